//! A node that restarts: commands for its keys wait for it, at most for `nodes.wait-max` after the loss. The error at
//! the end of the wait closes the connection if the node is the only one. All other tests of the suite run without this
//! wait.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::replicas::{calls, group, until_observed};
use crate::support::client::TIMEOUT;
use crate::support::{
    Client, NodeOptions, Router, RouterOptions, Site, SiteOptions, Value, bulk, direct, encode, int, ok, simple, until,
};

/// Longer than any test: only the return of a node ends a wait.
const LONG: &str = "[nodes]\nwait-max = \"1h\"\n";

/// Time without a reply after which a command counts as waiting.
const QUIET: Duration = Duration::from_millis(300);

/// Nodes whose keys survive a kill, and a router that waits for lost nodes.
fn site(nodes: usize, config: &str) -> Option<Site> {
    site_with(nodes, config, &[])
}

/// Starts such a site with additional arguments of the nodes.
fn site_with(nodes: usize, config: &str, args: &[&str]) -> Option<Site> {
    let node = NodeOptions::args(&[&["--appendonly", "yes", "--appendfsync", "always"], args].concat());
    Site::router_only(
        nodes,
        &SiteOptions { node, router: RouterOptions { waits_for_nodes: true, ..RouterOptions::config(config) } },
    )
}

/// Kills a node, and waits until every worker has lost it.
fn lose(site: &mut Site, node: usize) {
    site.node_mut(node).kill();
    until_lost(site.router(), site.nodes()[node].address());
}

fn until_lost(router: &Router, node: SocketAddr) {
    let line = format!("switchyard_node_up{{node=\"{node}\"}} 0");
    until("the router has lost the node", || router.metrics().lines().any(|known| known == line));
}

#[track_caller]
fn is_waiting(client: &mut Client, what: &str) {
    assert_eq!(client.listen(QUIET), (Vec::new(), false), "{what} waits");
}

#[test]
fn commands_of_every_kind_survive_the_restart_of_the_only_node() {
    let Some(mut site) = site(1, LONG) else { return };
    let mut client = site.client();
    assert_eq!(client.cmd("MSET n 41 s text"), ok());
    assert_eq!(client.cmd("RPUSH list one"), int(1));
    let lines = [
        ("INCR n", int(42)),
        ("GET s", bulk("text")),
        ("MGET s none", Value::Array(vec![bulk("text"), Value::Nil])),
        ("BLPOP list 0", Value::Array(vec![bulk("list"), bulk("one")])),
        ("EVAL \"return redis.call('STRLEN', KEYS[1])\" 1 s", int(4)),
        ("EVAL \"return 7\" 0", int(7)),
        ("WATCH s", ok()),
        ("EXISTS s none", int(1)),
        ("PUBLISH channel message", int(0)),
        ("SSUBSCRIBE shard", Value::Array(vec![bulk("ssubscribe"), bulk("shard"), int(1)])),
        ("SCRIPT FLUSH", ok()),
        ("SELECT 5", ok()),
    ];
    let mut clients: Vec<Client> = lines.iter().map(|_| site.client()).collect();
    let (mut pipeline, mut transaction, mut third, mut gone) =
        (site.client(), site.client(), site.client(), site.client());
    assert!(matches!(third.cmd("HELLO 3"), Value::Map(_)));
    gone.cmd("CLIENT SETNAME gone");
    lose(&mut site, 0);
    for (client, (line, _)) in clients.iter_mut().zip(&lines) {
        client.post(line);
    }
    for line in ["PING", "SET p 1", "PING", "INCR p"] {
        pipeline.post(line);
    }
    for line in ["MULTI", "INCR t", "INCR t", "EXEC"] {
        transaction.post(line);
    }
    third.post("SET third 3");
    gone.post("INCR n");
    // A reply of the router itself does not wait, unless an earlier command of the client does.
    assert_eq!(client.cmd("PING"), simple("PONG"));
    assert!(client.cmd("INFO server").text().contains("redis_version"));
    assert_eq!(pipeline.reply(), simple("PONG"));
    assert_eq!(transaction.reply(), ok());
    assert_eq!((transaction.reply(), transaction.reply()), (simple("QUEUED"), simple("QUEUED")));
    for (client, (line, _)) in clients.iter_mut().zip(&lines) {
        is_waiting(client, line);
    }
    is_waiting(&mut pipeline, "a pipeline");
    is_waiting(&mut transaction, "EXEC");
    // A client that disconnects is freed before the node is back, and its command is dropped.
    assert!(client.cmd("CLIENT LIST").text().contains("name=gone"));
    gone.cut();
    until("the client is freed", || !client.cmd("CLIENT LIST").text().contains("name=gone"));
    site.node_mut(0).restart();
    for (client, (line, reply)) in clients.iter_mut().zip(&lines) {
        assert_eq!(&client.reply(), reply, "{line}");
    }
    assert_eq!((pipeline.reply(), pipeline.reply(), pipeline.reply()), (ok(), simple("PONG"), int(2)));
    assert_eq!(transaction.reply(), Value::Array(vec![int(1), int(2)]));
    assert_eq!(third.reply(), ok());
    assert_eq!(client.cmd("GET n"), bulk("42"), "each command was executed once");
    assert_eq!(client.cmd("GET third"), bulk("3"));
}

