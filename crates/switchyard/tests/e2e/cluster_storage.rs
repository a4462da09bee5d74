//! A cluster as storage: redirects, transactions and scripts in front of members, also while slots migrate.

use std::collections::BTreeSet;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::movectl_history::Recording;
use crate::support::slots::slot;
use crate::support::{Client, Node, NodeOptions, Router, RouterOptions, Value, bulk, direct, int, ok, ports, until};

/// Port of a node for TLS, if it has one.
pub(crate) fn tls_port(node: &Node) -> Option<u16> {
    let setting = node.cmd("CONFIG GET tls-port");
    setting.items().get(1).and_then(|port| port.text().parse().ok()).filter(|port| *port > 0)
}

/// Waits until all members know each other. `meet` sends CLUSTER MEET, again after some seconds: a member forgets
/// a handshake after the node timeout, which a busy machine can exceed.
pub(crate) fn introduce(nodes: &[Node], meet: impl Fn()) {
    let known = format!("cluster_known_nodes:{}\r", nodes.len());
    let mut next = Instant::now();
    until("the members know each other", || {
        if Instant::now() >= next {
            meet();
            next = Instant::now() + Duration::from_secs(5);
        }
        nodes.iter().all(|node| {
            let info = node.cmd("CLUSTER INFO").text();
            info.contains("cluster_state:ok") && info.contains(&known)
        })
    });
}

/// Members of a cluster, each with an equal share of the slots, and then a replica of each, if there are any.
pub(crate) struct Members {
    pub(crate) nodes: Vec<Node>,
    pub(crate) ids: Vec<String>,
}

impl Members {
    pub(crate) fn start(count: usize) -> Members {
        Self::start_of(count, 0, 0)
    }

    /// `replicas`: number of members with a replica.
    pub(crate) fn start_with(primaries: usize, replicas: usize) -> Members {
        Self::start_of(primaries, replicas, 0)
    }

    /// `fresh`: number of primaries without slots, after all others.
    pub(crate) fn start_of(primaries: usize, replicas: usize, fresh: usize) -> Members {
        Self::start_each(primaries, replicas, fresh, &Vec::new)
    }

    /// `more`: further arguments of each member.
    pub(crate) fn start_each(
        primaries: usize,
        replicas: usize,
        fresh: usize,
        more: &(dyn Fn() -> Vec<String> + Sync),
    ) -> Members {
        let count = primaries + replicas + fresh;
        let start = || {
            let bus = ports::free().to_string();
            // Without it, a member that loses its last slot becomes a replica.
            let stays = ["--cluster-allow-replica-migration", "no"];
            let args = ["--cluster-enabled", "yes", "--cluster-node-timeout", "2000", "--cluster-port", &bus];
            let mut options = NodeOptions::args(&[&args[..], &stays].concat());
            options.args.extend(more());
            (Node::start(&options), bus)
        };
        let started: Vec<(Node, String)> = std::thread::scope(|scope| {
            let starts: Vec<_> = (0..count).map(|_| scope.spawn(start)).collect();
            starts.into_iter().map(|start| start.join().expect("a member")).collect()
        });
        let (first, bus) = (started[0].0.address(), started[0].1.clone());
        let port = tls_port(&started[0].0).unwrap_or(first.port());
        let meet = format!("CLUSTER MEET {} {port} {bus}", first.ip());
        for (number, (node, _)) in started.iter().enumerate() {
            node.cmd(&format!("CLUSTER SET-CONFIG-EPOCH {}", number + 1));
            if number < primaries {
                let (from, to) = (number * 16384 / primaries, (number + 1) * 16384 / primaries - 1);
                assert_eq!(node.cmd(&format!("CLUSTER ADDSLOTSRANGE {from} {to}")), ok());
            }
        }
        let nodes: Vec<Node> = started.into_iter().map(|(node, _)| node).collect();
        let ids: Vec<String> = nodes.iter().map(|node| node.cmd("CLUSTER MYID").text()).collect();
        introduce(&nodes, || nodes[1..].iter().for_each(|node| assert_eq!(node.cmd(&meet), ok())));
        let with_data = primaries + replicas;
        for (replica, id) in nodes[primaries..with_data].iter().zip(&ids) {
            until("it can be a replica", || replica.cmd(&format!("CLUSTER REPLICATE {id}")) == ok());
        }
        for replica in &nodes[primaries..with_data] {
            until("the replica has its data", || {
                replica.cmd("INFO replication").text().contains("master_link_status:up")
            });
        }
        let members = Members { nodes, ids };
        until("the members know the replicas", || {
            let shown =
                |node: &Node| node.cmd("CLUSTER SLOTS").items().iter().map(|range| range.items().len()).sum::<usize>();
            members.nodes.iter().all(|node| shown(node) == 3 * primaries + replicas)
        });
        members
    }

