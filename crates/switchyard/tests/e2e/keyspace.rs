//! Commands for all keys: SCAN, KEYS, DBSIZE, RANDOMKEY, FLUSHALL, FLUSHDB, and databases.

use std::collections::BTreeMap;

use crate::support::{Client, Site, SiteOptions, Value, bulk, encode, int, ok, simple, until};

fn fill(client: &mut Client, n: usize) {
    let mut bytes = Vec::new();
    for i in 0..n {
        let command = match i % 5 {
            0 => format!("RPUSH list:{i} x"),
            1 => format!("HSET hash:{i} f v"),
            _ => format!("SET string:{i} {i}"),
        };
        bytes.extend(encode(&crate::support::words(&command)));
    }
    for raw in client.pipeline(&bytes, n) {
        assert_ne!(raw[0], b'-', "{}", raw.escape_ascii());
    }
}

/// Runs a complete iteration. Returns how often each key occurred.
fn scan(client: &mut Client, options: &str) -> BTreeMap<String, usize> {
    let mut seen = BTreeMap::new();
    let mut cursor = "0".to_owned();
    for call in 0.. {
        assert!(call < 200_000, "SCAN {options} does not come to an end");
        let reply = client.cmd(&format!("SCAN {cursor} {options}"));
        let [next, keys] = reply.items() else { panic!("SCAN gave {reply:?}") };
        for key in keys.items() {
            *seen.entry(key.text()).or_default() += 1;
        }
        cursor = next.text();
        let number: u64 = cursor.parse().expect("clients parse cursors as integers");
        assert!(number < 1 << 53, "cursor {cursor} does not survive a JavaScript client");
        if cursor == "0" {
            return seen;
        }
    }
    unreachable!("0.. does not end");
}

#[test]
fn scan_returns_every_key_exactly_once() {
    const KEYS: usize = 10_000;
    let site = Site::new(3);
    let mut client = site.client();
    fill(&mut client, KEYS);
    // A plain server may repeat a key while it rehashes, but not afterwards.
    until("the tables have settled", || {
        site.nodes().iter().all(|node| {
            let stats = node.client().call(&["DEBUG", "HTSTATS", "0"]);
            !stats.text().contains("rehashing target")
        })
    });
    for options in ["", "COUNT 1000", "COUNT 7", "COUNT 100000"] {
        let seen = scan(&mut client, options);
        assert_eq!(seen.len(), KEYS, "SCAN {options}");
        let repeated: Vec<_> = seen.iter().filter(|(_, times)| **times > 1).take(5).collect();
        assert!(repeated.is_empty(), "SCAN {options} repeats keys: {repeated:?}");
    }
    assert_eq!(scan(&mut client, "MATCH hash:* COUNT 500").len(), KEYS / 5);
    assert_eq!(scan(&mut client, "COUNT 500 TYPE list").len(), KEYS / 5);
    assert_eq!(scan(&mut client, "MATCH string:* TYPE list COUNT 500").len(), 0);
    assert_eq!(scan(&mut client, "MATCH string:1234 COUNT 500").len(), usize::from(1234 % 5 > 1));
    // Two concurrent iterations, on the same and on another connection, do not affect each other.
    let mut other = site.client();
    let (mut a, mut b) = ("0".to_owned(), "0".to_owned());
    let (mut seen_a, mut seen_b) = (0, 0);
    let mut rounds = 0;
    loop {
        if rounds == 0 || a != "0" {
            let reply = client.cmd(&format!("SCAN {a} COUNT 300"));
            a = reply.items()[0].text();
            seen_a += reply.items()[1].items().len();
        }
        if rounds == 0 || b != "0" {
            let reply = other.cmd(&format!("SCAN {b} COUNT 450"));
            b = reply.items()[0].text();
            seen_b += reply.items()[1].items().len();
        }
        rounds += 1;
        if a == "0" && b == "0" {
            break;
        }
    }
    assert_eq!((seen_a, seen_b), (KEYS, KEYS));
}

