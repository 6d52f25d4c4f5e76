//! Counts whose past fades by halving: cheap enough to keep one per believed block. The unit of time is the *era*, in which a
//! fleet serves [`ERA_REQUESTS`] requests per worker, so that how fast the past fades does not depend on how busy the fleet is.

/// Requests per worker in an era. Short enough that a new hot prefix shows within minutes, long enough to be no accident.
const ERA_REQUESTS: u64 = 256;

/// A fading count. Small: one is kept in every believed block.
#[derive(Copy, Clone, Debug, Default)]
pub struct Tally {
    count: u16,
    era: u16,
}

impl Tally {
    pub fn add(&mut self, era: u16) {
        *self = Tally { count: self.at(era).saturating_add(1), era };
    }

    pub fn at(self, era: u16) -> u16 {
        self.count.checked_shr(u32::from(era.wrapping_sub(self.era))).unwrap_or(0)
    }
}

/// The whole fleet's requests, and with them the era.
#[derive(Copy, Clone, Debug, Default)]
pub struct Traffic {
    /// Eras so far, in 2^-32.
    elapsed: u64,
    era: u16,
    requests: u32,
}

impl Traffic {
    /// One more request for a fleet of `workers`.
    pub fn add(&mut self, workers: usize) {
        self.elapsed += (1 << 32) / (ERA_REQUESTS * workers.max(1) as u64);
        let era = (self.elapsed >> 32) as u16;
        let passed = u32::from(era.wrapping_sub(self.era));
        self.requests = self.requests.checked_shr(passed).unwrap_or(0).saturating_add(1);
        self.era = era;
    }

    pub fn era(self) -> u16 {
        self.era
    }

    /// Requests of late, faded as a [`Tally`] that counted all of them would be.
    pub fn requests(self) -> u32 {
        self.requests
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_fade_by_half_in_each_era() {
        let mut tally = Tally::default();
        (0..12).for_each(|_| tally.add(7));
        assert_eq!((tally.at(7), tally.at(8), tally.at(10), tally.at(40)), (12, 6, 1, 0));
        tally.add(8);
        assert_eq!(tally.at(8), 7);
    }

    #[test]
    fn a_tally_of_every_request_equals_the_traffic() {
        let mut traffic = Traffic::default();
        let mut tally = Tally::default();
        for _ in 0..5_000 {
            traffic.add(3);
            tally.add(traffic.era());
            assert_eq!(traffic.requests(), u32::from(tally.at(traffic.era())));
        }
        assert!(traffic.era() >= 6);
    }

    #[test]
    fn eras_wrap_around() {
        let mut tally = Tally { count: 8, era: u16::MAX };
        assert_eq!(tally.at(0), 4);
        tally.add(0);
        assert_eq!(tally.at(1), 2);
    }
}
