//! `switchyard serve`: starts all parts, and supervises them until a signal to stop.
//!
//! ARCHITECTURE.md lists the threads. The main thread waits for signals.

mod cluster;
mod log_queue;
mod logs;
mod metrics;
mod open_files;
mod pools;
mod reload;
mod standby;
mod twemproxy_stats;
mod upgrade;
mod users;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow};
use sd_notify::NotifyState;
use switchyard_control::admin::{self, AdminAccess, AdminError, AdminOptions, AdminThread, AdminTls, Source};
use switchyard_control::autoscale::AutoscaleThread;
use switchyard_control::eject::EjectThread;
use switchyard_control::failover::{self, MonitoredNode, Observer};
use switchyard_control::first_start;
use switchyard_control::health::HealthThread;
use switchyard_control::journal::Sync;
use switchyard_control::members::{self, FleetFacts};
use switchyard_control::node_maintenance::NodeMaintenance;
use switchyard_control::nodes::holdings::primaries;
use switchyard_control::operator;
use switchyard_control::ownership::{self, OwnershipThread, Ownerships, Replaced, Standby};
use switchyard_control::placement::{self, Placement};
use switchyard_control::planner::PlannerThread;
use switchyard_control::sockets::holder_of;
use switchyard_control::store::StoreError;
use switchyard_control::{Fleet, Processes, Running};
use switchyard_policy::topology::Topology;
use switchyard_router::{ColocatePort, ListenAddress, Ports, Router, Settings, StartError};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{error, info, warn};

use crate::cli::Failure;
use crate::config::{Config, Names, NodeAddress, PoolConfig, Problems, Resolved, Shared, Sources, counted};
pub(crate) use log_queue::flush as flush_log;
use logs::Logs;
use reload::{ReloadRequest, ReloadSender, ReloadTarget, Reloader};
use standby::StandbyWait;
use twemproxy_stats::{ShownPools, StatsPort};
use upgrade::{Role, Successor};

/// Flags for twemproxy pools.
pub(crate) struct TwemproxyFlags {
    /// Address of the stats port, if it is enabled.
    pub(crate) stats: Option<String>,
    /// Whether to delete misplaced keys: keys on servers that the placement rule does not select.
    pub(crate) removes_misplaced: bool,
}

impl TwemproxyFlags {
    /// Refuses to remove misplaced keys if other pools share a server. `None` if they are not removed.
    fn shared(&self, config: &Config, names: &mut Names) -> Result<Option<Shared>, Problems> {
        let shared = if self.removes_misplaced { config.shared_servers(names) } else { None };
        shared.map_or(Ok(None), |shared| if shared.is_none() { Ok(Some(shared)) } else { Err(shared.refusal()) })
    }
}

/// Runs the router until SIGTERM or SIGINT, or until another process has replaced it. A standby first waits until no
/// other router serves the nodes. With `beside`, a first start does not check for another router.
pub(crate) fn run(
    sources: Sources,
    standby: Option<Standby>,
    beside: bool,
    twemproxy: &TwemproxyFlags,
) -> Result<(), Failure> {
    match Role::of_process()? {
        Role::None => serve(sources, standby, beside, twemproxy, None),
        Role::Helper => Ok(()),
        Role::Successor(mut successor) => {
            let outcome = serve(sources, standby, beside, twemproxy, Some(&mut successor));
            outcome.inspect_err(|failure| successor.report(failure))
        }
    }
}

