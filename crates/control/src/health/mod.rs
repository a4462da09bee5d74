//! Health of nodes: whether they reply, whether they accept writes, and their INFO.
//!
//! A dedicated connection polls each node once a second ([`info_reply`]), even if no client uses the node. So a hanging
//! node is detected before a client notices, and its INFO is available to all consumers: the guard against nodes that
//! return empty, the loads of nodes, and reports. The router's own connections are unsuitable: there a poll would wait
//! behind clients' commands, and idle connections show nothing.

mod info_reply;
mod poller;

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use switchyard_policy::eject::Condition;
use switchyard_policy::topology::NodeId;
use switchyard_router::{NodeStatus, WriteRefusal};

use crate::admin::{NodeReport, Silence};
use crate::metrics::Page;

use info_reply::Refusal;
pub use poller::HealthThread;

/// Poll interval.
const INTERVAL: Duration = Duration::from_secs(1);

/// Time without a reply after which a node counts as silent.
const SILENT_AFTER: Duration = Duration::from_secs(2);

/// Maximum age of the workers' reports of commands in flight.
const REPORT_AGE_MAX: Duration = Duration::from_millis(600);

/// Time after a reply for which a node counts as replying.
const REPLY_VALID_FOR: Duration = Duration::from_secs(3);

/// Time after a client's refused write for which a node counts as refusing writes. INFO does not contain every reason.
const REFUSAL_VALID_FOR: Duration = Duration::from_secs(10);

/// Health of all nodes.
#[derive(Debug, Default)]
pub(crate) struct Health(Mutex<BTreeMap<NodeId, Node>>);

/// Health of a node.
#[derive(Debug, Default)]
struct Node {
    /// Time of the oldest unanswered poll.
    pending_since: Option<Instant>,
    /// Time of the first BUSY reply: the node executes a slow script.
    busy: Option<Instant>,
    /// Whether the connection was refused or closed after the last reply.
    is_gone: bool,
    /// Time of the last reply.
    replied_at: Option<Instant>,
    /// Refusal according to INFO.
    refusal_from_info: Option<Refusal>,
    /// Last refusal that clients received, with its time.
    refusal_to_clients: Option<(WriteRefusal, Instant)>,
    /// Refusals that clients had received at the last poll, by kind.
    refusals: Option<[u64; WriteRefusal::ALL.len()]>,
}

impl Node {
    fn is_late(&self, timeout: Duration, now: Instant) -> bool {
        self.pending_since.is_some_and(|asked| now.saturating_duration_since(asked) >= timeout.max(INTERVAL))
    }

    fn silence(&self, slow_for: Option<Duration>, now: Instant) -> Option<Silence> {
        let silent = self
            .pending_since
            .map(|asked| now.saturating_duration_since(asked))
            .filter(|silent| *silent >= SILENT_AFTER);
        let busy = self.busy.map(|since| now.saturating_duration_since(since));
        match (busy, silent) {
            (Some(busy), _) => Some(Silence::Busy { seconds: busy.as_secs_f64() }),
            // A slow command that was sent before the poll explains the silence.
            (None, Some(silent)) => Some(match slow_for.filter(|slow| *slow + REPORT_AGE_MAX >= silent) {
                Some(slow) => Silence::Busy { seconds: slow.as_secs_f64() },
                None => Silence::Silent { seconds: silent.as_secs_f64() },
            }),
            (None, None) => None,
        }
    }

    fn refusal(&self, now: Instant) -> Option<String> {
        let by_clients =
            self.refusal_to_clients.filter(|(_, at)| now.saturating_duration_since(*at) < REFUSAL_VALID_FOR);
        match (&self.refusal_from_info, by_clients) {
            (Some(refusal), _) => Some(refusal.to_string()),
            (None, Some((refusal, _))) => Some(format!("{} (clients got this error)", refusal.code())),
            (None, None) => None,
        }
    }
}

