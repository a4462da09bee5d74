//! Durability at the target before a key leaves its source.

use std::sync::atomic::Ordering;
use std::time::Duration;

use switchyard_policy::migration::{Durability, Goal};
use switchyard_policy::topology::MoveId;
use switchyard_router::{MoveEnd, Reads, RuntimeSettings, Servers, UserRequest};

use super::fleet::{Fleet, Server, all_there, fill, other_programs, settings, until, with};

/// Starts a replica of `of` and waits until it is in sync.
fn replica(of: &Server) -> Server {
    let port = of.address.port().to_string();
    let server = Server::start(&["--replicaof", "127.0.0.1", &port, "--repl-diskless-sync-delay", "0"]);
    let mut client = server.client();
    until("the replica follows", || client.cmd("INFO replication").contains("master_link_status:up"));
    server
}

fn keys(server: &Server) -> Vec<String> {
    let all = server.client().cmd("KEYS *");
    all.trim_matches(['[', ']']).split(", ").filter(|key| !key.is_empty()).map(str::to_owned).collect()
}

#[test]
fn keys_leave_the_source_after_a_replica_of_the_target_has_them() {
    let fleet = Fleet::new(2);
    fill(&mut fleet.client(), 4000);
    fleet.begin(with(fleet.task(1, 0, 1), |order| order.how.durability = Durability::Replica));
    let MoveEnd::Stopped(why) = fleet.wait_for(1) else { panic!("there is no replica") };
    assert!(why.contains("has no replica"), "{why}");
    let copy = replica(&fleet.servers[1]);
    // Invariant at any time: the replica has every key that the source no longer has. Check in this order.
    fleet.begin(with(fleet.task(2, 0, 1), |order| {
        order.how.durability = Durability::Replica;
        order.how.goal = Goal::Gentle;
    }));
    let mut looks = 0;
    while fleet.progress(2).end.is_none() {
        let (left, there) = (keys(&fleet.servers[0]), keys(&copy));
        let all: std::collections::BTreeSet<String> =
            left.into_iter().chain(there).filter(|key| key.starts_with('{')).collect();
        assert_eq!(all.len(), 4000, "after {} keys", fleet.progress(2).keys_moved);
        looks += 1;
        if looks == 5 {
            fleet.router().steer_move(MoveId(2), UserRequest::Goal(Goal::Fast));
        }
    }
    assert_eq!(fleet.wait_for(2), MoveEnd::Done);
    all_there(&mut fleet.client(), 4000);
    assert_eq!(keys(&copy).len(), 4000);
}

/// Clients may read replicas again after the hand-over, so these must have the moved keys by that time.
#[test]
fn slots_are_handed_over_when_replicas_have_the_moved_keys() {
    let fleet = Fleet::new(2);
    fill(&mut fleet.client(), 1000);
    fleet.run_to_end(fleet.task(1, 0, 1));
    assert!(fleet.keeper.needs.lock().expect("lock").is_empty(), "no request for a node without replicas");
    let copy = replica(&fleet.servers[0]);
    fleet.keeper.replicas.lock().expect("lock").push(copy.address);
    let servers = |primary: &Server, copy: &Server| Servers {
        primary: Some(primary.address),
        readable: vec![copy.address],
        ..Servers::default()
    };
    fleet.router().set_servers(fleet.node(0), Some(servers(&fleet.servers[0], &copy)));
    fleet.run_to_end(fleet.task(2, 1, 0));
    fleet.run_to_end(fleet.task(3, 0, 1));
    assert!(fleet.keeper.needs.lock().expect("lock").is_empty(), "nor if replicas are not read");
    let topology = fleet.keeper.topology.lock().expect("lock").clone();
    fleet.router().reconfigure(RuntimeSettings { reads: Reads::PreferReplica, ..settings(&topology, None).live });
    fleet.keeper.replicas_are_behind.store(true, Ordering::SeqCst);
    let before = (fleet.keeper.handed_over.load(Ordering::SeqCst), copy.client().replication_offset());
    fleet.begin(fleet.task(4, 1, 0));
    until("replicas are to catch up", || !fleet.keeper.needs.lock().expect("lock").is_empty());
    // Clients are served in the meantime. (Too short a wait would only miss a bug.)
    all_there(&mut fleet.client(), 1000);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(fleet.keeper.handed_over.load(Ordering::SeqCst), before.0);
    fleet.keeper.replicas_are_behind.store(false, Ordering::SeqCst);
    assert_eq!(fleet.wait_for(4), MoveEnd::Done);
    all_there(&mut fleet.client(), 1000);
    let needs = fleet.keeper.needs.lock().expect("lock");
    assert_eq!(needs.len() + before.0, fleet.keeper.handed_over.load(Ordering::SeqCst), "one request per leg");
    assert!(
        needs
            .iter()
            .enumerate()
            .all(|(place, (node, _, handed_over))| *node == fleet.node(0) && *handed_over == before.0 + place)
    );
    // The last leg's position is after all stores.
    assert!(copy.client().replication_offset() >= needs[needs.len() - 1].1.offset);
    assert!(needs[0].1.offset > before.1 && keys(&copy).len() == 1000);
}

