//! Placement rules: keys of one tag work together on several nodes, and rules change while clients use the keys.

use std::net::SocketAddr;
use std::time::Duration;

use serde_json::Value as Json;
use switchyard_policy::topology::{Rule, RuleSet, Ruled, crc16_slot};

use crate::movectl::{done, json, names, refused, run_cli};
use crate::movectl_history::Recording;
use crate::movectl_moves::{eventually, wait_for};
use crate::support::{Client, NodeOptions, Router, Site, SiteOptions, Value, bulk, encode, ok};

pub(crate) const RULES: &str =
    "[[placement.rule]]\nkeys = [\"bull:{queue}:*\"]\n\n[[placement.rule]]\nkeys = [\"rq:*\"]\ntag = \"rq\"\n";

/// Configuration of a router that keeps keys together only by rules.
const REFUSE: &str = "[clients]\ncross-slot = \"refuse\"\n\n";

/// A router that keeps keys together only by these rules.
fn only_by_rules() -> SiteOptions {
    SiteOptions::config(format!("{REFUSE}{RULES}"))
}

/// Options of an adoption that takes some seconds for [`KEYS`] keys.
pub(crate) const SLOWLY: &str = "--goal gentle --max-rate 100kb";

pub(crate) const KEYS: usize = 6_000;

const QUEUES: usize = 8;

fn name(number: usize) -> String {
    format!("bull:q{}:key:{number}", number % QUEUES)
}

fn value(number: usize) -> String {
    format!("{number} {}", "x".repeat(60))
}

pub(crate) fn fill(client: &mut Client) {
    let bytes: Vec<u8> = (0..KEYS).flat_map(|n| encode(&["SET", &name(n), &value(n)])).collect();
    assert!(client.pipeline(&bytes, KEYS).into_iter().all(|reply| reply == b"+OK\r\n"));
}

#[track_caller]
pub(crate) fn all_there(client: &mut Client) {
    let bytes: Vec<u8> = (0..KEYS).flat_map(|n| encode(&["GET", &name(n)])).collect();
    for (number, reply) in client.pipeline(&bytes, KEYS).into_iter().enumerate() {
        let expected = value(number);
        assert_eq!(String::from_utf8_lossy(&reply), format!("${}\r\n{expected}\r\n", expected.len()), "{number}");
    }
}

/// The report of the rules, with the state of an adoption.
pub(crate) fn report(router: &Router) -> Json {
    json(router, "rules list")
}

#[track_caller]
pub(crate) fn until_adopted(router: &Router) -> Json {
    eventually("the adoption ends", || Some(report(router)).filter(|report| report["adoption"].is_null()))
}

/// Fails unless all keys of each queue are at the node of the queue's slot.
#[track_caller]
pub(crate) fn keys_are_at_their_tags(site: &Site) {
    let router = site.router();
    for queue in 0..QUEUES {
        let told = json(router, &format!("where q{queue}"));
        let home = told["keys"][0]["node"].as_str().expect("a node").to_owned();
        for node in site.nodes() {
            let keys = node.cmd(&format!("KEYS bull:q{queue}:key:*")).items().len();
            let is_home = node.address().to_string() == home;
            assert!(
                if is_home { keys == KEYS.div_ceil(QUEUES) } else { keys == 0 },
                "queue {queue}: {keys} at {}",
                node.address()
            );
        }
    }
}

