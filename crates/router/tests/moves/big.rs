//! Big keys: copied in pieces while they are written, without a loss.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use switchyard_policy::migration::{Durability, Goal};
use switchyard_policy::topology::{MoveId, SLOT_COUNT, Slot, crc16_slot};
use switchyard_router::{MoveEnd, UserRequest};

use super::fleet::{Client, Fleet, Server, all_there, fill, until, with};

/// Fills a value in pipelines. `command` returns the command that adds elements `from..to`.
fn pour(client: &mut Client, count: usize, command: impl Fn(usize, usize) -> Vec<String>) {
    let step = 500;
    for from in (0..count).step_by(step) {
        let words = command(from, (from + step).min(count));
        let args: Vec<&[u8]> = words.iter().map(String::as_bytes).collect();
        client.send(&args);
        let reply = client.reply();
        assert!(!reply.starts_with('-'), "{reply}");
    }
}

pub(super) fn hash(client: &mut Client, key: &str, count: usize) {
    pour(client, count, |from, to| {
        let mut words = vec!["HSET".to_owned(), key.to_owned()];
        words.extend((from..to).flat_map(|n| [format!("field{n}"), format!("value{n}-{}", "x".repeat(80))]));
        words
    });
}

/// Returns a key in a slot of a node.
pub(super) fn key_of(fleet: &Fleet, node: usize, name: &str) -> String {
    let owned = fleet.slots_of(fleet.node(node));
    (0..)
        .map(|n| format!("{{{n}}}{name}"))
        .find(|key| owned.contains(&switchyard_policy::topology::crc16_slot(key.as_bytes())))
        .expect("a key")
}

pub(super) fn no_temporary_keys(server: &Server) {
    assert_eq!(server.client().cmd("KEYS switchyard:*"), "[]");
}

/// Returns all elements of a value, read in pages.
fn pages(client: &mut Client, command: &str, key: &str) -> Vec<String> {
    let (mut cursor, mut all) = ("0".to_owned(), Vec::new());
    loop {
        let reply = client.cmd(&format!("{command} {key} {cursor} COUNT 500"));
        let (next, page) = reply[1..].split_once(", [").expect("a cursor and elements");
        all.extend(page.trim_end_matches(']').split(", ").filter(|e| !e.is_empty()).map(str::to_owned));
        next.clone_into(&mut cursor);
        if cursor == "0" {
            return all;
        }
    }
}

/// Returns all fields of a hash.
fn fields(client: &mut Client, key: &str) -> BTreeMap<String, String> {
    pages(client, "HSCAN", key).chunks(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect()
}

#[test]
fn big_values_of_all_types_arrive_unchanged() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    let names = ["hash", "set", "zset", "list", "string"];
    let keys: BTreeMap<&str, String> = names.into_iter().map(|name| (name, key_of(&fleet, 0, name))).collect();
    let key = |name: &str| keys[name].clone();
    hash(&mut client, &key("hash"), 20_000);
    pour(&mut client, 30_000, |from, to| {
        let members = (from..to).map(|n| format!("member{n}-{}", "x".repeat(40)));
        ["SADD".to_owned(), key("set")].into_iter().chain(members).collect()
    });
    pour(&mut client, 30_000, |from, to| {
        let members = (from..to).flat_map(|n| [format!("{}", n as f64 / 7.0), format!("member{n}-{}", "x".repeat(40))]);
        ["ZADD".to_owned(), key("zset")].into_iter().chain(members).collect()
    });
    pour(&mut client, 40_000, |from, to| {
        let members = (from..to).map(|n| format!("member{n}-{}", "x".repeat(40)));
        ["RPUSH".to_owned(), key("list")].into_iter().chain(members).collect()
    });
    assert_eq!(client.cmd(&format!("SETRANGE {} 3000000 end", key("string"))), "3000003");
    assert_eq!(client.cmd(&format!("SETRANGE {} 1234567 middle", key("string"))), "3000003");
    assert_eq!(client.cmd(&format!("ZADD {} inf most -inf least", key("zset"))), "2");
    assert_eq!(client.cmd(&format!("PEXPIREAT {} 4102444800123", key("hash"))), "1");
    assert_eq!(client.cmd("SELECT 3"), "OK");
    hash(&mut client, &key("hash"), 15_000);
    assert_eq!(client.cmd("SELECT 0"), "OK");
    let look = |client: &mut Client| -> Vec<String> {
        let mut seen = Vec::new();
        for name in names {
            let dump = client.cmd(&format!("DUMP {}", key(name)));
            seen.push(if name == "hash" || name == "set" { dump.len().to_string() } else { dump });
        }
        seen.push(client.cmd(&format!("PEXPIRETIME {}", key("hash"))));
        seen.push(client.cmd(&format!("PEXPIRETIME {}", key("zset"))));
        seen.push(format!("{:?}", fields(client, &key("hash"))));
        let mut members = pages(client, "SSCAN", &key("set"));
        members.sort_unstable();
        members.dedup();
        seen.push(members.concat());
        client.cmd("SELECT 3");
        seen.push(format!("{:?}", fields(client, &key("hash"))));
        client.cmd("SELECT 0");
        seen
    };
    let before = look(&mut client);
    fleet.run_to_end(fleet.task(1, 0, 1));
    let after = look(&mut client);
    for (number, (before, after)) in before.iter().zip(&after).enumerate() {
        assert!(before == after || number < 2, "number {number}");
    }
    let big = fleet.progress(1).big;
    assert_eq!((big.in_pieces, big.whole, big.in_progress.len()), (6, 0, 0), "{big:?}");
    assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
    assert_eq!(fleet.servers[1].client().cmd("DBSIZE"), "5");
    no_temporary_keys(&fleet.servers[1]);
}

