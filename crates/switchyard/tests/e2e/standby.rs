//! Two routers, one after another: a standby takes over when the first has died or stands still, and what the first still wants to do is never done.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::movectl::done;
use crate::movectl_moves::eventually;
use crate::support::process::Process;
use crate::support::{Client, Node, NodeOptions, Router, RouterOptions, bulk, direct, ok, ports};

/// A router before two nodes, and a place for another one.
struct Scene {
    first: Router,
    nodes: Vec<Node>,
    listen: SocketAddr,
    copy: TempDir,
}

impl Scene {
    fn start() -> Option<Scene> {
        if direct() {
            eprintln!("nothing to check against a plain server");
            return None;
        }
        let nodes: Vec<Node> = (0..2).map(|_| Node::start(&NodeOptions::default())).collect();
        let addresses: Vec<SocketAddr> = nodes.iter().map(Node::address).collect();
        let first = Router::start(&addresses, &RouterOptions::default());
        Some(Scene { first, nodes, listen: fresh(), copy: TempDir::new().expect("a directory") })
    }

    /// Copies the state directory of the first router, which changes nothing just now.
    fn copy_state(&self) {
        for file in ["state.redb", "moves.journal"] {
            std::fs::copy(self.first.state_dir().join(file), self.copy.path().join(file)).expect("copied");
        }
    }

    fn second(&self, args: &[&str], state: &Path) -> Process {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        self.first.start_beside(&RouterOptions { args, ..RouterOptions::default() }, self.listen, fresh(), state)
    }

    /// A client of the second router, as soon as that serves all nodes.
    fn client_of(&self, second: &mut Process) -> Client {
        eventually("the second router serves", || {
            assert_eq!(second.ended(), None, "{}", second.log());
            let mut client = Client::try_connect(self.listen).ok()?;
            client.post_quietly("DBSIZE");
            client.try_reply().ok().filter(|reply| reply.error().is_none())?;
            Some(client)
        })
    }

    /// No connection of the first router is left at any node.
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

fn fresh() -> SocketAddr {
    ([127, 0, 0, 1], ports::free()).into()
}

const WAITS: &str = "waits until no other router serves the nodes";

#[test]
fn a_standby_takes_over_when_the_router_was_killed() {
    let Some(mut scene) = Scene::start() else { return };
    assert_eq!(Client::connect(scene.first.address()).cmd("SET k before"), ok());
    scene.copy_state();
    let mut standby = scene.second(&["--standby", "copy"], scene.copy.path());
    eventually("it waits", || standby.log().contains(WAITS).then_some(()));
    assert!(Client::try_connect(scene.listen).is_err(), "a standby that waits serves nobody");
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
    eventually("it waits", || standby.log().contains("waits until the state directory is free").then_some(()));
    scene.first.process_mut().kill();
    let mut client = scene.client_of(&mut standby);
    assert_eq!(client.cmd("GET k"), bulk("before"));
}

#[test]
fn a_router_that_stood_still_writes_nothing_after_another_has_taken_over() {
    let Some(mut scene) = Scene::start() else { return };
    let keys: Vec<String> = (0..20).map(|n| format!("key:{n}")).collect();
    let mut old = Client::connect(scene.first.address());
    for key in &keys {
        assert_eq!(old.cmd(&format!("SET {key} before")), ok());
    }
    scene.copy_state();
    let mut standby = scene.second(&["--standby", "copy"], scene.copy.path());
    eventually("it waits", || standby.log().contains(WAITS).then_some(()));
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
    let status = scene.first.process_mut().wait(Duration::from_secs(60));
    assert_eq!(status.code(), Some(1));
    let log = scene.first.process().log();
    assert!(log.contains("another router has taken over the nodes"), "{log}");
    for key in &keys {
        assert_eq!(new.cmd(&format!("GET {key}")), bulk("new"));
    }
    scene.only_one_router_is_connected();
}

#[test]
fn a_state_directory_that_is_older_than_the_last_move_is_refused() {
    let Some(mut scene) = Scene::start() else { return };
    assert_eq!(Client::connect(scene.first.address()).cmd("SET k v"), ok());
    scene.copy_state();
    let names: Vec<String> = scene.nodes.iter().map(|node| node.address().to_string()).collect();
    let owner = scene.nodes.iter().position(|node| node.cmd("EXISTS k").int() == 1).expect("somewhere");
    done(&scene.first, &format!("move --from {} --to {} --all --wait", names[owner], names[1 - owner]));
    // Both find out: one that waits, and one that is to serve at once.
    let refused = |args: &[&str]| {
        let mut second = scene.second(args, scene.copy.path());
        assert_eq!(second.wait(Duration::from_secs(60)).code(), Some(1));
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
