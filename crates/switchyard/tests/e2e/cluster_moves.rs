//! Moves of slots between the members of a cluster: under load, after the router's death, and next to other moves.
//!
//! With Valkey 9 the members move slots by `CLUSTER MIGRATESLOTS`, otherwise by `SETSLOT` and `MIGRATE`. The tests hold
//! for both.

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value as Json;

use crate::cluster_storage::{Members, introduce};
use crate::cluster_upgrade::Ends;
use crate::movectl::{done, json, refused, run_cli};
use crate::support::slots::slot;
use crate::support::{Client, Node, NodeOptions, Router, Value, bulk, direct, encode, int, ok, ports, until};

/// Text before the number of a key, whose hash tag is in this slot.
pub(crate) fn key_in(wanted: u16) -> &'static str {
    static TAGS: OnceLock<BTreeMap<u16, String>> = OnceLock::new();
    let all = || {
        let mut tags = BTreeMap::new();
        let keys = (0..).map(|tag| format!("{{t{tag}}}"));
        for key in keys.take(300_000) {
            tags.entry(slot(key.as_bytes())).or_insert(key);
        }
        tags
    };
    &TAGS.get_or_init(all)[&wanted]
}

/// Writes this many keys to a slot. The value of each is its number.
pub(crate) fn fill(client: &mut Client, slot: u16, count: usize) {
    let key = key_in(slot);
    let mut bytes = Vec::new();
    (0..count).for_each(|number| bytes.extend(encode(&["SET", &format!("{key}{number}"), &number.to_string()])));
    assert!(client.pipeline(&bytes, count).iter().all(|reply| reply == b"+OK\r\n"));
}

#[track_caller]
pub(crate) fn all_there(client: &mut Client, slot: u16, count: usize) {
    let key = key_in(slot);
    let mut bytes = Vec::new();
    (0..count).for_each(|number| bytes.extend(encode(&["GET", &format!("{key}{number}")])));
    for (number, reply) in client.pipeline(&bytes, count).into_iter().enumerate() {
        let expected = number.to_string();
        assert_eq!(String::from_utf8_lossy(&reply), format!("${}\r\n{expected}\r\n", expected.len()), "{key}{number}");
    }
}

impl Members {
    fn name(&self, number: usize) -> String {
        self.nodes[number].address().to_string()
    }

    /// Adds a member without slots.
    fn join(&mut self) -> usize {
        let bus = ports::free().to_string();
        let args = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port", &bus];
        let node = Node::start(&NodeOptions::args(&args));
        let address = node.address();
        self.ids.push(node.cmd("CLUSTER MYID").text());
        self.nodes.push(node);
        let meet = format!("CLUSTER MEET {} {} {bus}", address.ip(), address.port());
        introduce(&self.nodes, || assert_eq!(self.nodes[0].cmd(&meet), ok()));
        self.nodes.len() - 1
    }

    /// Whether a member shows a slot that migrates, or a migration in progress.
    fn is_moving(&self) -> bool {
        self.nodes.iter().any(|node| {
            let nodes = node.cmd("CLUSTER NODES").text();
            let jobs = node.cmd("CLUSTER GETSLOTMIGRATIONS");
            let is_running = |job: &Value| {
                let state = job.field("state").text();
                !["success", "failed", "cancelled"].contains(&state.as_str())
            };
            nodes.contains("->-")
                || nodes.contains("-<-")
                || (jobs.error().is_none() && jobs.items().iter().any(is_running))
        })
    }

    /// Whether the members migrate slots themselves.
    fn have_jobs(&self) -> bool {
        self.nodes[0].cmd("CLUSTER GETSLOTMIGRATIONS").error().is_none()
    }

    /// Number of keys of a slot at a member.
    fn keys(&self, number: usize, slot: u16) -> i64 {
        self.nodes[number].cmd(&format!("CLUSTER COUNTKEYSINSLOT {slot}")).int()
    }
}

/// Moves that a router shows.
fn moves(router: &Router) -> Vec<Json> {
    json(router, "moves list")["moves"].as_array().cloned().unwrap_or_default()
}

