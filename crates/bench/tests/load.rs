//! Tests of the load generator with a real server, and with incorrect servers.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use switchyard_bench::client::Client;
use switchyard_bench::load::{self, Doubt, Mix, Pace, Settings, Sharing, Skew, ValueSizes};
use switchyard_bench::process::{self, Process};
use tempfile::TempDir;

fn redis() -> (Process, SocketAddr, TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = process::find_redis_server().expect("the tests need a server");
    let (process, address) = process::start_redis(&server, "node", folder.path()).expect("it starts");
    (process, address, folder)
}

fn settings(target: SocketAddr) -> Settings {
    Settings {
        target,
        threads: 2,
        connections: 7,
        pipeline: 5,
        pace: Pace::Closed,
        duration: Duration::from_millis(300),
        mix: Mix::default(),
        sizes: "64:9,100000:1".parse().expect("sizes"),
        keys: 500,
        skew: Skew::Zipfian(0.99),
        sharing: Sharing::Owned,
        prefix: "t:".to_owned(),
        doubt: Doubt::Lasting,
        seed: 1,
    }
}

#[test]
fn a_real_server_gives_no_wrong_reply() {
    let (_node, address, _folder) = redis();
    for sharing in [Sharing::Owned, Sharing::Shared] {
        let settings = Settings {
            sharing,
            skew: if sharing == Sharing::Owned { Skew::Zipfian(0.99) } else { Skew::Scrambled },
            ..settings(address)
        };
        let summary = load::start(&settings).expect("it starts").finish().expect("it ends");
        assert!(summary.total.is_clean(), "{:?}", summary.complaints);
        assert!(summary.total.replies > 100, "{}", summary.total.replies);
        assert_eq!(summary.total.replies, summary.total.latency.len());
        let mut client = Client::connect(address).expect("it still answers");
        assert!(client.integer(&[b"DBSIZE"]).expect("a number") > 0);
        client.ok(&[b"FLUSHALL"]).expect("flushed");
    }
}

/// Every reply is known, so a value changed by another client is a wrong reply.
#[test]
fn a_change_from_outside_is_noticed() {
    let (_node, address, _folder) = redis();
    let run = load::start(&settings(address)).expect("it starts");
    let mut client = Client::connect(address).expect("it answers");
    while client.integer(&[b"DBSIZE"]).expect("a number") < 100 && !run.is_finished() {}
    client.ok(&[b"FLUSHALL"]).expect("flushed");
    let summary = run.finish().expect("it ends");
    assert!(summary.total.wrong > 0);
    assert!(summary.complaints.iter().any(|c| c.contains("expected")), "{:?}", summary.complaints);
}

#[test]
fn error_replies_count_only_as_errors() {
    let (_node, address, _folder) = redis();
    let mut client = Client::connect(address).expect("it answers");
    client.ok(&[b"CONFIG", b"SET", b"requirepass", b"secret"]).expect("set");
    // Small values: a server disconnects unauthenticated clients that declare large ones.
    let settings = Settings { sizes: ValueSizes::fixed(64), ..settings(address) };
    let summary = load::start(&settings).expect("it starts").finish().expect("it ends");
    let total = &summary.total;
    assert!(total.errors > 0 && total.errors == total.replies, "{total:?}");
    assert_eq!((total.wrong, total.unanswered, total.disconnects), (0, 0, 0));
    assert!(summary.complaints[0].contains("NOAUTH"), "{:?}", summary.complaints);
}

#[test]
fn an_open_loop_sends_due_requests_and_counts_their_wait() {
    let (_node, address, _folder) = redis();
    let settings = Settings {
        pace: Pace::Open { rate: 1000.0 },
        pipeline: 1000,
        duration: Duration::from_secs(1),
        sizes: ValueSizes::fixed(64),
        ..settings(address)
    };
    // The server does not reply during the first second: half of the requests wait at least half a second.
    let mut client = Client::connect(address).expect("it answers");
    client.ok(&[b"CLIENT", b"PAUSE", b"1000", b"ALL"]).expect("paused");
    let summary = load::start(&settings).expect("it starts").finish().expect("it ends");
    let total = &summary.total;
    assert!(total.is_clean(), "{:?}", summary.complaints);
    // Two threads, each with a first and a last request subject to rounding.
    assert!((998..=1002).contains(&total.replies), "{}", total.replies);
    assert!(total.quantile(0.5) > Duration::from_millis(100), "{:?}", total.quantile(0.5));
}

#[test]
fn a_server_crash_counts_as_a_lost_connection() {
    let (mut node, address, _folder) = redis();
    let mut run = load::start(&settings(address)).expect("it starts");
    while run.take_interval().replies == 0 && !run.is_finished() {
        std::thread::sleep(Duration::from_millis(1));
    }
    node.stop(Duration::ZERO);
    let summary = run.finish().expect("it ends");
    assert!(summary.total.disconnects > 0, "{:?}", summary.total);
    assert_eq!(summary.total.wrong, 0, "{:?}", summary.complaints);
    assert!(!summary.total.is_clean());
}

#[test]
fn an_invalid_reply_is_wrong_and_does_not_hang() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let address = listener.local_addr().expect("its address");
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(mut stream) = stream else { return };
            std::thread::spawn(move || {
                let mut buf = [0; 4096];
                while stream.read(&mut buf).is_ok_and(|n| n > 0) && stream.write_all(b"HTTP/1.1 200 OK\r\n").is_ok() {}
            });
        }
    });
    let summary = load::start(&settings(address)).expect("it starts").finish().expect("it ends");
    assert!(summary.total.wrong > 0 && summary.total.replies == 0, "{:?}", summary.total);
}

#[test]
fn invalid_settings_are_refused() {
    let (_node, address, _folder) = redis();
    for wrong in [
        Settings { connections: 0, ..settings(address) },
        Settings { pipeline: 0, ..settings(address) },
        Settings { pace: Pace::Open { rate: 0.0 }, ..settings(address) },
        Settings { skew: Skew::Zipfian(1.0), ..settings(address) },
        Settings { target: process::free_address().expect("a port"), ..settings(address) },
    ] {
        assert!(load::start(&wrong).is_err(), "{wrong:?}");
    }
}
