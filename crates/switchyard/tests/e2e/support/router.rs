//! The real `switchyard` binary, started by its command line.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::process::Signal;
use tempfile::TempDir;

use super::client::{Client, TIMEOUT, encode};
use super::process::{Process, tied};
use super::{http, ports};

/// Options to start a router.
#[derive(Clone, Debug)]
pub(crate) struct RouterOptions {
    pub(crate) workers: usize,
    /// Path of the binary, if it is not the one that was built.
    pub(crate) program: Option<PathBuf>,
    /// TOML for `--config`, in addition to flags. Empty: no file.
    pub(crate) config: String,
    /// Additional arguments.
    pub(crate) args: Vec<String>,
    /// Limit of open files (`prlimit --nofile`).
    pub(crate) open_files: Option<u64>,
    /// File mounted over `/etc/hosts`, in a separate mount namespace.
    pub(crate) accepted_host_names: Option<PathBuf>,
    /// Leaves `nodes.wait-max` to the configuration. Otherwise it is 0, so that a command for a node that is down fails
    /// at once.
    pub(crate) waits_for_nodes: bool,
    /// The nodes are members of a cluster.
    pub(crate) is_cluster: bool,
    /// Wait only until the router answers PING, not until every node replies.
    pub(crate) nodes_may_be_down: bool,
    /// Password for clients.
    pub(crate) password: Option<String>,
    /// User of that password, if not the default user.
    pub(crate) user: Option<String>,
}

impl Default for RouterOptions {
    fn default() -> RouterOptions {
        // Two workers, so that a test does not pass only because of a single worker.
        RouterOptions {
            workers: 2,
            program: None,
            config: String::new(),
            args: Vec::new(),
            open_files: None,
            accepted_host_names: None,
            waits_for_nodes: false,
            is_cluster: false,
            nodes_may_be_down: false,
            password: None,
            user: None,
        }
    }
}

impl RouterOptions {
    /// Options with this configuration file.
    pub(crate) fn config(text: impl Into<String>) -> RouterOptions {
        RouterOptions { config: text.into(), ..RouterOptions::default() }
    }

    /// Options with additional arguments.
    pub(crate) fn args(args: &[&str]) -> RouterOptions {
        RouterOptions { args: args.iter().map(|&arg| arg.to_owned()).collect(), ..RouterOptions::default() }
    }
}

/// A running router, killed when dropped.
#[derive(Debug)]
pub(crate) struct Router {
    process: Process,
    listen: SocketAddr,
    admin: SocketAddr,
    dir: TempDir,
    nodes: Vec<SocketAddr>,
    options: RouterOptions,
}

