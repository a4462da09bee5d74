//! `switchyard demo` as its users start it: it works, it says so, and it leaves nothing behind.

use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::support::process::{Process, tied};
use crate::support::{Client, ok, ports, simple, until};

/// How long a demo may take to end on a busy machine, from when it should.
const PATIENCE: Duration = Duration::from_secs(60);

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
            .args(["demo", "--connections", "8"])
            .args(["--port", &port.to_string()])
            .args(["--admin-port", &admin.to_string()])
            .args(arguments)
            .env("TMPDIR", folder.path());
        let log = folder.path().join("demo.log");
        Demo { process: Process::start("demo", command, &log), router: SocketAddr::from((Ipv4Addr::LOCALHOST, port)), folder }
    }

    fn output(&self) -> String {
        self.process.log()
    }

    fn wait_for(&mut self, text: &str) {
        until(text, || {
            let output = self.process.log();
            let ended = self.process.ended();
            assert!(output.contains(text) || ended.is_none(), "the demo ended with {ended:?} before it said \"{text}\":\n{output}");
            output.contains(text)
        });
    }

    /// Waits for its end: the exit code must be `code`, and everything that it started must be gone.
    fn ends_with(&mut self, code: i32) {
        let status = self.process.wait(PATIENCE);
        assert_eq!(status.code(), Some(code), "{}", self.output());
        let output = self.output();
        let nodes = output
            .lines()
            .filter(|line| line.starts_with("node ") && line.contains(" at "))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<SocketAddr>().ok());
        let mut count = 0;
        for address in nodes.chain([self.router]) {
            assert!(TcpStream::connect(address).is_err(), "{address} still listens:\n{output}");
            count += 1;
        }
        assert!(count > 1, "the nodes must be named:\n{output}");
        assert_eq!(left_in(self.folder.path()), [PathBuf::from("demo.log")]);
    }
}

fn left_in(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).expect("the folder").map(|entry| PathBuf::from(entry.expect("an entry").file_name())).collect()
}

#[test]
fn the_demo_checks_every_reply_and_cleans_up() {
    let mut demo = Demo::start(&["--duration", "1s", "--nodes", "2"]);
    demo.ends_with(0);
    let output = demo.output();
    let value = |name: &str| {
        let line = output.lines().find(|line| line.starts_with(name));
        let line = line.unwrap_or_else(|| panic!("no line \"{name}\" in:\n{output}"));
        let digits: String = line[name.len()..].chars().filter(char::is_ascii_digit).collect();
        digits.parse::<u64>().unwrap_or_else(|e| panic!("{line}: {e}"))
    };
    assert!(value("requests answered") > 100, "{output}");
    assert_eq!(value("error replies"), 0);
    assert_eq!(value("wrong replies"), 0);
    assert!(output.contains("DBSIZE through the router"), "{output}");
}

#[test]
fn held_up_it_serves_until_it_is_told_to_end() {
    let mut demo = Demo::start(&["--duration", "100ms", "--nodes", "1", "--hold"]);
    demo.wait_for("until Ctrl-C");
    let mut client = Client::connect(demo.router);
    assert_eq!(client.cmd("SET greeting hello"), ok());
    assert_eq!(client.cmd("PING"), simple("PONG"));
    demo.process.signal(Signal::INT);
    demo.ends_with(0);
}

#[test]
fn sigterm_in_the_load_ends_it_early_with_a_summary() {
    let mut demo = Demo::start(&["--duration", "1h", "--nodes", "2"]);
    demo.wait_for("requests/s");
    demo.process.signal(Signal::TERM);
    demo.ends_with(0);
    assert!(demo.output().contains("requests answered"), "{}", demo.output());
}

#[test]
fn without_a_server_it_says_what_to_install() {
    let folder = TempDir::new().expect("a directory");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_switchyard"))
        .args(["demo", "--duration", "1s"])
        .env("PATH", folder.path())
        .output()
        .expect("the binary runs");
    assert_eq!(output.status.code(), Some(1));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("redis-server") && error.contains("apt-get install"), "{error}");
}
