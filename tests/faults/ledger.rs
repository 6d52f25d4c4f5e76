//! Who was asked for what, and whether that, and what came of it, is allowed.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use serde_json::Value;
use warmroute::testing::{FakeEngine, Head, Message, Step};

use super::traffic::{Ask, DYING, Fate};

/// One worker was given one request.
#[derive(Debug)]
struct Contact {
    engine: usize,
    fate: Fate,
    /// See [`Ledger::troubles`].
    troubles: u64,
    /// The proxy might still take it for unreachable. See [`Ledger::seems_unreachable`].
    doubtful: bool,
    /// The proxy had closed the connection before the worker looked at the request.
    left: bool,
    /// Not zero once the worker's system has had a whole response head to send. Held by the worker too for as long as it does
    /// anything for the request.
    head: Arc<AtomicUsize>,
}

impl Contact {
    /// There was nothing of an answer that the proxy could have read: it had left, or the worker has ended the connection and had
    /// sent no whole head; or the answer was that the engine is gone.
    fn is_lost(&self) -> bool {
        let ended = Arc::strong_count(&self.head) == 1;
        self.left || self.fate == Fate::Dying || (ended && self.head.load(Ordering::SeqCst) == 0)
    }
}

/// Old requests are forgotten: nothing of theirs can still be under way.
const REMEMBERED: u64 = 50_000;
/// Violations that are kept; one is too many.
const MOST: usize = 20;

pub struct Ledger {
    pub seed: u64,
    next: AtomicU64,
    contacts: Mutex<HashMap<u64, Vec<Contact>>>,
    /// For each worker, how often trouble began or ended; odd while it is in trouble.
    troubles: Vec<AtomicU64>,
    /// For each worker, the count of probes that it has let pass, and what it was when trouble ended last or the proxy began to
    /// probe it anew.
    probes: Vec<(Arc<AtomicUsize>, AtomicUsize)>,
    outcomes: Mutex<HashMap<String, u64>>,
    violations: Mutex<Vec<String>>,
}

impl Ledger {
    pub fn new(seed: u64, engines: &[FakeEngine]) -> Ledger {
        Ledger {
            seed,
            next: AtomicU64::new(1),
            contacts: Mutex::default(),
            troubles: engines.iter().map(|_| AtomicU64::new(0)).collect(),
            probes: engines.iter().map(|engine| (engine.probes_passed(), AtomicUsize::new(0))).collect(),
            outcomes: Mutex::default(),
            violations: Mutex::default(),
        }
    }

    pub fn ask(&self) -> Ask {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        if id.is_multiple_of(10_000) {
            self.contacts.lock().retain(|old, _| *old + REMEMBERED > id);
        }
        Ask::of(self.seed, id)
    }

    pub fn asked(&self) -> u64 {
        self.next.load(Ordering::Relaxed) - 1
    }

    /// The worker is about to be killed or to refuse connections, or has come back.
    pub fn trouble(&self, engine: usize) {
        self.troubles[engine].fetch_add(1, Ordering::SeqCst);
        self.probed_anew(engine);
    }

    /// What the proxy has found out by its probes so far counts no more.
    pub fn probed_anew(&self, engine: usize) {
        let (passed, before) = &self.probes[engine];
        before.store(passed.load(Ordering::SeqCst), Ordering::SeqCst);
    }

    /// The proxy may still go by connections that were refused. Once it has asked for a second probe it has seen the first one pass.
    fn seems_unreachable(&self, engine: usize) -> bool {
        let (passed, before) = &self.probes[engine];
        passed.load(Ordering::SeqCst) < before.load(Ordering::SeqCst) + 2
    }

    /// The worker was in trouble since it was asked, or the proxy had reason to think so.
    fn had_trouble(&self, contact: &Contact) -> bool {
        let now = self.troubles[contact.engine].load(Ordering::SeqCst);
        now != contact.troubles || now % 2 == 1 || contact.doubtful
    }

    /// Whether the worker that was asked last broke the answer off.
    pub fn broke_off(&self, id: u64) -> bool {
        let contacts = self.contacts.lock();
        contacts.get(&id).and_then(|contacts| contacts.last()).is_some_and(|last| {
            matches!(last.fate, Fate::TooShort | Fate::ResetWithin | Fate::ClosedWithin | Fate::SilentWithin)
                || self.had_trouble(last)
        })
    }

    pub fn violation(&self, what: String) {
        let mut violations = self.violations.lock();
        if violations.len() < MOST {
            violations.push(what);
        }
    }

    pub fn violations(&self) -> Vec<String> {
        self.violations.lock().clone()
    }

    pub fn outcome(&self, what: impl Into<String>) {
        *self.outcomes.lock().entry(what.into()).or_default() += 1;
    }

    pub fn outcomes(&self) -> Vec<(String, u64)> {
        let mut all: Vec<_> = self.outcomes.lock().clone().into_iter().collect();
        all.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        all
    }

