//! The router while it runs, shared by what looks at it: the admin port, the reload, the signals.

use std::mem;
use std::sync::{Arc, PoisonError, RwLock};

use switchyard_policy::topology::Topology;
use switchyard_router::{Router, Status};

/// Holds the router from its start until it is drained. Everything that looks does so under the lock for a moment; draining
/// takes the router out.
#[derive(Debug, Default)]
pub(super) struct Running(RwLock<Phase>);

/// What can be said of the router.
#[derive(Debug, Default)]
pub(super) enum Phase {
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
    pub(super) fn set(&self, router: Router, topology: Arc<Topology>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Phase::Serving { router, topology };
    }

    /// Looks at the phase. A panic of somebody who looked before does not make it unusable.
    pub(super) fn look<R>(&self, look: impl FnOnce(&Phase) -> R) -> R {
        look(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Looks at the router; `None` before it serves and once it is being drained.
    pub(super) fn with<R>(&self, look: impl FnOnce(&Router) -> R) -> Option<R> {
        self.look(|phase| match phase {
            Phase::Serving { router, .. } => Some(look(router)),
            Phase::Starting | Phase::Draining { .. } => None,
        })
    }

    /// Makes the router adopt a newer topology.
    pub(super) fn publish(&self, newer: Arc<Topology>) {
        let mut phase = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if let Phase::Serving { router, topology } = &mut *phase {
            router.publish(Arc::clone(&newer));
            *topology = newer;
        }
    }

    /// Takes the router out, to drain it.
    pub(super) fn take(&self) -> Option<Router> {
        let mut phase = self.0.write().unwrap_or_else(PoisonError::into_inner);
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