#[test]
fn a_node_that_loads_its_data_has_not_returned() {
    // A restart takes seconds, during which the node sometimes replies LOADING.
    let Some(mut site) = site_with(1, LONG, &["--key-load-delay", "500"]) else { return };
    let mut client = site.client();
    let increments = 5000;
    assert_eq!(client.pipeline(&encode(&["INCR", "n"]).repeat(increments), increments).len(), increments);
    lose(&mut site, 0);
    client.post("INCR n");
    is_waiting(&mut client, "INCR");
    site.node_mut(0).restart();
    assert_eq!(client.reply(), int(5001));
}

#[test]
fn a_lost_only_node_closes_connections_after_the_wait() {
    let Some(mut site) = site(1, "") else { return };
    let mut client = site.client();
    assert_eq!(client.cmd("SET k v"), ok());
    // Errors of scripts are not errors of the router, even with the same prefix.
    let error = client.cmd("EVAL \"return redis.error_reply('NODEDOWN of a script')\" 0");
    assert!(error.expect_error().starts_with("NODEDOWN of a script"), "{error:?}");
    // A reply in flight is lost: earlier replies arrive, then the connection is closed.
    let mut in_flight = site.client();
    site.nodes()[0].freeze();
    for line in ["PING", "GET k", "PING"] {
        in_flight.post(line);
    }
    assert_eq!(in_flight.reply(), simple("PONG"));
    lose(&mut site, 0);
    assert_eq!(in_flight.listen(TIMEOUT), (Vec::new(), true));
    // A command before the end of the wait, pipelined after a command of the router.
    for line in ["ECHO first", "GET k", "ECHO last"] {
        client.post(line);
    }
    assert_eq!(client.reply(), bulk("first"));
    assert_eq!(client.listen(TIMEOUT), (Vec::new(), true));
    // Later commands do not wait: the time starts with the loss.
    let end = Instant::now() + TIMEOUT;
    for _ in 0..20 {
        let mut late = site.client();
        assert_eq!(late.cmd("PING"), simple("PONG"));
        late.post_quietly("GET k");
        assert_eq!(late.listen(TIMEOUT), (Vec::new(), true));
        assert!(Instant::now() < end, "each command waits");
    }
    site.node_mut(0).restart();
    until("the node serves again", || {
        let mut client = site.client();
        client.post_quietly("GET k");
        client.try_reply().is_ok_and(|reply| reply == bulk("v"))
    });
}

