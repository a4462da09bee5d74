//! Drained nodes: they get no slots until an operator undrains them, even after a restart. Otherwise two nodes drained
//! in sequence would give their slots to each other.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::store::{RedbStore, StoreError, load_json, save_json};

/// Store document of drained nodes.
const DRAINED: &str = "nodes-drained";

/// Names of drained nodes.
#[derive(Debug, Default)]
pub(crate) struct Drained(Mutex<BTreeSet<String>>);

impl Drained {
    pub(crate) fn load(store: &RedbStore) -> Result<Self, StoreError> {
        Ok(Self(Mutex::new(load_json(store, DRAINED)?)))
    }

    fn names(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.names().contains(name)
    }

    pub(crate) fn all(&self) -> Vec<String> {
        self.names().iter().cloned().collect()
    }

    /// Records that a node is drained, or no longer. Stored before it takes effect.
    pub(crate) fn set(&self, store: &RedbStore, name: &str, drained: bool) -> Result<(), String> {
        let mut names = self.names();
        let mut next = names.clone();
        let is_new = if drained { next.insert(name.to_owned()) } else { next.remove(name) };
        if is_new {
            save_json(store, DRAINED, &next)
                .map_err(|error| format!("cannot store that {name} is drained: {error}"))?;
            *names = next;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drained_nodes_stay_drained_until_undrained() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        {
            let store = RedbStore::open(dir.path()).expect("a store");
            let drained = Drained::load(&store).expect("nothing yet");
            drained.set(&store, "a:1", true).expect("kept");
            drained.set(&store, "b:1", true).expect("kept");
            drained.set(&store, "b:1", false).expect("kept");
        }
        let store = RedbStore::open(dir.path()).expect("a store");
        let drained = Drained::load(&store).expect("kept");
        assert!(drained.has("a:1") && !drained.has("b:1"));
        assert_eq!(drained.all(), ["a:1"]);
    }
}
