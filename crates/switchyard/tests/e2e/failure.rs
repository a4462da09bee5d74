//! Failures of nodes and clients: an error names the node within the configured time, other clients are not affected,
//! and no command is executed twice.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::relay::Relay;
use crate::support::{
    Client, Node, NodeOptions, Router, RouterOptions, Site, SiteOptions, Value, bulk, int, ok, simple, until,
};

fn options(config: &str) -> SiteOptions {
    SiteOptions::config(config)
}

/// Short timeouts, so that tests of failures are quick.
const BRISK: &str = "[nodes]\nconnect-timeout = \"500ms\"\ncommand-timeout = \"500ms\"\nslow-command-timeout = \"1s\"\nreconnect-backoff-max = \"200ms\"\n";

#[track_caller]
fn names_node(reply: &Value, node: SocketAddr) {
    let error = reply.expect_error();
    assert!(error.contains(&node.to_string()), "the error must name {node}: {error}");
}

/// Returns a key of each node, by hash tag.
fn keys(site: &Site) -> Vec<String> {
    site.tags().iter().map(|tags| format!("{{{}}}key", tags[0])).collect()
}

#[test]
fn a_dead_node_is_named_others_serve_and_it_recovers() {
    let Some(mut site) = Site::router_only(3, &options(BRISK)) else {
        return;
    };
    let keys = keys(&site);
    let mut client = site.client();
    for key in &keys {
        assert_eq!(client.cmd(&format!("SET {key} 1")), ok());
    }
    let dead = site.nodes()[1].address();
    site.node_mut(1).kill();
    // Commands for it fail with its name, at once or after a connection attempt. The replies of the other nodes are
    // correct and in order.
    for round in 0..50 {
        client.post(&format!("GET {}", keys[0]));
        client.post(&format!("GET {}", keys[1]));
        client.post(&format!("SET {} {round}", keys[2]));
        client.post(&format!("MGET {} {}", keys[0], keys[2]));
        client.post(&format!("MGET {} {} {}", keys[0], keys[1], keys[2]));
        client.post(&format!("DEL none {}", keys[1]));
        client.post("DBSIZE");
        client.post("PING");
        assert_eq!(client.reply(), bulk("1"));
        names_node(&client.reply(), dead);
        assert_eq!(client.reply(), ok());
        assert_eq!(client.reply(), Value::Array(vec![bulk("1"), bulk(round.to_string())]));
        names_node(&client.reply(), dead);
        names_node(&client.reply(), dead);
        let size = client.reply();
        names_node(&size, dead);
        assert!(!size.expect_error().contains("executed"), "it changes nothing: {size:?}");
        assert_eq!(client.reply(), simple("PONG"));
    }
    // Commands for all nodes name the missing node instead of returning a partial result.
    names_node(&client.cmd("KEYS *"), dead);
    names_node(&client.cmd("FLUSHALL"), dead);
    let mut cursor = "0".to_owned();
    let mut calls = 0;
    let scan_error = loop {
        let reply = client.cmd(&format!("SCAN {cursor} COUNT 1000"));
        if reply.error().is_some() {
            break reply;
        }
        cursor = reply.items()[0].text();
        calls += 1;
        assert!(cursor != "0" && calls < 1000, "SCAN came to an end without the dead node's keys");
    };
    names_node(&scan_error, dead);
    // The node is back, empty, without any intervention.
    site.node_mut(1).restart();
    until("the node serves again", || client.cmd(&format!("GET {}", keys[1])) == Value::Nil);
    assert_eq!(client.cmd(&format!("SET {} again", keys[1])), ok());
}

#[test]
fn a_router_starts_before_its_nodes() {
    let opts = SiteOptions::router(RouterOptions {
        nodes_may_be_down: true,
        config: BRISK.into(),
        ..RouterOptions::default()
    });
    if crate::support::direct() {
        return;
    }
    let mut nodes: Vec<Node> = (0..2).map(|_| Node::start(&NodeOptions::default())).collect();
    let addresses: Vec<_> = nodes.iter().map(Node::address).collect();
    nodes.iter_mut().for_each(Node::kill);
    let router = Router::start(&addresses, &opts.router);
    let mut client = Client::connect(router.address());
    let reply = client.cmd("GET k");
    assert!(addresses.iter().any(|a| reply.expect_error().contains(&a.to_string())), "{reply:?}");
    nodes.iter_mut().for_each(Node::restart);
    until("both nodes serve", || client.cmd("DBSIZE") == int(0));
}