#[test]
fn keys_of_one_tag_work_together_on_several_nodes() {
    let Some(site) = Site::router_only(3, &only_by_rules()) else { return };
    let mut client = site.client();
    assert_eq!(report(site.router())["number"], 1, "the first start has the configured rules");
    for command in ["RPUSH bull:mail:wait a b", "SET bull:mail:meta 7", "SET rq:job:1 x", "SADD rq:queues q"] {
        assert_eq!(client.cmd(command).error(), None, "{command}");
    }
    assert_eq!(client.cmd("RPOPLPUSH bull:mail:wait bull:mail:active"), bulk("b"));
    assert_eq!(client.cmd("BLMOVE bull:mail:wait bull:mail:active LEFT RIGHT 1"), bulk("a"));
    assert_eq!(client.cmd("RENAME rq:job:1 rq:job:2"), ok());
    for (command, reply) in [
        ("WATCH bull:mail:meta", ok()),
        ("MULTI", ok()),
        ("INCR bull:mail:meta", Value::Simple("QUEUED".into())),
        ("SADD bull:mail:done 1", Value::Simple("QUEUED".into())),
        ("EXEC", Value::Array(vec![Value::Int(8), Value::Int(1)])),
    ] {
        assert_eq!(client.cmd(command), reply, "{command}");
    }
    let undeclared = "return redis.call('LRANGE', 'bull:mail:active', 0, -1)";
    let both = Value::Array(vec![bulk("b"), bulk("a")]);
    assert_eq!(client.call(&["EVAL", undeclared, "1", "bull:mail:meta"]), both);
    let foreign = client.call(&["EVAL", undeclared, "1", "bull:sms:meta"]);
    assert!(foreign.error().is_some_and(|text| text.contains("bull:mail:active")), "{foreign:?}");
    // The tag of a sorted key determines its slot, not its whole name.
    let sorted = client.cmd("SORT bull:mail:active BY {bull:mail:active}:*");
    assert!(sorted.error().is_some_and(|text| text.contains("BY")), "{sorted:?}");
    // A hash tag in the name wins, and channels have no rules.
    let crossed = client.cmd("RENAME rq:{other} rq:job:2");
    assert!(crossed.error().is_some_and(|text| text.starts_with("CROSSSLOT")), "{crossed:?}");
    assert_eq!(client.cmd("CLUSTER KEYSLOT rq:x"), Value::Int(i64::from(crc16_slot(b"rq:x").number())));
    let checked = done(site.router(), "rules check bull:mail:wait rq:{other} plain");
    for part in ["bull:{queue}:*", "its own hash tag", "no rule"] {
        assert!(checked.contains(part), "{checked}");
    }
}

/// Patterns of each kind, with keys that match, nearly match, and match several.
const PATTERNS: [(&str, Option<&str>); 7] = [
    ("a:{x}:*", None),
    ("b.{x...}.y", None),
    ("c{x}", None),
    ("{x}-d*", None),
    ("e*", Some("t")),
    ("exact", Some("t")),
    ("a*", Some("rest")),
];

const NAMES: [&str; 24] = [
    "a:1:x", "a:1:y", "a:1", "a:2:", "a::x", "a:}:x", "a:1}2:z", "b.1.y", "b.1.2.y", "b.1.yy", "b..y", "c1", "c1}2",
    "c}1", "c", "1-d", "1-dx", "-d", "e", "e1", "exact", "{1}", "x{1}y", "other",
];

/// These rules, and as tables of the configuration.
fn set(patterns: &[(&str, Option<&str>)]) -> (Ruled, String) {
    let rule = |(keys, tag): &(&str, Option<&str>)| Rule { keys: vec![(*keys).into()], tag: tag.map(str::to_owned) };
    let table = |(keys, tag): &(&str, Option<&str>)| {
        let tag = tag.map(|tag| format!("tag = \"{tag}\"\n")).unwrap_or_default();
        format!("[[placement.rule]]\nkeys = [\"{keys}\"]\n{tag}\n")
    };
    let rules = RuleSet::new(patterns.iter().map(rule).collect()).expect("valid rules");
    (Ruled::first(rules), patterns.iter().map(table).collect())
}

/// Replaces the rules in the configuration, and reloads it.
fn reload(router: &Router, rules: &str) {
    let file = router.config_file();
    let before = std::fs::read_to_string(&file).expect("a file");
    let (head, _) = before.split_once("[[placement.rule]]").unwrap_or((&before, ""));
    std::fs::write(&file, format!("{head}\n{rules}")).expect("written");
    router.process().signal(rustix::process::Signal::HUP);
    eventually("the configuration is reloaded", || !report(router)["configured"].is_null());
}

