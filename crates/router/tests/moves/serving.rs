//! Moves without faults: all kinds of commands while keys move.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use switchyard_policy::migration::{Goal, Protocol};
use switchyard_policy::topology::{MoveId, crc16_slot};
use switchyard_router::MoveEnd;

use super::fleet::{Client, Fleet, Server, all_there, fill, until, with};

#[test]
fn every_type_ttl_and_database_arrives() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    for n in 0..40 {
        for line in [
            format!("SET {{{n}}}string value{n}"),
            format!("SET {{{n}}}mortal value EX 1000"),
            format!("RPUSH {{{n}}}list a b c"),
            format!("HSET {{{n}}}hash f v g w"),
            format!("SADD {{{n}}}set 1 2 3"),
            format!("ZADD {{{n}}}zset 1 a 2 b"),
            format!("XADD {{{n}}}stream 1-1 f v"),
            format!("PFADD {{{n}}}hll a b c"),
            format!("SETBIT {{{n}}}bits 1000 1"),
        ] {
            assert!(!client.cmd(&line).starts_with('-'), "{line}");
        }
    }
    assert_eq!(client.cmd("SELECT 3"), "OK");
    for n in 0..40 {
        assert_eq!(client.cmd(&format!("SET {{{n}}}string other{n}")), "OK");
    }
    assert_eq!(client.cmd("SELECT 0"), "OK");
    let look = |client: &mut Client| -> Vec<String> {
        let mut seen = Vec::new();
        for n in 0..40 {
            for line in [
                format!("GET {{{n}}}string"),
                format!("LRANGE {{{n}}}list 0 -1"),
                format!("HGETALL {{{n}}}hash"),
                format!("SCARD {{{n}}}set"),
                format!("ZRANGE {{{n}}}zset 0 -1 WITHSCORES"),
                format!("XRANGE {{{n}}}stream - +"),
                format!("PFCOUNT {{{n}}}hll"),
                format!("GETBIT {{{n}}}bits 1000"),
                format!("PEXPIRETIME {{{n}}}mortal"),
            ] {
                seen.push(client.cmd(&line));
            }
        }
        seen
    };
    let before = look(&mut client);
    fleet.run_to_end(fleet.task(1, 0, 1));
    assert_eq!(look(&mut client), before);
    assert_eq!(client.cmd("SELECT 3"), "OK");
    for n in 0..40 {
        assert_eq!(client.cmd(&format!("GET {{{n}}}string")), format!("other{n}"));
    }
    assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
    assert!(fleet.slots_of(fleet.node(0)).is_empty());
    assert!(fleet.progress(1).keys_moved > 0);
    // Back to the first node.
    fleet.run_to_end(fleet.task(2, 1, 0));
    assert_eq!(client.cmd("SELECT 0"), "OK");
    assert_eq!(look(&mut client), before);
}

/// If nearly all keys are strings, they are read by GET and stored by SET. Other types, TTLs, and empty or binary
/// values must arrive unchanged, and the nodes must have received these commands.
#[test]
fn strings_move_as_strings_and_other_types_unchanged() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    let awkward: [&[u8]; 5] = [b"", b"-WRONGTYPE", b"\r\n$-1\r\n", b"-9223372036854775808", &[0, 255, 13, 10, 0]];
    for n in 0..4000 {
        let (key, value) = (format!("s{n}"), awkward[n % awkward.len()]);
        client.send(&[b"SET", key.as_bytes(), value]);
        assert_eq!(client.reply(), "OK");
        if n % 50 == 0 {
            assert_eq!(client.cmd(&format!("RPUSH l{n} a {n}")), "2");
        }
        if n % 7 == 0 {
            assert_eq!(client.cmd(&format!("PEXPIRE s{n} {}", 1_000_000 + n)), "1");
        }
    }
    let look = |client: &mut Client| -> Vec<String> {
        let of = |n: usize| {
            [
                format!("GET s{n}"),
                format!("PEXPIRETIME s{n}"),
                format!("LRANGE l{n} 0 -1"),
                format!("OBJECT ENCODING s{n}"),
            ]
        };
        (0..4000).flat_map(of).map(|line| client.cmd(&line)).collect()
    };
    let before = look(&mut client);
    fleet.servers[0].client().cmd("CONFIG RESETSTAT");
    fleet.run_to_end(with(fleet.task(1, 0, 1), |order| order.how.goal = Goal::Fast));
    let calls = |server: usize, name: &str| {
        let all = fleet.servers[server].client().cmd("INFO commandstats");
        let counted = all.split_once(&format!("cmdstat_{name}:calls=")).map_or("0", |(_, rest)| rest);
        counted.split(',').next().and_then(|n| n.parse::<u64>().ok()).expect("a number")
    };
    // About 2000 keys, nearly all moved in multi-key commands.
    assert!(calls(0, "mget") > 20 && calls(0, "get") < 200 && calls(0, "dump") < 500 && calls(0, "pexpiretime") > 1000);
    assert!(calls(1, "msetnx") > 20 && calls(1, "restore") > 10);
    assert_eq!(look(&mut client), before);
    assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
}

