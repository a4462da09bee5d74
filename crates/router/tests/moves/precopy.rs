//! Protocols that copy all keys first and change the owner at the end.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use switchyard_policy::migration::record::Record;
use switchyard_policy::migration::{Goal, Protocol};
use switchyard_policy::topology::{MoveId, crc16_slot};
use switchyard_router::{MoveEnd, MoveTask, UserRequest};

use super::fleet::{Client, Fleet, Server, all_there, fill, until, with};

const BOTH: [Protocol; 2] = [Protocol::Source, Protocol::FreezeAndCopy];

fn by(fleet: &Fleet, id: u64, from: usize, to: usize, protocol: Protocol) -> MoveTask {
    with(fleet.task(id, from, to), |order| order.how.protocol = protocol)
}

/// Returns names of keys that are at a node when the test begins.
fn names_at(fleet: &Fleet, place: usize) -> impl Iterator<Item = String> {
    let slots = fleet.slots_of(fleet.node(place));
    (0..).map(|n| format!("{{{n}}}")).filter(move |name| slots.contains(&crc16_slot(name.as_bytes())))
}

/// Performs all kinds of changes on its own keys, and checks every reply. Returns the final counter and list length.
fn work(client: &mut Client, key: &str, stop: &AtomicBool) -> (u64, u64) {
    let (mut count, mut pushed, mut round) = (0_u64, 0_u64, 0_u64);
    while !stop.load(Ordering::Relaxed) {
        count += 1;
        round += 1;
        assert_eq!(client.cmd(&format!("INCR {key}counter")), count.to_string());
        pushed += 1;
        assert_eq!(client.cmd(&format!("RPUSH {key}list {pushed}")), pushed.to_string());
        assert_eq!(client.cmd(&format!("SET {key}gone v")), "OK");
        assert_eq!(client.cmd(&format!("GETDEL {key}gone")), "v");
        assert_eq!(client.cmd(&format!("EXISTS {key}gone")), "0");
        // Another type, a TTL, and no TTL again.
        assert_eq!(client.cmd(&format!("HSET {key}kind f {round}")), "1");
        assert_eq!(client.cmd(&format!("PEXPIRE {key}kind 1000000")), "1");
        assert_eq!(client.cmd(&format!("SET {key}kind {round}")), "OK");
        assert_eq!(client.cmd(&format!("TTL {key}kind")), "-1");
        assert_eq!(client.cmd(&format!("GET {key}kind")), round.to_string());
        assert_eq!(client.cmd(&format!("DEL {key}kind")), "1");
        assert_eq!(client.cmd(&format!("EVAL return(redis.call('INCR',KEYS[1])) 1 {key}script")), round.to_string());
        for (line, reply) in [("MULTI", "OK"), ("INCR", "QUEUED"), ("EXEC", "")] {
            let line = if line == "INCR" { format!("INCR {key}transaction") } else { line.to_owned() };
            let answer = client.cmd(&line);
            assert_eq!(answer, if reply.is_empty() { format!("[{round}]") } else { reply.to_owned() });
        }
    }
    (count, pushed)
}

#[test]
fn no_key_is_lost_or_resurrected_under_all_kinds_of_writes() {
    for protocol in BOTH.into_iter().chain([Protocol::Rocksteady, Protocol::NetMigrate, Protocol::Fulva]) {
        let fleet = Fleet::new(2);
        let mut client = fleet.client();
        fill(&mut client, 3000);
        assert_eq!(client.cmd("SELECT 3"), "OK");
        fill(&mut client, 300);
        let names: Vec<String> = names_at(&fleet, 0).skip(3000).take(4).collect();
        let stop = AtomicBool::new(false);
        let done = std::thread::scope(|scope| {
            let workers: Vec<_> = names
                .iter()
                .map(|name| {
                    let (fleet, stop) = (&fleet, &stop);
                    scope.spawn(move || work(&mut fleet.client(), name, stop))
                })
                .collect();
            std::thread::sleep(Duration::from_millis(50));
            for (id, from, to) in [(1, 0, 1), (2, 1, 0)] {
                let task = with(by(&fleet, id, from, to, protocol), |order| order.how.goal = Goal::Balanced);
                fleet.begin(task);
                assert_eq!(fleet.wait_for(id), MoveEnd::Done, "{protocol:?}");
            }
            stop.store(true, Ordering::Relaxed);
            workers.into_iter().map(|worker| worker.join().expect("a worker")).collect::<Vec<_>>()
        });
        let mut client = fleet.client();
        all_there(&mut client, 3000);
        for (name, (count, pushed)) in names.iter().zip(done) {
            assert_eq!(client.cmd(&format!("GET {name}counter")), count.to_string());
            assert_eq!(client.cmd(&format!("LLEN {name}list")), pushed.to_string());
            assert_eq!(client.cmd(&format!("EXISTS {name}gone {name}kind")), "0");
        }
        assert_eq!(client.cmd("SELECT 3"), "OK");
        all_there(&mut client, 300);
        assert_eq!(fleet.servers[1].client().cmd("DBSIZE"), "0", "{protocol:?}: its keys are purged");
    }
}

