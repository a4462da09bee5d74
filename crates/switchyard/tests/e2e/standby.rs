//! Two consecutive routers: a standby takes over when the first has died or is frozen, and later writes of the first
//! are never executed.

use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::movectl::done;
use crate::movectl_moves::{eventually, wait_for};
use crate::support::process::{Process, tied};
use crate::support::relay::Relay;
use crate::support::{Client, Node, NodeOptions, Router, RouterOptions, Value, bulk, direct, http, int, ok, ports};

/// A router in front of two nodes, and a folder for another router.
pub(crate) struct Scene {
    pub(crate) first: Router,
    pub(crate) nodes: Vec<Node>,
    listen: SocketAddr,
    copy: TempDir,
}

impl Scene {
    pub(crate) fn start() -> Option<Scene> {
        if direct() {
            eprintln!("nothing to check against a plain server");
            return None;
        }
        let nodes: Vec<Node> = (0..2).map(|_| Node::start(&NodeOptions::default())).collect();
        let addresses: Vec<SocketAddr> = nodes.iter().map(Node::address).collect();
        let first = Router::start(&addresses, &RouterOptions::default());
        Some(Scene { first, nodes, listen: fresh(), copy: TempDir::new().expect("a directory") })
    }

    /// Copies the state directory of the first router, which is not being changed.
    fn copy_state(&self) {
        for file in ["state.redb", "moves.journal"] {
            std::fs::copy(self.first.state_dir().join(file), self.copy.path().join(file)).expect("copied");
        }
    }

    fn second(&self, args: &[&str], state: &Path) -> Process {
        self.second_at(args, state, fresh())
    }

    pub(crate) fn second_at(&self, args: &[&str], state: &Path, admin: SocketAddr) -> Process {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        self.first.start_beside(&RouterOptions { args, ..RouterOptions::default() }, self.listen, admin, state)
    }

    /// Returns a client of the second router, as soon as it serves all nodes.
    pub(crate) fn client_of(&self, second: &mut Process) -> Client {
        eventually("the second router serves", || {
            assert_eq!(second.ended(), None, "{}", second.log());
            let mut client = Client::try_connect(self.listen).ok()?;
            client.post_quietly("DBSIZE");
            client.try_reply().ok().filter(|reply| reply.error().is_none())?;
            Some(client)
        })
    }

    /// Checks that no node has a connection of the first router.
    fn only_one_router_is_connected(&self) {
        for node in &self.nodes {
            let list = node.cmd("CLIENT LIST").text();
            let runs: std::collections::BTreeSet<String> = list
                .split(' ')
                .filter_map(|field| field.strip_prefix("name=switchyard-"))
                .filter_map(|name| Some(name.split('-').nth(2)?.to_owned()))
                .collect();
            assert_eq!(runs.len(), 1, "{list}");
        }
    }
}

pub(crate) fn fresh() -> SocketAddr {
    ([127, 0, 0, 1], ports::free()).into()
}

const WAITS: &str = "waits until no other router serves the nodes";
pub(crate) const WAITS_FOR_STATE: &str = "waits until the state directory is free";

/// Local servers run on the first machine only: a standby would start empty servers at their addresses.
#[test]
fn a_standby_with_local_servers_is_refused() {
    let Some(scene) = Scene::start() else { return };
    let config = "[autoscale.local]\ncommand = [\"redis-server\", \"--port\", \"{port}\"]\n".to_owned();
    for with in ["shared", "copy"] {
        let args = ["--standby", with].map(str::to_owned).to_vec();
        let options = RouterOptions { args, config: config.clone(), ..RouterOptions::default() };
        let mut second = scene.first.start_beside(&options, scene.listen, fresh(), scene.copy.path());
        assert_eq!(second.wait(Duration::from_secs(30)).code(), Some(2), "{}", second.log());
        assert!(
            second.log().contains("[autoscale.local] run on one machine")
                && second.log().contains("[autoscale.command]"),
            "{}",
            second.log()
        );
    }
}

#[test]
fn a_standby_takes_over_from_a_killed_router() {
    let Some(mut scene) = Scene::start() else { return };
    assert_eq!(Client::connect(scene.first.address()).cmd("SET k before"), ok());
    scene.copy_state();
    let mut standby = scene.second(&["--standby", "copy"], scene.copy.path());
    eventually("it waits", || standby.log().contains(WAITS));
    assert!(Client::try_connect(scene.listen).is_err(), "a waiting standby serves no client");
    assert_eq!(Client::connect(scene.first.address()).cmd("GET k"), bulk("before"));
    scene.first.process_mut().kill();
    let mut client = scene.client_of(&mut standby);
    assert_eq!(client.cmd("GET k"), bulk("before"));
    scene.only_one_router_is_connected();
}

