//! Hot copies: no read is older than an acknowledged write, whatever writes, moves, ends or returns.
//!
//! Most tests copy every key that is read (`admission = "all"`), and store an increasing number under each key: a
//! reader that sees less than an acknowledged write has read stale data.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::{Duration, Instant};

use crate::movectl::done;
use crate::support::{Client, NodeOptions, RouterOptions, Site, SiteOptions, Value, bulk, encode, int, ok, until};

/// Copies every key that is read.
const ALL: [&str; 2] = ["--set", "hot-copies.admission=all"];

fn all() -> SiteOptions {
    SiteOptions::router(RouterOptions { workers: 4, ..RouterOptions::args(&ALL) })
}

/// Returns a sample of the router's metrics.
fn metric(site: &Site, name: &str) -> f64 {
    let metrics = site.router().metrics();
    let line = metrics.lines().find(|line| line.starts_with(name) && line[name.len()..].starts_with([' ', '{']));
    line.and_then(|line| line.rsplit(' ').next()?.parse().ok()).unwrap_or(0.0)
}

/// Reads until a copy answers.
#[track_caller]
fn until_copied(site: &Site, client: &mut Client, line: &str) {
    let before = metric(site, "switchyard_hot_copies_hits_total");
    until("a copy answers", || {
        client.cmd(line);
        metric(site, "switchyard_hot_copies_hits_total") > before
    });
}

/// A key, with the latest acknowledged write and the latest requested write.
struct Watched {
    key: String,
    confirmed: AtomicI64,
    sent: AtomicI64,
}

impl Watched {
    fn new(key: &str) -> Self {
        Self { key: key.to_owned(), confirmed: AtomicI64::new(0), sent: AtomicI64::new(0) }
    }

    /// Writes the next number with `write`. Returns false on an error.
    fn write(&self, client: &mut Client, write: &dyn Fn(&mut Client, &str, i64) -> bool) -> bool {
        let number = self.sent.fetch_add(1, Ordering::SeqCst) + 1;
        let is_done = write(client, &self.key, number);
        if is_done {
            self.confirmed.fetch_max(number, Ordering::SeqCst);
        }
        is_done
    }

    /// Reads the key, and checks that the value is not stale.
    #[track_caller]
    fn read(&self, client: &mut Client, how: &str) {
        let least = self.confirmed.load(Ordering::SeqCst);
        let value = match client.cmd(&format!("{how} {}", self.key)) {
            Value::Array(items) => items.into_iter().next().unwrap_or(Value::Nil),
            value => value,
        };
        if value.error().is_some() {
            return;
        }
        let number = if value == Value::Nil { 0 } else { value.text().parse::<i64>().expect("a number") };
        let most = self.sent.load(Ordering::SeqCst);
        assert!(
            (least..=most).contains(&number),
            "{how} {}: {number}, with {least} acknowledged and {most} requested",
            self.key
        );
    }
}

/// Runs one writer per key, and readers of all keys, until `body` ends. Returns the number of reads.
fn watch(
    site: &Site,
    keys: &[Watched],
    time: Duration,
    write: &(dyn Fn(&mut Client, &str, i64) -> bool + Sync),
    meanwhile: impl FnOnce(),
) -> i64 {
    let (is_over, reads) = (AtomicBool::new(false), AtomicI64::new(0));
    std::thread::scope(|scope| {
        for watched in keys {
            scope.spawn(|| {
                let mut client = site.client();
                while !is_over.load(Ordering::SeqCst) {
                    watched.write(&mut client, &write);
                    std::thread::sleep(Duration::from_millis(3));
                }
            });
        }
        for reader in 0..6 {
            let (is_over, reads) = (&is_over, &reads);
            scope.spawn(move || {
                let mut client = site.client();
                if reader % 2 == 0 {
                    client.cmd("HELLO 3");
                }
                while !is_over.load(Ordering::SeqCst) {
                    for watched in keys {
                        watched.read(&mut client, if reader == 3 { "MGET" } else { "GET" });
                        reads.fetch_add(1, Ordering::SeqCst);
                    }
                }
            });
        }
        let began = Instant::now();
        meanwhile();
        std::thread::sleep(time.saturating_sub(began.elapsed()));
        is_over.store(true, Ordering::SeqCst);
    });
    reads.load(Ordering::SeqCst)
}

