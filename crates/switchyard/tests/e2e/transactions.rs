//! MULTI, EXEC, DISCARD, WATCH, UNWATCH: the cases that scripts/transactions.txt (compared with a plain server) cannot
//! cover, because they need several nodes, several clients, or failures.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::support::relay::Relay;
use crate::support::{
    Client, Node, NodeOptions, Router, RouterOptions, Site, SiteOptions, Value, bulk, encode, int, ok, simple, until,
};

const BRISK: &str =
    "[nodes]\nconnect-timeout = \"500ms\"\ncommand-timeout = \"500ms\"\nreconnect-backoff-max = \"100ms\"\n";

fn queued() -> Value {
    simple("QUEUED")
}

fn options(config: &str, workers: usize) -> SiteOptions {
    SiteOptions::router(RouterOptions { config: config.into(), workers, ..RouterOptions::default() })
}

#[test]
fn keys_of_one_transaction_share_a_slot_if_configured() {
    let Some(site) = Site::router_only(3, &SiteOptions::refusing_several_slots()) else { return };
    let tags = site.tags();
    let (here, there) = (&tags[0][0], &tags[1][0]);
    let mut client = site.client();
    let crossslot = "CROSSSLOT Keys in request don't hash to the same slot";
    let aborted = "EXECABORT Transaction discarded because of previous errors.";
    // Even if one node owns both slots.
    for other in [there, &tags[0][1]] {
        assert_eq!(client.cmd("MULTI"), ok());
        assert_eq!(client.cmd(&format!("SET {{{here}}}a 1")), queued());
        assert_eq!(client.cmd(&format!("SET {{{other}}}b 1")).expect_error(), crossslot);
        assert_eq!(client.cmd(&format!("SET {{{here}}}a 2")), queued());
        assert_eq!(client.cmd("EXEC").expect_error(), aborted);
        assert_eq!(client.cmd(&format!("EXISTS {{{here}}}a {{{other}}}b")), int(0));
        // In one command, and in combination with watched keys.
        assert_eq!(client.cmd("MULTI"), ok());
        assert_eq!(client.cmd(&format!("MSET {{{here}}}a 1 {{{other}}}b 1")).expect_error(), crossslot);
        assert_eq!(client.cmd("EXEC").expect_error(), aborted);
        assert_eq!(client.cmd(&format!("WATCH {{{here}}}a {{{other}}}b")).expect_error(), crossslot);
        assert_eq!(client.cmd(&format!("WATCH {{{here}}}a")), ok());
        assert_eq!(client.cmd(&format!("WATCH {{{other}}}a")).expect_error(), crossslot);
        assert_eq!(client.cmd("UNWATCH"), ok());
        assert_eq!(client.cmd(&format!("WATCH {{{here}}}a")), ok());
        assert_eq!(client.cmd("MULTI"), ok());
        assert_eq!(client.cmd(&format!("SET {{{other}}}a 1")).expect_error(), crossslot);
        assert_eq!(client.cmd("EXEC").expect_error(), aborted);
    }
    // Transactions on every node, sequentially and in one pipeline.
    for tag in tags.iter().flatten() {
        for line in ["MULTI".into(), format!("INCR {{{tag}}}n"), format!("GET {{{tag}}}n"), "EXEC".into()] {
            client.post(&line);
        }
    }
    for _ in tags.iter().flatten() {
        assert_eq!((client.reply(), client.reply(), client.reply()), (ok(), queued(), queued()));
        assert_eq!(client.reply(), Value::Array(vec![int(1), bulk("1")]));
    }
}

#[test]
fn commands_impossible_in_transactions_are_refused_when_queued() {
    let Some(site) = Site::router_only(3, &SiteOptions::default()) else { return };
    let mut client = site.client();
    for line in [
        "FLUSHALL",
        "DBSIZE",
        "KEYS *",
        "SCAN 0",
        "RANDOMKEY",
        "SCRIPT LOAD \"return 1\"",
        "HELLO 3",
        "AUTH x",
        "CLIENT REPLY OFF",
        "WAIT 0 0",
        "SHUTDOWN ABORT",
        "SAVE",
        "BGSAVE",
        "MONITOR",
    ] {
        assert_eq!(client.cmd("MULTI"), ok());
        assert_eq!(client.cmd("SET k v"), queued());
        let reply = client.cmd(line);
        let error = reply.expect_error();
        let named = error.contains(line.split(' ').next().expect("a name")) && error.len() > 30;
        assert!(named || error == "ERR Command not allowed inside a transaction", "{line}: {error}");
        assert!(client.cmd("EXEC").expect_error().starts_with("EXECABORT"), "{line}");
        assert_eq!(client.cmd("GET k"), Value::Nil, "{line}");
    }
    // Commands without keys run on any node.
    for line in ["MULTI", "PING", "TIME", "ECHO x"] {
        client.cmd(line);
    }
    assert_eq!(client.cmd("EXEC").items().len(), 3);
}

