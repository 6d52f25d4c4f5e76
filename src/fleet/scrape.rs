//! Reads the workers' metrics pages: one task per worker, apart from all requests, each reading on a connection of its own.
//! What a page says has an age, and an old value is unknown: it is neither zero nor a reason to stop.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use http_body_util::BodyExt;
use tokio::time::{Instant, sleep, timeout};

use super::Fleet;
use super::connection::ExchangeError;
use super::exposition::{CacheConfig, Page, PageReader};
use super::framing::Outgoing;
use super::news::News;
use super::reading::{Meaning, Readings};
use super::worker::Worker;
use crate::config::{Scrape, Secret};
use crate::core::ids::Time;
use crate::core::load::Given;
use crate::metrics::{Basis, Forgot, Scraped};

/// A page that takes long is read less often: at most this share of the time is spent on it.
const MOST_OF_THE_TIME: f64 = 0.1;
/// The longest pause, in intervals.
const LONGEST_PAUSE: f64 = 16.0;
/// Pauses differ by so much, so that workers are not all read at once.
const JITTER: f64 = 0.1;
/// Intervals after which a reading is old.
const FRESH_INTERVALS: u32 = 3;
/// How often the gauges follow where no page is read.
const UNREAD_INTERVAL: Duration = Duration::from_secs(2);
/// Seconds for which an answer's word on what was cached counts as recent.
const CONFIRMED_LATELY: f64 = 300.0;

/// What a worker has said of itself.
#[derive(Default)]
pub struct Engine {
    readings: Readings,
    /// When its page was last read.
    pub read_at: Option<Time>,
    /// When reading it was last tried, for the next time.
    tried: Option<Instant>,
    cache: Option<CacheConfig>,
    frozen: bool,
    outcome: Option<Scraped>,
    /// What the belief stands on.
    pub basis: Option<Basis>,
}

impl Engine {
    pub(super) fn process_started(&self) -> Option<f64> {
        self.readings.process_started()
    }
}

/// Reads the pages of all workers for as long as it is polled; follows the worker list and the settings.
pub async fn run(fleet: Arc<Fleet>, key: Option<Secret>, connect: Duration) {
    fleet.for_each_worker(false, |worker| scrape_one(fleet.clone(), worker, key.clone(), connect)).await;
}

async fn scrape_one(fleet: Arc<Fleet>, worker: Arc<Worker>, key: Option<Secret>, connect: Duration) {
    fleet.assume_capacities();
    let settings = fleet.scrape_settings();
    let Some(interval) = settings.interval else {
        loop {
            fleet.judge(&worker, &settings);
            sleep(UNREAD_INTERVAL).await;
        }
    };
    // A change of the worker list starts all tasks anew, but need not have every page read at once.
    let tried = worker.engine.lock().tried;
    if let Some(tried) = tried {
        sleep(interval.saturating_sub(tried.elapsed()).mul_f64(rand::random::<f64>())).await;
    }
    let mut failures = 0;
    loop {
        let begun = Instant::now();
        let before = fleet.planner.given(worker.id).unwrap_or_default();
        let request = scrape_request(&worker, &settings.path, PLAIN_TEXT, key.as_ref());
        let reading = read_page(&worker, request, connect, settings.limit);
        let read = timeout(settings.timeout, reading).await.unwrap_or(Err(Scraped::Timeout));
        worker.engine.lock().tried = Some(begun);
        failures = match read {
            // A worker that is being started again is to be seen as soon as it is back.
            Ok(_) | Err(Scraped::Refused) => 0,
            Err(_) => failures + 1,
        };
        match read {
            Ok(page) => fleet.take_page(&worker, page, before, &settings),
            Err(outcome) => fleet.take_failure(&worker, outcome),
        }
        fleet.judge(&worker, &settings);
        sleep(pause(interval, begun.elapsed(), failures, rand::random())).await;
    }
}

/// Until the next reading. `chance` is from 0 to 1.
fn pause(interval: Duration, took: Duration, failures: u32, chance: f64) -> Duration {
    let backed_off = interval.as_secs_f64() * f64::from(1u32 << failures.min(8));
    let gentle = took.as_secs_f64() / MOST_OF_THE_TIME;
    let seconds = backed_off.max(gentle).min(interval.as_secs_f64() * LONGEST_PAUSE);
    Duration::from_secs_f64(seconds * (1.0 - JITTER + 2.0 * JITTER * chance))
}

