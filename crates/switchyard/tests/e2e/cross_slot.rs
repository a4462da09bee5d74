//! Commands that read keys of several slots: replies and data are the same as with one server. And commands that must
//! be refused.

use std::time::Duration;

use crate::support::slots::slot;
use crate::support::{Client, Node, NodeOptions, Router, RouterOptions, Site, SiteOptions, Value, bulk, int, ok};

/// Sends a command to both. The replies must be equal.
fn both(router: &mut Client, plain: &mut Client, line: &str) -> Value {
    let (got, wanted) = (router.cmd(line), plain.cmd(line));
    assert_eq!(sorted(&got), sorted(&wanted), "{line}");
    got
}

/// Sorts a reply, because the order of set members is arbitrary.
fn sorted(value: &Value) -> Value {
    match value {
        Value::Array(items) | Value::Set(items) => {
            let mut items: Vec<Value> = items.iter().map(sorted).collect();
            items.sort_by_key(|item| format!("{item:?}"));
            Value::Array(items)
        }
        other => other.clone(),
    }
}

#[test]
fn commands_on_several_slots_match_a_single_server() {
    let Some(site) = Site::router_only(3, &SiteOptions::default()) else { return };
    let node = Node::start(&NodeOptions::default());
    let (mut router, mut plain) = (site.client(), node.client());
    // Enough names that pairs are on the same node and on different nodes.
    let names = ["a", "b", "c", "one", "two", "x:1"];
    assert!(names.iter().any(|n| slot(n.as_bytes()) != slot(b"a")));
    for protocol in ["HELLO 2", "HELLO 3"] {
        router.cmd(protocol);
        plain.cmd(protocol);
        for (i, x) in names.iter().enumerate() {
            let y = names[(i + 1) % names.len()];
            let z = names[(i + 3) % names.len()];
            let mut check = |lines: &[String]| {
                both(&mut router, &mut plain, "FLUSHALL");
                lines.iter().map(|line| both(&mut router, &mut plain, line)).last()
            };
            let sets = [format!("SADD {x} 1 2 3 m"), format!("SADD {y} 2 3 4 n")];
            let run = |setup: &[String], lines: &[&str]| -> Vec<String> {
                let fill = |l: &&str| l.replace("%x", x).replace("%y", y).replace("%z", z);
                setup.iter().cloned().chain(lines.iter().map(fill)).collect()
            };
            check(&run(
                &sets,
                &[
                    "SINTER %x %y",
                    "SUNION %x %y none",
                    "SDIFF %x %y",
                    "SINTERCARD 2 %x %y LIMIT 1",
                    "SUNIONSTORE %z %x %y",
                    "SMEMBERS %z",
                    "SINTERSTORE %x %x %y",
                    "SMEMBERS %x",
                    "SDIFFSTORE %z none %x",
                    "EXISTS %z",
                    "SORT %y ALPHA STORE %z",
                    "LRANGE %z 0 -1",
                    "SUNION %y %z",
                ],
            ));
            let sorted_sets = [format!("ZADD {x} 1 a 2.5 b 3 c"), format!("ZADD {y} 10 b 20 c 30 d")];
            check(&run(
                &sorted_sets,
                &[
                    "ZUNION 2 %x %y WITHSCORES",
                    "ZINTER 2 %x %y WEIGHTS 2 3 AGGREGATE MAX WITHSCORES",
                    "ZDIFF 2 %x %y",
                    "ZINTERCARD 2 %x %y",
                    "ZUNIONSTORE %z 2 %x %y",
                    "ZRANGE %z 0 -1 WITHSCORES",
                    "ZINTERSTORE %y 2 %x %y AGGREGATE MIN",
                    "ZRANGE %y 0 -1 WITHSCORES",
                    "ZDIFFSTORE %z 2 %x none",
                    "ZRANGESTORE %z %x 0 1",
                    "ZRANGE %z 0 -1",
                    "ZMPOP 3 none %x %y MIN COUNT 2",
                    "ZMPOP 2 none1 none2 MIN",
                    "ZMPOP 2 %x %y WRONG",
                ],
            ));
            let strings = [format!("SET {x} hello"), format!("SET {y} world")];
            check(&run(
                &strings,
                &[
                    "LCS %x %y",
                    "LCS %x %y IDX",
                    "BITOP XOR %z %x %y",
                    "GET %z",
                    "BITOP NOT %z none",
                    "EXISTS %z",
                    "COPY %x %z",
                    "COPY %y %z",
                    "GET %z",
                    "COPY %y %z REPLACE",
                    "GET %z",
                    "COPY none %z",
                    "PEXPIRE %x 100000000",
                    "COPY %x %z REPLACE",
                    "EXPIRETIME none",
                ],
            ));
            let copied = [format!("SET {x} v EX 100"), format!("COPY {x} {z}"), format!("TTL {z}")];
            let ttl = check(&copied).expect("a reply").int();
            assert!((99..=100).contains(&ttl), "COPY keeps the time to live: {ttl}");
            let lists = [format!("RPUSH {y} 1 2 3"), format!("PFADD {x} a b c"), format!("PFADD {z} c d")];
            check(&run(
                &lists,
                &[
                    "LMPOP 3 none %y none2 LEFT COUNT 2",
                    "PFCOUNT %x %z",
                    "PFMERGE %y{hll} %x %z",
                    "PFCOUNT %y{hll}",
                    "SINTER %x %z",
                    "SUNIONSTORE %z %y %x",
                    "TYPE %z",
                ],
            ));
            let places = [format!("GEOADD {x} 13.361389 38.115556 Palermo 15.087269 37.502669 Catania")];
            check(&run(
                &places,
                &[
                    "GEOSEARCHSTORE %z %x FROMLONLAT 15 37 BYRADIUS 200 km",
                    "ZRANGE %z 0 -1",
                    "GEORADIUS %x 15 37 200 km STOREDIST %y",
                    "ZCARD %y",
                    "GEORADIUSBYMEMBER %x Palermo 1 km STORE %z",
                    "ZRANGE %z 0 -1",
                ],
            ));
        }
    }
    // No node has temporary keys left.
    for node in site.nodes() {
        assert_eq!(node.cmd("KEYS switchyard:*"), Value::Array(vec![]));
    }
}

