//! SIGHUP: reads the configuration again, and applies the changes that are possible with connected clients.
//!
//! Runs on a separate thread, because it waits for name servers and for the drain barrier. The complete configuration
//! is validated before anything is applied, so that a mistake leaves the running one unchanged.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::{Arc, PoisonError, mpsc};
use std::time::{Duration, Instant};

use switchyard_control::admin::{self, Access, AdminAccess, AdminTls};
use switchyard_control::failover::{self, MonitoredNode, Observer};
use switchyard_control::members::{
    FleetFacts, MemberChange, NodeList, apply_change, leaving, load_changes, restore_changes, store_addresses,
};
use switchyard_control::nodes::NodeConnection;
use switchyard_control::placement;
use switchyard_control::{Fleet, Running};
use switchyard_policy::topology::{NodeId, Topology};
use switchyard_router::{NodeAccess, RuntimeSettings, Secret, Servers};
use tracing::{error, info, warn};

use super::logs::Logs;
use super::open_files;
use super::users::Configured;
use crate::config::{AppliesOn, Change, Config, NodeAddress, Sources};

/// Assumed duration of a command without a time-out, when waiting for a node to become idle.
const UNBOUNDED: Duration = Duration::from_secs(60);

/// Request to the reload thread.
#[derive(Debug)]
pub(super) enum ReloadRequest {
    /// Reads the configuration again.
    Reload,
    /// Returns the address and access of a server, as if it were a node.
    Find(String, mpsc::SyncSender<Result<NodeAddress, String>>),
    /// Changes the list of nodes, and returns the result.
    Change(MemberChange, mpsc::SyncSender<Result<(), String>>),
}

/// Executes the requests of the reload thread.
pub(super) trait ReloadTarget: Send + 'static {
    /// Executes a request. Problems are logged, or returned to the sender.
    fn execute(&mut self, request: ReloadRequest, running: &Arc<Running>);

    /// Maximum time for draining, by the configuration in force.
    fn shutdown_timeout(&self) -> Duration;
}

/// Sends requests to the reload thread, the only one that changes the list of nodes.
#[derive(Clone, Debug)]
pub(super) struct ReloadSender(pub(super) mpsc::SyncSender<ReloadRequest>);

impl ReloadSender {
    fn answered<T>(&self, ask: impl FnOnce(mpsc::SyncSender<Result<T, String>>) -> ReloadRequest) -> Result<T, String> {
        let (told, outcome) = mpsc::sync_channel(1);
        let ended = || "the router is stopping".to_owned();
        self.0.send(ask(told)).map_err(|_| ended())?;
        outcome.recv().map_err(|_| ended())?
    }
}

impl NodeList for ReloadSender {
    fn find(&self, name: &str) -> Result<NodeAddress, String> {
        self.answered(|told| ReloadRequest::Find(name.to_owned(), told))
    }

    fn change(&self, change: MemberChange) -> Result<(), String> {
        self.answered(|told| ReloadRequest::Change(change, told))
    }
}

/// State of the reload thread.
pub(super) struct Reloader {
    pub(super) sources: Sources,
    /// The router was started as a standby, so another machine may take over.
    pub(super) is_standby: bool,
    /// Configuration as read, without changes by `switchyard nodes`.
    pub(super) read: Config,
    pub(super) config: Config,
    /// Copy of `config` for other threads.
    pub(super) configured: Configured,
    pub(super) live: RuntimeSettings,
    pub(super) logs: Logs,
    /// Configured nodes with their replicas.
    pub(super) nodes: Vec<NodeAddress>,
    pub(super) observer: Observer,
    /// Admin port certificates, for renewal.
    pub(super) admin_tls: Option<AdminTls>,
    /// Permissions at the admin port.
    pub(super) admin_access: AdminAccess,
    pub(super) fleet: Arc<Fleet>,
}

/// Interval between checks of the drain barrier.
const BARRIER_LOOK: Duration = Duration::from_millis(10);

impl ReloadTarget for Reloader {
    fn execute(&mut self, request: ReloadRequest, running: &Arc<Running>) {
        match request {
            ReloadRequest::Reload => self.reload(running),
            // The change is applied even if the caller has timed out.
            ReloadRequest::Change(change, done) => drop(done.send(self.change_members(&change, running))),
            ReloadRequest::Find(name, told) => drop(told.send(self.find(&name))),
        }
    }

    fn shutdown_timeout(&self) -> Duration {
        self.config.shutdown_timeout
    }
}

