//! Nodes with host names whose address changes, or that no longer resolve. The router uses a separate `/etc/hosts`.

use std::path::PathBuf;
use std::process::Command;

use rustix::process::Signal;
use tempfile::TempDir;

use crate::movectl::done;
use crate::replicas::group;
use crate::support::{Client, Node, NodeOptions, Router, RouterOptions, bulk, ok, until};

const NAME: &str = "node-b.test";

/// The router's `/etc/hosts`.
struct Hosts(TempDir);

impl Hosts {
    /// `None` if the machine does not allow mounts.
    fn new() -> Option<Hosts> {
        let tried =
            Command::new("unshare").args(["--mount", "--", "mount", "--bind", "/etc/hosts", "/etc/hosts"]).output();
        if tried.is_ok_and(|tried| tried.status.success()) {
            return Some(Hosts(TempDir::new().expect("a directory")));
        }
        eprintln!("not tried here: mounts are not allowed");
        None
    }

    fn file(&self) -> PathBuf {
        self.0.path().join("hosts")
    }

    /// Sets or removes the address of the name.
    fn point(&self, address: Option<&str>) {
        let line = address.map(|address| format!("{address} {NAME}\n")).unwrap_or_default();
        std::fs::write(self.file(), format!("127.0.0.1 localhost\n{line}")).expect("written");
    }

    /// Starts a router with these nodes. The second one has the host name.
    fn router(&self, nodes: &[Node; 2]) -> Router {
        let (first, second) = (nodes[0].address(), nodes[1].address().port());
        let config = format!("[[node]]\naddress = \"{first}\"\n[[node]]\naddress = \"{NAME}:{second}\"\n");
        Router::start(
            &[],
            &RouterOptions {
                accepted_host_names: Some(self.file()),
                nodes_may_be_down: true,
                ..RouterOptions::config(config)
            },
        )
    }
}

/// Returns a key of the second node.
fn key_of_second(client: &mut Client, nodes: &[Node; 2]) -> String {
    let names = (0..1000).map(|number| format!("key:{number}"));
    let mut at_second = names
        .filter(|key| client.cmd(&format!("SET {key} v")) == ok() && nodes[1].cmd(&format!("EXISTS {key}")).int() == 1);
    until("the second node serves", || at_second.next())
}

#[test]
fn a_name_is_resolved_again_after_a_failed_connect() {
    let Some(accepted_host_names) = Hosts::new() else { return };
    let nodes = [(); 2].map(|()| Node::start(&NodeOptions::default()));
    assert_eq!(nodes[1].cmd("CONFIG SET bind \"127.0.0.1 127.0.0.2\""), ok());
    accepted_host_names.point(Some("127.0.0.2"));
    let router = accepted_host_names.router(&nodes);
    let mut client = Client::connect(router.address());
    let key = key_of_second(&mut client, &nodes);
    // The node changes its address first, then the name does.
    assert_eq!(nodes[1].cmd("CONFIG SET bind 127.0.0.1"), ok());
    nodes[1].cmd("CLIENT KILL TYPE normal SKIPME yes");
    let tried = format!("(tried at 127.0.0.2:{})", nodes[1].address().port());
    until("status shows the address tried", || done(&router, "status").contains(&tried));
    accepted_host_names.point(Some("127.0.0.1"));
    until("the node is found", || client.cmd(&format!("GET {key}")) == bulk("v"));
    until("the change is logged", || {
        router.process().log().contains("the name of the node resolves to another address now")
    });
}

#[test]
fn an_unresolvable_name_prevents_neither_start_nor_reload() {
    let Some(accepted_host_names) = Hosts::new() else { return };
    let nodes = [(); 2].map(|()| Node::start(&NodeOptions::default()));
    accepted_host_names.point(Some("127.0.0.1"));
    let mut router = accepted_host_names.router(&nodes);
    let key = key_of_second(&mut Client::connect(router.address()), &nodes);
    accepted_host_names.point(None);
    router.restart(&[]);
    let mut client = Client::connect(router.address());
    let down = until("its node is known to be down", || client.cmd(&format!("GET {key}")).error().map(str::to_owned));
    assert!(down.starts_with(&format!("NODEDOWN {NAME}:")) && down.contains("cannot resolve the host name"), "{down}");
    until("the other node serves", || {
        (0..100).any(|number| client.cmd(&format!("GET key:{number}")).error().is_none())
    });
    router.process().signal(Signal::HUP);
    until("it has reloaded", || router.process().log().contains("reloaded: "));
    accepted_host_names.point(Some("127.0.0.1"));
    until("the node serves", || client.cmd(&format!("GET {key}")) == bulk("v"));
}

#[test]
fn the_name_of_a_primary_is_resolved_again() {
    let Some(accepted_host_names) = Hosts::new() else { return };
    let nodes = group(1);
    assert_eq!(nodes[0].cmd("CONFIG SET bind \"127.0.0.1 127.0.0.2\""), ok());
    accepted_host_names.point(Some("127.0.0.2"));
    let (primary, replica) = (format!("{NAME}:{}", nodes[0].address().port()), nodes[1].address());
    let config = format!("[[node]]\naddress = \"{primary}\"\nreplicas = [\"{replica}\"]\n");
    let mut router = Router::start(
        &[],
        &RouterOptions {
            accepted_host_names: Some(accepted_host_names.file()),
            nodes_may_be_down: true,
            ..RouterOptions::config(config)
        },
    );
    let mut client = Client::connect(router.address());
    until("it serves", || client.cmd("SET k v") == ok());
    assert_eq!(nodes[0].cmd("CONFIG SET bind 127.0.0.1"), ok());
    nodes[0].cmd("CLIENT KILL TYPE normal SKIPME yes");
    until("the old address fails", || client.cmd("SET k v").error().is_some());
    accepted_host_names.point(Some("127.0.0.1"));
    until("the primary is found", || client.cmd("SET k new") == ok());
    assert_eq!(nodes[0].cmd("GET k"), bulk("new"));
    // The next start cannot resolve the name.
    accepted_host_names.point(None);
    router.restart(&[]);
    let mut client = Client::connect(router.address());
    let down = until("it is down", || client.cmd("GET k").error().map(str::to_owned));
    assert!(down.contains("cannot resolve the host name"), "{down}");
    accepted_host_names.point(Some("127.0.0.1"));
    until("it is found when its name resolves", || client.cmd("GET k") == bulk("new"));
}
