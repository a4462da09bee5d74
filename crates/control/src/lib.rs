//! The control plane: location of keys, permitted changes, and persistent state.
//!
//! - [`Fleet`]: everything that belongs to one fleet.
//! - [`operator`]: operations requested by operators. [`members`]: nodes that join and leave.
//! - [`planner`]: moves hot keys and slots automatically. [`autoscale`]: starts and stops servers.
//! - [`moves`]: the executor of moves. [`eject`]: replaces a failed server of a pool with stand-ins.
//! - [`placement`]: changes, stores and publishes the slot map. [`first_start`] makes the first one.
//! - [`failover`], [`ownership`], [`node_maintenance`], [`health`]: threads that monitor primaries, other routers,
//!   function libraries, and the health of nodes.
//! - [`cluster`]: a Redis or Valkey Cluster as storage.
//! - [`nodes`]: direct queries to nodes. `loads`: load of nodes, for reports.
//! - [`store`], [`journal`], [`ledger`]: persistent state.
//! - [`sockets`]: listening sockets of this machine, and the processes that hold them.
//! - [`admin`], [`metrics`]: interfaces for operators and tools.
//!
//! Uses the router through [`Running`], never its workers directly; the router does not depend on this crate. So
//! everything that waits for a disk, a node or an operator is here, and nothing here is on the path of a command.

pub mod admin;
pub mod autoscale;
pub mod cluster;
pub mod eject;
pub mod failover;
pub mod first_start;
mod fleet;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
pub mod health;
pub mod journal;
pub mod ledger;
mod loads;
pub mod members;
pub mod metrics;
pub mod moves;
pub mod node_maintenance;
pub mod nodes;
pub mod operator;
pub mod ownership;
pub mod placement;
pub mod planner;
mod processes;
mod running;
pub mod sockets;
pub mod store;

pub use fleet::{AboutProcess, Fleet};
pub use processes::{Processes, misplaced_text};
pub use running::Running;

/// Version of this program, for errors and the state directory.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");
