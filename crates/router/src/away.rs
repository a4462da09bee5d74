//! Slots of an ejected node that others serve, and the keys written there in the meantime
//! ([`switchyard_policy::eject::Elsewhere`]).
//!
//! Workers write to the list, and the mover that brings the slots back reads it. Part of the snapshot, so that each
//! worker knows of it before any worker sends a command to a stand-in. A lock rather than a list for each worker: only
//! writes in these slots take it, and only while a node is ejected.

use std::sync::{Arc, Mutex};

use switchyard_policy::eject::Elsewhere;
use switchyard_policy::migration::Fingerprinter;
use switchyard_policy::topology::{NodeId, SLOT_NUMBERS, Slot};

use crate::lock::lock;

/// Slots that are away from an ejected node.
#[derive(Clone, Debug)]
pub(crate) struct Away {
    pub(crate) node: NodeId,
    /// By number.
    slots: Arc<[bool]>,
    fingerprints: Fingerprinter,
    /// Shared by all versions of this value: slots may be added.
    elsewhere: Arc<Mutex<Elsewhere>>,
}

impl Away {
    /// Returns the record of a node without slots. `process`: its process when it failed; `None`: clients did not use
    /// its data.
    pub(crate) fn new(node: NodeId, process: Option<&str>, fingerprints: Fingerprinter) -> Self {
        let elsewhere = Arc::new(Mutex::new(Elsewhere::new(process)));
        Self { node, slots: [false; SLOT_NUMBERS].into(), fingerprints, elsewhere }
    }

    /// Returns the record with more slots. `process`: as in [`Away::new`].
    pub(crate) fn with(&self, slots: &[Slot], process: Option<&str>) -> Self {
        if !lock(&self.elsewhere).is_of(process) {
            self.note_any();
        }
        let mut all = self.slots.to_vec();
        slots.iter().for_each(|slot| all[slot.index()] = true);
        Self { slots: all.into(), ..self.clone() }
    }

    /// Whether a slot is away.
    pub(crate) fn has(&self, slot: Slot) -> bool {
        self.slots[slot.index()]
    }

    /// Records a key that a command may change. Must be called before the command is sent.
    pub(crate) fn note(&self, key: &[u8]) {
        let fingerprint = self.fingerprints.of(key);
        lock(&self.elsewhere).note(fingerprint);
    }

    /// Records that any key may have changed.
    pub(crate) fn note_any(&self) {
        lock(&self.elsewhere).note_any();
    }

    /// Whether the node, which is this process now, has a key of these slots as it was written last.
    pub(crate) fn is_current(&self, process: &str, key: &[u8]) -> bool {
        let fingerprint = self.fingerprints.of(key);
        lock(&self.elsewhere).is_current(process, fingerprint)
    }
}