#[test]
fn scripts_may_use_exactly_the_keys_of_their_slots() {
    let ((one, first), (other, second)) = (set(&PATTERNS), set(&PATTERNS[3..]));
    let Some(site) = Site::router_only(2, &SiteOptions::config(format!("{REFUSE}{first}"))) else { return };
    let (router, mut client) = (site.router(), site.client());
    let bytes: Vec<u8> = (0..2000).flat_map(|n| encode(&["SET", &format!("a:{n}:k"), &value(n)])).collect();
    assert!(client.pipeline(&bytes, 2000).into_iter().all(|reply| reply == b"+OK\r\n"));
    let mut permitted = |declared: &str, used: &str| {
        let reply = client.call(&["EVAL", "local k = ARGV[1] return redis.call('EXISTS', k)", "1", declared, used]);
        assert!(reply.error().is_none_or(|text| text.contains("touches the key")), "{reply:?}");
        reply.error().is_none()
    };
    let pairs = || NAMES.iter().flat_map(|declared| NAMES.iter().map(move |used| (*declared, *used)));
    for (declared, used) in pairs() {
        let same = one.slot_of(declared.as_bytes()) == one.slot_of(used.as_bytes());
        assert_eq!(permitted(declared, used), same, "{declared} {used}");
    }
    reload(router, &second);
    done(router, "rules adopt --goal gentle --max-rate 20kb");
    done(router, "rules pause");
    assert_eq!(report(router)["adoption"]["state"], "paused");
    for (declared, used) in pairs() {
        let same = [&one, &other].iter().all(|ruled| {
            let tag = |key: &str| ruled.tag(key.as_bytes()).unwrap_or(key.as_bytes()).to_vec();
            tag(declared) == tag(used)
        });
        assert_eq!(permitted(declared, used), same, "{declared} {used}");
    }
}

#[test]
fn functions_may_use_keys_of_the_tag_after_an_adoption() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let mut client = site.client();
    let library = "#!lua name=q\nredis.register_function('take', function(k, a) return redis.call('GET', a[1]) end)";
    let loaded = client.call(&["FUNCTION", "LOAD", library]);
    if loaded.error().is_some() {
        return eprintln!("no functions before Redis 7.0");
    }
    fill(&mut client);
    let take = |client: &mut Client, key: &str, other: &str| client.call(&["FCALL", "take", "1", key, other]);
    assert!(take(&mut client, &name(0), &name(QUEUES)).error().is_some());
    done(site.router(), "rules adopt --preset bullmq");
    until_adopted(site.router());
    eventually("nodes have libraries for the rules", || {
        take(&mut client, &name(0), &name(QUEUES)) == bulk(value(QUEUES))
    });
    assert!(take(&mut client, &name(0), &name(1)).error().is_some(), "keys of other queues stay forbidden");
    let code = client.cmd("FUNCTION LIST WITHCODE");
    assert!(
        format!("{code:?}").contains("redis.register_function") && !format!("{code:?}").contains("local function A")
    );
}

#[test]
fn an_adoption_moves_keys_once_while_clients_use_them() {
    let Some(site) = Site::router_only(3, &SiteOptions::default()) else { return };
    let router = site.router();
    let mut client = site.client();
    fill(&mut client);
    let planned = done(router, "rules adopt --preset bullmq --dry-run");
    assert!(planned.contains("keys would move to another node") && planned.contains("KEYS AFTER"), "{planned}");
    assert_eq!(report(router)["number"], 0);
    let mut waiting = site.client();
    waiting.post("BLPOP bull:q3:blocked 60");
    let recording = Recording::start(&[site.address()], |number| format!("bull:q{}:h:{number}", number % 5));
    recording.wait_for(100);
    done(router, &format!("rules adopt --preset bullmq {SLOWLY}"));
    let begun = report(router);
    assert_eq!(begun["adoption"]["state"], "running", "{begun}");
    let mut later = site.client();
    later.post("BLPOP bull:q3:blocked 60");
    recording.wait_for(300);
    // All existing keys are found by a SCAN during the adoption.
    let mut found = std::collections::BTreeSet::new();
    let mut cursor = "0".to_owned();
    loop {
        let page = client.cmd(&format!("SCAN {cursor} MATCH bull:*:key:* COUNT 500"));
        found.extend(page.items()[1].items().iter().map(Value::text));
        cursor = page.items()[0].text();
        if cursor == "0" {
            break;
        }
    }
    assert_eq!(found.len(), KEYS);
    until_adopted(router);
    // Clients that wait for a key are served in their order, also if rules changed in between.
    for (client, value) in [(&mut waiting, "first"), (&mut later, "second")] {
        assert_eq!(site.client().cmd(&format!("RPUSH bull:q3:blocked {value}")), Value::Int(1));
        assert_eq!(client.reply(), Value::Array(vec![bulk("bull:q3:blocked"), bulk(value)]));
    }
    recording.wait_for(100);
    let (tally, keys) = recording.finish().expect("linearizable");
    assert_eq!((tally.broken, tally.errors.keys().count()), (0, 0), "{tally:?}");
    assert!(!keys.is_empty());
    all_there(&mut client);
    keys_are_at_their_tags(&site);
    let moved: u64 = crate::movectl_moves::report(router)["ended"]
        .as_array()
        .expect("moves")
        .iter()
        .map(|one| one["keys_moved"].as_u64().expect("a number"))
        .sum();
    assert!(moved < KEYS as u64, "each key moves at most once, and keys at their node do not move: {moved}");
    assert!(site.router().metrics().contains("switchyard_placement_rules_number 1\n"));
}

