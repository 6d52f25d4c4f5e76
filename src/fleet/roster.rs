//! Who the fleet is made of: the list that each source has told last, put together.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fmt;
use std::sync::Arc;

use super::discovery::endpoints::{Intake, Pod};
use crate::config;

/// A worker of the fleet to be.
#[derive(Clone, PartialEq, Debug)]
pub struct Member {
    pub worker: config::Worker,
    /// The pod behind the address, where that is known: another one is another worker.
    pub pod: Option<Pod>,
    pub zone: Option<Arc<str>>,
    pub intake: Intake,
}

impl Member {
    /// Known by its address alone.
    pub fn plain(worker: config::Worker) -> Member {
        Member { worker, pod: None, zone: None, intake: Intake::Open }
    }
}

/// Where workers are found.
#[derive(Clone, PartialEq, Debug)]
pub enum Source {
    Kubernetes(config::Kubernetes),
    Dns(config::Dns),
}

impl Source {
    /// All that the config names.
    pub fn all(workers: &config::Workers) -> Vec<Source> {
        let kubernetes = workers.kubernetes.iter().cloned().map(Source::Kubernetes);
        kubernetes.chain(workers.dns.iter().cloned().map(Source::Dns)).collect()
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Kubernetes(source) => source.fmt(f),
            Source::Dns(source) => source.fmt(f),
        }
    }
}

/// What one source has told.
#[derive(Debug)]
struct List {
    source: Source,
    /// `None` where nothing has been heard yet.
    members: Option<Vec<Member>>,
    /// It was asked once, with whatever success; or it was only named while the fleet was serving, which does not wait for it.
    asked: bool,
}

/// The lists.
#[derive(Debug, Default)]
pub(super) struct Roster {
    fixed: Vec<Member>,
    /// In the order of the config.
    lists: Vec<List>,
    /// What sources had told that are no longer asked: it counts until all that are asked have been heard, so that an edit of
    /// the config does not empty the fleet.
    retired: Vec<Member>,
    /// It has been told once where to look.
    begun: bool,
}

impl Roster {
    pub(super) fn configure(&mut self, workers: &config::Workers) {
        self.fixed = workers.fixed.iter().cloned().map(Member::plain).collect();
        let serving = std::mem::replace(&mut self.begun, true);
        let mut old = std::mem::take(&mut self.lists);
        for source in Source::all(workers) {
            let known = old.iter().position(|list| list.source == source);
            let new = || List { source, members: None, asked: serving };
            self.lists.push(known.map(|at| old.swap_remove(at)).unwrap_or_else(new));
        }
        self.retired.extend(old.into_iter().filter_map(|list| list.members).flatten());
        self.let_go();
    }

    /// What a source tells now; `false` if it is no longer asked.
    pub(super) fn found(&mut self, source: &Source, members: Vec<Member>) -> bool {
        let Some(list) = self.lists.iter_mut().find(|list| list.source == *source) else { return false };
        list.members = Some(members);
        list.asked = true;
        self.let_go();
        true
    }

    /// A source was asked, and told nothing.
    pub(super) fn failed(&mut self, source: &Source) {
        if let Some(list) = self.lists.iter_mut().find(|list| list.source == *source) {
            list.asked = true;
        }
    }

    /// Sources that have not been asked yet since the start.
    pub(super) fn awaited(&self) -> usize {
        self.lists.iter().filter(|list| !list.asked).count()
    }

    fn let_go(&mut self) {
        if self.lists.iter().all(|list| list.members.is_some()) {
            self.retired.clear();
        }
    }

    /// Each address once. Who names it first says what is known of it; that one source would use it is enough.
    pub(super) fn members(&self) -> Vec<Member> {
        let lists = self.lists.iter().filter_map(|list| list.members.as_ref()).flatten();
        let mut members: Vec<Member> = Vec::new();
        let mut places = HashMap::new();
        for member in self.fixed.iter().chain(lists).chain(&self.retired) {
            match places.entry(&member.worker.url) {
                Entry::Vacant(place) => {
                    place.insert(members.len());
                    members.push(member.clone());
                }
                Entry::Occupied(place) => {
                    let known = &mut members[*place.get()];
                    known.intake = known.intake.max(member.intake);
                    known.zone = known.zone.take().or_else(|| member.zone.clone());
                    known.pod = known.pod.take().or_else(|| member.pod.clone());
                }
            }
        }
        members
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Origin, Worker, Workers};

