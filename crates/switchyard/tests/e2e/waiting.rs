//! WAIT: the reply counts replicas that have the client's writes, whichever of the router's connections was used.

use std::time::{Duration, Instant};

use crate::movectl::done;
use crate::support::relay::Relay;
use crate::support::{Client, Node, NodeOptions, Router, RouterOptions, Site, SiteOptions, Value, int, ok, until};

/// Starts a replica of a node, and waits until it is in sync.
pub(crate) fn replica_of(node: &Node) -> Node {
    let port = node.address().port().to_string();
    let args = ["--replicaof", "127.0.0.1", &port, "--repl-diskless-sync-delay", "0"].map(String::from).to_vec();
    let replica = Node::start(&NodeOptions { args, ..NodeOptions::default() });
    until("the replica is in step", || node.cmd("INFO replication").text().contains("state=online"));
    replica
}

#[test]
fn wait_counts_replicas_that_have_the_writes() {
    let site = Site::with(1, &SiteOptions::default());
    let mut client = site.client();
    assert_eq!(client.cmd("WAIT 0 0"), int(0), "there is no replica");
    let replica = replica_of(&site.nodes()[0]);
    assert_eq!(client.cmd("SET k v"), ok());
    assert_eq!(client.cmd("WAIT 1 0"), int(1));
    // The first WAIT of a connection, directly after its first write, with a frozen replica: no false confirmation.
    replica.freeze();
    for _ in 0..3 {
        let mut fresh = site.client();
        for line in ["SET k w", "WAIT 1 300", "GET k"] {
            fresh.post(line);
        }
        assert_eq!(fresh.reply(), ok());
        assert_eq!(fresh.reply(), int(0));
        assert_eq!(fresh.reply().text(), "w");
    }
    // The wait can be ended by CLIENT UNBLOCK, and other clients are served in the meantime.
    let id = client.cmd("CLIENT ID").int();
    client.cmd("SET k x");
    client.post("WAIT 1 0");
    let mut other = site.client();
    until("it waits", || other.cmd("CLIENT LIST").text().contains(" flags=b "));
    assert_eq!(other.cmd("SET other v"), ok());
    assert_eq!(other.cmd(&format!("CLIENT UNBLOCK {id}")), int(1));
    assert_eq!(client.reply(), int(0));
    client.post("WAIT 1 0");
    std::thread::sleep(Duration::from_millis(100));
    replica.thaw();
    assert_eq!(client.reply(), int(1));
    for line in ["WAIT 1 x", "WAIT x 1", "WAIT 1 -1"] {
        client.cmd(line).expect_error();
    }
    // No other client waits for a WAIT with a huge timeout.
    let mut odd = site.client();
    odd.post("WAIT 7 9000000000000000");
    for _ in 0..20 {
        assert_eq!(client.cmd("GET k").text(), "x");
    }
}

#[test]
fn waitaof_counts_the_local_file_and_replicas() {
    let args = ["--appendonly", "yes", "--appendfsync", "everysec"].map(String::from).to_vec();
    let site =
        Site::with(2, &SiteOptions { node: NodeOptions { args, ..NodeOptions::default() }, ..SiteOptions::default() });
    let mut client = site.client();
    let reply = client.cmd("WAITAOF 0 0 0");
    if reply.error().is_some_and(|e| e.starts_with("ERR unknown command")) {
        eprintln!("this server has no WAITAOF");
        return;
    }
    for i in 0..10 {
        assert_eq!(client.cmd(&format!("SET k{i} v")), ok());
    }
    assert_eq!(client.cmd("WAITAOF 1 0 0"), Value::Array(vec![int(1), int(0)]));
    assert_eq!(client.cmd("SET k w"), ok());
    assert_eq!(client.cmd("WAITAOF 1 1 1500"), Value::Array(vec![int(1), int(0)]));
    // Not yet in the file at the time of the command, which therefore waits.
    let start = Instant::now();
    for i in 0..3 {
        assert_eq!(client.cmd(&format!("SET k{i} v")), ok());
        assert_eq!(client.cmd("WAITAOF 1 0 0"), Value::Array(vec![int(1), int(0)]));
    }
    assert!(start.elapsed() > Duration::from_millis(900), "the file is written once a second: {:?}", start.elapsed());
}

