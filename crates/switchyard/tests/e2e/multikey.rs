//! Commands on several keys: split over nodes and merged in order, or within one slot, or refused like in a cluster.

use std::collections::BTreeSet;

use crate::support::slots::slot;
use crate::support::{Random, Site, SiteOptions, Value, bulk, encode, int, ok};

/// The error text of Redis Cluster.
pub(crate) const CROSSSLOT: &str = "CROSSSLOT Keys in request don't hash to the same slot";

#[test]
fn keys_are_placed_by_the_cluster_specification() {
    let Some(site) = Site::router_only(3, &SiteOptions::default()) else {
        return;
    };
    let mut client = site.client();
    let mut random = Random::new(3);
    let mut node_of_slot = std::collections::BTreeMap::new();
    for i in 0..600 {
        let key = match i % 6 {
            0 => format!("plain{i}").into_bytes(),
            1 => format!("{{tag{}}}x{i}", i % 7).into_bytes(),
            2 => format!("{{}}empty{i}").into_bytes(),
            3 => format!("x{{{{y{}}}}}{i}", i % 5).into_bytes(),
            4 => format!("open{{{i}").into_bytes(),
            _ => random.bytes(1 + i % 40),
        };
        assert_eq!(client.call(&[&b"SET"[..], &key, b"v"]), ok());
        let homes: Vec<usize> = (0..site.nodes().len())
            .filter(|n| site.nodes()[*n].client().call(&[&b"EXISTS"[..], &key]) == int(1))
            .collect();
        assert_eq!(homes.len(), 1, "key {:?} must be at exactly one node", key.escape_ascii().to_string());
        let before = node_of_slot.insert(slot(&key), homes[0]);
        assert!(before.is_none_or(|b| b == homes[0]), "slot {} is at two nodes", slot(&key));
    }
    for node in 0..3 {
        let share = node_of_slot.values().filter(|n| **n == node).count();
        assert!(share * 5 > node_of_slot.len(), "node {node} has only {share} of {} slots seen", node_of_slot.len());
    }
}

#[test]
fn mget_mset_and_counts_span_nodes_in_order() {
    let site = Site::new(3);
    for hello in ["HELLO 2", "HELLO 3"] {
        let mut client = site.client();
        client.cmd(hello);
        let mut random = Random::new(11);
        for round in 0..40 {
            let n = 1 + random.below(200);
            let mut mset = vec![b"MSET".to_vec()];
            for i in 0..n {
                mset.push(format!("k{i}").into_bytes());
                mset.push(format!("{round}:{i}").into_bytes());
            }
            assert_eq!(client.call(&mset), ok());
            // Any order, with repeated and missing keys.
            let asked: Vec<usize> = (0..1 + random.below(300)).map(|_| random.below(n + n / 4 + 1)).collect();
            let keys = |name: &str| -> Vec<String> {
                std::iter::once(name.to_owned()).chain(asked.iter().map(|i| format!("k{i}"))).collect()
            };
            let expected: Vec<Value> =
                asked.iter().map(|i| if *i < n { bulk(format!("{round}:{i}")) } else { Value::Nil }).collect();
            assert_eq!(client.call(&keys("MGET")), Value::Array(expected));
            let there = asked.iter().filter(|i| **i < n).count() as i64;
            assert_eq!(client.call(&keys("EXISTS")), int(there));
            assert_eq!(client.call(&keys("TOUCH")), int(there));
            let distinct = asked.iter().filter(|i| **i < n).collect::<BTreeSet<_>>().len() as i64;
            let gone = client.call(&keys(if round % 2 == 0 { "DEL" } else { "UNLINK" }));
            assert_eq!(gone, int(distinct));
            assert_eq!(client.call(&keys("EXISTS")), int(0));
            assert_eq!(client.cmd("FLUSHALL"), ok());
        }
    }
}

#[test]
fn the_last_of_equal_keys_in_mset_wins() {
    let site = Site::new(3);
    let mut client = site.client();
    assert_eq!(client.cmd("MSET a 1 b 2 a 3 c 4 b 5"), ok());
    assert_eq!(client.cmd("MGET a b c a"), Value::Array(vec![bulk("3"), bulk("5"), bulk("4"), bulk("3")]));
}

/// A type error of one part affects only that part: MGET returns nil for it like Redis, and the reply keeps its length.
#[test]
fn mget_of_other_types_returns_nil_in_place() {
    let site = Site::new(3);
    let mut client = site.client();
    for i in 0..30 {
        if i % 3 == 0 {
            client.cmd(&format!("RPUSH mixed{i} x"));
        } else {
            client.cmd(&format!("SET mixed{i} {i}"));
        }
    }
    let keys: Vec<String> = (0..30).map(|i| format!("mixed{i}")).collect();
    let reply = client.cmd(&format!("MGET {}", keys.join(" ")));
    for (i, value) in reply.items().iter().enumerate() {
        assert_eq!(*value, if i % 3 == 0 { Value::Nil } else { bulk(i.to_string()) });
    }
}

