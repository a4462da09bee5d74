//! Commands with several keys of a slot, some of which live elsewhere: these keys are returned to their slot owners. Tests
//! cover clients that wait for that, and the cases in which it is impossible. `together` has keys of several slots.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use switchyard_policy::topology::crc16_slot;

use crate::movectl::{done, json, run_cli};
use crate::movectl_moves::{eventually, report, the_move, wait_for};
use crate::movekeys::Scene;
use crate::support::{Client, Node, Site, SiteOptions, Value, bulk, encode, int, ok, simple, until};

const EXAMPLE: &str = "switchyard move --from";

/// Moves are slow on a busy machine.
const LONG_TIMEOUT: &str = "[moves]\ncolocate-timeout = \"60s\"\n";

/// Number of moves started because commands needed keys, from the report of all moves.
fn colocations(scene: &Scene) -> usize {
    let report = report(scene.router());
    let all = ["moves", "ended"].map(|list| report[list].as_array().cloned().unwrap_or_default()).concat();
    all.iter().filter(|m| m["home_for"].is_array()).count()
}

/// Number of keys that live elsewhere than their slots.
fn away(scene: &Scene) -> u64 {
    scene.overrides().iter().sum()
}

fn wait_until_at_rest(scene: &Scene) {
    eventually("no move is in progress", || report(scene.router())["moves"].as_array().is_some_and(Vec::is_empty));
}

#[test]
fn only_the_keys_of_a_command_are_returned() {
    let Some(scene) = Scene::with(LONG_TIMEOUT) else { return };
    let mut client = scene.site.client();
    client.cmd("SET {t}other 1");
    scene.part("{t}other");
    for line in ["SADD {t}s x y", "RPUSH {t}l 1 2", "SET {t}w1 1", "HSET {t}h f 1"] {
        client.cmd(line);
    }
    let queued = || simple("QUEUED");
    let mut asked = 0;
    for (parted, line, reply) in [
        (&["{t}b"][..], "RENAME {t}a {t}b", ok()),
        (&["{t}b"], "RENAME {t}b {t}a", ok()),
        (&["{t}b"], "RENAMENX {t}a {t}b", int(1)),
        (&["{t}r"], "SMOVE {t}s {t}r x", int(1)),
        (&["{t}m"], "LMOVE {t}l {t}m LEFT LEFT", bulk("1")),
        (&["{t}n", "{t}o"], "MSETNX {t}n 1 {t}o 1 {t}p 1", int(1)),
        (&["{t}m"], "BLPOP {t}none {t}m 5", Value::Array(vec![bulk("{t}m"), bulk("1")])),
        (&["{t}n"], "EVAL \"return redis.call('GET', KEYS[2])\" 2 {t}b {t}n", bulk("1")),
        (
            &["{t}h"],
            "EVAL \"return redis.call('HGET', KEYS[1], 'f') .. redis.call('GET', KEYS[2])\" 2 {t}h {t}n",
            bulk("11"),
        ),
    ] {
        client.cmd("DEL {t}a");
        client.cmd("SETNX {t}a 1");
        if line.starts_with("RENAME {t}b") {
            client.cmd("SET {t}b 1");
        } else if line.starts_with("RENAME") {
            client.cmd("DEL {t}b");
        }
        parted.iter().for_each(|key| scene.part(key));
        // Commands sent later are executed later.
        client.write(&[&encode(&crate::support::words(line))[..], &encode(&["ECHO", "behind"])].concat());
        assert_eq!((client.reply(), client.reply()), (reply, bulk("behind")), "{line}");
        asked += 1;
        wait_until_at_rest(&scene);
        assert_eq!((away(&scene), colocations(&scene)), (1, asked), "{line}");
    }

    // Transactions: queued and watched keys.
    scene.part("{t}b");
    for (line, reply) in [("MULTI", ok()), ("SET {t}a 1", queued()), ("SET {t}b 2", queued()), ("GET {t}a", queued())] {
        assert_eq!(client.cmd(line), reply);
    }
    assert_eq!(client.cmd("EXEC"), Value::Array(vec![ok(), ok(), bulk("1")]));
    wait_until_at_rest(&scene);
    scene.part("{t}b");
    assert_eq!(client.cmd("WATCH {t}a {t}b"), ok());
    client.cmd("MULTI");
    client.cmd("INCR {t}b");
    assert_eq!(client.cmd("EXEC"), Value::Array(vec![int(3)]));
    wait_until_at_rest(&scene);
    // If an unwatched key is moved to a watched one, the watch holds. The move of a watched key is a change of it.
    for (watched, used, result) in [("{t}a", "{t}b", Value::Array(vec![int(4)])), ("{t}b", "{t}a", Value::Nil)] {
        scene.part("{t}b");
        assert_eq!(client.cmd(&format!("WATCH {watched}")), ok());
        client.cmd("MULTI");
        client.cmd(&format!("INCR {used}"));
        assert_eq!(client.cmd("EXEC"), result, "{watched}, {used}");
        wait_until_at_rest(&scene);
        assert_eq!(away(&scene), 1);
    }
    scene.part("{t}b");
    assert_eq!((client.cmd("WATCH {t}a"), client.cmd("WATCH {t}b")), (ok(), ok()));
    scene.site.client().cmd("SET {t}a other");
    client.cmd("MULTI");
    client.cmd("SET {t}b mine");
    assert_eq!((client.cmd("EXEC"), client.cmd("GET {t}b")), (Value::Nil, bulk("4")), "the first watch was not lost");
    wait_until_at_rest(&scene);

    // A script causes the return of the keys that it touches.
    scene.part("{t}b");
    assert_eq!(away(&scene), 2);
    assert_eq!(client.cmd("EVAL \"return redis.call('GET', ARGV[1])\" 1 {t}a {t}other"), bulk("1"));
    wait_until_at_rest(&scene);
    assert_eq!(away(&scene), 1);
    // Other commands that may use any key of the slot cause the return of all its keys.
    scene.part("{t}w1");
    assert_eq!(client.cmd("RPUSH {t}q 1"), int(1));
    assert_eq!(client.cmd("SORT {t}q BY nosort GET {t}w*").items(), [bulk("1")]);
    wait_until_at_rest(&scene);
    assert_eq!(away(&scene), 0);
    let (owner, other) = scene.nodes_of("{t}");
    assert_eq!(other.cmd("DBSIZE"), int(0));
    assert_eq!(owner.cmd("DBSIZE"), client.cmd("DBSIZE"));
}

