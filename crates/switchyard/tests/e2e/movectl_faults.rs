//! A single fault during a move, with clients whose histories must be linearizable, and recovery without intervention.
//!
//! Short: each run moves some thousand keys, slowly until the fault occurs, and fast afterwards. `make soak` runs the
//! same for hours.

use std::collections::BTreeSet;
use std::net::SocketAddr;

use rustix::process::{Pid, Resource, Rlimit, Signal};
use switchyard_policy::topology::crc16_slot;

use crate::movectl::{done, run_cli};
use crate::movectl_history::{Recording, Tally, made};
use crate::movectl_moves::{eventually, report, the_move};
use crate::support::relay::Relay;
use crate::support::{Node, NodeOptions, Router, RouterOptions, Value, bulk, direct, encode, ok};

/// Number of keys that no client changes.
const FIXED: u64 = 1000;

/// Of the first keys that clients use, every second key below this number may exist before the move.
const MADE: u64 = 1200;

/// Data that moves.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Moved {
    /// All slots of the source.
    Slots,
    /// Keys without their slots: the unchanged keys, and every second key that clients use. The others stay, in the
    /// same slots.
    Keys,
}

/// Nodes behind relays, the router, and clients.
struct Scene {
    moved: Moved,
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
    names.into_iter().find(|name| crc16_slot(name.as_bytes()).number() < 8192).expect("half of all names")
}

fn fixed(number: u64) -> (String, String) {
    (name("fixed", number), format!("{number} {}", "x".repeat(100)))
}

fn is_made(number: u64) -> bool {
    number < MADE && number.is_multiple_of(2)
}

/// Key that clients use. A pattern distinguishes existing keys from other keys, but from nothing else.
fn used(number: u64) -> String {
    name(if is_made(number) { "made" } else { "h" }, number)
}

impl Scene {
    fn start(moved: Moved, is_durable: bool) -> Scene {
        let args: &[&str] = if is_durable { &["--appendonly", "yes", "--appendfsync", "always"] } else { &[] };
        let options = NodeOptions { args: args.iter().map(|a| (*a).to_owned()).collect(), ..NodeOptions::default() };
        let nodes: Vec<Node> = (0..2).map(|_| Node::start(&options)).collect();
        let relays: Vec<Relay> = nodes.iter().map(|node| Relay::start(node.address())).collect();
        let addresses: Vec<SocketAddr> = relays.iter().map(Relay::address).collect();
        let args =
            ["--set", "nodes.command-timeout=1s", "--set", "nodes.connect-timeout=1s"].map(str::to_owned).to_vec();
        let router = Router::start(&addresses, &RouterOptions { args, ..RouterOptions::default() });
        // The first map depends on the order of names.
        let source = usize::from(addresses[1].to_string() < addresses[0].to_string());
        let mut client = crate::support::Client::connect(router.address());
        let bytes: Vec<u8> = (0..FIXED).map(fixed).flat_map(|(key, value)| encode(&["SET", &key, &value])).collect();
        for reply in client.pipeline(&bytes, FIXED as usize) {
            assert_eq!(reply, b"+OK\r\n");
        }
        let numbers: Vec<u64> = (0..MADE).filter(|number| is_made(*number)).collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|number| made(*number, &used(*number))).collect();
        for reply in client.pipeline(&bytes, numbers.len()) {
            assert!(reply == b"+OK\r\n" || reply == b":1\r\n");
        }
        let target = 1 - source;
        if moved == Moved::Keys {
            // The set of keys is fixed from here on, whether or not they exist later.
            done(&router, &move_command(moved, addresses[source], addresses[target], SLOWLY));
        }
        let recording = Recording::start_with(&[router.address()], used, is_made);
        recording.wait_for(100);
        if moved == Moved::Slots {
            done(&router, &move_command(moved, addresses[source], addresses[target], SLOWLY));
        }
        Scene { moved, router, relays, nodes, recording, source, target }
    }

    fn addresses(&self) -> Vec<SocketAddr> {
        self.relays.iter().map(Relay::address).collect()
    }

    /// Command line for another move of the remaining data.
    fn move_command(&self, options: &str) -> String {
        let addresses = self.addresses();
        move_command(self.moved, addresses[self.source], addresses[self.target], options)
    }

    /// Current activity of the move, or the reason for its end.
    fn activity(&self) -> String {
        the_move(&self.router, 1)["activity"].as_str().unwrap_or_default().to_owned()
    }

    /// Waits until clients are affected.
    #[track_caller]
    fn until_it_is_felt(&self) {
        let before = self.recording.tally();
        eventually("clients feel it", || self.recording.tally().unknown > before.unknown + 3);
    }

    #[track_caller]
    fn until_it_does(&self, what: &str) {
        eventually(&format!("the activity contains {what:?}"), || self.activity().contains(what));
    }
}

