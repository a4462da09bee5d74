//! Serves twemproxy's file unchanged: each key on the server that a real `nutcracker` selects.

use std::collections::BTreeSet;
use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::client::Client;
use crate::support::node::{Node, NodeOptions};
use crate::support::process::{Process, tied};
use crate::support::value::{bulk, int, ok};
use crate::support::{ports, until};

/// Two pools with separate servers.
struct Fleet {
    dir: TempDir,
    nodes: Vec<Node>,
    /// Ports of the pools `alpha` and `beta`.
    listen: [u16; 2],
}

impl Fleet {
    fn start() -> Fleet {
        let nodes = (0..5).map(|_| Node::start(&NodeOptions::default())).collect();
        Fleet { dir: TempDir::new().expect("a directory"), nodes, listen: [ports::free(), ports::free()] }
    }

    /// Returns the file with these ports for the pools.
    fn file(&self, listen: [u16; 2]) -> String {
        let address = |node: usize| self.nodes[node].address();
        format!(
            "alpha:\n  listen: 127.0.0.1:{}\n  hash: fnv1a_64\n  hash_tag: \"{{}}\"\n  distribution: ketama\n  auto_eject_hosts: false\n  timeout: 2000\n  \
             redis: true\n  servers:\n   - {}:1 first\n   - {}:3 second\n   - {}:1\n\n\
             beta:\n  listen: 127.0.0.1:{}\n  hash: murmur\n  distribution: modula\n  redis: true\n  servers:\n   - {}:1\n   - {}:2\n",
            listen[0],
            address(0),
            address(1),
            address(2),
            listen[1],
            address(3),
            address(4)
        )
    }

    fn write(&self, name: &str, listen: [u16; 2]) -> std::path::PathBuf {
        let path = self.dir.path().join(name);
        std::fs::write(&path, self.file(listen)).expect("written");
        path
    }

    fn nutcracker(&self, listen: [u16; 2]) -> Process {
        self.nutcracker_with(listen, ports::free())
    }

    fn nutcracker_with(&self, listen: [u16; 2], stats: u16) -> Process {
        let mut command = tied("nutcracker");
        command.arg("-c").arg(self.write("nutcracker.yml", listen));
        command.args(["-a", "127.0.0.1", "-s", &stats.to_string(), "-i", "50", "-v", "1"]);
        Process::start("nutcracker", command, &self.dir.path().join("nutcracker.log"))
    }

    fn switchyard(&self) -> Process {
        self.switchyard_with(&[])
    }

    fn switchyard_with(&self, flags: &[&str]) -> Process {
        let mut command = tied(env!("CARGO_BIN_EXE_switchyard"));
        command.args(["serve", "--twemproxy-config"]).arg(self.write("switchyard.yml", self.listen)).args(flags);
        command.args(["--admin", "127.0.0.1:0", "--workers", "1", "--state-dir"]).arg(self.dir.path().join("state"));
        // A new log for each start, without lines of an earlier one.
        let log = self.dir.path().join("switchyard.log");
        let _ = std::fs::remove_file(&log);
        let process = Process::start("switchyard", command, &log);
        process.expect_log(&["2 pools of twemproxy's configuration are served"]);
        process
    }
}

/// Stops the router and its pools, so that the next one can use their state directories.
fn stop(mut switchyard: Process) {
    switchyard.signal(Signal::TERM);
    assert!(switchyard.wait(Duration::from_secs(30)).success(), "{}", switchyard.log());
}

fn client(port: u16) -> Client {
    until("a client is served", || Client::try_connect(SocketAddr::from((Ipv4Addr::LOCALHOST, port))).ok())
}

/// Returns the child processes of a process.
fn children(pid: u32) -> Vec<Pid> {
    let listed = std::fs::read_to_string(format!("/proc/{pid}/task/{pid}/children")).expect("a list");
    listed.split_whitespace().filter_map(|pid| Pid::from_raw(pid.parse().ok()?)).collect()
}

