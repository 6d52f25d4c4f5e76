//! Holds the house together: imports go down a floor or stay on it, the pure floor stays pure, every file says what it is
//! for and stays readable. The floors are read from the table in `src/lib.rs`, so that table cannot go stale.
//!
//! Each rule is a function from a file's path and text to what is wrong in it, and is shown an offender below.

#![expect(clippy::unwrap_used, reason = "a test that cannot read the sources should fail on the spot")]

use std::fs;
use std::path::{Path, PathBuf};

/// Lines that a file may have, its tests included. Aim for 500; what grows past this is cut by noun.
const MOST_LINES: usize = 600;

/// Modules that know neither sockets, files, clocks nor randomness of their own.
const PURE: [&str; 2] = ["core", "engine::model"];

/// What no pure module may name outside its tests.
const IMPURE: [&str; 18] = [
    "tokio",
    "hyper",
    "hyper_util",
    "prometheus",
    "std::fs",
    "std::net",
    "std::env",
    "std::process",
    "std::thread::spawn",
    "std::thread::sleep",
    "Instant::now",
    "std::time::Instant::now",
    "SystemTime",
    "std::time::SystemTime",
    "rand::rng",
    "rand::random",
    "thread_rng",
    "rand::thread_rng",
];

// === The rules, each over every file ===

#[test]
fn imports_go_down() {
    let floors = Floors::of_this_crate();
    hold(|path, text| imports_up(&floors, path, text));
}

#[test]
fn the_pure_floor_is_pure() {
    hold(impurities);
}

#[test]
fn every_file_says_what_it_is_for() {
    hold(missing_module_doc);
}

#[test]
fn no_file_is_too_long() {
    hold(too_long);
}

#[test]
fn every_top_level_module_has_a_floor() {
    let floors = Floors::of_this_crate();
    hold(|path, _| unknown_module(&floors, path));
}

/// Runs one rule over all of `src`, and fails with everything it found.
fn hold(rule: impl Fn(&str, &str) -> Vec<String>) {
    let files = sources();
    assert!(files.len() > 5, "found only {} files under src: looking in the wrong place?", files.len());
    let found: Vec<String> = files
        .iter()
        .flat_map(|(path, text)| rule(path, text).into_iter().map(move |what| format!("src/{path}: {what}")))
        .collect();
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

/// Path below `src` (with `/`) and text of every source file.
fn sources() -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut folders: Vec<PathBuf> = vec![root.clone()];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|ext| ext == "rs") {
                let below = path.strip_prefix(&root).unwrap().to_str().unwrap().replace('\\', "/");
                files.push((below, fs::read_to_string(&path).unwrap()));
            }
        }
    }
    files.sort();
    files
}

// === The rules ===

fn imports_up(floors: &Floors, path: &str, text: &str) -> Vec<String> {
    let here = module_of(path);
    let Some(mine) = here.first().and_then(|_| floors.of(&here.join("::"))) else {
        return Vec::new(); // lib.rs and main.rs stand above all; unknown modules are another rule's business
    };
    let mut found = Vec::new();
    for (line, target) in crate_paths(&here, text) {
        match floors.of(&target) {
            Some(theirs) if theirs > mine => {
                found.push(format!(
                    "line {line}: floor {mine} imports crate::{target}, which is on floor {theirs}"
                ));
            }
            _ => {}
        }
    }
    found
}

fn impurities(path: &str, text: &str) -> Vec<String> {
    let here = module_of(path).join("::");
    if !PURE.iter().any(|pure| within(&here, pure)) || here.ends_with("::tests") {
        return Vec::new();
    }
    let mut found = Vec::new();
    for (line, name) in all_paths(&product_tokens(text)) {
        if IMPURE.iter().any(|impure| within(&name, impure)) {
            found.push(format!("line {line}: {name} in a pure module; pass what is needed as an argument"));
        }
    }
    found
}

fn missing_module_doc(_path: &str, text: &str) -> Vec<String> {
    let opening = text.lines().find(|line| !line.trim().is_empty()).unwrap_or("");
    let says = opening.trim_start().strip_prefix("//!").is_some_and(|doc| !doc.trim().is_empty());
    if says {
        Vec::new()
    } else {
        vec!["does not open with a `//!` line that says what it is for".to_owned()]
    }
}

fn too_long(_path: &str, text: &str) -> Vec<String> {
    let lines = text.lines().count();
    if lines <= MOST_LINES {
        return Vec::new();
    }
    vec![format!("{lines} lines; {MOST_LINES} is the limit, cut it by noun")]
}

