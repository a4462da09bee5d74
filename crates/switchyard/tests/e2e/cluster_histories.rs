//! Histories of clients of two routers in front of a cluster, while members and routers fail.
//!
//! A failover of a cluster may lose writes that were not replicated yet. The servers here send a write to its replica before
//! they reply, and the replica receives what a killed server has sent. So a lost write would be an error of a router.

use std::net::SocketAddr;
use std::time::Duration;

use rustix::process::Signal;

use crate::cluster_storage::Members;
use crate::movectl_history::Recording;
use crate::support::{Client, Random, Router, direct, ok, until};

/// Number of faults of a run. `SWITCHYARD_HISTORY_FAULTS` sets another. With `SWITCHYARD_HISTORY_CONTROL`, the clients
/// follow the cluster's redirects themselves, without routers: a violation is then one of the cluster.
const FAULTS: usize = 8;

/// The primary of a pair of a primary and its replica, and the replica.
fn pair(members: &Members, first: usize) -> (usize, usize) {
    if members.is_primary(first) { (first, first + 3) } else { (first + 3, first) }
}

/// Waits until a replaced member is the replica of `owner`, and receives each write. The link is up before that: an owner
/// sends nothing to a new replica for up to a second, so the next failover would lose writes.
fn until_replica(members: &Members, owner: usize, replica: usize) {
    until("the former primary is a replica", || {
        replication(members, replica).contains("master_link_status:up")
            && replication(members, owner).contains("state=online")
    });
    let before = offset(members, owner, "master_repl_offset:");
    until("a replica receives writes", || offset(members, replica, "slave_repl_offset:") > before);
}

fn replication(members: &Members, number: usize) -> String {
    members.nodes[number].cmd("INFO replication").text()
}

/// Returns the bytes of replicated writes that a member has written or received.
fn offset(members: &Members, number: usize, field: &str) -> u64 {
    let info = replication(members, number);
    let value = info.lines().find_map(|line| line.strip_prefix(field));
    value.and_then(|value| value.trim().parse().ok()).unwrap_or_default()
}

/// Waits until a router has an owner for every key. Before that, it would accept a write of the resumed primary, as every
/// client of a cluster does, and the cluster loses this write.
fn until_served(router: &Router) {
    let mut client = Client::connect(router.address());
    for tag in ["h0", "h1", "h2"] {
        until("the router has the next owner", || client.cmd(&format!("SET {{{tag}}}probe v")) == ok());
    }
}

#[test]
fn histories_are_linearizable_while_members_and_routers_fail() {
    if direct() {
        return;
    }
    let faults = std::env::var("SWITCHYARD_HISTORY_FAULTS").ok().and_then(|text| text.parse().ok()).unwrap_or(FAULTS);
    for seed in Random::seeds(&[]) {
        println!("SWITCHYARD_E2E_SEED={seed}");
        run(seed, faults);
    }
}

fn run(seed: u64, faults: usize) {
    let mut random = Random::new(seed);
    let mut members = Members::start_with(3, 3);
    let is_control = std::env::var_os("SWITCHYARD_HISTORY_CONTROL").is_some();
    let mut routers: Vec<Router> = (0..2).filter(|_| !is_control).map(|_| members.router("")).collect();
    let addresses: Vec<SocketAddr> =
        if is_control { members.addresses() } else { routers.iter().map(Router::address).collect() };
    let recording = Recording::start(&addresses, |number| format!("{{h{}}}{number}", number % 3));
    let mut steps = Vec::new();
    for _ in 0..faults {
        recording.wait_for(200);
        let first = random.below(3);
        let (primary, replica) = pair(&members, first);
        match random.below(if is_control { 4 } else { 6 }) {
            0 => {
                steps.push("reshard".to_owned());
                members.reshard(["h0", "h1", "h2"][first]);
            }
            1 => {
                steps.push(format!("failover of {primary}"));
                let mut attempts = 0;
                until("the replica is the primary", || {
                    // A failover that does not get its votes in time is given up.
                    if attempts % 600 == 0 {
                        members.nodes[replica].cmd("CLUSTER FAILOVER");
                    }
                    attempts += 1;
                    members.is_primary(replica)
                });
                until_replica(&members, replica, primary);
            }
            2 => {
                steps.push(format!("kill of {primary}"));
                members.nodes[primary].kill();
                until("the replica is the primary", || members.is_primary(replica));
                members.nodes[primary].restart();
                until_replica(&members, replica, primary);
            }
            3 => {
                steps.push(format!("suspension of {primary}"));
                members.nodes[primary].freeze();
                until("the replica is the primary", || members.is_primary(replica));
                routers.iter().for_each(until_served);
                members.nodes[primary].thaw();
                until_replica(&members, replica, primary);
            }
            4 => {
                steps.push("suspension of a router".to_owned());
                let router = routers[first % 2].process();
                router.signal(Signal::STOP);
                std::thread::sleep(Duration::from_millis(700));
                router.signal(Signal::CONT);
            }
            _ => {
                steps.push("kill of a router".to_owned());
                routers[first % 2].process_mut().kill();
                routers[first % 2].start_again(&members.addresses());
            }
        }
    }
    recording.wait_for(200);
    println!("{steps:?}");
    let (tally, keys) = recording.finish().unwrap_or_else(|why| panic!("seed {seed}, {steps:?}: {why}"));
    let expected: &[&str] = if is_control {
        &["MOVED", "ASK", "TRYAGAIN", "CLUSTERDOWN", "EXECABORT", "MASTERDOWN", "LOADING"]
    } else {
        &["NODELOST", "NODEDOWN", "CLUSTERDOWN"]
    };
    let is_expected = |word: &String| expected.contains(&word.as_str());
    assert!(tally.errors.keys().all(is_expected) && keys.len() > 9, "seed {seed}, {steps:?}: {tally:?}");
}
