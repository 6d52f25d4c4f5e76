//! The text of experiments: prompts made of short common words, so that a word is a token for nearly every tokenizer (and four
//! bytes for one that only counts bytes), reproducible from a seed, and the bodies that carry them.

use bytes::Bytes;
use clap::ValueEnum;
use serde_json::{Value, json};

/// 128 words of three letters: seven bits each.
const WORDS: [&str; 128] = [
    "act", "add", "age", "ago", "aid", "aim", "air", "all", "and", "any", "arm", "art", "ask", "bad", "bag",
    "bar", "bed", "big", "bit", "box", "boy", "bus", "but", "buy", "can", "car", "cat", "cup", "cut", "day",
    "did", "die", "dog", "dry", "due", "eat", "egg", "end", "eye", "far", "fat", "few", "fit", "fix", "fly",
    "for", "fun", "gas", "get", "god", "got", "gun", "guy", "had", "has", "her", "him", "his", "hit", "hot",
    "how", "ice", "its", "job", "key", "kid", "law", "lay", "led", "leg", "let", "lie", "lot", "low", "man",
    "map", "may", "men", "met", "mix", "new", "nor", "not", "now", "odd", "off", "oil", "old", "one", "our",
    "out", "own", "pay", "per", "put", "ran", "raw", "red", "row", "run", "sat", "saw", "say", "sea", "see",
    "set", "she", "sit", "six", "sky", "son", "sun", "tax", "tea", "ten", "the", "tie", "too", "top", "try",
    "two", "use", "war", "was", "way", "who", "why", "yes",
];

/// Writes all texts of one run and draws their groups. The same seed and run (a name of three numbers) give the same order
/// of groups; with the same target also the same texts. Any other gives texts that share no beginning with them, so that
/// no run profits from what another one left in a cache.
#[derive(Clone, Debug)]
pub struct Writer {
    order_key: [u8; 32],
    text_key: [u8; 32],
}

/// What a text is for: texts of different use never begin alike.
#[derive(Copy, Clone, Debug)]
pub enum Use {
    /// The shared head of a group of prompts, by group.
    Prefix,
    /// The part that no other prompt has, by request.
    Tail,
    /// The tail of a warm-up, by group.
    WarmUp,
    /// Something to learn the target by, in no measured prompt.
    Probe,
    /// A block of a workload, by its place in a chain of blocks.
    Block,
}

impl Writer {
    pub fn new(seed: u64, run: [u64; 3], target: u64) -> Writer {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"warmroute experiment");
        for part in [seed, run[0], run[1], run[2]] {
            hasher.update(&part.to_le_bytes());
        }
        let order_key = *hasher.finalize().as_bytes();
        hasher.update(&target.to_le_bytes());
        Writer { order_key, text_key: *hasher.finalize().as_bytes() }
    }

    /// `words` words with single spaces between. The first eighteen already have 126 bits of chance: no text comes twice.
    pub fn text(&self, purpose: Use, index: usize, words: usize) -> String {
        let mut text = String::with_capacity(4 * words);
        self.write(purpose, index as u64, words, &mut text);
        text
    }

    /// Appends as many words to `text`, each after a space unless it is the first.
    pub fn write(&self, purpose: Use, number: u64, words: usize, text: &mut String) {
        let mut bytes = vec![0; words];
        stream(&self.text_key, &[purpose as u8], number).fill(&mut bytes);
        for byte in bytes {
            if !text.is_empty() {
                text.push(' ');
            }
            text.push_str(WORDS[usize::from(byte) % WORDS.len()]);
        }
    }

    /// A word for this run on this target, to keep caches apart by.
    pub fn salt(&self) -> String {
        self.text(Use::Probe, usize::MAX, 8).replace(' ', "-")
    }

    /// A uniform draw from `0..below` for the request at `index`.
    pub fn draw(&self, index: usize, below: usize) -> usize {
        let mut bytes = [0; 8];
        stream(&self.order_key, b"draw", index as u64).fill(&mut bytes);
        // The bias of the remainder is below 1e-15 for any number of groups that fits a fleet.
        (u64::from_le_bytes(bytes) % below.max(1) as u64) as usize
    }
}

fn stream(key: &[u8; 32], purpose: &[u8], number: u64) -> blake3::OutputReader {
    let mut hasher = blake3::Hasher::new_keyed(key);
    hasher.update(purpose).update(&number.to_le_bytes());
    hasher.finalize_xof()
}

/// The endpoint that prompts are sent to.
#[derive(Copy, Clone, PartialEq, Eq, Debug, ValueEnum)]
pub enum Api {
    /// `/v1/chat/completions`: the prefix is the system message, the tail the user's
    Chat,
    /// `/v1/completions`: prefix and tail in one string
    Completions,
}

impl Api {
    pub fn path(self) -> &'static str {
        match self {
            Api::Chat => "/v1/chat/completions",
            Api::Completions => "/v1/completions",
        }
    }
}

