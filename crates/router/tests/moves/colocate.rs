//! Commands that wait until their keys are at one node. The test takes the role of the control plane and decides when to
//! answer.

use std::sync::{Arc, Mutex};

use switchyard_policy::colocate::ColocationRequest;
use switchyard_policy::migration::{Goal, Key};
use switchyard_policy::topology::{MoveId, NodeId, crc16_slot};
use switchyard_router::{ColocatePort, ColocateRequest, MoveEnd, Ports, UserRequest};

use super::fleet::{Fleet, Server, until, with};
use super::waiting::blocked;

/// Collects requests.
#[derive(Debug, Default)]
struct Port {
    requests: Mutex<Vec<ColocateRequest>>,
}

impl ColocatePort for Port {
    fn colocate(&self, request: ColocateRequest) {
        self.requests.lock().expect("lock").push(request);
    }
}

impl Port {
    #[track_caller]
    fn next(&self) -> ColocateRequest {
        until("a request arrives", || !self.requests.lock().expect("lock").is_empty());
        self.requests.lock().expect("lock").remove(0)
    }
}

/// Two nodes. `home` owns the slot of `{t}`.
struct Scene {
    fleet: Fleet,
    port: Arc<Port>,
    home: NodeId,
    away: NodeId,
}

impl Scene {
    fn new() -> Self {
        let port = Arc::new(Port::default());
        let ports = Ports { colocate: Some(port.clone()), ..Ports::default() };
        let fleet = Fleet::with_ports((0..2).map(|_| Server::start(&[])).collect(), ports);
        let owned_by_first = fleet.slots_of(fleet.node(0)).contains(&crc16_slot(b"{t}"));
        let (home, away) = if owned_by_first { (fleet.node(0), fleet.node(1)) } else { (fleet.node(1), fleet.node(0)) };
        Self { fleet, port, home, away }
    }

    /// Returns a hash tag of the other node.
    fn tag_of_other(&self) -> String {
        let slots = self.fleet.slots_of(self.away);
        let is_there = |tag: &String| slots.contains(&crc16_slot(tag.as_bytes()));
        (0..).map(|n| format!("{{k{n}}}")).find(is_there).expect("half of all")
    }
}

/// Sets the location of a key.
fn publish(fleet: &Fleet, key: &str, node: NodeId) {
    let topology = fleet.keeper.topology.lock().expect("lock").clone();
    fleet.keeper.publish(topology.keys_handed_over(&[crc16_slot(key.as_bytes())], &[Arc::from(key.as_bytes())], node));
}

#[test]
fn a_command_requests_colocation_again_if_keys_parted() {
    let Scene { fleet, port, home, away } = Scene::new();
    let mut client = fleet.client();
    assert_eq!(client.cmd("SET {t}a 1"), "OK");
    publish(&fleet, "{t}b", away);
    client.post("RENAME {t}a {t}b");
    port.next().done();
    let again = port.next();
    publish(&fleet, "{t}b", home);
    assert_eq!((client.reply(), client.cmd("GET {t}b")), ("OK".to_owned(), "1".to_owned()));
    again.done();
}

#[test]
fn an_old_colocation_answer_does_not_affect_a_later_command() {
    let Scene { fleet, port, home, away } = Scene::new();
    let (mut client, mut other) = (fleet.client(), fleet.client());
    assert_eq!(client.cmd("SET {t}a 1"), "OK");
    publish(&fleet, "{t}b", away);
    client.post("RENAME {t}a {t}b");
    let first = port.next();
    publish(&fleet, "{t}b", home);
    assert_eq!(client.reply(), "OK");
    publish(&fleet, "{t}c", away);
    client.post("RENAME {t}b {t}c");
    let second = port.next();
    first.refuse("of the past");
    // All workers answer this after their earlier messages.
    assert!(other.cmd("CLIENT LIST").contains("id="));
    publish(&fleet, "{t}c", home);
    assert_eq!((client.reply(), client.cmd("GET {t}c")), ("OK".to_owned(), "1".to_owned()));
    second.done();
}

