//! A single node executes everything: no command, transaction or script is refused because of its keys. And the
//! commands in flight when a second node joins.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::movectl::{done, json, owns, refused, run_cli};
use crate::support::slots::slot;
use crate::support::{
    Client, Node, NodeOptions, RouterOptions, Site, SiteOptions, Value, bulk, int, ok, simple, until,
};

fn options(workers: usize) -> SiteOptions {
    SiteOptions::router(RouterOptions { workers, ..RouterOptions::default() })
}

/// Refuses keys of several slots as soon as there are several nodes.
fn refusing(workers: usize) -> SiteOptions {
    let mut options = SiteOptions::refusing_several_slots();
    options.router.workers = workers;
    options
}

/// Commands of applications and libraries, in blocks. `a`, `b`, `c` and the other keys are in different slots.
const BLOCKS: &[&[&str]] = &[
    &["SET test 1", "RENAME test test1", "RENAMENX test1 test2", "COPY test2 test3", "GET test3"],
    &[
        "RPUSH src 1 2",
        "LMOVE src dst LEFT RIGHT",
        "RPOPLPUSH dst src",
        "BLMOVE src dst LEFT RIGHT 1",
        "BRPOPLPUSH src dst 1",
        "LRANGE dst 0 -1",
    ],
    &[
        "RPUSH mail 1",
        "BRPOP dataset generation mail 1",
        "BLPOP dataset generation 0.01",
        "BLMPOP 0.01 2 a b LEFT",
        "ZADD z 1 m",
        "BZPOPMIN a z 1",
    ],
    &[
        "XADD s1 1-1 a b",
        "XREAD STREAMS s1 s2 0 0",
        "XREAD BLOCK 10 STREAMS s1 s2 $ $",
        "XGROUP CREATE s1 g 0",
        "XGROUP CREATE s2 g 0 MKSTREAM",
    ],
    &["XREADGROUP GROUP g c STREAMS s1 s2 > >", "XREADGROUP GROUP g c BLOCK 10 STREAMS s1 s2 > >"],
    &[
        "MSETNX a 1 b 2",
        "MSETNX b 3 c 4",
        "MGET a b c",
        "SADD t1 m",
        "SMOVE t1 t2 m",
        "SMEMBERS t2",
        "SINTERSTORE t3 t2 t2",
        "SUNION t2 t3",
    ],
    &[
        "SET o:1 3",
        "SET o:2 1",
        "RPUSH ids 1 2",
        "SORT ids BY o:* GET o:* GET #",
        "SORT ids BY o:* STORE sorted",
        "LRANGE sorted 0 -1",
    ],
    &["MULTI", "SET user:1 a", "SADD users 1", "MSET x 1 y 2", "RENAME x z1", "EXEC", "SMEMBERS users"],
    // kombu: the length of all priorities of a queue.
    &["MULTI", "LLEN celery", "LLEN \"celery\\x06\\x163\"", "LLEN \"celery\\x06\\x166\"", "EXEC"],
    &[
        "WATCH a b",
        "WATCH c",
        "MULTI",
        "SET d 1",
        "GET a",
        "EXEC",
        "WATCH a b",
        "SET b 9",
        "MULTI",
        "SET a 9",
        "EXEC",
        "GET a",
    ],
    &["MULTI", "SET a 1", "SET b", "EXEC", "GET a"],
    // Redlock with two resources.
    &[
        "EVAL \"for i,k in ipairs(KEYS) do if redis.call('exists',k)==1 then return 0 end end for i,k in ipairs(KEYS) do redis.call('set',k,ARGV[1],'PX',ARGV[2]) end return #KEYS\" 2 lock:1 lock:2 me 10000",
        "EVAL \"local n=0 for i,k in ipairs(KEYS) do if redis.call('get',k)==ARGV[1] then redis.call('pexpire',k,ARGV[2]) n=n+1 end end return n\" 2 lock:1 lock:2 me 10000",
    ],
    // A queue that generates the names of its jobs.
    &[
        "EVAL \"local id=redis.call('INCR',KEYS[1]..':id') redis.call('HSET',ARGV[1]..id,'data',ARGV[2]) redis.call('LPUSH',KEYS[1]..':wait',id) return id\" 1 q q:job: payload",
        "EVAL \"local id=redis.call('RPOPLPUSH',KEYS[1]..':wait',KEYS[1]..':active') return redis.call('HGETALL',ARGV[1]..id)\" 1 q q:job:",
        "EVAL \"return redis.call('GET',KEYS[1])\" 1 a",
        "EVAL \"return redis.call('GET',ARGV[1])\" 0 a",
    ],
    &[
        "MSET p:1 1 p:2 2",
        "EVAL \"local n=0 for _,k in ipairs(redis.call('KEYS',ARGV[1])) do n=n+redis.call('DEL',k) end return n\" 0 p:*",
        "EVAL \"return redis.call('DBSIZE')\" 0",
        "EVAL \"return _G and loadstring('return 7')()\" 0",
        "EVAL \"return redis.call('NOSUCH')\" 0",
        "EVAL \"return redis.call('GET')\" 0",
    ],
    &[
        "SCRIPT LOAD \"return redis.call('MGET',ARGV[1],ARGV[2])\"",
        "EVALSHA 3689de078b262db714a8dbd52ac6454ca362a448 0 a b",
        "SCRIPT EXISTS 3689de078b262db714a8dbd52ac6454ca362a448 1111111111111111111111111111111111111111",
        "EVALSHA 1111111111111111111111111111111111111111 0",
    ],
    &["MULTI", "EVAL \"return redis.call('SET',ARGV[1],1)\" 0 made", "SORT ids BY o:* GET o:*", "EXEC", "GET made"],
    &[
        "FUNCTION LOAD \"#!lua name=lib\\nredis.register_function('put', function(keys,args) return redis.call('SET',args[1],args[2]) end) x = _G\"",
        "FUNCTION LOAD \"#!lua name=lib\\nredis.register_function('put', function(keys,args) return redis.call('SET',args[1],args[2]) end)\"",
        "FCALL put 0 by-function 5",
        "FCALL put 2 a b by-function 6",
        "GET by-function",
        "FUNCTION DELETE lib",
    ],
    &["SET a 1", "SWAPDB 0 1", "EXISTS a", "MULTI", "SWAPDB 0 1", "EXEC", "GET a"],
    &[
        "PFADD h1 a",
        "PFADD h2 b",
        "PFMERGE h3 h1 h2",
        "PFCOUNT h1 h2 h3",
        "BITOP OR bits h1 h2",
        "GEOADD g1 1 1 x",
        "GEORADIUS g1 1 1 10 km STORE g2",
    ],
];

