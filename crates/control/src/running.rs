//! The router while it runs, shared by what looks at it: the admin port, the reload, the signals.

use std::collections::BTreeSet;
use std::mem;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, RwLock};
use std::time::{Duration, Instant};

use switchyard_policy::topology::Topology;
use switchyard_router::{Router, Status, Threads};
use tokio::sync::broadcast;

use crate::admin::Refused;
use crate::failover::Needs;
use crate::health::Health;
use crate::loads::Loads;
use crate::seat::Seats;

/// How often it is looked at whether an accepted node is served.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Holds the router from its start until it is drained. Everything that looks does so under the lock for a moment;
/// draining takes the router out.
#[derive(Debug)]
pub struct Running {
    phase: RwLock<Phase>,
    /// It has served, and who waits for that.
    served: (Mutex<bool>, Condvar),
    /// Names of nodes about which an operator has said that they are to be served as they are.
    accepted: broadcast::Sender<String>,
    /// Names of nodes whose primary a server claims to be without proof.
    claimed: Mutex<BTreeSet<String>>,
    /// What replicas must have before they are read.
    needs: Needs,
    /// What nodes have to do.
    loads: Loads,
    /// The health of nodes.
    health: Health,
    /// What is left at nodes, so that one router at a time serves them.
    seats: OnceLock<Arc<Seats>>,
    /// The registry of threads that the router can serve without.
    threads: Threads,
}

impl Default for Running {
    fn default() -> Self {
        Self {
            phase: RwLock::default(),
            served: <_>::default(),
            accepted: broadcast::Sender::new(16),
            claimed: Mutex::default(),
            needs: Needs::default(),
            loads: Loads::default(),
            health: Health::default(),
            seats: OnceLock::new(),
            threads: Threads::default(),
        }
    }
}

/// What can be said of the router.
#[derive(Debug, Default)]
pub(crate) enum Phase {
    #[default]
    Starting,
    Serving {
        router: Router,
        /// The topology published last, which the workers may still be adopting.
        topology: Arc<Topology>,
    },
    /// It was told to stop. What it said last is all there is to tell.
    Draining { status: Box<Status>, metrics: String, topology: Arc<Topology> },
}

impl Running {
    /// From here on the router serves.
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

    /// From here on nodes know who serves them.
    pub fn set_seats(&self, seats: Arc<Seats>) {
        // A second one is a mistake of the caller that changes nothing.
        let _ = self.seats.set(seats);
    }

    /// What is left at nodes; `None` before the router serves.
    pub(crate) fn seats(&self) -> Option<&Arc<Seats>> {
        self.seats.get()
    }

    /// Looks at the phase. A panic of somebody who looked before does not make it unusable.
    pub(crate) fn look<R>(&self, look: impl FnOnce(&Phase) -> R) -> R {
        look(&self.phase.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Looks at the router; `None` before it serves and once it is being drained.
    pub fn with<R>(&self, look: impl FnOnce(&Router) -> R) -> Option<R> {
        self.look(|phase| match phase {
            Phase::Serving { router, .. } => Some(look(router)),
            Phase::Starting | Phase::Draining { .. } => None,
        })
    }

    /// An operator accepts a node as it is: one that came back empty is served, and whoever claims to be its primary
    /// without proof is followed. It is when this returns.
    ///
    /// # Errors
    /// If there is no such node, or nothing that waits for an operator's word: said beforehand, it would hide a later
    /// loss. Also where it was accepted, and still cannot be served.
    pub(crate) fn accept(&self, node: &str) -> Result<(), Refused> {
        let is_held = self
            .with(|router| router.accept_empty(node))
            .ok_or_else(|| {
                Refused::Unavailable("the router is not serving: it is starting, or was told to stop".to_owned())
            })?
            .ok_or_else(|| {
                Refused::Wrong(format!("this router serves no node \"{node}\"; `switchyard nodes list` shows them"))
            })?;
        if !is_held && !self.is_claimed(node) {
            return Err(Refused::Conflict(format!(
                "nothing of node {node} waits to be accepted: it is not held because it came back empty, and no server claims to be its primary without \
                 proof"
            )));
        }
        let until = Instant::now() + self.with(Router::patience).unwrap_or_default();
        loop {
            let is_claimed = self.is_claimed(node);
            if is_claimed {
                // Again and again: it counts once the present primary has been silent for long enough. Nobody listens
                // where no node has replicas.
                let _ = self.accepted.send(node.to_owned());
            } else if self.with(|router| router.is_served(node)).unwrap_or(false) {
                return Ok(());
            }
            if Instant::now() >= until {
                return Err(Refused::Failed(if is_claimed {
                    format!(
                        "node {node} keeps its primary, which still answers; accept the other server once that is gone"
                    )
                } else {
                    format!(
                        "node {node} is accepted as it is, and does not serve yet: `switchyard status` says why. It is served as soon as it can be"
                    )
                }));
            }
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn is_claimed(&self, node: &str) -> bool {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner).contains(node)
    }

    /// Whether a server claims to be the primary of a node, and nothing proves it.
    pub(crate) fn note_claim(&self, node: &str, is_claimed: bool) {
        let mut claimed = self.claimed.lock().unwrap_or_else(PoisonError::into_inner);
        if is_claimed {
            claimed.insert(node.to_owned());
        } else {
            claimed.remove(node);
        }
    }

    /// The names of nodes that are accepted from now on.
    pub(crate) fn accepted(&self) -> broadcast::Receiver<String> {
        self.accepted.subscribe()
    }

    /// What replicas must have before they are read, as moves ask for it.
    pub(crate) fn needs(&self) -> &Needs {
        &self.needs
    }

    /// What nodes have to do, as far as it is known.
    pub(crate) fn loads(&self) -> &Loads {
        &self.loads
    }

    /// The registry of threads that the router can serve without.
    #[must_use]
    pub fn threads(&self) -> &Threads {
        &self.threads
    }

    /// The health of nodes, as it was last seen.
    pub(crate) fn health(&self) -> &Health {
        &self.health
    }

    /// Makes the router adopt a newer topology. One that is not newer is ignored, as the router does.
    pub(crate) fn publish(&self, newer: Arc<Topology>) {
        let mut phase = self.phase.write().unwrap_or_else(PoisonError::into_inner);
        if let Phase::Serving { router, topology } = &mut *phase
            && newer.epoch() > topology.epoch()
        {
            router.publish(Arc::clone(&newer));
            *topology = newer;
        }
    }

    /// Takes the router out, to drain it.
    pub fn take(&self) -> Option<Router> {
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
