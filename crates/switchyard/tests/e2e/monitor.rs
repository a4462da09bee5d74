//! MONITOR and CLIENT PAUSE, which affect the clients of all workers.

use std::time::{Duration, Instant};

use crate::support::client::TIMEOUT;
use crate::support::{Client, Node, NodeOptions, Site, SiteOptions, Value, bulk, direct, encode, int, ok, until};

/// Enough clients that each worker has some.
fn many(site: &Site) -> Vec<Client> {
    (0..12).map(|_| site.client()).collect()
}

/// Reads a line of MONITOR. Returns it without the time, and the time.
#[track_caller]
fn line(client: &mut Client) -> (String, f64) {
    let Value::Simple(line) = client.reply() else { panic!("not a line of MONITOR") };
    let (time, rest) = line.split_once(' ').unwrap_or_else(|| panic!("{line}"));
    (rest.to_owned(), time.parse().unwrap_or_else(|_| panic!("{line}")))
}

#[test]
fn monitor_output_matches_a_single_server() {
    let site = Site::new(3);
    let plain = Node::start(&NodeOptions::default());
    let (mut routed, mut reference) = (site.client(), plain.client());
    let (mut ours, mut theirs) = (site.client(), plain.client());
    assert_eq!((ours.cmd("MONITOR"), theirs.cmd("MONITOR")), (ok(), ok()));
    let now =
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).expect("a clock after 1970").as_secs_f64();
    for command in [
        "PING",
        "SET k \"a\\x00\\n\\\"z\\xff \\\\\"",
        "SELECT 3",
        "get K",
        "AUTH secret",
        "AUTH default secret",
        "HELLO 3 AUTH default secret SETNAME me",
        "HELLO 2",
        "CONFIG GET save",
        "CLIENT LIST",
        "CLIENT GETNAME",
        "NOSUCH",
        "GET",
        "LPUSH k v",
        "MGET a b c d e",
        "DEL a b c d",
        "DBSIZE",
        "SLOWLOG GET",
        "CLIENT PAUSE 1",
        "CLIENT UNPAUSE",
        "SUBSCRIBE a",
        "UNSUBSCRIBE",
        "PUBLISH a \"secret message\"",
        "SPUBLISH a b",
        "RESET",
        "SCRIPT LOAD \"return 1\"",
        "ECHO last",
        "QUIT",
    ] {
        for client in [&mut routed, &mut reference] {
            client.cmd(command);
        }
    }
    let (here, there) = (
        routed.stream().local_addr().expect("address").to_string(),
        reference.stream().local_addr().expect("address").to_string(),
    );
    loop {
        let ((own, time), (other, _)) = (line(&mut ours), line(&mut theirs));
        assert_eq!(own, other.replace(&there, &here));
        assert!((time - now).abs() < 60.0, "{time} is not now ({now})");
        if own.contains("QUIT") {
            break;
        }
    }
    // Commands that a monitoring client may send.
    for command in ["PING", "GET k", "SET k v", "ECHO x"] {
        ours.post(command);
        theirs.post(command);
        let replies = |client: &mut Client| loop {
            match client.reply() {
                Value::Simple(text) if text.contains(" [") => {}
                other => return other,
            }
        };
        assert_eq!(replies(&mut ours), replies(&mut theirs), "{command}");
    }
    ours.listen(Duration::from_millis(100));
    assert_eq!(ours.cmd("RESET"), Value::Simple("RESET".into()));
    site.client().cmd("SET k v");
    assert_eq!(ours.cmd("GET k"), bulk("v"), "no monitor any more");
    // Nothing follows the reply.
    let (rest, _) = ours.listen(Duration::from_millis(50));
    assert!(rest.is_empty(), "{}", rest.escape_ascii());
}