impl Health {
    fn nodes(&self) -> MutexGuard<'_, BTreeMap<NodeId, Node>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_queried(&self, node: NodeId, at: Instant) {
        self.nodes().entry(node).or_default().pending_since.get_or_insert(at);
    }

    /// Records a reply. `refusal_from_info`: the refusal, or `None` if INFO was not readable.
    fn note_answer(&self, node: NodeId, at: Instant, is_busy: bool, refuses: Option<Option<Refusal>>) {
        let mut nodes = self.nodes();
        let node = nodes.entry(node).or_default();
        (node.pending_since, node.is_gone, node.replied_at) = (None, false, Some(at));
        node.busy = if is_busy { Some(node.busy.unwrap_or(at)) } else { None };
        if let Some(refuses) = refuses {
            node.refusal_from_info = refuses;
        }
    }

    /// Records a refused or closed connection. The node is then down, not silent or busy.
    fn note_gone(&self, node: NodeId) {
        let mut nodes = self.nodes();
        let node = nodes.entry(node).or_default();
        (node.pending_since, node.busy, node.refusal_from_info, node.is_gone) = (None, None, None, true);
    }

    fn note_refusals(&self, node: NodeId, at: Instant, refusals: [u64; WriteRefusal::ALL.len()]) {
        let mut nodes = self.nodes();
        let node = nodes.entry(node).or_default();
        let before = node.refusals.replace(refusals).unwrap_or_default();
        if let Some(refusal) =
            WriteRefusal::ALL.into_iter().find(|refusal| refusals[*refusal as usize] > before[*refusal as usize])
        {
            node.refusal_to_clients = Some((refusal, at));
        }
    }

    fn keep(&self, is_one: impl Fn(NodeId) -> bool) {
        self.nodes().retain(|node, _| is_one(*node));
    }

    /// Returns whether a node replies or fails: it is unreachable, or has not replied to a poll within `timeout`.
    /// Unknown if there is neither a late poll nor a recent reply.
    pub(crate) fn condition(&self, node: NodeId, timeout: Duration, now: Instant) -> Condition {
        let nodes = self.nodes();
        let Some(node) = nodes.get(&node) else { return Condition::Unknown };
        let is_heard = node.replied_at.is_some_and(|heard| now.saturating_duration_since(heard) < REPLY_VALID_FOR);
        match node.is_gone || node.is_late(timeout, now) {
            true => Condition::Fails,
            false if is_heard => Condition::Answers,
            false => Condition::Unknown,
        }
    }

    /// Whether a poll older than `timeout` is unanswered.
    pub(crate) fn is_late(&self, node: NodeId, timeout: Duration, now: Instant) -> bool {
        self.nodes().get(&node).is_some_and(|node| node.is_late(timeout, now))
    }

    /// Kind and duration of a node's silence, if it does not reply now.
    pub(crate) fn silence(&self, node: &NodeStatus, now: Instant) -> Option<Silence> {
        self.nodes().get(&node.id)?.silence(node.slow_for, now)
    }

    /// Reason why a node refuses writes now.
    pub(crate) fn refusal(&self, node: NodeId, now: Instant) -> Option<String> {
        self.nodes().get(&node)?.refusal(now)
    }
}