/// With the goal `fast`, the sizes of a leg's keys are queried during the previous leg.
#[test]
fn big_keys_of_later_legs_are_known_in_time() {
    let fleet = Fleet::new(2);
    let owned = fleet.slots_of(fleet.node(0));
    let is_in = |slots: &[Slot], key: &str| slots.contains(&crc16_slot(key.as_bytes()));
    // More keys than the first leg takes.
    let mut mine = vec![false; SLOT_COUNT];
    owned.iter().for_each(|slot| mine[slot.index()] = true);
    let small: Vec<String> = (0..)
        .map(|n| format!("small:{n}"))
        .filter(|key| mine[crc16_slot(key.as_bytes()).index()])
        .take(70_000)
        .collect();
    let mut direct = fleet.servers[0].client();
    for some in small.chunks(500) {
        let args: Vec<&[u8]> =
            std::iter::once(&b"MSET"[..]).chain(some.iter().flat_map(|key| [key.as_bytes(), b"value"])).collect();
        direct.send(&args);
        assert_eq!(direct.reply(), "OK");
    }
    let late = &owned[owned.len() - 100..];
    let key = |name: &str| (0..).map(|n| format!("{{{n}}}{name}")).find(|key| is_in(late, key)).expect("a key");
    let mut client = fleet.client();
    hash(&mut client, &key("hash"), 20_000);
    assert_eq!(client.cmd(&format!("SETRANGE {} 3000000 end", key("string"))), "3000003");
    assert_eq!(client.cmd(&format!("HSET {} field value", key("few"))), "1");
    fleet.run_to_end(fleet.task(1, 0, 1));
    let big = fleet.progress(1).big;
    assert_eq!((big.in_pieces, big.whole, big.in_progress.len()), (2, 0, 0), "{big:?}");
    assert_eq!(fields(&mut client, &key("hash")).len(), 20_000);
    assert_eq!(client.cmd(&format!("STRLEN {}", key("string"))), "3000003");
    assert_eq!(client.cmd(&format!("HGET {} field", key("few"))), "value");
    assert_eq!(direct.cmd("DBSIZE"), "0");
    assert_eq!(fleet.servers[1].client().cmd("DBSIZE"), "70003");
}