    pub(crate) fn addresses(&self) -> Vec<SocketAddr> {
        self.nodes.iter().map(Node::address).collect()
    }

    pub(crate) fn router(&self, config: &str) -> Router {
        let options = RouterOptions { is_cluster: true, ..RouterOptions::config(config) };
        Router::start(&self.addresses()[..1], &options)
    }

    /// Waits until all members know the same configuration epochs. Two members that take slots with one epoch would
    /// dispute them, and delete keys.
    pub(crate) fn settle(&self) {
        let epochs = |node: &Node| {
            let text = node.cmd("CLUSTER NODES").text();
            let mut epochs: Vec<(String, String)> = text
                .lines()
                .map(|line| {
                    let fields: Vec<&str> = line.split(' ').collect();
                    (fields[0].to_owned(), fields[6].to_owned())
                })
                .collect();
            epochs.sort();
            epochs
        };
        until("the members know the same epochs", || {
            let all: Vec<_> = self.nodes.iter().map(epochs).collect();
            all.iter().all(|known| *known == all[0])
        });
    }

    /// Number of the member that owns the slot of a key, once all members agree.
    pub(crate) fn owner(&self, key: &str) -> usize {
        let slot = i64::from(slot(key.as_bytes()));
        let owner_by = |node: &Node| {
            let shown = node.cmd("CLUSTER SLOTS");
            let range = shown.items().iter().find(|range| {
                let range = range.items();
                (range[0].int()..=range[1].int()).contains(&slot)
            })?;
            let id = range.items()[2].items()[2].text();
            self.ids.iter().position(|known| *known == id)
        };
        until("the members agree on the owner", || {
            let owners: Vec<Option<usize>> = self.nodes.iter().map(owner_by).collect();
            owners[0].filter(|_| owners.iter().all(|owner| *owner == owners[0]))
        })
    }

    /// Begins to migrate the slot of a key.
    pub(crate) fn open(&self, key: &str, from: usize, to: usize) {
        let slot = slot(key.as_bytes());
        assert_eq!(self.nodes[to].cmd(&format!("CLUSTER SETSLOT {slot} IMPORTING {}", self.ids[from])), ok());
        assert_eq!(self.nodes[from].cmd(&format!("CLUSTER SETSLOT {slot} MIGRATING {}", self.ids[to])), ok());
    }

    /// Migrates some keys of a slot.
    pub(crate) fn migrate(&self, from: usize, to: usize, keys: &[String]) {
        let address = self.nodes[to].address();
        let mut words: Vec<String> =
            ["MIGRATE", &address.ip().to_string(), &address.port().to_string(), "", "0", "5000", "KEYS"]
                .map(str::to_owned)
                .to_vec();
        words.extend(keys.iter().cloned());
        let mut client = self.nodes[from].client();
        client.send(&words);
        client.reply();
    }

    /// Migrates the remaining keys, and gives the slot to the target.
    pub(crate) fn close(&self, key: &str, from: usize, to: usize) {
        let slot = slot(key.as_bytes());
        loop {
            let left = self.nodes[from].cmd(&format!("CLUSTER GETKEYSINSLOT {slot} 10"));
            let keys: Vec<String> = left.items().iter().map(Value::text).collect();
            if keys.is_empty() {
                break;
            }
            self.migrate(from, to, &keys);
        }
        let others = (0..self.nodes.len()).filter(|number| ![from, to].contains(number));
        for number in [to, from].into_iter().chain(others) {
            self.nodes[number].cmd(&format!("CLUSTER SETSLOT {slot} NODE {}", self.ids[to]));
        }
    }

