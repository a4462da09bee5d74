//! Short critical moments, prolonged: each is covered by a rule of the state machine.
//!
//! Each test fails without its rule; see docs/design/moves.md.

use std::sync::atomic::Ordering;

use switchyard_policy::migration::{Goal, Record};
use switchyard_policy::topology::{MoveId, crc16_slot};
use switchyard_router::{LateKeys, MoveEnd, UserRequest};

use super::big::{hash, key_of};
use super::fleet::{Client, Fleet, fill, until, with};

const KEYS: usize = 300;

/// Returns the keys that both nodes have: stored at the target, and not yet removed at the source.
fn on_their_way(fleet: &Fleet) -> Vec<usize> {
    let (mut source, mut target) = (fleet.servers[0].client(), fleet.servers[1].client());
    let has = |client: &mut Client, n: usize| client.cmd(&format!("EXISTS {{{n}}}")) == "1";
    (0..KEYS).filter(|n| has(&mut source, *n) && has(&mut target, *n)).collect()
}

/// Deletes keys by clients, and returns those with an acknowledgement. Overwrites would be less sensitive, because a
/// copy is never stored over an existing key.
fn deleted(fleet: &Fleet, keys: &[usize]) -> Vec<usize> {
    let mut clients: Vec<(usize, Client)> = keys.iter().map(|n| (*n, fleet.client())).collect();
    clients.iter_mut().for_each(|(n, client)| client.post(&format!("DEL {{{n}}}")));
    let answered = clients.into_iter().filter_map(|(n, mut client)| {
        let reply = client.reply();
        assert!(reply == "1" || reply.starts_with("-NODE") && reply.contains("not executed"), "key {n}: {reply}");
        (reply == "1").then_some(n)
    });
    answered.collect()
}

#[track_caller]
fn all_but(client: &mut Client, deleted: &[usize]) {
    for n in 0..KEYS {
        let expected = if deleted.contains(&n) { "(nil)".to_owned() } else { format!("value{n}") };
        assert_eq!(client.cmd(&format!("GET {{{n}}}")), expected, "key {n}");
    }
}

/// Stored, recorded, and still at the source: a resuming router moves the key again.
#[test]
fn a_key_is_unused_until_the_source_has_removed_it() {
    let mut fleet = Fleet::new(2);
    fill(&mut fleet.client(), KEYS);
    let mut source = fleet.servers[0].client();
    fleet.keeper.holds_moving.store(true, Ordering::SeqCst);
    fleet.begin_on_record(fleet.task(1, 0, 1));
    until("a leg has drained", || fleet.keeper.is_held.load(Ordering::SeqCst));
    assert_eq!(source.cmd("ACL SETUSER default -unlink"), "OK");
    fleet.keeper.holds_moving.store(false, Ordering::SeqCst);
    let is_on_record =
        || fleet.keeper.records.lock().expect("lock").iter().any(|record| matches!(record, Record::Moved { .. }));
    until("keys are stored and on record", || is_on_record() && !on_their_way(&fleet).is_empty());
    let keys = on_their_way(&fleet);
    let deleted = deleted(&fleet, &keys);
    let owned_by_first = fleet.slots_of(fleet.node(0));
    assert!(keys.iter().all(|n| owned_by_first.contains(&crc16_slot(format!("{{{n}}}").as_bytes()))));
    fleet.restart();
    assert_eq!(source.cmd("ACL SETUSER default +unlink"), "OK");
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    all_but(&mut fleet.client(), &deleted);
    assert_eq!(source.cmd("DBSIZE"), "0");
}

/// Stored, but never recorded: a resuming router does not know of it.
#[test]
fn a_key_is_unused_until_it_is_recorded() {
    let mut fleet = Fleet::new(2);
    fill(&mut fleet.client(), KEYS);
    fleet.keeper.loses_moved.store(true, Ordering::SeqCst);
    fleet.begin_on_record(fleet.task(1, 0, 1));
    until("keys are stored and not on record", || {
        fleet.keeper.is_losing.load(Ordering::SeqCst) && !on_their_way(&fleet).is_empty()
    });
    let deleted = deleted(&fleet, &on_their_way(&fleet));
    fleet.restart();
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    all_but(&mut fleet.client(), &deleted);
    assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
}

/// The target restarts with old keys, after it was checked for keys and before keys are stored.
#[test]
fn old_keys_of_a_target_killed_before_a_leg_are_removed() {
    let mut fleet = Fleet::new(2);
    let mut client = fleet.client();
    let big = key_of(&fleet, 0, "hash");
    hash(&mut client, &big, 60_000);
    let owned = fleet.slots_of(fleet.node(0));
    let small: Vec<String> =
        (0..KEYS).map(|n| format!("{{{n}}}")).filter(|key| owned.contains(&crc16_slot(key.as_bytes()))).collect();
    let mut direct = fleet.servers[1].client();
    for key in &small {
        assert_eq!(client.cmd(&format!("SET {key} today")), "OK");
        assert_eq!(direct.cmd(&format!("SET {key} long-ago")), "OK");
    }
    assert_eq!((direct.cmd("SAVE"), direct.cmd("FLUSHALL")), ("OK".to_owned(), "OK".to_owned()));
    // Big keys are copied between the listing and the first leg.
    fleet.begin(with(fleet.task(1, 0, 1), |order| {
        order.how.max_rate = Some(200_000);
        order.how.goal = Goal::Fast;
    }));
    until("a big key is copied in pieces", || fleet.progress(1).activity.contains("in pieces"));
    fleet.servers[1].crash(&[]);
    assert_eq!(fleet.servers[1].client().cmd("DBSIZE"), small.len().to_string());
    fleet.router().steer_move(MoveId(1), UserRequest::MaxRate(None));
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    let mut client = fleet.client();
    for key in &small {
        assert_eq!(client.cmd(&format!("GET {key}")), "today", "{key}");
    }
    assert_eq!(client.cmd(&format!("HLEN {big}")), "60000");
    assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
    assert_eq!(fleet.progress(1).late, LateKeys::default());
}
