//! What the standard library and rustix cannot say safely: the one place of the workspace where `unsafe` is allowed.
//!
//! Each file wraps one facility of the kernel, or of the language, in an interface that is safe to call, and argues in
//! place why it is.

#![allow(unsafe_code)]

mod heap;
mod send_batch;

pub use heap::CountedHeap;
pub(crate) use send_batch::{SendBatch, UNKNOWN};
