//! Whether a slot map fits the keys that nodes hold: the map of a first start, and a stored one.
//!
//! A key that is anywhere else than the map looks for it is answered with nil. So a first start places slots by what
//! the nodes hold, and asks for a look at every key where counts do not tell. A stored map is not weighed key by key:
//! the router that stored it has put the keys there. A sample of them tells a map that belongs to other nodes.

use super::{NodeId, PlaceError, Slot, Topology};

/// The map of a first start.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum First {
    /// It fits: no node holds keys, or there is only one.
    Even(Topology),
    /// One node holds all keys, so it owns every slot. The others have joined without any.
    Owner(Topology, NodeId),
    /// Several nodes hold keys: this even map fits only if each key is where it looks.
    IfKeysFit(Topology),
}

/// What a look at some keys of a node found.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sample {
    /// The node's process is one that the map has been used with.
    pub is_known: bool,
    /// How many keys were looked at.
    pub keys: u64,
    /// How many of them are elsewhere than the map looks for them.
    pub elsewhere: u64,
}

/// Whether a stored map belongs to the nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fit {
    /// Every key of the samples is where the map looks.
    Fits,
    /// Some are elsewhere, as when somebody writes past the router, or the map is an old copy.
    Doubtful,
    /// So many are elsewhere, at processes of which none is known, that it is the map of other nodes.
    Foreign,
}

/// Of this many keys at unknown processes, one elsewhere makes the map a foreign one.
const FOREIGN_ONE_IN: u64 = 10;

impl Topology {
    /// The map of a first start over these nodes, each with the number of its keys in all databases.
    ///
    /// # Errors
    /// As [`Topology::even`].
    pub fn first(nodes: &[(String, u64)]) -> Result<First, PlaceError> {
        let names: Vec<String> = nodes.iter().map(|(name, _)| name.clone()).collect();
        let even = Self::even(&names)?;
        // Numbers follow the order of the list.
        let mut having = (0..).map(NodeId).zip(nodes).filter(|(_, (_, keys))| *keys > 0).map(|(id, _)| id);
        Ok(match (having.next(), having.next()) {
            _ if nodes.len() == 1 => First::Even(even),
            (None, _) => First::Even(even),
            (Some(owner), None) => First::Owner(even.handed_over(&Slot::all().collect::<Vec<_>>(), owner), owner),
            (Some(_), Some(_)) => First::IfKeysFit(even),
        })
    }
}

/// Judges a stored map by a look at some keys of each node that answers.
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
    fn counts_decide_where_they_can() {
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
    fn a_map_is_foreign_where_nobody_is_known_and_keys_are_elsewhere() {
        let of = |is_known, keys, elsewhere| Sample { is_known, keys, elsewhere };
        assert_eq!(judge(&[]), Fit::Fits);
        assert_eq!(judge(&[of(false, 1000, 0), of(false, 1000, 0)]), Fit::Fits);
        assert_eq!(judge(&[of(false, 1000, 0), of(false, 1000, 200)]), Fit::Foreign);
        assert_eq!(judge(&[of(false, 1, 1)]), Fit::Foreign);
        assert_eq!(judge(&[of(false, 1000, 3)]), Fit::Doubtful, "somebody has written past the router");
        assert_eq!(judge(&[of(true, 1000, 0), of(false, 1000, 900)]), Fit::Doubtful, "one is known");
        assert_eq!(judge(&[of(true, 0, 0), of(false, 1000, 900)]), Fit::Foreign, "one that is empty says nothing");
    }
}
