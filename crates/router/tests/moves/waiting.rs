//! Clients that block on a list while it changes its node: order of service, and other ends of a wait.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use switchyard_policy::topology::crc16_slot;
use switchyard_router::MoveEnd;

use super::fleet::{Client, Fleet, Server, fill, until};

/// Returns the number of blocked clients of a server.
pub(super) fn blocked(server: &Server) -> usize {
    let info = server.client().cmd("INFO clients");
    let number = info.split("blocked_clients:").nth(1).and_then(|rest| rest.split("\\r").next());
    number.and_then(|n| n.parse().ok()).expect("a number")
}

/// Returns a blocked client with its id.
fn waiter(fleet: &Fleet, command: &str) -> (String, Client) {
    let mut client = fleet.client();
    let number = client.cmd("CLIENT ID");
    client.post(command);
    (number, client)
}

#[test]
fn clients_blocked_on_a_list_are_served_in_order() {
    let fleet = Fleet::new(2);
    for id in 1..=4_u64 {
        let keys: Vec<String> = (0..6).map(|n| format!("{{q{n}}}list")).collect();
        let mut queues: Vec<Vec<Client>> = keys.iter().map(|_| Vec::new()).collect();
        for place in 0..5 {
            for (key, queue) in keys.iter().zip(&mut queues) {
                let mut client = fleet.client();
                client.post(&format!("BLPOP {key} 60"));
                queue.push(client);
            }
            // Each round is blocked at its node before the next one starts.
            until("they wait", || fleet.servers.iter().map(blocked).sum::<usize>() == 6 * (place + 1));
        }
        let (from, to) = if id % 2 == 1 { (0, 1) } else { (1, 0) };
        fleet.begin(fleet.task(id, from, to));
        assert_eq!(fleet.wait_for(id), MoveEnd::Done);
        let mut pusher = fleet.client();
        for (key, queue) in keys.iter().zip(&mut queues) {
            for place in 0..queue.len() {
                pusher.cmd(&format!("RPUSH {key} element{place}"));
            }
            for (place, client) in queue.iter_mut().enumerate() {
                assert_eq!(client.reply(), format!("[{key}, element{place}]"), "move {id}");
            }
        }
    }
}

#[test]
fn a_wait_can_end_while_its_list_is_in_transit() {
    let fleet = Fleet::new(2);
    fill(&mut fleet.client(), 100);
    let owned = fleet.slots_of(fleet.node(0));
    let key =
        (0..).map(|n| format!("{{q{n}}}list")).find(|key| owned.contains(&crc16_slot(key.as_bytes()))).expect("one");
    let forever = format!("BLPOP {key} 0");
    let mut other = fleet.client();
    let mut recalled: Vec<(String, Client)> = Vec::new();
    for place in 0..8 {
        // The first command times out while it is held by the router.
        recalled.push(waiter(&fleet, &if place == 0 { format!("BLPOP {key} 3") } else { forever.clone() }));
        until("it waits", || blocked(&fleet.servers[0]) == place + 1);
    }
    fleet.keeper.holds_moving.store(true, Ordering::SeqCst);
    fleet.begin(fleet.task(1, 0, 1));
    until("no client is blocked there any more", || blocked(&fleet.servers[0]) == 0);
    // Two more commands arrive while the list is at neither node.
    let mut late = vec![waiter(&fleet, &format!("BLPOP {key} 1")), waiter(&fleet, &forever), waiter(&fleet, &forever)];
    until("they are shown as waiting", || {
        late.iter()
            .chain(&recalled[1..])
            .all(|(number, _)| other.cmd(&format!("CLIENT LIST ID {number}")).contains("flags=b"))
    });
    for waiters in [&mut late, &mut recalled] {
        assert_eq!(waiters[0].1.reply(), "(nil)", "its time is over");
        let (number, client) = &mut waiters[1];
        assert_eq!(other.cmd(&format!("CLIENT UNBLOCK {number}")), "1");
        assert_eq!((client.reply().as_str(), client.cmd("PING").as_str()), ("(nil)", "PONG"));
        assert_eq!(other.cmd(&format!("CLIENT UNBLOCK {number}")), "0");
    }
    let (number, client) = &mut recalled[2];
    assert_eq!(other.cmd(&format!("CLIENT UNBLOCK {number} ERROR")), "1");
    assert!(client.reply().starts_with("-UNBLOCKED"));
    let (number, client) = &mut recalled[3];
    assert_eq!(other.cmd(&format!("CLIENT KILL ID {number}")), "1");
    assert!(client.is_closed());
    recalled.remove(4); // closes its connection
    assert_eq!(blocked(&fleet.servers[1]), 0);
    fleet.keeper.holds_moving.store(false, Ordering::SeqCst);
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    for (place, client) in
        recalled.iter_mut().skip(4).chain(late.iter_mut().skip(2)).map(|(_, client)| client).enumerate()
    {
        other.cmd(&format!("RPUSH {key} element{place}"));
        assert_eq!(client.reply(), format!("[{key}, element{place}]"));
    }
    until("no client is blocked any more", || blocked(&fleet.servers[1]) == 0);
    assert_eq!(other.cmd(&format!("LLEN {key}")), "0");
}

