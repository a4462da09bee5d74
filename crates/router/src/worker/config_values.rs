//! Result of CONFIG GET if nodes differ: a single value of the setting's type, because programs parse it.
//!
//! The value is valid at every node: the tightest limit, the weakest guarantee. A list of all values with node names
//! would be readable for operators, but break every program. Values of a single node can be read at the node.

/// Settings with 0 for "no limit".
const ZERO_IS_UNBOUNDED: &[&str] = &[
    "busy-reply-threshold",
    "lua-time-limit",
    "maxmemory",
    "maxmemory-clients",
    "stream-node-max-bytes",
    "stream-node-max-entries",
    "tracking-table-max-keys",
];

/// Events included in `A` of `notify-keyspace-events`.
const ALL_EVENTS: &[u8] = b"g$lshzxetd";

/// Events in Redis's order.
const EVENTS: &[u8] = b"g$lshzxetdKEmno";

/// Returns one value for all nodes. `values`: at least one, in the order of nodes.
pub(super) fn one_of(name: &str, values: &[Vec<u8>]) -> Vec<u8> {
    let Some(first) = values.first() else { return Vec::new() };
    if values.iter().all(|v| v == first) {
        return first.clone();
    }
    let with = |wanted: &[u8]| values.iter().find(|v| v.as_slice() == wanted).cloned();
    match name {
        "notify-keyspace-events" => return common_events(values),
        // Only data saved by every node is saved.
        "save" => return with(b"").unwrap_or_else(|| first.clone()),
        "appendfsync" => return with(b"no").or_else(|| with(b"everysec")).unwrap_or_else(|| first.clone()),
        // Keys may vanish if any node evicts.
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

/// Returns the events that every node publishes.
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
    fn values_that_all_nodes_share_are_returned_unchanged() {
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
