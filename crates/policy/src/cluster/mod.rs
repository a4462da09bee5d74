//! A Redis or Valkey Cluster as storage: its members, the owners of its slots, and its redirects.
//!
//! The cluster decides where a key is, and each member refuses commands for slots that it does not own. So the map here
//! is a hint: a wrong one costs a redirect, and never a wrong reply. For the same reason several routers may serve one
//! cluster without any agreement among them.
//!
//! Apart from [`topology`](crate::topology), which this module builds: a fleet of standalone nodes changes its own map
//! step by step, while this map follows the replies of others and may be replaced as a whole.

mod claims;
mod nodes;
mod redirect;
pub mod reshard;
mod view;

pub use claims::{Claims, Peer};
pub use nodes::Nodes;
pub use redirect::{Place, Redirect};
pub use view::{Adopted, Member, OpenSlot, Shard, View, ViewError};
