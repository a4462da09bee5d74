//! Moves end or roll back, and clients are served in the meantime: a busy source, a target that is down or crashes on a
//! value, a client that waits for a whole slot, an operator who aborts.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use switchyard_policy::topology::crc16_slot;

use crate::movectl::done;
use crate::movectl_moves::{eventually, the_move, wait_for};
use crate::support::{Client, NodeOptions, RouterOptions, Site, SiteOptions, Value, bulk, encode, ok};

/// Keys of one slot. With [`SLOWLY`], their leg takes minutes.
const KEYS: usize = 8_000;
const SLOWLY: &str = "--goal gentle --max-rate 20kb";

/// A slot full of keys on the first node, about to move to the second.
struct Scene {
    site: Site,
    tag: String,
}

impl Scene {
    fn start() -> Option<Scene> {
        Scene::start_with(&[])
    }

    fn start_with(settings: &[&str]) -> Option<Scene> {
        let node = NodeOptions::args(&["--appendonly", "yes", "--appendfsync", "always"]);
        let args =
            ["--set", "moves.big-key=0"].into_iter().chain(settings.iter().copied()).map(str::to_owned).collect();
        let router = RouterOptions { args, nodes_may_be_down: true, ..RouterOptions::default() };
        let site = Site::router_only(2, &SiteOptions { node, router })?;
        let tag = site.tags()[0][0].clone();
        let scene = Scene { site, tag };
        let bytes: Vec<u8> = (0..KEYS).flat_map(|n| encode(&["SET", &scene.key(n), &value(n)])).collect();
        for reply in scene.site.client().pipeline(&bytes, KEYS) {
            assert_eq!(reply, b"+OK\r\n");
        }
        Some(scene)
    }

    fn key(&self, number: usize) -> String {
        format!("{{{}}}key:{number}", self.tag)
    }

    fn begin(&self, options: &str) {
        let [from, to] = [0, 1].map(|node| self.site.nodes()[node].address());
        let slot = crc16_slot(self.key(0).as_bytes()).number();
        done(self.site.router(), &format!("move --from {from} --to {to} --slots {slot} {options}"));
    }

    fn until_keys_move(&self) {
        eventually("keys move", || the_move(self.site.router(), 1)["keys_moved"].as_u64().filter(|keys| *keys > 30));
    }

    fn is_at(&self, node: usize, number: usize) -> bool {
        self.site.nodes()[node].cmd(&format!("EXISTS {}", self.key(number))) == Value::Int(1)
    }

    /// Returns a key that has not moved.
    fn unmoved(&self) -> usize {
        (0..KEYS).rev().find(|number| self.is_at(0, *number)).expect("one has not moved")
    }

    #[track_caller]
    fn all_there(&self) {
        let bytes: Vec<u8> = (0..KEYS).flat_map(|n| encode(&["GET", &self.key(n)])).collect();
        for (number, reply) in self.site.client().pipeline(&bytes, KEYS).into_iter().enumerate() {
            let expected = value(number);
            assert_eq!(
                String::from_utf8_lossy(&reply),
                format!("${}\r\n{expected}\r\n", expected.len()),
                "key {number}"
            );
        }
    }
}

fn value(number: usize) -> String {
    format!("{number} {}", "x".repeat(100))
}

#[test]
fn commands_for_a_whole_slot_run_during_slow_and_paused_moves() {
    // Less than the slot's move takes at that rate, and enough for a busy machine to move it fast.
    let Some(scene) = Scene::start_with(&["--set", "nodes.command-timeout=25s"]) else { return };
    let mut client = scene.site.client();
    client.timeout(Duration::from_secs(60));
    let (list, weight) = (format!("{{{}}}list", scene.tag), format!("{{{}}}weight", scene.tag));
    for command in [format!("RPUSH {list} a b"), format!("SET {weight}:a 2"), format!("SET {weight}:b 1")] {
        assert_eq!(client.cmd(&command).error(), None);
    }
    scene.begin(SLOWLY);
    scene.until_keys_move();
    done(scene.site.router(), "moves pause 1");
    let sorted = client.cmd(&format!("SORT {list} BY {weight}:*"));
    assert_eq!(sorted, Value::Array(vec![bulk("b"), bulk("a")]));
    let key = scene.key(KEYS - 1);
    let read = client.call(&["EVAL", "local k = KEYS[1] return redis.call('GET', k)", "1", &key]);
    assert_eq!(read, bulk(value(KEYS - 1)));
    wait_for(scene.site.router(), 1, "done");
    scene.all_there();
}

