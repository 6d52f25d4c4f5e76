//! Tasks that run for as long as a worker is in the fleet.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};

use tokio::task::{AbortHandle, JoinSet};

use super::worker::Worker;

/// A task for each of some workers.
#[derive(Default)]
pub(super) struct Running {
    tasks: JoinSet<()>,
    /// By the worker's address in memory, which a `Weak` keeps from being used again.
    of: HashMap<usize, (Weak<Worker>, AbortHandle)>,
}

impl Running {
    /// Ends the tasks of workers that are no longer wanted, and begins those of the new ones.
    pub(super) fn adapt<F: Future<Output = ()> + Send + 'static>(
        &mut self,
        wanted: &[Arc<Worker>],
        task: impl Fn(Arc<Worker>) -> F,
    ) {
        let place = |worker: &Arc<Worker>| Arc::as_ptr(worker) as usize;
        let keep: HashSet<usize> = wanted.iter().map(place).collect();
        self.of.retain(|at, (_, task)| {
            let kept = keep.contains(at);
            if !kept {
                task.abort();
            }
            kept
        });
        while self.tasks.try_join_next().is_some() {}
        for worker in wanted {
            self.of
                .entry(place(worker))
                .or_insert_with(|| (Arc::downgrade(worker), self.tasks.spawn(task(worker.clone()))));
        }
    }
}
