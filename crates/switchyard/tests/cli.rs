//! Tests of the command line with the real binary: exit codes, output and signals.
//!
//! Needs no Redis server. The end-to-end tests cover the router's behaviour for clients.

#[path = "../../../tests/ports.rs"]
mod ports;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Timeout of every wait, far more than needed, since the machine may be busy.
const TIMEOUT: Duration = Duration::from_secs(60);

fn switchyard() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_switchyard"));
    // Remove variables of the tester's environment.
    for name in ["RUST_LOG", "STATE_DIRECTORY", "NOTIFY_SOCKET", "WATCHDOG_USEC", "SWITCHYARD_ADMIN_TOKEN"] {
        command.env_remove(name);
    }
    command.stdin(Stdio::null());
    command
}

fn run(arguments: &[&str]) -> (i32, String, String) {
    outcome(switchyard().args(arguments).output().expect("the binary runs"))
}

fn outcome(output: Output) -> (i32, String, String) {
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (output.status.code().expect("an exit code"), text(output.stdout), text(output.stderr))
}

/// A running `serve`, killed when dropped.
struct Serve {
    child: Child,
    dir: TempDir,
    listen: SocketAddr,
    admin: SocketAddr,
    notify: UnixDatagram,
}

impl Serve {
    /// Starts `serve` with this configuration file, and waits until it reports ready.
    fn start(config: &str) -> Self {
        Self::start_in(Path::new("state"), config)
    }

    /// Like [`Serve::start`], with a state directory relative to a temporary folder.
    fn start_in(state: &Path, config: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (listen, admin) =
            (SocketAddr::from(([127, 0, 0, 1], ports::free())), SocketAddr::from(([127, 0, 0, 1], ports::free())));
        let socket = dir.path().join("notify");
        let notify = UnixDatagram::bind(&socket).expect("a socket");
        notify.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
        std::fs::write(dir.path().join("switchyard.toml"), config).expect("writing");
        let log = std::fs::File::create(dir.path().join("log")).expect("a file");
        let child = switchyard()
            .arg("serve")
            .arg("-c")
            .arg(dir.path().join("switchyard.toml"))
            .args(["--listen", &listen.to_string(), "--admin", &admin.to_string(), "--workers", "2"])
            .arg("--state-dir")
            .arg(dir.path().join(state))
            .env("NOTIFY_SOCKET", &socket)
            .env("WATCHDOG_USEC", "1000000")
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("the binary runs");
        let serve = Self { child, dir, listen, admin, notify };
        serve.expect_notification("READY=1");
        serve
    }