#[test]
fn a_move_under_load_loses_no_write_and_keeps_the_order() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    let routers = [members.router(""), members.router("")];
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4_u16)
            .map(|number| {
                let (address, is_over) = (routers[usize::from(number % 2)].address(), &is_over);
                scope.spawn(move || {
                    let (mut client, mut count) = (Client::connect(address), 0);
                    let keys: Vec<String> = (0..10).map(|slot| format!("{}n{number}", key_in(slot * 4))).collect();
                    while !is_over.load(Ordering::Relaxed) {
                        count += 1;
                        keys.iter().for_each(|key| client.post(&format!("INCR {key}")));
                        keys.iter().for_each(|key| client.post(&format!("GET {key}")));
                        keys.iter().for_each(|key| assert_eq!(client.reply(), int(count), "{key}"));
                        keys.iter().for_each(|key| assert_eq!(client.reply(), bulk(count.to_string()), "{key}"));
                    }
                    (keys, count)
                })
            })
            .collect();
        let mut client = Client::connect(routers[0].address());
        (0..40).for_each(|slot| fill(&mut client, slot, 100));
        for target in [1, 2, 0] {
            done(&routers[target % 2], &format!("move --slots 0-39 --to {} --wait", members.name(target)));
        }
        is_over.store(true, Ordering::Relaxed);
        for (keys, count) in clients.into_iter().map(|client| client.join().expect("in order")) {
            for key in keys {
                assert_eq!(client.cmd(&format!("GET {key}")), bulk(count.to_string()), "{key}");
            }
        }
        (0..40).for_each(|slot| all_there(&mut client, slot, 100));
    });
    assert!(!members.is_moving());
    assert_eq!((members.owner(key_in(0)), members.owner(key_in(39))), (0, 0));
    until("the other members have deleted the keys", || (1..3).all(|number| members.keys(number, 0) == 0));
    let error = refused(&routers[0], &format!("move --slots 0-39 --to {}", members.name(0)));
    assert!(error.contains("owns these slots already"), "{error}");
}

#[test]
fn another_router_continues_a_move_after_the_death_of_its_router() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    let second = members.router("");
    let mut client = Client::connect(second.address());
    (0..3).for_each(|slot| fill(&mut client, slot, 15_000));
    for (round, target) in [1, 2, 0].into_iter().enumerate() {
        let mut first = members.router("");
        done(&first, &format!("move --slots 0-2 --to {}", members.name(target)));
        until("a slot migrates", || members.is_moving());
        std::thread::sleep(Duration::from_millis(20 * round as u64));
        first.process_mut().kill();
        // The cluster itself completes a slot that the target has taken.
        std::thread::sleep(Duration::from_millis(200));
        // A second move is refused, and the keys are served in the meantime.
        if members.is_moving() && !members.have_jobs() {
            let other = (target + 1) % 3;
            let error = refused(&second, &format!("move --slots 16000 --to {}", members.name(other % 2)));
            assert!(error.contains("migrates from") && error.contains("moves resume 100000"), "{error}");
            let shown = moves(&second);
            assert_eq!((shown.len(), &shown[0]["slots"]), (1, &Json::from(1)), "{shown:?}");
        }
        all_there(&mut client, 0, 15_000);
        if members.have_jobs() {
            until("the members have ended their migration", || !members.is_moving());
        }
        let line = format!("move --slots 0-2 --to {} --wait", members.name(target));
        let again = run_cli(&second, &line);
        let is_done = again.code == 0 || again.err.contains("owns these slots already");
        assert!(is_done, "{}{}", again.out, again.err);
        assert!(!members.is_moving());
        (0..3).for_each(|slot| all_there(&mut client, slot, 15_000));
        assert_eq!(members.owner(key_in(1)), target);
        for number in (0..3).filter(|number| *number != target) {
            until("the others have no keys", || (0..3).all(|slot| members.keys(number, slot) == 0));
        }
    }
}

