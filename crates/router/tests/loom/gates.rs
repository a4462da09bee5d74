//! Gates of hot copies, with policy's own cache: a hit never returns a value older than what its client may know.

use std::sync::Arc;

use loom::thread::spawn;
use switchyard_policy::hot_copies::{Copies, GateId, Read, ReadRequest, WriteHolds, WriteOutcome};
use switchyard_policy::topology::{NodeId, Slot};

use crate::state::{HotCopies, Published};
use crate::{Node, Socket};

const KEY: &[u8] = b"k";
const HASH: u64 = 77 << 40;
const NODE: NodeId = NodeId(0);

fn slot() -> Slot {
    Slot::new(7).expect("a slot")
}

/// A worker with a cache.
struct Reader {
    copies: Copies,
    published: Published,
}

impl Reader {
    fn new(hot: &HotCopies) -> Self {
        let mut copies = Copies::default();
        copies.limit(1 << 20, 1 << 10);
        let mut reader = Self { copies, published: hot.published() };
        reader.copies.adopt(&reader.published.set);
        reader
    }

    fn adopt(&mut self, hot: &HotCopies) {
        self.published = hot.published();
        self.copies.adopt(&self.published.set);
    }

    /// Reads the key for a client: from the copy, or from the node, with a fill if that is permitted.
    fn read(&mut self, hot: &HotCopies, node: &Node) -> u64 {
        let asked = ReadRequest { hash: HASH, key: KEY, database: 0, request: KEY, node: NODE, resp3: true };
        let gates = &*self.published.gates;
        match self.copies.read(gates, asked, 0, || 0, |since| hot.may_fill(since, NODE)) {
            Read::Hit(value) => u64::from(value[0]),
            Read::Fill => {
                let Some(number) = self.copies.begin(gates, asked, (0, 0)) else { return node.read() };
                let value = node.read();
                let _ = self.copies.end(gates, number, &[value as u8], None, (0, 0), |_, _| Some(NODE));
                value
            }
            _ => node.read(),
        }
    }
}

/// A write by a worker that has adopted the key as cacheable.
fn write(hot: &HotCopies, node: &Node, value: u64) {
    let gates = hot.published().gates;
    let mut holds = WriteHolds::default();
    holds.sent(&*gates, 1, NODE, [GateId::of_key(HASH)]);
    node.write(value);
    holds.over(&*gates, 1, WriteOutcome::Certain);
}

/// Two workers that have adopted the key, without older commands.
fn with_cacheable_key() -> Arc<HotCopies> {
    let hot = HotCopies::new(2);
    hot.change(false, vec![(HASH, slot())], Vec::new());
    for worker in [0, 1] {
        hot.adopted(worker, 1);
        hot.drained(worker, vec![1]);
    }
    Arc::new(hot)
}

#[test]
fn hit_after_the_reply_to_a_write_has_the_new_value() {
    loom::model(|| {
        let (hot, node, replied) = (with_cacheable_key(), Arc::new(Node::new(0)), Arc::new(Socket::new()));
        let mut reader = Reader::new(&hot);
        let writer = spawn({
            let (hot, node, replied) = (hot.clone(), node.clone(), replied.clone());
            move || {
                write(&hot, &node, 1);
                replied.send();
            }
        });
        reader.read(&hot, &node);
        let is_new = replied.has_received();
        let value = reader.read(&hot, &node);
        assert!(value == 1 || !is_new, "an old copy after the reply to the write");
        writer.join().expect("joined");
        assert_eq!(reader.read(&hot, &node), 1);
    });
}

#[test]
fn hit_after_a_read_of_the_new_value_has_it_too() {
    // Three threads have too many orders. loom's authors find most errors with two preemptions.
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let (hot, node, seen) = (with_cacheable_key(), Arc::new(Node::new(0)), Arc::new(Socket::new()));
        let mut reader = Reader::new(&hot);
        let writer = spawn({
            let (hot, node) = (hot.clone(), node.clone());
            move || write(&hot, &node, 1)
        });
        let other = spawn({
            let (node, seen) = (node.clone(), seen.clone());
            move || {
                if node.read() == 1 {
                    seen.send();
                }
            }
        });
        reader.read(&hot, &node);
        let is_new = seen.has_received();
        let value = reader.read(&hot, &node);
        assert!(value == 1 || !is_new, "an old copy after another client has read the new value");
        writer.join().expect("joined");
        other.join().expect("joined");
    });
}

#[test]
fn key_is_filled_after_the_commands_of_older_generations() {
    loom::model(|| {
        let (hot, node, replied) = (Arc::new(HotCopies::new(2)), Arc::new(Node::new(0)), Arc::new(Socket::new()));
        hot.change(false, vec![(HASH, slot())], Vec::new());
        hot.adopted(1, 1);
        hot.drained(1, vec![1]);
        let mut reader = Reader::new(&hot);
        let writer = spawn({
            let (hot, node, replied) = (hot.clone(), node.clone(), replied.clone());
            move || {
                // Sent before the worker adopts the set, so without a gate. Executed later.
                hot.adopted(0, 1);
                hot.drained(0, vec![0]);
                node.write(1);
                hot.drained(0, vec![1]);
                replied.send();
            }
        });
        reader.read(&hot, &node);
        let is_new = replied.has_received();
        let value = reader.read(&hot, &node);
        assert!(value == 1 || !is_new, "a copy from before the write");
        writer.join().expect("joined");
    });
}

#[test]
fn removed_key_has_no_hits_after_a_write_without_a_gate() {
    loom::model(|| {
        let (hot, node, replied) = (with_cacheable_key(), Arc::new(Node::new(0)), Arc::new(Socket::new()));
        let mut reader = Reader::new(&hot);
        assert_eq!(reader.read(&hot, &node), 0);
        let writer = spawn({
            let (hot, node, replied) = (hot.clone(), node.clone(), replied.clone());
            move || {
                hot.change(false, Vec::new(), vec![HASH]);
                hot.adopted(0, 2);
                hot.release();
                node.write(1);
                replied.send();
            }
        });
        if hot.generation() == 2 {
            reader.adopt(&hot);
            hot.adopted(1, 2);
            hot.release();
        }
        let is_new = replied.has_received();
        let value = reader.read(&hot, &node);
        assert!(value == 1 || !is_new, "a copy of a key that the writer did not know as cacheable");
        writer.join().expect("joined");
    });
}

#[test]
fn copies_end_with_the_gates_of_a_worker_that_panicked() {
    loom::model(|| {
        let (hot, node, replied) = (with_cacheable_key(), Arc::new(Node::new(0)), Arc::new(Socket::new()));
        let mut reader = Reader::new(&hot);
        assert_eq!(reader.read(&hot, &node), 0);
        let supervisor = spawn({
            let (hot, node, replied) = (hot.clone(), node.clone(), replied.clone());
            move || {
                hot.forget_worker(0);
                // The dead worker's command: its gates are lost.
                node.write(1);
                replied.send();
            }
        });
        if hot.generation() == 2 {
            reader.adopt(&hot);
            hot.adopted(1, 2);
            hot.drained(1, vec![2]);
        }
        let is_new = replied.has_received();
        let value = reader.read(&hot, &node);
        assert!(value == 1 || !is_new, "a copy of an old generation");
        supervisor.join().expect("joined");
    });
}
