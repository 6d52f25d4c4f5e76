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
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header([
        "worker",
        "price ms",
        "cached",
        "assumed",
        "uncached",
        "popular",
        "queue",
        "pushed",
        "pushed once",
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
            one.price_s.map_or("–".to_owned(), |seconds| format!("{:.1}", seconds * 1e3)),
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
    text.push_str(&format!("\n{}\n", table.trim_fmt()));
    Ok(text)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn each_worker_has_a_line_with_its_terms() {
        let price = |worker: &str, price_s: Option<f64>| {
            json!({"worker": worker, "price_s": price_s, "cached_tokens": 1854.4, "assumed_tokens": 1.0, "uncached_tokens": 50.0,
                   "popular_tokens": 2.0, "queue_tokens": 3.0, "pushed_tokens": 4.0, "pushed_once_tokens": 5.0,
                   "recent_tokens": 6.0, "memory_s": 0.25, "prefill_tokens_per_s": 25360.0, "open": 7})
        };
        let answer = json!({"mode": "kv", "prompt_tokens": 1903, "blocks": 29, "worker": "a:1", "reason": "warm",
            "predicted_cached_tokens": 1854, "runner_up": "b:1", "workers": [price("a:1", Some(0.002)), price("b:1", None)]});
        let text = in_words(&answer).unwrap();
        assert!(text.starts_with("to a:1, by mode kv: warm; 1854 of about 1903 prompt tokens"), "{text}");
        assert!(text.contains("\nnext would be b:1\n\n"), "{text}");
        let cells = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let rows: Vec<_> = text.lines().skip(4).map(cells).collect();
        let terms = |name: &str, price: &str| {
            let terms = ["1854", "1", "50", "2", "3", "4", "5", "6", "250.0", "25360", "7"];
            [name, price].into_iter().chain(terms).map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(rows, [terms("a:1", "2.0"), terms("b:1", "–")], "{text}");
    }
}
