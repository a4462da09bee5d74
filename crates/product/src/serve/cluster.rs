//! `switchyard serve` in front of a Redis or Valkey Cluster: no state directory, no ownership record, no journal.
//!
//! A start of its own rather than branches in the usual one, most of whose steps prepare stored state.

use std::fs::DirBuilder;
use std::net::SocketAddr;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, anyhow};
use rustix::process::{Signal, kill_process};
use sd_notify::NotifyState;
use switchyard_control::admin::{self, AdminAccess, AdminOptions, AdminThread, AdminTls};
use switchyard_control::cluster::{ClusterFleet, ClusterKeeper, ClusterMoves, MapThread, MovesThread, ReplicaThread};
use switchyard_control::health::HealthThread;
use switchyard_control::{Running, operator};
use switchyard_router::{ClusterMap, Ports, Router, RuntimeSettings, Settings};
use tracing::{error, info, warn};

use super::logs::Logs;
use super::reload::{ReloadRequest, ReloadTarget, log_changed_content, log_changes, problem_lines, renew_admin_access};
use super::upgrade::{self, Successor, Upgrades};
use super::{
    SignalWait, check_ports, explain_admin, explain_start, metrics, open_files, pools, ready_line, start_reloads, stop,
};
use crate::cli::Failure;
use crate::config::{ClusterPlaces, Config, Resolved, Sources, counted};