fn serve(
    sources: Sources,
    standby: Option<Standby>,
    beside: bool,
    twemproxy: &TwemproxyFlags,
    successor: Option<&mut Successor>,
) -> Result<(), Failure> {
    let stats = twemproxy.stats.as_deref();
    if let Some(pools) = sources.several_pools()? {
        let mut names = Names::default();
        pools.iter().try_for_each(|(_, config)| twemproxy.shared(config, &mut names).map(drop))?;
        return pools::run(pools, stats, || sources.pool_names());
    }
    pools::end_with_parent()?;
    let mut config = sources.read()?;
    config.prefer_log_level(std::env::var("RUST_LOG").ok().as_deref());
    let is_standby = standby.is_some();
    if is_standby {
        config.check_standby()?;
    }
    let mut resolved = config.resolve(|_| None)?;
    let shared = twemproxy.shared(&config, &mut Names::default())?;
    let logs = Logs::start(config.log_format, &config.log_level, config.pool.as_ref().map(PoolConfig::name))?;
    if let Some(places) = resolved.cluster.take() {
        if is_standby || beside {
            let why = "--standby and --allow-other-router are for nodes: any number of routers may serve a cluster";
            return Err(Failure::Config(Problems::of(why)));
        }
        return cluster::run(sources, config, resolved, &places, logs, successor);
    }
    if successor.is_some() {
        return Err(Failure::Failed(anyhow!("the configuration no longer names a cluster: that needs a restart")));
    }
    // Open the state directory first: its lock is the right to route to these nodes. Then the ports, so that a start
    // that must fail leaves no slot map.
    let running = Arc::new(Running::default());
    let open = || Placement::open(&config.state_dir, Arc::clone(&running));
    let admin_tls = resolved.admin_tls.as_ref().map(|tls| AdminTls::new(tls.config.clone()));
    let admin_access = AdminAccess::new(standby::first_access(resolved.admin_token.as_ref()));
    let options = AdminOptions {
        access: admin_access.clone(),
        host_names: config.admin_host_names.clone(),
        tls: admin_tls.clone(),
    };
    // A standby may wait for a long time: signals and monitoring must work already.
    let mut waits = standby.map(|with| StandbyWait::new(with, resolved.admin, options.clone())).transpose()?;
    let opened = match &mut waits {
        Some(waits) => ownership::wait_for_directory(open, waits.with, &mut |what, period| waits.pause(what, period))?,
        None => Some(open().map_err(explain_state)?),
    };
    let Some(placement) = opened.map(Arc::new) else { return Ok(()) };
    let read = config.clone();
    let remembered = members::load_changes(placement.store(), &read.node_names())?;
    if remembered != members::MemberChanges::default() {
        reload::warn_ignored(&config.apply_membership(&remembered.added, &remembered.removed)?);
        resolved = config.resolve(|_| None)?;
    }
    let leaving = match &config.pool {
        Some(_) => members::leaving(
            placement.store(),
            placement.topology().as_deref(),
            &config.node_names(),
            &remembered.removed,
        )?,
        None => BTreeMap::new(),
    };
    if !leaving.is_empty() {
        config.keep_leaving(&leaving)?;
        resolved = config.resolve(|_| None)?;
    }
    placement.check_scheme(config.pool.as_ref().map(|pool| &pool.scheme))?;
    if placement.topology().is_none() && config.pool.is_none() {
        // A first start checks every node for keys, and so needs every address.
        resolved = resolved.require_resolved()?;
    }
    resolved.warnings().for_each(|warning| warn!("{warning}"));
    check_ports(&resolved)?;
    // First ensure that no other router serves the nodes: until then, their data can change.
    let with = waits.as_ref().map(|waits| waits.with);
    let mut wait = waits.as_mut().map(|waits| |what, period| waits.pause(what, period));
    let standby = with.zip(wait.as_mut().map(|wait| wait as ownership::Wait<'_>));
    let Some(found) = ownership::look(placement.store(), &config.state_dir, &resolved.nodes, standby)? else {
        return Ok(());
    };
    // Must finish before the listeners open.
    let timeout = resolved.live.connect_timeout.min(first_start::TIMEOUT);
    let beginning = match placement.topology() {
        None => Some(match &config.pool {
            None => first_start::examine_nodes(&resolved.nodes, &config.rule_set()?, timeout, beside, log_discovery)?,
            Some(pool) => {
                first_start::examine_pool(pool.continuum()?, &resolved.nodes, timeout, beside, log_discovery)?
            }
        }),
        Some(_) => None,
    };
    // Read again, since a standby may have waited or servers may have joined.
    if let (Some(held), Some(now)) = (&admin_tls, &resolved.admin_tls) {
        held.renew(now.config.clone());
    }
    admin_access.renew(admin::access(resolved.admin_token.as_ref(), &config.state_dir));
    // With several pools, the parent process serves the stats.
    let stats = if pools::is_supervised() { None } else { StatsPort::bind(stats)? };
    let (signal_wait, port) = match waits.map(StandbyWait::end) {
        Some((signals, port)) => (Some(signals), port),
        None => (None, None),
    };
    let (mut admin, shown) = match port {
        Some((admin, shown)) => (admin, Some(shown)),
        None => (AdminThread::bind(resolved.admin, options).map_err(explain_admin)?, None),
    };
    let (asks, asked) = mpsc::sync_channel(4);
    let list = Arc::new(ReloadSender(asks.clone()));
    let (sync, about) = (waits_for_disk(), metrics::add_process);
    let fleet = Fleet::open(&config.state_dir, Arc::clone(&running), Arc::clone(&placement), list, sync, about)?;
    let moves = Arc::clone(&fleet.moves);
    moves.tune(&config.moves, config.command_timeout());
    fleet.operator.tune(&resolved.nodes);
    fleet.operator.note_listed(&read.node_names());
    fleet.ejector.tune(resolved.ejection, config.command_timeout(), leaving.keys().cloned().collect());
    fleet.operator.tune_planner(&config.planner);
    fleet.operator.tune_autoscaler(&config.autoscale);
    let processes = Arc::new(Processes::load(placement.store())?);
    let held = match (beginning, placement.topology()) {
        (Some(first_start::InitialState { topology, held }), _) => {
            placement.begin(topology, held.is_some())?;
            held
        }
        (None, Some(topology)) => {
            let doubts = processes.check_map(
                &config.state_dir,
                &topology,
                &primaries(&resolved.nodes),
                timeout,
                |node| moves.left_at(node),
                !moves.open_ids().is_empty(),
            )?;
            doubts.iter().for_each(|doubt| warn!("{doubt}"));
            None
        }
        (None, None) => None,
    };
    let seats = Arc::new(Ownerships::take(&placement, &moves.site(), !moves.open_ids().is_empty(), &found)?);
    let out = refused_new_nodes(placement.topology().as_deref(), &resolved, moves.site(), timeout);
    let wanted: Vec<String> = config.node_names().into_iter().filter(|name| !out.contains(name)).collect();
    let settled = placement.apply_nodes(&wanted, |_| {})?;
    // After `apply_nodes`: a refused start must change nothing.
    members::apply_change(placement.store(), &read.node_names(), None)?;
    if config.pool.is_some() {
        members::store_addresses(placement.store(), &config.node_addresses())?;
        let listed: Vec<String> =
            read.node_names().into_iter().filter(|name| !remembered.removed.contains(name)).collect();
        fleet.operator.tune_list(&listed, &leaving.into_keys().collect::<Vec<_>>(), true);
    }
    let topology = settled.topology;
    for name in &settled.joined {
        info!("node {name} has joined; it owns no slots yet, so no keys are on it");
    }
    for (_, name) in &settled.removed {
        info!("node {name} was removed; it owned no slots");
    }

    let mut live = resolved.live;
    let connect_timeout = live.connect_timeout;
    live.nodes = placement::access(&topology, &resolved.nodes);
    let listeners = resolved.listen.len();
    let nodes = live.nodes.len();
    match open_files::make_room(&mut live, nodes, config.workers, listeners) {
        Ok(None) => {}
        Ok(Some(lowered)) => warn!("{lowered}"),
        Err(why) => return Err(Failure::Failed(anyhow!(why))),
    }

    let SignalWait { runtime, mut signals, reload_wanted } = match signal_wait {
        Some(waits) => waits,
        None => SignalWait::new()?,
    };
    let tls: Vec<bool> = resolved.listen.iter().map(|listener| listener.tls).collect();
    let watched = failover::monitored_nodes(&topology, &resolved.nodes, placement.store())?;
    let configured = Arc::new(Mutex::new(config.clone()));
    let settings = Settings {
        listen: resolved.listen,
        workers: config.workers,
        pin: config.pin,
        batched_sends: config.batched_sends,
        threads: running.threads().clone(),
        site: moves.site(),
        ownership: Some(seats.seat()),
        servers: watched.iter().map(MonitoredNode::servers).collect(),
        processes: processes.of(&topology),
        held_reason: held.clone(),
        cluster_map: None,
        ports: Ports {
            operator: Some(operator::listen(Arc::clone(&fleet) as Arc<dyn Source>, Arc::clone(&running))?),
            users: Some(users::listen(Arc::clone(&running), Arc::clone(&configured))?),
            colocate: Some(Arc::clone(&moves) as Arc<dyn ColocatePort>),
        },
        live: live.clone(),
    };
    let router = Router::start(settings, Arc::clone(&topology)).map_err(explain_start)?;
    let addresses = addresses_of(&router, &tls);
    running.set_seats(Arc::clone(&seats));
    running.set(router, Arc::clone(&topology));
    fleet.operator.tune_rules(config.placement_rules(), config.adopts_rules());
    let source = Arc::clone(&fleet) as Arc<dyn Source>;
    match shown {
        Some(shown) => shown.hand_over(source),
        None => admin.serve(source),
    }
    let (seat_thread, mut replaced) = OwnershipThread::start(seats, Arc::clone(&running))?;
    let executor = moves.start()?;

    info!(
        start = fleet.incarnation,
        epoch = topology.epoch(),
        state_dir = %config.state_dir.display(),
        "{}",
        ready_line(&addresses, &config, &counted(config.node_names().len(), "node"), admin.address, held.is_some())
    );
    pools::report_ready(admin.address);
    if let (Some(stats), Some(pool)) = (stats, &config.pool) {
        let shown = ShownPools::new([(pool.name().to_owned(), config.clone())]);
        shown.note(0, Some(admin.address));
        stats.serve(shown)?;
    }

    let look = match held {
        Some(held) => {
            let own = (!beside).then(|| moves.site());
            Some(first_start::Discovery::start(
                Arc::clone(&placement),
                Arc::clone(&running),
                config.rule_set()?,
                connect_timeout,
                own,
                held,
                log_discovery,
            )?)
        }
        None => None,
    };
    let health = HealthThread::start(Arc::clone(&running))?;
    let planner = PlannerThread::start(running.threads(), &fleet.operator)?;
    let ejector = config.pool.as_ref().map(|_| EjectThread::start(Arc::clone(&fleet.ejector))).transpose()?;
    let autoscaler = AutoscaleThread::start(running.threads(), Arc::clone(&fleet.operator))?;
    let doubt = shared.as_ref().and_then(Shared::doubt);
    if let Some(doubt) = &doubt {
        warn!("--misplaced-keys remove has no effect: {doubt}. Start again when they do");
    }
    let misplaced_in = (shared.is_some() && doubt.is_none()).then_some(live.database);
    let care = NodeMaintenance::start(
        Arc::clone(&running),
        processes,
        Arc::clone(placement.store()),
        Arc::clone(&moves),
        misplaced_in,
    )?;
    let observer = Observer::start(watched, Arc::clone(placement.store()), Arc::clone(&running))?;
    let nodes = resolved.nodes;
    let reloader = Reloader {
        sources,
        is_standby,
        live,
        nodes,
        observer,
        logs,
        read,
        config: config.clone(),
        configured,
        admin_tls,
        admin_access,
        fleet,
    };
    let reloads = start_reloads(reloader, Arc::clone(&running), asks, asked)?;
    if reload_wanted {
        reloads.request();
    }
    if let Some(why) = runtime.block_on(signals.wait_for_stop(&running, &reloads, &mut replaced)) {
        // Commands in flight can no longer be ended at the nodes, so do not drain.
        let why = format!("{why}. This router ends; clients reach the other one when they reconnect");
        // If restarted as a standby it waits. Without a standby, the two routers would end each other in turn.
        return Err(if is_standby { Failure::Failed(anyhow!(why)) } else { Failure::Replaced(why) });
    }
    notify(&[NotifyState::Stopping]);
    look.into_iter().for_each(first_start::Discovery::stop);
    drop((planner, ejector, autoscaler));
    care.stop();
    drop(health);
    let stopping = Arc::clone(&moves);
    // Stop moves while the router still serves, because ending a leg needs its help. Use at most half of the time, and
    // leave the rest for clients.
    let stop_moves = move |bound| stopping.stop(executor, bound / 2);
    let have_workers_ended = stop(&runtime, &mut signals, &running, stop_moves, reloads.shutdown_timeout())?;
    seat_thread.stop(have_workers_ended);
    admin.stop();
    reloads.stop();
    Ok(())
}

/// Checks before a start that the addresses for clients are free.
fn check_ports(resolved: &Resolved) -> anyhow::Result<()> {
    for listener in &resolved.listen {
        if let ListenAddress::Tcp(address) = listener.address {
            switchyard_router::could_listen(address)
                .map_err(|source| explain_listen(address, "clients", "--listen", source))?;
        }
    }
    Ok(())
}

/// Set by benchmarks to measure the cost of waiting for the disk. An environment variable rather than a configuration
/// key, so that operators do not find it.
const UNSAFE_JOURNAL: &str = "SWITCHYARD_BENCH_UNSAFE_JOURNAL";

fn waits_for_disk() -> Sync {
    if std::env::var_os(UNSAFE_JOURNAL).is_none() {
        return Sync::Always;
    }
    warn!("{UNSAFE_JOURNAL} is set: moves do not wait for the disk, and a power cut during a move loses keys");
    Sync::Never
}

/// Returns the nodes that are listed but not in the slot map, and may not join.
fn refused_new_nodes(topology: Option<&Topology>, resolved: &Resolved, site: String, timeout: Duration) -> Vec<String> {
    let is_placed =
        |node: &&NodeAddress| topology.is_none_or(|topology| topology.nodes().any(|known| known.name == node.name));
    let (placed, newly): (Vec<&NodeAddress>, Vec<&NodeAddress>) = resolved.nodes.iter().partition(is_placed);
    if newly.is_empty() {
        return Vec::new();
    }
    let placed: Vec<NodeAddress> = placed.into_iter().cloned().collect();
    FleetFacts::query(&primaries(&placed), site, timeout).refuse(&newly, &resolved.live.config_set, timeout)
}

/// Returns the addresses of the listeners, with the scheme `tls://` where `tls` is true. Both are in the order of the
/// configuration.
fn addresses_of(router: &Router, tls: &[bool]) -> Vec<String> {
    let address = |(address, tls): (_, &bool)| if *tls { format!("tls://{address}") } else { format!("{address}") };
    router.listeners().iter().zip(tls).map(address).collect()
}

fn ready_line(addresses: &[String], config: &Config, storage: &str, admin: SocketAddr, is_held: bool) -> String {
    let mut line = String::from(if is_held {
        "not ready yet, no key is served: clients connect to "
    } else {
        "ready: clients connect to "
    });
    for (i, address) in addresses.iter().enumerate() {
        let _ = write!(line, "{}{address}", if i > 0 { " or " } else { "" });
    }
    let workers = counted(config.workers, "worker");
    let scheme = if config.admin_tls { "https" } else { "http" };
    let _ = write!(line, "; {storage}, {workers}; admin on {scheme}://{admin}; Ctrl-C stops");
    line
}

fn explain_state(error: anyhow::Error) -> anyhow::Error {
    match error.downcast_ref() {
        Some(StoreError::Locked { .. }) => {
            anyhow!(
                "{error}; stop that router first, give this one another --state-dir, or start it with --standby to wait until the other ends"
            )
        }
        _ => error,
    }
}

/// Explains why the system refused an address, and what to do.
fn explain_listen(address: SocketAddr, what: &str, flag: &str, source: io::Error) -> anyhow::Error {
    let advice = match source.kind() {
        io::ErrorKind::AddrInUse => match holder_of(address) {
            Some(holder) => {
                format!(
                    "{} (process {}) listens there; stop it, or choose another address with {flag}",
                    holder.name, holder.pid
                )
            }
            None => format!(
                "another process listens there (`ss -ltnp 'sport = :{0}'` as root names it): stop it, or choose another address with {flag}. If that names \
                 none, but a connection uses this port (`ss -tan 'sport = :{0}'`): try again in a minute, or choose a port that the system does not assign \
                 (below those of `sysctl net.ipv4.ip_local_port_range`)",
                address.port()
            ),
        },
        io::ErrorKind::AddrNotAvailable => {
            format!("this machine has no such address; see `ip address`, or choose another with {flag}")
        }
        io::ErrorKind::PermissionDenied => {
            "ports below 1024 need root or CAP_NET_BIND_SERVICE; choose a higher one, or grant it".to_owned()
        }
        _ => format!("choose another address with {flag}"),
    };
    anyhow!("cannot listen on {address} for {what}: {source}: {advice}")
}

fn explain_admin(error: anyhow::Error) -> anyhow::Error {
    match error.downcast() {
        Ok(AdminError::Listen { address, why }) => explain_listen(address, "the admin API", "--admin", why),
        Ok(exposed @ AdminError::Exposed { .. }) => anyhow!(exposed),
        Err(other) => other,
    }
}

fn explain_start(error: StartError) -> anyhow::Error {
    match error {
        StartError::Listen { address: ListenAddress::Tcp(address), why } => {
            explain_listen(address, "clients", "--listen", why)
        }
        StartError::Listen { address, why } if why.kind() == io::ErrorKind::AddrInUse => {
            anyhow!(
                "cannot listen on {address} for clients: another process listens there; stop it, or choose another path"
            )
        }
        other => anyhow::Error::new(other),
    }
}

/// Notifies systemd, if it is the parent. An error is only logged: systemd detects a failure by itself.
fn notify(state: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(state) {
        warn!("cannot notify systemd: {error}");
    }
}

/// Extension of systemd's start timeout, on each progress report of the first start.
const EXTENSION: Duration = Duration::from_secs(60);

/// Reports the progress of a first start to the log and to systemd.
fn log_discovery(progress: &str) {
    info!("{progress}");
    notify(&[NotifyState::ExtendTimeoutUsec(EXTENSION.as_micros() as u32)]);
}

/// Maximum time to close the store. Closing takes milliseconds, unless a reload is running.
const STORE_CLOSE_BOUND: Duration = Duration::from_secs(1);

/// Handle of the thread that executes reloads sequentially.
struct Reloads {
    requests: mpsc::SyncSender<ReloadRequest>,
    /// Ends the thread. A flag, because other threads also hold a sender of requests.
    stopping: Arc<AtomicBool>,
    /// Disconnected when the thread has ended and the store is closed.
    ended: mpsc::Receiver<()>,
    /// Timeout for draining, which a reload may change.
    shutdown_timeout: Arc<std::sync::Mutex<Duration>>,
}

impl Reloads {
    /// Requests a reload. A queued request suffices, since it will read the newest file.
    fn request(&self) {
        match self.requests.try_send(ReloadRequest::Reload) {
            Ok(()) | Err(mpsc::TrySendError::Full(_)) => {}
            Err(mpsc::TrySendError::Disconnected(_)) => {
                error!("the reload thread has ended; restart to change the configuration")
            }
        }
    }

    /// Stops the thread, which closes the store. Does not wait for a reload that hangs on a name server: all stored
    /// data is already durable.
    fn stop(self) {
        self.stopping.store(true, Ordering::Release);
        // Only wakes the thread. If it is busy, it reads the flag afterwards.
        let _ = self.requests.try_send(ReloadRequest::Reload);
        let _ = self.ended.recv_timeout(STORE_CLOSE_BOUND);
    }

    fn shutdown_timeout(&self) -> Duration {
        *self.shutdown_timeout.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

fn start_reloads(
    reloader: impl ReloadTarget,
    running: Arc<Running>,
    requests: mpsc::SyncSender<ReloadRequest>,
    asked: mpsc::Receiver<ReloadRequest>,
) -> anyhow::Result<Reloads> {
    let stopping = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stopping);
    let (open, ended) = mpsc::channel();
    let shutdown_timeout = Arc::new(std::sync::Mutex::new(reloader.shutdown_timeout()));
    let told = Arc::clone(&shutdown_timeout);
    std::thread::Builder::new()
        .name("reload".to_owned())
        .spawn(move || {
            let _open: mpsc::Sender<()> = open; // dropped last: the variables declared below are dropped before it
            let mut reloader = reloader;
            while let Ok(ask) = asked.recv() {
                if stopped.load(Ordering::Acquire) {
                    return;
                }
                if !matches!(ask, ReloadRequest::Reload) {
                    reloader.execute(ask, &running);
                    continue;
                }
                match NotifyState::monotonic_usec_now() {
                    Ok(now) => notify(&[NotifyState::Reloading, now]),
                    Err(_) => notify(&[NotifyState::Reloading]),
                }
                reloader.execute(ask, &running);
                *told.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = reloader.shutdown_timeout();
                notify(&[NotifyState::Ready]);
            }
        })
        .context("cannot start a thread")?;
    Ok(Reloads { requests, stopping, ended, shutdown_timeout })
}

/// Signals that the process handles.
struct Signals {
    hangup: Signal,
    terminate: Signal,
    interrupt: Signal,
    /// Handled so that exceeding a file size limit (`ulimit -f`) is a write error, and does not end the process.
    _file_size: Signal,
}

/// Interval of checks whether the clients of a replaced process have left.
const CLIENTS_PERIOD: Duration = Duration::from_millis(50);

/// Interval of status updates to systemd, sent only on a change.
const STATUS_PERIOD: Duration = Duration::from_secs(2);

impl Signals {
    fn new() -> io::Result<Self> {
        Ok(Self {
            hangup: signal(SignalKind::hangup())?,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            _file_size: signal(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw()))?,
        })
    }

    /// Forwards reload requests until the process must stop. Returns `None` on a signal, or the reason if another
    /// router has taken over.
    async fn wait_for_stop(&mut self, running: &Running, reloads: &Reloads, replaced: &mut Replaced) -> Option<String> {
        // systemd recommends two keep-alives per watchdog interval.
        let watchdog = sd_notify::watchdog_enabled();
        let period = watchdog.map_or(STATUS_PERIOD, |period| STATUS_PERIOD.min(period / 2));
        let mut tick = tokio::time::interval(period.max(Duration::from_millis(10)));
        let mut last_status = String::new();
        loop {
            tokio::select! {
                // A replaced router executes no later request.
                biased;
                Some(why) = replaced.recv() => return Some(why),
                _ = self.hangup.recv() => reloads.request(),
                name = stop_signal(&mut self.terminate, &mut self.interrupt) => {
                    info!("{name}: stopping; clients' commands in flight get up to {:?}, a second signal ends it at once", reloads.shutdown_timeout());
                    return None;
                }
                _ = tick.tick() => notify_systemd(running, watchdog.is_some(), &mut last_status),
            }
        }
    }

    /// Waits until the clients of a replaced process have left, at most for `bound`, or until a signal.
    async fn wait_for_clients(&mut self, running: &Running, bound: Duration) {
        let end = tokio::time::Instant::now() + bound;
        let mut tick = tokio::time::interval(CLIENTS_PERIOD);
        let clients = || running.with(|router| router.status().clients).unwrap_or(0);
        loop {
            tokio::select! {
                _ = self.hangup.recv() => info!("SIGHUP: this process only serves its last clients, so it reads no configuration"),
                name = stop_signal(&mut self.terminate, &mut self.interrupt) => {
                    return info!("{name}: stopping; {} are disconnected after their commands in flight", counted(clients(), "client"));
                }
                () = tokio::time::sleep_until(end) => {
                    return info!("{bound:?} have passed; {} are disconnected after their commands in flight", counted(clients(), "client"));
                }
                _ = tick.tick() => if clients() == 0 {
                    return info!("all clients of this process have left");
                }
            }
        }
    }
}

/// Waits of a standby, during which signals are handled.
struct SignalWait {
    runtime: tokio::runtime::Runtime,
    signals: Signals,
    /// SIGHUP arrived during the wait.
    reload_wanted: bool,
}

impl SignalWait {
    fn new() -> anyhow::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .context("cannot start waiting for signals")?;
        let signals = {
            let _context = runtime.enter();
            Signals::new().context("cannot wait for signals")?
        };
        Ok(Self { runtime, signals, reload_wanted: false })
    }

    /// Waits for `period`, and reports `what` to systemd as the status. Returns false on a signal to stop.
    fn pause(&mut self, what: &str, period: Duration) -> bool {
        // A waiting standby is ready and alive for systemd.
        notify(&[NotifyState::Ready, NotifyState::Watchdog, NotifyState::Status(what)]);
        let Self { runtime, signals, reload_wanted } = self;
        let Signals { hangup, terminate, interrupt, .. } = signals;
        runtime.block_on(async {
            let end = tokio::time::sleep(period);
            tokio::pin!(end);
            loop {
                tokio::select! {
                    _ = hangup.recv() => {
                        info!("SIGHUP: a waiting standby reads the configuration again as soon as it serves");
                        *reload_wanted = true;
                    }
                    name = stop_signal(terminate, interrupt) => {
                        info!("{name}: stopped; the standby did not serve yet");
                        return false;
                    }
                    () = &mut end => return true,
                }
            }
        })
    }
}

/// Returns the name of the first signal that stops the process.
async fn stop_signal(terminate: &mut Signal, interrupt: &mut Signal) -> &'static str {
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    }
}