/// Every acknowledged write to a big hash is applied exactly once.
#[test]
fn writes_to_a_big_hash_while_it_is_copied_are_all_there() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    let key = key_of(&fleet, 0, "hash");
    let count = 200_000;
    hash(&mut client, &key, count);
    let stop = AtomicBool::new(false);
    let mut expected: BTreeMap<String, String> = fields(&mut client, &key);
    assert_eq!(expected.len(), count);
    std::thread::scope(|scope| {
        let mut writers = Vec::new();
        for writer in 0..3_usize {
            let (fleet, stop, key) = (&fleet, &stop, &key);
            writers.push(scope.spawn(move || {
                let mut client = fleet.client();
                let mut changed: BTreeMap<String, Option<String>> = BTreeMap::new();
                let mut state = writer as u64 * 7919 + 1;
                let mut writes = 0_u64;
                while !stop.load(Ordering::Relaxed) {
                    writes += 1;
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    // Each writer has its own fields.
                    let field = format!("field{}", (state >> 33) as usize % (count / 3) * 3 + writer);
                    match (state >> 20) % 5 {
                        0 => {
                            assert!(!client.cmd(&format!("HDEL {key} {field}")).starts_with('-'));
                            changed.insert(field, None);
                        }
                        1 => {
                            let counter = format!("counter{writer}-{}", (state >> 40) % 100);
                            let last: u64 =
                                changed.get(&counter).cloned().flatten().map_or(0, |n| n.parse().expect("a number"));
                            assert_eq!(client.cmd(&format!("HINCRBY {key} {counter} 1")), (last + 1).to_string());
                            changed.insert(counter, Some((last + 1).to_string()));
                        }
                        2 => {
                            assert_eq!(client.cmd("MULTI"), "OK");
                            assert_eq!(client.cmd(&format!("HSET {key} {field} multi{writes}")), "QUEUED");
                            assert_eq!(client.cmd(&format!("HSET {key} new{writer}-{writes} {writes}")), "QUEUED");
                            let reply = client.cmd("EXEC");
                            assert!(reply.ends_with(", 1]"), "{reply}");
                            changed.insert(field, Some(format!("multi{writes}")));
                            changed.insert(format!("new{writer}-{writes}"), Some(writes.to_string()));
                        }
                        3 => {
                            let expected = changed.get(&field).cloned().unwrap_or_else(|| {
                                let number = field.trim_start_matches("field");
                                Some(format!("value{number}-{}", "x".repeat(80)))
                            });
                            assert_eq!(
                                client.cmd(&format!("HGET {key} {field}")),
                                expected.unwrap_or_else(|| "(nil)".to_owned())
                            );
                        }
                        _ => {
                            assert!(!client.cmd(&format!("HSET {key} {field} single{writes}")).starts_with('-'));
                            changed.insert(field, Some(format!("single{writes}")));
                        }
                    }
                }
                changed
            }));
        }
        fleet.run_to_end(with(fleet.task(1, 0, 1), |order| order.how.goal = Goal::Balanced));
        std::thread::sleep(Duration::from_millis(100));
        stop.store(true, Ordering::Relaxed);
        for writer in writers {
            for (field, value) in writer.join().expect("no error") {
                match value {
                    Some(value) => expected.insert(field, value),
                    None => expected.remove(&field),
                };
            }
        }
    });
    let big = fleet.progress(1).big;
    assert_eq!((big.in_pieces, big.whole), (1, 0), "{big:?}");
    let found = fields(&mut client, &key);
    assert_eq!(found.len(), expected.len());
    assert!(found == expected, "some fields differ");
    assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
    no_temporary_keys(&fleet.servers[1]);
}

