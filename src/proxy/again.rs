//! Polls a connection again at once where that is what it asked for while it was polled: hyper hands a body over in two steps, and has
//! its task woken for the second. Through the runtime, the second would come when other tasks' code has taken the place of this one's
//! in the processor's cache.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use parking_lot::Mutex;

/// Polls in a row, so that other tasks have their turn.
const MOST: usize = 4;

/// Polls one thing, always the same.
#[derive(Default)]
pub struct Again {
    /// What is polled has it: made for the task that polls, as that is known.
    waker: Option<(Arc<Asks>, Waker)>,
}

struct Asks {
    task: Mutex<Waker>,
    polling: AtomicBool,
    asked: AtomicBool,
}

impl Wake for Asks {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // Either this sees that the poll is over, or the poll's end sees this: so says their one order.
        self.asked.store(true, Ordering::SeqCst);
        if !self.polling.load(Ordering::SeqCst) {
            self.task.lock().wake_by_ref();
        }
    }
}

impl Again {
    pub fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        let (asks, waker) = self.waker.get_or_insert_with(|| {
            let task = Mutex::new(cx.waker().clone());
            let asks = Arc::new(Asks { task, polling: AtomicBool::default(), asked: AtomicBool::default() });
            (asks.clone(), Waker::from(asks))
        });
        if !asks.task.lock().will_wake(cx.waker()) {
            *asks.task.lock() = cx.waker().clone();
        }
        for _ in 0..MOST {
            asks.asked.store(false, Ordering::SeqCst);
            asks.polling.store(true, Ordering::SeqCst);
            let polled = poll(&mut Context::from_waker(waker));
            asks.polling.store(false, Ordering::SeqCst);
            if polled.is_ready() || !asks.asked.load(Ordering::SeqCst) {
                return polled;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use super::*;
    use crate::bell::tests::Woken;

    /// Polls something that asks to be polled again so many times before it is ready, and says how often it was polled.
    fn polled(again: &mut Again, task: &Arc<Woken>, asks: usize) -> (usize, bool) {
        let mut polls = 0;
        let waker = Waker::from(task.clone());
        let outcome = again.poll(&mut Context::from_waker(&waker), |cx| {
            polls += 1;
            if polls > asks {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        });
        (polls, outcome.is_ready())
    }

    #[test]
    fn what_asks_for_it_is_polled_at_once_but_not_for_ever() {
        let (mut again, task) = (Again::default(), Arc::new(Woken::default()));
        assert_eq!(polled(&mut again, &task, 0), (1, true));
        assert_eq!(polled(&mut again, &task, MOST - 1), (MOST, true));
        assert_eq!(task.count(), 0, "the task was polled already");
        assert_eq!(polled(&mut again, &task, MOST), (MOST, false));
        assert_eq!(task.count(), 1, "it goes on in its next turn");
    }

    #[test]
    fn what_wakes_it_later_wakes_the_task_that_polled_last() {
        let mut again = Again::default();
        let (one, other) = (Arc::new(Woken::default()), Arc::new(Woken::default()));
        let mut kept = None;
        for task in [&one, &other] {
            let waker = Waker::from(task.clone());
            let polled = again.poll(&mut Context::from_waker(&waker), |cx| {
                kept = Some(cx.waker().clone());
                Poll::<()>::Pending
            });
            assert!(polled.is_pending());
        }
        kept.unwrap().wake();
        assert_eq!((one.count(), other.count()), (0, 1));
    }

    /// A wake while it is polled, and one just behind that, from another thread: none is lost, or this does not end.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn no_wake_from_another_thread_is_lost() {
        let (sender, mut receiver) = tokio::sync::mpsc::channel(1);
        let sending = tokio::spawn(async move {
            for number in 0..20_000_u32 {
                sender.send(number).await.unwrap();
            }
        });
        let mut again = Again::default();
        let mut expected = 0;
        while let Some(number) = poll_fn(|cx| again.poll(cx, |cx| receiver.poll_recv(cx))).await {
            assert_eq!(number, expected);
            expected += 1;
        }
        assert_eq!(expected, 20_000);
        sending.await.unwrap();
    }
}