#[test]
fn commands_that_change_two_keys_are_refused_if_configured() {
    let Some(site) = Site::router_only(2, &SiteOptions::refusing_several_slots()) else { return };
    let mut client = site.client();
    client.cmd("SET one 1");
    client.cmd("RPUSH l 1");
    for line in [
        "RENAME one two",
        "RENAMENX one two",
        "MSETNX one a two b",
        "LMOVE l two LEFT LEFT",
        "SMOVE one two m",
        "EVAL \"return 1\" 2 one two",
    ] {
        assert_eq!(client.cmd(line), Value::Error(crate::multikey::CROSSSLOT.into()), "{line}");
    }
    assert_eq!(client.cmd("GET one"), bulk("1"));
}

#[test]
fn too_large_keys_are_not_collected() {
    let Some(site) =
        Site::router_only(2, &SiteOptions::router(RouterOptions::args(&["--set", "clients.cross-slot-max=64kb"])))
    else {
        return;
    };
    let mut client = site.client();
    let tags = site.tags();
    let (a, b) = (format!("{{{}}}k", tags[0][0]), format!("{{{}}}k", tags[1][0]));
    let members: Vec<String> = (0..20_000).map(|i| format!("member{i}")).collect();
    for key in [&a, &b] {
        let mut args = vec!["SADD".to_owned(), key.clone()];
        args.extend(members.iter().cloned());
        client.call(&args);
    }
    let error = client.cmd(&format!("SUNIONSTORE {a}dst {a} {b}"));
    assert!(
        error.expect_error().starts_with("CROSSSLOT ") && error.expect_error().contains("cross-slot-max"),
        "{error:?}"
    );
    assert_eq!(client.cmd(&format!("EXISTS {a}dst")), int(0));
    // Later commands of the pipeline are executed after it, however long it takes.
    client.post(&format!("COPY {a} {b}x"));
    client.post(&format!("SADD {b}small 1"));
    client.post(&format!("SADD {a}small 2"));
    client.post(&format!("SUNIONSTORE {b}sum {a}small {b}small"));
    client.post(&format!("SCARD {b}sum"));
    client.post("PING");
    client.reply().expect_error();
    assert_eq!(client.reply(), int(1));
    assert_eq!(client.reply(), int(1));
    assert_eq!(client.reply(), int(2));
    assert_eq!(client.reply(), int(2), "the read behind the command sees what it wrote");
    assert_eq!(client.reply(), crate::support::simple("PONG"));
}

/// Number of the router's temporary keys at the nodes, queried repeatedly during `work`.
fn temporary_keys_seen(site: &Site, work: impl FnOnce()) -> usize {
    let stop = std::sync::atomic::AtomicBool::new(false);
    let look = |node: &Node| {
        let mut client = node.client();
        // The test may restrict the node's default user.
        client.cmd("AUTH looker x");
        client.cmd("KEYS *switchyard*").items().len()
    };
    std::thread::scope(|scope| {
        let looker = scope.spawn(|| {
            let mut seen = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                seen += site.nodes().iter().map(look).sum::<usize>();
            }
            seen + site.nodes().iter().map(look).sum::<usize>()
        });
        work();
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        looker.join().expect("the looker")
    })
}

