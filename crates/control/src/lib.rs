//! The control plane: where keys are, who may change it, and what is remembered between runs.
//!
//! - [`Fleet`]: all of it that belongs to one fleet.
//! - [`operator`]: what people ask of a fleet, in their words. [`members`]: nodes that join and go.
//! - [`planner`]: moves what is hot by itself. [`autoscale`]: starts and stops servers.
//! - [`moves`]: the executor of moves. [`eject`]: others serve for a server of a pool that fails.
//! - [`placement`]: the slot map in force, and its one owner. [`first_start`] makes the first one.
//! - [`failover`], [`seat`], [`node_maintenance`], [`health`]: threads that watch primaries, other routers, functions of nodes, and
//!   how nodes are.
//! - [`nodes`]: nodes, asked directly. `loads`: what these have to do, for people who ask.
//! - [`store`], [`journal`], [`ledger`]: what survives a restart.
//! - [`sockets`]: listening sockets of this machine, and their holders.
//! - [`admin`], [`metrics`]: what people and their tools talk to.
//!
//! It sees the router through [`Running`] and never its workers; the router does not know that it is there. So whatever
//! waits for a disk, a node or a person is here, and nothing here is on the path of a command.

pub mod admin;
pub mod autoscale;
pub mod eject;
pub mod failover;
pub mod first_start;
mod fleet;
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
pub mod placement;
pub mod planner;
mod processes;
mod running;
pub mod seat;
pub mod sockets;
pub mod store;

pub use fleet::{AboutProcess, Fleet};
pub use processes::{Processes, misplaced_text};
pub use running::Running;

/// The version of this program, as errors and the state directory name it.
pub(crate) const VERSION: &str = env!("CARGO_PKG_VERSION");
