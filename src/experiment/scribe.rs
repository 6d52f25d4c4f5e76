//! Writing a workload's requests as bodies for a target: the text of a prompt is made of words, one token each, so that two
//! prompts are equal exactly as far as their chains of blocks are, and as long as the workload says.
//!
//! Each block's words come from its hash in the chain, which stands for its id and all ids before it. Chat templates put
//! tokens before and behind the text; the text is shorter by as many, and its blocks end where the workload's do, half an engine
//! block late: a token more or less, where a tokenizer splits a word, then changes no full block.

use anyhow::{Context, Result};

use crate::experiment::load::Job;
use crate::experiment::prompts::{Template, Text, Use, Writer};
use crate::experiment::sizing::tokenize;
use crate::experiment::subject::{PROBE_WORDS, Subject};
use crate::experiment::workload::{Content, Request};

/// Words of the texts by which a template is learned.
const SAMPLE_WORDS: usize = 512;
/// Tokens that most templates put behind the text, where the target's tokenizer cannot be asked.
const USUAL_TAIL: u32 = 5;
/// A block ends at most so many tokens behind its border.
const MOST_MARGIN: u32 = 8;

/// What a template and a tokenizer make of a text of words.
#[derive(Copy, Clone, Debug, PartialEq)]
pub struct Rendering {
    /// Tokens before the text.
    pub head: u32,
    /// Tokens behind it.
    pub tail: u32,
    pub words_per_token: f64,
}

impl Rendering {
    /// Asks the subject's `/tokenize`, or goes by what it counted its probe as.
    ///
    /// # Errors
    /// If `/tokenize` fails.
    pub async fn learn(subject: &Subject) -> Result<Rendering> {
        let writer = Writer::new(0, [0; 3], 0);
        // Words that are not in the vocabulary of texts, so that the two differ from their first to their last letter.
        let text =
            |index, edge: &str| format!("{edge} {} {edge}", writer.text(Use::Probe, index, SAMPLE_WORDS - 2));
        let mut both = Vec::new();
        for (index, edge) in ["zoo", "wax"].into_iter().enumerate() {
            let asked = text(index, edge);
            match tokenize(&subject.target, &subject.template, Text::Whole(&asked)).await? {
                Some(tokens) => both.push(tokens),
                None => return Ok(Rendering::by_probe(PROBE_WORDS, subject.probe_tokens)),
            }
        }
        Rendering::of(&both[0], &both[1]).with_context(|| {
            format!("{}/tokenize: texts without a word in common have common tokens", subject.target)
        })
    }

    fn of(one: &[u64], other: &[u64]) -> Option<Rendering> {
        let head = one.iter().zip(other).take_while(|(a, b)| a == b).count();
        let tail = one.iter().rev().zip(other.iter().rev()).take_while(|(a, b)| a == b).count();
        let words = one.len().min(other.len()).checked_sub(head + tail).filter(|&words| words > 0)?;
        let words_per_token = SAMPLE_WORDS as f64 / words as f64;
        Some(Rendering { head: head as u32, tail: tail as u32, words_per_token })
    }

    fn by_probe(words: usize, tokens: u32) -> Rendering {
        let rest = tokens.saturating_sub(words as u32);
        // More than a long system prompt of the template's own: then words are not tokens.
        if tokens < words as u32 || rest > words as u32 / 8 {
            let words_per_token = words as f64 / f64::from(tokens.max(1));
            return Rendering { head: 0, tail: 0, words_per_token };
        }
        let tail = rest.min(USUAL_TAIL);
        Rendering { head: rest - tail, tail, words_per_token: 1.0 }
    }
}

/// Writes the requests of one run on one target.
#[derive(Clone, Debug)]
pub struct Scribe {
    pub template: Template,
    pub rendering: Rendering,
    /// Keys the texts: no two runs or targets have one in common.
    pub writer: Writer,
    /// Tokens of a block of the workload, and of the engines.
    pub block_tokens: u32,
    pub engine_block: u32,
    /// Ask for this model instead of the one that a user's own body names.
    pub model: Option<String>,
    /// Keep a user's own bodies apart by `cache_salt`: they have no texts to key.
    pub salted: bool,
}

