//! Control of moves in progress: progress, pause and abort, a restart during a move, nodes that join and leave, a full
//! disk.

use std::net::SocketAddr;

use rustix::process::{Resource, Rlimit, Signal};
use serde_json::Value as Json;

use crate::movectl::{done, json, names, owns, refused, slots};
use crate::support::process::{Process, tied};
use crate::support::{
    Client, Node, NodeOptions, Probed, Router, RouterOptions, Site, SiteOptions, Value, bulk, encode, http, int, ok,
    until_within,
};

/// Enough keys that a move is still in progress when a test checks it.
const KEYS: usize = 12_000;

/// A move that takes seconds, in several legs.
const SLOWLY: &str = "--goal gentle --max-rate 200k";

fn value(i: usize) -> String {
    format!("value {i} {}", "x".repeat(100))
}

fn fill(client: &mut Client) {
    let mut bytes = Vec::new();
    for i in 0..KEYS {
        bytes.extend(crate::support::encode(&["SET", &format!("key:{i}"), &value(i)]));
    }
    for reply in client.pipeline(&bytes, KEYS) {
        assert_eq!(reply, b"+OK\r\n");
    }
}

#[track_caller]
fn all_there(client: &mut Client) {
    let mut bytes = Vec::new();
    (0..KEYS).for_each(|i| bytes.extend(crate::support::encode(&["GET", &format!("key:{i}")])));
    for (i, reply) in client.pipeline(&bytes, KEYS).into_iter().enumerate() {
        let expected = value(i);
        assert_eq!(String::from_utf8_lossy(&reply), format!("${}\r\n{expected}\r\n", expected.len()), "key:{i}");
    }
}

/// The output of `switchyard moves --json`, without starting a process.
#[track_caller]
pub(crate) fn report(router: &Router) -> Json {
    report_at(router.admin())
}

/// The report of the router with this admin address.
#[track_caller]
fn report_at(admin: SocketAddr) -> Json {
    serde_json::from_str(&http::get(admin, "/api/v1/moves").1).expect("JSON")
}

/// The report of a move, whatever its state.
pub(crate) fn the_move(router: &Router, id: u64) -> Json {
    let report = report(router);
    let all = ["moves", "ended"].map(|list| report[list].as_array().cloned().unwrap_or_default()).concat();
    all.into_iter().find(|m| m["id"] == id).unwrap_or_else(|| panic!("move {id} is not in {report}"))
}

#[track_caller]
pub(crate) fn wait_for(router: &Router, id: u64, state: &str) -> Json {
    eventually(&format!("move {id} is {state}"), || Some(the_move(router, id)).filter(|m| m["state"] == state))
}

/// Like `until`, with a longer timeout: slow moves take long on a busy machine.
#[track_caller]
pub(crate) fn eventually<P: Probed>(what: &str, probe: impl FnMut() -> P) -> P::Found {
    until_within(std::time::Duration::from_secs(240), what, probe)
}

fn total(node: &Node) -> i64 {
    node.cmd("DBSIZE").int()
}

#[test]
fn a_move_is_requested_watched_and_completed() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let names = names(&site);
    let mut client = site.client();
    fill(&mut client);
    let out = done(site.router(), &format!("move --from {} --to {} --all --goal fast --wait", names[0], names[1]));
    assert!(out.contains("is done: 8 192 slots"), "{out}");
    assert_eq!(total(&site.nodes()[0]), 0);
    assert_eq!(total(&site.nodes()[1]), KEYS as i64);
    all_there(&mut client);
    let ended = the_move(site.router(), 1);
    assert_eq!((&ended["state"], &ended["slots_done"]), (&Json::from("done"), &Json::from(8192)), "{ended}");
    let report = json(site.router(), "moves");
    assert!(
        report["journal"]["records"].as_u64() > Some(0) && report["journal"]["syncs"].as_u64() > Some(0),
        "{report}"
    );
    assert!(report["journal"]["length"].as_u64() < Some(4096), "records of ended moves are removed: {report}");
    let metrics = site.router().metrics();
    assert!(
        metrics.contains("switchyard_moves_ended_total{how=\"done\"} 1\n")
            && metrics.contains("switchyard_moves_slots_moved_total 8192\n")
            && metrics.contains("switchyard_moves_journal_syncs_total"),
        "{metrics}"
    );
    let text = done(site.router(), "moves");
    assert!(text.contains("no moves are in progress") && text.contains("ended, the latest first"), "{text}");
    let text = refused(site.router(), "moves abort 1");
    assert!(text.contains("move 1 has ended"), "{text}");
    // Back again: leftovers of the first move are recognized as the fleet's own.
    done(site.router(), &format!("move --from {} --to {} --all --wait", names[1], names[0]));
    all_there(&mut client);
    assert_eq!(total(&site.nodes()[1]), 0);
}

