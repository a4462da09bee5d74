//! State of hot copies ([`switchyard_policy::hot_copies`]) that workers share ([`state`]), and the [`coordinator`] thread.
//!
//! A hit reads two gates and no other shared state. Only writes of cacheable keys, and of whole nodes, change a gate.
//! Each worker has its own copies: shared copies would need a lock, or reference counts that all workers write.
//!
//! The coordinator chooses the keys from the counts of all workers once a second, and from requests of workers at once.

mod coordinator;
mod state;

pub(crate) use coordinator::coordinate;
pub(crate) use state::{HotCopies, Published, Table};

#[cfg(test)]
mod tests {
    use switchyard_policy::hot_copies::{GateId, Gates};
    use switchyard_policy::topology::{NodeId, Slot};

    use super::HotCopies;
    use crate::sync::BLOCK;

    #[test]
    fn gate_of_a_removed_key_is_shut_until_all_workers_adopt_the_set() {
        let hot = HotCopies::new(2);
        let (hash, slot) = (77 << 40, Slot::new(7).expect("a slot"));
        let gate = || hot.published().gates.load(GateId::of_key(hash));
        hot.change(false, vec![(hash, slot)], Vec::new());
        hot.release();
        assert!(gate().is_open(), "gate of an added key");
        let before = gate();
        hot.change(false, Vec::new(), vec![hash]);
        hot.adopted(0, 2);
        hot.release();
        assert!(!gate().is_open(), "the other worker has the set with it");
        hot.adopted(1, 2);
        hot.release();
        assert!(gate().is_open() && gate() != before);
    }

    #[test]
    fn key_is_filled_after_every_worker_has_no_older_command_at_the_node() {
        let hot = HotCopies::new(2);
        let (near, far) = (NodeId(3), NodeId(BLOCK as u16 + 3));
        let nodes = |count: NodeId, oldest: u64| vec![oldest; count.index() + 1];
        let may_fill = |since| [near, far].map(|node| hot.may_fill(since, node));
        [0, 1].into_iter().for_each(|worker| hot.adopted(worker, 5));
        assert_eq!(may_fill(5), [false, false], "no worker has published its commands");
        hot.drained(0, nodes(far, 5));
        assert_eq!(may_fill(5), [false, false], "nor has the other one");
        hot.drained(1, nodes(near, 5));
        assert_eq!(may_fill(5), [true, false], "the other worker does not know the far node");
        let mut oldest = nodes(far, 5);
        oldest[near.index()] = 4;
        hot.drained(1, oldest);
        assert_eq!((may_fill(5), may_fill(4)), ([false, true], [true, true]), "an older command is in flight");
        hot.drained(1, nodes(far, 5));
        assert_eq!((may_fill(5), may_fill(6)), ([true, true], [false, false]));
        hot.drained(1, nodes(far, 6));
        hot.drained(0, nodes(far, 6));
        assert_eq!(may_fill(6), [false, false], "the workers do not raise the gates of this generation yet");
        // The topology has lost its last nodes.
        hot.drained(0, nodes(near, 6));
        assert_eq!(may_fill(5), [true, false]);
        hot.forget_worker(1);
        assert_eq!(may_fill(5), [false, false]);
        hot.adopted(1, 6);
        assert_eq!(may_fill(5), [false, false], "the worker that replaces it has published nothing yet");
        hot.drained(1, nodes(NodeId(u16::MAX), 6));
        hot.drained(0, nodes(NodeId(u16::MAX), 6));
        assert!(hot.may_fill(5, NodeId(u16::MAX)));
    }

    #[test]
    fn worker_panic_replaces_gates_and_restarts_all_keys() {
        let hot = HotCopies::new(2);
        hot.change(true, vec![(1, Slot::new(7).expect("a slot"))], Vec::new());
        let before = hot.published();
        [0, 1].into_iter().for_each(|worker| {
            hot.adopted(worker, 1);
            hot.drained(worker, vec![1]);
        });
        assert!(hot.may_fill(1, NodeId(0)));
        hot.forget_worker(1);
        let after = hot.published();
        assert!(
            !before.gates.load(GateId::of_node(NodeId(0))).is_open()
                && after.gates.load(GateId::of_node(NodeId(0))).is_open()
        );
        let since = after.set.get(1).expect("armed").since;
        assert!(since == 2 && after.all && !hot.may_fill(since, NodeId(0)));
    }

    #[test]
    fn suspension_persists_across_new_gates() {
        let hot = HotCopies::new(1);
        assert!(hot.suspend(true) && !hot.suspend(true));
        hot.forget_worker(0);
        assert!(!hot.published().gates.load(GateId::of_node(NodeId(3))).is_open());
        assert!(hot.suspend(false));
        assert!(hot.published().gates.load(GateId::of_node(NodeId(3))).is_open());
    }
}