#[test]
fn a_frozen_node_delays_only_its_own_clients_until_a_timeout() {
    let Some(site) = Site::router_only(2, &options(BRISK)) else {
        return;
    };
    let keys = keys(&site);
    let mut client = site.client();
    for key in &keys {
        client.cmd(&format!("SET {key} 1"));
    }
    let frozen = site.nodes()[0].address();
    site.nodes()[0].freeze();
    let mut waiting = site.client();
    waiting.post(&format!("GET {}", keys[0]));
    // During this wait, and after its timeout, clients of the other node are served.
    for i in 0..300 {
        assert_eq!(client.cmd(&format!("SET {} {i}", keys[1])), ok());
        assert_eq!(client.cmd(&format!("GET {}", keys[1])), bulk(i.to_string()));
    }
    let reply = waiting.reply();
    names_node(&reply, frozen);
    // Connections hang as well (the kernel accepts, the process does not read): still an error within the timeout.
    for _ in 0..3 {
        names_node(&waiting.cmd(&format!("GET {}", keys[0])), frozen);
        assert_eq!(client.cmd(&format!("GET {}", keys[1])), bulk("299"));
    }
    site.nodes()[0].thaw();
    until("the node serves again", || waiting.cmd(&format!("GET {}", keys[0])) == bulk("1"));
}

/// Like commands with keys: it is not known yet that the node does not serve.
#[test]
fn a_command_without_keys_waits_for_the_first_connection() {
    let router = RouterOptions { nodes_may_be_down: true, ..RouterOptions::default() };
    let Some(mut site) = Site::router_only(1, &SiteOptions { router, ..SiteOptions::default() }) else { return };
    until("the node serves", || site.client().cmd("DBSIZE") == int(0));
    let addresses: Vec<_> = site.nodes().iter().map(Node::address).collect();
    site.nodes()[0].freeze();
    site.router_mut().restart(&addresses);
    let mut client = site.client();
    client.post("EVAL \"return 7\" 0");
    std::thread::sleep(Duration::from_millis(200));
    site.nodes()[0].thaw();
    assert_eq!(client.reply(), int(7));
}

/// Repeated failures during replies: acknowledged commands were executed, and no command was executed twice.
#[test]
fn no_command_is_executed_twice_despite_failures() {
    if crate::support::direct() {
        return;
    }
    let node = Node::start(&NodeOptions::default());
    let relay = Relay::start(node.address());
    let router = Router::start(&[relay.address()], &RouterOptions::config(BRISK));
    let stop = AtomicBool::new(false);
    const COUNTERS: usize = 6;
    let outcomes: Vec<(i64, i64)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..COUNTERS)
            .map(|i| {
                let (router, stop) = (&router, &stop);
                scope.spawn(move || {
                    let (mut acked, mut unknown, mut last) = (0, 0, 0);
                    let mut client = Client::connect(router.address());
                    while !stop.load(Ordering::Relaxed) {
                        // Single commands and pipelines.
                        let n = if acked % 3 == 0 { 1 } else { 16 };
                        for _ in 0..n {
                            client.post(&format!("INCR counter{i}"));
                        }
                        for _ in 0..n {
                            match client.try_reply() {
                                Ok(Value::Int(value)) => {
                                    assert!(value > last, "counter{i} went from {last} to {value}");
                                    last = value;
                                    acked += 1;
                                }
                                Ok(Value::Error(_)) => unknown += 1,
                                other => panic!("INCR gave {other:?}"),
                            }
                        }
                    }
                    (acked, unknown)
                })
            })
            .collect();
        let end = Instant::now() + Duration::from_secs(4);
        let mut round = 0;
        while Instant::now() < end {
            round += 1;
            match round % 4 {
                // During a reply, after some of its bytes.
                0 => relay.cut_after(1 + round * 7 % 300),
                1 => relay.cut(),
                2 => {
                    relay.stall(true);
                    std::thread::sleep(Duration::from_millis(40));
                    relay.cut();
                    relay.stall(false);
                }
                _ => {
                    node.cmd("CLIENT KILL TYPE normal SKIPME yes");
                }
            }
            std::thread::sleep(Duration::from_millis(60));
        }
        stop.store(true, Ordering::Relaxed);
        workers.into_iter().map(|worker| worker.join().expect("a worker without impossible results")).collect()
    });
    for (i, (acked, unknown)) in outcomes.into_iter().enumerate() {
        let value: i64 = match node.cmd(&format!("GET counter{i}")) {
            Value::Nil => 0,
            other => other.text().parse().expect("a counter"),
        };
        assert!(acked > 50, "counter{i}: only {acked} acknowledged beside {unknown} unknown");
        assert!(
            acked <= value && value <= acked + unknown,
            "counter{i} is {value}: {acked} were acknowledged and {unknown} are unknown, so it must be between {acked} and {}",
            acked + unknown
        );
    }
    assert!(relay.accepted() > 10, "the connections were hardly cut: {}", relay.accepted());
}