#[test]
fn returned_keys_are_reported_and_moving_them_again_warns() {
    let Some(scene) = Scene::with(LONG_TIMEOUT) else { return };
    let mut client = scene.site.client();
    client.cmd("SET {t}secret value");
    scene.part("{t}secret");
    assert_eq!(client.cmd("RENAME {t}secret {t}mystery"), ok());
    wait_until_at_rest(&scene);
    let m = the_move(scene.router(), 2);
    assert_eq!((m["state"].as_str(), m["keys"].as_u64(), m["goal"].as_str()), (Some("done"), Some(1), Some("fast")));
    assert_eq!((m["home_for"][0]["command"].as_str(), m["home_for"][0]["keys"].as_u64()), (Some("RENAME"), Some(1)));
    let text = done(scene.router(), "moves");
    assert!(
        text.contains("(brings keys together for RENAME)") && text.contains("needed them together: RENAME 1"),
        "{text}"
    );
    let metrics = scene.router().metrics();
    for line in [
        "switchyard_moves_brought_home_keys_total{command=\"rename\"} 1",
        "switchyard_colocate_waits_total 1",
        "switchyard_colocate_refused_total 0",
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line} is not in\n{metrics}");
    }
    let log = scene
        .router()
        .process()
        .expect_log(&[&*format!("move 2 brings 1 key to {}: RENAME needs them", scene.nodes_of("{t}").0.address())]);
    for text in [&text, &metrics, &log] {
        assert!(!text.contains("mystery"), "key names must not be shown: {text}");
    }
    let (owner, other) = scene.nodes_of("{t}");
    for (keys, told) in [("{t}secret", true), ("{t}mystery", false)] {
        let line = format!("move --from {} --to {} --keys {keys} --dry-run", owner.address(), other.address());
        let text = done(scene.router(), &line);
        assert_eq!(
            text.contains("NOTE: 1 of these keys were brought to other keys") && text.contains("(RENAME)"),
            told,
            "{text}"
        );
    }
    let line = format!("move --from {} --to {} --keys {{t}}* --dry-run", owner.address(), other.address());
    assert!(json(scene.router(), &line)["notes"].is_null(), "the keys there now were not returned by a command");
}