#[test]
fn a_router_finishes_a_slot_from_any_state_that_another_tool_leaves() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    let router = members.router("");
    let mut client = Client::connect(router.address());
    let (key, mut from) = (key_in(7), 0);
    fill(&mut client, 7, 50);
    for (round, state) in
        ["importing", "both", "some keys", "all keys", "taken", "source informed"].into_iter().enumerate()
    {
        let to = (from + 1) % 3;
        members.settle();
        if state == "importing" {
            assert_eq!(members.nodes[to].cmd(&format!("CLUSTER SETSLOT 7 IMPORTING {}", members.ids[from])), ok());
        } else {
            members.open(key, from, to);
        }
        let count = match state {
            "importing" | "both" => 0,
            "some keys" => 20,
            _ => 50,
        };
        if count > 0 {
            let keys: Vec<String> = (0..count).map(|number| format!("{key}{number}")).collect();
            members.migrate(from, to, &keys);
        }
        if ["taken", "source informed"].contains(&state) {
            members.nodes[to].cmd(&format!("CLUSTER SETSLOT 7 NODE {}", members.ids[to]));
        }
        if state == "source informed" {
            members.nodes[from].cmd(&format!("CLUSTER SETSLOT 7 NODE {}", members.ids[to]));
        }
        // The cluster may complete the last states by itself.
        if members.is_moving() {
            let by_id = run_cli(&router, "moves resume 1000007");
            assert!(by_id.code == 0 || !members.is_moving(), "{state}: {}{}", by_id.out, by_id.err);
        }
        until("the move has ended", || moves(&router).is_empty());
        assert_eq!((members.owner(key), members.is_moving()), (to, false), "{state}");
        all_there(&mut client, 7, 50);
        assert_eq!(client.cmd(&format!("SET {key}0 0")), ok(), "round {round}");
        from = to;
    }
}

#[test]
fn a_second_move_is_refused_while_one_runs() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    let routers = [members.router(""), members.router("")];
    let mut client = Client::connect(routers[0].address());
    fill(&mut client, 5, 60_000);
    done(&routers[0], &format!("move --slots 5 --to {}", members.name(1)));
    until("the slot migrates", || members.is_moving());
    let line = format!("move --slots 6 --to {}", members.name(2));
    let own = run_cli(&routers[0], &line);
    let other = run_cli(&routers[1], &line);
    // If the move has ended in the meantime, the machine is too fast for this test.
    if members.is_moving() {
        assert!(own.code == 1 && own.err.contains("moves are in progress (1)"), "{}{}", own.out, own.err);
        let names = other.err.contains(&members.name(0)) && other.err.contains(&members.name(1));
        assert!(other.code == 1 && names && other.err.contains("already"), "{}{}", other.out, other.err);
    }
    until("the moves have ended", || !members.is_moving() && routers.iter().all(|router| moves(router).is_empty()));
    all_there(&mut client, 5, 60_000);
    assert_eq!(members.owner(key_in(5)), 1);
}

/// Nothing locks a cluster, so both routers may accept a move.
#[test]
fn moves_that_begin_at_the_same_time_lose_nothing() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    let routers = [members.router(""), members.router("")];
    let mut client = Client::connect(routers[0].address());
    (0..10).for_each(|slot| fill(&mut client, slot, 200));
    let last = 16_374..16_384;
    last.clone().for_each(|slot| fill(&mut client, slot, 200));
    for _ in 0..3 {
        let (first, second) = (members.owner(key_in(0)), members.owner(key_in(16_374)));
        let orders = [("0-9", first), ("16374-16383", second)];
        let ends: Vec<_> = std::thread::scope(|scope| {
            let start = |(router, (slots, from)): (&'static str, (&'static str, usize))| {
                let router = &routers[usize::from(router == "second")];
                let to = members.name((from + 1) % 3);
                scope.spawn(move || run_cli(router, &format!("move --slots {slots} --to {to} --wait")))
            };
            let started = [start(("first", orders[0])), start(("second", orders[1]))];
            started.into_iter().map(|end| end.join().expect("an end")).collect()
        });
        assert!(ends.iter().any(|end| end.code == 0), "{} {}", ends[0].err, ends[1].err);
        until("the moves have ended", || !members.is_moving() && routers.iter().all(|router| moves(router).is_empty()));
        members.settle();
        (0..10).chain(last.clone()).for_each(|slot| all_there(&mut client, slot, 200));
    }
}

#[test]
fn an_aborted_move_leaves_no_open_slot() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    let router = members.router("");
    let mut client = Client::connect(router.address());
    (0..200).for_each(|slot| fill(&mut client, slot, 200));
    done(&router, &format!("move --slots 0-199 --to {}", members.name(1)));
    until("a slot migrates", || members.is_moving());
    let aborted = run_cli(&router, "moves abort 1");
    assert!(aborted.code == 0 || aborted.err.contains("has ended"), "{}{}", aborted.out, aborted.err);
    until("the move has ended", || moves(&router).is_empty());
    assert!(!members.is_moving());
    let ended = json(&router, "moves list")["ended"][0].clone();
    assert!(["stopped", "done"].contains(&ended["state"].as_str().unwrap_or_default()), "{ended}");
    (0..200).for_each(|slot| all_there(&mut client, slot, 200));
    // The rest follows with the same command.
    if ended["state"] == "stopped" {
        done(&router, &format!("move --slots 0-199 --to {} --wait", members.name(1)));
    }
    assert_eq!((members.owner(key_in(0)), members.owner(key_in(199))), (1, 1));
    (0..200).for_each(|slot| all_there(&mut client, slot, 200));
}

