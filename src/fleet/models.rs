//! Which models each worker serves, LoRA adapters among them, and so who can be given a request. Pure: [`super::listing`] brings
//! the lists.
//!
//! A worker whose list is not known is taken to serve what all others list, or, where lists differ, what nobody else can. A model
//! that nobody lists goes to any worker, so that its own word on it comes back.

use std::collections::HashMap;
use std::sync::Arc;

use serde::Deserialize;
use thiserror::Error;

use super::worker::Worker;
use crate::core::ids::WorkerId;

/// Models of one worker that are kept; a longer list counts as not known.
const MOST: usize = 4_096;
/// Longest name; requests' names are cut there too.
const LONGEST: usize = 1_024;

/// The models of one worker.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Models {
    /// Sorted, each once.
    names: Vec<Box<str>>,
}

/// Why an answer is no list of models.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum NoList {
    #[error("is not a list of models: {0}")]
    Shape(String),
    #[error("names no model")]
    Empty,
    #[error("names {0} models, more than {MOST}")]
    TooMany(usize),
}

#[derive(Deserialize)]
struct Listing {
    data: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    id: Box<str>,
}

impl Models {
    /// Reads the body of an answer to `/v1/models`.
    ///
    /// # Errors
    /// If it is something else, or longer than what is kept.
    pub fn read(body: &[u8]) -> Result<Models, NoList> {
        let Listing { data } =
            serde_json::from_slice(body).map_err(|error| NoList::Shape(error.to_string()))?;
        if data.len() > MOST {
            return Err(NoList::TooMany(data.len()));
        }
        let names = data.into_iter().map(|entry| entry.id);
        let mut names: Vec<Box<str>> = names.filter(|name| (1..=LONGEST).contains(&name.len())).collect();
        names.sort_unstable();
        names.dedup();
        if names.is_empty() { Err(NoList::Empty) } else { Ok(Models { names }) }
    }

    pub fn names(&self) -> &[Box<str>] {
        &self.names
    }

    pub fn has(&self, name: &str) -> bool {
        self.names.binary_search_by(|other| other.as_ref().cmp(name)).is_ok()
    }
}

/// Workers that serve the same, and those of them that may be given a request.
#[derive(Clone, Debug, Default)]
pub struct Group {
    /// In slot order.
    pub eligible: Vec<WorkerId>,
    /// Nobody is known to be well: `eligible` are those of whom it is doubtful.
    pub doubtful: bool,
}

impl Group {
    /// `workers` are in slot order.
    pub(super) fn of<'w>(workers: impl Iterator<Item = &'w Worker> + Clone) -> Group {
        let pick = |fit: fn(&Worker) -> bool| {
            workers.clone().filter(|worker| fit(worker)).map(|worker| worker.id).collect::<Vec<_>>()
        };
        let eligible = pick(Worker::is_eligible);
        let doubtful = eligible.is_empty();
        // A bad page, a stall or a broken answer may be a passing thing; to refuse everybody for it would be worse.
        Group { eligible: if doubtful { pick(Worker::is_doubtful) } else { eligible }, doubtful }
    }
}

/// Who can serve which model, at one moment.
#[derive(Default)]
pub struct Directory {
    /// The one list, where all workers have the same.
    common: Option<Arc<Models>>,
    /// Where lists differ or are missing: every name that somebody lists.
    groups: HashMap<Box<str>, Group>,
    /// Workers whose list is not known, where others are.
    unknown: Group,
}

/// What the directory says of a model.
pub enum Found<'d> {
    /// Any worker can serve it, as far as is known.
    Anyone,
    /// These can.
    Only(&'d Group),
    /// No worker lists it.
    Nobody,
}

