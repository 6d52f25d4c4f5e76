//! Conversations that grow: each turn's prompt is all that was said before and a new message, and comes a while after the
//! answer. All begin with one system prompt.

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use smallvec::smallvec;

use super::shared::{BLOCK_TOKENS, Span, own_run, poisson, prefix_run};
use super::{Arrivals, Blocks, Request, Workload};

/// Growing conversations.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Chats {
    pub conversations: u32,
    /// Tokens that all conversations begin with.
    pub system: u32,
    /// Requests of a conversation.
    pub turns: Span,
    /// Tokens of a user's message.
    pub message: Span,
    /// Tokens of an answer.
    pub output: Span,
    /// Mean seconds between an answer and the next message; exponential.
    pub think_s: f64,
}

impl Chats {
    /// Prompt tokens of a conversation, in the mean.
    pub fn mean_tokens(&self) -> f64 {
        let mean = |span: Span| f64::from(span.from + span.to) / 2.0;
        let (turns, message, output) = (mean(self.turns), mean(self.message), mean(self.output));
        turns * (f64::from(self.system) + message * (turns + 1.0) / 2.0 + output * (turns - 1.0) / 2.0)
    }

    /// `starts_per_s`: conversations that begin in a second, in the mean; Poisson.
    pub fn make(&self, starts_per_s: f64, seed: u64) -> Workload {
        let mut random = StdRng::seed_from_u64(seed);
        let (mut requests, mut think, mut firsts) = (Vec::new(), Vec::new(), Vec::new());
        for conversation in 0..self.conversations {
            firsts.push(requests.len() as u32);
            let mut prompt_tokens = self.system / BLOCK_TOKENS * BLOCK_TOKENS;
            let system = prompt_tokens / BLOCK_TOKENS;
            for turn in 0..self.turns.draw(&mut random) {
                prompt_tokens += self.message.draw(&mut random).max(1);
                let output_tokens = self.output.draw(&mut random).max(1);
                let blocks = Blocks::Runs(smallvec![
                    prefix_run(0, 0, system),
                    own_run(conversation as usize, prompt_tokens / BLOCK_TOKENS - system)
                ]);
                requests.push(Request {
                    group: conversation,
                    ..Request::new(blocks, prompt_tokens, output_tokens)
                });
                let pause = -self.think_s * (1.0 - random.random::<f64>()).ln();
                think.push((turn > 0).then_some(pause));
                prompt_tokens += output_tokens;
            }
        }
        let at = poisson(firsts.len(), 1.0 / starts_per_s, &mut random);
        Workload {
            block_tokens: BLOCK_TOKENS,
            requests: requests.into(),
            arrivals: Arrivals::Sessions { starts: at.into_iter().zip(firsts).collect(), think },
            uncounted: 0,
            key_blocks: (self.system / BLOCK_TOKENS) as usize + 1,
            load: None,
        }
    }
}

impl std::fmt::Display for Chats {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Chats { conversations, system, turns, message, output, .. } = self;
        write!(f, "chats {system}+{turns}x{message}/{output} n={conversations}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_turn_begins_with_all_that_was_said() {
        let span = |from, to| Span { from, to };
        let chats = Chats {
            conversations: 5,
            system: 160,
            turns: span(2, 6),
            message: span(20, 90),
            output: span(10, 40),
            think_s: 1.0,
        };
        let workload = chats.make(2.0, 1);
        let Arrivals::Sessions { starts, think } = &workload.arrivals else { panic!("no sessions") };
        assert_eq!((starts.len(), think.len()), (5, workload.requests.len()));
        for (i, pair) in workload.requests.windows(2).enumerate() {
            let (a, b) = (pair[0].blocks.chain(), pair[1].blocks.chain());
            assert_eq!(a[..10], b[..10], "the system prompt");
            match think[i + 1] {
                Some(_) => assert!(b.len() >= a.len() && b[..a.len()] == a[..], "turn {i}"),
                None => assert_ne!(a[10..11], b[10..11], "another conversation"),
            }
        }
    }
}
