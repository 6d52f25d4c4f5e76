//! Workloads that are made up, as asked for on the command line: `simulate` and `bench play` have the same words for them.

use std::str::FromStr;

use clap::{Args, ValueEnum};

use super::chats::Chats;
use super::popularity::Popularity;
use super::replay::TraceName;
use super::shared::{Shape, Span};

/// A workload by name.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    Service,
    Hot,
    Chats,
    Groups { global: u32, group: u32 },
    Trace(TraceName),
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Kind, String> {
        match text {
            "service" => return Ok(Kind::Service),
            "hot" => return Ok(Kind::Hot),
            "chats" => return Ok(Kind::Chats),
            _ => {}
        }
        if let Some((global, group)) = text.strip_prefix("groups:").and_then(|rest| rest.split_once('+')) {
            return match (global.parse::<u32>(), group.parse::<u32>()) {
                (Ok(global), Ok(group)) if global <= 100 && group <= 100 - global => {
                    Ok(Kind::Groups { global, group })
                }
                _ => Err(format!("`{text}`: two percentages with a sum of at most 100 are needed")),
            };
        }
        TraceName::from_str(text, false).map(Kind::Trace).map_err(|_| {
            let traces: Vec<&str> = TraceName::value_variants().iter().map(|name| name.as_str()).collect();
            format!(
                "`{text}` is no workload: service, hot, chats, groups:GLOBAL+GROUP, {}",
                traces.join(", ")
            )
        })
    }
}

impl FromStr for Span {
    type Err = String;

    fn from_str(text: &str) -> Result<Span, String> {
        let (from, to) = text.split_once('-').unwrap_or((text, text));
        match (from.parse(), to.parse()) {
            (Ok(from), Ok(to)) if 0 < from && from <= to => Ok(Span { from, to }),
            _ => Err(format!("`{text}` is not N or FROM-TO in tokens, of at least 1")),
        }
    }
}

/// Sizes and numbers.
#[derive(Args, Clone, Debug)]
pub struct Made {
    /// Shared prefixes (service, hot)
    #[arg(long, value_delimiter = ',', default_value = "24", value_name = "P,..")]
    pub prefixes: Vec<u32>,
    /// Requests at a time (closed loops) [default: 8]
    #[arg(long, value_delimiter = ',', value_name = "N,..")]
    pub concurrency: Vec<usize>,
    /// Requests (service, hot); for chats, conversations [default: as the command says]
    #[arg(long, value_name = "N")]
    pub requests: Option<usize>,
    /// uniform, zipf:EXPONENT, hot:SHARE (service, hot)
    #[arg(long, default_value = "uniform")]
    pub popularity: Popularity,
    /// Tokens of a shared prefix (service, hot); of the system prompt that all chats share
    #[arg(long, default_value_t = Shape::SERVICE.prefix, value_name = "N")]
    pub prefix_tokens: u32,
    /// Tokens of a prompt, N or FROM-TO (service, hot)
    #[arg(long, default_value_t = Shape::SERVICE.prompt, value_name = "N|FROM-TO")]
    pub prompt_tokens: Span,
    /// Tokens of an answer, N or FROM-TO
    #[arg(long, default_value_t = Shape::SERVICE.output, value_name = "N|FROM-TO")]
    pub output_tokens: Span,
    /// Requests of a conversation, N or FROM-TO (chats)
    #[arg(long, default_value = "4-12", value_name = "N|FROM-TO")]
    pub turns: Span,
    /// Tokens of each new message, N or FROM-TO (chats)
    #[arg(long, default_value = "20-200", value_name = "N|FROM-TO")]
    pub message_tokens: Span,
    /// Mean seconds between an answer and the next message (chats)
    #[arg(long, default_value_t = 5.0, value_name = "S")]
    pub think: f64,
}

impl Made {
    /// # Errors
    /// With the name of a flag that is out of its range.
    pub fn check(&self) -> anyhow::Result<()> {
        use anyhow::ensure;
        ensure!(self.prefixes.iter().all(|&n| (1..1 << 24).contains(&n)), "--prefixes must be 1 to 16777215");
        ensure!(self.concurrency.iter().all(|&n| n > 0), "--concurrency must be at least 1");
        ensure!(self.requests != Some(0), "--requests must be at least 1");
        ensure!(self.think >= 0.0 && self.think.is_finite(), "--think must be at least 0");
        Ok(())
    }

    pub fn concurrencies(&self) -> &[usize] {
        if self.concurrency.is_empty() { &[8] } else { &self.concurrency }
    }

    pub fn shape(&self) -> Shape {
        Shape { prefix: self.prefix_tokens, prompt: self.prompt_tokens, output: self.output_tokens }
    }

    /// Without saying how often they begin.
    pub fn chats(&self, usual: u32) -> Chats {
        Chats {
            conversations: self.requests.map_or(usual, |asked| u32::try_from(asked).unwrap_or(u32::MAX)),
            system: self.prefix_tokens,
            turns: self.turns,
            message: self.message_tokens,
            output: self.output_tokens,
            think_s: self.think,
        }
    }
}
