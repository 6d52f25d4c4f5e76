//! How it stands with the other routers, for `GET /fleet`: in figures, and in one line for people.

use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::config::Sharing;
use crate::peers::{Other, Seen};
use crate::proxy::Proxy;

/// Others that are called by their names.
const NAMED: usize = 8;

/// `null` without `sharing`.
pub(super) fn sharing(proxy: &Proxy) -> Value {
    let Some(peers) = &proxy.peers else { return Value::Null };
    let now = proxy.clock.now();
    let seen = peers.seen();
    let other =
        |Other { name, spoke }: &Other| json!({"name": name.as_deref(), "spoke_s": (now - *spoke).max(0.0)});
    let routers: Vec<Value> = seen.others.iter().map(other).collect();
    let metrics = &proxy.metrics.sharing;
    let dropped: Vec<(&'static str, u64)> =
        metrics.dropped.totals().filter(|(_, total)| *total > 0).collect();
    let behind = metrics.lag.get();
    let fault = peers.fault();
    let store = proxy.config.load().sharing.as_ref().map(Sharing::addresses).unwrap_or_default();
    let line = line(&store, peers.is_connected(), fault.as_ref(), &seen, behind, &dropped);
    let dropped: Map<String, Value> =
        dropped.into_iter().map(|(why, total)| (why.to_owned(), total.into())).collect();
    json!({
        "line": line,
        "name": peers.name(),
        "store": store,
        "connected": peers.is_connected(),
        "fault": fault.as_ref().map(|(_, fault)| fault),
        "fault_s": fault.as_ref().map(|(since, _)| since.as_secs_f64()),
        "others": routers.len(),
        "routers": routers,
        "behind_s": behind,
        "dropped": dropped,
        "unknown_workers": seen.unknown_workers,
    })
}

fn line(
    store: &str,
    connected: bool,
    fault: Option<&(Duration, String)>,
    Seen { others, unknown_workers }: &Seen,
    behind: f64,
    dropped: &[(&str, u64)],
) -> String {
    let total: u64 = dropped.iter().map(|(_, count)| count).sum();
    let why: Vec<String> = dropped.iter().map(|(why, count)| format!("{count} {why}")).collect();
    let why = if why.is_empty() { String::new() } else { format!(" ({})", why.join(", ")) };
    let dropped = format!("{total} dropped{why}");
    if let Some((since, fault)) = fault {
        let seconds = since.as_secs();
        return format!("goes on alone for {seconds} s, as the store {store} fails: {fault}; {dropped}");
    }
    if !connected {
        return format!("the store {store} is being connected to");
    }
    if others.is_empty() {
        return format!("no others are heard over {store}, {dropped}");
    }
    let mut names: Vec<&str> = others.iter().filter_map(|other| other.name.as_deref()).take(NAMED).collect();
    if names.len() < others.len() && !names.is_empty() {
        names.push("..");
    }
    let names = if names.is_empty() { String::new() } else { format!(" ({})", names.join(", ")) };
    let unknown = match unknown_workers {
        0 => String::new(),
        1 => "; 1 worker of theirs is not known here".to_owned(),
        some => format!("; {some} workers of theirs are not known here"),
    };
    let (count, plural) = (others.len(), if others.len() == 1 { "" } else { "s" });
    format!("{count} other{plural}{names}, {:.0} ms behind, {dropped}{unknown}", 1e3 * behind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::ids::Time;

    fn seen(names: &[Option<&str>], unknown_workers: usize) -> Seen {
        let other = |name: &Option<&str>| Other { name: name.map(Into::into), spoke: Time(1.0) };
        Seen { others: names.iter().map(other).collect(), unknown_workers }
    }

    #[test]
    fn how_sharing_stands_is_one_line() {
        let of = |connected, seen: &Seen, dropped: &[(&str, u64)]| {
            line("redis://v:6379", connected, None, seen, 0.0123, dropped)
        };
        assert_eq!(
            of(true, &seen(&[Some("b:1"), None], 0), &[]),
            "2 others (b:1, ..), 12 ms behind, 0 dropped"
        );
        assert_eq!(
            of(true, &seen(&[Some("b:1")], 2), &[("gap", 1), ("unknown_worker", 20)]),
            "1 other (b:1), 12 ms behind, 21 dropped (1 gap, 20 unknown_worker); 2 workers of theirs are not known here"
        );
        let many = vec![Some("pod"); 200];
        assert!(of(true, &seen(&many, 0), &[]).len() < 100);
        assert_eq!(of(true, &Seen::default(), &[]), "no others are heard over redis://v:6379, 0 dropped");
        assert_eq!(of(false, &Seen::default(), &[]), "the store redis://v:6379 is being connected to");
        let fault = (Duration::from_millis(31_600), "Connection refused: nobody listens there".to_owned());
        assert_eq!(
            line("redis://v:6379", false, Some(&fault), &Seen::default(), 0.0, &[("full", 3)]),
            "goes on alone for 31 s, as the store redis://v:6379 fails: Connection refused: nobody listens there; 3 dropped (3 full)"
        );
    }
}