/// If one of the keys stored together already exists at the target, and the move did not store it, no client's value is
/// lost.
#[test]
fn an_existing_key_at_the_target_replaces_no_moved_key() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    fill(&mut client, 4000);
    let mut target = fleet.servers[1].client();
    let slots = fleet.slots_of(fleet.node(0));
    let of_source = |n: &usize| slots.contains(&switchyard_policy::topology::crc16_slot(format!("{{{n}}}").as_bytes()));
    let planted: Vec<usize> = (0..4000).filter(of_source).step_by(100).collect();
    let end = fleet.interrupt(fleet.task(1, 0, 1), || {
        // Past the router.
        planted.iter().for_each(|n| assert_eq!(target.cmd(&format!("SET {{{n}}} planted")), "OK"));
    });
    let MoveEnd::Stopped(why) = end else { panic!("the target has other keys") };
    assert!(why.contains("did not store"), "{why}");
    all_there(&mut client, 4000);
    assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), (0..4000).filter(of_source).count().to_string());
}

/// At the drain, no key has a TTL. Direct clients, where allowed, may set one later.
#[test]
fn a_ttl_set_by_a_direct_client_is_preserved() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    fill(&mut client, 400);
    let mut source = fleet.servers[0].client();
    let mut given = Vec::new();
    let end = fleet.interrupt(with(fleet.task(1, 0, 1), |order| order.how.direct_clients = true), || {
        given = (0..400).filter(|n| source.cmd(&format!("EXPIRE {{{n}}} 10000")) == "1").collect();
    });
    assert_eq!((end, given.len() > 100), (MoveEnd::Done, true));
    for n in given {
        let left: i64 = client.cmd(&format!("TTL {{{n}}}")).parse().expect("a number");
        assert!((1..=10_000).contains(&left), "key {n}: {left}");
    }
}