/// If only the node knows the reason of a refusal, the error with the reason comes at EXEC.
#[test]
fn a_command_that_the_node_refuses_to_queue_aborts_the_transaction() {
    let Some(site) = Site::router_only(1, &SiteOptions::default()) else { return };
    let node = &site.nodes()[0];
    let mut client = site.client();
    client.cmd("SET k before");
    node.cmd("CONFIG SET maxmemory 1");
    for line in ["MULTI", "GET k", "SET k after"] {
        assert!(client.cmd(line).error().is_none());
    }
    let reply = client.cmd("EXEC");
    let error = reply.expect_error();
    assert!(error.starts_with("EXECABORT Transaction discarded because of: OOM command not allowed"), "{error}");
    node.cmd("CONFIG SET maxmemory 0");
    assert_eq!(client.cmd("GET k"), bulk("before"));
    // Only this transaction: the reason does not remain on the connection.
    for line in ["MULTI", "SET k after"] {
        client.cmd(line);
    }
    assert_eq!(client.cmd("EXEC"), Value::Array(vec![ok()]));
    node.cmd("ACL SETUSER default -append");
    for line in ["MULTI", "SET k lost", "APPEND k lost"] {
        assert!(client.cmd(line).error().is_none());
    }
    assert!(client.cmd("EXEC").expect_error().contains("because of: NOPERM"));
    assert_eq!(client.cmd("GET k"), bulk("after"));
}

#[test]
fn a_node_that_refuses_multi_executes_no_queued_command() {
    if crate::support::direct() {
        return;
    }
    let node = Node::start(&NodeOptions::default());
    node.cmd("ACL SETUSER default -multi");
    let router = Router::start(&[node.address()], &RouterOptions::default());
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("SET k v"), ok());
    for line in ["MULTI", "SET k lost"] {
        assert!(client.cmd(line).error().is_none());
    }
    let reply = client.cmd("EXEC");
    assert!(reply.expect_error().contains("refuses transactions"), "{reply:?}");
    assert_eq!(client.cmd("GET k"), bulk("v"));
}

/// The node removes the permission for MULTI while connections are open. Commands in flight are then executed
/// individually, which no client may mistake for a transaction. Later transactions are not sent on that connection.
#[test]
fn exec_fails_if_multi_is_no_longer_permitted() {
    let Some(site) = Site::router_only(1, &options("", 1)) else { return };
    let node = &site.nodes()[0];
    let mut looker = node.client();
    looker.cmd("ACL SETUSER looker on nopass ~* &* +@all");
    looker.cmd("AUTH looker x");
    // A server that also refuses EXEC replies EXECABORT, as if the transaction had been discarded.
    for (protocol, refused, allowed) in
        [("HELLO 2", "-multi", "+multi"), ("HELLO 3", "-multi", "+multi"), ("HELLO 2", "-multi -exec", "+multi +exec")]
    {
        for watches in [false, true] {
            let mut client = site.client();
            client.cmd(protocol);
            assert_eq!(client.cmd("SET {t}n 1"), ok());
            client.cmd("DEL {t}l");
            // The connections are open, and may still use MULTI.
            for line in if watches { &["WATCH {t}n", "MULTI", "GET {t}n"][..] } else { &["MULTI", "GET {t}n"] } {
                assert!(client.cmd(line).error().is_none());
            }
            assert_eq!(client.cmd("EXEC"), Value::Array(vec![bulk("1")]));
            for line in if watches {
                &["WATCH {t}n", "MULTI", "INCR {t}n", "PUBLISH c x", "RPUSH {t}l x"][..]
            } else {
                &["MULTI", "INCR {t}n", "RPUSH {t}l x"]
            } {
                assert!(client.cmd(line).error().is_none());
            }
            assert_eq!(looker.cmd(&format!("ACL SETUSER default {refused}")), ok());
            let reply = client.cmd("EXEC");
            let error = reply.expect_error();
            assert!(error.starts_with("ERR the node refused MULTI") && error.contains("one by one"), "{error}");
            // The error is correct: the commands were executed.
            assert_eq!((client.cmd("GET {t}n"), client.cmd("LLEN {t}l")), (bulk("2"), int(1)));
            // Each connection detects this separately. This one already has.
            for line in if watches { &["WATCH {t}n", "MULTI", "INCR {t}n"][..] } else { &["MULTI", "INCR {t}n"] } {
                assert!(client.cmd(line).error().is_none());
            }
            let reply = client.cmd("EXEC");
            assert!(reply.expect_error().contains("refuses transactions"), "{reply:?}");
            assert_eq!(client.cmd("GET {t}n"), bulk("2"));
            assert_eq!(looker.cmd(&format!("ACL SETUSER default {allowed}")), ok());
            // New connections check the permission again.
            looker.cmd("CLIENT KILL TYPE normal SKIPME yes");
            until("transactions are served again", || {
                client.cmd("MULTI");
                client.cmd("GET {t}n");
                client.cmd("EXEC") == Value::Array(vec![bulk("2")])
            });
        }
    }
}

