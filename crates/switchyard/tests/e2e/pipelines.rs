//! Many commands in flight: each client gets the replies to its own commands in order, despite failures.

use std::io::Write;
use std::net::Shutdown;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::support::relay::Relay;
use crate::support::{
    Client, Node, Random, RouterOptions, Site, SiteOptions, Value, bulk, direct, encode, int, ok, until, value, words,
};

#[test]
fn a_pipeline_of_two_hundred_thousand_commands_keeps_its_order() {
    let site = Site::new(3);
    let mut client = site.client();
    let n = 100_000;
    let mut bytes = Vec::new();
    for i in 0..n {
        bytes.extend(encode(&["SET", &format!("key{i}"), &format!("value{i}")]));
    }
    for i in 0..n {
        bytes.extend(encode(&["GET", &format!("key{i}")]));
    }
    let replies = client.pipeline(&bytes, 2 * n);
    for (i, raw) in replies.iter().enumerate() {
        if i < n {
            assert_eq!(raw, b"+OK\r\n", "command {i}");
        } else {
            assert_eq!(value::parse(raw), bulk(format!("value{}", i - n)), "command {i}");
        }
    }
}

/// `redis-cli --pipe` and other programs write everything before they read.
#[test]
fn a_client_may_write_its_whole_pipeline_before_it_reads() {
    let site = Site::new(3);
    let mut client = site.client();
    let n = 50_000;
    let bytes: Vec<u8> = (0..n).flat_map(|i| encode(&["SET", &format!("key{i}"), "v"])).collect();
    client.write(&bytes);
    for i in 0..n {
        assert_eq!(client.raw(), b"+OK\r\n", "reply {i}");
    }
    assert_eq!(client.cmd("DBSIZE"), int(n));
}

#[test]
fn counters_count_every_command_once() {
    let site = Site::new(3);
    std::thread::scope(|scope| {
        for thread in 0..8 {
            let mut client = site.client();
            scope.spawn(move || {
                let n = 5000;
                let bytes: Vec<u8> = (0..n).flat_map(|i| encode(&["INCR", &format!("counter{}", i % 50)])).collect();
                for raw in client.pipeline(&bytes, n) {
                    assert_eq!(raw[0], b':', "thread {thread}: {}", raw.escape_ascii());
                }
            });
        }
    });
    let mut client = site.client();
    for i in 0..50 {
        assert_eq!(client.cmd(&format!("GET counter{i}")), bulk("800"));
    }
}

/// Counts of one client thread.
#[derive(Default)]
struct Tally {
    right: u64,
    errors: u64,
    reconnects: u64,
}

