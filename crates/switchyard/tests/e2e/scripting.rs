//! EVAL, SCRIPT and FUNCTION with several nodes.

use std::time::{Duration, Instant};

use crate::support::relay::Relay;
use crate::support::{
    Client, Node, NodeOptions, Router, RouterOptions, Site, SiteOptions, Value, bulk, direct, encode, int, ok, until,
};

const ADD: &str = "return redis.call('INCRBY', KEYS[1], ARGV[1])";
/// Returns the SHA-1 of a script, as computed by the first node.
fn sha(site: &Site, script: &str) -> String {
    let node = &site.nodes()[0];
    let sha = node.client().call(&["SCRIPT", "LOAD", script]).text();
    node.cmd("SCRIPT FLUSH");
    sha
}

#[test]
fn a_loaded_script_runs_at_every_node() {
    let site = Site::new(3);
    let mut client = site.client();
    let sha = sha(&site, ADD);
    assert!(client.call(&["EVALSHA", &sha, "1", "k", "1"]).expect_error().starts_with("NOSCRIPT"));
    assert_eq!(client.call(&["SCRIPT", "LOAD", ADD]), bulk(&sha));
    assert_eq!(
        client.call(&["SCRIPT", "EXISTS", &sha, "ffffffffffffffffffffffffffffffffffffffff"]),
        Value::Array(vec![int(1), int(0)])
    );
    for i in 0..60 {
        assert_eq!(client.call(&["EVALSHA", &sha, "1", &format!("counter{i}"), &i.to_string()]), int(i));
    }
    // Other spellings that clients use.
    assert_eq!(client.call(&["evalsha", &sha.to_uppercase(), "1", "counter1", "1"]), int(2));
    // SCRIPT FLUSH removes it everywhere, including in the router.
    assert_eq!(client.cmd("SCRIPT FLUSH"), ok());
    assert_eq!(client.call(&["SCRIPT", "EXISTS", &sha]), Value::Array(vec![int(0)]));
    for i in 0..20 {
        let reply = client.call(&["EVALSHA", &sha, "1", &format!("counter{i}"), "1"]);
        assert!(reply.expect_error().starts_with("NOSCRIPT"), "{reply:?}");
    }
    assert_eq!(client.cmd("SCRIPT KILL"), Value::Error("NOTBUSY No scripts in execution right now.".into()));
}

#[test]
fn a_script_lost_by_a_node_is_loaded_again() {
    let Some(mut site) = Site::router_only(3, &SiteOptions::default()) else {
        return;
    };
    let mut client = site.client();
    let sha = sha(&site, ADD);
    client.call(&["SCRIPT", "LOAD", ADD]);
    for node in site.nodes() {
        assert_eq!(node.cmd("SCRIPT FLUSH"), ok());
    }
    for i in 0..60 {
        assert_eq!(
            client.call(&["EVALSHA", &sha, "1", &format!("a{i}"), "5"]),
            int(5),
            "script lost by SCRIPT FLUSH at the node"
        );
    }
    // The same in a pipeline: reloading must keep the order, and execute nothing twice.
    for node in site.nodes() {
        node.cmd("SCRIPT FLUSH");
    }
    let bytes: Vec<u8> = (0..300)
        .flat_map(|i| {
            let key = format!("b{}", i % 10);
            let mut two = encode(&["EVALSHA", &sha, "1", &key, "1"]);
            two.extend(encode(&["GET", &key]));
            two
        })
        .collect();
    for (i, two) in client.pipeline(&bytes, 600).chunks(2).enumerate() {
        let expected = (i / 10 + 1).to_string();
        assert_eq!(two[0], format!(":{expected}\r\n").into_bytes(), "command {i}");
        assert_eq!(crate::support::value::parse(&two[1]), bulk(expected), "the GET after command {i}");
    }
    // A restarted node has no scripts.
    for i in 0..3 {
        site.node_mut(i).restart();
    }
    let mut client = crate::support::until("all nodes are back", || {
        let mut client = site.client();
        client.cmd("DBSIZE").error().is_none().then_some(client)
    });
    for i in 0..30 {
        assert_eq!(
            client.call(&["EVALSHA", &sha, "1", &format!("c{i}"), "2"]),
            int(2),
            "script lost by a restart of the node"
        );
    }
}