/// Increments with WATCH, GET, MULTI, SET, EXEC from many clients of several workers: every success counts exactly
/// once.
#[test]
fn increments_with_watch_from_many_clients_add_up() {
    let site = Site::with(2, &options("", 2));
    let keys = ["a", "b", "c"];
    let done = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..12)
            .map(|i| {
                let mut client = site.client();
                scope.spawn(move || {
                    if i % 2 == 0 {
                        client.cmd("HELLO 3");
                    }
                    let key = keys[i % keys.len()];
                    let (mut won, mut lost) = (0, 0);
                    while won < 40 {
                        assert_eq!(client.cmd(&format!("WATCH {key}")), ok());
                        let value = match client.cmd(&format!("GET {key}")) {
                            Value::Nil => 0,
                            other => other.text().parse::<i64>().expect("a number"),
                        };
                        // Sometimes in one piece, sometimes word by word.
                        let next = format!("SET {key} {}", value + 1);
                        for line in ["MULTI", &next, "EXEC"] {
                            client.post(line);
                        }
                        assert_eq!((client.reply(), client.reply()), (ok(), queued()));
                        match client.reply() {
                            Value::Nil => lost += 1,
                            reply => {
                                assert_eq!(reply, Value::Array(vec![ok()]));
                                won += 1;
                            }
                        }
                    }
                    (won, lost)
                })
            })
            .collect();
        workers.into_iter().map(|w| w.join().expect("a client")).collect::<Vec<_>>()
    });
    let mut client = site.client();
    let sum: i64 = keys.iter().map(|k| client.cmd(&format!("GET {k}")).text().parse::<i64>().expect("a number")).sum();
    assert_eq!(sum, done.iter().map(|d| d.0).sum::<i64>());
    assert!(done.iter().any(|d| d.1 > 0), "no client ever lost a race: the test shows nothing");
}

/// In the steady state, transactions open no connections, with or without WATCH.
#[test]
fn transactions_reuse_existing_connections() {
    if crate::support::direct() {
        return;
    }
    let node = Node::start(&NodeOptions::default());
    let relay = Relay::start(node.address());
    let router = Router::start(&[relay.address()], &RouterOptions { workers: 1, ..RouterOptions::default() });
    let mut clients: Vec<Client> = (0..20).map(|_| Client::connect(router.address())).collect();
    clients[0].cmd("SET warm up");
    let plain = relay.settled();
    for round in 0..10 {
        for client in &mut clients {
            client.write(&[encode(&["MULTI"]), encode(&["INCR", "n"]), encode(&["EXEC"])].concat());
        }
        for client in &mut clients {
            assert_eq!((client.reply(), client.reply()), (ok(), queued()));
            assert_eq!(client.reply().items().len(), 1, "round {round}");
        }
    }
    assert_eq!(relay.accepted(), plain, "without WATCH they share the ordinary connection");
    let mut watch = |times: usize| {
        for _ in 0..times {
            for client in &mut clients {
                assert_eq!(client.cmd("WATCH n"), ok());
                assert_eq!(client.cmd("MULTI"), ok());
                client.cmd("INCR n");
                assert_eq!(client.cmd("EXEC").items().len(), 1);
            }
        }
    };
    watch(1);
    let warm = relay.accepted();
    assert_eq!(warm, plain + 1, "sequentially they need one connection");
    watch(10);
    assert_eq!(relay.accepted(), warm);
    assert_eq!(node.cmd("GET n"), bulk("420"));
}

