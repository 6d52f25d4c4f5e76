//! Follows the config file while the process runs. The contents are compared, not times or names, so that an edit in place,
//! a rename and a ConfigMap's swap of symbolic links are all seen, and a touch is not. An edit counts once two looks in a row
//! have found the same: half of a file that is being written may well be valid YAML.

use std::path::PathBuf;
use std::time::Duration;

use tokio::sync::Notify;

use super::{Config, ConfigError};

/// How often a file is looked at. Kubernetes takes about a minute to bring a ConfigMap into a pod.
const INTERVAL: Duration = Duration::from_secs(1);
/// And how soon again if somebody waits for it.
const AGAIN: Duration = Duration::from_millis(100);

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

/// What a look at a file has found: its contents, or why it cannot be read.
type Found<T> = Result<T, String>;

/// Tells edits from what is only on its way to be one.
struct Edits<T> {
    known: Found<T>,
    /// Found by the last look, if it is to be confirmed by another one.
    pending: Option<Found<T>>,
    /// Somebody has asked for the contents, even if they are known.
    asked: bool,
}

impl<T: PartialEq> Edits<T> {
    fn from(known: Found<T>) -> Edits<T> {
        Edits { known, pending: None, asked: false }
    }

    /// Takes what a look has found; whether it is to be handed on.
    fn look(&mut self, found: Found<T>) -> bool {
        if !self.asked && found == self.known {
            self.pending = None;
            return false;
        }
        if self.pending.as_ref() != Some(&found) {
            self.pending = Some(found);
            return false;
        }
        self.known = found;
        self.pending = None;
        self.asked = false;
        true
    }
}

/// Waits for edits, and hands on each as the new config or as what is wrong with it. `look_now` has the file looked at at
/// once, and its contents handed on even if they are the same.
pub async fn watch(source: Source, look_now: &Notify, mut changed: impl FnMut(Result<Config, ConfigError>)) {
    let Source { path, text } = source;
    let mut edits = Edits::from(Ok(text));
    loop {
        let pause = if edits.asked { AGAIN } else { INTERVAL };
        edits.asked |= tokio::time::timeout(pause, look_now.notified()).await.is_ok();
        if !edits.look(read(path.clone()).await) {
            continue;
        }
        changed(match &edits.known {
            Ok(text) => Config::parse(text, &path),
            Err(message) => Err(ConfigError {
                file: path.clone(),
                line: None,
                message: format!("cannot be read: {message}"),
            }),
        });
    }
}

/// Follows files that the config names: hands on what `read` finds of them, for as long as it is polled, once it is another than
/// what is `known`, and the same for two looks.
pub async fn follow<T: Clone + PartialEq + Send + 'static>(
    known: T,
    read: impl Fn() -> Result<T, String> + Clone + Send + 'static,
    mut changed: impl FnMut(Result<T, String>),
) {
    let mut edits = Edits::from(Ok(known));
    loop {
        tokio::time::sleep(INTERVAL).await;
        let found = tokio::task::spawn_blocking(read.clone()).await;
        if edits.look(found.unwrap_or_else(|error| Err(error.to_string()))) {
            changed(edits.known.clone());
        }
    }
}

async fn read(path: PathBuf) -> Result<String, String> {
    tokio::fs::read_to_string(path).await.map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Found<String> {
        Ok(text.to_owned())
    }

    #[test]
    fn an_edit_counts_once_two_looks_agree() {
        let mut edits = Edits::from(text("old"));
        assert!(!edits.look(text("old")));
        assert!(!edits.look(text("half")));
        assert!(!edits.look(text("whole")));
        assert!(edits.look(text("whole")));
        assert!(!edits.look(text("whole")), "once");
        let gone = || Err("gone".to_owned());
        assert!(!edits.look(gone()));
        assert!(!edits.look(text("whole")), "it was only being renamed");
        assert!(!edits.look(gone()));
        assert!(edits.look(gone()));
    }

    #[test]
    fn what_is_asked_for_is_handed_on_even_if_it_is_known_but_not_by_halves() {
        let mut edits = Edits { asked: true, ..Edits::from(text("old")) };
        assert!(!edits.look(text("old")));
        assert!(edits.look(text("old")));
        edits.asked = true;
        assert!(!edits.look(text("half")));
        assert!(!edits.look(text("new")));
        assert!(edits.look(text("new")));
        assert!(!edits.asked && !edits.look(text("new")));
    }
}