#[test]
fn a_monitor_sees_the_clients_of_all_workers() {
    let site = Site::new(2);
    for protocol in ["HELLO 2", "HELLO 3"] {
        let mut monitor = site.client();
        monitor.cmd(protocol);
        assert_eq!(monitor.cmd("MONITOR"), ok());
        let mut clients = many(&site);
        for round in 0..20 {
            for (i, client) in clients.iter_mut().enumerate() {
                client.post(&format!("SET k{i} {round}"));
            }
            for client in &mut clients {
                client.reply();
            }
        }
        let mut seen = vec![0; clients.len()];
        let addresses: Vec<String> =
            clients.iter().map(|c| c.stream().local_addr().expect("address").to_string()).collect();
        for _ in 0..20 * clients.len() {
            let (line, _) = line(&mut monitor);
            let who =
                addresses.iter().position(|a| line.contains(a.as_str())).unwrap_or_else(|| panic!("nobody's: {line}"));
            assert_eq!(
                line,
                format!("[0 {}] \"SET\" \"k{who}\" \"{}\"", addresses[who], seen[who]),
                "each client's in its order"
            );
            seen[who] += 1;
        }
        let id = clients[0].cmd("CLIENT LIST").text();
        assert!(id.contains(" flags=O "), "{id}");
    }
}

#[test]
fn a_slow_monitor_is_closed_and_a_disconnected_one_forgotten() {
    let Some(site) = Site::router_only(1, &SiteOptions::config("[clients]\npush-limit = \"64kb\"\n")) else { return };
    let mut slow = site.client();
    assert_eq!(slow.cmd("MONITOR"), ok());
    let value = "v".repeat(60_000);
    let mut clients = many(&site);
    let begin = Instant::now();
    while !site.router().metrics().contains("switchyard_clients_disconnected_total{reason=\"push\"} 1") {
        assert!(begin.elapsed() < TIMEOUT, "a monitor that reads nothing is never cut");
        for client in &mut clients {
            assert_eq!(client.call(&["SET", "k", &value]), ok());
        }
    }
    assert!(slow.closed_within(TIMEOUT));
    // Disconnected at any time, also before the reply to MONITOR.
    for _ in 0..20 {
        let mut client = site.client();
        client.post("MONITOR");
    }
    for client in &mut clients {
        client.cmd("PING");
    }
    until("no monitor is left", || !site.client().cmd("CLIENT LIST").text().contains("flags=O"));
}

#[test]
fn a_pause_holds_all_workers() {
    let site = Site::new(2);
    let mut operator = site.client();
    let mut clients = many(&site);
    for (i, client) in clients.iter_mut().enumerate() {
        assert_eq!(client.cmd(&format!("SET k{i} 0")), ok());
    }
    // WRITE: reads are executed, writes wait.
    assert_eq!(operator.cmd("CLIENT PAUSE 60000 WRITE"), ok());
    for (i, client) in clients.iter_mut().enumerate() {
        assert_eq!(client.cmd(&format!("GET k{i}")), bulk("0"));
        client.post(&format!("SET k{i} 1"));
        client.post(&format!("GET k{i}"));
    }
    // A transaction with only reads is not a write.
    let mut reader = site.client();
    for line in ["MULTI", "GET k0"] {
        reader.cmd(line);
    }
    assert_eq!(reader.cmd("EXEC").items(), [bulk("0")]);
    let mut writer = site.client();
    for line in ["MULTI", "GET {k}x"] {
        writer.cmd(line);
    }
    writer.post("SET {k}x 2");
    writer.post("EXEC");
    std::thread::sleep(Duration::from_millis(100));
    for i in 0..clients.len() {
        assert_eq!(operator.cmd(&format!("GET k{i}")), bulk("0"), "a write in a pause");
    }
    assert_eq!(operator.cmd("CLIENT UNPAUSE"), ok());
    let replies = [writer.reply(), writer.reply()];
    assert!(replies[0] == Value::Simple("QUEUED".into()) && replies[1].items().len() == 2, "{replies:?}");
    for client in &mut clients {
        assert_eq!(client.reply(), ok());
        assert_eq!(client.reply(), bulk("1"));
    }
    // Later commands of the pausing client wait as well.
    let mut pausing = site.client();
    pausing.post("CLIENT PAUSE 60000 WRITE");
    pausing.post("SET k0 2");
    assert_eq!(pausing.reply(), ok());
    assert_eq!(operator.cmd("GET k0"), bulk("1"));
    assert_eq!(operator.cmd("CLIENT UNPAUSE"), ok());
    assert_eq!(pausing.reply(), ok());
    assert_eq!(operator.cmd("GET k0"), bulk("2"));
    // Commands of a client after it is killed are not executed.
    let mut ending = site.client();
    let id = ending.cmd("CLIENT ID").int();
    ending.write(format!("CLIENT KILL ID {id} SKIPME no\r\nSET ended 1\r\nGET ended\r\n").as_bytes());
    assert_eq!(ending.reply(), int(1));
    assert!(ending.try_reply().is_err());
    assert_eq!(operator.cmd("EXISTS ended"), int(0));
    // ALL: every command waits until the end of the pause.
    let begin = Instant::now();
    assert_eq!(operator.cmd("CLIENT PAUSE 400"), ok());
    for client in clients.iter_mut().chain([&mut operator]) {
        client.post("PING");
    }
    for client in clients.iter_mut().chain([&mut operator]) {
        assert!(client.reply().error().is_none());
    }
    assert!(begin.elapsed() >= Duration::from_millis(380), "{:?}", begin.elapsed());
}

