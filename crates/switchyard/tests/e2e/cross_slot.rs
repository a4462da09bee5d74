//! Commands that read keys of several slots: the same answers and the same data as with one server; and what must not be served.

use crate::support::slots::slot;
use crate::support::{Client, Node, NodeOptions, RouterOptions, Site, SiteOptions, Value, bulk, int, ok};

/// The same commands at both; the replies must agree.
fn both(router: &mut Client, plain: &mut Client, line: &str) -> Value {
    let (got, wanted) = (router.cmd(line), plain.cmd(line));
    assert_eq!(sorted(&got), sorted(&wanted), "{line}");
    got
}

/// Members of sets come in any order.
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
fn keys_of_several_slots_give_what_one_server_gives() {
    let Some(site) = Site::router_only(3, &SiteOptions::default()) else { return };
    let node = Node::start(&NodeOptions::default());
    let (mut router, mut plain) = (site.client(), node.client());
    // Names enough that every pair is at the same node and at different ones.
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
    // Nothing temporary is left anywhere.
    for node in site.nodes() {
        assert_eq!(node.cmd("KEYS switchyard:*"), Value::Array(vec![]));
    }
}

#[test]
fn what_changes_two_keys_stays_refused() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
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
fn what_is_too_large_is_not_brought_together() {
    let router = RouterOptions { args: vec!["--set".into(), "clients.cross-slot-max=64kb".into()], ..RouterOptions::default() };
    let Some(site) = Site::router_only(2, &SiteOptions { router, ..SiteOptions::default() }) else { return };
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
    assert!(error.expect_error().starts_with("CROSSSLOT ") && error.expect_error().contains("cross-slot-max"), "{error:?}");
    assert_eq!(client.cmd(&format!("EXISTS {a}dst")), int(0));
    // What follows in the pipeline comes after it, whatever it takes.
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
