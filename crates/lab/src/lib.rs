//! Measurements and trials of the router, for its developers; operators do not need them.
//!
//! Everything here uses the router from outside, like a client: over a socket. Nothing imports router internals, so
//! that users get the numbers measured here, and a check cannot share a mistake with the checked code.
//!
//! - [`peers`]: the router compared with alternative proxies, in one run on one machine.
//! - [`moves`]: cost of moving slots, compared with `redis-cli --cluster reshard`.
//! - [`queues`]: throughput of a job queue library by placement rules.
//! - [`together`]: cost of keys of several nodes in one command.
//! - [`clusters`]: the router in front of a Redis or Valkey Cluster.
//! - [`fleet`]: policies compared in simulated fleets.
//! - [`validate`]: simulated fleets compared with real servers.
//! - [`hot_keys`]: gain from hot copies, and their cost if no key is hot.
//! - [`history`]: records the operations of clients, for a linearizability checker.
//! - [`soak`]: repeated moves with faults, under clients whose histories are checked.
//! - [`reproduce`]: experiments of papers, on this machine.
//! - [`product`]: finds the router to measure.
//! - [`site`]: the servers and the router that a trial breaks.
//!
//! The load generator and the start of servers are in `switchyard-bench`; the simulator is `switchyard-sim`.

pub mod clusters;
mod document;
mod figure;
pub mod fleet;
pub mod history;
pub mod hot_keys;
pub mod moves;
pub mod peers;
mod procfs;
pub mod product;
pub mod queues;
pub mod reproduce;
pub mod site;
pub mod soak;
pub mod together;
pub mod validate;
