//! What replicas must have before they are read: asked for by moves before they hand slots over, seen to by the thread
//! that watches replicas.
//!
//! A queue beside the router and not a channel to the thread, because a reload replaces that thread, and moves go on.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use switchyard_policy::failover::Position;
use switchyard_policy::topology::NodeId;
use switchyard_router::Done;
use tokio::sync::Notify;

/// Clients may read replicas of a node for slots that were moved to it.
pub(crate) struct Need {
    pub(super) node: NodeId,
    /// What the node's primary had when all had been moved.
    pub(super) position: Position,
    /// Replicas that do not have it by then are not read until they do.
    pub(super) until: Instant,
    done: Option<Done>,
}

impl Need {
    pub(crate) fn new(node: NodeId, position: Position, patience: Duration, done: Done) -> Self {
        Self { node, position, until: Instant::now() + patience, done: Some(done) }
    }

    /// No replica is read that lacks it.
    pub(super) fn met(mut self) {
        if let Some(done) = self.done.take() {
            done(Ok(()));
        }
    }
}

impl Drop for Need {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            done(Err("whoever watches the replicas is being replaced".to_owned()));
        }
    }
}

/// Those that nobody has taken yet.
#[derive(Default)]
pub(crate) struct Needs {
    waiting: Mutex<Vec<Need>>,
    added: Notify,
}

impl Needs {
    pub(crate) fn add(&self, need: Need) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push(need);
        self.added.notify_one();
    }

    /// Waits until there are some.
    pub(super) async fn take(&self) -> Vec<Need> {
        loop {
            let waiting = std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
            if !waiting.is_empty() {
                return waiting;
            }
            self.added.notified().await;
        }
    }
}

impl std::fmt::Debug for Needs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Needs").finish_non_exhaustive()
    }
}