/// A blocked client may be served at the source after its command was sent. The element must disappear at the target as
/// well.
#[test]
fn elements_taken_by_blocked_clients_do_not_return() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    fill(&mut client, 2000);
    let name = names_at(&fleet, 0).nth(2000).expect("many");
    let mut waiting = fleet.client();
    let mut at_source = fleet.servers[0].client();
    waiting.post(&format!("BLPOP {name} 0"));
    until("it waits", || at_source.cmd("INFO clients").contains("blocked_clients:1"));
    let task = with(by(&fleet, 1, 0, 1, Protocol::Source), |order| {
        (order.how.goal, order.how.max_rate) = (Goal::Gentle, Some(40_000));
    });
    fleet.begin(task);
    until("keys are copied", || fleet.progress(1).keys_moved > 0);
    assert_eq!(client.cmd(&format!("RPUSH {name} x")), "1");
    assert_eq!(waiting.reply(), format!("[{name}, x]"));
    assert_eq!(client.cmd(&format!("EXISTS {name}")), "0");
    waiting.post(&format!("BLPOP {name} 0"));
    fleet.router().steer_move(MoveId(1), UserRequest::MaxRate(None));
    fleet.router().steer_move(MoveId(1), UserRequest::Goal(Goal::Fast));
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    assert_eq!(client.cmd(&format!("RPUSH {name} y")), "1");
    assert_eq!(waiting.reply(), format!("[{name}, y]"));
    all_there(&mut client, 2000);
}

#[test]
fn flushes_and_undeclared_writes_during_a_copy_reach_the_target() {
    for (line, reply) in [("FLUSHALL", "OK"), ("EVAL redis.call('SET',KEYS[1]..'x','made')return(1) 1 NAME", "1")] {
        let fleet = Fleet::new(2);
        let mut client = fleet.client();
        fill(&mut client, 2000);
        let name = names_at(&fleet, 0).nth(2000).expect("many");
        let task = with(by(&fleet, 1, 0, 1, Protocol::Source), |order| {
            (order.how.goal, order.how.max_rate) = (Goal::Gentle, Some(40_000));
        });
        fleet.begin(task);
        until("keys are copied", || fleet.progress(1).keys_moved > 0);
        assert_eq!(client.cmd(&line.replace("NAME", &name)), reply);
        fleet.router().steer_move(MoveId(1), UserRequest::MaxRate(None));
        fleet.router().steer_move(MoveId(1), UserRequest::Goal(Goal::Fast));
        assert_eq!(fleet.wait_for(1), MoveEnd::Done, "{line}");
        if line == "FLUSHALL" {
            assert_eq!(client.cmd("DBSIZE"), "0");
        } else {
            assert_eq!(client.cmd(&format!("GET {name}x")), "made");
            all_there(&mut client, 2000);
        }
    }
}

#[test]
fn an_abort_before_the_cut_leaves_no_key_at_the_target() {
    for protocol in BOTH {
        let fleet = Fleet::new(2);
        let mut client = fleet.client();
        fill(&mut client, 2000);
        let before = fleet.servers[1].client().cmd("DBSIZE");
        let task = with(by(&fleet, 1, 0, 1, protocol), |order| {
            (order.how.goal, order.how.max_rate) = (Goal::Gentle, Some(4_000))
        });
        fleet.begin(task);
        until("keys are copied", || fleet.progress(1).keys_moved > 0);
        // If all clients wait, the reply would only come after the move.
        if protocol == Protocol::Source {
            assert_eq!(client.cmd("SET {0} value0"), "OK");
        }
        fleet.router().steer_move(MoveId(1), UserRequest::Abort);
        let MoveEnd::Stopped(_) = fleet.wait_for(1) else { panic!("{protocol:?}: it was aborted by the user") };
        assert_eq!(fleet.servers[1].client().cmd("DBSIZE"), before);
        all_there(&mut client, 2000);
        fleet.run_to_end(by(&fleet, 2, 0, 1, protocol));
        all_there(&mut client, 2000);
    }
}

