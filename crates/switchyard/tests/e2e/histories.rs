//! Histories of many clients on the same few keys, judged by a checker that shares nothing with us: `tests-clients/history-check`, Go and
//! Porcupine. First the checker itself: on histories that no single server could have made, it must say so.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use switchyard_bench::history::{self, Kind, Recording, Settings, Summary, Tally};
use tempfile::TempDir;

use crate::clients::{prepared, programs, run, wanted};
use crate::support::process::tied;
use crate::support::{NodeOptions, Site, SiteOptions};

/// The checker, built once; `None` where the tests of clients are left out.
fn checker() -> Option<PathBuf> {
    if !wanted(&[("go", "golang-go")]) {
        return None;
    }
    let source = programs().join("history-check");
    let all: Vec<u8> = ["go.mod", "go.sum", "lists.go", "main.go", "model.go"]
        .iter()
        .flat_map(|f| std::fs::read(source.join(f)).expect("a source"))
        .collect();
    let built = prepared("history-check", &all, |dir| {
        let mut build = Command::new("go");
        build.args(["build", "-buildvcs=false", "-mod=readonly", "-o"]).arg(dir.join("history-check")).arg(".");
        run("go build", build.current_dir(&source));
    });
    Some(built.join("history-check"))
}

/// The exit code and the words of the checker.
fn judge(checker: &Path, files: &[PathBuf]) -> (i32, String) {
    let output = tied(checker).args(files).output().expect("the checker runs");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.code().expect("an exit code"), text)
}

fn samples(folder: &str) -> Vec<PathBuf> {
    let folder = programs().join("history-check/testdata").join(folder);
    let mut files: Vec<_> = std::fs::read_dir(&folder).expect("samples").map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    assert!(files.len() > 10, "{} samples in {}", files.len(), folder.display());
    files
}

/// Lists are decided without a search: on thousands of histories, good and damaged ones, as the search decides them.
#[test]
fn the_checkers_own_tests_pass() {
    if wanted(&[("go", "golang-go")]) {
        run("go test", Command::new("go").args(["test", "-mod=readonly", "."]).current_dir(programs().join("history-check")));
    }
}

#[test]
fn the_checker_tells_good_histories_from_bad_ones() {
    let Some(checker) = checker() else { return };
    for (folder, code) in [("bad", 1), ("good", 0)] {
        for file in samples(folder) {
            let (status, text) = judge(&checker, std::slice::from_ref(&file));
            assert_eq!(status, code, "{}:\n{text}", file.display());
        }
    }
}

fn settings(targets: Vec<SocketAddr>, kinds: &[Kind], folder: &TempDir) -> Settings {
    Settings {
        targets,
        duration: Duration::from_secs(60), // ended by operations, not by time
        clients: 16,
        kinds: kinds.to_vec(),
        patience: Duration::from_secs(10),
        pause: Duration::from_micros(300),
        seed: 1,
        prefix: "h:".to_owned(),
        folder: folder.path().to_owned(),
        clean: true,
    }
}

/// Waits until so many operations are recorded.
fn record(recording: &Recording, operations: u64) -> Tally {
    while recording.tally().operations < operations {
        assert!(!recording.is_finished(), "only {:?}", recording.tally());
        std::thread::sleep(Duration::from_millis(5));
    }
    recording.tally()
}

fn finish(recording: Recording) -> Summary {
    recording.stop();
    recording.finish().expect("the history ends")
}

/// Every second client talks to another server: each kind of history must show it, or it would not show a lost or a stale key either.
#[test]
fn two_servers_are_not_taken_for_one() {
    let Some(checker) = checker() else { return };
    let (one, other) = (crate::support::Node::start(&NodeOptions::default()), crate::support::Node::start(&NodeOptions::default()));
    for kind in Kind::ALL {
        let folder = TempDir::new().expect("a folder");
        let recording = history::start(&settings(vec![one.address(), other.address()], &[kind], &folder)).expect("it starts");
        record(&recording, 500);
        let summary = finish(recording);
        let (status, text) = judge(&checker, &summary.files);
        assert_eq!(status, 1, "{kind}:\n{text}");
    }
}

#[track_caller]
fn assert_linearizable(checker: &Path, summary: &Summary) {
    assert_eq!(summary.tally.unread, 0, "{:?}", summary.tally);
    let (status, text) = judge(checker, &summary.files);
    assert_eq!(status, 0, "{:?}\n{text}", summary.tally);
    eprintln!("{}", text.trim());
}

#[test]
fn what_clients_see_through_a_router_is_linearizable() {
    let Some(checker) = checker() else { return };
    let site = Site::new(3);
    let folder = TempDir::new().expect("a folder");
    let recording = history::start(&settings(vec![site.address()], &Kind::ALL, &folder)).expect("it starts");
    record(&recording, 15_000);
    let summary = finish(recording);
    assert!(summary.tally.is_clean(), "{:?}", summary.tally);
    assert_linearizable(&checker, &summary);
}

/// A node that hangs and one that is killed: what clients were not told stays open, and everything else still has an order. The nodes keep
/// what they have acknowledged, as the promise demands of them.
#[test]
fn also_with_nodes_that_hang_and_die() {
    let Some(checker) = checker() else { return };
    let node =
        NodeOptions { args: ["--appendonly", "yes", "--appendfsync", "always"].map(str::to_owned).to_vec(), ..NodeOptions::default() };
    let Some(mut site) = Site::router_only(2, &SiteOptions { node, ..SiteOptions::default() }) else { return };
    let folder = TempDir::new().expect("a folder");
    let settings = Settings { patience: Duration::from_millis(200), ..settings(vec![site.address()], &Kind::ALL, &folder) };
    let recording = history::start(&settings).expect("it starts");
    let mut goal = record(&recording, 2000).operations;
    for _ in 0..2 {
        site.nodes()[0].freeze();
        let before = recording.tally();
        while recording.tally().unknown == before.unknown {
            assert!(!recording.is_finished());
            std::thread::sleep(Duration::from_millis(5));
        }
        site.nodes()[0].thaw();
        goal = record(&recording, goal.max(recording.tally().operations) + 1000).operations;
        site.node_mut(1).restart(); // kill -9, and a start with the same append-only file
        goal = record(&recording, goal.max(recording.tally().operations) + 1000).operations;
    }
    let summary = finish(recording);
    assert!(summary.tally.unknown > 0, "{:?}", summary.tally);
    assert_linearizable(&checker, &summary);
}
