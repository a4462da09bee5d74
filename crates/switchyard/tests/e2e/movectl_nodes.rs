//! Moves between nodes with TLS, with replicas that serve reads, and with a failover during the move.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::Value as Json;

use crate::movectl::{done, json, refused, run_cli};
use crate::movectl_moves::{eventually, report, the_move, wait_for};
use crate::replicas::{calls, caught_up, follow, sentinels};
use crate::support::certificates::Authority;
use crate::support::process::tied;
use crate::support::relay::Relay;
use crate::support::{Client, Node, NodeOptions, Router, RouterOptions, Value, bulk, direct, encode, int, ok, until};
use crate::tls::secure_node;

const KEYS: usize = 3000;

fn value(i: usize) -> String {
    format!("value {i} {}", "x".repeat(100))
}

fn fill(client: &mut Client) {
    let bytes: Vec<u8> = (0..KEYS).flat_map(|i| encode(&["SET", &format!("key:{i}"), &value(i)])).collect();
    assert!(client.pipeline(&bytes, KEYS).iter().all(|reply| reply == b"+OK\r\n"));
}

#[track_caller]
fn all_there(router: &Router) {
    let mut client = Client::connect(router.address());
    for i in 0..KEYS {
        assert_eq!(client.cmd(&format!("GET key:{i}")), bulk(value(i)), "key:{i}");
    }
}

fn total(node: &Node) -> i64 {
    node.cmd("DBSIZE").int()
}

#[test]
fn nodes_over_tls_take_part() {
    if direct() {
        return;
    }
    let authority = Authority::new();
    let pair = authority.sign("node", &["127.0.0.1"]);
    let own = authority.sign("router", &["switchyard"]);
    // Both require a client certificate.
    let (first, first_at) = secure_node(&pair, &authority, &["--tls-auth-clients", "yes"]);
    let (second, second_at) = secure_node(&pair, &authority, &["--tls-auth-clients", "yes"]);
    let config = format!(
        "[nodes]\ntls = true\ntls-ca-file = {:?}\ntls-cert-file = {:?}\ntls-key-file = {:?}\n\
         [[node]]\naddress = \"{first_at}\"\n[[node]]\naddress = \"{second_at}\"\n",
        authority.file(),
        own.certificate,
        own.key,
    );
    let router = Router::start(&[], &RouterOptions::config(config));
    fill(&mut Client::connect(router.address()));
    let (one, other) = (first_at.to_string(), second_at.to_string());
    done(&router, &format!("move --from {one} --to {other} --all --goal fast --wait"));
    assert_eq!((total(&first), total(&second)), (0, KEYS as i64));
    all_there(&router);
    // Back, with values that need many TLS records, and connections that break in the meantime.
    let large = "0123456789abcdef".repeat(100_000);
    let mut client = Client::connect(router.address());
    for i in 0..6 {
        assert_eq!(client.call(&["SET", &format!("large{i}"), &large]), ok());
    }
    done(&router, &format!("move --from {other} --to {one} --all --goal gentle --max-rate 100k"));
    eventually("keys move", || the_move(&router, 2)["keys_moved"].as_u64().filter(|keys| *keys > 50));
    for node in [&first, &second] {
        assert!(node.cmd("CLIENT KILL TYPE normal").int() > 0);
    }
    done(&router, "moves max-rate 2 none");
    done(&router, "moves goal 2 fast");
    wait_for(&router, 2, "done");
    assert_eq!(total(&second), 0);
    all_there(&router);
    let mut client = Client::connect(router.address());
    for i in 0..6 {
        assert_eq!(client.call(&["GET", &format!("large{i}")]), bulk(&large));
    }
}

/// Two nodes, each a primary with replicas, behind a router.
struct Groups {
    router: Router,
    /// The primary first.
    servers: Vec<Vec<Node>>,
    /// Sentinels of the watched node.
    sentinels: Vec<Node>,
    names: Vec<String>,
}

impl Groups {
    /// Starts nodes with these numbers of replicas. `watched` is the index of the node whose primary Sentinels name.
    fn start(config: &str, replicas: [usize; 2], watched: Option<usize>) -> Groups {
        let servers: Vec<Vec<Node>> = replicas.iter().map(|count| crate::replicas::group(*count)).collect();
        let mut config = config.to_owned();
        let mut names = Vec::new();
        let mut all_sentinels = Vec::new();
        let quoted =
            |nodes: &[Node]| nodes.iter().map(|node| format!("\"{}\"", node.address())).collect::<Vec<_>>().join(", ");
        for (place, group) in servers.iter().enumerate() {
            if watched == Some(place) {
                all_sentinels = sentinels(group);
                config.push_str(&format!(
                    "\n[[node]]\nsentinel-master = \"mymaster\"\nsentinels = [{}]\n",
                    quoted(&all_sentinels)
                ));
                names.push("mymaster".to_owned());
            } else {
                config.push_str(&format!("\n[[node]]\naddress = {}\n", quoted(&group[..1])));
                if group.len() > 1 {
                    config.push_str(&format!("replicas = [{}]\n", quoted(&group[1..])));
                }
                names.push(group[0].address().to_string());
            }
        }
        let router = Router::start(&[], &RouterOptions::config(config));
        Groups { router, servers, sentinels: all_sentinels, names }
    }

