//! Nodes that a pool's file lists no longer. They stay nodes until they are empty, also over a restart, so their
//! addresses are on record: the file has them no more.
//!
//! Only for pools of twemproxy's configuration. There editing the list is the way to change a fleet, and a name says
//! nothing about the address.

use std::collections::BTreeMap;

use switchyard_policy::topology::Topology;

use crate::store::{RedbStore, load_json, save_json};

/// The document of the store.
const PLACES: &str = "pool-servers";

/// Nodes of the map that are not in a list, by name with their addresses. `removed`: those that an operator has
/// removed.
///
/// # Errors
/// If the store cannot be read.
pub fn leaving(
    store: &RedbStore,
    topology: Option<&Topology>,
    listed: &[String],
    removed: &[String],
) -> anyhow::Result<BTreeMap<String, String>> {
    let mut places: BTreeMap<String, String> = load_json(store, PLACES)?;
    places.retain(|name, _| !listed.contains(name) && !removed.contains(name));
    places.retain(|name, _| topology.is_some_and(|topology| topology.nodes().any(|node| node.name == *name)));
    Ok(places)
}

/// Keeps the addresses of all nodes of a pool, by name.
///
/// # Errors
/// If the store cannot be written.
pub fn keep_places(store: &RedbStore, places: &BTreeMap<String, String>) -> anyhow::Result<()> {
    let known: BTreeMap<String, String> = load_json(store, PLACES)?;
    if known != *places {
        save_json(store, PLACES, places)?;
    }
    Ok(())
}
