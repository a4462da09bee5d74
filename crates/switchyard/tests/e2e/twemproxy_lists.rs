//! The server list of a twemproxy pool changes while clients use it. Afterwards a real `nutcracker` with the new file
//! finds each key.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::movectl::run_cli_at;
use crate::support::client::Client;
use crate::support::node::{Node, NodeOptions};
use crate::support::process::{Process, tied};
use crate::support::value::{Value, bulk, int, ok};
use crate::support::{ports, until, until_within};

/// Hundreds of arcs must move, on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

const KEYS: usize = 400;

struct Pool {
    dir: TempDir,
    nodes: Vec<Node>,
    distribution: &'static str,
    listen: u16,
    admin: u16,
}

fn local(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

fn client(port: u16) -> Client {
    until("a client is served", || Client::try_connect(local(port)).ok())
}

impl Pool {
    fn new(distribution: &'static str) -> Pool {
        let nodes = (0..3).map(|_| Node::start(&NodeOptions::default())).collect();
        Pool {
            dir: TempDir::new().expect("a directory"),
            nodes,
            distribution,
            listen: ports::free(),
            admin: ports::free(),
        }
    }

    /// Writes a file with these servers.
    fn write(&self, name: &str, listen: u16, servers: &[usize]) -> PathBuf {
        let head = format!(
            "pool:\n  listen: 127.0.0.1:{listen}\n  hash: fnv1a_64\n  hash_tag: \"{{}}\"\n  distribution: {}\n  redis: true\n  servers:\n",
            self.distribution
        );
        let line = |server: &usize| format!("   - {}:{} s{server}\n", self.nodes[*server].address(), 1 + server % 2);
        let path = self.dir.path().join(name);
        std::fs::write(&path, head + &servers.iter().map(line).collect::<String>()).expect("written");
        path
    }

    fn start(&self, flags: &[&str]) -> Process {
        let mut command = tied(env!("CARGO_BIN_EXE_switchyard"));
        command.args(["serve", "--workers", "2", "--admin"]).arg(local(self.admin).to_string()).args(flags);
        command.arg("--twemproxy-config").arg(self.dir.path().join("pool.yml"));
        command.arg("--state-dir").arg(self.dir.path().join("state"));
        Process::start("switchyard", command, &self.dir.path().join("switchyard.log"))
    }

    /// Changes the servers in the file, and reloads.
    fn change(&self, router: &Process, servers: &[usize]) {
        self.write("pool.yml", self.listen, servers);
        router.signal(Signal::HUP);
    }

    /// Waits until the moves for a changed list have started and ended.
    fn wait_for_moves(&self, has_begun: impl Fn() -> bool) {
        until_within(TIMEOUT, "keys follow the list", has_begun);
        let said = run_cli_at(local(self.admin), "moves watch");
        assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    }

    /// Checks that a nutcracker with these servers finds each key without a request to other servers.
    fn are_keys_where_nutcracker_looks(&self, servers: &[usize]) {
        let port = ports::free();
        let file = self.write("nutcracker.yml", port, servers);
        let mut command = tied("nutcracker");
        command.arg("-c").arg(file).args(["-a", "127.0.0.1", "-s", &ports::free().to_string(), "-v", "1"]);
        let _nutcracker = Process::start("nutcracker", command, &self.dir.path().join("nutcracker.log"));
        let mut theirs = client(port);
        for n in 0..KEYS {
            assert_eq!(theirs.call(&["GET", &format!("key:{n}")]), bulk(n.to_string()), "key:{n}");
        }
        assert_eq!(
            self.nodes.iter().map(|node| node.cmd("DBSIZE").int()).sum::<i64>(),
            client(self.listen).cmd("DBSIZE").int()
        );
    }
}

/// Number of times that keys have started to follow a list.
fn followed(router: &Process) -> usize {
    router.log().matches("keys follow the list of servers:").count()
}

/// Returns all names of a complete SCAN.
fn scanned(client: &mut Client) -> std::collections::BTreeSet<String> {
    let (mut cursor, mut found) = ("0".to_owned(), std::collections::BTreeSet::new());
    loop {
        let answer = client.cmd(&format!("SCAN {cursor} COUNT 37"));
        cursor = answer.items()[0].text();
        found.extend(answer.items()[1].items().iter().map(Value::text));
        if cursor == "0" {
            return found;
        }
    }
}

/// Runs clients until `body` ends: each reply must have the newest value, no SCAN may miss a key, and no command may
/// fail.
fn checked(port: u16, body: impl FnOnce()) {
    struct Ends<'s>(&'s AtomicBool);
    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    let write = |number: usize| {
        let (mut client, mut value) = (client(port), 0_u64);
        while !stop.load(Ordering::Relaxed) {
            value += 1;
            for key in 0..60 {
                assert_eq!(client.cmd(&format!("SET {number}:{key} {value}")), ok());
            }
            for key in 0..60 {
                assert_eq!(client.cmd(&format!("GET {number}:{key}")), bulk(value.to_string()), "of client {number}");
            }
            // A single key is in one slot, whatever the list.
            client.cmd("MULTI");
            client.cmd(&format!("INCR count:{number}"));
            client.cmd(&format!("INCR count:{number}"));
            assert_eq!(client.cmd("EXEC").items().last(), Some(&int(2 * value as i64)));
            rounds.fetch_add(1, Ordering::Relaxed);
        }
    };
    let scan = || {
        let mut client = client(port);
        while !stop.load(Ordering::Relaxed) {
            let found = scanned(&mut client);
            let missing = (0..KEYS).map(|n| format!("key:{n}")).find(|key| !found.contains(key));
            assert_eq!(missing, None, "SCAN misses a key");
        }
    };
    std::thread::scope(|scope| {
        let _ends = Ends(&stop);
        let write = &write;
        (0..2).for_each(|number| drop(scope.spawn(move || write(number))));
        scope.spawn(scan);
        body();
    });
    assert!(rounds.load(Ordering::Relaxed) > 3, "clients were served");
}

