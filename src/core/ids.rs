//! The small values that everything else speaks in, as types, so that a slot cannot be passed for a hash or a time.

use std::ops::{Add, Sub};

/// Seconds since an origin of the caller's choice (process start in the proxy, zero in the simulator).
#[derive(Copy, Clone, PartialEq, PartialOrd, Debug, Default)]
pub struct Time(pub f64);

impl Sub for Time {
    type Output = f64;

    /// Seconds from `earlier` to `self`; negative if the two were swapped.
    fn sub(self, earlier: Time) -> f64 {
        self.0 - earlier.0
    }
}

impl Add<f64> for Time {
    type Output = Time;

    fn add(self, seconds: f64) -> Time {
        Time(self.0 + seconds)
    }
}

/// A worker's slot in the planner: dense, small, and reused after the worker has gone.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WorkerId(pub u32);

impl WorkerId {
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// The hash of one block *and of all blocks before it*: equal hashes mean equal prefixes.
#[derive(Copy, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BlockHash(pub u64);

/// SplitMix64's finaliser: spreads equal-looking keys over all 64 bits.
pub fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}
