//! Proof before removal: the autoscaler neither stops nor deletes a server unless it can prove that the server is its
//! own, empty and unused.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value as Json;

use crate::autoscale::{CHANGE_TIMEOUT, Fleet, failure, server, servers};
use crate::movectl::{done, run_cli};
use crate::support::node::default_program;
use crate::support::{Client, Node, NodeOptions, Site, SiteOptions, int, ok, ports, until_within};

const KEYS: usize = 300;

fn fill(fleet: &Fleet) {
    let mut client = fleet.site.client();
    for key in 0..KEYS {
        assert_eq!(client.cmd(&format!("SET key:{key} {key}")), ok());
    }
}

#[track_caller]
fn nothing_is_lost(fleet: &Fleet) {
    let mut client = fleet.site.client();
    for key in 0..KEYS {
        assert_eq!(client.cmd(&format!("GET key:{key}")).text(), key.to_string());
    }
}

fn texts(fleet: &Fleet) -> String {
    fleet.standing()["events"].to_string()
}

/// Two nodes, and a program that names a running server. Its stop fails while the file `outage` exists. Each stop adds
/// a line to `stops`.
struct Named {
    fleet: Fleet,
    server: Node,
    outage: PathBuf,
    stops: PathBuf,
}

impl Named {
    fn start(server: Node) -> Option<Named> {
        let folder = tempfile::tempdir().expect("a folder").keep();
        let (outage, stops) = (folder.join("outage"), folder.join("stops"));
        let script = format!(
            "read line; case \"$line\" in *'\"action\":\"start\"'*) echo '{{\"address\": \"{}\"}}';; *) echo stop >>{}; test ! -e {};; esac",
            server.address(),
            stops.display(),
            outage.display(),
        );
        let config = format!("[autoscale]\nmax-nodes = 3\n[autoscale.command]\nrun = {:?}\n", ["sh", "-c", &script]);
        let site = Site::router_only(2, &SiteOptions::config(config))?;
        Some(Named { fleet: Fleet::of(site), server, outage, stops })
    }

    fn stops(&self) -> usize {
        std::fs::read_to_string(&self.stops).unwrap_or_default().lines().count()
    }

    /// The server joins, gets a share of the keys, and leaves. The program cannot stop it.
    fn leaves_in_an_outage(&self) {
        self.fleet.want(3);
        self.fleet.wait_for_nodes(3);
        fill(&self.fleet);
        std::fs::write(&self.outage, "").expect("written");
        self.fleet.want(2);
        until_within(CHANGE_TIMEOUT, "its stop was tried", || self.stops() > 0);
    }

    fn wait_for_the_end_of_the_change(&self) {
        until_within(CHANGE_TIMEOUT, "no change is left", || self.fleet.standing()["change"].is_null());
    }
}

#[test]
fn a_server_that_an_operator_adds_again_is_not_stopped() {
    let Some(named) = Named::start(Node::start(&NodeOptions::default())) else { return };
    named.leaves_in_an_outage();
    // The add is refused only while the program runs.
    let add = format!("nodes add {} --rebalance --wait --goal fast", named.server.address());
    until_within(CHANGE_TIMEOUT, "it is added", || run_cli(named.fleet.site.router(), &add).code == 0);
    let stops = named.stops();
    std::fs::remove_file(&named.outage).expect("removed");
    named.wait_for_the_end_of_the_change();
    assert!(texts(&named.fleet).contains("an operator has added"), "{}", texts(&named.fleet));
    assert!(named.server.cmd("DBSIZE").int() > 10, "it has its share");
    assert_eq!(named.fleet.standing()["started"], Json::Array(Vec::new()));
    // The operator's node stays, regardless of later requests.
    let two = done(named.fleet.site.router(), "autoscale set-nodes 2 --json");
    until_within(CHANGE_TIMEOUT, "the order has ended", || named.fleet.standing()["wanted"].is_null());
    assert_eq!((named.fleet.standing()["nodes"].as_u64(), named.stops()), (Some(3), stops), "{two}");
    nothing_is_lost(&named.fleet);
}