fn notify_systemd(running: &Running, watchdog: bool, last: &mut String) {
    if std::env::var_os("NOTIFY_SOCKET").is_none() {
        return;
    }
    let Some(status) = running.with(Router::status) else {
        return;
    };
    let up = status.nodes.iter().filter(|node| node.link == switchyard_router::Link::Up).count();
    let text = format!(
        "{up} of {} up, {}, epoch {}",
        counted(status.nodes.len(), "node"),
        counted(status.clients, "client"),
        status.epoch
    );
    let mut states = Vec::new();
    if watchdog {
        states.push(NotifyState::Watchdog);
    }
    if text != *last {
        states.push(NotifyState::Status(&text));
    }
    if !states.is_empty() {
        notify(&states);
    }
    *last = text;
}

/// Drains the router within `bound`, after `before`. A second signal ends the process at once, also with exit code 0, because the
/// operator intends it. Returns whether all workers have ended.
fn stop(
    runtime: &tokio::runtime::Runtime,
    signals: &mut Signals,
    running: &Arc<Running>,
    before: impl FnOnce(Duration) + Send + 'static,
    bound: Duration,
) -> anyhow::Result<bool> {
    let running = Arc::clone(running);
    let (done, drained) = tokio::sync::oneshot::channel();
    std::thread::Builder::new()
        .name("drain".to_owned())
        .spawn(move || {
            let end = Instant::now() + bound;
            before(bound);
            let drained =
                running.start_draining().map(|router| router.drain(end.saturating_duration_since(Instant::now())));
            // The receiver is gone only after a second signal.
            let _ = done.send(drained);
        })
        .context("cannot start a thread")?;
    runtime.block_on(async {
        tokio::select! {
            drained = drained => match drained {
                Ok(Some(outcome)) if outcome.cut > 0 => {
                    warn!(
                        "stopped; {} with commands in flight after {bound:?} {} cut",
                        counted(outcome.cut, "client"),
                        if outcome.cut == 1 { "was" } else { "were" }
                    );
                }
                Ok(None) => return Err(anyhow!("the router has already ended")),
                Ok(Some(_)) => info!("stopped; no client was cut"),
                Err(_) => return Err(anyhow!("draining failed, see above")),
            },
            name = stop_signal(&mut signals.terminate, &mut signals.interrupt) => {
                warn!("{name} again: stopped at once");
                return Ok(false);
            }
        }
        Ok(true)
    })
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_used_port_names_its_holder() {
        let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = taken.local_addr().expect("its address");
        let refusal = TcpListener::bind(address).expect_err("taken");
        let text = explain_listen(address, "clients", "--listen", refusal).to_string();
        assert!(text.starts_with(&format!("cannot listen on {address} for clients: ")), "{text}");
        assert!(text.contains(&format!("(process {})", std::process::id())), "{text}");
        assert!(text.contains("--listen"), "{text}");
    }
}
