//! Wakes all tasks that listen. Unlike a `Notify` or a channel it costs nothing to go on listening: a task says once that it does, and
//! looks for itself what has happened whenever it is polled. For what is rare, and concerns many that are polled often.

use std::collections::HashMap;
use std::fmt;
use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use parking_lot::Mutex;

/// Cheap to clone; clones are the same bell.
#[derive(Clone, Default)]
pub struct Bell(Arc<Mutex<Listening>>);

#[derive(Default)]
struct Listening {
    /// The next listener's.
    number: u64,
    wakers: HashMap<u64, Waker>,
}

impl Bell {
    pub fn ring(&self) {
        // A task that ends by being woken takes its listener away.
        let wakers: Vec<Waker> = self.0.lock().wakers.values().cloned().collect();
        wakers.into_iter().for_each(Waker::wake);
    }

    /// Waits until it holds, looking whenever the bell rings.
    pub async fn until(&self, holds: impl Fn() -> bool) {
        let mut listener = self.listener();
        let look = |cx: &mut Context<'_>| {
            listener.listen(cx);
            if holds() { Poll::Ready(()) } else { Poll::Pending }
        };
        poll_fn(look).await;
    }

    pub fn listener(&self) -> Listener {
        let mut listening = self.0.lock();
        listening.number += 1;
        Listener { bell: self.clone(), number: listening.number, waker: None }
    }
}

impl fmt::Debug for Bell {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        to.debug_struct("Bell").finish_non_exhaustive()
    }
}

/// One that hears a [`Bell`], for as long as it lives.
pub struct Listener {
    bell: Bell,
    number: u64,
    /// As the bell has it.
    waker: Option<Waker>,
}

impl Listener {
    /// From now on the task is woken when the bell rings. To be called in each poll, before looking for what the bell would tell of.
    pub fn listen(&mut self, cx: &Context<'_>) {
        if self.waker.as_ref().is_some_and(|known| known.will_wake(cx.waker())) {
            return;
        }
        self.waker = Some(cx.waker().clone());
        self.bell.0.lock().wakers.insert(self.number, cx.waker().clone());
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        if self.waker.is_some() {
            self.bell.0.lock().wakers.remove(&self.number);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    /// A task that counts how often it is woken.
    #[derive(Default)]
    pub(crate) struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl Woken {
        fn listen(self: &Arc<Self>, listener: &mut Listener) {
            listener.listen(&Context::from_waker(&Waker::from(self.clone())));
        }

        pub(crate) fn count(&self) -> usize {
            self.0.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn whoever_listens_is_woken_each_time_until_it_is_gone() {
        let bell = Bell::default();
        let (one, other) = (Arc::new(Woken::default()), Arc::new(Woken::default()));
        let (mut first, mut second) = (bell.listener(), bell.listener());
        let _idle = bell.listener();
        bell.ring();
        one.listen(&mut first);
        one.listen(&mut first);
        other.listen(&mut second);
        bell.ring();
        bell.ring();
        assert_eq!((one.count(), other.count()), (2, 2), "once a ring, and not for those before");
        drop(first);
        bell.ring();
        assert_eq!((one.count(), other.count()), (2, 3));
        assert_eq!(bell.0.lock().wakers.len(), 1);
    }

    #[test]
    fn the_task_that_listened_last_is_woken() {
        let bell = Bell::default();
        let (one, other) = (Arc::new(Woken::default()), Arc::new(Woken::default()));
        let mut listener = bell.listener();
        one.listen(&mut listener);
        other.listen(&mut listener);
        bell.ring();
        assert_eq!((one.count(), other.count()), (0, 1));
    }
}
