//! Follows the config file while the process runs. The contents are compared, not times or names, so that an edit in place,
//! a rename and a ConfigMap's swap of symbolic links are all seen, and a touch is not.

use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::Notify;

use super::{Config, ConfigError};

/// How often the file is looked at. Kubernetes takes about a minute to bring a ConfigMap into a pod.
const INTERVAL: Duration = Duration::from_secs(1);

/// A config file and what was in it when it was last looked at.
pub struct Source {
    path: PathBuf,
    text: String,
}

impl Source {
    /// Reads and checks the file.
    ///
    /// # Errors
    /// As [`Config::load`].
    pub fn load(path: PathBuf) -> Result<(Config, Source), ConfigError> {
        let text = Config::read(&path)?;
        let config = Config::parse(&text, &path)?;
        Ok((config, Source { path, text }))
    }
}

/// Waits for edits, and hands on each as the new config or as what is wrong with it. `look_now` has the file looked at at
/// once, and its contents handed on even if they are the same.
pub async fn watch(source: Source, look_now: &Notify, mut changed: impl FnMut(Result<Config, ConfigError>)) {
    let Source { path, text } = source;
    let mut known = Ok(text);
    loop {
        let asked = tokio::time::timeout(INTERVAL, look_now.notified()).await.is_ok();
        let text = read(path.clone()).await;
        if text == known && !asked {
            continue;
        }
        changed(match &text {
            Ok(text) => Config::parse(text, &path),
            Err(message) => Err(ConfigError {
                file: path.clone(),
                line: None,
                message: format!("cannot be read: {message}"),
            }),
        });
        known = text;
    }
}

async fn read(path: PathBuf) -> Result<String, String> {
    tokio::fs::read_to_string(path).await.map_err(|error| error.to_string())
}