#[test]
fn one_node_accepts_everything_that_a_server_accepts() {
    let Some(site) = Site::router_only(1, &options(2)) else { return };
    let node = Node::start(&NodeOptions::default());
    assert_ne!(slot(b"a"), slot(b"b"));
    let (mut router, mut plain) = (site.client(), node.client());
    for protocol in ["HELLO 2", "HELLO 3"] {
        router.cmd(protocol);
        plain.cmd(protocol);
        for line in BLOCKS.iter().flat_map(|block| block.iter()) {
            assert_eq!(router.cmd(line), plain.cmd(line), "{line}");
        }
        assert_eq!((router.cmd("FLUSHALL"), plain.cmd("FLUSHALL")), (ok(), ok()));
        // The same in one pipeline.
        let lines: Vec<&str> = BLOCKS.iter().flat_map(|block| block.iter().copied()).collect();
        for line in &lines {
            router.post(line);
            plain.post(line);
        }
        for line in &lines {
            assert_eq!(router.reply(), plain.reply(), "{line}, in a pipeline");
        }
        assert_eq!((router.cmd("FLUSHALL"), plain.cmd("FLUSHALL")), (ok(), ok()));
    }
}

#[test]
fn one_node_serves_clients_blocked_on_keys_of_several_slots() {
    let Some(site) = Site::router_only(1, &options(2)) else { return };
    let (mut waiting, mut other) = (site.client(), site.client());
    let id = waiting.cmd("CLIENT ID").int();
    let blocked =
        |other: &mut Client| until("it waits", || other.cmd("INFO clients").text().contains("blocked_clients:1"));
    for (wait, push, reply) in [
        ("BLPOP a b c 0", "RPUSH c 1", Value::Array(vec![bulk("c"), bulk("1")])),
        ("BRPOP a b c 0", "RPUSH b 2", Value::Array(vec![bulk("b"), bulk("2")])),
        ("BLMOVE a d LEFT LEFT 0", "EVAL \"return redis.call('RPUSH',ARGV[1],3)\" 0 a", bulk("3")),
    ] {
        waiting.post(wait);
        blocked(&mut other);
        other.cmd(push);
        assert_eq!(waiting.reply(), reply, "{wait}");
    }
    waiting.post("BLPOP a b c 0");
    blocked(&mut other);
    assert_eq!(other.cmd(&format!("CLIENT UNBLOCK {id}")), int(1));
    assert_eq!(waiting.reply(), Value::Nil);
    assert_eq!(waiting.cmd("LLEN d"), int(1));
}