/// Faults.
impl Scene {
    fn kill(&mut self, node: usize) {
        self.nodes[node].kill();
        self.until_it_does("waiting for");
        self.nodes[node].restart();
    }

    fn kill_the_router(&mut self) {
        let nodes = self.addresses();
        self.router.process_mut().kill();
        self.router.start_again(&nodes);
    }

    fn freeze(&self, node: usize) {
        self.nodes[node].freeze();
        self.until_it_is_felt();
        self.nodes[node].thaw();
    }

    fn cut_off(&self, node: usize) {
        self.relays[node].refuse(true);
        self.relays[node].cut();
        self.until_it_is_felt();
        self.relays[node].refuse(false);
    }

    fn delay_what_is_sent(&self, node: usize) {
        self.relays[node].hold(true);
        self.until_it_is_felt();
        self.relays[node].hold(false);
    }

    /// Drops sent bytes together with their connections.
    fn lose_what_is_sent(&self, node: usize) {
        self.relays[node].hold(true);
        self.until_it_does("waiting for");
        self.until_it_is_felt();
        self.relays[node].cut();
        self.relays[node].hold(false);
    }

    fn delay_what_is_answered(&self, node: usize) {
        self.relays[node].stall(true);
        self.until_it_is_felt();
        self.relays[node].stall(false);
    }

    /// Lets all writes to the disk fail. Returns the previous limit, to undo that.
    fn fill_the_disk(&self) -> Rlimit {
        let pid = Pid::from_raw(self.router.process().pid() as i32);
        let nothing = Rlimit { current: Some(0), ..rustix::process::getrlimit(Resource::Fsize) };
        let free = rustix::process::prlimit(pid, Resource::Fsize, nothing).expect("limited");
        self.until_it_does("cannot be written");
        free
    }

    fn free_the_disk(&self, free: Rlimit) {
        let pid = Pid::from_raw(self.router.process().pid() as i32);
        rustix::process::prlimit(pid, Resource::Fsize, free).expect("free again");
    }

    fn fill_the_target(&mut self) {
        let target = &self.nodes[self.target];
        assert_eq!(target.cmd("CONFIG SET maxmemory 1"), ok());
        let state = eventually("the move ends", || {
            Some(the_move(&self.router, 1)["state"].clone()).filter(|state| state != "running")
        });
        assert!(
            state == "stopped" && (self.activity().contains("OOM") || self.activity().contains("room")),
            "{}",
            self.activity()
        );
        assert_eq!(target.cmd("CONFIG SET maxmemory 0"), ok());
    }
}

/// Slow enough that faults occur during the move.
const SLOWLY: &str = "--goal gentle --max-rate 40k";

fn move_command(moved: Moved, from: SocketAddr, to: SocketAddr, options: &str) -> String {
    let what = if moved == Moved::Slots { "--all" } else { "--keys [fm]*" };
    format!("move --from {from} --to {to} {what} {options}")
}

