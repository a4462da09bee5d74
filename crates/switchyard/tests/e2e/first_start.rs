//! Keys that exist before the router's first start: no start replies nil for any of them.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Output;
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::movectl::{done, refused, slots};
use crate::support::process::{Process, tied};
use crate::support::relay::Relay;
use crate::support::slots::slot;
use crate::support::{
    Client, Node, NodeOptions, Router, RouterOptions, Site, SiteOptions, Value, bulk, direct, http, int, ok, ports,
    until,
};

const KEYS: usize = 200;

fn key(number: usize) -> String {
    format!("there{number}")
}

fn nodes(count: usize) -> Vec<Node> {
    (0..count).map(|_| Node::start(&NodeOptions::default())).collect()
}

fn addresses(nodes: &[Node]) -> Vec<SocketAddr> {
    nodes.iter().map(Node::address).collect()
}

/// Writes keys at a node, bypassing routers.
fn fill(node: &Node, numbers: impl Iterator<Item = usize>) {
    let mut client = node.client();
    for number in numbers {
        assert_eq!(client.cmd(&format!("SET {} {number}", key(number))), ok());
    }
}

#[track_caller]
/// Until every worker serves, since a client may get any.
fn until_used(router: &Router) {
    let is_used = || Client::connect(router.address()).cmd(&format!("GET {}", key(0))).error().is_none();
    until("the nodes are used", || (0..16).all(|_| is_used()));
}

fn all_are_found(router: &Router) {
    let mut client = Client::connect(router.address());
    for number in 0..KEYS {
        assert_eq!(client.cmd(&format!("GET {}", key(number))), bulk(number.to_string()), "{}", key(number));
    }
}

/// Runs a start that is refused. Returns its log.
#[track_caller]
fn refused_start(nodes: &[SocketAddr], state_dir: &Path) -> String {
    let free = || SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free())).to_string();
    let mut command = tied(env!("CARGO_BIN_EXE_switchyard"));
    command.args(["serve", "--workers", "1", "--listen", &free(), "--admin", &free(), "--state-dir"]).arg(state_dir);
    for node in nodes {
        command.args(["--node", &node.to_string()]);
    }
    let log = TempDir::new().expect("a directory");
    let mut process = Process::start("a router that is refused", command, &log.path().join("log"));
    let status = process.wait(Duration::from_secs(30));
    let log = process.log();
    let code = if log.contains("is too old: it has version") { 3 } else { 1 };
    assert_eq!(status.code(), Some(code), "{log}");
    log
}

/// Runs `switchyard VERB` with these nodes.
fn run(verb: &str, nodes: &[SocketAddr], state_dir: &Path, more: &[&str]) -> (Option<i32>, String) {
    let mut command = tied(env!("CARGO_BIN_EXE_switchyard"));
    command.arg(verb).arg("--state-dir").arg(state_dir).args(more);
    for node in nodes {
        command.args(["--node", &node.to_string()]);
    }
    let Output { status, stdout, stderr } = command.output().expect("it runs");
    (status.code(), String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned())
}

#[test]
fn the_only_node_with_keys_owns_all_slots() {
    if direct() {
        return;
    }
    let nodes = nodes(3);
    fill(&nodes[1], 0..KEYS);
    let mut other = nodes[1].client();
    assert_eq!((other.cmd("SELECT 3"), other.cmd("SET third v")), (ok(), ok()));
    drop(other);
    let nowhere = TempDir::new().expect("a directory");
    let (code, text) = run("doctor", &addresses(&nodes), &nowhere.path().join("none"), &[]);
    assert!(code == Some(0) && text.contains(&format!("{} has all keys ({})", nodes[1].address(), KEYS + 1)), "{text}");
    let mut router = Router::start(&addresses(&nodes), &RouterOptions::default());
    all_are_found(&router);
    let mut client = Client::connect(router.address());
    assert_eq!((client.cmd("SELECT 3"), client.cmd("GET third")), (ok(), bulk("v")));
    let owned: Vec<i64> = slots(&router).into_iter().map(|(_, slots)| slots).collect();
    assert_eq!(owned, [0, 16384, 0]);
    router.process().expect_log(&["owns all slots", "--rebalance"]);
    done(&router, "balance --wait --goal fast");
    assert!(slots(&router).iter().all(|(_, slots)| *slots > 5000), "{:?}", slots(&router));
    all_are_found(&router);
    router.restart(&addresses(&nodes));
    all_are_found(&router);
}