fn is_ok(value: &Value) -> bool {
    value.error().is_none()
}

#[test]
fn the_router_answers_frequent_reads() {
    for reports in ["periodic", "instant"] {
        let reports = format!("telemetry.reports={reports}");
        let args = [
            "--set",
            "hot-copies.min-reads-per-second=50",
            "--set",
            &reports,
            "--set",
            "telemetry.instant-threshold=100",
        ];
        let Some(site) = Site::router_only(2, &SiteOptions::router(RouterOptions::args(&args))) else { return };
        let mut client = site.client();
        client.cmd("SET hot value");
        let gets = || -> i64 {
            let of_node = |info: &Value| {
                let info = info.text();
                let calls = info
                    .split("cmdstat_get:calls=")
                    .nth(1)
                    .and_then(|rest| rest.split(',').next()?.parse::<i64>().ok());
                calls.unwrap_or(0)
            };
            site.nodes().iter().map(|node| of_node(&node.cmd("INFO commandstats"))).sum()
        };
        until("the nodes receive no more reads", || {
            let before = gets();
            (0..500).for_each(|_| assert_eq!(client.cmd("GET hot"), bulk("value")));
            gets() - before < 50
        });
        // No copy is stale: each of these writes is visible at once.
        for number in 0..200 {
            assert_eq!(client.cmd(&format!("SET hot {number}")), ok());
            assert_eq!(site.client().cmd("GET hot"), bulk(number.to_string()));
        }
    }
}

#[test]
fn no_read_is_older_than_an_acknowledged_write() {
    let Some(site) = Site::router_only(2, &all()) else { return };
    type Write = fn(&mut Client, &str, i64) -> bool;
    let writes: [(&str, Write); 12] = [
        ("SET", |client, key, number| is_ok(&client.cmd(&format!("SET {key} {number}")))),
        ("GETSET", |client, key, number| is_ok(&client.cmd(&format!("GETSET {key} {number}")))),
        ("MSET", |client, key, number| is_ok(&client.cmd(&format!("MSET {key} {number} other{key} 1 third{key} 2")))),
        ("SET with a time", |client, key, number| is_ok(&client.cmd(&format!("SET {key} {number} PX 60000")))),
        ("MULTI", |client, key, number| {
            client.cmd("MULTI");
            client.cmd(&format!("SET {key} {number}"));
            is_ok(&client.cmd("EXEC"))
        }),
        ("WATCH", |client, key, number| {
            client.cmd(&format!("WATCH {key}"));
            client.cmd("MULTI");
            client.cmd(&format!("SET {key} {number}"));
            is_ok(&client.cmd("EXEC"))
        }),
        ("EVAL", |client, key, number| {
            is_ok(&client.call(&["EVAL", "return redis.call('SET', KEYS[1], ARGV[1])", "1", key, &number.to_string()]))
        }),
        ("EVAL of a key that it does not declare", |client, key, number| {
            let script = "return redis.call('SET', ARGV[1], ARGV[2])";
            is_ok(&client.call(&["EVAL", script, "1", &format!("x{{{key}}}"), key, &number.to_string()]))
        }),
        ("RENAME", |client, key, number| {
            client.cmd(&format!("SET {{{key}}}from {number}"));
            is_ok(&client.cmd(&format!("RENAME {{{key}}}from {key}")))
        }),
        ("COPY of another slot", |client, key, number| {
            client.cmd(&format!("SET from{key} {number}"));
            is_ok(&client.cmd(&format!("COPY from{key} {key} REPLACE")))
        }),
        ("pipelined", |client, key, number| {
            client.post(&format!("SET {key} {number}"));
            client.post(&format!("GET {key}"));
            let set = client.reply();
            let get = client.reply();
            assert_eq!(get, bulk(number.to_string()), "a client sees its own writes");
            is_ok(&set)
        }),
        ("large", |client, key, number| {
            let padded = "x".repeat(70_000) + &number.to_string();
            let is_done = is_ok(&client.call(&["SET", &format!("{{{key}}}large"), &padded]));
            is_done
                && is_ok(&client.cmd(&format!("RENAME {{{key}}}large {key}")))
                && is_ok(&client.cmd(&format!("SET {key} {number}")))
        }),
    ];
    for (form, write) in writes {
        let trim = form == "large";
        let keys: Vec<Watched> = (0..if trim { 1 } else { 4 })
            .map(|number| Watched::new(&format!("{}{number}", form.replace(' ', ""))))
            .collect();
        if trim {
            // A padded number parses as well.
            watch_trimmed(&site, &keys[0], write);
            continue;
        }
        let reads = watch(&site, &keys, Duration::from_millis(700), &write, || {});
        assert!(reads > 100, "{form}: {reads} reads");
    }
    assert!(metric(&site, "switchyard_hot_copies_hits_total") > 1000.0, "copies have answered");
}