#[test]
fn split_commands_in_a_pipeline_keep_their_places() {
    let site = Site::new(3);
    let mut client = site.client();
    let mut bytes = Vec::new();
    let rounds = 3000;
    for i in 0..rounds {
        for line in [
            format!("MSET p{i} {i} q{i} {i} r{i} {i}"),
            format!("GET q{i}"),
            format!("MGET r{i} p{i} none{i} q{i}"),
            "PING".to_owned(),
            format!("DEL p{i} q{i} r{i} none{i}"),
            format!("ECHO {i}"),
        ] {
            bytes.extend(encode(&crate::support::words(&line)));
        }
    }
    let replies = client.pipeline(&bytes, rounds * 6);
    for (i, replies) in replies.chunks(6).enumerate() {
        let values: Vec<Value> = replies.iter().map(|raw| crate::support::value::parse(raw)).collect();
        let v = bulk(i.to_string());
        let expected = [
            ok(),
            v.clone(),
            Value::Array(vec![v.clone(), v.clone(), Value::Nil, v.clone()]),
            crate::support::simple("PONG"),
            int(3),
            v,
        ];
        assert_eq!(values, expected, "round {i}");
    }
}

#[test]
fn commands_work_within_a_slot_and_change_nothing_across_slots() {
    // `cross_slot.rs` tests commands that may span slots. Here that is disabled.
    let mut options = SiteOptions::refusing_several_slots();
    options.router.args.extend(["--set", "clients.cross-slot-max=0"].map(str::to_owned));
    let Some(site) = Site::router_only(3, &options) else { return };
    let mut client = site.client();
    // `%1` and `%2` are replaced by keys of one slot, and of two slots.
    let commands = [
        "MSETNX %1 a %2 b",
        "RENAME %1 %2",
        "RENAMENX %1 %2",
        "COPY %1 %2",
        "SINTER %1 %2",
        "SINTERCARD 2 %1 %2",
        "SUNION %1 %2",
        "SDIFF %1 %2",
        "SINTERSTORE %1 %2",
        "SUNIONSTORE %1 %2",
        "SDIFFSTORE %1 %2",
        "SMOVE %1 %2 m",
        "LMOVE %1 %2 LEFT LEFT",
        "RPOPLPUSH %1 %2",
        "LMPOP 2 %1 %2 LEFT",
        "LCS %1 %2",
        "ZUNION 2 %1 %2",
        "ZINTER 2 %1 %2",
        "ZINTERCARD 2 %1 %2",
        "ZDIFF 2 %1 %2",
        "ZUNIONSTORE %1 1 %2",
        "ZINTERSTORE %1 1 %2",
        "ZDIFFSTORE %1 1 %2",
        "ZRANGESTORE %1 %2 0 -1",
        "ZMPOP 2 %1 %2 MIN",
        "BITOP AND %1 %2",
        "PFCOUNT %1 %2",
        "PFMERGE %1 %2",
        "GEOSEARCHSTORE %1 %2 FROMLONLAT 0 0 BYRADIUS 1 km",
        "GEORADIUS %1 0 0 1 km STORE %2",
        "GEORADIUSBYMEMBER %1 m 1 km STOREDIST %2",
        "SORT %1 STORE %2",
        "XREAD STREAMS %1 %2 0 0",
        "XREADGROUP GROUP g c STREAMS %1 %2 > >",
        "EVAL \"return 1\" 2 %1 %2",
        "EVAL_RO \"return 1\" 2 %1 %2",
        "EVALSHA e0e1f9fabfc9d4800c877a703b823ac0578ff8db 2 %1 %2",
    ];
    assert_ne!(slot(b"one"), slot(b"two"));
    for command in commands {
        let fill = |a: &str, b: &str| command.replace("%1", a).replace("%2", b);
        let reply = client.cmd(&fill("one", "two"));
        assert_eq!(reply, Value::Error(CROSSSLOT.into()), "{}", fill("one", "two"));
        let reply = client.cmd(&fill("{same}one", "{same}two"));
        assert!(
            !reply.error().is_some_and(|e| e.starts_with("CROSSSLOT")),
            "{}: {reply:?}",
            fill("{same}one", "{same}two")
        );
        assert_eq!(client.cmd("DEL one two"), int(0), "{command} across slots must not do anything");
    }
    // Functions as well.
    client.cmd("FUNCTION LOAD \"#!lua name=cross\\nredis.register_function('cross', function() return 1 end)\"");
    assert_eq!(client.cmd("FCALL cross 2 one two"), Value::Error(CROSSSLOT.into()));
    assert_eq!(client.cmd("FCALL cross 2 {a}one {a}two"), int(1));
    // An error keeps its place in a pipeline like any other reply.
    let bytes: Vec<u8> = (0..500)
        .flat_map(|i| {
            [format!("SET one {i}"), format!("RENAME one two{i}"), "GET one".into()]
                .into_iter()
                .flat_map(|line| encode(&crate::support::words(&line)))
        })
        .collect();
    let replies = client.pipeline(&bytes, 1500);
    for (i, chunk) in replies.chunks(3).enumerate() {
        assert_eq!(chunk[1], format!("-{CROSSSLOT}\r\n").into_bytes());
        assert_eq!(crate::support::value::parse(&chunk[2]), bulk(i.to_string()));
    }
}

#[test]
fn a_command_with_a_hundred_thousand_keys_works() {
    let site = Site::new(3);
    let mut client = site.client();
    let n = 100_000;
    let mut mset = vec!["MSET".to_owned()];
    let mut mget = vec!["MGET".to_owned()];
    for i in 0..n {
        mset.push(format!("many{i}"));
        mset.push(i.to_string());
        mget.push(format!("many{}", n - 1 - i));
    }
    assert_eq!(client.call(&mset), ok());
    let reply = client.call(&mget);
    assert_eq!(reply.items().len(), n);
    for (i, value) in reply.items().iter().enumerate() {
        assert_eq!(*value, bulk((n - 1 - i).to_string()));
    }
    mget[0] = "DEL".to_owned();
    assert_eq!(client.call(&mget), int(n as i64));
}