fn unknown_module(floors: &Floors, path: &str) -> Vec<String> {
    let here = module_of(path);
    if here.is_empty() || floors.of(&here.join("::")).is_some() {
        return Vec::new();
    }
    vec![format!("`{}` has no floor in the table of src/lib.rs", here.join("::"))]
}

// === Floors ===

/// Module paths and their floors, as the table in `src/lib.rs` has them.
struct Floors(Vec<(String, u8)>);

impl Floors {
    fn of_this_crate() -> Floors {
        Floors::parse(&fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).unwrap())
    }

    /// Rows are `//! | floor | [`module`], ... | what it is for |`.
    fn parse(lib: &str) -> Floors {
        let mut rows = Vec::new();
        for line in lib.lines().filter_map(|line| line.strip_prefix("//! |")) {
            let mut cells = line.split('|').map(str::trim);
            let (Some(Ok(floor)), Some(modules)) = (cells.next().map(str::parse), cells.next()) else {
                continue;
            };
            for module in modules.split(',').map(|name| name.trim().trim_matches(['[', ']', '`'])) {
                rows.push((module.to_owned(), floor));
            }
        }
        assert!(rows.len() > 5, "the table of floors in src/lib.rs could not be read");
        Floors(rows)
    }

    /// The floor of a module path: the row that names it or a module around it, else (a folder whose parts stand on several
    /// floors) the highest row below it.
    fn of(&self, module: &str) -> Option<u8> {
        let around = self.0.iter().filter(|(row, _)| within(module, row)).max_by_key(|(row, _)| row.len());
        let top = module.split("::").next().unwrap_or(module);
        let below = || self.0.iter().filter(|(row, _)| within(row, top)).map(|(_, floor)| *floor).max();
        around.map(|(_, floor)| *floor).or_else(below)
    }
}

/// Whether `path` is `module` or something in it.
fn within(path: &str, module: &str) -> bool {
    path.strip_prefix(module).is_some_and(|rest| rest.is_empty() || rest.starts_with("::"))
}

/// `core/prompt/mod.rs` is `["core", "prompt"]`; the crate's roots are `[]`.
fn module_of(path: &str) -> Vec<String> {
    if path == "lib.rs" || path == "main.rs" {
        return Vec::new();
    }
    let path = path.strip_suffix(".rs").unwrap_or(path);
    path.strip_suffix("/mod").unwrap_or(path).split('/').map(str::to_owned).collect()
}

// === Reading paths out of source text ===

type Token<'a> = (usize, &'a str);

/// Every path that leads to the crate's root, by `crate::` or by enough `super::`s, without that beginning.
fn crate_paths(here: &[String], text: &str) -> Vec<(usize, String)> {
    let tokens = tokens(text);
    let mut found = Vec::new();
    let mut inline = Vec::new(); // brace depths at which inline modules opened
    let mut depth = 0;
    for at in 0..tokens.len() {
        match tokens[at].1 {
            "{" => {
                depth += 1;
                if at >= 2 && tokens[at - 2].1 == "mod" {
                    inline.push(depth);
                }
            }
            "}" => {
                inline.pop_if(|opened| *opened == depth);
                depth -= 1;
            }
            "crate" if is(&tokens, at + 1, "::") => expand(&tokens, at + 2, "", &mut found),
            "super" if at == 0 || !is(&tokens, at - 1, "::") => {
                let ups = tokens[at..].chunks(2).take_while(|pair| pair[0].1 == "super").count();
                if ups >= here.len() + inline.len() {
                    expand(&tokens, at + 2 * ups, "", &mut found);
                }
            }
            _ => {}
        }
    }
    found
}

/// Every path in the text that does not hang on another one, with `{..}` groups spread out.
fn all_paths(tokens: &[Token]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for at in 0..tokens.len() {
        let starts = is_name(tokens[at].1) && (at == 0 || !is(tokens, at - 1, "::"));
        if starts {
            expand(tokens, at, "", &mut found);
        }
    }
    found
}

/// Appends the paths that begin with `before` and go on at `at`; answers where they end.
fn expand(tokens: &[Token], mut at: usize, before: &str, found: &mut Vec<(usize, String)>) {
    let mut path = before.to_owned();
    let line = tokens.get(at).map_or(0, |token| token.0);
    while let Some((_, name)) = tokens.get(at).filter(|token| is_name(token.1)) {
        path = if path.is_empty() { (*name).to_owned() } else { format!("{path}::{name}") };
        at += 1;
        if !is(tokens, at, "::") {
            break;
        }
        at += 1;
    }
    if !is(tokens, at, "{") || !is(tokens, at.wrapping_sub(1), "::") {
        return found.push((line, path));
    }
    let mut depth = 0;
    for inner in at..tokens.len() {
        match tokens[inner].1 {
            "{" => depth += 1,
            "}" => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            break;
        }
        if depth == 1 && (inner == at || is(tokens, inner, ",")) && !is(tokens, inner + 1, "}") {
            expand(tokens, inner + 1, &path, found);
        }
    }
}

