//! Requests of other routers before the same workers: what is said of a request as it goes its way ([`Claim`]), and what a router
//! makes of what it hears ([`Open`]). How words travel is their carriers' affair: a store, or virtual time.

use std::collections::HashMap;
use std::sync::Arc;

use crate::core::booking::{Booking, Finished};
use crate::core::ids::{Time, WorkerId};
use crate::core::planner::{Ask, Planner, Policy};
use crate::core::shadow::Followed;

/// What befell a request. `W` is how routers name a worker to each other.
#[derive(Clone, Debug)]
pub enum News<W> {
    Placed(Ask, W),
    FirstToken,
    Finished(Finished),
    /// It ended otherwise. Not `committed`: its worker never began on it.
    Lost {
        committed: bool,
    },
    /// The router itself leaves, and all that it has open is over.
    Left,
}

/// Carries what one router says to the others.
pub trait Tell {
    type Worker;

    fn tell(&self, at: Time, request: u64, news: News<Self::Worker>);
}

/// One request's claim on one worker, of which others are told. Dropped, it is taken back here and there.
pub struct Claim<T: Tell> {
    booking: Booking,
    told: Option<Told<T>>,
}

struct Told<T: Tell> {
    teller: T,
    request: u64,
    committed: bool,
    /// Its end has been told.
    ended: bool,
    at: Time,
}

impl<T: Tell> Told<T> {
    fn tell(&mut self, at: Time, news: News<T::Worker>) {
        self.at = at;
        self.teller.tell(at, self.request, news);
    }
}

impl<T: Tell> Drop for Told<T> {
    fn drop(&mut self) {
        if !self.ended {
            let committed = self.committed;
            self.tell(self.at, News::Lost { committed });
        }
    }
}

impl<T: Tell> Claim<T> {
    /// Tells nobody.
    pub fn silent(booking: Booking) -> Claim<T> {
        Claim { booking, told: None }
    }

    /// Of a request that was placed at `now` on `worker`; `request` is its number among those of this router.
    pub fn told(
        booking: Booking,
        teller: T,
        request: u64,
        ask: &Ask,
        worker: T::Worker,
        now: Time,
    ) -> Claim<T> {
        let mut told = Told { teller, request, committed: false, ended: false, at: now };
        told.tell(now, News::Placed(ask.clone(), worker));
        Claim { booking, told: Some(told) }
    }

    /// See [`Booking::commit`].
    pub fn commit(&mut self, now: Time) {
        self.booking.commit(now);
        if let Some(told) = &mut self.told {
            (told.committed, told.at) = (true, now);
        }
    }

    /// See [`Booking::first_token`].
    pub fn first_token(&mut self, now: Time) {
        self.booking.first_token(now);
        if let Some(told) = &mut self.told {
            told.tell(now, News::FirstToken);
        }
    }

    /// See [`Booking::finish`].
    pub fn finish(mut self, finished: Finished, now: Time) -> Option<usize> {
        if let Some(mut told) = self.told.take() {
            told.ended = true;
            told.tell(now, News::Finished(finished));
        }
        self.booking.finish(finished, now)
    }
}

/// Another router's request, in this one's planner on the worker that the other picked, and in its shadow.
pub struct Copy {
    booking: Booking,
    followed: Option<Followed>,
}

impl Copy {
    /// Of a request that was placed on `worker` at `at`; `None` if the worker has left. `followed` is it in the shadow, where there is one.
    pub fn of(
        planner: &Arc<Planner>,
        ask: &Ask,
        worker: WorkerId,
        at: Time,
        followed: Option<Followed>,
    ) -> Option<Copy> {
        let (_, booking) = planner.plan(ask, &[worker], Policy::Random, at, 0)?;
        Some(Copy { booking, followed })
    }

    fn commit(&mut self, at: Time) {
        self.booking.commit(at);
        if let Some(followed) = &mut self.followed {
            followed.commit(at);
        }
    }
}

/// Requests of one router at once: more are left out.
const MOST_OPEN: usize = 65_536;

/// What a router has open here.
#[derive(Default)]
pub struct Open(HashMap<u64, Copy>);

impl Open {
    /// Takes up what befell a request at `at`; `place` makes the copy of one that was placed, if it can. Answers whose cache that has
    /// shown to be emptied, and how many blocks were forgotten.
    pub fn take<W>(
        &mut self,
        at: Time,
        request: u64,
        news: News<W>,
        place: impl FnOnce(&Ask, W) -> Option<Copy>,
    ) -> Option<(WorkerId, usize)> {
        match news {
            News::Placed(..) if self.0.len() >= MOST_OPEN => {}
            News::Placed(ask, worker) => self.0.extend(place(&ask, worker).map(|copy| (request, copy))),
            News::FirstToken => {
                let copy = self.0.get_mut(&request)?;
                copy.commit(at);
                copy.booking.first_token(at);
            }
            News::Finished(finished) => {
                let Copy { booking, followed } = self.0.remove(&request)?;
                if let Some(followed) = followed {
                    followed.finish(finished.output_tokens, at);
                }
                let worker = booking.worker();
                return booking.finish(finished, at).map(|blocks| (worker, blocks));
            }
            News::Lost { committed } => {
                if let Some(mut copy) = self.0.remove(&request)
                    && committed
                {
                    copy.commit(at);
                }
            }
            News::Left => self.close(at),
        }
        None
    }

    /// Requests.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All of it is over; their workers have most likely worked on it.
    pub fn close(&mut self, at: Time) {
        self.0.drain().for_each(|(_, mut copy)| copy.commit(at));
    }
}