    fn begin(&self, options: &str) {
        done(&self.router, &format!("move {options} --from {} --to {} --all", self.names[0], self.names[1]));
    }

    /// Returns the entry of a node in `nodes list`.
    fn listed(&self, place: usize) -> Json {
        let all = json(&self.router, "nodes list");
        let of = |node: &&Json| node["address"] == self.names[place];
        all["nodes"]
            .as_array()
            .and_then(|nodes| nodes.iter().find(of))
            .unwrap_or_else(|| panic!("a node: {all}"))
            .clone()
    }

    fn is_read(&self, place: usize) -> bool {
        self.listed(place)["replicas"].as_array().is_some_and(|replicas| !replicas.is_empty())
    }

    /// Waits until replicas are in sync with their primaries.
    fn settle(&self, place: usize) {
        let primary = &self.servers[place][0];
        let replicas = self.servers[place].len() - 1;
        // WAIT only covers writes before the last command of its connection.
        let mut client = primary.client();
        client.cmd("PING");
        assert_eq!(client.cmd(&format!("WAIT {replicas} 20000")).int(), replicas as i64, "its replicas have all");
    }
}

/// A replica may lag. Clients that read from it must never miss a key that has moved.
#[test]
fn replica_reads_miss_no_moved_key() {
    if direct() {
        return;
    }
    let groups = Groups::start("[clients]\nreads = \"prefer-replica\"", [1, 1], None);
    fill(&mut Client::connect(groups.router.address()));
    let replica = &groups.servers[1][1];
    (0..2).for_each(|place| groups.settle(place));
    until("replicas are read", || groups.is_read(0) && groups.is_read(1));
    let moved = total(&groups.servers[0][0]);
    let stop = AtomicBool::new(false);
    let reads = std::thread::scope(|scope| {
        let readers: Vec<_> = (0..3)
            .map(|number| {
                let (router, stop) = (&groups.router, &stop);
                scope.spawn(move || {
                    let mut client = Client::connect(router.address());
                    let (mut i, mut reads) = (number * 1000, 0_u64);
                    while !stop.load(Ordering::Relaxed) {
                        i = (i + 7) % KEYS;
                        assert_eq!(client.cmd(&format!("GET key:{i}")), bulk(value(i)), "key:{i}");
                        reads += 1;
                    }
                    reads
                })
            })
            .collect();
        // The target's replica serves reads, but executes no replicated writes.
        assert_eq!(replica.cmd("CLIENT PAUSE 600000 WRITE"), ok());
        groups.begin("--goal fast");
        // The move does not wait for it forever.
        wait_for(&groups.router, 1, "done");
        assert!(total(replica) < KEYS as i64, "this server continues to replicate while it is paused");
        assert!(!groups.is_read(1), "{}", groups.listed(1));
        std::thread::sleep(Duration::from_millis(200));
        assert_eq!(replica.cmd("CLIENT UNPAUSE"), ok());
        until("it is read again", || groups.is_read(1));
        std::thread::sleep(Duration::from_millis(200));
        stop.store(true, Ordering::Relaxed);
        readers.into_iter().map(|reader| reader.join().expect("no key was missed")).sum::<u64>()
    });
    assert!(moved > 1000 && reads > 100, "{moved} keys, {reads} reads");
    let log = groups.router.process().expect_log(&["not read until it has them"]);
    let told = log
        .lines()
        .filter(|line| line.contains("not read until it has them") && line.contains(&replica.address().to_string()));
    assert_eq!(told.count(), 1, "said, and said once:\n{log}");
    // The replica serves moved keys.
    let before = calls(replica, "get");
    all_there(&groups.router);
    assert!(calls(replica, "get") > before);
    assert_eq!(total(&groups.servers[0][0]), 0);
}

/// A failover of one side during a move.
struct Failover {
    /// Source (0) or target (1).
    place: usize,
    replicas: [usize; 2],
    /// Sentinels promote the replica. Otherwise the test does.
    by_sentinels: bool,
    options: &'static str,
    /// The promoted replica lacks recent writes.
    is_behind: bool,
    /// Allowed end states of the move.
    ends: &'static [&'static str],
}