/// A single node runs unchecked code, and commands over slots: whatever they write, no copy is stale.
#[test]
fn no_read_is_stale_whatever_code_a_single_node_runs() {
    let Some(site) = Site::router_only(1, &all()) else { return };
    let library =
        "#!lua name=lib\nredis.register_function('put', function(k, a) return redis.call('SET', a[1], a[2]) end)";
    let has_functions = site.client().call(&["FUNCTION", "LOAD", library]).error().is_none();
    type Write = fn(&mut Client, &str, i64) -> bool;
    let writes: [(&str, Write); 4] = [
        ("EVAL", |client, key, number| {
            is_ok(&client.call(&["EVAL", "return redis.call('SET', ARGV[1], ARGV[2])", "0", key, &number.to_string()]))
        }),
        ("MULTI", |client, key, number| {
            client.cmd("MULTI");
            client.cmd(&format!("SET other{key} {number}"));
            client.call(&["EVAL", "return redis.call('RENAME', ARGV[1], ARGV[2])", "0", &format!("other{key}"), key]);
            is_ok(&client.cmd("EXEC"))
        }),
        ("RENAME", |client, key, number| {
            client.cmd(&format!("SET from{key} {number}"));
            is_ok(&client.cmd(&format!("RENAME from{key} {key}")))
        }),
        ("FCALL", |client, key, number| is_ok(&client.call(&["FCALL", "put", "0", key, &number.to_string()]))),
    ];
    for (form, write) in writes.into_iter().filter(|(form, _)| has_functions || *form != "FCALL") {
        let keys: Vec<Watched> = (0..4).map(|number| Watched::new(&format!("{form}{number}"))).collect();
        let reads = watch(&site, &keys, Duration::from_millis(700), &write, || {});
        assert!(reads > 100, "{form}: {reads} reads");
    }
    assert!(metric(&site, "switchyard_hot_copies_hits_total") > 100.0, "copies have answered");
}

fn watch_trimmed(site: &Site, watched: &Watched, write: fn(&mut Client, &str, i64) -> bool) {
    let (mut writer, mut reader) = (site.client(), site.client());
    for _ in 0..30 {
        assert!(watched.write(&mut writer, &write));
        for _ in 0..3 {
            watched.read(&mut reader, "GET");
        }
    }
}

#[test]
fn no_read_is_stale_while_keys_move() {
    let Some(site) = Site::router_only(3, &all()) else { return };
    let keys: Vec<Watched> = (0..8).map(|number| Watched::new(&format!("moved{number}"))).collect();
    let names = crate::movectl::names(&site);
    let write = |client: &mut Client, key: &str, number: i64| is_ok(&client.cmd(&format!("SET {key} {number}")));
    watch(&site, &keys, Duration::from_secs(4), &write, || {
        for round in 0..4 {
            done(
                site.router(),
                &format!("move --all --from {} --to {} --wait", names[round % 3], names[(round + 1) % 3]),
            );
        }
        done(site.router(), &format!("move --keys moved0,moved1 --to {} --wait", names[2]));
    });
    assert!(metric(&site, "switchyard_hot_copies_hits_total") > 100.0);
}

