//! Monitoring and control of hot copies: report, eviction, suspension, reloads, metrics. Another module tests the
//! correctness of replies.
//!
//! All keys that are read are copied here (`admission = "all"`), so that no test depends on load.

use serde_json::Value as Json;

use crate::movectl::{done, json, run_cli};
use crate::support::{Client, Node, NodeOptions, Router, RouterOptions, Site, SiteOptions, bulk, http, ok, until};

const ALL: [&str; 4] = ["--set", "hot-copies.admission=all", "--set", "clients.default-user-rules=operator"];

fn site(args: &[&str]) -> Option<Site> {
    Site::router_only(1, &SiteOptions::router(RouterOptions::args(args)))
}

/// Returns a number of the report.
fn figure(client: &mut Client, name: &str) -> i64 {
    client.cmd("SWITCHYARD HOTCOPIES").field(name).int()
}

/// Reads a key until copies answer.
fn warm(client: &mut Client, key: &str, value: &str) {
    until("copies answer", || {
        let before = figure(client, "hits");
        assert_eq!(client.cmd(&format!("GET {key}")), bulk(value));
        figure(client, "hits") > before
    });
}

/// Number of reads that copies answer, over all workers.
fn hits_of_reads(site: &Site, key: &str, value: &str) -> i64 {
    let mut clients: Vec<Client> = (0..8).map(|_| site.client()).collect();
    let before = figure(&mut clients[0], "hits");
    for client in &mut clients {
        (0..5).for_each(|_| assert_eq!(client.cmd(&format!("GET {key}")), bulk(value)));
    }
    figure(&mut clients[0], "hits") - before
}

#[test]
fn the_report_is_the_same_over_resp_http_and_the_command_line() {
    let Some(site) = site(&ALL) else { return };
    let mut client = site.client();
    assert_eq!(client.cmd("SET key value"), ok());
    warm(&mut client, "key", "value");
    let seen = json(site.router(), "hot-copies");
    let (status, body) = http::get(site.router().admin(), "/api/v1/hot-copies");
    assert_eq!((status, serde_json::from_str::<Json>(&body).expect("JSON")), (200, seen.clone()));
    for name in ["keys", "copies", "bytes", "hits", "fills", "invalidations"] {
        assert_eq!(seen[name].as_i64(), Some(figure(&mut client, name)), "{name} of {seen}");
    }
    assert!(seen["hits"].as_u64() > Some(0) && seen["bytes"].as_u64() > Some(5) && seen["keys"] == 1, "{seen}");
    assert_eq!(seen["discarded"].as_object().map(|by_why| by_why.len()), Some(7), "{seen}");
    let shown = done(site.router(), "hot-copies");
    assert!(shown.starts_with("hot copies: on\nmay have copies   1 key\n"), "{shown}");
    // In RESP3 as a map.
    client.cmd("HELLO 3");
    assert_eq!(client.cmd("SWITCHYARD HOTCOPIES").field("state"), bulk("on"));
    // INFO and the metrics have the same numbers.
    let info = client.cmd("INFO hot_copies").text();
    let metrics = site.router().metrics();
    let sample =
        |name: &str| metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse::<f64>().ok());
    for (name, figure) in [("hits", &seen["hits"]), ("fills", &seen["fills"])] {
        assert!(info.lines().any(|line| line == format!("hot_copies_{name}:{figure}")), "{name} of {seen}: {info}");
        assert_eq!(sample(&format!("switchyard_hot_copies_{name}_total")), figure.as_f64(), "{metrics}");
    }
    assert_eq!(sample("switchyard_hot_copies_invalidations_total"), seen["invalidations"].as_f64(), "{metrics}");
    for (name, figure) in [("", &seen["copies"]), ("_bytes", &seen["bytes"]), ("_keys", &seen["keys"])] {
        assert_eq!(sample(&format!("switchyard_hot_copies{name}")), figure.as_f64(), "{metrics}");
    }
    assert_eq!(sample("switchyard_hot_copies_enabled"), Some(1.0));
    for (why, count) in seen["discarded"].as_object().expect("by why") {
        assert_eq!(
            sample(&format!("switchyard_hot_copies_discarded_total{{reason=\"{why}\"}}")),
            count.as_f64(),
            "{why}: {metrics}"
        );
    }
}

