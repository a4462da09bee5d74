//! `auto_eject_hosts`: a server of a pool fails, others serve its keys, and it returns with stale values that must
//! never be read.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value as Json;
use tempfile::TempDir;

use crate::movectl::run_cli_at;
use crate::support::client::Client;
use crate::support::node::{Node, NodeOptions};
use crate::support::process::{Process, tied};
use crate::support::value::{Value, bulk, int, ok};
use crate::support::{http, ports, until_within};
use crate::waiting::replica_of;

/// Time to detect and eject a server, retry it, and return its slots, on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

const KEYS: usize = 300;

struct Pool {
    dir: TempDir,
    nodes: Vec<Node>,
    listen: u16,
    admin: u16,
    stats: u16,
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

fn wait_for_log(router: &Process, text: &str) {
    until_within(TIMEOUT, text, || router.log().contains(text));
}

fn connect(port: u16) -> Client {
    until_within(TIMEOUT, "a client is served", || Client::try_connect(local(port)).ok())
}

impl Pool {
    fn new(distribution: &str) -> Pool {
        let nodes: Vec<Node> = (0..3).map(|_| Node::start(&NodeOptions::default())).collect();
        let pool = Pool {
            dir: TempDir::new().expect("a directory"),
            nodes,
            listen: ports::free(),
            admin: ports::free(),
            stats: ports::free(),
        };
        let text = format!(
            "pool:\n  listen: 127.0.0.1:{}\n  hash: murmur\n  distribution: {distribution}\n  redis: true\n  timeout: 4000\n  auto_eject_hosts: true\n  \
             server_failure_limit: 2\n  server_retry_timeout: 1000\n  servers:\n",
            pool.listen
        );
        std::fs::write(pool.file(), text + &pool.servers(3)).expect("written");
        pool
    }

    /// Lines of the first `count` servers.
    fn servers(&self, count: usize) -> String {
        let line = |(n, node): (usize, &Node)| format!("   - {}:{} s{n}\n", node.address(), 1 + n % 2);
        self.nodes.iter().enumerate().take(count).map(line).collect()
    }

    fn file(&self) -> PathBuf {
        self.dir.path().join("pool.yml")
    }

    /// Starts a router with its own log file.
    fn start(&self, log: &str) -> Process {
        self.start_with(log, &[])
    }

    fn start_with(&self, log: &str, flags: &[&str]) -> Process {
        let mut command = tied(env!("CARGO_BIN_EXE_switchyard"));
        command.args(["serve", "--workers", "2", "--admin"]).arg(local(self.admin).to_string());
        command.arg("--twemproxy-stats").arg(local(self.stats).to_string());
        command
            .arg("--twemproxy-config")
            .arg(self.file())
            .arg("--state-dir")
            .arg(self.dir.path().join("state"))
            .args(flags);
        Process::start("switchyard", command, &self.dir.path().join(log))
    }

    /// Returns the numbers of the keys on a server.
    fn keys_of(&self, server: usize) -> Vec<usize> {
        let mut client = self.nodes[server].client();
        (0..KEYS).filter(|key| client.call(&["EXISTS", &name(*key)]) == int(1)).collect()
    }

    /// Reads twemproxy's stats: number of ejections of the pool, and time of this server's last ejection.
    fn ejection_stats(&self, server: &str) -> (u64, u64) {
        let mut text = String::new();
        let mut stream =
            until_within(TIMEOUT, "the stats port answers", || std::net::TcpStream::connect(local(self.stats)).ok());
        std::io::Read::read_to_string(&mut stream, &mut text).expect("a document");
        let stats: Json = serde_json::from_str(&text).expect("JSON");
        let number = |of: &Json| of.as_u64().unwrap_or(0);
        (number(&stats["pool"]["server_ejects"]), number(&stats["pool"][server]["server_ejected_at"]))
    }
}

fn name(key: usize) -> String {
    format!("key:{key}")
}

/// A client's knowledge of a key.
#[derive(Clone, Default)]
struct Known {
    /// Lowest value that a read may return: smaller ones were overwritten or lost.
    lowest: u64,
    /// Highest written value, possibly not acknowledged.
    highest: u64,
}

/// Observations of the clients of all keys.
struct Checked {
    known: Vec<Known>,
    /// Keys that may fail or be missing.
    may_fail: Vec<bool>,
    /// Number of missing keys.
    missing: AtomicU64,
    /// Number of rounds over all keys.
    rounds: AtomicU64,
}

impl Checked {
    fn new() -> Checked {
        Checked {
            known: vec![Known::default(); KEYS],
            may_fail: vec![false; KEYS],
            missing: AtomicU64::default(),
            rounds: AtomicU64::default(),
        }
    }

