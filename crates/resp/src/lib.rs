//! RESP, the Redis serialization protocol: bytes to commands and replies, and back.
//!
//! Everything here is a pure function of the bytes given: no sockets, no clock, no allocation by declared length.
//! The router, the fuzzers and the simulator run the same code.
//!
//! - [`request`]: finds the arguments of a command in a buffer (multibulk and inline).
//! - [`reply`]: finds where a reply ends, and what kind it is, in RESP2 and RESP3.
//! - [`encode`]: writes commands and replies.
//! - [`glob`]: the patterns of `KEYS`, `PSUBSCRIBE`, `CONFIG GET` and of users' rights.
//! - [`translate`]: replies of one protocol in the form of the other.
//! - [`units`]: sizes and times as `redis.conf` has them.
//! - [`command`]: the command table as data: names, arity, flags, where the keys are, who answers.

pub mod command;
pub mod encode;
pub mod glob;
pub mod reply;
pub mod request;
pub mod translate;
pub mod units;
