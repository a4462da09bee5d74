//! Nodes that a pool's file no longer lists. They stay nodes until they are empty, even over a restart, so the store
//! keeps their addresses.
//!
//! Only for pools of twemproxy's configuration: there operators change a fleet by editing the list, and a name does not
//! contain the address.

use std::collections::BTreeMap;

use switchyard_policy::topology::Topology;

use crate::store::{RedbStore, load_json, save_json};

/// Store document of the servers' addresses.
const PLACES: &str = "pool-servers";

/// Returns names and addresses of nodes in the map that are not listed. `removed`: nodes that an operator has removed.
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

/// Stores the addresses of all nodes of a pool, by name.
///
/// # Errors
/// If the store cannot be written.
pub fn store_addresses(store: &RedbStore, places: &BTreeMap<String, String>) -> anyhow::Result<()> {
    let known: BTreeMap<String, String> = load_json(store, PLACES)?;
    if known != *places {
        save_json(store, PLACES, places)?;
    }
    Ok(())
}
