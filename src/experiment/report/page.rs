//! A report to keep or to send: one Markdown text, or one HTML page with charts that needs nothing from elsewhere.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use maud::{DOCTYPE, Markup, PreEscaped, html};
use serde::Serialize;

use super::charts::{Mark, Paint};
use super::figures::{self, Charts};
use super::{Point, notes, points_table, sheet, table};
use crate::experiment::compare::{Versus, versus_sheet};

/// Everything that a report shows.
#[derive(Debug)]
pub struct Page<'a> {
    pub title: String,
    /// What was measured and how, as pairs of a word and its value.
    pub facts: Vec<(&'static str, String)>,
    pub points: &'a [Point],
    /// The first target against each of the others.
    pub versus: Vec<Versus>,
    /// Prompts of this experiment that the cache of one worker holds, if known: what the formula needs.
    pub prefixes_a_worker: Option<f64>,
}

/// The forms of a report, by the ending of the file's name.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
enum Form {
    Html,
    Markdown,
    Json,
}

fn form(path: &Path) -> Result<Form> {
    match path.extension().and_then(|ending| ending.to_str()) {
        Some("html") => Ok(Form::Html),
        Some("md") => Ok(Form::Markdown),
        Some("json") => Ok(Form::Json),
        _ => bail!("--report {}: the name must end in .html, .md or .json", path.display()),
    }
}

/// Refuses names that [`write()`] would refuse, before anything is measured.
///
/// # Errors
/// If the name does not tell the form, or its folder does not exist.
pub fn check(paths: &[PathBuf]) -> Result<()> {
    for path in paths {
        form(path)?;
        let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
        if folder.is_some_and(|folder| !folder.is_dir()) {
            bail!("--report {}: there is no such folder", path.display());
        }
    }
    Ok(())
}

/// Writes the report to each of `paths`; `raw` is what the JSON form has.
///
/// # Errors
/// If a file cannot be written.
pub fn write(paths: &[PathBuf], page: &Page<'_>, raw: &impl Serialize) -> Result<()> {
    for path in paths {
        let text = match form(path)? {
            Form::Html => page.html()?,
            Form::Markdown => page.markdown(),
            Form::Json => serde_json::to_string_pretty(raw)?,
        };
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

impl Page<'_> {
    /// The tables and notes for a terminal.
    pub fn text(&self) -> String {
        let mut text = format!("{}\n", points_table(self.points));
        if !self.versus.is_empty() {
            let (header, rows) = versus_sheet(&self.versus);
            text.push_str(&format!("{}\n", table(header, rows)));
        }
        for note in notes(self.points) {
            text.push_str(&format!("note: {note}\n"));
        }
        text
    }

    /// The report as Markdown.
    pub fn markdown(&self) -> String {
        let mut text = format!("# {}\n\n", self.title);
        for (word, value) in &self.facts {
            text.push_str(&format!("- {word}: {value}\n"));
        }
        let (header, rows) = sheet(self.points);
        let header: Vec<String> = header.iter().map(|title| title.replace('\n', " ")).collect();
        text.push_str(&format!("\n| {} |\n|{}\n", header.join(" | "), " ---: |".repeat(header.len())));
        for row in rows {
            text.push_str(&format!("| {} |\n", row.join(" | ")));
        }
        if !self.versus.is_empty() {
            let (header, rows) = versus_sheet(&self.versus);
            text.push_str(&format!("\n| {} |\n|{}\n", header.join(" | "), " ---: |".repeat(header.len())));
            for row in rows {
                text.push_str(&format!("| {} |\n", row.join(" | ")));
            }
        }
        for note in notes(self.points) {
            text.push_str(&format!("\nNote: {note}\n"));
        }
        text
    }

    /// The report as one HTML page.
    ///
    /// # Errors
    /// If a chart cannot be drawn.
    pub fn html(&self) -> Result<String> {
        let Charts { lines, bars } = figures::charts(self.points, self.prefixes_a_worker);
        let mut drawn = Vec::new();
        for chart in &lines {
            drawn.push(figure(&chart.title, &chart.legend(), &chart.svg()?));
        }
        for chart in &bars {
            drawn.push(figure(&chart.title, &chart.legend(), &chart.svg()?));
        }
        let (header, rows) = sheet(self.points);
        let (versus_header, versus_rows) = versus_sheet(&self.versus);
        let page = html! {
            (DOCTYPE)
            html lang="en" {
                head {
                    meta charset="utf-8";
                    meta name="viewport" content="width=device-width, initial-scale=1";
                    title { (self.title) }
                    style { (PreEscaped(STYLE)) }
                }
                body {
                    h1 { (self.title) }
                    dl {
                        @for (word, value) in &self.facts {
                            div { dt { (word) } dd { (value) } }
                        }
                    }
                    div.charts { @for chart in &drawn { (chart) } }
                    h2 { "All figures" }
                    (html_table(&header, &rows))
                    @if !self.versus.is_empty() {
                        h2 { "Target against target" }
                        (html_table(&versus_header, &versus_rows))
                    }
                    @for note in notes(self.points) {
                        p.note { "Note: " (note) }
                    }
                }
            }
        };
        Ok(page.into_string())
    }
}

fn html_table(header: &[&str], rows: &[impl AsRef<[String]>]) -> Markup {
    html! {
        div.wide {
            table {
                thead { tr { @for title in header { th { (title.replace('\n', " ")) } } } }
                tbody {
                    @for row in rows {
                        tr { @for cell in row.as_ref() { td { (cell) } } }
                    }
                }
            }
        }
    }
}

fn figure(title: &str, legend: &[(&str, Paint, Mark)], svg: &str) -> Markup {
    html! {
        figure {
            figcaption {
                strong { (title) }
                ul {
                    @for (name, paint, mark) in legend {
                        li {
                            i class=(class(*mark)) style=(format!("color:var({})", paint.variable())) {}
                            (name)
                        }
                    }
                }
            }
            (PreEscaped(svg))
        }
    }
}

fn class(mark: Mark) -> &'static str {
    match mark {
        Mark::Solid => "solid",
        Mark::Dashed => "dashed",
        Mark::Thin => "thin",
        Mark::Rings => "rings",
    }
}

