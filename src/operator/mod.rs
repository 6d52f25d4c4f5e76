//! What an operator does from a terminal: `status`, `mode`, `workers` and `explain` ask a running proxy's admin listener.

mod explain;
mod status;

use std::io::{self, IsTerminal, Write};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand, ValueEnum};
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;
use tokio::time::sleep;

use crate::config::Mode;
use crate::experiment::target::Target;

pub use explain::{ExplainArgs, explain};

/// Where the proxy is.
#[derive(Debug, Args)]
pub struct Admin {
    /// The proxy's admin listener.
    #[arg(long = "admin", value_name = "URL", default_value = "http://127.0.0.1:9090")]
    url: String,
}

impl Admin {
    async fn target(&self) -> Result<Target> {
        if self.url.contains(',') {
            bail!("--admin {}: one address; each replica has its own fleet to tell of", self.url);
        }
        Target::resolve(&self.url).await.context("--admin")
    }
}

/// `text` as a part of a path or a query.
fn encoded(text: &str) -> impl std::fmt::Display {
    utf8_percent_encode(text, PLAIN)
}

/// What is written as it is: what RFC 3986 (2.3) leaves unreserved, and what addresses are made of.
const PLAIN: &AsciiSet =
    &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b':').remove(b'/');

#[derive(Debug, Args)]
pub struct StatusArgs {
    #[command(flatten)]
    admin: Admin,
    /// Show it again every so many seconds, until interrupted.
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, default_missing_value = "2")]
    watch: Option<f64>,
}

#[derive(Debug, Args)]
pub struct ModeArgs {
    /// Switch to this mode; without it, tell the mode in force.
    mode: Option<ModeName>,
    #[command(flatten)]
    admin: Admin,
}

#[derive(Copy, Clone, Debug, ValueEnum)]
enum ModeName {
    Kv,
    Random,
}

impl ModeName {
    fn mode(self) -> Mode {
        match self {
            ModeName::Kv => Mode::Kv,
            ModeName::Random => Mode::Random,
        }
    }
}

#[derive(Debug, Args)]
pub struct WorkersArgs {
    #[command(subcommand)]
    command: WorkersCommand,
}

#[derive(Debug, Subcommand)]
enum WorkersCommand {
    /// Give a worker no new requests, in either mode; those that it has run to their end.
    Drain {
        #[command(flatten)]
        worker: Named,
        /// Return only when its last request has ended.
        #[arg(long)]
        wait: bool,
    },
    /// Give a drained worker requests again.
    Resume(Named),
}

#[derive(Debug, Args)]
struct Named {
    /// As `status` and the metrics name it: host and port, with `https://` before them in TLS.
    name: String,
    #[command(flatten)]
    admin: Admin,
}

/// Time between looks at a worker that is being drained.
const LOOK_AGAIN: Duration = Duration::from_millis(500);

/// Prints the workers and what is believed of them.
///
/// # Errors
/// If the proxy cannot be asked, or standard output is closed.
pub async fn status(args: &StatusArgs, out: &mut impl Write) -> Result<()> {
    let admin = args.admin.target().await?;
    let Some(seconds) = args.watch else {
        let table = status::table(&get(&admin, "/fleet").await?)?;
        return out.write_all(table.as_bytes()).context("standard output");
    };
    let pause = Duration::try_from_secs_f64(seconds).ok().filter(|pause| !pause.is_zero());
    let pause =
        pause.with_context(|| format!("--watch {seconds}: must be a number of seconds above zero"))?;
    let stdout = io::stdout();
    let is_screen = stdout.is_terminal();
    loop {
        // A proxy that restarts is to be seen coming back.
        let shown = match get(&admin, "/fleet").await.and_then(|fleet| status::table(&fleet)) {
            Ok(table) => table,
            Err(error) => format!("{error:#}\n"),
        };
        // Asked each time: windows change their size.
        let lines = rustix::termios::tcgetwinsize(&stdout).map_or(0, |size| size.ws_row);
        let shown = if is_screen { redrawn(&shown, usize::from(lines)) } else { shown };
        out.write_all(shown.as_bytes()).and_then(|()| out.flush()).context("standard output")?;
        sleep(pause).await;
    }
}