#[test]
fn a_connection_is_returned_clean_whatever_its_client_does() {
    let Some(site) =
        Site::router_only(1, &options("[nodes]\nwatch-connections-max = 1\ncommand-timeout = \"20s\"\n", 1))
    else {
        return;
    };
    let mut other = site.client();
    other.cmd("SET k 0");
    // Each way to stop watching. The next client on the same connection must not be affected.
    type Way = fn(&mut Client);
    let ways: [(&str, Way); 9] = [
        ("close", |c| c.cut()),
        ("half close", |c| c.finish_sending()),
        ("UNWATCH", |c| assert_eq!(c.cmd("UNWATCH"), ok())),
        ("RESET", |c| assert_eq!(c.cmd("RESET"), simple("RESET"))),
        ("QUIT", |c| assert_eq!(c.cmd("QUIT"), ok())),
        ("DISCARD", |c| {
            c.cmd("MULTI");
            c.cmd("SET k lost");
            assert_eq!(c.cmd("DISCARD"), ok());
        }),
        ("EXECABORT", |c| {
            c.cmd("MULTI");
            c.cmd("NOSUCHCOMMAND").expect_error();
            c.cmd("EXEC").expect_error();
        }),
        ("EXEC", |c| {
            c.cmd("MULTI");
            assert_eq!(c.cmd("EXEC"), Value::Array(vec![]));
        }),
        ("a close in the middle of MULTI", |c| {
            c.cmd("MULTI");
            c.cmd("SET k lost");
            c.cut();
        }),
    ];
    for (name, way) in ways {
        let mut client = site.client();
        assert_eq!(client.cmd("WATCH k"), ok(), "before {name}");
        way(&mut client);
        let mut next = site.client();
        assert_eq!(next.cmd("WATCH unrelated"), ok(), "after {name}");
        // The next EXEC would fail if the previous watch were still active.
        other.cmd("INCR k");
        assert_eq!(next.cmd("MULTI"), ok());
        assert_eq!(next.cmd("GET unrelated"), queued());
        assert_eq!(next.cmd("EXEC"), Value::Array(vec![Value::Nil]), "after {name}");
    }
    assert_eq!(other.cmd("GET k"), bulk("9"));
    // Sequentially, so one connection was used for all of them.
    let own = site.nodes()[0].cmd("CLIENT LIST").text();
    assert_eq!(
        own.lines().filter(|l| l.contains("name=switchyard-") && !l.contains("-ownership ")).count(),
        2,
        "{own}"
    );
}

#[test]
fn at_the_limit_a_watch_waits_and_then_gets_a_clear_error() {
    let Some(site) =
        Site::router_only(1, &options("[nodes]\nwatch-connections-max = 2\ncommand-timeout = \"700ms\"\n", 1))
    else {
        return;
    };
    let mut holders = [site.client(), site.client()];
    for holder in &mut holders {
        assert_eq!(holder.cmd("WATCH k"), ok());
    }
    let mut third = site.client();
    let reply = third.cmd("WATCH k");
    let error = reply.expect_error();
    assert!(
        error.starts_with("NODEBUSY") && error.contains("watch-connections-max 2") && error.contains("transactions"),
        "{error}"
    );
    // Queued, while one connection is returned.
    third.post("WATCH k");
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(holders[0].cmd("UNWATCH"), ok());
    assert_eq!(third.reply(), ok());
    // Transactions without WATCH need no connection of their own.
    holders[0].cmd("MULTI");
    holders[0].cmd("SET k v");
    assert_eq!(holders[0].cmd("EXEC"), Value::Array(vec![ok()]));
    // Both watching clients see the change.
    for client in [&mut third, &mut holders[1]] {
        client.cmd("MULTI");
        client.cmd("SET k lost");
        assert_eq!(client.cmd("EXEC"), Value::Nil);
    }
    // A client of the other protocol gets a connection, although free connections of the first fill the pool.
    let mut three = site.client();
    three.cmd("HELLO 3");
    assert_eq!(three.cmd("WATCH k"), ok());
    three.cmd("MULTI");
    three.cmd("HGETALL {k}none");
    assert_eq!(three.cmd("EXEC"), Value::Array(vec![Value::Map(vec![])]));
}