/// The basic rule: bytes sent to a node are never sent again, whatever the result.
#[test]
fn the_bytes_of_a_write_reach_a_node_once() {
    if crate::support::direct() {
        return;
    }
    let node = Node::start(&NodeOptions::default());
    let relay = Relay::start(node.address());
    let router = Router::start(&[relay.address()], &RouterOptions::config(BRISK));
    // A client for each, because commands of one client may wait for each other.
    let mut clients: Vec<Client> = (0..3).map(|_| Client::connect(router.address())).collect();
    for round in 0..12 {
        for client in &mut clients {
            // On each of its connections, because a new one would be stalled in its handshake.
            until("the node serves", || {
                let plain = client.cmd("GET warm").error().is_none();
                (plain && client.cmd("EVAL \"return 1\" 1 warm") == int(1)).then_some(())
            });
        }
        // The node executes the command, but the reply never arrives: the connection is cut, or a timeout expires.
        relay.stall(true);
        for (i, client) in clients.iter_mut().enumerate() {
            let mark = format!("once-{round}-{i}");
            match i {
                0 => client.send(&["SET", &mark, "x"]),
                1 => client.send(&["EVAL", "return redis.call('INCR', KEYS[1])", "1", &mark]),
                _ => client.send(&["MSET", &mark, "x"]),
            }
        }
        until("the node has them", || (0..3).all(|i| relay.seen(format!("once-{round}-{i}").as_bytes()) > 0));
        if round % 2 == 0 {
            relay.cut();
        }
        for client in &mut clients {
            names_node(&client.reply(), relay.address());
        }
        relay.stall(false);
    }
    until("the node serves", || clients[0].cmd("GET warm").error().is_none());
    for mark in (0..12).flat_map(|round| (0..3).map(move |i| format!("once-{round}-{i}"))) {
        assert_eq!(relay.seen(format!("{mark}\r\n").as_bytes()), 1, "{mark} was sent more than once");
    }
}

#[test]
fn a_node_that_refuses_connections_is_named_and_others_serve() {
    if crate::support::direct() {
        return;
    }
    let nodes = [Node::start(&NodeOptions::default()), Node::start(&NodeOptions::default())];
    let relay = Relay::start(nodes[0].address());
    let router = Router::start(&[relay.address(), nodes[1].address()], &RouterOptions::config(BRISK));
    let mut client = Client::connect(router.address());
    let keys: Vec<String> = (0..40).map(|i| format!("key{i}")).collect();
    for key in &keys {
        assert_eq!(client.cmd(&format!("SET {key} v")), ok());
    }
    let (far, near): (Vec<&String>, Vec<&String>) =
        keys.iter().partition(|key| nodes[0].cmd(&format!("EXISTS {key}")) == int(1));
    assert!(far.len() > 5 && near.len() > 5);
    // Connections are accepted and closed at once, like a load balancer without a server.
    relay.refuse(true);
    relay.cut();
    until("the loss is noticed", || client.cmd(&format!("GET {}", far[0])).error().map(drop));
    for _ in 0..20 {
        for key in &far {
            names_node(&client.cmd(&format!("GET {key}")), relay.address());
        }
        for key in &near {
            assert_eq!(client.cmd(&format!("GET {key}")), bulk("v"));
        }
    }
    relay.refuse(false);
    until("the node serves again", || client.cmd(&format!("GET {}", far[0])) == bulk("v"));
}

