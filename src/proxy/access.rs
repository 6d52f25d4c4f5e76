//! The access log, if it is asked for: one JSON line for each request, with what was expected of it and what came true. With the
//! hashes of the prompts' blocks it can be played again (`bench play`) and looked into (`bench import`). There is nothing of
//! prompts in it, nor of keys or who asked; the hashes are keyed.
//!
//! No request waits for it: lines that a full disk or a slow reader has no room for are lost, and counted.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use tracing_appender::non_blocking::{NonBlocking, NonBlockingBuilder, WorkerGuard};

use crate::config::{AccessLog as Settings, LogTo};

/// Lines that may wait to be written.
const WAITING: usize = 16_384;

/// Counts what cannot be written: a line is handed over whole.
struct Counting<W> {
    to: W,
    failed: Arc<AtomicU64>,
}

impl<W: Write> Write for Counting<W> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.to.write(line).inspect_err(|_| {
            self.failed.fetch_add(1, Ordering::Relaxed);
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

/// Where the lines go.
pub struct AccessLog {
    writer: Option<NonBlocking>,
    failed: Arc<AtomicU64>,
    share: f64,
    blocks: bool,
}

impl AccessLog {
    /// The log, and what writes its last lines when it is dropped.
    ///
    /// # Errors
    /// If its file cannot be opened.
    pub fn open(settings: &Settings) -> io::Result<(AccessLog, Option<WorkerGuard>)> {
        let failed: Arc<AtomicU64> = Arc::default();
        let build = |to: Box<dyn Write + Send>| {
            let to = Counting { to, failed: failed.clone() };
            NonBlockingBuilder::default().buffered_lines_limit(WAITING).finish(to)
        };
        let (writer, guard) = match &settings.to {
            LogTo::Off => (None, None),
            LogTo::Stdout => Some(build(Box::new(io::stdout()))).unzip(),
            LogTo::File(path) => {
                let file = OpenOptions::new().append(true).create(true).open(path)?;
                Some(build(Box::new(file))).unzip()
            }
        };
        Ok((AccessLog { writer, failed, share: settings.share, blocks: settings.blocks }, guard))
    }

    /// Whether the next request is to have a line.
    pub(super) fn draws(&self) -> bool {
        self.writer.is_some() && (self.share >= 1.0 || rand::random::<f64>() < self.share)
    }

    pub(super) fn keeps_blocks(&self) -> bool {
        self.blocks
    }

    /// Writes the line of a request that has ended.
    pub(super) fn write(&self, line: &impl Serialize) {
        let Some(mut writer) = self.writer.clone() else { return };
        if let Ok(mut text) = serde_json::to_vec(line) {
            text.push(b'\n');
            // It only hands on, and never fails.
            let _ = writer.write_all(&text);
        }
    }

    /// Lines lost since the start.
    pub fn lost(&self) -> u64 {
        let dropped = |writer: &NonBlocking| writer.error_counter().dropped_lines() as u64;
        self.failed.load(Ordering::Relaxed) + self.writer.as_ref().map_or(0, dropped)
    }
}
