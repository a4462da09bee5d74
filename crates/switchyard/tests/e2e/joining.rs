//! Servers that try to join: refused with a reason if a check fails, without any change. And nodes without keys, whose
//! failures must not affect commands for all nodes.

use std::net::SocketAddr;
use std::time::Duration;

use crate::movectl::{done, json, names, owns, refused, run_cli, slots};
use crate::support::relay::Relay;
use crate::support::{
    Client, Node, NodeOptions, Router, RouterOptions, Site, SiteOptions, Value, bulk, direct, int, ok, ports, until,
};

fn node(args: &[&str]) -> Node {
    Node::start(&NodeOptions { args: args.iter().map(|arg| (*arg).to_owned()).collect(), ..NodeOptions::default() })
}

fn operated(nodes_may_be_down: bool, more: &[&str]) -> SiteOptions {
    let mut args = vec!["--set".to_owned(), "clients.default-user-rules=operator".to_owned()];
    args.extend(more.iter().map(|arg| (*arg).to_owned()));
    SiteOptions::router(RouterOptions { args, nodes_may_be_down, ..RouterOptions::default() })
}

fn epoch(router: &Router) -> i64 {
    Client::connect(router.address()).cmd("SWITCHYARD STATUS").field("epoch").int()
}

#[test]
fn an_unsuitable_server_is_refused_without_any_change() {
    let Some(site) = Site::router_only(2, &operated(false, &[])) else { return };
    let router = site.router();
    site.client().cmd("SET key value");
    let first = site.nodes()[0].address();
    let [to_router, to_node] = [Relay::start(router.address()), Relay::start(first)];
    let replica = node(&["--replicaof", "127.0.0.1", &first.port().to_string()]);
    let full = node(&[]);
    full.client().cmd("SET stray 1");
    let mut other_database = full.client();
    other_database.cmd("SELECT 3");
    other_database.cmd("SET stray 1");
    let closed = node(&["--requirepass", "secret"]);
    let bus = ports::free().to_string();
    let cluster = node(&["--cluster-enabled", "yes", "--cluster-port", &bus]);
    let small = node(&["--databases", "4"]);
    let nobody = SocketAddr::from(([127, 0, 0, 1], ports::free()));
    let before = (slots(router), epoch(router));
    for (address, said) in [
        (nobody, "cannot be reached"),
        (router.address(), "is this router itself"),
        (to_router.address(), "is this router itself"),
        (to_node.address(), "is the same server as node"),
        (replica.address(), "promote it first"),
        (full.address(), "holds 2 keys (db0: 1, db3: 1)"),
        (closed.address(), "refuses us: NOAUTH"),
        (cluster.address(), "set cluster-enabled no there"),
        (small.address(), "fewer databases than the other nodes"),
    ] {
        for line in [format!("nodes add {address}"), format!("nodes add {address} --rebalance --wait")] {
            let text = refused(router, &line);
            assert!(text.starts_with(&format!("switchyard: {address} ")) && text.contains(said), "{line}: {text}");
        }
        let text = site.client().cmd(&format!("SWITCHYARD NODES ADD {address} REBALANCE"));
        assert!(text.expect_error().contains(said), "{address}: {text:?}");
        assert_eq!((slots(router), epoch(router)), before, "{address}");
    }
    assert_eq!(site.client().cmd("DBSIZE"), int(1));
    // The suggested remedy.
    full.client().cmd("FLUSHALL");
    done(router, &format!("nodes add {}", full.address()));
    assert_eq!(owns(router, full.address()), Some(0));
    assert!(refused(router, &format!("nodes add {}", full.address())).contains("is a node already"));
}