    fn worker(host: &str) -> Worker {
        Worker {
            url: Origin::parse(&format!("http://{host}:8000")).unwrap(),
            capacity_tokens: None,
            prefill_speed: None,
        }
    }

    fn workers(fixed: &[&str], services: &[&str]) -> Workers {
        let entries: Vec<String> = services.iter().map(|name| format!("{{service: {name}}}")).collect();
        let kubernetes = entries_of(&entries);
        Workers { fixed: fixed.iter().map(|host| worker(host)).collect(), kubernetes, ..Workers::default() }
    }

    fn entries_of(entries: &[String]) -> Vec<config::Kubernetes> {
        entries
            .iter()
            .map(|entry| {
                let text = format!("workers: {{kubernetes: [{entry}]}}");
                let config = config::Config::parse(&text, std::path::Path::new("c.yaml")).unwrap();
                config.workers.kubernetes[0].clone()
            })
            .collect()
    }

    fn hosts(roster: &Roster) -> Vec<String> {
        roster.members().iter().map(|member| member.worker.url.host().to_owned()).collect()
    }

    fn found(roster: &mut Roster, workers: &Workers, at: usize, list: &[&str]) -> bool {
        let members = list.iter().map(|host| Member::plain(worker(host))).collect();
        roster.found(&Source::all(workers)[at], members)
    }

    #[test]
    fn an_edit_of_the_sources_does_not_empty_the_fleet() {
        let mut roster = Roster::default();
        let before = workers(&["fixed"], &["a", "b"]);
        roster.configure(&before);
        assert_eq!((hosts(&roster), roster.awaited()), (vec!["fixed".to_owned()], 2));
        roster.failed(&Source::all(&before)[1]);
        assert_eq!(roster.awaited(), 1);
        assert!(found(&mut roster, &before, 0, &["a1", "a2"]));
        assert!(found(&mut roster, &before, 1, &["b1"]));
        assert_eq!(hosts(&roster), ["fixed", "a1", "a2", "b1"]);

        let after = workers(&[], &["b", "c"]);
        roster.configure(&after);
        assert_eq!(
            hosts(&roster),
            ["b1", "a1", "a2"],
            "what the static list named is told, not found: it goes at once"
        );
        assert!(!found(&mut roster, &before, 0, &["a3"]), "nobody asks it any more");
        assert!(found(&mut roster, &after, 0, &["b2"]));
        assert_eq!(hosts(&roster), ["b2", "a1", "a2"], "c has not been heard yet");
        assert!(found(&mut roster, &after, 1, &[]));
        assert_eq!(hosts(&roster), ["b2"]);
    }

    #[test]
    fn an_address_that_several_name_is_one_worker() {
        let mut roster = Roster::default();
        let workers = workers(&["x"], &["a", "b"]);
        roster.configure(&workers);
        let sources = Source::all(&workers);
        let pod = Pod { name: "p".into(), uid: "1".into() };
        let of = |host, intake| Member { intake, pod: Some(pod.clone()), ..Member::plain(worker(host)) };
        roster.found(&sources[0], vec![of("x", Intake::NotReady), of("y", Intake::NotReady)]);
        roster.found(&sources[1], vec![of("y", Intake::Open), of("z", Intake::Terminating)]);
        let seen: Vec<_> = roster
            .members()
            .iter()
            .map(|member| (member.worker.url.host().to_owned(), member.intake, member.pod.is_some()))
            .collect();
        let row = |host: &str, intake| (host.to_owned(), intake, true);
        assert_eq!(seen, [row("x", Intake::Open), row("y", Intake::Open), row("z", Intake::Terminating)]);
    }
}
