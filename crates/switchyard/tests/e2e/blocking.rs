//! Blocking commands: the cases that scripts/blocking.txt (compared with a plain server) cannot cover, because they
//! need several clients, time, or failures.

use std::time::{Duration, Instant};

use crate::support::client::TIMEOUT;
use crate::support::relay::Relay;
use crate::support::{
    Client, Node, NodeOptions, Router, RouterOptions, Site, SiteOptions, Value, bulk, int, ok, simple, until,
};

const BRISK: &str =
    "[nodes]\nconnect-timeout = \"500ms\"\ncommand-timeout = \"500ms\"\nreconnect-backoff-max = \"100ms\"\n";

fn options(config: &str, workers: usize) -> SiteOptions {
    SiteOptions::router(RouterOptions { config: config.into(), workers, ..RouterOptions::default() })
}

fn field(info: &str, name: &str) -> usize {
    let value = info
        .lines()
        .find_map(|l| l.strip_prefix(name)?.strip_prefix(':'))
        .unwrap_or_else(|| panic!("no {name} in {info}"));
    value.trim().parse().expect("a number")
}

/// Number of blocked clients that the node reports.
fn waiting(node: &Node) -> usize {
    field(&node.cmd("INFO clients").text(), "blocked_clients")
}

#[track_caller]
fn until_waiting(node: &Node, count: usize) {
    until("the expected number of clients wait at the node", || waiting(node) == count);
}

/// The reply to a blocking pop: the key and the element.
fn popped(key: &str, value: &str) -> Value {
    Value::Array(vec![bulk(key), bulk(value)])
}

#[test]
fn an_element_wakes_clients_in_the_order_of_waiting() {
    let site = Site::with(2, &options("", 2));
    let mut pusher = site.client();
    for protocol in ["HELLO 2", "HELLO 3"] {
        let mut clients: Vec<Client> = (0..5).map(|_| site.client()).collect();
        for client in &mut clients {
            client.cmd(protocol);
            let before: usize = site.nodes().iter().map(waiting).sum();
            client.post("BLPOP q{w} r{w} 0");
            until("it waits", || site.nodes().iter().map(waiting).sum::<usize>() == before + 1);
        }
        for (i, client) in clients.iter_mut().enumerate() {
            assert_eq!(pusher.cmd(&format!("RPUSH r{{w}} element{i}")), int(1));
            assert_eq!(client.reply(), popped("r{w}", &format!("element{i}")));
        }
        // An entry of a stream wakes all readers.
        pusher.cmd("XADD x{w} 1-1 f v");
        for client in &mut clients {
            client.post("XREAD BLOCK 0 STREAMS x{w} $");
        }
        until("all wait", || site.nodes().iter().map(waiting).sum::<usize>() == 5);
        pusher.cmd("XADD x{w} 2-2 g w");
        for client in &mut clients {
            assert!(client.reply().error().is_none());
        }
        pusher.cmd("DEL x{w}");
    }
}

#[test]
fn commands_behind_a_blocking_command_wait() {
    let site = Site::with(2, &options("", 1));
    let mut client = site.client();
    let mut other = site.client();
    // Also commands for other nodes, and commands that the router answers.
    for line in ["SET before 1", "GET before", "BLPOP q 0", "SET after 1", "PING", "GET after", "BLPOP q 0", "ECHO end"]
    {
        client.post(line);
    }
    assert_eq!((client.reply(), client.reply()), (ok(), bulk("1")));
    until("it waits", || site.nodes().iter().map(waiting).sum::<usize>() == 1);
    assert_eq!(other.cmd("EXISTS after"), int(0));
    assert_eq!(client.listen(Duration::from_millis(200)), (vec![], false));
    other.cmd("RPUSH q one");
    assert_eq!(client.reply(), popped("q", "one"));
    assert_eq!((client.reply(), client.reply(), client.reply()), (ok(), simple("PONG"), bulk("1")));
    until("it waits again", || site.nodes().iter().map(waiting).sum::<usize>() == 1);
    other.cmd("RPUSH q two");
    assert_eq!((client.reply(), client.reply()), (popped("q", "two"), bulk("end")));
}

