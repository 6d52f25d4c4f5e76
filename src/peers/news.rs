//! What routers say to each other, and how it is written: compact, with a version in front, and read as what anybody may have put
//! there.
//!
//! A batch is its version, its router, its number, that router's name (its length in a byte, 0 if it is not said this time), and one thing
//! said after another until its end. Numbers are little-endian, or seven bits a byte, the least first (`varint`). Times are ages in
//! milliseconds, so no two clocks are compared.

use std::sync::Arc;

use crate::core::blocks::{Chain, Widths};
use crate::core::booking::Finished;
use crate::core::elsewhere;
use crate::core::ids::BlockHash;
use crate::core::planner::Ask;

/// Of the format: batches of another one are left alone.
pub const VERSION: u8 = 2;
/// What may be a version in the times to come; anything else was not written by a router.
const LATEST: u8 = 15;
/// Largest batch that is read, and the most that is said in one. A router sends 256 KiB at most, and what its last prompt takes: 32 KiB for a
/// million tokens.
pub const MOST_BYTES: usize = 1 << 20;
const MOST_SAID: usize = 65_536;
/// Of a router's name: as long as a pod's name and a port can be.
const LONGEST_NAME: usize = 80;
/// Blocks of a prompt that is told of: 64 MiB of text, some sixteen million tokens.
pub const MOST_BLOCKS: usize = MOST_BYTES / 8 / 2;

/// A worker, by what all routers know of it.
#[derive(Copy, Clone, PartialEq, Eq, Hash, Debug)]
pub struct Name {
    /// Of its address.
    pub key: u64,
    /// Of the uid of its pod; 0 where that is not known.
    pub pod: u64,
}

pub type News = elsewhere::News<Name>;

/// One thing that was said.
#[derive(Clone, Debug)]
pub struct Said {
    /// Milliseconds from the event until the batch was sent.
    pub age: u64,
    pub request: u64,
    pub news: News,
}

/// What one router sends at once; empty if it only says that it lives.
#[derive(Clone, Debug)]
pub struct Batch {
    pub router: u64,
    /// Each is one more than the one before. If it is more, something of what was to be said has not been.
    pub number: u64,
    /// What people call the router; said now and then.
    pub name: Option<Arc<str>>,
    pub said: Vec<Said>,
}

/// Why a batch cannot be taken up.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Unreadable {
    Version,
    Malformed,
}

const PLACED: u8 = 1;
const FIRST_TOKEN: u8 = 2;
const FINISHED: u8 = 3;
const LOST: u8 = 4;
const LEFT: u8 = 5;

/// Above it no number of tokens is one.
const MOST_TOKENS: f32 = 1e9;
const MOST_WIDE: u64 = 1024;

/// Writes a batch, one thing after another.
pub struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    /// Nothing is said of a name that is none: see [`is_name`].
    pub fn begin(router: u64, number: u64, name: Option<&str>) -> Writer {
        let mut writer = Writer { bytes: vec![VERSION] };
        writer.fixed(router);
        writer.varint(number);
        let name = name.filter(|name| is_name(name)).unwrap_or_default();
        writer.bytes.push(name.len() as u8);
        writer.bytes.extend(name.bytes());
        writer
    }

    pub fn say(&mut self, said: &Said) {
        self.bytes.push(match &said.news {
            News::Placed(..) => PLACED,
            News::FirstToken => FIRST_TOKEN,
            News::Finished(_) => FINISHED,
            News::Lost { .. } => LOST,
            News::Left => LEFT,
        });
        self.varint(said.request);
        self.varint(said.age);
        match &said.news {
            News::Placed(ask, worker) => self.place(ask, *worker),
            News::Finished(finished) => {
                for tokens in [finished.prompt_tokens, finished.cached_tokens, finished.output_tokens] {
                    // Zero says that it is not known.
                    self.varint(tokens.map_or(0, |tokens| u64::from(tokens) + 1));
                }
            }
            News::Lost { committed } => self.bytes.push(u8::from(*committed)),
            News::FirstToken | News::Left => {}
        }
    }

    fn place(&mut self, ask: &Ask, worker: Name) {
        self.fixed(worker.key);
        self.fixed(worker.pod);
        self.bytes.push(u8::from(ask.streams));
        for tokens in [ask.block_tokens, ask.prompt_tokens, ask.output_tokens] {
            self.bytes.extend((tokens as f32).to_le_bytes());
        }
        let Chain { hashes, widths, bytes } = &ask.chain;
        self.varint(*bytes);
        // Blocks that are all alike have no end of narrow ones.
        self.varint(widths.narrow.min(hashes.len()) as u64);
        self.varint(widths.wide as u64);
        self.varint(hashes.len() as u64);
        hashes.iter().for_each(|hash| self.fixed(hash.0));
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }

    fn fixed(&mut self, number: u64) {
        self.bytes.extend(number.to_le_bytes());
    }

    fn varint(&mut self, mut number: u64) {
        while number >= 0x80 {
            self.bytes.push(number as u8 | 0x80);
            number >>= 7;
        }
        self.bytes.push(number as u8);
    }
}