    fn config(&self) -> std::path::PathBuf {
        self.dir.path().join("switchyard.toml")
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("log")).expect("the log")
    }

    /// Waits for a notification to systemd.
    fn expect_notification(&self, expected: &str) {
        let mut buffer = [0; 1024];
        loop {
            let length = match self.notify.recv(&mut buffer) {
                Ok(length) => length,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(error) => panic!("no {expected}: {error}\n{}", self.log()),
            };
            if String::from_utf8_lossy(&buffer[..length]).lines().any(|line| line == expected) {
                return;
            }
        }
    }

    fn expect_log(&self, expected: &str) {
        self.expect_lines(expected, 1);
    }

    /// Waits until `count` lines of the log contain the text. A separate thread writes the log.
    fn expect_lines(&self, expected: &str, count: usize) {
        let end = Instant::now() + TIMEOUT;
        while self.log().lines().filter(|line| line.contains(expected)).count() < count {
            assert!(Instant::now() < end, "the log never said {expected:?} {count} times:\n{}", self.log());
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("the process runs");
    }

    /// Replaces the configuration, and reloads. Returns after the reload.
    fn reload(&self, config: &str) {
        std::fs::write(self.config(), config).expect("writing");
        self.signal(Signal::HUP);
        self.expect_notification("RELOADING=1");
        self.expect_notification("READY=1");
    }

    /// Whether the last reload was applied, and the time of the last applied one.
    fn last_reload(&self) -> (f64, f64) {
        let mut stream = TcpStream::connect(self.admin).expect("a connection");
        write!(stream, "GET /metrics HTTP/1.0\r\nHost: {}\r\n\r\n", self.admin).expect("sent");
        let mut page = String::new();
        stream.read_to_string(&mut page).expect("a page");
        let value = |name: &str| page.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        let value = |name: &str| value(name).unwrap_or_else(|| panic!("no {name}:\n{page}"));
        (
            value("switchyard_config_last_reload_successful"),
            value("switchyard_config_last_reload_success_timestamp_seconds"),
        )
    }

    fn nodes(&self) -> Vec<(u64, String, u64)> {
        let (code, out, err) = run(&["nodes", "--json", "--admin", &self.admin.to_string()]);
        assert_eq!(code, 0, "{err}");
        let answer: serde_json::Value = serde_json::from_str(&out).expect("JSON");
        let nodes = answer["nodes"].as_array().expect("a list");
        let number = |value: &serde_json::Value| value.as_u64().expect("a number");
        nodes
            .iter()
            .map(|n| (number(&n["id"]), n["address"].as_str().expect("text").to_owned(), number(&n["slots"])))
            .collect()
    }

    fn stop(mut self) -> i32 {
        self.signal(Signal::TERM);
        self.expect_notification("STOPPING=1");
        self.child.wait().expect("an end").code().expect("an exit code")
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn node(port: u16) -> String {
    format!("[[node]]\naddress = \"127.0.0.1:{port}\"\n")
}

#[test]
fn help_has_examples_and_exit_codes() {
    let (code, out, _) = run(&["--help"]);
    assert_eq!(code, 0);
    for word in ["serve", "check-config", "status", "nodes", "Examples:", "Exit codes:"] {
        assert!(out.contains(word), "{word}:\n{out}");
    }
    for command in [
        &["serve"][..],
        &["check-config"],
        &["status"],
        &["nodes", "list"],
        &["demo"],
        &["nodes"],
        &["nodes", "remove"],
        &["moves", "goal"],
        &["moves", "max-rate"],
    ] {
        let (code, out, _) = run(&[command, &["--help"]].concat());
        assert_eq!(code, 0);
        assert!(out.contains("Examples:") && out.contains("Exit codes:"), "{command:?}:\n{out}");
    }
    let (code, out, _) = run(&["--version"]);
    let commit = out
        .trim()
        .strip_prefix(concat!("switchyard ", env!("CARGO_PKG_VERSION"), " ("))
        .and_then(|rest| rest.strip_suffix(')'));
    let commit = commit.unwrap_or_else(|| panic!("no commit: {out}"));
    assert_eq!((code, commit), (0, switchyard_product::COMMIT));
    // A working tree has a commit; an archive has no commit, except with SWITCHYARD_COMMIT.
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    if Path::new(root).join(".git").exists() && std::env::var_os("SWITCHYARD_COMMIT").is_none() {
        let head =
            Command::new("git").args(["-C", root, "rev-parse", "--short=12", "HEAD"]).output().expect("git runs");
        assert_eq!(commit.trim_end_matches("-dirty"), String::from_utf8_lossy(&head.stdout).trim());
    }
}

#[test]
fn status_check_exits_with_the_state_of_the_router() {
    let serve = Serve::start(&node(ports::free()));
    let check =
        |admin: SocketAddr, more: &[&str]| run(&[&["status", "--check", "--admin", &admin.to_string()], more].concat());
    // The node does not exist.
    let (code, out, err) = check(serve.admin, &[]);
    assert_eq!((code, err.trim()), (2, "switchyard: keys of some slots cannot be used: no node serves them"), "{out}");
    assert!(out.contains("NOT READY"), "{out}");
    let (code, out, _) = check(serve.admin, &["--json"]);
    assert_eq!((code, out.contains("\"ready\":false")), (2, true), "{out}");
    let nothing = SocketAddr::from(([127, 0, 0, 1], ports::free()));
    let (code, out, err) = check(nothing, &[]);
    assert_eq!((code, out.as_str()), (3, ""));
    assert!(err.contains("no router answers"), "{err}");
    // Without the flag, the exit code depends only on whether the router replied.
    assert_eq!(run(&["status", "--admin", &serve.admin.to_string()]).0, 0);
    assert_eq!(run(&["status", "--admin", &nothing.to_string()]).0, 1);
}

#[test]
fn a_wrong_command_line_exits_with_2_and_a_suggestion() {
    for (arguments, expected) in [
        (&["serv"][..], "'serve'"),
        (&["serve", "--worker", "2"], "'--workers'"),
        (&["serve", "--node"], "--node"),
        (&["serve"], "no node is given"),
        (
            &["move", "--to", "127.0.0.1:7002"],
            "name the slots or keys to move: --slots RANGES, --all, --keys PATTERN or --home",
        ),
        (&["nodes", "-c", "file", "list"], "cannot read the configuration file file"),
        (&["serve", "--node", "a", "--workers", "0"], "--workers: \"0\" is not a whole number from 1 to 1024"),
        (&["serve", "--node", "a", "--misplaced-keys", "remove"], "cannot be used with '--misplaced-keys <WHAT>'"),
        (&["serve", "-c", "file", "--twemproxy-stats", "127.0.0.1:1"], "--twemproxy-config <FILE>"),
        (
            &["serve", "-c", "/nonexistent/switchyard.toml"],
            "cannot read the configuration file /nonexistent/switchyard.toml",
        ),
    ] {
        let (code, out, err) = run(arguments);
        assert_eq!(code, 2, "{arguments:?}: {err}");
        assert!(err.contains(expected), "{arguments:?}: {err}");
        assert_eq!(out, "");
    }
}

#[test]
fn check_config_shows_a_good_file_and_refuses_a_bad_one() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).expect("writing");
        path.display().to_string()
    };
    let good = write(
        "good.toml",
        "[clients]\npassword = \"hunter2\"\nmax-clients = 5\n[[node]]\naddress = \"127.0.0.1:7001\"\n",
    );
    for arguments in
        [&["check-config", "-c", &good, "--workers", "3"][..], &["serve", "-c", &good, "--workers", "3", "--test-conf"]]
    {
        let (code, out, err) = run(arguments);
        assert_eq!((code, err.as_str()), (0, ""));
        assert!(out.lines().any(|line| line.starts_with("workers = 3 ") && line.ends_with("# --workers")), "{out}");
        assert!(out.lines().any(|line| line.starts_with("max-clients = 5 ") && line.ends_with("good.toml:3")), "{out}");
        assert!(out.contains("password = \"***\"") && !out.contains("hunter2"), "{out}");
    }

    let bad = write(
        "bad.toml",
        "wrokers = 2\n[nodes]\ncomand-timeout = \"5s\"\ncommand-timeout = \"5\"\n[[node]]\naddress = \"127.0.0.1:7001\"\n",
    );
    let (code, out, err) = run(&["check-config", "-c", &bad]);
    assert_eq!((code, out.as_str()), (2, ""));
    let lines: Vec<&str> = err.lines().collect();
    assert_eq!(lines[0], format!("{bad}:1: unknown key \"wrokers\" at the top level; did you mean \"workers\"?"));
    assert_eq!(
        lines[1],
        format!("{bad}:3: unknown key \"comand-timeout\" in [nodes]; did you mean \"command-timeout\"?")
    );
    assert!(lines[2].starts_with(&format!("{bad}:4: command-timeout: \"5\" is not a time with its unit")), "{err}");
    assert_eq!(lines.len(), 3, "{err}");

    let unresolvable = write("unresolvable.toml", "[[node]]\naddress = \"no-such-host.invalid\"\n");
    let (code, _, err) = run(&["check-config", "-c", &unresolvable]);
    assert_eq!(code, 2);
    assert!(err.contains("cannot resolve the host name \"no-such-host.invalid\""), "{err}");
}

