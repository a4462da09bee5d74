//! `switchyard upgrade`: a new process takes over the listening sockets, and the old one serves its clients.

use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::clients::wanted;
use crate::cluster_storage::Members;
use crate::support::client::TIMEOUT;
use crate::support::process::tied;
use crate::support::{Client, Router, RouterOptions, Site, Value, bulk, direct, http, int, ok, ports, simple, until};

/// A process that has replaced the router of a test, killed when dropped. By its descriptor, because it is no child of
/// the test: its id may belong to another process after its end.
struct Successor(OwnedFd);

impl Successor {
    fn of(pid: u32) -> Successor {
        let pid = Pid::from_raw(pid.cast_signed()).expect("a process id");
        Successor(pidfd_open(pid, PidfdFlags::empty()).expect("the process runs"))
    }

    fn signal(&self, signal: Signal) {
        let _ = pidfd_send_signal(&self.0, signal);
    }

    fn has_ended(&self) -> bool {
        poll(&mut [PollFd::new(&self.0, PollFlags::IN)], Some(&Timespec::default())) == Ok(1)
    }
}

impl Drop for Successor {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
    }
}

/// Ends the clients of a test, also after a failed assertion.
pub(crate) struct Ends<'a>(pub(crate) &'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `switchyard upgrade`. Returns its exit code and output.
fn run_upgrade(admin: SocketAddr, more: &[&str]) -> (Option<i32>, String) {
    let mut command = tied(env!("CARGO_BIN_EXE_switchyard"));
    command.args(["upgrade", "--admin", &admin.to_string()]).args(more);
    let output = command.output().expect("it runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout) + &text(&output.stderr))
}

#[track_caller]
fn upgrade(admin: SocketAddr) -> Successor {
    let (code, text) = run_upgrade(admin, &["--json"]);
    assert_eq!(code, Some(0), "{text}");
    let report: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let pid = report["pid"].as_u64().and_then(|pid| u32::try_from(pid).ok()).expect("a process id");
    assert!(pid > 1 && report["version"].as_str().is_some_and(|version| version.contains('(')), "{text}");
    Successor::of(pid)
}

fn members() -> Option<Members> {
    if direct() { None } else { Some(Members::start(2)) }
}

/// A router that also listens on a Unix socket.
fn router_with_unix(members: &Members, config: &str, path: &Path) -> Router {
    let args = vec!["--listen".to_owned(), format!("unix:{}", path.display())];
    let options = RouterOptions { is_cluster: true, args, ..RouterOptions::config(config) };
    Router::start(&members.addresses()[..1], &options)
}

#[track_caller]
fn ping_unix(path: &Path) -> UnixStream {
    let mut stream = UnixStream::connect(path).expect("connects");
    stream.set_read_timeout(Some(TIMEOUT)).expect("a timeout");
    stream.write_all(b"PING\r\n").expect("sent");
    let mut reply = [0; 7];
    stream.read_exact(&mut reply).expect("a reply");
    assert_eq!(&reply, b"+PONG\r\n");
    stream
}

#[test]
fn clients_see_no_error_while_processes_replace_each_other() {
    let Some(members) = members() else { return };
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("socket");
    let mut router = router_with_unix(&members, "", &path);
    let (address, admin) = (router.address(), router.admin());
    let is_over = &AtomicBool::new(false);
    let successors = std::thread::scope(|scope| {
        let ends = Ends(is_over);
        let pipelines: Vec<_> = (0..3)
            .map(|number| {
                scope.spawn(move || {
                    let (mut client, mut count) = (Client::connect(address), 0);
                    while !is_over.load(Ordering::Relaxed) {
                        (0..50).for_each(|_| client.post(&format!("INCR pipeline:{number}")));
                        for _ in 0..50 {
                            count += 1;
                            assert_eq!(client.reply(), int(count));
                        }
                    }
                    count
                })
            })
            .collect();
        let visitors: Vec<_> = (0..4)
            .map(|number| {
                let path = &path;
                scope.spawn(move || {
                    let mut visits = 0;
                    while !is_over.load(Ordering::Relaxed) {
                        visits += 1;
                        if number == 0 {
                            drop(ping_unix(path));
                        } else {
                            let mut client = Client::connect(address);
                            assert_eq!(client.cmd(&format!("INCR visits:{number}")), int(visits));
                            // The keys of several members.
                            assert_eq!(client.cmd("MGET a b c"), Value::Array(vec![Value::Nil; 3]));
                        }
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    visits
                })
            })
            .collect();
        until("clients are served", || Client::connect(address).cmd("EXISTS pipeline:0 visits:1") == int(2));
        let mut successors = Vec::new();
        for _ in 0..4 {
            successors.push(upgrade(admin));
            std::thread::sleep(Duration::from_millis(300));
        }
        // The first process has clients; the others have had visitors only.
        for ended in &successors[..3] {
            until("its visitors have left", || ended.has_ended());
        }
        assert!(router.process_mut().ended().is_none(), "the pipelining clients are connected to it");
        drop(ends);
        let mut client = Client::connect(address);
        for (number, pipeline) in pipelines.into_iter().enumerate() {
            let count = pipeline.join().expect("every reply in order");
            assert_eq!(client.cmd(&format!("GET pipeline:{number}")), bulk(count.to_string()));
        }
        for visitor in visitors {
            assert!(visitor.join().expect("every connection served") > 10);
        }
        successors
    });
    let status = router.process_mut().wait(TIMEOUT);
    assert!(status.success(), "{status}: {}", router.process().log());
    let last = successors.last().expect("a process");
    assert!(!last.has_ended());
    let (status, body) = http::get(admin, "/readyz");
    assert_eq!(status, 200, "{body}");
    drop(ping_unix(&path));
    last.signal(Signal::TERM);
    until("the last process has ended", || last.has_ended());
    assert!(!path.exists(), "the socket file is removed by its last owner");
    assert!(Client::try_connect(address).is_err());
}

#[test]
fn replaced_process_ends_after_drain_max_though_a_client_stays() {
    let Some(members) = members() else { return };
    let mut router = members.router("[storage]\ndrain-max = \"6s\"\n");
    let (mut idle, mut blocked) = (Client::connect(router.address()), Client::connect(router.address()));
    assert_eq!(idle.cmd("SET k v"), ok());
    blocked.post("BLPOP list 0");
    until("it waits", || idle.cmd("CLIENT LIST").text().contains(" flags=b "));
    let _successor = upgrade(router.admin());
    assert_eq!(idle.cmd("GET k"), bulk("v"), "the old process serves it");
    let mut other = Client::connect(router.address());
    assert_eq!(other.cmd("LPUSH list value"), int(1));
    assert_eq!(blocked.reply(), Value::Array(vec![bulk("list"), bulk("value")]), "woken by a client of the new one");
    assert!(idle.closed_within(TIMEOUT));
    assert!(router.process_mut().wait(TIMEOUT).success());
    assert_eq!(other.cmd("GET k"), bulk("v"));
}

#[test]
fn failed_successor_leaves_the_old_process_serving() {
    let Some(members) = members() else { return };
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("socket");
    let mut router = router_with_unix(&members, "[log]\nlevel = \"info\"\n", &path);
    let mut client = Client::connect(router.address());
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let listener = format!("[[listener]]\naddress = \"{}\"\n", taken.local_addr().expect("its address"));
    for (config, reason) in [
        ("[log]\nlewel = \"info\"\n", "unknown key"),
        ("[storage]\nwait-max = \"long\"\n", "not a time"),
        (listener.as_str(), "cannot listen on"),
    ] {
        std::fs::write(router.config_file(), config).expect("written");
        let (code, text) = run_upgrade(router.admin(), &[]);
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains(reason) && text.contains("serves as before"), "{text}");
        router.process().expect_log(&[reason, "not upgraded"]);
        assert_eq!((client.cmd("PING"), Client::connect(router.address()).cmd("DBSIZE")), (simple("PONG"), int(0)));
        drop(ping_unix(&path));
        assert!(router.process_mut().ended().is_none());
    }
    // Settings that need a restart are applied: another listener.
    let added = SocketAddr::from(([127, 0, 0, 1], ports::free()));
    std::fs::write(router.config_file(), format!("[[listener]]\naddress = \"{added}\"\n")).expect("written");
    let (code, text) = run_upgrade(router.admin(), &[]);
    assert_eq!(code, Some(0), "{text}");
    let pid = text.strip_prefix("process ").and_then(|rest| rest.split(' ').next()?.parse().ok());
    let successor = Successor::of(pid.unwrap_or_else(|| panic!("{text}")));
    assert!(text.contains(&format!("process {} serves ", router.process().pid())), "{text}");
    assert_eq!(Client::connect(added).cmd("PING"), simple("PONG"));
    drop(client);
    assert!(router.process_mut().wait(TIMEOUT).success());
    assert!(!successor.has_ended());
}

/// A program that takes part in an upgrade until it must accept, and then fails.
const FAILING: &str = r#"#!/usr/bin/env python3
import json, os, socket
channel = socket.socket(fileno=0)
if os.fork():
    os._exit(0)
offer = json.loads(channel.recv(1 << 16))["offer"]
missing = 1 + sum(1 + listener["sockets"] for listener in offer["listeners"])
while missing:
    missing -= len(socket.recv_fds(channel, 1 << 16, 253)[1])
channel.send(json.dumps({"ready": {"pid": os.getpid(), "version": "1 (test)"}}).encode())
channel.recv(1 << 16)
"#;

#[test]
fn successor_that_cannot_accept_leaves_the_old_process_serving() {
    if !wanted(&[("python3", "python3")]) {
        return;
    }
    let Some(members) = members() else { return };
    let dir = tempfile::tempdir().expect("a folder");
    let (program, path) = (dir.path().join("switchyard"), dir.path().join("socket"));
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_switchyard"), &program).expect("a link");
    let args = vec!["--listen".to_owned(), format!("unix:{}", path.display())];
    let options = RouterOptions { is_cluster: true, program: Some(program.clone()), args, ..RouterOptions::default() };
    let mut router = Router::start(&members.addresses()[..1], &options);
    let refusal = r#"channel.send(b'{"refused": {"why": "no descriptor is left"}}')"#;
    for (end, reason) in [("", "ended early"), (refusal, "no descriptor is left")] {
        let script = dir.path().join("script");
        std::fs::write(&script, format!("{FAILING}{end}\n")).expect("written");
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).expect("executable");
        std::fs::rename(&script, &program).expect("replaced");
        let (code, text) = run_upgrade(router.admin(), &[]);
        assert_eq!(code, Some(1), "{text}");
        assert!(text.contains(reason) && text.contains("serves as before"), "{text}");
        assert_eq!(Client::connect(router.address()).cmd("DBSIZE"), int(0));
        drop(ping_unix(&path));
        assert!(router.process_mut().ended().is_none());
    }
}