/// The router has not noticed yet that the node is another process.
#[test]
fn a_restarted_node_does_not_join_under_another_name() {
    let Some(mut site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let relay = Relay::start(site.nodes()[0].address());
    let name = site.nodes()[0].address().to_string();
    site.node_mut(0).kill();
    until("it is known to be down", || json(site.router(), "status").to_string().contains("down"));
    // The pauses between connection attempts are long after this time.
    std::thread::sleep(Duration::from_secs(2));
    site.node_mut(0).restart();
    let text = refused(site.router(), &format!("nodes add {}", relay.address()));
    assert!(text.contains(&format!("is the same server as node {name}")), "{text}");
}

#[test]
fn a_node_that_refuses_commands_of_moves_gets_no_share() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let renamed =
        Node::start(&NodeOptions { config: "rename-command RESTORE \"\"\n".into(), ..NodeOptions::default() });
    let limited = node(&[]);
    assert_eq!(limited.client().cmd("ACL SETUSER default -restore"), ok());
    for node in [&renamed, &limited] {
        let text = refused(site.router(), &format!("nodes add {} --rebalance", node.address()));
        assert!(text.contains("refuses RESTORE, which moves need") && !text.contains("with args"), "{text}");
        assert_eq!(owns(site.router(), node.address()), None);
        assert_eq!(node.cmd("DBSIZE"), int(0), "nothing is left there");
    }
}

#[test]
fn a_node_that_cannot_get_its_share_does_not_join() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let third = node(&[]);
    let mut direct = site.nodes()[0].client();
    assert_eq!(direct.cmd("SET past-the-router 1"), ok());
    let text = refused(site.router(), &format!("nodes add {} --rebalance", third.address()));
    assert!(
        text.contains("is used past this router") && text.contains(&format!("{} was not added", third.address())),
        "{text}"
    );
    assert_eq!(owns(site.router(), third.address()), None);
    let text = refused(site.router(), &format!("nodes add {} --rebalance --durability aof", third.address()));
    assert!(text.contains("has no append-only file"), "{text}");
    assert_eq!(owns(site.router(), third.address()), None);
    direct.cmd("DEL past-the-router");
    direct.cut();
    until("the direct client is gone", || {
        let said = run_cli(site.router(), &format!("nodes add {} --rebalance --wait", third.address()));
        said.code == 0
    });
    assert!(owns(site.router(), third.address()).is_some_and(|slots| slots > 5000));
    // While these nodes get their shares, no other node joins partially.
    let fourth = node(&[]);
    let mut client = site.client();
    for i in 0..2000 {
        assert_eq!(client.cmd(&format!("SET key:{i} {}", "x".repeat(100))), ok());
    }
    done(site.router(), &format!("move --from {} --to {} --all --max-rate 10k", names(&site)[0], names(&site)[1]));
    let text = refused(site.router(), &format!("nodes add {} --rebalance", fourth.address()));
    assert!(text.contains("moves are in progress"), "{text}");
    assert_eq!(owns(site.router(), fourth.address()), None);
}

/// Commands for all nodes, each with a part of the reply. In this order.
const TO_ALL: &[(&str, &str)] = &[
    ("SET {a}k 1", "OK"),
    ("DBSIZE", "1"),
    ("KEYS *", "{a}k"),
    ("RANDOMKEY", "{a}k"),
    ("SCAN 0", "{a}k"),
    ("SELECT 5", "OK"),
    ("SELECT 0", "OK"),
    ("SCRIPT LOAD return(1)", "930269f31393d0be681588b6ab08dccee7d6bb67"),
    ("EVALSHA 930269f31393d0be681588b6ab08dccee7d6bb67 0", "1"),
    ("SCRIPT EXISTS 930269f31393d0be681588b6ab08dccee7d6bb67", "1"),
    ("SCRIPT KILL", "NOTBUSY"),
    ("FUNCTION KILL", "NOTBUSY"),
    ("FUNCTION FLUSH", "OK"),
    ("WAIT 0 100", "0"),
    ("CONFIG GET maxmemory", "maxmemory"),
    ("CONFIG RESETSTAT", "OK"),
    ("INFO keyspace", "keys=1"),
    ("LASTSAVE", ""),
    ("MEMORY DOCTOR", ""),
    ("MEMORY STATS", ""),
    ("MEMORY PURGE", "OK"),
    ("LATENCY LATEST", ""),
    ("LATENCY RESET", "0"),
    ("FLUSHDB", "OK"),
    ("SET {a}k 1", "OK"),
    ("FLUSHALL", "OK"),
    ("DBSIZE", "0"),
    ("WAIT 0 100", "0"),
];