/// Causes a fault during a move. The system must have recovered when `fault` returns. Then checks keys and histories.
#[track_caller]
fn during_a_move(moved: Moved, is_durable: bool, fault: impl FnOnce(&mut Scene)) -> Option<Tally> {
    if direct() {
        eprintln!("nothing to check against a plain server");
        return None;
    }
    let mut scene = Scene::start(moved, is_durable);
    eventually("keys move", || the_move(&scene.router, 1)["keys_moved"].as_u64().filter(|keys| *keys > 30));
    fault(&mut scene);
    // All clients are served again, while the rest moves.
    scene.recording.wait_for(200);
    let is_over = |id| ["done", "stopped"].contains(&the_move(&scene.router, id)["state"].as_str().unwrap_or_default());
    for line in ["moves max-rate 1 none", "moves goal 1 fast"] {
        let said = run_cli(&scene.router, line);
        assert!(said.code == 0 || is_over(1), "{line}: {}", said.err);
    }
    eventually("the move is over", || is_over(1));
    let was_stopped = the_move(&scene.router, 1)["state"] == "stopped";
    if was_stopped {
        // The move has ended with a reason, and another move can start.
        eventually("another move is taken", || run_cli(&scene.router, &scene.move_command("--goal fast")).code == 0);
        eventually("it is over", || is_over(2));
        assert_eq!(the_move(&scene.router, 2)["state"], "done", "{}", report(&scene.router));
    }
    scene.recording.wait_for(100);
    let Scene { router, relays, nodes, recording, source, target, .. } = scene;
    let (tally, used) = recording.finish().unwrap_or_else(|why| panic!("{why}\n{}", report(&router)));
    let mut client = crate::support::Client::connect(router.address());
    let mut unchanged = || {
        for (key, value) in (0..FIXED).map(fixed) {
            assert_eq!(client.cmd(&format!("GET {key}")), bulk(value), "{key}");
        }
    };
    unchanged();
    let keys_of = |node: &Node| -> BTreeSet<String> { node.cmd("KEYS *").items().iter().map(Value::text).collect() };
    let (left, there) = (keys_of(&nodes[source]), keys_of(&nodes[target]));
    assert_eq!(left.intersection(&there).next(), None, "at both nodes");
    let mut known: BTreeSet<String> = (0..FIXED).map(|number| fixed(number).0).chain(used.iter().cloned()).collect();
    known.extend((0..MADE).filter(|number| is_made(*number)).map(self::used));
    assert_eq!(left.union(&there).find(|key| !known.contains(*key)), None, "this was never written");
    match moved {
        Moved::Slots => assert_eq!(left.first(), None, "nothing is left at the source"),
        Moved::Keys => {
            assert_eq!(there.iter().find(|key| key.starts_with('h')), None, "it did not move");
            // A key that did not exist at the start of the second move does not belong to it.
            let moves = |key: &&String| key.starts_with('f') || key.starts_with('m') && !was_stopped;
            assert_eq!(left.iter().find(moves), None, "left at the source");
            // All keys can be returned to their slot owners.
            done(&router, &format!("move --from {} --home --wait --goal fast", relays[target].address()));
            unchanged();
            assert_eq!(keys_of(&nodes[target]).first(), None, "left where they have been");
        }
    }
    eprintln!("{} keys: {tally:?}", used.len());
    Some(tally)
}

fn no_error(tally: Option<Tally>) {
    let Some(tally) = tally else { return };
    assert!(tally.unknown == 0 && tally.broken == 0 && tally.errors.is_empty(), "{tally:?}");
}

/// One test per line: moved data, persistence of the nodes, and the fault.
macro_rules! faults {
    ($($name:ident: ($moved:ident, $durable:literal) $fault:expr;)*) => {
        $(#[test]
        fn $name() {
            during_a_move(Moved::$moved, $durable, $fault);
        })*
    };
}

faults! {
    the_source_is_killed: (Slots, true) |scene| scene.kill(scene.source);
    the_target_is_killed: (Slots, true) |scene| scene.kill(scene.target);
    the_router_is_killed: (Slots, false) Scene::kill_the_router;
    the_source_is_frozen: (Slots, false) |scene| scene.freeze(scene.source);
    the_target_is_frozen: (Slots, false) |scene| scene.freeze(scene.target);
    the_source_is_unreachable: (Slots, false) |scene| scene.cut_off(scene.source);
    the_target_is_unreachable: (Slots, false) |scene| scene.cut_off(scene.target);
    requests_to_the_source_arrive_late: (Slots, false) |scene| scene.delay_what_is_sent(scene.source);
    requests_to_the_target_arrive_late: (Slots, false) |scene| scene.delay_what_is_sent(scene.target);
    requests_to_the_source_are_lost: (Slots, false) |scene| scene.lose_what_is_sent(scene.source);
    requests_to_the_target_are_lost: (Slots, false) |scene| scene.lose_what_is_sent(scene.target);
    replies_of_the_source_do_not_arrive: (Slots, false) |scene| scene.delay_what_is_answered(scene.source);
    replies_of_the_target_do_not_arrive: (Slots, false) |scene| scene.delay_what_is_answered(scene.target);
}