#[test]
fn a_second_node_ends_commands_that_need_a_single_node() {
    let Some(site) = Site::router_only(1, &refusing(2)) else { return };
    let mut other = site.client();
    let clients = |lines: &[&[&str]]| -> Vec<Client> {
        lines
            .iter()
            .map(|lines| {
                let mut client = site.client();
                lines.iter().for_each(|line| assert_eq!(client.cmd(line).error(), None, "{line}"));
                client
            })
            .collect()
    };
    let refused_ones = [
        &["MULTI", "SET a 1", "SET b 1"][..],
        &["MULTI", "SET x 1", "MSET a 1 b 1"],
        &["MULTI", "EVAL \"return redis.call('SET',ARGV[1],1)\" 1 a b"],
        &["WATCH a b", "MULTI", "SET a 1"],
        &["WATCH a", "MULTI", "SET a 1", "SET b 1"],
        &["MULTI", "SET a 1", "DBSIZE"],
    ];
    let mut transactions = clients(&refused_ones);
    let mut single =
        clients(&[&["WATCH {t}1", "MULTI", "SET {t}2 done", "EVAL \"return redis.call('GET',KEYS[1])\" 1 {t}2"]]);
    let mut waiting: Vec<Client> = (0..4).map(|_| site.client()).collect();
    for (client, line) in waiting.iter_mut().zip([
        "BLPOP a b 0",
        "XREAD BLOCK 0 STREAMS s1 s2 $ $",
        "BLMOVE c d LEFT RIGHT 0",
        "BLPOP {t}list {t}more 0",
    ]) {
        client.post(line);
    }
    until("they wait", || other.cmd("INFO clients").text().contains("blocked_clients:4"));
    let second = Node::start(&NodeOptions::default());
    done(site.router(), &format!("nodes add {} --allow-limits", second.address()));
    for client in &mut waiting[..3] {
        let reply = client.reply();
        let text = reply.expect_error();
        assert!(text.starts_with("CROSSSLOT") && text.contains("another node has joined"), "{text}");
    }
    for (client, lines) in transactions.iter_mut().zip(refused_ones) {
        let reply = client.cmd("EXEC");
        let text = reply.expect_error();
        assert!(text.starts_with("EXECABORT") && text.contains("another node has joined since"), "{lines:?}: {text}");
        assert_eq!(client.cmd("EXEC").expect_error(), "ERR EXEC without MULTI");
    }
    assert_eq!(single[0].cmd("EXEC"), Value::Array(vec![ok(), bulk("done")]), "commands within a slot continue");
    assert_eq!(other.cmd("DBSIZE"), int(1), "nothing of the others was executed");
    other.cmd("RPUSH {t}more 1");
    assert_eq!(waiting[3].reply(), Value::Array(vec![bulk("{t}more"), bulk("1")]));
    // From now on the limits of two nodes apply.
    assert!(other.cmd("RENAME a b").expect_error().starts_with("CROSSSLOT"));
    assert!(
        other
            .cmd("EVAL \"return redis.call('SET',ARGV[1],1)\" 0 x")
            .expect_error()
            .contains("the script touches the key")
    );
    done(site.router(), &format!("nodes remove {}", second.address()));
    until("one node takes everything again", || other.cmd("EVAL \"return redis.call('SET',ARGV[1],1)\" 0 x") == ok());
}

