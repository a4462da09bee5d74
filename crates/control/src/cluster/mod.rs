//! A Redis or Valkey Cluster as storage: reading its map, and the control plane of a router in front of it.
//!
//! The cluster owns the truth, so nothing is stored: no state directory, journal or ownership record. Several routers
//! may serve one cluster. Apart from [`crate::Fleet`], whose parts all work on stored state.

mod fleet;
mod keeper;
mod members;
mod mover;
mod moves;
mod planning;
mod replicas;
mod report;

pub use fleet::ClusterFleet;
pub use keeper::{ClusterKeeper, MapThread};
pub use moves::{ClusterMoves, MovesThread};
pub use replicas::ReplicaThread;
pub use report::{AccessOf, ClusterReader, Report};