#[test]
fn a_closed_output_ends_a_command_quietly() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let output = switchyard()
        .args(["check-config", "--example"])
        .stdout(writer)
        .stderr(Stdio::piped())
        .output()
        .expect("the binary runs");
    assert_eq!(output.status.code(), Some(141));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn the_example_passes_check_config() {
    let (code, example, _) = run(&["check-config", "--example"]);
    assert_eq!(code, 0);
    let dir = tempfile::tempdir().expect("a temporary directory");
    let path = dir.path().join("switchyard.toml");
    std::fs::write(&path, example).expect("writing");
    let (code, _, err) = run(&["check-config", "-c", &path.display().to_string()]);
    assert_eq!((code, err.as_str()), (0, ""));
}

#[test]
fn an_open_listener_is_refused() {
    let (code, _, err) =
        run(&["serve", "--node", "127.0.0.1:7001", "--listen", "0.0.0.0:0", "--state-dir", "/nonexistent"]);
    assert_eq!(code, 2);
    assert!(err.contains("without a password") && err.contains("--allow-open-listener"), "{err}");
    let (code, _, err) =
        run(&["serve", "--node", "127.0.0.1:7001", "--admin", "0.0.0.0:0", "--state-dir", "/nonexistent"]);
    assert_eq!(code, 2);
    assert!(err.contains("without a token") && err.contains("--admin-token-file"), "{err}");
}

