//! Which targets are measured, as said on the command line: one, several under names, or one in both modes of a warmroute.

use std::time::Duration;

use anyhow::{Result, bail, ensure};
use clap::Args;
use serde::{Deserialize, Serialize};
use tokio::signal::unix::{SignalKind, signal};

use crate::experiment::counters::Workers;
use crate::experiment::prompts::Api;
use crate::experiment::subject::{ModeSwitch, Subject, Wish};
use crate::experiment::target::Target;

#[derive(Args, Clone, Debug)]
pub struct TargetArgs {
    /// What to measure: http://HOST:PORT of a proxy, a Service or an engine. Repeat as NAME=URL to compare several: they
    /// take turns. NAME=URL,URL,.. has several routers before one fleet, connected to in turns
    #[arg(long = "target", value_name = "[NAME=]URL", required = true)]
    pub targets: Vec<Named>,
    /// Engines behind the target, for their /metrics: one or more addresses. NAME= says behind which target
    #[arg(long, value_name = "[NAME=]URL", num_args = 1..)]
    pub metrics: Vec<Named>,
    /// Admin listener of the warmroute that the target is: its modes random and kv are compared, in turns
    #[arg(long, value_name = "URL")]
    pub admin: Option<String>,
    /// Model to ask for [default: the first that the target lists]
    #[arg(long)]
    pub model: Option<String>,
    /// Endpoint to use
    #[arg(long, value_enum, default_value_t = Api::Chat)]
    pub api: Api,
    /// Header for every request, as "NAME: VALUE"; may be repeated
    #[arg(long = "header", value_name = "LINE")]
    pub headers: Vec<String>,
    /// Keep connections instead of opening one for each request
    #[arg(long)]
    pub keep_alive: bool,
    /// Seconds after which a request counts as failed
    #[arg(long, default_value_t = 300, value_name = "S")]
    pub timeout: u64,
}

/// A URL that may carry a name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Named {
    pub name: Option<String>,
    pub url: String,
}

impl std::str::FromStr for Named {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Named, Self::Err> {
        Ok(match text.split_once('=') {
            // An `=` further on belongs to the URL.
            Some((name, url)) if !name.contains(['/', ':', '?']) => {
                Named { name: Some(name.to_owned()), url: url.to_owned() }
            }
            _ => Named { name: None, url: text.to_owned() },
        })
    }
}

/// One target of a report.
#[derive(Debug, Serialize, Deserialize)]
pub struct ReportedTarget {
    /// As in its points' `mode`.
    pub name: String,
    pub url: String,
    pub model: String,
    /// Tokens of a prompt that a cache can hold for its group; absent if the target has no `/tokenize`.
    #[serde(default)]
    pub shareable_tokens: Option<u32>,
}

impl ReportedTarget {
    pub fn of(subject: &Subject) -> ReportedTarget {
        ReportedTarget {
            name: subject.name.clone(),
            url: subject.target.to_string(),
            model: subject.template.model.clone(),
            shareable_tokens: None,
        }
    }
}

/// What is measured, in the order of its turns, and how to leave it as it was.
pub struct Subjects {
    pub list: Vec<Subject>,
    restore: Option<ModeSwitch>,
}

impl Subjects {
    /// Does the work, or breaks it off on SIGINT or SIGTERM, so that a warmroute can be switched back.
    ///
    /// # Errors
    /// The work's, or that it was interrupted.
    pub async fn unless_interrupted<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let mut terminate = signal(SignalKind::terminate())?;
        tokio::select! {
            done = work => done,
            _ = tokio::signal::ctrl_c() => bail!("interrupted"),
            _ = terminate.recv() => bail!("interrupted"),
        }
    }

    /// Switches a warmroute whose modes were compared back to the one it was in.
    ///
    /// # Errors
    /// If it refuses.
    pub async fn restore(&self) -> Result<()> {
        match &self.restore {
            Some(before) => before.enter().await,
            None => Ok(()),
        }
    }
}

impl TargetArgs {
    /// Refuses what cannot be meant.
    ///
    /// # Errors
    /// With the flag's name.
    pub fn check(&self) -> Result<()> {
        let names = self.names()?;
        ensure!(self.admin.is_none() || names.len() == 1, "--admin compares the modes of one --target");
        let several = self.targets.iter().any(|target| target.url.contains(','));
        ensure!(
            self.admin.is_none() || !several,
            "--admin switches one warmroute, and would leave the others of --target URL,URL as they are: compare modes before one"
        );
        for named in &self.metrics {
            if let Some(name) = named.name.as_ref().filter(|name| !names.contains(name)) {
                bail!("--metrics {name}={}: no --target is called `{name}`", named.url);
            }
        }
        Ok(())
    }

    /// The targets' names, all different.
    fn names(&self) -> Result<Vec<String>> {
        let mut names: Vec<String> = Vec::new();
        for target in &self.targets {
            let name = match &target.name {
                Some(name) => name.clone(),
                None if self.targets.len() == 1 => "target".to_owned(),
                None => bail!("--target {}: of several targets each needs a name, as NAME=URL", target.url),
            };
            ensure!(!names.contains(&name), "--target {name}=..: two targets are called `{name}`");
            names.push(name);
        }
        Ok(names)
    }

    /// How long a request may take.
    pub fn timeout(&self) -> Duration {
        Duration::from_secs(self.timeout)
    }

    /// Asks the targets what must be known of them.
    ///
    /// # Errors
    /// If one cannot be measured.
    pub async fn learn(&self, output_tokens: u32) -> Result<Subjects> {
        let wish = Wish { api: self.api, model: self.model.clone(), output_tokens, timeout: self.timeout() };
        let mut list = Vec::new();
        for (name, named) in self.names()?.iter().zip(&self.targets) {
            let mut target = Target::resolve(&named.url).await?;
            for line in &self.headers {
                target = target.with_header(line)?;
            }
            let behind = self.metrics.iter().filter(|page| page.name.as_ref().is_none_or(|of| of == name));
            let urls: Vec<String> = behind.map(|page| page.url.clone()).collect();
            let workers = Workers::resolve(&urls).await?;
            list.push(Subject::learn(name, target, workers, &wish).await?);
        }
        let Some(admin) = &self.admin else { return Ok(Subjects { list, restore: None }) };
        let before = ModeSwitch::now(Target::resolve(admin).await?).await?;
        let in_mode = |mode: &str| Subject {
            name: mode.to_owned(),
            mode: Some(ModeSwitch { mode: mode.to_owned(), ..before.clone() }),
            admin: Some(before.admin.clone()),
            ..list[0].clone()
        };
        let list = ["random", "kv"].map(in_mode).into();
        Ok(Subjects { list, restore: Some(before) })
    }
}

/// URLs with their names, for a journal's settings.
pub fn shown(named: &[Named]) -> Vec<String> {
    named.iter().map(|one| format!("{}={}", one.name.as_deref().unwrap_or(""), one.url)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_ends_at_the_first_equals_sign_of_a_plain_word() {
        for (text, name, url) in [
            ("http://a:1", None, "http://a:1"),
            ("kv=http://a:1", Some("kv"), "http://a:1"),
            ("http://a:1/?x=y", None, "http://a:1/?x=y"),
            ("a:1", None, "a:1"),
        ] {
            let named: Named = text.parse().unwrap();
            assert_eq!((named.name.as_deref(), named.url.as_str()), (name, url));
        }
    }
}