    pub(crate) fn is_primary(&self, number: usize) -> bool {
        self.nodes[number].cmd("ROLE").items()[0].text() == "master"
    }

    /// Moves the slot of a key to another member.
    pub(crate) fn reshard(&self, key: &str) {
        self.settle();
        let from = self.owner(key);
        let to = (0..self.nodes.len()).cycle().skip(from + 1).find(|at| self.is_primary(*at)).expect("another primary");
        self.open(key, from, to);
        self.close(key, from, to);
    }
}

#[test]
fn commands_of_every_kind_work_in_front_of_a_cluster() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    let router = members.router("");
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("MSET a 1 b 2 c 3 {a}x 4"), ok());
    assert_eq!(
        client.cmd("MGET a b c nothing {a}x"),
        Value::Array(vec![bulk("1"), bulk("2"), bulk("3"), Value::Nil, bulk("4")])
    );
    assert_eq!((client.cmd("EXISTS a b nothing"), client.cmd("DBSIZE")), (int(2), int(4)));
    // Members would refuse these keys, although one of them may own both slots.
    let error = client.cmd("RENAME a b");
    assert!(error.error().is_some_and(|error| error.starts_with("CROSSSLOT")), "{error:?}");
    assert_eq!(client.cmd("EVAL \"return redis.call('INCRBY', KEYS[1], ARGV[1])\" 1 a 5"), int(6));
    let sha = client.cmd("SCRIPT LOAD \"return redis.call('GET', KEYS[1])\"").text();
    for key in ["a", "b", "c"] {
        assert!(client.cmd(&format!("EVALSHA {sha} 1 {key}")).error().is_none());
    }
    assert_eq!(client.cmd("MULTI"), ok());
    client.cmd("INCR a");
    client.cmd("GET {a}x");
    assert_eq!(client.cmd("EXEC"), Value::Array(vec![int(7), bulk("4")]));
    assert_eq!(client.cmd("WATCH a"), ok());
    client.cmd("MULTI");
    client.cmd("SET a watched");
    assert_eq!(client.cmd("EXEC"), Value::Array(vec![ok()]));
    assert_eq!((client.cmd("LPUSH l v"), client.cmd("BLPOP l 1")), (int(1), Value::Array(vec![bulk("l"), bulk("v")])));
    for (refused, why) in
        [("SELECT 1", "serves only database 0 in front of a cluster"), ("SWITCHYARD BALANCE", "this changes the fleet")]
    {
        let error = client.cmd(refused);
        assert!(error.error().is_some_and(|error| error.contains(why)), "{refused}: {error:?}");
    }
    assert_eq!((client.cmd("DEL a b c {a}x"), client.cmd("FLUSHALL"), client.cmd("DBSIZE")), (int(4), ok(), int(0)));
    let (status, body) = crate::support::http::get(router.admin(), "/readyz");
    assert_eq!(status, 200, "{body}");
    assert!(router.metrics().contains("switchyard_slots_unserved 0"));
}