#[test]
fn client_unblock_works_at_any_time_of_a_move() {
    let fleet = Fleet::new(2);
    fill(&mut fleet.client(), 500);
    for id in 1..=4_u64 {
        let mut waiting: Vec<(String, Client)> =
            (0..30).map(|n| waiter(&fleet, &format!("BLPOP {{u{n}}}list 60"))).collect();
        std::thread::sleep(Duration::from_millis(50));
        let (from, to) = if id % 2 == 1 { (0, 1) } else { (1, 0) };
        fleet.begin(fleet.task(id, from, to));
        let mut other = fleet.client();
        for (place, (number, client)) in waiting.iter_mut().enumerate() {
            let how = if place % 2 == 0 { "TIMEOUT" } else { "ERROR" };
            assert_eq!(other.cmd(&format!("CLIENT UNBLOCK {number} {how}")), "1", "client {place}, move {id}");
            let reply = client.reply();
            assert!(if place % 2 == 0 { reply == "(nil)" } else { reply.starts_with("-UNBLOCKED") }, "{reply}");
            assert_eq!(client.cmd("PING"), "PONG");
        }
        assert_eq!(fleet.wait_for(id), MoveEnd::Done);
    }
}

/// A node serves many blocked clients in sequence, on connections opened while others close; clients of both protocol
/// versions and of all workers.
#[test]
fn hundreds_of_clients_blocked_on_a_list_are_served_in_order() {
    const WAITERS: usize = 300;
    let fleet = Fleet::new(2);
    let owned = fleet.slots_of(fleet.node(0));
    let key =
        (0..).map(|n| format!("{{q{n}}}list")).find(|key| owned.contains(&crc16_slot(key.as_bytes()))).expect("one");
    let mut waiting: Vec<Client> = Vec::new();
    for place in 0..WAITERS {
        let mut client = fleet.client();
        if place % 3 == 0 {
            client.cmd("HELLO 3");
        }
        client.post(&format!("BLPOP {key} 0"));
        waiting.push(client);
        until("it waits", || blocked(&fleet.servers[0]) == place + 1);
    }
    fleet.keeper.holds_moving.store(true, Ordering::SeqCst);
    fleet.begin(fleet.task(1, 0, 1));
    until("no client is blocked there any more", || blocked(&fleet.servers[0]) == 0);
    let since = Instant::now();
    fleet.keeper.holds_moving.store(false, Ordering::SeqCst);
    until("all wait at the other node", || blocked(&fleet.servers[1]) == WAITERS);
    eprintln!("{WAITERS} clients wait at the other node {:?} after the copying could begin", since.elapsed());
    assert_eq!(fleet.wait_for(1), MoveEnd::Done);
    let mut pusher = fleet.client();
    let elements: Vec<String> = (0..WAITERS).map(|place| format!("element{place}")).collect();
    pusher.cmd(&format!("RPUSH {key} {}", elements.join(" ")));
    for (client, element) in waiting.iter_mut().zip(&elements) {
        assert_eq!(client.reply(), format!("[{key}, {element}]"));
    }
}
