//! A real `redis-server` (or `valkey-server`) on a separate port, without files on disk.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use super::client::{Client, TIMEOUT};
use super::process::{Process, on_path, tied};
use super::{ports, value::Value};

/// Server under test: `SWITCHYARD_E2E_SERVER`, or any installed one.
pub(crate) fn default_program() -> String {
    if let Ok(program) = std::env::var("SWITCHYARD_E2E_SERVER") {
        return program;
    }
    ["redis-server", "valkey-server"]
        .into_iter()
        .find(|program| on_path(program))
        .expect("redis-server or valkey-server must be on PATH (Debian: apt-get install redis-server)")
        .to_owned()
}

/// Options to start a node.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeOptions {
    /// Server program, if not the default.
    pub(crate) program: Option<String>,
    /// Additional arguments (`["--requirepass", "x"]`).
    pub(crate) args: Vec<String>,
    /// Lines of a configuration file, for settings that cannot be arguments.
    pub(crate) config: String,
}

impl NodeOptions {
    /// Options with additional arguments.
    pub(crate) fn args(args: &[&str]) -> NodeOptions {
        NodeOptions { args: args.iter().map(|&arg| arg.to_owned()).collect(), ..NodeOptions::default() }
    }
}

/// A running server, killed when dropped.
#[derive(Debug)]
pub(crate) struct Node {
    // Declared before the directory, because fields are dropped in order and the process uses the directory.
    process: Option<Process>,
    dir: TempDir,
    port: u16,
    options: NodeOptions,
}

impl Node {
    /// Starts a node.
    pub(crate) fn start(options: &NodeOptions) -> Node {
        for _ in 0..5 {
            let mut node = Node {
                process: None,
                dir: TempDir::new().expect("a directory"),
                port: ports::free(),
                options: options.clone(),
            };
            if node.launch() {
                return node;
            }
        }
        panic!("a node does not start on five different ports");
    }

    fn program(&self) -> String {
        self.options.program.clone().unwrap_or_else(default_program)
    }

    /// Starts the process. Returns false if it ended at once because another process took the port.
    fn launch(&mut self) -> bool {
        let mut command = tied(self.program());
        let file = self.dir.path().join("server.conf");
        std::fs::write(&file, &self.options.config).expect("configuration file");
        command.arg(&file);
        command.args(["--port", &self.port.to_string(), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]);
        command.args(["--enable-debug-command", "yes", "--daemonize", "no", "--databases", "16"]);
        command.arg("--dir").arg(self.dir.path());
        command.args(&self.options.args);
        let mut process = Process::start(&format!("node {}", self.port), command, &self.dir.path().join("log"));
        let end = Instant::now() + TIMEOUT;
        loop {
            if process.ended().is_some() {
                let log = process.log();
                assert!(log.contains("Address already in use"), "the node does not start:\n{log}");
                return false;
            }
            // Before authentication, PING returns an error: any reply suffices.
            if let Ok(mut client) = Client::try_connect(self.address()) {
                client.post("PING");
                let answers =
                    client.try_reply().is_ok_and(|reply| !reply.error().is_some_and(|e| e.starts_with("LOADING")));
                if answers && is_ours(&mut client, process.pid()) {
                    self.process = Some(process);
                    return true;
                }
            }
            assert!(Instant::now() < end, "the node does not answer:\n{}", process.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Folder of the append-only file.
    pub(crate) fn append_only_file(&self) -> std::path::PathBuf {
        self.dir.path().join("appendonlydir")
    }

    pub(crate) fn address(&self) -> SocketAddr {
        (Ipv4Addr::LOCALHOST, self.port).into()
    }

    /// Returns a client that bypasses the router.
    #[track_caller]
    pub(crate) fn client(&self) -> Client {
        Client::connect(self.address())
    }

    /// Runs a command that bypasses the router.
    #[track_caller]
    pub(crate) fn cmd(&self, line: &str) -> Value {
        self.client().cmd(line)
    }

    /// Kills the process with SIGKILL.
    pub(crate) fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill();
        }
    }

    /// Restarts the node empty, on the same port.
    pub(crate) fn restart(&mut self) {
        self.kill();
        for _ in 0..100 {
            if self.launch() {
                return;
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        panic!("the node does not start again on port {}", self.port);
    }

    /// Suspends the process with SIGSTOP, without closing connections.
    pub(crate) fn freeze(&self) {
        self.process.as_ref().expect("a running node").signal(Signal::STOP);
    }

    /// Resumes the process with SIGCONT.
    pub(crate) fn thaw(&self) {
        self.process.as_ref().expect("a running node").signal(Signal::CONT);
    }
}

/// Whether the server that replies is the started process, as far as it reports its id. Another process may have bound
/// the port first.
fn is_ours(client: &mut Client, pid: u32) -> bool {
    client.post("INFO server");
    let Ok(Value::Bulk(info)) = client.try_reply() else { return true };
    let info = String::from_utf8_lossy(&info);
    let said = info.lines().find_map(|l| l.strip_prefix("process_id:")).map(str::trim);
    said.is_none_or(|said| said == pid.to_string())
}
