//! How a report is handed over, as the command line says: printed, as JSON, or left in files.

use std::io::Write;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use super::Point;
use super::page::{self, Page};

#[derive(Args, Clone, Debug, Default)]
pub struct Outputs {
    /// Print JSON instead of the table
    #[arg(long)]
    pub json: bool,
    /// With --json, add every single request, which `bench compare` needs
    #[arg(long, requires = "json")]
    pub samples: bool,
    /// Leave a report in this file: .html with charts, .md or .json (with every single request); may be repeated
    #[arg(long = "report", value_name = "FILE")]
    pub reports: Vec<PathBuf>,
}

/// What an experiment has measured.
pub trait Measured: Serialize {
    fn page(&self) -> Page<'_>;

    fn points_mut(&mut self) -> &mut [Point];

    /// Says it to somebody at a terminal.
    ///
    /// # Errors
    /// If `out` takes no more.
    fn print(&self, page: &Page<'_>, out: &mut dyn Write) -> Result<()>;
}

impl Outputs {
    /// Refuses names of files before anything is measured.
    ///
    /// # Errors
    /// See [`page::check`].
    pub fn check(&self) -> Result<()> {
        page::check(&self.reports)
    }

    /// Hands the report over.
    ///
    /// # Errors
    /// If it cannot be written.
    pub fn deliver(&self, mut report: impl Measured, out: &mut dyn Write) -> Result<()> {
        if !self.json || !self.reports.is_empty() {
            let page = report.page();
            page::write(&self.reports, &page, &report)?;
            if !self.json {
                return report.print(&page, out);
            }
        }
        if !self.samples {
            report.points_mut().iter_mut().for_each(Point::drop_samples);
        }
        serde_json::to_writer_pretty(&mut *out, &report)?;
        writeln!(out)?;
        Ok(())
    }
}