#[test]
fn no_read_is_stale_while_nodes_restart() {
    let node = NodeOptions::args(&["--appendonly", "yes", "--appendfsync", "always"]);
    let Some(mut site) = Site::router_only(2, &SiteOptions { node, ..all() }) else { return };
    let keys: Vec<Watched> = (0..6).map(|number| Watched::new(&format!("k{number}"))).collect();
    let write = |client: &mut Client, key: &str, number: i64| is_ok(&client.cmd(&format!("SET {key} {number}")));
    for round in 0..3 {
        watch(&site, &keys, Duration::from_millis(800), &write, || {});
        if round % 2 == 0 {
            site.node_mut(0).kill();
            site.node_mut(0).restart();
        } else {
            site.nodes()[1].freeze();
            std::thread::sleep(Duration::from_millis(300));
            site.nodes()[1].thaw();
        }
        // Values read before the restart are not served after it.
        let mut client = site.client();
        until("the node is back", || is_ok(&client.cmd("DBSIZE")));
    }
}

#[test]
fn older_data_of_a_returning_node_is_served_at_once() {
    let node = NodeOptions::args(&["--save", "", "--dbfilename", "old.rdb"]);
    let options = SiteOptions {
        node,
        ..SiteOptions::router(RouterOptions {
            workers: 4,
            ..RouterOptions::args(&["--set", "hot-copies.admission=all", "--set", "nodes.on-data-loss=serve"])
        })
    };
    let Some(mut site) = Site::router_only(1, &options) else { return };
    let mut clients: Vec<Client> = (0..12).map(|_| site.client()).collect();
    clients[0].cmd("SET k old");
    site.nodes()[0].cmd("SAVE");
    clients[0].cmd("SET k new");
    for client in &mut clients {
        until_copied(&site, client, "GET k");
    }
    site.node_mut(0).kill();
    site.node_mut(0).restart();
    // One client observes the returned node. From then on, no client reads the previous value.
    until("the node is back", || clients[0].cmd("SET other 1") == ok());
    assert_eq!(clients[0].cmd("GET k"), bulk("old"));
    for client in &mut clients {
        let value = client.cmd("GET k");
        assert!(value == bulk("old") || value.error().is_some(), "{value:?}");
    }
}

#[test]
fn a_copy_expires_with_its_key() {
    let Some(site) = Site::router_only(2, &all()) else { return };
    let mut clients: Vec<Client> = (0..8).map(|_| site.client()).collect();
    for client in &mut clients {
        until_copied(&site, client, "GET none");
    }
    for round in 0..10 {
        let began = Instant::now();
        clients[0].cmd(&format!("SET short{round} x PX 150"));
        let written = Instant::now();
        while written.elapsed() < Duration::from_millis(200) {
            for client in &mut clients {
                let before = Instant::now();
                let value = client.cmd(&format!("GET short{round}"));
                let age = before.duration_since(written);
                assert!(
                    value == Value::Nil || began.elapsed() < Duration::from_secs(5) && age < Duration::from_millis(151),
                    "{value:?} after {age:?}"
                );
            }
        }
    }
    // Commands that shorten a key's life, or delete it, are writes as well.
    clients[0].cmd("SET k x");
    until_copied(&site, &mut clients[1], "GET k");
    clients[0].cmd("PEXPIRE k 1");
    std::thread::sleep(Duration::from_millis(3));
    assert_eq!(clients[1].cmd("GET k"), Value::Nil);
}

#[test]
fn flushed_keys_have_no_copies() {
    let Some(site) = Site::router_only(2, &all()) else { return };
    let mut clients: Vec<Client> = (0..8).map(|_| site.client()).collect();
    for flush in ["FLUSHALL", "FLUSHDB", "FLUSHALL SYNC"] {
        (0..10).for_each(|number| drop(clients[0].cmd(&format!("SET k{number} x"))));
        for client in &mut clients {
            (0..10).for_each(|number| assert_eq!(client.cmd(&format!("GET k{number}")), bulk("x")));
        }
        until_copied(&site, &mut clients[1], "GET k1");
        assert_eq!(clients[0].cmd(flush), ok());
        for client in &mut clients {
            (0..10).for_each(|number| assert_eq!(client.cmd(&format!("GET k{number}")), Value::Nil, "{flush}"));
        }
    }
}

#[test]
fn writes_of_blocking_commands_are_visible() {
    let Some(site) = Site::router_only(2, &all()) else { return };
    let (mut waiter, mut pusher, mut reader) = (site.client(), site.client(), site.client());
    until_copied(&site, &mut reader, "LRANGE {q}to 0 -1");
    for number in 0..50 {
        waiter.post("BLMOVE {q}from {q}to LEFT RIGHT 10");
        for _ in 0..3 {
            assert_eq!(reader.cmd("LRANGE {q}to 0 -1").items().len(), number);
        }
        pusher.cmd("RPUSH {q}from x");
        assert_eq!(waiter.reply(), bulk("x"));
        assert_eq!(reader.cmd("LRANGE {q}to 0 -1").items().len(), number + 1);
    }
}