#[test]
fn keys_of_one_blocking_command_share_a_slot_if_configured() {
    let Some(site) = Site::router_only(3, &SiteOptions::refusing_several_slots()) else { return };
    let mut client = site.client();
    for line in [
        "BLPOP a b 0",
        "BLMOVE a b LEFT LEFT 0",
        "BLMPOP 0 2 a b LEFT",
        "BZPOPMIN a b 0",
        "XREAD BLOCK 0 STREAMS a b 0 0",
    ] {
        assert!(client.cmd(line).expect_error().starts_with("CROSSSLOT"), "{line}");
    }
}

#[test]
fn client_unblock_reaches_clients_of_every_worker() {
    let site = Site::with(2, &options("", 2));
    let mut other = site.client();
    let mut clients: Vec<Client> = (0..8).map(|_| site.client()).collect();
    for (i, client) in clients.iter_mut().enumerate() {
        let id = client.cmd("CLIENT ID").int();
        for line in
            [format!("BLPOP q{i} 0"), format!("BLMOVE q{i} q{i} LEFT LEFT 0"), format!("XREAD BLOCK 0 STREAMS q{i} $")]
        {
            client.post(&line);
            // Immediately, so the command may not have reached the node.
            let mut unblocked = other.cmd(&format!("CLIENT UNBLOCK {id}"));
            while unblocked == int(0) {
                unblocked = other.cmd(&format!("CLIENT UNBLOCK {id} TIMEOUT"));
            }
            assert_eq!(unblocked, int(1));
            assert_eq!(client.raw(), b"*-1\r\n", "{line}");
            client.post(&line);
            until("it waits", || field(&other.cmd("INFO clients").text(), "blocked_clients") == 1);
            assert!(other.cmd("CLIENT LIST").text().contains(" flags=b "));
            assert_eq!(other.cmd(&format!("CLIENT UNBLOCK {id} ERROR")), int(1));
            assert_eq!(client.reply().expect_error(), "UNBLOCKED client unblocked via CLIENT UNBLOCK");
            assert_eq!(other.cmd(&format!("CLIENT UNBLOCK {id}")), int(0), "it waits no more");
        }
        assert_eq!(client.cmd("PING"), simple("PONG"));
    }
    assert!(other.cmd("CLIENT LIST").text().lines().all(|l| l.contains(" flags=N ")));
    // The connections are free again, and unblocking has affected no other client.
    for client in &mut clients {
        assert_eq!(client.cmd("BLPOP none 0.01"), Value::Nil);
    }
}

/// A disconnected client no longer waits at the node: elements pushed afterwards are not lost.
#[test]
fn a_disconnected_client_takes_no_element() {
    let site = Site::with(1, &options("", 2));
    let node = &site.nodes()[0];
    let mut other = site.client();
    type Way = fn(&mut Client, &mut Client);
    let ways: [(&str, Way); 4] = [
        ("it closes", |c, _| c.cut()),
        ("it closes its side", |c, _| c.finish_sending()),
        ("it closes with more commands sent", |c, _| {
            c.post("SET unread 1");
            c.post("BLPOP q 0");
            c.finish_sending();
        }),
        ("it is killed", |c, o| {
            let addr = c.stream().local_addr().expect("an address");
            assert_eq!(o.cmd(&format!("CLIENT KILL ADDR {addr}")), int(1));
        }),
    ];
    for (name, way) in ways {
        for _ in 0..5 {
            let mut client = site.client();
            client.post("BLPOP q 0");
            until_waiting(node, 1);
            way(&mut client, &mut other);
            until_waiting(node, 0);
            other.cmd("RPUSH q kept");
            assert_eq!(other.cmd("LPOP q"), bulk("kept"), "{name}");
            assert!(client.closed_within(Duration::from_secs(10)), "{name}");
        }
    }
    assert_eq!(other.cmd("EXISTS unread"), int(0));
    // A client that disconnects before its command is processed.
    for _ in 0..20 {
        let mut client = site.client();
        client.post("SET k v");
        client.post("BLPOP q 0");
        client.finish_sending();
        assert_eq!(client.reply(), ok());
        assert!(client.closed_within(Duration::from_secs(10)));
        until_waiting(node, 0);
    }
    until("no client is counted as waiting", || field(&other.cmd("INFO clients").text(), "blocked_clients") == 0);
}

