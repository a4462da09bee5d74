//! Load generation: what `switchyard demo` and `switchyard bench load` need, and what every measurement of the lab
//! stands on.
//!
//! Everything here sees the router from outside, as a client does: over a socket. Nothing imports router internals, so
//! that a number measured here is one that a user gets, and a check made here cannot share a mistake with the code it
//! checks.
//!
//! - [`load`]: many connections, pipelines, a mix of commands over Zipfian keys, closed or open loop, every reply
//!   checked.
//! - [`process`], [`client`], [`wire`]: starting real servers, asking them things.
//! - [`random`]: seeded numbers, and which keys are popular.
//! - [`numbers`], [`table`], [`interrupt`]: what the user types and reads, and Ctrl-C.

pub mod client;
pub mod interrupt;
pub mod load;
pub mod numbers;
pub mod process;
pub mod random;
pub mod table;
pub mod wire;