fn pool_of(pid: Pid) -> String {
    let line = std::fs::read_to_string(Path::new("/proc").join(pid.as_raw_nonzero().to_string()).join("cmdline"))
        .unwrap_or_default();
    line.split('\0').skip_while(|word| *word != "--twemproxy-pool").nth(1).unwrap_or_default().to_owned()
}

#[test]
fn keys_of_a_real_nutcracker_are_found() {
    let fleet = Fleet::start();
    let before = [ports::free(), ports::free()];
    let _nutcracker = fleet.nutcracker(before);
    let keys: Vec<String> = (0..300).map(|n| format!("key:{n}:{{tag{}}}é", n % 97)).collect();
    let mut theirs = before.map(client);
    for client in &mut theirs {
        for key in &keys {
            assert_eq!(client.call(&["SET", key, key]), ok());
        }
    }
    let _switchyard = fleet.switchyard();
    let mut ours = fleet.listen.map(client);
    for (ours, theirs) in ours.iter_mut().zip(&mut theirs) {
        assert_eq!(ours.cmd("DBSIZE"), int(300));
        for key in &keys {
            assert_eq!(ours.call(&["GET", key]), bulk(key), "{key}");
            assert_eq!(ours.call(&["SET", &format!("new:{key}"), "1"]), ok());
            assert_eq!(theirs.call(&["GET", &format!("new:{key}")]), bulk("1"), "{key}");
        }
        // Commands across servers match nutcracker's replies.
        for words in [
            ["MSET", &keys[0], "a", &keys[1], "b", &keys[2], "c"].map(String::from).to_vec(),
            [&["MGET".to_owned()], &keys[..20]].concat(),
            [&["DEL".to_owned(), "none".to_owned()], &keys[..10]].concat(),
            [&["MGET".to_owned()], &keys[5..15]].concat(),
        ] {
            let (one, other) = (ours.call(&words), theirs.call(&words));
            if words[0] == "DEL" {
                assert_eq!((one, other), (int(10), int(0)), "the same keys");
            } else {
                assert_eq!(one, other, "{words:?}");
            }
        }
    }
}

/// Reads the document of a stats port.
fn stats(port: u16) -> Value {
    let mut stream = until("a stats port answers", || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok());
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("a document");
    serde_json::from_str(&text).expect("JSON")
}

/// Returns the keys of a map in the document.
fn names(map: &Value) -> BTreeSet<String> {
    map.as_object().expect("a map").keys().cloned().collect()
}

