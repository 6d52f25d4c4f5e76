//! A rollout: every worker of a fleet is told to end and replaced, one after the other, while clients go on asking. Workers end as
//! vLLM does: they refuse new connections and let what runs hang, without a byte or a FIN, until everybody has left.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use warmroute::config::{Config, Mode, Origin, Worker};
use warmroute::testing::{FakeEngine, Message, Step, TestRouter, until};

const WORKERS: usize = 24;
const CLIENTS: usize = 48;
/// Events of a stream.
const EVENTS: usize = 6;
const CHAT: &str = "/v1/chat/completions";

/// What the run has seen. A *life* is one process of one worker.
#[derive(Default)]
struct Run {
    over: AtomicBool,
    lives: AtomicUsize,
    /// Those that were told to end.
    ended: Mutex<HashSet<usize>>,
    asked: AtomicUsize,
    answered: AtomicUsize,
    streamed: AtomicUsize,
    broken: AtomicUsize,
    longest_silence: Mutex<Duration>,
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
    fn begin(&self, engine: &FakeEngine) -> usize {
        let life = self.lives.fetch_add(1, Ordering::Relaxed);
        engine.always(move |message| work(life, message));
        life
    }

    /// One client: request after request over one connection, half of them streams.
    async fn client(&self, client: usize, router: &TestRouter) {
        let mut wire = router.client().await;
        let prefix = format!("client {client} of group {} begins; ", client % 16).repeat(80);
        while !self.over.load(Ordering::Relaxed) {
            let number = self.asked.fetch_add(1, Ordering::Relaxed);
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
        let data = text.split("\r\n").filter_map(|line| line.strip_prefix("data: "));
        let mut events: Vec<&str> = data.map(|line| line.trim_end_matches('\n')).collect();
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

fn config(engines: &[FakeEngine]) -> Config {
    let mut config = TestRouter::config(Mode::Kv, &engines.iter().collect::<Vec<_>>());
    config.health.interval = Some(Duration::from_millis(50));
    config.health.unreachable_silence = Some(Duration::from_millis(200));
    config
}

/// Replaces each worker: every other one comes back at its address, as a StatefulSet's pod does behind its name; the others are
/// taken off the list as they are told to end, and a new one is put on it, as a Deployment's pods are.
async fn roll(run: &Run, engines: &mut [FakeEngine], lives: &mut [usize], router: &TestRouter) {
    for at in 0..WORKERS {
        let address = engines[at].address();
        let busy = format!(r#"warmroute_worker_in_flight{{worker="{address}"}}"#);
        until("a request to run there", async || router.metric(&busy).await > 0.0).await;
        run.ended.lock().insert(lives[at]);
        if at % 2 == 0 {
            engines[at].terminate().await;
            engines[at].ended().await;
            lives[at] = run.begin(&engines[at]);
            engines[at].revive().await;
        } else {
            let new = FakeEngine::start().await;
            lives[at] = run.begin(&new);
            let mut list = router.proxy.config.load().as_ref().clone();
            list.workers.fixed[at] = Worker {
                url: Origin::parse(&new.url()).expect("an engine's own address"),
                capacity_tokens: None,
                prefill_speed: None,
            };
            router.proxy.reconfigure(list, None);
            let mut old = std::mem::replace(&mut engines[at], new);
            old.terminate().await;
            old.ended().await;
        }
        let up = format!(r#"warmroute_worker_state{{state="up",worker="{}"}}"#, engines[at].address());
        router.metric_is(&up, 1.0).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_fleet_is_rolled_worker_by_worker_and_nothing_is_lost_that_can_be_saved() {
    let run = Arc::new(Run::default());
    let (mut engines, mut lives) = (Vec::new(), Vec::new());
    for _ in 0..WORKERS {
        let engine = FakeEngine::start().await;
        lives.push(run.begin(&engine));
        engines.push(engine);
    }
    let router = Arc::new(TestRouter::start(config(&engines)).await);
    let mut clients = tokio::task::JoinSet::new();
    for client in 0..CLIENTS {
        let (run, router) = (run.clone(), router.clone());
        clients.spawn(async move { run.client(client, &router).await });
    }
    roll(&run, &mut engines, &mut lives, &router).await;
    run.over.store(true, Ordering::Relaxed);
    // A client that was let down has panicked.
    while let Some(ended) = clients.join_next().await {
        ended.expect("every client gets what it is due");
    }
    let count = |counter: &AtomicUsize| counter.load(Ordering::Relaxed);
    let (answered, streamed, broken) = (count(&run.answered), count(&run.streamed), count(&run.broken));
    let resent = router.metric(r#"warmroute_retries_total{cause="broken"}"#).await;
    println!(
        "{WORKERS} workers rolled: {answered} answers, {streamed} streams, {broken} streams ended by an event after {:?} of \
         silence at most, {resent} requests asked for elsewhere after their worker had taken them",
        *run.longest_silence.lock()
    );
    assert!(answered > 0 && streamed > 0 && broken > 0 && resent > 0.0);
    assert_eq!(answered + streamed + broken, count(&run.asked), "each has one outcome");
    router.metric_is("warmroute_requests_in_flight", 0.0).await;
    let page = router.admin("/metrics").await;
    let workers: HashSet<&str> = page
        .lines()
        .filter_map(|line| line.strip_prefix("warmroute_worker_in_flight{worker=\"")?.split_once('"'))
        .map(|(address, _)| address)
        .collect();
    let there: HashSet<String> = engines.iter().map(|engine| engine.address().to_string()).collect();
    assert_eq!(
        workers,
        there.iter().map(String::as_str).collect(),
        "those that left have taken their series along"
    );
}
