//! A matrix of measurements: targets x prefixes x concurrencies x runs. Targets take turns inside each point, so that a
//! drift of the machine or the fleet hits all of them; what is finished is written down at once, so that an interrupted
//! matrix goes on where it stopped.

use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};

use crate::experiment::figures::Figures;

/// One measurement to make.
#[derive(Copy, Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Cell {
    /// Index into the targets.
    pub target: usize,
    pub prefixes: usize,
    pub concurrency: usize,
    /// Repetition, from 0.
    pub run: u64,
}

/// All cells in the order of measuring: repetitions outermost, so that even an early stop leaves every point measured, and
/// targets innermost. Odd repetitions go through the targets backwards: none is always the one after a rest.
pub fn order(targets: usize, prefixes: &[usize], concurrencies: &[usize], runs: u64) -> Vec<Cell> {
    let mut cells = Vec::new();
    for run in 0..runs {
        for &concurrency in concurrencies {
            for &prefixes in prefixes {
                let in_turn = (0..targets).map(|nth| if run % 2 == 0 { nth } else { targets - 1 - nth });
                cells.extend(in_turn.map(|target| Cell { target, prefixes, concurrency, run }));
            }
        }
    }
    cells
}

/// A cell and what it gave.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Measured {
    pub cell: Cell,
    pub figures: Figures,
}

/// The file that remembers finished cells: a line with the settings, then a line a cell.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Opens or starts the journal at `path`; answers what was already measured under the same `settings` (one line that
    /// names all of them).
    ///
    /// # Errors
    /// If the file cannot be read and written, is no journal, or belongs to other settings.
    pub fn open(path: &Path, settings: &str) -> Result<(Journal, Vec<Measured>)> {
        let named = || format!("journal {}", path.display());
        let mut file =
            OpenOptions::new().create(true).append(true).read(true).open(path).with_context(named)?;
        let mut text = String::new();
        file.read_to_string(&mut text).with_context(named)?;
        let mut lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        let mut kept_bytes = 0;
        if let Some(first) = lines.next() {
            ensure!(
                first.trim_end() == settings,
                "{}: it belongs to a matrix with other settings: {}",
                named(),
                first.trim_end()
            );
            kept_bytes += first.len();
        }
        let mut done = Vec::new();
        for line in lines {
            done.push(serde_json::from_str(line).with_context(named)?);
            kept_bytes += line.len();
        }
        // A last line that the interruption cut off is measured again.
        file.set_len(kept_bytes as u64).with_context(named)?;
        let mut journal = Journal { path: path.to_owned(), file };
        if kept_bytes == 0 {
            journal.line(settings)?;
        }
        Ok((journal, done))
    }

    /// Writes a finished cell down, to the disk before it returns.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn record(&mut self, measured: &Measured) -> Result<()> {
        let line = serde_json::to_string(measured)?;
        self.line(&line)
    }

    fn line(&mut self, line: &str) -> Result<()> {
        let written = writeln!(self.file, "{line}").and_then(|()| self.file.sync_data());
        written.with_context(|| format!("cannot write journal {}", self.path.display()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_take_turns_and_none_always_goes_first() {
        let cells = order(2, &[2, 7], &[8], 2);
        let seen: Vec<(usize, usize, u64)> =
            cells.iter().map(|cell| (cell.target, cell.prefixes, cell.run)).collect();
        let first = [(0, 2, 0), (1, 2, 0), (0, 7, 0), (1, 7, 0)];
        let second = [(1, 2, 1), (0, 2, 1), (1, 7, 1), (0, 7, 1)];
        assert_eq!(seen, [first, second].concat());
    }

    fn measured(run: u64) -> Measured {
        let figures = crate::experiment::report::tests::figures(0.5, 10.0, [1, 1]);
        Measured { cell: Cell { target: 0, prefixes: 2, concurrency: 8, run }, figures }
    }

    #[test]
    fn a_journal_goes_on_where_it_was_cut_off() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("matrix.jsonl");
        let (mut journal, done) = Journal::open(&path, "settings 1").unwrap();
        assert!(done.is_empty());
        journal.record(&measured(0)).unwrap();
        journal.record(&measured(1)).unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::write(&path, &text[..text.len() - 5]).unwrap();

        let (mut journal, done) = Journal::open(&path, "settings 1").unwrap();
        assert_eq!(done.iter().map(|done| done.cell.run).collect::<Vec<_>>(), [0]);
        journal.record(&measured(1)).unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), text);
    }

    #[test]
    fn a_journal_of_other_settings_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("matrix.jsonl");
        Journal::open(&path, "seed 1").unwrap();
        let error = format!("{:#}", Journal::open(&path, "seed 2").unwrap_err());
        assert!(error.contains("matrix.jsonl") && error.contains("seed 1"), "{error}");
        std::fs::write(&path, "{}\nnot a measurement\n").unwrap();
        assert!(Journal::open(&path, "{}").is_err());
    }
}