#[test]
fn wait_over_several_nodes_returns_the_minimum_of_written_nodes() {
    let Some(site) = Site::router_only(3, &SiteOptions::default()) else { return };
    let tags = site.tags();
    let first = replica_of(&site.nodes()[0]);
    let _second = [replica_of(&site.nodes()[1]), replica_of(&site.nodes()[1])];
    let key = |node: usize| format!("{{{}}}k", tags[node][0]);
    let set = |client: &mut Client, node: usize| assert_eq!(client.cmd(&format!("SET {} v", key(node))), ok());
    // Only this client's writes count: the third node has no replica, and is not waited for.
    let mut client = site.client();
    set(&mut client, 0);
    assert_eq!(client.cmd(&format!("GET {}", key(2))), Value::Nil);
    assert_eq!(client.cmd("WAIT 1 0"), int(1));
    set(&mut client, 1);
    assert_eq!(client.cmd("WAIT 1 0"), int(1));
    let mut client = site.client();
    set(&mut client, 1);
    assert_eq!(client.cmd("WAIT 2 0"), int(2));
    // Also if the write was part of a transaction.
    let mut client = site.client();
    client.cmd("MULTI");
    client.cmd(&format!("SET {} v", key(2)));
    client.cmd("EXEC");
    assert_eq!(client.cmd("WAIT 1 100"), int(0));
    let mut client = site.client();
    client.cmd(&format!("MSET {} v {} w", key(1), key(2)));
    assert_eq!(client.cmd("WAIT 1 100"), int(0));
    let mut client = site.client();
    client.cmd(&format!("RPUSH {}l x", key(2)));
    client.cmd(&format!("BLPOP {}l 0", key(2)));
    assert_eq!(client.cmd("WAIT 1 100"), int(0));
    // Without writes, all nodes count.
    assert_eq!(site.client().cmd("WAIT 1 100"), int(0));
    // The timeout is shared: the last node gets the remaining time.
    first.freeze();
    let mut client = site.client();
    for node in 0..3 {
        set(&mut client, node);
    }
    let mut monitor = site.nodes()[0].client();
    assert_eq!(monitor.cmd("MONITOR"), ok());
    let start = Instant::now();
    assert_eq!(client.cmd("WAIT 1 1000"), int(0));
    assert!(start.elapsed() >= Duration::from_millis(990), "{:?}", start.elapsed());
    let asked = until("the node receives WAIT", || {
        let line = monitor.reply().text();
        line.split_once("\"WAIT\" \"1\" ").map(|(_, time)| time.trim_matches('"').parse::<u64>().expect("a time"))
    });
    assert!(asked < 1000, "the node would wait for {asked} ms, as if it had been the first");
    first.thaw();
}

#[test]
fn wait_confirms_no_write_to_a_replaced_process() {
    let options = SiteOptions::router(RouterOptions::args(&["--set", "nodes.on-data-loss=serve"]));
    let Some(mut site) = Site::router_only(1, &options) else { return };
    let _replica = replica_of(&site.nodes()[0]);
    let mut client = site.client();
    assert_eq!(client.cmd("SET k lost"), ok());
    site.node_mut(0).kill();
    site.node_mut(0).restart();
    until("the replica is in step again", || site.nodes()[0].cmd("INFO replication").text().contains("state=online"));
    until("the node is served", || client.cmd("GET k") == Value::Nil);
    assert_eq!(client.cmd("WAIT 1 3000"), int(0), "the write is lost");
    assert_eq!(client.cmd("WAIT 1 3000"), int(0), "and is not confirmed later");
    let aof = client.cmd("WAITAOF 0 1 100");
    assert!(aof.error().is_some() || aof == Value::Array(vec![int(0), int(0)]), "{aof:?}");
    assert_eq!(client.cmd("SET k kept"), ok());
    assert_eq!(client.cmd("WAIT 1 0"), int(1));
    assert_eq!(client.cmd("WAIT 1 0"), int(1));
}

