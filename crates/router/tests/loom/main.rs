//! Model check of the state that workers share without locks: the gates of hot copies, the barriers of movers and
//! failovers, and the publication of the routing snapshot.
//!
//! loom executes each test in all orders that Acquire and Release permit, including orders that are impossible on x86.
//! The modules under test are the router's own files, compiled here with [`sync`] instead of the router's primitives.
//! This takes seconds and no other build of the dependencies, as `--cfg loom` would.
//!
//! A node and a socket are modelled by their weakest property: a command or a reply carries the memory order of its
//! system calls ([`Node`], [`Socket`]), and nothing else orders the workers.

mod barriers;
mod gates;

#[path = "../../src/lock.rs"]
mod lock;
#[path = "../../src/publication.rs"]
#[allow(dead_code)] // the router uses more of it
mod publication;
#[path = "../../src/hot_copies/state.rs"]
#[allow(dead_code, clippy::modulo_one)] // blocks have one node here
mod state;

use sync::{AtomicBool, AtomicU64, Ordering};

/// Value of one key at a node.
#[derive(Debug)]
struct Node(AtomicU64);

impl Node {
    fn new(value: u64) -> Self {
        Self(AtomicU64::new(value))
    }

    fn write(&self, value: u64) {
        self.0.store(value, Ordering::Release);
    }

    fn read(&self) -> u64 {
        self.0.load(Ordering::Acquire)
    }
}

/// A message from one thread to another.
#[derive(Debug)]
struct Socket(AtomicBool);

impl Socket {
    fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    fn send(&self) {
        self.0.store(true, Ordering::Release);
    }

    fn has_received(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// loom's primitives, with tables for one key and one node.
mod sync {
    pub(crate) use std::sync::Arc;

    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
    use switchyard_policy::hot_copies::GateId;
    use switchyard_policy::topology::NodeId;

    pub(crate) const BLOCK: usize = 1;
    pub(crate) const BLOCKS: usize = 1;
    pub(crate) const GATES: usize = 2;

    pub(crate) fn place_of_gate(gate: GateId) -> usize {
        usize::from(node_gates().all(|of_node| of_node != gate))
    }

    pub(crate) fn node_gates() -> impl Iterator<Item = GateId> {
        [GateId::of_node(NodeId(0))].into_iter()
    }

    /// Missing in loom. The value is visible to threads that acquire its flag.
    #[derive(Debug)]
    pub(crate) struct OnceLock<T> {
        is_set: AtomicBool,
        value: std::sync::OnceLock<T>,
    }

    impl<T> OnceLock<T> {
        pub(crate) fn new() -> Self {
            Self { is_set: AtomicBool::new(false), value: std::sync::OnceLock::new() }
        }

        pub(crate) fn get(&self) -> Option<&T> {
            self.is_set.load(Ordering::Acquire).then(|| self.value.get()).flatten()
        }

        pub(crate) fn get_or_init(&self, init: impl FnOnce() -> T) -> &T {
            let value = self.value.get_or_init(init);
            self.is_set.store(true, Ordering::Release);
            value
        }
    }
}