    /// What the worker does with what it was sent.
    pub fn arrived(&self, engine: usize, message: &Message) -> Vec<Step> {
        let Some(id) = message.head.get("x-fault-run").and_then(|id| id.parse().ok()) else {
            return vec![Step::json("200 OK", "{}")];
        };
        let ask = Ask::of(self.seed, id);
        if message.body.len() < ask.body.len() && ask.body.starts_with(&message.body) {
            // The proxy has closed this connection in the middle of the request: it has given the request up.
            return vec![Step::Close];
        }
        if message.body != ask.body {
            self.violation(format!("request {id}: its body is not what was sent"));
        }
        if message.head.second() != ask.path || message.head.all("content-length").len() != 1 {
            self.violation(format!("request {id}: its head is not what it should be: {:?}", message.head));
        }
        let mut contacts = self.contacts.lock();
        let before = contacts.entry(id).or_default();
        let fate = Fate::of(self.seed, id, before.len() as u64);
        let head = Arc::new(AtomicUsize::new(0));
        let contact = Contact {
            engine,
            fate,
            troubles: self.troubles[engine].load(Ordering::SeqCst),
            doubtful: self.seems_unreachable(engine),
            left: message.left,
            head: head.clone(),
        };
        if let Some(what) = self.wrong(&ask, before, &contact) {
            let path = ask.path;
            self.violation(format!("request {id} ({path}): {what}: {contact:?}; before: {before:?}"));
        }
        before.push(contact);
        fate.steps(&ask, &Step::Mark(head))
    }

    /// What is wrong with asking a worker now.
    fn wrong(&self, ask: &Ask, before: &[Contact], now: &Contact) -> Option<&'static str> {
        // One that reads only now what it was sent before the proxy turned to somebody else was not asked after that one.
        let last = before.iter().rfind(|contact| !contact.left).or(before.last()).filter(|_| !now.left);
        if let Some(last) = last {
            let died = self.had_trouble(last);
            if !last.is_lost() && !died {
                return Some("asked again though an answer had begun");
            }
            if !ask.repeatable && last.fate != Fate::Reset && !died {
                return Some("asked again though that may do harm");
            }
        }
        // A kept connection that closes without a byte of answer had been closed before: the same worker is asked once more.
        let same = before.iter().filter(|contact| contact.engine == now.engine).count();
        let excused = before.iter().any(|contact| {
            contact.engine == now.engine && (contact.fate == Fate::Reset || self.had_trouble(contact))
        });
        if same > 1 || (same == 1 && !excused) {
            return Some("the same worker was asked again");
        }
        (before.len() >= 6).then_some("asked too often")
    }

    /// Judges what a client got, as far as it came: `complete` as it was framed.
    pub fn judge(&self, ask: &Ask, head: &Head, body: &[u8], complete: bool) {
        let status: u16 = head.second().parse().unwrap_or(0);
        match self.verdict(ask, status, body, complete) {
            Ok(outcome) => self.outcome(outcome),
            Err(what) => {
                let got = String::from_utf8_lossy(&body[..body.len().min(300)]).into_owned();
                self.violation(format!("request {} ({}): {what}: {head:?} {got}", ask.id, ask.path));
            }
        }
    }

    fn verdict(&self, ask: &Ask, status: u16, body: &[u8], complete: bool) -> Result<String, &'static str> {
        const BROKEN: &str = r#"data: {"error":{"#;
        let whole = ask.whole();
        let text = std::str::from_utf8(body).map_err(|_| "no text")?;
        let refusal = Ask::refusal(ask.id);
        if status == 200 {
            return match (complete, text.find(BROKEN).filter(|_| ask.streams)) {
                (true, None) if text == whole => Ok("answered".to_owned()),
                (true, None) => Err("a complete answer is not what was sent"),
                (false, None) if whole.starts_with(text) => Ok("cut".to_owned()),
                (_, Some(at)) if whole.starts_with(text[..at].trim_end_matches('\n')) => {
                    Ok("broken by an event".to_owned())
                }
                _ => Err("an answer that broke off is not a part of what was sent"),
            };
        }
        if text == refusal || (!complete && refusal.starts_with(text)) {
            return Ok(format!("{status} by the worker"));
        }
        if status == 500 && !ask.repeatable && text == DYING {
            return Ok("500 by a dying worker".to_owned());
        }
        let value: Value = serde_json::from_str(text).map_err(|_| "no error that a client can read")?;
        match (status, value["error"]["code"].as_str()) {
            (408, Some("request_timeout"))
            | (502, Some("bad_gateway"))
            | (503, Some("no_server_available" | "overloaded"))
            | (504, Some("gateway_timeout")) => Ok(format!("{status} by the proxy")),
            _ => Err("an error that has no reason"),
        }
    }
}