#[track_caller]
fn all_answered(router: &Router, when: &str) {
    // Several clients, so that both workers are used.
    for _ in 0..4 {
        let mut client = Client::connect(router.address());
        for (line, word) in TO_ALL {
            let reply = client.cmd(line);
            assert!(format!("{reply:?}").contains(word), "{when}: {line}: {reply:?}");
            assert!(reply.error().is_none_or(|error| error.starts_with("NOTBUSY")), "{when}: {line}: {reply:?}");
        }
        let library = "#!lua name=lib\nredis.register_function('f', function() return 7 end)";
        assert_eq!(client.call(&["FUNCTION", "LOAD", "REPLACE", library]), bulk("lib"), "{when}");
        assert_eq!(client.cmd("FCALL f 0"), int(7), "{when}");
    }
}

#[test]
fn a_node_without_slots_never_fails_a_command_to_all_nodes() {
    let Some(mut site) = Site::router_only(2, &operated(true, &["--set", "nodes.command-timeout=1s"])) else { return };
    let mut third = node(&[]);
    done(site.router(), &format!("nodes add {}", third.address()));
    all_answered(site.router(), "while it is up");
    // Commands for keys do not involve it, so they do not wait for it.
    third.freeze();
    all_answered(site.router(), "while it does not answer");
    third.thaw();
    third.kill();
    all_answered(site.router(), "while it is down");
    let listed: Vec<SocketAddr> = site.nodes().iter().map(Node::address).collect();
    site.router_mut().restart(&listed);
    all_answered(site.router(), "after a restart of the router without it");
    // The node lacks a script and a function, and gets them when keys are moved to it.
    let mut client = site.client();
    let library = "#!lua name=lib\nredis.register_function('f', function() return 8 end)";
    assert_eq!(client.call(&["FUNCTION", "LOAD", "REPLACE", library]), bulk("lib"));
    let sha = client.cmd("SCRIPT LOAD return(redis.call('incr',KEYS[1]))").text();
    third.restart();
    until("it is up", || {
        let nodes = client.cmd("SWITCHYARD NODES");
        nodes.items().iter().all(|node| node.field("link") == bulk("up"))
    });
    for name in names(&site) {
        done(site.router(), &format!("nodes drain {name} --wait"));
        done(site.router(), &format!("nodes remove {name}"));
    }
    let mut client = site.client();
    assert_eq!(client.cmd(&format!("EVALSHA {sha} 1 counter")), int(1));
    assert_eq!(client.cmd("FCALL f 0"), int(8));
}

#[test]
fn wait_queries_the_nodes_that_have_the_keys_now() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let tags = site.tags();
    let mut client = site.client();
    // Written only to a node that leaves.
    assert_eq!(client.cmd(&format!("SET {{{}}}k 1", tags[1][0])), ok());
    assert_eq!(client.cmd("WAIT 0 100"), int(0));
    done(site.router(), &format!("nodes drain {} --wait", names(&site)[1]));
    assert_eq!(client.cmd("WAIT 0 100"), int(0));
    done(site.router(), &format!("nodes remove {}", names(&site)[1]));
    assert_eq!(client.cmd("WAIT 0 100"), int(0), "there is an answer");
    assert_eq!(client.cmd("PING"), Value::Simple("PONG".to_owned()));
}

#[test]
fn a_node_with_fewer_databases_than_clients_use_is_not_served() {
    if direct() {
        return;
    }
    // Part of the first start, because joining nodes are checked.
    let (others, mut small) = ([node(&[]), node(&[])], node(&["--databases", "4"]));
    let all: Vec<SocketAddr> = others.iter().chain([&small]).map(Node::address).collect();
    let router = Router::start(&all, &operated(true, &[]).router);
    done(&router, &format!("nodes drain {} --wait", small.address()));
    let mut client = Client::connect(router.address());
    until("it is up", || {
        let nodes = client.cmd("SWITCHYARD NODES");
        nodes.items().iter().all(|node| node.field("link") == bulk("up"))
    });
    assert!(client.cmd("SELECT 5").expect_error().contains("out of range"), "a node that is up must have it");
    small.kill();
    until("it is down", || client.cmd("SELECT 5") == ok());
    assert_eq!(client.cmd("SET k v"), ok());
    small.restart();
    until("it is refused", || {
        let nodes = client.cmd("SWITCHYARD NODES");
        nodes.items().iter().any(|node| node.field("link").text().contains("fewer databases than clients use"))
    });
    assert_eq!(client.cmd("GET k"), bulk("v"));
}

