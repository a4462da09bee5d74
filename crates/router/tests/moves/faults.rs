//! Faults during moves, and impossible moves.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use switchyard_policy::migration::{Durability, Goal, Phase, Protocol, Record};
use switchyard_policy::topology::{MoveId, crc16_slot};
use switchyard_router::{LateKeys, MoveEnd, UserRequest};

use super::fleet::{Client, Fleet, Server, all_there, fill, until, with};
use super::relay::{Hold, has_command, relay};

#[test]
fn leftovers_at_the_target_stop_a_move_unless_they_may_go() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    for n in 0..100 {
        assert_eq!(client.cmd(&format!("SET {{{n}}} value")), "OK");
    }
    // Foreign data at the wrong node.
    let mut direct = fleet.servers[1].client();
    let theirs: Vec<usize> = (0..100).filter(|n| direct.cmd(&format!("EXISTS {{{n}}}")) == "0").collect();
    for n in &theirs {
        assert_eq!(direct.cmd(&format!("SET {{{n}}} stale")), "OK");
    }
    fleet.begin(fleet.task(1, 0, 1));
    let MoveEnd::Stopped(why) = fleet.wait_for(1) else { panic!("it must not overwrite or keep them") };
    assert!(why.contains(&format!("{} keys", theirs.len())), "{why}");
    assert_eq!(client.cmd(&format!("GET {{{}}}", theirs[0])), "value");
    fleet.run_to_end(with(fleet.task(2, 0, 1), |order| order.how.purge_target = true));
    for n in 0..100 {
        assert_eq!(client.cmd(&format!("GET {{{n}}}")), "value");
    }
}

#[test]
fn leftovers_of_a_move_are_removed_unless_the_source_lacks_most() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    let mut nodes = [fleet.servers[0].client(), fleet.servers[1].client()];
    (0..200).for_each(|n| assert_eq!(client.cmd(&format!("SET {{{n}}} value")), "OK"));
    let owned: Vec<usize> = (0..200).filter(|n| nodes[0].cmd(&format!("EXISTS {{{n}}}")) == "1").collect();
    owned.iter().for_each(|n| assert_eq!(nodes[1].cmd(&format!("SET {{{n}}} older")), "OK"));
    let task = |id| {
        let mut task = fleet.task(id, 0, 1);
        task.leftovers.clone_from(&task.order.slots);
        task
    };
    // The owner returns without most of the keys.
    owned.iter().skip(5).for_each(|n| assert_eq!(nodes[0].cmd(&format!("DEL {{{n}}}")), "1"));
    fleet.begin(task(1));
    let MoveEnd::Stopped(why) = fleet.wait_for(1) else { panic!("keys without another copy are not removed") };
    assert!(why.contains(&format!("{} keys", owned.len() - 5)) && why.contains("docs/backup.md"), "{why}");
    owned.iter().skip(5).for_each(|n| assert_eq!(nodes[1].cmd(&format!("GET {{{n}}}")), "older"));
    // Once the owner has most of them, stale copies are removed, and keys deleted by clients do not return.
    owned.iter().skip(5).for_each(|n| assert_eq!(client.cmd(&format!("SET {{{n}}} value")), "OK"));
    assert_eq!(client.cmd(&format!("DEL {{{}}}", owned[7])), "1");
    fleet.run_to_end(task(2));
    for n in &owned {
        assert_eq!(client.cmd(&format!("GET {{{n}}}")), if *n == owned[7] { "(nil)" } else { "value" });
    }
}

#[test]
fn a_target_without_room_is_not_filled() {
    let fleet = Fleet::with(vec![Server::start(&[]), Server::start(&["--maxmemory", "3mb"])]);
    let mut client = fleet.client();
    let value = "x".repeat(20_000);
    for n in 0..400 {
        let _ = client.cmd(&format!("SET {{{n}}} {value}"));
    }
    let before = client.cmd("GET {1}").len() + client.cmd("GET {2}").len() + client.cmd("GET {3}").len();
    fleet.begin(fleet.task(1, 0, 1));
    let MoveEnd::Stopped(why) = fleet.wait_for(1) else { panic!("it has no room") };
    assert!(why.contains("room") || why.contains("OOM"), "{why}");
    assert_eq!(client.cmd("GET {1}").len() + client.cmd("GET {2}").len() + client.cmd("GET {3}").len(), before);
}