#[test]
fn clients_that_need_the_same_key_share_one_move() {
    const CLIENTS: usize = 300;
    let Some(scene) = Scene::with(LONG_TIMEOUT) else { return };
    let mut client = scene.site.client();
    client.cmd("MSET {t}a 0 {t}b 0");
    scene.part("{t}b");
    let script = "EVAL \"redis.call('INCR', KEYS[1]) return redis.call('INCR', KEYS[2])\" 2 {t}a {t}b";
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| scene.site.client()).collect();
    clients.iter_mut().for_each(|client| client.post(script));
    let mut seen: Vec<i64> = clients.iter_mut().map(|client| client.reply().int()).collect();
    seen.sort_unstable();
    assert_eq!(seen, (1..=CLIENTS as i64).collect::<Vec<_>>());
    assert_eq!(client.cmd("MGET {t}a {t}b").items(), [bulk(CLIENTS.to_string()), bulk(CLIENTS.to_string())]);
    wait_until_at_rest(&scene);
    assert_eq!((colocations(&scene), away(&scene)), (1, 0));
}

/// Keys are repeatedly moved away while clients use them together, and count their commands.
#[test]
fn nothing_is_lost_or_partial_while_keys_leave_and_return() {
    const ROUNDS: usize = 8;
    let Some(scene) = Scene::with(LONG_TIMEOUT) else { return };
    let mut client = scene.site.client();
    client.cmd("MSET {t}a 0 {t}b 0 {t}c 0 {t}v 0 {t}w 0 {t}r1 round");
    client.cmd("SADD {t}s1 one stays");
    let (stop, turns) = (AtomicBool::new(false), AtomicU64::new(0));
    let address = scene.router().address();
    let repeat = |mut step: Box<dyn FnMut(&mut Client) + Send>| {
        let (stop, turns) = (&stop, &turns);
        move || {
            let mut client = Client::connect(address);
            let mut count = 0_i64;
            while !stop.load(Ordering::Relaxed) {
                step(&mut client);
                count += 1;
                turns.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(1));
            }
            count
        }
    };
    let multi = |client: &mut Client, lines: &[&str]| {
        assert_eq!(client.cmd("MULTI"), ok());
        for line in lines {
            assert_eq!(client.cmd(line), simple("QUEUED"));
        }
        client.cmd("EXEC")
    };
    let watched = AtomicU64::new(0);
    let counts = std::thread::scope(|scope| {
        let watched = &watched;
        let by_script = scope.spawn(repeat(Box::new(|client| {
            let reply =
                client.cmd("EVAL \"local a = redis.call('DECR', KEYS[1]) local b = redis.call('INCR', KEYS[2]) return a + b\" 2 {t}a {t}b");
            assert_eq!(reply, int(0));
        })));
        let by_multi = scope.spawn(repeat(Box::new(move |client| {
            let reply = multi(client, &["DECR {t}a", "INCR {t}b"]);
            assert_eq!(reply.items().iter().map(Value::int).sum::<i64>(), 0, "{reply:?}");
        })));
        let looks = scope.spawn(repeat(Box::new(move |client| {
            let reply = multi(client, &["GET {t}a", "GET {t}b"]);
            let sum = reply.items().iter().map(|value| value.text().parse::<i64>().expect("a number")).sum::<i64>();
            assert_eq!(sum, 0, "half of a transfer: {reply:?}");
        })));
        let single = scope.spawn(repeat(Box::new(|client| assert!(client.cmd("INCR {t}c").error().is_none()))));
        let mut to = ["{t}s1", "{t}s2"];
        let sets = scope.spawn(repeat(Box::new(move |client| {
            assert_eq!(client.cmd(&format!("SMOVE {} {} one", to[0], to[1])), int(1));
            to.reverse();
        })));
        let mut name = ["{t}r1", "{t}r2"];
        let renames = scope.spawn(repeat(Box::new(move |client| {
            assert_eq!(client.cmd(&format!("RENAME {} {}", name[0], name[1])), ok());
            assert_eq!(client.cmd(&format!("GET {}", name[1])), bulk("round"));
            name.reverse();
        })));
        let watches = scope.spawn(repeat(Box::new(move |client| {
            assert_eq!(client.cmd("WATCH {t}v {t}w"), ok());
            let both = client.cmd("MGET {t}v {t}w");
            let next = both.items()[0].text().parse::<u64>().expect("a number") + 1;
            assert_eq!(both.items()[0], both.items()[1]);
            let reply = multi(client, &[&format!("SET {{t}}v {next}"), &format!("SET {{t}}w {next}")]);
            if reply != Value::Nil {
                assert_eq!(reply.items(), [ok(), ok()]);
                watched.store(next, Ordering::Relaxed);
            }
        })));
        let (owner, other) = scene.nodes_of("{t}");
        let (mut rounds, mut tried) = (0, 0);
        while rounds < ROUNDS {
            // Refused while matching keys are being returned. Keys that already live elsewhere do not match.
            let line = format!(
                "move --from {} --to {} --keys {{t}}[bcsrv]* --wait --goal fast",
                owner.address(),
                other.address()
            );
            let said = run_cli(scene.router(), &line);
            rounds += usize::from(said.code == 0);
            tried += 1;
            assert!(
                said.code == 0 || said.err.contains("is part of move") || said.err.contains("no key that lives"),
                "{}",
                said.err
            );
            assert!(tried < 500, "only {rounds} of {tried} moves were started");
            let from = turns.load(Ordering::Relaxed);
            until("clients have gone on", || turns.load(Ordering::Relaxed) > from + 20);
        }
        stop.store(true, Ordering::Relaxed);
        let count = |thread: std::thread::ScopedJoinHandle<'_, i64>| thread.join().expect("a client saw nothing wrong");
        [by_script, by_multi, looks, single, sets, renames, watches].map(count)
    });
    let [by_script, by_multi, _, single, sets, renames, _] = counts;
    let number =
        |client: &mut Client, key: &str| client.cmd(&format!("GET {key}")).text().parse::<i64>().expect("a number");
    assert_eq!(
        (number(&mut client, "{t}a"), number(&mut client, "{t}b")),
        (-by_script - by_multi, by_script + by_multi)
    );
    assert_eq!(number(&mut client, "{t}c"), single);
    let last = watched.load(Ordering::Relaxed) as i64;
    assert_eq!((number(&mut client, "{t}v"), number(&mut client, "{t}w")), (last, last));
    let at = |client: &mut Client, key: &str| client.cmd(&format!("SISMEMBER {key} one"));
    let there = [at(&mut client, "{t}s1"), at(&mut client, "{t}s2")];
    assert_eq!(there, if sets % 2 == 0 { [int(1), int(0)] } else { [int(0), int(1)] });
    assert_eq!(client.cmd(if renames % 2 == 0 { "GET {t}r1" } else { "GET {t}r2" }), bulk("round"));
    assert_eq!(client.cmd("EXISTS {t}r1 {t}r2"), int(1));
    assert!(colocations(&scene) > 0);
    eprintln!("{} co-locating moves, {counts:?} turns", colocations(&scene));
}

