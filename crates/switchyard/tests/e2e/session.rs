//! State of one connection: HELLO, AUTH, SELECT, CLIENT, RESET, QUIT.

use std::time::Duration;

use crate::support::client::TIMEOUT;
use crate::support::{
    Client, Node, NodeOptions, RouterOptions, Site, SiteOptions, Value, bulk, direct, int, ok, simple, until, value,
};

/// Sends each line to the router and to a plain server, on separate connections, and compares the bytes.
#[track_caller]
fn same(site: &Site, plain: &Node, lines: &[&str]) {
    let (mut routed, mut reference) = (site.client(), plain.client());
    for line in lines {
        routed.post(line);
        reference.post(line);
        let (ours, theirs) = (routed.raw(), reference.raw());
        assert_eq!(ours.escape_ascii().to_string(), theirs.escape_ascii().to_string(), "{line} (after {lines:?})");
    }
}

#[test]
fn hello_switches_protocols() {
    let site = Site::new(2);
    let plain = Node::start(&NodeOptions::default());
    let mut client = site.client();
    let id = client.cmd("CLIENT ID").int();
    for (line, proto) in [("HELLO", 2), ("HELLO 3", 3), ("HELLO", 3), ("HELLO 2", 2), ("HELLO 3 SETNAME neo", 3)] {
        let hello = client.cmd(line);
        assert_eq!(matches!(hello, Value::Map(_)), proto == 3, "{line}: {hello:?}");
        assert_eq!(hello.field("proto"), int(proto), "{line}");
        assert_eq!(hello.field("id"), int(id), "{line}");
        assert_eq!(hello.field("role"), bulk("master"));
        assert_eq!(hello.field("mode"), bulk("standalone"));
        assert_eq!(hello.field("modules"), Value::Array(vec![]));
        let names: Vec<String> = hello.pairs().into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["server", "version", "proto", "id", "mode", "role", "modules"]);
        assert_eq!(hello.field("server"), plain.cmd("HELLO").field("server"));
        assert_eq!(
            hello.field("version"),
            plain.cmd("HELLO").field("version"),
            "libraries decide by the version what they may use"
        );
    }
    assert_eq!(client.cmd("CLIENT GETNAME"), bulk("neo"));
    same(
        &site,
        &plain,
        &[
            "HELLO 1",
            "HELLO 4",
            "HELLO x",
            "HELLO 3 SETNAME",
            "HELLO 3 BOGUS",
            "HELLO 2 AUTH default",
            "HELLO 3 SETNAME \"with space\"",
            "GET none",
            "CLIENT GETNAME",
            "GET none",
        ],
    );
    // The format of every reply follows the connection's protocol, even within a pipeline.
    let mut client = site.client();
    client.cmd("HSET h f v");
    client.cmd("ZADD z 1.5 m");
    for line in [
        "HGETALL h",
        "HELLO 3",
        "HGETALL h",
        "ZSCORE z m",
        "GET none",
        "HELLO 2",
        "HGETALL h",
        "ZSCORE z m",
        "GET none",
    ] {
        client.post(line);
    }
    assert_eq!(client.raw(), b"*2\r\n$1\r\nf\r\n$1\r\nv\r\n");
    client.raw();
    assert_eq!(client.raw(), b"%1\r\n$1\r\nf\r\n$1\r\nv\r\n");
    assert_eq!(client.raw(), b",1.5\r\n");
    assert_eq!(client.raw(), b"_\r\n");
    client.raw();
    assert_eq!(client.raw(), b"*2\r\n$1\r\nf\r\n$1\r\nv\r\n");
    assert_eq!(client.raw(), b"$3\r\n1.5\r\n");
    assert_eq!(client.raw(), b"$-1\r\n");
}