/// The watching connection is lost: EXEC returns nil or an error, although the key is unchanged, and never succeeds.
#[test]
fn a_watch_does_not_survive_its_connection() {
    let Some(mut site) = Site::router_only(1, &options(BRISK, 1)) else { return };
    let in_doubt = |reply: &Value| *reply == Value::Nil || reply.error().is_some_and(|e| e.starts_with("NODE"));
    for way in ["kill the connection", "restart the node", "restart before MULTI"] {
        let mut client = site.client();
        until("the node serves", || client.cmd("SET k v") == ok());
        assert_eq!(client.cmd("WATCH k"), ok());
        if way != "restart before MULTI" {
            assert_eq!(client.cmd("MULTI"), ok());
            assert_eq!(client.cmd("SET k changed"), queued());
        }
        if way == "kill the connection" {
            site.nodes()[0].cmd("CLIENT KILL TYPE normal SKIPME yes");
        } else {
            site.node_mut(0).kill();
            site.node_mut(0).restart();
        }
        let mut other = site.client();
        until("the node serves again", || other.cmd("GET k").error().is_none());
        if way == "restart before MULTI" {
            assert_eq!(client.cmd("MULTI"), ok());
            assert_eq!(client.cmd("SET k changed"), queued());
        }
        assert!(other.cmd("CLIENT LIST").text().contains(" flags=xd "), "{way}");
        let reply = client.cmd("EXEC");
        assert!(in_doubt(&reply), "{way}: {reply:?}");
        assert_ne!(other.cmd("GET k"), bulk("changed"), "{way}");
        // The next attempt succeeds.
        assert_eq!(client.cmd("WATCH k"), ok());
        client.cmd("MULTI");
        client.cmd("SET k at last");
        client.cmd("DISCARD");
        client.cmd("MULTI");
        client.cmd("SET k changed");
        assert_eq!(client.cmd("EXEC"), Value::Array(vec![ok()]));
        client.cmd("SET k v");
    }
}

/// The whole transaction in one pipeline, at a node that does not reply: after a failed WATCH, EXEC does not succeed.
#[test]
fn a_pipelined_transaction_with_a_failed_watch_does_not_succeed() {
    let Some(site) = Site::router_only(1, &options(BRISK, 1)) else { return };
    let mut client = site.client();
    assert_eq!(client.cmd("SET k v"), ok());
    site.nodes()[0].freeze();
    for line in ["WATCH k", "MULTI", "SET k lost", "EXEC"] {
        client.post(line);
    }
    assert!(client.reply().expect_error().starts_with("NODE"));
    assert_eq!((client.reply(), client.reply()), (ok(), queued()));
    assert_eq!(client.reply(), Value::Nil);
    site.nodes()[0].thaw();
    until("the node serves again", || client.cmd("GET k") == bulk("v"));
    // Only once.
    for line in ["MULTI", "SET k w", "EXEC"] {
        client.post(line);
    }
    assert_eq!((client.reply(), client.reply(), client.reply()), (ok(), queued(), Value::Array(vec![ok()])));
}

/// However late the transaction is sent: it is unknown whether the client had read the error before.
#[test]
fn after_a_failed_watch_exec_fails_until_unwatch() {
    let Some(site) = Site::router_only(1, &options(BRISK, 1)) else { return };
    let mut client = site.client();
    assert_eq!(client.cmd("SET k v"), ok());
    let fail_watch = || {
        let mut client = site.client();
        client.cmd("PING");
        site.nodes()[0].freeze();
        client.post("WATCH k");
        client.stream().peek(&mut [0]).expect("an error, not read yet");
        site.nodes()[0].thaw();
        until("the node serves again", || site.client().cmd("GET k") == bulk("v"));
        client
    };
    let mut pipelines = fail_watch();
    for line in ["MULTI", "SET k lost", "EXEC"] {
        pipelines.post(line);
    }
    assert!(pipelines.reply().expect_error().starts_with("NODE"));
    assert_eq!((pipelines.reply(), pipelines.reply(), pipelines.reply()), (ok(), queued(), Value::Nil));
    assert_eq!(client.cmd("GET k"), bulk("v"));
    // Only once: afterwards the state is the same as after every EXEC.
    for line in ["MULTI", "SET {k}n 1"] {
        pipelines.cmd(line);
    }
    assert_eq!(pipelines.cmd("EXEC"), Value::Array(vec![ok()]));
    // Another WATCH does not clear the failure, but UNWATCH does.
    let mut again = fail_watch();
    assert!(again.reply().expect_error().starts_with("NODE"));
    assert_eq!((again.cmd("WATCH {k}n"), again.cmd("MULTI"), again.cmd("SET k lost")), (ok(), ok(), queued()));
    assert_eq!((again.cmd("EXEC"), client.cmd("GET k")), (Value::Nil, bulk("v")));
    let mut careful = fail_watch();
    assert!(careful.reply().expect_error().starts_with("NODE"));
    assert_eq!((careful.cmd("UNWATCH"), careful.cmd("MULTI"), careful.cmd("SET {k}n 2")), (ok(), ok(), queued()));
    assert_eq!(careful.cmd("EXEC"), Value::Array(vec![ok()]));
}