/// A script sent with EVAL can be called with EVALSHA at any node, like on a single server.
#[test]
fn evalsha_after_eval_works_for_every_key() {
    let site = Site::new(3);
    let mut client = site.client();
    let sha = sha(&site, ADD);
    assert_eq!(client.call(&["EVAL", ADD, "1", "first", "1"]), int(1));
    for i in 0..60 {
        assert_eq!(client.call(&["EVALSHA", &sha, "1", &format!("k{i}"), "3"]), int(3));
    }
    let mut other = site.client();
    for i in 0..60 {
        assert_eq!(other.call(&["EVALSHA", &sha, "1", &format!("k{i}"), "3"]), int(6));
    }
}

#[test]
fn scripts_without_keys_and_with_many() {
    let site = Site::new(3);
    let mut client = site.client();
    for _ in 0..20 {
        assert_eq!(client.cmd("EVAL \"return ARGV[1]\" 0 hello"), bulk("hello"));
    }
    let keys: Vec<String> = (0..500).map(|i| format!("{{t}}{i}")).collect();
    let mut command = vec!["EVAL".to_owned(), "return #KEYS".to_owned(), "500".to_owned()];
    command.extend(keys);
    assert_eq!(client.call(&command), int(500));
}

#[test]
fn functions_are_loaded_at_every_node() {
    let Some(site) = Site::router_only(3, &SiteOptions::default()) else {
        return;
    };
    let mut client = site.client();
    let library = "#!lua name=lib\nredis.register_function('fset', function(keys, args) return redis.call('SET', keys[1], args[1]) end)";
    assert_eq!(client.call(&["FUNCTION", "LOAD", library]), bulk("lib"));
    for i in 0..40 {
        assert_eq!(client.cmd(&format!("FCALL fset 1 k{i} v{i}")), ok());
        assert_eq!(client.cmd(&format!("GET k{i}")), bulk(format!("v{i}")));
    }
    let mut other = site.client();
    assert!(other.call(&["FUNCTION", "LOAD", library]).expect_error().contains("already exists"));
    assert_eq!(other.call(&["FUNCTION", "LOAD", "REPLACE", library]), bulk("lib"));
    for node in site.nodes() {
        assert_eq!(node.cmd("FUNCTION LIST").items().len(), 1);
    }
    assert_eq!(client.cmd("FUNCTION LIST").items().len(), 1);
    assert_eq!(client.cmd("FUNCTION DELETE lib"), ok());
    for node in site.nodes() {
        assert_eq!(node.cmd("FUNCTION LIST").items().len(), 0);
    }
    client.call(&["FUNCTION", "LOAD", library]);
    let dump = client.cmd("FUNCTION DUMP");
    assert_eq!(client.cmd("FUNCTION FLUSH"), ok());
    assert!(site.nodes().iter().all(|node| node.cmd("FUNCTION LIST").items().is_empty()));
    assert_eq!(client.call(&[&b"FUNCTION"[..], b"RESTORE", dump.bytes()]), ok());
    assert!(site.nodes().iter().all(|node| node.cmd("FUNCTION LIST").items().len() == 1));
}

#[test]
fn a_library_that_one_node_refuses_is_loaded_nowhere() {
    let Some(site) = Site::router_only(3, &SiteOptions::default()) else { return };
    let mut client = site.client();
    let library =
        |version: u32| format!("#!lua name=lib\nredis.register_function('f', function() return {version} end)");
    let refuse = |what: &str| assert_eq!(site.nodes()[1].cmd(&format!("ACL SETUSER default {what}")), ok());
    let at_each = || site.nodes().iter().map(|node| node.cmd("FUNCTION LIST").items().len()).collect::<Vec<_>>();
    refuse("-function|load");
    assert!(client.call(&["FUNCTION", "LOAD", &library(1)]).expect_error().starts_with("NOPERM"));
    assert_eq!(at_each(), [0, 0, 0]);
    refuse("+function|load");
    assert_eq!(client.call(&["FUNCTION", "LOAD", &library(1)]), bulk("lib"));
    assert_eq!(at_each(), [1, 1, 1]);
    // The library that it should replace stays.
    refuse("-function|load");
    assert!(client.call(&["FUNCTION", "LOAD", "REPLACE", &library(2)]).expect_error().starts_with("NOPERM"));
    for tags in site.tags() {
        assert_eq!(client.cmd(&format!("FCALL f 1 {{{}}}", tags[0])), int(1));
    }
    let dump = client.cmd("FUNCTION DUMP");
    assert_eq!(client.cmd("FUNCTION FLUSH"), ok());
    refuse("-function|restore");
    assert!(client.call(&[&b"FUNCTION"[..], b"RESTORE", dump.bytes()]).expect_error().starts_with("NOPERM"));
    assert_eq!(at_each(), [0, 0, 0]);
    refuse("+function|load +function|restore");
    assert_eq!(client.call(&[&b"FUNCTION"[..], b"RESTORE", dump.bytes()]), ok());
    assert_eq!(at_each(), [1, 1, 1]);
    // Servers provide the API as `redis`, or also as `server`.
    assert_eq!(client.cmd("SET k v"), ok());
    assert_eq!(client.call(&["EVAL", "return server.call('GET',KEYS[1])", "1", "k"]), bulk("v"));
}