#[test]
fn a_second_node_does_not_end_commands_with_keys_of_several_slots() {
    let config = "[moves]\ncolocate-timeout = \"60s\"\n";
    let Some(site) = Site::router_only(1, &SiteOptions::config(config)) else { return };
    let mut other = site.client();
    for line in
        ["MSET a 1 b 2", "RENAME a c", "EVAL \"return redis.call('MGET',KEYS[1],KEYS[2])\" 2 b c", "BLPOP x y 0.01"]
    {
        assert_eq!(other.cmd(line).error(), None, "{line}");
    }
    let (mut transaction, mut watching, mut waiting) = (site.client(), site.client(), site.client());
    for line in ["MULTI", "INCR b", "INCR c"] {
        assert_eq!(transaction.cmd(line).error(), None, "{line}");
    }
    for line in ["WATCH b c", "MULTI", "GET d"] {
        assert_eq!(watching.cmd(line).error(), None, "{line}");
    }
    waiting.post("BLPOP q1 q2 q3 0");
    until("it waits", || other.cmd("INFO clients").text().contains("blocked_clients:1"));
    let second = Node::start(&NodeOptions::default());
    // No command has met a limit.
    done(site.router(), &format!("nodes add {} --rebalance --wait", second.address()));
    assert_eq!(transaction.cmd("EXEC"), Value::Array(vec![int(3), int(2)]));
    assert_eq!(watching.cmd("EXEC"), Value::Nil, "the watched keys have changed");
    assert_eq!(other.cmd("RPUSH q2 x"), int(1));
    assert_eq!(waiting.reply(), Value::Array(vec![bulk("q2"), bulk("x")]));
}

/// Scripts that generate key names run at full speed while the second node joins and gets half of the slots: every
/// acknowledged write is on the right node, and nothing else exists.
#[test]
fn no_script_writes_to_a_wrong_node_while_a_node_joins() {
    let Some(site) = Site::router_only(1, &refusing(2)) else { return };
    let (stop, counts) = (AtomicBool::new(false), [const { AtomicU64::new(0) }; 64]);
    let script = "EVAL \"redis.call('INCR',ARGV[1]) return redis.call('INCR',ARGV[2])\" 0";
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let (site, stop, counts) = (&site, &stop, &counts);
            scope.spawn(move || {
                let mut client = site.client();
                for round in 0.. {
                    let pair = (worker * 16 + round % 16) as usize;
                    let reply = client.cmd(&format!("{script} n:{pair} m:{pair}"));
                    match reply.error() {
                        None => counts[pair].fetch_add(1, Ordering::Relaxed),
                        Some(text) => {
                            assert!(text.contains("the script touches the key"), "{text}");
                            return;
                        }
                    };
                    assert!(!stop.load(Ordering::Relaxed), "scripts that name no keys run before two nodes");
                }
            });
        }
        until("scripts run", || counts.iter().all(|count| count.load(Ordering::Relaxed) > 10));
        let second = Node::start(&NodeOptions::default());
        done(site.router(), &format!("nodes add {} --rebalance --wait --allow-limits", second.address()));
        assert!(owns(site.router(), second.address()).is_some_and(|slots| slots > 8000));
        stop.store(true, Ordering::Relaxed);
        let mut client = site.client();
        until("all scripts have ended", || {
            let values =
                |client: &mut Client| (0..64).map(|n| client.cmd(&format!("GET n:{n}")).text()).collect::<Vec<_>>();
            values(&mut client) == values(&mut client)
        });
        for (n, count) in counts.iter().enumerate() {
            let count = count.load(Ordering::Relaxed).to_string();
            assert_eq!(
                client.cmd(&format!("MGET n:{n} m:{n}")),
                Value::Array(vec![bulk(&count), bulk(&count)]),
                "pair {n}"
            );
        }
        assert_eq!(client.cmd("DBSIZE"), int(128));
        drop(second);
    });
}