#[test]
fn migrations_of_other_tools_are_not_cancelled() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    if !members.have_jobs() {
        eprintln!("left out: the server has no CLUSTER MIGRATESLOTS");
        return;
    }
    // Migrations do not end until then.
    let source = &members.nodes[0];
    assert_eq!(source.cmd("DEBUG SLOTMIGRATION PREVENT-PAUSE 1"), ok());
    let router = members.router("");
    done(&router, &format!("move --slots 0-3 --to {}", members.name(1)));
    until("the slots migrate", || members.is_moving());
    assert_eq!(source.cmd(&format!("CLUSTER MIGRATESLOTS SLOTSRANGE 10 12 NODE {}", members.ids[2])), ok());
    done(&router, "moves abort 1");
    let activity = || moves(&router).first().map(|own| own["activity"].as_str().unwrap_or_default().to_owned());
    until("the move waits", || activity().is_some_and(|text| text.contains("cannot be cancelled")));
    let error = refused(&router, "moves abort 2000010");
    assert!(error.contains("would cancel both"), "{error}");
    assert_eq!(source.cmd("DEBUG SLOTMIGRATION PREVENT-PAUSE 0"), ok());
    until("both have ended", || moves(&router).is_empty() && !members.is_moving());
    assert_eq!(members.owner(key_in(10)), 2);
}

#[test]
fn values_that_only_the_target_has_are_never_replaced() {
    if direct() {
        return;
    }
    let members = Members::start(2);
    let router = members.router("");
    let mut client = Client::connect(router.address());
    let key = key_in(9);
    fill(&mut client, 9, 20);
    members.open(key, 0, 1);
    let set_at_target = |value: &str| {
        let mut target = members.nodes[1].client();
        assert_eq!(target.cmd("ASKING"), ok());
        assert_eq!(target.cmd(&format!("SET {key}3 {value}")), ok());
    };
    for (round, value) in ["other", "3 EX 600"].into_iter().enumerate() {
        set_at_target(value);
        done(&router, "moves resume 1000009");
        until("the move has stopped", || moves(&router).iter().all(|shown| shown["id"] == 1_000_009));
        let ended = json(&router, "moves list")["ended"][round].clone();
        let activity = ended["activity"].as_str().unwrap_or_default();
        assert!(ended["state"] == "stopped" && activity.contains("other values"), "{value}: {ended}");
    }
    let status = json(&router, "status");
    assert!(status["warnings"][0]["what"].as_str().is_some_and(|what| what.contains("left a slot open")), "{status}");
    let metrics = router.metrics();
    for line in ["moves_ended_total{how=\"stopped\"} 2", "moves_in_trouble 1"] {
        assert!(metrics.contains(&format!("switchyard_{line}\n")), "{metrics}");
    }
    // Clients use the value of the source.
    all_there(&mut client, 9, 20);
    // The same value is a copy that an earlier attempt has left.
    set_at_target("3");
    done(&router, "moves resume 1000009");
    until("the move has ended", || moves(&router).is_empty());
    assert!(!members.is_moving());
    all_there(&mut client, 9, 20);
    assert_eq!(members.owner(key), 1);
}