#[test]
fn clients_learn_why_keys_cannot_be_returned() {
    let Some(mut scene) = Scene::with(LONG_TIMEOUT) else { return };
    let mut client = scene.site.client();
    client.cmd("MSET {t}a 1 {t}b 2");
    for n in 0..400 {
        client.cmd(&format!("SET {{t}}x{n} {}", "x".repeat(200)));
    }
    scene.part("{t}b");
    let error = |client: &mut Client, line: &str| {
        let answer = client.cmd(line);
        answer.error().unwrap_or_else(|| panic!("{line}: {answer:?}")).to_owned()
    };
    let script = "EVAL \"return redis.call('MGET', KEYS[1], KEYS[2])\" 2 {t}a {t}b";

    // A client bypasses the router at a node.
    let (owner, other) = scene.nodes_of("{t}");
    let (from, to) = (owner.address(), other.address());
    let mut direct = other.client();
    direct.cmd("CLIENT SETNAME billing");
    direct.cmd("SET past-the-router 1");
    let text = error(&mut client, script);
    assert!(text.starts_with("CROSSSLOT") && text.contains(EXAMPLE), "{text}");
    assert!(
        text.contains("were not brought together") && text.contains("is used past this router by 1 client "),
        "{text}"
    );
    direct.cmd("DEL past-the-router");
    drop(direct);
    until("the node has noticed", || other.cmd("CLIENT LIST").text().lines().all(|l| !l.contains("name=billing")));

    // A move of other keys of the slot is paused.
    done(scene.router(), &format!("move --from {from} --to {to} --keys {{t}}x* --goal gentle --max-rate 2k"));
    let id = report(scene.router())["moves"][0]["id"].as_u64().expect("a move");
    done(scene.router(), &format!("moves pause {id}"));
    let text = error(&mut client, script);
    assert!(text.contains(&format!("part of move {id}, which is paused")), "{text}");
    client.cmd("MULTI");
    client.cmd("GET {t}a");
    client.cmd("GET {t}b");
    let text = error(&mut client, "EXEC");
    assert!(text.starts_with("EXECABORT") && text.contains("CROSSSLOT") && text.contains("which is paused"), "{text}");
    assert_eq!(client.cmd("GET {t}b"), bulk("2"));
    // The move is resumed, and with it the next client.
    client.post(script);
    done(scene.router(), &format!("moves max-rate {id} none"));
    done(scene.router(), &format!("moves goal {id} fast"));
    let first = client.reply();
    done(scene.router(), &format!("moves resume {id}"));
    assert!(first.error().is_some_and(|text| text.contains("which is paused")), "{first:?}");
    assert_eq!(client.cmd(script).items(), [bulk("1"), bulk("2")]);
    wait_for(scene.router(), id, "done");
    wait_until_at_rest(&scene);

    // The key's node is down. Its remaining keys are available when the node is.
    scene.part("{t}b");
    let other = usize::from(scene.site.nodes()[1].address() == to);
    scene.site.node_mut(other).kill();
    let text = eventually("the router knows that the node cannot be used", || {
        let answer = scene.site.client().cmd(script);
        answer.error().filter(|text| text.contains("cannot be used")).map(str::to_owned)
    });
    assert!(text.starts_with("CROSSSLOT") && text.contains(&format!("{to} cannot be used")), "{text}");
    assert_eq!(scene.site.client().cmd("GET {t}a"), bulk("1"));
}