#[test]
fn exec_at_a_silent_node_times_out_and_its_late_reply_is_dropped() {
    let Some(mut site) = Site::router_only(1, &SiteOptions::config(BRISK)) else { return };
    let mut client = site.client();
    client.cmd("SET k v");
    for watch in [false, true] {
        if watch {
            assert_eq!(client.cmd("WATCH k"), ok());
        }
        client.cmd("MULTI");
        assert_eq!(client.cmd("INCR {k}n"), queued());
        site.nodes()[0].freeze();
        assert!(client.cmd("EXEC").expect_error().starts_with("NODETIMEOUT"));
        site.nodes()[0].thaw();
        until("the node serves again", || client.cmd("GET k") == bulk("v"));
        for i in 0..20 {
            assert_eq!(client.cmd(&format!("ECHO {i}")), bulk(i.to_string()));
            assert_eq!(client.cmd("GET k"), bulk("v"));
        }
    }
    client.cmd("MULTI");
    client.cmd("SET k w");
    site.node_mut(0).kill();
    let reply = client.cmd("EXEC");
    let error = reply.expect_error();
    assert!(error.starts_with("NODELOST") || error.starts_with("NODEDOWN"), "{error}");
    // The transaction has ended nevertheless.
    assert_eq!(client.cmd("EXEC").expect_error(), "ERR EXEC without MULTI");
}

#[test]
fn large_arguments_and_replies_work_in_transactions() {
    let site = Site::with(2, &options("", 1));
    let mut other = site.client();
    for protocol in ["HELLO 2", "HELLO 3"] {
        for watch in [false, true] {
            let mut client = site.client();
            client.cmd(protocol);
            if watch {
                assert_eq!(client.cmd("WATCH {l}a"), ok());
            }
            let value = vec![b'v'; 3 << 20];
            assert_eq!(client.cmd("MULTI"), ok());
            assert_eq!(client.call(&[&b"SET"[..], b"{l}a", &value]), queued());
            assert_eq!(client.call(&[&b"APPEND"[..], b"{l}a", &value]), queued());
            assert_eq!(client.cmd("GET {l}a"), queued());
            assert_eq!(client.cmd("GET {l}a"), queued());
            assert_eq!(client.cmd("STRLEN {l}a"), queued());
            client.post("EXEC");
            client.post("ECHO after");
            // Other clients are served in the meantime.
            assert_eq!(other.cmd("SET {l}b x"), ok());
            let reply = client.reply();
            let items = reply.items();
            assert_eq!((&items[0], &items[1]), (&ok(), &int(6 << 20)));
            assert_eq!(items[2], bulk([value.clone(), value.clone()].concat()));
            assert_eq!(items[3], items[2]);
            assert_eq!(items[4], int(6 << 20));
            assert_eq!(client.reply(), bulk("after"));
            // A small transaction with a large reply shares the ordinary connection.
            client.cmd("MULTI");
            client.cmd("GET {l}a");
            assert_eq!(client.cmd("EXEC").items()[0].bytes().len(), 6 << 20);
            assert_eq!(client.cmd("DEL {l}a"), int(1));
        }
    }
}