/// A reply ends in the middle of a value: an error or a close, never a shortened or mixed value.
#[test]
fn a_truncated_reply_is_never_completed_with_other_bytes() {
    if crate::support::direct() {
        return;
    }
    let node = Node::start(&NodeOptions::default());
    let relay = Relay::start(node.address());
    let router = Router::start(
        &[relay.address()],
        &RouterOptions { config: BRISK.into(), workers: 1, ..RouterOptions::default() },
    );
    for len in [100, 60_000, 3 << 20] {
        let value = vec![b'v'; len];
        assert_eq!(node.client().call(&[&b"SET"[..], format!("value{len}").as_bytes(), &value]), ok());
        node.cmd("SET other correct");
        for cut in [1, 3, 8, len / 2, len + 3] {
            let mut client = Client::connect(router.address());
            until("the node serves", || client.cmd("GET other") == bulk("correct"));
            relay.cut_after(cut as i64);
            client.post(&format!("GET value{len}"));
            client.post("GET other");
            match client.try_reply() {
                Ok(Value::Bulk(got)) => assert_eq!(got.len(), len, "cut after {cut} bytes"),
                Ok(other) => names_node(&other, relay.address()),
                // A partially forwarded value can only be ended by closing.
                Err(_) => continue,
            }
            match client.try_reply() {
                Ok(Value::Bulk(got)) => assert_eq!(got, b"correct"),
                Ok(other) => names_node(&other, relay.address()),
                Err(_) => {}
            }
            relay.cut_after(-1);
        }
    }
}

#[test]
fn a_client_that_does_not_read_is_closed_at_its_output_limit() {
    let Some(site) = Site::router_only(1, &options("[clients]\noutput-limit = \"4mb\"\n")) else {
        return;
    };
    let mut other = site.client();
    let value = vec![b'x'; 100_000];
    assert_eq!(other.call(&[&b"SET"[..], b"k", &value]), ok());
    let process = site.router().process();
    process.reset_peak_memory();
    let before = process.memory_kib("VmHWM");
    let mut lazy = site.client();
    let commands = crate::support::encode(&["GET", "k"]).repeat(5000);
    // The client writes and never reads. The router may stop reading its commands, or close it, but must not buffer
    // half a gigabyte.
    lazy.stream().set_write_timeout(Some(Duration::from_secs(1))).expect("timeout");
    use std::io::Write;
    let _ = lazy.stream().write_all(&commands);
    until("the lazy client is cut", || {
        // Other clients are served in the meantime.
        assert_eq!(other.cmd("STRLEN k"), int(100_000));
        let list = other.cmd("CLIENT LIST").text();
        list.lines().count() == 1
    });
    let grown = process.memory_kib("VmHWM").saturating_sub(before);
    assert!(grown < 40 << 10, "a client with an output limit of 4 MB cost {grown} KiB");
    assert!(lazy.closed_within(crate::support::client::TIMEOUT));
}

#[test]
fn a_client_above_max_clients_gets_redis_s_error() {
    let options = SiteOptions {
        node: NodeOptions {
            args: if crate::support::direct() { vec!["--maxclients".into(), "10".into()] } else { vec![] },
            ..NodeOptions::default()
        },
        router: RouterOptions::config("[clients]\nmax-clients = 10\n"),
    };
    let site = Site::with(1, &options);
    let mut clients: Vec<Client> = Vec::new();
    until("ten are in", || {
        // Connections of the start may still be counted for a moment.
        let mut client = site.client();
        if client.cmd("PING") == simple("PONG") {
            clients.push(client);
        }
        clients.len() == 10
    });
    for _ in 0..3 {
        let mut refused = site.client();
        let (bytes, closed) = refused.listen(Duration::from_secs(10));
        assert_eq!(String::from_utf8_lossy(&bytes), "-ERR max number of clients reached\r\n");
        assert!(closed);
    }
    assert_eq!(clients[0].cmd("PING"), simple("PONG"));
    clients.pop();
    until("there is room again", || {
        let mut client = site.client();
        client.post("PING");
        (client.try_reply().ok()? == simple("PONG")).then_some(())
    });
}

#[test]
fn the_router_survives_running_out_of_descriptors() {
    let Some(site) = Site::router_only(
        2,
        &SiteOptions::router(RouterOptions {
            open_files: Some(320),
            config: "[clients]\nmax-clients = 100000\n".into(),
            ..RouterOptions::default()
        }),
    ) else {
        return;
    };
    let mut first = site.client();
    assert_eq!(first.cmd("SET k v"), ok());
    let mut crowd: Vec<Client> = (0..400).filter_map(|_| Client::try_connect(site.address()).ok()).collect();
    let mut served = 0;
    let mut refused = 0;
    for client in &mut crowd {
        client.timeout(Duration::from_millis(2000));
        client.post_quietly("PING");
        match client.try_reply() {
            Ok(Value::Error(error)) => {
                assert_eq!(error, "ERR max number of clients reached");
                refused += 1;
            }
            Ok(reply) => {
                assert_eq!(reply, simple("PONG"));
                served += 1;
            }
            Err(_) => refused += 1,
        }
    }
    assert!(served > 20, "only {served} of 400 were served under 200 descriptors");
    assert!(refused > 100, "{refused} refused");
    // Connected clients are served, the admin port replies, and when the other clients are gone, everything works as
    // before.
    assert_eq!(first.cmd("GET k"), bulk("v"));
    drop(crowd);
    until("new clients are served again", || {
        let mut client = Client::try_connect(site.address()).ok()?;
        client.post_quietly("GET k");
        (client.try_reply().ok()? == bulk("v")).then_some(())
    });
    let (status, _) = crate::support::http::get(site.router().admin(), "/healthz");
    assert_eq!(status, 200);
}