/// Clients wait for the colocation, and the other move may take hours.
#[test]
fn a_colocation_does_not_wait_for_other_moves_of_its_nodes() {
    let Some(scene) = Scene::with(LONG_TIMEOUT) else { return };
    let mut client = scene.site.client();
    let (owner, other) = scene.nodes_of("{t}");
    let near = |n: &usize| scene.nodes_of(&format!("{{{n}}}")).0.address() == owner.address();
    let tag = (0..).find(near).expect("half of all slots");
    for n in 0..400 {
        client.cmd(&format!("SET {{{tag}}}x{n} {}", "x".repeat(200)));
    }
    client.cmd("SET {t}a 1");
    scene.part("{t}b");
    let slot = crc16_slot(tag.to_string().as_bytes()).number();
    let line =
        format!("move --from {} --to {} --slots {slot} --goal gentle --max-rate 2k", owner.address(), other.address());
    done(scene.router(), &line);
    wait_for(scene.router(), 2, "running");
    assert_eq!(client.cmd("RENAME {t}a {t}b"), ok());
    assert_eq!(the_move(scene.router(), 2)["state"], "running");
    done(scene.router(), "moves max-rate 2 none");
    done(scene.router(), "moves goal 2 fast");
    wait_for(scene.router(), 2, "done");
    assert_eq!((client.cmd("GET {t}b"), away(&scene)), (bulk("1"), 0));
}

