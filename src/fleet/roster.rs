//! Who the fleet is made of: the list that each source has told last, put together.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use super::discovery::endpoints::{Intake, Pod};
use crate::config::{self, Origin};

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
    Kubernetes(config::Kubernetes, config::KubernetesApi),
    Dns(config::Dns),
}

impl Source {
    /// All that the config names.
    pub fn all(workers: &config::Workers) -> Vec<Source> {
        let api = &workers.kubernetes_api;
        let kubernetes =
            workers.kubernetes.iter().map(|source| Source::Kubernetes(source.clone(), api.clone()));
        kubernetes.chain(workers.dns.iter().cloned().map(Source::Dns)).collect()
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Kubernetes(source, _) => source.fmt(f),
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
    /// What is wrong with it now.
    fault: Option<String>,
}

/// Whom an edit took out while it brought sources: what others had told, or the static list had named. They count until the new ones
/// have been heard, so that an edit of the config does not empty the fleet. Where an edit brings no source, nobody is to come in the
/// place of those that go, and they go at once.
#[derive(Debug)]
struct Kept {
    members: Vec<Member>,
    /// Not heard yet; never empty.
    until: Vec<Source>,
}

/// How it stands with one source, for those who ask.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct SourceStatus {
    pub source: String,
    /// How many workers it has told of; `None` where it has not been heard yet.
    pub workers: Option<usize>,
    /// Why it cannot be heard, or what is wrong with its list.
    pub fault: Option<String>,
}

/// Workers that no source names any more.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct KeptStatus {
    /// As the metrics name them.
    pub workers: Vec<String>,
    /// The sources that came in the place of theirs, and have not been heard yet.
    pub until_heard: Vec<String>,
}

/// The lists.
#[derive(Debug, Default)]
pub(super) struct Roster {
    fixed: Vec<Member>,
    /// In the order of the config.
    lists: Vec<List>,
    kept: Vec<Kept>,
    /// It has been told once where to look.
    begun: bool,
}

impl Roster {
    pub(super) fn configure(&mut self, workers: &config::Workers) {
        let fixed = workers.fixed.iter().cloned().map(Member::plain).collect();
        let mut gone: Vec<Member> = std::mem::replace(&mut self.fixed, fixed);
        gone.retain(|member| !self.fixed.iter().any(|named| named.worker.url == member.worker.url));
        let serving = std::mem::replace(&mut self.begun, true);
        let mut old = std::mem::take(&mut self.lists);
        let mut fresh = Vec::new();
        for source in Source::all(workers) {
            let known = old.iter().position(|list| list.source == source);
            self.lists.push(known.map(|at| old.swap_remove(at)).unwrap_or_else(|| {
                fresh.push(source.clone());
                List { source, members: None, asked: serving, fault: None }
            }));
        }
        for kept in &mut self.kept {
            let before = kept.until.len();
            kept.until.retain(|source| self.lists.iter().any(|list| list.source == *source));
            // Who was to come in their place has gone as well: it is for those who come now.
            if kept.until.len() < before {
                kept.until.extend(fresh.iter().cloned());
            }
        }
        gone.extend(old.into_iter().filter_map(|list| list.members).flatten());
        if !gone.is_empty() {
            self.kept.push(Kept { members: gone, until: fresh });
        }
        self.let_go();
    }

    /// What a source tells now, and what is wrong with others; `false` if it is no longer asked.
    pub(super) fn found(&mut self, source: &Source, members: Vec<Member>, fault: Option<&str>) -> bool {
        let Some(list) = self.lists.iter_mut().find(|list| list.source == *source) else { return false };
        // Nobody, and a fault: a name or a port that was misspelt is no reason to let others go.
        let heard = fault.is_none() || !members.is_empty();
        list.members = Some(members);
        list.asked = true;
        list.fault = fault.map(str::to_owned);
        if heard {
            self.kept.iter_mut().for_each(|kept| kept.until.retain(|awaited| awaited != source));
        }
        self.let_go();
        true
    }

    /// A source was asked, and told nothing.
    pub(super) fn failed(&mut self, source: &Source, why: &str) {
        if let Some(list) = self.lists.iter_mut().find(|list| list.source == *source) {
            list.asked = true;
            list.fault = Some(why.to_owned());
        }
    }

