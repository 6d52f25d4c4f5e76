//! Random bodies, randomly spelled: the reader and its twin agree on them, on what is no JSON too.

use proptest::prelude::*;

use super::bodies::Choices;
use super::*;
use crate::core::prompt::read;
use crate::core::prompt::tests::key;

fn endpoints() -> impl Strategy<Value = Endpoint> {
    prop::sample::select(vec![Endpoint::Chat, Endpoint::Completions, Endpoint::Responses, Endpoint::Messages])
}

fn bytes(most: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(any::<u8>(), 0..most)
}

/// The members of the body, and of its messages, in another order.
fn turned(body: &Tree, by: usize) -> Tree {
    let Tree::Object(members) = body else { return body.clone() };
    // Of a key that is there twice the last one counts, so only the others may move.
    let twice = |key: &str| members.iter().filter(|(other, _)| other == key).count() > 1;
    let (fixed, mut moved): (Vec<_>, Vec<_>) = members.iter().cloned().partition(|(key, _)| twice(key));
    let by_members = by % moved.len().max(1);
    moved.rotate_left(by_members);
    for (key, value) in &mut moved {
        if let ("messages", Tree::List(messages)) = (key.as_str(), &mut *value) {
            messages.iter_mut().for_each(|message| *message = turned(message, by / 3));
        }
    }
    moved.extend(fixed);
    Tree::Object(moved)
}

#[test]
fn most_random_bodies_have_a_prompt() {
    let mut read = [0; 4];
    for seed in 0..1000u64 {
        let noise = blake3::hash(&seed.to_le_bytes());
        let mut random = vec![0; 1000];
        blake3::Hasher::new_keyed(noise.as_bytes()).finalize_xof().fill(&mut random);
        let body = Choices(&random).body().compact();
        let endpoints = [Endpoint::Chat, Endpoint::Completions, Endpoint::Responses, Endpoint::Messages];
        for (count, endpoint) in read.iter_mut().zip(endpoints) {
            *count += usize::from(
                slow(endpoint, body.as_bytes(), &key()).is_ok_and(|(_, stream)| !stream.is_empty()),
            );
        }
    }
    assert!(read.iter().all(|count| *count > 250), "{read:?} of 1000: the random bodies test too little");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn the_reader_agrees_with_its_twin(endpoint in endpoints(), body in bytes(400), spelling in bytes(400)) {
        let body = Choices(&spelling).spell(&Choices(&body).body());
        prop_assert_eq!(fast(endpoint, body.as_bytes(), &key()), slow(endpoint, body.as_bytes(), &key()), "{}", body);
    }

    #[test]
    fn spelling_and_order_do_not_count(
        endpoint in endpoints(), body in bytes(400), spelling in bytes(400), by in 0usize..100,
    ) {
        let body = Choices(&body).body();
        let plain = body.compact();
        let other = Choices(&spelling).spell(&turned(&body, by));
        prop_assert_eq!(
            fast(endpoint, plain.as_bytes(), &key()), fast(endpoint, other.as_bytes(), &key()), "{}\n{}", plain, other
        );
    }

    #[test]
    fn what_is_json_is_as_for_serde(
        endpoint in endpoints(), body in bytes(400), spelling in bytes(400),
        faults in prop::collection::vec((any::<prop::sample::Index>(), 0u8..4, any::<u8>()), 1..4),
    ) {
        let mut body = Choices(&spelling).spell(&Choices(&body).body()).into_bytes();
        for (place, kind, byte) in faults {
            let at = place.index(body.len() + 1);
            // Signs of the grammar are likelier to do harm than other bytes.
            let byte = b"{}[]\",:\\ue0-+.tfn \n\x00".get(usize::from(byte / 4)).copied().unwrap_or(byte);
            match kind {
                0 => body.insert(at, byte),
                1 if at < body.len() => body[at] = byte,
                2 if at < body.len() => drop(body.remove(at)),
                _ => body.truncate(at),
            }
        }
        let object = body.trim_ascii_start().starts_with(b"{");
        let json = object && serde_json::from_slice::<serde::de::IgnoredAny>(&body).is_ok();
        let chain = read(endpoint, &body, &key(), 16).chain;
        prop_assert_eq!(chain.err() != Some(Opaque::Json), json, "{}", String::from_utf8_lossy(&body));
        if let Ok(canonical) = slow(endpoint, &body, &key()) {
            prop_assert_eq!(fast(endpoint, &body, &key()), Ok(canonical));
        }
    }
}
