//! Load of each node, for reports (such as `switchyard hotkeys`) and the planner.
//!
//! [`crate::health`] queries INFO once a second, and this module stores the load. A query per report would not do: CPU
//! usage is a difference over time, so the first report would lack it, concurrent reports would shorten each other's
//! interval, and a report would wait for a silent node.
//!
//! Workers count the traffic to a node since the start ([`Traffic`]); the same thread reads the counts once a second.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use switchyard_policy::load::{Answers, NodeLoad, SlotCount, SlotLoad, SlotRates};
use switchyard_policy::topology::NodeId;
use switchyard_router::Traffic;

/// Maximum age of a measurement.
const AGE_MAX: Duration = Duration::from_secs(10);

/// Load according to a server's INFO. Missing fields are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ServerLoad {
    /// CPU time of the process since its start, over all threads, in seconds.
    cpu: Option<f64>,
    /// Memory of data and clients, in bytes.
    memory: Option<u64>,
    /// `maxmemory` in bytes. 0 means no limit.
    memory_max: Option<u64>,
    /// Keys in all databases.
    keys: Option<u64>,
    /// Keys evicted since its start.
    evicted: Option<u64>,
    clients: Option<u64>,
    /// Replication lag of the slowest replica, in bytes. `None` without replicas.
    replica_lag: Option<u64>,
}

impl ServerLoad {
    /// Parses INFO. `keys`: total number of keys.
    pub(crate) fn parse(info: &str, keys: u64) -> Self {
        let seconds = |name| field(info, name)?.parse().ok().filter(|seconds: &f64| seconds.is_finite());
        let bytes = |name| field(info, name)?.parse().ok();
        Self {
            cpu: seconds("used_cpu_sys").zip(seconds("used_cpu_user")).map(|(sys, user)| sys + user),
            memory: bytes("used_memory"),
            memory_max: bytes("maxmemory"),
            keys: Some(keys),
            evicted: bytes("evicted_keys"),
            clients: bytes("connected_clients"),
            replica_lag: bytes("master_repl_offset")
                .zip(slowest_replica(info))
                .map(|(all, slowest)| all.saturating_sub(slowest)),
        }
    }
}

/// Smallest offset of a replica: `slave0:ip=127.0.0.1,port=7002,state=online,offset=42,lag=0`.
fn slowest_replica(info: &str) -> Option<u64> {
    let offset = |line: &str| {
        line.strip_prefix("slave")?.split(',').find_map(|field| field.strip_prefix("offset=")?.parse::<u64>().ok())
    };
    info.lines().filter_map(offset).min()
}

/// Returns a field of INFO.
pub(crate) fn field<'i>(info: &'i str, name: &str) -> Option<&'i str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// The last two samples of a value.
#[derive(Clone, Debug)]
struct LastTwo<T> {
    last: (Instant, T),
    before: Option<(Instant, T)>,
}

impl<T> LastTwo<T> {
    fn of(at: Instant, value: T) -> Self {
        Self { last: (at, value), before: None }
    }

    fn note(&mut self, at: Instant, value: T) {
        self.before = Some(std::mem::replace(&mut self.last, (at, value)));
    }

    fn is_fresh(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last.0) < AGE_MAX
    }

    /// Seconds between the samples, the older sample, and the newer one.
    fn both(&self) -> Option<(f64, &T, &T)> {
        let (began, before) = self.before.as_ref()?;
        let seconds = self.last.0.saturating_duration_since(*began).as_secs_f64();
        (seconds > 0.0).then_some((seconds, before, &self.last.1))
    }
}

/// Loads of all nodes. Not used on the path of a command.
#[derive(Debug, Default)]
pub(crate) struct Loads(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    traffic: BTreeMap<NodeId, LastTwo<Traffic>>,
    /// With the `run_id` of the process, because a new process counts from zero.
    servers: BTreeMap<NodeId, (String, LastTwo<ServerLoad>)>,
    slots: SlotRates,
    slots_at: Option<Instant>,
}

