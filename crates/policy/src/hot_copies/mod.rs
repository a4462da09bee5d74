//! Hot copies: replies that a router keeps of keys that are read much, and gives instead of their nodes. Never stale,
//! at any number of workers.
//!
//! The rules, by the numbers of docs/design/hot-copies.md, which has the interleaving that each one stops, and the
//! proof:
//! 1. A write of an armed key raises the key's [`Gate`] before it is sent, and lowers it, with a new version, when it
//!    is over. A copy is given only while the gate is as it was when its fill began: open, and of the same version.
//! 2. A write that is in doubt (its connection was lost) keeps the gate shut until its node has confirmed that the
//!    connection is dead. One that timed out is not over.
//! 3. A key is armed in a generation of the [`ArmedSet`]. It is filled only when every worker raises gates for it, and
//!    all that workers had sent to its node before is over.
//! 4. Each node has a gate, too. What may write any key of it raises it. Another process in the place of the node gives
//!    it a new version before anybody uses that process.
//! 5. A copy lives no longer than its key: its end is reckoned from when the time to live was asked for.
//! 6. Each worker fills on a connection of its own that tracks what it reads. What the node invalidates is dropped, and
//!    all of it with the connection.
//! 7. A copy is of where its key lives. A fill comes to nothing if its key was elsewhere meanwhile, even where it is
//!    back.
//! 8. What cannot be known is not kept.
//! 9. A worker that panics takes all gates with it: its successors and the others get new ones, and all keys come anew.
//! 10. The gate of a key that is armed no more is shut until every worker has the set without it.
//! 11. A hit needs a beat that was sent on the fill connection at most [`LEASE_US`] ago and confirmed ([`Beats`]). A
//!     successor writes only after that.
//!
//! Not a time to live, as in other proxies: what was read would be old for so long. Not a counter of versions alone: a
//! read that runs beside a write would be kept.

mod admission;
mod armed;
mod beat;
mod copies;
mod gate;
mod holds;
mod share;

pub use admission::{Admission, Admitted, Knobs};
pub use armed::{Armed, ArmedSet, hash_of_name};
pub use beat::{Beats, LEASE_US};
pub use copies::{Copies, Discarded, Filled, Read, ReadRequest, RecentHit, Sizes};
pub use gate::{Gate, GateId, Gates};
pub use holds::{WriteHolds, WriteOutcome};
pub use share::TurnBudget;
