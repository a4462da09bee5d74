//! A command in flight ends with a reply, or with the node's confirmation that the connection is dead, never with a
//! closed socket: a frozen node executes received commands long after the router gave up.

use std::net::SocketAddr;

use crate::support::relay::Relay;
use crate::support::{
    Client, Node, NodeOptions, Router, RouterOptions, Site, SiteOptions, bulk, encode, int, ok, simple, until,
};

const BRISK: &str =
    "[nodes]\nconnect-timeout = \"500ms\"\ncommand-timeout = \"500ms\"\nreconnect-backoff-max = \"100ms\"\n";

/// Number of connections that broke with commands in flight and are not confirmed dead.
fn unconfirmed(site: &Site, node: SocketAddr) -> u64 {
    unconfirmed_at(site.router(), node)
}

fn unconfirmed_at(router: &Router, node: SocketAddr) -> u64 {
    let line = format!("switchyard_node_unconfirmed_connections{{node=\"{node}\"}} ");
    let metrics = router.metrics();
    metrics.lines().find_map(|l| l.strip_prefix(&line)?.parse().ok()).expect("the metric is there")
}

#[test]
fn a_broken_connection_stays_in_flight_until_the_node_kills_it() {
    let Some(site) = Site::router_only(1, &SiteOptions::config(BRISK)) else {
        return;
    };
    let node = site.nodes()[0].address();
    let mut client = site.client();
    assert_eq!(client.cmd("SET k before"), ok());
    assert_eq!(unconfirmed(&site, node), 0);

    site.nodes()[0].freeze();
    let error = client.cmd("SET k late");
    assert!(error.expect_error().starts_with("NODETIMEOUT"), "{error:?}");
    // The router gives up the connection. The node still has the bytes of the SET, so the connection is recorded as
    // long as the node is silent.
    until("the connection is given up", || unconfirmed(&site, node) == 1);
    let error = client.cmd("GET k");
    assert!(error.expect_error().contains(&node.to_string()), "{error:?}");
    assert_eq!(unconfirmed(&site, node), 1);

    site.nodes()[0].thaw();
    until("the node confirms that the connection is dead", || unconfirmed(&site, node) == 0);
    // From here on, no old command can be executed: new writes stay.
    assert_eq!(client.cmd("SET k after"), ok());
    assert_eq!(client.cmd("GET k"), bulk("after"));
    assert_eq!(site.nodes()[0].cmd("GET k"), bulk("after"));
}

#[test]
fn a_restarted_node_has_no_commands_of_the_old_process_in_flight() {
    let Some(mut site) = Site::router_only(1, &SiteOptions::config(BRISK)) else {
        return;
    };
    let node = site.nodes()[0].address();
    let mut client = site.client();
    assert_eq!(client.cmd("SET k before"), ok());
    site.nodes()[0].freeze();
    client.cmd("SET k late").expect_error();
    until("the connection is given up", || unconfirmed(&site, node) == 1);
    site.node_mut(0).kill();
    site.node_mut(0).restart();
    until("another run_id lays the old connection to rest", || unconfirmed(&site, node) == 0);
    until("the router is back", || client.cmd("SET k after") == ok());
}

const LARGE: usize = 3 << 19;

/// Splits `APPEND key <LARGE bytes>` into its beginning and the rest.
fn halves(key: &str) -> (Vec<u8>, Vec<u8>) {
    let mut request = encode::<&[u8]>(&[b"APPEND", key.as_bytes(), &vec![b'x'; LARGE]]);
    let rest = request.split_off(request.len() / 2);
    (request, rest)
}

/// A node behind a relay that holds replies, and a client that has sent one large command and half of another.
struct HalfSent {
    node: Node,
    relay: Relay,
    router: Router,
    client: Client,
    rest: Vec<u8>,
}

impl HalfSent {
    /// `first` has `answered` replies and one that the relay holds. It makes `k1` as long as one large value.
    fn new(config: &str, first: &[u8], answered: usize) -> Option<Self> {
        if crate::support::direct() {
            return None;
        }
        let node = Node::start(&NodeOptions::default());
        let relay = Relay::start(node.address());
        let options = RouterOptions { workers: 1, config: config.into(), ..RouterOptions::default() };
        let router = Router::start(&[relay.address()], &options);
        let mut client = Client::connect(router.address());
        assert_eq!(client.cmd("PING"), simple("PONG"));
        // The dedicated connection for large commands is open, with a completed handshake.
        assert_eq!(client.call::<&[u8]>(&[b"SET", b"warm", &[b'x'; LARGE]]), ok());
        relay.stall(true);
        client.write(first);
        (0..answered).for_each(|_| drop(client.reply()));
        let (half, rest) = halves("k2");
        client.write(&half);
        until("the node has executed the first", || node.cmd("STRLEN k1") == int(LARGE as i64));
        Some(Self { node, relay, router, client, rest })
    }