/// Commands queued before a change of rules are not executed at the former node of a key.
#[test]
fn a_change_of_rules_aborts_transactions_checked_by_earlier_rules() {
    let one_tag = "[[placement.rule]]\nkeys = [\"app:*\"]\ntag = \"app\"\n";
    let Some(site) = Site::router_only(2, &SiteOptions::config(format!("{REFUSE}{one_tag}"))) else { return };
    let router = site.router();
    let node_of = |key: &str| json(router, &format!("where {key}"))["keys"][0]["node"].clone();
    let home = node_of("app:x");
    let at = |is_home: bool| {
        (0..).map(|n| format!("app:{n}:k")).find(|key| {
            let tag = key.split(':').nth(1).expect("a number");
            (node_of(tag) == home) == is_home
        })
    };
    let (stays, leaves) = (at(true).expect("a key"), at(false).expect("a key"));
    let script = "return redis.call('SET', ARGV[1], 'lost')";
    let commands =
        [(Some(stays.as_str()), vec!["SET", &leaves, "lost"]), (None, vec!["EVAL", script, "1", &stays, &leaves])];
    let mut clients: Vec<Client> = commands.iter().map(|_| site.client()).collect();
    assert_eq!(site.client().cmd(&format!("SET {leaves} kept")), ok());
    for (client, (watched, command)) in clients.iter_mut().zip(&commands) {
        if let Some(key) = watched {
            assert_eq!(client.cmd(&format!("WATCH {key}")), ok());
        }
        assert_eq!(client.cmd("MULTI"), ok());
        assert_eq!(client.call(command), Value::Simple("QUEUED".into()));
    }
    reload(router, "[[placement.rule]]\nkeys = [\"app:{n}:*\"]\n");
    done(router, "rules adopt");
    until_adopted(router);
    for (client, (_, command)) in clients.iter_mut().zip(&commands) {
        let reply = client.cmd("EXEC");
        assert!(reply.error().is_some_and(|text| text.starts_with("EXECABORT")), "{command:?}: {reply:?}");
    }
    assert_eq!(site.client().cmd(&format!("GET {leaves}")), bulk("kept"));
    let copies: usize = site.nodes().iter().map(|node| node.cmd(&format!("KEYS {leaves}")).items().len()).sum();
    assert_eq!(copies, 1);
}