/// One client: writes values that contain their author and a sequence number, and checks every reply. It owns its keys,
/// so it knows every correct reply. After an error, a key has one of the possible values. After it has cut its own
/// connection it continues with new keys, because its earlier commands may still be executed at any time.
fn checked_client(address: std::net::SocketAddr, me: usize, seed: u64, stop: &AtomicBool, cuts: bool) -> Tally {
    let mut random = Random::new(seed);
    let mut tally = Tally::default();
    let mut seq = 0u64;
    let mut life = 0u64;
    // For each key: its possible values.
    let mut may: Vec<Vec<Option<String>>> = vec![vec![None]; 20];
    let mut client: Option<Client> = None;
    while !stop.load(Ordering::Relaxed) {
        if client.is_none() {
            tally.reconnects += 1;
            client = Client::try_connect(address).ok();
            if client.is_none() {
                std::thread::sleep(Duration::from_millis(5));
                continue;
            }
        }
        let connection = client.as_mut().expect("just connected");
        connection.timeout(Duration::from_secs(30));
        enum Expected {
            Set(usize, String),
            Get(usize),
            Pair(usize, usize),
            Echo(String),
        }
        let mut asked = Vec::new();
        let mut bytes = Vec::new();
        for _ in 0..1 + random.below(40) {
            let key = random.below(may.len());
            let name = |key: usize| format!("c{me}:{life}:{key}");
            match random.below(10) {
                0..4 => {
                    seq += 1;
                    // Sometimes a value that exceeds one read of the socket.
                    let filler = if random.one_in(60) { 40_000 } else { random.below(100) };
                    let value = format!("{me}:{seq}:{}", "x".repeat(filler));
                    bytes.extend(encode(&["SET", &name(key), &value]));
                    asked.push(Expected::Set(key, value));
                }
                4..8 => {
                    bytes.extend(encode(&["GET", &name(key)]));
                    asked.push(Expected::Get(key));
                }
                8 => {
                    let other = random.below(may.len());
                    bytes.extend(encode(&["MGET", &name(key), &name(other)]));
                    asked.push(Expected::Pair(key, other));
                }
                _ => {
                    seq += 1;
                    let text = format!("{me}:{seq}");
                    bytes.extend(encode(&["ECHO", &text]));
                    asked.push(Expected::Echo(text));
                }
            }
        }
        let cut_here = cuts && random.one_in(12);
        let sent = if cut_here {
            let part = random.below(bytes.len() + 1);
            let sent = connection.stream().write_all(&bytes[..part]);
            if random.one_in(2) {
                let _ = connection.stream().shutdown(Shutdown::Both);
            }
            sent
        } else {
            connection.stream().write_all(&bytes)
        };
        let mut lost = sent.is_err();
        for ask in asked {
            let reply = if lost || cut_here {
                None
            } else {
                match connection.try_reply() {
                    Ok(reply) => Some(reply),
                    Err(_) => {
                        lost = true;
                        None
                    }
                }
            };
            let fits = |may: &Vec<Option<String>>, got: &Value| match got {
                Value::Nil => may.contains(&None),
                Value::Bulk(b) => may.iter().flatten().any(|v| v.as_bytes() == b),
                _ => false,
            };
            match (ask, reply) {
                (Expected::Set(key, value), Some(reply)) => {
                    if reply == ok() {
                        may[key] = vec![Some(value)];
                        tally.right += 1;
                    } else {
                        assert!(reply.error().is_some(), "client {me}: SET gave {reply:?}");
                        may[key].push(Some(value));
                        tally.errors += 1;
                    }
                }
                (Expected::Set(key, value), None) => may[key].push(Some(value)),
                (Expected::Get(key), Some(reply)) => {
                    if reply.error().is_some() {
                        tally.errors += 1;
                    } else {
                        assert!(
                            fits(&may[key], &reply),
                            "client {me}: GET of key {key} gave {reply:?}, possible: {:?}",
                            brief(&may[key])
                        );
                        tally.right += 1;
                    }
                }
                (Expected::Pair(a, b), Some(reply)) => {
                    if reply.error().is_some() {
                        tally.errors += 1;
                    } else {
                        let items = reply.items();
                        assert_eq!(items.len(), 2, "client {me}: {reply:?}");
                        assert!(
                            fits(&may[a], &items[0]),
                            "client {me}: MGET of {a} gave {:?}, possible: {:?}",
                            items[0],
                            brief(&may[a])
                        );
                        assert!(
                            fits(&may[b], &items[1]),
                            "client {me}: MGET of {b} gave {:?}, possible: {:?}",
                            items[1],
                            brief(&may[b])
                        );
                        tally.right += 1;
                    }
                }
                (Expected::Echo(text), Some(reply)) => {
                    assert_eq!(reply, bulk(&text), "client {me}");
                    tally.right += 1;
                }
                (_, None) => {}
            }
        }
        if lost || cut_here {
            client = None;
            life += 1;
            may.fill(vec![None]);
        }
    }
    tally
}

fn brief(may: &[Option<String>]) -> Vec<String> {
    may.iter().map(|v| v.as_deref().map_or("nil".to_owned(), |v| v.chars().take(30).collect())).collect()
}

/// Every reply must belong to its request while connections break on both sides at random.
#[test]
fn no_reply_is_misrouted_when_connections_break_on_both_sides() {
    let site = Site::new(3);
    let stop = AtomicBool::new(false);
    let kills = AtomicU64::new(0);
    for seed in Random::seeds(&[5]) {
        eprintln!("SWITCHYARD_E2E_SEED={seed}");
        stop.store(false, Ordering::Relaxed);
        let tallies: Vec<Tally> = std::thread::scope(|scope| {
            let clients: Vec<_> = (0..12)
                .map(|me| {
                    let (address, stop) = (site.address(), &stop);
                    // Unique clients per run, because the values of the previous run still exist.
                    let me = me + 100 * (seed as usize % 1_000_000);
                    scope.spawn(move || checked_client(address, me, seed ^ (me as u64) << 32, stop, true))
                })
                .collect();
            let killer = {
                let (site, stop, kills) = (&site, &stop, &kills);
                scope.spawn(move || {
                    let mut random = Random::new(seed);
                    while !stop.load(Ordering::Relaxed) {
                        std::thread::sleep(Duration::from_millis(50 + random.below(150) as u64));
                        if !direct() {
                            let node = &site.nodes()[random.below(site.nodes().len())];
                            kills.fetch_add(
                                node.cmd("CLIENT KILL TYPE normal SKIPME yes").int() as u64,
                                Ordering::Relaxed,
                            );
                        }
                    }
                })
            };
            let end = Instant::now() + Duration::from_secs(4);
            // A client that finds an error ends early: then the other clients can stop.
            while Instant::now() < end && !clients.iter().any(|c| c.is_finished()) {
                std::thread::sleep(Duration::from_millis(20));
            }
            stop.store(true, Ordering::Relaxed);
            killer.join().expect("the killer");
            clients.into_iter().map(|c| c.join().expect("a client that saw only right replies")).collect()
        });
        let right: u64 = tallies.iter().map(|t| t.right).sum();
        let errors: u64 = tallies.iter().map(|t| t.errors).sum();
        let reconnects: u64 = tallies.iter().map(|t| t.reconnects).sum();
        let kills = kills.load(Ordering::Relaxed);
        eprintln!("{right} right replies, {errors} errors, {reconnects} reconnects, {kills} node connections killed");
        assert!(right > 2000, "only {right} replies");
        assert!(
            errors * 2 < right,
            "{errors} errors next to {right} right replies: kills should only fail commands in flight"
        );
        if !direct() {
            assert!(kills > 10, "only {kills} node connections were killed");
        }
    }
}