impl Scribe {
    /// The request at place `index` of the workload.
    pub fn job(&self, request: &Request, index: usize) -> Job {
        let path = self.template.api.path();
        let body = |text: &str| self.template.body_for(Text::Whole(text), request.output_tokens);
        match &request.content {
            Content::Made => Job { path, body: body(&self.text(request, index)) },
            Content::Text(text) => Job { path, body: body(&format!("{}\n{text}", self.writer.salt())) },
            Content::Body(own) => {
                let salt = self.salted.then(|| self.writer.salt());
                Job { path: own.path, body: own.bytes(self.model.as_deref(), salt.as_deref()) }
            }
        }
    }

    fn text(&self, request: &Request, index: usize) -> String {
        let Rendering { head, tail, words_per_token } = self.rendering;
        let margin = (self.engine_block / 2).min(MOST_MARGIN);
        let words = |tokens: f64| (tokens * words_per_token).round().max(0.0) as usize;
        let all = words(f64::from(request.prompt_tokens) - f64::from(head + tail)).max(1);
        let mut text = String::with_capacity(4 * all);
        let mut written = 0;
        for (nth, hash) in request.blocks.chain().iter().enumerate() {
            let border =
                (nth as f64 + 1.0) * f64::from(self.block_tokens) + f64::from(margin) - f64::from(head);
            let until = words(border).min(all);
            self.writer.write(Use::Block, hash.0, until - written, &mut text);
            written = until;
        }
        self.writer.write(Use::Tail, index as u64, all - written, &mut text);
        text
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use smallvec::smallvec;

    use super::*;
    use crate::experiment::prompts::Api;
    use crate::experiment::workload::{Blocks, Run};

    fn scribe(head: u32) -> Scribe {
        Scribe {
            template: Template { api: Api::Chat, model: "m".into(), output_tokens: 1 },
            rendering: Rendering { head, tail: 5, words_per_token: 1.0 },
            writer: Writer::new(1, [0; 3], 0),
            block_tokens: 64,
            engine_block: 16,
            model: None,
            salted: false,
        }
    }

    fn request(runs: [Run; 2], prompt_tokens: u32) -> Request {
        Request::new(Blocks::Runs(smallvec![runs[0], runs[1]]), prompt_tokens, 7)
    }

    fn words(scribe: &Scribe, request: &Request, index: usize) -> Vec<String> {
        let body: Value = serde_json::from_slice(&scribe.job(request, index).body).unwrap();
        assert_eq!(body["max_tokens"], 7);
        let text = body["messages"][0]["content"].as_str().unwrap();
        text.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn texts_are_equal_as_far_as_their_blocks_and_as_long_as_asked() {
        let run = |first, blocks| Run { first, blocks };
        // A head longer than a block is one that all share anyway.
        for head in [0, 3, 25, 90] {
            let scribe = scribe(head);
            let one = words(&scribe, &request([run(0, 3), run(100, 2)], 330), 0);
            let other = words(&scribe, &request([run(0, 3), run(200, 2)], 350), 1);
            let same = one.iter().zip(&other).take_while(|(a, b)| a == b).count() as u32;
            let shared = head + same;
            assert!((3 * 64..3 * 64 + 16).contains(&shared), "{shared} tokens with a head of {head}");
            assert_eq!((one.len() as u32 + head + 5, other.len() as u32 + head + 5), (330, 350));
        }
    }

    #[test]
    fn equal_chains_have_tails_of_their_own_and_no_two_runs_share_a_text() {
        let shared = request([Run { first: 0, blocks: 2 }, Run { first: 9, blocks: 0 }], 180);
        let (one, two) = (words(&scribe(3), &shared, 0), words(&scribe(3), &shared, 1));
        assert_eq!(one[..120], two[..120]);
        assert_ne!(one[140..], two[140..]);
        let other = Scribe { writer: Writer::new(1, [1, 0, 0], 0), ..scribe(3) };
        assert_ne!(words(&other, &shared, 0)[..8], one[..8]);
    }

    #[test]
    fn a_template_is_told_by_what_two_texts_have_in_common() {
        let tokens = |own: u64| [vec![1, 2, 3], vec![own; 512], vec![8, 9]].concat();
        let found = Rendering::of(&tokens(50), &tokens(60)).unwrap();
        assert_eq!(found, Rendering { head: 3, tail: 2, words_per_token: 1.0 });
        assert_eq!(Rendering::of(&tokens(50), &tokens(50)), None);
        let probed = Rendering::by_probe(600, 613);
        assert_eq!(probed, Rendering { head: 8, tail: 5, words_per_token: 1.0 });
        assert_eq!(Rendering::by_probe(600, 1200).words_per_token, 0.5);
    }
}