#[test]
fn shard_channels_have_no_rules_in_transactions_and_scripts() {
    let Some(site) = Site::router_only(2, &only_by_rules()) else { return };
    let mut client = site.client();
    let reply = client.call(&["EVAL", "return redis.call('SPUBLISH', KEYS[1], 'm')", "1", "bull:mail:events"]);
    assert!(reply.error().is_some_and(|text| text.contains("may not call spublish")), "{reply:?}");
    if client.cmd("SPUBLISH x m").error().is_some() {
        return eprintln!("no shard channels before Redis 7.0");
    }
    for queue in 0..8 {
        let channel = format!("bull:q{queue}:events");
        let mut subscriber = site.client();
        subscriber.cmd(&format!("SSUBSCRIBE {channel}"));
        client.cmd("MULTI");
        assert_eq!(client.cmd(&format!("SPUBLISH {channel} m")), Value::Simple("QUEUED".into()));
        assert_eq!(client.cmd("EXEC"), Value::Array(vec![Value::Int(1)]), "{channel}");
        assert_eq!(subscriber.reply(), Value::Array(vec![bulk("smessage"), bulk(&channel), bulk("m")]));
        client.cmd("MULTI");
        client.cmd(&format!("SET bull:q{queue}:k 1"));
        assert!(client.cmd(&format!("SPUBLISH {channel} m")).expect_error().starts_with("CROSSSLOT"), "{channel}");
        client.cmd("DISCARD");
    }
}

#[test]
fn a_killed_router_continues_an_adoption() {
    let node = NodeOptions::args(&["--appendonly", "yes"]);
    let Some(mut site) = Site::router_only(2, &SiteOptions { node, ..SiteOptions::default() }) else { return };
    let nodes: Vec<SocketAddr> = site.nodes().iter().map(crate::support::Node::address).collect();
    fill(&mut site.client());
    done(site.router(), &format!("rules adopt --preset bullmq {SLOWLY}"));
    for _ in 0..3 {
        std::thread::sleep(Duration::from_millis(400));
        site.router_mut().process_mut().kill();
        site.router_mut().start_again(&nodes);
        let report = report(site.router());
        assert_eq!(report["adoption"]["state"], "running", "{report}");
    }
    site.node_mut(1).kill();
    site.node_mut(1).restart();
    until_adopted(site.router());
    all_there(&mut site.client());
    keys_are_at_their_tags(&site);
    assert_eq!(report(site.router())["number"], 1);
}

#[test]
fn an_adoption_can_be_paused_and_abandoned() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let router = site.router();
    fill(&mut site.client());
    let before: Vec<i64> = site.nodes().iter().map(|node| node.cmd("DBSIZE").int()).collect();
    assert!(refused(router, "rules pause").contains("no adoption"));
    done(router, &format!("rules adopt --preset bullmq {SLOWLY}"));
    let left = |report: &Json| report["adoption"]["groups_left"].as_u64();
    eventually("keys move", || crate::movectl_moves::the_move(router, 1)["keys_moved"].as_u64().filter(|n| *n > 50));
    done(router, "rules pause");
    assert_eq!(report(router)["adoption"]["state"], "paused");
    wait_for(router, 1, "paused");
    let again = refused(router, "rules adopt --preset rq");
    assert!(again.contains("an adoption of rules is in progress"), "{again}");
    done(router, "rules resume");
    eventually("groups arrive", || {
        let report = report(router);
        left(&report).filter(|left| Some(*left) < report["adoption"]["groups"].as_u64())
    });
    done(router, "rules abandon");
    done(router, "rules pause");
    assert_eq!(report(router)["adoption"]["state"], "paused");
    done(router, "rules resume");
    let ended = until_adopted(router);
    assert_eq!(ended["rules"].as_array().map(Vec::len), Some(0), "{ended}");
    let after: Vec<i64> = site.nodes().iter().map(|node| node.cmd("DBSIZE").int()).collect();
    assert_eq!(after, before, "all keys are back");
    all_there(&mut site.client());
}

#[test]
fn moves_and_adoptions_wait_for_each_other() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let (router, names) = (site.router(), names(&site));
    fill(&mut site.client());
    let move_all = format!("move --from {} --to {} --all", names[0], names[1]);
    done(router, &format!("{move_all} {SLOWLY}"));
    let told = done(router, "rules adopt --preset bullmq");
    assert!(told.contains("the adoption waits: move 1 is in progress"), "{told}");
    let waiting = report(router);
    assert_eq!((&waiting["adoption"]["state"], &waiting["number"]), (&Json::from("requested"), &Json::from(0)));
    // The adoption that waits is paused, and not the move that it waits for.
    done(router, "rules pause");
    assert_eq!(crate::movectl_moves::the_move(router, 1)["state"], "running");
    done(router, "rules resume");
    done(router, "moves abort 1");
    until_adopted(router);
    done(router, &format!("rules adopt --none {SLOWLY}"));
    let passage = format!("move --from {} --to {} --slots 16384", names[0], names[1]);
    for order in [&move_all, &passage] {
        let text = refused(router, order);
        assert!(text.contains("an adoption of placement rules is in progress"), "{text}");
    }
    let text = refused(router, &move_all);
    assert!(text.contains("an adoption of placement rules is in progress"), "{text}");
    refused(router, &format!("nodes drain {}", names[0]));
    done(router, "rules abandon");
    until_adopted(router);
    all_there(&mut site.client());
}

