//! RESP3 clients with nodes that do not support RESP3.

use crate::differential::{SCRIPTS, compare, script};
use crate::support::{Client, Node, NodeOptions, Site, SiteOptions, Value, bulk, int, ok, value};

fn three(mut client: Client) -> Client {
    client.cmd("HELLO 3").field("proto");
    client
}

/// Nodes without HELLO.
fn old_nodes() -> SiteOptions {
    let node = NodeOptions { config: "rename-command HELLO \"\"\n".into(), ..NodeOptions::default() };
    SiteOptions { node, ..SiteOptions::default() }
}

#[test]
fn replies_are_translated_for_clients_of_a_newer_protocol() {
    let Some(site) = Site::router_only(3, &old_nodes()) else { return };
    let plain = Node::start(&NodeOptions::default());
    // The router does not know the types that a script intends: for types that RESP2 lacks, a reply keeps its RESP2
    // form.
    for (family, text) in SCRIPTS.iter().filter(|(family, _)| *family != "scripts") {
        let commands: Vec<_> = script(text).into_iter().filter(|c| !c[0].eq_ignore_ascii_case(b"HELLO")).collect();
        let (mut routed, mut reference) = (three(site.client()), three(plain.client()));
        for length in [1, 1000] {
            compare(&format!("{family}, {length} at once"), &mut routed, &mut reference, &commands, || length);
            assert_eq!(site.client().cmd("FLUSHALL"), value::ok());
            assert_eq!(plain.cmd("FLUSHALL"), value::ok());
        }
    }
    site.router().process().expect_log(&["node does not speak RESP3"]);
    // A concurrent client of RESP2 is not affected.
    let mut two = site.client();
    two.cmd("HSET h f v");
    two.post("HGETALL h");
    assert_eq!(two.raw(), b"*2\r\n$1\r\nf\r\n$1\r\nv\r\n");
}

#[test]
fn nodes_may_support_different_protocols() {
    let old = Node::start(&old_nodes().node);
    let new = Node::start(&NodeOptions::default());
    let router =
        crate::support::Router::start(&[old.address(), new.address()], &crate::support::RouterOptions::default());
    let mut client = three(Client::connect(router.address()));
    for i in 0..30 {
        client.cmd(&format!("HSET h{i} f v"));
        client.cmd(&format!("ZADD z{i} 1.5 m"));
        client.post(&format!("HGETALL h{i}"));
        assert_eq!(client.raw(), b"%1\r\n$1\r\nf\r\n$1\r\nv\r\n");
        client.post(&format!("ZSCORE z{i} m"));
        assert_eq!(client.raw(), b",1.5\r\n");
    }
    client.post("MGET h1 none none2 none3 none4 none5 none6");
    assert_eq!(client.raw(), [&b"*7\r\n"[..], &b"_\r\n".repeat(7)].concat());
}

#[test]
fn credentials_and_large_replies_work_without_hello() {
    // One reason for a missing HELLO is a lack of permission.
    let node = NodeOptions { config: "user default on >secret ~* &* +@all -hello\n".into(), ..NodeOptions::default() };
    let options = SiteOptions {
        node,
        router: crate::support::RouterOptions {
            config: "[nodes]\npassword = \"secret\"\n".into(),
            nodes_may_be_down: true,
            ..Default::default()
        },
    };
    let Some(site) = Site::router_only(2, &options) else { return };
    let mut client = three(site.client());
    let big = "x".repeat(3 << 20);
    assert_eq!(client.call(&["HSET", "h", "f", &big]), int(1));
    assert_eq!(client.call(&["SET", "s", &big]), ok());
    for _ in 0..3 {
        assert_eq!(client.cmd("HGETALL h"), Value::Map(vec![(bulk("f"), bulk(&big))]));
        assert_eq!(client.cmd("GET s").bytes().len(), big.len());
        assert_eq!(client.cmd("HVALS h"), Value::Array(vec![bulk(&big)]));
    }
    // Pub/sub uses a separate connection.
    assert_eq!(client.cmd("SUBSCRIBE a"), Value::Push(vec![bulk("subscribe"), bulk("a"), int(1)]));
    assert_eq!(site.client().cmd("PUBLISH a x"), int(1));
    assert_eq!(client.reply(), Value::Push(vec![bulk("message"), bulk("a"), bulk("x")]));
    assert_eq!(client.cmd("UNSUBSCRIBE"), Value::Push(vec![bulk("unsubscribe"), bulk("a"), int(0)]));
}
