//! Change of a node's primary while workers have commands in progress.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use rustix::process::Signal;
use switchyard_policy::topology::NodeId;
use switchyard_router::{Outcome, SentCommand, Servers, Tap};

use super::fleet::{Client, Fleet, Server, until};

/// Blocks the worker that sends a command with the key `hold`, and records the worker of each command.
#[derive(Debug, Default)]
struct Holder {
    worker: Mutex<Option<usize>>,
    holds: AtomicBool,
    is_holding: AtomicBool,
}

impl Tap for Holder {
    fn sent(&self, command: &SentCommand<'_>) {
        *self.worker.lock().expect("lock") = Some(command.number.0);
        if command.keys == [b"hold"] {
            while self.holds.load(Ordering::SeqCst) {
                self.is_holding.store(true, Ordering::SeqCst);
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
    }

    fn ended(&self, _: (usize, u64), _: Outcome) {}
}

fn leads(fleet: &Fleet, address: SocketAddr) {
    let servers = Servers { primary: Some(address), ..Servers::default() };
    fleet.router().set_servers(NodeId(0), Some(servers));
}

fn calls(server: &Server, command: &str) -> u64 {
    let stats = server.client().cmd("INFO commandstats");
    let line = stats.split(&format!("cmdstat_{command}:calls=")).nth(1).unwrap_or("0,");
    line.split(',').next().and_then(|calls| calls.parse().ok()).expect("a number")
}

/// Otherwise a client could read the old value at the old primary after an acknowledged write at the new one.
#[test]
fn a_new_primary_is_not_used_before_all_workers_have_left_the_old_one() {
    let fleet = Fleet::new(1);
    let successor = Server::start(&[]);
    let holder = Arc::new(Holder::default());
    fleet.router().tap(holder.clone());
    // One client per worker.
    let mut by_worker: [Option<Client>; 2] = [None, None];
    until("both workers have a client", || {
        let mut client = fleet.client();
        holder.worker.lock().expect("lock").take();
        client.cmd("SET k before");
        if let Some(worker) = holder.worker.lock().expect("lock").take() {
            by_worker[worker].get_or_insert(client);
        }
        by_worker.iter().all(Option::is_some)
    });
    let [mut held, mut free] = by_worker.map(|client| client.expect("one each"));
    holder.holds.store(true, Ordering::SeqCst);
    held.post("GET hold");
    until("a worker is held up", || holder.is_holding.load(Ordering::SeqCst));
    leads(&fleet, successor.address);
    // The other worker polls whether it may use the new primary.
    until("the other worker has come to the successor", || calls(&successor, "ping") > 20);
    free.post("SET k after");
    let before = calls(&successor, "ping");
    until("it continues to poll", || calls(&successor, "ping") > before + 20);
    assert_eq!(calls(&successor, "set"), 0, "the held worker would still read at the old primary");
    holder.holds.store(false, Ordering::SeqCst);
    assert_eq!(free.reply(), "OK");
    held.reply();
    until("the other worker reads the new value", || held.cmd("GET k") == "after");
}

/// The old primary may still execute earlier commands when it returns.
#[test]
fn old_connections_at_a_returning_primary_are_killed_before_use() {
    let fleet = Fleet::new(1);
    let successor = Server::start(&[]);
    let mut client = fleet.client();
    assert_eq!(client.cmd("SET k 1"), "OK");
    fleet.servers[0].signal(Signal::STOP);
    client.post("INCR k");
    until("it is on its way", || fleet.router().status().nodes.iter().any(|node| node.in_flight > 0));
    leads(&fleet, successor.address);
    assert!(client.reply().starts_with("-NODELOST"), "the old primary may execute it");
    until("the successor serves", || client.cmd("SET k 2") == "OK");
    fleet.servers[0].signal(Signal::CONT);
    leads(&fleet, fleet.servers[0].address);
    until("the old primary serves again", || {
        client.cmd("GET k").parse().is_ok_and(|value: u32| value <= 2)
            && calls(&fleet.servers[0], "set") == 1
            && calls(&fleet.servers[0], "get") > 0
    });
    assert!(calls(&fleet.servers[0], "client|kill") > 0, "no connection was killed there");
}
