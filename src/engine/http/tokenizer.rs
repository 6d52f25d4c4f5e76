//! A tokenizer without a vocabulary file: text is cut by rule as GPT-like tokenizers cut it, and each piece's id is a hash of
//! it. Texts that begin alike have tokens that begin alike, English has about four bytes a token, and the pieces put together
//! are the text again, which is what caches and routers depend on. Ids of different pieces may collide, as hashes do.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::words;
use crate::core::ids::BlockHash;

/// Pieces that are one token wherever they stand, as chat templates use them.
const SPECIAL: [&str; 3] = ["<|im_start|>", "<|im_end|>", "<|endoftext|>"];

/// Letters of one piece at most; longer words are cut from their beginning.
const LETTERS: usize = 6;

/// The first piece of `text`, which must not be empty.
fn first_piece(text: &str) -> &str {
    let bytes = text.as_bytes();
    let run = |from: usize, most: usize, class: fn(&u8) -> bool| {
        from + bytes[from..].iter().take(most).take_while(|byte| class(byte)).count()
    };
    // No piece goes on over the beginning of a special token.
    let punctuation = |byte: &u8| byte.is_ascii_punctuation() && *byte != b'<';
    if bytes[0] == b'<'
        && let Some(special) = SPECIAL.iter().find(|special| text.starts_with(*special))
    {
        return &text[..special.len()];
    }
    // One space goes with the word or punctuation behind it; what else is white stands alone.
    let start = usize::from(bytes[0] == b' ');
    let end = match bytes.get(start) {
        Some(b) if b.is_ascii_alphabetic() => run(start, LETTERS, u8::is_ascii_alphabetic),
        Some(b) if b.is_ascii_digit() && start == 0 => run(0, 3, u8::is_ascii_digit),
        Some(b) if punctuation(b) || bytes[0] == b'<' => run(start + 1, 2, punctuation),
        _ if bytes[0].is_ascii_whitespace() => {
            let end = run(0, 16, u8::is_ascii_whitespace);
            let gives_space = end > 1 && bytes[end - 1] == b' ' && end < bytes.len();
            if gives_space { end - 1 } else { end }
        }
        _ => text.chars().next().map_or(1, char::len_utf8),
    };
    &text[..end]
}

/// The pieces of `text` in order; together they are `text`.
pub(super) fn pieces(mut text: &str) -> impl Iterator<Item = &str> {
    std::iter::from_fn(move || {
        if text.is_empty() {
            return None;
        }
        let piece = first_piece(text);
        text = &text[piece.len()..];
        Some(piece)
    })
}

/// Ids for pieces, and pieces for the ids that it was asked to remember.
pub(super) struct Tokenizer {
    vocab_size: u32,
    /// Pieces that `/tokenize` has told the ids of, so that `/detokenize` can tell them back. At most one for each id.
    told: Mutex<HashMap<u32, Box<str>>>,
}

impl Tokenizer {
    pub fn new(vocab_size: u32) -> Tokenizer {
        let tokenizer = Tokenizer { vocab_size, told: Mutex::default() };
        words::all().iter().chain(&SPECIAL).for_each(|piece| tokenizer.remember(piece));
        tokenizer
    }

    pub fn vocab_size(&self) -> u32 {
        self.vocab_size
    }

    /// Ids below 128 are the ASCII characters, the last ones are the special tokens, hashes fill the rest.
    pub fn id(&self, piece: &str) -> u32 {
        let bytes = piece.as_bytes();
        if let [byte] = bytes {
            return u32::from(*byte);
        }
        if bytes.starts_with(b"<|")
            && let Some(place) = SPECIAL.iter().position(|special| *special == piece)
        {
            return self.vocab_size - 1 - place as u32;
        }
        let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325_u64, |hash, &byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let range = u64::from(self.vocab_size - 128 - SPECIAL.len() as u32);
        128 + ((hash ^ (hash >> 29)) % range) as u32
    }

    pub fn ids(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3 + 1);
        ids.extend(pieces(text).map(|piece| self.id(piece)));
        ids
    }

    pub fn remember(&self, piece: &str) {
        self.told.lock().insert(self.id(piece), piece.into());
    }

    /// The text of `ids`; for one that was never told, a word of its number.
    pub fn text(&self, ids: &[u32]) -> String {
        let told = self.told.lock();
        let mut text = String::new();
        for id in ids {
            match (told.get(id), u8::try_from(*id)) {
                (Some(piece), _) => text.push_str(piece),
                (None, Ok(byte)) if byte.is_ascii() => text.push(char::from(byte)),
                _ => text.push_str(&format!(" w{id}")),
            }
        }
        text
    }
}

