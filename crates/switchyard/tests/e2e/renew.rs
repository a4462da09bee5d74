//! A reload with new credentials for the nodes: connections are reopened, and no request is lost.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::Signal;

use crate::support::{Client, Node, NodeOptions, Router, RouterOptions, bulk, ok, until};

fn config(password: &str, user: Option<&str>) -> String {
    let user = user.map(|u| format!("username = \"{u}\"\n")).unwrap_or_default();
    format!("[nodes]\npassword = \"{password}\"\n{user}")
}

fn connections(node: &Node, password: &str, user: &str) -> usize {
    let mut client = node.client();
    client.call(&["AUTH", password]);
    client
        .cmd("CLIENT LIST")
        .text()
        .lines()
        .filter(|l| l.contains("name=switchyard-") && l.contains(&format!(" user={user} ")))
        .count()
}

#[test]
fn changed_credentials_reach_every_connection_and_no_request_is_lost() {
    if crate::support::direct() {
        return;
    }
    let options = NodeOptions { args: vec!["--requirepass".into(), "old".into()], ..NodeOptions::default() };
    let nodes = [Node::start(&options), Node::start(&options)];
    let addresses: Vec<_> = nodes.iter().map(Node::address).collect();
    let router = Router::start(&addresses, &RouterOptions::config(config("old", None)));
    for node in &nodes {
        let mut client = node.client();
        client.call(&["AUTH", "old"]);
        assert_eq!(client.cmd("ACL SETUSER router on >new ~* &* +@all"), ok());
    }
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let runs: Vec<_> = (0..8)
            .map(|me| {
                let (stop, address) = (&stop, router.address());
                scope.spawn(move || {
                    let mut client = Client::connect(address);
                    if me % 2 == 1 {
                        client.cmd("HELLO 3");
                    }
                    let mut done = 0u64;
                    while !stop.load(Ordering::Relaxed) {
                        for i in 0..20 {
                            client.post(&format!("INCR c{me}:{i}"));
                        }
                        client.post(&format!("SORT none{me}"));
                        client.post(&format!("SELECT {}", done % 3));
                        client.post("SELECT 0");
                        done += 1;
                        for _ in 0..20 {
                            assert_eq!(client.reply().int(), done as i64, "client {me}");
                        }
                        assert!(client.reply().error().is_none());
                        assert_eq!((client.reply(), client.reply()), (ok(), ok()));
                        assert!(client.cmd("EVAL \"return 1\" 0").error().is_none());
                    }
                    done
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(300));
        std::fs::write(router.config_file(), config("new", Some("router"))).expect("the configuration");
        router.process().signal(Signal::HUP);
        until("all connections have the new user", || {
            nodes.iter().all(|n| connections(n, "old", "default") == 0 && connections(n, "old", "router") > 0)
        });
        std::thread::sleep(Duration::from_millis(300));
        stop.store(true, Ordering::Relaxed);
        let done: u64 = runs.into_iter().map(|run| run.join().expect("no error and no wrong reply")).sum();
        assert!(done > 20, "hardly anything was done: {done}");
    });
    // Credentials that a node refuses do not replace working ones.
    std::fs::write(router.config_file(), config("wrong", Some("router"))).expect("the configuration");
    router.process().signal(Signal::HUP);
    until("the error is logged", || router.process().log().contains("keep the old credentials"));
    let mut client = Client::connect(router.address());
    for i in 0..20 {
        assert_eq!(client.cmd(&format!("SET after{i} v")), ok());
        assert_eq!(client.cmd(&format!("GET after{i}")), bulk("v"));
    }
}