impl Loads {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the traffic to the nodes. Forgets nodes that are missing here.
    pub(crate) fn note_traffic(&self, at: Instant, traffic: BTreeMap<NodeId, Traffic>) {
        let known = &mut self.inner().traffic;
        known.retain(|node, _| traffic.contains_key(node));
        for (node, traffic) in traffic {
            match known.entry(node) {
                Entry::Occupied(lately) => lately.into_mut().note(at, traffic),
                Entry::Vacant(unknown) => drop(unknown.insert(LastTwo::of(at, traffic))),
            }
        }
    }

    /// Records the load of a node's server.
    pub(crate) fn note_server(&self, node: NodeId, run_id: &str, at: Instant, load: ServerLoad) {
        match self.inner().servers.get_mut(&node) {
            Some((process, lately)) if process == run_id => return lately.note(at, load),
            _ => {}
        }
        self.inner().servers.insert(node, (run_id.to_owned(), LastTwo::of(at, load)));
    }

    /// Forgets the servers of nodes for which `answers` returns false.
    pub(crate) fn keep_servers(&self, answers: impl Fn(NodeId) -> bool) {
        self.inner().servers.retain(|node, _| answers(*node));
    }

    /// Records the uses of each slot's keys since the start.
    pub(crate) fn note_slots(&self, at: Instant, counts: Vec<SlotCount>) {
        let mut inner = self.inner();
        let seconds = inner.slots_at.map_or(0.0, |before| at.saturating_duration_since(before).as_secs_f64());
        inner.slots_at = Some(at);
        inner.slots.counted(counts, seconds);
    }

    pub(crate) fn slots(&self) -> Vec<SlotLoad> {
        self.inner().slots.rates().to_vec()
    }