/// The way in which nodes' replies are split must not change them.
#[test]
fn replies_may_arrive_from_the_nodes_in_any_pieces() {
    if direct() {
        return;
    }
    let nodes = [Node::start(&Default::default()), Node::start(&Default::default())];
    let relays: Vec<Relay> = nodes.iter().map(|node| Relay::start(node.address())).collect();
    let addresses: Vec<_> = relays.iter().map(Relay::address).collect();
    let router = crate::support::Router::start(&addresses, &RouterOptions::default());
    let mut commands = Vec::new();
    for i in 0..20 {
        commands.push(format!("SET s{i} \"value\\r\\n$3\\r\\n{i}\""));
        commands.push(format!("RPUSH l{i} a b c {i}"));
        commands.push(format!("HSET h{i} f {i} g {i}"));
        commands.push(format!("ZADD z{i} 1.5 a {i} b"));
    }
    let mut client = Client::connect(router.address());
    for command in &commands {
        assert!(client.cmd(command).error().is_none());
    }
    let mut asked = Vec::new();
    for i in 0..20 {
        for line in [
            format!("GET s{i}"),
            format!("LRANGE l{i} 0 -1"),
            format!("HGETALL h{i}"),
            format!("ZRANGE z{i} 0 -1 WITHSCORES"),
            format!("MGET s{i} s{} none s{}", (i + 1) % 20, (i + 7) % 20),
            format!("EXISTS s{i} s{} l{i} none", (i + 3) % 20),
            format!("GET l{i}"),
            format!("EVAL \"return {{1, {{KEYS[1], {{ARGV[1]}}}}, redis.error_reply('x')}}\" 1 s{i} y"),
            "PING".to_owned(),
        ] {
            asked.push(words(&line));
        }
    }
    let bytes: Vec<u8> = asked.iter().flat_map(|command| encode(command)).collect();
    for protocol in ["HELLO 2", "HELLO 3"] {
        relays.iter().for_each(|relay| relay.chop(0));
        let mut client = Client::connect(router.address());
        client.cmd(protocol);
        let whole = client.pipeline(&bytes, asked.len());
        for chop in [1, 2, 3, 5, 7, 11, 16, 61, 1000] {
            relays.iter().for_each(|relay| relay.chop(chop));
            let pieces = client.pipeline(&bytes, asked.len());
            for (i, (a, b)) in whole.iter().zip(&pieces).enumerate() {
                assert_eq!(
                    a.escape_ascii().to_string(),
                    b.escape_ascii().to_string(),
                    "{protocol}, pieces of {chop}: {:?}",
                    crate::differential::show(&asked[i])
                );
            }
        }
        relays.iter().for_each(|relay| relay.chop(0));
    }
}

/// A client that disconnects with commands in flight must not shift the replies of clients that share its connection to
/// the node.
#[test]
fn disconnected_clients_shift_no_replies() {
    let site = Site::with(2, &SiteOptions::router(RouterOptions { workers: 1, ..RouterOptions::default() }));
    let mut steady = site.client();
    for i in 0..50 {
        steady.cmd(&format!("SET leave{i} {i}"));
    }
    let files = (!direct()).then(|| site.router().process().open_files());
    for round in 0..300 {
        let mut leaver = site.client();
        for i in 0..20 {
            leaver.post(&format!("GET leave{}", (i + round) % 50));
            leaver.post("MGET leave1 leave2 leave3 leave4");
        }
        for i in 0..10 {
            steady.post(&format!("GET leave{i}"));
        }
        if round % 2 == 0 {
            leaver.cut();
        }
        drop(leaver);
        for i in 0..10 {
            assert_eq!(steady.reply(), bulk(i.to_string()), "round {round}");
        }
    }
    until("the disconnected clients are gone", || steady.cmd("CLIENT LIST").text().lines().count() == 1);
    if let Some(files) = files {
        // 300 clients have left. The router may have opened connections to nodes since.
        until("their descriptors are given back", || site.router().process().open_files() <= files + 20);
    }
}
