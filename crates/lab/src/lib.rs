//! Measurements and trials of the router: what its developers run, and its operators need not.
//!
//! Everything here sees the router from outside, as a client does: over a socket. Nothing imports router internals, so
//! that a number measured here is one that a user gets, and a check made here cannot share a mistake with the code it
//! checks.
//!
//! - [`peers`]: the router beside the proxies that a user could pick instead, in one run on one machine.
//! - [`moves`]: what moving slots costs, beside `redis-cli --cluster reshard`.
//! - [`hot_keys`]: what hot copies give, and what they cost where nothing is hot.
//! - [`history`]: records what clients saw, for a checker of linearizability.
//! - [`soak`]: moves with faults, again and again, under clients whose histories are checked.
//! - [`reproduce`]: what the papers measured, on this machine.
//! - [`product`]: finds the router to measure.
//! - [`site`]: the servers and the router that a trial breaks.
//!
//! The load generator, and starting of servers, is in `switchyard-bench`; the simulator is `switchyard-sim`.

mod document;
pub mod history;
pub mod hot_keys;
pub mod moves;
pub mod peers;
mod procfs;
pub mod product;
pub mod reproduce;
pub mod site;
pub mod soak;