/// Over what was shown before, without a flicker: from the top, each line cleared to its end, and all below. What a screen of so many
/// `lines` has no room for is counted; 0 if that is not known.
fn redrawn(text: &str, lines: usize) -> String {
    let all = text.lines().count();
    let text = match lines.checked_sub(2) {
        Some(room @ 1..) if all > room + 1 => {
            let shown: Vec<&str> = text.lines().take(room).collect();
            format!(
                "{}\n{} more lines: make the window taller, or see them without --watch\n",
                shown.join("\n"),
                all - room
            )
        }
        _ => text.to_owned(),
    };
    format!("\x1b[H{}\x1b[J", text.replace('\n', "\x1b[K\n"))
}

/// Tells the mode, or switches it.
///
/// # Errors
/// If the proxy cannot be asked, or refuses.
pub async fn mode(args: &ModeArgs, out: &mut impl Write) -> Result<()> {
    let admin = args.admin.target().await?;
    let answer = match args.mode {
        None => get(&admin, "/mode").await?,
        Some(name) => read(&admin, "PUT /mode", admin.put("/mode", name.mode().as_str()).await?)?,
    };
    let mode = answer["mode"].as_str().with_context(|| not_ours(&admin))?;
    writeln!(out, "{mode}").context("standard output")
}

/// Drains a worker, or undoes it.
///
/// # Errors
/// If the proxy cannot be asked, or has no such worker.
pub async fn workers(args: &WorkersArgs, out: &mut impl Write) -> Result<()> {
    let (named, verb) = match &args.command {
        WorkersCommand::Drain { worker, .. } => (worker, "drain"),
        WorkersCommand::Resume(worker) => (worker, "resume"),
    };
    let admin = named.admin.target().await?;
    let path = format!("/workers/{}/{verb}", encoded(&named.name));
    let told = read(&admin, &format!("POST {path}"), admin.post(&path, &Value::Null).await?)?;
    let number = |key: &str| told[key].as_u64().with_context(|| not_ours(&admin));
    let (in_flight, usable) = (number("in_flight")?, counted(number("usable")?, "usable worker"));
    let name = &named.name;
    match &args.command {
        WorkersCommand::Resume(_) => writeln!(out, "{name} is given requests again; {usable}")?,
        WorkersCommand::Drain { wait, .. } => {
            writeln!(out, "{name} drains: {} there; {usable}", counted(in_flight, "request"))?;
            if *wait && in_flight > 0 {
                drained(&admin, name).await?;
                writeln!(out, "{name} is drained")?;
            }
        }
    }
    Ok(())
}

/// Waits until the worker has no requests.
async fn drained(admin: &Target, name: &str) -> Result<()> {
    loop {
        let fleet = get(admin, "/fleet").await?;
        let workers = fleet["workers"].as_array().with_context(|| not_ours(admin))?;
        let Some(worker) = workers.iter().find(|worker| worker["name"] == name || worker["url"] == name)
        else {
            bail!("{name} has left the fleet");
        };
        if worker["state"] != "draining" {
            bail!("{name} was resumed by somebody else");
        }
        if worker["in_flight"] == 0 {
            return Ok(());
        }
        sleep(LOOK_AGAIN).await;
    }
}

/// `1 worker`, `2 workers`.
fn counted(count: u64, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

async fn get(admin: &Target, path: &str) -> Result<Value> {
    read(admin, &format!("GET {path}"), admin.get(path).await?)
}

/// The object in an answer, or what was refused and why.
fn read(admin: &Target, asked: &str, (status, text): (http::StatusCode, String)) -> Result<Value> {
    if !status.is_success() {
        bail!("{asked} at {admin}: status {status}: {}", text.trim());
    }
    serde_json::from_str(&text).with_context(|| not_ours(admin))
}

fn not_ours(admin: &Target) -> String {
    format!(
        "{admin} does not answer like a warmroute's admin listener: --admin wants the address under `admin` in its config"
    )
}

#[cfg(test)]
mod tests {
    use super::redrawn;

    #[test]
    fn what_is_watched_stays_within_the_screen() {
        let shown = |lines| redrawn("1\n2\n3\n4\n5\n", lines).replace("\x1b[K", "");
        for fits in [0, 1, 2, 6, 50] {
            assert_eq!(shown(fits), "\x1b[H1\n2\n3\n4\n5\n\x1b[J", "{fits} lines");
        }
        // The cursor stands below the last line.
        assert!(shown(5).starts_with("\x1b[H1\n2\n3\n2 more lines"), "{:?}", shown(5));
        assert_eq!(shown(5).matches('\n').count(), 4);
    }
}