#[test]
fn keys_that_fit_no_map_refuse_the_start_with_remedies() {
    if direct() {
        return;
    }
    let nodes = nodes(2);
    fill(&nodes[0], 0..KEYS);
    fill(&nodes[1], KEYS..2 * KEYS);
    let state = TempDir::new().expect("a directory");
    let (code, doctor) = run("doctor", &addresses(&nodes), &state.path().join("none"), &[]);
    assert!(code == Some(1) && doctor.contains("a first start would be refused"), "{doctor}");
    assert!(!state.path().join("none").exists(), "doctor makes nothing");
    // Twice, since a refusal must leave no map behind.
    for _ in 0..2 {
        let log = refused_start(&addresses(&nodes), state.path());
        for way in ["switchyard recover", "--node ", "switchyard nodes add", "FLUSHALL", "--state-dir"] {
            assert!(log.contains(way) && doctor.contains(way), "{way}: {log}\n{doctor}");
        }
        assert!(!log.contains("there1"), "key names must not be shown: {log}");
    }
    // A remedy: flush the other node, if its keys are not needed.
    assert_eq!(nodes[1].cmd("FLUSHALL"), ok());
    let router = Router::start(&addresses(&nodes), &RouterOptions::default());
    all_are_found(&router);
    drop(router);
    // A fleet that a router has served, without its state directory: the suggested remedies lose no keys.
    fill(&nodes[1], KEYS..2 * KEYS);
    let log = refused_start(&addresses(&nodes), &state.path().join("lost"));
    for way in ["its state directory is lost", "switchyard recover", "--state-dir"] {
        assert!(log.contains(way), "{way}: {log}");
    }
    assert!(!log.contains("FLUSHALL") && !log.contains("--node "), "{log}");
}

#[test]
fn no_key_is_served_before_every_node_was_checked() {
    if direct() {
        return;
    }
    let nodes = nodes(2);
    fill(&nodes[1], 0..KEYS);
    nodes[1].freeze();
    let options = RouterOptions { nodes_may_be_down: true, ..RouterOptions::default() };
    let mut router = Router::start(&addresses(&nodes), &options);
    let mut client = Client::connect(router.address());
    for number in 0..KEYS {
        let reply = client.cmd(&format!("GET {}", key(number)));
        assert!(reply.error().is_some_and(|error| error.starts_with("NODEDOWN")), "{reply:?}");
    }
    let first = nodes[0].address();
    until("the replying node has the reason why it is not used", || {
        let (status, body) = http::get(router.admin(), "/readyz");
        status == 503 && body.contains(&first.to_string()) && body.contains("first start")
    });
    let text = refused(&router, &format!("nodes add 127.0.0.1:{}", ports::free()));
    assert!(text.contains("the keys of each node are not known yet"), "{text}");
    // No map is stored: a restart starts over.
    router.restart(&addresses(&nodes));
    nodes[1].thaw();
    until_used(&router);
    all_are_found(&router);
    let owned: Vec<i64> = slots(&router).into_iter().map(|(_, slots)| slots).collect();
    assert_eq!(owned, [0, 16384]);
    router.restart(&addresses(&nodes));
    until_used(&router);
    all_are_found(&router);
}

#[test]
fn late_keys_that_fit_no_map_are_not_served() {
    if direct() {
        return;
    }
    let nodes = nodes(2);
    fill(&nodes[0], 0..KEYS);
    fill(&nodes[1], KEYS..2 * KEYS);
    nodes[1].freeze();
    let router =
        Router::start(&addresses(&nodes), &RouterOptions { nodes_may_be_down: true, ..RouterOptions::default() });
    nodes[1].thaw();
    until("the remedy is logged", || router.process().log().contains("switchyard recover"));
    let mut client = Client::connect(router.address());
    for number in 0..2 * KEYS {
        client.cmd(&format!("GET {}", key(number))).expect_error();
    }
}