/// Checks that no key of the new primary is lost, no deleted key returns, and every key is on exactly one node.
fn fails_over(failover: &Failover) {
    if direct() {
        return;
    }
    let Failover { place, replicas, by_sentinels, options, is_behind, ends } = *failover;
    let mut groups = Groups::start("", replicas, by_sentinels.then_some(place));
    fill(&mut Client::connect(groups.router.address()));
    (0..2).for_each(|place| groups.settle(place));
    // The primaries' replication ids are known at this time: a successor proves its descent by them.
    until("replicas are known", || groups.is_read(place));
    if is_behind {
        assert_eq!(groups.servers[place][1].cmd("CLIENT PAUSE 600000 WRITE"), ok());
    }
    groups.begin(&format!("--max-rate 100k{options} --goal gentle"));
    eventually("keys move", || the_move(&groups.router, 1)["keys_moved"].as_u64().filter(|keys| *keys > 200));
    // Some moved keys are changed at the target.
    let mut client = Client::connect(groups.router.address());
    let there = groups.servers[1][0].cmd("KEYS key:*");
    let changed: Vec<String> = there.items().iter().take(100).map(Value::text).collect();
    for (n, key) in changed.iter().enumerate() {
        let reply = client.cmd(&if n % 2 == 0 { format!("DEL {key}") } else { format!("SET {key} changed") });
        assert_eq!(reply.error(), None);
    }
    (0..2).filter(|at| !is_behind || *at != place).for_each(|at| groups.settle(at));
    if is_behind {
        let [has, had] = [0, 1].map(|at| total(&groups.servers[place][at]));
        assert!(
            had > has + 200,
            "this server continues to replicate while it is paused: {had} keys, {has} at its primary"
        );
    }
    groups.servers[place][0].kill();
    if !by_sentinels {
        eventually("it waits", || {
            the_move(&groups.router, 1)["activity"].as_str().is_some_and(|activity| activity.contains("waiting for"))
        });
        let promoted = &groups.servers[place][1];
        assert_eq!(promoted.cmd("REPLICAOF NO ONE"), ok());
        promoted.cmd("CLIENT UNPAUSE");
        for other in &groups.servers[place][2..] {
            follow(other, promoted.address());
            caught_up(other);
        }
    }
    for line in ["moves max-rate 1 none", "moves goal 1 fast"] {
        done(&groups.router, line);
    }
    let ended =
        eventually("the move is over", || Some(the_move(&groups.router, 1)).filter(|m| m["state"] != "running"));
    assert!(ends.iter().any(|end| ended["state"] == *end), "{}", report(&groups.router));
    let mut client = Client::connect(groups.router.address());
    for i in 0..KEYS {
        let key = format!("key:{i}");
        let expected = match changed.iter().position(|changed| *changed == key) {
            Some(n) if n % 2 == 0 => Value::Nil,
            Some(_) => bulk("changed"),
            None => bulk(value(i)),
        };
        assert_eq!(client.cmd(&format!("GET {key}")), expected, "{key}");
    }
    // Together, the current primaries have every key exactly once.
    let deleted = changed.len().div_ceil(2);
    let primary = |at: usize| {
        let listed = groups.listed(at);
        let is = |node: &&Node| listed["primary"].as_str().is_none_or(|address| node.address().to_string() == address);
        groups.servers[at].iter().find(is).expect("one of ours")
    };
    let totals = [primary(0), primary(1)].map(total);
    assert_eq!(totals.iter().sum::<i64>(), (KEYS - deleted) as i64, "{totals:?}");
    if ended["state"] == "done" {
        assert_eq!(totals[0], 0);
    }
    assert_eq!(run_cli(&groups.router, "moves").code, 0);
    drop(groups.sentinels);
}

#[test]
fn the_source_fails_over() {
    fails_over(&Failover {
        place: 0,
        replicas: [1, 0],
        by_sentinels: false,
        options: "",
        is_behind: false,
        ends: &["done"],
    });
}

/// The promoted replica still has keys that had left its primary. By the journal, they have moved.
#[test]
fn the_source_fails_over_to_a_lagging_replica() {
    fails_over(&Failover {
        place: 0,
        replicas: [1, 0],
        by_sentinels: false,
        options: "",
        is_behind: true,
        ends: &["done"],
    });
}

#[test]
fn the_target_fails_over() {
    let options = " --durability replica";
    fails_over(&Failover {
        place: 1,
        replicas: [0, 2],
        by_sentinels: false,
        options,
        is_behind: false,
        ends: &["done"],
    });
}