fn servers_join_and_leave(distribution: &'static str) {
    let mut pool = Pool::new(distribution);
    pool.write("pool.yml", pool.listen, &[0, 1]);
    let mut router = pool.start(&[]);
    let mut first = client(pool.listen);
    for n in 0..KEYS {
        assert_eq!(first.call(&["SET", &format!("key:{n}"), &n.to_string()]), ok());
    }
    // Blocked clients, and a client between MULTI and EXEC, from before the change.
    let mut waiting: Vec<Client> = (0..12).map(|_| client(pool.listen)).collect();
    for (n, client) in waiting.iter_mut().enumerate() {
        client.post(&format!("BLPOP queue:{n} 0"));
    }
    let mut queued = client(pool.listen);
    for line in ["MULTI", "SET {one}a 1", "SET {one}b 1"] {
        queued.cmd(line);
    }
    let mut watching = client(pool.listen);
    for line in ["WATCH watched", "MULTI", "SET watched 1"] {
        watching.cmd(line);
    }
    checked(pool.listen, || {
        pool.change(&router, &[0, 1, 2]);
        pool.wait_for_moves(|| followed(&router) == 1);
    });
    pool.are_keys_where_nutcracker_looks(&[0, 1, 2]);
    assert!(pool.nodes[2].cmd("DBSIZE").int() > 20);
    assert_eq!(queued.cmd("EXEC"), Value::Array(vec![ok(), ok()]));
    let ended = watching.cmd("EXEC");
    assert!(ended.error().is_none(), "{ended:?}");
    for (n, client) in waiting.iter_mut().enumerate() {
        assert_eq!(first.cmd(&format!("LPUSH queue:{n} {n}")), int(1));
        assert_eq!(
            client.reply(),
            Value::Array(vec![bulk(format!("queue:{n}")), bulk(n.to_string())]),
            "a client that waits is served"
        );
    }

    // A server is removed from the file, and the router is killed during the moves.
    pool.change(&router, &[1, 2]);
    until_within(TIMEOUT, "keys begin to follow", || followed(&router) == 2);
    router.kill();
    router = pool.start(&[]);
    until("it is served again", || Client::try_connect(local(pool.listen)).ok());
    pool.wait_for_moves(|| true);
    until_within(TIMEOUT, "the server has left", || {
        router.log().contains("node s0 is no longer in the list of servers")
    });
    assert_eq!(pool.nodes[0].cmd("DBSIZE"), int(0), "nothing is left at it");
    pool.are_keys_where_nutcracker_looks(&[1, 2]);

    // The server returns at another address, under its old name.
    let said = run_cli_at(local(pool.admin), "nodes drain s2 --dry-run");
    assert!(said.out.contains("% of the keys move"), "{}{}", said.out, said.err);
    let fresh = Node::start(&NodeOptions::default());
    pool.nodes[0] = fresh;
    pool.change(&router, &[0, 1, 2]);
    pool.wait_for_moves(|| followed(&router) == 3);
    pool.are_keys_where_nutcracker_looks(&[0, 1, 2]);
    let said = run_cli_at(local(pool.admin), "nodes drain s2 --wait --goal fast");
    assert_eq!(said.code, 0, "{}{}", said.out, said.err);
    pool.are_keys_where_nutcracker_looks(&[0, 1]);

    // Moves have left keys of some slots at the server, which may be last copies. Only keys of other slots are
    // misplaced there.
    router.kill();
    for n in 0..KEYS {
        assert_eq!(pool.nodes[2].cmd(&format!("SET key:{n} misplaced")), ok());
    }
    let _again = pool.start(&["--misplaced-keys", "remove"]);
    until("the misplaced keys are removed", || {
        let left = pool.nodes[2].cmd("DBSIZE").int();
        (left < KEYS as i64).then(|| assert!(left > 0, "keys of slots of earlier moves stay"))
    });
    let mut last = client(pool.listen);
    for n in 0..KEYS {
        assert_eq!(last.cmd(&format!("GET key:{n}")), bulk(n.to_string()));
    }
}

#[test]
fn keys_follow_the_list_of_a_ketama_pool() {
    servers_join_and_leave("ketama");
}

#[test]
fn keys_follow_the_list_of_a_modula_pool() {
    servers_join_and_leave("modula");
}