/// How long an element can still be popped for a disconnected client. Does not assert a time: the documentation states
/// the measured one.
#[test]
fn the_wait_of_a_disconnected_client_ends() {
    let Some(site) = Site::router_only(1, &options("", 1)) else { return };
    let mut probe = site.nodes()[0].client();
    let mut times: Vec<Duration> = (0..200)
        .map(|_| {
            let mut client = site.client();
            client.post("BLPOP q 0");
            until("it waits", || field(&probe.cmd("INFO clients").text(), "blocked_clients") == 1);
            let start = Instant::now();
            client.cut();
            while field(&probe.cmd("INFO clients").text(), "blocked_clients") > 0 {
                assert!(start.elapsed() < TIMEOUT, "the wait continues without its client");
            }
            start.elapsed()
        })
        .collect();
    times.sort();
    eprintln!(
        "from the client's close to the end of its wait: median {:?}, 99th percentile {:?}, longest {:?}",
        times[100], times[197], times[199]
    );
}

#[test]
fn connections_are_returned_and_reused() {
    if crate::support::direct() {
        return;
    }
    let node = Node::start(&NodeOptions::default());
    let relay = Relay::start(node.address());
    let router = Router::start(&[relay.address()], &RouterOptions { workers: 1, ..RouterOptions::default() });
    let mut other = Client::connect(router.address());
    other.cmd("SET warm up");
    let plain = relay.settled();
    for round in 0..30 {
        let mut client = Client::connect(router.address());
        client.post("BLPOP q 0");
        until_waiting(&node, 1);
        match round % 3 {
            0 => {
                other.cmd("RPUSH q x");
                assert_eq!(client.reply(), popped("q", "x"));
            }
            1 => {
                client.cut();
                until_waiting(&node, 0);
            }
            _ => {
                let id = other
                    .cmd("CLIENT LIST")
                    .text()
                    .lines()
                    .last()
                    .map(|l| l.split([' ', '=']).nth(1).expect("an id").to_owned());
                other.cmd(&format!("CLIENT UNBLOCK {}", id.expect("a client")));
                assert_eq!(client.reply(), Value::Nil);
            }
        }
    }
    // The last connection of a round may not be returned when the next round begins.
    assert!(relay.accepted() <= plain + 3, "{} connections for 30 commands", relay.accepted() - plain);
}

#[test]
fn thousands_of_clients_wait_at_once() {
    const CLIENTS: usize = 3000;
    let node = NodeOptions { args: vec!["--maxclients".into(), "20000".into()], ..NodeOptions::default() };
    let Some(site) = Site::router_only(1, &SiteOptions { node, ..options("", 2) }) else { return };
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| site.client()).collect();
    for (i, client) in clients.iter_mut().enumerate() {
        client.post(&format!("BLPOP q{i} 0"));
    }
    until_waiting(&site.nodes()[0], CLIENTS);
    // Other clients are served.
    let mut other = site.client();
    assert_eq!(other.cmd("SET k v"), ok());
    for (i, client) in clients.iter_mut().enumerate().filter(|(i, _)| i % 2 == 0) {
        assert_eq!(other.cmd(&format!("RPUSH q{i} v{i}")), int(1));
        assert_eq!(client.reply(), popped(&format!("q{i}"), &format!("v{i}")));
    }
    // All other clients disconnect at once.
    drop(clients);
    until_waiting(&site.nodes()[0], 0);
    assert_eq!(other.cmd("RPUSH q1 kept"), int(1));
    assert_eq!(other.cmd("LLEN q1"), int(1));
}

