//! CONFIG GET where the nodes differ: one value of the kind that the setting has, because a program parses it.
//!
//! The choice is the one that a program may rely on at every node: the tightest bound, the weakest promise. Not a list
//! of all values with the nodes' names: a person would understand it, and every program would fail on it. Who wants to
//! see each node's asks the node.

/// Numbers of which 0 means that there is no bound.
const ZERO_IS_UNBOUNDED: &[&str] = &[
    "busy-reply-threshold",
    "lua-time-limit",
    "maxmemory",
    "maxmemory-clients",
    "stream-node-max-bytes",
    "stream-node-max-entries",
    "tracking-table-max-keys",
];

/// What `A` stands for in `notify-keyspace-events`.
const ALL_EVENTS: &[u8] = b"g$lshzxetd";

/// Events in the order in which Redis writes them.
const EVENTS: &[u8] = b"g$lshzxetdKEmno";

/// The value that stands for those of all nodes, which are in the nodes' order and at least one.
pub(super) fn one_of(name: &str, values: &[Vec<u8>]) -> Vec<u8> {
    let Some(first) = values.first() else { return Vec::new() };
    if values.iter().all(|v| v == first) {
        return first.clone();
    }
    let with = |wanted: &[u8]| values.iter().find(|v| v.as_slice() == wanted).cloned();
    match name {
        "notify-keyspace-events" => return common_events(values),
        // Only what every node saves is saved.
        "save" => return with(b"").unwrap_or_else(|| first.clone()),
        "appendfsync" => return with(b"no").or_else(|| with(b"everysec")).unwrap_or_else(|| first.clone()),
        // Where some node evicts, keys may vanish.
        "maxmemory-policy" => return values.iter().find(|v| v.as_slice() != b"noeviction").unwrap_or(first).clone(),
        _ => {}
    }
    if values.iter().all(|v| matches!(v.as_slice(), b"yes" | b"no")) {
        return b"no".to_vec();
    }
    let number = |v: &Vec<u8>| std::str::from_utf8(v).ok()?.parse::<i64>().ok();
    if values.iter().all(|v| number(v).is_some()) {
        let is_bound = |n: &i64| *n != 0 || !ZERO_IS_UNBOUNDED.contains(&name);
        let least = values.iter().filter_map(number).filter(is_bound).min();
        return least.unwrap_or(0).to_string().into_bytes();
    }
    first.clone()
}

/// The events that every node tells of.
fn common_events(values: &[Vec<u8>]) -> Vec<u8> {
    let tells =
        |value: &[u8], event: u8| value.contains(&event) || (ALL_EVENTS.contains(&event) && value.contains(&b'A'));
    let common: Vec<u8> = EVENTS.iter().copied().filter(|e| values.iter().all(|v| tells(v, *e))).collect();
    if !ALL_EVENTS.iter().all(|e| common.contains(e)) {
        return common;
    }
    std::iter::once(b'A').chain(common.into_iter().filter(|e| !ALL_EVENTS.contains(e))).collect()
}

#[cfg(test)]
mod tests {
    use super::one_of;

    fn chosen(name: &str, values: &[&str]) -> String {
        let values: Vec<Vec<u8>> = values.iter().map(|v| v.as_bytes().to_vec()).collect();
        String::from_utf8(one_of(name, &values)).expect("text")
    }

    #[test]
    fn what_all_say_is_said_as_it_is() {
        assert_eq!(chosen("save", &["3600 1 300 100", "3600 1 300 100"]), "3600 1 300 100");
        assert_eq!(chosen("maxmemory", &["0", "0"]), "0");
    }

    #[test]
    fn a_program_can_rely_on_what_is_said_at_every_node() {
        for (name, values, expected) in [
            ("maxmemory", &["0", "200", "100"][..], "100"),
            ("databases", &["16", "4"], "4"),
            ("latency-monitor-threshold", &["100", "0"], "0"),
            ("appendonly", &["yes", "no"], "no"),
            ("appendfsync", &["always", "everysec"], "everysec"),
            ("appendfsync", &["no", "everysec"], "no"),
            ("save", &["3600 1", ""], ""),
            ("save", &["3600 1", "60 1"], "3600 1"),
            ("maxmemory-policy", &["noeviction", "allkeys-lru"], "allkeys-lru"),
            ("notify-keyspace-events", &["AKE", ""], ""),
            ("notify-keyspace-events", &["AKE", "xE"], "xE"),
            ("notify-keyspace-events", &["AKE", "AE"], "AE"),
            ("notify-keyspace-events", &["g$lshzxetdKE", "AKEn"], "AKE"),
            ("loglevel", &["notice", "debug"], "notice"),
        ] {
            assert_eq!(chosen(name, values), expected, "{name} {values:?}");
        }
    }
}