/// Transactions between other commands of many clients, while connections break on both sides: EXEC's reply matches the
/// executed commands.
#[test]
fn transactions_are_all_or_nothing_despite_failures() {
    let Some(site) = Site::router_only(2, &SiteOptions::config(BRISK)) else { return };
    let stop = AtomicBool::new(false);
    let outcomes: Vec<(i64, i64)> = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..8)
            .map(|i| {
                let (site, stop) = (&site, &stop);
                scope.spawn(move || {
                    let (mut acked, mut unknown, mut round) = (0, 0, 0);
                    // A WATCH has failed: the next EXEC returns nil.
                    let mut doubt = false;
                    let mut client = site.client();
                    while !stop.load(Ordering::Relaxed) {
                        round += 1;
                        if round % 50 == 0 {
                            // Disconnects during a transaction.
                            client.post("MULTI");
                            client.post(&format!("INCR {{t{i}}}a"));
                            client.cut();
                            client = site.client();
                            doubt = false;
                        }
                        let watch = round % 3 == 0;
                        if watch && client.cmd(&format!("WATCH {{t{i}}}a")).error().is_some() {
                            doubt = true;
                            continue;
                        }
                        for line in
                            ["MULTI".into(), format!("INCR {{t{i}}}a"), format!("INCR {{t{i}}}b"), "EXEC".into()]
                        {
                            client.post(&line);
                        }
                        assert_eq!((client.reply(), client.reply(), client.reply()), (ok(), queued(), queued()));
                        match client.reply() {
                            Value::Nil => assert!(watch || doubt, "nil without a watch"),
                            Value::Array(items) => {
                                assert!(!doubt, "it succeeded though a watch had failed");
                                assert_eq!(items[0], items[1], "one of two was executed");
                                acked += 1;
                            }
                            error => {
                                let error = error.expect_error();
                                assert!(error.starts_with("NODE"), "{error}");
                                unknown += 1;
                            }
                        }
                        doubt = false;
                    }
                    (acked, unknown)
                })
            })
            .collect();
        for round in 0..25 {
            std::thread::sleep(Duration::from_millis(80));
            site.nodes()[round % 2].cmd("CLIENT KILL TYPE normal SKIPME yes");
        }
        stop.store(true, Ordering::Relaxed);
        workers.into_iter().map(|w| w.join().expect("a client without impossible results")).collect()
    });
    let mut client = site.client();
    for (i, (acked, unknown)) in outcomes.into_iter().enumerate() {
        let value = |name: &str, client: &mut Client| {
            until("the node serves", || {
                client
                    .cmd(&format!("GET {{t{i}}}{name}"))
                    .error()
                    .is_none()
                    .then(|| client.cmd(&format!("GET {{t{i}}}{name}")).text())
            })
        };
        let (a, b) = (value("a", &mut client), value("b", &mut client));
        assert_eq!(a, b, "half of a transaction was executed");
        let count: i64 = a.parse().expect("a number");
        assert!(
            acked > 20 && acked <= count && count <= acked + unknown,
            "{acked} acknowledged, {unknown} unknown, {count} there"
        );
    }
}

#[test]
fn client_list_shows_transactions() {
    let site = Site::with(2, &options("", 2));
    let mut watcher = site.client();
    let mut client = site.client();
    client.cmd("CLIENT SETNAME busy");
    let mut line = || {
        let list = watcher.cmd("CLIENT LIST").text();
        list.lines().find(|l| l.contains(" name=busy ")).expect("the client").to_owned()
    };
    assert!(line().contains(" flags=N ") && line().contains(" multi=-1 "));
    client.cmd("MULTI");
    assert!(line().contains(" flags=x ") && line().contains(" multi=0 "), "{}", line());
    client.cmd("SET k v");
    client.cmd("GET k");
    assert!(line().contains(" multi=2 "), "{}", line());
    client.cmd("EXEC");
    assert!(line().contains(" flags=N ") && line().contains(" multi=-1 "));
}

#[test]
fn a_slow_transaction_with_watch_has_the_timeout_of_slow_commands() {
    let Some(site) = Site::router_only(1, &options(BRISK, 1)) else { return };
    let mut client = site.client();
    let script = "local function now() local t = redis.call('TIME'); return t[1] * 1000 + t[2] / 1000 end; \
                  local began = now(); while now() - began < 1500 do end; return redis.call('INCR', KEYS[1])";
    assert_eq!(client.cmd("WATCH k"), ok());
    assert_eq!(client.cmd("MULTI"), ok());
    client.send(&["EVAL", script, "1", "k"]);
    assert_eq!(client.reply(), queued());
    assert_eq!(client.cmd("EXEC"), Value::Array(vec![int(1)]));
}