fn with_looker(site: &Site) {
    for node in site.nodes() {
        assert_eq!(node.cmd("ACL SETUSER looker on nopass ~* &* +@all"), ok());
    }
}

#[test]
fn a_pause_holds_the_whole_command_and_hides_temporary_keys() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    with_looker(&site);
    let tags = site.tags();
    let (a, b) = (format!("{{{}}}k", tags[0][0]), format!("{{{}}}k", tags[1][0]));
    let (mut client, mut operator) = (site.client(), site.client());
    client.cmd(&format!("SADD {a} 1 2"));
    client.cmd(&format!("SADD {b} 2 3"));
    let seen = temporary_keys_seen(&site, || {
        for mode in ["WRITE", "ALL"] {
            client.cmd(&format!("DEL {b}dst"));
            assert_eq!(operator.cmd(&format!("CLIENT PAUSE 60000 {mode}")), ok());
            client.post(&format!("SUNIONSTORE {b}dst {a} {b}"));
            client.post(&format!("SINTER {a} {b}"));
            std::thread::sleep(Duration::from_millis(300));
            assert_eq!(site.nodes()[1].cmd(&format!("EXISTS {b}dst")), int(0), "written during a pause ({mode})");
            assert_eq!(operator.cmd("CLIENT UNPAUSE"), ok());
            assert_eq!(client.reply(), int(3));
            assert_eq!(client.reply().items(), [bulk("2")]);
        }
        // Pauses that begin during such commands.
        for round in 0..30 {
            client.post(&format!("SUNIONSTORE {b}dst {a} {b}"));
            operator.cmd(&format!("CLIENT PAUSE 20 {}", if round % 2 == 0 { "WRITE" } else { "ALL" }));
            assert_eq!(client.reply(), int(3));
        }
    });
    assert_eq!(seen, 0, "a temporary key was seen");
}

/// If the router's user lacks a permission at a node, the whole command fails: nothing is written or left behind.
#[test]
fn a_node_that_refuses_a_step_is_unchanged() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    with_looker(&site);
    let tags = site.tags();
    let (a, b) = (format!("{{{}}}k", tags[0][0]), format!("{{{}}}k", tags[1][0]));
    let mut client = site.client();
    client.cmd(&format!("SADD {a} 1 2"));
    client.cmd(&format!("SADD {b} 2 3"));
    client.cmd(&format!("SADD {b}dst old"));
    let rules =
        ["-restore", "-unlink", "-sunionstore", "-exec", "-dump", "resetkeys ~{*}k*", "resetkeys %R~* %W~{*}kdst"];
    for rule in rules {
        let set = |words: &str| {
            for node in site.nodes() {
                let mut looker = node.client();
                looker.cmd("AUTH looker x");
                assert_eq!(looker.cmd(&format!("ACL SETUSER default reset on nopass ~* &* +@all {words}")), ok());
            }
        };
        set(rule);
        let seen = temporary_keys_seen(&site, || {
            for _ in 0..5 {
                let reply = client.cmd(&format!("SUNIONSTORE {b}dst {a} {b}"));
                assert!(reply.error().is_some(), "{rule}: {reply:?}");
            }
        });
        assert_eq!(seen, 0, "{rule}: a temporary key was seen or left");
        set("");
        assert_eq!(client.cmd(&format!("SMEMBERS {b}dst")).items(), [bulk("old")], "{rule}");
    }
}

#[test]
fn a_restricted_user_reads_only_its_keys_and_no_temporary_key() {
    use std::os::unix::fs::PermissionsExt;
    let users = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(
        users.path(),
        "user default on nopass ~* &* +@all\nuser app on nopass ~app:* %R~shared:* &* +@all\n",
    )
    .expect("written");
    std::fs::set_permissions(users.path(), std::fs::Permissions::from_mode(0o600)).expect("mode");
    let config = format!("[clients]\nusers-file = {:?}\n", users.path());
    let Some(site) = Site::router_only(2, &SiteOptions::config(config)) else { return };
    with_looker(&site);
    let tags = site.tags();
    let (mine, shared) = (format!("app:{{{}}}", tags[0][0]), format!("shared:{{{}}}", tags[1][0]));
    let (mut owner, mut app) = (site.client(), site.client());
    owner.cmd(&format!("SADD {mine} 1 2"));
    owner.cmd(&format!("SADD {shared} 2 3"));
    owner.cmd("SADD secret 9");
    assert_eq!(app.cmd("AUTH app x"), ok());
    let seen = temporary_keys_seen(&site, || {
        for _ in 0..20 {
            assert_eq!(app.cmd(&format!("SUNIONSTORE {mine}dst {mine} {shared}")), int(3));
            assert_eq!(app.cmd(&format!("SINTER {mine} {shared}")).items(), [bulk("2")]);
            for refused in [
                format!("SUNIONSTORE {shared}dst {mine} {shared}"),
                format!("SUNIONSTORE {mine}dst {mine} secret"),
                format!("SINTER {mine} secret"),
                format!("COPY {mine} {shared}"),
            ] {
                assert!(app.cmd(&refused).expect_error().starts_with("NOPERM"), "{refused}");
            }
        }
    });
    assert_eq!(seen, 0, "a temporary key was seen");
    assert_eq!(app.cmd(&format!("SCARD {mine}dst")), int(3));
}

