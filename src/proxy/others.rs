//! What other routers place, in this one's shadow: they share the workers' caches, so that a model of them that sees a part of the traffic only
//! would hold too much of it.

use smallvec::SmallVec;

use super::{Proxy, arms};
use crate::core::ids::{Time, WorkerId};
use crate::core::planner::Ask;
use crate::core::shadow::Followed;
use crate::peers::Follow;

impl Follow for Proxy {
    fn prepare(&self) {
        self.sync_shadow();
    }

    /// As one's own, by the mode that is in force here: all routers have the same config.
    fn follow(&self, ask: &Ask, worker: WorkerId, at: Time) -> Option<Followed> {
        let shadow = self.shadow.as_ref()?;
        let (config, fleet) = (self.config.load(), self.fleet.snapshot());
        let mode = arms::mode_of(&config, ask);
        let mut eligible = SmallVec::from_vec(fleet.like(worker));
        arms::keep_own(&config, mode, &fleet, &mut eligible);
        shadow.follow(ask, &eligible, mode.into(), at, rand::random())
    }
}
