//! The planner with real servers: it observes, explains and acts, and can be disabled.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use serde_json::Value as Json;

use crate::movectl::{done, json, refused};
use crate::support::slots::slot;
use crate::support::{Client, Node, RouterOptions, Site, SiteOptions, Value, encode, http, ok, until_within};

/// Time to measure a load, decide, move, and evaluate.
const TIMEOUT: Duration = Duration::from_secs(240);

/// Rounds per pipeline of the load: two writes of hot keys, and one of a cold key.
const ROUNDS: usize = 8;

fn site(mode: &str) -> Option<Site> {
    let mode = format!("planner.mode={mode}");
    let args = [
        "--set",
        mode.as_str(),
        "--set",
        "planner.min-requests=50",
        "--set",
        "planner.window=1s",
        "--set",
        "planner.interval=200ms",
        "--set",
        "planner.headroom=60",
    ];
    let args = [&args[..], &["--set", "hot-copies.mode=off", "--set", "telemetry.sample=1"]].concat();
    Site::router_only(3, &SiteOptions::router(RouterOptions::args(&args)))
}

fn at(site: &Site, key: &str) -> Json {
    json(site.router(), &format!("where {key}"))["keys"][0].clone()
}

/// Returns two keys of one slot, without a hash tag. Of three nodes with a limit of 1.6 shares, each key fits at another
/// node, even after all cold keys of its own node have moved there. The slot fits at no other node, and exceeds the limit
/// of its own. So only a move of one of these keys brings all nodes below their limits.
fn keys_of_one_slot() -> Vec<String> {
    let mut names = (0..).map(|number| format!("hot:{number}"));
    let first = names.next().expect("a name");
    let second = names.find(|name| slot(name.as_bytes()) == slot(first.as_bytes())).expect("a name");
    vec![first, second]
}

/// Returns four keys of one node, in different slots.
fn keys_of_one_node(site: &Site) -> Vec<String> {
    let first = at(site, "hot")["owner"].clone();
    (0..).map(|number| format!("hot:{number}")).filter(|name| at(site, name)["owner"] == first).take(4).collect()
}

/// Sends two thirds of a load to the hot keys, and one third to cold keys of all nodes, until `body` ends. No write of a
/// hot key may be lost.
fn skewed(site: &Site, hot: &[String], body: impl FnOnce()) {
    let mut client = site.client();
    // One by one, because an MGET on keys of several slots is not atomic.
    let mut sum = || -> i64 {
        let count = |value: Value| if value == Value::Nil { 0 } else { value.text().parse().expect("a number") };
        hot.iter().map(|key| count(client.cmd(&format!("GET {key}")))).sum()
    };
    let before = sum();
    let (stop, written) = (AtomicBool::new(false), AtomicI64::new(0));
    let load = |mut client: Client| {
        let (mut hot, mut cold) = (hot.iter().cycle(), (0..3000).cycle().map(|number| format!("cold:{number}")));
        while !stop.load(Ordering::Relaxed) {
            // A pipeline, so that the load does not depend on how soon this thread gets a processor for each reply.
            let mut bytes = Vec::new();
            for cold in cold.by_ref().take(ROUNDS) {
                hot.by_ref().take(2).for_each(|key| bytes.extend(encode(&["INCR", key])));
                bytes.extend(encode(&["SET", &cold, "x"]));
            }
            client.write(&bytes);
            for _ in 0..ROUNDS {
                (0..2).for_each(|_| assert!(client.reply().int() > 0));
                assert_eq!(client.reply(), ok());
            }
            written.fetch_add(2 * ROUNDS as i64, Ordering::Relaxed);
            // The moves need a processor, too.
            std::thread::sleep(Duration::from_millis(10));
        }
    };
    /// Stops the load even if `body` fails.
    struct Ends<'s>(&'s AtomicBool);
    impl Drop for Ends<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    std::thread::scope(|scope| {
        let _ends = Ends(&stop);
        (0..2).for_each(|_| drop(scope.spawn(|| load(site.client()))));
        body();
    });
    assert_eq!(sum() - before, written.load(Ordering::Relaxed), "no write is lost");
}

fn relocated(site: &Site, keys: &[String]) -> bool {
    keys.iter().any(|key| at(site, key)["relocated"] == true)
}