impl Router {
    /// Starts a router in front of `nodes`, and waits until it serves.
    pub(crate) fn start(nodes: &[SocketAddr], options: &RouterOptions) -> Router {
        let dir = TempDir::new().expect("a directory");
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free()));
        let admin = SocketAddr::from((Ipv4Addr::LOCALHOST, ports::free()));
        let process = launch(nodes, options, listen, admin, dir.path());
        let mut router = Router { process, listen, admin, dir, nodes: nodes.to_vec(), options: options.clone() };
        router.wait_until_serving();
        router
    }

    /// Starts a second process with the same settings, as by an operator's mistake. Returns the process.
    pub(crate) fn start_rival(&self, listen: SocketAddr, admin: SocketAddr, state_dir: &Path) -> Process {
        self.start_beside(&self.options, listen, admin, state_dir)
    }

    /// Starts another process in front of the same nodes.
    pub(crate) fn start_beside(
        &self,
        options: &RouterOptions,
        listen: SocketAddr,
        admin: SocketAddr,
        state_dir: &Path,
    ) -> Process {
        launch_with_state(&self.nodes, options, listen, admin, self.dir.path(), state_dir, "rival.log")
    }

    fn wait_until_serving(&mut self) {
        let end = Instant::now() + TIMEOUT;
        loop {
            if let Some(status) = self.process.ended() {
                panic!("the router ended at start ({status}):\n{}", self.process.log());
            }
            if let Ok(mut client) = Client::try_connect(self.listen) {
                client.timeout(Duration::from_secs(5));
                if let Some(password) = &self.options.password {
                    // The router tests its ports before it serves: a client that connects then is closed.
                    let _ = match &self.options.user {
                        Some(user) => client.try_write(&encode(&["AUTH", user.as_str(), password.as_str()])),
                        None => client.try_write(&encode(&["AUTH", password.as_str()])),
                    };
                    let _ = client.try_reply();
                }
                // DBSIZE reaches every node.
                client.post_quietly(if self.options.nodes_may_be_down { "PING" } else { "DBSIZE" });
                if client.try_reply().is_ok_and(|reply| reply.error().is_none()) {
                    // Clients are served shortly before the threads for operators' commands run. Bounded, because some
                    // tests log little.
                    let told = Instant::now() + Duration::from_secs(1);
                    while !self.process.log().contains("clients connect to") && Instant::now() < told {
                        std::thread::sleep(Duration::from_millis(5));
                    }
                    return;
                }
            }
            assert!(Instant::now() < end, "the router does not serve:\n{}", self.process.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    /// Address for clients.
    pub(crate) fn address(&self) -> SocketAddr {
        self.listen
    }

    /// Address of the admin port.
    pub(crate) fn admin(&self) -> SocketAddr {
        self.admin
    }

    pub(crate) fn state_dir(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    /// Path of the configuration file. It exists only if a configuration was given.
    pub(crate) fn config_file(&self) -> PathBuf {
        self.dir.path().join("switchyard.toml")
    }

    pub(crate) fn process(&self) -> &Process {
        &self.process
    }

    pub(crate) fn process_mut(&mut self) -> &mut Process {
        &mut self.process
    }

    #[track_caller]
    pub(crate) fn metrics(&self) -> String {
        let (status, body) = http::get(self.admin, "/metrics");
        assert_eq!(status, 200, "GET /metrics: {body}");
        body
    }

    /// Stops the router with SIGTERM, and starts it again in front of `nodes` with the same state directory.
    pub(crate) fn restart(&mut self, nodes: &[SocketAddr]) {
        self.process.signal(Signal::TERM);
        let status = self.process.wait(Duration::from_secs(30));
        assert!(status.success(), "SIGTERM must end with exit code 0, not {status}:\n{}", self.process.log());
        self.start_again(nodes);
    }

    /// Starts the router again after its end, with the same state directory.
    pub(crate) fn start_again(&mut self, nodes: &[SocketAddr]) {
        self.nodes = nodes.to_vec();
        self.process = launch(nodes, &self.options, self.listen, self.admin, self.dir.path());
        self.wait_until_serving();
    }
}

fn launch(nodes: &[SocketAddr], options: &RouterOptions, listen: SocketAddr, admin: SocketAddr, dir: &Path) -> Process {
    launch_with_state(nodes, options, listen, admin, dir, &dir.join("state"), "router.log")
}

fn launch_with_state(
    nodes: &[SocketAddr],
    options: &RouterOptions,
    listen: SocketAddr,
    admin: SocketAddr,
    dir: &Path,
    state_dir: &Path,
    log: &str,
) -> Process {
    let binary = options.program.as_deref().unwrap_or(Path::new(env!("CARGO_BIN_EXE_switchyard")));
    let mut command = match (options.open_files, &options.accepted_host_names) {
        (None, None) => tied(binary),
        (_, Some(accepted_host_names)) => {
            let mut command = tied("unshare");
            command
                .args(["--mount", "--", "sh", "-c", "mount --bind \"$0\" /etc/hosts && exec \"$@\""])
                .arg(accepted_host_names)
                .arg(binary);
            command
        }
        (Some(limit), None) => {
            let mut command = tied("/usr/bin/prlimit");
            command.arg(format!("--nofile={limit}:{limit}")).arg("--").arg(binary);
            command
        }
    };
    command.arg("serve").args(["--listen", &listen.to_string()]);
    for node in nodes {
        command.args([if options.is_cluster { "--storage-cluster" } else { "--node" }, &node.to_string()]);
    }
    command.args(["--workers", &options.workers.to_string(), "--admin", &admin.to_string()]);
    if options.is_cluster {
        command.env("RUNTIME_DIRECTORY", dir);
    } else {
        command.arg("--state-dir").arg(state_dir);
    }
    if !options.config.is_empty() {
        let file = dir.join("switchyard.toml");
        std::fs::write(&file, &options.config).expect("configuration file");
        command.arg("--config").arg(file);
    }
    command.args(&options.args);
    if !options.waits_for_nodes && !options.is_cluster {
        command.args(["--set", "nodes.wait-max=0s"]);
    }
    // Runs the whole suite with other settings, such as hot-copies.admission=all.
    for setting in std::env::var("SWITCHYARD_E2E_SET").iter().flat_map(|all| all.split_whitespace()) {
        command.args(["--set", setting]);
    }
    command.env_remove("RUST_LOG");
    Process::start(&format!("router {listen}"), command, &dir.join(log))
}
