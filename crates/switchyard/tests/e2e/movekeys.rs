//! Keys that live elsewhere than their slots: moving them there and back, commands on several of them, and their
//! treatment by other moves.

use std::net::SocketAddr;
use std::time::Duration;

use switchyard_policy::topology::crc16_slot;

use crate::movectl::{done, json, names, refused};
use crate::movectl_history::Recording;
use crate::movectl_moves::{eventually, the_move, wait_for};
use crate::support::{
    Client, Node, NodeOptions, Router, RouterOptions, Site, SiteOptions, Value, bulk, direct, encode, int, ok,
};

/// Two nodes. The first one owns the lower half of the slots.
pub(crate) struct Scene {
    pub(crate) site: Site,
    low: usize,
}

impl Scene {
    pub(crate) fn start() -> Option<Scene> {
        Scene::with("")
    }

    pub(crate) fn with(config: &str) -> Option<Scene> {
        // With CLUSTER commands that count and list the keys of a slot.
        let router =
            RouterOptions { args: vec!["--cluster".to_owned()], config: config.to_owned(), ..RouterOptions::default() };
        let site = Site::router_only(2, &SiteOptions::router(router))?;
        let names = names(&site);
        Some(Scene { low: usize::from(names[1] < names[0]), site })
    }

    pub(crate) fn router(&self) -> &Router {
        self.site.router()
    }

    /// Returns the owner of a key's slot, and the other node.
    pub(crate) fn nodes_of(&self, key: &str) -> (&Node, &Node) {
        let owner = if crc16_slot(key.as_bytes()).number() < 8192 { self.low } else { 1 - self.low };
        (&self.site.nodes()[owner], &self.site.nodes()[1 - owner])
    }

    /// Moves the matching keys away from the slot owner of `pattern`.
    pub(crate) fn part(&self, pattern: &str) {
        let (owner, other) = self.nodes_of(pattern);
        done(
            self.router(),
            &format!("move --from {} --to {} --keys {pattern} --wait", owner.address(), other.address()),
        );
    }

    pub(crate) fn overrides(&self) -> Vec<u64> {
        let nodes = json(self.router(), "nodes list");
        nodes["nodes"]
            .as_array()
            .expect("nodes")
            .iter()
            .map(|node| node["overrides"].as_u64().expect("a number"))
            .collect()
    }

    fn again(&mut self) {
        let nodes: Vec<SocketAddr> = self.site.nodes().iter().map(Node::address).collect();
        self.site.router_mut().restart(&nodes);
    }
}

fn sorted(value: &Value) -> Vec<String> {
    let mut texts: Vec<String> = value.items().iter().map(Value::text).collect();
    texts.sort();
    texts
}

/// Returns all keys by SCAN.
fn scanned(client: &mut Client) -> Vec<String> {
    let (mut keys, mut cursor) = (Vec::new(), "0".to_owned());
    loop {
        let page = client.cmd(&format!("SCAN {cursor} COUNT 7"));
        keys.extend(page.items()[1].items().iter().map(Value::text));
        cursor = page.items()[0].text();
        if cursor == "0" {
            keys.sort();
            return keys;
        }
    }
}