/// Whether a plan or a decision moves one of these keys alone.
fn moves_one(plan: &Json, keys: &[String]) -> bool {
    let steps = plan["steps"].as_array();
    steps.is_some_and(|steps| steps.iter().any(|step| keys.iter().any(|key| step["key"] == key.as_str())))
}

fn decisions(site: &Site) -> Vec<Json> {
    json(site.router(), "plan history")["decisions"].as_array().cloned().unwrap_or_default()
}

#[test]
fn a_node_with_hot_keys_is_relieved_with_a_reason() {
    let Some(mut site) = site("on") else { return };
    let hot = keys_of_one_slot();
    skewed(&site, &hot, || {
        until_within(TIMEOUT, "keys were moved", || relocated(&site, &hot));
        until_within(TIMEOUT, "the outcome was evaluated", || {
            decisions(&site)
                .iter()
                .any(|decision| decision["outcome"].as_str().is_some_and(|outcome| outcome.contains("% of its limit")))
        });
    });
    // An earlier decision may have found nothing to move, because keys had no measured load yet.
    let all = decisions(&site);
    let first = all.iter().rev().find(|decision| moves_one(decision, &hot)).expect("a decision about these keys");
    assert_eq!(first["by"], "planner");
    assert!(
        first["message"].as_str().is_some_and(|message| message.contains("its limit is") && message.contains("moving")),
        "{first}"
    );
    // The same decision on the recorded numbers.
    let again = json(site.router(), &format!("plan replay {}", first["id"]));
    assert_eq!(
        (&again["steps"], &again["message"], &again["nodes"]),
        (&first["steps"], &first["message"], &first["nodes"])
    );
    assert!(refused(site.router(), "plan replay 999").contains("there is no decision 999"));
    let addresses: Vec<_> = site.nodes().iter().map(crate::support::Node::address).collect();
    site.router_mut().restart(&addresses);
    let has_message = |decision: &Json| decision["id"] == first["id"] && decision["message"] == first["message"];
    assert!(decisions(&site).iter().any(has_message), "decisions survive a restart");
}

#[test]
fn an_observing_planner_moves_nothing_by_itself() {
    let Some(site) = site("observe") else { return };
    assert!(refused(site.router(), "plan --apply").contains("there is nothing to do"));
    let hot = keys_of_one_slot();
    skewed(&site, &hot, || {
        until_within(TIMEOUT, "it has decided", || !decisions(&site).is_empty());
        assert!(!relocated(&site, &hot) && json(site.router(), "moves")["open"].as_array().is_none_or(Vec::is_empty));
        let plan = until_within(TIMEOUT, "hot keys should move", || {
            let plan = json(site.router(), "plan");
            moves_one(&plan, &hot).then_some(plan)
        });
        assert!(["relieved", "partly"].contains(&plan["verdict"].as_str().expect("a verdict")), "{plan}");
        // Key names need a permission.
        let (status, body) = http::get(site.router().admin(), "/api/v1/plan");
        assert!(status == 200 && !body.contains("hot:"), "{status} {body}");
        assert!(done(site.router(), "plan --load x2").contains("limit"));
        assert!(refused(site.router(), "plan --policy nobody").contains("makris-ffd"));
        let leaver = plan["nodes"][2]["node"].as_str().expect("a name").to_owned();
        let without = json(site.router(), &format!("plan --without {leaver}"));
        assert!(
            without["steps"]
                .as_array()
                .expect("steps")
                .iter()
                .any(|step| step["from"] == leaver.as_str() && step["what"] == "slots")
        );
        // A plan is computed again when it is applied, from the load of that time.
        let applied = until_within(TIMEOUT, "the moves of such a plan have started", || {
            let said = crate::movectl::run_cli(site.router(), "plan --apply");
            assert!(said.code != 0 || said.out.contains("has started as"), "{}", said.out);
            decisions(&site).into_iter().find(|decision| decision["by"] != "planner" && moves_one(decision, &hot))
        });
        until_within(TIMEOUT, "keys were moved", || relocated(&site, &hot));
        // Undo, which is possible only once.
        let id = applied["id"].as_u64().expect("a number");
        until_within(TIMEOUT, "the decision is undone", || {
            crate::movectl::run_cli(site.router(), &format!("plan undo {id}")).code == 0
        });
        until_within(TIMEOUT, "keys are home", || !relocated(&site, &hot));
        until_within(TIMEOUT, "nothing is left to undo", || {
            crate::movectl::run_cli(site.router(), &format!("plan undo {id}")).err.contains("nothing that decision")
        });
    });
    assert!(refused(site.router(), "plan undo 999").contains("there is no decision 999"));
}

