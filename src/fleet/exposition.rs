//! Reads the few series that matter here from an engine's metrics page (Prometheus text format), piece by piece as it comes,
//! so that a page of any size costs no memory. Pure.
//!
//! Nothing on the page can make reading fail. What is absent, no number (`NaN`, `+Inf`), negative, or too large to be true is
//! left out, each series for itself; a line that is too long, malformed or cut off is skipped. Of a series that is there
//! twice the later one counts.
//!
//! A worker with several data-parallel engines shows one series for each (`engine="0"`, ...): counts and capacities are
//! added up, of the usage the fullest engine counts, because that one preempts first.

use memchr::memchr;

/// Longest line that is looked at.
const LONGEST_LINE: usize = 16 << 10;
/// Engines of one worker that are told apart; the series of further ones are left out.
const ENGINES: usize = 1024;
/// Above this, counters that are floating-point numbers stop counting.
const PLAUSIBLE: std::ops::RangeInclusive<f64> = 0.0..=9_007_199_254_740_992.0;
/// Tokens in one KV block.
const BLOCK_TOKENS: std::ops::RangeInclusive<u64> = 1..=1 << 20;
/// KV blocks of one engine, the null block included.
const BLOCKS: std::ops::RangeInclusive<u64> = 2..=1 << 32;

/// What an engine said of itself. `None`: it did not say.
#[derive(Copy, Clone, Debug, Default, PartialEq)]
pub struct Page {
    /// `vllm:cache_config_info`.
    pub cache: Option<CacheConfig>,
    /// Requests in the running batch.
    pub running: Option<f64>,
    /// Requests in the queue.
    pub waiting: Option<f64>,
    /// Share of the KV blocks that running requests hold, 0 to 1: zero when idle, however much is cached.
    pub usage: Option<f64>,
    /// Tokens looked up in the prefix cache since the start. Some versions count a waiting request at every step.
    pub queries: Option<f64>,
    /// Tokens found there.
    pub hits: Option<f64>,
    /// Prompt tokens prefilled or found since the start, each request once.
    pub prompt_tokens: Option<f64>,
    pub generation_tokens: Option<f64>,
    pub preemptions: Option<f64>,
    /// When the process started, in seconds since 1970.
    pub started: Option<f64>,
    /// How many engines told their queries, hits, prompt tokens, generation tokens, and cache.
    pub told: [u16; 5],
}

impl Page {
    /// Some of the worker's engines that told something on the `earlier` page do not on this one, while others do: its sums mean
    /// nothing beside the earlier ones.
    pub fn lacks_engines(&self, earlier: &Page) -> bool {
        self.told.iter().zip(&earlier.told).any(|(now, then)| *now > 0 && now < then)
    }
}

/// How an engine's KV cache is cut.
#[derive(Copy, Clone, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Tokens in a block; of engines that differ, the largest.
    pub block_tokens: u32,
    /// Tokens that can be cached: one block of each engine, the null block, holds nothing.
    pub usable_tokens: u64,
}

/// The series that are read. Where two names stand for one thing, the newer one comes first.
#[derive(Copy, Clone, PartialEq, Eq)]
enum Series {
    Cache,
    Running,
    Waiting,
    Usage,
    OldUsage,
    Queries,
    OldQueries,
    Hits,
    OldHits,
    PromptTokens,
    GenerationTokens,
    Preemptions,
    Started,
}

const SERIES: usize = Series::Started as usize + 1;

fn series(name: &[u8]) -> Option<Series> {
    let name = match name {
        b"process_start_time_seconds" => return Some(Series::Started),
        name => name.strip_prefix(b"vllm:")?,
    };
    Some(match name.strip_suffix(b"_total").unwrap_or(name) {
        b"cache_config_info" => Series::Cache,
        b"num_requests_running" => Series::Running,
        b"num_requests_waiting" => Series::Waiting,
        b"kv_cache_usage_perc" => Series::Usage,
        b"gpu_cache_usage_perc" => Series::OldUsage,
        b"prefix_cache_queries" => Series::Queries,
        b"gpu_prefix_cache_queries" => Series::OldQueries,
        b"prefix_cache_hits" => Series::Hits,
        b"gpu_prefix_cache_hits" => Series::OldHits,
        b"prompt_tokens" => Series::PromptTokens,
        b"generation_tokens" => Series::GenerationTokens,
        b"num_preemptions" => Series::Preemptions,
        _ => return None,
    })
}

/// The values of one series, by its labels as they are spelt.
#[derive(Default)]
struct Values {
    by_labels: Vec<(u64, f64)>,
}

impl Values {
    fn set(&mut self, labels: &[u8], value: f64) {
        put(&mut self.by_labels, hash(labels), value);
    }

    fn sum(&self) -> Option<f64> {
        (!self.by_labels.is_empty()).then(|| self.by_labels.iter().map(|(_, value)| value).sum())
    }

    fn count(&self) -> u16 {
        self.by_labels.len() as u16
    }

    fn most(&self) -> Option<f64> {
        self.by_labels.iter().map(|(_, value)| *value).reduce(f64::max)
    }
}

/// Replaces the value of `key`, or adds it while there is room.
fn put<T>(list: &mut Vec<(u64, T)>, key: u64, value: T) {
    let room = list.len() < ENGINES;
    match list.iter_mut().find(|(known, _)| *known == key) {
        Some((_, known)) => *known = value,
        None if room => list.push((key, value)),
        None => {}
    }
}

/// FNV-1a: the labels come from the worker itself, which could as well lie about the values.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