#[test]
fn a_moved_slot_costs_no_client_an_error() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    let router = members.router("");
    let mut client = Client::connect(router.address());
    // Without redirects: the router has an older map.
    for (number, key) in ["a", "b", "c"].into_iter().enumerate() {
        client.cmd(&format!("SET {key} {number}"));
        members.reshard(key);
        assert_eq!(client.cmd(&format!("GET {key}")), bulk(number.to_string()));
        assert_eq!(
            client.cmd(&format!("MGET {{{key}}}x {key}")),
            Value::Array(vec![Value::Nil, bulk(number.to_string())])
        );
    }
    // The map of all workers has changed: a command goes to the owner at once.
    let before = members.nodes[members.owner("a")].cmd("INFO errorstats").text();
    for _ in 0..10 {
        assert_eq!(Client::connect(router.address()).cmd("GET a"), bulk("0"));
    }
    assert_eq!(members.nodes[members.owner("a")].cmd("INFO errorstats").text(), before);
    // A transaction that was queued before the slot moved.
    client.cmd("MULTI");
    client.cmd("SET a queued");
    client.cmd("EVAL \"return redis.call('GET', KEYS[1])\" 1 a");
    members.reshard("a");
    assert_eq!(client.cmd("EXEC"), Value::Array(vec![ok(), bulk("queued")]));
    // Watched keys that have moved count as changed.
    client.cmd("WATCH a");
    client.cmd("MULTI");
    client.cmd("SET a lost");
    members.reshard("a");
    assert_eq!((client.cmd("EXEC"), client.cmd("GET a")), (Value::Nil, bulk("queued")));
    assert_eq!(client.cmd("EVAL \"return redis.call('APPEND', KEYS[1], '!')\" 1 a"), int(7));
    members.reshard("a");
    assert_eq!(client.cmd("EVAL \"return redis.call('APPEND', KEYS[1], '!')\" 1 a"), int(8));
}

#[test]
fn commands_for_a_migrating_slot_reach_the_member_with_the_key() {
    if direct() {
        return;
    }
    let members = Members::start(2);
    let router = members.router("[storage]\nwait-max = \"500ms\"\n");
    let mut client = Client::connect(router.address());
    client.cmd("MSET {k}1 one {k}2 two");
    let from = members.owner("{k}1");
    let to = 1 - from;
    members.open("{k}1", from, to);
    // ASK: absent at the source.
    assert_eq!((client.cmd("SET {k}3 three"), client.cmd("GET {k}3")), (ok(), bulk("three")));
    assert_eq!(members.nodes[from].cmd("GET {k}3").error().map(|error| error.starts_with("ASK")), Some(true));
    assert_eq!(client.cmd("EVAL \"return redis.call('GET', KEYS[1])\" 1 {k}3"), bulk("three"));
    client.cmd("MULTI");
    client.cmd("INCR {k}count");
    client.cmd("INCR {k}count");
    assert_eq!(client.cmd("EXEC"), Value::Array(vec![int(1), int(2)]));
    assert_eq!(client.cmd("GET {k}1"), bulk("one"));
    // TRYAGAIN: each member has one of the keys, for longer than the command may wait.
    members.migrate(from, to, &["{k}1".to_owned()]);
    let error = client.cmd("MGET {k}1 {k}2");
    assert!(
        error.error().is_some_and(|error| error.starts_with("NODEDOWN") && error.contains("wait-max")),
        "{error:?}"
    );
    // A script may return any error.
    let error = client.cmd("EVAL \"return redis.error_reply('TRYAGAIN later')\" 1 {k}2");
    assert_eq!(error.error(), Some("TRYAGAIN later"));
    let error = client.cmd("EVAL \"return redis.error_reply('MOVED 1 127.0.0.1:1')\" 1 {k}2");
    assert_eq!(error.error(), Some("MOVED 1 127.0.0.1:1"));
    // With the slot of its own key: it does not direct the router to an address.
    let stranger = TcpListener::bind("127.0.0.1:0").expect("a port");
    stranger.set_nonblocking(true).expect("a socket");
    let (slot, address) = (slot(b"{k}2"), stranger.local_addr().expect("an address"));
    for kind in ["ASK", "MOVED"] {
        let error = client.cmd(&format!("EVAL \"return redis.error_reply('{kind} {slot} {address}')\" 1 {{k}}2"));
        assert!(error.error().is_some_and(|error| error.starts_with("NODEDOWN")), "{error:?}");
    }
    assert!(stranger.accept().is_err(), "the router has connected to an address of a script");
    assert_eq!(client.cmd("GET {k}2"), bulk("two"));
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| Client::connect(router.address()).cmd("MGET {k}1 {k}2"));
        members.close("{k}1", from, to);
        assert_eq!(waiting.join().expect("a reply"), Value::Array(vec![bulk("one"), bulk("two")]));
    });
}