    /// Runs clients that write increasing values and check their reads, until `body` ends.
    fn during(&mut self, port: u16, body: impl FnOnce(&AtomicU64)) {
        struct Ends<'s>(&'s AtomicBool);
        impl Drop for Ends<'_> {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let stop = AtomicBool::new(false);
        let Checked { known, may_fail, missing, rounds } = self;
        std::thread::scope(|scope| {
            let _ends = Ends(&stop);
            let half = KEYS / 2;
            for (part, (known, may_fail)) in known.chunks_mut(half).zip(may_fail.chunks(half)).enumerate() {
                let (stop, missing, rounds) = (&stop, &*missing, &*rounds);
                scope.spawn(move || {
                    let mut client = connect(port);
                    while !stop.load(Ordering::Relaxed) {
                        for (at, known) in known.iter_mut().enumerate() {
                            let (key, may_fail) = (part * half + at, may_fail[at]);
                            known.check_read(&client.call(&["GET", &name(key)]), key, may_fail, missing);
                            known.highest += 1;
                            let written = client.call(&["SET", &name(key), &known.highest.to_string()]);
                            match written.error() {
                                None => known.lowest = known.highest,
                                Some(error) => assert!(may_fail, "{}: {error}", name(key)),
                            }
                        }
                        rounds.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
            body(rounds);
        });
    }
}

impl Known {
    fn check_read(&mut self, found: &Value, key: usize, may_fail: bool, missing: &AtomicU64) {
        match found {
            Value::Bulk(value) => {
                let value: u64 = String::from_utf8_lossy(value).parse().expect("a number");
                assert!(
                    (self.lowest..=self.highest).contains(&value),
                    "{}: {value} is not from {} to {}",
                    name(key),
                    self.lowest,
                    self.highest
                );
                self.lowest = value;
            }
            Value::Nil => {
                assert!(may_fail || self.highest == 0, "{} is missing", name(key));
                missing.fetch_add(1, Ordering::Relaxed);
                // Earlier values must never be read again.
                self.lowest = self.highest + 1;
            }
            other => assert!(may_fail && other.error().is_some(), "{}: {other:?}", name(key)),
        }
    }
}

/// Waits for further rounds: clients are served despite a failure.
fn wait_for_rounds(rounds: &AtomicU64) {
    let before = rounds.load(Ordering::Relaxed);
    until_within(TIMEOUT, "clients continue", || rounds.load(Ordering::Relaxed) > before + 5);
}

/// Waits until all of these keys are served without an error.
fn wait_until_served(port: u16, keys: &[usize]) {
    let mut client = connect(port);
    until_within(TIMEOUT, "all keys are served", || {
        keys.iter().all(|key| client.call(&["GET", &name(*key)]).error().is_none())
    });
}

fn eject_and_return(distribution: &str, lose: impl Fn(&mut Node), find: impl Fn(&mut Node)) {
    let mut pool = Pool::new(distribution);
    let mut router = pool.start("first.log");
    let mut checked = Checked::new();
    checked.during(pool.listen, wait_for_rounds);
    let of_lost = pool.keys_of(1);
    let before: Vec<Vec<usize>> = (0..3).map(|server| pool.keys_of(server)).collect();
    assert!(before.iter().all(|keys| keys.len() > 20), "each server has more than 20 keys");
    of_lost.iter().for_each(|key| checked.may_fail[*key] = true);
    let (listen, last) = (pool.listen, of_lost.clone());
    checked.during(listen, |rounds| {
        wait_for_rounds(rounds);
        // The server will return with this snapshot, which is stale at that time.
        assert_eq!(pool.nodes[1].cmd("SAVE"), ok());
        // The other servers have stale values of these keys, too.
        let strays: Vec<String> = last.iter().take(20).flat_map(|key| [name(*key), "0".to_owned()]).collect();
        for other in [0, 2] {
            assert_eq!(pool.nodes[other].client().call(&[&["MSET".to_owned()], &strays[..]].concat()), ok());
        }
        wait_for_rounds(rounds);
        lose(&mut pool.nodes[1]);
        wait_for_log(&router, "node s1 is ejected:");
        wait_until_served(listen, &last);
        wait_for_rounds(rounds);
        let shown = run_cli_at(local(pool.admin), "nodes");
        assert!(shown.out.contains("s1: ejected (auto_eject_hosts)"), "{}{}", shown.out, shown.err);
        let (ejects, at) = pool.ejection_stats("s1");
        assert!(ejects == 1 && at > 0, "{ejects}, {at}");
        find(&mut pool.nodes[1]);
        wait_for_log(&router, "node s1 is no longer ejected: all of its slots are back");
        wait_for_rounds(rounds);
        wait_until_served(listen, &last);
    });
    for other in [0, 2] {
        // Servers that did not stand in keep the stale keys of s1.
        let strays: Vec<String> = of_lost.iter().take(20).map(|key| name(*key)).collect();
        pool.nodes[other].client().call(&[&["DEL".to_owned()], &strays[..]].concat());
    }
    for (server, keys) in before.iter().enumerate() {
        assert_eq!(&pool.keys_of(server), keys, "s{server} has its keys again, and no others");
    }
    assert!(
        checked.missing.load(Ordering::Relaxed) >= of_lost.len() as u64,
        "each key of the ejected server is missing at first"
    );
    let (_, metrics) = http::get(local(pool.admin), "/metrics");
    assert!(metrics.contains("switchyard_node_ejections_total{node=\"s1\"} 1"), "{metrics}");
    assert!(metrics.contains("switchyard_node_ejected{node=\"s1\"} 0"), "{metrics}");

    // The router is killed while the server is down.
    checked.during(listen, |rounds| {
        wait_for_rounds(rounds);
        lose(&mut pool.nodes[1]);
        until_within(TIMEOUT, "s1 is ejected again", || pool.ejection_stats("s1").0 == 2);
        wait_until_served(listen, &last);
        wait_for_rounds(rounds);
    });
    router.kill();
    let again = pool.start("again.log");
    checked.during(listen, |rounds| {
        wait_until_served(listen, &last);
        wait_for_rounds(rounds);
        let refused = run_cli_at(local(pool.admin), "balance");
        assert!(
            refused.code != 0 && refused.err.contains("s1 is ejected (auto_eject_hosts)"),
            "{}{}",
            refused.out,
            refused.err
        );
        find(&mut pool.nodes[1]);
        wait_for_log(&again, "node s1 is no longer ejected: all of its slots are back");
        wait_for_rounds(rounds);
    });
    for (server, keys) in before.iter().enumerate() {
        assert_eq!(&pool.keys_of(server), keys, "s{server}");
    }
}

#[test]
fn an_ejected_server_returns_without_stale_values() {
    eject_and_return("ketama", Node::kill, Node::restart);
}

#[test]
fn with_modula_the_keys_of_other_servers_stay() {
    eject_and_return("modula", Node::kill, Node::restart);
}

#[test]
fn a_hung_server_returns_without_stale_values() {
    eject_and_return("ketama", |node| node.freeze(), |node| node.thaw());
}

/// Checks the keys of a returning server, after clients have written some of them and deleted some. With `keeps`, the
/// server keeps all other keys, otherwise none.
fn check_return_after_writes(lose: impl Fn(&mut Node), find: impl Fn(&mut Node), keeps: bool) {
    let mut pool = Pool::new("ketama");
    let router = pool.start("first.log");
    let mut client = connect(pool.listen);
    for key in 0..KEYS {
        assert_eq!(client.call(&["SET", &name(key), "old"]), ok());
    }
    assert_eq!(pool.nodes[1].cmd("SAVE"), ok());
    let of_lost = pool.keys_of(1);
    assert!(of_lost.len() > 20, "{}", of_lost.len());
    // Keys of other databases do not belong to the pool.
    let foreign = name(of_lost[0]);
    assert_eq!(pool.nodes[1].cmd(&format!("COPY {foreign} {foreign} DB 7")), int(1));
    assert_eq!(pool.nodes[1].cmd("SAVE"), ok());
    let refused = client.call(&["SELECT", "7"]);
    assert!(refused.error().is_some_and(|error| error.contains("auto_eject_hosts")), "{refused:?}");
    lose(&mut pool.nodes[1]);
    wait_for_log(&router, "node s1 is ejected:");
    wait_until_served(pool.listen, &of_lost);
    let mut client = connect(pool.listen);
    let expected: Vec<Value> = (0..KEYS)
        .map(|key| {
            let place = of_lost.iter().position(|lost| *lost == key);
            match place.map(|place| place % 4) {
                None => bulk("old"),
                Some(0) => {
                    assert_eq!(client.call(&["SET", &name(key), "new"]), ok());
                    bulk("new")
                }
                // The key does not exist, and must not reappear.
                Some(1) => {
                    assert_eq!(client.call(&["DEL", &name(key)]), int(0));
                    Value::Nil
                }
                Some(2) => {
                    assert_eq!(client.call(&["SET", &name(key), "gone"]), ok());
                    assert_eq!(client.call(&["EVAL", "return redis.call('UNLINK', KEYS[1])", "1", &name(key)]), int(1));
                    Value::Nil
                }
                Some(_) => {
                    assert_eq!(client.call(&["GET", &name(key)]), Value::Nil, "missing while s1 is ejected");
                    if keeps { bulk("old") } else { Value::Nil }
                }
            }
        })
        .collect();
    find(&mut pool.nodes[1]);
    wait_for_log(&router, "node s1 is no longer ejected: all of its slots are back");
    for (key, expected) in expected.iter().enumerate() {
        assert_eq!(&client.call(&["GET", &name(key)]), expected, "{}", name(key));
    }
    let mut other = pool.nodes[1].client();
    assert_eq!(other.call(&["SELECT", "7"]), ok());
    assert_eq!(other.call(&["GET", &foreign]), bulk("old"), "keys of other databases stay");
    let there = expected.iter().filter(|value| **value != Value::Nil).count() as i64;
    assert_eq!(pool.nodes.iter().map(|node| node.cmd("DBSIZE").int()).sum::<i64>(), there, "no copies are left");
}

#[test]
fn a_stalled_server_keeps_keys_not_written_elsewhere() {
    check_return_after_writes(|node| node.freeze(), |node| node.thaw(), true);
}

#[test]
fn a_restarted_server_keeps_none_of_its_keys() {
    check_return_after_writes(Node::kill, Node::restart, false);
}

#[test]
fn a_server_with_a_direct_client_returns_when_that_disconnects() {
    let mut pool = Pool::new("ketama");
    let router = pool.start("first.log");
    let mut client = connect(pool.listen);
    for key in 0..KEYS {
        assert_eq!(client.call(&["SET", &name(key), "old"]), ok());
    }
    let keys = pool.keys_of(1);
    pool.nodes[1].kill();
    wait_for_log(&router, "node s1 is ejected:");
    pool.nodes[1].restart();
    let mut direct = pool.nodes[1].client();
    assert_eq!(direct.call(&["SET", &name(keys[0]), "direct"]), ok());
    // CLIENT LIST only shows this last command, which does not use keys.
    assert_eq!(direct.call(&["SELECT", "0"]), ok());
    wait_for_log(&router, "last command select");
    assert_eq!(
        direct.call(&["GET", &name(keys[0])]),
        bulk("direct"),
        "no key is removed while the client is connected"
    );
    drop(direct);
    wait_for_log(&router, "node s1 is no longer ejected: all of its slots are back");
    assert_eq!(client.call(&["GET", &name(keys[0])]), Value::Nil);
}

#[test]
fn wait_confirms_no_write_that_only_an_ejected_server_has() {
    let mut pool = Pool::new("ketama");
    let _replicas = [replica_of(&pool.nodes[0]), replica_of(&pool.nodes[2])];
    let router = pool.start("first.log");
    let mut client = connect(pool.listen);
    for key in 0..KEYS {
        assert_eq!(client.call(&["SET", &name(key), "old"]), ok());
    }
    let key = name(pool.keys_of(1)[0]);
    let mut writer = connect(pool.listen);
    assert_eq!(writer.call(&["SET", &key, "lost"]), ok());
    pool.nodes[1].kill();
    wait_for_log(&router, "node s1 is ejected:");
    assert_eq!(writer.call(&["GET", &key]), Value::Nil);
    assert_eq!(
        writer.call(&["WAIT", "1", "3000"]),
        int(0),
        "only stand-ins have replicas, and they do not have this write"
    );
    assert_eq!(writer.call(&["SET", &key, "kept"]), ok());
    assert_eq!(writer.call(&["WAIT", "1", "0"]), int(1));
}

#[test]
fn the_last_live_server_is_never_ejected() {
    let mut pool = Pool::new("ketama");
    let router = pool.start("first.log");
    let mut client = connect(pool.listen);
    pool.nodes[0].kill();
    wait_for_log(&router, "node s0 is ejected:");
    pool.nodes[2].kill();
    wait_for_log(&router, "node s2 is ejected:");
    for key in 0..KEYS {
        assert_eq!(client.call(&["SET", &name(key), "1"]), ok());
    }
    assert_eq!(pool.nodes[1].cmd("DBSIZE"), int(KEYS as i64));
    pool.nodes[1].kill();
    wait_for_log(&router, "node s1: it fails, and is not ejected: no other server is live");
    // Another server returns first: s1 can be ejected then.
    pool.nodes[0].restart();
    wait_until_served(pool.listen, &(0..KEYS).collect::<Vec<_>>());
    for key in 0..KEYS {
        assert_eq!(client.call(&["SET", &name(key), "2"]), ok());
    }
    pool.nodes[1].restart();
    pool.nodes[2].restart();
    let all_back = ["node s1 is no longer ejected: all", "node s2 is no longer ejected: all"];
    wait_for_log(&router, all_back[0]);
    wait_for_log(&router, all_back[1]);
    for key in 0..KEYS {
        assert_eq!(client.call(&["GET", &name(key)]).text(), "2", "{}", name(key));
    }
    assert_eq!(pool.nodes.iter().map(|node| node.cmd("DBSIZE").int()).sum::<i64>(), KEYS as i64);
}

#[test]
fn an_ejected_server_may_be_removed_from_the_list() {
    let mut pool = Pool::new("ketama");
    let router = pool.start("first.log");
    let mut client = connect(pool.listen);
    for key in 0..KEYS {
        assert_eq!(client.call(&["SET", &name(key), "1"]), ok());
    }
    let lost = pool.keys_of(2);
    pool.nodes[2].kill();
    wait_for_log(&router, "node s2 is ejected:");
    let text = std::fs::read_to_string(pool.file()).expect("read").replace(&pool.servers(3), &pool.servers(2));
    std::fs::write(pool.file(), text).expect("written");
    router.signal(Signal::HUP);
    until_within(TIMEOUT, "s2 has left the pool", || !run_cli_at(local(pool.admin), "nodes").out.contains(" s2 "));
    assert_eq!(run_cli_at(local(pool.admin), "moves watch").code, 0);
    for key in 0..KEYS {
        assert_eq!(client.call(&["GET", &name(key)]) == Value::Nil, lost.contains(&key), "{}", name(key));
        assert_eq!(client.call(&["SET", &name(key), "2"]), ok());
    }
    let sizes: Vec<i64> = pool.nodes[..2].iter().map(|node| node.cmd("DBSIZE").int()).collect();
    assert_eq!(sizes.iter().sum::<i64>(), KEYS as i64);
    pool.nodes[2].restart();
    let text = std::fs::read_to_string(pool.file()).expect("read") + &pool.servers(3)[pool.servers(2).len()..];
    std::fs::write(pool.file(), text).expect("written");
    router.signal(Signal::HUP);
    until_within(TIMEOUT, "s2 has keys again", || pool.nodes[2].cmd("DBSIZE").int() > 0);
    assert_eq!(run_cli_at(local(pool.admin), "moves watch").code, 0);
    for key in 0..KEYS {
        assert_eq!(client.call(&["GET", &name(key)]).text(), "2", "{}", name(key));
    }
}

#[test]
fn a_server_that_fails_during_its_return_is_retried() {
    let mut pool = Pool::new("ketama");
    let router = pool.start_with("first.log", &["--set", "moves.max-rate=20kb", "--set", "moves.goal=gentle"]);
    let mut client = connect(pool.listen);
    let (listen, all) = (pool.listen, (0..KEYS).collect::<Vec<_>>());
    let value = |first: &str| first.repeat(4000);
    let mut set_all =
        |first: &str| all.iter().for_each(|key| assert_eq!(client.call(&["SET", &name(*key), &value(first)]), ok()));
    set_all("1");
    pool.nodes[1].kill();
    wait_for_log(&router, "node s1 is ejected:");
    set_all("2");
    pool.nodes[1].restart();
    wait_for_log(&router, "its slots move back");
    until_within(TIMEOUT, "some keys have moved", || pool.nodes[1].cmd("DBSIZE").int() > 3);
    pool.nodes[1].kill();
    // Slots that have completely moved are ejected again. The others are still on the stand-ins.
    until_within(TIMEOUT, "the moves to s1 have ended", || {
        let (_, moves) = http::get(local(pool.admin), "/api/v1/moves");
        serde_json::from_str::<serde_json::Value>(&moves)
            .is_ok_and(|moves| moves["open"].as_array().is_none_or(Vec::is_empty))
    });
    wait_until_served(listen, &all);
    let mut client = connect(listen);
    for key in &all {
        let found = client.call(&["GET", &name(*key)]);
        assert!(found == Value::Nil || found.text() == value("2"), "{}", name(*key));
        assert_eq!(client.call(&["SET", &name(*key), &value("3")]), ok());
    }
    let moves = run_cli_at(local(pool.admin), "moves");
    assert_eq!(moves.code, 0, "{}{}", moves.out, moves.err);
    pool.nodes[1].restart();
    until_within(TIMEOUT, "some keys have moved", || pool.nodes[1].cmd("DBSIZE").int() > 3);
    for key in &all {
        assert_eq!(client.call(&["GET", &name(*key)]).text(), value("3"), "{}", name(*key));
    }
}

#[test]
fn clients_in_another_database_are_closed_when_ejection_begins() {
    let pool = Pool::new("ketama");
    let text = std::fs::read_to_string(pool.file()).expect("read");
    std::fs::write(pool.file(), text.replace("auto_eject_hosts: true", "auto_eject_hosts: false")).expect("written");
    let router = pool.start("first.log");
    let mut clients = [(); 3].map(|()| connect(pool.listen));
    let [at_home, elsewhere, in_transaction] = &mut clients;
    assert_eq!(at_home.call(&["MULTI"]), ok());
    assert_eq!(elsewhere.call(&["SELECT", "5"]), ok());
    assert_eq!(in_transaction.call(&["MULTI"]), ok());
    assert_eq!(in_transaction.call(&["SELECT", "5"]).text(), "QUEUED");
    std::fs::write(pool.file(), text).expect("written");
    router.signal(Signal::HUP);
    assert!(elsewhere.closed_within(TIMEOUT) && in_transaction.closed_within(TIMEOUT));
    assert_eq!(at_home.call(&["SET", &name(1), "1"]).text(), "QUEUED");
    assert_eq!(at_home.call(&["EXEC"]), Value::Array(vec![ok()]));
}