impl Reloader {
    /// Reloads once. Problems are logged, and leave the running configuration unchanged.
    fn reload(&mut self, running: &Arc<Running>) {
        info!("reloading the configuration");
        let applied = self.apply(running).inspect(|_| {
            if running.with(|router| router.discard_config_set(self.live.clone())).unwrap_or(false) {
                info!("values changed by CONFIG SET are reset to the configuration");
            }
        });
        self.fleet.note_reload(applied.is_ok());
        match applied {
            Ok(0) => info!("reloaded: nothing has changed"),
            Ok(changes) => info!("reloaded: {changes} applied"),
            Err(problems) => {
                for problem in problems {
                    error!("{problem}");
                }
                error!("not reloaded: the running configuration is unchanged");
            }
        }
    }

    /// Adds or removes a node. Other changes in the file wait for a reload.
    fn change_members(&mut self, change: &MemberChange, running: &Arc<Running>) -> Result<(), String> {
        let listed = self.read.node_names();
        let store = Arc::clone(self.fleet.placement.store());
        let said = |error: anyhow::Error| format!("{error:#}");
        let before = load_changes(&store, &listed).map_err(said)?;
        apply_change(&store, &listed, Some(change)).map_err(said)?;
        self.apply_read(self.read.clone(), running, Some(change)).map(drop).map_err(|problems| {
            // Undo the stored change, so that the next reload does not repeat it.
            let undone = restore_changes(&store, &before).map_err(said).err();
            problems.into_iter().chain(undone).collect::<Vec<_>>().join("; ")
        })
    }

    /// Returns the address and access of a server, as if it were a node.
    fn find(&self, name: &str) -> Result<NodeAddress, String> {
        let mut config = self.read.clone();
        let remembered =
            load_changes(self.fleet.placement.store(), &config.node_names()).map_err(|error| format!("{error:#}"))?;
        let added: Vec<String> = remembered.added.into_iter().chain([name.to_owned()]).collect();
        let removed: Vec<String> = remembered.removed.into_iter().filter(|removed| removed != name).collect();
        let joined = |problems| problem_lines(problems).join("; ");
        config.apply_membership(&added, &removed).map_err(joined)?;
        config.keep_until_restart(&self.config);
        let known = self.addresses();
        let nodes = config.resolve(|name| known.get(name).copied()).map_err(joined)?.nodes;
        nodes.into_iter().find(|node| node.name == name).ok_or_else(|| format!("{name} is no address of a node"))
    }

    /// Current addresses by node name.
    fn addresses(&self) -> BTreeMap<String, SocketAddr> {
        let of = |node: &NodeAccess| Some((node.name.clone(), node.address?));
        let now = self.fleet.running.with(|router| router.configured_access()).unwrap_or_default();
        self.live.nodes.values().chain(now.values()).filter_map(of).collect()
    }

    /// Applies the configuration. Returns the number of changes, or the problems.
    fn apply(&mut self, running: &Arc<Running>) -> Result<usize, Vec<String>> {
        let mut read = self.sources.read().map_err(problem_lines)?;
        read.prefer_log_level(std::env::var("RUST_LOG").ok().as_deref());
        if self.is_standby {
            read.check_standby().map_err(problem_lines)?;
        }
        let applied = self.apply_read(read.clone(), running, None)?;
        // After `apply_read`: a refused reload must change nothing.
        apply_change(self.fleet.placement.store(), &read.node_names(), None)
            .map_err(|error| vec![format!("{error:#}")])?;
        self.read = read;
        Ok(applied)
    }

    /// Returns the configured nodes that may not join: nodes that own no slots and fail a check. A node named in
    /// `change` was checked before; the others then wait for a reload.
    fn refused_nodes(
        &self,
        nodes: &[NodeAddress],
        config_set: &[String],
        change: Option<&MemberChange>,
    ) -> Vec<String> {
        let Some(topology) = self.fleet.placement.topology() else { return Vec::new() };
        let newly: Vec<&NodeAddress> =
            nodes.iter().filter(|node| topology.nodes().all(|known| known.name != node.name)).collect();
        let (stopping, newly): (Vec<_>, Vec<_>) =
            newly.into_iter().partition(|node| self.fleet.operator.is_stopping(&node.name));
        let stopping: Vec<String> = stopping.into_iter().map(|node| node.name.clone()).collect();
        for name in &stopping {
            error!(
                "node {name} is in the configuration, but does not join: the autoscaler is stopping it now. When that has ended: reload (SIGHUP)"
            );
        }
        if newly.is_empty() {
            return stopping;
        }
        let (moves, running) = (&self.fleet.moves, &self.fleet.running);
        let out = match (change, FleetFacts::of(running, &topology, moves.site(), moves.timeout())) {
            (None, Some(facts)) => facts.refuse(&newly, config_set, moves.timeout()),
            (change, _) => {
                let is_named = |name: &String| matches!(change, Some(MemberChange::Add(named)) if named == name);
                newly.into_iter().map(|node| node.name.clone()).filter(|name| !is_named(name)).collect()
            }
        };
        out.into_iter().chain(stopping).collect()
    }