/// Commands that the router answers, between commands of the node: each reply at its place, and their effects after
/// EXEC.
#[test]
fn replies_of_the_router_have_their_places_in_exec() {
    let Some(site) = Site::router_only(2, &options("", 1)) else { return };
    let mut client = site.client();
    let id = client.cmd("CLIENT ID");
    let lines = [
        "MULTI",
        "CLIENT GETNAME",
        "SET {t}a 1",
        "CLIENT SETNAME inside",
        "CLIENT GETNAME",
        "INFO server",
        "GET {t}a",
        "CLIENT ID",
        "ROLE",
        "CONFIG GET maxmemory",
        "SELECT 3",
        "SET {t}b 2",
        "CLIENT NO-EVICT ON",
        "EXEC",
        "CLIENT GETNAME",
        "GET {t}b",
        "SELECT 0",
        "CLIENT SETNAME out",
    ];
    // One by one, and in a pipeline: commands after EXEC wait for the commands in it.
    for is_pipeline in [false, true] {
        let replies: Vec<Value> = if is_pipeline {
            lines.iter().for_each(|line| client.post(line));
            lines.iter().map(|_| client.reply()).collect()
        } else {
            lines.iter().map(|line| client.cmd(line)).collect()
        };
        let [exec, name, found, ..] = &replies[13..] else { panic!("{replies:?}") };
        assert!(replies[1..13].iter().all(|reply| *reply == queued()), "{replies:?}");
        let [before, set, named, inside, info, a, own, role, config, select, b, evict] = exec.items() else {
            panic!("{exec:?}")
        };
        assert_eq!(*before, if is_pipeline { bulk("out") } else { Value::Nil });
        assert_eq!((set, named, inside, a, own), (&ok(), &ok(), &bulk("inside"), &bulk("1"), &id));
        assert!(info.text().contains("switchyard_version:"), "{info:?}");
        assert_eq!((&role.items()[0], &config.items()[0]), (&bulk("master"), &bulk("maxmemory")));
        assert_eq!((select, b, evict), (&ok(), &ok(), &ok()));
        assert_eq!(
            (name, found),
            (&bulk("inside"), &bulk("2")),
            "the name and the database are as the transaction left them"
        );
    }
    // A failed transaction changes nothing.
    let mut other = site.client();
    assert_eq!(client.cmd("WATCH {t}a"), ok());
    other.cmd("SET {t}a 5");
    for line in ["MULTI", "SET {t}a 6", "CLIENT SETNAME never", "SELECT 4"] {
        client.cmd(line);
    }
    assert_eq!(client.cmd("EXEC"), Value::Nil);
    assert_eq!((client.cmd("CLIENT GETNAME"), client.cmd("GET {t}a")), (bulk("out"), bulk("5")));
    // Only commands of the router, and a database that no node has.
    for line in ["MULTI", "CLIENT GETNAME", "CLIENT SETNAME \"a b\""] {
        client.cmd(line);
    }
    let exec = client.cmd("EXEC");
    assert_eq!(exec.items()[0], bulk("out"));
    assert!(exec.items()[1].expect_error().contains("cannot contain spaces"));
    for line in ["MULTI", "SELECT 999", "GET {t}a"] {
        client.cmd(line);
    }
    let exec = client.cmd("EXEC");
    assert_eq!((exec.items()[0].expect_error(), &exec.items()[1]), ("ERR DB index is out of range", &bulk("5")));
    assert_eq!(client.cmd("GET {t}a"), bulk("5"), "the database is the one before");
}

#[test]
fn one_node_runs_commands_for_all_keys_in_transactions() {
    let Some(site) = Site::router_only(1, &options("", 1)) else { return };
    let mut client = site.client();
    for i in 0..50 {
        client.cmd(&format!("SET key:{i} 1"));
    }
    let lines = [
        "MULTI",
        "SET more 1",
        "DBSIZE",
        "SCAN 0 COUNT 5",
        "RANDOMKEY",
        "KEYS mor?",
        "SCRIPT LOAD \"return 1\"",
        "SCAN nonsense",
        "EXEC",
    ];
    let exec = lines.map(|line| client.cmd(line))[8].clone();
    let [set, size, page, random, keys, sha, refused] = exec.items() else { panic!("{exec:?}") };
    assert_eq!((set, size, keys, sha.text().len()), (&ok(), &int(51), &Value::Array(vec![bulk("more")]), 40));
    assert!(random.text().starts_with("key:") || random.text() == "more");
    assert_eq!(refused.expect_error(), "ERR invalid cursor");
    // A scan within a transaction continues outside, and the other way round.
    let mut found: Vec<String> = page.items()[1].items().iter().map(Value::text).collect();
    let mut cursor = page.items()[0].text();
    while cursor != "0" {
        let page = if found.len().is_multiple_of(2) {
            client.cmd(&format!("SCAN {cursor} COUNT 5"))
        } else {
            client.cmd("MULTI");
            client.cmd(&format!("SCAN {cursor} COUNT 5"));
            client.cmd("EXEC").items()[0].clone()
        };
        found.extend(page.items()[1].items().iter().map(Value::text));
        cursor = page.items()[0].text();
    }
    found.sort_unstable();
    found.dedup();
    assert_eq!(found.len(), 51, "every key");
    for line in ["MULTI", "FLUSHDB", "SET last 1", "EXEC"] {
        client.cmd(line);
    }
    assert_eq!(client.cmd("KEYS *"), Value::Array(vec![bulk("last")]));
}