#[test]
fn a_new_member_gets_slots_with_large_and_expiring_keys() {
    if direct() {
        return;
    }
    let mut members = Members::start(2);
    let router = members.router("[storage]\nwait-max = \"60s\"\n");
    let mut client = Client::connect(router.address());
    let new = members.join();
    let key = key_in(3);
    let large = "x".repeat(3 << 20);
    assert_eq!(client.call(&["SET", &format!("{key}large"), &large]), ok());
    for number in 0..300 {
        client.call(&[
            "SET",
            &format!("{key}{number}"),
            &"y".repeat(number * 100),
            "PX",
            if number % 3 == 0 { "40" } else { "600000" },
        ]);
    }
    assert_eq!(client.cmd(&format!("HSET {key}hash a 1 b 2")), int(2));
    let error = refused(&router, &format!("move --slots 3 --to {} --goal fast", members.name(new)));
    assert!(error.contains("members of a cluster copy keys themselves"), "{error}");
    let planned = done(&router, "balance --dry-run");
    assert!(planned.contains(&members.name(new)) && planned.contains("by hand"), "{planned}");
    done(&router, &format!("move --slots 0-9 --to {} --wait", members.name(new)));
    assert_eq!(members.owner(key), new);
    assert_eq!(client.call(&["STRLEN", &format!("{key}large")]), int(3 << 20));
    for number in (0..300).filter(|number| number % 3 != 0) {
        assert_eq!(client.cmd(&format!("STRLEN {key}{number}")), int(number * 100), "{number}");
        assert!(client.cmd(&format!("PTTL {key}{number}")).int() > 0);
    }
    assert_eq!(client.cmd(&format!("HGETALL {key}hash")).items().len(), 4);
    let metrics = router.metrics();
    let value = |name: &str| {
        let line = metrics.lines().find_map(|line| line.strip_prefix(&format!("switchyard_{name} ")));
        line.and_then(|value| value.parse::<u64>().ok()).unwrap_or_else(|| panic!("{name}: {metrics}"))
    };
    assert_eq!((value("moves_running"), value("moves_ended_total{how=\"done\"}")), (0, 1));
    assert_eq!((value("moves_slots_moved_total"), value("moves_slots_left")), (10, 0));
    assert!(value("moves_keys_moved_total") >= 202);
    // The members that migrate slots themselves report no bytes.
    assert!(members.have_jobs() || value("moves_bytes_moved_total") > 3 << 20);
    // By RESP, too.
    let error = client.cmd(&format!("SWITCHYARD MOVE SLOTS 3 TO {}", members.name(0)));
    assert!(error.error().is_some_and(|error| error.starts_with("NOPERM")), "{error:?}");
    assert_eq!(client.cmd("SWITCHYARD MOVES").field("moves"), Value::Array(Vec::new()));
}

#[test]
fn commands_about_all_keys_reach_members_that_get_their_first_slot() {
    if direct() {
        return;
    }
    let members = Members::start_of(2, 0, 2);
    let router = members.router("");
    let mut client = Client::connect(router.address());
    fill(&mut client, 5, 30_000);
    done(&router, &format!("move --slots 5 --to {}", members.name(2)));
    until("the move has ended", || {
        let count = client.cmd("DBSIZE").int();
        // Some keys move between the replies of both members; if these migrate the slot themselves, all at once.
        assert!(members.have_jobs() || count > 15_000, "{count}");
        moves(&router).is_empty()
    });
    // Another tool moves a slot.
    let key = key_in(0);
    fill(&mut client, 0, 100);
    members.settle();
    members.open(key, 0, 3);
    members.migrate(0, 3, &(0..40).map(|number| format!("{key}{number}")).collect::<Vec<_>>());
    assert_eq!(client.cmd(&format!("GET {key}0")), bulk("0"));
    assert_eq!(client.cmd("DBSIZE"), int(30_100));
    assert_eq!(client.cmd(&format!("KEYS {key}*")).items().len(), 100);
    assert_eq!(client.cmd("FLUSHALL"), ok());
    assert_eq!((members.keys(0, 0), members.keys(3, 0)), (0, 0));
}

#[test]
fn the_mover_authenticates_at_the_target() {
    if direct() {
        return;
    }
    let members = Members::start(2);
    for node in &members.nodes {
        assert_eq!(node.cmd("ACL SETUSER router on >geheim ~* &* +@all"), ok());
        assert_eq!(node.cmd("ACL SETUSER default -migrate -restore -restore-asking"), ok());
    }
    let secret = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(secret.path(), "geheim").expect("a file");
    let config = format!("[nodes]\nusername = \"router\"\npassword-file = {:?}\n", secret.path());
    let router = members.router(&config);
    let mut client = Client::connect(router.address());
    fill(&mut client, 0, 10);
    done(&router, &format!("move --slots 0-1 --to {} --wait", members.name(1)));
    all_there(&mut client, 0, 10);
    assert_eq!(members.owner(key_in(0)), 1);
    assert!(!router.process().log().contains("geheim"));
    // As at a managed service.
    let command = if members.have_jobs() { "-cluster|migrateslots" } else { "-migrate" };
    members.nodes.iter().for_each(|node| assert_eq!(node.cmd(&format!("ACL SETUSER router {command}")), ok()));
    let line = format!("move --slots 2 --to {}", members.name(1));
    let error = refused(&router, &line);
    assert!(error.contains("NOPERM") && error.contains("modify-replication-group-shard-configuration"), "{error}");
    let planned = done(&router, &format!("{line} --dry-run"));
    assert!(planned.contains("NOTE: ") && planned.contains("update-cluster"), "{planned}");
    assert_eq!((members.owner(key_in(2)), members.is_moving()), (0, false));
}