#[test]
fn a_refused_start_exits_with_1_and_leaves_no_slot_map() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("its address").to_string();
    let dir = tempfile::tempdir().expect("a temporary directory");
    let state = dir.path().join("state").display().to_string();
    for port in ["--listen", "--admin"] {
        let other = if port == "--listen" { "--admin" } else { "--listen" };
        let (code, _, err) =
            run(&["serve", "--node", "127.0.0.1:7001", port, &address, other, "127.0.0.1:0", "--state-dir", &state]);
        assert_eq!(code, 1, "{err}");
        assert!(
            err.contains(&address) && err.contains(&format!("process {}", std::process::id())) && err.contains(port),
            "{err}"
        );
    }
    // If one of these starts had stored a map, the next start would fail: 7001 owns keys and may not be removed.
    let serve = Serve::start_in(Path::new(&state), &node(7002));
    assert_eq!(serve.stop(), 0);

    let file = dir.path().join("a-file");
    std::fs::write(&file, "").expect("writing");
    let (code, _, err) = run(&["serve", "--node", "127.0.0.1:7001", "--state-dir", &file.display().to_string()]);
    assert_eq!(code, 1);
    assert!(err.contains("a-file"), "{err}");
}

#[test]
fn status_without_a_router_exits_with_1_and_a_remedy() {
    let nobody = format!("127.0.0.1:{}", ports::free());
    for command in [&["status"][..], &["nodes", "list"]] {
        let (code, out, err) = run(&[command, &["--admin", &nobody]].concat());
        assert_eq!((code, out.as_str()), (1, ""));
        assert!(err.contains(&nobody) && err.contains("switchyard serve"), "{err}");
    }
    // Another service listens at the address.
    let other = TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = other.local_addr().expect("its address").to_string();
    std::thread::spawn(move || {
        for stream in other.incoming() {
            let mut stream: TcpStream = stream.expect("a client");
            let _ = stream.read(&mut [0; 1024]);
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}");
        }
    });
    let (code, _, err) = run(&["status", "--admin", &address]);
    assert_eq!(code, 1);
    assert!(err.contains("not a Switchyard"), "{err}");
}

#[test]
fn serve_notifies_systemd_and_stops_with_0() {
    let serve = Serve::start(&node(7001));
    serve.expect_log(&format!(
        "not ready yet, no key is served: clients connect to {}; 1 node, 2 workers",
        serve.listen
    ));
    TcpStream::connect(serve.listen).expect("clients can connect once it is ready");
    serve.expect_notification("WATCHDOG=1");
    serve.reload(&node(7001));
    serve.expect_log("nothing has changed");
    assert_eq!(serve.stop(), 0);
}

#[test]
fn the_admin_token_is_required_and_found() {
    let serve = Serve::start(&format!("{}[admin]\ntoken = \"s3cret\"\n", node(7001)));
    let admin = serve.admin.to_string();
    let (code, _, err) = run(&["status", "--admin", &admin]);
    assert_eq!(code, 1);
    assert!(err.contains("token") && err.contains("--admin-token-file"), "{err}");
    let config = serve.config().display().to_string();
    let (code, out, err) = run(&["status", "--admin", &admin, "-c", &config]);
    assert_eq!(code, 0, "{err}");
    assert!(out.contains("127.0.0.1:7001") && out.contains("16 384"), "{out}");
    let answer = switchyard()
        .args(["status", "--json", "--admin", &admin])
        .env("SWITCHYARD_ADMIN_TOKEN", "s3cret")
        .output()
        .map(outcome)
        .expect("the binary runs");
    assert_eq!(answer.0, 0, "{}", answer.2);
    let status: serde_json::Value = serde_json::from_str(&answer.1).expect("JSON");
    assert_eq!(status["incarnation"], 1);
    let wrong = serve.dir.path().join("wrong-token");
    std::fs::write(&wrong, "guess\n").expect("writing");
    let (code, _, err) = run(&["status", "--admin", &admin, "--admin-token-file", &wrong.display().to_string()]);
    assert_eq!(code, 1);
    assert!(!err.contains("guess") && !err.contains("s3cret"), "{err}");
}

