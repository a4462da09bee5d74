//! Commands of a transaction that the router answers, and their replies.

use std::collections::BTreeSet;

use switchyard_policy::scan::Position;
use switchyard_resp::encode;

/// Time at which the router answers a command of a transaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::worker) enum When {
    /// Before EXEC is sent, with queries to nodes.
    Before,
    /// After the node has executed the other commands.
    After,
}

/// Captures a reply instead of sending it to a client.
#[derive(Debug, Default)]
pub(in crate::worker) enum CapturedReply {
    /// Replies go to clients.
    #[default]
    Nothing,
    /// Capture the next reply.
    Wanted,
    Answer(Vec<u8>),
}

impl CapturedReply {
    /// Captures a reply if requested. Returns whether it did.
    #[inline]
    pub(in crate::worker) fn takes(&mut self, answer: &[u8]) -> bool {
        let is_wanted = matches!(self, Self::Wanted);
        if is_wanted {
            *self = Self::Answer(answer.to_vec());
        }
        is_wanted
    }

    pub(super) fn end(&mut self) -> Option<Vec<u8>> {
        match std::mem::take(self) {
            Self::Answer(answer) => Some(answer),
            Self::Nothing | Self::Wanted => None,
        }
    }
}

#[derive(Debug)]
pub(super) enum Answer {
    None,
    /// Nodes are being queried: number of the pending reply, and the client's database.
    Awaited(u32, u32),
    Given(Vec<u8>),
}

#[derive(Debug)]
pub(super) struct Own {
    /// Place in EXEC's array. `None`: only the answer is needed.
    pub(super) place: Option<usize>,
    pub(super) request: Vec<u8>,
    when: When,
    pub(super) answer: Answer,
}

/// Commands of a transaction whose replies are not the node's.
#[derive(Debug, Default)]
pub(in crate::worker) struct LocalInMulti {
    pub(super) own: Vec<Own>,
    /// Number of commands with a place in EXEC's array.
    placed: usize,
    /// Bytes of their requests.
    request_bytes: usize,
    /// All commands before this index that need queries are answered.
    replied: usize,
    databases: BTreeSet<u32>,
    /// Places of the node's replies to SCAN among its replies.
    pub(super) scans: Vec<(usize, QueuedScan)>,
}

impl LocalInMulti {
    pub(in crate::worker) fn is_empty(&self) -> bool {
        self.own.is_empty() && self.scans.is_empty()
    }

    /// Number of commands in EXEC's array.
    pub(in crate::worker) fn count(&self) -> usize {
        self.placed
    }

    /// Memory of the queue, bytes.
    pub(in crate::worker) fn bytes(&self) -> usize {
        self.own.len() * size_of::<Own>() + self.request_bytes + self.scans.len() * size_of::<(usize, QueuedScan)>()
    }

    /// Queues a command at this place of EXEC's array.
    pub(in crate::worker) fn queue(&mut self, place: usize, when: When, request: &[u8]) {
        self.placed += 1;
        self.push(Own { place: Some(place), request: request.to_vec(), when, answer: Answer::None });
    }

    /// Records a SCAN that the node answers, at this place among its replies.
    pub(in crate::worker) fn queue_scan(&mut self, place: usize, scan: QueuedScan) {
        self.scans.push((place, scan));
    }

    /// Requests a check before EXEC that the nodes have this database.
    pub(in crate::worker) fn require_database(&mut self, database: u32) {
        let mut request = Vec::new();
        encode::command(&mut request, [&b"SELECT"[..], database.to_string().as_bytes()]);
        if self.databases.insert(database) {
            self.push(Own { place: None, request, when: When::Before, answer: Answer::None });
        }
    }

    fn push(&mut self, own: Own) {
        self.request_bytes += own.request.capacity();
        self.own.push(own);
    }

    /// Returns the first command that needs a query and has no answer.
    fn unanswered(&mut self) -> Option<&mut Own> {
        let is_done = |own: &Own| own.when == When::After || matches!(own.answer, Answer::Given(_));
        while self.own.get(self.replied).is_some_and(is_done) {
            self.replied += 1;
        }
        self.own.get_mut(self.replied)
    }

    pub(super) fn unasked(&mut self) -> Option<&mut Own> {
        self.unanswered().filter(|own| matches!(own.answer, Answer::None))
    }

    fn awaited(&mut self, seq: u32) -> Option<&mut Own> {
        self.unanswered().filter(|own| matches!(own.answer, Answer::Awaited(of, _) if of == seq))
    }

    /// Records the answer of nodes to a query. Returns the client's database before it, if the query is pending.
    pub(in crate::worker) fn note_answer(&mut self, seq: u32, answer: &[u8]) -> Option<u32> {
        let own = self.awaited(seq)?;
        match std::mem::replace(&mut own.answer, Answer::Given(answer.to_vec())) {
            Answer::Awaited(_, database) => Some(database),
            Answer::None | Answer::Given(_) => None,
        }
    }
}

/// A SCAN that is part of a transaction, executed by the only node.
#[derive(Debug)]
pub(in crate::worker) struct QueuedScan(pub(in crate::worker) Position);

#[cfg(test)]
mod tests {
    use super::*;

    /// Nodes are queried for one command at a time, and the cost per command is constant for long transactions.
    #[test]
    fn queries_to_nodes_are_sent_in_order_and_once() {
        let mut own = LocalInMulti::default();
        own.queue(0, When::After, b"ROLE");
        own.queue(1, When::Before, b"INFO");
        own.require_database(7);
        own.require_database(7);
        own.queue(3, When::Before, b"CONFIG GET x");
        assert_eq!(
            (own.count(), own.bytes()),
            (3, 4 * size_of::<Own>() + own.own.iter().map(|own| own.request.capacity()).sum::<usize>())
        );
        let mut asked = Vec::new();
        while let Some(next) = own.unasked() {
            next.answer = Answer::Awaited(5, 0);
            asked.push(next.place);
            assert!(own.unasked().is_none() && own.awaited(4).is_none(), "one at a time");
            own.awaited(5).expect("it is awaited").answer = Answer::Given(Vec::new());
        }
        assert_eq!(asked, [Some(1), None, Some(3)]);
    }
}
