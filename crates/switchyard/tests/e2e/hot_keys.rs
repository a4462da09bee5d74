//! Most-used keys: by the command line, the admin API and RESP, for all forms of commands. And the permission to read
//! their names.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value as Json;

use crate::movectl::{done, json, refused};
use crate::support::slots::slot;
use crate::support::{Client, RouterOptions, Site, SiteOptions, Value, http, int, ok, until};

/// Enough uses that some are sampled.
const USES: usize = 400;

/// Reported keys with the name of their node.
fn reported(site: &Site) -> Vec<(String, Json)> {
    let report = json(site.router(), "hotkeys --count 256");
    let nodes = report["nodes"].as_array().expect("nodes").clone();
    let of_node = |node: Json| {
        let name = node["node"].as_str().expect("a name").to_owned();
        node["keys"].as_array().expect("keys").iter().map(|key| (name.clone(), key.clone())).collect::<Vec<_>>()
    };
    nodes.into_iter().flat_map(of_node).collect()
}

fn named<'k>(keys: &'k [(String, Json)], name: &str) -> Option<&'k (String, Json)> {
    keys.iter().find(|(_, key)| key["key"] == name)
}

#[test]
fn every_form_of_command_is_counted() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let mut client = site.client();
    let large = "x".repeat(70_000);
    let script = "return redis.call('INCR', KEYS[1])";
    type Form<'f> = &'f dyn Fn(&mut Client);
    let forms: [(&str, Form<'_>); 7] = [
        ("plain", &|client| drop(client.cmd("GET plain"))),
        ("split", &|client| drop(client.cmd("MGET split {other}"))),
        ("queued", &|client| ["MULTI", "INCR queued", "EXEC"].into_iter().for_each(|line| drop(client.cmd(line)))),
        ("script", &|client| assert!(client.call(&["EVAL", script, "1", "script"]).int() > 0)),
        ("blocking", &|client| {
            client.cmd("LPUSH {blocking}full x");
            client.cmd("BLPOP blocking {blocking}full 1");
        }),
        ("large", &|client| assert_eq!(client.call(&["SET", "large", &large]), ok())),
        ("many", &|client| assert_eq!(client.cmd("DEL many {none}"), int(0))),
    ];
    for (name, form) in forms {
        (0..USES).for_each(|_| form(&mut client));
        until(name, || named(&reported(&site), name).is_some());
    }
    // Keys that are no longer used are forgotten.
    until("nothing is used", || done(site.router(), "hotkeys").starts_with("no key is used now\n"));
}

#[test]
fn a_hot_key_is_first_and_names_need_a_permission() {
    let options = SiteOptions::router(RouterOptions::args(&["--set", "clients.default-user-rules=operator"]));
    let Some(site) = Site::router_only(2, &options) else { return };
    let mut client = site.client();
    let hot = "secret:hot";
    let owner = json(site.router(), &format!("where {hot}"))["keys"][0]["node"].clone();
    let mut round = 0;
    let keys = until("it is the hottest", || {
        for number in 0..300 {
            round += 1;
            client.cmd(&format!("GET cold:{round}"));
            client.cmd(&format!("GET {hot}"));
            if number % 3 == 0 {
                client.cmd(&format!("SET {hot} {number}"));
            }
        }
        let keys = reported(&site);
        let (node, key) = named(&keys, hot)?.clone();
        let of_node: Vec<_> = keys.iter().filter(|(of, _)| *of == node).collect();
        (of_node[0].1["key"] == hot && key["writes_per_second"].as_f64() > Some(1.0)).then_some(keys)
    });
    let (node, key) = named(&keys, hot).expect("it is there");
    assert_eq!(*node, owner);
    let rate = |what: &str| key[what].as_f64().expect("a number");
    assert!(
        rate("reads_per_second") > rate("writes_per_second")
            && rate("bytes_per_second") > 20.0 * rate("writes_per_second"),
        "{key}"
    );
    assert!((10.0..=100.0).contains(&rate("percent")), "{key}");
    // The command line shows a table for one node.
    let table = done(site.router(), &format!("hotkeys --node {node} --count 1"));
    assert!(table.starts_with("NODE") && table.lines().nth(1).is_some_and(|line| line.contains(hot)), "{table}");
    // Over HTTP only with the token, which the command line has found by itself.
    let (status, body) = http::get(site.router().admin(), "/api/v1/hotkeys");
    assert!(status == 200 && body.contains("fingerprint") && !body.contains("secret"), "{status} {body}");
    assert_eq!(http::get(site.router().admin(), "/api/v1/hotkeys?count=0").0, 400);
    // Over RESP only for operators.
    let text = |reply: Value| format!("{reply:?}");
    assert!(text(client.cmd("SWITCHYARD HOTKEYS 5")).contains("secret:hot"));
    client.cmd("SWITCHYARD HOTKEYS 1000").expect_error();
    client.cmd("SWITCHYARD HOTKEYS x y").expect_error();
    assert!(refused(site.router(), "hotkeys --node nobody:1").contains("no node"));
}