#[test]
fn a_killed_target_with_its_data_receives_the_remaining_keys() {
    let durable = ["--appendonly", "yes", "--appendfsync", "always"];
    let mut fleet = Fleet::with(vec![Server::start(&[]), Server::start(&durable)]);
    let mut client = fleet.client();
    fill(&mut client, 4000);
    fleet.begin(with(fleet.task(1, 0, 1), |order| {
        order.how.durability = Durability::Aof;
        order.how.goal = Goal::Gentle;
    }));
    until("some keys have moved", || fleet.progress(1).keys_moved > 200);
    fleet.servers[1].crash(&durable);
    fleet.router().steer_move(MoveId(1), switchyard_router::UserRequest::Goal(Goal::Fast));
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    all_there(&mut fleet.client(), 4000);
}

#[test]
fn a_killed_source_with_old_keys_restores_no_stale_key() {
    let mut fleet = Fleet::with(vec![Server::start(&[]), Server::start(&[])]);
    let mut client = fleet.client();
    fill(&mut client, 4000);
    // State with which the source returns.
    assert_eq!(fleet.servers[0].client().cmd("SAVE"), "OK");
    fleet.begin(with(fleet.task(1, 0, 1), |order| order.how.goal = Goal::Gentle));
    until("some keys have moved", || fleet.progress(1).keys_moved > 200);
    // Moved keys are changed and deleted at their new node.
    let mut direct = fleet.servers[1].client();
    let owned = fleet.slots_of(fleet.node(0));
    let moved: Vec<usize> = (0..4000)
        .filter(|n| owned.contains(&switchyard_policy::topology::crc16_slot(format!("{{{n}}}").as_bytes())))
        .collect();
    moved.iter().for_each(|n| direct.post(&format!("EXISTS {{{n}}}")));
    let moved: Vec<usize> = moved.into_iter().filter(|_| direct.reply() == "1").take(50).collect();
    assert!(moved.len() > 10);
    for (place, n) in moved.iter().enumerate() {
        let line = if place % 2 == 0 { format!("DEL {{{n}}}") } else { format!("SET {{{n}}} changed") };
        assert!(!client.cmd(&line).starts_with('-'));
    }
    fleet.servers[0].crash(&[]);
    let ended_legs = fleet.keeper.handed_over.load(Ordering::SeqCst);
    fleet.router().steer_move(MoveId(1), UserRequest::Goal(Goal::Fast));
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    // The source also had no old key left when the slots had left it. On a busy machine, slots may have left it before
    // it was killed: then it returns with their old keys, which are removed at the end.
    let late = fleet.progress(1).late;
    assert_eq!(LateKeys { removed: if ended_legs > 0 { 0 } else { late.removed }, ..late }, LateKeys::default());
    let mut client = fleet.client();
    for n in 0..4000 {
        let expected = match moved.iter().position(|m| *m == n) {
            Some(place) if place % 2 == 0 => "(nil)".to_owned(),
            Some(_) => "changed".to_owned(),
            None => format!("value{n}"),
        };
        assert_eq!(client.cmd(&format!("GET {{{n}}}")), expected, "key {n}");
    }
}

#[test]
fn a_paused_node_only_delays_a_move() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    fill(&mut client, 4000);
    for (id, place) in [(1, 1), (2, 1)] {
        let (from, to) = if id == 1 { (0, 1) } else { (1, 0) };
        fleet.begin(with(fleet.task(id, from, to), |order| order.how.goal = Goal::Gentle));
        until("some keys have moved", || fleet.progress(id).keys_moved > 100);
        fleet.servers[place].signal(rustix::process::Signal::STOP);
        // Longer than the command timeout.
        std::thread::sleep(Duration::from_millis(6500));
        fleet.servers[place].signal(rustix::process::Signal::CONT);
        fleet.router().steer_move(MoveId(id), switchyard_router::UserRequest::Goal(Goal::Fast));
        assert_eq!(fleet.wait_for(id), MoveEnd::Done);
        all_there(&mut fleet.client(), 4000);
    }
}