#[test]
fn changed_rules_in_the_configuration_wait_for_an_order() {
    let Some(site) = Site::router_only(2, &SiteOptions::config("[placement]\nadopt = \"ask\"\n")) else { return };
    let router = site.router();
    fill(&mut site.client());
    reload(router, RULES);
    assert_eq!(report(router)["configured"].as_array().map(Vec::len), Some(2));
    assert_eq!(report(router)["number"], 0);
    assert!(router.process().log().contains("switchyard rules adopt"));
    done(router, "rules adopt");
    assert_eq!(until_adopted(router)["number"], 1);
    keys_are_at_their_tags(&site);
    // During an adoption, a reload waits for its end.
    done(router, &format!("rules adopt --none {SLOWLY}"));
    let file = router.config_file();
    let rules = "[placement]\nadopt = \"auto\"\n[[placement.rule]]\npreset = \"rq\"\n";
    std::fs::write(&file, rules).expect("written");
    router.process().signal(rustix::process::Signal::HUP);
    eventually("changed rules are adopted without an order", || report(router)["number"] == 3);
    assert_eq!(report(router)["rules"][0]["keys"][0], "rq:*");
    all_there(&mut site.client());
    // Without rules in the configuration, the rules in force need an order to be removed.
    std::fs::write(&file, "[placement]\nadopt = \"ask\"\n").expect("written");
    router.process().signal(rustix::process::Signal::HUP);
    let lacking = "rules are in force that the configuration lacks";
    eventually("the configuration has no rules", || router.process().log().contains(lacking));
    assert!(refused(router, "rules adopt").contains("no [[placement.rule]]"));
    assert_eq!(report(router)["number"], 3);
    assert_eq!(run_cli(router, "rules check bull:q1:x").code, 0);
}

/// Commands with keys of two queues each, as an application uses them.
fn use_together(client: &mut Client, is_refused: bool) {
    for queue in 0..20 {
        let [wait, active, meta] = ["wait", "active", "meta"].map(|part| format!("jobs:q{queue}:{part}"));
        assert_eq!(client.cmd(&format!("RPUSH {wait} 1")).error(), None);
        let moved = client.cmd(&format!("LMOVE {wait} {active} LEFT RIGHT"));
        client.cmd("MULTI");
        client.cmd(&format!("SET {meta} 1"));
        let queued = client.cmd(&format!("DEL {active}"));
        let done = client.cmd("EXEC");
        assert_eq!((moved.error().is_some(), done.error().is_some()), (is_refused, is_refused), "{moved:?} {done:?}");
        if is_refused {
            assert!(moved.expect_error().contains("with the pattern jobs:{name}:* would"), "{moved:?}");
            assert!(queued.expect_error().contains("with the pattern jobs:{name}:* would"), "{queued:?}");
        }
    }
}

#[test]
fn rules_are_learned_from_keys_that_clients_use_together() {
    let Some(site) = Site::router_only(1, &SiteOptions::config(REFUSE)) else { return };
    assert!(done(site.router(), "rules learn").contains("no rules are needed"));
    use_together(&mut site.client(), false);
    let learned = eventually("the groups are sampled", || {
        let text = done(site.router(), "rules learn");
        text.contains("[[placement.rule]]").then_some(text)
    });
    assert!(learned.contains("keys = [\"jobs:{name}:*\"]") && !learned.contains("less than 95 %"), "{learned}");
    let joining = crate::support::Node::start(&NodeOptions::default());
    let text = refused(site.router(), &format!("nodes add {}", joining.address()));
    assert!(text.contains("switchyard rules learn"), "{text}");
    let proposed = json(site.router(), "rules learn");
    assert_eq!((&proposed["is_enough"], &proposed["together_now"]), (&Json::from(true), &Json::from(0)), "{proposed}");
    // Patterns may be names of keys.
    let (status, text) = crate::support::http::get(site.router().admin(), "/api/v1/rules/learn");
    assert!(status == 200 && text.contains("\"proposed\":1") && !text.contains("jobs"), "{text}");
}