#[test]
fn nodes_join_and_leave_by_reload() {
    if direct() {
        return;
    }
    let nodes: Vec<Node> = (0..4).map(|_| node(&[])).collect();
    let listed = |which: &[usize]| {
        which.iter().map(|at| format!("[[node]]\naddress = \"{}\"\n", nodes[*at].address())).collect::<String>()
    };
    let router = Router::start(&[], &RouterOptions::config(listed(&[0])));
    let numbered = || {
        let nodes = json(&router, "nodes list");
        let nodes = nodes["nodes"].as_array().expect("a list").clone();
        nodes
            .iter()
            .map(|node| (node["id"].as_u64().expect("a number"), node["address"].as_str().expect("text").to_owned()))
            .collect::<Vec<_>>()
    };
    let named = |id, at: usize| (id, nodes[at].address().to_string());
    let reload = |which: &[usize]| {
        std::fs::write(router.config_file(), listed(which)).expect("configuration");
        router.process().signal(rustix::process::Signal::HUP);
    };
    reload(&[2, 0]);
    until("it has joined", || numbered() == [named(0, 0), named(1, 2)]);
    assert_eq!(
        slots(&router).into_iter().map(|(_, slots)| slots).collect::<Vec<_>>(),
        [16384, 0],
        "a node that joins moves nothing"
    );

    reload(&[1, 2]);
    let log = until("it is refused", || {
        let log = router.process().log();
        log.contains("not reloaded: the running configuration is unchanged").then_some(log)
    });
    assert!(log.contains(&format!("{} (16384 slots) still owns keys", nodes[0].address())), "{log}");
    assert_eq!(numbered().len(), 2, "an owner cannot leave");

    reload(&[0]);
    until("it has left", || numbered() == [named(0, 0)]);
    // Its id is not given to another node.
    reload(&[0, 3]);
    until("another has joined", || numbered() == [named(0, 0), named(2, 3)]);
}

fn setting(node: &Node, name: &str) -> String {
    node.cmd(&format!("CONFIG GET {name}")).items()[1].text()
}

/// Writes 300 keys through the router, and returns the number of events that a subscriber receives.
fn events_of_writes(router: &Router, tag: &str) -> usize {
    let (mut client, mut subscriber) = (Client::connect(router.address()), Client::connect(router.address()));
    subscriber.cmd("PSUBSCRIBE __keyevent@0__:set");
    for i in 0..300 {
        assert_eq!(client.cmd(&format!("SET {tag}:{i} x")), ok());
    }
    subscriber.timeout(Duration::from_secs(3));
    (0..300).take_while(|_| subscriber.try_reply().is_ok()).count()
}

#[test]
fn a_joining_node_gets_the_allowed_settings() {
    let options = operated(false, &["--set", "nodes.config-set=notify-keyspace-events,maxmemory*"]);
    let Some(site) = Site::router_only(2, &options) else { return };
    let router = site.router();
    let mut client = site.client();
    assert_eq!(client.cmd("CONFIG SET notify-keyspace-events KEA maxmemory-policy allkeys-lru"), ok());
    assert_eq!(events_of_writes(router, "before"), 300);
    let third = node(&["--save", "60 1", "--appendonly", "yes", "--databases", "32"]);
    let text = done(router, &format!("nodes add {} --rebalance --wait", third.address()));
    let at = third.address();
    for (name, note) in [
        (
            "notify-keyspace-events",
            format!("{at} had notify-keyspace-events \"\", and now has \"AKE\", as the other nodes"),
        ),
        (
            "maxmemory-policy",
            format!("{at} had maxmemory-policy \"noeviction\", and now has \"allkeys-lru\", as the other nodes"),
        ),
        ("save", format!("{at} has save \"60 1\", and it is \"\" at the other nodes")),
        ("appendonly", format!("{at} has appendonly \"yes\", and it is \"no\" at the other nodes")),
        ("databases", format!("{at} has databases \"32\", and it is \"16\" at the other nodes")),
    ] {
        assert!(text.contains(&note), "{text}");
        let is_set = matches!(name, "notify-keyspace-events" | "maxmemory-policy");
        assert_eq!(setting(&third, name) == setting(&site.nodes()[0], name), is_set, "{name}");
    }
    router.process().expect_log(&["had notify-keyspace-events"]);
    assert_eq!(events_of_writes(router, "after"), 300, "no event is lost");
}

