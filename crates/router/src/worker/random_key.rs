//! RANDOMKEY over all nodes: every key is as likely as any other, as from one server.
//!
//! The nodes report their numbers of keys, and a node chosen with that weight returns one of its keys. Choosing among
//! one key of each node would favour keys of small nodes.

use switchyard_policy::migration::is_temporary;
use switchyard_policy::topology::NodeId;
use switchyard_resp::{encode, reply};

use super::downstreams::Downstreams;
use super::flow::Flow;
use super::gather::Gathers;
use super::multi_step::{MultiStepCommand, Next, StepRequest};
use super::quiesce::belongs;
use super::turn::Turn;
use super::upstreams::Upstreams;
use crate::lane::Lane;
use crate::slab::Handle;

/// Maximum number of unusable keys (of movers, or stale copies) that a node returns before it counts as empty.
const STRANGERS_MAX: u32 = 32;

#[derive(Debug)]
struct RandomKey {
    nodes: Vec<NodeId>,
    /// Number of keys of each node, when known; 0 if it has turned out to be empty.
    keys: Vec<u64>,
    /// Index of the node that was sent RANDOMKEY.
    queried: usize,
    strangers: u32,
    random: u64,
}

impl RandomKey {
    /// Returns the index of a node, weighted by the number of keys.
    fn choose(&mut self) -> Option<usize> {
        self.random = rapidhash::v3::rapidhash_v3(&self.random.to_ne_bytes());
        let mut at = self.random.checked_rem(self.keys.iter().fold(0, |sum, keys| sum.saturating_add(*keys)))?;
        self.keys.iter().position(|keys| {
            let is_here = at < *keys;
            at = at.saturating_sub(*keys);
            is_here
        })
    }
}

impl MultiStepCommand for RandomKey {
    fn next(&mut self, turn: &Turn, _: &Upstreams, resp3: bool, mut parts: Vec<Vec<u8>>) -> Next {
        if let Some(error) = parts.iter().find(|part| reply::is_error(part)) {
            return Next::Done(error.clone());
        }
        if self.keys.is_empty() {
            self.keys = parts
                .iter()
                .map(|part| reply::integer(part).and_then(|n| u64::try_from(n).ok()).unwrap_or(0))
                .collect();
        } else {
            let answer = parts.pop().unwrap_or_default();
            let node = self.nodes[self.queried];
            let is_stranger =
                reply::text(&answer).is_some_and(|key| is_temporary(key) || !belongs(turn.routing(), node, key));
            if !reply::is_null(&answer) && !is_stranger {
                return Next::Done(answer);
            }
            self.strangers += u32::from(is_stranger);
            if !is_stranger || self.strangers == STRANGERS_MAX {
                self.keys[self.queried] = 0;
                self.strangers = 0;
            }
        }
        match self.choose() {
            Some(place) => {
                self.queried = place;
                let request = b"*1\r\n$9\r\nRANDOMKEY\r\n".to_vec();
                Next::Round(vec![StepRequest { node: self.nodes[place], lane: Lane::Main, requests: vec![request] }])
            }
            None => {
                let mut out = Vec::new();
                encode::null(&mut out, resp3);
                Next::Done(out)
            }
        }
    }
}

impl Gathers {
    pub(super) fn random_key(&mut self, turn: &Turn, down: &mut Downstreams, handle: Handle, class: u8) -> Flow {
        let nodes = turn.data_nodes().all();
        let size = |node: &NodeId| StepRequest {
            node: *node,
            lane: Lane::Main,
            requests: vec![b"*1\r\n$6\r\nDBSIZE\r\n".to_vec()],
        };
        let first: Vec<StepRequest> = nodes.iter().map(size).collect();
        let random = turn.now_us() ^ self.next_random().rotate_left(32);
        let procedure = RandomKey { nodes, keys: Vec::new(), queried: 0, strangers: 0, random };
        self.begin_alone(turn, down, handle, class, Box::new(procedure), first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_chosen_by_their_keys() {
        let mut random =
            RandomKey { nodes: Vec::new(), keys: vec![1000, 0, 9000], queried: 0, strangers: 0, random: 7 };
        let mut chosen = [0u32; 3];
        for _ in 0..10_000 {
            chosen[random.choose().expect("there are keys")] += 1;
        }
        assert_eq!(chosen[1], 0);
        assert!((800..1200).contains(&chosen[0]), "{chosen:?}");
        random.keys = vec![0, 0, 0];
        assert_eq!(random.choose(), None);
    }
}