#[test]
fn stats_have_the_names_of_a_real_nutcracker() {
    let fleet = Fleet::start();
    let (theirs, ours, before) = (ports::free(), ports::free(), [ports::free(), ports::free()]);
    let _nutcracker = fleet.nutcracker_with(before, theirs);
    let switchyard = fleet.switchyard_with(&["--twemproxy-stats", &format!("127.0.0.1:{ours}")]);
    let theirs = stats(theirs);
    let servers: Vec<String> =
        names(&theirs["alpha"]).into_iter().filter(|name| theirs["alpha"][name].is_object()).collect();
    let sum = |stats: &Value, name: &str| {
        servers.iter().map(|server| stats["alpha"][server][name].as_u64().unwrap_or(0)).sum::<u64>()
    };
    // The router's own first request to each server is counted as well.
    let first =
        until("each server has answered the router", || Some(stats(ours)).filter(|stats| sum(stats, "responses") == 3));
    assert_eq!(names(&theirs), names(&first));
    // The router has no queue before that of the connection, and does not count the bytes of waiting requests.
    let uncounted = BTreeSet::from(["in_queue", "in_queue_bytes", "out_queue_bytes"].map(String::from));
    for pool in ["alpha", "beta"] {
        assert_eq!(names(&theirs[pool]), names(&first[pool]), "{pool}");
        for (server, counts) in theirs[pool].as_object().expect("a map").iter().filter(|(_, counts)| counts.is_object())
        {
            assert_eq!(&names(counts) - &uncounted, names(&first[pool][server]), "{pool} {server}");
        }
    }

    let mut alpha = client(fleet.listen[0]);
    // Names that differ much: fnv1a_64 places names close together that differ only in their last digits.
    let keys: Vec<String> = (1..=60_u64).map(|n| format!("{:x}", n * 2_654_435_761)).collect();
    for key in &keys {
        assert_eq!(alpha.call(&["SET", key, "1"]), ok());
    }
    assert_eq!(alpha.call(&[&["MGET".to_owned()], &keys[..]].concat()).items().len(), 60);
    drop(client(fleet.listen[0]));
    let last = until("an end of a connection is counted", || {
        Some(stats(ours)).filter(|stats| stats["alpha"]["client_eof"] == 1)
    });
    assert_eq!(sum(&last, "requests") - sum(&first, "requests"), 60 + 3, "a part of MGET for each server");
    assert_eq!(sum(&last, "responses") - sum(&first, "responses"), 60 + 3);
    assert!(
        sum(&last, "request_bytes") > sum(&first, "request_bytes")
            && sum(&last, "response_bytes") > sum(&first, "response_bytes")
    );
    assert_eq!(
        (&last["alpha"]["client_connections"], &last["alpha"]["fragments"], &last["beta"]["fragments"]),
        (&json!(1), &json!(3), &json!(0))
    );
    assert!(sum(&last, "server_connections") >= 3);

    // A server ends, and a pool ends.
    let mut fleet = fleet;
    fleet.nodes.remove(0);
    until("the end of the server is counted", || {
        let stats = stats(ours);
        let answered = alpha.call(&[&["MGET".to_owned()], &keys[..]].concat());
        (stats["alpha"]["first"]["server_eof"].as_u64() > Some(0)
            && answered.error().is_some()
            && stats["alpha"]["forward_error"].as_u64() > Some(0))
        .then_some(())
    });
    let beta = children(switchyard.pid()).into_iter().find(|pid| pool_of(*pid) == "beta").expect("a process of beta");
    kill_process(beta, Signal::STOP).expect("stopped");
    let shown = stats(ours);
    kill_process(beta, Signal::KILL).expect("killed");
    assert_eq!(shown["beta"], json!({"unreachable": true}));
    assert!(shown["alpha"]["first"].is_object(), "the others are shown");
    until("the pool is shown again", || stats(ours)["beta"]["client_eof"].is_u64().then_some(()));
}

#[test]
fn each_pool_has_a_process_that_is_restarted() {
    let fleet = Fleet::start();
    let mut switchyard = fleet.switchyard();
    let mut beta = client(fleet.listen[1]);
    assert_eq!(beta.cmd("SET b 1"), ok());
    let pools = children(switchyard.pid());
    assert_eq!(pools.len(), 2);
    let alpha = *pools.iter().find(|pid| pool_of(**pid) == "alpha").expect("a process of alpha");
    kill_process(alpha, Signal::KILL).expect("killed");
    switchyard.expect_log(&["pool alpha: its process ended (signal 9)"]);
    assert_eq!(beta.cmd("GET b"), bulk("1"), "the other pool continues");
    until("alpha is served again", || {
        let mut client = Client::try_connect(SocketAddr::from((Ipv4Addr::LOCALHOST, fleet.listen[0]))).ok()?;
        client.post_quietly("SET a 1");
        client.try_reply().ok().filter(|reply| *reply == ok())
    });
    // A restart keeps the state: each pool has a separate directory.
    assert!(fleet.dir.path().join("state/alpha").is_dir() && fleet.dir.path().join("state/beta").is_dir());
    let pools = children(switchyard.pid());
    switchyard.signal(Signal::TERM);
    assert!(switchyard.wait(Duration::from_secs(30)).success(), "{}", switchyard.log());
    let lives = |pid: &Pid| !pool_of(*pid).is_empty();
    assert_eq!(pools.iter().filter(|pid| lives(pid)).count(), 0, "no process is left");
    // The parent process is killed: its pools end as well.
    let mut switchyard = fleet.switchyard();
    let pools = children(switchyard.pid());
    switchyard.kill();
    until("the pools have ended", || (!pools.iter().any(lives)).then_some(()));
}

