//! Reads which models the workers serve: one task per worker asks for `/v1/models` now and then, and at once when the worker has
//! come up, was started again or has not found a model that it lists. A worker that cannot be asked keeps its list: it may only be busy or away. One that answers
//! with something else, several times, has none that is known.

use std::sync::Arc;
use std::time::Duration;

use http::StatusCode;
use http_body_util::{BodyExt, Limited};
use tokio::time::{Instant, sleep_until, timeout};

use super::Fleet;
use super::models::Models;
use super::news::News;
use super::scrape::scrape_request;
use super::worker::Worker;
use crate::config::Secret;

const PATH: &str = "/v1/models";
/// Largest list that is read: several thousand models as vLLM tells them.
const LIMIT: usize = 4 << 20;
/// Answers in a row that are no list, after which none is known.
const BAD_ANSWERS: u32 = 3;
/// The pause after a first failure; doubles up to the usual one.
const RETRY: Duration = Duration::from_secs(1);
/// The least time between two readings, whatever calls for one.
const LEAST: Duration = Duration::from_secs(1);

/// What is known of a worker's list.
#[derive(Default)]
pub struct Listed {
    pub models: Option<Arc<Models>>,
    /// When it was last asked for, with whatever result.
    asked: Option<Instant>,
    /// The last fault, which is told once.
    fault: Option<String>,
    bad_answers: u32,
}

/// Asks all workers for as long as it is polled; follows the worker list and the settings.
pub async fn run(fleet: Arc<Fleet>, key: Option<Secret>, connect: Duration) {
    fleet.for_each_worker(false, |worker| ask_one(fleet.clone(), worker, key.clone(), connect)).await;
}

async fn ask_one(fleet: Arc<Fleet>, worker: Arc<Worker>, key: Option<Secret>, connect: Duration) {
    let settings = fleet.scrape_settings();
    let Some(interval) = settings.models_interval else {
        return fleet.take_models(&worker, None);
    };
    let mut failures = 0;
    // A change of the worker list starts all tasks anew, but need not have every list read again.
    let asked = worker.listed.lock().asked;
    let mut due = asked.map_or_else(Instant::now, |asked| asked + interval);
    loop {
        tokio::select! {
            () = sleep_until(due) => {}
            () = worker.relist.notified() => {
                let asked = worker.listed.lock().asked;
                if let Some(asked) = asked {
                    sleep_until(asked + LEAST).await;
                }
            }
        }
        let reading = read_list(&worker, key.as_ref(), connect);
        let read = timeout(settings.timeout, reading).await;
        let read = read.unwrap_or(Err(Failure::Unanswered("did not answer in time".to_owned())));
        // Not before: a task that ends with the worker list has asked for nothing.
        worker.listed.lock().asked = Some(Instant::now());
        failures = if read.is_ok() { 0 } else { failures + 1 };
        fleet.take_listing(&worker, read);
        let pause = if failures == 0 { interval } else { interval.min(RETRY * (1 << failures.min(16) >> 1)) };
        due = Instant::now() + pause.mul_f64(0.9 + 0.2 * rand::random::<f64>());
    }
}

/// Why no list was read.
enum Failure {
    /// Nothing came that says anything of the list.
    Unanswered(String),
    /// What came is no list.
    NoList(String),
}

async fn read_list(worker: &Worker, key: Option<&Secret>, connect: Duration) -> Result<Models, Failure> {
    let request = scrape_request(worker, PATH, "application/json", key);
    let response = worker.pool.send_anew(request, connect).await;
    let response = response.map_err(|error| Failure::Unanswered(error.to_string()))?;
    match response.status() {
        StatusCode::OK => {}
        StatusCode::UNAUTHORIZED => {
            return Err(Failure::NoList("wants a key: see workers.api_key_file".to_owned()));
        }
        status => return Err(Failure::NoList(format!("answered {status}"))),
    }
    match Limited::new(response.into_body(), LIMIT).collect().await {
        Ok(body) => Models::read(&body.to_bytes()).map_err(|why| Failure::NoList(why.to_string())),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => {
            Err(Failure::NoList(format!("is longer than {LIMIT} bytes")))
        }
        Err(error) => Err(Failure::Unanswered(error.to_string())),
    }
}

impl Fleet {
    fn take_listing(&self, worker: &Arc<Worker>, read: Result<Models, Failure>) {
        let (models, fault) = match read {
            Ok(models) => (Some(Some(models)), None),
            Err(Failure::Unanswered(fault)) => (None, Some(fault)),
            Err(Failure::NoList(fault)) => {
                let mut listed = worker.listed.lock();
                listed.bad_answers += 1;
                ((listed.bad_answers >= BAD_ANSWERS).then_some(None), Some(fault))
            }
        };
        let before = std::mem::replace(&mut worker.listed.lock().fault, fault.clone());
        if let Some(fault) = fault.filter(|fault| before.as_ref() != Some(fault)) {
            self.tell(worker, News::NoModels { path: PATH, fault });
        }
        if let Some(models) = models {
            self.take_models(worker, models);
        }
    }

    fn take_models(&self, worker: &Arc<Worker>, models: Option<Models>) {
        {
            let mut listed = worker.listed.lock();
            if models.is_some() {
                listed.bad_answers = 0;
            }
            if listed.models.as_deref() == models.as_ref() {
                return;
            }
            let count = models.as_ref().map(|models| models.names().len());
            self.tell(worker, News::Models(count));
            worker.metrics.set_models(count);
            listed.models = models.map(Arc::new);
        }
        self.republish();
    }
}
