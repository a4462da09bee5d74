//! Several moves at once.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};

use switchyard_policy::migration::Goal;
use switchyard_policy::topology::MoveId;
use switchyard_router::{MoveEnd, UserRequest};

use super::fleet::{Fleet, all_there, fill, until, with};

/// A node is the target of two moves, the source of two, and both at once. In the meantime clients increment counters,
/// also across two slots of different moves.
#[test]
fn moves_that_share_a_node_do_not_disturb_each_other() {
    let fleet = Fleet::new(3);
    fill(&mut fleet.client(), 3000);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..4_u64)
            .map(|number| {
                let (fleet, stop) = (&fleet, &stop);
                scope.spawn(move || {
                    let mut client = fleet.client();
                    let mut counts = vec![0_u64; 60];
                    let mut state = number + 1;
                    while !stop.load(Ordering::Relaxed) {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1442695040888963407);
                        let (one, other) =
                            ((state >> 33) as usize % counts.len(), (state >> 45) as usize % counts.len());
                        let name = |place: usize| format!("w{number}:{place}");
                        match (state >> 20) % 3 {
                            0 => {
                                counts[one] += 1;
                                assert_eq!(client.cmd(&format!("INCR {}", name(one))), counts[one].to_string());
                            }
                            1 => {
                                let seen = |place: usize| {
                                    if counts[place] == 0 { "(nil)".to_owned() } else { counts[place].to_string() }
                                };
                                let expected = format!("[{}, {}]", seen(one), seen(other));
                                assert_eq!(client.cmd(&format!("MGET {} {}", name(one), name(other))), expected);
                            }
                            _ => {
                                (counts[one], counts[other]) = (7, 7);
                                assert_eq!(client.cmd(&format!("MSET {} 7 {} 7", name(one), name(other))), "OK");
                            }
                        }
                    }
                })
            })
            .collect();
        for (round, pairs) in [[(0, 2), (1, 2)], [(2, 0), (2, 1)], [(0, 1), (1, 2)]].into_iter().enumerate() {
            let ids: Vec<u64> = (0..2).map(|place| (2 * round + place + 1) as u64).collect();
            let mut taken = BTreeSet::new();
            for (id, (from, to)) in ids.iter().zip(pairs) {
                let task = fleet.task(*id, from, to);
                // Half of the source's slots if it has two moves.
                let slots: Vec<_> =
                    task.order.slots.iter().copied().filter(|slot| slot.number() % 2 == (*id % 2) as u16).collect();
                assert!(slots.iter().all(|slot| taken.insert(*slot)), "each slot in one move");
                fleet.begin(with(task, |order| {
                    order.slots = slots;
                    order.how.goal = Goal::Gentle;
                }));
            }
            until("both have moved something", || {
                ids.iter().all(|id| fleet.progress(*id).keys_moved > 0 || fleet.progress(*id).end.is_some())
            });
            for id in &ids {
                fleet.router().steer_move(MoveId(*id), UserRequest::Goal(Goal::Fast));
            }
            for id in &ids {
                assert_eq!(fleet.wait_for(*id), MoveEnd::Done, "move {id}");
            }
        }
        stop.store(true, Ordering::Relaxed);
        for worker in workers {
            worker.join().expect("no client saw an error");
        }
    });
    all_there(&mut fleet.client(), 3000);
    let counts: Vec<u64> =
        fleet.servers.iter().map(|server| server.client().cmd("DBSIZE").parse().expect("a number")).collect();
    assert_eq!(counts.iter().sum::<u64>().to_string(), fleet.client().cmd("DBSIZE"));
}