#[test]
fn keys_on_other_servers_prevent_no_start() {
    let fleet = Fleet::start();
    for node in &fleet.nodes {
        // By the rule, at most two of the five servers own the key, one in each pool.
        assert_eq!(node.cmd("SET everywhere 1"), ok());
    }
    let switchyard = fleet.switchyard();
    for port in fleet.listen {
        let mut client = client(port);
        assert_eq!(client.cmd("SET everywhere 2"), ok());
        assert_eq!(client.cmd("GET everywhere"), bulk("2"));
        let found = client.cmd("SCAN 0 COUNT 1000");
        assert_eq!(found.items()[1].items().len(), 1, "misplaced keys are not served");
    }
    assert_eq!(fleet.nodes.iter().filter(|node| node.cmd("GET everywhere") == bulk("2")).count(), 2);
    stop(switchyard);
    let _again = fleet.switchyard();
}

#[test]
fn misplaced_keys_are_removed_if_configured() {
    let fleet = Fleet::start();
    let keys: Vec<String> = (0..3000).map(|n| format!("key:{n}")).collect();
    for node in &fleet.nodes {
        let (mut client, address) = (node.client(), node.address().to_string());
        for keys in keys.chunks(500) {
            let mut words = vec!["MSET"];
            keys.iter().for_each(|key| words.extend([key.as_str(), &address]));
            assert_eq!(client.call(&words), ok());
        }
        // In a database that the pool does not use.
        assert_eq!((client.cmd("SELECT 3"), client.cmd("SET other x")), (ok(), ok()));
    }
    let flags = ["--misplaced-keys", "remove", "--set", "clients.default-user-rules=operator"];
    let switchyard = fleet.switchyard_with(&flags);
    // Of all copies of a key, each pool keeps the one on the server that its rule selects.
    for (port, nodes) in fleet.listen.into_iter().zip([&fleet.nodes[..3], &fleet.nodes[3..]]) {
        let sizes = || nodes.iter().map(|node| node.cmd("DBSIZE").int()).collect::<Vec<_>>();
        until("the misplaced keys are gone", || (sizes().iter().sum::<i64>() == 3000).then_some(()));
        assert!(sizes().iter().all(|size| *size > 0));
        let mut client = client(port);
        for key in &keys {
            let at = client.call(&["GET", key]);
            assert!(
                nodes
                    .iter()
                    .any(|node| at == bulk(node.address().to_string()) && node.client().call(&["GET", key]) == at),
                "{key}"
            );
        }
    }
    for node in &fleet.nodes {
        let mut client = node.client();
        assert_eq!((client.cmd("SELECT 3"), client.cmd("GET other")), (ok(), bulk("x")));
    }
    until("each server is counted", || {
        (switchyard.log().matches("of other servers (--misplaced-keys remove)").count() == 5).then_some(())
    });
    // A key that a move has placed elsewhere is not misplaced, also after a restart. On a server unrelated to the move
    // it is.
    let mut alpha = client(fleet.listen[0]);
    let owner = fleet.nodes[..3].iter().position(|node| node.cmd("EXISTS key:1") == int(1)).expect("a server has it");
    let [target, other] = [[1, 2], [0, 2], [0, 1]][owner];
    assert_eq!(alpha.call(&["SWITCHYARD", "MOVE", "KEYS", "key:1", "TO", ["first", "second"][target]]).error(), None);
    until("the key has moved", || (fleet.nodes[owner].cmd("EXISTS key:1") == int(0)).then_some(()));
    assert_eq!(alpha.cmd("SET key:1 moved"), ok());
    stop(switchyard);
    assert_eq!(fleet.nodes[other].cmd("SET key:1 misplaced"), ok());
    let _again = fleet.switchyard_with(&flags);
    until("the misplaced key is gone", || (fleet.nodes[other].cmd("EXISTS key:1") == int(0)).then_some(()));
    assert_eq!(client(fleet.listen[0]).cmd("GET key:1"), bulk("moved"));
    assert_eq!(fleet.nodes[target].cmd("GET key:1"), bulk("moved"));
}