#[test]
fn a_state_directory_of_other_servers_is_refused() {
    let Some(mut site) = Site::router_only(
        2,
        &SiteOptions::router(RouterOptions { nodes_may_be_down: true, ..RouterOptions::default() }),
    ) else {
        return;
    };
    until_used(site.router());
    let mut client = site.client();
    for number in 0..KEYS {
        client.cmd(&format!("SET {} {number}", key(number)));
    }
    // A key written by a client that bypassed the router does not prevent a start, but is logged.
    let names: Vec<SocketAddr> = addresses(site.nodes());
    let first = usize::from(names[1].to_string() < names[0].to_string());
    let stray = (0..).map(|number| format!("stray{number}")).find(|key| slot(key.as_bytes()) >= 8192).expect("one");
    assert_eq!(site.nodes()[first].cmd(&format!("SET {stray} v")), ok());
    site.router_mut().restart(&names);
    site.router().process().expect_log(&["places 1 elsewhere"]);
    // Doctor reports it as well, while the router runs.
    let (code, found) =
        run("doctor", &names, &site.router().state_dir(), &["--admin", &site.router().admin().to_string()]);
    assert_eq!(code, Some(0), "{found}");
    assert!(
        found.contains(&format!("warning  {}  slot map: of ", names[first])) && found.contains("places 1 elsewhere"),
        "{found}"
    );
    until_used(site.router());
    all_are_found(site.router());

    site.router().process().signal(Signal::TERM);
    site.router_mut().process_mut().wait(Duration::from_secs(30));
    // Other servers at the same addresses: each has the keys of the other.
    for (node, half) in [(first, 8192..16384), (1 - first, 0..8192)] {
        site.node_mut(node).restart();
        fill(&site.nodes()[node], (0..KEYS).filter(|number| half.contains(&slot(key(*number).as_bytes()))));
    }
    let state = site.router().state_dir();
    let (code, doctor) = run("doctor", &names, &state, &[]);
    assert!(code == Some(1) && doctor.contains("belongs to other servers"), "{doctor}");
    let log = refused_start(&names, &state);
    assert!(log.contains("belongs to other servers") && log.contains("switchyard recover"), "{log}");
}

#[test]
fn doctor_and_recover_know_nodes_added_at_run_time() {
    let config = "workers = 2\n".to_owned();
    let Some(mut site) = Site::router_only(1, &SiteOptions::config(config)) else { return };
    let more = nodes(2);
    more.iter().for_each(|node| drop(done(site.router(), &format!("nodes add {}", node.address()))));
    let (listed, state) = (addresses(site.nodes()), site.router().state_dir());
    let admin = site.router().admin().to_string();
    let (_, text) = run("doctor", &listed, &state, &["--admin", &admin]);
    assert!(text.contains("3 nodes checked"), "{text}");
    let (code, text) = run("recover", &listed, &state, &["--admin", &admin, "--dry-run"]);
    assert!(code == Some(1) && text.contains("a router runs on the state directory"), "{text}");
    // With another state directory, only the existence of a router is known.
    let empty = TempDir::new().expect("a directory");
    let (_, text) = run("doctor", &listed, empty.path(), &[]);
    assert!(text.contains("a router uses these nodes"), "{text}");
    let (code, text) = run("recover", &listed, empty.path(), &["--dry-run"]);
    assert!(code == Some(1) && text.contains("a router uses node"), "{text}");
    // The admin port of another router is not queried.
    let (_, text) = run("doctor", &listed, &state, &["--admin", &format!("127.0.0.1:{}", ports::free())]);
    assert!(text.contains("only the configured nodes were checked"), "{text}");

    site.router().process().signal(Signal::TERM);
    site.router_mut().process_mut().wait(Duration::from_secs(30));
    let (_, text) = run("doctor", &listed, &state, &[]);
    assert!(text.contains("3 nodes checked"), "{text}");
    let (code, text) = run("recover", &listed, &state, &["--dry-run"]);
    assert!(code == Some(1) && text.contains("has a slot map"), "{text}");
    let (code, text) = run("recover", &listed, empty.path(), &["--dry-run"]);
    assert!(code == Some(0) && text.contains("gets 16"), "the others have no keys: {text}");
}