#[test]
fn scan_returns_keys_that_exist_throughout() {
    let site = Site::new(3);
    let mut client = site.client();
    fill(&mut client, 3000);
    let mut churn = site.client();
    let mut seen = BTreeMap::<String, usize>::new();
    let mut cursor = "0".to_owned();
    let mut step = 0;
    loop {
        let reply = client.cmd(&format!("SCAN {cursor} COUNT 20"));
        for key in reply.items()[1].items() {
            *seen.entry(key.text()).or_default() += 1;
        }
        cursor = reply.items()[0].text();
        if cursor == "0" {
            break;
        }
        for i in 0..20 {
            churn.cmd(&format!("SET come:{} x", step * 20 + i));
            churn.cmd(&format!("DEL come:{}", (step * 20 + i) / 2));
        }
        step += 1;
    }
    let stayed = seen.keys().filter(|key| !key.starts_with("come:")).count();
    assert_eq!(stayed, 3000);
}

#[test]
fn scan_errors_match_redis() {
    let site = Site::new(2);
    let mut client = site.client();
    let plain = crate::support::Node::start(&crate::support::NodeOptions::default());
    let mut reference = plain.client();
    for line in [
        "SCAN",
        "SCAN x",
        // Not `SCAN -1`: Redis parses it as 18446744073709551615, a cursor that no server returns.
        "SCAN 0 COUNT",
        "SCAN 0 COUNT 0",
        "SCAN 0 COUNT x",
        "SCAN 0 COUNT -5",
        "SCAN 0 MATCH",
        "SCAN 0 BOGUS 1",
        "SCAN 99999999999999999999999999",
        "KEYS",
        "KEYS a b",
        "DBSIZE x",
        "RANDOMKEY",
        "RANDOMKEY x",
        "FLUSHALL BOGUS",
        "FLUSHDB BOGUS",
        "FLUSHALL ASYNC",
        "FLUSHDB SYNC",
        "SELECT",
        "SELECT x",
        "SELECT 16",
        "SELECT -1",
        "SELECT 99999999999",
        "SELECT 15",
        "SELECT 0",
    ] {
        assert_eq!(client.cmd(line), reference.cmd(line), "{line}");
    }
}

#[test]
fn keys_dbsize_randomkey_and_flushes_reach_every_node() {
    let site = Site::new(3);
    let mut client = site.client();
    assert_eq!(client.cmd("RANDOMKEY"), Value::Nil);
    assert_eq!(client.cmd("DBSIZE"), int(0));
    assert_eq!(client.cmd("KEYS *"), Value::Array(vec![]));
    fill(&mut client, 500);
    assert_eq!(client.cmd("DBSIZE"), int(500));
    assert_eq!(client.cmd("KEYS *").items().len(), 500);
    assert_eq!(client.cmd("KEYS hash:*").items().len(), 100);
    assert_eq!(client.cmd("KEYS string:12"), Value::Array(vec![bulk("string:12")]));
    let per_node: i64 = site.nodes().iter().map(|node| node.cmd("DBSIZE").int()).sum();
    assert_eq!(per_node, 500);
    let mut kinds = BTreeMap::<String, usize>::new();
    for _ in 0..300 {
        let key = client.cmd("RANDOMKEY").text();
        assert_eq!(client.cmd(&format!("EXISTS {key}")), int(1));
        *kinds.entry(key).or_default() += 1;
    }
    assert!(kinds.len() > 50, "300 random keys of 500 were only {} different ones", kinds.len());
    // Keys are found even if only one node has any.
    assert_eq!(client.cmd("FLUSHALL"), ok());
    assert_eq!(client.cmd("DBSIZE"), int(0));
    assert!(site.nodes().iter().all(|node| node.cmd("DBSIZE") == int(0)));
    client.cmd("SET only x");
    for _ in 0..20 {
        assert_eq!(client.cmd("RANDOMKEY"), bulk("only"));
    }
    // A flush keeps its place in a pipeline.
    client.post("SET a 1");
    client.post("FLUSHDB");
    client.post("DBSIZE");
    client.post("SET b 1");
    client.post("GET b");
    assert_eq!(client.reply(), ok());
    assert_eq!(client.reply(), ok());
    assert_eq!(client.reply(), int(0));
    assert_eq!(client.reply(), ok());
    assert_eq!(client.reply(), bulk("1"));
}