#[test]
fn no_client_waits_longer_than_the_timeout() {
    let Some(scene) = Scene::with("[moves]\ncolocate-timeout = \"300ms\"\n") else { return };
    let mut client = scene.site.client();
    client.cmd("MSET {t}a 1 {t}b 2");
    scene.part("{t}b");
    let (_, other) = scene.nodes_of("{t}");
    other.freeze();
    client.post("RENAME {t}a {t}b");
    // Commands without these keys are not delayed.
    let mut somebody = scene.site.client();
    assert_eq!(somebody.cmd("GET {t}a"), bulk("1"));
    let answer = client.reply();
    other.thaw();
    let text = answer.error().unwrap_or_else(|| panic!("{answer:?}"));
    assert!(
        text.starts_with("CROSSSLOT")
            && text.contains(EXAMPLE)
            && text.contains("were not brought together within 300ms"),
        "{text}"
    );
    assert!(scene.router().metrics().lines().any(|line| line == "switchyard_colocate_refused_total 1"));
    assert_eq!(somebody.cmd("MGET {t}a {t}b").items(), [bulk("1"), bulk("2")], "it was not executed");
    // Later the keys have returned, or return.
    eventually("the node answers again", || client.cmd("RENAME {t}a {t}b") == ok());
    assert_eq!(somebody.cmd("MGET {t}a {t}b").items(), [Value::Nil, bulk("1")]);
}

#[test]
fn a_colocation_continues_after_a_crash() {
    // Enough keys that the move is in progress when the router ends: the wait of a client has no timeout.
    const KEYS: usize = 30_000;
    let config = "[moves]\ncolocate-timeout = \"10m\"\nmax-rate = \"50kb\"\n";
    let Some(mut scene) = Scene::with(config) else { return };
    let mut client = scene.site.client();
    let value = |n: usize| format!("{n} {}", "x".repeat(100));
    let bytes: Vec<u8> = (0..KEYS).flat_map(|n| encode(&["SET", &format!("{{t}}{n}"), &value(n)])).collect();
    client.pipeline(&bytes, KEYS);
    let (owner, other) = scene.nodes_of("{t}");
    let (from, to) = (owner.address(), other.address());
    done(scene.router(), &format!("move --from {from} --to {to} --keys {{t}}* --wait --goal fast --max-rate 1gb"));
    assert_eq!(away(&scene), KEYS as u64);
    let command = "SORT {t}none GET {t}*";
    client.post(command);
    eventually("a move brings them", || colocations(&scene) == 1);
    eventually("keys come home", || the_move(scene.router(), 2)["keys_moved"].as_u64().filter(|keys| *keys > 100));
    let nodes: Vec<SocketAddr> = scene.site.nodes().iter().map(Node::address).collect();
    scene.site.router_mut().process_mut().kill();
    scene.site.router_mut().start_again(&nodes);
    let m = the_move(scene.router(), 2);
    assert_eq!(
        (m["home_for"][0]["command"].as_str(), m["home_for"][0]["keys"].as_u64()),
        (Some("SORT"), Some(KEYS as u64))
    );
    let mut client = scene.site.client();
    client.post(command);
    assert_eq!(client.reply(), Value::Array(Vec::new()));
    wait_for(scene.router(), 2, "done");
    assert_eq!((away(&scene), colocations(&scene)), (0, 1));
    let bytes: Vec<u8> = (0..KEYS).flat_map(|n| encode(&["GET", &format!("{{t}}{n}")])).collect();
    for (n, reply) in client.pipeline(&bytes, KEYS).into_iter().enumerate() {
        let expected = value(n);
        assert_eq!(String::from_utf8_lossy(&reply), format!("${}\r\n{expected}\r\n", expected.len()), "{{t}}{n}");
    }
    let (owner, other) = scene.nodes_of("{t}");
    assert_eq!((owner.cmd("DBSIZE"), other.cmd("DBSIZE")), (int(KEYS as i64), int(0)));
}

