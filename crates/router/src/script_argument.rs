//! The argument that the router adds to each call of a checked script, as its last one. The prelude of the script takes it
//! from `ARGV` ([`crate::lua`]).
//!
//! It has the facts about a call that the text of the script cannot have, because the text is the same at all nodes and
//! at any time: which undeclared keys are at this node, and whether to rehearse.

use std::collections::BTreeMap;

use switchyard_policy::topology::{NodeId, Slot, Topology};

/// Maximum total length of the names of keys that live elsewhere, in bytes. A slot with more of them permits no undeclared
/// keys.
const ELSEWHERE_MAX: usize = 16 << 10;

/// Content of the argument.
#[derive(Default, Debug)]
pub(crate) struct ScriptArgument {
    /// Number of keys that the router has declared, after those of the client.
    more: usize,
    /// Indexes of the declared keys, from 1, whose slots are at the node as a whole. `None`: all.
    home: Option<Vec<usize>>,
    /// Keys of these slots that live elsewhere, each with its length: `5:{a}:x`.
    elsewhere: Vec<u8>,
}

impl ScriptArgument {
    /// Returns the argument for a call with these declared keys, the last `more` of them by the router, at a node that has
    /// them all.
    pub(crate) fn new(topology: &Topology, node: NodeId, keys: &[&[u8]], more: usize) -> Self {
        let mut argument = Self { more, ..Self::default() };
        let mut known: BTreeMap<Slot, bool> = BTreeMap::new();
        let mut home = Vec::new();
        for (index, key) in keys.iter().enumerate() {
            let slot = topology.slot_of(key);
            let is_home = *known
                .entry(slot)
                .or_insert_with(|| topology.owner(slot) == node && argument.has_room_for(topology, slot));
            if is_home {
                home.push(index + 1);
            }
        }
        argument.home = (home.len() < keys.len()).then_some(home);
        argument
    }

    /// Returns the argument for a call with this number of keys by the router, whose node is not known.
    pub(crate) fn of_more(more: usize) -> Self {
        Self { more, ..Self::default() }
    }

    /// Returns the number of keys by the router in an encoded argument. `None`: it is no argument of the router.
    pub(crate) fn number_of_more(argument: &[u8]) -> Option<usize> {
        let mut parts = argument.split(|byte| *byte == b':');
        let more = parts.nth(1).filter(|_| parts.next().is_some() && parts.next().is_some())?;
        std::str::from_utf8(more).ok()?.parse().ok()
    }

    /// Adds the keys of a slot that live elsewhere than its owner, if they fit.
    fn has_room_for(&mut self, topology: &Topology, slot: Slot) -> bool {
        if !topology.has_override(slot) {
            return true;
        }
        let before = self.elsewhere.len();
        for (key, _) in topology.overrides_in(slot) {
            self.elsewhere.extend_from_slice(format!("{}:", key.len()).as_bytes());
            self.elsewhere.extend_from_slice(key);
            if self.elsewhere.len() > ELSEWHERE_MAX {
                self.elsewhere.truncate(before);
                return false;
            }
        }
        true
    }

    /// Whether the node has all keys of all slots of the call.
    pub(crate) fn is_plain(&self) -> bool {
        self.more == 0 && self.home.is_none() && self.elsewhere.is_empty()
    }

    /// Returns the bytes. `token`: the call is rehearsed, and the error that names further keys has this token. Clients do
    /// not know it, so no script can return this error. After `!`, the call is only rehearsed, and always returns the error.
    pub(crate) fn encode(&self, token: Option<&str>) -> Vec<u8> {
        let home = self
            .home
            .as_ref()
            .map_or_else(|| "*".to_owned(), |home| home.iter().map(usize::to_string).collect::<Vec<_>>().join(","));
        let mut out = format!("{}:{}:{home}:", token.unwrap_or_default(), self.more).into_bytes();
        out.extend_from_slice(&self.elsewhere);
        out
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    #[test]
    fn only_slots_of_the_node_permit_undeclared_keys() {
        let names: Vec<String> = (0..2).map(|i| format!("127.0.0.1:{}", 7000 + i)).collect();
        let topology = Topology::even(&names).expect("two nodes");
        let node = topology.owner_of(b"{a}");
        let other = (0..).map(|n| format!("{{{n}}}")).find(|name| topology.owner_of(name.as_bytes()) != node);
        let other = other.expect("a key of the other node");
        let keys: [&[u8]; 2] = [b"{a}1", other.as_bytes()];
        let plain = ScriptArgument::new(&topology, node, &keys[..1], 0);
        assert!(plain.is_plain());
        assert_eq!(plain.encode(None), b":0:*:");
        let near: Arc<[u8]> = Arc::from(&b"{a}near"[..]);
        let away = topology.keys_handed_over(&[], [&near], topology.owner_of(other.as_bytes()));
        let both = ScriptArgument::new(&away, node, &keys, 1);
        assert!(!both.is_plain());
        assert_eq!(both.encode(Some("7f")), b"7f:1:1:7:{a}near");
        let count = ScriptArgument::number_of_more;
        assert_eq!(
            [count(b"7f:1:1:7:{a}near"), count(b":0:*:"), count(b"x"), count(b"a:b:c:d")],
            [Some(1), Some(0), None, None]
        );
        // With too many names, the slot permits no undeclared keys.
        let many: Vec<Arc<[u8]>> = (0..2000).map(|n| Arc::from(format!("{{a}}many:{n}").as_bytes())).collect();
        let full = topology.keys_handed_over(&[], &many, topology.owner_of(other.as_bytes()));
        assert_eq!(ScriptArgument::new(&full, node, &keys, 0).encode(None), b":0::");
    }
}
