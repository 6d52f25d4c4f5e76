//! Readers of request traces: JSON lines, plain or gzip'd, one row at a time, each error with its line. Every schema of the
//! public traces that `simulate` replays has its row type here, and a row that contradicts itself is an error, not a guess.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Tokens of one id in a Mooncake trace.
pub const MOONCAKE_BLOCK_TOKENS: u32 = 512;
/// Tokens of one id in a session trace.
pub const SESSION_BLOCK_TOKENS: u32 = 64;
/// A line longer than this is refused: the longest real row (a whole prompt as text) has under a megabyte.
const LINE_LIMIT: u64 = 64 << 20;

/// What is wrong with a trace, and where.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("cannot open the trace {path}: {source}")]
    Open { path: PathBuf, source: std::io::Error },
    #[error("{path}, line {line}: cannot read: {source}")]
    Read { path: PathBuf, line: usize, source: std::io::Error },
    #[error("{path}, line {line}: longer than {LINE_LIMIT} bytes")]
    Long { path: PathBuf, line: usize },
    #[error("{path}, line {line}: {source}")]
    Parse { path: PathBuf, line: usize, source: serde_json::Error },
    #[error("{path}, line {line}: {what}")]
    Row { path: PathBuf, line: usize, what: String },
    #[error("{path}: the trace has no rows")]
    Empty { path: PathBuf },
    #[error("{path}: {what}")]
    Schema { path: PathBuf, what: String },
}

/// One line of a trace that can say what is wrong with itself.
pub trait Row: DeserializeOwned {
    /// The first contradiction in the row, in words.
    fn check(&self) -> Result<(), String>;
}

/// A request with its blocks' identities (`mooncake_*`): blocks of 512 tokens.
#[derive(Clone, Debug, Deserialize)]
pub struct BlockRow {
    /// Milliseconds since the trace began.
    pub timestamp: f64,
    /// Tokens.
    pub input_length: u32,
    /// Tokens.
    pub output_length: u32,
    /// One a block, the last one for a part block unless the length is a multiple of 512. Equal ids after equal ids are
    /// equal prefixes.
    pub hash_ids: Vec<u64>,
}

impl Row for BlockRow {
    fn check(&self) -> Result<(), String> {
        check_arrival(self.timestamp, self.input_length)?;
        let wanted = self.input_length.div_ceil(MOONCAKE_BLOCK_TOKENS) as usize;
        if self.hash_ids.len() != wanted {
            let (n, had) = (self.input_length, self.hash_ids.len());
            return Err(format!("input_length {n} needs {wanted} hash_ids, the row has {had}"));
        }
        Ok(())
    }
}

/// A line of warmroute's access log. Requests that were not answered have lines too.
#[derive(Clone, Debug, Deserialize)]
pub struct AccessRow {
    /// Milliseconds since 1970.
    pub timestamp: f64,
    pub route: String,
    pub prompt_tokens: u32,
    pub output_tokens: Option<u32>,
    /// Tokens of the first block.
    pub block_tokens: Option<f64>,
    /// One hash a block, each of 16 hexadecimal digits.
    pub blocks: Option<Vec<String>>,
}

impl Row for AccessRow {
    fn check(&self) -> Result<(), String> {
        /// More than any engine takes.
        const MOST: u32 = 16_000_000;
        check_arrival(self.timestamp, self.prompt_tokens.max(1))?;
        if !self.has_prompt() {
            return Ok(());
        }
        let lengths = [self.prompt_tokens, self.output_tokens.unwrap_or(0)];
        if let Some(tokens) = lengths.into_iter().find(|&tokens| tokens > MOST) {
            return Err(format!("{tokens} tokens are no length of a prompt or an answer"));
        }
        match self.block_tokens {
            Some(tokens) if !(1.0..=65_536.0).contains(&tokens) => {
                Err(format!("block_tokens {tokens} is no length of a block"))
            }
            Some(_) if self.blocks.is_some() => Ok(()),
            _ => Err("it has no blocks: the log was written without `log.access.blocks`".to_owned()),
        }
    }
}

impl AccessRow {
    /// Whether it is of a request with a prompt, and not of another path.
    pub fn has_prompt(&self) -> bool {
        matches!(self.route.as_str(), "chat" | "completions" | "responses" | "messages")
    }

    /// The blocks' hashes.
    ///
    /// # Errors
    /// Names the first that is none.
    pub fn hashes(&self) -> Result<Vec<u64>, String> {
        let hash = |text: &String| {
            u64::from_str_radix(text, 16)
                .ok()
                .filter(|_| text.len() == 16)
                .ok_or_else(|| format!("`{text}` is not the hash of a block"))
        };
        self.blocks.iter().flatten().map(hash).collect()
    }
}