#[test]
fn clients_of_both_protocols_share_nodes() {
    let site = Site::new(2);
    let mut two: Vec<Client> = (0..3).map(|_| site.client()).collect();
    let mut three: Vec<Client> = (0..3).map(|_| site.client()).collect();
    for client in &mut three {
        client.cmd("HELLO 3");
    }
    two[0].cmd("ZADD z 1 a 2 b");
    two[0].cmd("HSET h a 1");
    for _ in 0..200 {
        for client in two.iter_mut().chain(&mut three) {
            client.post("ZRANGE z 0 -1 WITHSCORES");
            client.post("HGETALL h");
            client.post("MGET none h");
        }
        for client in &mut two {
            assert_eq!(client.raw(), b"*4\r\n$1\r\na\r\n$1\r\n1\r\n$1\r\nb\r\n$1\r\n2\r\n");
            assert_eq!(client.raw(), b"*2\r\n$1\r\na\r\n$1\r\n1\r\n");
            assert_eq!(client.raw(), b"*2\r\n$-1\r\n$-1\r\n");
        }
        for client in &mut three {
            assert_eq!(client.raw(), b"*2\r\n*2\r\n$1\r\na\r\n,1\r\n*2\r\n$1\r\nb\r\n,2\r\n");
            assert_eq!(client.raw(), b"%1\r\n$1\r\na\r\n$1\r\n1\r\n");
            assert_eq!(client.raw(), b"*2\r\n_\r\n_\r\n");
        }
    }
}

#[test]
fn auth_without_a_password_returns_an_error() {
    let site = Site::new(1);
    let plain = Node::start(&NodeOptions::default());
    same(&site, &plain, &["AUTH", "AUTH x", "AUTH a b c", "AUTH nobody x", "HELLO 3 AUTH nobody x", "RESET", "GET k"]);
}