#[test]
fn commands_that_two_nodes_would_refuse_are_counted() {
    let Some(site) = Site::router_only(1, &refusing(2)) else { return };
    let mut client = site.client();
    let second = Node::start(&NodeOptions::default());
    for line in
        ["SET {t}a 1", "RENAME {t}a {t}b", "MGET a b", "SUNION a b", "EVAL \"return redis.call('GET',KEYS[1])\" 1 a"]
    {
        assert_eq!(client.cmd(line).error(), None, "{line}");
    }
    assert!(!site.router().metrics().contains("multi_node_incompatible_commands_total{"), "two nodes serve these too");
    for line in [
        "MSETNX x 1 y 2",
        "RENAME x a",
        "RENAME y x",
        "EVAL \"return redis.call('GET',ARGV[1])\" 0 a",
        "SORT ids BY o:*",
        "MULTI",
        "SET a 1",
        "SET b 1",
        "EXEC",
        "WATCH a b",
        "BLPOP a1 b1 0.01",
    ] {
        assert_eq!(client.cmd(line).error(), None, "{line}");
    }
    let counted = [
        ("BLPOP", "slots", 1),
        ("EVAL", "unproved-code", 1),
        ("EXEC", "slots", 1),
        ("MSETNX", "slots", 1),
        ("RENAME", "slots", 2),
        ("SORT", "unnamed-keys", 1),
        ("WATCH", "slots", 1),
    ];
    until("all is counted", || {
        let metrics = site.router().metrics();
        counted.iter().all(|(command, limit, count)| {
            metrics.contains(&format!(
                "switchyard_multi_node_incompatible_commands_total{{command=\"{command}\",limit=\"{limit}\"}} {count}\n"
            ))
        })
    });
    let [node, state] = [site.nodes()[0].address().to_string(), site.router().state_dir().display().to_string()];
    let doctor = run_cli(site.router(), &format!("doctor --node {node} --state-dir {state}"));
    assert!(
        doctor.out.contains("2 calls of RENAME that meet a limit with two nodes: keys of several slots"),
        "{}",
        doctor.out
    );
    let info = client.cmd("INFO switchyard").text();
    assert!(info.contains("\r\nlimited_rename:slots=2\r\n"), "{info}");
    let text = refused(site.router(), &format!("nodes add {}", second.address()));
    assert!(text.contains("RENAME (2: keys of several slots)") && text.contains("--allow-limits"), "{text}");
    let error = refused(site.router(), &format!("nodes add {} --rebalance --wait", second.address()));
    assert!(error.contains("EVAL (1: code that may use undeclared keys"), "{error}");
    assert_eq!(owns(site.router(), second.address()), None, "nothing has changed");
    done(site.router(), &format!("nodes add {} --allow-limits", second.address()));
    assert_eq!(json(site.router(), "nodes list")["nodes"].as_array().map(Vec::len), Some(2));
}

/// Functions of a single node may use every key. With several nodes, functions may only use keys named by their
/// callers, however the functions were loaded.
#[test]
fn functions_of_one_node_are_checked_when_a_second_joins() {
    let Some(site) = Site::router_only(1, &options(2)) else { return };
    let mut client = site.client();
    if client.cmd("FUNCTION LIST").error().is_some() {
        eprintln!("this server has no functions");
        return;
    }
    let library = |name: &str, what: &str| {
        format!("#!lua name={name}\nredis.register_function('{name}', function(k, a) return redis.call({what}) end)")
    };
    assert_eq!(client.call(&["FUNCTION", "LOAD", &library("alone", "unpack(a)")]), bulk("alone"));
    assert_eq!(
        (client.cmd("MULTI"), client.call(&["FUNCTION", "LOAD", &library("queued", "unpack(a)")])),
        (ok(), simple("QUEUED"))
    );
    assert_eq!(client.cmd("EXEC"), Value::Array(vec![bulk("queued")]));
    let names = ["alone", "queued"];
    let put = |client: &mut Client, name: &str| client.cmd(&format!("FCALL {name} 0 SET by:{name} 1"));
    names.iter().for_each(|name| assert_eq!(put(&mut client, name), ok()));
    let second = Node::start(&NodeOptions::default());
    // The move begins at once, and checks the source's libraries before anything moves.
    done(site.router(), &format!("nodes add {} --rebalance --wait --allow-limits", second.address()));
    for name in names {
        assert!(put(&mut client, name).expect_error().contains("the script touches the key"), "{name}");
        assert_eq!(client.cmd(&format!("FCALL {name} 1 by:{name} GET by:{name}")), bulk("1"));
    }
    let codes = |client: &mut Client| -> Vec<String> {
        client
            .cmd("FUNCTION LIST WITHCODE")
            .items()
            .iter()
            .map(|library| library.field("library_code").text())
            .collect()
    };
    let is_checked = |code: &String| code.contains("ERR Switchyard");
    assert!(codes(&mut client).iter().all(|code| !is_checked(code)), "clients see what they have written");
    for node in [&site.nodes()[0], &second] {
        assert_eq!(codes(&mut node.client()).iter().filter(|code| is_checked(code)).count(), 2);
    }
    done(site.router(), &format!("nodes drain {} --wait", second.address()));
    done(site.router(), &format!("nodes remove {}", second.address()));
    until("one node takes everything again", || put(&mut client, "alone") == ok());
    // A library that cannot be checked is not copied.
    assert_eq!(client.call(&["FUNCTION", "LOAD", &library("odd", "_G.unpack(a)")]), bulk("odd"));
    assert_eq!(second.cmd("FLUSHALL"), ok());
    let text = refused(site.router(), &format!("nodes add {} --rebalance --wait --allow-limits", second.address()));
    assert!(text.contains("library odd") && text.contains("may use undeclared keys"), "{text}");
}