    pub(crate) fn of(&self, node: NodeId, now: Instant) -> NodeLoad {
        let inner = self.inner();
        let traffic = inner.traffic.get(&node).filter(|lately| lately.is_fresh(now));
        let both = traffic.and_then(LastTwo::both);
        let server = inner.servers.get(&node).map(|(_, lately)| lately).filter(|lately| lately.is_fresh(now));
        let cpu = |(seconds, before, last): (f64, &ServerLoad, &ServerLoad)| {
            Some((last.cpu? - before.cpu?).max(0.0) / seconds)
        };
        let evictions = |(seconds, before, last): (f64, &ServerLoad, &ServerLoad)| {
            Some(last.evicted?.saturating_sub(before.evicted?) as f64 / seconds)
        };
        let answers = |(_, before, last): (f64, &Traffic, &Traffic)| {
            let count = last.answers.count_since(&before.answers);
            Some(Answers {
                mean_us: last.answers_us.saturating_sub(before.answers_us) as f64 / count as f64,
                p50_us: last.answers.percentile_since(&before.answers, 50)?,
                p99_us: last.answers.percentile_since(&before.answers, 99)?,
            })
        };
        NodeLoad {
            requests: both
                .map(|(seconds, before, last)| last.requests.saturating_sub(before.requests) as f64 / seconds),
            answers: both.and_then(answers),
            in_flight: traffic.map_or(0, |lately| lately.last.1.in_flight),
            cpu: server.and_then(LastTwo::both).and_then(cpu),
            memory: server.and_then(|lately| lately.last.1.memory),
            memory_max: server.and_then(|lately| lately.last.1.memory_max),
            keys: server.and_then(|lately| lately.last.1.keys),
            evictions: server.and_then(LastTwo::both).and_then(evictions),
            clients: server.and_then(|lately| lately.last.1.clients),
            replica_lag: server.and_then(|lately| lately.last.1.replica_lag),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeId = NodeId(0);
    const SECOND: Duration = Duration::from_secs(1);

    fn about(found: Option<f64>, expected: f64) -> bool {
        found.is_some_and(|found| (found - expected).abs() < 1e-9)
    }

    #[test]
    fn info_is_read() {
        let cpu = "# CPU\r\nused_cpu_sys_children:7.5\r\nused_cpu_sys:1.250000\r\nused_cpu_user:2.5\r\nused_cpu_user_main_thread:9\r\n";
        let memory = "# Memory\r\nused_memory:1048576\r\nused_memory_human:1.00M\r\nused_memory_rss:9\r\nmaxmemory:0\r\nmaxmemory_policy:noeviction\r\n";
        let all = ServerLoad {
            cpu: Some(3.75),
            memory: Some(1 << 20),
            memory_max: Some(0),
            keys: Some(7),
            clients: Some(4),
            replica_lag: Some(30),
            ..<_>::default()
        };
        let others = "connected_clients:4\r\nmaster_repl_offset:100\r\nslave0:ip=::1,port=2,state=online,offset=90,lag=0\r\nslave1:ip=::1,port=3,state=online,offset=70,lag=1\r\n";
        assert_eq!(ServerLoad::parse(&format!("{memory}{cpu}{others}"), 7), all);
        assert_eq!(
            ServerLoad::parse("used_cpu_sys:1\r\nused_memory:x\r\nmaxmemory:5\r\n", 0),
            ServerLoad { memory_max: Some(5), keys: Some(0), ..<_>::default() }
        );
        assert_eq!(
            ServerLoad::parse("used_cpu_sys:nan\nused_cpu_user:1\n", 0),
            ServerLoad { keys: Some(0), ..<_>::default() }
        );
    }

    #[test]
    fn cpu_is_a_difference_over_time_of_one_process() {
        let (loads, start) = (Loads::default(), Instant::now());
        let said = |cpu| ServerLoad { cpu: Some(cpu), memory: Some(5), memory_max: Some(9), ..<_>::default() };
        let at = |seconds: u32| start + seconds * SECOND;
        assert_eq!(loads.of(NODE, start), NodeLoad::default());
        loads.note_server(NODE, "one", at(0), said(100.0));
        assert_eq!(
            loads.of(NODE, at(0)),
            NodeLoad { memory: Some(5), memory_max: Some(9), ..<_>::default() },
            "one answer is no difference"
        );
        loads.note_server(NODE, "one", at(2), said(101.5));
        assert!(about(loads.of(NODE, at(2)).cpu, 0.75));
        loads.note_server(NODE, "one", at(3), said(101.75));
        assert!(about(loads.of(NODE, at(3)).cpu, 0.25), "only the newest two");
        loads.note_server(NODE, "two", at(4), said(3.0));
        assert_eq!(loads.of(NODE, at(4)).cpu, None, "another process counts from zero");
        loads.note_server(NODE, "two", at(5), said(3.5));
        assert!(about(loads.of(NODE, at(5)).cpu, 0.5));
        assert_eq!(loads.of(NODE, at(15)), NodeLoad::default(), "too long ago");
        loads.keep_servers(|_| true);
        assert!(loads.of(NODE, at(5)).cpu.is_some());
        loads.keep_servers(|_| false);
        assert_eq!(loads.of(NODE, at(5)), NodeLoad::default());
    }

    #[test]
    fn traffic_is_a_difference_over_time() {
        let (loads, start) = (Loads::default(), Instant::now());
        let mut traffic = Traffic::default();
        let mut note = |seconds: u32, requests: u64, us: &[u64]| {
            traffic.requests += requests;
            us.iter().for_each(|us| traffic.answers.note(*us));
            traffic.answers_us += us.iter().sum::<u64>();
            loads.note_traffic(start + seconds * SECOND, [(NODE, traffic.clone())].into());
            loads.of(NODE, start + seconds * SECOND)
        };
        assert_eq!(note(0, 1000, &[9; 9]), NodeLoad::default());
        let times: Vec<u64> = [vec![100; 97], vec![10_000; 3]].concat();
        let load = note(2, 2000, &times);
        let answers = load.answers.expect("answered");
        assert!(about(load.requests, 1000.0) && about(Some(answers.mean_us), 397.0), "{load:?}");
        assert!((100..=125).contains(&answers.p50_us) && (10_000..=12_500).contains(&answers.p99_us), "{answers:?}");
        let load = note(3, 1, &[]);
        assert!(about(load.requests, 1.0) && load.answers.is_none(), "nothing was answered: {load:?}");
        assert_eq!(loads.of(NODE, start + 13 * SECOND), NodeLoad::default(), "too long ago");
        loads.note_traffic(start + 4 * SECOND, BTreeMap::new());
        assert_eq!(loads.of(NODE, start + 4 * SECOND), NodeLoad::default(), "a node no more");
    }
}