#[test]
fn a_command_for_several_nodes_waits_as_a_whole() {
    let Some(mut site) = site(2, LONG) else { return };
    let tags = site.tags();
    let keys: Vec<String> = tags.iter().map(|tags| format!("{{{}}}key", tags[0])).collect();
    let mut client = site.client();
    assert_eq!(client.cmd(&format!("MSET {} 0 {} 1", keys[0], keys[1])), ok());
    let before = calls(&site.nodes()[0], "mget");
    lose(&mut site, 1);
    let mut clients: Vec<Client> = (0..4).map(|_| site.client()).collect();
    let lines = [
        format!("MGET {} {}", keys[0], keys[1]),
        format!("DEL none{{{}}} none{{{}}}", tags[0][0], tags[1][0]),
        "DBSIZE".to_owned(),
        format!("SUNIONSTORE {{{}}}to {{{}}}from", tags[0][0], tags[1][0]),
    ];
    for (client, line) in clients.iter_mut().zip(&lines) {
        client.post(line);
    }
    // SCAN returns the keys of the live node, and waits at the lost one.
    let mut scan = site.client();
    let mut found = Vec::new();
    let mut cursor = "0".to_owned();
    loop {
        scan.post(&format!("SCAN {cursor} COUNT 1000"));
        let (bytes, closed) = scan.listen(QUIET);
        assert!(!closed);
        if bytes.is_empty() {
            break;
        }
        let reply = crate::support::value::parse(&bytes);
        assert_ne!(reply.items()[0].text(), "0", "SCAN ended without the lost node: {reply:?}");
        cursor = reply.items()[0].text();
        found.extend(reply.items()[1].items().iter().map(Value::text));
    }
    // Clients of the other node are served, including one with a large value.
    for i in 0..200 {
        assert_eq!(client.cmd(&format!("SET {} {i}", keys[0])), ok());
        assert_eq!(client.cmd(&format!("GET {}", keys[0])), bulk(i.to_string()));
    }
    let large = "x".repeat(2 << 20);
    assert_eq!(client.call(&["SET", &format!("{{{}}}large", tags[0][0]), &large]), ok());
    let mut upload = site.client();
    upload.send(&["SET", &format!("{{{}}}large", tags[1][0]), &large]);
    for (client, line) in clients.iter_mut().zip(&lines) {
        is_waiting(client, line);
    }
    is_waiting(&mut upload, "a large SET");
    assert_eq!(calls(&site.nodes()[0], "mget"), before, "no part is sent");
    site.node_mut(1).restart();
    assert_eq!(clients[0].reply(), Value::Array(vec![bulk("199"), bulk("1")]));
    assert_eq!(clients[1].reply(), int(0));
    assert!(clients[2].reply().int() >= 3);
    assert_eq!(clients[3].reply(), int(0));
    assert_eq!(upload.reply(), ok());
    let mut reply = scan.reply();
    loop {
        found.extend(reply.items()[1].items().iter().map(Value::text));
        match reply.items()[0].text() {
            end if end == "0" => break,
            cursor => reply = scan.cmd(&format!("SCAN {cursor} COUNT 1000")),
        }
    }
    assert!(keys.iter().all(|key| found.contains(key)), "{found:?}");
}

#[test]
fn one_of_several_nodes_that_stays_down_causes_errors() {
    let Some(mut site) = site(2, "") else { return };
    let keys: Vec<String> = site.tags().iter().map(|tags| format!("{{{}}}key", tags[0])).collect();
    lose(&mut site, 1);
    let lost = site.nodes()[1].address().to_string();
    let mut client = site.client();
    client.post(&format!("MGET {} {}", keys[0], keys[1]));
    client.post(&format!("SET {} v", keys[0]));
    let end = Instant::now() + TIMEOUT;
    let error = client.reply();
    assert!(error.expect_error().starts_with(&format!("NODEDOWN {lost}")), "{error:?}");
    assert_eq!(client.reply(), ok());
    for _ in 0..30 {
        let error = client.cmd(&format!("GET {}", keys[1]));
        assert!(error.expect_error().starts_with(&format!("NODEDOWN {lost}")), "{error:?}");
        assert!(Instant::now() < end, "each command waits");
    }
}