#[test]
fn a_restarted_router_resumes_the_move() {
    let mut fleet = Fleet::new(2);
    fill(&mut fleet.client(), 4000);
    fleet.begin_on_record(with(fleet.task(1, 0, 1), |order| order.how.goal = Goal::Gentle));
    for _ in 0..3 {
        let before = fleet.progress(1).keys_moved;
        until("some keys have moved", || {
            let progress = fleet.progress(1);
            progress.keys_moved > before + 100 || progress.end.is_some()
        });
        fleet.restart();
        all_there(&mut fleet.client(), 4000);
    }
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    all_there(&mut fleet.client(), 4000);
    assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
}

#[test]
fn commands_waiting_too_long_for_a_key_fail_alone() {
    let fleet = Fleet::new(2);
    fill(&mut fleet.client(), 4000);
    fleet.begin(with(fleet.task(1, 0, 1), |order| order.how.goal = Goal::Gentle));
    until("some keys have moved", || fleet.progress(1).keys_moved > 20);
    fleet.keeper.stuck.store(true, Ordering::SeqCst);
    std::thread::sleep(Duration::from_millis(50));
    let owned = fleet.slots_of(fleet.node(0));
    let there: Vec<usize> = (0..4000)
        .filter(|n| owned.contains(&switchyard_policy::topology::crc16_slot(format!("{{{n}}}").as_bytes())))
        .take(90)
        .collect();
    let value = vec![b'x'; 2 << 20];
    let told: usize = std::thread::scope(|scope| {
        let clients: Vec<_> = there
            .iter()
            .enumerate()
            .map(|(place, n)| {
                let (fleet, value) = (&fleet, &value);
                scope.spawn(move || {
                    let mut client = fleet.client();
                    let key = format!("{{{n}}}");
                    let reply = match place % 3 {
                        0 => {
                            client.send(&[b"SET", format!("{{{n}}}large").as_bytes(), value]);
                            client.reply()
                        }
                        1 => {
                            client.post(&format!("WATCH {key}"));
                            client.post("MULTI");
                            client.post(&format!("SET {key}watched 1"));
                            client.post("EXEC");
                            let watched = client.reply();
                            assert_eq!((client.reply(), client.reply()), ("OK".to_owned(), "QUEUED".to_owned()));
                            let executed = client.reply();
                            if watched.starts_with('-') {
                                assert!(
                                    executed == "(nil)" || executed.starts_with('-'),
                                    "{executed} without the watch"
                                );
                            }
                            watched
                        }
                        _ => client.cmd(&format!("APPEND {key} x")),
                    };
                    assert_eq!(client.cmd("PING"), "PONG");
                    assert!(!reply.starts_with('-') || reply.starts_with("-NODETIMEOUT"), "{reply}");
                    usize::from(reply.starts_with('-'))
                })
            })
            .collect();
        clients.into_iter().map(|c| c.join().expect("answered")).sum()
    });
    assert!(told > 0, "some keys were not there");
    fleet.keeper.stuck.store(false, Ordering::SeqCst);
    fleet.router().steer_move(MoveId(1), switchyard_router::UserRequest::Goal(Goal::Fast));
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    assert!(fleet.progress(1).holds.max_us > 1_000_000);
}