fn is(tokens: &[Token], at: usize, text: &str) -> bool {
    tokens.get(at).is_some_and(|token| token.1 == text)
}

fn is_name(text: &str) -> bool {
    text.starts_with(|first: char| first.is_alphabetic() || first == '_')
}

/// The tokens without those of `#[cfg(test)]` modules.
fn product_tokens(text: &str) -> Vec<Token<'_>> {
    let all = tokens(text);
    let test = ["#", "[", "cfg", "(", "test", ")", "]"];
    let mut kept = Vec::new();
    let mut at = 0;
    while at < all.len() {
        let marked = all[at..].iter().map(|token| token.1).take(test.len()).eq(test);
        if !marked || !is(&all, at + 7, "mod") {
            kept.push(all[at]);
            at += 1;
            continue;
        }
        let mut depth = 0;
        while at < all.len() {
            depth += i32::from(all[at].1 == "{") - i32::from(all[at].1 == "}");
            let over = depth == 0 && matches!(all[at].1, "}" | ";");
            at += 1;
            if over {
                break;
            }
        }
    }
    kept
}

/// Names, numbers, `::` and single signs, each with its line; comments and strings are left out.
fn tokens(text: &str) -> Vec<Token<'_>> {
    let mut found = Vec::new();
    let (mut at, mut line) = (0, 1);
    while let Some(first) = text[at..].chars().next() {
        let rest = &text[at..];
        let length = match first {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => rest.find("*/").map_or(rest.len(), |end| end + 2),
            '"' => quoted(rest),
            'r' if raw_hashes(rest).is_some() => raw(rest),
            '\'' => character(rest),
            ':' if rest.starts_with("::") => {
                found.push((line, "::"));
                2
            }
            _ if first.is_alphanumeric() || first == '_' => {
                let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
                found.push((line, &rest[..end]));
                end
            }
            _ => {
                if !first.is_whitespace() {
                    found.push((line, &rest[..first.len_utf8()]));
                }
                first.len_utf8()
            }
        };
        line += rest[..length].matches('\n').count();
        at += length;
    }
    found
}

fn quoted(rest: &str) -> usize {
    let mut escaped = false;
    for (at, c) in rest.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at + 1,
            _ => {}
        }
    }
    rest.len()
}

/// The number of `#` if a raw string opens here (`r"`, `r#"`; a raw name such as `r#type` is none).
fn raw_hashes(rest: &str) -> Option<usize> {
    let after = rest[1..].trim_start_matches('#');
    after.starts_with('"').then_some(rest.len() - 1 - after.len())
}

fn raw(rest: &str) -> usize {
    let hashes = raw_hashes(rest).unwrap_or(0);
    let close = format!("\"{}", "#".repeat(hashes));
    let open = hashes + 2;
    rest[open..].find(&close).map_or(rest.len(), |end| open + end + close.len())
}

/// A character literal whole; of a lifetime only its `'`.
fn character(rest: &str) -> usize {
    let mut inside = rest[1..].char_indices();
    match (inside.next(), inside.next()) {
        (Some((_, '\\')), Some((escaped, c))) => {
            let from = 1 + escaped + c.len_utf8();
            rest[from..].find('\'').map_or(rest.len(), |end| from + end + 1)
        }
        (Some(_), Some((end, '\''))) => end + 2,
        _ => 1,
    }
}

// === Each rule catches its offender ===

fn floors() -> Floors {
    Floors::parse(
        "//! | floor | modules | what |\n//! | --- | --- | --- |\n//! | 6 | [`cli`], [`app`] | a |\n//! | 3 | [`proxy`], \
         [`engine::http`] | b |\n//! | 1 | [`config`] | c |\n//! | 0 | [`core`], [`engine::model`] | d |\n",
    )
}

