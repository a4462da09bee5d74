//! Publication of the routing snapshot, and the barriers: what happens after a barrier sees all that workers did before
//! they passed it.

use std::sync::Arc;

use loom::thread::spawn;
use switchyard_policy::topology::NodeId;

use crate::Node;
use crate::publication::{DrainBarrier, OldestInFlight, Publication};

const NODE: NodeId = NodeId(0);

fn in_flight(oldest: u64) -> OldestInFlight {
    OldestInFlight { executed: vec![oldest], answered: vec![oldest] }
}

/// Snapshots are their own numbers, from 1.
fn publication(workers: usize) -> Publication<u64> {
    Publication::new(1, workers)
}

#[test]
fn snapshot_is_adopted_with_its_own_number() {
    loom::model(|| {
        let shared = Arc::new(publication(1));
        let publishers = [0, 1].map(|_| {
            let shared = shared.clone();
            spawn(move || shared.change(|number| number + 1, |_| ()))
        });
        let seen = shared.generation();
        let (number, snapshot) = shared.own();
        assert!(number >= seen && *snapshot == number, "snapshot {snapshot} with number {number}");
        publishers.into_iter().for_each(|publisher| publisher.join().expect("joined"));
        assert_eq!((shared.generation(), *shared.current()), (3, 3));
    });
}

#[test]
fn new_primary_is_used_after_the_workers_last_command_at_the_old() {
    loom::model(|| {
        let shared = Arc::new(publication(1));
        let old = Arc::new(Node::new(0));
        let worker = spawn({
            let (shared, old) = (shared.clone(), old.clone());
            move || {
                old.write(1);
                let (number, snapshot) = shared.own();
                assert!(!shared.must_leave_servers(number) || *snapshot == 1);
                shared.adopted(0, number);
            }
        });
        shared.change_servers(|number| number + 1, |_| ());
        if shared.all_left_old_servers() {
            assert_eq!(old.read(), 1, "the worker's command comes after the change of the primary");
        }
        worker.join().expect("joined");
    });
}

#[test]
fn mover_that_passes_the_barrier_sees_all_commands_of_older_epochs() {
    for of_node in [false, true] {
        loom::model(move || {
            let barrier = Arc::new(DrainBarrier::new(2, 0));
            let source = Arc::new(Node::new(0));
            barrier.publish(1, 1, in_flight(1));
            let worker = spawn({
                let (barrier, source) = (barrier.clone(), source.clone());
                move || {
                    barrier.publish(0, 0, in_flight(0));
                    source.write(1);
                    // A command at another node may still be in flight.
                    barrier.publish(0, u64::from(!of_node), in_flight(1));
                }
            });
            barrier.want(1);
            if barrier.has_drained(1, NODE, |at| &at.executed) {
                assert_eq!(source.read(), 1, "a command of the old epoch is executed after the barrier");
            }
            worker.join().expect("joined");
            assert!(barrier.has_drained(1, NODE, |at| &at.answered) && barrier.oldest() == u64::from(!of_node));
        });
    }
}