/// A client's commands for one key are executed in their order, wherever its slot is.
#[test]
fn pipelines_keep_their_order_while_slots_migrate() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    let router = members.router("");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let clients: Vec<_> = (0..4)
            .map(|number| {
                let (address, is_over) = (router.address(), &is_over);
                scope.spawn(move || {
                    let (mut client, mut count) = (Client::connect(address), 0);
                    let key = format!("{{p}}{number}");
                    while !is_over.load(Ordering::Relaxed) || count < 2000 {
                        (0..50).for_each(|_| client.post(&format!("INCR {key}")));
                        for _ in 0..50 {
                            count += 1;
                            assert_eq!(client.reply(), int(count), "{key}");
                        }
                    }
                    count
                })
            })
            .collect();
        (0..20).for_each(|_| members.reshard("p"));
        is_over.store(true, Ordering::Relaxed);
        let counts: Vec<i64> = clients.into_iter().map(|client| client.join().expect("in order")).collect();
        let mut client = Client::connect(router.address());
        for (number, count) in counts.into_iter().enumerate() {
            assert_eq!(client.cmd(&format!("GET {{p}}{number}")), bulk(count.to_string()));
        }
    });
}

#[test]
fn histories_of_two_routers_are_linearizable_while_slots_migrate() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    let routers = [members.router(""), members.router("")];
    let addresses = routers.each_ref().map(Router::address);
    let recording = Recording::start(&addresses, |number| format!("{{h{}}}{number}", number % 3));
    for round in 0..8 {
        recording.wait_for(100);
        members.reshard(["h0", "h1", "h2"][round % 3]);
    }
    recording.wait_for(100);
    let (tally, keys) = recording.finish().expect("linearizable");
    assert!(tally.unknown == 0 && tally.errors.is_empty() && keys.len() > 9, "{tally:?}");
}

#[test]
fn a_reload_keeps_the_members() {
    if direct() {
        return;
    }
    let members = Members::start(2);
    let router = members.router("[clients]\npipeline-max = 100\n");
    let mut client = Client::connect(router.address());
    client.cmd("MSET a 1 b 2");
    std::fs::write(router.config_file(), "[clients]\npipeline-max = 200\n").expect("a file");
    router.process().signal(Signal::HUP);
    until("the configuration is reloaded", || router.process().log().contains("reloaded: 1 applied"));
    assert_eq!(client.cmd("MGET a b"), Value::Array(vec![bulk("1"), bulk("2")]));
    members.reshard("a");
    assert_eq!(client.cmd("MGET a b"), Value::Array(vec![bulk("1"), bulk("2")]));
}

#[test]
fn blocked_clients_follow_their_slot() {
    if direct() {
        return;
    }
    let members = Members::start(2);
    let router = members.router("");
    let mut client = Client::connect(router.address());
    let mut blocked = Client::connect(router.address());
    blocked.post("BLPOP l 0");
    let waits = |number: usize| members.nodes[number].cmd("INFO clients").text().contains("blocked_clients:1");
    let from = members.owner("l");
    until("it waits at the owner", || waits(from));
    members.reshard("l");
    until("it waits at the next owner", || waits(1 - from));
    assert_eq!(client.cmd("RPUSH l one"), int(1));
    assert_eq!(blocked.reply(), Value::Array(vec![bulk("l"), bulk("one")]));
    // A list that begins at the target of a migration.
    blocked.post("BLPOP l 0");
    until("it waits again", || waits(1 - from));
    members.open("l", 1 - from, from);
    assert_eq!(client.cmd("RPUSH l two"), int(1));
    members.close("l", 1 - from, from);
    assert_eq!(blocked.reply(), Value::Array(vec![bulk("l"), bulk("two")]));
    // A command that begins to wait while its slot migrates waits at the target.
    members.open("l", from, 1 - from);
    blocked.post("BLPOP l 0");
    until("it waits at the target", || waits(1 - from));
    assert_eq!(client.cmd("RPUSH l three"), int(1));
    assert_eq!(blocked.reply(), Value::Array(vec![bulk("l"), bulk("three")]));
    // A time-out counts from the beginning.
    blocked.post("BLPOP l 0.5");
    members.close("l", from, 1 - from);
    assert_eq!(blocked.reply(), Value::Nil);
}