#[test]
fn a_server_that_got_a_key_after_leaving_is_left_alone() {
    let Some(named) = Named::start(Node::start(&NodeOptions::default())) else { return };
    named.leaves_in_an_outage();
    let mut direct = Client::connect(named.server.address());
    assert_eq!((direct.cmd("SELECT 3"), direct.cmd("SET precious 1")), (ok(), ok()));
    drop(direct);
    let stops = named.stops();
    std::fs::remove_file(&named.outage).expect("removed");
    named.wait_for_the_end_of_the_change();
    assert!(texts(&named.fleet).contains("is not stopped: it has keys (1)"), "{}", texts(&named.fleet));
    assert_eq!(named.stops(), stops, "the key was seen before the program was called");
    assert_eq!(named.fleet.standing()["started"], Json::Array(Vec::new()), "it is reported once");
}

#[test]
fn a_server_with_a_subscriber_is_left_alone() {
    let Some(named) = Named::start(Node::start(&NodeOptions::default())) else { return };
    named.leaves_in_an_outage();
    let mut direct = Client::connect(named.server.address());
    assert_eq!(direct.cmd("SUBSCRIBE news").items().len(), 3);
    let stops = named.stops();
    std::fs::remove_file(&named.outage).expect("removed");
    named.wait_for_the_end_of_the_change();
    assert!(texts(&named.fleet).contains("last command subscribe"), "{}", texts(&named.fleet));
    assert_eq!(named.stops(), stops, "the client was seen before the program was called");
}

#[test]
fn a_server_that_may_not_join_is_left_alone() {
    let server = Node::start(&NodeOptions::default());
    assert_eq!(server.cmd("SET foreign 1"), ok());
    let Some(named) = Named::start(server) else { return };
    named.fleet.want(3);
    let why = failure(&named.fleet);
    assert!(why.contains("holds 1 key") && why.contains("is not stopped"), "{why}");
    assert_eq!((named.stops(), named.server.cmd("EXISTS foreign")), (0, int(1)));
    assert_eq!(named.fleet.standing()["started"], Json::Array(Vec::new()));
}

fn two_ports() -> (u16, u16) {
    loop {
        let (first, last) = (ports::free(), ports::free());
        if last == first + 1 {
            return (first, last);
        }
    }
}

fn started(fleet: &Fleet) -> SocketAddr {
    fleet.standing()["started"][0].as_str().and_then(|address| address.parse().ok()).expect("a server")
}

/// Numbers restart at 0, and the server with the old number 0 is a listed node.
#[test]
fn a_lost_state_directory_makes_no_old_server_a_new_one() {
    let Some(mut fleet) = Fleet::start_at(&server(""), "max-nodes = 4", two_ports()) else { return };
    fleet.want(3);
    fleet.wait_for_nodes(3);
    let old = started(&fleet);
    fill(&fleet);
    fleet.site.router().process().signal(Signal::TERM);
    fleet.site.router_mut().process_mut().wait(Duration::from_secs(30));
    let state = fleet.site.router().state_dir();
    std::fs::remove_dir_all(&state).expect("removed");
    let all: Vec<SocketAddr> = fleet.addresses().into_iter().chain([old]).collect();
    let mut recover = Command::new(env!("CARGO_BIN_EXE_switchyard"));
    recover
        .arg("recover")
        .arg("--state-dir")
        .arg(&state)
        .args(all.iter().flat_map(|node| ["--node".to_owned(), node.to_string()]));
    let output = recover.output().expect("it runs");
    assert!(output.status.success(), "{output:?}");
    fleet.site.router_mut().start_again(&all);
    nothing_is_lost(&fleet);
    fleet.want(4);
    fleet.wait_for_nodes(4);
    let new = started(&fleet);
    assert_ne!(new, old);
    fleet.want(3);
    fleet.wait_for_nodes(3);
    nothing_is_lost(&fleet);
    assert!(Client::try_connect(new).is_err(), "the new server is stopped");
    assert_eq!(servers(&fleet.folder).len(), 1, "the old one runs on");
}