const STYLE: &str = "
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#57606a;--page:#ffffff;--card:#f6f8fa;--grid:#d8dee4;
--reference:#8c959f;--series-0:#bc4c00;--series-1:#0969da;--series-2:#1a7f37;--series-3:#8250df;--series-4:#bf3989;--series-5:#9a6700}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9198a1;--page:#0d1117;--card:#161b22;--grid:#30363d;
--reference:#7d8590;--series-0:#f0883e;--series-1:#58a6ff;--series-2:#3fb950;--series-3:#bc8cff;--series-4:#f778ba;--series-5:#d29922}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem;max-width:76rem;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem;margin:0 0 1rem}h2{font-size:1.15rem;margin:2rem 0 .75rem}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,15rem),1fr));gap:.5rem 1.5rem;margin:0 0 1.5rem}
dt{color:var(--soft);font-size:.8rem}dd{margin:0;overflow-wrap:anywhere}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,27rem),1fr));gap:1rem}
figure{margin:0;padding:1rem;background:var(--card);border:1px solid var(--grid);border-radius:8px;min-width:0}
figure svg{display:block;width:100%;height:auto;margin-top:.5rem}
figcaption ul{display:flex;flex-wrap:wrap;gap:.15rem .9rem;list-style:none;margin:.25rem 0 0;padding:0;font-size:.8rem;color:var(--soft)}
figcaption li{display:flex;align-items:center;gap:.35rem}
i{display:inline-block;width:1.2rem;height:0;border-top:3px solid}i.dashed{border-top-style:dashed}i.thin{border-top-width:1px}
i.rings{width:.7rem;height:.7rem;border:2px solid;border-radius:50%}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums;white-space:nowrap}
th,td{padding:.3rem .6rem;text-align:right;border-bottom:1px solid var(--grid)}th{color:var(--soft);font-weight:600}
th:first-child,td:first-child{text-align:left}.note{color:var(--soft)}
";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiment::report::tests::figures as some_figures;

    fn points() -> Vec<Point> {
        let point = |mode: &str, prefixes, concurrency| {
            Point::of(mode, Some(6), prefixes, concurrency, vec![some_figures(0.5, 40.0, [3, 1])], true)
        };
        ["random", "<kv>"]
            .into_iter()
            .flat_map(|mode| [(2, 4), (2, 8), (24, 4), (24, 8)].map(|(p, c)| point(mode, p, c).unwrap()))
            .collect()
    }

    fn page(points: &[Point]) -> Page<'_> {
        Page {
            title: "A & B".into(),
            facts: vec![("seed", "1".into())],
            points,
            versus: Vec::new(),
            prefixes_a_worker: Some(3.95),
        }
    }

    #[test]
    fn a_page_is_whole_in_itself() {
        let html = page(&points()).html().unwrap();
        for outside in ["http:", "https:", "src=", "url(", "@import", "<script", "<link"] {
            let found = html.replace("http://www.w3.org/", "").contains(outside);
            assert!(!found, "the page fetches something: {outside}");
        }
        assert!(html.contains("A &amp; B") && html.contains("&lt;kv&gt;"), "what people name is escaped");
        assert!(html.contains("prefers-color-scheme:dark") && html.matches("<svg").count() >= 6);
        assert!(html.contains("Note: random, 2 prefixes, run 1: odd"));
    }

    #[test]
    fn markdown_has_a_row_a_point() {
        let text = page(&points()).markdown();
        let rows: Vec<&str> = text.lines().filter(|line| line.starts_with('|')).collect();
        assert_eq!(rows.len(), 2 + 8);
        let columns = |row: &str| row.matches('|').count();
        assert!(rows.iter().all(|row| columns(row) == columns(rows[0])), "{text}");
        assert!(text.starts_with("# A & B\n\n- seed: 1\n"), "{text}");
    }

    #[test]
    fn names_that_do_not_tell_the_form_are_refused_early() {
        let refused = |name: &str| format!("{:#}", check(&[PathBuf::from(name)]).unwrap_err());
        assert!(refused("out.pdf").contains(".html, .md or .json"));
        assert!(refused("no/such/folder/out.md").contains("no such folder"));
        assert!(check(&[PathBuf::from("out.html")]).is_ok());
    }
}