#[test]
fn a_key_moves_alone_and_returns() {
    let Some(mut scene) = Scene::start() else { return };
    let mut client = scene.site.client();
    for n in 0..40 {
        client.cmd(&format!("SET {{t}}{n} {n}"));
    }
    client.cmd("EXPIRE {t}1 1000");
    let (owner, other) = scene.nodes_of("{t}");
    let (from, to) = (owner.address(), other.address());
    let plan = done(scene.router(), &format!("move --from {from} --to {to} --keys {{t}}1* --dry-run"));
    assert!(plan.contains("KEYS") && plan.contains("11") && plan.contains("only planned"), "{plan}");
    assert_eq!(owner.cmd("DBSIZE"), int(40));
    let out = done(scene.router(), &format!("move --from {from} --to {to} --keys {{t}}1* --wait"));
    assert!(out.contains("is done: 11 named keys, 11 keys"), "{out}");
    let report = the_move(scene.router(), 1);
    assert_eq!(
        (report["keys"].as_u64(), report["pattern"].as_str(), report["slots"].as_u64()),
        (Some(11), Some("{t}1*"), Some(1))
    );

    let all: Vec<String> = {
        let mut all: Vec<String> = (0..40).map(|n| format!("{{t}}{n}")).collect();
        all.sort();
        all
    };
    for restarted in [false, true] {
        if restarted {
            scene.again();
        }
        let (owner, other) = scene.nodes_of("{t}");
        let mut client = scene.site.client();
        assert_eq!((owner.cmd("DBSIZE"), other.cmd("DBSIZE")), (int(29), int(11)));
        for n in 0..40 {
            assert_eq!(client.cmd(&format!("GET {{t}}{n}")), bulk(n.to_string()));
        }
        assert!((900..=1000).contains(&client.cmd("TTL {t}1").int()));
        // The keyspace looks the same.
        assert_eq!(client.cmd("DBSIZE"), int(40));
        assert_eq!(sorted(&client.cmd("KEYS *")), all);
        assert_eq!(scanned(&mut client), all);
        let slot = crc16_slot(b"{t}").number();
        assert_eq!(client.cmd(&format!("CLUSTER COUNTKEYSINSLOT {slot}")), int(40));
        assert_eq!(sorted(&client.cmd(&format!("CLUSTER GETKEYSINSLOT {slot} 100"))), all);
        assert_eq!(scene.overrides().iter().sum::<u64>(), 11);
        // A key that is created again stays in its place. A new key that only matches the pattern is not affected.
        client.cmd("DEL {t}12");
        client.cmd("SET {t}12 12");
        assert_eq!(other.cmd("EXISTS {t}12"), int(1));
        client.cmd("SET {t}100 new");
        assert_eq!((owner.cmd("EXISTS {t}100"), client.cmd("DEL {t}100")), (int(1), int(1)));
    }

    let text = refused(scene.router(), &format!("move --from {from} --to {to} --keys {{t}}12"));
    assert!(text.contains(&format!("that key lives at {to}, not at {from}")), "{text}");
    let text = refused(scene.router(), &format!("move --from {from} --to {to} --keys nothing*"));
    assert!(text.contains("no key that lives at"), "{text}");
    let text = refused(scene.router(), &format!("move --from {from} --home"));
    assert!(text.contains("nothing to return"), "{text}");
    let text = refused(scene.router(), &format!("move --from {from} --to {to} --keys a* --protocol source"));
    assert!(text.contains("by the protocol switchyard only"), "{text}");

    // One key returns by its name, the others by --home. A deleted key as well.
    let mut client = scene.site.client();
    client.cmd("DEL {t}15");
    done(scene.router(), &format!("move --from {to} --to {from} --keys {{t}}11 --wait"));
    assert_eq!(scene.overrides().iter().sum::<u64>(), 10);
    let out = done(scene.router(), &format!("move --from {to} --home --wait"));
    assert!(out.contains("10 named keys, 9 keys"), "{out}");
    assert_eq!(scene.overrides(), [0, 0]);
    let (owner, other) = scene.nodes_of("{t}");
    assert_eq!((owner.cmd("DBSIZE"), other.cmd("DBSIZE")), (int(39), int(0)));
    assert_eq!((client.cmd("GET {t}11"), client.cmd("EXISTS {t}15")), (bulk("11"), int(0)));
}