    /// Returns the nodes of a pool that are no longer in its file. They remain until they own no slots.
    fn leaving(
        &self,
        config: &Config,
        removed: &[String],
        change: Option<&MemberChange>,
    ) -> anyhow::Result<BTreeMap<String, String>> {
        if config.pool.is_none() {
            return Ok(BTreeMap::new());
        }
        let topology = self.fleet.placement.topology();
        let mut leaving = leaving(self.fleet.placement.store(), topology.as_deref(), &config.node_names(), removed)?;
        if let Some(MemberChange::Remove(name)) = change {
            leaving.remove(name);
        }
        Ok(leaving)
    }

    fn apply_read(
        &mut self,
        mut config: Config,
        running: &Arc<Running>,
        change: Option<&MemberChange>,
    ) -> Result<usize, Vec<String>> {
        let listed = config.node_names();
        let remembered =
            load_changes(self.fleet.placement.store(), &listed).map_err(|error| vec![format!("{error:#}")])?;
        warn_ignored(&config.apply_membership(&remembered.added, &remembered.removed).map_err(problem_lines)?);
        let leaving = self.leaving(&config, &remembered.removed, change).map_err(|error| vec![format!("{error:#}")])?;
        config.keep_leaving(&leaving).map_err(problem_lines)?;
        let scheme = config.pool.as_ref().map(|pool| &pool.scheme);
        self.fleet.placement.check_scheme(scheme).map_err(|error| vec![error.to_string()])?;
        let changes = config.changes_since(&self.config);
        config.keep_until_restart(&self.config);
        let known = self.addresses();
        let mut resolved = config.resolve(|name| known.get(name).copied()).map_err(problem_lines)?;
        keep_hosts(&self.nodes, &mut resolved.nodes);
        let warnings: Vec<String> = resolved.warnings().collect();
        let mut live = resolved.live;
        if let (Some(held), Some(new)) = (&self.admin_tls, &resolved.admin_tls) {
            held.renew(new.config.clone());
        }
        let nodes = resolved.nodes.len();
        let lowered =
            open_files::make_room(&mut live, nodes, config.workers, resolved.listen.len()).map_err(|why| vec![why])?;

        // From here on, only the store can fail. Leaving nodes stay reachable until their last command is answered.
        // Joining nodes are reachable before the first command. Note the listed nodes first: the autoscaler must not
        // stop one of them from now on.
        self.fleet.operator.note_listed(&listed);
        let out = self.refused_nodes(&resolved.nodes, &live.config_set, change);
        let wanted: Vec<String> = config.node_names().into_iter().filter(|name| !out.contains(name)).collect();
        let mut both = live.clone();
        let settled = self.fleet.placement.apply_nodes(&wanted, |settled| {
            live.nodes = placement::access(&settled.topology, &resolved.nodes);
            self.verify_credentials(&mut live);
            both = live.clone();
            let leaving = self.live.nodes.iter().filter(|(id, _)| !live.nodes.contains_key(id));
            both.nodes.extend(leaving.map(|(id, access)| (*id, access.clone())));
            if both != self.live {
                running.with(|router| router.reconfigure(both.clone()));
            }
        });
        let settled = settled.map_err(|error| vec![format!("{error:#}")])?;
        self.fleet.moves.tune(&config.moves, config.command_timeout());
        self.fleet.operator.tune(&resolved.nodes);
        self.fleet.ejector.tune(resolved.ejection, config.command_timeout(), leaving.keys().cloned().collect());
        if config.pool.is_some() {
            store_addresses(self.fleet.placement.store(), &config.node_addresses())
                .map_err(|error| vec![format!("{error:#}")])?;
            let listed: Vec<String> = listed.into_iter().filter(|name| !remembered.removed.contains(name)).collect();
            self.fleet.operator.tune_list(&listed, &leaving.into_keys().collect::<Vec<_>>(), change.is_none());
        }
        self.fleet.operator.tune_rules(config.placement_rules(), config.adopts_rules());
        self.fleet.operator.tune_planner(&config.planner);
        self.fleet.operator.tune_autoscaler(&config.autoscale);
        warnings.into_iter().chain(lowered).for_each(|warning| warn!("{warning}"));
        let applied = log_changes(&changes)
            + renew_admin_access(&self.admin_access, resolved.admin_token.as_ref(), &config.state_dir)
            + log_changed_content(&self.live, &live, &changes);
        for name in &settled.joined {
            info!("node {name} has joined; it owns no slots yet, so no keys are on it");
        }

        let leaving: Vec<NodeAccess> = both
            .nodes
            .iter()
            .filter(|(id, _)| !live.nodes.contains_key(id))
            .map(|(_, access)| access.clone())
            .collect();
        if leaving.is_empty() {
            self.live = both;
        } else {
            // A command is in flight until its reply or a confirmed kill: twice its timeout is ample. A command without
            // a timeout may take a minute.
            let bound = 2 * live.slow_command_timeout.unwrap_or(UNBOUNDED).max(live.command_timeout);
            if wait_for_epoch(running, settled.topology.epoch(), bound) {
                running.with(|router| router.reconfigure(live.clone()));
                self.live = live;
            } else {
                // The next reload tries again, because the nodes are then still in `self.live.nodes`.
                for node in &leaving {
                    warn!(
                        "node {} is still busy with commands sent before it was removed; reload again later to forget it",
                        node.name
                    );
                }
                self.live = both;
            }
        }
        if let Err(error) = self.watch(&settled.topology, resolved.nodes, running) {
            error!("{error:#}");
        }
        self.logs.set_level(&config.log_level);
        self.configured.lock().unwrap_or_else(PoisonError::into_inner).clone_from(&config);
        self.config = config;
        Ok(applied)
    }
}