#[test]
fn a_node_that_is_down_fails_the_command_and_changes_nothing() {
    let Some(mut site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let tags = site.tags();
    let (a, b) = (format!("{{{}}}k", tags[0][0]), format!("{{{}}}k", tags[1][0]));
    let mut client = site.client();
    client.cmd(&format!("SADD {a} 1"));
    client.cmd(&format!("SADD {b} 2"));
    client.cmd(&format!("SADD {b}dst old"));
    site.node_mut(0).kill();
    let reply = client.cmd(&format!("SUNIONSTORE {b}dst {a} {b}"));
    let error = reply.expect_error();
    assert!(error.starts_with("NODEDOWN") || error.starts_with("NODELOST"), "{error}");
    assert_eq!(client.cmd(&format!("SMEMBERS {b}dst")), Value::Array(vec![bulk("old")]));
    assert_eq!(client.cmd(&format!("SET {b}s v")), ok());
}

#[test]
fn a_node_that_refuses_multi_executes_nothing() {
    if crate::support::direct() {
        return;
    }
    let nodes: Vec<Node> = (0..2).map(|_| Node::start(&NodeOptions::default())).collect();
    nodes.iter().for_each(|node| drop(node.cmd("ACL SETUSER default -multi")));
    let addresses: Vec<_> = nodes.iter().map(Node::address).collect();
    let router = Router::start(&addresses, &RouterOptions { workers: 1, ..RouterOptions::default() });
    let mut client = Client::connect(router.address());
    // Their slots belong to different nodes.
    assert_eq!((client.cmd("SADD {foo}s a b"), client.cmd("SADD {bar}s b c")), (int(2), int(2)));
    // In the first round, the command's connection is still being opened, and another command waits on it, too.
    for _ in 0..2 {
        let mut other = Client::connect(router.address());
        other.post("SORT {foo}s ALPHA");
        let reply = client.cmd("SINTERSTORE {foo}d {foo}s {bar}s");
        assert!(reply.expect_error().contains("refuses transactions"), "{reply:?}");
        assert_eq!(other.reply(), Value::Array(vec![bulk("a"), bulk("b")]));
        assert_eq!(client.cmd("EXISTS {foo}d"), int(0));
    }
    let keys: Vec<Value> = nodes.iter().map(|node| node.cmd("DBSIZE")).collect();
    assert_eq!(keys, [int(1), int(1)], "no temporary key is left");
}

#[test]
fn an_impossible_store_changes_nothing_at_the_destination() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let mut client = site.client();
    let tags = site.tags();
    let (here, there) = (format!("{{{}}}", tags[0][0]), format!("{{{}}}", tags[1][0]));
    client.cmd(&format!("RPUSH {here}l 1 2 3"));
    client.cmd(&format!("MSET {here}w_1 30 {here}w_2 20 {here}w_3 10"));
    // The keys of the pattern are on the other node.
    let sort = |to: &str, get: &str| format!("SORT {here}l BY {here}w_* {get} STORE {to}d");
    for get in ["GET #".to_owned(), format!("GET {here}w_*")] {
        assert!(client.cmd(&sort(&there, &get)).expect_error().starts_with("CROSSSLOT"));
        assert_eq!(client.cmd(&format!("EXISTS {there}d")), int(0));
        assert_eq!(client.cmd(&sort(&here, &get)), int(3));
    }
    assert_eq!(client.cmd(&format!("SORT {here}l BY nosort DESC STORE {there}d")), int(3), "it looks at no other key");
    // A copy that a server refuses overwrites nothing.
    client.cmd(&format!("SET {here}s 1"));
    for options in ["nonsense REPLACE", "REPLACE nonsense", "foo"] {
        assert!(client.cmd(&format!("COPY {here}s {there}d {options}")).expect_error().contains("syntax"), "{options}");
    }
    assert_eq!(client.cmd(&format!("TYPE {there}d")), Value::Simple("list".to_owned()));
}
