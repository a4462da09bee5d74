//! The admin port: metrics, health, status, and what changes nodes and moves, over HTTP or HTTPS.
//!
//! Whoever can reach it may read, so it listens on loopback unless told otherwise, and elsewhere only with a token of
//! the configuration. What changes something needs a token also on loopback ([`token`]). Loopback alone does not keep
//! web pages out (a page can point a name of its own at 127.0.0.1), hence the check of the `Host` header. Nothing here
//! changes state by GET.
//!
//! HTTP is not spoken by the router's workers but on tokio here, in a thread of its own: a scrape must never take a
//! turn of a worker's loop, and a worker that hangs must be visible from outside.

mod autoscale;
mod guard;
mod hot_copies;
mod listener;
mod load;
mod moves;
mod page;
mod planner;
mod report;
mod routes;
mod thread;
mod tls;
mod token;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;

pub use autoscale::{AutoscaleChange, AutoscaleEvent, AutoscaleReport, AutoscaleRequest};
pub use hot_copies::{HotCopiesDone, HotCopiesOrder, HotCopiesReport, HotCopiesRequest};
pub use load::{LoadReport, NodeLoadReport, SlotLoadReport};
pub use moves::{
    AbortRequest, AddNodeRequest, BalanceRequest, BigKeyReport, ExceptionsReport, GoalRequest, HomeReport,
    HotKeyReport, HotKeysReport, HotNodeReport, HowRequest, JournalReport, KeyReport, Lose, MaxRateRequest,
    MisplacedReport, MoveReport, MoveRequest, MoveState, MovesReport, NodeMisplacedReport, NodeRequest,
    NodeSlotsReport, Operation, PaperRequest, PlanReport, PlannedReport, RangeReport, Refused, SlotsReport,
    SteerRequest, TransitReport, WhereReport,
};
pub(crate) use moves::{conflict, wrong};
pub use planner::{
    AlternativeReport, AutomationReport, AutomationRequest, DecisionReport, HistoryReport, NodeOutlookReport,
    PlanRequest, PriceReport, StepReport,
};
pub use report::{
    AutomationState, LimitedReport, LinkReport, NodeReport, NodesReport, NotReady, Readiness, Silence, Source,
    StandbyReport, StatusReport, TokenReport, Trouble,
};

pub use thread::{AdminThread, access};
pub use tls::AdminTls;
pub use token::{Access, AdminAccess, Token};

use guard::Guard;
use listener::{BoundedListener, Peer};

/// How long requests that are being answered may take after the shutdown was asked for.
const SHUTDOWN_BOUND: Duration = Duration::from_secs(1);

/// How the admin port is reached, and by whom.
#[derive(Clone, Debug)]
pub struct AdminOptions {
    /// Who may do what. Must be [`Access::Given`] if the address is not a loopback address. The handle is kept by
    /// whoever renews it.
    pub access: AdminAccess,
    /// Names by which browsers and tools may address this host, beside `localhost` and any IP address: what stands in
    /// their `Host` header, without the port.
    pub host_names: Vec<String>,
    /// Certificates, for HTTPS. The handle is kept by whoever renews them.
    pub tls: Option<AdminTls>,
}

/// Why the admin port could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// Others could reach it, and there is no token.
    #[error(
        "the admin port on {address} could be reached from other machines, and no token is set; \
         set a token for it, or bind it to 127.0.0.1"
    )]
    Exposed {
        /// The address asked for.
        address: SocketAddr,
    },
    /// The address cannot be had.
    #[error("cannot listen on {address} for the admin API: {why}")]
    Listen {
        /// The address asked for.
        address: SocketAddr,
        /// What the system said.
        why: io::Error,
    },
}

/// The admin port, bound and not yet serving.
#[derive(Debug)]
pub struct Admin {
    address: SocketAddr,
    listener: TcpListener,
    options: AdminOptions,
}

impl Admin {
    /// Takes the port.
    ///
    /// # Errors
    /// If the port cannot be had, or would be exposed without a token.
    pub async fn bind(address: SocketAddr, options: AdminOptions) -> Result<Self, AdminError> {
        if !address.ip().to_canonical().is_loopback() && !matches!(*options.access.now(), Access::Given(_)) {
            return Err(AdminError::Exposed { address });
        }
        let refused = |why| AdminError::Listen { address, why };
        let listener = TcpListener::bind(address).await.map_err(refused)?;
        let address = listener.local_addr().map_err(refused)?;
        Ok(Self { address, listener, options })
    }

    /// The address listened on, with the port that the system chose if 0 was asked for.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves what comes from `source`, until `shutdown` completes. Answers that are under way then get a moment to
    /// finish.
    ///
    /// # Errors
    /// If the listener fails for good.
    pub async fn serve(
        self,
        source: Arc<dyn Source>,
        shutdown: impl Future<Output = ()> + Send + 'static,
    ) -> io::Result<()> {
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let until = async move {
            shutdown.await;
            // Also when nobody listens any more, which is fine.
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
            () = bound => Ok(()), // a client that neither sends nor reads does not hold up the process
        }
    }
}