#[test]
fn commands_on_several_keys_are_correct_or_refused() {
    // Commands that need keys together cause their return (`colocate`), unless that is disabled.
    let Some(scene) = Scene::with("[moves]\ncolocate-timeout = \"0s\"\n") else { return };
    let mut client = scene.site.client();
    for line in ["SET {t}a 1", "SET {t}b 2", "SADD {t}s x y", "SADD {t}r y z", "RPUSH {t}l 1 2", "RPUSH {t}m 3"] {
        client.cmd(line);
    }
    for key in ["{t}b", "{t}r", "{t}m", "{t}d"] {
        scene.part(key);
    }
    let (owner, other) = scene.nodes_of("{t}");
    let there = |node: &Node, key: &str| node.cmd(&format!("EXISTS {key}")) == int(1);
    assert!(there(other, "{t}b") && !there(owner, "{t}b") && there(owner, "{t}a"));

    // Commands that work across nodes.
    assert_eq!(client.cmd("MGET {t}a {t}b {t}c"), Value::Array(vec![bulk("1"), bulk("2"), Value::Nil]));
    assert_eq!(client.cmd("MSET {t}a 10 {t}b 20"), ok());
    assert_eq!((owner.cmd("GET {t}a"), other.cmd("GET {t}b")), (bulk("10"), bulk("20")));
    assert_eq!(client.cmd("EXISTS {t}a {t}b {t}c"), int(2));
    assert_eq!(sorted(&client.cmd("SUNION {t}s {t}r")), ["x", "y", "z"]);
    assert_eq!(client.cmd("SINTERSTORE {t}d {t}s {t}r"), int(1));
    assert!(there(other, "{t}d") && !there(owner, "{t}d"), "the destination lives there");
    assert_eq!(client.cmd("COPY {t}a {t}b"), int(0));
    assert_eq!(client.cmd("COPY {t}a {t}b REPLACE"), int(1));
    assert_eq!((client.cmd("GET {t}b"), other.cmd("GET {t}b")), (bulk("10"), bulk("10")));
    assert_eq!(client.cmd("LMPOP 2 {t}none {t}m LEFT").items()[1].items(), [bulk("3")]);
    assert_eq!(client.cmd("SORT {t}l STORE {t}m"), int(2));
    assert!(there(other, "{t}m"));
    assert_eq!(client.cmd("DEL {t}a {t}b {t}c"), int(2));
    client.cmd("MSET {t}a 1 {t}b 2");

    // Other commands are refused with the remedy.
    let hint = format!("switchyard move --from {} --to {} --keys KEY", other.address(), owner.address());
    for line in [
        "RENAME {t}a {t}b",
        "RENAME {t}b {t}c",
        "RENAMENX {t}b {t}c",
        "SMOVE {t}s {t}r x",
        "LMOVE {t}l {t}m LEFT LEFT",
        "MSETNX {t}a 1 {t}b 1",
        "BLPOP {t}l {t}m 1",
        "EVAL \"return redis.call('GET', KEYS[2])\" 2 {t}a {t}b",
        "EVAL \"return redis.call('GET', '{t}b')\" 1 {t}a",
        "EVAL \"return redis.call('GET', ARGV[1])\" 1 {t}b {t}a",
        "SORT {t}l BY {t}w*",
        "SORT {t}l BY {t}w* STORE {t}m",
        "SORT_RO {t}l GET {t}w*",
        "WATCH {t}a {t}b",
    ] {
        let answer = client.cmd(line);
        let error = answer.error().unwrap_or_else(|| panic!("{line}: {answer:?}"));
        assert!(error.starts_with("CROSSSLOT") && error.contains(&hint), "{line}: {error}");
    }
    assert_eq!(
        (client.cmd("GET {t}a"), client.cmd("GET {t}b"), client.cmd("LLEN {t}l")),
        (bulk("1"), bulk("2"), int(2))
    );

    // Commands on one key, or on keys that live together, work.
    assert_eq!(client.cmd("EVAL \"return redis.call('INCR', KEYS[1])\" 1 {t}b"), int(3));
    assert_eq!(client.cmd("RENAME {t}b {t}d"), ok());
    assert_eq!(client.cmd("RENAME {t}d {t}b"), ok());
    assert_eq!(
        client.cmd("EVAL \"return redis.call('MGET', KEYS[1], KEYS[2])\" 2 {t}b {t}d").items(),
        [bulk("3"), Value::Nil]
    );

    // Transactions are executed on one node, or not at all.
    for line in ["MULTI", "INCR {t}b", "SET {t}d 1"] {
        client.cmd(line);
    }
    assert_eq!(client.cmd("EXEC").items(), [int(4), ok()]);
    for (first, second) in [("INCR {t}a", "INCR {t}b"), ("INCR {t}b", "INCR {t}a"), ("MGET {t}a {t}b", "GET {t}a")] {
        client.cmd("MULTI");
        assert_eq!(
            (client.cmd(first), client.cmd(second)),
            (Value::Simple("QUEUED".into()), Value::Simple("QUEUED".into()))
        );
        let answer = client.cmd("EXEC");
        let error = answer.error().unwrap_or_else(|| panic!("{first}, {second}: {answer:?}"));
        assert!(error.starts_with("EXECABORT") && error.contains(&hint), "{error}");
    }
    assert_eq!((client.cmd("GET {t}a"), client.cmd("GET {t}b")), (bulk("1"), bulk("4")));
    for (watched, used, good) in [("{t}b", "{t}b", true), ("{t}a", "{t}b", false), ("{t}b", "{t}a", false)] {
        assert_eq!(client.cmd(&format!("WATCH {watched}")), ok());
        client.cmd("MULTI");
        client.cmd(&format!("GET {used}"));
        let answer = client.cmd("EXEC");
        assert_eq!(answer.error().is_none(), good, "{watched}, {used}: {answer:?}");
    }
    client.cmd("WATCH {t}b");
    scene.site.client().cmd("SET {t}b other");
    client.cmd("MULTI");
    client.cmd("SET {t}b mine");
    assert_eq!((client.cmd("EXEC"), client.cmd("GET {t}b")), (Value::Nil, bulk("other")));
}