/// The reported rate is the rate of the load, although only a sample is counted: a steady load on three nodes, mostly
/// on one key.
#[test]
fn the_rate_of_a_hot_key_is_the_rate_of_the_load() {
    let Some(site) = Site::router_only(3, &SiteOptions::default()) else { return };
    let (stop, sent) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = site.client();
            while !stop.load(Ordering::Relaxed) {
                for number in 0..20 {
                    // Writes, because hot copies would answer reads.
                    client.post("INCR hot");
                    client.post(&format!("INCR cold:{number}"));
                }
                (0..40).for_each(|_| drop(client.reply()));
                sent.fetch_add(20, Ordering::Relaxed);
                std::thread::sleep(Duration::from_millis(5));
            }
        });
        let (mut began, mut before) = (Instant::now(), 0);
        until("the rates are alike", || {
            std::thread::sleep(Duration::from_secs(1));
            let now = sent.load(Ordering::Relaxed);
            let rate = (now - before) as f64 / began.elapsed().as_secs_f64();
            (began, before) = (Instant::now(), now);
            let keys = reported(&site);
            let shown = named(&keys, "hot")?.1["writes_per_second"].as_f64()?;
            ((shown / rate - 1.0).abs() <= 0.1).then_some(())
        });
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn users_without_permission_see_no_key_names() {
    let Some(site) = Site::router_only(1, &SiteOptions::default()) else { return };
    let mut client = site.client();
    let seen = until("it is seen", || {
        (0..USES).for_each(|_| drop(client.cmd("GET secret")));
        let text = format!("{:?}", client.cmd("SWITCHYARD HOTKEYS"));
        text.contains("fingerprint").then_some(text)
    });
    assert!(!seen.contains("secret"), "{seen}");
}

/// Keys of the same name in different databases. Replies are counted whether they are forwarded whole, in pieces or in
/// a transaction.
#[test]
fn databases_are_separate_and_replies_are_measured() {
    // Replies from hot copies would take no time of the node.
    let router = RouterOptions::args(&["--set", "hot-copies.mode=off"]);
    let Some(site) = Site::router_only(1, &SiteOptions { router, ..SiteOptions::default() }) else { return };
    let (mut first, mut third) = (site.client(), site.client());
    third.cmd("SELECT 3");
    let (small, large) = ("x".repeat(1000), "x".repeat(2 << 20));
    assert_eq!(first.call(&["SET", "key", &small]), ok());
    assert_eq!(third.call(&["SET", "key", &large]), ok());
    assert_eq!(first.call(&["SET", "queued", &small]), ok());
    until("answers of each are counted", || {
        for _ in 0..60 {
            first.cmd("GET key");
            third.cmd("GET key");
            ["MULTI", "GET queued", "GET queued", "EXEC"].into_iter().for_each(|line| drop(first.cmd(line)));
        }
        let keys = reported(&site);
        let of =
            |name: &str, database: u32| keys.iter().find(|(_, key)| key["key"] == name && key["database"] == database);
        let per_read = |key: &Json| Some(key["reply_bytes_per_second"].as_f64()? / key["reads_per_second"].as_f64()?);
        let small = per_read(&of("key", 0)?.1)?;
        let large = per_read(&of("key", 3)?.1)?;
        let queued = per_read(&of("queued", 0)?.1)?;
        let waits = keys.iter().all(|(_, key)| key["wait_us"].as_f64() > Some(0.0));
        (waits
            && (500.0..=1100.0).contains(&small)
            && (1e6..=2.2e6).contains(&large)
            && (500.0..=1100.0).contains(&queued))
        .then_some(())
    });
}