#[test]
fn a_full_target_returns_the_keys_of_the_leg() {
    let fleet = Fleet::new(2);
    fill(&mut fleet.client(), 4000);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..3)
            .map(|offset| {
                let (fleet, stop) = (&fleet, &stop);
                scope.spawn(move || {
                    let mut client = fleet.client();
                    let mut n = offset * 1000;
                    while !stop.load(Ordering::Relaxed) {
                        n = (n + 7) % 4000;
                        assert_eq!(client.cmd(&format!("GET {{{n}}}")), format!("value{n}"));
                    }
                })
            })
            .collect();
        fleet.begin(with(fleet.task(1, 0, 1), |order| order.how.goal = Goal::Gentle));
        until("some keys have moved", || fleet.progress(1).keys_moved > 100);
        assert_eq!(fleet.servers[1].client().cmd("CONFIG SET maxmemory 1mb"), "OK");
        let MoveEnd::Stopped(why) = fleet.wait_for(1) else { panic!("it is full") };
        assert!(why.contains("OOM") || why.contains("room"), "{why}");
        stop.store(true, Ordering::Relaxed);
        for reader in readers {
            reader.join().expect("no client saw an error");
        }
    });
    // Slots handed over before stay at the target; the keys of the current leg return.
    assert_eq!(fleet.servers[1].client().cmd("CONFIG SET maxmemory 0"), "OK");
    all_there(&mut fleet.client(), 4000);
    let mut counts = [0, 0];
    for (place, count) in counts.iter_mut().enumerate() {
        *count = fleet.servers[place].client().cmd("DBSIZE").parse::<u64>().expect("a number");
    }
    assert_eq!(counts[0] + counts[1], 4000, "no key is at two nodes");
    fleet.run_to_end(fleet.task(2, 0, 1));
    all_there(&mut fleet.client(), 4000);
}

/// MIGRATE is refused and the leg goes back while the map cannot be stored. Until the map names the owner, no command
/// is executed at any node.
#[test]
fn no_command_runs_at_the_target_of_a_leg_that_has_migrated_back() {
    let fleet = Fleet::new(2);
    let source = fleet.node(0);
    let is_ours =
        |name: &String| fleet.keeper.topology.lock().expect("lock").owner(crc16_slot(name.as_bytes())) == source;
    let counter = (0..).map(|n| format!("{{{n}}}")).find(is_ours).expect("half of all names");
    let mut client = fleet.client();
    assert_eq!(client.cmd(&format!("SET {counter} 1000")), "OK");
    let mut target = fleet.servers[1].client();
    assert_eq!(target.cmd("ACL SETUSER default -restore"), "OK");
    fleet.keeper.cannot_store.store(true, Ordering::SeqCst);
    fleet.begin(with(fleet.task(1, 0, 1), |order| order.how.protocol = Protocol::StopAndCopy));
    until("the slots are being handed over", || fleet.progress(1).activity.contains("cannot be stored"));
    client.post(&format!("INCR {counter}"));
    fleet.keeper.cannot_store.store(false, Ordering::SeqCst);
    let MoveEnd::Stopped(why) = fleet.wait_for(1) else { panic!("MIGRATE was refused") };
    assert!(why.contains("could not migrate"), "{why}");
    assert_eq!(client.reply(), "1001");
    assert_eq!(target.cmd(&format!("EXISTS {counter}")), "0");
    assert!(is_ours(&counter), "the slots are where they were");
}

/// Nodes may change machines, and clocks are adjusted, so they are queried before each leg, also before a resumed one.
#[test]
fn clocks_are_queried_before_each_leg_and_after_a_restart() {
    let mut fleet = Fleet::new(2);
    let mut client = fleet.client();
    fill(&mut client, 3000);
    let mut target = fleet.servers[1].client();
    let order = || with(fleet.task(1, 0, 1), |order| order.how.goal = Goal::Gentle);
    fleet.begin_on_record(order());
    until("some keys have moved", || fleet.progress(1).keys_moved > 100);
    assert_eq!(target.cmd("ACL SETUSER default -time"), "OK");
    let MoveEnd::Stopped(why) = fleet.wait_for(1) else { panic!("the time of the node is unknown") };
    assert!(why.contains("refuses TIME"), "{why}");
    assert_eq!(target.cmd("ACL SETUSER default +time"), "OK");
    fleet.keeper.records.lock().expect("lock").push(Record::Ended { move_id: MoveId(1) });

    fleet.keeper.loses_moved.store(true, std::sync::atomic::Ordering::SeqCst);
    fleet.begin_on_record(with(fleet.task(2, 0, 1), |order| order.how.goal = Goal::Fast));
    until("keys are in transit", || fleet.keeper.is_losing.load(std::sync::atomic::Ordering::SeqCst));
    assert_eq!(target.cmd("ACL SETUSER default -time"), "OK");
    fleet.restart();
    until("the leg waits", || fleet.progress(2).activity.contains("refuses TIME"));
    assert_eq!(target.cmd("ACL SETUSER default +time"), "OK");
    assert_eq!(fleet.wait_for(2), MoveEnd::Done);
    all_there(&mut fleet.client(), 3000);
}