/// Counters, lists and transactions while all slots move back and forth: every acknowledged change is applied once,
/// without errors.
#[test]
fn clients_see_no_error_and_no_lost_write_during_moves() {
    let fleet = Fleet::new(2);
    let stop = AtomicBool::new(false);
    let moves = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let mut workers = Vec::new();
        for number in 0..6_u64 {
            let (fleet, stop) = (&fleet, &stop);
            workers.push(scope.spawn(move || {
                let mut client = fleet.client();
                let mut counts = vec![0_u64; 200];
                let mut state = number * 7919 + 1;
                let mut rounds = 0_u64;
                while !stop.load(Ordering::Relaxed) || rounds < 200 {
                    rounds += 1;
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let place = (state >> 33) as usize % counts.len();
                    let key = format!("{{w{number}:{place}}}");
                    match (state >> 20) % 6 {
                        0 | 1 => {
                            counts[place] += 1;
                            assert_eq!(client.cmd(&format!("INCR {key}")), counts[place].to_string());
                        }
                        2 => {
                            let expected =
                                if counts[place] == 0 { "(nil)".to_owned() } else { counts[place].to_string() };
                            assert_eq!(client.cmd(&format!("GET {key}")), expected);
                        }
                        3 => {
                            assert_eq!(client.cmd("MULTI"), "OK");
                            assert_eq!(client.cmd(&format!("INCR {key}")), "QUEUED");
                            assert_eq!(client.cmd(&format!("SET {key}copy x")), "QUEUED");
                            counts[place] += 1;
                            assert_eq!(client.cmd("EXEC"), format!("[{}, OK]", counts[place]));
                        }
                        4 => {
                            counts[place] += 2;
                            client.send(&[
                                b"EVAL",
                                b"redis.call('INCR', KEYS[1]) return redis.call('INCR', KEYS[1])",
                                b"1",
                                key.as_bytes(),
                            ]);
                            assert_eq!(client.reply(), counts[place].to_string());
                        }
                        _ => {
                            // A pipeline: its replies are in order, and its writes are visible.
                            client.post(&format!("INCR {key}"));
                            client.post(&format!("GET {key}"));
                            client.post(&format!("DEL {key}copy"));
                            counts[place] += 1;
                            assert_eq!(client.reply(), counts[place].to_string());
                            assert_eq!(client.reply(), counts[place].to_string());
                            assert!(["0", "1"].contains(&client.reply().as_str()));
                        }
                    }
                }
                for (place, count) in counts.iter().enumerate() {
                    let expected = if *count == 0 { "(nil)".to_owned() } else { count.to_string() };
                    assert_eq!(client.cmd(&format!("GET {{w{number}:{place}}}")), expected);
                }
            }));
        }
        for id in 1..=4 {
            let (from, to) = if id % 2 == 1 { (0, 1) } else { (1, 0) };
            fleet.begin(fleet.task(id, from, to));
            assert_eq!(fleet.wait_for(id), MoveEnd::Done);
            moves.fetch_add(fleet.progress(id).keys_moved, Ordering::Relaxed);
        }
        stop.store(true, Ordering::Relaxed);
        for worker in workers {
            worker.join().expect("no client saw an error");
        }
    });
    assert!(moves.load(Ordering::Relaxed) > 0);
}

#[test]
fn blocked_clients_get_their_element_during_moves() {
    let fleet = Fleet::new(2);
    // One key per node, so that both directions are covered.
    let mut waiting: Vec<(String, Client)> = (0..20)
        .map(|n| {
            let mut client = fleet.client();
            client.post(&format!("BLPOP {{q{n}}}list 30"));
            (format!("{{q{n}}}list"), client)
        })
        .collect();
    std::thread::sleep(Duration::from_millis(100));
    fleet.run_to_end(fleet.task(1, 0, 1));
    let mut pusher = fleet.client();
    for (key, client) in &mut waiting {
        assert_eq!(pusher.cmd(&format!("RPUSH {key} element")), "1");
        assert_eq!(client.reply(), format!("[{key}, element]"));
        assert_eq!(pusher.cmd(&format!("LLEN {key}")), "0");
    }
    // The timeout of the command still applies.
    let mut impatient = fleet.client();
    impatient.post("BLPOP {short}list 1");
    fleet.run_to_end(fleet.task(2, 1, 0));
    assert_eq!(impatient.reply(), "(nil)");
}

#[test]
fn a_watch_does_not_survive_the_hand_over_of_its_slot() {
    let fleet = Fleet::new(2);
    let mut clients: Vec<Client> = (0..8).map(|_| fleet.client()).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        assert_eq!(client.cmd(&format!("SET {{k{n}}} 1")), "OK");
        assert_eq!(client.cmd(&format!("WATCH {{k{n}}}")), "OK");
    }
    fleet.run_to_end(fleet.task(1, 0, 1));
    let mut other = fleet.client();
    for (n, client) in clients.iter_mut().enumerate() {
        assert_eq!(other.cmd(&format!("SET {{k{n}}} 2")), "OK");
        assert_eq!(client.cmd("MULTI"), "OK");
        assert_eq!(client.cmd(&format!("SET {{k{n}}} 3")), "QUEUED");
        assert_eq!(client.cmd("EXEC"), "(nil)");
        assert_eq!(client.cmd(&format!("GET {{k{n}}}")), "2");
    }
}

