//! `switchyard demo` as its users start it: it succeeds, reports that, and leaves nothing behind.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::support::process::{Process, tied};
use crate::support::{Client, ok, ports, simple, until_within};

/// Time for a demo to end on a busy machine, after the signal to stop.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time for the whole demo, while other tests run.
const STORY: Duration = Duration::from_secs(600);

struct Demo {
    process: Process,
    router: SocketAddr,
    folder: TempDir,
}

impl Demo {
    fn start(arguments: &[&str]) -> Demo {
        let folder = TempDir::new().expect("a directory");
        let (port, admin) = (ports::free(), ports::free());
        let mut command = tied(env!("CARGO_BIN_EXE_switchyard"));
        command
            .args(["demo", "--connections", "4", "--rate", "400"])
            .args(["--port", &port.to_string()])
            .args(["--admin-port", &admin.to_string()])
            .args(arguments)
            .env("TMPDIR", folder.path());
        let log = folder.path().join("demo.log");
        Demo {
            process: Process::start("demo", command, &log),
            router: SocketAddr::from((Ipv4Addr::LOCALHOST, port)),
            folder,
        }
    }

    fn output(&self) -> String {
        self.process.log()
    }

    fn wait_for(&mut self, timeout: Duration, text: &str) {
        until_within(timeout, text, || {
            let output = self.process.log();
            let ended = self.process.ended();
            assert!(
                output.contains(text) || ended.is_none(),
                "the demo ended with {ended:?} before it said \"{text}\":\n{output}"
            );
            output.contains(text)
        });
    }

    /// Waits for the end: the exit code must be `code`, and all processes that the demo started must be gone.
    fn ends_with(&mut self, code: i32) {
        let status = self.process.wait(TIMEOUT);
        assert_eq!(status.code(), Some(code), "{}", self.output());
        let output = self.output();
        let ends_in = |line: &str| line.split([' ', ',']).find_map(|word| word.parse::<SocketAddr>().ok());
        let nodes: Vec<SocketAddr> =
            output.lines().filter(|line| line.starts_with("node ")).filter_map(ends_in).collect();
        assert_eq!(nodes.len(), 2, "the nodes must be named:\n{output}");
        for address in nodes.into_iter().chain([self.router]) {
            assert!(TcpStream::connect(address).is_err(), "{address} still listens:\n{output}");
        }
        assert_eq!(processes_in(self.folder.path()), Vec::<PathBuf>::new(), "{output}");
        assert_eq!(left_in(self.folder.path()), [PathBuf::from("demo.log")]);
    }
}

fn left_in(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder)
        .expect("the folder")
        .map(|entry| PathBuf::from(entry.expect("an entry").file_name()))
        .collect()
}

/// Directories of processes that run in a folder, also if that was deleted.
fn processes_in(folder: &Path) -> Vec<PathBuf> {
    let all = std::fs::read_dir("/proc").expect("processes").flatten();
    let homes = all.filter_map(|entry| std::fs::read_link(entry.path().join("cwd")).ok());
    homes.filter(|home| home.starts_with(folder)).collect()
}

#[test]
fn the_demo_shows_everything_and_leaves_nothing_behind() {
    let picture = tempfile::NamedTempFile::new().expect("a file");
    let mut demo = Demo::start(&["--hold", "--svg", picture.path().to_str().expect("a path")]);
    demo.wait_for(STORY, "until Ctrl-C");
    let mut client = Client::connect(demo.router);
    assert_eq!(client.cmd("SET greeting hello"), ok());
    assert_eq!(client.cmd("PING"), simple("PONG"));
    demo.process.signal(Signal::INT);
    demo.ends_with(0);
    let output = demo.output();
    // Decisions and actions of the router, as in its histories.
    let said = story_lines(&output);
    for (what, words) in [
        ("the hot key is answered", vec!["done", "reads were answered from copies"]),
        ("the planner decides", vec!["decided", "planner, decision", "its limit is", "moving"]),
        ("a written key is moved", vec!["done", "override: stock", "of the planner"]),
        ("a node is requested", vec!["decided", "autoscaler: change", "a node is added", "requests/s need"]),
        (
            "it has its share",
            vec!["done", "a third redis-server was started as node 3, joined, and got", "of 16384 slots"],
        ),
        ("it joins", vec!["done", "autoscaler: change", "has joined and has its share; there are 3 nodes now"]),
        ("a node is killed", vec!["seen", "node 2 was killed"]),
        ("it comes back", vec!["seen", "node 2 is back", "errors ("]),
        ("its keys have the errors", vec!["done", "each of these errors is for a key of node 2"]),
        ("a node is removed", vec!["decided", "autoscaler: change", "is removed", "requests/s need only"]),
        ("it is stopped", vec!["done", "autoscaler: change", "has left and is stopped; there are 2 nodes now"]),
        (
            "the verdict",
            vec!["verdict", "every reply checked: 0 wrong, 0 stale", "errors, all for keys of the killed node"],
        ),
    ] {
        assert!(said.iter().any(|line| words.iter().all(|word| line.contains(word))), "{what}:\n{output}");
    }
    assert!(!output.contains("MISSED"), "{output}");
    assert!(output.contains("keys through the router, and the same number at the nodes"), "{output}");
    let program =
        Path::new(env!("CARGO_BIN_EXE_switchyard")).file_name().expect("a name").to_string_lossy().into_owned();
    assert!(output.contains(&format!("/{program} autoscale history --admin 127.0.0.1:")), "{output}");
    let picture = std::fs::read_to_string(picture.path()).expect("a picture");
    assert!(picture.starts_with("<svg") && picture.contains("0 wrong, 0 stale"), "{picture}");
}

/// Lines of the output, each joined with its continuation lines.
fn story_lines(output: &str) -> Vec<String> {
    let mut said: Vec<String> = Vec::new();
    for line in output.lines() {
        match (line.starts_with("                "), said.last_mut()) {
            (true, Some(last)) => last.push_str(&format!(" {}", line.trim())),
            _ => said.push(line.to_owned()),
        }
    }
    said
}

#[test]
fn sigterm_during_the_story_ends_it_with_a_verdict() {
    let mut demo = Demo::start(&[]);
    demo.wait_for(TIMEOUT, "requests/s, p99");
    demo.process.signal(Signal::TERM);
    demo.ends_with(0);
    let output = demo.output();
    assert!(output.contains("Ended early") && output.contains("0 wrong, 0 stale; 0 errors"), "{output}");
}

#[test]
fn without_a_server_the_error_names_the_package() {
    let folder = TempDir::new().expect("a directory");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_switchyard"))
        .args(["demo"])
        .env("PATH", folder.path())
        .output()
        .expect("the binary runs");
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("redis-server") && error.contains("apt-get install"), "{error}");
}