#[test]
fn evicted_keys_are_read_from_the_node_again() {
    let Some(site) = site(&ALL) else { return };
    let mut client = site.client();
    for key in ["user:1", "user:2"] {
        assert_eq!(client.cmd(&format!("SET {key} v")), ok());
        warm(&mut client, key, "v");
    }
    // An evicted key is read from the node again. The other key is not.
    let asked = |client: &mut Client, key: &str| {
        let before = figure(client, "fills");
        assert_eq!(client.cmd(&format!("GET {key}")), bulk("v"));
        figure(client, "fills") > before
    };
    // Nothing else ends a copy in the meantime.
    assert!(!asked(&mut client, "user:1") && !asked(&mut client, "user:2"));
    let evicted_over = |client: &mut Client, evict: &dyn Fn(&mut Client), others: bool| {
        evict(client);
        assert_eq!((asked(client, "user:1"), asked(client, "user:2")), (true, others));
        ["user:1", "user:2"].into_iter().for_each(|key| warm(client, key, "v"));
    };
    let resp = |line: &'static str| {
        move |client: &mut Client| {
            let said = client.cmd(line);
            assert_eq!((said.error(), said.field("state")), (None, bulk("on")), "{line}");
        }
    };
    evicted_over(&mut client, &resp("SWITCHYARD HOTCOPIES EVICT KEY user:1"), false);
    evicted_over(&mut client, &resp("switchyard hotcopies evict prefix user:"), true);
    evicted_over(&mut client, &resp("SWITCHYARD HOTCOPIES EVICT ALL"), true);
    let cli = |line: &'static str| {
        let router = site.router();
        move |_: &mut Client| assert!(done(router, line).contains("all present copies"), "{line}")
    };
    evicted_over(&mut client, &cli("hot-copies evict --key user:1"), false);
    evicted_over(&mut client, &cli("hot-copies evict --prefix us"), true);
    evicted_over(&mut client, &cli("hot-copies evict --all"), true);
    for line in [
        "SWITCHYARD HOTCOPIES EVICT",
        "SWITCHYARD HOTCOPIES EVICT KEY",
        "SWITCHYARD HOTCOPIES NOW",
        "SWITCHYARD HOTCOPIES OFF 5",
    ] {
        assert!(client.cmd(line).expect_error().contains("wrong arguments"), "{line}");
    }
    for line in ["hot-copies evict", "hot-copies evict --key a --all"] {
        assert_eq!(run_cli(site.router(), line).code, 2, "{line}");
    }
    let log = site.router().process().log();
    assert!(log.contains("asked: evict the hot copies of a key") && !log.contains("user:1"), "{log}");
}