#[test]
fn keys_of_several_slots_are_needed_until_the_command_is_sent() {
    let scene = Scene::new();
    let other = scene.tag_of_other();
    let Scene { fleet, port, home, .. } = scene;
    let mut client = fleet.client();
    assert_eq!(client.cmd("SET {t}a 1"), "OK");
    client.post(&format!("RENAME {{t}}a {other}"));
    let request = port.next();
    let keys = vec![Arc::from(&b"{t}a"[..]), Arc::from(other.as_bytes())];
    assert_eq!(*request.wanted(), ColocationRequest::Several { keys, at: None });
    assert_eq!(request.wait().strong_count(), 1);
    publish(&fleet, &other, home);
    assert_eq!((client.reply(), client.cmd(&format!("GET {other}"))), ("OK".to_owned(), "1".to_owned()));
    until("its keys may leave", || request.wait().strong_count() == 0);
    // The next command finds them together.
    assert_eq!(client.cmd(&format!("RENAME {other} {{t}}a")), "OK");
    assert!(port.requests.lock().expect("lock").is_empty());
    request.done();
}

#[test]
fn exec_does_not_wait_for_a_leg_that_has_committed_its_watched_keys() {
    let scene = Scene::new();
    let tag = scene.tag_of_other();
    let Scene { fleet, port, home, away } = scene;
    let mut client = fleet.client();
    let names: Vec<String> = (0..500).map(|n| format!("{tag}{n}")).collect();
    for name in &names {
        assert_eq!(client.cmd(&format!("SET {name} {}", "x".repeat(200))), "OK");
    }
    let mut keys: Vec<Key> = names.iter().map(|name| Key::from(name.as_bytes())).collect();
    keys.sort_unstable();
    fleet.begin(with(fleet.task(1, 0, 1), |order| {
        (order.source, order.target) = (away, home);
        (order.slots, order.keys) = (vec![crc16_slot(tag.as_bytes())], Some(keys.into()));
        (order.how.goal, order.how.max_rate) = (Goal::Gentle, Some(2_000));
    }));
    until("keys move", || fleet.progress(1).keys_moved > 0);
    // The mover pulls this key next.
    let watched = &names[7];
    assert_eq!(client.cmd(&format!("STRLEN {watched}")), "200");
    for (line, reply) in [
        (format!("WATCH {{t}}a {watched}"), "OK"),
        ("MULTI".to_owned(), "OK"),
        ("SET {t}a 1".to_owned(), "QUEUED"),
        ("EXEC".to_owned(), "[OK]"),
    ] {
        assert_eq!(client.cmd(&line), reply, "{line}");
    }
    assert!(port.requests.lock().expect("lock").is_empty());
    assert!(fleet.progress(1).end.is_none());
    fleet.router().steer_move(MoveId(1), UserRequest::MaxRate(None));
    fleet.router().steer_move(MoveId(1), UserRequest::Goal(Goal::Fast));
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
}

#[test]
fn each_separation_of_the_keys_of_a_blocked_command_starts_a_new_wait() {
    let scene = Scene::new();
    let other = scene.tag_of_other();
    let Scene { fleet, port, home, away } = scene;
    let all_blocked = || fleet.servers.iter().map(blocked).sum::<usize>();
    let (mut client, mut pusher) = (fleet.client(), fleet.client());
    client.post(&format!("BLPOP {{t}}a {other} 0"));
    for round in 0..3 {
        // The command is at the router now.
        let request = port.next();
        assert!(request.waited().is_zero(), "{:?} in round {round}", request.waited());
        publish(&fleet, &other, home);
        until("it waits at the node of its keys", || all_blocked() == 1);
        request.done();
        // All workers answer this after their earlier messages.
        assert!(pusher.cmd("CLIENT LIST").contains("id="));
        if round < 2 {
            publish(&fleet, &other, away);
        }
    }
    assert_eq!(pusher.cmd("RPUSH {t}a x"), "1");
    assert_eq!(client.reply(), "[{t}a, x]");
}
