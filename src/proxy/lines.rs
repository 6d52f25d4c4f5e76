//! Writes lines to where they are kept, whole or not at all as far as readers can tell, and says in the log when that fails and when it
//! works again: once each, however many lines it concerns.
//!
//! A file is followed by its name: once another one has that name, or none, as after a rotation, lines go to the one that has it, which
//! is made if need be.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The time between two looks at who has the name of the file.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Lines are written again once none was lost for so long.
const CALM: Duration = Duration::from_secs(5);

/// A file that is appended to, by its name.
pub(super) struct Named {
    path: PathBuf,
    file: File,
    looked: Instant,
    /// Look at once.
    look: Arc<AtomicBool>,
}

impl Named {
    /// # Errors
    /// If the file cannot be opened.
    pub(super) fn open(path: &Path, look: Arc<AtomicBool>) -> io::Result<Named> {
        Ok(Named { path: path.to_owned(), file: open(path)?, looked: Instant::now(), look })
    }

    /// Sees to it that the file is the one that has the name; true if it is another one now.
    fn follow(&mut self) -> io::Result<bool> {
        let asked = self.look.swap(false, Ordering::Relaxed);
        if !asked && self.looked.elapsed() < LOOK_EVERY {
            return Ok(false);
        }
        match fs::metadata(&self.path) {
            Ok(there) if is_same(&there, &self.file.metadata()?) => {}
            Err(error) if error.kind() != ErrorKind::NotFound => {
                // Who may not look keeps what is open.
                tracing::debug!("log.access: {} cannot be looked at: {error}", self.path.display());
            }
            Ok(_) | Err(_) => {
                // Where that fails it is tried again with the next line.
                self.file = open(&self.path)?;
                self.looked = Instant::now();
                return Ok(true);
            }
        }
        self.looked = Instant::now();
        Ok(false)
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).open(path)
}

fn is_same(one: &Metadata, other: &Metadata) -> bool {
    (one.dev(), one.ino()) == (other.dev(), other.ino())
}

/// Where lines go.
pub(super) enum To {
    Stdout(io::Stdout),
    File(Named),
}

/// See the module.
pub(super) struct Lines {
    to: To,
    failed: Arc<AtomicU64>,
    /// The last line was written in part.
    torn: bool,
    losses: Losses,
}

impl Lines {
    /// `failed` counts those that could not be written.
    pub(super) fn new(to: To, failed: Arc<AtomicU64>) -> Lines {
        Lines { to, failed, torn: false, losses: Losses::default() }
    }

    fn put(&mut self, line: &[u8]) -> io::Result<()> {
        let to: &mut dyn Write = match &mut self.to {
            To::Stdout(stdout) => stdout,
            To::File(named) => {
                if named.follow()? {
                    self.torn = false;
                }
                &mut named.file
            }
        };
        if self.torn {
            to.write_all(b"\n")?;
            self.torn = false;
        }
        let mut rest = line;
        while !rest.is_empty() {
            match to.write(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    self.torn = rest.len() < line.len();
                    return Err(error);
                }
            }
        }
        Ok(())
    }
}

impl Write for Lines {
    /// Takes a whole line, or nothing.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let now = Instant::now();
        match self.put(line) {
            Ok(()) => {
                if let Some(lost) = self.losses.written(now) {
                    tracing::info!(lost, "log.access: lines are written again");
                }
                Ok(line.len())
            }
            Err(error) => {
                self.failed.fetch_add(1, Ordering::Relaxed);
                if self.losses.lost(now) {
                    tracing::warn!("log.access: lines cannot be written and are lost: {error}");
                }
                Err(error)
            }
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match &mut self.to {
            To::Stdout(stdout) => stdout.flush(),
            To::File(_) => Ok(()),
        }
    }
}

/// What was lost since it was said that lines are lost.
#[derive(Default)]
struct Losses {
    count: u64,
    last: Option<Instant>,
}

impl Losses {
    /// Whether it is to be said.
    fn lost(&mut self, now: Instant) -> bool {
        self.count += 1;
        self.last.replace(now).is_none()
    }

    /// How many were lost, if it is to be said that they are written again.
    fn written(&mut self, now: Instant) -> Option<u64> {
        let calm = now.duration_since(self.last?) >= CALM;
        calm.then(|| std::mem::take(self).count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn losses_and_their_end_are_said_once() {
        let begin = Instant::now();
        let at = |seconds: u64| begin + Duration::from_secs(seconds);
        let mut losses = Losses::default();
        assert_eq!(losses.written(at(0)), None, "nothing was lost");
        assert!(losses.lost(at(1)));
        assert!(!losses.lost(at(2)));
        assert_eq!(losses.written(at(3)), None, "too early to say");
        assert!(!losses.lost(at(4)), "it goes on");
        assert_eq!(losses.written(at(9)), Some(3));
        assert_eq!(losses.written(at(10)), None);
        assert!(losses.lost(at(11)), "anew");
    }

    struct Log {
        folder: tempfile::TempDir,
        look: Arc<AtomicBool>,
        failed: Arc<AtomicU64>,
        lines: Lines,
    }

    impl Log {
        fn new() -> Log {
            let (look, failed) = <(Arc<AtomicBool>, Arc<AtomicU64>)>::default();
            let folder = tempfile::tempdir().unwrap();
            let named = Named::open(&folder.path().join("log"), look.clone()).unwrap();
            Log { folder, look, lines: Lines::new(To::File(named), failed.clone()), failed }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn text(&self, name: &str) -> String {
            fs::read_to_string(self.path(name)).unwrap_or_default()
        }

        fn look_and_write(&mut self, line: &str) -> bool {
            self.look.store(true, Ordering::Relaxed);
            self.lines.write_all(line.as_bytes()).is_ok()
        }
    }

    #[test]
    fn lines_go_to_whatever_file_has_the_name() {
        let mut log = Log::new();
        assert!(log.look_and_write("one\n"));
        fs::rename(log.path("log"), log.path("log.1")).unwrap();
        log.lines.write_all(b"two\n").unwrap();
        assert_eq!(log.text("log.1"), "one\ntwo\n", "not looked at yet");
        assert!(log.look_and_write("three\n"));
        assert_eq!((log.text("log"), log.text("log.1")), ("three\n".to_owned(), "one\ntwo\n".to_owned()));
        fs::remove_file(log.path("log")).unwrap();
        assert!(log.look_and_write("four\n"));
        fs::write(log.path("other"), "").unwrap();
        fs::rename(log.path("other"), log.path("log")).unwrap();
        assert!(log.look_and_write("five\n"));
        assert_eq!(log.text("log"), "five\n");
    }

    #[test]
    fn a_file_that_cannot_be_made_anew_loses_lines_until_it_can() {
        let mut log = Log::new();
        fs::remove_file(log.path("log")).unwrap();
        fs::create_dir(log.path("log")).unwrap();
        assert!(!log.look_and_write("one\n"));
        assert_eq!(log.failed.load(Ordering::Relaxed), 1);
        fs::remove_dir(log.path("log")).unwrap();
        assert!(log.look_and_write("two\n"));
        assert_eq!(log.text("log"), "two\n");
        assert_eq!(log.lines.losses.count, 1, "kept until it is said");
    }

    #[test]
    fn what_follows_a_torn_line_begins_on_one_of_its_own() {
        let mut log = Log::new();
        log.lines.write_all(b"half of a li").unwrap();
        log.lines.torn = true;
        log.lines.write_all(b"whole\n").unwrap();
        log.lines.write_all(b"next\n").unwrap();
        assert_eq!(log.text("log"), "half of a li\nwhole\nnext\n");
    }
}