#[test]
fn each_message_is_delivered_once() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    members.nodes.iter().for_each(|node| assert_eq!(node.cmd("CONFIG SET notify-keyspace-events K$"), ok()));
    let routers = [members.router(""), members.router("")];
    let mut clients = routers.each_ref().map(|router| Client::connect(router.address()));
    let mut subscribers = routers.each_ref().map(|router| Client::connect(router.address()));
    for subscriber in &mut subscribers {
        subscriber.cmd("SUBSCRIBE news");
        subscriber.cmd("PSUBSCRIBE __keyspace@0__:*");
    }
    // At a router, at a member, in a transaction, and by a script.
    clients[0].cmd("PUBLISH news one");
    members.nodes[2].cmd("PUBLISH news two");
    clients[1].cmd("MULTI");
    clients[1].cmd("SET a 1");
    clients[1].cmd("PUBLISH news three");
    clients[1].cmd("EXEC");
    clients[0].cmd("MSET b 2 c 3");
    clients[0].cmd("PUBLISH news end");
    for subscriber in &mut subscribers {
        let (mut news, mut events) = (Vec::new(), Vec::new());
        while news.len() < 4 || events.len() < 3 {
            let message = subscriber.reply();
            let parts: Vec<String> = message.items().iter().map(Value::text).collect();
            match parts[0].as_str() {
                "message" => news.push(parts[2].clone()),
                _ => events.push(parts[2].clone()),
            }
        }
        events.sort();
        assert_eq!(events, ["__keyspace@0__:a", "__keyspace@0__:b", "__keyspace@0__:c"]);
        // Members order messages of several publishers differently.
        news.sort();
        assert_eq!(news, ["end", "one", "three", "two"]);
        assert_eq!(subscriber.cmd("UNSUBSCRIBE news").items()[0].text(), "unsubscribe", "nothing came twice");
    }
}

#[test]
fn histories_are_linearizable_during_planned_failovers() {
    if direct() {
        return;
    }
    let members = Members::start_with(3, 3);
    let routers = [members.router(""), members.router("")];
    let addresses = routers.each_ref().map(Router::address);
    let recording = Recording::start(&addresses, |number| format!("{{h{}}}{number}", number % 3));
    for round in 0..4 {
        recording.wait_for(100);
        let (primary, replica) = (round % 3, 3 + round % 3);
        let next = if members.is_primary(primary) { replica } else { primary };
        let mut attempts = 0;
        until("the replica is the primary", || {
            // A failover that does not get its votes in time is given up.
            if attempts % 600 == 0 {
                members.nodes[next].cmd("CLUSTER FAILOVER");
            }
            attempts += 1;
            members.is_primary(next)
        });
    }
    recording.wait_for(100);
    let (tally, keys) = recording.finish().expect("linearizable");
    assert!(tally.unknown == 0 && tally.errors.is_empty() && keys.len() > 9, "{tally:?}");
}

#[test]
fn a_dead_primary_costs_only_commands_in_flight() {
    if direct() {
        return;
    }
    let mut members = Members::start_with(3, 3);
    let router = members.router("[storage]\nwait-max = \"60s\"\n");
    let mut client = Client::connect(router.address());
    let mut blocked = Client::connect(router.address());
    assert_eq!(client.cmd("MSET a 1 b 2 c 3"), ok());
    let owner = members.owner("a");
    assert_eq!(members.nodes[owner].cmd("WAIT 1 0"), int(1));
    blocked.post("BLPOP {a}list 0");
    until("it waits", || members.nodes[owner].cmd("INFO clients").text().contains("blocked_clients:1"));
    members.nodes[owner].kill();
    // It waits for the next owner.
    assert_eq!(
        (client.cmd("SET a 4"), client.cmd("MGET a b c")),
        (ok(), Value::Array(vec![bulk("4"), bulk("2"), bulk("3")]))
    );
    assert!(members.is_primary(owner + 3));
    assert!(blocked.try_reply().is_err(), "as after the end of a server");
}