async fn read_page(
    worker: &Worker,
    request: Outgoing,
    connect: Duration,
    limit: usize,
) -> Result<Page, Scraped> {
    let response = worker.pool.send_anew(request, connect).await.map_err(|error| match error {
        ExchangeError::Connect(error) if error.kind() == io::ErrorKind::ConnectionRefused => Scraped::Refused,
        ExchangeError::Connect(error) if error.kind() == io::ErrorKind::TimedOut => Scraped::Timeout,
        ExchangeError::Connect(_) | ExchangeError::Local(_) | ExchangeError::Insecure(_) => Scraped::Connect,
        _ => Scraped::Broken,
    })?;
    if response.status() != StatusCode::OK {
        return Err(Scraped::Status);
    }
    let mut body = response.into_body();
    let mut reader = PageReader::default();
    let mut length = 0;
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| Scraped::Broken)?.into_data() else { continue };
        length += data.len();
        if length > limit {
            return Err(Scraped::TooLarge);
        }
        reader.feed(&data);
    }
    match reader.finish() {
        page if page == Page::default() => Err(Scraped::Foreign),
        page => Ok(page),
    }
}

const PLAIN_TEXT: &str = "text/plain;version=0.0.4";

/// Asks the worker for something that it says of itself, on a connection of its own.
pub(super) fn scrape_request(
    worker: &Worker,
    path: &str,
    accept: &'static str,
    key: Option<&Secret>,
) -> Outgoing {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    headers.insert(header::USER_AGENT, HeaderValue::from_static("warmroute-scrape"));
    headers.insert(header::ACCEPT, HeaderValue::from_static(accept));
    headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    if let Some(key) = key.and_then(Secret::bearer) {
        headers.insert(header::AUTHORIZATION, key);
    }
    let path = path.parse().expect("the config takes paths only");
    Outgoing::new(&Method::GET, &path, &worker.authority, &headers, Bytes::new())
}

impl Fleet {
    /// Workers whose page is to be read and has not been tried yet: the process has only just started.
    pub fn unread_pages(&self) -> usize {
        if self.scrape_settings().interval.is_none() {
            return 0;
        }
        let unread = |worker: &&Arc<Worker>| worker.engine.lock().outcome.is_none();
        self.snapshot().workers.iter().filter(unread).count()
    }

    fn take_page(&self, worker: &Arc<Worker>, page: Page, before: Given, settings: &Scrape) {
        if !self.is_current(worker) {
            return;
        }
        let now = self.clock.now();
        let after = self.planner.given(worker.id).unwrap_or_default();
        let confirms = self.confirmed_lately(worker, now);
        let meaning = {
            let mut engine = worker.engine.lock();
            let meaning = engine.readings.take(page, before, after, confirms);
            if !meaning.incomplete {
                engine.read_at = Some(now);
                engine.outcome = Some(Scraped::Ok);
                engine.frozen = meaning.frozen;
            }
            meaning
        };
        if meaning.incomplete {
            return self.take_failure(worker, Scraped::Broken);
        }
        worker.metrics.scraped(Scraped::Ok);
        worker.metrics.engine_counted(meaning.hits, meaning.queries);
        if let Some(reason) = meaning.forget {
            self.forget(worker, reason);
        }
        if let Some(cache) = page.cache {
            self.learn_cache(worker, cache);
        }
        self.learn_foreign(worker, &meaning, now + fresh_for(settings).as_secs_f64());
    }

    fn take_failure(&self, worker: &Arc<Worker>, outcome: Scraped) {
        worker.metrics.scraped(outcome);
        let before = worker.engine.lock().outcome.replace(outcome);
        if before != Some(outcome) {
            // Said once for each new fault.
            self.tell(worker, News::PageFailed(outcome));
        }
        if outcome == Scraped::Refused {
            self.forget(worker, Forgot::Refused);
        }
    }

    fn learn_cache(&self, worker: &Worker, cache: CacheConfig) {
        let before = worker.engine.lock().cache.replace(cache);
        if before == Some(cache) {
            return;
        }
        let CacheConfig { block_tokens, usable_tokens } = cache;
        self.tell(worker, News::CacheSize { block_tokens, usable_tokens });
        self.planner.set_engine_block(worker.id, block_tokens);
        match worker.configured_capacity() {
            None => self.planner.set_capacity(worker.id, Some(usable_tokens)),
            Some(configured) if configured.abs_diff(usable_tokens) > usable_tokens / 10 => {
                tracing::warn!(
                    worker = %worker.url, configured, usable_tokens,
                    "workers.static.capacity_tokens counts, but the worker says otherwise",
                );
            }
            Some(_) => {}
        }
        self.assume_capacities();
    }

