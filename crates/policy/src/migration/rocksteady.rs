//! Rocksteady (SOSP 2017) as NetMigrate's testbed has it, with what makes it correct: ownership goes first, and what is
//! asked for and not there yet is pulled.
//!
//! As with the default protocol the target serves a key as soon as it has it, and the rest follows in the background.
//! What differs is the pull. Rocksteady asks the source for several missing keys at once (`PriorityPull`), so that the
//! source, which is what the move wants to relieve, is disturbed less often: NetMigrate's testbed waits until sixteen
//! are missing, or a tenth of a second. A client waits for that long, where the published clients try again. Records,
//! purge and going back are those of the shell; the published protocol has none, and keeps the source's copies until
//! all is over instead.

use super::leg::Pulls;

/// When missing keys are asked for (NetMigrate's agents, `server/`: 16 keys or 100 ms).
pub(super) const PULLS: Pulls = Pulls { at_once: usize::MAX, keys: 16, gathers: 16, wait_us: 100_000 };