    /// Sources that have not been asked yet since the start.
    pub(super) fn awaited(&self) -> usize {
        self.lists.iter().filter(|list| !list.asked).count()
    }

    fn let_go(&mut self) {
        self.kept.retain(|kept| !kept.until.is_empty());
    }

    pub(super) fn sources(&self) -> Vec<SourceStatus> {
        let status = |list: &List| SourceStatus {
            source: list.source.to_string(),
            workers: list.members.as_ref().map(Vec::len),
            fault: list.fault.clone(),
        };
        self.lists.iter().map(status).collect()
    }

    /// Those that are in the fleet though no source names them any more.
    pub(super) fn kept(&self) -> Vec<KeptStatus> {
        let lists = self.lists.iter().filter_map(|list| list.members.as_ref()).flatten();
        let named: HashSet<&Origin> =
            self.fixed.iter().chain(lists).map(|member| &member.worker.url).collect();
        let status = |kept: &Kept| KeptStatus {
            workers: kept
                .members
                .iter()
                .filter(|member| !named.contains(&member.worker.url))
                .map(|member| member.worker.url.label())
                .collect(),
            until_heard: kept.until.iter().map(Source::to_string).collect(),
        };
        self.kept.iter().map(status).filter(|kept| !kept.workers.is_empty()).collect()
    }