/// Two nodes, one of which has functions. A relay holds the transfer of functions to the other.
fn given_functions() -> ([Node; 2], Relay, Router) {
    let nodes = [Node::start(&NodeOptions::default()), Node::start(&NodeOptions::default())];
    let library = "#!lua name=lib\nredis.register_function('f', function() return 1 end)";
    assert_eq!(nodes[0].client().call(&["FUNCTION", "LOAD", library]), bulk("lib"));
    let relay = Relay::start(nodes[1].address());
    relay.hold_from(b"RESTORE");
    let router = Router::start(&[nodes[0].address(), relay.address()], &RouterOptions::default());
    until("the other node is given the functions", || relay.holds_one());
    (nodes, relay, router)
}

/// A client flushes functions while a node is receiving them: after the reply, they do not reappear on that node.
#[test]
fn functions_flushed_during_a_transfer_do_not_reappear() {
    if direct() {
        return;
    }
    let (nodes, relay, router) = given_functions();
    let mut client = Client::connect(router.address());
    let remover = std::thread::spawn(move || client.cmd("FUNCTION FLUSH"));
    // As long as it would take if nothing delayed it.
    let begun = Instant::now();
    while !remover.is_finished() && begun.elapsed() < Duration::from_secs(1) {
        std::thread::sleep(Duration::from_millis(5));
    }
    relay.release();
    assert_eq!(remover.join().expect("told"), ok());
    let given = || nodes[1].cmd("INFO commandstats").text().contains("cmdstat_function|restore");
    until("the node has been given them", given);
    assert!(nodes.iter().all(|node| node.cmd("FUNCTION LIST").items().is_empty()));
}

/// A node that does not reply in time may execute sent commands until its connection is closed.
#[test]
fn functions_flushed_after_a_stalled_transfer_do_not_reappear() {
    if direct() {
        return;
    }
    let (nodes, relay, router) = given_functions();
    let mut client = Client::connect(router.address());
    let mut flush = || client.cmd("FUNCTION FLUSH");
    let answer =
        until("a client gets the reply that they are gone", || Some(flush()).filter(|answer| answer.error().is_none()));
    assert_eq!(answer, ok());
    relay.release();
    for _ in 0..20 {
        assert!(nodes.iter().all(|node| node.cmd("FUNCTION LIST").items().is_empty()));
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The commands that replace a checked script must not be visible to clients, including in transactions.
#[test]
fn a_script_error_in_a_transaction_matches_one_outside() {
    let site = Site::new(2);
    let script = "local k = KEYS[1] return redis.call('LPUSH', k, 'x')";
    let sha = sha(&site, script);
    let mut client = site.client();
    assert_eq!(client.cmd("SET {k} text"), ok());
    let outside = client.call(&["EVAL", script, "1", "{k}"]);
    assert!(outside.expect_error().contains(&sha), "{outside:?}");
    assert_eq!(client.cmd("MULTI"), ok());
    for call in [["EVAL", script, "1", "{k}"], ["EVALSHA", &sha, "1", "{k}"]] {
        assert_eq!(client.call(&call).text(), "QUEUED");
    }
    client.post("GET {k}");
    assert_eq!(client.reply().text(), "QUEUED");
    assert_eq!(client.cmd("EXEC"), Value::Array(vec![outside.clone(), outside, bulk("text")]));
}

/// A one-line reply of any length does not break the connection shared by scripts.
#[test]
fn a_script_may_reply_with_a_long_line() {
    let site = Site::new(2);
    let mut client = site.client();
    for reply in ["status_reply", "error_reply"] {
        let answer = client.call(&["EVAL", &format!("return redis.{reply}(string.rep('a', 4000000))"), "1", "b"]);
        let text = match &answer {
            Value::Error(text) | Value::Simple(text) => text,
            other => panic!("{other:?}"),
        };
        assert!(text.len() >= 4_000_000, "{} bytes", text.len());
    }
}