#[test]
fn databases_are_separate_for_interleaving_clients() {
    let site = Site::new(3);
    // Clients of several databases share the router's connections, but must not see each other's keys.
    let mut clients: Vec<Client> = (0..8).map(|_| site.client()).collect();
    for (db, client) in clients.iter_mut().enumerate() {
        assert_eq!(client.cmd(&format!("SELECT {db}")), ok());
    }
    for round in 0..30 {
        for (db, client) in clients.iter_mut().enumerate() {
            for i in 0..10 {
                client.post(&format!("SET key{i} {round}:{db}:{i}"));
            }
        }
        for (db, client) in clients.iter_mut().enumerate() {
            for i in 0..10 {
                client.post(&format!("GET key{i}"));
            }
            client.post("MGET key1 key2 key3");
            client.post("DBSIZE");
            for _ in 0..10 {
                assert_eq!(client.reply(), ok());
            }
            for i in 0..10 {
                assert_eq!(client.reply(), bulk(format!("{round}:{db}:{i}")));
            }
            let expected = (1..4).map(|i| bulk(format!("{round}:{db}:{i}"))).collect();
            assert_eq!(client.reply(), Value::Array(expected));
            assert_eq!(client.reply(), int(10));
        }
    }
    // In one pipeline of one client.
    let mut client = site.client();
    let bytes: Vec<u8> = (0..200)
        .flat_map(|i| {
            [format!("SELECT {}", i % 8), "GET key3".to_owned()]
                .into_iter()
                .flat_map(|l| encode(&crate::support::words(&l)))
        })
        .collect();
    for (i, pair) in client.pipeline(&bytes, 400).chunks(2).enumerate() {
        assert_eq!(pair[0], b"+OK\r\n");
        assert_eq!(crate::support::value::parse(&pair[1]), bulk(format!("29:{}:3", i % 8)));
    }
    // Commands for all keys use the client's database.
    assert_eq!(clients[3].cmd("KEYS *").items().len(), 10);
    assert_eq!(scan(&mut clients[3], "COUNT 3").len(), 10);
    assert_eq!(clients[3].cmd("FLUSHDB"), ok());
    assert_eq!(clients[3].cmd("DBSIZE"), int(0));
    assert_eq!(clients[3].cmd("RANDOMKEY"), Value::Nil);
    assert_eq!(clients[4].cmd("DBSIZE"), int(10));
    assert_eq!(clients[4].cmd("MOVE key1 3"), int(1));
    assert_eq!(clients[3].cmd("GET key1"), bulk("29:4:1"));
    assert_eq!(clients[4].cmd("COPY key2 key2 DB 3"), int(1));
    assert_eq!(clients[3].cmd("DBSIZE"), int(2));
    assert_eq!(clients[0].cmd("FLUSHALL"), ok());
    assert!(clients.iter_mut().all(|client| client.cmd("DBSIZE") == int(0)));
    // A script uses the database of its caller.
    clients[5].cmd("SET s five");
    assert_eq!(clients[5].cmd("EVAL \"return redis.call('GET', KEYS[1])\" 1 s"), bulk("five"));
    assert_eq!(clients[6].cmd("EVAL \"return redis.call('GET', KEYS[1])\" 1 s"), Value::Nil);
    // A large value as well, which uses another connection.
    let large = vec![b'L'; 2 << 20];
    assert_eq!(clients[7].call(&[&b"SET"[..], b"big", &large]), ok());
    assert_eq!(clients[6].cmd("EXISTS big"), int(0));
    assert_eq!(clients[7].cmd("STRLEN big"), int(2 << 20));
    assert_eq!(clients[7].cmd("GET big").bytes().len(), 2 << 20);
    assert_eq!(clients[6].cmd("SELECT 7"), ok());
    assert_eq!(clients[6].cmd("EXISTS big"), int(1));
}