/// The promoted server has no replica, so keys cannot be made safe there. The move stops, and moved keys stay at the
/// target.
#[test]
fn the_target_fails_over_to_its_only_replica() {
    let options = " --durability replica";
    fails_over(&Failover {
        place: 1,
        replicas: [0, 1],
        by_sentinels: false,
        options,
        is_behind: false,
        ends: &["stopped"],
    });
}

#[test]
fn sentinels_fail_over_the_source() {
    fails_over(&Failover {
        place: 0,
        replicas: [2, 0],
        by_sentinels: true,
        options: "",
        is_behind: false,
        ends: &["done"],
    });
}

/// The move stops if the other replica follows the new primary only after several attempts.
#[test]
fn sentinels_fail_over_the_target() {
    let options = " --durability replica";
    fails_over(&Failover {
        place: 1,
        replicas: [0, 2],
        by_sentinels: true,
        options,
        is_behind: false,
        ends: &["done", "stopped"],
    });
}

/// The keys found at the target would be the source's own, and --purge-target would delete them.
#[test]
fn nothing_moves_between_two_names_of_one_server() {
    if direct() {
        return;
    }
    let node = Node::start(&NodeOptions::default());
    let mut second = Node::start(&NodeOptions::default());
    let (one, other) = (node.address(), second.address());
    // A single worker: each has its own connections, and may lack one for a while.
    let router = Router::start(&[one, other], &RouterOptions { workers: 1, ..RouterOptions::default() });
    // While the router runs, the second name is redirected to the first server.
    second.kill();
    let _relay = Relay::start_at(other, one);
    let mut client = Client::connect(router.address());
    until("both names are served", || client.cmd("DBSIZE") == int(0));
    fill(&mut client);
    for more in ["", " --purge-target"] {
        let said = refused(&router, &format!("move --from {one} --to {other} --all{more}"));
        assert!(said.contains("one server under two names"), "{said}");
    }
    all_there(&router);
}

#[test]
fn a_lost_node_is_replaced_by_an_empty_server_and_removed() {
    if direct() {
        return;
    }
    let mut nodes: Vec<Node> = (0..2).map(|_| Node::start(&NodeOptions::default())).collect();
    let names: Vec<String> = nodes.iter().map(|node| node.address().to_string()).collect();
    let config = |replica: Option<&Node>| {
        let replicas = replica.map_or_else(String::new, |node| format!("replicas = [\"{}\"]\n", node.address()));
        format!("[[node]]\naddress = \"{}\"\n[[node]]\naddress = \"{}\"\n{replicas}", names[0], names[1])
    };
    let router = Router::start(&[], &RouterOptions::config(config(None)));
    fill(&mut Client::connect(router.address()));
    let lost = total(&nodes[1]);
    assert!(lost > 0);
    nodes[1].kill();
    until("it is known to be away", || done(&router, "status").contains("is down"));
    // Each names the remedy, rather than the other command.
    for line in ["nodes drain", "nodes remove"] {
        let text = refused(&router, &format!("{line} {}", names[1]));
        for word in [
            "cannot be used now",
            "empty",
            "`replicas`",
            "SIGHUP",
            &format!("nodes accept {}", names[1]),
            "docs/dead-server.md",
        ] {
            assert!(text.contains(word), "{line}: {text}");
        }
    }
    // The remedy.
    let empty = Node::start(&NodeOptions::default());
    std::fs::write(router.config_file(), config(Some(&empty))).expect("configuration");
    router.process().signal(rustix::process::Signal::HUP);
    let accept = format!("nodes accept {}", names[1]);
    eventually("the empty server can be accepted", || run_cli(&router, &accept).code == 0);
    // The old server may return: the running router knows which server it uses.
    nodes[1].restart();
    let mut doctor = tied(env!("CARGO_BIN_EXE_switchyard"));
    doctor.arg("doctor").arg("-c").arg(router.config_file()).arg("--state-dir").arg(router.state_dir());
    let said = doctor.args(["--admin", &router.admin().to_string()]).output().expect("it runs");
    let said = String::from_utf8_lossy(&said.stdout);
    let beside = format!(
        "{} replica {}  role: it reports that it is a primary, in addition to {}",
        names[1],
        names[1],
        empty.address()
    );
    assert!(said.contains(&beside) && said.matches("gets no writes").count() == 1, "{said}");
    nodes[1].kill();
    let drain = format!("nodes drain {} --goal fast --wait", names[1]);
    eventually("it can be drained", || run_cli(&router, &drain).code == 0);
    done(&router, &format!("nodes remove {}", names[1]));
    assert_eq!(Client::connect(router.address()).cmd("DBSIZE").int(), KEYS as i64 - lost);
    let report = json(&router, "nodes list");
    assert_eq!(report["nodes"].as_array().map(Vec::len), Some(1), "{report}");
    assert_eq!(report["nodes"][0]["slots"], 16_384, "{report}");
}
