//! Load generation for `switchyard demo`, `switchyard bench load`, and all measurements of the lab.
//!
//! All code here treats the router as a client does, over a socket, and imports no router internals. So a measured
//! value is one that users get, and a check cannot share a bug with the code under test.
//!
//! - [`load`]: many connections, pipelines, a mix of commands over Zipfian keys, closed or open loop; checks every
//!   reply.
//! - [`process`], [`client`], [`wire`]: start and query real servers.
//! - [`random`]: seeded random numbers and key popularity.
//! - [`numbers`], [`table`], [`interrupt`]: formats for users, and Ctrl-C.

pub mod client;
pub mod interrupt;
pub mod load;
pub mod numbers;
pub mod process;
pub mod random;
pub mod table;
pub mod wire;