    /// Each address once. Who names it first says what is known of it; that one source would use it is enough.
    pub(super) fn members(&self) -> Vec<Member> {
        let lists = self.lists.iter().filter_map(|list| list.members.as_ref()).flatten();
        let kept = self.kept.iter().flat_map(|kept| &kept.members);
        let mut members: Vec<Member> = Vec::new();
        let mut places = HashMap::new();
        for member in self.fixed.iter().chain(lists).chain(kept) {
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
        roster.found(&Source::all(workers)[at], members, None)
    }

    #[test]
    fn an_edit_of_the_sources_does_not_empty_the_fleet() {
        let mut roster = Roster::default();
        let before = workers(&["fixed"], &["a", "b"]);
        roster.configure(&before);
        assert_eq!((hosts(&roster), roster.awaited()), (vec!["fixed".to_owned()], 2));
        roster.failed(&Source::all(&before)[1], "away");
        assert_eq!(roster.awaited(), 1);
        assert!(found(&mut roster, &before, 0, &["a1", "a2"]));
        assert!(found(&mut roster, &before, 1, &["b1"]));
        assert_eq!(hosts(&roster), ["fixed", "a1", "a2", "b1"]);

        let after = workers(&[], &["b", "c"]);
        roster.configure(&after);
        assert_eq!(
            hosts(&roster),
            ["b1", "fixed", "a1", "a2"],
            "whom the static list named is no less in use than who was found"
        );
        assert!(!found(&mut roster, &before, 0, &["a3"]), "nobody asks it any more");
        assert!(found(&mut roster, &after, 0, &["b2"]));
        assert_eq!(hosts(&roster), ["b2", "fixed", "a1", "a2"], "c has not been heard yet");
        let kept = &roster.kept()[0];
        assert_eq!((kept.workers.len(), &kept.until_heard[0][..]), (3, "kubernetes:c"), "which is said");
        assert!(roster.found(&Source::all(&after)[1], Vec::new(), Some("there is no c")));
        assert_eq!(hosts(&roster), ["b2", "fixed", "a1", "a2"], "nor has it told of anything");
        assert!(found(&mut roster, &after, 1, &[]));
        assert_eq!(hosts(&roster), ["b2"]);
        assert!(roster.kept().is_empty());
    }

    #[test]
    fn static_workers_stay_until_the_sources_that_an_edit_brings_have_been_heard() {
        let mut roster = Roster::default();
        roster.configure(&workers(&["s1", "s2", "s3"], &[]));
        let after = workers(&["s3"], &["a"]);
        roster.configure(&after);
        assert_eq!(hosts(&roster), ["s3", "s1", "s2"], "nobody has left");
        assert_eq!(roster.kept()[0].workers, ["s1:8000", "s2:8000"]);
        roster.failed(&Source::all(&after)[0], "it may not be listed");
        assert_eq!(hosts(&roster), ["s3", "s1", "s2"]);
        // Whom the source names as well is the worker that it was.
        assert!(found(&mut roster, &after, 0, &["s1", "a1"]));
        assert_eq!(hosts(&roster), ["s3", "s1", "a1"]);
        // Back: the static list needs no hearing.
        roster.configure(&workers(&["s1", "s2"], &[]));
        assert_eq!((hosts(&roster), roster.kept()), (vec!["s1".to_owned(), "s2".to_owned()], Vec::new()));
        // Another edit before anybody was heard, and back again.
        roster.configure(&workers(&[], &["b"]));
        roster.configure(&workers(&["s1"], &[]));
        assert_eq!((hosts(&roster), roster.kept()), (vec!["s1".to_owned()], Vec::new()));
    }

    #[test]
    fn an_edit_that_brings_no_source_lets_workers_go_whoever_cannot_be_heard() {
        let mut roster = Roster::default();
        let before = workers(&[], &["a", "away"]);
        roster.configure(&before);
        assert!(found(&mut roster, &before, 0, &["a1"]));
        roster.failed(&Source::all(&before)[1], "the API server says no");
        let status = roster.sources();
        assert_eq!((status[0].workers, status[1].workers), (Some(1), None));
        assert_eq!(status[1].fault.as_deref(), Some("the API server says no"));
        roster.configure(&workers(&["fixed"], &["away"]));
        assert_eq!(hosts(&roster), ["fixed"]);
    }

    #[test]
    fn what_is_kept_is_kept_for_whoever_comes_in_its_place_in_the_end() {
        let mut roster = Roster::default();
        let [a, b, c] = ["a", "b", "c"].map(|name| workers(&[], &[name]));
        roster.configure(&a);
        assert!(found(&mut roster, &a, 0, &["a1"]));
        roster.configure(&b);
        roster.configure(&c);
        assert_eq!((hosts(&roster), roster.kept()[0].until_heard.len()), (vec!["a1".to_owned()], 1));
        // And back: it is asked anew, and until then what it told is all there is.
        roster.configure(&a);
        assert_eq!(hosts(&roster), ["a1"]);
        assert!(found(&mut roster, &a, 0, &["a2"]));
        assert_eq!(hosts(&roster), ["a2"]);
        roster.configure(&b);
        roster.configure(&workers(&["fixed"], &[]));
        assert_eq!(hosts(&roster), ["fixed"], "nobody is to come any more");
    }

    #[test]
    fn an_edit_of_how_the_api_server_is_reached_asks_anew_and_loses_nobody() {
        let mut roster = Roster::default();
        let mut edited = workers(&[], &["a"]);
        roster.configure(&edited);
        assert!(found(&mut roster, &edited, 0, &["a1"]));
        edited.kubernetes_api.url = Some("https://10.96.0.1".to_owned());
        roster.configure(&edited);
        assert_eq!((hosts(&roster), roster.sources()[0].workers), (vec!["a1".to_owned()], None));
    }

    #[test]
    fn an_address_that_several_name_is_one_worker() {
        let mut roster = Roster::default();
        let workers = workers(&["x"], &["a", "b"]);
        roster.configure(&workers);
        let sources = Source::all(&workers);
        let pod = Pod { name: "p".into(), uid: "1".into() };
        let of = |host, intake| Member { intake, pod: Some(pod.clone()), ..Member::plain(worker(host)) };
        roster.found(&sources[0], vec![of("x", Intake::NotReady), of("y", Intake::NotReady)], None);
        roster.found(&sources[1], vec![of("y", Intake::Open), of("z", Intake::Terminating)], None);
        let seen: Vec<_> = roster
            .members()
            .iter()
            .map(|member| (member.worker.url.host().to_owned(), member.intake, member.pod.is_some()))
            .collect();
        let row = |host: &str, intake| (host.to_owned(), intake, true);
        assert_eq!(seen, [row("x", Intake::Open), row("y", Intake::Open), row("z", Intake::Terminating)]);
    }
}
