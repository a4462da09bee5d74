//! Load generation and benchmarks.
//!
//! Everything here sees the router from outside, as a client does: over a socket. Nothing imports router internals, so that a
//! number measured here is one that a user gets, and a check made here cannot share a mistake with the code it checks.
//!
//! - [`history`]: records what clients saw, for a checker of linearizability.
//! - [`load`]: many connections, pipelines, a mix of commands over Zipfian keys, closed or open loop, every reply checked.
//! - [`moves`]: what moving slots costs, beside `redis-cli --cluster reshard`.
//! - [`peers`]: the router beside the proxies that a user could pick instead, in one run on one machine.
//! - [`soak`]: moves with faults, again and again, under clients whose histories are checked.
//! - [`process`], [`procfs`], [`client`]: starting real servers, reading what they cost, asking them things.

pub mod client;
pub mod history;
pub mod interrupt;
pub mod load;
pub mod moves;
pub mod numbers;
pub mod peers;
pub mod process;
pub mod procfs;
pub mod random;
pub mod soak;
pub mod table;
pub mod wire;
