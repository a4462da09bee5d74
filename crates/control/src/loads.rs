//! How much each node has to do, for people who ask which keys are hot (`switchyard hotkeys`).
//!
//! [`crate::health`] asks nodes once a second, with all else that is wanted of INFO. Here it is remembered. Not asked when somebody wants the report: CPU is a difference over time, so the first answer would have none, two who ask at a time would
//! shorten each other's time, and whoever asks would wait for a node that is silent.
//!
//! What goes to a node is counted by workers since the start ([`Traffic`]); the same thread looks at that once a second.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use switchyard_policy::topology::NodeId;
use switchyard_router::Traffic;

/// What was known so long ago says nothing of now.
const STAYS: Duration = Duration::from_secs(10);

/// What a server says of itself. What it does not say, or what the router may not ask, is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ServerLoad {
    /// Seconds of processors that its process has used since its start, on all its threads.
    cpu: Option<f64>,
    /// Bytes that its data and its clients take.
    memory: Option<u64>,
    /// How many these may be; 0: no limit.
    memory_max: Option<u64>,
}

impl ServerLoad {
    /// Reads it from INFO.
    pub(crate) fn parse(info: &str) -> Self {
        let seconds = |name| field(info, name)?.parse().ok().filter(|seconds: &f64| seconds.is_finite());
        let bytes = |name| field(info, name)?.parse().ok();
        Self {
            cpu: seconds("used_cpu_sys").zip(seconds("used_cpu_user")).map(|(sys, user)| sys + user),
            memory: bytes("used_memory"),
            memory_max: bytes("maxmemory"),
        }
    }
}

/// A field of INFO.
pub(crate) fn field<'i>(info: &'i str, name: &str) -> Option<&'i str> {
    info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
}

/// What is known of a node now.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Load {
    /// Commands that are sent to it, each second.
    pub(crate) requests: Option<f64>,
    /// The mean time from sending one to the answer, microseconds. None also where nothing was answered.
    pub(crate) answer_us: Option<f64>,
    /// Processors that its server keeps busy: 1.0 is one.
    pub(crate) cpu: Option<f64>,
    /// Bytes that the server uses.
    pub(crate) memory: Option<u64>,
    /// How many it may; 0: no limit.
    pub(crate) memory_max: Option<u64>,
}

/// The two newest of some numbers that are looked at again and again.
#[derive(Clone, Copy, Debug)]
struct Lately<T> {
    last: (Instant, T),
    before: Option<(Instant, T)>,
}

impl<T: Copy> Lately<T> {
    fn of(at: Instant, value: T) -> Self {
        Self { last: (at, value), before: None }
    }

    fn note(&mut self, at: Instant, value: T) {
        self.before = Some(std::mem::replace(&mut self.last, (at, value)));
    }

    fn is_fresh(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last.0) < STAYS
    }

    /// Seconds between the two, the older one and the newer one.
    fn both(&self) -> Option<(f64, T, T)> {
        let (began, before) = self.before?;
        let seconds = self.last.0.saturating_duration_since(began).as_secs_f64();
        (seconds > 0.0).then_some((seconds, before, self.last.1))
    }
}

/// What is remembered of all nodes. Nobody who has a command to forward comes here.
#[derive(Debug, Default)]
pub(crate) struct Loads(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    traffic: BTreeMap<NodeId, Lately<Traffic>>,
    /// With the process that has said it: another one counts from zero.
    servers: BTreeMap<NodeId, (String, Lately<ServerLoad>)>,
}

impl Loads {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What has gone to the nodes by now. Others are nodes no more.
    pub(crate) fn note_traffic(&self, at: Instant, traffic: BTreeMap<NodeId, Traffic>) {
        let known = &mut self.inner().traffic;
        known.retain(|node, _| traffic.contains_key(node));
        for (node, traffic) in traffic {
            known.entry(node).and_modify(|lately| lately.note(at, traffic)).or_insert_with(|| Lately::of(at, traffic));
        }
    }

    /// What the server of a node has said of itself.
    pub(crate) fn note_server(&self, node: NodeId, run_id: &str, at: Instant, load: ServerLoad) {
        match self.inner().servers.get_mut(&node) {
            Some((process, lately)) if process == run_id => return lately.note(at, load),
            _ => {}
        }
        self.inner().servers.insert(node, (run_id.to_owned(), Lately::of(at, load)));
    }

