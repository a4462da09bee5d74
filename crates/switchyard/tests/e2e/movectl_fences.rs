//! Requests on a broken connection may be executed later: the end of a move or of the router must account for all of
//! them.

use std::net::SocketAddr;

use switchyard_policy::topology::crc16_slot;

use crate::movectl::done;
use crate::movectl_moves::{eventually, the_move, wait_for};
use crate::support::relay::Relay;
use crate::support::{Client, Node, NodeOptions, Router, RouterOptions, Value, bulk, direct, ok};

/// Three nodes behind relays, and the router. The first node owns the key.
struct Scene {
    router: Router,
    relays: Vec<Relay>,
    nodes: Vec<Node>,
    key: String,
}

impl Scene {
    fn start() -> Option<Scene> {
        if direct() {
            eprintln!("nothing to check against a plain server");
            return None;
        }
        let started: Vec<Node> = (0..3).map(|_| Node::start(&NodeOptions::default())).collect();
        let mut pairs: Vec<(Relay, Node)> =
            started.into_iter().map(|node| (Relay::start(node.address()), node)).collect();
        // The first map depends on the order of names.
        pairs.sort_by_key(|(relay, _)| relay.address().to_string());
        let (relays, nodes): (Vec<Relay>, Vec<Node>) = pairs.into_iter().unzip();
        let args =
            ["--set", "nodes.command-timeout=1s", "--set", "nodes.connect-timeout=1s"].map(str::to_owned).to_vec();
        let addresses: Vec<SocketAddr> = relays.iter().map(Relay::address).collect();
        let router = Router::start(&addresses, &RouterOptions { args, ..RouterOptions::default() });
        let key =
            (0..).map(|n| format!("key:{n}")).find(|key| crc16_slot(key.as_bytes()).number() < 5461).expect("one");
        Some(Scene { router, relays, nodes, key })
    }

    fn client(&self) -> Client {
        Client::connect(self.router.address())
    }

    fn move_slot(&self, options: &str) {
        let (from, to) = (self.relays[0].address(), self.relays[1].address());
        let slot = crc16_slot(self.key.as_bytes()).number();
        done(&self.router, format!("move --from {from} --to {to} --slots {slot} --purge-target {options}").trim_end());
    }
}

#[test]
fn requests_of_an_aborted_move_are_not_executed_in_the_next() {
    let Some(scene) = Scene::start() else { return };
    let (key, target) = (&scene.key, &scene.relays[1]);
    assert_eq!(scene.nodes[1].cmd(&format!("SET {key} leftover")), ok());
    // With the name of this key, because a move tests the command at its target before it begins.
    target.hold_from(format!("UNLINK\r\n${}\r\n{key}", key.len()).as_bytes());
    scene.move_slot("");
    eventually("a removal is in flight", || target.holds_one());
    target.refuse(true);
    eventually("it is given up", || {
        the_move(&scene.router, 1)["activity"].as_str()?.contains("waiting for").then_some(())
    });
    done(&scene.router, "moves abort 1");
    wait_for(&scene.router, 1, "stopped");
    target.refuse(false);
    scene.move_slot("--wait");
    let mut client = scene.client();
    assert_eq!(client.cmd(&format!("SET {key} new")), ok());
    assert_eq!(scene.nodes[1].cmd(&format!("GET {key}")), bulk("new"));
    target.release();
    assert_eq!(client.cmd(&format!("GET {key}")), bulk("new"));
}

#[test]
fn requests_of_a_killed_router_are_not_executed_after_its_restart() {
    let Some(mut scene) = Scene::start() else { return };
    let key = scene.key.clone();
    scene.relays[0].hold_from(b"late");
    let mut client = scene.client();
    client.post(&format!("SET {key} late"));
    eventually("it is in flight", || scene.relays[0].holds_one());
    scene.router.process_mut().kill();
    let addresses: Vec<SocketAddr> = scene.relays.iter().map(Relay::address).collect();
    scene.router.start_again(&addresses);
    let mut client = scene.client();
    assert_eq!(client.cmd(&format!("GET {key}")), Value::Nil);
    scene.relays[0].release();
    assert_eq!(client.cmd(&format!("GET {key}")), Value::Nil);
    scene.move_slot("--wait");
    assert_eq!(client.cmd(&format!("GET {key}")), Value::Nil);
    assert_eq!(scene.nodes[0].cmd(&format!("EXISTS {key}")), Value::Int(0));
}

#[test]
fn functions_sent_by_an_aborted_move_do_not_come_back() {
    let Some(scene) = Scene::start() else { return };
    let library =
        |answer: u32| format!("#!lua name=library\nredis.register_function('f', function() return {answer} end)");
    let (mut client, target) = (scene.client(), &scene.relays[1]);
    assert_eq!(client.call(&["FUNCTION", "LOAD", &library(1)]), bulk("library"));
    // The move must copy the source's functions to the target. They differ from the target's: outside of moves, no
    // functions are loaded into a node that has any.
    assert_eq!(scene.nodes[1].client().call(&["FUNCTION", "LOAD", "REPLACE", &library(0)]), bulk("library"));
    target.hold_from(b"$8\r\nFUNCTION\r\n$7\r\nRESTORE");
    scene.move_slot("");
    eventually("they are in flight", || target.holds_one());
    target.refuse(true);
    eventually("it is given up", || {
        the_move(&scene.router, 1)["activity"].as_str()?.contains("waiting for").then_some(())
    });
    done(&scene.router, "moves abort 1");
    wait_for(&scene.router, 1, "stopped");
    let change = |client: &mut Client| client.call(&["FUNCTION", "LOAD", "REPLACE", &library(2)]);
    let refused = change(&mut client);
    assert!(
        matches!(&refused, Value::Error(text) if text.starts_with("TRYAGAIN") && text.contains("may still store")),
        "{refused:?}"
    );
    // A node that is down does not delay moves without it.
    let (from, to) = (scene.relays[0].address(), scene.relays[2].address());
    done(&scene.router, &format!("move --from {from} --to {to} --slots 1 --wait"));
    target.refuse(false);
    eventually("they are replaced", || change(&mut client) == bulk("library"));
    target.release();
    assert_eq!(scene.nodes[1].cmd("FCALL f 0"), Value::Int(2));
}