/// Keys on unlisted nodes would be answered with nil.
#[test]
fn a_first_start_with_a_part_of_the_nodes_is_refused() {
    let Some(mut site) = Site::router_only(1, &SiteOptions::default()) else { return };
    let more = nodes(2);
    let mut client = site.client();
    for number in 0..KEYS {
        assert_eq!(client.cmd(&format!("SET {} {number}", key(number))), ok());
    }
    more.iter().for_each(|node| drop(done(site.router(), &format!("nodes add {}", node.address()))));
    done(site.router(), "balance --wait --goal fast");
    // A removed node can start over: it no longer refers to the other nodes.
    done(site.router(), &format!("nodes drain {} --wait --goal fast", more[1].address()));
    done(site.router(), &format!("nodes remove {}", more[1].address()));
    let marked = |node: &Node| {
        let user = node
            .cmd("ACL USERS")
            .items()
            .iter()
            .map(Value::text)
            .find(|user| user.starts_with("switchyard-"))
            .expect("a mark");
        (format!("{:?}", node.cmd(&format!("ACL GETUSER {user}"))), user)
    };
    until("the removed node is updated", || !marked(&more[1]).0.contains("node:"));
    let both = [site.nodes()[0].address(), more[0].address()];
    let names_both = |node: &Node| both.iter().all(|address| marked(node).0.contains(&format!("node:{address}")));
    until("the others name each other", || names_both(&site.nodes()[0]) && names_both(&more[0]));
    site.router().process().signal(Signal::TERM);
    site.router_mut().process_mut().wait(Duration::from_secs(30));

    let lost = TempDir::new().expect("a directory");
    for (listed, missing) in [(both[0], both[1]), (both[1], both[0])] {
        let (code, doctor) = run("doctor", &[listed], &lost.path().join("none"), &[]);
        assert_eq!(code, Some(1), "{doctor}");
        let (code, recover) = run("recover", &[listed], &lost.path().join("none"), &["--dry-run"]);
        assert_eq!(code, Some(1), "{recover}");
        for text in [refused_start(&[listed], lost.path()), doctor, recover] {
            for word in [&format!("keys at other nodes: {missing}"), "ACL DELUSER switchyard-"] {
                assert!(text.contains(word), "{word}: {text}");
            }
        }
    }
    // The remedies: list all nodes, and rebuild the map from the keys.
    let (code, text) = run("recover", &both, lost.path(), &[]);
    assert_eq!(code, Some(0), "{text}");
    site.router_mut().start_again(&both);
    all_are_found(site.router());
    drop(Router::start(&[more[1].address()], &RouterOptions::default()));
    // Or remove the records of the other nodes.
    site.router_mut().process_mut().kill();
    for user in
        site.nodes()[0].cmd("ACL USERS").items().iter().map(Value::text).filter(|user| user.starts_with("switchyard-"))
    {
        site.nodes()[0].cmd(&format!("ACL DELUSER {user}"));
    }
    drop(Router::start(&both[..1], &RouterOptions::default()));
}

/// A first map is only correct until the other router moves a slot.
#[test]
fn a_first_start_besides_another_router_is_refused() {
    if direct() {
        return;
    }
    let nodes = nodes(2);
    let router = Router::start(&addresses(&nodes), &RouterOptions::default());
    let state = TempDir::new().expect("a directory");
    let log = refused_start(&addresses(&nodes), state.path());
    assert!(log.contains("another router serves node") && log.contains("--state-dir"), "{log}");
    drop(router);
    let _ = Router::start(&addresses(&nodes), &RouterOptions::default());
}