/// Serves a cluster until SIGTERM or SIGINT, or until another process has replaced this one and the clients have left.
/// A `successor` takes over the listening sockets of another process.
pub(super) fn run(
    sources: Sources,
    config: Config,
    resolved: Resolved,
    places: &ClusterPlaces,
    logs: Logs,
    mut successor: Option<&mut Successor>,
) -> Result<(), Failure> {
    resolved.warnings().for_each(|warning| warn!("{warning}"));
    let access = if successor.is_some() { admin::kept_access } else { admin::access };
    let admin_socket = successor.as_mut().and_then(|successor| successor.take_admin(resolved.admin));
    if successor.is_none() {
        check_ports(&resolved)?;
    }
    let running = Arc::new(Running::default());
    let admin_tls = resolved.admin_tls.as_ref().map(|tls| AdminTls::new(tls.config.clone()));
    let token_dir = token_directory(resolved.admin);
    let admin_access = AdminAccess::new(access(resolved.admin_token.as_ref(), &token_dir));
    let options = AdminOptions {
        access: admin_access.clone(),
        host_names: config.admin_host_names.clone(),
        tls: admin_tls.clone(),
    };
    let mut admin = match admin_socket {
        Some(socket) => AdminThread::adopt(socket, options),
        None => AdminThread::bind(resolved.admin, options),
    }
    .map_err(explain_admin)?;
    let reader = places.reader();
    let report = reader.read(&[], &[], 0).map_err(|why| anyhow!("no member of the cluster shows its map: {why}"))?;
    let map = ClusterMap::new(&report.shards).map_err(|why| anyhow!("the map of the cluster is not usable: {why}"))?;
    let mut live = resolved.live;
    live.nodes =
        map.members().into_iter().filter_map(|(node, of)| Some((node, report.access.get(&of)?.clone()))).collect();
    let nodes = live.nodes.len();
    if let Some(lowered) =
        open_files::make_room(&mut live, nodes, config.workers, resolved.listen.len()).map_err(|why| anyhow!(why))?
    {
        warn!("{lowered}");
    }
    let SignalWait { runtime, mut signals, .. } = SignalWait::new()?;
    let tls: Vec<bool> = resolved.listen.iter().map(|listener| listener.tls).collect();
    let topology = map.topology();
    let moves = ClusterMoves::new(Arc::clone(&running), Arc::clone(&map), places.reader());
    moves.tune_planner(&config.planner);
    let (replaced_sender, mut replaced) = tokio::sync::mpsc::channel(1);
    let admin_socket = admin.socket().context("cannot copy the socket of the admin port")?;
    let upgrades =
        Upgrades::new(Arc::clone(&running), (resolved.admin, admin_socket), config.drain_max(), replaced_sender);
    let port = Arc::clone(&upgrades) as Arc<dyn admin::UpgradePort>;
    let fleet = ClusterFleet::new(Arc::clone(&running), Arc::clone(&moves), metrics::add_process, port);
    let settings = Settings {
        listen: resolved.listen,
        workers: config.workers,
        pin: config.pin,
        batched_sends: config.batched_sends,
        threads: running.threads().clone(),
        site: site(),
        ownership: None,
        servers: <_>::default(),
        processes: <_>::default(),
        held_reason: None,
        ports: Ports {
            operator: Some(operator::listen(Arc::clone(&fleet) as Arc<dyn admin::Source>, Arc::clone(&running))?),
            ..Ports::default()
        },
        cluster_map: Some(Arc::clone(&map)),
        live: live.clone(),
    };
    let router = match &mut successor {
        Some(successor) => Router::start_closed(settings, Arc::clone(&topology), successor.take_listeners()),
        None => Router::start(settings, Arc::clone(&topology)),
    }
    .map_err(explain_start)?;
    let addresses = super::addresses_of(&router, &tls);
    running.set(router, topology);
    let keeper = ClusterKeeper::new(Arc::clone(&running), map, reader);
    let map_thread = MapThread::start(Arc::clone(&keeper))?;
    let replica_thread = ReplicaThread::start(Arc::clone(&running), Arc::clone(&keeper))?;
    let mut moves_thread = Some(MovesThread::start(Arc::clone(&moves))?);
    let health = HealthThread::start(Arc::clone(&running))?;
    let storage = format!("a cluster of {}", counted(nodes, "primary node"));
    let ready = ready_line(&addresses, &config, &storage, admin.address, false);
    let (asks, asked) = mpsc::sync_channel(4);
    let reloader = ClusterReloader {
        sources,
        config,
        live,
        logs,
        keeper,
        moves,
        admin_tls,
        admin_access,
        token_dir,
        fleet: Arc::clone(&fleet),
        upgrades: Arc::clone(&upgrades),
    };
    let reloads = start_reloads(reloader, Arc::clone(&running), asks, asked)?;
    // The last step that can fail, because the old process ends after it.
    if let Some(successor) = successor {
        upgrade::wait_for_members(&running);
        successor.wait_for_open()?;
        running.with(Router::open).unwrap_or(Ok(())).context("cannot accept clients")?;
        successor.wait_for_go()?;
        running.with(Router::own_socket_files);
    }
    admin.serve(fleet);
    info!("{ready}");
    pools::report_ready(admin.address);
    let is_replaced = runtime.block_on(signals.wait_for_stop(&running, &reloads, &mut replaced)).is_some();
    let admin = if is_replaced {
        // Only the new process answers there and notifies systemd.
        admin.stop();
        // Only the new process moves slots.
        drop(moves_thread.take());
        runtime.block_on(signals.wait_for_clients(&running, upgrades.drain_max()));
        None
    } else {
        match upgrades.stop() {
            // The signal has arrived in the moment of an upgrade. It was meant for the service.
            Some(pid) => {
                let _ = kill_process(pid, Signal::TERM);
            }
            None => super::notify(&[NotifyState::Stopping]),
        }
        Some(admin)
    };
    drop((moves_thread, map_thread, replica_thread, health));
    stop(&runtime, &mut signals, &running, |_| {}, reloads.shutdown_timeout())?;
    admin.into_iter().for_each(AdminThread::stop);
    reloads.stop();
    Ok(())
}

/// Identifies the connections of this process at the members. Each process has a different name, because nothing is stored.
fn site() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("{:x}{:x}", std::process::id(), now.as_micros())
}

/// Directory of the admin port's token. Two routers on one machine have different ones.
fn token_directory(admin: SocketAddr) -> PathBuf {
    let directory = token_directory_of(admin, |name| std::env::var_os(name).map(PathBuf::from));
    // If this fails, writing the token fails, which is reported.
    let _ = DirBuilder::new().recursive(true).mode(0o700).create(&directory);
    directory
}

