//! One thing breaks in the middle of a move, under clients whose histories must have an order, and everything is well again by itself.
//!
//! Short: each run moves some thousand keys, slowly enough that the fault meets it under way, and fast once it is over. `make soak` has the same for hours.

use std::net::SocketAddr;

use rustix::process::{Pid, Resource, Rlimit, Signal};
use switchyard_policy::topology::slot_of;

use crate::movectl::{ask, done};
use crate::movectl_history::{Recording, Tally};
use crate::movectl_moves::{eventually, report, the_move};
use crate::support::relay::Relay;
use crate::support::{Node, NodeOptions, Router, RouterOptions, Value, bulk, direct, encode, ok};

/// Keys that nobody changes.
const FIXED: u64 = 1000;

/// Nodes behind relays, the router before them, and clients.
struct Scene {
    router: Router,
    relays: Vec<Relay>,
    nodes: Vec<Node>,
    recording: Recording,
    source: usize,
    target: usize,
}

/// A name in the slots of the source, which are the first half.
fn name(prefix: &str, number: u64) -> String {
    let names = (0..).map(|try_| format!("{prefix}:{number}:{try_}"));
    names.into_iter().find(|name| slot_of(name.as_bytes()).number() < 8192).expect("half of all names")
}

fn fixed(number: u64) -> (String, String) {
    (name("fixed", number), format!("{number} {}", "x".repeat(100)))
}

impl Scene {
    fn start(is_durable: bool) -> Scene {
        let args: &[&str] = if is_durable { &["--appendonly", "yes", "--appendfsync", "always"] } else { &[] };
        let options = NodeOptions { args: args.iter().map(|a| (*a).to_owned()).collect(), ..NodeOptions::default() };
        let nodes: Vec<Node> = (0..2).map(|_| Node::start(&options)).collect();
        let relays: Vec<Relay> = nodes.iter().map(|node| Relay::start(node.address())).collect();
        let addresses: Vec<SocketAddr> = relays.iter().map(Relay::address).collect();
        let args = ["--set", "nodes.command-timeout=1s", "--set", "nodes.connect-timeout=1s"].map(str::to_owned).to_vec();
        let router = Router::start(&addresses, &RouterOptions { args, ..RouterOptions::default() });
        // The first placement goes by the order of names.
        let source = usize::from(addresses[1].to_string() < addresses[0].to_string());
        let mut client = crate::support::Client::connect(router.address());
        let bytes: Vec<u8> = (0..FIXED).map(fixed).flat_map(|(key, value)| encode(&["SET", &key, &value])).collect();
        for reply in client.pipeline(&bytes, FIXED as usize) {
            assert_eq!(reply, b"+OK\r\n");
        }
        let recording = Recording::start(&[router.address()], |number| name("h", number));
        Scene { router, relays, nodes, recording, source, target: 1 - source }
    }

    fn addresses(&self) -> Vec<SocketAddr> {
        self.relays.iter().map(Relay::address).collect()
    }

    fn move_command(&self, options: &str) -> String {
        let addresses = self.addresses();
        format!("move --from {} --to {} --all {options}", addresses[self.source], addresses[self.target])
    }

    /// What the move does, or why it has ended.
    fn doing(&self) -> String {
        the_move(&self.router, 1)["doing"].as_str().unwrap_or_default().to_owned()
    }

    /// Waits until clients have felt it.
    #[track_caller]
    fn until_it_is_felt(&self) {
        let before = self.recording.tally();
        eventually("clients feel it", || (self.recording.tally().unknown > before.unknown + 3).then_some(()));
    }

    #[track_caller]
    fn until_it_does(&self, what: &str) {
        eventually(&format!("it says {what:?}"), || self.doing().contains(what).then_some(()));
    }
}

/// Does something in the middle of a move, which everything must have recovered from when it returns; and looks whether all is as it must be.
#[track_caller]
fn during_a_move(is_durable: bool, fault: impl FnOnce(&mut Scene)) -> Option<Tally> {
    if direct() {
        eprintln!("nothing to check against a plain server");
        return None;
    }
    let mut scene = Scene::start(is_durable);
    scene.recording.wait_for(100);
    done(&scene.router, &scene.move_command("--goal gentle --max-rate 40k"));
    eventually("keys move", || the_move(&scene.router, 1)["keys_moved"].as_u64().filter(|keys| *keys > 30));
    fault(&mut scene);
    // Everybody is served again, while the rest moves.
    scene.recording.wait_for(200);
    let is_over = |id| ["done", "stopped"].contains(&the_move(&scene.router, id)["state"].as_str().unwrap_or_default());
    for line in ["moves max-rate 1 none", "moves goal 1 fast"] {
        let said = ask(&scene.router, line);
        assert!(said.code == 0 || is_over(1), "{line}: {}", said.err);
    }
    eventually("the move is over", || is_over(1).then_some(()));
    if the_move(&scene.router, 1)["state"] == "stopped" {
        // It has said why; nothing hinders another one.
        eventually("another move is taken", || (ask(&scene.router, &scene.move_command("--goal fast")).code == 0).then_some(()));
        eventually("it is over", || is_over(2).then_some(()));
        assert_eq!(the_move(&scene.router, 2)["state"], "done", "{}", report(&scene.router));
    }
    scene.recording.wait_for(100);
    let Scene { router, relays: _relays, nodes, recording, source, target } = scene;
    let (tally, keys) = recording.finish().unwrap_or_else(|why| panic!("{why}\n{}", report(&router)));
    let mut client = crate::support::Client::connect(router.address());
    for (key, value) in (0..FIXED).map(fixed) {
        assert_eq!(client.cmd(&format!("GET {key}")), bulk(value), "{key}");
    }
    assert_eq!(nodes[source].cmd("KEYS *"), Value::Array(vec![]), "nothing is left at the source");
    let there = nodes[target].cmd("KEYS *");
    let fixed: Vec<String> = (0..FIXED).map(|number| fixed(number).0).collect();
    let others: Vec<String> = there.items().iter().map(Value::text).filter(|key| !fixed.contains(key) && !keys.contains(key)).collect();
    assert_eq!(others, [] as [&str; 0], "nobody wrote these");
    eprintln!("{} keys: {tally:?}", keys.len());
    Some(tally)
}