#[test]
fn a_promoted_replica_serves_the_waiting_commands() {
    if direct() {
        return;
    }
    let mut nodes = group(1);
    let config =
        format!("{LONG}[[node]]\naddress = \"{}\"\nreplicas = [\"{}\"]\n", nodes[0].address(), nodes[1].address());
    let options = RouterOptions { waits_for_nodes: true, ..RouterOptions::config(config) };
    let router = Router::start(&[nodes[0].address()], &options);
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("SET n 1"), ok());
    until("the replica has it", || nodes[1].cmd("GET n") == bulk("1"));
    until_observed(&nodes[1]);
    nodes[0].kill();
    until_lost(&router, nodes[0].address());
    client.post("INCR n");
    is_waiting(&mut client, "INCR");
    assert_eq!(nodes[1].cmd("REPLICAOF NO ONE"), ok());
    assert_eq!(client.reply(), int(2));
    assert_eq!(nodes[1].cmd("GET n"), bulk("2"));
}

#[test]
fn a_reload_and_a_drain_end_the_wait() {
    let Some(mut site) = site(2, LONG) else { return };
    let key = format!("{{{}}}key", site.tags()[1][0]);
    let (mut client, mut admin) = (site.client(), site.client());
    lose(&mut site, 1);
    client.post(&format!("GET {key}"));
    is_waiting(&mut client, "GET");
    // CLIENT KILL ends a waiting client.
    let mut killed = site.client();
    let id = killed.cmd("CLIENT ID").int();
    killed.post(&format!("GET {key}"));
    is_waiting(&mut killed, "GET");
    assert_eq!(admin.cmd(&format!("CLIENT KILL ID {id}")), int(1));
    assert_eq!(killed.listen(TIMEOUT), (Vec::new(), true));
    std::fs::write(site.router().config_file(), LONG.replace("1h", "0s")).expect("written");
    site.router().process().signal(Signal::HUP);
    let error = client.reply();
    assert!(error.expect_error().starts_with("NODEDOWN "), "{error:?}");
    std::fs::write(site.router().config_file(), LONG).expect("written");
    site.router().process().signal(Signal::HUP);
    site.node_mut(1).restart();
    until("the node serves again", || client.cmd(&format!("GET {key}")).error().is_none());
    until("the new time holds", || site.router().process().log().matches("reloaded: ").count() >= 2);
    lose(&mut site, 1);
    client.post(&format!("GET {key}"));
    is_waiting(&mut client, "GET");
    site.router().process().signal(Signal::TERM);
    assert_eq!(client.listen(TIMEOUT), (Vec::new(), true));
    assert!(site.router_mut().process_mut().wait(TIMEOUT).success());
}

#[test]
fn a_waiting_command_counts_once_for_a_limit() {
    let Some(mut site) = site(1, &format!("{LONG}[[limit]]\nkey-requests-per-second = 2\n")) else { return };
    assert_eq!(site.client().cmd("SET n 0"), ok());
    lose(&mut site, 0);
    let mut clients: Vec<Client> = (0..5).map(|_| site.client()).collect();
    for client in &mut clients {
        // Slowly enough for the limit.
        std::thread::sleep(Duration::from_millis(600));
        client.post("INCR n");
        is_waiting(client, "INCR");
    }
    site.node_mut(0).restart();
    let mut counts: Vec<i64> = clients.iter_mut().map(|client| client.reply().int()).collect();
    counts.sort_unstable();
    assert_eq!(counts, [1, 2, 3, 4, 5]);
}

#[test]
fn the_loss_of_a_replica_closes_no_connection() {
    if direct() {
        return;
    }
    let mut nodes = group(1);
    let config = format!(
        "{LONG}[clients]\nreads = \"replica\"\n[[node]]\naddress = \"{}\"\nreplicas = [\"{}\"]\n",
        nodes[0].address(),
        nodes[1].address()
    );
    let options = RouterOptions { waits_for_nodes: true, ..RouterOptions::config(config) };
    let router = Router::start(&[nodes[0].address()], &options);
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("SET k v"), ok());
    until("the replica replies", || client.cmd("GET k") == bulk("v"));
    nodes[1].kill();
    until("no replica is fit", || matches!(client.cmd("GET k"), Value::Error(error) if error.starts_with("NODEDOWN")));
    assert_eq!(client.cmd("SET k w"), ok(), "the connection is open, and the primary serves");
}