#[test]
fn the_switch_stops_every_worker_at_once() {
    let Some(site) = site(&ALL) else { return };
    let mut client = site.client();
    assert_eq!(client.cmd("SET key 0"), ok());
    let mut value = 0;
    let router = site.router();
    let over_resp =
        |client: &mut Client, word: &str| client.cmd(&format!("SWITCHYARD HOTCOPIES {word}")).field("state").text();
    let by_command = |_: &mut Client, word: &str| {
        done(router, &format!("hot-copies {}", word.to_lowercase()));
        json(router, "hot-copies")["state"].as_str().expect("a state").to_owned()
    };
    type Way<'w> = &'w dyn Fn(&mut Client, &str) -> String;
    let ways: [Way<'_>; 2] = [&over_resp, &by_command];
    for way in ways {
        warm(&mut client, "key", &value.to_string());
        until("copies answer at more than one worker", || hits_of_reads(&site, "key", &value.to_string()) > 30);
        assert_eq!(way(&mut client, "OFF"), "suspended");
        assert_eq!(hits_of_reads(&site, "key", &value.to_string()), 0);
        assert!(router.metrics().contains("\nswitchyard_hot_copies_enabled 0\n"));
        assert!(done(router, "hot-copies").contains("SUSPENDED"));
        value += 1;
        assert_eq!(client.cmd(&format!("SET key {value}")), ok());
        // Neither a repeated command nor an eviction enables them.
        assert_eq!(way(&mut client, "OFF"), "suspended");
        assert_eq!(client.cmd("SWITCHYARD HOTCOPIES EVICT ALL").field("state"), bulk("suspended"));
        assert_eq!(hits_of_reads(&site, "key", &value.to_string()), 0);
        assert_eq!(way(&mut client, "ON"), "on");
    }
    warm(&mut client, "key", &value.to_string());
    let log = router.process().log();
    assert!(log.contains("asked: switch hot copies off") && log.contains("asked: switch hot copies on"), "{log}");
}

#[test]
fn users_without_permission_may_view_but_not_change() {
    let Some(site) = site(&ALL[..2]) else { return };
    let mut client = site.client();
    assert_eq!(client.cmd("SWITCHYARD HOTCOPIES").field("state"), bulk("on"));
    for line in ["EVICT ALL", "EVICT KEY k", "EVICT PREFIX k", "OFF", "ON"] {
        assert!(client.cmd(&format!("SWITCHYARD HOTCOPIES {line}")).expect_error().starts_with("NOPERM"), "{line}");
    }
    assert_eq!(client.cmd("SWITCHYARD HOTCOPIES").field("state"), bulk("on"));
    let help = client.cmd("SWITCHYARD HELP");
    assert!(help.items().iter().any(|line| line.text().starts_with("HOTCOPIES |")), "{help:?}");
}

/// Excluded keys are read from their nodes as soon as the reload returns. Other keys are not affected.
#[test]
fn a_reload_takes_effect_at_once() {
    let config = |section: &str| format!("[clients]\ndefault-user-rules = [\"operator\"]\n[hot-copies]\n{section}\n");
    let Some(site) = Site::router_only(1, &SiteOptions::config(config("admission = \"all\""))) else { return };
    let mut client = site.client();
    for key in ["secret:1", "plain:1"] {
        assert_eq!(client.cmd(&format!("SET {key} v")), ok());
        warm(&mut client, key, "v");
    }
    let reload = |section: &str| {
        std::fs::write(site.router().config_file(), config(section)).expect("written");
        site.router().process().signal(rustix::process::Signal::HUP);
    };
    for section in ["admission = \"all\"\nexclude = [\"secret:\"]", "admission = \"all\"\nallow = [\"plain:\"]"] {
        reload(section);
        until("the key has no copies any more", || hits_of_reads(&site, "secret:1", "v") == 0);
        warm(&mut client, "plain:1", "v");
        assert_eq!(hits_of_reads(&site, "secret:1", "v"), 0, "{section}");
        assert_eq!(figure(&mut client, "keys"), 1, "{section}");
        reload("admission = \"all\"");
        warm(&mut client, "secret:1", "v");
    }
    reload("mode = \"off\"");
    until("they are off", || client.cmd("SWITCHYARD HOTCOPIES").field("state") == bulk("off"));
    until("none is left", || (figure(&mut client, "copies"), figure(&mut client, "keys")) == (0, 0));
    assert_eq!(hits_of_reads(&site, "plain:1", "v"), 0);
    assert!(done(site.router(), "hot-copies on").contains("hot-copies.mode"));
    reload("admission = \"all\"");
    warm(&mut client, "plain:1", "v");
}

/// A second router may serve the node, or an earlier run of this router may have left uncertain state.
#[test]
fn a_node_with_possible_unseen_writes_gets_no_copies() {
    if crate::support::direct() {
        return;
    }
    for (right, reason) in [("client|list", "CLIENT LIST"), ("acl|setuser", "ACL SETUSER")] {
        let node = Node::start(&NodeOptions::default());
        let mut admin = node.client();
        admin.cmd("ACL SETUSER admin on nopass ~* &* +@all");
        admin.cmd("AUTH admin x");
        assert_eq!(admin.cmd(&format!("ACL SETUSER default -{right}")), ok());
        let router = Router::start(&[node.address()], &RouterOptions::args(&ALL));
        let mut client = Client::connect(router.address());
        assert_eq!(client.cmd("SET key value"), ok());
        let why = until("the report names it", || {
            assert_eq!(client.cmd("GET key"), bulk("value"));
            json(&router, "hot-copies")["refused"][&node.address().to_string()].as_str().map(str::to_owned)
        });
        assert!(why.contains(reason), "{why}");
        assert_eq!(figure(&mut client, "hits"), 0);
    }
}

#[test]
fn a_node_without_change_reports_is_named_with_its_reason() {
    for right in ["client|tracking", "pttl"] {
        let Some(site) = site(&ALL) else { return };
        let mut client = site.client();
        let node = &site.nodes()[0];
        assert_eq!(node.cmd(&format!("ACL SETUSER default -{right}")), ok());
        assert_eq!(client.cmd("SET key value"), ok());
        let name = node.address().to_string();
        let why = until("the reason is reported", || {
            assert_eq!(client.cmd("GET key"), bulk("value"));
            json(site.router(), "hot-copies")["refused"][&name].as_str().map(str::to_owned)
        });
        assert!(why.contains(right), "{why}");
        assert!(done(site.router(), "hot-copies").contains(&format!("no copies from {name}: {why}")));
        assert_eq!(figure(&mut client, "hits"), 0);
        assert!(done(site.router(), "status").contains("ready: every slot is served"), "the node still serves");
        assert_eq!(node.cmd(&format!("ACL SETUSER default +{right}")), ok());
        warm(&mut client, "key", "value");
        until("the reason is reported no more", || {
            json(site.router(), "hot-copies")["refused"].as_object().is_some_and(|refused| refused.is_empty())
        });
    }
}