#[test]
fn blocked_and_watching_clients_notice_a_moved_key() {
    let Some(scene) = Scene::with("[moves]\ncolocate-timeout = \"0s\"\n") else { return };
    let mut client = scene.site.client();
    let (mut pops, mut stays, mut watches, mut both) =
        (scene.site.client(), scene.site.client(), scene.site.client(), scene.site.client());
    client.cmd("SET {t}k 1");
    pops.post("BLPOP {t}queue 30");
    stays.post("BLPOP {t}other 30");
    both.post("BLPOP {t}queue {t}other 30");
    assert_eq!(watches.cmd("WATCH {t}k"), ok());
    let (owner, other) = scene.nodes_of("{t}");
    let waits = |node: &Node| node.cmd("INFO clients").text().contains("blocked_clients:3");
    crate::support::until("they wait", || waits(owner));
    scene.part("{t}queue");
    scene.part("{t}k");
    let answer = both.reply();
    assert!(answer.error().is_some_and(|text| text.starts_with("CROSSSLOT")), "its keys are parted: {answer:?}");
    let waiting =
        |node: &Node, count: u32| node.cmd("INFO clients").text().contains(&format!("blocked_clients:{count}\r"));
    crate::support::until("each waits where its key lives", || waiting(owner, 1) && waiting(other, 1));
    client.cmd("RPUSH {t}other o");
    client.cmd("RPUSH {t}queue q");
    assert_eq!(pops.reply().items(), [bulk("{t}queue"), bulk("q")]);
    assert_eq!(stays.reply().items(), [bulk("{t}other"), bulk("o")]);
    watches.cmd("MULTI");
    watches.cmd("SET {t}k 2");
    assert_eq!(watches.cmd("EXEC"), Value::Nil, "the key has gone to another node");
    assert_eq!(client.cmd("GET {t}k"), bulk("1"));
    // FLUSHALL reaches the key, and its placement override remains.
    assert_eq!((client.cmd("FLUSHALL"), client.cmd("DBSIZE")), (ok(), int(0)));
    client.cmd("SET {t}k 3");
    assert_eq!(other.cmd("GET {t}k"), bulk("3"));
}