#[test]
fn a_paused_move_stops_and_an_aborted_one_ends() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let names = names(&site);
    let mut client = site.client();
    fill(&mut client);
    let router = site.router();
    done(router, &format!("move --from {} --to {} --all {SLOWLY}", names[0], names[1]));
    eventually("keys move", || the_move(router, 1)["keys_moved"].as_u64().filter(|keys| *keys > 0));
    let text = refused(router, "balance");
    assert!(text.contains("moves are in progress (1)"), "{text}");
    let text = refused(router, &format!("nodes remove {}", names[1]));
    assert!(text.contains("takes part in move 1"), "{text}");
    let text = refused(router, &format!("move --from {} --to {} --all", names[0], names[1]));
    assert!(text.contains("is part of move 1") || text.contains("do not belong"), "{text}");
    done(router, "moves pause 1");
    assert_eq!(the_move(router, 1)["state"], "paused");
    // The batch in flight completes. Afterwards only keys that clients use are moved.
    let mut last = u64::MAX;
    eventually("it stands still", || {
        let keys = the_move(router, 1)["keys_moved"].as_u64().unwrap_or(0);
        std::thread::sleep(std::time::Duration::from_millis(300));
        std::mem::replace(&mut last, keys) == keys
    });
    all_there(&mut client);
    // When watching is interrupted, the output states that the move continues.
    let mut watch = tied(env!("CARGO_BIN_EXE_switchyard"));
    watch.args(["moves", "watch", "--admin", &router.admin().to_string()]);
    let log = tempfile::NamedTempFile::new().expect("a file");
    let mut watch = Process::start("moves watch", watch, log.path());
    watch.expect_log(&["PAUSED"]);
    watch.signal(Signal::INT);
    assert_eq!(watch.wait(std::time::Duration::from_secs(30)).code(), Some(1));
    watch.expect_log(&["stopped watching, and the move continues"]);
    done(router, "moves resume 1");
    assert_eq!(the_move(router, 1)["state"], "running");
    done(router, "moves max-rate 1 none");
    done(router, "moves goal 1 balanced");
    assert_eq!(
        (&the_move(router, 1)["goal"], &the_move(router, 1)["max_rate"]),
        (&Json::from("balanced"), &Json::Null)
    );
    done(router, "moves max-rate 1 100kb");
    assert_eq!(the_move(router, 1)["max_rate"], 100 << 10);
    assert!(refused(router, "moves goal 2 fast").contains("there is no move 2"));
    // Only users with the permission may abort a move.
    let text = client.cmd("SWITCHYARD MOVES ABORT 1").expect_error().to_owned();
    assert!(text.starts_with("NOPERM ") && text.contains("operator") && text.contains("default-user-rules"), "{text}");
    assert_eq!(the_move(router, 1)["state"], "running");
    done(router, "moves abort 1");
    let ended = wait_for(router, 1, "stopped");
    assert!(ended["slots_done"].as_u64() < Some(8192), "{ended}");
    all_there(&mut client);
    let (source, target) = (owns(router, site.nodes()[0].address()), owns(router, site.nodes()[1].address()));
    assert_eq!(source.zip(target).map(|(a, b)| a + b), Some(16384));
    // A queued move can be ended as well.
    assert!(report(router)["moves"].as_array().is_some_and(Vec::is_empty));
}