impl Reloader {
    /// Tests new credentials before they replace those in use, so that no working connection is closed for credentials
    /// that the node refuses.
    fn verify_credentials(&self, live: &mut RuntimeSettings) {
        for (id, access) in &mut live.nodes {
            let Some(old) = self.live.nodes.get(id) else { continue };
            let same = (&old.username, &old.password, &old.tls) == (&access.username, &access.password, &access.tls);
            if same || access.address.is_none() || access.address != old.address {
                continue;
            }
            if let Err(why) = try_credentials(access, live.connect_timeout) {
                error!(
                    "node {} {why}: its connections keep the old credentials; correct them and reload again",
                    access.name
                );
                *access = old.clone();
            }
        }
    }

    /// Restarts the observer with the configured nodes.
    fn watch(&mut self, topology: &Topology, nodes: Vec<NodeAddress>, running: &Arc<Running>) -> anyhow::Result<()> {
        let has_replicas =
            |nodes: &[NodeAddress]| nodes.iter().filter(|node| node.has_replicas()).cloned().collect::<Vec<_>>();
        if has_replicas(&nodes) == has_replicas(&self.nodes) {
            self.nodes = nodes;
            return Ok(());
        }
        let store = Arc::clone(self.fleet.placement.store());
        let watched = failover::monitored_nodes(topology, &nodes, &store)?;
        // Stop the previous observer first, so that it publishes nothing after this.
        self.observer = Observer::default();
        let servers: BTreeMap<NodeId, Servers> = watched.iter().map(MonitoredNode::servers).collect();
        for node in topology.nodes() {
            running.with(|router| router.set_servers(node.id, servers.get(&node.id).cloned()));
        }
        self.observer = Observer::start(watched, store, Arc::clone(running))?;
        self.nodes = nodes;
        Ok(())
    }
}

/// Copies host names announced by Sentinels to the new configuration, for certificate checks.
fn keep_hosts(before: &[NodeAddress], nodes: &mut [NodeAddress]) {
    for node in nodes {
        let same = before.iter().find(|known| known.name == node.name);
        if let (Some(tls), Some(known)) = (&mut node.tls, same.and_then(|known| known.tls.as_ref())) {
            tls.adopt_hosts(known);
        }
    }
}