/// Starts three primaries with a replica each and a router that waits 60 s for them. Returns a client, which has set `a`,
/// and the owner of `a`.
fn with_replicas_and_long_waits() -> (Members, Router, Client, usize) {
    let members = Members::start_with(3, 3);
    let router = members.router("[storage]\nwait-max = \"60s\"\n[nodes]\ncommand-timeout = \"60s\"\n");
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("SET a old"), ok());
    let owner = members.owner("a");
    (members, router, client, owner)
}

/// A primary that was suspended replies to commands that it received before, although its replica has executed later
/// ones.
#[test]
fn replies_of_a_replaced_primary_do_not_count() {
    if direct() {
        return;
    }
    let (members, router, mut client, owner) = with_replicas_and_long_waits();
    assert_eq!(members.nodes[owner].cmd("WAIT 1 0"), int(1));
    members.nodes[owner].freeze();
    let (mut reader, mut writer) = (Client::connect(router.address()), Client::connect(router.address()));
    reader.post("GET a");
    writer.post("SET a lost");
    until("the replica is the primary", || members.is_primary(owner + 3));
    until("the next owner takes a write", || client.cmd("SET a new") == ok());
    // The next owner replies while the replaced one is silent.
    let read = reader.reply();
    assert!(read == bulk("new") || read == bulk("old"), "{read:?}");
    members.nodes[owner].thaw();
    let error = writer.reply();
    assert!(error.error().is_some_and(|error| error.starts_with("NODELOST")), "{error:?}");
    assert_eq!(client.cmd("GET a"), bulk("new"));
}

/// The suspended primary receives these transactions until the router has the next owner, each on a connection of its own.
#[test]
fn transactions_sent_just_before_a_failover_do_not_count() {
    if direct() {
        return;
    }
    let (members, router, mut client, owner) = with_replicas_and_long_waits();
    let mut others: Vec<Client> = (0..70).map(|_| Client::connect(router.address())).collect();
    for (number, other) in others.iter_mut().enumerate() {
        assert_eq!(other.cmd(&format!("WATCH {{a}}{number}")), ok());
    }
    members.nodes[owner].freeze();
    for (number, other) in others.iter_mut().enumerate() {
        ["MULTI", &format!("INCR {{a}}{number}"), "EXEC"].into_iter().for_each(|line| other.post(line));
        std::thread::sleep(Duration::from_millis(60));
    }
    until("the next owner takes a write", || client.cmd("SET a new") == ok());
    members.nodes[owner].thaw();
    for (number, other) in others.iter_mut().enumerate() {
        let replies = [other.reply(), other.reply(), other.reply()];
        if replies[2] == Value::Array(vec![int(1)]) {
            assert_eq!(client.cmd(&format!("GET {{a}}{number}")), bulk("1"), "{number} was executed");
        }
    }
}

#[test]
fn a_member_without_slots_serves_a_slot_that_migrates_to_it() {
    if direct() {
        return;
    }
    let members = Members::start_of(2, 0, 1);
    let router = members.router("");
    let mut client = Client::connect(router.address());
    client.cmd("MSET {k}1 one {k}2 two");
    let from = members.owner("{k}1");
    members.open("{k}1", from, 2);
    // No report contains this member yet.
    assert_eq!((client.cmd("SET {k}3 three"), client.cmd("GET {k}3")), (ok(), bulk("three")));
    members.migrate(from, 2, &["{k}1".to_owned()]);
    assert_eq!((client.cmd("GET {k}1"), client.cmd("GET {k}2")), (bulk("one"), bulk("two")));
    assert_eq!(scanned(&mut client), ["{k}1", "{k}2", "{k}3"].map(str::to_owned).into());
    // By a router that has received no redirect.
    let another = members.router("");
    assert_eq!(scanned(&mut Client::connect(another.address())), ["{k}1", "{k}2", "{k}3"].map(str::to_owned).into());
    members.close("{k}1", from, 2);
    assert_eq!(client.cmd("MGET {k}1 {k}2 {k}3"), Value::Array(vec![bulk("one"), bulk("two"), bulk("three")]));
    assert_eq!(client.cmd("DBSIZE"), int(3));
}