#[test]
fn a_standby_with_the_same_state_directory_takes_over_when_it_is_free() {
    let Some(mut scene) = Scene::start() else { return };
    assert_eq!(Client::connect(scene.first.address()).cmd("SET k before"), ok());
    let mut standby = scene.second(&["--standby", "shared"], &scene.first.state_dir());
    eventually("it waits", || standby.log().contains(WAITS_FOR_STATE));
    scene.first.process_mut().kill();
    let mut client = scene.client_of(&mut standby);
    assert_eq!(client.cmd("GET k"), bulk("before"));
}

/// Returns exit code and output of the command line for the router with this admin port.
fn command(admin: SocketAddr, line: &str) -> (Option<i32>, String) {
    let mut command = tied(env!("CARGO_BIN_EXE_switchyard"));
    let output = command.args(line.split(' ')).args(["--admin", &admin.to_string()]).output().expect("it runs");
    (output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned())
}

#[test]
fn a_waiting_standby_shows_its_state_and_keeps_its_admin_port() {
    for (with, reason) in [("copy", "another router serves the nodes"), ("shared", "waits for the state directory")] {
        let Some(mut scene) = Scene::start() else { return };
        scene.copy_state();
        let (state, admin) =
            (if with == "copy" { scene.copy.path().to_owned() } else { scene.first.state_dir() }, fresh());
        let token = std::fs::read(scene.first.state_dir().join("admin-token")).expect("the token of the first router");
        let mut standby = scene.second_at(&["--standby", with], &state, admin);
        let waits = format!("not ready\nwaiting as a standby\n{reason}\n");
        eventually("it shows that it waits", || {
            http::try_get(admin, "/readyz").is_ok_and(|answer| answer == (503, waits.clone()))
        });
        assert_eq!(http::get(admin, "/healthz"), (200, "ok\n".to_owned()));
        let metrics = http::get(admin, "/metrics").1;
        assert!(
            metrics.contains("\nswitchyard_standby_waits 1\n") && metrics.contains("\nprocess_open_fds "),
            "{metrics}"
        );
        assert!(scene.first.metrics().contains("\nswitchyard_standby_waits 0\n"));
        let (code, shown) = command(admin, "status --check");
        assert_eq!((code, shown.contains(&format!("waits as a standby: {reason}"))), (Some(0), true), "{shown}");
        assert_eq!(command(admin, "balance").0, Some(1), "nothing changes through a standby");
        assert_eq!(
            std::fs::read(scene.first.state_dir().join("admin-token")).expect("a token"),
            token,
            "the token of another router is not its own"
        );
        done(&scene.first, "hot-copies off");
        scene.first.process_mut().kill();
        scene.client_of(&mut standby);
        eventually("it is ready", || http::get(admin, "/readyz").0 == 200);
        assert!(http::get(admin, "/metrics").1.contains("\nswitchyard_standby_waits 0\n"));
        eventually("it is healthy", || command(admin, "status --check").0 == Some(0));
        assert_eq!(command(admin, "hot-copies off").0, Some(0), "with the token that it has made now");
    }
}

#[test]
fn a_standby_waits_for_the_admin_address_of_the_router() {
    let Some(mut scene) = Scene::start() else { return };
    scene.copy_state();
    let admin = scene.first.admin();
    let mut standby = scene.second_at(&["--standby", "copy"], scene.copy.path(), admin);
    eventually("it waits", || standby.log().contains("waits without an admin port") && standby.log().contains(WAITS));
    assert!(scene.first.metrics().contains("\nswitchyard_standby_waits 0\n"), "the port is that of the first router");
    assert_eq!(standby.ended(), None);
    scene.first.process_mut().kill();
    scene.client_of(&mut standby);
    eventually("its port replies", || http::try_get(admin, "/readyz").is_ok_and(|(status, _)| status == 200));
    assert_eq!(standby.log().matches("waits without an admin port").count(), 1, "{}", standby.log());
}