/// Keys that neither node has, in a slot in transit: deleted, expired, or never written.
#[test]
fn missing_keys_are_answered_during_a_move_of_their_slot() {
    const HERE: usize = 3000;
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let mut names = names(&site);
    names.sort();
    let (router, mut client) = (site.router(), site.client());
    let bytes: Vec<u8> = (0..HERE).flat_map(|i| encode(&["SET", &format!("{{b}}{i}"), &value(i)])).collect();
    client.pipeline(&bytes, HERE);
    done(router, &format!("move --from {} --to {} --slots 3300 --goal gentle --max-rate 20kb", names[0], names[1]));
    eventually("keys move", || the_move(router, 1)["keys_moved"].as_u64().filter(|keys| *keys > 0));
    done(router, "moves pause 1");
    for round in 0..3 {
        for i in 0..200 {
            assert_eq!(client.cmd(&format!("GET {{b}}never{i}")), Value::Nil, "round {round}");
            assert_eq!(client.cmd(&format!("DEL {{b}}nor{i}")), int(0), "round {round}");
        }
        assert_eq!(client.cmd("SET {b}deleted 1"), ok());
        assert_eq!(client.cmd("DEL {b}deleted"), int(1));
        assert_eq!(client.cmd("SET {b}expired 1 PX 1"), ok());
        eventually("it expires", || client.cmd("GET {b}expired") == Value::Nil);
        assert_eq!(
            client.cmd("MGET {b}deleted {b}expired {b}never1"),
            Value::Array(vec![Value::Nil, Value::Nil, Value::Nil])
        );
    }
    let paused = the_move(router, 1);
    assert_eq!(paused["state"], "paused");
    assert!(
        paused["keys_moved"].as_u64().is_some_and(|keys| (1..HERE as u64).contains(&keys)),
        "in the middle of its leg: {paused}"
    );
    assert_eq!(client.cmd("DBSIZE"), int(HERE as i64));
    for line in ["moves max-rate 1 none", "moves goal 1 fast", "moves resume 1"] {
        done(router, line);
    }
    let ended = wait_for(router, 1, "done");
    // At most the keys that existed briefly are counted in addition.
    assert!(
        ended["keys_moved"].as_u64().is_some_and(|keys| (HERE as u64..=HERE as u64 + 6).contains(&keys)),
        "{ended}"
    );
    assert_eq!(site.nodes().iter().map(total).sum::<i64>(), HERE as i64);
    for i in 0..HERE {
        assert_eq!(client.cmd(&format!("GET {{b}}{i}")), bulk(value(i)));
    }
}

/// The node refuses commands that need memory, and all commands in transactions. Moving keys away must still work.
#[test]
fn a_full_node_can_be_relieved() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let mut client = site.client();
    fill(&mut client);
    let names = names(&site);
    done(site.router(), &format!("move --from {} --to {} --all --goal fast --wait", names[1], names[0]));
    let full = &site.nodes()[0];
    assert_eq!(full.cmd("CONFIG SET maxmemory 1kb"), ok());
    assert!(client.cmd("SET another 1").error().is_some_and(|error| error.starts_with("OOM")));
    done(site.router(), &format!("move --from {} --to {} --all --goal fast --wait", names[0], names[1]));
    all_there(&mut client);
    assert_eq!((total(full), total(&site.nodes()[1])), (0, KEYS as i64));
}

