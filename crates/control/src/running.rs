//! The running router, shared by the admin port, reloads and signals.

use std::collections::BTreeSet;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use switchyard_policy::topology::Topology;
use switchyard_router::{Router, Status, Threads};
use tokio::sync::broadcast;

use crate::admin::OperationError;
use crate::failover::ReplicaRequirements;
use crate::health::Health;
use crate::loads::Loads;
use crate::ownership::Ownerships;

/// Interval between checks whether an accepted node is served.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Holds the router from its start until it is drained. Readers hold the lock briefly; draining takes the router out.
#[derive(Debug)]
pub struct Running {
    phase: RwLock<Phase>,
    /// Whether the router has served, with the condition variable for waiting.
    served: (Mutex<bool>, Condvar),
    /// Names of nodes that an operator has accepted in their present state.
    accepted: broadcast::Sender<String>,
    /// Names of nodes with a server that claims without proof to be the primary.
    claimed: Mutex<BTreeSet<String>>,
    /// Positions that replicas must reach before they are read.
    needs: ReplicaRequirements,
    /// Loads of nodes.
    loads: Loads,
    /// Health of nodes.
    health: Health,
    /// Ownership records at the nodes, which ensure a single router.
    ownerships: OnceLock<Arc<Ownerships>>,
    /// Registry of threads that the router can serve without.
    threads: Threads,
}

impl Default for Running {
    fn default() -> Self {
        Self {
            phase: RwLock::default(),
            served: <_>::default(),
            accepted: broadcast::Sender::new(16),
            claimed: Mutex::default(),
            needs: ReplicaRequirements::default(),
            loads: Loads::default(),
            health: Health::default(),
            ownerships: OnceLock::new(),
            threads: Threads::default(),
        }
    }
}

/// State of the router.
#[derive(Debug, Default)]
pub(crate) enum Phase {
    #[default]
    Starting,
    Serving {
        router: Router,
        /// Latest published topology, which the workers may still be adopting.
        topology: Arc<Topology>,
    },
    /// The router is stopping. These are its last reports.
    Draining { status: Box<Status>, metrics: String, topology: Arc<Topology> },
}

impl Running {
    /// Sets the router, which serves from now on.
    pub fn set(&self, router: Router, topology: Arc<Topology>) {
        *self.phase.write().unwrap_or_else(PoisonError::into_inner) = Phase::Serving { router, topology };
        *self.served.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
        self.served.1.notify_all();
    }

    /// Waits until the router serves, or has served.
    pub(crate) fn wait_until_served(&self) {
        let served = self.served.0.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.served.1.wait_while(served, |served| !*served));
    }

    /// Sets the ownership records.
    pub fn set_seats(&self, seats: Arc<Ownerships>) {
        // A second call is a caller's mistake and changes nothing.
        let _ = self.ownerships.set(seats);
    }

    /// Ownership records. `None` before the router serves.
    pub(crate) fn ownerships(&self) -> Option<&Arc<Ownerships>> {
        self.ownerships.get()
    }

    /// Reads the phase. A panic of an earlier reader does not poison it.
    pub(crate) fn with_phase<R>(&self, look: impl FnOnce(&Phase) -> R) -> R {
        look(&self.phase.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Calls `with_phase` with the router. `None` before it serves, and after draining has begun.
    pub fn with<R>(&self, look: impl FnOnce(&Router) -> R) -> Option<R> {
        self.with_phase(|phase| match phase {
            Phase::Serving { router, .. } => Some(look(router)),
            Phase::Starting | Phase::Draining { .. } => None,
        })
    }

    /// Accepts a node in its present state, for an operator: a node that returned empty is served, and a server that
    /// claims without proof to be its primary is followed. Effective on return.
    ///
    /// # Errors
    /// If there is no such node, or it has nothing to accept: accepting in advance would hide a later loss. Also if the
    /// node was accepted, but still cannot be served.
    pub(crate) fn accept(&self, node: &str) -> Result<(), OperationError> {
        let is_held = self
            .with(|router| router.accept_empty(node))
            .ok_or_else(|| {
                OperationError::Unavailable("the router is not serving: it is starting or shutting down".to_owned())
            })?
            .ok_or_else(|| {
                OperationError::Invalid(format!(
                    "this router serves no node \"{node}\"; `switchyard nodes list` shows them"
                ))
            })?;
        if !is_held && !self.is_claimed(node) {
            return Err(OperationError::Conflict(format!(
                "nothing of node {node} waits to be accepted: it is not held because it returned empty, and no server claims to be its primary without \
                 proof"
            )));
        }
        let until = Instant::now() + self.with(Router::timeout).unwrap_or_default();
        loop {
            let is_claimed = self.is_claimed(node);
            if is_claimed {
                // Sent repeatedly, because it takes effect only after the present primary has been silent for long
                // enough. Without nodes that have replicas there is no receiver.
                let _ = self.accepted.send(node.to_owned());
            } else if self.with(|router| router.is_served(node)).unwrap_or(false) {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(OperationError::Failed(if is_claimed {
                    format!(
                        "node {node} keeps its primary, which still replies; accept the other server once that has stopped"
                    )
                } else {
                    format!(
                        "node {node} is accepted as it is, but does not serve yet: `switchyard status` shows the reason. It is served as soon as possible"
                    )
                }));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn is_claimed(&self, node: &str) -> bool {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner).contains(node)
    }

    /// Records whether a server claims without proof to be a node's primary.
    pub(crate) fn note_claim(&self, node: &str, is_claimed: bool) {
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        if is_claimed {
            claimed.insert(node.to_owned());
        } else {
            claimed.remove(node);
        }
    }

    /// Subscribes to names of accepted nodes.
    pub(crate) fn accepted(&self) -> broadcast::Receiver<String> {
        self.accepted.subscribe()
    }

    /// Positions that replicas must reach before they are read, requested by moves.
    pub(crate) fn needs(&self) -> &ReplicaRequirements {
        &self.needs
    }

    /// Loads of nodes.
    pub(crate) fn loads(&self) -> &Loads {
        &self.loads
    }

    /// Registry of threads that the router can serve without.
    #[must_use]
    pub fn threads(&self) -> &Threads {
        &self.threads
    }

    /// Latest health of nodes.
    pub(crate) fn health(&self) -> &Health {
        &self.health
    }

    /// Publishes a newer topology to the router. Ignores others, as the router does.
    pub(crate) fn publish(&self, newer: Arc<Topology>) {
        let mut phase = self.phase.write().unwrap_or_else(PoisonError::into_inner);
        if let Phase::Serving { router, topology } = &mut *phase
            && newer.epoch() > topology.epoch()
        {
            debug_assert!(newer.moves_only_held_keys_since(topology), "a key changes its node only while it is held");
            router.publish(Arc::clone(&newer));
            *topology = newer;
        }
    }

    /// Records the topology of a router that follows the map of a cluster.
    pub(crate) fn note_topology(&self, newer: Arc<Topology>) {
        if let Phase::Serving { topology, .. } = &mut *self.phase.write().unwrap_or_else(PoisonError::into_inner)
            && newer.epoch() > topology.epoch()
        {
            *topology = newer;
        }
    }

    /// Takes the router out for draining.
    pub fn start_draining(&self) -> Option<Router> {
        let mut phase = self.phase.write().unwrap_or_else(PoisonError::into_inner);
        match mem::take(&mut *phase) {
            Phase::Serving { router, topology } => {
                *phase = Phase::Draining { status: Box::new(router.status()), metrics: router.metrics(), topology };
                Some(router)
            }
            other => {
                *phase = other;
                None
            }
        }
    }
}
