//! The access log, if it is asked for: one JSON line for each request, with what was expected of it and what came true. With the
//! hashes of the prompts' blocks it can be played again (`bench play`) and looked into (`bench import`). There is nothing of
//! prompts in it, nor of keys or who asked; the hashes are keyed.
//!
//! No request waits for it: what [`lines`](super::lines) cannot write, or not as fast as requests end, is lost, counted, and told in the
//! log.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use serde::Serialize;
use tracing_appender::non_blocking::{NonBlocking, NonBlockingBuilder, WorkerGuard};

use super::lines::{Lines, Named, To};
use super::note::Lost;
use crate::config::{AccessLog as Settings, LogTo};

/// Lines that may wait to be written.
const WAITING: usize = 16_384;

/// Where the lines go.
pub struct AccessLog {
    writer: Option<NonBlocking>,
    failed: Arc<AtomicU64>,
    look: Arc<AtomicBool>,
    share: f64,
    blocks: bool,
}

impl AccessLog {
    /// The log, and what writes its last lines when it is dropped.
    ///
    /// # Errors
    /// If its file cannot be opened.
    pub fn open(settings: &Settings) -> io::Result<(AccessLog, Option<WorkerGuard>)> {
        let (failed, look) = <(Arc<AtomicU64>, Arc<AtomicBool>)>::default();
        let to = match &settings.to {
            LogTo::Off => None,
            LogTo::Stdout => Some(To::Stdout(io::stdout())),
            LogTo::File(path) => Some(To::File(Named::open(path, look.clone())?)),
        };
        let build = |to| {
            let lines = Lines::new(to, failed.clone());
            NonBlockingBuilder::default().buffered_lines_limit(WAITING).finish(lines)
        };
        let (writer, guard) = to.map(build).unzip();
        Ok((AccessLog { writer, failed, look, share: settings.share, blocks: settings.blocks }, guard))
    }

    /// The file may have been moved away: the next line goes to the one that has its name.
    pub fn reopen(&self) {
        self.look.store(true, Ordering::Relaxed);
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

    /// Lines lost since the start: they could not be written, or had to wait behind too many.
    pub fn lost(&self) -> Lost {
        let dropped = |writer: &NonBlocking| writer.error_counter().dropped_lines() as u64;
        Lost { failed: self.failed.load(Ordering::Relaxed), crowded: self.writer.as_ref().map_or(0, dropped) }
    }
}