    /// The servers of these nodes answer; of others nothing is known any more.
    pub(crate) fn keep_servers(&self, answers: impl Fn(NodeId) -> bool) {
        self.inner().servers.retain(|node, _| answers(*node));
    }

    /// What is known of a node.
    pub(crate) fn of(&self, node: NodeId, now: Instant) -> Load {
        let inner = self.inner();
        let traffic = inner.traffic.get(&node).filter(|lately| lately.is_fresh(now)).and_then(Lately::both);
        let server = inner.servers.get(&node).map(|(_, lately)| lately).filter(|lately| lately.is_fresh(now));
        let cpu = |(seconds, before, last): (f64, ServerLoad, ServerLoad)| Some((last.cpu? - before.cpu?).max(0.0) / seconds);
        Load {
            requests: traffic.map(|(seconds, before, last)| last.requests.saturating_sub(before.requests) as f64 / seconds),
            answer_us: traffic.and_then(|(_, before, last)| {
                let answers = last.answers.saturating_sub(before.answers);
                (answers > 0).then(|| last.answers_us.saturating_sub(before.answers_us) as f64 / answers as f64)
            }),
            cpu: server.and_then(Lately::both).and_then(cpu),
            memory: server.and_then(|lately| lately.last.1.memory),
            memory_max: server.and_then(|lately| lately.last.1.memory_max),
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
        let all = ServerLoad { cpu: Some(3.75), memory: Some(1 << 20), memory_max: Some(0) };
        assert_eq!(ServerLoad::parse(&format!("{memory}{cpu}")), all);
        assert_eq!(
            ServerLoad::parse("used_cpu_sys:1\r\nused_memory:x\r\nmaxmemory:5\r\n"),
            ServerLoad { memory_max: Some(5), ..<_>::default() }
        );
        assert_eq!(ServerLoad::parse("used_cpu_sys:nan\nused_cpu_user:1\n"), ServerLoad::default());
    }

    #[test]
    fn cpu_is_a_difference_over_time_of_one_process() {
        let (loads, start) = (Loads::default(), Instant::now());
        let said = |cpu| ServerLoad { cpu: Some(cpu), memory: Some(5), memory_max: Some(9) };
        let at = |seconds: u32| start + seconds * SECOND;
        assert_eq!(loads.of(NODE, start), Load::default());
        loads.note_server(NODE, "one", at(0), said(100.0));
        assert_eq!(loads.of(NODE, at(0)), Load { memory: Some(5), memory_max: Some(9), ..<_>::default() }, "one answer is no difference");
        loads.note_server(NODE, "one", at(2), said(101.5));
        assert!(about(loads.of(NODE, at(2)).cpu, 0.75));
        loads.note_server(NODE, "one", at(3), said(101.75));
        assert!(about(loads.of(NODE, at(3)).cpu, 0.25), "only the newest two");
        loads.note_server(NODE, "two", at(4), said(3.0));
        assert_eq!(loads.of(NODE, at(4)).cpu, None, "another process counts from zero");
        loads.note_server(NODE, "two", at(5), said(3.5));
        assert!(about(loads.of(NODE, at(5)).cpu, 0.5));
        assert_eq!(loads.of(NODE, at(15)), Load::default(), "too long ago");
        loads.keep_servers(|_| true);
        assert!(loads.of(NODE, at(5)).cpu.is_some());
        loads.keep_servers(|_| false);
        assert_eq!(loads.of(NODE, at(5)), Load::default());
    }

    #[test]
    fn traffic_is_a_difference_over_time() {
        let (loads, start) = (Loads::default(), Instant::now());
        let note = |seconds: u32, requests, answers, answers_us| {
            loads.note_traffic(start + seconds * SECOND, [(NODE, Traffic { requests, answers, answers_us })].into());
            loads.of(NODE, start + seconds * SECOND)
        };
        assert_eq!(note(0, 1000, 900, 1_000_000), Load::default());
        let load = note(2, 3000, 1900, 1_200_000);
        assert!(about(load.requests, 1000.0) && about(load.answer_us, 200.0), "{load:?}");
        let load = note(3, 3001, 1900, 1_200_000);
        assert!(about(load.requests, 1.0) && load.answer_us.is_none(), "nothing was answered: {load:?}");
        assert_eq!(loads.of(NODE, start + 13 * SECOND), Load::default(), "too long ago");
        loads.note_traffic(start + 4 * SECOND, BTreeMap::new());
        assert_eq!(loads.of(NODE, start + 4 * SECOND), Load::default(), "a node no more");
    }
}
