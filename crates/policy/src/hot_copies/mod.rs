//! Hot copies: cached replies for frequently read keys, served by the router instead of the node. Never stale, with any
//! number of workers.
//!
//! The rules, numbered as in docs/design/hot-copies.md, which has the proof and, for each rule, the interleaving that
//! it prevents:
//! 1. A write of a cacheable key raises the key's [`Gate`] before it is sent. Completion lowers the gate and increments
//!    its version. A copy is served only while the gate is as it was at the start of the fill: open, with the same
//!    version.
//! 2. A write lost with its connection keeps the gate shut until the node confirms that the connection is dead. A
//!    timed-out write is not complete.
//! 3. A key becomes cacheable in a generation of the [`CacheableSet`]. It is filled only after every worker raises
//!    gates for it and all earlier commands to its node have completed.
//! 4. Each node has a gate too, raised by commands that may write any key of the node. If the process of the node
//!    changes, the gate gets a new version before the new process is used.
//! 5. A copy expires with its key. The expiry is computed from the time at which the TTL was requested.
//! 6. Each worker fills over a separate connection with tracking enabled. An invalidation drops the key's copies, and
//!    the loss of the connection drops all copies of the node.
//! 7. A copy is valid only while the key stays at its node. A fill is discarded if the key was elsewhere in the
//!    meantime, even if it has returned.
//! 8. A reply whose validity is unknown is not stored.
//! 9. If a worker panics, all gates are replaced for all workers, and all keys start again as newly cacheable.
//! 10. The gate of a key that is no longer cacheable stays shut until every worker has adopted the set without it.
//! 11. A hit needs a beat sent on the fill connection at most [`LEASE_US`] ago and confirmed ([`Beats`]). A successor
//!     writes only after that.
//!
//! In front of a cluster, others write the same keys, so rules 3, 9 and 11 cannot prove that a copy is current. There,
//! copies are off, or have a bound: see `bounded.rs`.
//!
//! Gates rather than a time to live as in other proxies, because a copy would be stale for up to that time. A write
//! count rather than a version alone, because a read concurrent with a write would be stored.

mod admission;
mod beat;
mod bounded;
mod cacheable;
mod change_queue;
mod copies;
mod gate;
mod holds;
mod share;

pub use admission::{Admission, Admitted, Bug, Knobs, Limited, Selection};
pub use beat::{Beats, LEASE_US};
pub use cacheable::{CacheableKeys, CacheableSet, hash_of_name};
pub use copies::{Copies, Discarded, Filled, Read, ReadRequest, RecentHit, Sizes};
pub use gate::{Gate, GateId, Gates};
pub use holds::{WriteHolds, WriteOutcome};
pub use share::TurnBudget;