#[test]
fn swapdb_is_refused_or_swaps_everywhere() {
    let site = Site::with(2, &SiteOptions::default());
    let mut client = site.client();
    for i in 0..20 {
        client.cmd(&format!("SET swap{i} x"));
    }
    let reply = client.cmd("SWAPDB 0 1");
    let left = client.cmd("DBSIZE").int();
    match reply {
        Value::Error(_) => assert_eq!(left, 20, "a refused SWAPDB must not do anything"),
        other => {
            assert_eq!(other, simple("OK"));
            assert_eq!(left, 0);
            client.cmd("SELECT 1");
            assert_eq!(client.cmd("DBSIZE"), int(20));
        }
    }
}

/// The router opens connections on demand, with queued commands. Each queued command uses its own database, whichever
/// comes first.
#[test]
fn the_database_is_kept_on_connections_opened_for_a_command() {
    for default in [0, 5] {
        for protocol in [2, 3] {
            let config = format!("[clients]\ndatabase = {default}\n");
            let site = Site::with(2, &SiteOptions::config(config));
            // A database that was used before needs no query to the nodes.
            site.client().cmd("SELECT 3");
            let mut clients: Vec<Client> = (0..8).map(|_| site.client()).collect();
            for (i, client) in clients.iter_mut().enumerate() {
                client.cmd(&format!("HELLO {protocol}"));
                let large = vec![b'x'; 2 << 20];
                for (first, second) in [(3, 0), (0, 3)] {
                    // Ordinary, slow and large commands use different connections.
                    client.cmd(&format!("SELECT {first}"));
                    client.cmd(&format!("SET plain{i} {first}"));
                    client.cmd(&format!("EVAL \"return redis.call('SET', KEYS[1], ARGV[1])\" 1 slow{i} {first}"));
                    client.call(&[&b"SET"[..], format!("large{i}").as_bytes(), &large]);
                    client.cmd(&format!("SELECT {second}"));
                    assert_eq!(
                        client.cmd(&format!("GET plain{i}")),
                        Value::Nil,
                        "default {default}, RESP{protocol}, SELECT {second}"
                    );
                    let slow = client.cmd(&format!("EVAL \"return redis.call('GET', KEYS[1])\" 1 slow{i}"));
                    assert_eq!(slow, Value::Nil, "default {default}, RESP{protocol}, SELECT {second}");
                    assert_eq!(
                        client.cmd(&format!("GET large{i}")),
                        Value::Nil,
                        "default {default}, RESP{protocol}, SELECT {second}"
                    );
                    client.cmd(&format!("SELECT {first}"));
                    assert_eq!(client.cmd(&format!("DEL plain{i} slow{i} large{i}")), int(3));
                }
            }
            for node in site.nodes() {
                assert_eq!(
                    node.cmd("INFO keyspace").text().trim(),
                    "# Keyspace",
                    "a key was written to another database"
                );
            }
        }
    }
}

#[test]
fn a_random_key_is_drawn_from_all_keys() {
    let Some(site) = Site::router_only(3, &SiteOptions::default()) else { return };
    let mut client = site.client();
    let tags = site.tags();
    for number in 0..300 {
        assert_eq!(client.cmd(&format!("SET {{{}}}many{number} v", tags[0][0])), ok());
    }
    for tags in &tags[1..] {
        assert_eq!(client.cmd(&format!("SET {{{}}}few v", tags[0])), ok());
    }
    let few = (0..300).filter(|_| client.cmd("RANDOMKEY").text().contains("few")).count();
    // Two of 302 keys: about two of 300 replies, rather than two thirds of them.
    assert!(few < 30, "{few} of 300");
}
