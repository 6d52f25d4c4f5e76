//! The thin front: everything is in the library.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    match warmroute::cli::run(warmroute::cli::Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            // Nothing is left to tell if standard error is closed.
            let _ = writeln!(std::io::stderr(), "warmroute: {error:#}");
            ExitCode::FAILURE
        }
    }
}
