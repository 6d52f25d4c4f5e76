//! Any text as a config: it is refused with a reason or taken, and what was taken says the same when it is written out and read
//! again.
#![no_main]

use std::path::Path;

use libfuzzer_sys::fuzz_target;
use warmroute::config::Config;

fuzz_target!(|text: &str| {
    // Files that it names are read; some have no end.
    if ["/dev", "/proc", "/sys"].iter().any(|folder| text.contains(folder)) {
        return;
    }
    let file = Path::new("fuzzed.yaml");
    match Config::parse(text, file) {
        Err(error) => {
            assert!(!error.message.is_empty());
            assert!(error.line.is_none_or(|line| line <= text.len() + 1), "{error}");
        }
        Ok(config) => {
            let written = config.to_yaml();
            let again = Config::parse(&written, file).map(|config| config.to_yaml());
            assert_eq!(again.as_ref(), Ok(&written));
        }
    }
});
