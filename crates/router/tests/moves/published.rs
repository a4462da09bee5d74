//! Protocols as published (`--mode paper`), on real servers: clients that only read lose nothing, and the known
//! anomalies occur.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use switchyard_policy::migration::published::Paper;
use switchyard_policy::migration::tracker::Kind;
use switchyard_policy::migration::{Goal, Protocol};
use switchyard_policy::topology::{MoveId, crc16_slot};
use switchyard_router::{MoveEnd, MoveTask, UserRequest};

use super::fleet::{Client, Fleet, all_there, fill, until, with};

/// Returns a move from the first node to the second, so slow that most keys are in transit during a test.
fn published(fleet: &Fleet, id: u64, protocol: Protocol, change: impl FnOnce(&mut Paper)) -> MoveTask {
    with(fleet.task(id, 0, 1), |order| {
        let mut paper = Paper::of(protocol).expect("it is published");
        paper.groups = 64;
        change(&mut paper);
        (order.how.protocol, order.how.paper) = (protocol, Some(paper));
        (order.how.goal, order.how.max_rate) = (Goal::Gentle, Some(100));
    })
}

fn finish(fleet: &Fleet, id: u64) {
    fleet.router().steer_move(MoveId(id), UserRequest::MaxRate(None));
    fleet.router().steer_move(MoveId(id), UserRequest::Goal(Goal::Fast));
    assert_eq!(fleet.wait_for(id), MoveEnd::Done);
    assert_eq!(fleet.servers[0].client().cmd("DBSIZE"), "0");
}

/// Returns the keys at the first node.
fn of_source(fleet: &Fleet, count: usize) -> Vec<String> {
    let mut source = fleet.servers[0].client();
    (0..count).map(|n| format!("{{{n}}}")).filter(|key| source.cmd(&format!("EXISTS {key}")) == "1").collect()
}

fn missing(client: &mut Client, keys: &[String]) -> usize {
    keys.iter().filter(|key| client.cmd(&format!("GET {key}")) == "(nil)").count()
}

#[test]
fn a_client_that_only_reads_sees_everything() {
    const KEYS: usize = 1000;
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    fill(&mut client, KEYS);
    for (id, protocol) in
        [(1, Protocol::NetMigrate), (3, Protocol::Rocksteady), (5, Protocol::Fulva), (7, Protocol::Bloom)]
    {
        // Bloom telemetry trusts its filter, which has false positives.
        fleet.begin(published(&fleet, id, protocol, |paper| {
            paper.tracker = if protocol == Protocol::Bloom { Kind::Exact } else { paper.tracker }
        }));
        until("keys move", || fleet.progress(id).keys_moved > 10);
        all_there(&mut client, KEYS);
        // Single keys.
        let (keys, values): (Vec<String>, Vec<String>) =
            (0..20).map(|n| (format!("{{{n}}}"), format!("value{n}"))).unzip();
        if matches!(protocol, Protocol::Bloom) {
            assert_eq!(client.cmd(&format!("MGET {}", keys.join(" "))), format!("[{}]", values.join(", ")));
        }
        assert!(fleet.progress(id).end.is_none(), "it was on its way all the time");
        finish(&fleet, id);
        all_there(&mut client, KEYS);
        // Back with the correct protocol.
        let back = with(fleet.task(id + 1, 1, 0), |order| {
            order.slots.truncate(8192);
            order.how.goal = Goal::Fast;
        });
        fleet.run_to_end(back);
        all_there(&mut client, KEYS);
    }
}

#[test]
fn empty_values_at_the_target_are_not_replaced_by_those_of_the_source() {
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    fill(&mut client, 1000);
    // One group, so that all keys are read at both nodes.
    fleet.begin(published(&fleet, 1, Protocol::NetMigrate, |paper| (paper.groups, paper.tracker) = (1, Kind::Exact)));
    until("keys move", || fleet.progress(1).keys_moved > 0);
    // New keys, because a copy of an existing one could overwrite the write.
    let moving = fleet.slots_of(fleet.node(0));
    let is_moving = |key: &String| moving.contains(&crc16_slot(key.as_bytes()));
    let new: Vec<String> = (0..).map(|n| format!("{{new{n}}}")).filter(is_moving).take(3).collect();
    for (key, value) in new.iter().zip(["", "0", "-1"]) {
        client.send(&[b"SET", key.as_bytes(), value.as_bytes()]);
        assert_eq!(client.reply(), "OK");
        assert_eq!(client.cmd(&format!("GET {key}")), value);
        assert_eq!(fleet.servers[1].client().cmd(&format!("EXISTS {key}")), "1");
    }
    // Reads whose reply is never null still find keys at the source.
    for key in of_source(&fleet, 1000).iter().take(10) {
        assert_eq!(client.cmd(&format!("EXISTS {key}")), "1");
    }
    assert!(fleet.progress(1).end.is_none(), "it was in progress all the time");
    finish(&fleet, 1);
}