#[test]
fn slots_move_without_their_placement_overrides() {
    let Some(mut scene) = Scene::start() else { return };
    let third = Node::start(&NodeOptions::default());
    done(scene.router(), &format!("nodes add {}", third.address()));
    let mut client = scene.site.client();
    for n in 0..20 {
        client.cmd(&format!("SET {{t}}{n} {n}"));
    }
    let slot = crc16_slot(b"{t}").number();
    let (owner, other) = scene.nodes_of("{t}");
    let (first, second) = (owner.address(), other.address());
    let third_name = third.address();
    done(scene.router(), &format!("move --from {first} --to {second} --keys {{t}}1 --wait"));
    done(scene.router(), &format!("move --from {first} --to {third_name} --keys {{t}}2 --wait"));
    let check = |client: &mut Client, first: i64, second: i64, third_has: i64, scene: &Scene| {
        for n in 0..20 {
            assert_eq!(client.cmd(&format!("GET {{t}}{n}")), bulk(n.to_string()));
        }
        let (owner, other) = scene.nodes_of("{t}");
        assert_eq!(
            (owner.cmd("DBSIZE"), other.cmd("DBSIZE"), third.cmd("DBSIZE")),
            (int(first), int(second), int(third_has))
        );
        assert_eq!(client.cmd("DBSIZE"), int(20));
    };
    check(&mut client, 18, 1, 1, &scene);
    // Moves the slot to the node of one override: that key is no longer an override, and not treated as a leftover. The
    // other override stays.
    done(scene.router(), &format!("move --from {first} --to {second} --slots {slot} --wait"));
    check(&mut client, 0, 19, 1, &scene);
    assert_eq!(scene.overrides().iter().sum::<u64>(), 1);
    // Moves the slot away and back: leftovers of an earlier move are removed, but a key with an override is kept.
    done(scene.router(), &format!("move --from {second} --to {first} --keys {{t}}3 --wait"));
    check(&mut client, 1, 18, 1, &scene);
    done(scene.router(), &format!("move --from {second} --to {first} --slots {slot} --wait"));
    check(&mut client, 19, 0, 1, &scene);
    // A drain also moves keys with overrides. Before that, the node cannot be removed.
    let text = refused(scene.router(), &format!("nodes remove {third_name}"));
    assert!(
        text.contains("1 key was moved to") && text.contains(&format!("switchyard nodes drain {third_name}")),
        "{text}"
    );
    done(scene.router(), &format!("nodes drain {third_name} --wait"));
    check(&mut client, 20, 0, 0, &scene);
    assert_eq!(scene.overrides(), [0, 0, 0]);
    done(scene.router(), &format!("nodes remove {third_name}"));
    scene.again();
    check(&mut scene.site.client(), 20, 0, 0, &scene);
}