#[test]
fn learned_rules_are_adopted_without_an_order_if_configured() {
    let Some(site) = Site::router_only(2, &SiteOptions::config("[placement]\nadopt = \"auto\"\n")) else { return };
    let mut client = site.client();
    let use_queues = |client: &mut Client| {
        for queue in 0..40 {
            client.cmd(&format!("RPUSH jobs:q{queue}:wait 1"));
            client.cmd(&format!("LMOVE jobs:q{queue}:wait jobs:q{queue}:active LEFT RIGHT"));
        }
    };
    eventually("learned rules are in force", || {
        use_queues(&mut client);
        report(site.router())["number"] == 1
    });
    use_together(&mut client, false);
    // Removed rules are not adopted again.
    done(site.router(), "rules adopt --none");
    until_adopted(site.router());
    for _ in 0..30 {
        use_queues(&mut client);
        std::thread::sleep(Duration::from_millis(100));
    }
    let after = report(site.router());
    assert_eq!((&after["number"], after["adoption"].is_null()), (&Json::from(2), true), "{after}");
}

#[test]
fn learned_rules_serve_refused_commands_on_two_nodes() {
    let Some(site) = Site::router_only(2, &SiteOptions::config(format!("{REFUSE}[placement]\nadopt = \"ask\"\n")))
    else {
        return;
    };
    let mut client = site.client();
    use_together(&mut client, true);
    use_together_until_learned(&mut client, site.router());
    let learned = done(site.router(), "rules learn");
    let rules: String = learned
        .lines()
        .filter(|line| line.starts_with("[[") || line.starts_with("keys = "))
        .map(|line| format!("{line}\n"))
        .collect();
    reload(site.router(), &rules);
    done(site.router(), "rules adopt");
    until_adopted(site.router());
    use_together(&mut client, false);
}

fn use_together_until_learned(client: &mut Client, router: &Router) {
    eventually("refused commands are sampled", || {
        for queue in 0..40 {
            let [wait, active] = ["wait", "active"].map(|part| format!("jobs:q{queue}:{part}"));
            client.cmd(&format!("LMOVE {wait} {active} LEFT RIGHT"));
        }
        done(router, "rules learn").contains("jobs:{name}:*")
    });
}