/// Posts as a script of another user of this machine would.
fn post(admin: SocketAddr, path: &str, more: &str) -> String {
    post_body(admin, path, more, "")
}

fn post_body(admin: SocketAddr, path: &str, more: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(admin).expect("a connection");
    let length = body.len();
    write!(stream, "POST {path} HTTP/1.0\r\nHost: {admin}\r\nContent-Length: {length}\r\n{more}\r\n{body}")
        .expect("sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("an answer");
    answer
}

#[test]
fn changes_need_the_token_and_the_command_line_finds_it() {
    use std::os::unix::fs::PermissionsExt;
    let serve = Serve::start(&node(7001));
    let admin = serve.admin.to_string();
    let refused = post(serve.admin, "/api/v1/moves/1/abort", "");
    assert!(refused.starts_with("HTTP/1.0 401"), "{refused}");
    let file = serve.dir.path().join("state/admin-token");
    assert!(refused.contains(&file.display().to_string()), "{refused}");
    assert_eq!(std::fs::metadata(&file).expect("there").permissions().mode() & 0o777, 0o600);
    // No input by the user: reading needs no token, and otherwise the file is found.
    assert_eq!(run(&["status", "--admin", &admin]).0, 0);
    let abort = || run(&["moves", "abort", "1", "--admin", &admin]);
    let (code, _, err) = abort();
    assert!(code == 1 && err.contains("there is no move 1"), "{err}");
    let bearer = format!("Authorization: Bearer {}\r\n", std::fs::read_to_string(&file).expect("the token").trim());
    assert!(post(serve.admin, "/api/v1/moves/1/abort", &bearer).contains("there is no move 1"), "for curl");
    serve.expect_lines("audit", 3);
    assert!(!serve.log().contains(bearer[22..].trim()), "never logged");
    // The error explains why the file cannot be used.
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o644)).expect("mode");
    let (code, _, err) = abort();
    assert!(code == 1 && err.contains("others than its owner") && err.contains("--admin-token-file"), "{err}");
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("mode");
    // Reloads set another token, and remove it.
    let with = |token: &str| format!("[admin]\ntoken = \"{token}\"\n{}", node(7001));
    serve.reload(&with("first"));
    serve.expect_log("the token of the admin port has changed");
    let (code, _, err) = abort();
    assert!(code == 1 && err.contains("token"), "{err}");
    assert!(
        post(serve.admin, "/api/v1/moves/1/abort", &bearer).starts_with("HTTP/1.0 401"),
        "the made one is good no more"
    );
    let status = |token: &str| {
        let mut command = switchyard();
        outcome(
            command
                .args(["status", "--admin", &admin])
                .env("SWITCHYARD_ADMIN_TOKEN", token)
                .output()
                .expect("the binary runs"),
        )
        .0
    };
    assert_eq!((status("first"), status("second")), (0, 1));
    serve.reload(&with("second"));
    assert_eq!((status("first"), status("second")), (1, 0));
    serve.reload(&node(7001));
    let (code, _, err) = abort();
    assert!(code == 1 && err.contains("there is no move 1"), "{err}");
    assert_eq!(serve.stop(), 0);
}

