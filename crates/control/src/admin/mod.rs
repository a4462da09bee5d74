//! The admin port: metrics, health, status, and control of nodes and moves, over HTTP or HTTPS.
//!
//! Any client that can connect may read, so the port listens on loopback by default, and elsewhere only with a
//! configured token. Changes need a token even on loopback ([`token`]). Loopback alone does not exclude web pages (a
//! page can point a name of its own at 127.0.0.1), hence the check of the `Host` header. No GET changes state.
//!
//! HTTP runs on tokio in a thread of its own rather than on the workers: a scrape must never take a turn of a worker's
//! loop, and a hanging worker must be visible from outside.

mod autoscale;
mod colocation;
mod guard;
mod hot_copies;
mod listener;
mod load;
mod moves;
mod page;
mod planner;
mod report;
mod routes;
mod rules;
mod thread;
mod tls;
mod token;
mod upgrade;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;

pub use autoscale::{AutoscaleChange, AutoscaleEvent, AutoscaleReport, AutoscaleRequest};
pub use colocation::{
    ColocatedKeyReport, ColocationRefusalReport, ColocationReport, ColocationWaitReport, KeyGroupReport,
};
pub use hot_copies::{HotCopiesOrder, HotCopiesReport, HotCopiesRequest, HotCopiesResult};
pub use load::{LoadReport, NodeLoadReport, SlotLoadReport};
pub use moves::{
    Abandon, AbortRequest, AddNodeRequest, BalanceRequest, BigKeyReport, GoalRequest, HotKeyReport, HotKeysReport,
    HotNodeReport, JournalReport, KeyReport, MaxRateRequest, MisplacedReport, MoveOptionsRequest, MoveReport,
    MoveRequest, MoveState, MovesReport, NodeMisplacedReport, NodeRequest, NodeSlotsReport, Operation, OperationError,
    OverridesReport, PaperRequest, PlanReport, PlannedReport, RangeReport, ReturnedKeysReport, SlotsReport,
    SourceOpsMaxRequest, SteerRequest, TransitReport, WhereReport,
};
pub(crate) use moves::{conflict, invalid};
pub use planner::{
    AlternativeReport, AutomationReport, AutomationRequest, DecisionReport, HistoryReport, NodeOutlookReport,
    PlanRequest, PriceReport, StepReport,
};
pub use report::{
    AutomationState, LimitedReport, LinkReport, NodeReport, NodesReport, Readiness, Silence, Source, StandbyReport,
    StatusReport, TokenReport, UnreachableNode, Warning,
};
pub use rules::{
    AdoptionReport, RuledKeyReport, RulesCheckReport, RulesEstimate, RulesOrder, RulesProposal, RulesReport,
    RulesRequest, RulesResult, TooLargeReport,
};

pub use thread::{AdminThread, access, kept_access};
pub use tls::AdminTls;
pub use token::{Access, AdminAccess, Token};
pub use upgrade::{UpgradePort, UpgradeReport};

use guard::Guard;
use listener::{BoundedListener, Peer};

/// Time that requests in progress have to finish after a shutdown begins.
const SHUTDOWN_BOUND: Duration = Duration::from_secs(1);

/// Settings of the admin port.
#[derive(Clone, Debug)]
pub struct AdminOptions {
    /// Access rights. Must be [`Access::Given`] unless the address is a loopback address. The owner of the other handle
    /// renews them.
    pub access: AdminAccess,
    /// Host names accepted in the `Host` header, without the port, in addition to `localhost` and any IP address.
    pub host_names: Vec<String>,
    /// Certificates, for HTTPS. The owner of the other handle renews them.
    pub tls: Option<AdminTls>,
}

/// Errors of opening the admin port.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The address is reachable from other machines, and no token is set.
    #[error(
        "the admin port on {address} could be reached from other machines, and no token is set; \
         set a token for it, or bind it to 127.0.0.1"
    )]
    Exposed {
        /// Requested address.
        address: SocketAddr,
    },
    /// Binding the address failed.
    #[error("cannot listen on {address} for the admin API: {why}")]
    Listen {
        /// Requested address.
        address: SocketAddr,
        /// Error of the operating system.
        why: io::Error,
    },
}

/// The bound admin port, before it serves.
#[derive(Debug)]
pub struct Admin {
    address: SocketAddr,
    listener: TcpListener,
    options: AdminOptions,
}

impl Admin {
    /// Binds the port.
    ///
    /// # Errors
    /// If the port cannot be bound, or would be exposed without a token.
    pub async fn bind(address: SocketAddr, options: AdminOptions) -> Result<Self, AdminError> {
        Self::open(address, TcpListener::bind(address), options).await
    }

    /// Uses the listening socket of another process.
    ///
    /// # Errors
    /// If the socket cannot be used, or would be exposed without a token.
    pub async fn adopt(socket: OwnedFd, options: AdminOptions) -> Result<Self, AdminError> {
        let unknown = SocketAddr::from(([0, 0, 0, 0], 0));
        let refused = |why| AdminError::Listen { address: unknown, why };
        let listener = std::net::TcpListener::from(socket);
        let address = listener.local_addr().map_err(refused)?;
        listener.set_nonblocking(true).map_err(refused)?;
        Self::open(address, async move { TcpListener::from_std(listener) }, options).await
    }

    async fn open(
        address: SocketAddr,
        listener: impl Future<Output = io::Result<TcpListener>>,
        options: AdminOptions,
    ) -> Result<Self, AdminError> {
        if !address.ip().to_canonical().is_loopback() && !matches!(*options.access.now(), Access::Given(_)) {
            return Err(AdminError::Exposed { address });
        }
        let refused = |why| AdminError::Listen { address, why };
        let listener = listener.await.map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        Ok(Self { address, listener, options })
    }

    /// Copies the listening socket, for a process that replaces this one.
    fn socket(&self) -> Result<OwnedFd, AdminError> {
        let copy = self.listener.as_fd().try_clone_to_owned();
        copy.map_err(|why| AdminError::Listen { address: self.address, why })
    }

    /// Bound address, with the port chosen by the system if port 0 was requested.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves `source` until `shutdown` completes. Responses in progress then have 1 s to finish.
    ///
    /// # Errors
    /// If the listener fails permanently.
    pub async fn serve(
        self,
        source: Arc<dyn Source>,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<()> {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let until = async move {
            shutdown.await;
            // Fails if serving has already ended, which is fine.
            let _ = stop.send(());
        };
        let tls = self.options.tls.clone();
        let router = routes::router(source, Guard::new(self.address, self.options));
        let serving =
            axum::serve(BoundedListener::new(self.listener, tls), router.into_make_service_with_connect_info::<Peer>())
                .with_graceful_shutdown(until)
                .into_future();
        let bound = async {
            let _ = stopped.await;
            tokio::time::sleep(SHUTDOWN_BOUND).await;
        };
        tokio::select! {
            result = serving => result,
            () = bound => Ok(()), // a client that neither sends nor reads must not delay the process's exit
        }
    }
}