#[test]
fn a_move_continues_after_a_restart() {
    for signal in [Signal::TERM, Signal::KILL] {
        let Some(mut site) = Site::router_only(2, &SiteOptions::default()) else { return };
        let names = names(&site);
        let mut client = site.client();
        fill(&mut client);
        done(
            site.router(),
            &format!("move --from {} --to {} --all --goal balanced --max-rate 300k", names[0], names[1]),
        );
        eventually("keys move", || the_move(site.router(), 1)["keys_moved"].as_u64().filter(|keys| *keys > 100));
        let nodes: Vec<SocketAddr> = site.nodes().iter().map(Node::address).collect();
        if signal == Signal::KILL {
            site.router_mut().process_mut().kill();
            // A list that lacks a node of the move is refused, and not stored.
            let output = std::process::Command::new(env!("CARGO_BIN_EXE_switchyard"))
                .args([
                    "serve",
                    "--listen",
                    "127.0.0.1:0",
                    "--admin",
                    "127.0.0.1:0",
                    "--node",
                    &names[0],
                    "--state-dir",
                ])
                .arg(site.router().state_dir())
                .output()
                .expect("the binary runs");
            let text = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(
                output.status.code() == Some(1)
                    && (text.contains("takes part in move 1") || text.contains("still own")),
                "{text}"
            );
            site.router_mut().start_again(&nodes);
        } else {
            site.router_mut().restart(&nodes);
        }
        let resumed = the_move(site.router(), 1);
        assert_eq!(
            (&resumed["goal"], &resumed["max_rate"]),
            (&Json::from("balanced"), &Json::from(300_000)),
            "as requested"
        );
        let mut client = site.client();
        all_there(&mut client);
        site.router().process().expect_log(&["move 1 resumes"]);
        wait_for(site.router(), 1, "done");
        all_there(&mut client);
        assert_eq!((total(&site.nodes()[0]), total(&site.nodes()[1])), (0, KEYS as i64));
    }
}

#[test]
fn a_fleet_grows_and_shrinks() {
    let Some(mut site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let third = Node::start(&NodeOptions::default());
    let mut client = site.client();
    fill(&mut client);
    done(site.router(), &format!("nodes add {} --rebalance --wait", third.address()));
    let owned: Vec<i64> = slots(site.router()).into_iter().map(|(_, slots)| slots).collect();
    assert!(owned.iter().all(|slots| (5461..=5462).contains(slots)), "{owned:?}");
    assert!(total(&third) > 1000);
    all_there(&mut client);
    assert!(done(site.router(), "balance").contains("nothing to move"));
    // The node has keys, and no flag names it.
    let listed: Vec<SocketAddr> = site.nodes().iter().map(Node::address).collect();
    site.router_mut().restart(&listed);
    let mut client = site.client();
    all_there(&mut client);
    done(site.router(), &format!("nodes drain {} --wait", third.address()));
    assert_eq!(owns(site.router(), third.address()), Some(0));
    assert_eq!(total(&third), 0);
    done(site.router(), &format!("nodes remove {}", third.address()));
    assert_eq!(owns(site.router(), third.address()), None);
    all_there(&mut client);
}

#[test]
fn two_moves_of_one_node_are_sequential() {
    let Some(site) = Site::router_only(3, &SiteOptions::default()) else { return };
    let names = names(&site);
    let mut client = site.client();
    fill(&mut client);
    let router = site.router();
    done(router, &format!("move --from {} --to {} --all {SLOWLY}", names[0], names[1]));
    wait_for(router, 1, "running");
    done(router, &format!("move --from {} --to {} --all", names[2], names[1]));
    let waits = the_move(router, 2);
    assert_eq!(waits["state"], "queued", "{waits}");
    done(router, "moves pause 2");
    assert_eq!(the_move(router, 2)["state"], "paused");
    done(router, "moves abort 2");
    assert_eq!(the_move(router, 2)["activity"], "aborted before it started");
    done(router, "moves abort 1");
    wait_for(router, 1, "stopped");
    all_there(&mut client);
}

/// A small file system for the state directory, if this process may mount one.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn mount() -> Option<Self> {
        let dir = tempfile::tempdir().expect("a directory");
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=12m", "tmpfs"])
            .arg(dir.path())
            .output();
        mounted.is_ok_and(|output| output.status.success()).then(|| Self(dir))
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg(self.0.path()).output();
    }
}