/// Needs a binary without the feature `research`, with which most tests run.
#[cfg(not(feature = "research"))]
#[test]
fn the_product_offers_no_research_modes() {
    for command in [&["move"][..], &["balance"], &["nodes", "drain"], &["nodes", "add"], &["plan"]] {
        let (code, out, _) = run(&[command, &["--help"]].concat());
        assert_eq!(code, 0);
        let out = out.to_lowercase();
        for word in ["paper", "--mode", "tracker", "key-loss", "stop-and-copy", "bloom", "makris-printed"] {
            assert!(!out.contains(word), "{command:?} offers {word}:\n{out}");
        }
    }
    let (code, out, _) = run(&["check-config", "--example"]);
    assert!(code == 0 && out.contains("makris-safe") && !out.contains("makris-printed"), "{out}");
    let (code, _, err) = run(&["move", "--from", "a:1", "--to", "b:1", "--all", "--allow-key-loss"]);
    assert!(code == 2 && err.contains("unexpected argument '--allow-key-loss'"), "{err}");

    let serve = Serve::start(&node(7001));
    let token = std::fs::read_to_string(serve.dir.path().join("state/admin-token")).expect("the token");
    let bearer = format!("Authorization: Bearer {}\r\nContent-Type: application/json\r\n", token.trim());
    for options in [
        r#""protocol":"netmigrate","paper":{},"allow_key_loss":true"#,
        r#""protocol":"bloom""#,
        r#""protocol":"stop-and-copy""#,
        r#""allow_key_loss":true"#,
    ] {
        let body = format!(r#"{{"from":"127.0.0.1:7001","to":"127.0.0.1:7002","all":true,{options}}}"#);
        let refused = post_body(serve.admin, "/api/v1/moves", &bearer, &body);
        assert!(refused.starts_with("HTTP/1.0 400") && refused.contains("--features research"), "{options}: {refused}");
    }
    let config = serve.dir.path().join("policy.toml");
    std::fs::write(&config, format!("[planner]\npolicy = \"makris-printed\"\n{}", node(7001))).expect("writing");
    let (code, _, err) = run(&["check-config", "-c", &config.display().to_string()]);
    assert!(code == 2 && err.contains("\"makris-printed\" is not switchyard, makris-ffd or makris-safe"), "{err}");
    assert_eq!(serve.stop(), 0);
}

/// A process that listens at the router's address receives no token, and no other file's content.
#[test]
fn an_unknown_process_at_the_admin_port_learns_no_token() {
    use std::os::unix::fs::PermissionsExt;
    let serve = Serve::start(&node(7001));
    let state = serve.dir.path().join("state");
    let secret = serve.dir.path().join("secret");
    std::fs::write(&secret, "hunter2\n").expect("written");
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).expect("mode");
    for named in [state.join("admin-token"), secret, "/dev/zero".into(), "/etc/passwd".into()] {
        let stranger = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = stranger.local_addr().expect("its address");
        let body = serde_json::json!({ "file": named }).to_string();
        let heard = std::thread::spawn(move || {
            let mut heard = Vec::new();
            for stream in stranger.incoming() {
                let mut stream = stream.expect("a client");
                let mut buffer = [0; 4096];
                let length = stream.read(&mut buffer).unwrap_or(0);
                let text = String::from_utf8_lossy(&buffer[..length]).into_owned();
                let asks_where = text.starts_with("GET /api/v1/token");
                let last = text.starts_with("POST") || text.starts_with("stop");
                heard.push(text);
                let body = if asks_where { body.as_str() } else { "{}" };
                let head = "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json";
                let _ = write!(stream, "{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
                if last {
                    return heard;
                }
            }
            heard
        });
        run(&["moves", "abort", "1", "--admin", &address.to_string()]);
        if let Ok(mut stream) = TcpStream::connect(address) {
            let _ = stream.write_all(b"stop");
        }
        let heard = heard.join().expect("the stranger").join("\n");
        let token = std::fs::read_to_string(state.join("admin-token")).expect("the token");
        assert!(!heard.contains(token.trim()) && !heard.contains("hunter2") && !heard.contains("root:"), "{heard}");
        // The proof sent to it is useless at the real router.
        let proof =
            heard.lines().find_map(|line| line.to_lowercase().starts_with("authorization:").then(|| line.to_owned()));
        assert_eq!(proof.is_some(), named == state.join("admin-token"), "{heard}");
        if let Some(proof) = proof {
            let answer = post(serve.admin, "/api/v1/moves/1/abort", &format!("{}\r\n", proof.trim()));
            assert!(answer.starts_with("HTTP/1.0 401"), "{answer}");
        }
    }
    assert_eq!(serve.stop(), 0);
}

#[test]
fn a_reload_applies_allowed_changes_and_survives_mistakes() {
    let serve = Serve::start(&node(7001));
    serve.reload(&format!("pin = true\n[clients]\nmax-clients = 77\n[log]\nlevel = \"debug\"\n{}", node(7001)));
    serve.expect_log("clients.max-clients: 10000 -> 77");
    serve.expect_log("log.level: \"info\" -> \"debug\"");
    serve.expect_log("pin: false -> true needs a restart");

    serve.reload("this is no TOML");
    serve.expect_log("switchyard.toml:1: not valid TOML");
    std::fs::remove_file(serve.config()).expect("removing");
    serve.signal(Signal::HUP);
    serve.expect_log("cannot read the configuration file");
    assert_eq!(serve.nodes().len(), 1, "it still runs");
    let (is_good, since) = serve.last_reload();
    assert_eq!(is_good, 0.0);

    // A changed secret file is detected, although the configuration is the same.
    let secret = serve.dir.path().join("pw");
    std::fs::write(&secret, "first-secret\n").expect("writing");
    let with_password = format!("[clients]\npassword-file = \"pw\"\n{}", node(7001));
    serve.expect_notification("READY=1");
    serve.reload(&with_password);
    let now = serve.last_reload();
    assert!(now.0 == 1.0 && now.1 > since, "{now:?}, before that {since}");
    std::fs::write(&secret, "second-secret\n").expect("writing");
    serve.reload(&with_password);
    serve.expect_log("the password or the users of clients have changed");
    assert!(!serve.log().contains("-secret"), "{}", serve.log());
    assert_eq!(serve.stop(), 0);
}

#[test]
fn a_second_signal_stops_the_router_at_once() {
    // A node that accepts connections and never replies, with an endless timeout: the drain alone would take an hour.
    let mute = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = mute.local_addr().expect("its address").port();
    let config = format!(
        "shutdown-timeout = \"1h\"\n[nodes]\nconnect-timeout = \"1h\"\ncommand-timeout = \"1h\"\n{}",
        node(port)
    );
    let mut serve = Serve::start(&config);
    let mut client = TcpStream::connect(serve.listen).expect("a client");
    std::io::Write::write_all(&mut client, b"PING\r\nGET key\r\n").expect("a command");
    let mut pong = [0; 7];
    std::io::Read::read_exact(&mut client, &mut pong).expect("the answer to PING");
    serve.signal(Signal::TERM);
    serve.expect_log("SIGTERM: stopping");
    serve.signal(Signal::INT);
    let end = Instant::now() + TIMEOUT;
    let status = loop {
        if let Some(status) = serve.child.try_wait().expect("its state") {
            break status;
        }
        assert!(Instant::now() < end, "it still runs:\n{}", serve.log());
        std::thread::sleep(Duration::from_millis(10));
    };
    assert_eq!(status.code(), Some(0));
    assert!(serve.log().contains("SIGINT again: stopped at once"), "{}", serve.log());
}

#[test]
fn logs_are_json_if_configured() {
    let serve = Serve::start(&format!("[log]\nformat = \"json\"\n{}", node(7001)));
    serve.signal(Signal::INT);
    serve.expect_log("stopped");
    for line in serve.log().lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}"));
        assert!(line["level"].is_string() && line["message"].is_string(), "{line}");
    }
}