/// Adds metrics of the nodes' health.
pub(crate) fn add_metrics(page: &mut Page, nodes: &[NodeReport]) {
    let of = |node: &NodeReport, is: bool| (vec![("node", node.address.clone())], f64::from(u8::from(is)));
    let silent = nodes.iter().map(|node| of(node, matches!(node.silence, Some(Silence::Silent { .. }))));
    page.gauges(
        "node_silent",
        "1 if the node has not replied for two seconds, and no slow command explains it",
        silent,
    );
    let busy = nodes.iter().map(|node| of(node, matches!(node.silence, Some(Silence::Busy { .. }))));
    page.gauges("node_busy", "1 if the node does not reply because it executes a slow command", busy);
    let refusals = nodes.iter().flat_map(|node| {
        let code = node.refuses_writes.as_deref().and_then(|why| why.split(' ').next());
        WriteRefusal::ALL.map(|refusal| {
            let labels = vec![("node", node.address.clone()), ("reason", refusal.code().to_owned())];
            (labels, f64::from(u8::from(code == Some(refusal.code()))))
        })
    });
    page.gauges("node_refuses_writes", "1 if the node refuses writes, by the code of its error", refusals);
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeId = NodeId(3);

    fn silence(health: &Health, slow_for: Option<u64>, now: Instant) -> Option<Silence> {
        health.nodes().get(&NODE)?.silence(slow_for.map(Duration::from_secs), now)
    }

    #[test]
    fn a_node_is_silent_after_two_intervals() {
        let (health, start) = (Health::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        health.note_queried(NODE, at(0));
        assert_eq!(silence(&health, None, at(1)), None);
        // Polled again on another connection, with the first poll still unanswered.
        health.note_queried(NODE, at(2));
        assert_eq!(silence(&health, None, at(3)), Some(Silence::Silent { seconds: 3.0 }));
        assert_eq!(silence(&health, Some(4), at(3)), Some(Silence::Busy { seconds: 4.0 }));
        assert_eq!(
            silence(&health, Some(1), at(3)),
            Some(Silence::Silent { seconds: 3.0 }),
            "the node was silent before that command"
        );
        health.note_answer(NODE, at(3), false, None);
        assert_eq!(silence(&health, Some(4), at(3)), None);
        health.note_answer(NODE, at(4), true, None);
        health.note_answer(NODE, at(5), true, None);
        assert_eq!(silence(&health, None, at(6)), Some(Silence::Busy { seconds: 2.0 }), "BUSY replies");
        health.note_queried(NODE, at(6));
        health.note_gone(NODE);
        assert_eq!(silence(&health, None, at(16)), None, "a missing node is down, not silent");
    }

    #[test]
    fn a_node_fails_that_is_gone_or_late() {
        let (health, start) = (Health::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let condition = |now| health.condition(NODE, Duration::from_secs(2), at(now));
        assert_eq!(condition(0), Condition::Unknown, "not polled yet");
        health.note_queried(NODE, at(0));
        assert_eq!((condition(1), condition(2)), (Condition::Unknown, Condition::Fails));
        assert!(
            health.is_late(NODE, Duration::from_secs(2), at(2)) && !health.is_late(NODE, Duration::from_secs(2), at(1))
        );
        health.note_answer(NODE, at(2), false, None);
        assert_eq!((condition(2), condition(5)), (Condition::Answers, Condition::Unknown), "a reply counts for 3 s");
        health.note_gone(NODE);
        health.note_queried(NODE, at(6));
        assert_eq!(condition(6), Condition::Fails, "polled again, without a reply yet");
        health.note_answer(NODE, at(6), false, None);
        assert_eq!(condition(6), Condition::Answers);
    }

    #[test]
    fn refusals_seen_by_clients_are_reported_for_a_while() {
        let (health, start) = (Health::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        health.note_refusals(NODE, at(0), [0, 0, 0, 0]);
        assert_eq!(health.refusal(NODE, at(0)), None);
        health.note_refusals(NODE, at(1), [0, 2, 0, 0]);
        health.note_refusals(NODE, at(2), [0, 2, 0, 0]);
        assert_eq!(health.refusal(NODE, at(3)), Some("OOM (clients got this error)".to_owned()));
        assert_eq!(health.refusal(NODE, at(11)), None);
        health.note_answer(
            NODE,
            at(12),
            false,
            Some(Some(Refusal { code: WriteRefusal::Readonly, why: "it is a replica".to_owned() })),
        );
        assert_eq!(health.refusal(NODE, at(60)), Some("READONLY it is a replica".to_owned()));
        health.note_answer(NODE, at(61), false, Some(None));
        assert_eq!(health.refusal(NODE, at(61)), None);
    }
}