/// The key moves back and forth: its node has not seen the changes made elsewhere.
#[test]
fn a_watch_does_not_survive_a_round_trip_of_its_key() {
    let fleet = Fleet::new(2);
    let mut clients: Vec<Client> = (0..8).map(|_| fleet.client()).collect();
    for (n, client) in clients.iter_mut().enumerate() {
        assert_eq!(client.cmd(&format!("WATCH {{k{n}}}")), "OK");
    }
    let mut other = fleet.client();
    fleet.run_to_end(fleet.task(1, 0, 1));
    for n in 0..clients.len() {
        assert_eq!(other.cmd(&format!("SET {{k{n}}} 1")), "OK");
        assert_eq!(other.cmd(&format!("DEL {{k{n}}}")), "1");
    }
    fleet.run_to_end(fleet.task(2, 1, 0));
    for (n, client) in clients.iter_mut().enumerate() {
        assert_eq!(client.cmd("MULTI"), "OK");
        assert_eq!(client.cmd(&format!("SET {{k{n}}} 3")), "QUEUED");
        assert_eq!(client.cmd("EXEC"), "(nil)");
        assert_eq!(client.cmd(&format!("GET {{k{n}}}")), "(nil)");
        // Afterwards WATCH works normally.
        assert_eq!((client.cmd(&format!("WATCH {{k{n}}}")), client.cmd("MULTI")), ("OK".to_owned(), "OK".to_owned()));
        assert_eq!(client.cmd(&format!("SET {{k{n}}} 4")), "QUEUED");
        assert_eq!(client.cmd("EXEC"), "[OK]");
    }
}

#[test]
fn a_scan_misses_no_key_that_exists_throughout() {
    let fleet = Fleet::new(3);
    let mut client = fleet.client();
    fill(&mut client, 3000);
    for (id, (from, to)) in (1..).zip([(2, 0), (0, 1), (1, 2), (2, 1), (1, 0)]) {
        let mut seen = std::collections::BTreeSet::new();
        let mut cursor = "0".to_owned();
        let mut steps = 0;
        loop {
            let reply = client.cmd(&format!("SCAN {cursor} COUNT 50"));
            let pair = reply
                .strip_prefix('[')
                .and_then(|reply| reply.strip_suffix("]]"))
                .and_then(|reply| reply.split_once(", ["));
            let (next, keys) = pair.unwrap_or_else(|| panic!("step {steps}, cursor {cursor}: {reply}"));
            seen.extend(keys.split(", ").filter(|k| !k.is_empty()).map(str::to_owned));
            cursor = next.to_owned();
            steps += 1;
            if steps == 20 {
                fleet.begin(with(fleet.task(id, from, to), |order| order.how.goal = Goal::Gentle));
            }
            if cursor == "0" {
                break;
            }
            assert!(steps < 100_000, "it ends: {cursor} {:?}", fleet.progress(id));
            std::thread::sleep(Duration::from_millis(1));
        }
        let missed: Vec<usize> = (0..3000).filter(|n| !seen.contains(&format!("{{{n}}}"))).collect();
        assert_eq!(missed, [] as [usize; 0], "move {id} from {from} to {to}");
        fleet.router().steer_move(MoveId(id), switchyard_router::UserRequest::Goal(Goal::Fast));
        assert_eq!(fleet.wait_for(id), MoveEnd::Done);
    }
}