/// What all requests of an experiment have in common.
#[derive(Clone, Debug)]
pub struct Template {
    pub api: Api,
    pub model: String,
    /// Tokens to generate, exactly: `ignore_eos` is set.
    pub output_tokens: u32,
}

/// What a prompt is made of.
#[derive(Copy, Clone, Debug)]
pub enum Text<'a> {
    /// A prefix that others share, and a tail of its own: a system and a user message.
    Parts(&'a str, &'a str),
    /// One piece: a user message.
    Whole(&'a str),
}

impl Template {
    /// The body of a streamed request that asks for `usage`.
    pub fn body(&self, text: Text<'_>) -> Bytes {
        self.body_for(text, self.output_tokens)
    }

    /// The same for an answer of `output_tokens`.
    pub fn body_for(&self, text: Text<'_>, output_tokens: u32) -> Bytes {
        let mut body = json!({
            "model": self.model,
            "max_tokens": output_tokens,
            "ignore_eos": true,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        self.put_prompt(&mut body, text);
        body.to_string().into()
    }

    /// The body that asks `/tokenize` about the same prompt.
    pub fn tokenize_body(&self, text: Text<'_>) -> Value {
        let mut body = json!({"model": self.model});
        if self.api == Api::Chat {
            body["add_generation_prompt"] = json!(true);
        }
        self.put_prompt(&mut body, text);
        body
    }

    fn put_prompt(&self, body: &mut Value, text: Text<'_>) {
        match (self.api, text) {
            (Api::Chat, Text::Parts(prefix, tail)) => {
                body["messages"] = json!([
                    {"role": "system", "content": prefix},
                    {"role": "user", "content": tail},
                ]);
            }
            (Api::Chat, Text::Whole(text)) => body["messages"] = json!([{"role": "user", "content": text}]),
            (Api::Completions, Text::Parts(prefix, tail)) => {
                body["prompt"] = json!(format!("{prefix} {tail}"));
            }
            (Api::Completions, Text::Whole(text)) => body["prompt"] = json!(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn words_are_distinct_and_four_bytes_with_their_space() {
        assert_eq!(WORDS.iter().collect::<HashSet<_>>().len(), WORDS.len());
        assert!(WORDS.iter().all(|word| word.len() == 3));
        assert_eq!(Writer::new(1, [0; 3], 0).text(Use::Tail, 0, 100).len(), 399);
    }

    #[test]
    fn a_seed_and_run_fix_every_text_and_draw() {
        let [one, same] = [Writer::new(7, [2, 24, 8], 0), Writer::new(7, [2, 24, 8], 0)];
        assert_eq!(one.text(Use::Prefix, 3, 50), same.text(Use::Prefix, 3, 50));
        let draws = |writer: &Writer| (0..100).map(|index| writer.draw(index, 24)).collect::<Vec<_>>();
        assert_eq!(draws(&one), draws(&same));
        assert_eq!(draws(&one), draws(&Writer::new(7, [2, 24, 8], 1)), "another target has the same order");
        assert_ne!(draws(&one), draws(&Writer::new(8, [2, 24, 8], 0)));
    }

    #[test]
    fn no_two_texts_begin_alike() {
        let mut heads = HashSet::new();
        for (seed, run, target) in
            [(1, [0, 2, 8], 0), (1, [1, 2, 8], 0), (1, [0, 7, 8], 0), (2, [0, 2, 8], 0), (1, [0, 2, 8], 1)]
        {
            let writer = Writer::new(seed, run, target);
            for purpose in [Use::Prefix, Use::Tail, Use::WarmUp, Use::Probe] {
                for index in 0..50 {
                    assert!(heads.insert(writer.text(purpose, index, 8)), "{purpose:?} {index}");
                }
            }
        }
    }

    #[test]
    fn draws_are_uniform() {
        let writer = Writer::new(3, [0; 3], 0);
        let mut counts = [0; 24];
        (0..24_000).for_each(|index| counts[writer.draw(index, 24)] += 1);
        assert!(counts.iter().all(|&count| (850..1150).contains(&count)), "{counts:?}");
    }

    #[test]
    fn bodies_put_the_prefix_first() {
        let template = |api| Template { api, model: "m".into(), output_tokens: 64 };
        let chat: Value =
            serde_json::from_slice(&template(Api::Chat).body(Text::Parts("aaa", "bbb"))).unwrap();
        assert_eq!(chat["messages"][0]["content"], "aaa");
        assert_eq!(chat["stream_options"]["include_usage"], true);
        let completion: Value =
            serde_json::from_slice(&template(Api::Completions).body(Text::Parts("aaa", "bbb"))).unwrap();
        assert_eq!(completion["prompt"], "aaa bbb");
        assert_eq!(template(Api::Completions).tokenize_body(Text::Parts("aaa", "bbb"))["prompt"], "aaa bbb");
    }
}