#[test]
fn floors_are_read_from_the_table() {
    let floors = floors();
    assert_eq!(floors.of("app::wiring"), Some(6));
    assert_eq!(floors.of("engine::http::server"), Some(3));
    assert_eq!(floors.of("engine::model"), Some(0));
    assert_eq!(floors.of("engine"), Some(3), "the folder stands as high as its highest part");
    assert_eq!(floors.of("corex"), None);
    assert_eq!(Floors::of_this_crate().of("core::prompt"), Some(0));
}

#[test]
fn an_import_up_is_caught_however_it_is_written() {
    let floors = floors();
    let up = |path, text| imports_up(&floors, path, text).len();
    assert_eq!(up("core/cache.rs", "use crate::proxy::Route;"), 1);
    assert_eq!(up("core/cache.rs", "use crate::{core::ids::Time, proxy::{Route, route::X}};"), 2);
    assert_eq!(up("core/cache.rs", "fn f() { crate::config::load(); }"), 1);
    assert_eq!(up("core/cache.rs", "use super::super::app::App;"), 1);
    assert_eq!(up("core/cache.rs", "mod tests { use super::super::super::app::App; }"), 1);
    assert_eq!(up("engine/model/pool.rs", "use crate::engine::http::serve;"), 1);
    assert_eq!(up("config/mod.rs", "fn f() -> Vec<crate::app::Bound> {}"), 1);
}

#[test]
fn an_import_down_or_beside_is_not_caught() {
    let floors = floors();
    let up = |path, text| imports_up(&floors, path, text);
    let none: [String; 0] = [];
    assert_eq!(
        up("proxy/route.rs", "use crate::{core::ids::Time, config::Config}; use crate::proxy::body;"),
        none
    );
    assert_eq!(up("engine/http/mod.rs", "use crate::engine::model::Pool; use crate::proxy::X;"), none);
    assert_eq!(up("core/cache.rs", "mod tests { use super::super::ids::Time; } pub(crate) fn f() {}"), none);
    assert_eq!(
        up(
            "core/cache.rs",
            "// crate::app::x\nconst S: &str = \"crate::app\"; const R: &str = r#\"crate::app\"#;"
        ),
        none
    );
    assert_eq!(up("lib.rs", "pub use crate::app::Bound;"), none);
}

#[test]
fn an_impure_name_is_caught_in_pure_modules_only() {
    let found = |path, text| impurities(path, text).len();
    assert_eq!(found("core/cache.rs", "use tokio::sync::Mutex;"), 1);
    assert_eq!(found("core/cache.rs", "use std::{collections::HashMap, fs, net::{IpAddr, TcpStream}};"), 3);
    assert_eq!(
        found("engine/model/pool.rs", "let t = Instant::now(); let u = std::time::Instant::now();"),
        2
    );
    assert_eq!(found("core/prompt/mod.rs", "use std::time::SystemTime; let r = rand::rng();"), 2);
    assert_eq!(found("core/prompt/mod.rs", "use hyper::Request; fn f<'a>(x: &'a str) { thread_rng() }"), 2);
    assert_eq!(
        found("core/cache.rs", "#[cfg(test)]\nmod tests { use std::fs; } fn f() { std::fs::read(x) }"),
        1
    );
    assert_eq!(
        found("core/cache.rs", "use rand::Rng; let f = self.tokio; // tokio::spawn\n"),
        1,
        "a bare name counts"
    );
    assert_eq!(found("engine/http/mod.rs", "use tokio::net::TcpListener;"), 0);
    assert_eq!(found("proxy/mod.rs", "use tokio::net::TcpListener;"), 0);
}

#[test]
fn a_file_without_a_purpose_is_caught() {
    assert_eq!(missing_module_doc("a.rs", "use std::fs;\n//! late").len(), 1);
    assert_eq!(missing_module_doc("a.rs", "//!\nfn f() {}").len(), 1);
    assert_eq!(missing_module_doc("a.rs", "").len(), 1);
    assert!(missing_module_doc("a.rs", "\n//! What it is for.\n").is_empty());
}

#[test]
fn a_long_file_is_caught() {
    assert!(too_long("a.rs", &"x\n".repeat(MOST_LINES)).is_empty());
    assert_eq!(too_long("a.rs", &"x\n".repeat(MOST_LINES + 1)).len(), 1);
}

#[test]
fn a_module_without_a_floor_is_caught() {
    assert_eq!(unknown_module(&floors(), "helpers/mod.rs").len(), 1);
    assert_eq!(unknown_module(&floors(), "helpers.rs").len(), 1);
    for known in ["lib.rs", "main.rs", "cli.rs", "engine/mod.rs", "core/prompt/scan.rs"] {
        assert!(unknown_module(&floors(), known).is_empty(), "{known}");
    }
}