#[test]
fn published_protocols_show_their_anomalies() {
    const KEYS: usize = 1000;
    let fleet = Fleet::new(2);
    let mut client = fleet.client();
    fill(&mut client, KEYS);
    let keys = of_source(&fleet, KEYS);
    // Bloom telemetry without forwarding: all commands go to the target, and keys still at the source appear lost.
    fleet.begin(published(&fleet, 1, Protocol::Bloom, |paper| paper.forwards = false));
    until("keys move", || fleet.progress(1).keys_moved > 10);
    let lost = missing(&mut client, &keys);
    assert!(lost > keys.len() / 2, "{lost} of {}", keys.len());
    finish(&fleet, 1);
    assert_eq!(missing(&mut client, &keys), 0);

    let back = with(fleet.task(2, 1, 0), |order| order.how.goal = Goal::Fast);
    fleet.run_to_end(back);
    // A filter with a single bit has false positives.
    fleet.begin(published(&fleet, 3, Protocol::Bloom, |paper| (paper.groups, paper.bits) = (200, 1)));
    until("some have moved", || fleet.progress(3).keys_moved > 50);
    let lost = missing(&mut client, &keys);
    assert!(lost > 0);
    finish(&fleet, 3);

    // Rocksteady: the target owns all keys at once and counts from zero; later the copy overwrites the counters.
    let back = with(fleet.task(4, 1, 0), |order| order.how.goal = Goal::Fast);
    fleet.run_to_end(back);
    fleet.begin(published(&fleet, 5, Protocol::Rocksteady, |_| {}));
    until("keys move", || fleet.progress(5).keys_moved > 0);
    let counted: Vec<&String> = keys.iter().filter(|key| client.cmd(&format!("INCR {key}")) == "1").collect();
    assert!(counted.len() > keys.len() / 2, "{} of {}", counted.len(), keys.len());
    finish(&fleet, 5);
    let overwritten = counted.iter().filter(|key| client.cmd(&format!("GET {key}")).starts_with("value")).count();
    assert!(overwritten > counted.len() / 2, "{overwritten} of {}", counted.len());
}

#[test]
fn a_restarted_router_begins_the_move_again() {
    const KEYS: usize = 500;
    let mut fleet = Fleet::new(2);
    let mut client = fleet.client();
    fill(&mut client, KEYS);
    fleet.begin_on_record(published(&fleet, 1, Protocol::NetMigrate, |_| {}));
    until("keys move", || fleet.progress(1).keys_moved > 10);
    drop(client);
    fleet.restart();
    let mut client = fleet.client();
    finish(&fleet, 1);
    all_there(&mut client, KEYS);
}

/// Returns the number of BITCOUNT commands that a server has executed. The mover sends none.
fn reads(fleet: &Fleet, server: usize) -> u64 {
    let stats = fleet.servers[server].client().cmd("INFO commandstats");
    let calls = stats.split_once("cmdstat_bitcount:calls=").and_then(|(_, rest)| rest.split(',').next());
    calls.map_or(0, |calls| calls.parse().expect("a number"))
}

/// Stops the clients of a test, also if it fails.
struct Stops<'s>(&'s AtomicBool);

impl Drop for Stops<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Reads keys with pipelines, until the flag is set.
fn read_pipelined(fleet: &Fleet, keys: &[String], stop: &AtomicBool) {
    let mut client = fleet.client();
    for chunk in keys.chunks(4).cycle().take_while(|_| !stop.load(Ordering::Relaxed)) {
        chunk.iter().for_each(|key| client.post(&format!("BITCOUNT {key}")));
        for key in chunk {
            let value = format!("value{}", key.trim_matches(['{', '}']));
            let bits: u32 = value.bytes().map(u8::count_ones).sum();
            assert_eq!(client.reply(), bits.to_string(), "in the order of the client");
        }
    }
}

#[test]
fn a_source_serves_no_more_commands_than_its_limit() {
    const KEYS: usize = 1000;
    const CLIENTS: u64 = 4;
    const LIMIT: u32 = 40;
    let at_most = |since: Instant| (f64::from(LIMIT) * since.elapsed().as_secs_f64()) as u64 + 1;
    // Many groups: most keys are read at the source. One group: all keys are read at both nodes.
    for groups in [64, 1] {
        let fleet = Fleet::new(2);
        let mut client = fleet.client();
        fill(&mut client, KEYS);
        let keys = of_source(&fleet, KEYS);
        let began = Instant::now();
        let task =
            published(&fleet, 1, Protocol::NetMigrate, |paper| (paper.groups, paper.tracker) = (groups, Kind::Exact));
        fleet.begin(with(task, |order| order.how.source_ops_max = Some(LIMIT)));
        until("keys move", || fleet.progress(1).keys_moved > 0);
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let stops = Stops(&stop);
            (0..CLIENTS).for_each(|_| drop(scope.spawn(|| read_pipelined(&fleet, &keys, &stop))));
            let steer = |max| fleet.router().steer_move(MoveId(1), UserRequest::SourceOpsMax(max));
            until("commands wait for the limit", || fleet.progress(1).holds.count > u64::from(LIMIT));
            let served = reads(&fleet, 0);
            assert!(0 < served && served <= at_most(began), "{served} of {}", at_most(began));
            // Not reachable with the limit before the test fails.
            steer(None);
            until("the source serves more", || reads(&fleet, 0) - served > 5000);
            let (began, holds) = (Instant::now(), fleet.progress(1).holds.count);
            steer(Some(LIMIT));
            until("commands wait again", || fleet.progress(1).holds.count > holds);
            let before = reads(&fleet, 0);
            until("more commands wait", || fleet.progress(1).holds.count > holds + u64::from(LIMIT));
            let served = reads(&fleet, 0) - before;
            // Commands in flight at the change are executed.
            assert!(served <= at_most(began) + 4 * CLIENTS, "{served} of {}", at_most(began));
            assert!(fleet.progress(1).end.is_none(), "it was in progress all the time");
            // Waiting commands continue when the move ends.
            finish(&fleet, 1);
            drop(stops);
        });
        all_there(&mut client, KEYS);
    }
}