/// A function may use any key of the slot, whatever its arguments.
#[test]
fn a_function_causes_the_return_of_all_keys_of_its_slot() {
    const LIBRARY: &str = "#!lua name=of_slots\nredis.register_function('sum', function(keys, args) return redis.call('GET', keys[1]) + redis.call('GET', args[1]) end)\n\
        redis.register_function{function_name='peek', callback=function(keys, args) return redis.call('GET', args[1]) end, flags={'no-writes'}}";
    let Some(scene) = Scene::with(LONG_TIMEOUT) else { return };
    let mut client = scene.site.client();
    client.write(&encode(&["FUNCTION", "LOAD", LIBRARY]));
    let loaded = client.reply();
    if loaded.error().is_some_and(|text| text.contains("unknown command")) {
        eprintln!("skipped: this server has no functions");
        return;
    }
    assert_eq!(loaded, bulk("of_slots"));
    client.cmd("MSET {t}a 1 {t}b 2 {t}other 3");
    let mut asked = 0;
    for (line, reply) in [("FCALL sum 1 {t}a {t}b", int(3)), ("FCALL_RO peek 1 {t}a {t}b", bulk("2"))] {
        scene.part("{t}b");
        scene.part("{t}other");
        assert_eq!(client.cmd(line), reply, "{line}");
        wait_until_at_rest(&scene);
        asked += 1;
        assert_eq!((away(&scene), colocations(&scene)), (0, asked), "{line}");
    }
    // The same within a transaction.
    scene.part("{t}b");
    scene.part("{t}other");
    assert_eq!(client.cmd("MULTI"), ok());
    assert_eq!(client.cmd("FCALL sum 1 {t}a {t}other"), simple("QUEUED"));
    assert_eq!(client.cmd("INCR {t}a"), simple("QUEUED"));
    assert_eq!(client.cmd("EXEC"), Value::Array(vec![int(4), int(2)]));
    wait_until_at_rest(&scene);
    assert_eq!(away(&scene), 0);
}

/// Number of clients blocked at a node.
fn blocked(node: &Node) -> usize {
    let info = node.cmd("INFO clients").text();
    let number = info.lines().find_map(|line| line.strip_prefix("blocked_clients:")).expect("the field");
    number.trim().parse().expect("a number")
}

/// If a move takes some keys of a blocked client away, these are returned, and the client continues to wait. If the keys
/// stay together, it waits where they are.
#[test]
fn a_client_blocked_on_parted_keys_waits_until_they_are_together() {
    let Some(scene) = Scene::with(LONG_TIMEOUT) else { return };
    let (owner, other) = scene.nodes_of("{t}");
    let mut client = scene.site.client();
    let mut asked = 0;
    for (line, element, reply) in [
        ("BLPOP {t}a {t}b 0", "RPUSH {t}b x", Value::Array(vec![bulk("{t}b"), bulk("x")])),
        ("BLMOVE {t}a {t}b LEFT LEFT 0", "RPUSH {t}a x", bulk("x")),
        ("BLMOVE {t}b {t}a LEFT LEFT 0", "RPUSH {t}b x", bulk("x")),
        ("BZPOPMIN {t}a {t}b 0", "ZADD {t}b 1 x", Value::Array(vec![bulk("{t}b"), bulk("x"), bulk("1")])),
        ("BLMPOP 0 2 {t}a {t}b LEFT", "RPUSH {t}b x", Value::Array(vec![bulk("{t}b"), Value::Array(vec![bulk("x")])])),
        (
            "XREAD BLOCK 0 STREAMS {t}a {t}b $ $",
            "XADD {t}b 7-7 f v",
            Value::Array(vec![Value::Array(vec![
                bulk("{t}b"),
                Value::Array(vec![Value::Array(vec![bulk("7-7"), Value::Array(vec![bulk("f"), bulk("v")])])]),
            ])]),
        ),
    ] {
        client.cmd("DEL {t}a {t}b {t}c");
        let (mut waits, mut waits_for_one) = (scene.site.client(), scene.site.client());
        waits.post(line);
        waits_for_one.post("BLPOP {t}c 0");
        until("both wait", || blocked(owner) == 2);
        scene.part("{t}b");
        asked += 1;
        eventually("the key has returned", || (away(&scene), colocations(&scene)) == (0, asked));
        wait_until_at_rest(&scene);
        until("it waits again, and the other client still waits", || blocked(owner) == 2);
        client.cmd(element);
        assert_eq!(waits.reply(), reply, "{line}");
        client.cmd("RPUSH {t}c y");
        assert_eq!(waits_for_one.reply(), Value::Array(vec![bulk("{t}c"), bulk("y")]), "{line}");
        wait_until_at_rest(&scene);

        // Keys that live together elsewhere: the client waits there, and returns with them.
        client.cmd("DEL {t}a {t}b");
        scene.part("{t}a");
        scene.part("{t}b");
        waits.post(line);
        until("it waits where they live", || blocked(other) == 1);
        done(scene.router(), &format!("move --from {} --home --wait", other.address()));
        until("it waits at home", || (blocked(owner), blocked(other)) == (1, 0));
        client.cmd(element);
        assert_eq!(waits.reply(), reply, "{line}");
        assert_eq!((away(&scene), colocations(&scene)), (0, asked), "{line}");
    }
}

