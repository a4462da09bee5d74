//! Facilities without a safe interface in the standard library or rustix: the only place in the workspace with
//! `unsafe`.
//!
//! Each file wraps one facility of the kernel, or of the language, in a safe interface, with safety arguments in place.

#![allow(unsafe_code)]

mod heap;
mod send_batch;

pub use heap::CountedHeap;
pub(crate) use send_batch::{SendBatch, UNKNOWN};