#[test]
fn a_slow_command_does_not_delay_the_pipeline_of_others() {
    // One worker: without a separate lane, the reply of the slow script would precede all others.
    let Some(site) =
        Site::router_only(2, &SiteOptions::router(RouterOptions { workers: 1, ..RouterOptions::default() }))
    else {
        return;
    };
    let keys = keys(&site);
    let mut slow = site.client();
    let mut quick = site.client();
    // The script blocks its node until it is killed, but not the other node.
    let node = &site.nodes()[0];
    assert_eq!(node.cmd("CONFIG SET lua-time-limit 10"), ok());
    slow.send(&["EVAL", "while true do end", "1", &keys[0]]);
    until("the script runs", || node.cmd("PING").error().is_some_and(|error| error.starts_with("BUSY")));
    for number in 0..100 {
        assert_eq!(quick.cmd(&format!("SET {} {number}", keys[1])), ok());
    }
    slow.timeout(Duration::from_millis(1));
    assert!(slow.try_reply().is_err(), "the script runs until it is killed");
    slow.timeout(crate::support::client::TIMEOUT);
    assert_eq!(node.cmd("SCRIPT KILL"), ok());
    let reply = slow.reply();
    assert!(reply.expect_error().contains("killed"), "{reply:?}");
}

#[test]
fn a_short_silence_does_not_fill_the_slow_log() {
    let config = "[log]\nslowlog-log-slower-than = \"50ms\"\nslowlog-max-len = 10000\n";
    let site_options =
        SiteOptions::router(RouterOptions { config: config.into(), workers: 1, ..RouterOptions::default() });
    let Some(site) = Site::router_only(1, &site_options) else { return };
    let mut client = site.client();
    assert_eq!(client.cmd("SET k v"), ok());
    // After small replies, a client may have many commands in flight.
    for _ in 0..100 {
        assert_eq!(client.cmd("GET k"), bulk("v"));
    }
    site.nodes()[0].freeze();
    let began = Instant::now();
    for _ in 0..3000 {
        client.post("GET k");
    }
    std::thread::sleep(Duration::from_millis(200));
    site.nodes()[0].thaw();
    for _ in 0..3000 {
        assert_eq!(client.reply(), bulk("v"));
    }
    let entered = client.cmd("SLOWLOG LEN").int();
    let seconds = began.elapsed().as_secs() as i64 + 1;
    assert!((1..=100 * (1 + seconds)).contains(&entered), "{entered} entries in {seconds} s");
    let metrics = site.router().metrics();
    let counted = metrics.lines().find_map(|line| {
        line.strip_prefix("switchyard_slowlog_dropped_total")?.rsplit(' ').next()?.parse::<i64>().ok()
    });
    assert!(counted.is_some_and(|counted| counted + entered >= 2500), "{counted:?} and {entered} of 3000");
}