#[test]
fn without_a_fault_nobody_gets_an_error() {
    let Some(tally) = during_a_move(false, |_| {}) else { return };
    assert!(tally.unknown == 0 && tally.broken == 0 && tally.errors.is_empty(), "{tally:?}");
}

#[test]
fn the_source_is_killed() {
    during_a_move(true, |scene| {
        scene.nodes[scene.source].kill();
        scene.until_it_does("waiting for");
        scene.nodes[scene.source].restart();
    });
}

#[test]
fn the_target_is_killed() {
    during_a_move(true, |scene| {
        scene.nodes[scene.target].kill();
        scene.until_it_does("waiting for");
        scene.nodes[scene.target].restart();
    });
}

#[test]
fn the_router_is_killed() {
    during_a_move(false, |scene| {
        let nodes = scene.addresses();
        scene.router.process_mut().kill();
        scene.router.start_again(&nodes);
    });
}

#[test]
fn the_source_stands_still() {
    during_a_move(false, |scene| {
        scene.nodes[scene.source].freeze();
        scene.until_it_is_felt();
        scene.nodes[scene.source].thaw();
    });
}

#[test]
fn the_target_stands_still() {
    during_a_move(false, |scene| {
        scene.nodes[scene.target].freeze();
        scene.until_it_is_felt();
        scene.nodes[scene.target].thaw();
    });
}

#[test]
fn the_router_stands_still() {
    during_a_move(false, |scene| {
        scene.router.process().signal(Signal::STOP);
        // Longer than it waits for anything.
        std::thread::sleep(std::time::Duration::from_millis(1500));
        scene.router.process().signal(Signal::CONT);
    });
}

#[test]
fn connections_to_the_source_break_and_cannot_be_made() {
    during_a_move(false, |scene| {
        scene.relays[scene.source].refuse(true);
        scene.relays[scene.source].cut();
        scene.until_it_is_felt();
        scene.relays[scene.source].refuse(false);
    });
}

#[test]
fn connections_to_the_target_break_and_cannot_be_made() {
    during_a_move(false, |scene| {
        scene.relays[scene.target].refuse(true);
        scene.relays[scene.target].cut();
        scene.until_it_is_felt();
        scene.relays[scene.target].refuse(false);
    });
}

#[test]
fn what_is_sent_to_the_source_arrives_late() {
    during_a_move(false, |scene| {
        scene.relays[scene.source].hold(true);
        scene.until_it_is_felt();
        scene.relays[scene.source].hold(false);
    });
}

#[test]
fn what_is_sent_to_the_target_arrives_late() {
    during_a_move(false, |scene| {
        scene.relays[scene.target].hold(true);
        scene.until_it_is_felt();
        scene.relays[scene.target].hold(false);
    });
}

#[test]
fn what_the_source_answers_does_not_arrive() {
    during_a_move(false, |scene| {
        scene.relays[scene.source].stall(true);
        scene.until_it_is_felt();
        scene.relays[scene.source].stall(false);
    });
}

#[test]
fn what_the_target_answers_does_not_arrive() {
    during_a_move(false, |scene| {
        scene.relays[scene.target].stall(true);
        scene.until_it_is_felt();
        scene.relays[scene.target].stall(false);
    });
}

#[test]
fn the_target_runs_full() {
    let tally = during_a_move(false, |scene| {
        let target = &scene.nodes[scene.target];
        assert_eq!(target.cmd("CONFIG SET maxmemory 1"), ok());
        let state = eventually("the move ends", || Some(the_move(&scene.router, 1)["state"].clone()).filter(|state| state != "running"));
        assert!(state == "stopped" && (scene.doing().contains("OOM") || scene.doing().contains("room")), "{}", scene.doing());
        assert_eq!(target.cmd("CONFIG SET maxmemory 0"), ok());
    });
    assert!(tally.is_none_or(|tally| tally.broken == 0));
}

#[test]
fn the_target_refuses_restore() {
    let tally = during_a_move(false, |scene| {
        let target = &scene.nodes[scene.target];
        assert_eq!(target.cmd("ACL SETUSER default -restore"), ok());
        let state = eventually("the move ends", || Some(the_move(&scene.router, 1)["state"].clone()).filter(|state| state != "running"));
        assert!(state == "stopped" && scene.doing().contains("restore"), "{}", scene.doing());
        assert_eq!(target.cmd("ACL SETUSER default +restore"), ok());
    });
    assert!(tally.is_none_or(|tally| tally.broken == 0 && tally.errors.is_empty()));
}

#[test]
fn the_disk_of_the_router_is_full() {
    during_a_move(false, |scene| {
        let pid = Pid::from_raw(scene.router.process().pid() as i32);
        let nothing = Rlimit { current: Some(0), ..rustix::process::getrlimit(Resource::Fsize) };
        let free = rustix::process::prlimit(pid, Resource::Fsize, nothing).expect("limited");
        scene.until_it_does("cannot be written");
        scene.until_it_is_felt();
        rustix::process::prlimit(pid, Resource::Fsize, free).expect("free again");
    });
}