#[test]
fn wait_follows_keys_that_moved_to_another_node() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let names: Vec<String> = site.nodes().iter().map(|node| node.address().to_string()).collect();
    let _replica = replica_of(&site.nodes()[0]);
    let tag = site.tags()[0][0].clone();
    for (number, order) in [
        format!("move --keys {{{tag}}}0 --to {} --wait", names[1]),
        format!("move --from {} --to {} --all --wait", names[0], names[1]),
    ]
    .iter()
    .enumerate()
    {
        let mut client = site.client();
        assert_eq!(client.cmd(&format!("SET {{{tag}}}{number} v")), ok());
        assert_eq!(client.cmd("WAIT 1 0"), int(1));
        done(site.router(), order);
        assert_eq!(client.cmd("WAIT 1 300"), int(0), "{order}: the node that has the key has no replica");
    }
}

#[test]
fn wait_confirms_no_write_that_a_node_lost_between_two_moves() {
    let options = SiteOptions::router(RouterOptions::args(&["--set", "nodes.on-data-loss=serve"]));
    let Some(mut site) = Site::router_only(3, &options) else { return };
    let names: Vec<String> = site.nodes().iter().map(|node| node.address().to_string()).collect();
    let _replicas = [replica_of(&site.nodes()[0]), replica_of(&site.nodes()[2])];
    let key = site.tags()[0][0].clone();
    let mut client = site.client();
    assert_eq!(client.cmd(&format!("SET {key} lost")), ok());
    done(site.router(), &format!("move --from {} --to {} --all --wait", names[0], names[1]));
    site.node_mut(1).kill();
    site.node_mut(1).restart();
    until("the node is served", || client.cmd(&format!("GET {key}")) == Value::Nil);
    done(site.router(), &format!("move --from {} --to {} --all --wait", names[1], names[2]));
    assert_eq!(client.cmd("WAIT 1 3000"), int(0), "the node that lost the write has no keys any more");
    assert_eq!(client.cmd(&format!("SET {key} kept")), ok());
    assert_eq!(client.cmd("WAIT 1 0"), int(1));
}

#[test]
fn a_replaced_process_gets_no_more_commands() {
    if crate::support::direct() {
        return;
    }
    let (old, new) = (Node::start(&NodeOptions::default()), Node::start(&NodeOptions::default()));
    let _replica = replica_of(&new);
    let relay = Relay::start(old.address());
    let router = Router::start(&[relay.address()], &RouterOptions::args(&["--set", "nodes.on-data-loss=serve"]));
    // Enough clients that both workers are most likely used.
    let mut clients: Vec<Client> = (0..16).map(|_| Client::connect(router.address())).collect();
    for (number, client) in clients.iter_mut().enumerate() {
        assert_eq!(client.cmd(&format!("SET key:{number} old")), ok());
    }
    // Simulates a virtual address after a failover. A blocking command opens a connection.
    relay.turn_to(new.address());
    let mut blocking = Client::connect(router.address());
    assert_eq!(blocking.cmd("BLPOP nothing 0.1"), Value::Nil);
    for (number, client) in clients.iter_mut().enumerate() {
        assert_eq!(client.cmd("WAIT 1 2000"), int(0), "the write may be lost");
        until("it is written", || client.cmd(&format!("SET key:{number} new")) == ok());
        assert_eq!(new.cmd(&format!("GET key:{number}")).text(), "new");
        assert_eq!(old.cmd(&format!("GET key:{number}")).text(), "old");
    }
}