/// The last keys are written, copied and served by the node in the journal, wherever the router stops.
#[test]
fn the_source_stays_owner_if_the_cut_was_not_recorded() {
    for protocol in BOTH {
        let mut fleet = Fleet::new(2);
        fill(&mut fleet.client(), 1000);
        fleet.keeper.loses_moved.store(true, Ordering::SeqCst);
        fleet.begin_on_record(by(&fleet, 1, 0, 1, protocol));
        until("the record of the cut is submitted", || fleet.keeper.is_losing.load(Ordering::SeqCst));
        fleet.restart();
        let MoveEnd::Stopped(why) = fleet.wait_for(1) else { panic!("{protocol:?}: later writes are unknown") };
        assert!(why.contains("router was restarted"), "{why}");
        all_there(&mut fleet.client(), 1000);
        assert!(!fleet.slots_of(fleet.node(0)).is_empty());
        fleet.keeper.records.lock().expect("lock").push(Record::Ended { move_id: MoveId(1) });
        fleet.run_to_end(by(&fleet, 2, 0, 1, protocol));
        all_there(&mut fleet.client(), 1000);
    }
}

#[test]
fn a_router_restarted_after_the_cut_continues_at_the_target() {
    for protocol in BOTH {
        let mut fleet = Fleet::new(2);
        let mut client = fleet.client();
        fill(&mut client, 1000);
        let name = names_at(&fleet, 0).next().expect("many");
        let mut source = fleet.servers[0].client();
        fleet.keeper.holds_moving.store(true, Ordering::SeqCst);
        fleet.begin_on_record(by(&fleet, 1, 0, 1, protocol));
        until("the leg has drained", || fleet.keeper.is_held.load(Ordering::SeqCst));
        assert_eq!(source.cmd("ACL SETUSER default -unlink"), "OK");
        fleet.keeper.holds_moving.store(false, Ordering::SeqCst);
        until("the purge of the source has started", || fleet.progress(1).activity.contains("refuses to remove"));
        assert_eq!(client.cmd(&format!("SET {name} after")), "OK", "the target serves");
        assert_eq!(client.cmd(&format!("DEL {name}")), "1");
        fleet.restart();
        until("the purge continues", || fleet.progress(1).activity.contains("refuses to remove"));
        assert_eq!(fleet.client().cmd(&format!("EXISTS {name}")), "0", "{protocol:?}: what the source has is past");
        assert_eq!(source.cmd("ACL SETUSER default +unlink"), "OK");
        assert_eq!(fleet.wait_for(1), MoveEnd::Done);
        assert_eq!(fleet.client().cmd(&format!("EXISTS {name}")), "0");
        assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
    }
}

/// A new process lacks keys that were read or stored before, so the leg starts again.
#[test]
fn a_node_restart_during_the_copy_restarts_the_leg() {
    let keeps = ["--appendonly", "yes", "--appendfsync", "always"];
    for restarted in [0, 1] {
        let mut fleet = Fleet::with(vec![Server::start(&keeps), Server::start(&keeps)]);
        let mut client = fleet.client();
        fill(&mut client, 2000);
        let task = with(by(&fleet, 1, 0, 1, Protocol::Source), |order| {
            (order.how.goal, order.how.max_rate) = (Goal::Gentle, Some(40_000));
        });
        fleet.begin(task);
        until("keys are copied", || fleet.progress(1).keys_moved > 0);
        fleet.servers[restarted].crash(&keeps);
        until("it is back", || {
            fleet.client().cmd("SET {0} value0") == "OK" && fleet.client().cmd("SET {1} value1") == "OK"
        });
        fleet.router().steer_move(MoveId(1), UserRequest::MaxRate(None));
        fleet.router().steer_move(MoveId(1), UserRequest::Goal(Goal::Fast));
        assert_eq!(fleet.wait_for(1), MoveEnd::Done);
        all_there(&mut fleet.client(), 2000);
        assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
    }
}