/// A turn of a session (`claude_code_sessions_*`): blocks of 64 tokens, their ids local to the session.
#[derive(Clone, Debug, Deserialize)]
pub struct SessionRow {
    pub session: String,
    /// From 0.
    pub turn: u32,
    /// Milliseconds since the trace began; on a session's first row only.
    pub start_ms: Option<f64>,
    /// Seconds between the last answer and this turn.
    pub think_s: f64,
    pub model: String,
    /// Tokens of the tool definitions at the head of the prompt; on a session's first row only.
    pub tool_tokens: Option<u32>,
    /// Tokens.
    pub input_length: u32,
    /// Tokens.
    pub output_length: u32,
    /// Runs of block ids, both ends inclusive.
    pub hash_ranges: Vec<(u64, u64)>,
}

impl Row for SessionRow {
    fn check(&self) -> Result<(), String> {
        check_arrival(self.start_ms.unwrap_or(0.0), self.input_length)?;
        if !self.think_s.is_finite() || self.think_s < 0.0 {
            return Err(format!("think_s {} is not a time", self.think_s));
        }
        if (self.turn == 0) != self.start_ms.is_some() {
            return Err("start_ms belongs on turn 0 and only there".into());
        }
        let wanted = u64::from(self.input_length / SESSION_BLOCK_TOKENS);
        let mut had = 0u64;
        for &(first, last) in &self.hash_ranges {
            if last < first {
                return Err(format!("the range [{first}, {last}] runs backwards"));
            }
            had = had.saturating_add((last - first).saturating_add(1));
        }
        if had != wanted {
            return Err(format!(
                "input_length {} needs {wanted} block ids, the row has {had}",
                self.input_length
            ));
        }
        Ok(())
    }
}

impl SessionRow {
    /// The row's block ids, one for each 64 tokens.
    pub fn ids(&self) -> impl Iterator<Item = u64> + '_ {
        self.hash_ranges.iter().flat_map(|&(first, last)| first..=last)
    }
}

/// A turn of an agent's run with its whole prompt as text (`lmcache_*_text`).
#[derive(Clone, Debug, Deserialize)]
pub struct TextRow {
    pub session: String,
    /// From 0.
    pub turn: u32,
    /// Milliseconds since the session's first request.
    pub t_ms: f64,
    pub input: String,
    pub output_chars: u32,
}

impl Row for TextRow {
    fn check(&self) -> Result<(), String> {
        // Agents do send empty prompts; vLLM still adds a token for the beginning of the text.
        check_arrival(self.t_ms, 1)
    }
}

/// A request of which only time and sizes are known (`azure2023_*`).
#[derive(Clone, Debug, Deserialize)]
pub struct SizeRow {
    /// Milliseconds since the trace began.
    pub timestamp: f64,
    /// Tokens.
    pub input_length: u32,
    /// Tokens.
    pub output_length: u32,
}

impl Row for SizeRow {
    fn check(&self) -> Result<(), String> {
        check_arrival(self.timestamp, self.input_length)
    }
}

/// How much one client of a production model sends (`servegen_client_rates`).
#[derive(Clone, Debug, Deserialize)]
pub struct RateRow {
    pub model: String,
    pub client: u32,
    /// Requests a second.
    pub mean_rps: f64,
}

impl Row for RateRow {
    fn check(&self) -> Result<(), String> {
        if !self.mean_rps.is_finite() || self.mean_rps < 0.0 {
            return Err(format!("mean_rps {} is not a rate", self.mean_rps));
        }
        Ok(())
    }
}

fn check_arrival(milliseconds: f64, input_length: u32) -> Result<(), String> {
    if !milliseconds.is_finite() || milliseconds < 0.0 {
        return Err(format!("the time {milliseconds} is not one"));
    }
    if input_length == 0 {
        return Err("the prompt is empty".into());
    }
    Ok(())
}

impl TraceError {
    /// Nothing behind it can be read either; other errors spoil one line.
    pub fn is_fatal(&self) -> bool {
        matches!(self, TraceError::Open { .. } | TraceError::Read { .. } | TraceError::Long { .. })
    }
}

/// All rows of the trace at `path`, which must have at least one.
pub fn read<R: Row>(path: &Path) -> Result<Vec<R>, TraceError> {
    let rows = Rows::open(path)?.collect::<Result<Vec<R>, _>>()?;
    if rows.is_empty() {
        return Err(TraceError::Empty { path: path.to_owned() });
    }
    Ok(rows)
}

/// The rows of one trace, read as they are asked for. A bad row is an error in its place; the file itself ends after the first.
pub struct Rows<R> {
    path: PathBuf,
    reader: Box<dyn BufRead>,
    line: usize,
    buffer: Vec<u8>,
    failed: bool,
    row: std::marker::PhantomData<R>,
}

