//! Rocksteady (SOSP 2017) as in NetMigrate's testbed, made correct: ownership moves first, and requested keys that have
//! not arrived are pulled.
//!
//! As with the default protocol, the target serves a key once it has arrived, and the rest follows in the background.
//! Only the pull differs: Rocksteady requests several missing keys at once (`PriorityPull`), which disturbs the source
//! less often. NetMigrate's testbed waits for 16 missing keys or 100 ms. A client waits that long; the published
//! clients retry. Records, purge and rollback are those of the default protocol. The published protocol retains the
//! source's copies until the end instead.

use super::leg::Pulls;

/// When missing keys are pulled (NetMigrate's agents, `server/`: 16 keys or 100 ms).
pub(super) const PULLS: Pulls = Pulls { at_once: usize::MAX, keys: 16, gather_keys: 16, wait_us: 100_000 };
