//! How many words make a prompt of the wanted number of tokens, by asking the target.

use anyhow::{Context, Result, bail};
use http::StatusCode;
use serde::Deserialize;

use crate::experiment::prompts::{Template, Text, Use, Writer};
use crate::experiment::subject::{PROBE_WORDS, Subject};
use crate::experiment::target::Target;

/// Corrections tried before a tokenizer is given up on; two suffice for all seen.
const ATTEMPTS: usize = 12;

/// The sizes to reach, in tokens.
#[derive(Copy, Clone, Debug)]
pub struct Wanted {
    /// Tokens that an engine can take from its cache: full blocks of what all prompts of a group begin with.
    pub shared_tokens: u32,
    /// Tokens of a whole prompt.
    pub prompt_tokens: u32,
}

/// The sizes to write.
#[derive(Copy, Clone, Debug)]
pub struct Sizes {
    pub prefix_words: usize,
    pub tail_words: usize,
    /// Tokens of a prompt that the cache can hold for the group, if the target's tokenizer could be asked.
    pub shareable_tokens: Option<u32>,
}

impl Sizes {
    /// Asks the subject's tokenizer, or goes by what it counted its probe as.
    ///
    /// # Errors
    /// If `/tokenize` fails, or no number of words gives the wanted sizes.
    pub async fn find(subject: &Subject, wanted: Wanted) -> Result<Sizes> {
        let block_size = subject.block_size();
        if wanted.prompt_tokens < wanted.shared_tokens + 2 * block_size {
            bail!(
                "a prompt of {} tokens has no room for {} shared ones and a tail of two blocks of {block_size}",
                wanted.prompt_tokens,
                wanted.shared_tokens,
            );
        }
        match by_tokenizer(&subject.target, &subject.template, wanted, block_size).await? {
            Some(sizes) => Ok(sizes),
            None => Ok(by_probe(PROBE_WORDS, subject.probe_tokens, wanted, block_size)),
        }
    }
}

/// Finds the sizes with the target's `/tokenize`; `None` if it has none.
async fn by_tokenizer(
    target: &Target,
    template: &Template,
    wanted: Wanted,
    block_size: u32,
) -> Result<Option<Sizes>> {
    // Half a block above the last full one: a token more or less in another prefix does not change the full blocks.
    let aim = f64::from(wanted.shared_tokens + block_size / 2);
    let (mut prefix_words, mut tail_words) =
        (wanted.shared_tokens as usize, (wanted.prompt_tokens - wanted.shared_tokens) as usize);
    for _ in 0..ATTEMPTS {
        let Some(found) = Found::ask(target, template, prefix_words, tail_words).await? else {
            return Ok(None);
        };
        let tail_wanted = f64::from(wanted.prompt_tokens) - aim;
        let prefix_off = (aim - found.shared) * prefix_words as f64 / found.shared;
        let tail_off = (tail_wanted - found.rest) * tail_words as f64 / found.rest;
        if prefix_off.abs() < 1.5 && tail_off.abs() < 1.5 {
            let blocks = found.shared as u32 / block_size;
            let shareable_tokens = Some(blocks * block_size);
            return Ok(Some(Sizes { prefix_words, tail_words, shareable_tokens }));
        }
        prefix_words = (prefix_words as f64 + prefix_off).round().max(1.0) as usize;
        tail_words = (tail_words as f64 + tail_off).round().max(1.0) as usize;
    }
    bail!("{target}/tokenize: no number of words gives prompts of {} tokens", wanted.prompt_tokens)
}

/// Sizes from the tokens that one probe of `words` words was counted as; for targets without `/tokenize`.
fn by_probe(words: usize, tokens: u32, wanted: Wanted, block_size: u32) -> Sizes {
    let words_a_token = words as f64 / f64::from(tokens.max(1));
    let aim = f64::from(wanted.shared_tokens + block_size / 2);
    let rest = (f64::from(wanted.prompt_tokens) - aim).max(1.0);
    Sizes {
        prefix_words: (aim * words_a_token).round() as usize,
        tail_words: (rest * words_a_token).round() as usize,
        shareable_tokens: None,
    }
}

/// What the tokenizer makes of one prefix under two tails.
struct Found {
    /// Tokens at the head that both prompts have in common.
    shared: f64,
    /// Tokens after them.
    rest: f64,
}

#[derive(Deserialize)]
struct Tokenized {
    tokens: Vec<u64>,
}

impl Found {
    async fn ask(
        target: &Target,
        template: &Template,
        prefix_words: usize,
        tail_words: usize,
    ) -> Result<Option<Found>> {
        let writer = Writer::new(0, [0; 3], 0);
        let prefix = writer.text(Use::Probe, 0, prefix_words);
        let mut prompts = Vec::new();
        // Words that are not in the vocabulary of texts, so that the two tails differ from their first letter on.
        for first in ["zoo", "wax"] {
            let tail = format!("{first} {}", writer.text(Use::Probe, 1, tail_words.saturating_sub(1)));
            match tokenize(target, template, Text::Parts(&prefix, &tail)).await? {
                Some(tokens) => prompts.push(tokens),
                None => return Ok(None),
            }
        }
        let shared = prompts[0].iter().zip(&prompts[1]).take_while(|(one, other)| one == other).count();
        let rest = prompts[0].len() - shared;
        if shared == 0 || rest == 0 {
            bail!("{target}/tokenize: prompts with a common prefix have no common tokens");
        }
        Ok(Some(Found { shared: shared as f64, rest: rest as f64 }))
    }
}

/// The tokens of a prompt by the target's `/tokenize`; `None` if it has none.
///
/// # Errors
/// If it fails, or its answer has no tokens.
pub async fn tokenize(target: &Target, template: &Template, text: Text<'_>) -> Result<Option<Vec<u64>>> {
    let (status, text) = target.post("/tokenize", &template.tokenize_body(text)).await?;
    match status {
        StatusCode::OK => {
            let answer: Tokenized = serde_json::from_str(&text)
                .with_context(|| format!("{target}/tokenize: no `tokens` in the answer"))?;
            Ok(Some(answer.tokens))
        }
        StatusCode::NOT_FOUND
        | StatusCode::METHOD_NOT_ALLOWED
        | StatusCode::FORBIDDEN
        | StatusCode::NOT_IMPLEMENTED => Ok(None),
        _ => bail!("{target}/tokenize: status {status}: {}", text.chars().take(300).collect::<String>()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_scales_words_to_tokens() {
        let wanted = Wanted { shared_tokens: 2032, prompt_tokens: 2371 };
        let sizes = by_probe(300, 600, wanted, 16);
        assert_eq!((sizes.prefix_words, sizes.tail_words), (1020, 166));
        assert_eq!(sizes.shareable_tokens, None);
    }
}