#[test]
fn a_replica_that_does_not_acknowledge_rolls_the_leg_back() {
    let fleet = Fleet::new(2);
    fill(&mut fleet.client(), 2000);
    let copy = replica(&fleet.servers[1]);
    fleet.begin(with(fleet.task(1, 0, 1), |order| {
        order.how.durability = Durability::Replica;
        order.how.goal = Goal::Gentle;
    }));
    until("some keys have moved", || fleet.progress(1).keys_moved > 50);
    copy.signal(rustix::process::Signal::STOP);
    let MoveEnd::Stopped(why) = fleet.wait_for(1) else { panic!("nothing is safe") };
    assert!(why.contains("0 of 1 replica acknowledged it"), "{why}");
    copy.signal(rustix::process::Signal::CONT);
    all_there(&mut fleet.client(), 2000);
    until("another move is done", || {
        let id = 2 + fleet.keeper.ended.lock().expect("lock").len() as u64;
        fleet.begin(with(fleet.task(id, 0, 1), |order| order.how.durability = Durability::Replica));
        fleet.wait_for(id) == MoveEnd::Done
    });
    all_there(&mut fleet.client(), 2000);
    assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
}

/// A failover may promote any of the replicas.
#[test]
fn all_connected_replicas_must_have_moved_keys() {
    let fleet = Fleet::new(2);
    fill(&mut fleet.client(), 2000);
    let copies = [replica(&fleet.servers[1]), replica(&fleet.servers[1])];
    until("both are in step", || {
        fleet.servers[1].client().cmd("INFO replication").matches("state=online").count() == 2
    });
    let task = |id, goal| {
        with(fleet.task(id, 0, 1), |order| (order.how.durability, order.how.goal) = (Durability::Replica, goal))
    };
    fleet.begin(task(1, Goal::Gentle));
    until("some keys have moved", || fleet.progress(1).keys_moved > 50);
    copies[0].signal(rustix::process::Signal::STOP);
    let MoveEnd::Stopped(why) = fleet.wait_for(1) else { panic!("one of them does not have it") };
    assert!(why.contains("1 of 2 replicas acknowledged it"), "{why}");
    copies[0].signal(rustix::process::Signal::CONT);
    all_there(&mut fleet.client(), 2000);
    until("both are in step again", || fleet.servers[1].client().cmd("INFO replication").matches("lag=0").count() == 2);
    // A disconnected replica is not waited for.
    fleet.begin(task(2, Goal::Gentle));
    until("some keys have moved", || fleet.progress(2).keys_moved > 50);
    let [gone, stays] = copies;
    drop(gone);
    fleet.router().steer_move(MoveId(2), UserRequest::Goal(Goal::Fast));
    assert_eq!(fleet.wait_for(2), MoveEnd::Done);
    assert_eq!(keys(&stays).len(), 2000);
}

#[test]
fn aof_durability_requires_waitaof_or_appendfsync_always() {
    // Synced once a second, so only WAITAOF can confirm durability, if available.
    let fleet = Fleet::with(vec![Server::start(&[]), Server::start(&["--appendonly", "yes"])]);
    fill(&mut fleet.client(), 500);
    let knows_waitaof = !fleet.servers[1].client().cmd("WAITAOF 0 0 1").starts_with("-ERR unknown command");
    fleet.begin(with(fleet.task(1, 0, 1), |order| order.how.durability = Durability::Aof));
    match fleet.wait_for(1) {
        MoveEnd::Done => assert!(knows_waitaof),
        MoveEnd::Stopped(why) => {
            assert!(!knows_waitaof && why.contains("cannot confirm that its append-only file is synced"), "{why}");
            assert_eq!(fleet.progress(1).keys_moved, 0);
        }
    }
    all_there(&mut fleet.client(), 500);
}

#[test]
fn moved_keys_survive_a_target_crash_with_waitaof() {
    for program in other_programs() {
        let lazily = ["--appendonly", "yes", "--appendfsync", "everysec"];
        let fleet = Fleet::with(vec![Server::start(&[]), Server::of(&program, &lazily)]);
        if fleet.servers[1].client().cmd("WAITAOF 0 0 1").starts_with('-') {
            eprintln!("skipped: {program} does not know WAITAOF");
            continue;
        }
        fill(&mut fleet.client(), 1000);
        fleet.begin(with(fleet.task(1, 0, 1), |order| order.how.durability = Durability::Aof));
        assert_eq!(fleet.wait_for(1), MoveEnd::Done, "{program}");
        let asked = fleet.servers[1].client().cmd("INFO commandstats");
        assert!(asked.contains("cmdstat_waitaof:"), "{program} was asked: {asked}");
        all_there(&mut fleet.client(), 1000);
    }
}
