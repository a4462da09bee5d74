//! Bounded copies of a cluster's hot keys: own writes are visible at once, and no hit exceeds the bound.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::cluster_storage::Members;
use crate::support::{Client, Router, Value, bulk, direct, int, ok, until};

/// Copies every key that is read, for as long as the promise permits.
const COPIES: &str =
    "[hot-copies]\npromise = \"bounded\"\nadmission = \"all\"\nttl = \"0s\"\nstaleness-max = \"200ms\"\n";

const BOUND: Duration = Duration::from_millis(200);

fn hits(router: &Router) -> u64 {
    let metrics = router.metrics();
    let line = metrics.lines().find(|line| line.starts_with("switchyard_hot_copies_hits_total"));
    line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).unwrap_or_default() as u64
}

/// Reads until copies reply.
#[track_caller]
fn until_copied(router: &Router, client: &mut Client, key: &str) {
    let before = hits(router);
    until("copies reply", || {
        client.cmd(&format!("GET {key}"));
        hits(router) > before + 3
    });
}

#[test]
fn copies_of_a_cluster_show_own_writes_at_once() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    let router = members.router(COPIES);
    let mut client = Client::connect(router.address());
    for round in 0..30 {
        assert_eq!(client.cmd(&format!("SET k {round}")), ok());
        until_copied(&router, &mut client, "k");
        assert_eq!(client.cmd("GET k"), bulk(round.to_string()));
        assert_eq!(Client::connect(router.address()).cmd("GET k"), bulk(round.to_string()));
        if round % 10 == 9 {
            members.reshard("k");
        }
    }
    assert_eq!((client.cmd("DEL k"), client.cmd("GET k")), (int(1), Value::Nil));
}

/// The source of a migration sends no invalidation when another client creates an absent key at the target.
#[test]
fn a_copy_of_an_absent_key_ends_when_its_slot_migrates() {
    if direct() {
        return;
    }
    let members = Members::start(2);
    let router = members.router(COPIES);
    let mut client = Client::connect(router.address());
    until_copied(&router, &mut client, "{k}absent");
    let from = members.owner("{k}");
    let to = 1 - from;
    members.open("{k}", from, to);
    let mut other = members.nodes[to].client();
    assert_eq!((other.cmd("ASKING"), other.cmd("SET {k}absent v")), (ok(), ok()));
    until("the copy has ended", || client.cmd("GET {k}absent") == bulk("v"));
}

/// A client that bypasses the router writes numbers, while the slot moves and a member is suspended. A hit may be older than
/// the last write, but the next number must not have been acknowledged more than the bound before the read began.
#[test]
fn no_hit_exceeds_the_bound() {
    if direct() {
        return;
    }
    let members = Members::start(3);
    let router = members.router(COPIES);
    let is_over = AtomicBool::new(false);
    // Time at which each number was acknowledged.
    let acknowledged = Mutex::new(vec![Instant::now()]);
    assert_eq!(Client::connect(router.address()).cmd("SET k 0"), ok());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut number = 0;
            while !is_over.load(Ordering::Relaxed) {
                let next = number + 1;
                // Without a router: at the member that owns the slot, or to which it migrates.
                let is_written = members.nodes.iter().any(|node| node.cmd(&format!("SET k {next}")) == ok());
                if is_written {
                    acknowledged.lock().expect("times").push(Instant::now());
                    number = next;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let readers: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let mut client = Client::connect(router.address());
                    while !is_over.load(Ordering::Relaxed) {
                        let began = Instant::now();
                        let number: usize = client.cmd("GET k").text().parse().expect("a number");
                        let next = acknowledged.lock().expect("times").get(number + 1).copied();
                        let age = next.map_or(Duration::ZERO, |next| began.saturating_duration_since(next));
                        assert!(age <= BOUND, "{number} was replaced {age:?} before it was read");
                    }
                })
            })
            .collect();
        until_copied(&router, &mut Client::connect(router.address()), "k");
        for round in 0..6 {
            std::thread::sleep(Duration::from_millis(150));
            if round % 2 == 0 {
                members.reshard("k");
            } else {
                let owner = members.owner("k");
                members.nodes[owner].freeze();
                std::thread::sleep(Duration::from_millis(600));
                members.nodes[owner].thaw();
            }
        }
        is_over.store(true, Ordering::Relaxed);
        readers.into_iter().for_each(|reader| reader.join().expect("no hit exceeds the bound"));
    });
    assert!(hits(&router) > 100, "copies have replied");
}