/// More moves than fit into eight bits, one slot each, while clients scan; some slots move repeatedly.
#[test]
fn hundreds_of_moves_during_one_scan_cost_it_no_key() {
    let fleet = Fleet::new(3);
    let mut client = fleet.client();
    fill(&mut client, 1000);
    let mut seen = std::collections::BTreeSet::new();
    let (mut cursor, mut moves) = ("0".to_owned(), 0);
    loop {
        let reply = client.cmd(&format!("SCAN {cursor} COUNT 10"));
        let pair = reply
            .strip_prefix('[')
            .and_then(|reply| reply.strip_suffix("]]"))
            .and_then(|reply| reply.split_once(", ["));
        let (next, keys) = pair.unwrap_or_else(|| panic!("after {moves} moves, cursor {cursor}: {reply}"));
        seen.extend(keys.split(", ").filter(|k| !k.is_empty()).map(str::to_owned));
        cursor = next.to_owned();
        if cursor == "0" {
            break;
        }
        for _ in 0..if moves < 300 { 6 } else { 1 } {
            moves += 1;
            let (from, to) = [(2, 0), (0, 1), (1, 2), (0, 2), (1, 0), (2, 1)][moves as usize % 6];
            // Among the slots with keys: alternately one of the first few, and a new one.
            let nth = if moves % 2 == 0 { moves % 7 } else { moves };
            let of = |n: &usize| {
                fleet.slots_of(fleet.node(from)).binary_search(&crc16_slot(format!("{{{n}}}").as_bytes())).is_ok()
            };
            let Some(n) = (0..1000).filter(of).nth(nth as usize % 200) else { continue };
            let slots = vec![crc16_slot(format!("{{{n}}}").as_bytes())];
            fleet.begin(with(fleet.task(moves, from, to), |order| order.slots = slots));
            assert_eq!(fleet.wait_for(moves), MoveEnd::Done);
        }
        assert!(moves < 3000, "it ends");
    }
    let missed: Vec<usize> = (0..1000).filter(|n| !seen.contains(&format!("{{{n}}}"))).collect();
    assert_eq!(missed, [] as [usize; 0], "after {moves} moves");
    assert!(moves > 300, "{moves} moves");
}

#[test]
fn a_flush_in_the_middle_leaves_nothing() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    // Large enough that some keys are always read at one node and not yet stored at the other.
    let value = vec![b'x'; 200_000];
    for id in 1..=8 {
        for n in 0..150 {
            client.send(&[b"SET", format!("{{{n}}}").as_bytes(), &value]);
            assert_eq!(client.reply(), "OK");
        }
        let (from, to) = if id % 2 == 1 { (0, 1) } else { (1, 0) };
        fleet.begin(fleet.task(id, from, to));
        until("some keys have moved", || fleet.progress(id).bytes_moved > 0);
        assert_eq!(client.cmd("FLUSHALL"), "OK");
        assert_eq!(client.cmd("DBSIZE"), "0");
        assert_eq!(fleet.wait_for(id), MoveEnd::Done);
        assert_eq!(client.cmd("DBSIZE"), "0");
    }
}

/// DBSIZE and KEYS count each key once, wherever it is in transit, and do not delay the end of a move.
#[test]
fn every_key_is_counted_once_while_it_moves() {
    const KEYS: usize = 20_000;
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    for first in (0..KEYS).step_by(500) {
        let pairs: String = (first..first + 500).map(|n| format!(" k{n} v")).collect();
        assert_eq!(client.cmd(&format!("MSET{pairs}")), "OK");
    }
    for (id, protocol) in [(1, Protocol::Switchyard), (2, Protocol::StopAndCopy)] {
        let (from, to) = if id == 1 { (0, 1) } else { (1, 0) };
        fleet.begin(with(fleet.task(id, from, to), |order| {
            order.how.goal = Goal::Balanced;
            order.how.protocol = protocol;
        }));
        let mut looks = 0;
        while fleet.progress(id).end.is_none() {
            assert_eq!(client.cmd("DBSIZE"), KEYS.to_string(), "move {id}, look {looks}");
            let reply = client.cmd("KEYS k*");
            let keys: Vec<&str> = reply.trim_matches(['[', ']']).split(", ").collect();
            let names: std::collections::HashSet<&str> = keys.iter().copied().collect();
            assert_eq!((keys.len(), names.len()), (KEYS, KEYS), "move {id}, look {looks}");
            looks += usize::from(fleet.progress(id).keys_moved > 0);
        }
        assert_eq!(fleet.wait_for(id), MoveEnd::Done);
        assert!(looks > 0, "it is looked while keys move");
    }
}