#[test]
fn the_limit_holds_over_all_workers_and_each_gets_a_turn() {
    let Some(site) =
        Site::router_only(1, &options("[nodes]\nblocking-connections-max = 3\ncommand-timeout = \"20s\"\n", 2))
    else {
        return;
    };
    let node = &site.nodes()[0];
    let mut clients: Vec<Client> = (0..12).map(|_| site.client()).collect();
    for client in &mut clients {
        client.post("BLPOP q 0");
    }
    until_waiting(node, 3);
    let mut other = site.client();
    // Each client gets its element, on any worker: a worker releases its connections to the clients of another.
    for number in 0..12 {
        assert_eq!(other.cmd(&format!("RPUSH q v{number}")).error(), None);
        assert!(node.cmd("INFO clients").text().lines().any(|l| {
            l.strip_prefix("blocked_clients:").is_some_and(|n| n.trim().parse::<u32>().is_ok_and(|n| n <= 3))
        }));
    }
    let mut got: Vec<String> = clients.iter_mut().map(|client| client.reply().items()[1].text()).collect();
    got.sort();
    let mut wanted: Vec<String> = (0..12).map(|number| format!("v{number}")).collect();
    wanted.sort();
    assert_eq!(got, wanted);
    // A worker releases unused connections to the clients of another.
    for round in 0..6 {
        let mut clients: Vec<Client> = (0..3).map(|_| site.client()).collect();
        for client in &mut clients {
            client.post(&format!("BLPOP round{round} 0"));
        }
        until_waiting(node, 3);
        other.cmd(&format!("RPUSH round{round} v v v"));
        for client in &mut clients {
            assert_eq!(client.reply(), popped(&format!("round{round}"), "v"));
        }
    }
}

#[test]
fn an_error_names_the_limit_when_it_is_reached() {
    let Some(site) =
        Site::router_only(1, &options("[nodes]\nblocking-connections-max = 2\ncommand-timeout = \"2s\"\n", 1))
    else {
        return;
    };
    let mut clients = [site.client(), site.client()];
    for (at, client) in clients.iter_mut().enumerate() {
        client.post("BLPOP q 0");
        until_waiting(&site.nodes()[0], at + 1);
    }
    let mut third = site.client();
    let reply = third.cmd("BLPOP q 0");
    let error = reply.expect_error();
    assert!(error.starts_with("NODEBUSY") && error.contains("blocking-connections-max 2"), "{error}");
    // A queued client gets the next returned connection.
    third.post("BLPOP other 0");
    std::thread::sleep(Duration::from_millis(100));
    let mut other = site.client();
    other.cmd("RPUSH q x");
    assert_eq!(clients[0].reply(), popped("q", "x"));
    until_waiting(&site.nodes()[0], 2);
    other.cmd("RPUSH other y");
    assert_eq!(third.reply(), popped("other", "y"));
    // A client that disconnects while queued leaves nothing behind.
    clients[0].post("BLPOP q 0");
    until_waiting(&site.nodes()[0], 2);
    third.post("BLPOP q 0");
    std::thread::sleep(Duration::from_millis(50));
    drop(third);
    for (client, value) in clients.iter_mut().rev().zip(["1", "2"]) {
        other.cmd(&format!("RPUSH q {value}"));
        assert_eq!(client.reply(), popped("q", value));
    }
    assert_eq!(other.cmd("LLEN q"), int(0));
}

#[test]
fn a_node_that_refuses_connections_does_not_count_as_dead() {
    let node = NodeOptions { args: vec!["--maxclients".into(), "6".into()], ..NodeOptions::default() };
    let Some(site) = Site::router_only(1, &SiteOptions { node, ..options(BRISK, 1) }) else { return };
    let mut clients: Vec<Client> = (0..12).map(|_| site.client()).collect();
    for client in &mut clients {
        client.post("BLPOP q 2");
    }
    let mut other = site.client();
    assert_eq!(other.cmd("SET k v"), ok());
    let mut refused = 0;
    for client in &mut clients {
        let reply = client.reply();
        if let Some(error) = reply.error() {
            assert!(error.starts_with("NODEBUSY"), "{error}");
            refused += 1;
        }
        assert_eq!(other.cmd("GET k"), bulk("v"));
    }
    assert!(refused > 0 && refused < 12, "{refused} refused");
}

