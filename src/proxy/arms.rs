//! The two arms of a split (`split` in the config): which mode a request goes by, and which workers that arm has.

use smallvec::SmallVec;

use crate::config::{Config, Mode, Split, SplitBy};
use crate::core::ids::{WorkerId, mix};
use crate::core::planner::Ask;
use crate::fleet::Snapshot;

/// Sets the draw of arms apart from all else that is drawn from the same hash.
const SALT: u64 = 0x0061_726d_5f61_726d;

/// The mode of a request: the one in force, or for a share of the prompts' roots the other one. A prompt that is shorter than a root
/// has none.
pub fn mode_of(config: &Config, ask: &Ask) -> Mode {
    let Split { share, root_blocks, .. } = config.split;
    let Some(root) = ask.chain.hashes.get(root_blocks - 1).filter(|_| share > 0.0) else {
        return config.mode;
    };
    let place = mix(root.0 ^ SALT) as f64 / 2f64.powi(64);
    if place < share { config.mode.other() } else { config.mode }
}

/// The mode of the arm that a worker belongs to, if arms have workers of their own.
pub fn of_worker(config: &Config, fleet: &Snapshot, worker: WorkerId) -> Option<Mode> {
    let Split { share, by, .. } = config.split;
    let other = || if fleet.is_of_part(worker, share) { config.mode.other() } else { config.mode };
    (by == SplitBy::Workers && share > 0.0).then(other)
}

/// Leaves the arm's own workers, if it has any. Answers whether it had some and none of them is there.
pub fn keep_own(
    config: &Config,
    mode: Mode,
    fleet: &Snapshot,
    eligible: &mut SmallVec<[WorkerId; 64]>,
) -> bool {
    let Split { share, by, .. } = config.split;
    if by == SplitBy::Prefix || share <= 0.0 || eligible.is_empty() {
        return false;
    }
    let own = |worker: &WorkerId| of_worker(config, fleet, *worker) == Some(mode);
    let any = eligible.iter().any(own);
    if any {
        eligible.retain(|worker| own(worker));
    }
    !any
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::core::blocks::Chain;
    use crate::core::ids::BlockHash;

    fn ask(blocks: &[u64]) -> Ask {
        let hashes: Arc<[BlockHash]> = blocks.iter().copied().map(BlockHash).collect();
        Ask {
            chain: Chain::even(hashes, 0),
            block_tokens: 64.0,
            prompt_tokens: 0.0,
            output_tokens: 0.0,
            streams: true,
        }
    }

    fn config(share: f64, root_blocks: usize) -> Config {
        Config { split: Split { share, root_blocks, ..Split::default() }, ..Config::default() }
    }

    #[test]
    fn a_share_of_the_roots_goes_by_the_other_mode() {
        let config = config(0.25, 1);
        let others =
            (0..4_000u64).filter(|root| mode_of(&config, &ask(&[*root, root + 1])) == Mode::Random).count();
        assert!((800..1_200).contains(&others), "{others}");
    }

    #[test]
    fn what_has_one_root_goes_one_way() {
        let config = config(0.5, 2);
        for root in 0..100u64 {
            let mode = mode_of(&config, &ask(&[1, root, 3]));
            assert_eq!(mode_of(&config, &ask(&[1, root, 4, 5])), mode);
            assert_eq!(mode_of(&config, &ask(&[1, root])), mode);
            assert_eq!(mode_of(&config, &ask(&[root])), Mode::Kv, "it has no root yet");
        }
    }

    #[test]
    fn none_and_all_are_exact() {
        for (share, mode) in [(0.0, Mode::Kv), (1.0, Mode::Random)] {
            assert!((0..1_000u64).all(|root| mode_of(&config(share, 1), &ask(&[root])) == mode));
        }
    }
}