#[test]
fn a_joining_node_with_different_settings_is_named() {
    let Some(site) = Site::router_only(2, &operated(false, &[])) else { return };
    let router = site.router();
    for node in site.nodes() {
        assert_eq!(node.cmd("CONFIG SET notify-keyspace-events KEA"), ok());
    }
    let third = node(&[]);
    let reply = site.client().cmd(&format!("SWITCHYARD NODES ADD {}", third.address()));
    let note = format!("{} has notify-keyspace-events \"\", and it is \"AKE\" at the other nodes", third.address());
    let text = reply.field("notes").items()[0].text();
    assert!(text.contains(&note) && text.contains("nodes.config-set"), "{text}");
    assert_eq!(setting(&third, "notify-keyspace-events"), "", "nothing is set that nodes.config-set does not allow");
    // A server that refuses CONFIG may join.
    let fourth = node(&[]);
    assert_eq!(fourth.cmd("ACL SETUSER default -config"), ok());
    let text = done(router, &format!("nodes add {}", fourth.address()));
    assert!(text.contains("refuses CONFIG GET") && text.contains("allow +config|get"), "{text}");
    assert_eq!(owns(router, fourth.address()), Some(0));
}

#[test]
fn nodes_of_a_reload_get_the_settings_of_the_others() {
    if direct() {
        return;
    }
    let nodes = [node(&["--notify-keyspace-events", "KEA"]), node(&[])];
    let listed = |count: usize| {
        let tables: String =
            nodes[..count].iter().map(|node| format!("[[node]]\naddress = \"{}\"\n", node.address())).collect();
        format!("[nodes]\nconfig-set = [\"notify-keyspace-events\"]\n{tables}")
    };
    let router = Router::start(&[], &RouterOptions::config(listed(1)));
    std::fs::write(router.config_file(), listed(2)).expect("configuration");
    router.process().signal(rustix::process::Signal::HUP);
    router.process().expect_log(&["had notify-keyspace-events", "has joined"]);
    assert_eq!(setting(&nodes[1], "notify-keyspace-events"), "AKE");
}

/// Regression: a refused reload with a wrong file forgot which nodes had joined since. Afterwards the correct file was
/// refused.
#[test]
fn a_refused_reload_changes_nothing() {
    if direct() {
        return;
    }
    let nodes: Vec<Node> = (0..2).map(|_| node(&[])).collect();
    let names: Vec<String> = nodes.iter().map(|node| node.address().to_string()).collect();
    let listed = |at: usize| format!("[[node]]\naddress = \"{}\"\n", names[at]);
    let router = Router::start(&[], &RouterOptions::config(listed(0)));
    done(&router, &format!("nodes add {} --rebalance --wait", names[1]));
    let reload = |at: usize, outcome: &str| {
        let before = router.process().log().matches(outcome).count();
        std::fs::write(router.config_file(), listed(at)).expect("configuration");
        router.process().signal(rustix::process::Signal::HUP);
        until("it is read", || router.process().log().matches(outcome).count() > before);
    };
    reload(0, "reloaded: nothing has changed");
    reload(1, "not reloaded: the running configuration is unchanged");
    reload(0, "reloaded: nothing has changed");
    assert_eq!(slots(&router).into_iter().map(|(_, slots)| slots).collect::<Vec<_>>(), [8192, 8192]);
}

/// When the command was queued, there was only one node.
#[test]
fn a_transaction_does_not_flush_a_part_of_the_fleet() {
    let Some(site) = Site::router_only(1, &operated(false, &[])) else { return };
    let (mut client, second) = (site.client(), node(&[]));
    client.cmd("SET before v");
    assert_eq!(client.cmd("MULTI"), ok());
    for line in ["SET z 1", "FLUSHALL"] {
        assert_eq!(client.cmd(line).text(), "QUEUED");
    }
    done(site.router(), &format!("nodes add {}", second.address()));
    let error = client.cmd("EXEC").expect_error().to_owned();
    assert!(error.starts_with("EXECABORT") && error.contains("another node has joined"), "{error}");
    assert_eq!((client.cmd("GET before"), client.cmd("GET z")), (bulk("v"), Value::Nil));
}
