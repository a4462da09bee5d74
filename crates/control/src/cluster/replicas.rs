//! Selects the replicas of a cluster that may be read: by the rules of [`PrimaryMonitor`], as at standalone nodes with
//! replicas, but the cluster alone names the primaries.
//!
//! A thread of its own, so that neither a worker nor the reader of the map waits for a silent replica. Nothing is queried
//! unless clients may read from replicas.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::Context;
use switchyard_policy::failover::{Action, Event, PrimaryMonitor, Record, Role};
use switchyard_policy::topology::NodeId;
use switchyard_router::{NodeAccess, ReplicaMember, Servers};
use tokio::sync::{mpsc, oneshot, watch};
use tokio::task::JoinSet;
use tracing::debug;

use super::keeper::ClusterKeeper;
use super::report::ReplicatedMember;
use crate::failover::{Sender, server};
use crate::running::Running;

/// Capacity of the event queue.
const QUEUE: usize = 1024;

/// Interval between two comparisons of the checks with the map.
const INTERVAL: Duration = Duration::from_millis(200);

/// The running thread. Dropping it ends the thread.
#[derive(Debug)]
pub struct ReplicaThread {
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl ReplicaThread {
    /// Starts to check the replicas of the cluster.
    ///
    /// # Errors
    /// If no thread can be started.
    pub fn start(running: Arc<Running>, keeper: Arc<ClusterKeeper>) -> anyhow::Result<Self> {
        let (stop, stopped) = oneshot::channel();
        let failed = "cannot start checking the replicas of the cluster";
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().context(failed)?;
        // The map that the router started with has no replicas.
        keeper.map().request();
        let threads = running.threads().clone();
        let thread = threads
            .spawn("cluster-replicas", move || runtime.block_on(check(&running, &keeper, stopped)))
            .context(failed)?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for ReplicaThread {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Checks of the replicas of one primary, from one change of its slots to the next.
struct Check {
    node: NodeId,
    /// Epoch of the map at the beginning.
    epoch: u64,
    of: ReplicatedMember,
    members: BTreeMap<SocketAddr, ReplicaMember>,
    monitor: PrimaryMonitor<SocketAddr>,
    /// Queries of the servers. Dropping them ends the queries, and with them the reports of this check.
    _queries: JoinSet<()>,
}

impl Check {
    /// Begins. `number`: sent with the reports of the servers. `None` if the address of the primary is unknown.
    fn begin(
        number: usize,
        (node, epoch): (NodeId, u64),
        of: &ReplicatedMember,
        (sender, hurried): (&Sender, &watch::Receiver<bool>),
    ) -> Option<Self> {
        let primary = of.primary.1.address?;
        let replicas: Vec<(SocketAddr, &(_, NodeAccess))> = of
            .replicas
            .iter()
            .filter_map(|replica| Some((replica.1.address?, replica)))
            .filter(|(address, _)| *address != primary)
            .collect();
        let mut queries = JoinSet::new();
        let servers = replicas.iter().map(|(address, (_, access))| (*address, access));
        for (address, access) in servers.chain([(primary, &of.primary.1)]) {
            queries.spawn(server::query(number, address, access.clone(), sender.clone(), hurried.clone()));
        }
        let record = Record { primary, config_epoch: 0, replication_id: None };
        // As with Sentinels: a server's own claim to be a primary changes nothing.
        let monitor = PrimaryMonitor::new(replicas.iter().map(|(address, _)| *address).collect(), true, Some(record));
        let members = replicas.iter().map(|(address, (member, access))| {
            (*address, ReplicaMember { id: member.id.clone(), tls: access.tls.clone() })
        });
        Some(Self { node, epoch, of: of.clone(), members: members.collect(), monitor, _queries: queries })
    }

    /// Processes a report. Returns the readable replicas after a change.
    fn step(&mut self, event: Event<SocketAddr>, now_us: u64) -> Option<Servers> {
        let event = match event {
            // Behind address translation, a replica names its primary by another address. The id of the replication
            // history shows which primary it follows.
            Event::RoleReported { address, role: Role::Replica { is_current, position, .. }, round_trip_us } => {
                Event::RoleReported { address, role: Role::Replica { of: None, is_current, position }, round_trip_us }
            }
            other => other,
        };
        let mut actions = Vec::new();
        self.monitor.step(event, now_us, &mut actions);
        let mut readable = actions.into_iter().filter_map(|action| match action {
            Action::Readable { replicas, primary_is_nearest } => Some((replicas, primary_is_nearest)),
            Action::Record(_) | Action::Primary { .. } | Action::Unproven { .. } => None,
        });
        let (readable, primary_is_nearest) = readable.next_back()?;
        Some(Servers {
            primary: self.of.primary.1.address,
            readable,
            primary_is_nearest,
            members: self.members.clone(),
            ..Servers::default()
        })
    }
}

/// Checks in progress, by number. A check gets a new number when it begins again, so that no earlier report counts.
#[derive(Default)]
struct Checks {
    by_number: BTreeMap<usize, Check>,
    next: usize,
}

impl Checks {
    /// Ends checks that no longer count, and begins missing ones.
    fn follow(&mut self, running: &Running, keeper: &ClusterKeeper, reports: (&Sender, &watch::Receiver<bool>)) {
        let replicated = keeper.replicated();
        let numbers: BTreeMap<_, NodeId> =
            keeper.map().members().into_iter().map(|(node, member)| (member, node)).collect();
        let node_of = |of: &ReplicatedMember| numbers.get(&of.primary.0).copied();
        self.by_number.retain(|_, check| {
            if !replicated.iter().any(|of| node_of(of) == Some(check.node)) {
                running.with(|router| router.forget_replicas(check.node));
                return false;
            }
            let is_valid = running.with(|router| router.is_check_valid(check.node, check.epoch)).unwrap_or(false);
            is_valid && replicated.contains(&check.of)
        });
        for of in replicated.iter() {
            let Some(node) = node_of(of) else { continue };
            if of.primary.1.address.is_none() || self.by_number.values().any(|check| check.node == node) {
                continue;
            }
            let Some(epoch) = running.with(|router| router.check_replicas(node)).flatten() else { continue };
            if let Some(check) = Check::begin(self.next, (node, epoch), of, reports) {
                self.by_number.insert(self.next, check);
                self.next += 1;
            }
        }
    }
}

async fn check(running: &Running, keeper: &ClusterKeeper, mut stop: oneshot::Receiver<()>) {
    let began = Instant::now();
    let (sender, mut reports) = mpsc::channel(QUEUE);
    // No check waits for a position in a hurry: it is reached at the next query.
    let (_hurry, hurried) = watch::channel(false);
    let mut checks = Checks::default();
    let mut interval = tokio::time::interval(INTERVAL);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = &mut stop => return,
            _ = interval.tick() => checks.follow(running, keeper, (&sender, &hurried)),
            Some((number, event)) = reports.recv() => {
                let Some(check) = checks.by_number.get_mut(&number) else { continue };
                let Some(servers) = check.step(event, began.elapsed().as_micros() as u64) else { continue };
                let member = check.of.primary.0.name();
                debug!(member, replicas = servers.readable.len(), "readable replicas of a member have changed");
                running.with(|router| router.set_replicas(check.node, servers, check.epoch));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use switchyard_policy::cluster::Member;
    use switchyard_policy::failover::Position;

    use super::*;

    fn member(port: u16) -> (Member, NodeAccess) {
        let member = Member { id: port.to_string(), host: "127.0.0.1".to_owned(), port };
        let address = Some(SocketAddr::from(([127, 0, 0, 1], port)));
        let access =
            NodeAccess { name: member.name(), address, unresolved: None, username: None, password: None, tls: None };
        (member, access)
    }

    fn replica_at(port: u16, replication_id: &str, offset: u64) -> Event<SocketAddr> {
        Event::RoleReported {
            address: SocketAddr::from(([127, 0, 0, 1], port)),
            role: Role::Replica {
                // An address before translation.
                of: Some(SocketAddr::from(([10, 0, 0, 1], 6379))),
                is_current: true,
                position: Position { replication_id: replication_id.to_owned(), offset },
            },
            round_trip_us: 100,
        }
    }

    fn primary_at(port: u16, offset: u64) -> Event<SocketAddr> {
        let role = Role::Primary { replication_id: "a".to_owned(), followed_id: None, offset };
        Event::RoleReported { address: SocketAddr::from(([127, 0, 0, 1], port)), role, round_trip_us: 100 }
    }

    #[test]
    fn replicas_are_read_once_they_have_the_data_of_their_primary() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        let _entered = runtime.enter();
        let (sender, _reports) = mpsc::channel(1);
        let (_hurry, hurried) = watch::channel(false);
        let of = ReplicatedMember { primary: member(1), replicas: vec![member(2), member(3)] };
        let mut check = Check::begin(0, (NodeId(0), 1), &of, (&sender, &hurried)).expect("a check");
        let readable = |servers: Option<Servers>| {
            servers.map(|servers| servers.readable.iter().map(SocketAddr::port).collect::<Vec<_>>())
        };
        assert_eq!(readable(check.step(replica_at(2, "a", 100), 0)), None, "the position of the primary is unknown");
        assert_eq!(readable(check.step(primary_at(1, 100), 0)), Some(vec![2]));
        assert_eq!(readable(check.step(replica_at(3, "a", 99), 0)), None, "it is behind");
        assert_eq!(readable(check.step(replica_at(3, "a", 100), 0)), Some(vec![2, 3]));
        assert_eq!(readable(check.step(replica_at(2, "b", 900), 0)), Some(vec![3]), "it follows another primary");
        // A replica that claims to be a primary is not read, and not followed.
        assert_eq!(readable(check.step(primary_at(3, 100), 0)), Some(vec![]));
        assert_eq!(check.monitor.primary().map(SocketAddr::port), Some(1));
        let servers = check.step(replica_at(3, "a", 100), 0).expect("a change");
        assert_eq!(servers.members.get(&servers.readable[0]).map(|member| member.id.as_str()), Some("3"));
    }
}
