//! What is asked and what must come back, all of it from the seed and the request's number, so that either side can tell what
//! the other one sent.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use warmroute::testing::Step;

pub fn random(seed: u64, id: u64, salt: u64) -> StdRng {
    let mixed = seed ^ id.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ salt.wrapping_mul(0xd1b5_4a32_d192_ed03);
    StdRng::seed_from_u64(mixed)
}

fn pick<T: Copy>(random: &mut StdRng, weighted: &[(u32, T)]) -> T {
    let mut left = random.random_range(0..weighted.iter().map(|(weight, _)| weight).sum());
    for (weight, what) in weighted {
        if left < *weight {
            return *what;
        }
        left -= weight;
    }
    weighted[0].1
}

/// One request.
pub struct Ask {
    pub id: u64,
    pub path: &'static str,
    pub streams: bool,
    /// Doing it again does no harm.
    pub repeatable: bool,
    pub body: Vec<u8>,
    /// What a worker that does its work answers, in the pieces in which it does.
    pub answer: Vec<String>,
}

impl Ask {
    pub fn of(seed: u64, id: u64) -> Ask {
        let random = &mut random(seed, id, 1);
        let (path, streams, repeatable) = pick(
            random,
            &[
                (3, ("/v1/chat/completions", false, true)),
                (5, ("/v1/chat/completions", true, true)),
                (1, ("/v1/completions", false, true)),
                (1, ("/v1/audio/transcriptions", false, false)),
            ],
        );
        let length = match random.random_range(0..200) {
            0 => 300_000,
            1..20 => random.random_range(2_000..40_000),
            _ => random.random_range(0..2_000),
        };
        let prefix = "shared ".repeat(20 * (1 + id as usize % 7));
        let text: String = (0..length).map(|at| char::from(b'a' + ((at as u64 ^ id) % 26) as u8)).collect();
        let body = format!(
            r#"{{"model":"m","stream":{streams},"n":1,"prompt":"{id}","messages":[{{"role":"system","content":"{prefix}"}},{{"role":"user","content":"{text}"}}]}}"#
        );
        let pieces = if streams { random.random_range(1..20) } else { 1 };
        let answer = (0..pieces)
            .map(|at| {
                let word = "x".repeat(random.random_range(1..300));
                let data = format!(r#"{{"id":{id},"at":{at},"word":"{word}"}}"#);
                if streams { format!("data: {data}\n\n") } else { data }
            })
            .collect();
        Ask { id, path, streams, repeatable, body: body.into_bytes(), answer }
    }

    pub fn whole(&self) -> String {
        self.answer.concat()
    }

    /// What a worker says that refuses it.
    pub fn refusal(id: u64) -> String {
        format!(r#"{{"refused":{id}}}"#)
    }
}

/// What a worker says whose engine is gone. Where the request can be asked for elsewhere, clients do not get to see it.
pub const DYING: &str = r#"{"error":"EngineCore encountered an issue"}"#;

/// What a worker does with a request.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Fate {
    Answered,
    /// In good order, and the connection is closed right after it, unannounced.
    AnsweredLast,
    Dripped,
    /// Nothing, and the connection is broken.
    Reset,
    HalfHead,
    /// It says that its engine is gone.
    Dying,
    /// It promises more than it sends.
    TooShort,
    /// The answer breaks off, or ends without its last chunk.
    ResetWithin,
    ClosedWithin,
    /// Nothing comes, or nothing more.
    Silent,
    SilentWithin,
    Refused(&'static str),
}

impl Fate {
    pub fn of(seed: u64, id: u64, contact: u64) -> Fate {
        pick(
            &mut random(seed, id, 100 + contact),
            &[
                (60, Fate::Answered),
                (5, Fate::AnsweredLast),
                (3, Fate::Dripped),
                (2, Fate::Reset),
                (2, Fate::HalfHead),
                (1, Fate::Dying),
                (3, Fate::TooShort),
                (3, Fate::ResetWithin),
                (3, Fate::ClosedWithin),
                (1, Fate::Silent),
                (1, Fate::SilentWithin),
                (2, Fate::Refused("429 Too Many Requests")),
                (2, Fate::Refused("503 Service Unavailable")),
                (2, Fate::Refused("500 Internal Server Error")),
                (1, Fate::Refused("400 Bad Request")),
            ],
        )
    }

    /// `mark` is taken once the whole head is with the system, and is let go of when the worker does nothing more.
    pub fn steps(self, ask: &Ask, mark: &Step) -> Vec<Step> {
        let cut = ask.answer.len() / 2;
        let head = if ask.streams { Step::stream_head() } else { json_in_chunks() };
        let head = || vec![head.clone(), mark.clone()];
        let pieces = |count: usize| ask.answer[..count].iter().map(Step::chunk).collect::<Vec<_>>();
        let all = || [head(), pieces(ask.answer.len()), vec![Step::last_chunk()]].concat();
        let begun = |end: Step| [head(), pieces(cut), vec![end]].concat();
        let whole_is = |text: String| vec![Step::send(text), mark.clone()];
        let sized = |status: &str, length: usize, body: &str| {
            format!(
                "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
            )
        };
        let whole = ask.whole();
        let mut steps = match self {
            Fate::Answered if ask.streams => all(),
            Fate::Answered => whole_is(sized("200 OK", whole.len(), &whole)),
            Fate::AnsweredLast => [all(), vec![Step::Close]].concat(),
            Fate::Dripped => {
                vec![Step::Drip(sized("200 OK", whole.len(), &whole).into_bytes()), mark.clone()]
            }
            Fate::Reset => vec![Step::Reset],
            Fate::HalfHead => vec![Step::send("HTTP/1.1 200 OK\r\ncontent-"), Step::Close],
            Fate::Dying => whole_is(sized("500 Internal Server Error", DYING.len(), DYING)),
            Fate::TooShort => {
                [whole_is(sized("200 OK", whole.len() + 7, &whole)), vec![Step::Close]].concat()
            }
            Fate::ResetWithin => begun(Step::Reset),
            Fate::ClosedWithin => begun(Step::Close),
            Fate::Silent => vec![Step::AwaitClose],
            Fate::SilentWithin => begun(Step::AwaitClose),
            Fate::Refused(status) => {
                let said = Ask::refusal(ask.id);
                whole_is(sized(status, said.len(), &said))
            }
        };
        steps.push(mark.clone());
        steps
    }
}

fn json_in_chunks() -> Step {
    Step::send("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n")
}
