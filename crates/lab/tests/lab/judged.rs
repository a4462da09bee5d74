//! Histories of many clients on the same few keys, judged by an independent checker: `tests-clients/history-check`, Go
//! and Porcupine. Also tests the checker itself: it must refuse histories that no single server could have made.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use switchyard_lab::history::{self, Kind, Recording, Settings, Summary, Tally};
use switchyard_lab::product;
use switchyard_lab::site::{Site, freeze, thaw};
use tempfile::TempDir;

use crate::recorded::redis;

/// The source of the checker.
fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests-clients/history-check")
}

/// Runs Go in the source of the checker. Returns `false` if tests that need more than Rust are left out.
fn go(arguments: &[&str]) -> bool {
    if std::env::var("SWITCHYARD_SKIP_CLIENTS").is_ok_and(|v| v == "1") {
        eprintln!("left out: SWITCHYARD_SKIP_CLIENTS=1");
        return false;
    }
    let output = Command::new("go").args(arguments).current_dir(source()).output().expect(
        "go must be on PATH: install it (Debian: apt-get install golang-go), or set SWITCHYARD_SKIP_CLIENTS=1 to leave out what needs it",
    );
    assert!(
        output.status.success(),
        "go {arguments:?}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    true
}

/// The checker, built once per process; `None` if it is left out.
fn checker() -> Option<&'static Path> {
    static BUILT: OnceLock<Option<PathBuf>> = OnceLock::new();
    let built = BUILT.get_or_init(|| {
        let to = Path::new(env!("CARGO_TARGET_TMPDIR")).join("history-check");
        // Tests run in separate processes at the same time, and another test may execute the file.
        let made = to.with_extension(std::process::id().to_string());
        go(&["build", "-buildvcs=false", "-mod=readonly", "-o", made.to_str().expect("a path in UTF-8"), "."]).then(
            || {
                std::fs::rename(&made, &to).expect("renamed");
                to
            },
        )
    });
    built.as_deref()
}

/// The router, which the workspace's build puts next to the lab.
fn router() -> PathBuf {
    product::beside(Path::new(env!("CARGO_BIN_EXE_switchyard-lab")))
        .expect("the product is built, as by `cargo test --workspace`")
}

/// Returns the exit code and the output of the checker.
fn judge(checker: &Path, files: &[PathBuf]) -> (i32, String) {
    let output = Command::new(checker).args(files).output().expect("the checker runs");
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.code().expect("an exit code"), text)
}

fn samples(folder: &str) -> Vec<PathBuf> {
    let folder = source().join("testdata").join(folder);
    let mut files: Vec<_> =
        std::fs::read_dir(&folder).expect("samples").map(|entry| entry.expect("an entry").path()).collect();
    files.sort();
    assert!(files.len() > 10, "{} samples in {}", files.len(), folder.display());
    files
}

/// The checker decides lists without a search. Its tests compare both on thousands of good and damaged histories.
#[test]
fn the_checkers_own_tests_pass() {
    go(&["test", "-mod=readonly", "."]);
}

#[test]
fn checker_accepts_good_histories_and_refuses_bad_ones() {
    let Some(checker) = checker() else { return };
    for (folder, code) in [("bad", 1), ("good", 0)] {
        for file in samples(folder) {
            let (status, text) = judge(checker, std::slice::from_ref(&file));
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
        timeout: Duration::from_secs(10),
        pause: Duration::from_micros(300),
        seed: 1,
        prefix: "h:".to_owned(),
        folder: folder.path().join("histories"),
        clean: true,
    }
}

/// Waits until `operations` operations are recorded.
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

/// Every second client uses another server. Each kind of history must show that, or it would not show lost or stale
/// keys either.
#[test]
fn two_servers_are_not_taken_for_one() {
    let Some(checker) = checker() else { return };
    let ((_one, one, _), (_other, other, _)) = (redis(), redis());
    for kind in Kind::ALL {
        let folder = TempDir::new().expect("a folder");
        let recording = history::start(&settings(vec![one, other], &[kind], &folder)).expect("it starts");
        record(&recording, 500);
        let summary = finish(recording);
        let (status, text) = judge(checker, &summary.files);
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
fn histories_through_a_router_are_linearizable() {
    let Some(checker) = checker() else { return };
    let folder = TempDir::new().expect("a folder");
    let site = Site::start(&router(), &[], 3, folder.path()).expect("it starts");
    let recording = history::start(&settings(vec![site.entry()], &Kind::ALL, &folder)).expect("it starts");
    record(&recording, 15_000);
    let summary = finish(recording);
    assert!(summary.tally.is_clean(), "{:?}", summary.tally);
    assert_linearizable(checker, &summary);
}

/// With a node that hangs and one that is killed, operations without a reply stay open, and all others still have an
/// order. The nodes persist acknowledged writes, as the guarantee requires.
#[test]
fn histories_are_linearizable_if_nodes_hang_and_die() {
    let Some(checker) = checker() else { return };
    let folder = TempDir::new().expect("a folder");
    let mut site = Site::start(&router(), &[], 2, folder.path()).expect("it starts");
    let settings =
        Settings { timeout: Duration::from_millis(200), ..settings(vec![site.entry()], &Kind::ALL, &folder) };
    let recording = history::start(&settings).expect("it starts");
    let mut goal = record(&recording, 2000).operations;
    for _ in 0..2 {
        freeze(site.node_process(0)).expect("it stops");
        let before = recording.tally();
        while recording.tally().unknown == before.unknown {
            assert!(!recording.is_finished());
            std::thread::sleep(Duration::from_millis(5));
        }
        thaw(site.node_process(0)).expect("the process continues");
        goal = record(&recording, goal.max(recording.tally().operations) + 1000).operations;
        // kill -9, and a start with the same append-only file
        site.restart_node(1, Duration::ZERO).expect("it starts again");
        goal = record(&recording, goal.max(recording.tally().operations) + 1000).operations;
    }
    let summary = finish(recording);
    assert!(summary.tally.unknown > 0, "{:?}", summary.tally);
    assert_linearizable(checker, &summary);
}