#[test]
fn slots_do_not_move_while_members_are_unreachable() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    let router = members.router("[nodes]\nconnect-timeout = \"500ms\"\n");
    members.nodes[2].freeze();
    let error = refused(&router, &format!("move --slots 0 --to {}", members.name(1)));
    assert!(error.contains(&members.name(2)) && error.contains("primaries reply and agree"), "{error}");
    members.nodes[2].thaw();
    members.settle();
    until("the members agree again", || {
        run_cli(&router, &format!("move --slots 0 --to {} --wait", members.name(1))).code == 0
    });
    assert!(!members.is_moving());
}

#[test]
fn a_plan_relieves_a_busy_member() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    // Valkey then counts the processor time of slots. Other servers refuse it, and the router's sample counts.
    members.nodes.iter().for_each(|node| drop(node.cmd("CONFIG SET cluster-slot-stats-enabled yes")));
    let router = members.router("[planner]\nmode = \"advise\"\nmin-requests = 10\n");
    let is_over = AtomicBool::new(false);
    let (planned, balanced) = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = Client::connect(router.address());
            let keys: Vec<&str> = (0..50).map(key_in).collect();
            while !is_over.load(Ordering::Relaxed) {
                keys.iter().for_each(|key| client.post(&format!("INCR {key}")));
                keys.iter().for_each(|_| assert!(client.reply().error().is_none()));
            }
        });
        // The load is known after some seconds.
        let mut planned = Json::Null;
        for _ in 0..60 {
            planned = serde_json::from_str(&run_cli(&router, "plan --json").out).unwrap_or_default();
            if planned["steps"].as_array().is_some_and(|steps| !steps.is_empty()) {
                break;
            }
            std::thread::sleep(Duration::from_millis(500));
        }
        let balanced = run_cli(&router, "balance --by load --wait");
        is_over.store(true, Ordering::Relaxed);
        (planned, balanced)
    });
    let steps = planned["steps"].as_array().expect("steps");
    assert!(!steps.is_empty() && steps.iter().all(|step| step["from"] == members.name(0)), "{planned}");
    let is_by_hand = |advice: &Json| advice.as_str().is_some_and(|advice| advice.starts_with("by hand"));
    assert!(planned["advice"].as_array().expect("advice").iter().any(is_by_hand), "{planned}");
    assert_eq!(balanced.code, 0, "{}{}", balanced.out, balanced.err);
    assert!((0..50).any(|slot| members.owner(key_in(slot)) != 0));
    assert!(!members.is_moving());
}

#[test]
fn the_planner_relieves_a_busy_member_by_itself() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    members.nodes.iter().for_each(|node| drop(node.cmd("CONFIG SET cluster-slot-stats-enabled yes")));
    let router = members.router("[planner]\nmode = \"act\"\nmin-requests = 10\nwindow = \"5s\"\n");
    let is_over = &AtomicBool::new(false);
    let ended = std::thread::scope(|scope| {
        let ends = Ends(is_over);
        let load = scope.spawn(|| {
            let (mut client, mut count) = (Client::connect(router.address()), 0);
            let keys: Vec<&str> = (0..50).map(key_in).collect();
            while !is_over.load(Ordering::Relaxed) {
                count += 1;
                keys.iter().for_each(|key| client.post(&format!("INCR {key}")));
                keys.iter().for_each(|key| assert_eq!(client.reply(), int(count), "{key}"));
            }
        });
        let ended = until("slots have moved", || json(&router, "moves list")["ended"].as_array()?.first().cloned());
        drop(ends);
        load.join().expect("every reply");
        ended
    });
    assert_eq!((&ended["state"], &ended["from"]), (&Json::from("done"), &Json::from(members.name(0))), "{ended}");
    assert!((0..50).any(|slot| members.owner(key_in(slot)) != 0));
}