#[test]
fn sigterm_ends_a_replaced_process_and_keeps_its_successor() {
    let Some(members) = members() else { return };
    let mut router = members.router("");
    let mut idle = Client::connect(router.address());
    idle.cmd("PING");
    let successor = upgrade(router.admin());
    router.process().signal(Signal::HUP);
    router.process().expect_log(&["only serves its last clients"]);
    assert_eq!(idle.cmd("PING"), simple("PONG"));
    router.process().signal(Signal::TERM);
    assert!(idle.closed_within(TIMEOUT));
    assert!(router.process_mut().wait(TIMEOUT).success());
    assert_eq!(Client::connect(router.address()).cmd("DBSIZE"), int(0));
    assert!(!successor.has_ended());
}

#[test]
fn upgrade_over_standalone_nodes_is_refused_with_the_remedy() {
    let Some(mut site) = Site::router_only(1, &crate::support::SiteOptions::config("")) else { return };
    let (code, text) = run_upgrade(site.router().admin(), &[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("standalone nodes") && text.contains("restart"), "{text}");
    assert!(site.router_mut().process_mut().ended().is_none());
}

#[test]
fn variable_of_an_upgrade_alone_starts_no_router() {
    for role in ["successor", "other"] {
        let mut command = tied(env!("CARGO_BIN_EXE_switchyard"));
        command.args(["serve", "--storage-cluster", "127.0.0.1:1"]).env("SWITCHYARD_UPGRADE_ROLE", role);
        let output = command.stdin(std::process::Stdio::null()).output().expect("it runs");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(text.contains("SWITCHYARD_UPGRADE_ROLE is set"), "{text}");
    }
}
