//! Checks whether a slot map fits the keys at the nodes, for a first start and for a stored map.
//!
//! A read of a key that is elsewhere than in the map returns nil. So a first start derives the map from key counts, and
//! requests a check of every key if counts are not sufficient. For a stored map a sample is sufficient: the router that
//! stored it also placed the keys. The sample detects a map of other nodes.

use super::{NodeId, PlaceError, Slot, Topology};

/// Slot map of a first start.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum First {
    /// Valid: no node has keys, or there is only one node.
    Even(Topology),
    /// One node has all keys, so it owns every slot. The others join without slots.
    Owner(Topology, NodeId),
    /// Several nodes have keys: this even map is valid only if every key is at its owner.
    IfKeysFit(Topology),
}

/// Sampled keys of a node.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sample {
    /// Whether the node's process was used with the map before.
    pub is_known: bool,
    /// Keys in the sample.
    pub keys: u64,
    /// Keys whose owner in the map is another node.
    pub elsewhere: u64,
}

/// Whether a stored map fits the nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fit {
    /// All sampled keys are at their owners.
    Fits,
    /// Some keys are misplaced: a client bypasses the router, or the map is an old copy.
    Doubtful,
    /// Many keys are misplaced at unknown processes, so the map belongs to other nodes.
    Foreign,
}

/// The map is foreign if one of this many keys at unknown processes is misplaced.
const FOREIGN_ONE_IN: u64 = 10;

impl Topology {
    /// Returns the map of a first start over these nodes, each with its number of keys in all databases.
    ///
    /// # Errors
    /// As [`Topology::even`].
    pub fn first(nodes: &[(String, u64)]) -> Result<First, PlaceError> {
        let names: Vec<String> = nodes.iter().map(|(name, _)| name.clone()).collect();
        let even = Self::even(&names)?;
        // Node ids follow the order of the list.
        let mut having = (0..).map(NodeId).zip(nodes).filter(|(_, (_, keys))| *keys > 0).map(|(id, _)| id);
        Ok(match (having.next(), having.next()) {
            _ if nodes.len() == 1 => First::Even(even),
            (None, _) => First::Even(even),
            (Some(owner), None) => First::Owner(even.handed_over(&Slot::all().collect::<Vec<_>>(), owner), owner),
            (Some(_), Some(_)) => First::IfKeysFit(even),
        })
    }
}

/// Judges a stored map by a sample of keys from each node that replies.
#[must_use]
pub fn judge(samples: &[Sample]) -> Fit {
    let sum = |of: fn(&Sample) -> u64| samples.iter().map(of).sum::<u64>();
    let (keys, elsewhere) = (sum(|sample| sample.keys), sum(|sample| sample.elsewhere));
    let is_known = samples.iter().any(|sample| sample.is_known && sample.keys > 0);
    match elsewhere {
        0 => Fit::Fits,
        _ if !is_known && elsewhere.saturating_mul(FOREIGN_ONE_IN) >= keys => Fit::Foreign,
        _ => Fit::Doubtful,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nodes(keys: &[u64]) -> Vec<(String, u64)> {
        keys.iter().enumerate().map(|(i, keys)| (format!("n{i}:1"), *keys)).collect()
    }

    #[test]
    fn key_counts_decide_if_sufficient() {
        let even = Topology::even(&["n0:1".to_owned(), "n1:1".to_owned()]).expect("nodes");
        assert_eq!(Topology::first(&nodes(&[0, 0])), Ok(First::Even(even.clone())));
        assert_eq!(Topology::first(&nodes(&[3, 1])), Ok(First::IfKeysFit(even)));
        assert!(
            matches!(Topology::first(&nodes(&[7])), Ok(First::Even(map)) if map.slots_of(NodeId(0)) == super::super::SLOT_COUNT)
        );
        let Ok(First::Owner(map, owner)) = Topology::first(&nodes(&[0, 9, 0])) else { panic!("the second has all") };
        assert_eq!((owner, map.ranges().collect::<Vec<_>>()), (NodeId(1), vec![(NodeId(1), 0..=16383)]));
        assert_eq!(map.nodes().len(), 3);
        assert_eq!(Topology::first(&[]), Err(PlaceError::NoNodes));
    }

    #[test]
    fn a_map_is_foreign_if_processes_are_unknown_and_keys_misplaced() {
        let of = |is_known, keys, elsewhere| Sample { is_known, keys, elsewhere };
        assert_eq!(judge(&[]), Fit::Fits);
        assert_eq!(judge(&[of(false, 1000, 0), of(false, 1000, 0)]), Fit::Fits);
        assert_eq!(judge(&[of(false, 1000, 0), of(false, 1000, 200)]), Fit::Foreign);
        assert_eq!(judge(&[of(false, 1, 1)]), Fit::Foreign);
        assert_eq!(judge(&[of(false, 1000, 3)]), Fit::Doubtful, "a client has bypassed the router");
        assert_eq!(judge(&[of(true, 1000, 0), of(false, 1000, 900)]), Fit::Doubtful, "one is known");
        assert_eq!(judge(&[of(true, 0, 0), of(false, 1000, 900)]), Fit::Foreign, "an empty sample proves nothing");
    }
}