/// Whether routers can be called so: by some letters that are safe in a log.
pub fn is_name(name: &str) -> bool {
    (1..=LONGEST_NAME).contains(&name.len())
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.:[]".contains(&byte))
}

/// Whose batch it is, if it is one.
pub fn router_of(bytes: &[u8]) -> Option<u64> {
    let (router, _) = bytes.strip_prefix(&[VERSION])?.split_first_chunk()?;
    Some(u64::from_le_bytes(*router))
}

/// Reads a batch.
///
/// # Errors
/// If it is not one, or of another version.
pub fn read(bytes: &[u8]) -> Result<Batch, Unreadable> {
    let mut reader = Reader { left: bytes };
    match reader.byte() {
        Some(VERSION) if bytes.len() <= MOST_BYTES => reader.batch().ok_or(Unreadable::Malformed),
        Some(1..=LATEST) if bytes[0] != VERSION => Err(Unreadable::Version),
        _ => Err(Unreadable::Malformed),
    }
}

struct Reader<'a> {
    left: &'a [u8],
}

impl Reader<'_> {
    fn batch(&mut self) -> Option<Batch> {
        let (router, number, name) = (self.fixed()?, self.varint()?, self.name()?);
        let mut said = Vec::new();
        while !self.left.is_empty() {
            // Little is written of a thing that takes much more when it is read.
            if said.len() == MOST_SAID {
                return None;
            }
            said.push(self.said()?);
        }
        Some(Batch { router, number, name, said })
    }

    fn name(&mut self) -> Option<Option<Arc<str>>> {
        let length = usize::from(self.byte()?);
        let (name, left) = self.left.split_at_checked(length)?;
        self.left = left;
        if length == 0 {
            return Some(None);
        }
        let name = std::str::from_utf8(name).ok().filter(|name| is_name(name))?;
        Some(Some(name.into()))
    }

    fn said(&mut self) -> Option<Said> {
        let kind = self.byte()?;
        let (request, age) = (self.varint()?, self.varint()?);
        let news = match kind {
            PLACED => self.placed()?,
            FIRST_TOKEN => News::FirstToken,
            FINISHED => {
                let mut tokens = || Some(self.varint()?.checked_sub(1).map(u32::try_from));
                let (prompt, cached, output) = (tokens()?, tokens()?, tokens()?);
                News::Finished(Finished {
                    prompt_tokens: prompt.transpose().ok()?,
                    cached_tokens: cached.transpose().ok()?,
                    output_tokens: output.transpose().ok()?,
                })
            }
            LOST => News::Lost { committed: self.flag()? },
            LEFT => News::Left,
            _ => return None,
        };
        Some(Said { age, request, news })
    }

    fn placed(&mut self) -> Option<News> {
        let worker = Name { key: self.fixed()?, pod: self.fixed()? };
        let streams = self.flag()?;
        let (block_tokens, prompt_tokens, output_tokens) = (self.tokens()?, self.tokens()?, self.tokens()?);
        let bytes = self.varint()?;
        let (narrow, wide, blocks) = (self.varint()?, self.varint()?, self.varint()?);
        if block_tokens <= 0.0 || !(1..=MOST_WIDE).contains(&wide) || narrow > blocks {
            return None;
        }
        let blocks = usize::try_from(blocks).ok()?;
        // Nothing is set aside for what is not there.
        let (hashes, left) = self.left.split_at_checked(blocks.checked_mul(8)?)?;
        self.left = left;
        let (hashes, _) = hashes.as_chunks::<8>();
        let hashes: Arc<[BlockHash]> =
            hashes.iter().map(|hash| BlockHash(u64::from_le_bytes(*hash))).collect();
        let narrow = if narrow as usize == blocks { usize::MAX } else { narrow as usize };
        let widths = match narrow {
            usize::MAX => Widths::EVEN,
            narrow => Widths { narrow, wide: wide as usize },
        };
        let chain = Chain { hashes, widths, bytes };
        Some(News::Placed(Ask { chain, block_tokens, prompt_tokens, output_tokens, streams }, worker))
    }

    fn byte(&mut self) -> Option<u8> {
        let (byte, left) = self.left.split_first()?;
        self.left = left;
        Some(*byte)
    }

    fn flag(&mut self) -> Option<bool> {
        match self.byte()? {
            0 => Some(false),
            1 => Some(true),
            _ => None,
        }
    }

    fn chunk<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (chunk, left) = self.left.split_first_chunk::<N>()?;
        self.left = left;
        Some(*chunk)
    }

    fn fixed(&mut self) -> Option<u64> {
        Some(u64::from_le_bytes(self.chunk()?))
    }

    fn tokens(&mut self) -> Option<f64> {
        let tokens = f32::from_le_bytes(self.chunk()?);
        // Of what is not a number neither is true.
        (0.0..=MOST_TOKENS).contains(&tokens).then_some(f64::from(tokens))
    }

    fn varint(&mut self) -> Option<u64> {
        let mut number = 0u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if shift == 63 && bits > 1 {
                return None;
            }
            number |= bits << shift;
            if byte < 0x80 {
                return Some(number);
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ask(blocks: usize, widths: Widths) -> Ask {
        let hashes = (0..blocks as u64).map(|at| BlockHash(u64::MAX - at * 0x1234_5678_9abc)).collect();
        let chain = Chain { hashes, widths, bytes: 31_999 };
        Ask { chain, block_tokens: 64.25, prompt_tokens: 8_000.0, output_tokens: 128.5, streams: true }
    }

    fn all() -> Vec<News> {
        let name = Name { key: u64::MAX, pod: 7 };
        vec![
            News::Placed(ask(3, Widths::GROWING), name),
            News::Placed(ask(200, Widths::GROWING), name),
            News::Placed(ask(5, Widths::EVEN), Name { key: 1, pod: 0 }),
            News::Placed(ask(0, Widths::EVEN), name),
            News::FirstToken,
            News::Finished(Finished {
                prompt_tokens: Some(8_000),
                cached_tokens: Some(0),
                output_tokens: None,
            }),
            News::Finished(Finished {
                prompt_tokens: Some(u32::MAX),
                cached_tokens: None,
                output_tokens: Some(1),
            }),
            News::Lost { committed: true },
            News::Lost { committed: false },
            News::Left,
        ]
    }

    fn written(number: u64) -> (Vec<u8>, Vec<Said>) {
        let mut writer = Writer::begin(0x1122_3344_5566_7788, number, Some("warmroute-7d9f-x2x:8080"));
        let said: Vec<Said> = all()
            .into_iter()
            .enumerate()
            .map(|(at, news)| Said { age: 3 * at as u64, request: 1 << (6 * at), news })
            .collect();
        said.iter().for_each(|said| writer.say(said));
        (writer.finish(), said)
    }

    /// What matters of it: the widths of a chain that has no wide block mean nothing.
    fn shown(said: &Said) -> String {
        match &said.news {
            News::Placed(ask, name) => {
                let Ask { chain, block_tokens, prompt_tokens, output_tokens, streams } = ask;
                let units: Vec<usize> = (0..=chain.hashes.len()).map(|depth| chain.units(depth)).collect();
                let tokens = (block_tokens, prompt_tokens, output_tokens, streams);
                format!(
                    "{} {} {name:?} {:?} {units:?} {} {tokens:?}",
                    said.age, said.request, chain.hashes, chain.bytes
                )
            }
            other => format!("{} {} {other:?}", said.age, said.request),
        }
    }

    #[test]
    fn what_is_written_is_read() {
        for number in [0, 127, 128, u64::MAX] {
            let (bytes, said) = written(number);
            let batch = read(&bytes).unwrap();
            assert_eq!(router_of(&bytes), Some(batch.router));
            assert_eq!((batch.router, batch.number), (0x1122_3344_5566_7788, number));
            assert_eq!(batch.name.as_deref(), Some("warmroute-7d9f-x2x:8080"));
            let (is, was): (Vec<_>, Vec<_>) =
                (batch.said.iter().map(shown).collect(), said.iter().map(shown).collect());
            assert_eq!(is, was);
        }
    }

    #[test]
    fn a_prompt_of_8000_tokens_takes_eight_bytes_a_block_and_little_more() {
        let mut writer = Writer::begin(1, 1, None);
        let before = writer.len();
        writer.say(&Said {
            age: 5,
            request: 1_000,
            news: News::Placed(ask(125, Widths::GROWING), Name { key: 1, pod: 1 }),
        });
        assert!(writer.len() - before < 125 * 8 + 50, "{}", writer.len());
    }

    #[test]
    fn another_version_is_told_from_nonsense() {
        let (mut bytes, _) = written(1);
        bytes[0] = VERSION + 1;
        assert_eq!(read(&bytes).unwrap_err(), Unreadable::Version);
        assert_eq!(read(&[]).unwrap_err(), Unreadable::Malformed);
        assert_eq!(read(&vec![VERSION; MOST_BYTES + 1]).unwrap_err(), Unreadable::Malformed);
        assert_eq!(read(b"x").unwrap_err(), Unreadable::Malformed);
        let many = |count| {
            let mut writer = Writer::begin(1, 1, None);
            (0..count).for_each(|_| writer.say(&Said { age: 0, request: 1, news: News::FirstToken }));
            read(&writer.finish()).map(|batch| batch.said.len())
        };
        assert_eq!(many(MOST_SAID), Ok(MOST_SAID));
        assert_eq!(many(MOST_SAID + 1), Err(Unreadable::Malformed));
    }

    /// Seeds of an earlier format would have the fuzzer find nothing.
    #[test]
    fn what_the_fuzzer_begins_with_is_of_this_format() {
        let all = read(include_bytes!("../../fuzz/seeds/news/all")).unwrap();
        assert!(all.name.is_some() && all.said.len() >= 5, "{all:?}");
        assert!(read(include_bytes!("../../fuzz/seeds/news/pulse")).unwrap().said.is_empty());
    }

    #[test]
    fn names_are_safe_in_a_log_or_none() {
        let read_of = |name: &[u8]| {
            let mut bytes = Writer::begin(1, 1, None).finish();
            bytes.pop();
            bytes.push(name.len() as u8);
            bytes.extend(name);
            read(&bytes).map(|batch| batch.name.map(|name| name.to_string()))
        };
        assert_eq!(read_of(b""), Ok(None));
        assert_eq!(read_of(b"[::1]:8080"), Ok(Some("[::1]:8080".to_owned())));
        let long = [b'a'; LONGEST_NAME + 1];
        for name in [&b"a b"[..], b"a\nb", b"\x1b[0m", b"\xff", "\u{e4}".as_bytes(), &long] {
            assert_eq!(read_of(name), Err(Unreadable::Malformed));
        }
        let unsaid = Writer::begin(1, 1, Some("a b")).finish();
        assert_eq!(read(&unsaid).unwrap().name, None);
    }

    #[test]
    fn lengths_and_numbers_that_lie_are_refused() {
        let placed = |change: fn(&mut Ask)| {
            let mut ask = ask(3, Widths::GROWING);
            change(&mut ask);
            let mut writer = Writer::begin(1, 1, None);
            writer.say(&Said { age: 0, request: 1, news: News::Placed(ask, Name { key: 1, pod: 1 }) });
            read(&writer.finish())
        };
        assert!(placed(|_| ()).is_ok());
        assert!(placed(|ask| ask.block_tokens = f64::NAN).is_err());
        assert!(placed(|ask| ask.block_tokens = 0.0).is_err());
        assert!(placed(|ask| ask.prompt_tokens = -1.0).is_err());
        assert!(placed(|ask| ask.output_tokens = f64::INFINITY).is_err());
        assert!(placed(|ask| ask.chain.widths.wide = 1 << 20).is_err());
        let (bytes, _) = written(1);
        let whole = (0..bytes.len()).filter(|end| read(&bytes[..*end]).is_ok()).count();
        assert!(whole <= all().len(), "a cut is seen unless it is between two news");
    }

    proptest! {
        #[test]
        fn nothing_that_is_read_takes_more_than_it_brings(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let mut bytes = bytes;
            if let Some(first) = bytes.first_mut() {
                *first = VERSION;
            }
            if let Ok(batch) = read(&bytes) {
                prop_assert!(batch.said.len() <= bytes.len());
            }
        }
    }
}