#[test]
fn keys_of_another_pool_on_a_shared_server_stay() {
    let nodes: Vec<Node> = (0..3).map(|_| Node::start(&NodeOptions::default())).collect();
    let (dir, listen) = (TempDir::new().expect("a directory"), [ports::free(), ports::free()]);
    let pool = |name: &str, listen: u16, database: u32, servers: &[String]| {
        format!(
            "{name}:\n  listen: 127.0.0.1:{listen}\n  hash: murmur\n  redis: true\n  auto_eject_hosts: true\n  server_failure_limit: 1\n  server_retry_timeout: 1000\n  timeout: 2000\n  \
             redis_db: {database}\n  servers:\n{}",
            servers.iter().map(|server| format!("   - {server}:1\n")).collect::<String>()
        )
    };
    let address = |node: usize| nodes[node].address().to_string();
    // The second server under another name.
    let shared = format!("localhost:{}", nodes[1].address().port());
    let one = pool("one", listen[0], 0, &[address(0), address(1)]);
    let two = pool("two", listen[1], 1, &[shared, address(2)]);
    let path = dir.path().join("both.yml");
    std::fs::write(&path, one.clone() + &two).expect("written");
    let start = |path: &Path, state: &str, flags: &[&str]| {
        let mut command = tied(env!("CARGO_BIN_EXE_switchyard"));
        command.args(["serve", "--admin", "127.0.0.1:0", "--workers", "1", "--twemproxy-config"]).arg(path).args(flags);
        command.arg("--state-dir").arg(dir.path().join(state));
        let log = dir.path().join("switchyard.log");
        let _ = std::fs::remove_file(&log);
        Process::start("switchyard", command, &log)
    };
    let mut refused = start(&path, "state", &["--misplaced-keys", "remove"]);
    assert_eq!(refused.wait(Duration::from_secs(20)).code(), Some(2), "{}", refused.log());
    let why = format!(
        "--misplaced-keys remove is refused: pool one shares servers with other pools of the file ({} with pool two)",
        address(1)
    );
    assert!(refused.log().contains(&why), "{}", refused.log());

    let switchyard = start(&path, "state", &[]);
    switchyard.expect_log(&["2 pools of twemproxy's configuration are served"]);
    for name in ["one", "two"] {
        let off = format!("auto_eject_hosts has no effect: pool {name} shares servers");
        assert_eq!(switchyard.log().matches(&off).count(), 1, "{}", switchyard.log());
        // Both pools write to one log, so each line names its pool.
        let lines_of = |what: &str| {
            switchyard.log().lines().filter(|line| line.contains(what)).map(str::to_owned).collect::<Vec<_>>()
        };
        assert!(lines_of(&off).iter().all(|line| line.ends_with(&format!(" pool={name}"))));
        let is_ready =
            |line: &String| line.contains("ready: clients connect to") && line.ends_with(&format!(" pool={name}"));
        until("its line is written", || {
            (lines_of("clients connect to").iter().filter(|line| is_ready(line)).count() == 1).then_some(())
        });
    }
    let mut clients = listen.map(client);
    for key in 0..100 {
        for (pool, client) in clients.iter_mut().enumerate() {
            assert_eq!(client.call(&["SET", &format!("key:{key}"), &pool.to_string()]), ok());
        }
    }
    let keyspace = |node: &Node| {
        node.cmd("INFO keyspace")
            .text()
            .lines()
            .filter(|line| line.starts_with("db"))
            .map(|line| line.split(',').next().expect("keys").to_owned())
            .collect::<Vec<_>>()
    };
    let before = keyspace(&nodes[1]);
    assert_eq!(before.len(), 2, "{before:?}");
    // With 60 keys each server owns some, whatever their ports.
    let keys: Vec<String> = (0..60).map(|key| format!("key:{key}")).collect();
    let both: Vec<&str> = ["MGET"].into_iter().chain(keys.iter().map(String::as_str)).collect();
    nodes[1].freeze();
    until("the server is down", || clients[0].call(&both).error().is_some().then_some(()));
    nodes[1].thaw();
    until("it is served again", || clients[0].call(&both).error().is_none().then_some(()));
    assert_eq!(keyspace(&nodes[1]), before);
    assert!(!switchyard.log().contains("is ejected"), "{}", switchyard.log());
    stop(switchyard);

    // Two routers with separate files do not know each other's pools. The server's ownership record reveals another
    // router, even if it is not running.
    let (first, second) = (dir.path().join("one.yml"), dir.path().join("two.yml"));
    std::fs::write(&first, one).expect("written");
    std::fs::write(&second, two.replace("redis_db: 1", "redis_db: 0")).expect("written");
    let mut earlier = start(&second, "second", &[]);
    let mut two = client(listen[1]);
    for key in 0..100 {
        assert_eq!(two.call(&["SET", &format!("own:{key}"), "1"]), ok());
    }
    earlier.signal(Signal::TERM);
    assert!(earlier.wait(Duration::from_secs(30)).success(), "{}", earlier.log());
    let own = |node: &Node| node.cmd("KEYS own:*").items().len();
    let before = own(&nodes[1]);
    assert!(before > 20, "{before}");
    let removing = start(&first, "first", &["--misplaced-keys", "remove"]);
    until("the other router is noticed", || {
        removing.log().contains("misplaced keys are removed later: node").then_some(())
    });
    assert!(removing.log().contains("another router has an ownership record there"), "{}", removing.log());
    // The other server belongs only to this router.
    assert_eq!(own(&nodes[1]), before);
}

