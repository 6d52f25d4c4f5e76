//! Holds `docs/bug-cases.md` to the truth: every test that it names exists.

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