#[test]
fn a_waiting_standby_handles_signals() {
    for (with, waits, signal) in
        [("copy", WAITS, Signal::TERM), ("shared", "waits until the state directory is free", Signal::INT)]
    {
        let Some(scene) = Scene::start() else { return };
        scene.copy_state();
        let state = if with == "copy" { scene.copy.path().to_owned() } else { scene.first.state_dir() };
        let mut standby = scene.second(&["--standby", with], &state);
        eventually("it waits", || standby.log().contains(waits));
        standby.signal(Signal::HUP);
        eventually("it takes note", || standby.log().contains("reads the configuration again as soon as it serves"));
        assert_eq!(standby.ended(), None);
        standby.signal(signal);
        assert_eq!(standby.wait(Duration::from_secs(60)).code(), Some(0), "{}", standby.log());
    }
}

#[test]
fn sighup_during_a_standby_wait_causes_a_reload_when_it_serves() {
    let Some(mut scene) = Scene::start() else { return };
    scene.copy_state();
    let mut standby = scene.second(&["--standby", "copy"], scene.copy.path());
    eventually("it waits", || standby.log().contains(WAITS));
    standby.signal(Signal::HUP);
    eventually("it takes note", || standby.log().contains("as soon as it serves"));
    scene.first.process_mut().kill();
    scene.client_of(&mut standby);
    eventually("it reloads", || standby.log().contains("reloaded: nothing has changed"));
}

#[test]
fn a_frozen_router_writes_nothing_after_a_take_over() {
    let Some(mut scene) = Scene::start() else { return };
    let keys: Vec<String> = (0..20).map(|n| format!("key:{n}")).collect();
    let mut old = Client::connect(scene.first.address());
    for key in &keys {
        assert_eq!(old.cmd(&format!("SET {key} before")), ok());
    }
    scene.copy_state();
    let mut standby = scene.second(&["--standby", "copy"], scene.copy.path());
    eventually("it waits", || standby.log().contains(WAITS));
    scene.first.process().signal(Signal::STOP);
    for key in &keys {
        old.post(&format!("SET {key} late"));
    }
    let mut new = scene.client_of(&mut standby);
    for key in &keys {
        assert_eq!(new.cmd(&format!("SET {key} new")), ok());
    }
    scene.first.process().signal(Signal::CONT);
    for _ in &keys {
        match old.try_reply() {
            Ok(reply) => assert!(reply.error().is_some(), "a write through the router that was replaced: {reply:?}"),
            Err(_) => break,
        }
    }
    // Nor for new clients.
    let status = eventually("it ends", || {
        if let Ok(mut late) = Client::try_connect(scene.first.address()) {
            late.post_quietly("SET key:0 late");
            assert!(
                !late.try_reply().is_ok_and(|reply| reply.error().is_none()),
                "a write through the router that was replaced"
            );
        }
        scene.first.process_mut().ended()
    });
    assert_eq!(status.code(), Some(3));
    scene.first.process().expect_log(&["another router has taken over the nodes"]);
    for key in &keys {
        assert_eq!(new.cmd(&format!("GET {key}")), bulk("new"));
    }
    scene.only_one_router_is_connected();
}

#[test]
fn a_state_directory_older_than_the_last_move_is_refused() {
    let Some(mut scene) = Scene::start() else { return };
    assert_eq!(Client::connect(scene.first.address()).cmd("SET k v"), ok());
    scene.copy_state();
    let names: Vec<String> = scene.nodes.iter().map(|node| node.address().to_string()).collect();
    let owner = scene.nodes.iter().position(|node| node.cmd("EXISTS k").int() == 1).expect("somewhere");
    done(&scene.first, &format!("move --from {} --to {} --all --wait", names[owner], names[1 - owner]));
    // Both detect it: a waiting standby, and a router that should serve at once.
    let refused = |args: &[&str]| {
        let mut second = scene.second(args, scene.copy.path());
        assert_eq!(second.wait(Duration::from_secs(60)).code(), Some(3), "another start would not help");
        let log = second.log();
        assert!(log.contains("is too old: it has version 0") && log.contains("recover --help"), "{log}");
    };
    refused(&["--standby", "copy"]);
    refused(&[]);
    assert_eq!(Client::connect(scene.first.address()).cmd("GET k"), bulk("v"), "the first one serves on");
    let addresses: Vec<SocketAddr> = scene.nodes.iter().map(Node::address).collect();
    scene.first.process_mut().kill();
    scene.first.start_again(&addresses);
    assert_eq!(Client::connect(scene.first.address()).cmd("GET k"), bulk("v"), "its own is the newest");
}