#[test]
fn unsupported_settings_are_refused_with_a_remedy() {
    let fleet = Fleet::start();
    let text = fleet.file(fleet.listen);
    for (from, to, reason) in [
        ("distribution: ketama", "distribution: random", "another server than the one it was written to"),
        ("  redis: true\n  servers:\n   - 127.0.0.1", "  servers:\n   - 127.0.0.1", "Leave such pools to twemproxy"),
        ("hash: murmur", "hash: sha1", "not a valid hash"),
    ] {
        assert!(text.contains(from), "{from}");
        let path = fleet.dir.path().join("wrong.yml");
        std::fs::write(&path, text.replacen(from, to, 1)).expect("written");
        let mut command = tied(env!("CARGO_BIN_EXE_switchyard"));
        command
            .args(["serve", "--twemproxy-config"])
            .arg(&path)
            .args(["--state-dir"])
            .arg(fleet.dir.path().join("none"));
        let mut process = Process::start("switchyard", command, &fleet.dir.path().join("wrong.log"));
        assert_eq!(process.wait(Duration::from_secs(20)).code(), Some(2), "{}", process.log());
        assert!(process.log().contains(reason), "{}", process.log());
    }
}

#[test]
fn a_reload_names_pools_that_need_a_restart() {
    let fleet = Fleet::start();
    let switchyard = fleet.switchyard();
    let mut alpha = client(fleet.listen[0]);
    assert_eq!(alpha.cmd("SET k v"), ok());
    let port = ports::free();
    // A single server has every key, whatever the distribution.
    let more = format!(
        "gamma:\n  listen: 127.0.0.1:{port}\n  distribution: random\n  redis: true\n  servers:\n   - {}:1\n",
        Node::start(&NodeOptions::default()).address()
    );
    let write = |text: &str| std::fs::write(fleet.dir.path().join("switchyard.yml"), text).expect("written");
    write(&format!("{}\n{more}", fleet.file(fleet.listen)));
    switchyard.signal(Signal::HUP);
    switchyard.expect_log(&["pool gamma is new in the file and not served yet: it needs a restart"]);
    write(&fleet.file([ports::free(), fleet.listen[1]]));
    switchyard.signal(Signal::HUP);
    switchyard.expect_log(&["the listen address of pool alpha needs a restart"]);
    assert_eq!(alpha.cmd("GET k"), bulk("v"), "the pool is still served");
}
