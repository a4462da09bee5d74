//! Stored form of a topology: a row of JSON, and a table of its placement overrides.
//!
//! Apart from the database, because a fuzzer reads rows without one.

use std::ops::RangeInclusive;
use std::sync::Arc;

use redb::ReadableTable;
use serde::{Deserialize, Serialize};
use switchyard_policy::topology::{
    Continuum, Node, NodeId, Placement, Ruled, SLOT_COUNT, StoredContinuum, StoredRules, Topology,
};

use super::{Failure, parse_failure};

/// Maximum number of placement overrides of early versions, and maximum total size of their names, in bytes.
const EARLY_OVERRIDES_MAX: usize = 65_536;
const EARLY_OVERRIDE_BYTES_MAX: usize = 16 << 20;

/// The row.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    epoch: u64,
    next_id: u32,
    nodes: Vec<NodeDocument>,
    /// First slot, last slot, number of the owner.
    ranges: Vec<(u16, u16, u16)>,
    /// Placement overrides as the first version wrote them: name in hexadecimal, and number of the node.
    #[serde(default, skip_serializing)]
    exceptions: Vec<(String, u16)>,
    /// Number of placement overrides in `exceptions`. Programs that do not know the table do not know this field
    /// either, and refuse the file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    exceptions_apart: Option<usize>,
    /// Whether `exceptions` is larger than early versions support, which refuse the file because of this field.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    exceptions_many: bool,
    /// Continuum that maps keys to slots instead of CRC16. Programs without support refuse the file, as above.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    continuum: Option<StoredContinuum>,
    /// Placement rules, if the fleet has had any. Programs without support refuse the file, as above.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rules: Option<StoredRules>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct NodeDocument {
    id: u16,
    name: String,
}

pub(super) fn encode(topology: &Topology) -> Vec<u8> {
    let document = Document {
        epoch: topology.epoch(),
        next_id: topology.next_id(),
        nodes: topology.nodes().map(|node| NodeDocument { id: node.id.0, name: node.name.clone() }).collect(),
        ranges: topology.ranges().map(|(owner, range)| (*range.start(), *range.end(), owner.0)).collect(),
        exceptions: Vec::new(),
        exceptions_apart: Some(topology.override_count()).filter(|count| *count > 0),
        exceptions_many: topology.override_count() > EARLY_OVERRIDES_MAX
            || topology.override_bytes() > EARLY_OVERRIDE_BYTES_MAX,
        continuum: topology.placement().continuum().map(|continuum| continuum.stored()),
        rules: topology.ruled().map(|ruled| ruled.stored()),
    };
    serde_json::to_vec(&document).expect("numbers and strings are always JSON")
}

/// A topology as read.
pub(super) struct Loaded {
    pub(super) topology: Topology,
    /// Whether `exceptions` has its placement overrides, exactly.
    pub(super) overrides_apart: bool,
}

/// Key, and the node where it lives.
type PlacedKey = (Arc<[u8]>, NodeId);

/// All keys of `exceptions`.
pub(super) fn load_overrides(table: &impl ReadableTable<&'static [u8], u16>) -> Result<Vec<PlacedKey>, Failure> {
    let mut all = Vec::new();
    for row in table.iter()? {
        let (key, node) = row?;
        all.push((key.value().into(), NodeId(node.value())));
    }
    Ok(all)
}

/// Parses a topology. `apart` reads the keys in the table.
pub(super) fn decode(bytes: &[u8], apart: impl FnOnce() -> Result<Vec<PlacedKey>, Failure>) -> Result<Loaded, Failure> {
    let bad = |what: String| Failure::Damaged(format!("its topology cannot be read: {what}"));
    let document: Document = serde_json::from_slice(bytes).map_err(|error| parse_failure("topology", &error))?;
    let nodes = document.nodes.into_iter().map(|node| Node { id: NodeId(node.id), name: node.name }).collect();
    let ranges =
        document.ranges.iter().map(|(first, last, owner)| (NodeId(*owner), RangeInclusive::new(*first, *last)));
    let topology = Topology::from_parts(document.epoch, nodes, ranges, document.next_id)
        .map_err(|error| bad(error.to_string()))?;
    let (count, end) = document.ranges.iter().fold((0, 0), |(count, end), (first, last, _)| {
        (count + last.abs_diff(*first) as usize + 1, end.max(usize::from(*last) + 1))
    });
    let topology = match (document.continuum, document.rules) {
        (None, None) => topology,
        (Some(_), Some(_)) => return Err(bad("it has both a continuum and rules".to_owned())),
        (Some(stored), None) => {
            let continuum = Continuum::try_from(stored).map_err(|error| bad(error.to_string()))?;
            topology.with_stored_placement(Placement::Continuum(continuum.into()))
        }
        (None, Some(stored)) => {
            let ruled = Ruled::try_from(stored).map_err(|error| bad(error.to_string()))?;
            topology.with_stored_placement(Placement::Ruled(ruled.into()))
        }
    };
    let expected = topology.placement().slots().max(SLOT_COUNT);
    if count != expected || end != expected {
        return Err(bad(format!("it has owners of {count} slots, up to number {end}, instead of {expected}")));
    }
    let overrides_apart = document.exceptions_apart.is_some();
    let exceptions = match document.exceptions_apart {
        Some(count) => {
            let apart = apart()?;
            if apart.len() != count {
                return Err(bad(format!("it counts {count} placement overrides, and {} are on record", apart.len())));
            }
            apart
        }
        None => {
            let key = |(name, node): &(String, u16)| Some((hex::decode(name).ok()?.into(), NodeId(*node)));
            let keys: Option<Vec<PlacedKey>> = document.exceptions.iter().map(key).collect();
            keys.ok_or_else(|| bad("the name of a key is not in hexadecimal".to_owned()))?
        }
    };
    let topology = topology.with_stored_overrides(exceptions).map_err(|error| bad(error.to_string()))?;
    Ok(Loaded { topology, overrides_apart })
}
