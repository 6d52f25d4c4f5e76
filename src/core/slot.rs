//! What the planner has of each worker ([`Slot`]) and of all of them together ([`Common`]), each part under a lock of its own that is
//! held for no more than a step: threads that place requests on different workers do not wait for each other.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use crossbeam_utils::CachePadded;
use crossbeam_utils::atomic::AtomicCell;
use parking_lot::Mutex;

use crate::core::cache::Cache;
use crate::core::decision::WorkerSpec;
use crate::core::homes::Homes;
use crate::core::ids::{Time, WorkerId};
use crate::core::load::{Load, Snapshot};
use crate::core::speed::Line;
use crate::core::tally::Traffic;
use crate::core::trust::Trust;

/// A number that is read without a lock.
#[derive(Debug)]
pub(super) struct Number(AtomicU64);

impl Number {
    pub(super) fn new(value: f64) -> Number {
        Number(AtomicU64::new(value.to_bits()))
    }

    pub(super) fn get(&self) -> f64 {
        f64::from_bits(self.0.load(Ordering::Relaxed))
    }

    pub(super) fn set(&self, value: f64) {
        self.0.store(value.to_bits(), Ordering::Relaxed);
    }
}

/// A worker's place in the planner. The generation tells a place's present worker from the one that had it before.
pub(super) struct Slot {
    pub(super) id: WorkerId,
    pub(super) generation: u64,
    pub(super) spec: WorkerSpec,
    /// This and the load are `None` once the worker has left: a decision under way may still hold the slot, and must leave nothing behind.
    pub(super) cache: Mutex<Option<Cache>>,
    load: CachePadded<Mutex<Option<Load>>>,
    /// A copy of what prices need of the load: all decisions read it, of all workers, and must not take turns for that.
    snapshot: CachePadded<AtomicCell<Snapshot>>,
    pub(super) trust: Mutex<Trust>,
    /// A copy of what the trust gives: the share of what is believed cached that counts.
    pub(super) credit: Number,
    /// Tokens in a block of the engine.
    pub(super) engine_block_tokens: AtomicU32,
    /// How many times all that was believed of it was forgotten.
    pub(super) emptied: AtomicU64,
    pub(super) near: AtomicBool,
    /// The share of its prompt tokens that others send.
    pub(super) foreign_share: Number,
}

impl Slot {
    pub(super) fn new(id: WorkerId, generation: u64, spec: WorkerSpec, cache: Cache) -> Slot {
        let load = Load::told(spec.prefill_speed);
        let snapshot = CachePadded::new(AtomicCell::new(load.snapshot()));
        Slot {
            id,
            generation,
            cache: Mutex::new(Some(cache)),
            load: CachePadded::new(Mutex::new(Some(load))),
            snapshot,
            trust: Mutex::new(Trust::new(spec.capacity_tokens)),
            credit: Number::new(1.0),
            engine_block_tokens: AtomicU32::new(spec.engine_block_tokens),
            emptied: AtomicU64::new(0),
            near: AtomicBool::new(false),
            foreign_share: Number::new(0.0),
            spec,
        }
    }

    /// `None` if the worker has left.
    pub(super) fn with_load<T>(&self, act: impl FnOnce(&mut Load) -> T) -> Option<T> {
        let mut guard = self.load.lock();
        let load = guard.as_mut()?;
        let result = act(load);
        self.snapshot.store(load.snapshot());
        Some(result)
    }

    pub(super) fn snapshot(&self) -> Snapshot {
        self.snapshot.load()
    }

    /// The worker's load at `now`, and its speed where the fleet's line says `typical`, if it is known.
    pub(super) fn snapshot_at(&self, now: Time, typical: f64) -> (Snapshot, Option<f64>) {
        let snapshot = self.snapshot();
        let known = snapshot.speed(typical);
        let speed = known.unwrap_or(typical);
        if !snapshot.is_stale(now, speed) {
            return (snapshot, known);
        }
        self.with_load(|load| load.pass(now, speed));
        (self.snapshot(), known)
    }

    /// The worker has left: answers what was believed of its cache.
    pub(super) fn leave(&self) -> Option<Cache> {
        self.load.lock().take();
        self.cache.lock().take()
    }

    /// Of two that are as good, the near one is taken.
    pub(super) fn is_near(&self) -> bool {
        self.near.load(Ordering::Relaxed)
    }

    pub(super) fn engine_block_tokens(&self) -> u32 {
        self.engine_block_tokens.load(Ordering::Relaxed)
    }
}

/// What is learned of the fleet as a whole.
pub(super) struct Common {
    line: Mutex<Line>,
    /// What the line says.
    typical_speed: Number,
    decode_seconds: Number,
    traffic: Mutex<Traffic>,
    pub(super) homes: Homes,
    /// Others have been seen to use a worker too.
    others: AtomicBool,
}

impl Default for Common {
    fn default() -> Common {
        let line = Line::default();
        Common {
            typical_speed: Number::new(line.tokens_per_s()),
            line: Mutex::new(line),
            decode_seconds: Number::new(0.0),
            traffic: Mutex::default(),
            homes: Homes::default(),
            others: AtomicBool::new(false),
        }
    }
}

impl Common {
    /// A prefill of `tokens` took the slot's worker so long.
    pub(super) fn saw_prefill(&self, slot: &Slot, tokens: f64, seconds: f64) {
        let line = {
            let mut line = self.line.lock();
            line.learn(tokens, seconds);
            self.typical_speed.set(line.tokens_per_s());
            *line
        };
        slot.with_load(|load| load.learn_speed(&line, tokens, seconds));
    }

    /// What is assumed of a worker whose speed is not known, in tokens a second.
    pub(super) fn typical_speed(&self) -> f64 {
        self.typical_speed.get()
    }

    /// A request's last token came so long after its first. Of two that end at once one may be missed.
    pub(super) fn saw_decode(&self, seconds: f64) {
        const KEEP: f64 = 0.98;
        let mean = self.decode_seconds.get();
        self.decode_seconds.set(if mean == 0.0 { seconds } else { KEEP * mean + (1.0 - KEEP) * seconds });
    }

    /// Mean seconds from first to last token of late.
    pub(super) fn decode_seconds(&self) -> f64 {
        self.decode_seconds.get()
    }

    pub(super) fn set_decode_seconds(&self, seconds: f64) {
        self.decode_seconds.set(seconds);
    }

    /// Whether any worker has ever been used by others too.
    pub(super) fn has_others(&self) -> bool {
        self.others.load(Ordering::Relaxed)
    }

    pub(super) fn saw_others(&self) {
        self.others.store(true, Ordering::Relaxed);
    }

    pub(super) fn traffic(&self) -> Traffic {
        *self.traffic.lock()
    }

    /// One more request for a fleet of `workers`; answers the traffic with it.
    pub(super) fn count(&self, workers: usize) -> Traffic {
        let mut traffic = self.traffic.lock();
        traffic.add(workers);
        *traffic
    }
}