#[test]
fn a_node_listed_in_the_configuration_stays() {
    let Some(mut fleet) = Fleet::start_at(&server(""), "max-nodes = 3", two_ports()) else { return };
    fleet.want(3);
    fleet.wait_for_nodes(3);
    let nodes: Vec<SocketAddr> = fleet.addresses().into_iter().chain([started(&fleet)]).collect();
    fleet.site.router_mut().restart(&nodes);
    assert_eq!(fleet.standing()["started"], Json::Array(Vec::new()), "{}", texts(&fleet));
    fleet.want(2);
    let why = failure(&fleet);
    assert!(why.contains("the autoscaler started none of the nodes"), "{why}");
    assert_eq!((fleet.standing()["nodes"].as_u64(), servers(&fleet.folder).len()), (Some(3), 1));
}

/// Two nodes with a password, and this command line for a third.
fn with_password(command: &str) -> Option<Fleet> {
    let port = ports::free();
    let config = format!(
        "[nodes]\npassword = \"se cret\\\"x\"\n[autoscale]\nmax-nodes = 3\n[autoscale.local]\ncommand = [{command}]\nports = \"{port}-{port}\"\n"
    );
    let node = NodeOptions { config: "requirepass \"se cret\\\"x\"\n".to_owned(), ..NodeOptions::default() };
    Some(Fleet::of(Site::router_only(2, &SiteOptions { node, ..SiteOptions::config(config) })?))
}

#[test]
fn a_local_server_reads_the_password_of_nodes_from_its_input() {
    let program = default_program();
    let command =
        format!("'{program}', '--bind', '127.0.0.1', '--port', '{{port}}', '--dir', '{{dir}}', '--save', '', '-'");
    let Some(fleet) = with_password(&command) else { return };
    fleet.want(3);
    fleet.wait_for_nodes(3);
    let mut direct = Client::connect(started(&fleet));
    assert!(direct.cmd("PING").error().is_some_and(|error| error.starts_with("NOAUTH")));
    drop(direct);
    fleet.want(2);
    fleet.wait_for_nodes(2);
    assert_eq!(servers(&fleet.folder).len(), 0, "its stop was proven with the password, too");
}

#[test]
fn a_local_server_without_the_password_of_nodes_is_named_with_a_remedy() {
    let Some(fleet) = with_password(&server("")) else { return };
    fleet.want(3);
    let error = until_within(CHANGE_TIMEOUT, "it is refused", || {
        fleet.standing()["change"]["error"].as_str().map(str::to_owned)
    });
    assert!(error.contains("refuses our user or password") && error.contains("standard input"), "{error}");
    // Another change would start one more server.
    until_within(CHANGE_TIMEOUT, "it is tried on", || texts(&fleet).contains("(it is retried;"));
    assert_eq!((servers(&fleet.folder).len(), fleet.standing()["change"]["error"].is_null()), (1, false));
}

#[test]
fn doctor_names_a_shared_disk_and_retained_directories() {
    let Some(fleet) = Fleet::start_at(&server(""), "max-nodes = 3", two_ports()) else { return };
    let kept = fleet.folder.join("9-0123456789abcdef.kept-2026-01-31");
    std::fs::create_dir_all(&kept).expect("made");
    let router = fleet.site.router();
    let mut doctor = Command::new(env!("CARGO_BIN_EXE_switchyard"));
    doctor.arg("doctor").arg("--config").arg(router.config_file()).arg("--state-dir").arg(router.state_dir());
    doctor
        .args(["--admin", &router.admin().to_string()])
        .args(fleet.addresses().iter().flat_map(|node| ["--node".to_owned(), node.to_string()]));
    let output = doctor.output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("are on one disk") && text.contains("autoscale.local.directory"), "{text}");
    assert!(text.contains(&format!("{} is the directory of a server", kept.display())), "{text}");
}