/// A router is killed during a move of keys: the next one continues the move.
#[test]
fn a_move_of_keys_continues_after_a_crash() {
    const KEYS: usize = 3000;
    let Some(mut scene) = Scene::start() else { return };
    let mut client = scene.site.client();
    let value = |n: usize| format!("{n} {}", "x".repeat(100));
    let bytes: Vec<u8> = (0..KEYS).flat_map(|n| encode(&["SET", &format!("key:{n}"), &value(n)])).collect();
    client.pipeline(&bytes, KEYS);
    let (low, high) = (&scene.site.nodes()[scene.low], &scene.site.nodes()[1 - scene.low]);
    let (from, to) = (low.address(), high.address());
    let matching = |n: &usize| n % 10 < 5 && crc16_slot(format!("key:{n}").as_bytes()).number() < 8192;
    let count = (0..KEYS).filter(matching).count();
    let lows = (0..KEYS).filter(|n| crc16_slot(format!("key:{n}").as_bytes()).number() < 8192).count();
    done(scene.router(), &format!("move --from {from} --to {to} --keys key:*[01234] --goal gentle --max-rate 50k"));
    assert_eq!(the_move(scene.router(), 1)["keys"].as_u64(), Some(count as u64));
    let text = refused(scene.router(), &format!("move --from {from} --to {to} --keys key:*0"));
    assert!(text.contains("is part of move 1"), "{text}");
    eventually("keys move", || the_move(scene.router(), 1)["keys_moved"].as_u64().filter(|keys| *keys > 100));
    let nodes: Vec<SocketAddr> = scene.site.nodes().iter().map(Node::address).collect();
    scene.site.router_mut().process_mut().kill();
    // As after a copy of a big key in pieces.
    assert_eq!(scene.site.nodes()[1 - scene.low].cmd("SET switchyard:temporary:gone:staging-1-7 piece"), ok());
    scene.site.router_mut().start_again(&nodes);
    let mut client = scene.site.client();
    // Names that never existed wait no longer than others, and are created at their slot owner.
    client.cmd("SET key:another 1");
    assert_eq!(client.cmd("DEL key:another"), int(1));
    let all_there = |client: &mut Client| {
        let bytes: Vec<u8> = (0..KEYS).flat_map(|n| encode(&["GET", &format!("key:{n}")])).collect();
        for (n, reply) in client.pipeline(&bytes, KEYS).into_iter().enumerate() {
            let expected = value(n);
            assert_eq!(String::from_utf8_lossy(&reply), format!("${}\r\n{expected}\r\n", expected.len()), "key:{n}");
        }
    };
    all_there(&mut client);
    scene.router().process().expect_log(&["move 1 resumes"]);
    for line in ["moves max-rate 1 none", "moves goal 1 fast"] {
        crate::movectl::run_cli(scene.router(), line);
    }
    wait_for(scene.router(), 1, "done");
    all_there(&mut client);
    let (low, high) = (&scene.site.nodes()[scene.low], &scene.site.nodes()[1 - scene.low]);
    assert_eq!(
        (low.cmd("DBSIZE"), high.cmd("DBSIZE")),
        (int((lows - count) as i64), int((KEYS - lows + count) as i64))
    );
    assert_eq!(scene.overrides().iter().sum::<u64>(), count as u64);
    scene.again();
    all_there(&mut scene.site.client());
    done(scene.router(), &format!("move --from {to} --home --wait --goal fast"));
    all_there(&mut scene.site.client());
    let (low, high) = (&scene.site.nodes()[scene.low], &scene.site.nodes()[1 - scene.low]);
    assert_eq!((low.cmd("DBSIZE"), high.cmd("DBSIZE")), (int(lows as i64), int((KEYS - lows) as i64)));
}

/// Linearizability of keys that move alone back and forth, while their slots move, too.
#[test]
fn histories_are_linearizable_while_keys_move_back_and_forth() {
    fn name(number: u64) -> String {
        let names = (0..).map(|try_| format!("h:{number}:{try_}"));
        names.into_iter().find(|name| crc16_slot(name.as_bytes()).number() < 8192).expect("half of all names")
    }
    if direct() {
        eprintln!("nothing to check against a plain server");
        return;
    }
    let nodes: Vec<Node> = (0..2).map(|_| Node::start(&NodeOptions::default())).collect();
    let addresses: Vec<SocketAddr> = nodes.iter().map(Node::address).collect();
    let router = Router::start(&addresses, &RouterOptions::default());
    let low = usize::from(addresses[1].to_string() < addresses[0].to_string());
    let (low, high) = (addresses[low], addresses[1 - low]);
    let recording = Recording::start(&[router.address()], name);
    recording.wait_for(50);
    for round in 0..12 {
        let said =
            crate::movectl::run_cli(&router, &format!("move --from {low} --to {high} --keys h:* --wait --goal fast"));
        assert!(said.code == 0 || said.err.contains("no key that lives"), "{}", said.err);
        recording.wait_for(20);
        if round % 4 == 3 {
            done(&router, &format!("move --from {low} --to {high} --slots 0-8191 --wait --goal fast"));
            recording.wait_for(20);
            done(&router, &format!("move --from {high} --to {low} --slots 0-8191 --wait --goal fast"));
        } else {
            let said = crate::movectl::run_cli(&router, &format!("move --from {high} --home --wait --goal fast"));
            assert!(said.code == 0 || said.err.contains("nothing to return"), "{}", said.err);
        }
        recording.wait_for(20);
        std::thread::sleep(Duration::from_millis(20));
    }
    let (tally, keys) = recording.finish().unwrap_or_else(|why| panic!("{why}"));
    assert!(tally.unknown == 0 && tally.broken == 0 && tally.errors.is_empty(), "{tally:?}");
    eprintln!("{} keys: {tally:?}", keys.len());
}