impl<R: Row> Rows<R> {
    /// Opens `path`; gzip is told by its first bytes, not by the name.
    pub fn open(path: &Path) -> Result<Rows<R>, TraceError> {
        let open = |source| TraceError::Open { path: path.to_owned(), source };
        let mut file = BufReader::new(File::open(path).map_err(open)?);
        let zipped = file.fill_buf().map_err(open)?.starts_with(&[0x1f, 0x8b]);
        let reader: Box<dyn BufRead> = match zipped {
            true => Box::new(BufReader::new(flate2::bufread::MultiGzDecoder::new(file))),
            false => Box::new(file),
        };
        let (path, row) = (path.to_owned(), std::marker::PhantomData);
        Ok(Rows { path, reader, line: 0, buffer: Vec::new(), failed: false, row })
    }

    /// The line of the row that was read last, from 1.
    pub fn line(&self) -> usize {
        self.line
    }

    fn next_row(&mut self) -> Result<Option<R>, TraceError> {
        loop {
            self.line += 1;
            self.buffer.clear();
            let (path, line) = (self.path.clone(), self.line);
            let read = (&mut self.reader).take(LINE_LIMIT).read_until(b'\n', &mut self.buffer);
            match read {
                Err(source) => return Err(TraceError::Read { path, line, source }),
                Ok(0) => return Ok(None),
                Ok(n) if n as u64 == LINE_LIMIT => return Err(TraceError::Long { path, line }),
                Ok(_) if self.buffer.trim_ascii().is_empty() => continue,
                Ok(_) => {}
            }
            let row: R = match serde_json::from_slice(&self.buffer) {
                Ok(row) => row,
                Err(source) => return Err(TraceError::Parse { path, line, source }),
            };
            return match row.check() {
                Ok(()) => Ok(Some(row)),
                Err(what) => Err(TraceError::Row { path, line, what }),
            };
        }
    }
}

impl<R: Row> Iterator for Rows<R> {
    type Item = Result<R, TraceError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed {
            return None;
        }
        let row = self.next_row().transpose();
        self.failed = matches!(&row, Some(Err(error)) if error.is_fatal());
        row
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn write(text: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text).unwrap();
        file
    }

    fn fails<R: Row + std::fmt::Debug>(text: &str) -> String {
        read::<R>(write(text.as_bytes()).path()).unwrap_err().to_string()
    }

    #[test]
    fn plain_and_zipped_rows_read_the_same() {
        let text = b"{\"timestamp\":3,\"input_length\":513,\"output_length\":1,\"hash_ids\":[0,7]}\n\n";
        let mut zipped = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        zipped.write_all(text).unwrap();
        for bytes in [text.to_vec(), zipped.finish().unwrap()] {
            let rows = read::<BlockRow>(write(&bytes).path()).unwrap();
            assert_eq!((rows.len(), rows[0].input_length, &rows[0].hash_ids[..]), (1, 513, &[0, 7][..]));
        }
    }

    #[test]
    fn errors_name_the_line() {
        let good = "{\"timestamp\":3,\"input_length\":513,\"output_length\":1,\"hash_ids\":[0,7]}\n";
        let cases = [
            (
                "{\"timestamp\":3,\"input_length\":513,\"output_length\":1,\"hash_ids\":[0]}",
                "needs 2 hash_ids",
            ),
            ("{\"timestamp\":3,\"input_length\":0,\"output_length\":1,\"hash_ids\":[]}", "prompt is empty"),
            ("{\"timestamp\":-3,\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}", "the time -3"),
            ("{\"timestamp\":3", "EOF"),
            ("{\"timestamp\":3}", "missing field"),
        ];
        for (bad, what) in cases {
            let error = fails::<BlockRow>(&format!("{good}{bad}\n"));
            assert!(error.contains("line 2") && error.contains(what), "{error}");
        }
        assert!(fails::<BlockRow>("").contains("no rows"));
    }

    #[test]
    fn a_range_is_checked_before_it_is_expanded() {
        let row = |turn: u32, ranges: &str| {
            let start = if turn == 0 { "\"start_ms\":1," } else { "" };
            format!(
                "{{\"session\":\"a\",\"turn\":{turn},{start}\"think_s\":0,\"model\":\"m\",\"input_length\":200,\
                 \"output_length\":1,\"hash_ranges\":{ranges}}}"
            )
        };
        assert!(fails::<SessionRow>(&row(0, "[[1,18446744073709551615]]")).contains("needs 3 block ids"));
        assert!(fails::<SessionRow>(&row(0, "[[5,3]]")).contains("backwards"));
        let file = write(row(1, "[[1,2],[9,9]]").as_bytes());
        let rows = read::<SessionRow>(file.path()).unwrap();
        assert_eq!(rows[0].ids().collect::<Vec<_>>(), [1, 2, 9]);
    }

    #[test]
    fn a_missing_file_is_named() {
        let error = read::<SizeRow>(Path::new("/nowhere/trace.jsonl.gz")).unwrap_err().to_string();
        assert!(error.contains("/nowhere/trace.jsonl.gz"), "{error}");
    }
}