#[test]
fn clients_authenticate_as_on_a_plain_server() {
    // In front of nodes without a password, the router requires its own.
    let node = NodeOptions::default();
    let protected = NodeOptions { args: vec!["--requirepass".into(), "open sesame".into()], ..NodeOptions::default() };
    let plain = Node::start(&protected);
    let options = SiteOptions {
        node: if direct() { protected } else { node },
        router: RouterOptions {
            config: "[clients]\npassword = \"open sesame\"\n".into(),
            password: Some("open sesame".into()),
            ..RouterOptions::default()
        },
    };
    let site = Site::with(2, &options);
    for lines in [
        &[
            "PING",
            "GET k",
            "ECHO x",
            "NOSUCH",
            "CLIENT ID",
            "HELLO",
            "HELLO 3",
            "AUTH",
            "AUTH wrong",
            "GET k",
            "SELECT 1",
        ][..],
        &[
            "AUTH nobody \"open sesame\"",
            "AUTH default wrong",
            "AUTH default \"open sesame\"",
            "GET k",
            "AUTH wrong",
            "GET k",
            "PING",
        ],
        &["AUTH \"open sesame\"", "SET k v", "GET k", "RESET", "GET k", "PING"],
        &["HELLO 3 AUTH default wrong", "HELLO 2 AUTH default \"open sesame\" SETNAME me", "CLIENT GETNAME", "GET k"],
        &["HELLO 2 SETNAME me AUTH default \"open sesame\"", "GET k"],
        &["HELLO 3 SETNAME me", "PING"],
        &["QUIT"],
    ] {
        // HELLO's reply to authenticated clients contains ids, and is compared elsewhere.
        let (mut routed, mut reference) = (site.client(), plain.client());
        for line in lines {
            let (ours, theirs) = (routed.cmd(line), reference.cmd(line));
            if line.starts_with("HELLO") && ours.error().is_none() {
                assert!(theirs.error().is_none(), "{line}: {ours:?} instead of {theirs:?}");
            } else if line.starts_with("HELLO") && ours.expect_error().starts_with("NOAUTH") {
                // The rest of the text differs between versions of Redis.
                let words = "NOAUTH HELLO must be called with the client already authenticated";
                assert!(ours.expect_error().starts_with(words), "{line}: {ours:?}");
                assert!(theirs.expect_error().starts_with(words), "{line}: {theirs:?}");
            } else {
                assert_eq!(ours, theirs, "{line} (after {lines:?})");
            }
        }
    }
    // Before authentication, a client must not cause large buffers.
    let mut intruder = site.client();
    intruder.write(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n");
    let mut reference = plain.client();
    reference.write(b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$1000000\r\n");
    assert_eq!(intruder.raw(), reference.raw());
    assert!(intruder.closed_within(TIMEOUT));
}

#[test]
fn a_router_authenticates_at_its_nodes() {
    let args = ["--requirepass", "node secret"].map(str::to_owned).to_vec();
    let options = SiteOptions {
        node: NodeOptions { args, ..NodeOptions::default() },
        router: RouterOptions::config("[nodes]\npassword = \"node secret\"\n"),
    };
    let Some(site) = Site::router_only(2, &options) else {
        return;
    };
    let mut client = site.client();
    for i in 0..20 {
        assert_eq!(client.cmd(&format!("SET k{i} v")), ok());
    }
    // As an ACL user with the minimum of permissions.
    for node in site.nodes() {
        let mut admin = node.client();
        assert_eq!(admin.call(&["AUTH", "node secret"]), ok());
        assert_eq!(admin.cmd("ACL SETUSER switch on >other ~* +@all"), ok());
    }
    let addresses: Vec<_> = site.nodes().iter().map(Node::address).collect();
    let options = RouterOptions {
        config: "[nodes]\nusername = \"switch\"\npassword = \"other\"\n".into(),
        args: vec!["--allow-other-router".to_owned()],
        ..RouterOptions::default()
    };
    let router = crate::support::Router::start(&addresses, &options);
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("GET k7"), bulk("v"));
    let mut admin = site.nodes()[0].client();
    admin.call(&["AUTH", "node secret"]);
    assert!(admin.cmd("CLIENT LIST").text().contains("user=switch"));
}

#[test]
fn a_wrong_node_password_is_an_error_that_names_the_node() {
    let args = ["--requirepass", "node secret"].map(str::to_owned).to_vec();
    let options = SiteOptions {
        node: NodeOptions { args, ..NodeOptions::default() },
        router: RouterOptions {
            config: "[nodes]\npassword = \"wrong\"\n".into(),
            nodes_may_be_down: true,
            ..RouterOptions::default()
        },
    };
    let Some(site) = Site::router_only(1, &options) else {
        return;
    };
    let name = site.nodes()[0].address().to_string();
    until("the error says why", || {
        let reply = site.client().cmd("GET k");
        let error = reply.expect_error();
        assert!(!error.contains("node secret") && !error.contains("wrong "), "a password in an error: {error}");
        error.contains(&name) && (error.contains("WRONGPASS") || error.contains("assword"))
    });
}

#[test]
fn client_names_ids_and_lists_are_consistent() {
    let site = Site::new(2);
    let plain = Node::start(&NodeOptions::default());
    same(
        &site,
        &plain,
        &[
            "CLIENT GETNAME",
            "CLIENT SETNAME neo",
            "CLIENT GETNAME",
            "CLIENT SETNAME \"two words\"",
            "CLIENT SETNAME \"line\\nbreak\"",
            "CLIENT SETNAME \"\"",
            "CLIENT GETNAME",
            "CLIENT",
            "CLIENT BOGUS",
            "CLIENT SETNAME",
            "CLIENT ID x",
            "CLIENT REPLY",
            "CLIENT REPLY BOGUS",
            "CLIENT NO-EVICT",
            "CLIENT NO-EVICT on",
            "CLIENT NO-EVICT off",
            "CLIENT NO-EVICT maybe",
            "CLIENT KILL",
            "CLIENT KILL 1.2.3.4:5",
            "CLIENT KILL ID x",
            "CLIENT KILL ID 99999999",
            "CLIENT KILL TYPE bogus",
            "CLIENT KILL BOGUS x",
            "CLIENT KILL ADDR 1.2.3.4:5",
            "CLIENT LIST BOGUS",
            "CLIENT LIST ID",
            "CLIENT LIST ID x",
            "CLIENT LIST TYPE bogus",
            "CLIENT LIST ID 99999999",
        ],
    );
    let mut ids: Vec<i64> = Vec::new();
    let mut clients: Vec<Client> = (0..20).map(|_| site.client()).collect();
    for client in &mut clients {
        let id = client.cmd("CLIENT ID").int();
        assert!(id > 0);
        assert_eq!(client.cmd("CLIENT ID"), int(id));
        ids.push(id);
    }
    let mut distinct = ids.clone();
    distinct.sort_unstable();
    distinct.dedup();
    assert_eq!(distinct.len(), ids.len(), "ids must not repeat over workers: {ids:?}");

    clients[0].cmd("CLIENT SETNAME alpha");
    clients[0].cmd("SELECT 3");
    clients[0].cmd("GET x");
    let own_address = clients[0].stream().local_addr().expect("address").to_string();
    let info = clients[0].cmd("CLIENT INFO").text();
    let field = |line: &str, name: &str| {
        line.split(' ')
            .find_map(|f| f.strip_prefix(name)?.strip_prefix('=').map(str::to_owned))
            .unwrap_or_else(|| panic!("no field {name} in {line}"))
    };
    for (name, expected) in [
        ("id", ids[0].to_string()),
        ("addr", own_address.clone()),
        ("laddr", site.address().to_string()),
        ("name", "alpha".into()),
        ("db", "3".into()),
        ("cmd", "client|info".into()),
        ("user", "default".into()),
    ] {
        assert_eq!(field(info.trim(), name), expected, "{name} in {info}");
    }
    for name in ["fd", "age", "idle", "flags", "sub", "psub", "multi", "qbuf", "obl", "oll", "omem", "resp"] {
        if name != "resp" || !direct() {
            field(info.trim(), name);
        }
    }
    let list = clients[1].cmd("CLIENT LIST").text();
    for id in &ids {
        assert_eq!(
            list.lines().filter(|line| field(line, "id") == id.to_string()).count(),
            1,
            "client {id} in\n{list}"
        );
    }
    assert!(list.lines().any(|line| field(line, "addr") == own_address && field(line, "name") == "alpha"));
    let two = clients[1].cmd(&format!("CLIENT LIST ID {} {}", ids[2], ids[5])).text();
    assert_eq!(two.lines().count(), 2, "{two}");
    assert!(clients[1].cmd("CLIENT LIST TYPE normal").text().lines().count() >= ids.len());
    assert_eq!(clients[1].cmd("CLIENT LIST TYPE pubsub").text().trim(), "");
    if !direct() {
        // Newer than Redis 7.0. Current libraries send it when they connect.
        assert_eq!(clients[0].cmd("CLIENT SETINFO LIB-NAME mylib"), ok());
        assert_eq!(clients[0].cmd("CLIENT SETINFO lib-ver 1.2.3"), ok());
        clients[0].cmd("CLIENT SETINFO BOGUS x").expect_error();
        clients[0].cmd("CLIENT SETINFO LIB-NAME \"a b\"").expect_error();
        let info = clients[0].cmd("CLIENT INFO").text();
        assert_eq!((field(info.trim(), "lib-name"), field(info.trim(), "lib-ver")), ("mylib".into(), "1.2.3".into()));
        // Only nodes from Redis 7.2 on can read without updating the access time.
        let version = clients[0].cmd("INFO server").text();
        let version =
            version.lines().find_map(|line| line.strip_prefix("redis_version:")).expect("a version").to_owned();
        let knows = version.split('.').map(|n| n.parse().unwrap_or(0)).collect::<Vec<u32>>()[..2] >= [7, 2][..];
        assert_eq!(clients[0].cmd("CLIENT NO-TOUCH on").error().is_none(), knows);
        assert_eq!(clients[0].cmd("GET none"), Value::Nil);
        assert_eq!(clients[0].cmd("CLIENT NO-TOUCH off"), ok());
        clients[0].cmd("CLIENT NO-TOUCH maybe").expect_error();
    }
    assert!(!clients[0].cmd("CLIENT HELP").items().is_empty());
}

#[test]
fn clients_are_killed_by_matching_filters() {
    let site = Site::new(2);
    let mut killer = site.client();
    let mut victims: Vec<Client> = (0..6).map(|_| site.client()).collect();
    let ids: Vec<i64> = victims.iter_mut().map(|v| v.cmd("CLIENT ID").int()).collect();
    let address = |client: &Client| client.stream().local_addr().expect("address");
    assert_eq!(killer.cmd(&format!("CLIENT KILL ID {}", ids[0])), int(1));
    assert!(victims[0].closed_within(TIMEOUT));
    assert_eq!(killer.cmd(&format!("CLIENT KILL {}", address(&victims[1]))), ok());
    assert!(victims[1].closed_within(TIMEOUT));
    assert_eq!(killer.cmd(&format!("CLIENT KILL ADDR {}", address(&victims[2]))), int(1));
    assert!(victims[2].closed_within(TIMEOUT));
    assert_eq!(killer.cmd(&format!("CLIENT KILL ID {} ADDR {}", ids[3], address(&victims[4]))), int(0));
    assert_eq!(killer.cmd(&format!("CLIENT KILL ID {} ADDR {}", ids[3], address(&victims[3]))), int(1));
    assert!(victims[3].closed_within(TIMEOUT));
    assert_eq!(victims[4].cmd("PING"), simple("PONG"));
    // All others except the caller.
    assert_eq!(killer.cmd(&format!("CLIENT KILL LADDR {}", site.address())), int(2));
    assert!(victims[4].closed_within(TIMEOUT) && victims[5].closed_within(TIMEOUT));
    assert_eq!(killer.cmd("PING"), simple("PONG"));
    // The caller: the reply arrives, then the close.
    let own = killer.cmd("CLIENT ID").int();
    killer.post(&format!("CLIENT KILL ID {own} SKIPME no"));
    killer.post("PING");
    assert_eq!(killer.reply(), int(1));
    assert!(killer.closed_within(TIMEOUT));
    let mut last = site.client();
    let list = last.cmd("CLIENT LIST").text();
    for id in ids {
        assert!(!list.contains(&format!("id={id} ")), "{list}");
    }
}

#[test]
fn replies_can_be_disabled() {
    let site = Site::new(2);
    let mut client = site.client();
    client.post("CLIENT REPLY SKIP");
    client.post("SET skipped 1");
    client.post("GET skipped");
    assert_eq!(client.reply(), bulk("1"), "SKIP hides its own reply and the next one");
    client.post("CLIENT REPLY OFF");
    for i in 0..200 {
        client.post(&format!("SET off{i} {i}"));
        client.post(&format!("MSET multi{i} a other{i} b"));
        client.post(&format!("NOSUCH {i}"));
        client.post("PING");
    }
    client.post("CLIENT REPLY ON");
    client.post("MGET off0 off199 multi7 other8");
    assert_eq!(client.reply(), ok(), "only CLIENT REPLY ON answers");
    assert_eq!(client.reply(), Value::Array(vec![bulk("0"), bulk("199"), bulk("a"), bulk("b")]));
    // Skips one of several replies in flight.
    for i in 0..50 {
        client.post(&format!("GET off{i}"));
        client.post("CLIENT REPLY SKIP");
        client.post(&format!("GET off{}", i + 1));
        client.post(&format!("GET off{}", i + 2));
    }
    for i in 0..50 {
        assert_eq!(client.reply(), bulk(i.to_string()));
        assert_eq!(client.reply(), bulk((i + 2).to_string()));
    }
    client.post("CLIENT REPLY SKIP");
    client.post("CLIENT REPLY SKIP");
    client.post("PING");
    client.post("ECHO end");
    assert_eq!(client.reply(), bulk("end"));
    client.post("CLIENT REPLY SKIP");
    client.post("RESET");
    client.post("ECHO reset");
    assert_eq!(client.reply(), bulk("reset"));
}

#[test]
fn reset_clears_the_whole_session() {
    let site = Site::new(2);
    let mut client = site.client();
    client.cmd("HELLO 3");
    client.cmd("CLIENT SETNAME neo");
    client.cmd("SELECT 5");
    client.cmd("SET five yes");
    assert_eq!(client.cmd("RESET"), simple("RESET"));
    assert_eq!(client.cmd("CLIENT GETNAME"), Value::Nil);
    client.post("GET five");
    assert_eq!(client.raw(), b"$-1\r\n", "RESP2 and database 0 again");
    client.post("CLIENT REPLY OFF");
    client.post("RESET");
    assert_eq!(client.reply(), simple("RESET"));
    assert_eq!(client.cmd("RESET x").expect_error(), "ERR wrong number of arguments for 'reset' command");
}

#[test]
fn quit_replies_and_closes_after_earlier_commands() {
    let site = Site::new(2);
    let mut client = site.client();
    for i in 0..100 {
        client.post(&format!("SET q{i} {i}"));
    }
    client.post("QUIT");
    client.post("SET after 1");
    for _ in 0..100 {
        assert_eq!(client.reply(), ok());
    }
    assert_eq!(client.reply(), ok());
    let (rest, closed) = client.listen(TIMEOUT);
    assert!(closed && rest.is_empty(), "after QUIT: {:?}", rest.escape_ascii().to_string());
    assert_eq!(site.client().cmd("EXISTS after"), int(0));
}

/// `printf 'GET k\r
/// ' | nc`: the client has closed its sending direction, but still reads.
#[test]
fn a_client_that_has_finished_sending_gets_its_replies() {
    let site = Site::new(3);
    for n in [1, 50] {
        let mut client = site.client();
        for i in 0..n {
            client.post(&format!("SET half{i} {i}"));
            client.post(&format!("GET half{i}"));
        }
        client.finish_sending();
        for i in 0..n {
            assert_eq!(client.reply(), ok());
            assert_eq!(client.reply(), bulk(i.to_string()));
        }
        assert!(client.closed_within(TIMEOUT));
    }
}

#[test]
fn an_idle_client_is_closed_after_the_configured_time() {
    let options = SiteOptions {
        node: NodeOptions {
            args: vec!["--timeout".into(), if direct() { "1" } else { "0" }.into()],
            ..NodeOptions::default()
        },
        router: RouterOptions::config("[clients]\nidle-timeout = \"1s\"\n"),
    };
    let site = Site::with(1, &options);
    let mut idle = site.client();
    assert_eq!(idle.cmd("PING"), simple("PONG"));
    assert!(idle.closed_within(TIMEOUT));
    let mut busy = site.client();
    for _ in 0..15 {
        assert_eq!(busy.cmd("PING"), simple("PONG"));
        std::thread::sleep(Duration::from_millis(150));
    }
}

#[test]
fn select_works_in_pipelines_of_inline_commands() {
    let site = Site::new(2);
    let mut client = site.client();
    client.write(b"SELECT 4\r\nSET inl one\r\n\r\n  \r\nGET inl\nSELECT 0\r\nGET inl\r\nPING\r\n");
    let replies: Vec<Value> = (0..6).map(|_| client.reply()).collect();
    assert_eq!(replies, [ok(), ok(), bulk("one"), ok(), Value::Nil, simple("PONG")]);
    client.write(b"SET \"quoted key\" 'single \\'quoted\\''\r\nGET \"quoted\\x20key\"\r\n");
    assert_eq!([client.reply(), client.reply()], [ok(), value::bulk("single 'quoted'")]);
}
