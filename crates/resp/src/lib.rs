//! RESP, the Redis serialization protocol: conversion between bytes and commands or replies.
//!
//! Pure functions of the given bytes: no sockets, no clock, no allocation by declared length. The router, the fuzz
//! targets, and the simulator run the same code.
//!
//! - [`request`]: finds the arguments of a command in a buffer (multibulk and inline).
//! - [`reply`]: finds the end and the kind of a reply, in RESP2 and RESP3.
//! - [`encode`]: encodes commands and replies.
//! - [`glob`]: patterns of `KEYS`, `PSUBSCRIBE`, `CONFIG GET`, and ACL rules.
//! - [`translate`]: converts replies between RESP2 and RESP3.
//! - [`units`]: sizes and times as in `redis.conf`.
//! - [`command`]: the command table: names, arity, flags, key positions, handling.

pub mod command;
pub mod encode;
pub mod glob;
pub mod reply;
pub mod request;
pub mod translate;
pub mod units;