/// Chains block hashes over token ids as they come.
#[derive(Clone)]
pub(super) struct Chain {
    block_size: u32,
    state: u64,
    tokens: u32,
    pub blocks: Vec<BlockHash>,
}

impl Chain {
    /// Chains with different `namespace`s share no block.
    pub fn new(block_size: u32, namespace: &[&str]) -> Chain {
        let mut chain = Chain { block_size, state: 0x243f_6a88_85a3_08d3, tokens: 0, blocks: Vec::new() };
        for part in namespace {
            part.bytes().for_each(|byte| chain.mix(u64::from(byte) | 0x100));
            chain.mix(0x200);
        }
        chain
    }

    fn mix(&mut self, value: u64) {
        let mixed = (self.state ^ value).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.state = mixed ^ (mixed >> 32);
    }

    pub fn push(&mut self, id: u32) {
        self.mix(u64::from(id));
        self.tokens += 1;
        if self.tokens.is_multiple_of(self.block_size) {
            self.blocks.push(BlockHash(self.state));
        }
    }

    /// A number that stands for all that was pushed.
    pub fn digest(&self) -> u64 {
        self.state
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cut(text: &str) -> Vec<&str> {
        pieces(text).collect()
    }

    #[test]
    fn words_digits_punctuation_and_white_space() {
        assert_eq!(
            cut("Hello, understanding 12345!"),
            ["Hello", ",", " unders", "tandin", "g", " ", "123", "45", "!"]
        );
        assert_eq!(cut("a  b\n\n c"), ["a", " ", " b", "\n\n", " c"]);
        assert_eq!(cut("<|im_start|>user\nhi<|im_end|>"), ["<|im_start|>", "user", "\n", "hi", "<|im_end|>"]);
        assert_eq!(cut("!!<|im_end|>"), ["!!", "<|im_end|>"]);
        assert_eq!(cut(" <|im_end|>x"), [" ", "<|im_end|>", "x"]);
        assert_eq!(cut("日本 é"), ["日", "本", " ", "é"]);
    }

    #[test]
    fn english_has_about_four_bytes_a_token() {
        let text = "The router reads the prompt of each request, hashes its prefix in chained blocks and keeps a belief \
                    of which worker holds which blocks. It then sends the request where it will be answered soonest.";
        let bytes_a_token = text.len() as f64 / cut(text).len() as f64;
        assert!((3.7..4.8).contains(&bytes_a_token), "{bytes_a_token}");
    }

    #[test]
    fn every_answer_word_is_one_token_after_anything() {
        for before in ["x", "x ", "x  ", "\n", ".", "12", "é", "<|im_start|>assistant\n"] {
            for word in words::all() {
                let mut expected = cut(before);
                expected.extend([*word, " next"]);
                assert_eq!(cut(&format!("{before}{word} next")), expected);
            }
        }
    }

    #[test]
    fn told_ids_come_back_as_text() {
        let tokenizer = Tokenizer::new(151_936);
        let text = "Some <|im_start|>text, 2024 été";
        pieces(text).for_each(|piece| tokenizer.remember(piece));
        assert_eq!(tokenizer.text(&tokenizer.ids(text)), text);
        assert_eq!(tokenizer.text(&[40, 41, 140_000]), "() w140000");
    }

    proptest! {
        #[test]
        fn pieces_together_are_the_text(text in "(?s).{0,200}") {
            prop_assert_eq!(pieces(&text).collect::<String>(), text);
        }

        #[test]
        fn texts_that_begin_alike_have_tokens_that_begin_alike(head in "[a-z ,.0-9\n]{20,200}", a in "(?s).{0,20}", b in "(?s).{0,20}") {
            let tokenizer = Tokenizer::new(151_936);
            let (one, two) = (tokenizer.ids(&format!("{head}{a}")), tokenizer.ids(&format!("{head}{b}")));
            let common = one.iter().zip(&two).take_while(|(a, b)| a == b).count();
            // White space may be regrouped up to its 16 bytes, words and others up to 7.
            prop_assert!(common + 16 >= tokenizer.ids(&head).len());
        }

        #[test]
        fn ids_are_in_the_vocabulary(text in "(?s).{1,50}", vocab_size in 1000..200_000u32) {
            let tokenizer = Tokenizer::new(vocab_size);
            prop_assert!(tokenizer.ids(&text).iter().all(|&id| id < vocab_size));
        }
    }
}