/// A server executes one command at a time, and other commands wait for it. So they do through the router, whatever the
/// duration.
#[test]
fn a_slow_command_takes_its_time_and_causes_no_errors() {
    let config = "[nodes]\nconnect-timeout = \"400ms\"\ncommand-timeout = \"400ms\"\n";
    let Some(site) = Site::router_only(
        2,
        &SiteOptions::router(RouterOptions { config: config.into(), workers: 1, ..RouterOptions::default() }),
    ) else {
        return;
    };
    let keys = keys(&site);
    let mut clients: Vec<Client> = (0..6).map(|_| site.client()).collect();
    let script = format!("EVAL \"return 1\" 1 {}", keys[1]);
    for line in ["KEYS *", &script, "SCRIPT LOAD \"return 1\""] {
        assert_eq!(clients[0].cmd(line).error(), None, "its connection is there");
    }
    for slow in ["FLUSHALL", "KEYS *", "SCRIPT FLUSH", &script] {
        // A frozen node is indistinguishable from a node that executes a slow command.
        site.nodes()[1].freeze();
        clients[0].post(slow);
        clients[0].post(&format!("SET {} 1", keys[1]));
        std::thread::sleep(Duration::from_millis(100));
        let others = [
            format!("GET {}", keys[1]),
            format!("WATCH {}", keys[1]),
            format!("BLPOP {}list 0.1", keys[1]),
            format!("MGET {} {}", keys[0], keys[1]),
        ];
        clients[5].cmd("HELLO 3");
        for (client, line) in clients[1..5].iter_mut().zip(&others) {
            client.post(line);
        }
        clients[5].post(&format!("SET {} 1", keys[1]));
        // The other node serves the whole time.
        let until = Instant::now() + Duration::from_secs(2);
        let mut other = site.client();
        while Instant::now() < until {
            assert_eq!(other.cmd(&format!("SET {} 1", keys[0])), ok());
        }
        site.nodes()[1].thaw();
        for client in &mut clients {
            let reply = client.reply();
            assert_eq!(reply.error(), None, "{slow}: {reply:?}");
        }
        assert_eq!(clients[0].reply(), ok());
        assert_eq!(clients[2].cmd("UNWATCH"), ok());
    }
}

/// A library sends these commands when connecting, and considers an address without a reply dead.
#[test]
fn a_handshake_waits_for_no_silent_node() {
    let Some(site) = Site::router_only(2, &options("workers = 1\n[nodes]\ncommand-timeout = \"5m\"\n")) else { return };
    let keys = keys(&site);
    let mut before = site.client();
    let count = before.cmd("COMMAND COUNT");
    assert_eq!(before.cmd(&format!("SET {} 1 EX 1000", keys[0])), ok());
    assert_eq!(before.cmd(&format!("SET {} 1", keys[1])), ok());
    let all = |info: &str| info.contains("db0:keys=2,expires=1,");
    until("the health of both nodes has been queried since", || all(&before.cmd("INFO").text()));
    std::thread::sleep(std::time::Duration::from_millis(2500));
    let mut waiting: Vec<Client> = keys.iter().map(|_| site.client()).collect();
    for (node, client) in waiting.iter_mut().enumerate() {
        site.nodes()[node].freeze();
        client.post(&format!("SET {} 1", keys[node]));
        // Immediately, and when the node is known to be silent.
        for _ in 0..3 {
            let mut client = site.client();
            for line in ["HELLO 2", "CLIENT SETNAME library", "CLIENT SETINFO LIB-NAME library", "SELECT 0", "PING"] {
                assert_eq!(client.cmd(line).error(), None, "{line}");
            }
            let info = client.cmd("INFO");
            assert!(info.text().contains("switchyard_version:") && all(&info.text()), "{info:?}");
            assert_eq!(client.cmd("COMMAND COUNT"), count);
        }
    }
    for (node, client) in waiting.iter_mut().enumerate() {
        site.nodes()[node].thaw();
        assert_eq!(client.reply(), ok(), "what needs the node has waited for it");
    }
}

/// The pause of a connection grows with each failed attempt. When another connection finds the node up, no command
/// waits for the pause, or fails because of it.
#[test]
fn commands_wait_if_another_connection_finds_the_node_up() {
    let options = RouterOptions { workers: 1, ..RouterOptions::config("[nodes]\nreconnect-backoff-max = \"1h\"\n") };
    let Some(mut site) = Site::router_only(1, &SiteOptions::router(options)) else { return };
    let mut resting = site.client();
    assert_eq!(resting.cmd("SET k v"), ok());
    site.node_mut(0).kill();
    // The next pause takes seconds.
    let failures = || {
        let metrics = site.router().metrics();
        let line = metrics
            .lines()
            .find(|line| line.starts_with("switchyard_node_connection_failures_total"))
            .map(str::to_owned);
        line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).unwrap_or(0.0)
    };
    until("it has failed again and again", || failures() >= 7.0);
    site.node_mut(0).restart();
    // RESP3 replies use another connection.
    let mut other = site.client();
    other.cmd("HELLO 3");
    until("the other one finds it up", || other.cmd("GET k").error().is_none());
    for line in ["GET k", "EVAL \"return 1\" 0", "EVAL \"return 1\" 1 k", "DBSIZE", "MGET k k", "PING"] {
        let reply = resting.cmd(line);
        assert!(reply.error().is_none(), "{line}: {reply:?}");
    }
}