#[test]
fn the_migrate_command_moves_the_same_keys() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    fill(&mut client, 1000);
    fleet.run_to_end(with(fleet.task(1, 0, 1), |order| order.how.protocol = Protocol::StopAndCopy));
    all_there(&mut client, 1000);
    assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
}

#[test]
fn no_message_on_a_shard_channel_is_missed() {
    let fleet = Fleet::new(2);
    let mut subscribers: Vec<Client> = (0..8).map(|_| fleet.client()).collect();
    for (n, subscriber) in subscribers.iter_mut().enumerate() {
        assert!(subscriber.cmd(&format!("SSUBSCRIBE {{c{n}}}")).starts_with("[ssubscribe"));
    }
    let stop = AtomicBool::new(false);
    let published = std::thread::scope(|scope| {
        let publisher = scope.spawn(|| {
            let mut client = fleet.client();
            let mut count = 0_u64;
            while !stop.load(Ordering::Relaxed) {
                count += 1;
                for n in 0..8 {
                    assert_eq!(client.cmd(&format!("SPUBLISH {{c{n}}} {count}")), "1");
                }
            }
            count
        });
        fill(&mut fleet.client(), 500);
        for id in 1..=4 {
            let (from, to) = if id % 2 == 1 { (0, 1) } else { (1, 0) };
            fleet.begin(fleet.task(id, from, to));
            assert_eq!(fleet.wait_for(id), MoveEnd::Done);
        }
        stop.store(true, Ordering::Relaxed);
        publisher.join().expect("published")
    });
    for (n, subscriber) in subscribers.iter_mut().enumerate() {
        // At a hand-over, messages come from two nodes over separate connections, without a common order.
        let heard: BTreeSet<String> = (0..published).map(|_| subscriber.reply()).collect();
        let expected: BTreeSet<String> =
            (1..=published).map(|count| format!("[smessage, {{c{n}}}, {count}]")).collect();
        assert!(heard == expected, "missed: {:?}", expected.difference(&heard).take(10).collect::<Vec<_>>());
    }
}

#[test]
fn subscribers_to_keyspace_events_do_not_see_a_move() {
    let events = ["--notify-keyspace-events", "KEA"];
    let fleet = Fleet::with(vec![Server::start(&events), Server::start(&events)]);
    let mut client = fleet.client();
    fill(&mut client, 500);
    let mut subscriber = fleet.client();
    assert!(subscriber.cmd("PSUBSCRIBE __key*__:*").starts_with("[psubscribe"));
    fleet.run_to_end(fleet.task(1, 0, 1));
    assert_eq!(client.cmd("DEL {7}"), "1");
    let seen = [subscriber.reply(), subscriber.reply()];
    assert_eq!(
        seen,
        ["[pmessage, __key*__:*, __keyspace@0__:{7}, del]", "[pmessage, __key*__:*, __keyevent@0__:del, {7}]"]
    );
}

#[test]
fn moves_work_with_node_passwords() {
    let options = ["--requirepass", "secret"];
    let fleet = Fleet::with_password(vec![Server::start(&options), Server::start(&options)], Some("secret"));
    let mut client = fleet.client();
    fill(&mut client, 300);
    fleet.run_to_end(fleet.task(1, 0, 1));
    all_there(&mut client, 300);
}

