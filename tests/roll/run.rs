//! Clients that go on asking while workers are replaced, and what each of them is due.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use warmroute::testing::{FakeEngine, Message, Step, TestRouter, until};

pub const WORKERS: usize = 24;
pub const CLIENTS: usize = 48;
/// Events of a stream.
const EVENTS: usize = 6;
const CHAT: &str = "/v1/chat/completions";

/// What the run has seen. A *life* is one process of one worker.
#[derive(Default)]
pub struct Run {
    pub over: AtomicBool,
    lives: AtomicUsize,
    /// Those that were told to end.
    pub ended: Mutex<HashSet<usize>>,
    pub asked: AtomicUsize,
    /// Numbers of requests that have no outcome yet.
    under_way: Mutex<HashSet<usize>>,
    pub answered: AtomicUsize,
    pub streamed: AtomicUsize,
    pub broken: AtomicUsize,
    pub longest_silence: Mutex<Duration>,
}

/// The number of a request.
fn number(message: &Message) -> String {
    message.head.get("x-number").expect("every client numbers its requests").to_owned()
}

/// What life `life` does with a request: it takes its time, and says who it is.
fn work(life: usize, message: &Message) -> Vec<Step> {
    let number = number(message);
    if !message.body.starts_with(br#"{"stream":true"#) {
        let answer = format!(r#"{{"number":{number},"life":{life}}}"#);
        return vec![Step::Work(Duration::from_millis(200)), Step::json("200 OK", &answer)];
    }
    let mut steps = vec![Step::stream_head()];
    for at in 0..EVENTS {
        let event = format!("data: {{\"number\":{number},\"life\":{life},\"at\":{at}}}\n\n");
        steps.extend([Step::Work(Duration::from_millis(40)), Step::chunk(event)]);
    }
    steps.extend([Step::chunk("data: [DONE]\n\n"), Step::last_chunk()]);
    steps
}

impl Run {
    /// Has `engine` begin a life.
    pub fn begin(&self, engine: &FakeEngine) -> usize {
        let life = self.lives.fetch_add(1, Ordering::Relaxed);
        engine.always(move |message| work(life, message));
        life
    }

    /// Waits until all that is under way now has its outcome, what an ended worker had among it. In a cluster a pod takes longer to start
    /// than a request to be answered, so none loses its worker again and again.
    pub async fn outlast(&self) {
        let now = self.under_way.lock().clone();
        until("what was under way to have its outcome", async || self.under_way.lock().is_disjoint(&now))
            .await;
    }

    /// One client: request after request over one connection, half of them streams.
    pub async fn client(&self, client: usize, router: &TestRouter) {
        let mut wire = router.client().await;
        let prefix = format!("client {client} of group {} begins; ", client % 16).repeat(80);
        while !self.over.load(Ordering::Relaxed) {
            let number = self.asked.fetch_add(1, Ordering::Relaxed);
            self.under_way.lock().insert(number);
            let streams = (number + client).is_multiple_of(2);
            let body = format!(
                r#"{{"stream":{streams},"messages":[{{"role":"user","content":"{prefix}{number}"}}]}}"#
            );
            let length = body.len();
            wire.send(format!(
                "POST {CHAT} HTTP/1.1\r\nhost: a\r\nx-number: {number}\r\ncontent-length: {length}\r\n\r\n{body}"
            ))
            .await;
            if streams {
                self.stream(number, &mut wire).await;
            } else {
                let answer = wire.answer("POST").await.expect("an answer");
                assert_eq!(answer.status(), 200, "{}", answer.text());
                let said: serde_json::Value = serde_json::from_str(&answer.text()).expect("a whole answer");
                assert_eq!(said["number"], number);
                self.answered.fetch_add(1, Ordering::Relaxed);
            }
            self.under_way.lock().remove(&number);
        }
    }

    /// A stream is whole; or its worker was told to end, and it says so.
    async fn stream(&self, number: usize, wire: &mut warmroute::testing::Wire) {
        let (head, _) = wire.head().await.expect("a head");
        assert_eq!(head.second(), "200");
        let (mut text, mut last) = (String::new(), Instant::now());
        let mut silence = Duration::ZERO;
        while !text.ends_with("\r\n0\r\n\r\n") {
            let piece = wire.piece().await;
            assert!(!piece.is_empty(), "cut without a word: {text}");
            text += std::str::from_utf8(&piece).expect("text");
            silence = last.elapsed();
            last = Instant::now();
        }
        // Sizes and chunks in turns; a chunk has one event or several.
        let whole: String = text.split("\r\n").skip(1).step_by(2).collect();
        let mut events: Vec<&str> =
            whole.split("\n\n").filter_map(|event| event.strip_prefix("data: ")).collect();
        let end = events.pop().expect("an event");
        let whole = end == "[DONE]";
        assert!(if whole { events.len() == EVENTS } else { events.len() <= EVENTS }, "{text}");
        let mut life = None;
        for (at, event) in events.iter().enumerate() {
            let said: serde_json::Value = serde_json::from_str(event).expect("a whole event");
            assert_eq!(
                (said["number"].as_u64(), said["at"].as_u64()),
                (Some(number as u64), Some(at as u64))
            );
            life = said["life"].as_u64();
        }
        if whole {
            self.streamed.fetch_add(1, Ordering::Relaxed);
            return;
        }
        assert!(end.contains(r#""code":"stream_broken""#), "{text}");
        if let Some(life) = life {
            assert!(self.ended.lock().contains(&(life as usize)), "life {life} was well: {text}");
        }
        self.broken.fetch_add(1, Ordering::Relaxed);
        let mut longest = self.longest_silence.lock();
        *longest = longest.max(silence);
    }
}