/// As at the end of a server: libraries handle a closed connection, but no special error.
#[test]
fn a_node_that_dies_ends_every_wait() {
    let Some(mut site) = Site::router_only(1, &options(BRISK, 2)) else { return };
    let mut clients: Vec<Client> = (0..20).map(|_| site.client()).collect();
    for (i, client) in clients.iter_mut().enumerate() {
        if i % 2 == 0 {
            client.cmd("HELLO 3");
        }
        client.post("BLPOP q 0");
        client.post("PING");
    }
    until_waiting(&site.nodes()[0], 20);
    let mut other = site.client();
    site.node_mut(0).kill();
    for client in &mut clients {
        assert_eq!(client.listen(TIMEOUT), (Vec::new(), true));
    }
    // While the node is down there is no connection to wait on. Other commands return errors.
    until("the node is known to be down", || {
        other.cmd("GET k").error().is_some_and(|error| error.starts_with("NODEDOWN"))
    });
    for line in ["BLPOP q 0", "BLPOP q 1", "XREAD BLOCK 0 STREAMS s $"] {
        let mut late = site.client();
        late.post(line);
        assert_eq!(late.listen(TIMEOUT), (Vec::new(), true), "{line}");
    }
    site.node_mut(0).restart();
    until("the node serves again", || other.cmd("GET k").error().is_none());
    let mut clients: Vec<Client> = (0..20).map(|_| site.client()).collect();
    for client in &mut clients {
        client.post("BLPOP q 0");
    }
    until_waiting(&site.nodes()[0], 20);
    for _ in 0..20 {
        other.cmd("RPUSH q x");
    }
    for client in &mut clients {
        assert_eq!(client.reply(), popped("q", "x"));
    }
}

/// As for a client that already waits: here its connection was still being opened.
#[test]
fn a_node_that_dies_ends_waits_about_to_begin() {
    if crate::support::direct() {
        return;
    }
    let node = Node::start(&NodeOptions::default());
    let relay = Relay::start(node.address());
    let router = Router::start(&[relay.address()], &RouterOptions { workers: 1, ..RouterOptions::default() });
    let mut clients: Vec<Client> = (0..5).map(|_| Client::connect(router.address())).collect();
    assert_eq!(clients[0].cmd("SET k v"), ok());
    let before = relay.settled();
    relay.stall(true);
    for client in &mut clients {
        client.post("BLPOP q 0");
    }
    until("their connections are being made", || relay.accepted() >= before + 5);
    relay.refuse(true);
    relay.cut();
    for client in &mut clients {
        assert_eq!(client.listen(TIMEOUT), (Vec::new(), true));
    }
}

/// A frozen node causes no event on the connection of a waiting client, but is still detected.
#[test]
fn a_node_that_freezes_ends_every_wait() {
    let Some(site) = Site::router_only(1, &options(BRISK, 1)) else { return };
    let node = &site.nodes()[0];
    let mut forever = site.client();
    forever.post("BLPOP q 0");
    let mut bounded = site.client();
    bounded.post("BLPOP q 1");
    until_waiting(node, 2);
    node.freeze();
    assert_eq!(forever.listen(TIMEOUT), (Vec::new(), true));
    assert_eq!(bounded.listen(TIMEOUT), (Vec::new(), true));
    node.thaw();
    let mut other = site.client();
    until("the node serves again", || other.cmd("SET k v") == ok());
    // The earlier waits have ended at the node as well.
    until_waiting(node, 0);
    other.cmd("RPUSH q kept");
    assert_eq!(other.cmd("BLPOP q 0"), popped("q", "kept"));
}

#[test]
fn a_wait_exceeds_the_command_timeout_and_is_no_zombie() {
    let Some(site) = Site::router_only(1, &options(BRISK, 1)) else { return };
    let mut client = site.client();
    let start = Instant::now();
    assert_eq!(client.cmd("BLPOP q 1.2"), Value::Nil);
    assert!(start.elapsed() >= Duration::from_millis(1200));
    client.post("BLPOP q 0");
    std::thread::sleep(Duration::from_millis(1200));
    let mut other = site.client();
    other.cmd("RPUSH q x");
    assert_eq!(client.reply(), popped("q", "x"));
    let metrics = site.router().metrics();
    assert!(metrics.contains("switchyard_clients_blocked 0"), "{metrics}");
    for line in metrics
        .lines()
        .filter(|l| l.starts_with("switchyard_node_timeouts_total") || l.starts_with("switchyard_node_unconfirmed"))
    {
        assert!(line.ends_with(" 0"), "{line}");
    }
}