impl Directory {
    /// `workers` are in slot order, each with its list if that is known.
    pub(super) fn of(workers: &[(&Worker, Option<Arc<Models>>)]) -> Directory {
        let mut known = workers.iter().filter_map(|(_, models)| models.as_ref());
        let Some(first) = known.next() else { return Directory::default() };
        if workers.iter().all(|(_, models)| models.as_ref() == Some(first)) {
            return Directory { common: Some(first.clone()), ..Directory::default() };
        }
        // Where all known lists are the same, the others may be taken to serve it too; where they differ, only if nobody else can:
        // an answer that a model is unknown comes fast, and whoever gives it would look idle.
        let differ = known.any(|models| models != first);
        let mut groups = HashMap::new();
        for (_, models) in workers {
            for name in models.iter().flat_map(|models| models.names()) {
                if !groups.contains_key(name) {
                    let serving = |unlisted: bool| {
                        let serves = move |models: &Option<Arc<Models>>| {
                            models.as_ref().map_or(unlisted, |models| models.has(name))
                        };
                        workers.iter().filter(move |(_, models)| serves(models)).map(|(worker, _)| *worker)
                    };
                    let listed = Group::of(serving(!differ));
                    let group = if listed.doubtful { Group::of(serving(true)) } else { listed };
                    groups.insert(name.clone(), group);
                }
            }
        }
        let unknown = workers.iter().filter(|(_, models)| models.is_none()).map(|(worker, _)| *worker);
        Directory { common: None, groups, unknown: Group::of(unknown) }
    }

    /// Who can serve `model`. A request that names none asks for whatever its worker serves.
    pub fn find(&self, model: &str) -> Found<'_> {
        if model.is_empty() {
            return Found::Anyone;
        }
        match &self.common {
            Some(models) if models.has(model) => return Found::Anyone,
            Some(_) => return Found::Nobody,
            None if self.groups.is_empty() => return Found::Anyone,
            None => {}
        }
        match self.groups.get(model) {
            Some(group) => Found::Only(group),
            None if self.unknown.doubtful => Found::Nobody,
            None => Found::Only(&self.unknown),
        }
    }

    /// It makes a difference which model is asked for.
    pub fn is_mixed(&self) -> bool {
        !self.groups.is_empty()
    }
}

/// The model that a JSON body names, whatever else it is.
pub fn named_in(body: &[u8]) -> Option<String> {
    #[derive(Deserialize)]
    struct Named {
        model: String,
    }
    // An array would be read as a struct too.
    let object = body.trim_ascii_start().starts_with(b"{");
    object.then(|| serde_json::from_slice::<Named>(body).ok())?.map(|named| named.model)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(body: &str) -> Result<Vec<String>, NoList> {
        let models = Models::read(body.as_bytes())?;
        Ok(models.names().iter().map(|name| name.to_string()).collect())
    }

    #[test]
    fn a_real_list_is_read_with_its_adapters() {
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/vllm");
        let read = |name: &str| {
            let text = std::fs::read_to_string(folder.join(name)).unwrap();
            names(text.split_once("\r\n\r\n").unwrap().1).unwrap()
        };
        assert_eq!(read("get_v1_models.resp"), ["tiny"]);
        assert_eq!(read("lora_models.resp"), ["a1", "tiny"]);
    }

    #[test]
    fn lists_are_sorted_and_bounded_and_what_is_none_is_refused() {
        assert_eq!(names(r#"{"data":[{"id":"b"},{"id":"a"},{"id":"b"},{"id":""}]}"#).unwrap(), ["a", "b"]);
        let long = format!(r#"{{"data":[{{"id":"{}"}},{{"id":"a"}}]}}"#, "x".repeat(LONGEST + 1));
        assert_eq!(names(&long).unwrap(), ["a"]);
        let many: Vec<String> = (0..=MOST).map(|n| format!(r#"{{"id":"{n}"}}"#)).collect();
        assert_eq!(names(&format!(r#"{{"data":[{}]}}"#, many.join(","))), Err(NoList::TooMany(MOST + 1)));
        assert_eq!(names(r#"{"data":[]}"#), Err(NoList::Empty));
        for other in ["", "null", "[]", "{}", r#"{"data":{}}"#, r#"{"data":[{"id":7}]}"#, r#"{"data":["a"]}"#]
        {
            assert!(matches!(names(other), Err(NoList::Shape(_))), "{other}");
        }
    }

    #[test]
    fn the_model_of_any_json_body_is_found() {
        assert_eq!(named_in(br#"{"input":["x"],"model":"e5"}"#).as_deref(), Some("e5"));
        for other in [&b""[..], b"model=x", b"{}", br#"{"model":null}"#, br#"["model"]"#] {
            assert_eq!(named_in(other), None);
        }
    }
}