/// A large request is forwarded before it is complete: its end waits for the end of the pause, and the pause does not
/// wait for it.
#[test]
fn a_pause_holds_the_end_of_a_large_request() {
    let site = Site::new(2);
    let (mut operator, mut client) = (site.client(), site.client());
    let request = encode(&[&b"SET"[..], b"k", &vec![b'x'; 2 << 20]]);
    let (first, rest) = request.split_at(request.len() - 1000);
    client.write(first);
    until("its request is in flight", || direct() || operator.cmd("CLIENT LIST").text().contains(" oll=1 "));
    assert_eq!(operator.cmd("CLIENT PAUSE 60000 WRITE"), ok());
    client.write(rest);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(operator.cmd("EXISTS k"), int(0), "a write in a pause");
    assert_eq!(operator.cmd("CLIENT UNPAUSE"), ok());
    assert_eq!(client.reply(), ok());
    assert_eq!(operator.cmd("STRLEN k"), int(2 << 20));
}

#[test]
fn unpause_ends_a_pause_of_all_commands() {
    // A single server would hold UNPAUSE as well.
    let Some(site) = Site::router_only(1, &SiteOptions::default()) else { return };
    let mut operator = site.client();
    let mut client = site.client();
    assert_eq!(operator.cmd("CLIENT PAUSE 600000 ALL"), ok());
    client.post("INCR k");
    let mut gone = site.client();
    gone.post("INCR k");
    drop(gone);
    assert_eq!(site.client().cmd("CLIENT UNPAUSE"), ok());
    client.reply().int();
    assert_eq!(operator.cmd("EXISTS k"), int(1));
}

#[test]
fn nothing_changes_after_the_reply_to_a_pause() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else { return };
    let mut operator = site.client();
    let mut clients = many(&site);
    for round in 0..10 {
        // Writes in flight, some of them at a node that is busy for a while.
        for client in &mut clients {
            client.post("EVAL \"local now = function() local t = redis.call('TIME') return t[1] * 1000000 + t[2] end local e = now() + 20000 repeat until now() > e return redis.call('INCR', KEYS[1])\" 1 slow");
            for i in 0..20 {
                client.post(&format!("INCR n{i}"));
            }
        }
        assert_eq!(operator.cmd("CLIENT PAUSE 60000 WRITE"), ok());
        let snapshot = |operator: &mut Client| -> Vec<Value> {
            let mut all: Vec<Value> = (0..20).map(|i| operator.cmd(&format!("GET n{i}"))).collect();
            all.push(operator.cmd("GET slow"));
            all
        };
        let before = snapshot(&mut operator);
        std::thread::sleep(Duration::from_millis(60));
        assert_eq!(snapshot(&mut operator), before, "round {round}");
        assert_eq!(operator.cmd("CLIENT UNPAUSE"), ok());
        for client in &mut clients {
            for _ in 0..21 {
                client.reply().int();
            }
        }
    }
}

#[test]
fn pause_errors_match_a_single_server() {
    let site = Site::new(1);
    let plain = Node::start(&NodeOptions::default());
    let (mut routed, mut reference) = (site.client(), plain.client());
    for line in [
        "CLIENT PAUSE",
        "CLIENT PAUSE x",
        "CLIENT PAUSE -1",
        "CLIENT PAUSE 10 foo",
        "CLIENT PAUSE x foo",
        "CLIENT PAUSE 10 write",
        "CLIENT PAUSE 10 ALL x",
        "CLIENT UNPAUSE x",
        "CLIENT UNPAUSE",
        "GET k",
    ] {
        assert_eq!(routed.cmd(line), reference.cmd(line), "{line}");
    }
}
