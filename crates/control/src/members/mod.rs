//! Nodes that were added and removed at run time.
//!
//! The configuration lists nodes; the state directory stores later changes (docs/decisions/0012). So `nodes add` needs
//! no edit of a file, and a restart preserves both. Changes that the configuration already contains are not stored.

mod alike;
mod drained;
mod leaving;
mod newcomer;

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::nodes::NodeAddress;
use crate::store::{RedbStore, load_json, save_json};

pub(crate) use alike::align_settings;
pub(crate) use drained::Drained;
pub use leaving::{leaving, store_addresses};
pub use newcomer::FleetFacts;

/// Store document of the changes.
const MEMBERS: &str = "nodes";

/// Changes relative to the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemberChanges {
    /// Nodes that the configuration does not list.
    pub added: Vec<String>,
    /// Listed nodes that were removed.
    pub removed: Vec<String>,
}

impl MemberChanges {
    fn drop_listed(&mut self, listed: &[String]) {
        self.added.retain(|name| !listed.contains(name));
        self.removed.retain(|name| listed.contains(name));
        for names in [&mut self.added, &mut self.removed] {
            names.sort();
            names.dedup();
        }
    }
}

/// A change of the list of nodes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MemberChange {
    /// Add the node of this name.
    Add(String),
    /// Remove the node of this name.
    Remove(String),
}

/// List of nodes: the configuration with later changes. Implemented by the component that reads the configuration.
pub trait NodeList: Send + Sync {
    /// Returns the address of a server as if it were a node, by the configuration. Changes nothing.
    fn find(&self, name: &str) -> Result<NodeAddress, String>;

    /// Changes the list, and waits until every worker has adopted it.
    fn change(&self, change: MemberChange) -> Result<(), String>;
}

/// Not a supertrait of [`NodeList`]: its table of functions would keep the `Debug` code of all fields in the binary.
impl fmt::Debug for dyn NodeList + '_ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("NodeList")
    }
}

/// Returns the stored changes without modifying them.
pub fn load_changes(store: &RedbStore, listed: &[String]) -> anyhow::Result<MemberChanges> {
    let mut remembered: MemberChanges = load_json(store, MEMBERS)?;
    remembered.drop_listed(listed);
    Ok(remembered)
}

/// Applies `change` to the stored changes, and removes the entries that the configuration already contains.
pub fn apply_change(
    store: &RedbStore,
    listed: &[String],
    change: Option<&MemberChange>,
) -> anyhow::Result<MemberChanges> {
    let before: MemberChanges = load_json(store, MEMBERS)?;
    let mut after = before.clone();
    match change {
        Some(MemberChange::Add(name)) => {
            after.removed.retain(|removed| removed != name);
            after.added.push(name.clone());
        }
        Some(MemberChange::Remove(name)) => {
            after.added.retain(|added| added != name);
            after.removed.push(name.clone());
        }
        None => {}
    }
    after.drop_listed(listed);
    if after != before {
        save_json(store, MEMBERS, &after)?;
    }
    Ok(after)
}

/// Restores the previous changes after a change was refused.
pub fn restore_changes(store: &RedbStore, before: &MemberChanges) -> anyhow::Result<()> {
    Ok(save_json(store, MEMBERS, before)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_in_the_configuration_are_not_stored() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let store = RedbStore::open(dir.path()).expect("a store");
        let names = |names: &[&str]| names.iter().map(|n| (*n).to_owned()).collect::<Vec<_>>();
        let listed = names(&["a:1", "b:1"]);
        let step = |listed: &[String], change: Option<MemberChange>| {
            let remembered = apply_change(&store, listed, change.as_ref()).expect("saved");
            assert_eq!(apply_change(&store, listed, None).expect("saved"), remembered, "it survives");
            (remembered.added, remembered.removed)
        };
        assert_eq!(step(&listed, Some(MemberChange::Add("c:1".into()))), (names(&["c:1"]), names(&[])));
        assert_eq!(step(&listed, Some(MemberChange::Remove("a:1".into()))), (names(&["c:1"]), names(&["a:1"])));
        assert_eq!(
            step(&listed, Some(MemberChange::Add("a:1".into()))),
            (names(&["c:1"]), names(&[])),
            "it is in the file"
        );
        assert_eq!(step(&listed, Some(MemberChange::Remove("b:1".into()))), (names(&["c:1"]), names(&["b:1"])));
        let edited = names(&["a:1", "c:1"]);
        assert_eq!(step(&edited, None), (names(&[]), names(&[])), "the file contains both");
        assert_eq!(step(&edited, Some(MemberChange::Remove("c:1".into()))), (names(&[]), names(&["c:1"])));
        // A refused removal of a node that is not listed leaves no entry.
        let before = load_changes(&store, &edited).expect("is read");
        step(&edited, Some(MemberChange::Remove("d:1".into())));
        restore_changes(&store, &before).expect("saved");
        assert_eq!(load_changes(&store, &edited).expect("is read"), before);
    }
}