/// Slots of both names would be on one server, and keys that "move" between them would be deleted.
#[test]
fn one_server_under_two_names_is_refused() {
    if direct() {
        return;
    }
    let nodes = nodes(2);
    let relay = Relay::start(nodes[0].address());
    let twice = [nodes[0].address(), relay.address()];
    let state = TempDir::new().expect("a directory");
    let log = refused_start(&twice, state.path());
    assert!(log.contains("one server under two names"), "{log}");
    let (code, doctor) = run("doctor", &twice, &state.path().join("none"), &[]);
    assert!(code == Some(1) && doctor.contains("a first start would be refused"), "{doctor}");
    // A stored map with two names, one of which now resolves to the other's server.
    let mut router = Router::start(&addresses(&nodes), &RouterOptions::default());
    router.process().signal(Signal::TERM);
    router.process_mut().wait(Duration::from_secs(30));
    let mut nodes = nodes;
    nodes[1].kill();
    let _second = Relay::start_at(nodes[1].address(), nodes[0].address());
    let log = refused_start(&addresses(&nodes), &router.state_dir());
    assert!(log.contains("one server under two names"), "{log}");
}

/// Servers that `nodes add` refuses also stay out if the file lists them, at a start and at a reload. In the past, each
/// of these was accepted as a node, and half of the writes failed.
#[test]
fn an_unsuitable_node_refuses_the_start() {
    let node = |args: &[&str]| {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        Node::start(&NodeOptions { args, ..NodeOptions::default() })
    };
    let first = Node::start(&NodeOptions::default());
    let replica = node(&["--replicaof", "127.0.0.1", &first.address().port().to_string()]);
    let clustered = node(&["--cluster-enabled", "yes"]);
    let Some(other) = Site::router_only(1, &SiteOptions::default()) else { return };
    let unfit = [
        (replica.address(), "is a replica of 127.0.0.1"),
        (clustered.address(), "set cluster-enabled no"),
        (other.address(), "is a Switchyard router"),
    ];
    for (address, why) in unfit {
        let state_dir = TempDir::new().expect("a directory");
        let log = refused_start(&[first.address(), address], state_dir.path());
        assert!(log.contains(why) && log.contains(&address.to_string()), "{why}: {log}");
    }
}

#[test]
fn a_newly_listed_node_that_may_not_join_stays_out() {
    let options = SiteOptions::config("workers = 2\n");
    let Some(mut site) = Site::router_only(2, &options) else { return };
    let (full, good) = (Node::start(&NodeOptions::default()), Node::start(&NodeOptions::default()));
    fill(&full, 0..1);
    let relay = Relay::start(site.nodes()[0].address());
    let again = Relay::start(good.address());
    let nobody = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free()));
    let bad = [
        (full.address(), "holds 1 key ("),
        (relay.address(), "is the same server as node"),
        (nobody, "cannot be reached"),
    ];
    let listed = addresses(site.nodes());
    let all: Vec<SocketAddr> = listed
        .iter()
        .copied()
        .chain(bad.map(|(address, _)| address))
        .chain([good.address(), again.address()])
        .collect();
    let stays_out = |site: &Site, count: usize| {
        let log = until("all are logged", || {
            let log = site.router().process().log();
            (log.matches("but does not join").count() == count).then_some(log)
        });
        for (address, why) in bad {
            assert!(
                log.contains(&format!("node {address} is in the configuration, but does not join: {address} {why}")),
                "{log}"
            );
        }
        let names: Vec<String> = slots(site.router()).into_iter().map(|(name, _)| name).collect();
        let expected: Vec<String> = listed.iter().chain([&good.address()]).map(SocketAddr::to_string).collect();
        assert_eq!(names.iter().collect::<BTreeSet<_>>(), expected.iter().collect(), "{log}");
        log
    };
    site.router_mut().restart(&all);
    let log = stays_out(&site, 4);
    assert!(log.contains(&format!("{} is the same server as node {}", again.address(), good.address())), "{log}");
    // Only the wrong entries had no effect.
    site.router().process().signal(Signal::HUP);
    stays_out(&site, 8);
    assert_eq!(full.cmd("FLUSHALL"), ok());
    site.router().process().signal(Signal::HUP);
    until("it has joined", || slots(site.router()).iter().any(|(name, _)| *name == full.address().to_string()));
    assert_eq!(site.client().cmd("DBSIZE"), int(0));
}