#[test]
fn an_aborted_leg_rolls_back_if_that_is_shorter() {
    let Some(scene) = Scene::start() else { return };
    scene.begin(SLOWLY);
    scene.until_keys_move();
    done(scene.site.router(), "moves abort 1");
    let ended = wait_for(scene.site.router(), 1, "stopped");
    assert_eq!(ended["slots_done"], 0, "{ended}");
    assert_eq!(scene.site.nodes()[1].cmd("DBSIZE"), Value::Int(0));
    scene.all_there();
}

#[test]
fn keys_at_the_source_are_served_when_the_target_is_down() {
    let Some(mut scene) = Scene::start() else { return };
    scene.begin(SLOWLY);
    scene.until_keys_move();
    let number = scene.unmoved();
    // A key on both nodes is not committed yet, and served by the source.
    let moved = (0..KEYS).find(|number| scene.is_at(1, *number) && !scene.is_at(0, *number)).expect("one has moved");
    scene.site.node_mut(1).kill();
    let mut client = scene.site.client();
    let key = scene.key(number);
    let served = |client: &mut Client, say: &str| {
        eventually(say, || client.cmd(&format!("SET {key} {say}")) == ok());
        assert_eq!(client.cmd(&format!("GET {key}")), bulk(say));
    };
    served(&mut client, "once");
    // Never nil.
    assert!(client.cmd(&format!("GET {}", scene.key(moved))).error().is_some());
    // Also by a router that has never connected to the target.
    let nodes = [0, 1].map(|node| scene.site.nodes()[node].address());
    scene.site.router_mut().process_mut().kill();
    scene.site.router_mut().start_again(&nodes);
    let mut client = scene.site.client();
    served(&mut client, "twice");
    assert!(client.cmd(&format!("GET {}", scene.key(moved))).error().is_some());
    scene.site.node_mut(1).restart();
    let ended = wait_for(scene.site.router(), 1, "stopped");
    assert_eq!(ended["slots_done"], 0, "{ended}");
    assert_eq!(client.call(&["SET", &key, &value(number)]), ok());
    scene.all_there();
    assert_eq!(scene.site.nodes()[1].cmd("DBSIZE"), Value::Int(0));
}

/// The target closes the connection on this value, each time.
#[test]
fn a_value_that_the_target_never_accepts_ends_the_move() {
    let Some(scene) = Scene::start() else { return };
    let mut client = scene.site.client();
    let large = "x".repeat(3 << 20);
    assert_eq!(client.call(&["SET", &scene.key(0), &large]), ok());
    assert_eq!(scene.site.nodes()[1].cmd("CONFIG SET proto-max-bulk-len 1mb"), ok());
    scene.begin("--goal fast");
    let ended = wait_for(scene.site.router(), 1, "stopped");
    assert!(ended["activity"].as_str().is_some_and(|why| why.contains("in the middle of the same keys")), "{ended}");
    assert_eq!(client.call(&["GET", &scene.key(0)]), bulk(large.as_str()));
    assert_eq!(client.call(&["SET", &scene.key(0), &value(0)]), ok());
    scene.all_there();
}

#[test]
fn a_move_from_a_busy_source_ends() {
    let Some(scene) = Scene::start() else { return };
    let other = scene.site.tags()[0][1].clone();
    let is_over = AtomicBool::new(false);
    // Ends even if the test fails.
    let until = Instant::now() + Duration::from_secs(60);
    std::thread::scope(|scope| {
        for n in 0..4 {
            let (scene, is_over, key) = (&scene, &is_over, format!("{{{other}}}busy:{n}"));
            scope.spawn(move || {
                let mut client = scene.site.client();
                while !is_over.load(Ordering::SeqCst) && Instant::now() < until {
                    let reply = client.call(&["EVAL", "for i = 1, 3e6 do end return 1", "1", &key]);
                    assert_eq!(reply, Value::Int(1));
                }
            });
        }
        scene.begin("--goal fast");
        wait_for(scene.site.router(), 1, "done");
        is_over.store(true, Ordering::SeqCst);
    });
    scene.all_there();
}
