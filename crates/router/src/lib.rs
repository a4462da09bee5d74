//! The data plane: one worker thread per core, each with its own listener, clients, and connections to the nodes.

mod settings;

pub use settings::{Live, NodeAccess, Secret, Settings};

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use switchyard_policy::topology::{NodeId, Topology};

/// Why the router did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Another process has the port.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address asked for.
        address: SocketAddr,
        /// What the system said.
        source: io::Error,
    },
    /// The system refused a thread, an epoll instance or the like.
    #[error("cannot start a worker: {0}")]
    System(#[from] io::Error),
}

/// Whether a node can be talked to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Link {
    /// Connected and answering.
    Up,
    /// No worker has a connection yet.
    Connecting,
    /// The last attempt failed; the text says why.
    Down(String),
}

/// What the router knows of a node, over all workers.
#[derive(Clone, Debug)]
pub struct NodeStatus {
    /// Its number.
    pub id: NodeId,
    /// Its address as the user wrote it.
    pub name: String,
    /// Whether it can be talked to.
    pub link: Link,
    /// `run_id` of the server process, once known: another one means that it restarted.
    pub run_id: Option<String>,
    /// `redis` or `valkey`, with its version, once known ("redis 7.0.15").
    pub version: Option<String>,
    /// Commands sent to it since start.
    pub requests: u64,
    /// Error replies and failures since start.
    pub errors: u64,
    /// Commands sent and not yet answered.
    pub in_flight: u64,
}

/// What the router knows of itself.
#[derive(Clone, Debug)]
pub struct Status {
    /// Epoch of the topology that every worker has adopted.
    pub epoch: u64,
    /// Clients connected now.
    pub clients: u64,
    /// Commands answered since start.
    pub commands: u64,
    /// Time since start.
    pub uptime: Duration,
    /// The nodes, by number.
    pub nodes: Vec<NodeStatus>,
}

/// How a drain ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drained {
    /// Clients that were cut because the bound was reached with commands of theirs in flight.
    pub cut: u64,
}

/// A running router. Dropping it stops it at once; [`Router::drain`] stops it politely.
#[derive(Debug)]
pub struct Router {}

#[allow(clippy::todo, missing_docs, unused_variables)]
impl Router {
    pub fn start(settings: Settings, topology: Arc<Topology>) -> Result<Router, StartError> { todo!() }
    /// Addresses listened on, with the port that the system chose where 0 was asked for.
    pub fn addresses(&self) -> &[SocketAddr] { todo!() }
    /// Makes every worker adopt a newer topology (its epoch must be higher).
    pub fn publish(&self, topology: Arc<Topology>) { todo!() }
    /// Makes every worker adopt new settings.
    pub fn reconfigure(&self, live: Live) { todo!() }
    /// The drain barrier: no command sent under an epoch older than the one returned is still in flight.
    pub fn drained_epoch(&self) -> u64 { todo!() }
    /// What the router knows.
    pub fn status(&self) -> Status { todo!() }
    /// All metrics in Prometheus' text format.
    pub fn metrics(&self) -> String { todo!() }
    /// Stops accepting, lets what is in flight finish within `bound`, then stops the workers.
    pub fn drain(self, bound: Duration) -> Drained { todo!() }
}