/// As above, for sets and sorted sets.
#[test]
fn writes_to_big_sets_while_they_are_copied_are_all_there() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    let (set, zset, other) = (key_of(&fleet, 0, "set"), key_of(&fleet, 0, "zset"), key_of(&fleet, 0, "other"));
    let count = 40_000;
    let pad = "x".repeat(40);
    pour(&mut client, count, |from, to| {
        ["SADD".to_owned(), set.clone()].into_iter().chain((from..to).map(|n| format!("m{n}-{pad}"))).collect()
    });
    pour(&mut client, count, |from, to| {
        ["ZADD".to_owned(), zset.clone()]
            .into_iter()
            .chain((from..to).flat_map(|n| [n.to_string(), format!("m{n}-{pad}")]))
            .collect()
    });
    let stop = AtomicBool::new(false);
    let mut members: BTreeMap<usize, bool> = (0..count).map(|n| (n, true)).collect();
    let mut scores: BTreeMap<usize, Option<i64>> = (0..count).map(|n| (n, Some(n as i64))).collect();
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut client = fleet.client();
            let mut state = 11_u64;
            while !stop.load(Ordering::Relaxed) {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let n = (state >> 33) as usize % (count + 1000);
                let line = match (state >> 20) % 6 {
                    0 => format!("SADD {set} m{n}-{pad}"),
                    1 => format!("SREM {set} m{n}-{pad}"),
                    2 => format!("SMOVE {set} {other} m{n}-{pad}"),
                    3 => format!("ZADD {zset} CH {} m{n}-{pad}", n * 2),
                    4 => format!("ZREM {zset} m{n}-{pad}"),
                    _ => format!("ZINCRBY {zset} 1 m{n}-{pad}"),
                };
                let reply = client.cmd(&line);
                assert!(!reply.starts_with('-'), "{reply}");
                match (state >> 20) % 6 {
                    0 => drop(members.insert(n, true)),
                    1 | 2 => drop(members.insert(n, false)),
                    3 => drop(scores.insert(n, Some(n as i64 * 2))),
                    4 => drop(scores.insert(n, None)),
                    _ => {
                        let score = scores.entry(n).or_default();
                        *score = Some(score.unwrap_or(0) + 1);
                        assert_eq!(reply, score.unwrap_or(0).to_string());
                    }
                }
            }
        });
        fleet.run_to_end(with(fleet.task(1, 0, 1), |order| order.how.goal = Goal::Balanced));
        stop.store(true, Ordering::Relaxed);
        writer.join().expect("no error");
    });
    let big = fleet.progress(1).big;
    assert_eq!((big.in_pieces, big.whole), (2, 0), "{big:?}");
    assert_eq!(client.cmd(&format!("SCARD {set}")), members.values().filter(|there| **there).count().to_string());
    assert_eq!(client.cmd(&format!("ZCARD {zset}")), scores.values().flatten().count().to_string());
    let ask = |client: &mut Client, command: &str, key: &str, numbers: &[usize]| -> Vec<String> {
        let line: Vec<String> = numbers.iter().map(|n| format!("m{n}-{pad}")).collect();
        let reply = client.cmd(&format!("{command} {key} {}", line.join(" ")));
        reply.trim_matches(['[', ']']).split(", ").map(str::to_owned).collect()
    };
    let numbers: Vec<usize> = members.keys().copied().collect();
    for some in numbers.chunks(500) {
        let expected: Vec<String> = some.iter().map(|n| u8::from(members[n]).to_string()).collect();
        assert_eq!(ask(&mut client, "SMISMEMBER", &set, some), expected);
    }
    let numbers: Vec<usize> = scores.keys().copied().collect();
    for some in numbers.chunks(500) {
        let expected: Vec<String> =
            some.iter().map(|n| scores[n].map_or_else(|| "(nil)".to_owned(), |score| score.to_string())).collect();
        assert_eq!(ask(&mut client, "ZMSCORE", &zset, some), expected);
    }
    no_temporary_keys(&fleet.servers[1]);
}

/// A key is deleted and recreated, expires, or changes its type during the copy. Its final state counts.
#[test]
fn keys_replaced_during_their_copy_keep_the_new_value() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    let names = ["again", "gone", "mortal", "other"];
    let keys: Vec<String> = names.iter().map(|name| key_of(&fleet, 0, name)).collect();
    for key in &keys {
        hash(&mut client, key, 30_000);
    }
    fleet.begin(with(fleet.task(1, 0, 1), |order| order.how.goal = Goal::Gentle));
    until("they are being copied", || fleet.progress(1).big.in_progress.iter().any(|big| big.copied > 0));
    assert_eq!(client.cmd(&format!("PEXPIRE {} 50", keys[2])), "1");
    assert_eq!(client.cmd(&format!("DEL {}", keys[0])), "1");
    assert_eq!(client.cmd(&format!("HSET {} field1 new", keys[0])), "1");
    assert_eq!(client.cmd(&format!("DEL {}", keys[1])), "1");
    assert_eq!(client.cmd(&format!("SET {} text", keys[3])), "OK");
    std::thread::sleep(Duration::from_millis(200));
    // The key has expired without a command, so none of its old fields may return.
    let reply = client.cmd(&format!("HSET {} field1 new", keys[2]));
    assert_eq!(reply, "1");
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    assert_eq!(client.cmd(&format!("HGETALL {}", keys[0])), "[field1, new]");
    assert_eq!(client.cmd(&format!("EXISTS {}", keys[1])), "0");
    assert_eq!(client.cmd(&format!("HGETALL {}", keys[2])), "[field1, new]");
    assert_eq!(client.cmd(&format!("GET {}", keys[3])), "text");
    no_temporary_keys(&fleet.servers[1]);
    assert_eq!(fleet.servers[1].client().cmd("DBSIZE"), "3");
}

