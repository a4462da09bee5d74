//! Synchronisation primitives of the modules that `tests/loom` executes in all orders, and the sizes of their tables.
//!
//! `tests/loom` compiles these modules with a `sync` of its own: loom's primitives and small tables. So the real code is
//! checked, with an ordinary `cargo test`. The usual `--cfg loom` would rebuild all dependencies with other flags.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
pub(crate) use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};

use switchyard_policy::hot_copies::GateId;

/// Number of node ids in a block of the oldest commands in flight.
pub(crate) const BLOCK: usize = 1 << 10;

/// Number of blocks, for all possible node ids.
pub(crate) const BLOCKS: usize = (u16::MAX as usize + 1) / BLOCK;

/// Number of gates.
pub(crate) const GATES: usize = GateId::COUNT;

/// Place of a gate in the table.
#[inline]
pub(crate) const fn place_of_gate(gate: GateId) -> usize {
    gate.index()
}

/// All node gates.
pub(crate) fn node_gates() -> impl Iterator<Item = GateId> {
    GateId::of_nodes()
}