    /// A worker that does not tell the size of its cache is taken to be like the smallest of those that do: else it would look
    /// as if nothing were ever pushed out there, and it would draw all that is new.
    fn assume_capacities(&self) {
        let fleet = self.snapshot();
        let least = fleet.workers.iter().filter_map(|worker| told_capacity(worker)).min();
        for worker in fleet.workers.iter().filter(|worker| told_capacity(worker).is_none()) {
            self.planner.set_capacity(worker.id, least);
        }
    }

    fn learn_foreign(&self, worker: &Worker, meaning: &Meaning, until: Time) {
        let Given { requests, asked, expected, .. } = self.planner.given(worker.id).unwrap_or_default();
        // What others send is taken to be like what comes through here.
        let each = if requests > 0 { (asked - expected) / requests as f64 } else { UNKNOWN_PREFILL };
        self.planner.set_foreign_queue(worker.id, meaning.foreign_waiting * each.max(0.0), until);
        self.planner.set_foreign_share(worker.id, meaning.foreign_share);
        worker.metrics.foreign_requests.set(meaning.foreign_requests);
        worker.metrics.foreign_share.set(meaning.foreign_share);
    }

    /// Says what the belief stands on, and lets go of what has become too old to be known.
    fn judge(&self, worker: &Arc<Worker>, settings: &Scrape) {
        let now = self.clock.now();
        if !self.is_current(worker) {
            return;
        }
        let told = told_capacity(worker);
        let Some(belief) = self.planner.belief(worker.id, now) else { return };
        let (read_at, frozen) = {
            let engine = worker.engine.lock();
            (engine.read_at, engine.frozen)
        };
        let stale = read_at.is_none_or(|at| now - at > fresh_for(settings).as_secs_f64());
        if stale && belief.foreign_share > 0.0 {
            self.learn_foreign(worker, &Meaning::default(), now);
        }
        let lately = belief.confirmed_at.is_some_and(|at| now - at < CONFIRMED_LATELY);
        let basis = match (read_at, told) {
            _ if lately => Basis::Confirmed,
            (_, None) if read_at.is_some() && !stale => Basis::NoCapacity,
            (None, None) => Basis::NoScrape,
            (Some(_), _) if stale => Basis::Stale,
            _ if frozen => Basis::Frozen,
            _ => Basis::NoUsage,
        };
        let shown = &worker.metrics;
        worker.engine.lock().basis = Some(basis);
        shown.set_basis(basis);
        shown.set_capacity(told, belief.capacity_tokens);
        shown.credit.set(belief.credit);
    }

    fn confirmed_lately(&self, worker: &Worker, now: Time) -> bool {
        let belief = self.planner.belief(worker.id, now);
        belief.and_then(|belief| belief.confirmed_at).is_some_and(|at| now - at < CONFIRMED_LATELY)
    }
}

/// The size of the worker's KV cache by the config, else by its own word.
pub(super) fn told_capacity(worker: &Worker) -> Option<u64> {
    let said = || worker.engine.lock().cache.map(|cache| cache.usable_tokens);
    worker.configured_capacity().or_else(said)
}

/// Uncached tokens of a request, before any has come through here.
const UNKNOWN_PREFILL: f64 = 1_000.0;

/// How long a reading is not old.
fn fresh_for(settings: &Scrape) -> Duration {
    settings.interval.unwrap_or_default() * FRESH_INTERVALS + settings.timeout
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_and_failing_pages_are_read_less_often_and_pauses_are_bounded() {
        let interval = Duration::from_secs(2);
        let usual = |took, failures| pause(interval, took, failures, 0.5).as_secs_f64();
        assert_eq!(usual(Duration::from_millis(20), 0), 2.0);
        assert_eq!(usual(Duration::from_secs(1), 0), 10.0);
        assert_eq!(usual(Duration::from_millis(20), 2), 8.0);
        for failures in [4, 31, 32, u32::MAX] {
            assert_eq!(usual(Duration::from_secs(60), failures), 32.0);
        }
        assert_eq!(pause(interval, Duration::ZERO, 0, 0.0).as_secs_f64(), 1.8);
        assert_eq!(pause(interval, Duration::ZERO, 0, 1.0).as_secs_f64(), 2.2);
    }
}