/// A list under constant writes cannot be copied in pieces exactly. It moves whole, and this is reported.
#[test]
fn constantly_rewritten_lists_move_whole_and_are_reported() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    let key = key_of(&fleet, 0, "list");
    let count = 40_000_usize;
    pour(&mut client, count, |from, to| {
        ["RPUSH".to_owned(), key.clone()]
            .into_iter()
            .chain((from..to).map(|n| format!("{n}-{}", "x".repeat(60))))
            .collect()
    });
    let stop = AtomicBool::new(false);
    let pushed = std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut client = fleet.client();
            let mut pushed = 0;
            while !stop.load(Ordering::Relaxed) {
                pushed += 1;
                assert_eq!(client.cmd(&format!("RPUSH {key} last{pushed}")), (count + pushed).to_string());
            }
            pushed
        });
        fleet.run_to_end(with(fleet.task(1, 0, 1), |order| order.how.goal = Goal::Gentle));
        stop.store(true, Ordering::Relaxed);
        writer.join().expect("no error")
    });
    let big = fleet.progress(1).big;
    assert_eq!((big.in_pieces, big.whole), (0, 1), "{big:?}");
    assert!(big.whole_last.contains("a list of") && big.whole_last.contains("repeatedly replaced"), "{big:?}");
    assert_eq!(client.cmd(&format!("LLEN {key}")), (count + pushed).to_string());
    assert_eq!(client.cmd(&format!("LINDEX {key} -1")), format!("last{pushed}"));
    no_temporary_keys(&fleet.servers[1]);
}

/// After a crash of a node or the router during the copy, all acknowledged writes are present, and no staging key is
/// left.
#[test]
fn a_big_key_survives_crashes_of_nodes_and_router() {
    let durable = ["--appendonly", "yes", "--appendfsync", "always", "--no-appendfsync-on-rewrite", "no"];
    let mut state = 17_u64;
    for round in 0..6 {
        let mut fleet = Fleet::with(vec![Server::start(&durable), Server::start(&durable)]);
        let mut client = fleet.client();
        let key = key_of(&fleet, 0, "hash");
        hash(&mut client, &key, 20_000);
        fleet.begin_on_record(with(fleet.task(1, 0, 1), |order| {
            order.how.goal = Goal::Balanced;
            order.how.durability = Durability::Aof;
        }));
        // Under other load the move may have ended before this check.
        until("it is being copied", || {
            !fleet.progress(1).big.in_progress.is_empty() || fleet.progress(1).end.is_some()
        });
        for n in 0..200 {
            assert_eq!(client.cmd(&format!("HSET {key} field{n} new{n}")), "0");
        }
        // At a random time: during the copy of pieces, in the leg, or afterwards.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        std::thread::sleep(Duration::from_millis((state >> 33) % 400));
        match round % 3 {
            0 => fleet.servers[0].crash(&durable),
            1 => fleet.servers[1].crash(&durable),
            _ => {
                drop(client);
                fleet.restart();
            }
        }
        assert_eq!(fleet.wait_for(1), MoveEnd::Done, "round {round}");
        let mut client = fleet.client();
        // The router may not have reconnected to the restarted server yet.
        until("the key can be read", || client.cmd(&format!("HLEN {key}")) == "20000");
        let found = fields(&mut client, &key);
        assert_eq!(found.len(), 20_000, "round {round}");
        for n in 0..200 {
            assert_eq!(found[&format!("field{n}")], format!("new{n}"), "round {round}");
        }
        assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0", "round {round}");
        for server in &fleet.servers {
            no_temporary_keys(server);
        }
    }
}