/// The other router would not find moved keys.
#[test]
fn a_node_used_by_another_router_neither_joins_nor_takes_part_in_moves() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let others = nodes(1);
    let other = Router::start(&addresses(&others), &RouterOptions::default());
    let text = refused(site.router(), &format!("nodes add {}", others[0].address()));
    assert!(text.contains("is used by another router"), "{text}");
    let beside = RouterOptions::args(&["--allow-other-router"]);
    let beside = Router::start(&addresses(site.nodes()), &beside);
    let [from, to] = [0, 1].map(|node: usize| site.nodes()[node].address());
    let line = format!("move --from {from} --to {to} --all --wait");
    let text = refused(site.router(), &line);
    assert!(text.contains("is used by another router, with a state directory of its own"), "{text}");
    drop((other, beside));
    // Connections of its own previous run do not count as another router.
    let mut site = site;
    let listed = addresses(site.nodes());
    site.router_mut().process_mut().kill();
    site.router_mut().start_again(&listed);
    done(site.router(), &line);
    done(site.router(), &format!("nodes add {}", others[0].address()));
}

/// If nodes have no ownership records, nothing else distinguishes two routers with one slot map.
#[test]
fn nothing_moves_besides_a_router_with_a_copy_of_the_state() {
    let node = NodeOptions { config: "user default on nopass ~* &* +@all -acl\n".to_owned(), ..NodeOptions::default() };
    let Some(site) = Site::router_only(2, &SiteOptions { node, ..SiteOptions::default() }) else { return };
    let copy = TempDir::new().expect("a directory");
    for file in ["state.redb", "moves.journal"] {
        std::fs::copy(site.router().state_dir().join(file), copy.path().join(file)).expect("copied");
    }
    let (code, doctor) = run("doctor", &addresses(site.nodes()), &copy.path().join("none"), &[]);
    assert!(
        code == Some(0) && doctor.contains("ACL GETUSER") && doctor.contains("no standby can take over"),
        "{doctor}"
    );
    let [listen, admin] = [0, 1].map(|_| SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free())));
    let _second = site.router().start_beside(&RouterOptions::default(), listen, admin, copy.path());
    until("both serve", || {
        let mut client = Client::try_connect(listen).ok()?;
        client.post_quietly("DBSIZE");
        client.try_reply().ok().filter(|reply| reply.error().is_none()).map(drop)
    });
    let [from, to] = [0, 1].map(|node: usize| site.nodes()[node].address());
    until("the first is connected again", || site.client().cmd("DBSIZE").error().is_none());
    for more in ["", " --allow-direct-clients"] {
        let text = refused(site.router(), &format!("move --from {from} --to {to} --all{more}"));
        assert!(text.contains("used by another router with the same state directory"), "{text}");
    }
}

