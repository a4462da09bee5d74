//! State of a worker that stays constant during one turn of its loop: time, routing snapshot, counters, and the handles
//! shared by all workers.
//!
//! A type of its own, so that a function whose result depends only on this state takes nothing else. Only the loop
//! changes it.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use switchyard_policy::topology::NodeId;

use super::fan_out::DataNodes;
use crate::metrics::WorkerCounters;
use crate::poll::Poll;
use crate::pubsub::Kind;
use crate::shared::{RoutingSnapshot, Shared};

#[derive(Debug)]
pub(super) struct Turn {
    index: usize,
    now_us: u64,
    /// An allocation of this worker: reference counts on a shared one would write memory that all workers read.
    routing: Arc<RoutingSnapshot>,
    data_nodes: DataNodes,
    generation: u64,
    counters: Arc<WorkerCounters>,
    shared: Arc<Shared>,
    poll: Poll,
    /// Low bits of the generation of cacheable keys whose gates this worker raises.
    cacheable: u32,
    sends_batched: bool,
}

impl Turn {
    /// Adopts the current snapshot.
    pub(super) fn new(index: usize, shared: Arc<Shared>, poll: Poll) -> Self {
        let (generation, routing) = shared.publication.own();
        let counters = shared.counters[index].clone();
        let data_nodes = DataNodes::of(&routing.topology);
        Self {
            index,
            now_us: 0,
            routing,
            data_nodes,
            generation,
            counters,
            shared,
            poll,
            cacheable: 0,
            sends_batched: false,
        }
    }

    /// Number of this worker.
    #[inline]
    pub(super) const fn index(&self) -> usize {
        self.index
    }

    /// Time since the start of the router, read once per turn, us.
    #[inline]
    pub(super) const fn now_us(&self) -> u64 {
        self.now_us
    }

    #[inline]
    pub(super) const fn routing(&self) -> &Arc<RoutingSnapshot> {
        &self.routing
    }

    /// Nodes that may have keys.
    #[inline]
    pub(super) const fn data_nodes(&self) -> &DataNodes {
        &self.data_nodes
    }

    /// Generation of the snapshot.
    #[inline]
    pub(super) const fn generation(&self) -> u64 {
        self.generation
    }

    #[inline]
    pub(super) const fn counters(&self) -> &Arc<WorkerCounters> {
        &self.counters
    }

    #[inline]
    pub(super) const fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Low bits of the generation of cacheable keys whose gates this worker raises.
    #[inline]
    pub(super) const fn cacheable(&self) -> u32 {
        self.cacheable
    }

    /// Sets the generation of cacheable keys.
    pub(super) fn set_cacheable(&mut self, generation: u64) {
        self.cacheable = generation as u32;
    }

    #[inline]
    pub(super) const fn poll(&self) -> &Poll {
        &self.poll
    }

    /// Whether many are sent in one system call.
    pub(super) const fn sends_batched(&self) -> bool {
        self.sends_batched
    }

    pub(super) fn set_sends_batched(&mut self, batched: bool) {
        self.sends_batched = batched;
    }

    /// Sets the interval of ticks.
    pub(super) fn tick_every(&mut self, interval: Duration) -> io::Result<()> {
        self.poll.tick_every(interval)
    }

    /// Reads the clock, us.
    pub(super) fn clock_us(&self) -> u64 {
        self.shared.started.elapsed().as_micros() as u64
    }

    /// Begins a turn.
    #[inline]
    pub(super) fn begin(&mut self) {
        self.now_us = self.clock_us();
    }

    /// Whether there is a newer snapshot.
    #[inline]
    pub(super) fn is_outdated(&self) -> bool {
        self.shared.publication.generation() != self.generation
    }

    /// Adopts the current snapshot. Returns the generation and the snapshot before.
    pub(super) fn adopt_routing(&mut self) -> (u64, Arc<RoutingSnapshot>) {
        let (generation, routing) = self.shared.publication.own();
        self.data_nodes = DataNodes::of(&routing.topology);
        (std::mem::replace(&mut self.generation, generation), std::mem::replace(&mut self.routing, routing))
    }

    pub(super) fn node_name(&self, node: NodeId) -> String {
        self.routing().topology.node(node).map_or_else(|| "a removed node".into(), |n| n.name.clone())
    }

    /// Returns the error text of a node that accepts no commands.
    pub(super) fn down_text(&self, node: NodeId) -> String {
        self.down_text_or(node, "not connected")
    }

    /// Like `down_text`, with a default reason for a node that is up.
    pub(super) fn down_text_or(&self, node: NodeId, why: &str) -> String {
        let why = self.shared().with_facts(node, |f| f.failure.clone()).unwrap_or_else(|| why.into());
        format!("NODEDOWN {} cannot be reached: {why}", self.node_name(node))
    }

    /// Whether the last attempt to reach the node failed.
    pub(super) fn node_fails(&self, node: NodeId) -> bool {
        self.shared().with_facts(node, |f| f.failure.is_some())
    }

    /// Returns the reply to PUBLISH from the node's count: with our clients instead of our own subscriptions.
    pub(super) fn count_of_publish(&self, kind: Kind, channel: &[u8], node: NodeId, count: i64) -> i64 {
        let (clients, upstream) = self.shared.subscriptions.audience(kind, channel, node);
        clients as i64 + (count - upstream as i64).max(0)
    }
}
