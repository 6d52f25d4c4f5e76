//! The labels of the metrics: each has a name and a closed set of values, so that nobody can make a page grow by inventing one.

use crate::config::Mode;
use crate::core::planner::Reason;
use crate::lifecycle::Phase;

/// A label with a closed set of values.
pub trait Label: Copy + Send + Sync + 'static {
    const NAME: &'static str;
    const VALUES: &'static [&'static str];

    fn index(self) -> usize;

    fn as_str(self) -> &'static str {
        Self::VALUES[self.index()]
    }
}

macro_rules! label {
    ($(#[$doc:meta])* $name:ident as $label:literal { $($(#[$case_doc:meta])* $case:ident = $text:literal,)+ }) => {
        $(#[$doc])*
        #[derive(Copy, Clone, PartialEq, Eq, Debug)]
        pub enum $name { $($(#[$case_doc])* $case,)+ }

        impl $name {
            pub const ALL: &[$name] = &[$($name::$case),+];
        }

        impl $crate::metrics::Label for $name {
            const NAME: &'static str = $label;
            const VALUES: &'static [&'static str] = &[$($text,)+];

            fn index(self) -> usize {
                self as usize
            }
        }
    };
}

label! {
    /// What kind of request it was.
    Route as "route" {
        Chat = "chat",
        Completions = "completions",
        Responses = "responses",
        Messages = "messages",
        /// Forwarded by load, without a cache key.
        Other = "other",
        /// A control path of the engine.
        Blocked = "blocked",
    }
}

label! {
    /// How a request ended, as its client saw it.
    Outcome as "outcome" {
        /// The worker's answer, complete, below status 400.
        Ok = "ok",
        /// The worker's own 4xx, complete.
        ClientError = "client_error",
        /// The worker's own 5xx, complete.
        WorkerError = "worker_error",
        /// The answer broke off, or none came.
        WorkerFailed = "worker_failed",
        /// The client left before the end.
        ClientGone = "client_gone",
        /// Refused by the proxy: too large, malformed, or a blocked path.
        Refused = "refused",
        /// Too many were there already.
        Shed = "shed",
        /// No worker could take it.
        Unavailable = "unavailable",
        /// Ended by a limit before its end: the drain's deadline, a second signal, or the time for an answer once that had begun.
        Cut = "cut",
        /// A fault of the proxy itself.
        Internal = "internal",
    }
}

label! {
    /// Whether the worker was believed to hold any of the prompt.
    Predicted as "predicted" {
        Hit = "hit",
        Miss = "miss",
    }
}

label! {
    /// Under which policy a hit is counted.
    Played as "policy" {
        Kv = "kv",
        Random = "random",
        /// In one cache without end.
        Ideal = "ideal",
    }
}

label! {
    /// Why a request was routed without what the policy wants.
    Fallback as "reason" {
        /// The body is not JSON, or not an object.
        OpaqueJson = "opaque_json",
        /// The JSON is nested too deep to follow.
        OpaqueDepth = "opaque_depth",
        /// No prompt of a known shape.
        OpaqueShape = "opaque_shape",
        /// The prompt goes on from something that only a worker has.
        OpaqueStored = "opaque_stored",
        /// No worker is known to be well, so those that may be were asked.
        NoHealthyWorker = "no_healthy_worker",
        /// The worker drawn for the client connection is out, so another was drawn.
        PinnedWorkerOut = "pinned_worker_out",
        /// No worker lists the model, so any was asked.
        ModelUnlisted = "model_unlisted",
        /// None of the workers of the split's arm can take it, so any was asked.
        ArmOut = "arm_out",
    }
}

label! {
    /// Which way news went.
    Way as "way" {
        Sent = "sent",
        Received = "received",
    }
}

label! {
    /// Why news were not sent, or not taken up.
    NewsLost as "reason" {
        /// Too much waited for the store.
        Full = "full",
        /// Batches of another router are missing.
        Gap = "gap",
        /// Placed on a worker that is not known here.
        UnknownWorker = "unknown_worker",
        /// Placed on a process that has ended since.
        Restarted = "restarted",
        /// More routers than are remembered.
        Routers = "routers",
        /// In the format of another version.
        Version = "version",
        /// It cannot be read.
        Malformed = "malformed",
    }
}

label! {
    /// Why an attempt was made again.
    Retry as "cause" {
        /// The worker closed a kept connection just as it was used again.
        Stale = "stale",
        /// No connection could be opened.
        Connect = "connect",
        /// The worker broke off before any answer.
        Broken = "broken",
    }
}

label! {
    /// Why a worker failed a request.
    FailureKind as "cause" {
        Connect = "connect",
        BeforeHead = "before_head",
        InBody = "in_body",
        /// The worker's own word, in the middle of a stream, that it has failed.
        InStream = "in_stream",
        /// Given up after too long a silence.
        Silent = "silent",
    }
}

label! {
    /// State of a worker; see `fleet::health`.
    WorkerState as "state" {
        Starting = "starting",
        Up = "up",
        Unreachable = "unreachable",
        Insecure = "insecure",
        Unhealthy = "unhealthy",
        Broken = "broken",
        Stalled = "stalled",
        Erring = "erring",
        Trial = "trial",
        /// An operator has it take nothing new.
        Draining = "draining",
        /// Its pod is not ready, as Kubernetes sees it.
        NotReady = "not_ready",
        /// Its pod is on its way out, and others are ready.
        Terminating = "terminating",
    }
}

label! {
    /// Why a source could not tell who the workers are.
    Trouble as "reason" {
        /// It could not be asked: no connection, or no answer in time.
        Unreachable = "unreachable",
        /// It refused: no right to list EndpointSlices, or an error of its own.
        Refused = "refused",
        /// The watch began too long ago for the API server (410), so all was listed anew.
        Expired = "expired",
        /// The watch brought nothing, not even its end.
        Silent = "silent",
        /// The watch broke off.
        Broken = "broken",
        /// What came cannot be understood.
        Malformed = "malformed",
        /// The port that is asked for is not among the endpoints'.
        Port = "port",
        /// The DNS has no such record, the cluster no such EndpointSlice (any more).
        Absent = "absent",
    }
}

label! {
    /// How a reload of the config ended.
    Reload as "result" {
        Applied = "applied",
        Unchanged = "unchanged",
        Refused = "refused",
    }
}

label! {
    /// How a reading of a worker's metrics page ended.
    Scraped as "outcome" {
        Ok = "ok",
        /// Nobody listens there.
        Refused = "refused",
        /// No connection could be opened otherwise.
        Connect = "connect",
        Timeout = "timeout",
        /// The status was not 200.
        Status = "status",
        /// The page is larger than `scrape.limit`.
        TooLarge = "too_large",
        /// It broke off.
        Broken = "broken",
        /// Nothing that is known was on it.
        Foreign = "not_vllm",
    }
}

label! {
    /// Why what was believed of a worker was forgotten.
    Forgot as "reason" {
        /// Its process is a new one.
        Restarted = "restarted",
        /// A counter of its engine fell.
        CounterFell = "counter_fell",
        /// Nobody listens at its address.
        Refused = "refused",
        /// Connections to it fail.
        Unreachable = "unreachable",
        /// Its engine finds nothing of what should be cached.
        HitsFlat = "hits_flat",
        /// Its answers confirm nothing of what was used just before.
        Unconfirmed = "unconfirmed",
    }
}

label! {
    /// Whose count of tokens it is.
    Source as "source" {
        /// What was believed when the request was placed.
        Predicted = "predicted",
        /// What `usage` in the answer said.
        Confirmed = "confirmed",
        /// What the engine's own counters said.
        Engine = "engine",
    }
}

label! {
    /// Which size of a KV cache it is.
    Capacity as "kind" {
        /// As configured, or told by the worker.
        Told = "told",
        /// As it is believed to stay for us.
        Believed = "believed",
    }
}

label! {
    /// What the belief about a worker stands on, and why it is no better.
    Basis as "reason" {
        /// Its answers tell what was cached.
        Confirmed = "confirmed",
        /// The size of its cache is known, but no answer tells what was cached.
        NoUsage = "no_usage",
        /// Its page has not been read yet, or never could be.
        NoScrape = "no_scrape",
        /// Its page does not tell the size of the cache.
        NoCapacity = "no_capacity",
        /// Its page cannot be read any more.
        Stale = "stale",
        /// Its page does not change while it works.
        Frozen = "frozen",
    }
}

label! {
    /// [`Basis`] in one word.
    Footing as "basis" {
        Calibrated = "calibrated",
        Predicted = "predicted",
        Blind = "blind",
    }
}

impl Basis {
    pub fn footing(self) -> Footing {
        match self {
            Basis::Confirmed => Footing::Calibrated,
            Basis::NoUsage => Footing::Predicted,
            Basis::NoScrape | Basis::NoCapacity | Basis::Stale | Basis::Frozen => Footing::Blind,
        }
    }
}

impl Label for Reason {
    const NAME: &'static str = "reason";
    const VALUES: &'static [&'static str] = &["random", "only", "warm", "spill", "home", "cold", "load"];

    fn index(self) -> usize {
        self as usize
    }
}

impl Label for Mode {
    const NAME: &'static str = "mode";
    const VALUES: &'static [&'static str] = &["kv", "random"];

    fn index(self) -> usize {
        self as usize
    }
}

impl Label for Phase {
    const NAME: &'static str = "phase";
    const VALUES: &'static [&'static str] = &["serving", "leaving", "draining", "cut"];

    fn index(self) -> usize {
        self as usize
    }
}