/// Tries twice: operators close connections that use the old password right after a change, and may close this one.
fn try_credentials(access: &NodeAccess, timeout: Duration) -> Result<(), String> {
    let open = || NodeConnection::open(access, timeout).map(drop);
    open().or_else(|_| open())
}

pub(super) fn problem_lines(problems: crate::config::Problems) -> Vec<String> {
    problems.0.iter().map(ToString::to_string).collect()
}

/// Warns of configured nodes that were removed with `switchyard nodes remove`.
pub(super) fn warn_ignored(names: &[String]) {
    for name in names {
        warn!(
            "node {name} is in the configuration, but was removed by `switchyard nodes remove`: it is not served. Remove it from the configuration, or \
             add it again with `switchyard nodes add {name}`"
        );
    }
}

/// Applies the configured token of the admin port. Returns the number of changes, 0 or 1. `directory`: of a generated
/// token.
pub(super) fn renew_admin_access(admin_access: &AdminAccess, token: Option<&Secret>, directory: &Path) -> usize {
    let before = admin_access.now();
    if token.is_none() && matches!(*before, Access::Made { .. }) {
        return 0;
    }
    let access = admin::access(token, directory);
    if access == *before {
        return 0;
    }
    admin_access.renew(access);
    info!(target: "audit", "the token of the admin port has changed");
    1
}

/// Logs changed settings. Returns the number of applied settings.
pub(super) fn log_changes(changes: &[Change]) -> usize {
    let mut applied = 0;
    for change in changes {
        match change.takes {
            AppliesOn::Restart => warn!("{} needs a restart; it is unchanged until then", change.description),
            AppliesOn::Reload => {
                applied += 1;
                info!("{}", change.description);
            }
        }
    }
    applied
}

/// Logs changes that the configuration does not show: the content of a secret's file, the address of a name.
pub(super) fn log_changed_content(old: &RuntimeSettings, new: &RuntimeSettings, changes: &[Change]) -> usize {
    let told: Vec<&str> = changes.iter().map(|change| change.description.as_str()).collect();
    let mut changed = 0;
    if old.users != new.users
        && !told.iter().any(|what| what.starts_with("clients.password") || what.starts_with("clients.users"))
    {
        info!("the password or the users of clients have changed");
        changed += 1;
    }
    if old.tls != new.tls {
        info!("the certificates of TLS listeners have changed; new connections get the new ones");
        changed += 1;
    }
    for (id, node) in &new.nodes {
        let Some(before) = old.nodes.get(id) else {
            continue;
        };
        if let (Some(now), Some(then)) = (node.address, before.address)
            && now != then
        {
            info!("node {}: now at {now}, previously at {then}", node.name);
            changed += 1;
        }
        if before.tls != node.tls && !told.iter().any(|what| what.starts_with("nodes.tls") || what.contains("its TLS"))
        {
            info!("node {}: the certificates for it have changed; new connections use the new ones", node.name);
            changed += 1;
        }
        let about = format!("node {}: its user", node.name);
        if before.password != node.password
            && !told.iter().any(|what| what.starts_with("nodes.password") || what.starts_with(&about))
        {
            info!("node {}: its password has changed", node.name);
            changed += 1;
        }
    }
    changed
}

/// Waits until no command of an older epoch is in flight. Returns false after `bound`, or if the router stops.
fn wait_for_epoch(running: &Running, epoch: u64, bound: Duration) -> bool {
    let deadline = Instant::now() + bound;
    loop {
        match running.with(|router| router.drained_epoch()) {
            Some(drained) if drained >= epoch => return true,
            Some(_) if Instant::now() < deadline => std::thread::sleep(BARRIER_LOOK),
            _ => return false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn credentials_are_tried_twice() {
        let node = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = node.local_addr().ok();
        let access =
            NodeAccess { name: "n".into(), address, unresolved: None, username: None, password: None, tls: None };
        let attempts = || try_credentials(&access, Duration::from_secs(30));
        std::thread::scope(|scope| {
            let asked = scope.spawn(attempts);
            drop(node.accept().expect("the first attempt"));
            let (mut second, _) = node.accept().expect("the second attempt");
            second.read(&mut [0; 100]).and_then(|_| second.write_all(b"+PONG\r\n")).expect("asked");
            assert_eq!(asked.join().expect("an answer"), Ok(()));
            let refused = scope.spawn(attempts);
            for _ in 0..2 {
                drop(node.accept().expect("an attempt"));
            }
            assert!(refused.join().expect("an answer").is_err());
        });
    }
}