#[test]
fn a_copy_is_refused_after_unfinished_moves_but_not_the_original() {
    let Some(mut scene) = Scene::start() else { return };
    let mut client = Client::connect(scene.first.address());
    for n in 0..200 {
        assert_eq!(client.cmd(&format!("SET key:{n} {}", "v".repeat(100))), ok());
    }
    let [from, to] = [0, 1].map(|node: usize| scene.nodes[node].address());
    let marks = |scene: &Scene| {
        let mark_at = |node: &Node| {
            let users =
                node.cmd("ACL USERS").items().iter().map(Value::text).find(|user| user.starts_with("switchyard-"));
            users.map(|user| (format!("{:?}", node.cmd(&format!("ACL GETUSER {user}"))), user))
        };
        scene.nodes.iter().map(|node| mark_at(node).expect("a mark")).collect::<Vec<_>>()
    };
    let moving = |scene: &Scene| marks(scene).iter().filter(|(mark, _)| mark.contains("moving:1")).count();
    assert_eq!(moving(&scene), 0);
    done(&scene.first, &format!("move --from {from} --to {to} --all --goal gentle --max-rate 2k"));
    eventually("both nodes know that keys are moving", || moving(&scene) == 2);
    done(&scene.first, "moves max-rate 1 none");
    wait_for(&scene.first, 1, "done");
    eventually("both know that none is", || moving(&scene) == 0);
    scene.copy_state();
    scene.first.process_mut().kill();
    // Simulates that the router died during a leg: a copy from that time looks the same, but lacks the keys that have
    // moved since.
    let (_, user) = marks(&scene).remove(0);
    assert_eq!(scene.nodes[0].cmd(&format!("ACL SETUSER {user} ~moving:1")), ok());
    let mut second = scene.second(&["--standby", "copy"], scene.copy.path());
    assert_eq!(second.wait(Duration::from_secs(60)).code(), Some(3));
    assert!(second.log().contains("keys were moving when the nodes were last served"), "{}", second.log());
    let mut second = scene.second(&["--standby", "shared"], &scene.first.state_dir());
    assert_eq!(scene.client_of(&mut second).cmd("DBSIZE"), int(200));
}

#[test]
fn a_standby_needs_a_state_directory_and_ownership_records() {
    let Some(scene) = Scene::start() else { return };
    let refused = |why: &str| {
        let mut second = scene.second(&["--standby", "copy"], scene.copy.path());
        assert_eq!(second.wait(Duration::from_secs(60)).code(), Some(1));
        assert!(second.log().contains(why), "{}", second.log());
    };
    refused("is empty: a standby needs that of the active router, or a copy");
    refused("the very first start of a fleet is without --standby");
    scene.copy_state();
    assert_eq!(scene.nodes[0].cmd("ACL SETUSER default -acl"), ok());
    refused("does not report which router serves it, so a standby cannot take over");
    assert_eq!(Client::connect(scene.first.address()).cmd("DBSIZE"), int(0), "a router alone needs no marks");
}

#[test]
fn a_standby_can_start_with_a_recovered_directory() {
    let Some(mut scene) = Scene::start() else { return };
    assert_eq!(Client::connect(scene.first.address()).cmd("SET k v"), ok());
    scene.first.process().signal(Signal::TERM);
    scene.first.process_mut().wait(Duration::from_secs(30));
    let mut recover = tied(env!("CARGO_BIN_EXE_switchyard"));
    recover.arg("recover").arg("--state-dir").arg(scene.copy.path());
    for node in &scene.nodes {
        recover.args(["--node", &node.address().to_string()]);
    }
    assert!(recover.output().expect("it runs").status.success());
    let mut copy = scene.second(&["--standby", "copy"], scene.copy.path());
    assert_eq!(copy.wait(Duration::from_secs(60)).code(), Some(1));
    assert!(copy.log().contains("a slot map that no router has used yet"), "{}", copy.log());
    let mut shared = scene.second(&["--standby", "shared"], scene.copy.path());
    assert_eq!(scene.client_of(&mut shared).cmd("GET k"), bulk("v"));
}

