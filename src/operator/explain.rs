//! `warmroute explain FILE`: where a request would go, and what each worker's price is made of.

use std::io::{self, Read, Write};
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use serde::Deserialize;
use serde_json::Value;

use super::{Admin, ModeName, encoded, read};

#[derive(Debug, Args)]
pub struct ExplainArgs {
    /// A file with the body of a request, as a client would send it; - for standard input
    file: PathBuf,
    /// The endpoint that it would be sent to [default: the one whose shape it has]
    #[arg(long, value_name = "PATH")]
    path: Option<String>,
    /// By this mode [default: the one in force]
    #[arg(long)]
    mode: Option<ModeName>,
    /// Print what the proxy answers, as it is
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    admin: Admin,
}

#[derive(Deserialize)]
struct Explanation {
    mode: String,
    prompt_tokens: u64,
    blocks: usize,
    worker: String,
    reason: String,
    predicted_cached_tokens: u64,
    runner_up: Option<String>,
    workers: Vec<Price>,
}

#[derive(Deserialize)]
struct Price {
    worker: String,
    price_s: Option<f64>,
    cached_tokens: f64,
    assumed_tokens: f64,
    uncached_tokens: f64,
    popular_tokens: f64,
    queue_tokens: f64,
    pushed_tokens: f64,
    pushed_once_tokens: f64,
    recent_tokens: f64,
    memory_s: f64,
    prefill_tokens_per_s: f64,
    open: usize,
}

/// Asks the proxy and prints.
///
/// # Errors
/// If the file cannot be read, or the proxy cannot be asked or refuses.
pub async fn explain(args: &ExplainArgs, out: &mut impl Write) -> Result<()> {
    let mut body = Vec::new();
    if args.file.as_os_str() == "-" {
        io::stdin().read_to_end(&mut body).context("standard input")?;
    } else {
        body = std::fs::read(&args.file).with_context(|| args.file.display().to_string())?;
    }
    let admin = args.admin.target().await?;
    let path = args.path.iter().map(|path| format!("path={}", encoded(path)));
    let mode = args.mode.iter().map(|mode| format!("mode={}", mode.mode().as_str()));
    let query: Vec<String> = path.chain(mode).collect();
    let asked = format!("/explain?{}", query.join("&"));
    let answer = read(&admin, "POST /explain", admin.post_bytes(&asked, body.into()).await?)?;
    let shown = if args.json { format!("{answer:#}\n") } else { in_words(&answer)? };
    out.write_all(shown.as_bytes()).context("standard output")
}

fn in_words(answer: &Value) -> Result<String> {
    let told = Explanation::deserialize(answer)
        .context("what came from /explain is not of this version of warmroute")?;
    let Explanation { mode, prompt_tokens, blocks, worker, reason, predicted_cached_tokens, .. } = &told;
    let mut text = format!(
        "to {worker}, by mode {mode}: {reason}; {predicted_cached_tokens} of about {prompt_tokens} prompt tokens believed \
         cached there; {blocks} full blocks\n"
    );
    if let Some(next) = &told.runner_up {
        text.push_str(&format!("next would be {next}\n"));
    }
    let mut table = Table::new();
    table.load_style(presets::UTF8_HORIZONTAL_ONLY).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header([
        "worker",
        "price ms",
        "cached",
        "assumed",
        "uncached",
        "shared out",
        "queue",
        "pushes out",
        "used once",
        "recent",
        "memory ms",
        "tokens/s",
        "open",
    ]);
    table.column_iter_mut().skip(1).for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    for one in &told.workers {
        let whole = |value: f64| format!("{value:.0}");
        table.add_row([
            one.worker.clone(),
            one.price_s.map_or("-".to_owned(), |seconds| format!("{:.1}", seconds * 1e3)),
            whole(one.cached_tokens),
            whole(one.assumed_tokens),
            whole(one.uncached_tokens),
            whole(one.popular_tokens),
            whole(one.queue_tokens),
            whole(one.pushed_tokens),
            whole(one.pushed_once_tokens),
            whole(one.recent_tokens),
            format!("{:.1}", one.memory_s * 1e3),
            whole(one.prefill_tokens_per_s),
            one.open.to_string(),
        ]);
    }
    text.push_str(&format!("{table}\n"));
    Ok(text)
}