const OF_ONE_SLOT: usize = 300;

/// Returns two nodes, with a filter on connections to the source, and the direct address of the source.
fn source_behind(passes: impl Fn(&[u8]) -> bool + Send + Sync + 'static) -> (Fleet, SocketAddr) {
    let (mut source, target) = (Server::start(&[]), Server::start(&[]));
    let direct = source.address;
    source.address = relay(direct, passes);
    (Fleet::with(vec![source, target]), direct)
}

/// Creates keys of one slot at the source, and starts a move that is within this slot on return. Returns the hash tag.
fn in_the_middle_of_a_slot(fleet: &Fleet) -> String {
    let task = fleet.task(1, 0, 1);
    let tag = (0..)
        .map(|n| format!("t{n}"))
        .find(|tag| task.order.slots.contains(&crc16_slot(tag.as_bytes())))
        .expect("a tag");
    let mut client = fleet.client();
    for n in 0..OF_ONE_SLOT {
        assert_eq!(client.cmd(&format!("SET {{{tag}}}{n} {}", "x".repeat(100))), "OK");
    }
    let slots = vec![crc16_slot(tag.as_bytes())];
    fleet.begin_on_record(with(task, |order| {
        order.slots = slots;
        order.how.goal = Goal::Gentle;
        order.how.max_rate = Some(10_000);
    }));
    until("some keys have moved", || fleet.progress(1).keys_moved > 20);
    tag
}

#[track_caller]
fn all_of_the_slot(fleet: &Fleet, tag: &str) {
    let mut client = fleet.client();
    let there = (0..OF_ONE_SLOT).filter(|n| client.cmd(&format!("EXISTS {{{tag}}}{n}")) == "1").count();
    assert_eq!(there, OF_ONE_SLOT);
}

/// The leg was in progress when the router ended, so its keys may be anywhere. A connection that breaks before the leg
/// is resumed must not end the move.
#[test]
fn a_source_lost_while_a_leg_resumes_does_not_end_the_move() {
    let (armed, clocks) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
    let (is_armed, asked) = (armed.clone(), clocks.clone());
    // The mover's first TIME is part of connecting, the second checks whether the leg can resume.
    let breaks = move |bytes: &[u8]| {
        is_armed.load(Ordering::SeqCst) && has_command(bytes, &["TIME"]) && asked.fetch_add(1, Ordering::SeqCst) == 1
    };
    let (mut fleet, _) = source_behind(move |bytes| !breaks(bytes));
    let tag = in_the_middle_of_a_slot(&fleet);
    armed.store(true, Ordering::SeqCst);
    fleet.restart();
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    assert!(clocks.load(Ordering::SeqCst) > 2, "the connection has broken");
    all_of_the_slot(&fleet, &tag);
}

/// The leg turns while the source has been queried for keys and has not replied with enough. All keys at the target
/// return.
#[test]
fn a_rollback_during_a_source_scan_returns_all_keys() {
    let hold = Arc::<Hold>::default();
    let held = hold.clone();
    let (mut fleet, direct) = source_behind(move |bytes| {
        if has_command(bytes, &["SCAN"]) {
            held.wait();
        }
        true
    });
    // Enough other keys that one SCAN does not find enough keys of the slot.
    let mut source = Client::connect(direct);
    source.send(&[b"EVAL", b"for n = 1, 30000 do redis.call('SET', 'other' .. n, '') end", b"0"]);
    assert_eq!(source.reply(), "(nil)");
    let tag = in_the_middle_of_a_slot(&fleet);
    hold.wanted.store(true, Ordering::SeqCst);
    fleet.restart();
    until("SCAN is sent to the source", || hold.holds.load(Ordering::SeqCst));
    fleet.router().steer_move(MoveId(1), UserRequest::Abort);
    until("the leg has turned", || fleet.progress(1).phase == Some(Phase::Returning));
    hold.wanted.store(false, Ordering::SeqCst);
    assert!(matches!(fleet.wait_for(1), MoveEnd::Stopped(_)));
    all_of_the_slot(&fleet, &tag);
}