#[test]
fn a_full_disk_delays_moves_but_no_client() {
    let Some(mut site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let Some(disk) = SmallDisk::mount() else {
        eprintln!("skipped: nothing may be mounted here");
        return;
    };
    // The router under test has its state directory on the small file system.
    site.router_mut().process_mut().kill();
    let [listen, admin] = [(); 2].map(|()| SocketAddr::from(([127, 0, 0, 1], crate::support::ports::free())));
    let rival = site.router().start_beside(&RouterOptions::default(), listen, admin, &disk.0.path().join("state"));
    let mut client = eventually("it serves", || Client::try_connect(listen).ok());
    eventually("its nodes are up", || client.cmd("DBSIZE").error().is_none());
    fill(&mut client);
    let names = names(&site);
    let move_to = |from: usize, to: usize, wait: &str| {
        let line = format!("move --from {} --to {} --all{wait}", names[from], names[to]);
        crate::movectl::run_cli_at(admin, &line)
    };
    let filler = disk.0.path().join("filler");
    // No move begins without space for its end.
    let _ = std::fs::write(&filler, vec![0; 16 << 20]);
    let said = move_to(0, 1, "");
    assert_eq!(said.code, 1, "{}", said.out);
    assert!(said.err.contains("room") || said.err.contains("No space"), "{}", said.err);
    assert!(crate::movectl::run_cli_at(admin, "status").out.contains("the state directory needs attention"));
    assert_eq!(client.cmd("SET during 1"), ok());
    std::fs::remove_file(&filler).expect("removed");
    let said =
        eventually("it is taken once there is room", || Some(move_to(0, 1, " --wait")).filter(|said| said.code == 0));
    assert!(said.out.contains("is done"), "{}{}", said.out, rival.log());
    all_there(&mut client);

    // During a move: the current leg ends in the reserved space, or waits, and no client's command fails.
    let said = move_to(1, 0, " --goal balanced --max-rate 300k");
    assert_eq!(said.code, 0, "{}", said.err);
    let report = || report_at(admin);
    eventually("keys move", || report()["moves"][0]["keys_moved"].as_u64().filter(|keys| *keys > 0));
    let _ = std::fs::write(&filler, vec![0; 16 << 20]);
    let status = crate::movectl::run_cli_at(admin, "status").out;
    assert!(status.contains("the state directory needs attention"), "before anything has been tried: {status}");
    eventually("it reports the reason of its wait", || {
        let report = report();
        let activity = report["moves"][0]["activity"].as_str().unwrap_or_default().to_owned();
        report["journal"]["write_error"].is_string() || activity.contains("cannot be")
    });
    all_there(&mut client);
    assert_eq!(client.cmd("SET during 2"), ok());
    std::fs::remove_file(&filler).expect("removed");
    eventually("it continues without intervention", || report()["moves"].as_array().is_some_and(Vec::is_empty));
    let ended = report()["ended"].as_array().and_then(|ended| ended.last().cloned()).expect("it has ended");
    assert_eq!(ended["state"], "done", "{ended}");
    assert!(report()["journal"]["write_error"].is_null());
    all_there(&mut client);
}

#[test]
fn a_router_started_on_a_full_disk_serves_and_reports_it() {
    let Some(mut site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let Some(disk) = SmallDisk::mount() else {
        eprintln!("skipped: nothing may be mounted here");
        return;
    };
    // The router under test has its state directory on the small file system.
    site.router_mut().process_mut().kill();
    let [listen, admin] = [(); 2].map(|()| SocketAddr::from(([127, 0, 0, 1], crate::support::ports::free())));
    let start = || {
        let rival = site.router().start_beside(&RouterOptions::default(), listen, admin, &disk.0.path().join("state"));
        let mut client = eventually("it serves", || Client::try_connect(listen).ok());
        eventually("its nodes are up", || client.cmd("DBSIZE").error().is_none());
        (rival, client)
    };
    let (mut rival, mut client) = start();
    assert_eq!(client.cmd("SET key 1"), ok());
    assert!(crate::movectl::run_cli_at(admin, "status").out.contains("ready: every slot is served"));
    // A clean stop: after a crash, the store releases space.
    rival.signal(Signal::TERM);
    assert!(rival.wait(std::time::Duration::from_secs(30)).success());
    let filler = disk.0.path().join("filler");
    let _ = std::fs::write(&filler, vec![0; 16 << 20]);
    assert!(std::fs::write(disk.0.path().join("more"), vec![0; 1 << 20]).is_err(), "it is full");

    let (rival, mut client) = start();
    assert_eq!(client.cmd("GET key"), bulk("1"));
    assert!(rival.log().contains("The token of the previous start is used"), "{}", rival.log());
    let status = crate::movectl::run_cli_at(admin, "status").out;
    assert!(
        status.contains("the state directory needs attention") && status.contains("no move can start until"),
        "{status}"
    );
    let (code, ready) = http::get(admin, "/readyz");
    assert!(
        code == 200 && ready.contains("free for the state directory"),
        "it serves, and reports the problem: {ready}"
    );
    let metrics = || http::get(admin, "/metrics").1;
    assert!(metrics().contains("switchyard_state_directory_trouble 1\n"));
    // The token of the previous start is still valid, so the command line has access.
    let said = crate::movectl::run_cli_at(admin, "moves pause 7").err;
    assert!(said.contains("there is no move 7"), "{said}");
    std::fs::remove_file(&filler).expect("removed");
    let _ = std::fs::remove_file(disk.0.path().join("more"));
    eventually("all is well again", || {
        crate::movectl::run_cli_at(admin, "status").out.contains("ready: every slot is served")
    });
    assert!(metrics().contains("switchyard_state_directory_trouble 0\n"));
}

#[test]
fn a_leg_waits_until_its_records_can_be_written() {
    let args = vec!["--set".to_owned(), "nodes.command-timeout=1s".to_owned()];
    let router = RouterOptions { args, ..RouterOptions::default() };
    let Some(site) = Site::router_only(2, &SiteOptions::router(router)) else { return };
    let names = names(&site);
    fill(&mut site.client());
    let router = site.router();
    done(router, &format!("move --from {} --to {} --all {SLOWLY}", names[0], names[1]));
    eventually("keys move", || the_move(router, 1)["keys_moved"].as_u64().filter(|keys| *keys > 100));
    // During a leg, no file may grow beyond the current size of the journal, so reserved space is of no use.
    let pid = rustix::process::Pid::from_raw(router.process().pid() as i32);
    let free = rustix::process::prlimit(
        pid,
        Resource::Fsize,
        Rlimit { current: Some(0), ..rustix::process::getrlimit(Resource::Fsize) },
    );
    let free = free.expect("limited");
    let moved = the_move(router, 1)["keys_moved"].as_u64();
    let told = eventually("it reports the reason of its wait", || {
        let report = report(router);
        let activity = report["moves"][0]["activity"].as_str().unwrap_or_default().to_owned();
        (report["journal"]["write_error"].is_string() && activity.contains("cannot be written")).then_some(activity)
    });
    assert!(told.contains("moves wait until it can be"), "{told}");
    // Keys without a recorded move are unusable, and their clients get an error in time. All other keys are served.
    let mut client = site.client();
    let refusal = eventually("a key waits for its record", || {
        (0..KEYS).find_map(|i| {
            let reply = client.cmd(&format!("GET key:{i}"));
            if reply.error().is_none() {
                assert_eq!(reply, bulk(value(i)));
            }
            reply.error().map(str::to_owned)
        })
    });
    assert!(
        refusal.starts_with("NODETIMEOUT the keys' slot is being moved from ") && refusal.contains("(move 1)"),
        "{refusal}"
    );
    let text = refused(router, &format!("move --from {} --to {} --all", names[1], names[0]));
    assert!(text.contains("is part of move 1") || text.contains("cannot be written"), "{text}");
    let now = the_move(router, 1);
    assert!(now["keys_moved"].as_u64() <= moved.map(|keys| keys + 2048), "no more than the batch in flight: {now}");

    rustix::process::prlimit(pid, Resource::Fsize, free).expect("free again");
    wait_for(router, 1, "done");
    assert!(report(router)["journal"]["write_error"].is_null());
    all_there(&mut site.client());
    assert_eq!((total(&site.nodes()[0]), total(&site.nodes()[1])), (0, KEYS as i64));
    let log = router.process().log();
    assert!(log.contains("the journal of moves can be written again"), "{log}");
}