/// SIGTERM first ends waits at the node, so that elements pushed in the meantime are not lost, and then the
/// connections.
#[test]
fn a_drain_ends_waits_without_an_error() {
    // If the drain waited for its timeout, the test would time out.
    let Some(mut site) = Site::router_only(1, &options("shutdown-timeout = \"10m\"\n", 2)) else { return };
    let mut clients: Vec<Client> = (0..10).map(|_| site.client()).collect();
    for client in &mut clients {
        client.post("BLPOP q 0");
    }
    until_waiting(&site.nodes()[0], 10);
    site.router().process().signal(rustix::process::Signal::TERM);
    for client in &mut clients {
        assert_eq!(client.listen(TIMEOUT), (Vec::new(), true));
    }
    assert_eq!(waiting(&site.nodes()[0]), 0);
    assert!(site.router_mut().process_mut().wait(TIMEOUT).success());
}

/// An unlimited wait does not delay a reload, which waits until no command of the old topology is in flight.
#[test]
fn a_wait_does_not_delay_a_change_of_the_nodes() {
    if crate::support::direct() {
        return;
    }
    let nodes = [Node::start(&NodeOptions::default()), Node::start(&NodeOptions::default())];
    let limits = "[nodes]\ncommand-timeout = \"300ms\"\nslow-command-timeout = \"500ms\"\n";
    let with = |count: usize| {
        let list: String =
            nodes[..count].iter().map(|n| format!("[[node]]\naddress = \"{}\"\n", n.address())).collect();
        format!("{limits}{list}")
    };
    let router = Router::start(&[], &RouterOptions::config(with(1)));
    let mut client = Client::connect(router.address());
    client.post("BLPOP q 0");
    until_waiting(&nodes[0], 1);
    let mut other = Client::connect(router.address());
    let reload = |config: String, count: i64| {
        std::fs::write(router.config_file(), config).expect("configuration");
        router.process().signal(rustix::process::Signal::HUP);
        let mut other = Client::connect(router.address());
        until("the nodes have changed", || other.cmd("SWITCHYARD STATUS").field("nodes") == int(count));
    };
    reload(with(2), 2);
    reload(with(1), 1);
    // The reload waits for at most twice the slow command's time. Then it logs that it gave up.
    std::thread::sleep(Duration::from_millis(1500));
    assert!(!router.process().log().contains("still busy"), "{}", router.process().log());
    assert_eq!(waiting(&nodes[0]), 1);
    other.cmd("RPUSH q x");
    assert_eq!(client.reply(), popped("q", "x"));
}

/// Elements are neither lost nor delivered twice while consumers join and leave, and connections break.
#[test]
fn elements_are_neither_lost_nor_doubled_among_many_consumers() {
    const ELEMENTS: usize = 3000;
    let site = Site::with(2, &options("", 2));
    let mut got: Vec<usize> = std::thread::scope(|scope| {
        let consumers: Vec<_> = (0..16)
            .map(|i| {
                let site = &site;
                scope.spawn(move || {
                    let mut got = Vec::new();
                    let mut client = site.client();
                    if i % 2 == 0 {
                        client.cmd("HELLO 3");
                    }
                    loop {
                        let reply = match i % 3 {
                            0 => client.cmd(&format!("BLPOP {{q{}}}l 0", i % 4)),
                            1 => client.cmd(&format!("BRPOP {{q{}}}l {{q{}}}m 0", i % 4, i % 4)),
                            _ => client.cmd(&format!("BLMPOP 0 1 {{q{}}}l LEFT", i % 4)),
                        };
                        let value = match &reply.items()[1] {
                            Value::Bulk(value) => String::from_utf8_lossy(value).into_owned(),
                            other => other.items()[0].text(),
                        };
                        match value.parse() {
                            Ok(number) => got.push(number),
                            Err(_) => return got,
                        }
                        if got.len() % 40 == 0 {
                            // Open another connection. No command is in flight on this one.
                            client = site.client();
                        }
                    }
                })
            })
            .collect();
        let mut pusher = site.client();
        for number in 0..ELEMENTS {
            pusher.cmd(&format!("RPUSH {{q{}}}l {number}", number % 4));
        }
        for i in 0..4 {
            until("the queue is empty", || pusher.cmd(&format!("LLEN {{q{i}}}l")) == int(0));
            for _ in 0..4 {
                pusher.cmd(&format!("RPUSH {{q{i}}}l end"));
            }
        }
        consumers.into_iter().flat_map(|c| c.join().expect("a consumer")).collect()
    });
    got.sort_unstable();
    assert_eq!(got, (0..ELEMENTS).collect::<Vec<_>>());
}