#[test]
fn the_load_of_each_node_is_shown_with_its_keys() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let mut client = site.client();
    let key = "key";
    let owner = json(site.router(), &format!("where {key}"))["keys"][0]["node"].clone();
    let of_node = |report: &Json, is_owner: bool| -> Json {
        let nodes = report["nodes"].as_array().expect("nodes");
        nodes.iter().find(|node| (node["node"] == owner) == is_owner).expect("both nodes are there").clone()
    };
    let number = |node: &Json, what: &str| node[what].as_f64();
    let value = "x".repeat(3 << 20);
    assert_eq!(client.call(&["SET", key, &value]), ok());
    let report = until("the load is known", || {
        // Writes, because hot copies would answer reads.
        (0..200).for_each(|_| drop(client.cmd(&format!("INCR {{{key}}}number"))));
        let report = json(site.router(), "hotkeys");
        let (busy, idle) = (of_node(&report, true), of_node(&report, false));
        let is_known = number(&busy, "requests_per_second") > Some(20.0)
            && number(&busy, "cpu_percent") > Some(0.0)
            && number(&busy, "answer_us") > Some(0.0)
            && number(&idle, "cpu_percent").is_some();
        is_known.then_some(report)
    });
    let (busy, idle) = (of_node(&report, true), of_node(&report, false));
    assert!(number(&busy, "answer_us") < Some(1e6) && number(&busy, "cpu_percent") < Some(1000.0), "{busy}");
    // Only one node has the large value.
    assert!(number(&busy, "memory_bytes") > number(&idle, "memory_bytes").map(|bytes| bytes + 2e6), "{report}");
    // The other node has no traffic, but is listed.
    assert!(
        number(&idle, "requests_per_second") < number(&busy, "requests_per_second")
            && idle["keys"] == serde_json::json!([]),
        "{idle}"
    );
    // The same data as one value, with response times and slots, and over RESP.
    let (status, body) = http::get(site.router().admin(), "/api/v1/load");
    let load: Json = serde_json::from_str(&body).expect("JSON");
    let busy_load = of_node(&load, true);
    assert!(
        status == 200
            && number(&busy_load, "p50_us") > Some(0.0)
            && number(&busy_load, "p99_us") >= number(&busy_load, "p50_us"),
        "{body}"
    );
    let slot = u64::from(slot(key.as_bytes()));
    let hottest = until("slots are counted", || {
        (0..200).for_each(|_| drop(client.cmd(&format!("INCR {{{key}}}number"))));
        let load: Json = serde_json::from_str(&http::get(site.router().admin(), "/api/v1/load").1).expect("JSON");
        Some(load["slots"][0].clone()).filter(|slot| !slot.is_null())
    });
    assert!(hottest["slot"] == slot && hottest["node"] == owner, "{body}");
    assert!(
        number(&hottest, "writes_per_second") > Some(1.0)
            && number(&hottest, "bytes_per_second") > number(&hottest, "commands_per_second"),
        "{body}"
    );
    assert!(format!("{:?}", client.cmd("SWITCHYARD LOAD")).contains("p99_us"));
    let table = done(site.router(), "hotkeys");
    let row = |node: &Json| {
        let name = node["node"].as_str().expect("a name");
        table
            .lines()
            .skip_while(|line| !line.is_empty())
            .find(|line| line.starts_with(name))
            .expect("its row")
            .to_owned()
    };
    assert!(row(&busy).contains(" us ") && row(&busy).contains('%') && row(&busy).contains(" MB"), "{table}");
    assert!(row(&idle).contains('%'), "{table}");
    // A limit is shown as soon as the node has one, because each node is queried every second.
    let node = site.nodes().iter().find(|node| busy["node"] == node.address().to_string()).expect("the node");
    assert_eq!(node.cmd("CONFIG SET maxmemory 64mb"), ok());
    until("its limit", || of_node(&json(site.router(), "hotkeys"), true)["memory_max_bytes"] == 64 << 20);
}