#[test]
fn clients_blocked_at_a_stream_end_get_the_next_entry() {
    let fleet = Fleet::new(2);
    for id in 1..=4 {
        let mut readers: Vec<Client> = (0..60)
            .map(|n| {
                let mut client = fleet.client();
                client.post(&format!("XREAD BLOCK 20000 STREAMS {{x{n}}} $"));
                client
            })
            .collect();
        let waiting = |server: &Server| {
            let info = server.client().cmd("INFO clients");
            info.split("blocked_clients:")
                .nth(1)
                .and_then(|rest| rest.split('\\').next()?.parse::<usize>().ok())
                .expect("a number")
        };
        until("all of them wait", || fleet.servers.iter().map(waiting).sum::<usize>() == 60);
        std::thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut client = fleet.client();
                for n in 0..60 {
                    assert_eq!(client.cmd(&format!("XADD {{x{n}}} {id}-1 f v")), format!("{id}-1"));
                }
            });
            let (from, to) = if id % 2 == 1 { (0, 1) } else { (1, 0) };
            fleet.begin(fleet.task(id, from, to));
            assert_eq!(fleet.wait_for(id), MoveEnd::Done);
            writer.join().expect("added");
        });
        for (n, reader) in readers.iter_mut().enumerate() {
            assert_eq!(reader.reply(), format!("[[{{x{n}}}, [[{id}-1, [f, v]]]]]"));
        }
    }
}

/// A script creates an undeclared key while a leg is about to start: after the check of its list of keys, and before
/// the drain.
#[test]
fn undeclared_keys_written_before_the_drain_move_with_the_leg() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    let task = fleet.task(1, 0, 1);
    let tag = (0..)
        .map(|n| format!("t{n}"))
        .find(|tag| task.order.slots.contains(&crc16_slot(tag.as_bytes())))
        .expect("a tag");
    assert_eq!(client.cmd(&format!("SET {{{tag}}} value")), "OK");
    fleet.keeper.stuck.store(true, Ordering::SeqCst);
    fleet.begin(with(task, |order| order.slots = vec![crc16_slot(tag.as_bytes())]));
    until("a leg is being put on record", || fleet.keeper.is_stuck.load(Ordering::SeqCst));
    let key = format!("{{{tag}}}");
    client.send(&[b"EVAL", b"return redis.call('SET', KEYS[1] .. ':unnamed', 'value')", b"1", key.as_bytes()]);
    assert_eq!(client.reply(), "OK");
    fleet.keeper.stuck.store(false, Ordering::SeqCst);
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    assert_eq!(client.cmd(&format!("GET {key}:unnamed")), "value");
    assert_eq!(
        fleet.progress(1).late,
        switchyard_router::LateKeys::default(),
        "until it was found late, clients did not find it"
    );
}

/// An element cursor is only valid at one server.
#[test]
fn element_scans_of_a_moving_key_miss_no_element() {
    const ELEMENTS: usize = 5000;
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    for first in (0..ELEMENTS).step_by(500) {
        let of = |make: fn(usize) -> String| (first..first + 500).map(make).collect::<String>();
        client.cmd(&format!("HSET {{v}}hash{}", of(|n| format!(" f{n} v"))));
        client.cmd(&format!("SADD {{v}}set{}", of(|n| format!(" f{n}"))));
        client.cmd(&format!("ZADD {{v}}zset{}", of(|n| format!(" {n} f{n}"))));
    }
    let mut at = usize::from(fleet.servers[0].client().cmd("EXISTS {v}hash") == "0");
    for (id, (command, key)) in
        [("HSCAN", "{v}hash"), ("SSCAN", "{v}set"), ("ZSCAN", "{v}zset")].into_iter().enumerate()
    {
        let (mut cursor, mut pages) = ("0".to_owned(), 0);
        let mut found = std::collections::HashSet::new();
        loop {
            let page = client.cmd(&format!("{command} {key} {cursor} COUNT 100"));
            let (next, elements) = page.trim_start_matches('[').split_once(", [").expect("a page");
            found.extend(
                elements
                    .trim_end_matches(']')
                    .split(", ")
                    .filter(|element| element.starts_with('f'))
                    .map(str::to_owned),
            );
            cursor = next.to_owned();
            pages += 1;
            assert!(cursor.parse::<i64>().is_ok() && pages < 1000, "{cursor}");
            if pages == 20 {
                fleet.run_to_end(fleet.task(id as u64 + 1, at, 1 - at));
                at = 1 - at;
            }
            if cursor == "0" {
                break;
            }
        }
        assert!(pages > 20);
        assert_eq!(found.len(), ELEMENTS, "{command}");
    }
    assert_eq!(client.cmd("HSCAN {v}hash x"), "-ERR invalid cursor");
}