/// Keys of a whole scan.
fn scanned(client: &mut Client) -> BTreeSet<String> {
    let (mut cursor, mut found) = ("0".to_owned(), BTreeSet::new());
    loop {
        let reply = client.cmd(&format!("SCAN {cursor} COUNT 20"));
        found.extend(reply.items()[1].items().iter().map(Value::text));
        cursor = reply.items()[0].text();
        if cursor == "0" {
            return found;
        }
    }
}

#[test]
fn a_scan_finds_every_key_while_slots_migrate() {
    if direct() {
        return;
    }
    let members = Members::start_of(3, 0, 1);
    let router = members.router("");
    let mut client = Client::connect(router.address());
    // Many keys of few slots, which move, among others.
    let tags = ["s0", "s1", "s2"];
    let key = |number: usize| match number % 3 {
        0 => format!("k{number}"),
        _ => format!("{{{}}}{number}", tags[number % 9 / 3]),
    };
    let all: BTreeSet<String> = (0..600).map(key).collect();
    for key in &all {
        client.cmd(&format!("SET {key} v"));
    }
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let scans: Vec<_> = (0..2)
            .map(|_| {
                let (address, is_over, all) = (router.address(), &is_over, &all);
                scope.spawn(move || {
                    let (mut client, mut scans) = (Client::connect(address), 0);
                    while !is_over.load(Ordering::Relaxed) || scans < 3 {
                        let found = scanned(&mut client);
                        assert_eq!(all.difference(&found).collect::<Vec<_>>(), Vec::<&String>::new());
                        scans += 1;
                    }
                })
            })
            .collect();
        for round in 0..12 {
            members.settle();
            let key = format!("{{{}}}", tags[round % 3]);
            let from = members.owner(&key);
            let to = (from + 1 + round % 2) % 4;
            members.open(&key, from, to);
            // Slowly, so that scans see a part of its keys at each member.
            let slot = slot(key.as_bytes());
            for _ in 0..5 {
                let some = members.nodes[from].cmd(&format!("CLUSTER GETKEYSINSLOT {slot} 20"));
                members.migrate(from, to, &some.items().iter().map(Value::text).collect::<Vec<_>>());
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            members.close(&key, from, to);
        }
        is_over.store(true, Ordering::Relaxed);
        members.owner("{s2}");
        until("the router has the map", || client.cmd("DBSIZE") == int(all.len() as i64));
        scans.into_iter().for_each(|scan| scan.join().expect("every key"));
    });
}

#[test]
fn shard_channels_follow_their_slot() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    let router = members.router("");
    let mut client = Client::connect(router.address());
    let mut subscriber = Client::connect(router.address());
    subscriber.cmd("SSUBSCRIBE news");
    let message = |text: &str| Value::Array(vec![bulk("smessage"), bulk("news"), bulk(text)]);
    for round in 0..4 {
        let text = round.to_string();
        until("the owner has the subscription", || {
            members.nodes[members.owner("news")].cmd("PUBSUB SHARDNUMSUB news").items()[1] == int(1)
        });
        assert_eq!(client.cmd(&format!("SPUBLISH news {text}")), int(1));
        assert_eq!(subscriber.reply(), message(&text));
        members.reshard("news");
        // By a router with an old map.
        assert_eq!(Client::connect(router.address()).cmd("SSUBSCRIBE news").items()[2], int(1));
    }
}

#[test]
fn tracking_clients_learn_of_changes_at_the_next_owner() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    let router = members.router("");
    let mut client = Client::connect(router.address());
    let mut reader = Client::connect(router.address());
    client.cmd("MSET a 1 b 2");
    reader.cmd("HELLO 3");
    assert_eq!(reader.cmd("CLIENT TRACKING ON"), ok());
    let invalidation = |key: &str| Value::Push(vec![bulk("invalidate"), Value::Array(vec![bulk(key)])]);
    for round in 3..6 {
        let read = reader.cmd("GET a");
        members.reshard("a");
        assert_eq!(client.cmd(&format!("SET a {round}")), ok());
        assert_eq!(reader.reply(), invalidation("a"), "{read:?} is old");
    }
}