#[test]
fn an_aborted_copy_is_invisible_and_leaves_no_key() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    let key = key_of(&fleet, 0, "hash");
    hash(&mut client, &key, 30_000);
    fleet.begin(with(fleet.task(1, 0, 1), |order| order.how.goal = Goal::Gentle));
    until("it is being copied", || fleet.progress(1).big.in_progress.iter().any(|big| big.copied > 0));
    assert_eq!(client.cmd("KEYS *"), format!("[{key}]"));
    assert_eq!(pages_of_keys(&mut client), std::slice::from_ref(&key));
    assert_eq!(client.cmd("RANDOMKEY"), key);
    assert_eq!(client.cmd("DBSIZE"), "1");
    assert_eq!(fleet.servers[1].client().cmd("DBSIZE"), "1", "its pieces are there");
    until("INFO knows it", || client.cmd("INFO keyspace").contains("db0:keys=1,expires=0,"));
    let under_way = fleet.progress(1).big.in_progress;
    assert!(under_way.iter().all(|big| big.restarts == 0), "to look is not to write: {under_way:?}");
    fleet.router().steer_move(MoveId(1), UserRequest::Abort);
    assert!(matches!(fleet.wait_for(1), MoveEnd::Stopped(_)));
    assert_eq!(client.cmd(&format!("HLEN {key}")), "30000");
    assert_eq!(fleet.servers[1].client().cmd("DBSIZE"), "0");
}

#[test]
fn a_full_target_returns_its_part_of_a_big_key() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    let key = key_of(&fleet, 0, "hash");
    hash(&mut client, &key, 30_000);
    fleet.begin(with(fleet.task(1, 0, 1), |order| order.how.goal = Goal::Gentle));
    until("it is being copied", || fleet.progress(1).big.in_progress.iter().any(|big| big.copied > 0));
    assert_eq!(fleet.servers[1].client().cmd("CONFIG SET maxmemory 1mb"), "OK");
    let MoveEnd::Stopped(why) = fleet.wait_for(1) else { panic!("it is full") };
    assert!(why.contains("OOM") || why.contains("room"), "{why}");
    assert_eq!(client.cmd(&format!("HSET {key} field0 new")), "0");
    assert_eq!(fields(&mut client, &key).len(), 30_000);
    assert_eq!(fleet.servers[1].client().cmd("DBSIZE"), "0");
    assert_eq!(fleet.servers[1].client().cmd("CONFIG SET maxmemory 0"), "OK");
    fleet.run_to_end(fleet.task(2, 0, 1));
    let found = fields(&mut client, &key);
    assert!(found.len() == 30_000 && found["field0"] == "new");
    assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
}

fn pages_of_keys(client: &mut Client) -> Vec<String> {
    let (mut cursor, mut all) = ("0".to_owned(), Vec::new());
    loop {
        let reply = client.cmd(&format!("SCAN {cursor}"));
        let (next, page) = reply[1..].split_once(", [").expect("a cursor and keys");
        all.extend(page.trim_end_matches(']').split(", ").filter(|e| !e.is_empty()).map(str::to_owned));
        next.clone_into(&mut cursor);
        if cursor == "0" {
            return all;
        }
    }
}

/// Staging keys of earlier routers are removed at both nodes, and belong to no slot.
#[test]
fn leftovers_of_a_crash_are_removed_by_the_next_move() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    fill(&mut client, 50);
    for server in &fleet.servers {
        for n in 0..50 {
            assert_eq!(server.client().cmd(&format!("SET switchyard:temporary:1-2:staging-9-{n} part EX 3600")), "OK");
        }
    }
    assert_eq!(client.cmd("KEYS switchyard:*"), "[]", "clients do not see them before, either");
    fleet.run_to_end(fleet.task(1, 0, 1));
    for server in &fleet.servers {
        no_temporary_keys(server);
    }
    all_there(&mut client, 50);
}