    fn unconfirmed(&self) -> u64 {
        unconfirmed_at(&self.router, self.relay.address())
    }
}

#[test]
fn commands_before_an_upload_may_have_been_executed() {
    let (half, rest) = halves("k1");
    let append = [half, rest].concat();
    let part = vec![b'x'; LARGE / 2];
    let append_part = || encode::<&[u8]>(&[b"APPEND", b"k1", &part]);
    let transaction = [encode(&[b"MULTI"]), append_part(), append_part(), encode(&[b"EXEC"])].concat();
    for (first, answered) in [(append, 0), (transaction, 3)] {
        let Some(mut site) = HalfSent::new("", &first, answered) else { return };
        site.relay.refuse(true);
        site.relay.cut();
        site.relay.stall(false);
        let lost = site.client.reply();
        assert!(
            lost.expect_error().starts_with("NODELOST") && lost.expect_error().contains("may have been executed"),
            "{lost:?}"
        );
        // Half a request is never executed.
        let half = site.client.reply();
        assert!(
            half.expect_error().starts_with("NODELOST") && !half.expect_error().contains("may have been"),
            "{half:?}"
        );
        assert_eq!(site.unconfirmed(), 1, "the drain barrier remembers it");
        site.relay.refuse(false);
        until("the node confirms that the connection is dead", || site.unconfirmed() == 0);
        assert_eq!(site.node.cmd("STRLEN k2"), int(0));
        site.client.write(&site.rest);
        assert_eq!(site.client.cmd("STRLEN k1"), int(LARGE as i64));
    }
}

#[test]
fn commands_of_a_client_that_left_during_an_upload_are_in_flight() {
    let (half, rest) = halves("k1");
    let Some(site) = HalfSent::new("", &[half, rest].concat(), 0) else { return };
    site.client.cut();
    until("the connection is remembered", || site.unconfirmed() == 1);
    site.relay.stall(false);
    until("the node confirms that the connection is dead", || site.unconfirmed() == 0);
    assert_eq!(site.node.cmd("STRLEN k2"), int(0));
}

#[test]
fn a_command_before_an_upload_times_out() {
    let (half, rest) = halves("k1");
    let Some(mut site) = HalfSent::new(BRISK, &[half, rest].concat(), 0) else { return };
    let late = site.client.reply();
    assert!(late.expect_error().starts_with("NODETIMEOUT"), "{late:?}");
    let half = site.client.reply();
    assert!(half.expect_error().starts_with("NODELOST") && !half.expect_error().contains("may have been"), "{half:?}");
    site.relay.stall(false);
    until("the node confirms that the connection is dead", || site.unconfirmed() == 0);
    site.client.write(&site.rest);
    until("the upload continues", || site.client.cmd("STRLEN k1") == int(LARGE as i64));
    assert_eq!(site.node.cmd("STRLEN k2"), int(0));
}

/// If one node has executed its part of a command, no error claims that the command was not executed.
#[test]
fn a_partly_executed_command_is_not_reported_as_unexecuted() {
    const CLAUSE: &str = "; other parts of the command may have been executed";
    let Some(mut site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let tags = site.tags();
    let (here, gone) = (format!("{{{}}}k", tags[0][0]), format!("{{{}}}k", tags[1][0]));
    let mut client = site.client();
    assert_eq!(client.cmd(&format!("MSET {here} 1 {gone} 1")), ok());
    site.node_mut(1).kill();
    until("the node is known to be down", || {
        client.cmd(&format!("GET {gone}")).error().is_some_and(|error| error.starts_with("NODEDOWN"))
    });
    let whole = client.cmd(&format!("MSET {here} 2 {gone} 2"));
    let whole = whole.expect_error();
    assert!(whole.starts_with("NODEDOWN") && whole.ends_with(CLAUSE), "{whole}");
    assert_eq!(client.cmd(&format!("GET {here}")), bulk("2"));
    let whole = client.cmd(&format!("DEL {gone} {here}"));
    assert!(whole.expect_error().ends_with(CLAUSE), "{whole:?}");
    assert_eq!(client.cmd(&format!("EXISTS {here}")), int(0));
    for nothing in [format!("MSET {gone} 3 {gone}2 3"), format!("MGET {here} {gone}")] {
        let error = client.cmd(&nothing);
        let error = error.expect_error();
        assert!(error.starts_with("NODEDOWN") && !error.contains("may have been"), "{error}");
    }
}