/// Unused copies are invisible to clients.
#[test]
fn keys_deleted_during_their_copy_are_invisible() {
    const KEYS: usize = 1000;
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    let names: Vec<String> = names_at(&fleet, 0).take(KEYS).collect();
    names.iter().for_each(|name| assert_eq!(client.cmd(&format!("SET {name}gone v")), "OK"));
    let stays: Vec<String> = names_at(&fleet, 1).take(3).map(|name| format!("{name}stays")).collect();
    stays.iter().for_each(|name| assert_eq!(client.cmd(&format!("SET {name} v")), "OK"));
    let task = with(by(&fleet, 1, 0, 1, Protocol::Source), |order| {
        (order.how.goal, order.how.max_rate) = (Goal::Gentle, Some(30_000));
    });
    fleet.begin(task);
    let mut target = fleet.servers[1].client();
    until("keys are copied", || target.cmd("DBSIZE").parse().is_ok_and(|keys: u32| keys > 50));
    names.iter().for_each(|name| assert_eq!(client.cmd(&format!("DEL {name}gone")), "1"));
    assert!(target.cmd("DBSIZE").parse().is_ok_and(|keys: u32| keys > 50), "the copies are there for a while");
    assert_eq!(client.cmd("KEYS *gone"), "[]");
    for _ in 0..100 {
        let random = client.cmd("RANDOMKEY");
        assert!(random == "(nil)" || stays.contains(&random), "{random}");
    }
    assert!(fleet.progress(1).end.is_none(), "it was being copied all the time");
    fleet.router().steer_move(MoveId(1), UserRequest::Goal(Goal::Fast));
    fleet.router().steer_move(MoveId(1), UserRequest::MaxRate(None));
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    assert_eq!(client.cmd("DBSIZE"), "3");
}

/// Keys evicted by the target would be lost, so they are copied again, or the move stops.
#[test]
fn evictions_at_the_target_before_the_cut_are_detected() {
    const KEYS: usize = 1000;
    let fleet = Fleet::with(vec![Server::start(&[]), Server::start(&["--maxmemory-policy", "allkeys-random"])]);
    let mut client = fleet.client();
    let names: Vec<String> = names_at(&fleet, 0).take(KEYS).collect();
    names.iter().for_each(|name| assert_eq!(client.cmd(&format!("SET {name} v")), "OK"));
    let task = with(by(&fleet, 1, 0, 1, Protocol::Source), |order| {
        (order.how.goal, order.how.max_rate) = (Goal::Gentle, Some(30_000));
    });
    fleet.begin(task);
    let mut target = fleet.servers[1].client();
    until("keys are copied", || target.cmd("DBSIZE").parse().is_ok_and(|keys: u32| keys > 50));
    assert_eq!(target.cmd("CONFIG SET maxmemory 1"), "OK");
    until("it evicts", || target.cmd("DBSIZE").parse().is_ok_and(|keys: u32| keys < 40));
    assert_eq!(target.cmd("CONFIG SET maxmemory 0"), "OK");
    fleet.router().steer_move(MoveId(1), UserRequest::Goal(Goal::Fast));
    fleet.router().steer_move(MoveId(1), UserRequest::MaxRate(None));
    // The leg started again, or the eviction was detected when clients already waited.
    let is_there =
        |client: &mut Client| names.iter().for_each(|name| assert_eq!(client.cmd(&format!("GET {name}")), "v"));
    if let MoveEnd::Stopped(why) = fleet.wait_for(1) {
        assert!(why.contains("has evicted keys since copying started"), "{why}");
        is_there(&mut client);
        fleet.run_to_end(by(&fleet, 2, 0, 1, Protocol::Source));
    }
    is_there(&mut client);
}

/// All keys are at the target: neither clients nor slots wait for a source that does not return.
#[test]
fn a_source_lost_after_the_cut_delays_no_client() {
    for protocol in BOTH {
        let mut fleet = Fleet::new(2);
        fill(&mut fleet.client(), 1000);
        let mut source = fleet.servers[0].client();
        fleet.keeper.holds_moving.store(true, Ordering::SeqCst);
        fleet.begin_on_record(by(&fleet, 1, 0, 1, protocol));
        until("the leg has drained", || fleet.keeper.is_held.load(Ordering::SeqCst));
        assert_eq!(source.cmd("ACL SETUSER default -unlink"), "OK");
        fleet.keeper.holds_moving.store(false, Ordering::SeqCst);
        until("the purge of the source has started", || fleet.progress(1).activity.contains("refuses to remove"));
        fleet.servers[0].signal(rustix::process::Signal::KILL);
        fleet.restart();
        all_there(&mut fleet.client(), 1000);
        until("the slots are the target's", || fleet.slots_of(fleet.node(0)).is_empty());
        all_there(&mut fleet.client(), 1000);
    }
}
