//! Health of nodes in all reports: silent, busy, or refusing writes.

use crate::movectl::done;
use crate::support::{NodeOptions, RouterOptions, Site, SiteOptions, Value, http, int, ok, until};

/// Returns the reports: status on the command line, start page, /readyz, and metrics.
fn places(site: &Site) -> [String; 4] {
    let router = site.router();
    let page = |path| http::get(router.admin(), path).1;
    [done(router, "status"), page("/"), page("/readyz"), router.metrics()]
}

fn is_set(site: &Site, gauge: &str, node: usize, more: &str) -> bool {
    let line = format!("switchyard_{gauge}{{node=\"{}\"{more}}} 1", site.nodes()[node].address());
    site.router().metrics().lines().any(|known| known == line)
}

fn until_logged(site: &Site, what: &str) {
    until("the log has the text", || site.router().process().log().contains(what));
}

/// Detected even without any client.
#[test]
fn a_hanging_node_is_silent_even_without_traffic() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    site.nodes()[1].freeze();
    until("it is silent", || is_set(&site, "node_silent", 1, ""));
    until_logged(&site, "node is silent");
    let [status, page, ready, _] = places(&site);
    let name = site.nodes()[1].address();
    assert!(
        status.contains("SILENT") && status.contains(&format!("{name}: silent: it has not answered for ")),
        "{status}"
    );
    assert!(page.contains("silent: it has not answered for "), "{page}");
    assert!(ready.starts_with("ready\n") && ready.contains(&format!("node {name} (8192 slots): silent: ")), "{ready}");
    assert!(!is_set(&site, "node_silent", 0, "") && !is_set(&site, "node_busy", 1, ""));
    site.nodes()[1].thaw();
    until("it answers", || !is_set(&site, "node_silent", 1, ""));
    until("the page shows it", || places(&site)[..3].iter().all(|said| !said.to_lowercase().contains("silent")));
    until_logged(&site, "node answers again");
    let log = site.router().process().log();
    assert_eq!(log.matches("node is silent").count(), 1, "{log}");
}

#[test]
fn a_node_with_a_slow_command_is_busy() {
    // The node does not report it: only the command sent to it explains its silence.
    let node = NodeOptions::args(&["--lua-time-limit", "1000000"]);
    let options = SiteOptions { node, router: RouterOptions::config("[nodes]\nslow-command-timeout = \"1m\"\n") };
    let Some(site) = Site::router_only(1, &options) else { return };
    let mut client = site.client();
    let script = "local t = redis.call('TIME')[1] + 6; while redis.call('TIME')[1] + 0 < t do end; return 1";
    client.send(&["EVAL", script, "1", "k"]);
    until("it is busy", || is_set(&site, "node_busy", 0, ""));
    let [status, page, ready, _] = places(&site);
    for said in [status, page, ready] {
        assert!(said.contains("busy: it has executed a slow command for "), "{said}");
    }
    assert_eq!(client.reply(), int(1));
    until("it is no longer busy", || !is_set(&site, "node_busy", 0, ""));
    assert!(done(site.router(), "status").contains("ready: every slot is served"));
}

#[test]
fn a_node_that_refuses_writes_is_reported_with_the_reason() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    // One node reports it in its INFO. The other reports nothing, and clients get the error.
    let [full, lonely] = [&site.nodes()[0], &site.nodes()[1]];
    assert_eq!(full.cmd("CONFIG SET maxmemory 1"), ok());
    // Together, so that the router cannot read the setting in between.
    let mut direct = lonely.client();
    for line in ["MULTI", "CONFIG SET min-replicas-to-write 1", "ACL SETUSER default -config"] {
        assert!(direct.cmd(line).error().is_none(), "{line}");
    }
    assert_eq!(direct.cmd("EXEC").items(), [ok(), ok()]);
    until("one is full", || is_set(&site, "node_refuses_writes", 0, ",reason=\"OOM\""));
    let [status, page, ready, _] = places(&site);
    for said in [status, page, ready] {
        assert!(said.contains("refuses writes: OOM it uses "), "{said}");
        assert!(!said.contains("NOREPLICAS"), "no client has written there: {said}");
    }
    let mut client = site.client();
    let key = format!("{{{}}}k", site_tag(&site, 1));
    until("the other one refuses", || {
        assert!(client.cmd(&format!("SET {key} v")).expect_error().starts_with("NOREPLICAS"));
        is_set(&site, "node_refuses_writes", 1, ",reason=\"NOREPLICAS\"")
    });
    assert!(done(site.router(), "status").contains("refuses writes: NOREPLICAS (clients got this error)"));
    assert_eq!(full.cmd("CONFIG SET maxmemory 0"), ok());
    until("it takes writes again", || !is_set(&site, "node_refuses_writes", 0, ",reason=\"OOM\""));
    until_logged(&site, "node takes writes again");
    let log = site.router().process().log();
    assert_eq!(log.matches("node refuses writes").count(), 2, "{log}");
}

/// Returns a hash tag of this node, found by reading, because writes are refused.
fn site_tag(site: &Site, node: usize) -> String {
    let mut client = site.client();
    let calls = || calls_of_get(&site.nodes()[node].cmd("INFO commandstats").text());
    let mut at = |tag: &str| {
        let before = calls();
        assert_eq!(client.cmd(&format!("GET {{{tag}}}k")), Value::Nil);
        calls() > before
    };
    (0..1000).map(|number| format!("t{number}")).find(|tag| at(tag)).expect("a tag of the node")
}

fn calls_of_get(stats: &str) -> u64 {
    let line = stats.lines().find_map(|line| line.strip_prefix("cmdstat_get:calls="));
    line.and_then(|rest| rest.split(',').next()?.parse().ok()).unwrap_or(0)
}
