//! Positions that replicas must reach before they are read. Moves add them before they hand slots over; the monitoring
//! thread waits for the replicas.
//!
//! A queue next to the router rather than a channel to the thread, because a reload replaces that thread while moves
//! continue.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use switchyard_policy::failover::Position;
use switchyard_policy::topology::NodeId;
use switchyard_router::Done;
use tokio::sync::Notify;

/// Replicas of a node must have this position before clients may read moved slots from them.
pub(crate) struct ReplicaRequirement {
    pub(super) node: NodeId,
    /// Position of the node's primary after the move had written everything.
    pub(super) position: Position,
    /// Time after which replicas without the position are excluded from reads until they reach it.
    pub(super) until: Instant,
    done: Option<Done>,
}

impl ReplicaRequirement {
    pub(crate) fn new(node: NodeId, position: Position, timeout: Duration, done: Done) -> Self {
        Self { node, position, until: Instant::now() + timeout, done: Some(done) }
    }

    /// Completes the need: no replica that lacks the position is read.
    pub(super) fn met(mut self) {
        if let Some(done) = self.done.take() {
            done(Ok(()));
        }
    }
}

impl Drop for ReplicaRequirement {
    fn drop(&mut self) {
        if let Some(done) = self.done.take() {
            done(Err("the observer of the replicas is being replaced".to_owned()));
        }
    }
}

/// Needs that the thread has not taken yet.
#[derive(Default)]
pub(crate) struct ReplicaRequirements {
    waiting: Mutex<Vec<ReplicaRequirement>>,
    added: Notify,
}

impl ReplicaRequirements {
    pub(crate) fn add(&self, need: ReplicaRequirement) {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner).push(need);
        self.added.notify_one();
    }

    /// Waits until needs are present, and returns them.
    pub(super) async fn take(&self) -> Vec<ReplicaRequirement> {
        loop {
            let waiting = std::mem::take(&mut *self.waiting.lock().unwrap_or_else(PoisonError::into_inner));
            if !waiting.is_empty() {
                return waiting;
            }
            self.added.notified().await;
        }
    }
}

impl std::fmt::Debug for ReplicaRequirements {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Needs").finish_non_exhaustive()
    }
}
