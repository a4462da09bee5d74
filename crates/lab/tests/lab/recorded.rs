//! Histories of a real server, also of one that hangs: the records must match the observations. The judgement of
//! histories is tested in `judged`.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use serde_json::Value;
use switchyard_bench::client::Client;
use switchyard_bench::process::{self, Process};
use switchyard_lab::history::{self, Kind, Settings, Summary};
use tempfile::TempDir;

pub(crate) fn redis() -> (Process, SocketAddr, TempDir) {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let server = process::find_redis_server().expect("the tests need a server");
    let (process, address) = process::start_redis(&server, "node", folder.path()).expect("it starts");
    (process, address, folder)
}

fn settings(target: SocketAddr, folder: &TempDir) -> Settings {
    Settings {
        targets: vec![target],
        duration: Duration::from_millis(700),
        clients: 10,
        kinds: Kind::ALL.to_vec(),
        timeout: Duration::from_millis(300),
        pause: Duration::ZERO,
        seed: 1,
        prefix: "h:".to_owned(),
        folder: folder.path().join("histories"),
        clean: true,
    }
}

fn lines(summary: &Summary) -> Vec<Value> {
    let texts = summary.files.iter().map(|file| std::fs::read_to_string(file).expect("a file"));
    texts
        .flat_map(|text| text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect::<Vec<_>>())
        .collect()
}

#[test]
fn all_operations_are_recorded() {
    let (_node, address, folder) = redis();
    // No operation may time out, even on a busy machine.
    let settings =
        Settings { duration: Duration::from_secs(60), timeout: Duration::from_secs(10), ..settings(address, &folder) };
    let recording = history::start(&settings).expect("it starts");
    // Until a watch has seen a change, which takes two clients on the same key.
    while recording.tally().aborted == 0 || recording.tally().operations < 3000 {
        assert!(!recording.is_finished(), "no WATCH saw a change: {:?}", recording.tally());
        std::thread::sleep(Duration::from_millis(5));
    }
    recording.stop();
    let summary = recording.finish().expect("it ends");
    assert!(summary.tally.is_clean(), "{:?}", summary.tally);
    assert_eq!(summary.files.len(), Kind::ALL.len());
    let lines = lines(&summary);
    assert_eq!(lines.len() as u64, summary.tally.operations);
    for line in &lines {
        let (call, back) = (line["call"].as_u64().expect("a call"), line["return"].as_u64().expect("a return"));
        assert!(call < back, "{line}");
        let commands = line["do"].as_array().expect("commands").len();
        assert!(line["aborted"] == true || line["got"].as_array().expect("replies").len() == commands, "{line}");
    }
    // Every kind occurs, and every type of transaction.
    for word in ["GETDEL", "INCR", "RPUSH", "HSET", "PERSIST", "PTTL", "MSET", "NX"] {
        assert!(lines.iter().any(|l| l["do"].to_string().contains(word)), "no {word}");
    }
    assert!(lines.iter().any(|l| l.get("if").is_some() && l.get("got").is_some()), "no WATCH that succeeded");
    // No key is left.
    assert_eq!(Client::connect(address).and_then(|mut c| c.integer(&[b"DBSIZE"])).expect("a size"), 0);
}

/// A server hangs for longer than clients wait, and executes the received commands afterwards. Their outcome must stay
/// open, and the keys are read again after its return.
#[test]
fn unanswered_operations_stay_open() {
    let (node, address, folder) = redis();
    let settings = Settings { duration: Duration::from_secs(2), ..settings(address, &folder) };
    let recording = history::start(&settings).expect("it starts");
    while recording.tally().operations < 100 {
        assert!(recording.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(5));
    }
    let pid = rustix::process::Pid::from_raw(node.id() as i32).expect("a process");
    rustix::process::kill_process(pid, rustix::process::Signal::STOP).expect("it stops");
    let begun = Instant::now();
    while recording.tally().unknown < 5 && begun.elapsed() < Duration::from_secs(20) {
        std::thread::sleep(Duration::from_millis(5));
    }
    rustix::process::kill_process(pid, rustix::process::Signal::CONT).expect("the process continues");
    let summary = recording.finish().expect("it ends");
    assert!(summary.tally.unknown >= 5, "{:?}", summary.tally);
    assert_eq!(summary.tally.unread, 0, "{:?}", summary.tally);
    let lines = lines(&summary);
    let open: Vec<_> = lines.iter().filter(|l| l.get("return").is_none()).collect();
    assert_eq!(open.len() as u64, summary.tally.unknown);
    for line in open {
        assert!(line.get("got").is_none() && line.get("aborted").is_none(), "{line}");
        let command = line["do"][0][0].as_str().expect("a command");
        assert!(
            line["do"].as_array().expect("commands").len() > 1
                || !["GET", "LRANGE", "HGETALL", "PTTL", "MGET"].contains(&command),
            "{line}"
        );
    }
}