/// Reads one page as it comes.
#[derive(Default)]
pub struct PageReader {
    /// The beginning of a line whose end has not come.
    line: Vec<u8>,
    /// The line is too long: what comes of it is dropped.
    skipping: bool,
    values: [Values; SERIES],
    caches: Vec<(u64, CacheConfig)>,
}

impl PageReader {
    /// Takes the next piece of the page, cut anywhere.
    pub fn feed(&mut self, mut piece: &[u8]) {
        while let Some(end) = memchr(b'\n', piece) {
            let (head, rest) = (&piece[..end], &piece[end + 1..]);
            if self.skipping {
                self.skipping = false;
            } else if self.line.is_empty() {
                self.read_line(head);
            } else if self.line.len() + head.len() <= LONGEST_LINE {
                let mut line = std::mem::take(&mut self.line);
                line.extend_from_slice(head);
                self.read_line(&line);
                self.line = line;
            }
            self.line.clear();
            piece = rest;
        }
        if self.skipping || self.line.len() + piece.len() > LONGEST_LINE {
            self.skipping = true;
            self.line.clear();
        } else {
            self.line.extend_from_slice(piece);
        }
    }

    /// What the page said. A last line without its end is left out: it may have been cut.
    pub fn finish(self) -> Page {
        let of = |series: Series| &self.values[series as usize];
        let caches = self.caches.iter().map(|(_, cache)| *cache);
        Page {
            cache: caches.reduce(|one, other| CacheConfig {
                block_tokens: one.block_tokens.max(other.block_tokens),
                usable_tokens: one.usable_tokens.saturating_add(other.usable_tokens),
            }),
            running: of(Series::Running).sum(),
            waiting: of(Series::Waiting).sum(),
            usage: of(Series::Usage).most().or(of(Series::OldUsage).most()),
            queries: of(Series::Queries).sum().or(of(Series::OldQueries).sum()),
            hits: of(Series::Hits).sum().or(of(Series::OldHits).sum()),
            prompt_tokens: of(Series::PromptTokens).sum(),
            generation_tokens: of(Series::GenerationTokens).sum(),
            preemptions: of(Series::Preemptions).sum(),
            started: of(Series::Started).most(),
            told: [
                of(Series::Queries).count().max(of(Series::OldQueries).count()),
                of(Series::Hits).count().max(of(Series::OldHits).count()),
                of(Series::PromptTokens).count(),
                of(Series::GenerationTokens).count(),
                self.caches.len() as u16,
            ],
        }
    }

    fn read_line(&mut self, line: &[u8]) {
        if line.len() > LONGEST_LINE {
            return;
        }
        let name_ends = line.iter().position(|byte| matches!(byte, b'{' | b' ' | b'\t'));
        let Some((name, rest)) = name_ends.map(|end| line.split_at(end)) else { return };
        let Some(series) = series(name) else { return };
        let Some((labels, rest)) = split_labels(rest) else { return };
        if series == Series::Cache {
            self.read_cache(labels);
            return;
        }
        // A time or an exemplar may follow the value.
        let value = rest.split(|byte| byte.is_ascii_whitespace()).find(|word| !word.is_empty());
        let value = value.and_then(|word| std::str::from_utf8(word).ok()?.parse::<f64>().ok());
        if let Some(value) = value.filter(|value| PLAUSIBLE.contains(value)) {
            self.values[series as usize].set(labels, value);
        }
    }

    fn read_cache(&mut self, labels: &[u8]) {
        let number = |name: &str| label(labels, name)?.parse::<u64>().ok();
        let block = number("block_size").filter(|tokens| BLOCK_TOKENS.contains(tokens));
        let blocks = number("num_gpu_blocks").filter(|blocks| BLOCKS.contains(blocks));
        let (Some(block), Some(blocks)) = (block, blocks) else { return };
        let cache = CacheConfig { block_tokens: block as u32, usable_tokens: (blocks - 1) * block };
        // The other labels may change while the engine runs: which engine it is says whether it is the same series.
        let engine = hash(label(labels, "engine").unwrap_or("").as_bytes());
        put(&mut self.caches, engine, cache);
    }
}

/// What stands between the braces, if there are any, and what follows them.
fn split_labels(rest: &[u8]) -> Option<(&[u8], &[u8])> {
    let Some(inside) = rest.strip_prefix(b"{") else { return Some((&[], rest)) };
    let (mut quoted, mut escaped) = (false, false);
    for (at, byte) in inside.iter().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'}' if !quoted => return Some((&inside[..at], &inside[at + 1..])),
            _ => {}
        }
    }
    None
}

/// The value of one label. Values with escapes in them are not asked for here, so they are not resolved.
fn label<'l>(labels: &'l [u8], wanted: &str) -> Option<&'l str> {
    let mut rest = labels;
    while let Some(equals) = memchr(b'=', rest) {
        let name = rest[..equals].trim_ascii();
        let value = rest[equals + 1..].trim_ascii_start().strip_prefix(b"\"")?;
        let mut escaped = false;
        let end = value.iter().position(|byte| {
            let closes = *byte == b'"' && !escaped;
            escaped = *byte == b'\\' && !escaped;
            closes
        })?;
        if name == wanted.as_bytes() {
            return std::str::from_utf8(&value[..end]).ok();
        }
        rest = value[end + 1..].trim_ascii_start();
        rest = rest.strip_prefix(b",").unwrap_or(rest);
    }
    None
}

/// Reads a whole page.
pub fn read(page: &[u8]) -> Page {
    let mut reader = PageReader::default();
    reader.feed(page);
    reader.finish()
}

#[cfg(test)]
mod tests;