#[test]
fn writes_that_bypass_the_router_are_visible_soon() {
    let Some(site) = Site::router_only(1, &all()) else { return };
    let (mut client, mut past) = (site.client(), site.nodes()[0].client());
    for number in 0..20 {
        past.cmd(&format!("SET k {number}"));
        until("it is seen", || client.cmd("GET k") == bulk(number.to_string()));
        client.cmd("GET k");
    }
    past.cmd("FLUSHALL");
    until("all is gone", || client.cmd("GET k") == Value::Nil);
}

#[test]
fn copies_match_the_nodes_replies_byte_for_byte() {
    let Some(site) = Site::router_only(1, &all()) else { return };
    let mut writer = site.client();
    for line in [
        "SET s hello",
        "SETBIT b 7 1",
        "RPUSH l a b c a",
        "SADD set one",
        "HSET h f 1 g 2",
        "ZADD z 1 a 2.5 b inf c -1e-7 d",
        "XADD x 1-1 f v",
        "SET n 17",
    ] {
        assert!(is_ok(&writer.cmd(line)), "{line}");
    }
    let lines = [
        "GET s",
        "GET none",
        "GETRANGE s 1 3",
        "STRLEN s",
        "SUBSTR s 0 1",
        "BITCOUNT b",
        "BITPOS b 1",
        "GETBIT b 7",
        "HEXISTS h f",
        "HGET h f",
        "HGET h none",
        "HGETALL h",
        "HGETALL none",
        "HKEYS h",
        "HVALS h",
        "HLEN h",
        "HMGET h f none",
        "HSTRLEN h f",
        "LINDEX l 0",
        "LINDEX l 9",
        "LLEN l",
        "LPOS l a",
        "LPOS l none",
        "LPOS l a COUNT 0",
        "LRANGE l 0 -1",
        "LRANGE none 0 -1",
        "SCARD set",
        "SISMEMBER set one",
        "SMEMBERS set",
        "SMISMEMBER set one two",
        "ZCARD z",
        "ZCOUNT z 0 5",
        "ZLEXCOUNT z - +",
        "ZMSCORE z a none",
        "ZRANGE z 0 -1",
        "ZRANGE z 0 -1 WITHSCORES",
        "ZRANGE z 0 -1 REV WITHSCORES",
        "ZRANGEBYLEX z - +",
        "ZRANGEBYSCORE z 0 9 WITHSCORES",
        "ZRANK z a",
        "ZRANK z none",
        "ZREVRANGE z 0 -1 WITHSCORES",
        "ZREVRANGEBYLEX z + -",
        "ZREVRANGEBYSCORE z 9 0",
        "ZREVRANK z a",
        "ZSCORE z a",
        "ZSCORE z c",
        "ZSCORE z none",
        "XLEN x",
        "XRANGE x - +",
        "XREVRANGE x + -",
        "EXISTS s",
        "EXISTS none",
        "TYPE s",
        "TYPE none",
        "MGET s n none",
        "GET l",
        "zrange z 0 -1 withscores",
    ];
    for protocol in ["2", "3"] {
        let (mut client, mut direct) = (site.client(), site.nodes()[0].client());
        for client in [&mut client, &mut direct] {
            client.cmd(&format!("HELLO {protocol}"));
        }
        for line in lines {
            direct.post(line);
            let expected = direct.raw();
            for _ in 0..12 {
                client.post(line);
                assert_eq!(
                    client.raw().escape_ascii().to_string(),
                    expected.escape_ascii().to_string(),
                    "{line} by RESP{protocol}"
                );
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
    assert!(metric(&site, "switchyard_hot_copies_hits_total") > 500.0);
}

#[test]
fn databases_have_separate_copies() {
    let Some(site) = Site::router_only(2, &all()) else { return };
    let mut clients: Vec<Client> = (0..3).map(|_| site.client()).collect();
    for (number, client) in clients.iter_mut().enumerate() {
        client.cmd(&format!("SELECT {number}"));
        client.cmd(&format!("SET k {number}"));
    }
    for _ in 0..100 {
        for (number, client) in clients.iter_mut().enumerate() {
            assert_eq!(client.cmd("GET k"), bulk(number.to_string()));
        }
    }
    assert_eq!(clients[0].cmd("MOVE k 5"), int(1));
    assert_eq!(clients[0].cmd("GET k"), Value::Nil);
    clients[0].cmd("SELECT 5");
    assert_eq!(clients[0].cmd("GET k"), bulk("0"));
}

#[test]
fn concurrent_readers_share_one_request() {
    let options = SiteOptions::router(RouterOptions { workers: 1, ..RouterOptions::args(&ALL) });
    let Some(site) = Site::router_only(1, &options) else { return };
    let mut first = site.client();
    first.cmd("SET k x");
    until_copied(&site, &mut first, "GET k");
    let mut clients: Vec<Client> = (0..50).map(|_| site.client()).collect();
    let gets = || {
        let info = site.nodes()[0].cmd("INFO commandstats").text();
        info.split("cmdstat_get:calls=")
            .nth(1)
            .and_then(|rest| rest.split(',').next()?.parse::<i64>().ok())
            .unwrap_or(0)
    };
    for round in 0..20 {
        first.cmd(&format!("SET k {round}"));
        let before = gets();
        clients.iter_mut().for_each(|client| client.post("GET k"));
        clients.iter_mut().for_each(|client| assert_eq!(client.reply(), bulk(round.to_string())));
        assert!(gets() - before <= 10, "{} of 50 went to the node", gets() - before);
    }
}

#[test]
fn a_tracking_client_is_notified_of_changes() {
    let Some(site) = Site::router_only(2, &all()) else { return };
    let (mut tracker, mut other) = (site.client(), site.client());
    other.cmd("SET k 0");
    until_copied(&site, &mut other, "GET k");
    tracker.cmd("HELLO 3");
    assert_eq!(tracker.cmd("CLIENT TRACKING ON"), ok());
    for number in 0..10 {
        assert_eq!(tracker.cmd("GET k"), bulk(number.to_string()));
        other.cmd(&format!("SET k {}", number + 1));
        tracker.timeout(Duration::from_secs(5));
        assert!(tracker.raw().starts_with(b">2\r\n$10\r\ninvalidate"), "it is told");
    }
}

#[test]
fn nulls_instead_of_arrays_match_the_nodes_replies() {
    let Some(site) = Site::router_only(1, &all()) else { return };
    let mut direct = site.nodes()[0].client();
    direct.cmd("XADD x 1-1 f v");
    direct.cmd("ZADD z 1 a");
    for protocol in ["2", "3"] {
        let mut client = site.client();
        for client in [&mut client, &mut direct] {
            client.cmd(&format!("HELLO {protocol}"));
        }
        until_copied(&site, &mut client, "ZCARD z");
        for line in
            ["XRANGE x - + COUNT 0", "XREVRANGE x + - COUNT 0", "ZRANK z none WITHSCORE", "ZREVRANK none a WITHSCORE"]
        {
            direct.post(line);
            let expected = direct.raw();
            for _ in 0..50 {
                client.post(line);
                assert_eq!(
                    client.raw().escape_ascii().to_string(),
                    expected.escape_ascii().to_string(),
                    "{line} by RESP{protocol}"
                );
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }
}

#[test]
fn waiting_for_replicas_ends_no_copies_and_delays_none() {
    let options = SiteOptions::router(RouterOptions { workers: 1, ..RouterOptions::args(&ALL) });
    let Some(site) = Site::router_only(1, &options) else { return };
    let (mut client, mut waiter) = (site.client(), site.client());
    client.cmd("SET k x");
    until_copied(&site, &mut client, "GET k");
    waiter.cmd("SET other 1");
    let fills = metric(&site, "switchyard_hot_copies_fills_total");
    for _ in 0..20 {
        assert_eq!(waiter.cmd("WAIT 0 10"), int(0));
        assert_eq!(client.cmd("GET k"), bulk("x"));
    }
    assert_eq!(metric(&site, "switchyard_hot_copies_fills_total"), fills, "the copy is still good");
    // Endless: there is no replica.
    waiter.post("WAIT 1 0");
    std::thread::sleep(Duration::from_millis(200));
    client.cmd("SET new x");
    until_copied(&site, &mut client, "GET new");
}

#[test]
fn many_copies_in_one_reply_do_not_fill_the_memory() {
    let options = SiteOptions::router(RouterOptions { workers: 1, ..RouterOptions::args(&ALL) });
    let Some(site) = Site::router_only(1, &options) else { return };
    let mut client = site.client();
    let value = "v".repeat(60_000);
    client.call(&["SET", "k", &value]);
    until_copied(&site, &mut client, "GET k");
    until_copied(&site, &mut client, "MGET k k");
    let hits = metric(&site, "switchyard_hot_copies_hits_total");
    let mut line = vec!["MGET"];
    line.resize(101, "k");
    assert_eq!(client.call(&line).items().len(), 100);
    assert_eq!(metric(&site, "switchyard_hot_copies_hits_total"), hits, "6 MB are taken as they come");
}

#[test]
fn a_client_waiting_for_a_copy_is_counted_once() {
    let config = "[[limit]]\nprefix = \"k\"\nrequests-per-second = 20\n[hot-copies]\nadmission = \"all\"\n";
    let site = Site::with(2, &SiteOptions::config(config));
    let mut client = site.client();
    assert_eq!(client.cmd("SET k abcdefghijklmnopqrstuvwxyz"), ok());
    until_copied(&site, &mut client, "GET k");
    let fills = || metric(&site, "switchyard_hot_copies_fills_total");
    let before = fills();
    // A second without requests refills the bucket.
    std::thread::sleep(Duration::from_millis(1_500));
    for end in 0..15 {
        assert_eq!(client.cmd(&format!("GETRANGE k 0 {end}")).text().len(), end + 1);
    }
    assert!(fills() - before >= 14.0, "they waited: {}", fills() - before);
}

/// The client requests more at once than it reads: other clients get turns in between.
#[test]
fn a_client_that_does_not_read_takes_no_turns_of_others() {
    let Some(site) =
        Site::router_only(1, &SiteOptions::router(RouterOptions { workers: 1, ..RouterOptions::args(&ALL) }))
    else {
        return;
    };
    let mut other = site.client();
    other.call(&["SET", "big", &"x".repeat(60_000)]);
    until_copied(&site, &mut other, "GET big");
    let mut flood = site.client();
    let gets = |count: usize| encode(&["GET", "big"]).repeat(count);
    // More than the socket buffers hold, so that the client counts as not reading. The router reads all of it at once.
    let name = |name: &str| encode(&["CLIENT", "SETNAME", name]);
    flood.write(&[gets(600), name("began"), gets(3000), name("done")].concat());
    let mut has_begun = false;
    until("all of it is answered", || {
        let clients = other.cmd("CLIENT LIST").text();
        has_begun |= clients.contains("name=began");
        clients.contains("name=done")
    });
    assert!(has_begun, "no other client had a turn between its first and its last commands");
}

/// The upload is executed only after its last byte, regardless of waiting clients. Then it ends the copies that were
/// made in the meantime.
#[test]
fn a_slow_upload_delays_no_copies_and_ends_those_of_its_key() {
    let Some(site) = Site::router_only(1, &all()) else { return };
    let (mut client, mut slow) = (site.client(), site.client());
    assert_eq!(client.cmd("SET loaded before"), ok());
    let value = "x".repeat(4 << 20);
    let upload = encode(&["SET", "loaded", &value]);
    let (most, last) = upload.split_at(upload.len() - 3);
    slow.write(most);
    let is_large = |line: &str| {
        line.split(" qbuf=")
            .nth(1)
            .and_then(|rest| rest.split(' ').next()?.parse().ok())
            .is_some_and(|bytes: u64| bytes > 1 << 20)
    };
    until("the upload is on its way", || site.nodes()[0].cmd("CLIENT LIST").text().lines().any(is_large));
    assert_eq!(client.cmd("SET new x"), ok());
    until_copied(&site, &mut client, "GET new");
    until_copied(&site, &mut client, "GETRANGE loaded 0 9");
    assert_eq!(client.cmd("GETRANGE loaded 0 9"), bulk("before"));
    slow.write(last);
    assert_eq!(slow.reply(), ok());
    assert_eq!(client.cmd("GETRANGE loaded 0 9"), bulk("xxxxxxxxxx"));
}

/// Clients that wait for a copy then do not wait for the node.
#[test]
fn a_silent_node_receives_no_more_reads_for_copies() {
    let args = ["--set", "hot-copies.admission=all", "--set", "nodes.command-timeout=2s"];
    let options = SiteOptions::router(RouterOptions { workers: 1, ..RouterOptions::args(&args) });
    let Some(site) = Site::router_only(1, &options) else { return };
    let mut client = site.client();
    let names: Vec<String> = (0..100).map(|number| format!("k{number}")).collect();
    for name in &names {
        assert_eq!(client.cmd(&format!("SET {name} v")), ok());
        until_copied(&site, &mut client, &format!("GET {name}"));
    }
    done(site.router(), "hot-copies evict --all");
    let fills = metric(&site, "switchyard_hot_copies_fills_total");
    site.nodes()[0].freeze();
    names.iter().for_each(|name| client.post(&format!("GET {name}")));
    names.iter().for_each(|_| assert!(client.reply().expect_error().starts_with("NODETIMEOUT")));
    site.nodes()[0].thaw();
    let asked = metric(&site, "switchyard_hot_copies_fills_total") - fills;
    assert!(asked < 10.0, "{asked} fills, each of which made the client wait");
}

#[test]
fn a_write_that_cannot_be_ended_is_counted() {
    let args = ["--set", "hot-copies.admission=all", "--set", "nodes.command-timeout=300ms"];
    let options = SiteOptions::router(RouterOptions { workers: 1, ..RouterOptions::args(&args) });
    let Some(site) = Site::router_only(1, &options) else { return };
    let (mut client, node) = (site.client(), &site.nodes()[0]);
    assert_eq!(client.cmd("SET k v"), ok());
    until_copied(&site, &mut client, "GET k");
    assert_eq!(node.cmd("ACL SETUSER default -client|kill"), ok());
    node.freeze();
    client.post("SET k w");
    assert!(client.reply().expect_error().starts_with("NODETIMEOUT"));
    until("its connection is given up", || metric(&site, "switchyard_hot_copies_unconfirmed_writes") > 0.0);
    node.thaw();
    let mut reader = site.client();
    until("the node serves", || reader.cmd("GET k") == bulk("w"));
    let info = |client: &mut Client| client.cmd("INFO hot_copies").text();
    assert!(
        info(&mut reader).starts_with("# Hot_copies\r\nhot_copies_answer:1\r\n")
            && info(&mut reader).contains("hot_copies_unconfirmed_writes:1\r\n")
    );
    assert_eq!(node.cmd("ACL SETUSER default +client|kill"), ok());
    until("it is ended", || {
        node.cmd("CLIENT KILL TYPE normal SKIPME yes");
        reader = site.client();
        reader.cmd("GET k");
        metric(&site, "switchyard_hot_copies_unconfirmed_writes") == 0.0
    });
    until_copied(&site, &mut reader, "GET k");
}

/// PFCOUNT stores the count in the key, which changes the bytes for other readers.
#[test]
fn pfcount_ends_the_copies_of_its_key() {
    let Some(site) = Site::router_only(1, &all()) else { return };
    let (mut client, mut counter) = (site.client(), site.client());
    let node = &site.nodes()[0];
    client.cmd("PFADD h a");
    until_copied(&site, &mut client, "GET h");
    for round in 0..300 {
        client.cmd(&format!("PFADD h {round}"));
        client.cmd("GET h");
        client.cmd("GET h");
        counter.cmd("PFCOUNT h");
        assert_eq!(client.cmd("GET h"), node.cmd("GET h"), "round {round}");
    }
}

#[test]
fn a_direct_swap_of_databases_ends_copies_in_time() {
    let Some(site) = Site::router_only(1, &all()) else { return };
    let mut client = site.client();
    assert_eq!(client.cmd("SET k before"), ok());
    until_copied(&site, &mut client, "GET k");
    assert_eq!(site.nodes()[0].cmd("SWAPDB 0 1"), ok());
    until("the node is read again", || client.cmd("GET k") == Value::Nil);
}