/// systemd sets `$RUNTIME_DIRECTORY` for `RuntimeDirectory=`, as folders separated by colons.
fn token_directory_of(admin: SocketAddr, env: impl Fn(&str) -> Option<PathBuf>) -> PathBuf {
    let set = |name| env(name).filter(|path| !path.as_os_str().is_empty());
    if let Some(folders) = set("RUNTIME_DIRECTORY")
        && let Some(first) = folders.to_string_lossy().split(':').next()
    {
        return PathBuf::from(first);
    }
    let base = set("XDG_RUNTIME_DIR").filter(|path| path.is_absolute());
    base.as_deref().unwrap_or(Path::new("/run")).join("switchyard").join(admin.port().to_string())
}

/// State of the reload thread.
struct ClusterReloader {
    sources: Sources,
    config: Config,
    live: RuntimeSettings,
    logs: Logs,
    keeper: Arc<ClusterKeeper>,
    moves: Arc<ClusterMoves>,
    admin_tls: Option<AdminTls>,
    admin_access: AdminAccess,
    token_dir: PathBuf,
    fleet: Arc<ClusterFleet>,
    upgrades: Arc<Upgrades>,
}

impl ReloadTarget for ClusterReloader {
    fn execute(&mut self, request: ReloadRequest, _: &Arc<Running>) {
        // The list of members is the cluster's own, so no other request exists.
        if !matches!(request, ReloadRequest::Reload) {
            return;
        }
        info!("reloading the configuration");
        let applied = self.apply();
        self.fleet.note_reload(applied.is_ok());
        match applied {
            Ok(0) => info!("reloaded: nothing has changed"),
            Ok(changes) => info!("reloaded: {changes} applied"),
            Err(problems) => {
                problems.iter().for_each(|problem| error!("{problem}"));
                error!("not reloaded: the running configuration is unchanged");
            }
        }
    }

    fn shutdown_timeout(&self) -> Duration {
        self.config.shutdown_timeout
    }
}

impl ClusterReloader {
    /// Applies the configuration. Returns the number of changes, or the problems.
    fn apply(&mut self) -> Result<usize, Vec<String>> {
        let mut config = self.sources.read().map_err(problem_lines)?;
        config.prefer_log_level(std::env::var("RUST_LOG").ok().as_deref());
        if !config.is_of_cluster() {
            return Err(vec!["the configuration no longer names a cluster: that needs a restart".to_owned()]);
        }
        let changes = config.changes_since(&self.config);
        config.keep_until_restart(&self.config);
        let resolved = config.resolve(|_| None).map_err(problem_lines)?;
        let Some(places) = &resolved.cluster else { return Ok(0) };
        let warnings: Vec<String> = resolved.warnings().collect();
        let mut live = resolved.live;
        let nodes = self.keeper.map().members().len();
        let lowered =
            open_files::make_room(&mut live, nodes, config.workers, resolved.listen.len()).map_err(|why| vec![why])?;
        if let (Some(held), Some(new)) = (&self.admin_tls, &resolved.admin_tls) {
            held.renew(new.config.clone());
        }
        self.keeper.reconfigure(live.clone(), places.reader());
        self.moves.reconfigure(places.reader());
        self.moves.tune_planner(&config.planner);
        warnings.into_iter().chain(lowered).for_each(|warning| warn!("{warning}"));
        let applied = log_changes(&changes)
            + renew_admin_access(&self.admin_access, resolved.admin_token.as_ref(), &self.token_dir)
            + log_changed_content(&self.live, &live, &changes);
        self.logs.set_level(&config.log_level);
        self.upgrades.set_drain_max(config.drain_max());
        (self.live, self.config) = (live, config);
        Ok(applied)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_token_is_in_the_runtime_directory() {
        let admin = SocketAddr::from(([127, 0, 0, 1], 6381));
        let of = |given: &[(&str, &str)]| {
            let env = |name: &str| given.iter().find(|(of, _)| *of == name).map(|(_, path)| PathBuf::from(path));
            token_directory_of(admin, env)
        };
        assert_eq!(of(&[("RUNTIME_DIRECTORY", "/run/a:/run/b"), ("XDG_RUNTIME_DIR", "/x")]), Path::new("/run/a"));
        assert_eq!(of(&[("XDG_RUNTIME_DIR", "/x")]), Path::new("/x/switchyard/6381"));
        assert_eq!(of(&[("XDG_RUNTIME_DIR", "x")]), Path::new("/run/switchyard/6381"));
    }
}