/// Without the records, only the keys reveal an old copy of the state directory.
#[test]
fn an_old_copy_is_refused_if_ownership_records_were_removed() {
    let args = ["--appendonly", "yes", "--appendfsync", "always"].map(str::to_owned).to_vec();
    let node = NodeOptions { args, ..NodeOptions::default() };
    let Some(mut site) = Site::router_only(2, &SiteOptions { node, ..SiteOptions::default() }) else { return };
    let mut client = site.client();
    for number in 0..KEYS {
        assert_eq!(client.cmd(&format!("SET {} {number}", key(number))), ok());
    }
    let copy = TempDir::new().expect("a directory");
    let listed = addresses(site.nodes());
    site.router_mut().restart(&listed);
    // The only key of its slot, in a sample of many keys.
    let moved = slot(key(7).as_bytes());
    let [from, to] = if site.nodes()[0].cmd(&format!("EXISTS {}", key(7))) == int(1) { [0, 1] } else { [1, 0] }
        .map(|node: usize| listed[node]);
    site.router().process().signal(Signal::TERM);
    site.router_mut().process_mut().wait(Duration::from_secs(30));
    for file in ["state.redb", "moves.journal"] {
        std::fs::copy(site.router().state_dir().join(file), copy.path().join(file)).expect("copied");
    }
    site.router_mut().start_again(&listed);
    done(site.router(), &format!("move --from {from} --to {to} --slots {moved} --wait"));
    site.router().process().signal(Signal::TERM);
    site.router_mut().process_mut().wait(Duration::from_secs(30));
    let log = refused_start(&listed, copy.path());
    assert!(log.contains("is too old: it has version"), "{log}");
    for node in site.nodes() {
        for user in node.cmd("ACL USERS").items().iter().map(Value::text).filter(|user| user.starts_with("switchyard-"))
        {
            assert_eq!(node.cmd(&format!("ACL DELUSER {user}")), int(1));
        }
    }
    let log = refused_start(&listed, copy.path());
    assert!(log.contains("may be an old copy") && log.contains("switchyard recover"), "{log}");
    // A restart of the servers removes the records as well, and then the processes are unknown.
    (0..2).for_each(|node| site.node_mut(node).restart());
    let log = refused_start(&listed, copy.path());
    assert!(
        log.contains("may be an old copy") && log.contains("no server runs a process that the state directory lists"),
        "{log}"
    );
    // The latest state directory fits.
    site.router_mut().start_again(&listed);
    all_are_found(site.router());
}

/// A current state directory, and servers restored to a state before keys moved.
#[test]
fn servers_restored_from_before_a_move_are_refused() {
    if direct() {
        return;
    }
    let mut nodes: Vec<Node> = (0..2).map(|_| Node::start(&NodeOptions::default())).collect();
    let mut router = Router::start(&addresses(&nodes), &RouterOptions::default());
    let mut client = Client::connect(router.address());
    (0..200).for_each(|n| assert_eq!(client.cmd(&format!("SET key:{n} v")), ok()));
    let name = |node: &Node| node.address().to_string();
    let had: Vec<String> = nodes[0].cmd("KEYS *").items().iter().map(Value::text).collect();
    crate::movectl::done(
        &router,
        &format!("move --from {} --to {} --all --goal fast --wait", name(&nodes[0]), name(&nodes[1])),
    );
    router.process_mut().kill();
    nodes[1].restart();
    had.iter().for_each(|key| drop(nodes[0].cmd(&format!("SET {key} v"))));
    router.start_again(&addresses(&nodes));
    let found = format!("node {}: of {}", name(&nodes[0]), format_args!("{} keys", had.len()));
    router.process().expect_log(&[&found, "restored from snapshots of another time"]);

    // If all processes are unknown, this cannot be an accident of one server.
    router.process_mut().kill();
    nodes[0].restart();
    had.iter().for_each(|key| drop(nodes[0].cmd(&format!("SET {key} v"))));
    let (code, doctor) = run("doctor", &addresses(&nodes), &router.state_dir(), &[]);
    assert!(code == Some(1) && doctor.contains("a start would be refused"), "{doctor}");
    let log = refused_start(&addresses(&nodes), &router.state_dir());
    assert!(log.contains("are of different times") && log.contains("docs/backup.md"), "{log}");
    // A second copy of a key is only a leftover.
    had.iter().for_each(|key| drop(nodes[1].cmd(&format!("SET {key} v"))));
    let (code, doctor) = run("doctor", &addresses(&nodes), &router.state_dir(), &[]);
    assert_eq!(code, Some(0), "{doctor}");
    router.start_again(&addresses(&nodes));
    let mut client = Client::connect(router.address());
    had.iter().for_each(|key| assert_eq!(client.cmd(&format!("GET {key}")).text(), "v"));
}
