//! Protocol `netmigrate`: reads of keys in transit are sent to both nodes.

use std::sync::atomic::{AtomicBool, Ordering};

use switchyard_policy::migration::{Goal, Protocol};
use switchyard_policy::topology::MoveId;
use switchyard_router::{MoveEnd, MoveTask, UserRequest};

use super::fleet::{Client, Fleet, all_there, fill, until, with};

/// Returns a move so slow that most keys are in transit during a test.
fn slowly(fleet: &Fleet, id: u64, from: usize, to: usize) -> MoveTask {
    with(fleet.task(id, from, to), |order| {
        (order.how.protocol, order.how.goal, order.how.max_rate) = (Protocol::NetMigrate, Goal::Gentle, Some(2_000));
    })
}

/// Returns the value of a counter in the metrics.
fn metric(fleet: &Fleet, name: &str) -> u64 {
    let text = fleet.router().metrics();
    let line = text.lines().find(|line| line.starts_with(&format!("switchyard_{name}_total"))).expect(name);
    line.rsplit(' ').next().and_then(|number| number.parse().ok()).expect("a number")
}

#[test]
fn fulva_moves_all_slots_in_one_leg_and_pulls_a_sample_of_reads() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    fill(&mut client, 4000);
    let mut task = slowly(&fleet, 1, 0, 1);
    task.order.how.protocol = Protocol::Fulva;
    let slots = task.order.slots.len();
    let legs = fleet.keeper.handed_over.load(Ordering::SeqCst);
    fleet.begin(task);
    until("keys move", || fleet.progress(1).keys_moved > 10);
    let before = (metric(&fleet, "moves_double_reads"), fleet.progress(1).pulled);
    all_there(&mut client, 4000);
    let asked = metric(&fleet, "moves_double_reads") - before.0;
    assert!(asked > 1000, "half of them are on their way, in {slots} slots: {asked}");
    // They are reported, fetched and counted one at a time. Some have moved by themselves in the meantime.
    until("some are fetched", || fleet.progress(1).pulled - before.1 >= asked / 200);
    // A key that moves between the two reads is found at neither node, and is fetched as well.
    let missed = metric(&fleet, "moves_double_reads_missed");
    assert!(fleet.progress(1).pulled - before.1 <= asked / 100 + 1 + missed);
    assert_eq!(fleet.keeper.handed_over.load(Ordering::SeqCst), legs);
    fleet.router().steer_move(MoveId(1), UserRequest::MaxRate(None));
    fleet.router().steer_move(MoveId(1), UserRequest::Goal(Goal::Fast));
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    assert_eq!(fleet.keeper.handed_over.load(Ordering::SeqCst), legs + 1, "all slots were one leg");
    all_there(&mut client, 4000);
}

#[test]
fn reads_of_keys_in_transit_do_not_wait_and_are_correct() {
    const KEYS: usize = 4000;
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    // One slot, so that it is one leg.
    for n in 0..KEYS {
        client.post(&format!("SET {{a}}{n} {n}"));
    }
    (0..KEYS).for_each(|_| assert_eq!(client.reply(), "OK"));
    assert_eq!(client.cmd("HSET {a}hash f v"), "1");
    assert_eq!(client.cmd("RPUSH {a}list 1 2"), "2");
    let from = usize::from(fleet.servers[0].client().cmd("EXISTS {a}0") == "0");
    fleet.begin(slowly(&fleet, 1, from, 1 - from));
    until("keys move", || fleet.progress(1).keys_moved > 10);
    let pulled = fleet.progress(1).pulled;
    for n in (7..KEYS).step_by(7) {
        assert_eq!(client.cmd(&format!("GET {{a}}{n}")), n.to_string());
        assert_eq!(client.cmd(&format!("STRLEN {{a}}{n}")), n.to_string().len().to_string());
    }
    assert_eq!(client.cmd("HGET {a}hash f"), "v");
    assert_eq!(client.cmd("LRANGE {a}list 0 -1"), "[1, 2]");
    assert_eq!(client.cmd("TYPE {a}list"), "list");
    assert!(metric(&fleet, "moves_double_reads") > 500);
    assert_eq!(fleet.progress(1).pulled, pulled, "nothing was fetched for them");
    // A key that neither node has is requested and awaited, because it may be between the two.
    let missed = metric(&fleet, "moves_double_reads_missed");
    assert_eq!(client.cmd("GET {a}none"), "(nil)");
    assert_eq!(client.cmd("HGET {a}hash other"), "(nil)");
    assert!(client.cmd("GET {a}list").contains("WRONGTYPE"));
    // The hash or the list may already have moved.
    assert!((1..=3).contains(&(metric(&fleet, "moves_double_reads_missed") - missed)));
    // After and before other commands of the same client.
    for line in ["SET {a}3001 new", "GET {a}3001", "GET {a}3002", "GET {a}no", "PING", "INCR {a}3002", "GET {a}3002"] {
        client.post(line);
    }
    let replies: Vec<String> = (0..7).map(|_| client.reply()).collect();
    assert_eq!(replies, ["OK", "new", "3002", "(nil)", "PONG", "3003", "3003"]);
    // Several keys must be of one moment, so they are awaited.
    assert_eq!(client.cmd("MGET {a}3003 {a}3004"), "[3003, 3004]");
    assert!(fleet.progress(1).end.is_none(), "it was on its way all the time");
    fleet.router().steer_move(MoveId(1), UserRequest::MaxRate(None));
    fleet.router().steer_move(MoveId(1), UserRequest::Goal(Goal::Fast));
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    assert_eq!(client.cmd("GET {a}3005"), "3005");
}

fn count(client: &mut Client, key: &str) -> u64 {
    let text = client.cmd(&format!("GET {key}"));
    if text == "(nil)" { 0 } else { text.parse().expect("a number") }
}

/// Values seen by readers never decrease, for any timing of writers and moves.
#[test]
fn readers_never_see_an_older_value() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    fill(&mut client, 2000);
    let keys: Vec<String> = (0..16).map(|n| format!("{{{n}}}counter")).collect();
    let stop = AtomicBool::new(false);
    let totals = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut client = fleet.client();
            let mut rounds = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                rounds += 1;
                keys.iter().for_each(|key| assert_eq!(client.cmd(&format!("INCR {key}")), rounds.to_string()));
            }
            rounds
        });
        for _ in 0..2 {
            scope.spawn(|| {
                let mut client = fleet.client();
                let mut last = vec![0; keys.len()];
                while !stop.load(Ordering::Relaxed) {
                    for (key, last) in keys.iter().zip(&mut last) {
                        let now = count(&mut client, key);
                        assert!(now >= *last, "{key}: {now} after {last}");
                        *last = now;
                    }
                }
            });
        }
        for id in 1..=6 {
            let (from, to) = if id % 2 == 1 { (0, 1) } else { (1, 0) };
            let task = with(fleet.task(id, from, to), |order| {
                (order.how.protocol, order.how.goal) = (Protocol::NetMigrate, Goal::Balanced);
            });
            fleet.begin(task);
            assert_eq!(fleet.wait_for(id), MoveEnd::Done);
        }
        stop.store(true, Ordering::Relaxed);
        writer.join().expect("the writer")
    });
    let mut client = fleet.client();
    keys.iter().for_each(|key| assert_eq!(client.cmd(&format!("GET {key}")), totals.to_string()));
    all_there(&mut client, 2000);
}