#[test]
fn a_node_short_of_memory_moves_slots_to_nodes_with_room() {
    let Some(site) = site("on") else { return };
    let mut client = site.client();
    let value = "x".repeat(10_000);
    for number in 0..3000 {
        assert_eq!(client.cmd(&format!("SET key:{number} {value}")), Value::Simple("OK".into()));
    }
    let node = &site.nodes()[0];
    let used = |node: &Node| -> u64 {
        let info = node.cmd("INFO memory").text();
        info.lines()
            .find_map(|line| line.strip_prefix("used_memory:"))
            .expect("a field")
            .trim()
            .parse()
            .expect("a number")
    };
    let most = used(node) * 3 / 4;
    node.cmd(&format!("CONFIG SET maxmemory {most}"));
    until_within(TIMEOUT, "the node uses less than nine tenths", || used(node) < most / 10 * 9);
    let all = decisions(&site);
    let is_about_memory = |decision: &Json| {
        decision["message"].as_str().is_some_and(|message| message.contains("of memory, and its limit is"))
    };
    assert!(all.iter().any(is_about_memory), "{all:?}");
    done(site.router(), "automation off");
    until_within(TIMEOUT, "no move is open", || {
        json(site.router(), "moves")["moves"].as_array().is_none_or(Vec::is_empty)
    });
    assert!((0..3000).all(|number| client.cmd(&format!("STRLEN key:{number}")).int() == 10_000), "no key is lost");
    // The other nodes have no room, however little data the moves left at this node.
    for other in &site.nodes()[1..] {
        other.cmd(&format!("CONFIG SET maxmemory {}", used(other) * 20 / 19));
    }
    let name = json(site.router(), "nodes")["nodes"][0]["address"].as_str().expect("a name").to_owned();
    until_within(TIMEOUT, "missing room is reported", || {
        done(site.router(), &format!("nodes drain {name} --dry-run")).contains("room is missing")
    });
}

#[test]
fn one_switch_stops_all_automation_permanently() {
    let Some(mut site) = site("on") else { return };
    assert!(done(site.router(), "automation").starts_with("automation acts"));
    assert!(done(site.router(), "automation off").starts_with("automation does not act: automation is switched off"));
    let hot = keys_of_one_slot();
    skewed(&site, &hot, || {
        until_within(TIMEOUT, "it has decided", || !decisions(&site).is_empty());
        assert!(!relocated(&site, &hot));
        // Without the switch, it would already have acted.
        until_within(TIMEOUT, "it continues to evaluate the load", || json(site.router(), "plan")["verdict"] != "fine");
        assert!(
            !relocated(&site, &hot)
                && decisions(&site)
                    .iter()
                    .all(|decision| decision["applied"].is_null() && decision["outcome"].is_null())
        );
    });
    let addresses: Vec<_> = site.nodes().iter().map(crate::support::Node::address).collect();
    site.router_mut().restart(&addresses);
    assert!(done(site.router(), "automation").starts_with("automation does not act"));
    let mut client = site.client();
    client.cmd("SWITCHYARD AUTOMATION ON").expect_error();
    assert!(done(site.router(), "automation on").starts_with("automation acts"));
    skewed(&site, &hot, || until_within(TIMEOUT, "keys were moved", || relocated(&site, &hot)));
}

#[test]
fn slots_are_balanced_by_the_measured_load() {
    let Some(site) = site("off") else { return };
    let hot = keys_of_one_node(&site);
    skewed(&site, &hot, || {
        let said = until_within(TIMEOUT, "slots should move", || {
            let plan = json(site.router(), "balance --by load --dry-run");
            (!plan["moves"].as_array()?.is_empty()).then_some(plan)
        });
        assert!(said["notes"][0].as_str().is_some_and(|message| message.contains("its limit is")), "{said}");
        until_within(TIMEOUT, "a busy slot has another owner", || {
            // Refused while the previous moves are in progress.
            crate::movectl::run_cli(site.router(), "balance --by load");
            let owners: Vec<Json> = hot.iter().map(|key| at(&site, key)["owner"].clone()).collect();
            owners.iter().any(|owner| *owner != owners[0])
        });
        assert!(!relocated(&site, &hot));
    });
}