#[test]
fn a_large_element_reaches_the_waiting_client() {
    let site = Site::with(1, &options("", 1));
    let mut client = site.client();
    let mut other = site.client();
    let value = vec![b'e'; 5 << 20];
    for _ in 0..3 {
        client.post("BLPOP q 0");
        client.post("PING");
        until_waiting(&site.nodes()[0], 1);
        assert_eq!(other.call(&[&b"RPUSH"[..], b"q", &value]), int(1));
        assert_eq!(client.reply().items()[1].bytes().len(), value.len());
        assert_eq!(client.reply(), simple("PONG"));
    }
}

/// Connections break on both sides while clients wait: no element is delivered twice, and an element is missing only if
/// a client was disconnected, or left while it waited.
#[test]
fn elements_are_delivered_at_most_once_despite_failures() {
    use std::sync::atomic::{AtomicBool, Ordering};
    let Some(site) = Site::router_only(2, &options(BRISK, 2)) else { return };
    let stop = AtomicBool::new(false);
    let (mut got, mut doubts, mut pushed) = (Vec::new(), 0, Vec::new());
    std::thread::scope(|scope| {
        let consumers: Vec<_> = (0..12)
            .map(|i| {
                let (site, stop) = (&site, &stop);
                scope.spawn(move || {
                    let (mut got, mut doubts) = (Vec::new(), 0);
                    let mut client = site.client();
                    let mut round = i;
                    while !stop.load(Ordering::Relaxed) {
                        round += 1;
                        let tag = round % 3;
                        client.post(&format!("BLPOP {{w{tag}}}q 0.3"));
                        if round % 9 == 0 {
                            std::thread::sleep(Duration::from_millis(round as u64 % 40));
                            client.cut();
                            doubts += 1;
                            client = site.client();
                            continue;
                        }
                        match client.try_reply() {
                            Ok(Value::Nil) => {}
                            Ok(Value::Array(items)) => got.push(items[1].text()),
                            Ok(other) => panic!("{other:?}"),
                            Err(_) => {
                                doubts += 1;
                                client = site.client();
                            }
                        }
                    }
                    (got, doubts)
                })
            })
            .collect();
        let mut pusher = site.client();
        // A count rather than a time, because the throughput depends on the machine.
        for number in 1..=2000_usize {
            let element = format!("e{number}");
            // An element with an unknown result is not counted, but may appear.
            if pusher.cmd(&format!("RPUSH {{w{}}}q {element}", number % 3)).error().is_none() {
                pushed.push(element);
            }
            if number % 150 == 0 {
                site.nodes()[number % 2].cmd("CLIENT KILL TYPE normal SKIPME yes");
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, Ordering::Relaxed);
        for consumer in consumers {
            let (more, doubt) = consumer.join().expect("a consumer without impossible results");
            got.extend(more);
            doubts += doubt;
        }
    });
    let mut client = site.client();
    for tag in 0..3 {
        until("the node serves", || client.cmd(&format!("LLEN {{w{tag}}}q")).error().is_none());
        got.extend(client.cmd(&format!("LRANGE {{w{tag}}}q 0 -1")).items().iter().map(Value::text));
    }
    let count = got.len();
    got.sort_unstable();
    got.dedup();
    assert_eq!(got.len(), count, "an element was given twice");
    let missing = pushed.iter().filter(|element| got.binary_search(element).is_err()).count();
    assert!(
        pushed.len() > 1000 && missing <= doubts,
        "{missing} of {} are missing, and only {doubts} waits ended in doubt",
        pushed.len()
    );
    eprintln!("{} pushed, {missing} missing, {doubts} in doubt", pushed.len());
}