#[test]
fn the_limit_of_open_files_lowers_max_clients() {
    let dir = tempfile::tempdir().expect("a temporary directory");
    let log = dir.path().join("log");
    // Root may raise any limit, so `max-clients` exceeds even root's maximum.
    let toml = dir.path().join("switchyard.toml");
    std::fs::write(&toml, format!("[clients]\nmax-clients = 10000000\n{}", node(7001))).expect("writing");
    let nr_open: u64 =
        std::fs::read_to_string("/proc/sys/fs/nr_open").expect("Linux").trim().parse().expect("a number");
    if nr_open > 10_000_000 {
        eprintln!("skipped: this machine allows more open files than clients can be configured");
        return;
    }
    let child = switchyard()
        .args(["serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"])
        .arg("-c")
        .arg(&toml)
        .arg("--state-dir")
        .arg(Path::new(dir.path()).join("state"))
        .stdout(Stdio::null())
        .stderr(std::fs::File::create(&log).expect("a file"))
        .spawn()
        .expect("the binary runs");
    let serve = Killed(child);
    let end = Instant::now() + TIMEOUT;
    while !std::fs::read_to_string(&log).expect("the log").contains("max-clients lowered from 10000000 to ") {
        assert!(Instant::now() < end, "{}", std::fs::read_to_string(&log).expect("the log"));
        std::thread::sleep(Duration::from_millis(10));
    }
    drop(serve);
}

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