/// Commands of libraries and their keys, from the sources of the libraries. Scripts are shorter, but use the same keys.
const LIBRARIES: [(&str, &[&str]); 6] = [
    (
        "bullmq",
        &[
            "EVAL \"redis.call('INCR', KEYS[1] .. 'id'); return redis.call('LPUSH', KEYS[2], 1)\" 2 bull:mail: bull:mail:wait",
            "BZPOPMIN bull:mail:marker 0.01",
            "XREAD BLOCK 10 STREAMS bull:mail:events $",
        ],
    ),
    (
        "sidekiq",
        &[
            "SADD queues default",
            "LPUSH queue:default job",
            "BRPOP queue:critical queue:default queue:low 2",
            "MULTI",
            "UNLINK queue:default",
            "SREM queues default",
            "EXEC",
            "MULTI",
            "SADD processes worker-7:1:abc",
            "EXISTS worker-7:1:abc",
            "HSET worker-7:1:abc busy 0",
            "EXPIRE worker-7:1:abc 60",
            "RPOP worker-7:1:abc-signals",
            "EXEC",
            "MSET stat:processed 1 stat:failed 0",
            "MGET stat:processed:2026-01-01 stat:failed:2026-01-01",
            "EVAL \"return redis.call('ZRANGE', KEYS[1], '-inf', ARGV[1], 'BYSCORE')\" 1 schedule 5",
        ],
    ),
    (
        "horizon",
        &[
            "EVAL \"redis.call('RPUSH', KEYS[1], ARGV[1]); return redis.call('RPUSH', KEYS[2], 1)\" 2 laravel_database_queues:mail laravel_database_queues:mail:notify job",
            "EVAL \"local job = redis.call('LPOP', KEYS[1]); redis.call('ZADD', KEYS[2], 60, job); redis.call('LPOP', KEYS[3]); return job\" 3 laravel_database_queues:mail laravel_database_queues:mail:reserved laravel_database_queues:mail:notify",
            "EVAL \"redis.call('ZREM', KEYS[2], ARGV[1]); return redis.call('ZADD', KEYS[1], 9, ARGV[1])\" 2 laravel_database_queues:mail:delayed laravel_database_queues:mail:reserved job",
            "BLPOP laravel_database_queues:mail:notify 0.01",
            "EVAL \"redis.call('HINCRBY', KEYS[1], 'throughput', 1); return redis.call('SADD', KEYS[2], KEYS[1])\" 2 laravel_horizon:job:Mail laravel_horizon:measured_jobs",
            "EVAL \"redis.call('HSET', ARGV[1], 'status', 'x'); return redis.call('ZCARD', KEYS[1])\" 2 laravel_horizon:recent_jobs laravel_horizon:pending_jobs laravel_horizon:7",
        ],
    ),
    (
        "celery",
        &[
            "LPUSH celery message",
            "BRPOP celery \"celery\\x06\\x163\" \"celery\\x06\\x166\" \"celery\\x06\\x169\" 1",
            "MULTI",
            "ZADD unacked_index 1 tag",
            "HSET unacked tag message",
            "EXEC",
            "WATCH unacked",
            "MULTI",
            "ZREM unacked_index tag",
            "HDEL unacked tag",
            "RPUSH celery message",
            "EXEC",
            "MULTI",
            "SETEX celery-task-meta-7 60 done",
            "PUBLISH celery-task-meta-7 done",
            "EXEC",
            "MULTI",
            "RPUSH celery-taskset-meta-1.j done",
            "GET celery-taskset-meta-1",
            "GET celery-taskset-meta-1.s",
            "EXEC",
            "MGET celery-task-meta-7 celery-task-meta-8",
        ],
    ),
    (
        "rq",
        &[
            "MULTI",
            "SADD rq:queues rq:queue:default",
            "HSET rq:job:1 status queued",
            "RPUSH rq:queue:default 1",
            "EXEC",
            "BLPOP rq:queue:high rq:queue:default 1",
            "WATCH rq:job:1:dependents",
            "MULTI",
            "HSET rq:worker:a current_job 1",
            "ZADD rq:wip:default 1 1",
            "HSET rq:job:1 status started",
            "EXEC",
        ],
    ),
    (
        "arq",
        &[
            "WATCH arq:job:1",
            "EXISTS arq:job:1 arq:result:1",
            "MULTI",
            "PSETEX arq:job:1 60000 job",
            "ZADD arq:queue 1 1",
            "EXEC",
            "MULTI",
            "SETEX arq:result:1 60 done",
            "ZREM arq:abort 1",
            "ZREM arq:queue 1",
            "DEL arq:retry:1 arq:job:1 arq:in-progress:1",
            "EXEC",
        ],
    ),
];

#[test]
fn presets_serve_recorded_commands_of_their_libraries() {
    let rule = |(name, _): &(&str, _)| format!("[[placement.rule]]\npreset = \"{name}\"\n");
    let heartbeat = "[[placement.rule]]\nkeys = [\"processes\", \"worker-*\"]\ntag = \"sidekiq-processes\"\n";
    let rules: String = LIBRARIES.iter().map(rule).chain([heartbeat.to_owned()]).collect();
    let Some(site) = Site::router_only(3, &SiteOptions::config(&rules)) else { return };
    for (name, commands) in LIBRARIES {
        let mut client = site.client();
        for command in commands {
            let reply = client.cmd(command);
            assert_eq!(reply.error(), None, "{name}: {command}");
            assert!(*command != "EXEC" || matches!(reply, Value::Array(_)), "{name}: {reply:?}");
        }
    }
}
