//! What is in flight ends with a reply or with the node's word that the connection is dead, never with a closed socket: a node that was
//! frozen executes what it had received, long after the router gave up.

use std::net::SocketAddr;

use crate::support::{RouterOptions, Site, SiteOptions, bulk, ok, until};

const BRISK: &str = "[nodes]\nconnect-timeout = \"500ms\"\ncommand-timeout = \"500ms\"\nreconnect-backoff-max = \"100ms\"\n";

/// Connections that broke with commands in flight and are not known to be dead.
fn unconfirmed(site: &Site, node: SocketAddr) -> u64 {
    let line = format!("switchyard_node_unconfirmed_connections{{node=\"{node}\"}} ");
    let metrics = site.router().metrics();
    metrics.lines().find_map(|l| l.strip_prefix(&line)?.parse().ok()).expect("the metric is there")
}

#[test]
fn a_broken_connection_stays_in_flight_until_the_node_has_killed_it() {
    let router = RouterOptions { config: BRISK.into(), ..RouterOptions::default() };
    let Some(site) = Site::router_only(1, &SiteOptions { router, ..SiteOptions::default() }) else {
        return;
    };
    let node = site.nodes()[0].address();
    let mut client = site.client();
    assert_eq!(client.cmd("SET k before"), ok());
    assert_eq!(unconfirmed(&site, node), 0);

    site.nodes()[0].freeze();
    let error = client.cmd("SET k late");
    assert!(error.expect_error().starts_with("NODETIMEOUT"), "{error:?}");
    // The router gives the connection up; the bytes of the SET are still with the node, and the record says so for as long as it is silent.
    until("the connection is given up", || (unconfirmed(&site, node) == 1).then_some(()));
    let error = client.cmd("GET k");
    assert!(error.expect_error().contains(&node.to_string()), "{error:?}");
    assert_eq!(unconfirmed(&site, node), 1);

    site.nodes()[0].thaw();
    until("the node confirms that the connection is dead", || (unconfirmed(&site, node) == 0).then_some(()));
    // From here on nothing old can be executed: what is written now stays.
    assert_eq!(client.cmd("SET k after"), ok());
    assert_eq!(client.cmd("GET k"), bulk("after"));
    assert_eq!(site.nodes()[0].cmd("GET k"), bulk("after"));
}

#[test]
fn a_node_that_was_restarted_has_nothing_of_the_old_process_in_flight() {
    let router = RouterOptions { config: BRISK.into(), ..RouterOptions::default() };
    let Some(mut site) = Site::router_only(1, &SiteOptions { router, ..SiteOptions::default() }) else {
        return;
    };
    let node = site.nodes()[0].address();
    let mut client = site.client();
    assert_eq!(client.cmd("SET k before"), ok());
    site.nodes()[0].freeze();
    client.cmd("SET k late").expect_error();
    until("the connection is given up", || (unconfirmed(&site, node) == 1).then_some(()));
    site.node_mut(0).kill();
    site.node_mut(0).restart();
    until("another run_id lays the old connection to rest", || (unconfirmed(&site, node) == 0).then_some(()));
    until("the router is back", || (client.cmd("SET k after") == ok()).then_some(()));
}