/// Every write to a staging key leaves it with a TTL, also if the key was removed before.
#[test]
fn staging_keys_always_expire() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    let key = key_of(&fleet, 0, "hash");
    hash(&mut client, &key, 30_000);
    let mut monitor = fleet.servers[1].client();
    assert_eq!(monitor.cmd("MONITOR"), "OK");
    fleet.begin(with(fleet.task(1, 0, 1), |order| order.how.goal = Goal::Gentle));
    until("it is being copied", || fleet.progress(1).big.in_progress.iter().any(|big| big.copied > 0));
    let mut target = fleet.servers[1].client();
    let staging = target.cmd("KEYS switchyard:*").replace(['[', ']'], "");
    assert_eq!(target.cmd(&format!("UNLINK {staging}")), "1");
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    assert_eq!(client.cmd(&format!("HLEN {key}")), "30000");
    assert_eq!(target.cmd("ECHO enough"), "enough");
    // The last command of each transaction on a staging key.
    let (mut last, mut transactions) = (None::<String>, 0);
    loop {
        let line = monitor.reply();
        let (is_over, begins) = (line.contains("\"enough\""), line.contains("\"MULTI\""));
        if is_over || begins {
            if let Some(last) = last.take() {
                assert!(
                    last.contains("\"PEXPIRE\"") || last.contains("\"UNLINK\""),
                    "{}",
                    &last[..last.len().min(200)]
                );
                transactions += 1;
            }
        } else if line.contains("\"switchyard:temporary:") && !line.contains("\"HLEN\"") {
            last = Some(line);
        }
        if is_over {
            break;
        }
    }
    assert!(transactions > 3, "it was copied in pieces: {transactions}");
}

#[test]
fn keys_flushed_during_their_copy_stay_deleted() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    let key = key_of(&fleet, 0, "hash");
    hash(&mut client, &key, 30_000);
    fleet.begin(with(fleet.task(1, 0, 1), |order| order.how.goal = Goal::Gentle));
    until("it is being copied", || fleet.progress(1).big.in_progress.iter().any(|big| big.copied > 0));
    assert_eq!(client.cmd("FLUSHALL"), "OK");
    assert_eq!(client.cmd(&format!("HSET {key} field1 new")), "1");
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    assert_eq!(client.cmd(&format!("HGETALL {key}")), "[field1, new]");
    no_temporary_keys(&fleet.servers[1]);
}

/// Writes past the router are not observed, so keys with direct clients are not copied in pieces.
#[test]
fn big_keys_move_whole_with_direct_clients() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    let key = key_of(&fleet, 0, "hash");
    hash(&mut client, &key, 20_000);
    fleet.run_to_end(with(fleet.task(1, 0, 1), |order| order.how.direct_clients = true));
    let big = fleet.progress(1).big;
    assert_eq!((big.in_pieces, big.whole), (0, 1), "{big:?}");
    assert!(big.whole_last.contains("directly"), "{big:?}");
    assert_eq!(client.cmd(&format!("HLEN {key}")), "20000");
}

/// The elements of a copy are counted before it is used. If some are missing, the key is read again, whole. A key of
/// the same name in another database is not read again, because it is already stored.
#[test]
fn an_incomplete_copy_is_not_used() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    let key = key_of(&fleet, 0, "hash");
    hash(&mut client, &key, 30_000);
    assert_eq!(client.cmd(&format!("PEXPIREAT {key} 4102444800123")), "1");
    assert_eq!(
        (client.cmd("SELECT 1"), client.cmd(&format!("SET {key} other")), client.cmd("SELECT 0")),
        ("OK".into(), "OK".into(), "OK".into())
    );
    fleet.begin(with(fleet.task(1, 0, 1), |order| order.how.goal = Goal::Gentle));
    until("it is being copied", || fleet.progress(1).big.in_progress.iter().any(|big| big.copied > 0));
    let mut target = fleet.servers[1].client();
    let staging = target.cmd("KEYS switchyard:*").replace(['[', ']'], "");
    let field = target.cmd(&format!("HRANDFIELD {staging}"));
    assert_eq!(target.cmd(&format!("HDEL {staging} {field}")), "1");
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    let big = fleet.progress(1).big;
    assert_eq!((big.in_pieces, big.whole), (0, 1), "{big:?}");
    assert!(big.whole_last.contains("elements"), "{big:?}");
    assert_eq!(client.cmd(&format!("HLEN {key}")), "30000");
    assert_eq!(client.cmd(&format!("PEXPIRETIME {key}")), "4102444800123");
    no_temporary_keys(&fleet.servers[1]);
    assert_eq!((client.cmd("SELECT 1"), client.cmd(&format!("GET {key}"))), ("OK".into(), "other".into()));
    assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
}