/// Before a move, nodes are queried for its keys. A frozen node does not reply.
#[test]
fn a_frozen_node_delays_only_its_own_keys() {
    // Longer than this test takes: a client that waits for the node gets no reply.
    let config = "[nodes]\ncommand-timeout = \"10m\"\n[moves]\ncolocate-timeout = \"2m\"\n".to_owned();
    let Some(site) = Site::router_only(3, &SiteOptions::config(config)) else { return };
    let mut client = site.client();
    let mut owned_by_first = (0..).map(|n| format!("{{{n}}}")).filter(|tag| {
        assert_eq!(client.cmd(&format!("SET {tag}a {tag}")), ok());
        site.nodes()[0].cmd(&format!("EXISTS {tag}a")) == int(1)
    });
    let [one, two, three] = std::array::from_fn(|_| owned_by_first.next().expect("a third of all"));
    drop(owned_by_first);
    let part = |tag: &str, to: usize| {
        let [from, to] = [0, to].map(|place| site.nodes()[place].address());
        done(site.router(), &format!("move --from {from} --to {to} --keys {tag}b --wait"));
    };
    part(&one, 1);
    part(&two, 2);
    site.nodes()[2].freeze();
    let mut held_up = site.client();
    held_up.post(&format!("RENAME {two}a {two}b"));
    until("it waits", || site.router().metrics().lines().any(|line| line == "switchyard_colocate_waits_total 1"));
    let comes_home = |client: &mut Client| {
        assert_eq!(client.cmd(&format!("RENAME {one}a {one}b")), ok());
        assert_eq!(client.cmd(&format!("RENAME {one}b {one}a")), ok());
        eventually("the move has ended", || report(site.router())["moves"].as_array().is_some_and(Vec::is_empty));
    };
    comes_home(&mut client);
    // The node has certainly been queried at this point. In addition, an operator may request moves of other nodes.
    part(&one, 1);
    comes_home(&mut client);
    part(&one, 1);
    let [from, to] = [0, 2].map(|place| site.nodes()[place].address());
    let line = format!("move --from {from} --to {to} --keys {three}b");
    let asked = std::thread::scope(|scope| {
        let before = connections_to(to);
        let asked = scope.spawn(|| run_cli(site.router(), &line));
        // The operator's request waits for the node.
        until("the node is queried", || connections_to(to) > before);
        comes_home(&mut client);
        site.nodes()[2].thaw();
        asked.join().expect("it ends")
    });
    assert!(asked.code == 0, "{}{}", asked.out, asked.err);
    let first = held_up.reply();
    assert!(
        first == ok() || first.error().is_some_and(|text| text.contains("were not brought together within")),
        "{first:?}"
    );
    eventually("it is renamed", || {
        client.cmd(&format!("RENAME {two}a {two}b"));
        client.cmd(&format!("GET {two}b")) == bulk(&*two)
    });
}

/// Number of connections to a server, including connections that it has not accepted.
fn connections_to(server: SocketAddr) -> usize {
    let remote = format!(":{:04X}", server.port());
    let table = std::fs::read_to_string("/proc/net/tcp").expect("the table of connections");
    let is_one = |line: &&str| {
        line.split_whitespace().nth(2).is_some_and(|address| address.ends_with(&remote)) && line.contains(" 01 ")
    };
    table.lines().filter(is_one).count()
}