#[test]
fn without_a_fault_no_client_gets_an_error() {
    no_error(during_a_move(Moved::Slots, false, |_| {}));
}

#[test]
fn the_router_is_frozen() {
    during_a_move(Moved::Slots, false, |scene| {
        scene.router.process().signal(Signal::STOP);
        // Longer than any timeout of the router.
        std::thread::sleep(std::time::Duration::from_millis(1500));
        scene.router.process().signal(Signal::CONT);
    });
}

#[test]
fn the_target_runs_full() {
    let tally = during_a_move(Moved::Slots, false, Scene::fill_the_target);
    assert!(tally.is_none_or(|tally| tally.broken == 0));
}

#[test]
fn the_target_refuses_restore() {
    let tally = during_a_move(Moved::Slots, false, |scene| {
        let target = &scene.nodes[scene.target];
        assert_eq!(target.cmd("ACL SETUSER default -restore"), ok());
        let state = eventually("the move ends", || {
            Some(the_move(&scene.router, 1)["state"].clone()).filter(|state| state != "running")
        });
        assert!(state == "stopped" && scene.activity().contains("restore"), "{}", scene.activity());
        assert_eq!(target.cmd("ACL SETUSER default +restore"), ok());
    });
    assert!(tally.is_none_or(|tally| tally.broken == 0 && tally.errors.is_empty()));
}

#[test]
fn the_source_refuses_to_remove_keys() {
    during_a_move(Moved::Slots, false, |scene| {
        let source = &scene.nodes[scene.source];
        assert_eq!(source.cmd("ACL SETUSER default -unlink"), ok());
        scene.until_it_does("refuses to remove keys");
        assert_eq!(source.cmd("ACL SETUSER default +unlink"), ok());
    });
}

#[test]
fn the_disk_of_the_router_is_full() {
    during_a_move(Moved::Slots, false, |scene| {
        let free = scene.fill_the_disk();
        scene.until_it_is_felt();
        scene.free_the_disk(free);
    });
}

/// The keys stored at the target were never recorded.
#[test]
fn the_router_is_killed_while_its_disk_is_full() {
    during_a_move(Moved::Slots, false, |scene| {
        scene.fill_the_disk();
        scene.until_it_is_felt();
        scene.kill_the_router();
    });
}

/// The keys stored at the target are recorded, but still at the source.
#[test]
fn the_router_is_killed_before_the_source_has_removed_keys() {
    during_a_move(Moved::Slots, false, |scene| {
        let free = scene.fill_the_disk();
        scene.until_it_is_felt();
        scene.relays[scene.source].hold(true);
        scene.free_the_disk(free);
        scene.until_it_does("waiting for");
        scene.until_it_is_felt();
        // Held requests are lost with their connections.
        scene.router.process_mut().kill();
        scene.relays[scene.source].cut();
        scene.relays[scene.source].hold(false);
        let nodes = scene.addresses();
        scene.router.start_again(&nodes);
    });
}

/// Faults while keys move without their slots.
mod of_keys {
    use super::{Moved, Scene, during_a_move, no_error};

    faults! {
        the_source_is_killed: (Keys, true) |scene| scene.kill(scene.source);
        the_target_is_killed: (Keys, true) |scene| scene.kill(scene.target);
        the_router_is_killed: (Keys, false) Scene::kill_the_router;
        the_source_is_frozen: (Keys, false) |scene| scene.freeze(scene.source);
        the_target_is_frozen: (Keys, false) |scene| scene.freeze(scene.target);
        replies_of_the_source_do_not_arrive: (Keys, false) |scene| scene.delay_what_is_answered(scene.source);
        replies_of_the_target_do_not_arrive: (Keys, false) |scene| scene.delay_what_is_answered(scene.target);
    }

    #[test]
    fn without_a_fault_no_client_gets_an_error() {
        no_error(during_a_move(Moved::Keys, false, |_| {}));
    }

    #[test]
    fn the_target_runs_full() {
        let tally = during_a_move(Moved::Keys, false, Scene::fill_the_target);
        assert!(tally.is_none_or(|tally| tally.broken == 0));
    }
}
