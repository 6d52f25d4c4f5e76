//! Holds pages of `docs/` to the truth: every test that `bug-cases.md` names exists, and `operate.md` lists what there is.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn rust_files(folder: &Path, into: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).expect("a folder of the repository") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            rust_files(&path, into);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            into.push(path);
        }
    }
}

#[test]
fn every_test_that_is_named_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    rust_files(&root.join("src"), &mut files);
    rust_files(&root.join("tests"), &mut files);
    let code: String = files.iter().map(|file| fs::read_to_string(file).expect("text")).collect();
    let page = fs::read_to_string(root.join("docs/bug-cases.md")).expect("the page");
    let mut named = 0;
    for row in page.lines().filter(|line| line.starts_with("| B") || line.starts_with("| rollout")) {
        let tests = row.split('|').nth(3).expect("three columns");
        for test in tests.split('`').skip(1).step_by(2) {
            assert!(code.contains(&format!("fn {test}()")), "{test} is named and does not exist");
            named += 1;
        }
    }
    assert!(named > 50, "only {named} tests were found in the table");
}

fn text(of: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(of)).expect(of)
}

/// The first column of the table that begins with this head.
fn rows(page: &str, head: &str) -> BTreeSet<String> {
    let table = page.split(&format!("| {head} |")).nth(1).expect(head);
    let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
    rows.map(|row| row.split('`').nth(1).expect("a name").to_owned()).collect()
}

/// The fields of a struct.
fn fields(code: &str, name: &str) -> BTreeSet<String> {
    let body =
        code.split(&format!("struct {name} {{\n")).nth(1).expect(name).split("\n}").next().expect("its end");
    let declared = body.lines().map(str::trim).filter(|line| !line.starts_with(['/', '#']));
    let names = declared.filter_map(|line| line.split(':').next()?.split_whitespace().last());
    names.map(str::to_owned).collect()
}

#[test]
fn what_is_told_of_requests_is_listed() {
    let page = text("docs/operate.md");
    let (note, decisions) = (text("src/proxy/note.rs"), text("src/proxy/decisions.rs"));
    let (lines, told) = page.split_once("## Decisions").expect("a section");
    assert_eq!(rows(lines, "field | what it says"), fields(&note, "Known"));
    assert_eq!(rows(told, "field | what it says"), fields(&decisions, "Explanation"));
    assert_eq!(rows(told, "term | what it says"), fields(&decisions, "WorkerPrice"));

    // Each error is a line of these facts: whose fault, status, outcome, code, words.
    let errors = text("src/proxy/error.rs");
    let product = errors.split("#[cfg(test)]").next().expect("the code");
    let is_code = |word: &&str| {
        let letters = word.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
        letters && word.contains('_') && !word.ends_with("_error")
            || matches!(*word, "internal_error" | "overloaded")
    };
    let codes = product.split('"').skip(1).step_by(2).filter(is_code).map(str::to_owned);
    assert_eq!(rows(&page, "code | status | outcome | what has happened"), codes.collect());
}