#[test]
fn a_replaced_router_serves_no_stale_copy() {
    if direct() {
        return;
    }
    let nodes: Vec<Node> = (0..2).map(|_| Node::start(&NodeOptions::default())).collect();
    let relays: Vec<Relay> = nodes.iter().map(|node| Relay::start(node.address())).collect();
    let addresses: Vec<SocketAddr> = relays.iter().map(Relay::address).collect();
    let first = Router::start(&addresses, &RouterOptions::args(&["--set", "hot-copies.admission=all"]));
    let scene = Scene { first, nodes, listen: fresh(), copy: TempDir::new().expect("a directory") };
    let mut client = Client::connect(scene.first.address());
    assert_eq!(client.cmd("SET hot old"), ok());
    let hits = |scene: &Scene| {
        let metrics = scene.first.metrics();
        let line = metrics
            .lines()
            .find(|line| line.starts_with("switchyard_hot_copies_hits_total"))
            .expect("a metric")
            .to_owned();
        line.rsplit(' ').next().and_then(|hits| hits.parse::<f64>().ok()).expect("a number")
    };
    let before = hits(&scene);
    eventually("a copy answers", || {
        assert_eq!(client.cmd("GET hot"), bulk("old"));
        hits(&scene) > before
    });
    scene.copy_state();
    let standby = scene.second(&["--standby", "copy"], scene.copy.path());
    eventually("it waits", || standby.log().contains(WAITS));
    let pid = scene.first.process().pid();
    assert_eq!(client.cmd("GET hot"), bulk("old"));
    relays.iter().for_each(|relay| relay.isolate(pid));
    let is_written = AtomicBool::new(false);
    let old_address = scene.first.address();
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|_| {
                scope.spawn(|| {
                    // The first router is cut off from its nodes, but not from its clients. It may reply as long as
                    // nothing was written elsewhere.
                    let end = Instant::now() + Duration::from_secs(240);
                    let mut late_reads = 0;
                    while late_reads < 100 && Instant::now() < end {
                        let is_late = is_written.load(Ordering::SeqCst);
                        late_reads += usize::from(is_late);
                        let Ok(mut reader) = Client::try_connect(old_address) else {
                            std::thread::sleep(Duration::from_millis(10));
                            continue;
                        };
                        reader.timeout(Duration::from_millis(100));
                        reader.post_quietly("GET hot");
                        let reply = reader.try_reply();
                        assert!(
                            !(is_late && reply.is_ok_and(|reply| reply == bulk("old"))),
                            "a read after the write returned the old value"
                        );
                        std::thread::sleep(Duration::from_millis(10));
                    }
                    late_reads
                })
            })
            .collect();
        let mut new = eventually("the second router writes", || {
            let mut client = Client::try_connect(scene.listen).ok()?;
            client.post_quietly("SET hot new");
            (client.try_reply().ok()? == ok()).then_some(client)
        });
        is_written.store(true, Ordering::SeqCst);
        for reader in readers {
            assert!(reader.join().expect("no old value") > 0);
        }
        assert_eq!(new.cmd("GET hot"), bulk("new"));
    });
}

#[test]
fn a_successor_waits_for_copies_unless_the_router_has_provably_ended() {
    let Some(mut scene) = Scene::start() else { return };
    let marks = |scene: &Scene| {
        let user = scene.nodes[0]
            .cmd("ACL USERS")
            .items()
            .iter()
            .map(Value::text)
            .find(|user| user.starts_with("switchyard-"))
            .expect("a mark");
        format!("{:?}", scene.nodes[0].cmd(&format!("ACL GETUSER {user}")))
    };
    let addresses: Vec<SocketAddr> = scene.nodes.iter().map(Node::address).collect();
    const WAITING: &str = "an earlier router may still reply from hot copies";
    scene.first.process().expect_log(&["node is up"]);
    // The previous process held the lock of the same store.
    scene.first.process_mut().kill();
    scene.first.start_again(&addresses);
    assert!(!scene.first.process().log().contains(WAITING), "{}", scene.first.process().log());
    // A copy of the directory proves nothing about a process that was killed.
    scene.copy_state();
    scene.first.process_mut().kill();
    let mut second = scene.second(&[], scene.copy.path());
    scene.client_of(&mut second);
    assert_eq!(second.log().matches(WAITING).count(), 2, "{}", second.log());
    // A stopped router records its end.
    second.signal(Signal::TERM);
    assert_eq!(second.wait(Duration::from_secs(60)).code(), Some(0), "{}", second.log());
    assert!(marks(&scene).contains("stopped:"), "{}", marks(&scene));
    let mut third = scene.second(&[], &scene.first.state_dir());
    scene.client_of(&mut third);
    // The two share a log.
    assert_eq!(third.log().matches(WAITING).count(), 2, "once for each node, by the second router: {}", third.log());
}
