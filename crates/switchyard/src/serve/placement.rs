//! From the nodes that the user names to the topology that the router gets: the stored slot map, the numbers of the nodes in
//! it, and how each is reached.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Context;
use switchyard_control::store::{RedbStore, Store};
use switchyard_policy::topology::{NodeId, Topology};
use switchyard_router::NodeAccess;

use crate::config::{Config, NodeAddress};

/// The slot map in force, and where it is kept.
pub(super) struct Placement {
    store: Arc<RedbStore>,
    topology: Option<Arc<Topology>>,
}

/// What became of the list of nodes.
#[derive(Debug)]
pub(super) struct Settled {
    pub(super) topology: Arc<Topology>,
    /// Names of the nodes that are new and own no slots.
    pub(super) joined: Vec<String>,
    /// Numbers and names of the nodes that are gone.
    pub(super) removed: Vec<(NodeId, String)>,
    pub(super) changed: bool,
}

impl Placement {
    /// Opens the state directory, which no other process may have open.
    pub(super) fn open(config: &Config) -> anyhow::Result<Self> {
        let store = Arc::new(RedbStore::open(&config.state_dir)?);
        let topology = store.load_topology()?.map(Arc::new);
        Ok(Self { store, topology })
    }

    /// The store, for those who keep other things in it.
    pub(super) fn store(&self) -> &Arc<RedbStore> {
        &self.store
    }

    /// Counts this start.
    pub(super) fn next_incarnation(&self) -> anyhow::Result<u64> {
        Ok(self.store.next_incarnation()?)
    }

    /// Reconciles the map with the nodes wanted, and makes the outcome durable before anybody sees it.
    pub(super) fn settle(&mut self, wanted: &[String]) -> anyhow::Result<Settled> {
        let placed = Topology::place(self.topology.as_deref(), wanted)?;
        let topology = match &self.topology {
            Some(stored) if !placed.changed => Arc::clone(stored),
            _ => {
                self.store.save_topology(&placed.topology).context("cannot keep the slot map")?;
                Arc::new(placed.topology)
            }
        };
        self.topology = Some(Arc::clone(&topology));
        let name = |id| topology.node(id).map(|node| node.name.clone());
        Ok(Settled {
            joined: placed.joined.iter().filter_map(|id| name(*id)).collect(),
            removed: placed.removed.into_iter().map(|node| (node.id, node.name)).collect(),
            changed: placed.changed,
            topology,
        })
    }
}

/// How each node of the topology is reached, by its number. Every node of the topology is among the addresses, because the
/// topology was made from their names.
pub(super) fn access(topology: &Topology, addresses: &[NodeAddress]) -> BTreeMap<NodeId, NodeAccess> {
    let by_name: BTreeMap<&str, &NodeAddress> = addresses.iter().map(|node| (node.name.as_str(), node)).collect();
    topology
        .nodes()
        .filter_map(|node| {
            let found = by_name.get(node.name.as_str())?;
            Some((node.id, found.access()))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Override, Raw, Sources};

    fn config(dir: &std::path::Path, nodes: &[&str]) -> Config {
        let set = |path: &str, value| Override { flag: format!("--{path}"), path: path.to_owned(), value };
        Sources {
            file: None,
            overrides: vec![
                set("state-dir", Raw::Text(dir.display().to_string())),
                set("node", Raw::List(nodes.iter().map(|n| Raw::Text((*n).to_owned())).collect())),
            ],
        }
        .read()
        .expect("a good configuration")
    }

    #[test]
    fn the_map_survives_a_restart_and_nodes_keep_their_numbers() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let first = config(dir.path(), &["127.0.0.1:7001", "127.0.0.1:7002"]);
        let before = {
            let mut placement = Placement::open(&first).expect("opens");
            assert_eq!(placement.next_incarnation().expect("counts"), 1);
            let settled = placement.settle(&first.node_names()).expect("places");
            assert!(settled.changed && settled.joined.is_empty() && settled.removed.is_empty());
            let refused = Placement::open(&first).map(|_| ()).expect_err("locked").to_string();
            assert!(refused.contains("in use"), "{refused}");
            settled.topology
        };

        let second = config(dir.path(), &["127.0.0.1:7003", "127.0.0.1:7002", "127.0.0.1:7001"]);
        let mut placement = Placement::open(&second).expect("opens again");
        assert_eq!(placement.next_incarnation().expect("counts"), 2);
        let settled = placement.settle(&second.node_names()).expect("places");
        assert_eq!(settled.joined, ["127.0.0.1:7003"]);
        assert_eq!(settled.topology.epoch(), before.epoch() + 1);
        assert_eq!(settled.topology.ranges().collect::<Vec<_>>(), before.ranges().collect::<Vec<_>>(), "nothing moved");

        let addresses = second.resolve(|_| None).expect("resolves").nodes;
        let access = access(&settled.topology, &addresses);
        for (number, port) in [(0, 7001), (1, 7002), (2, 7003)] {
            assert_eq!(access[&NodeId(number)].address.map(|a| a.port()), Some(port));
        }

        let error = placement.settle(&["127.0.0.1:7003".to_owned()]).expect_err("owners are missing").to_string();
        assert!(error.contains("127.0.0.1:7001") && error.contains("slots"), "{error}");
        let settled = placement.settle(&first.node_names()).expect("the node without slots may go");
        assert_eq!(settled.removed, [(NodeId(2), "127.0.0.1:7003".to_owned())]);
        let unchanged = placement.settle(&first.node_names()).expect("places");
        assert!(!unchanged.changed && Arc::ptr_eq(&unchanged.topology, &settled.topology));
    }
}
