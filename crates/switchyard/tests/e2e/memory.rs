//! The memory budget (`memory-max`): clients may use much memory while it suffices. Beyond the budget, the largest are
//! closed first.

use std::io::Write;
use std::net::TcpStream;
use std::thread::JoinHandle;

use crate::support::client::TIMEOUT;
use crate::support::{Client, RouterOptions, Site, SiteOptions, Value, bulk, encode, int, ok, simple, until};

const MIB: usize = 1 << 20;

fn options(config: &str) -> SiteOptions {
    SiteOptions::config(config)
}

/// Returns a number of the router's metrics.
fn metric(site: &Site, name: &str) -> u64 {
    let metrics = site.router().metrics();
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    line.unwrap_or_else(|| panic!("no {name} in\n{metrics}")).parse().expect("a number")
}

/// Requests a value `count` times without reading. Returns the writing thread, because the router may stop reading.
fn send_gets(client: &Client, key: &str, count: usize) -> JoinHandle<std::io::Result<()>> {
    let mut stream: TcpStream = client.stream().try_clone().expect("a second handle");
    let commands = encode(&["GET", key]).repeat(count);
    std::thread::spawn(move || stream.write_all(&commands))
}

#[test]
fn a_pipeline_of_300_megabytes_of_replies_is_served_before_any_is_read() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else {
        return;
    };
    let mut client = site.client();
    let value = vec![b'v'; 100_000];
    assert_eq!(client.call(&[&b"SET"[..], b"k", &value]), ok());
    let written = send_gets(&client, "k", 3000);
    until("all replies wait in the router", || {
        let metrics = site.router().metrics();
        let lines = metrics.lines().filter(|line| line.starts_with("switchyard_node_received_bytes_total{"));
        let bytes: u64 = lines.map(|line| line.rsplit(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0)).sum();
        bytes > 300_000_000
    });
    assert!(metric(&site, "switchyard_memory_used_bytes") > 290_000_000);
    written.join().expect("the writer").expect("written");
    for i in 0..3000 {
        assert!(client.reply() == bulk(&value), "reply {i}");
    }
    assert_eq!(client.cmd("PING"), simple("PONG"));
    until("the memory is given back", || metric(&site, "switchyard_memory_used_bytes") < 50_000_000);
}

/// A reply on a separate connection waits for its client. A client that continues to write must not block itself.
#[test]
fn a_large_reply_does_not_block_a_client_that_writes_first() {
    let site = Site::new(1);
    let mut client = site.client();
    let large = vec![b'l'; 20 * MIB];
    assert_eq!(client.call(&[&b"SET"[..], b"large", &large]), ok());
    // From now on the router knows that the value is large.
    assert!(client.cmd("GET large") == bulk(&large));
    let piece = vec![b'p'; 100_000];
    let mut commands = encode(&["GET", "large"]);
    for _ in 0..300 {
        commands.extend(encode(&[&b"SET"[..], b"small", &piece]));
    }
    client.write(&commands);
    assert!(client.reply() == bulk(&large));
    for i in 0..300 {
        assert_eq!(client.reply(), ok(), "SET {i}");
    }
}

#[test]
fn the_largest_clients_are_closed_first_and_memory_stays_in_budget() {
    // The buffer of the last client grows from 98 to 196 MB at once. With a smaller budget, the excess could be so large
    // that another worker evicts a small client before this worker evicts the largest.
    let config = "memory-max = \"160mb\"\n[nodes]\ncommand-timeout = \"20s\"\n";
    let Some(site) = Site::router_only(2, &options(config)) else {
        return;
    };
    let value = vec![b'v'; 100_000];
    let mut steady = site.client();
    assert_eq!(steady.call(&[&b"SET"[..], b"k", &value]), ok());
    site.router().process().reset_peak_memory();
    // Small clients are served, even if they do not read for a while.
    let mut small: Vec<Client> = (0..6).map(|_| site.client()).collect();
    small.iter().for_each(|client| send_gets(client, "k", 40).join().expect("the writer").expect("written"));
    let mut big: Vec<Client> = (0..6).map(|_| site.client()).collect();
    let writers: Vec<_> = big.iter().map(|client| send_gets(client, "k", 2000)).collect();
    until("the biggest are cut", || {
        assert_eq!(steady.cmd("STRLEN k"), int(100_000));
        // Even the last client exceeds the remaining budget.
        metric(&site, "switchyard_clients_evicted_total") == 6
    });
    for (i, client) in small.iter_mut().enumerate() {
        for _ in 0..40 {
            assert!(client.reply() == bulk(&value), "client {i}");
        }
    }
    let used = steady.cmd("INFO memory").text();
    assert!(used.contains("switchyard_memory_max:167772160"), "{used}");
    assert!(steady.cmd("INFO stats").text().contains("evicted_clients:6"));
    let peak = site.router().process().memory_kib("VmHWM");
    // The clients requested 1.2 GB. A growing buffer briefly exists twice, the allocator releases memory late, and a
    // worker without a processor reacts late.
    assert!(peak < (3 * 160) << 10, "the router took {peak} KiB with a budget of 160 MiB");
    site.router().process().expect_log(&["disconnecting the client that uses the most memory (memory-max)"]);
    assert!(big.iter_mut().all(|client| client.closed_within(TIMEOUT)));
    writers.into_iter().for_each(|writer| drop(writer.join()));
    assert_eq!(steady.cmd("PING"), simple("PONG"));
}

#[test]
fn a_burst_leaves_no_memory_behind() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else {
        return;
    };
    let mut client = site.client();
    let used = || metric(&site, "switchyard_memory_used_bytes");
    let before = used();
    let keys = 1_000_000;
    let command =
        [format!("*{}\r\n$6\r\nEXISTS\r\n", keys + 1).into_bytes(), b"$1\r\na\r\n$1\r\nb\r\n".repeat(keys / 2)]
            .concat();
    assert_eq!(client.pipeline(&command, 1), [b":0\r\n"]);
    until("what a million keys took is given back", || used() < before + (2 << 20));
}

#[test]
fn queued_transactions_count() {
    let Some(site) = Site::router_only(2, &options("memory-max = \"96mb\"\n")) else {
        return;
    };
    let (mut small, mut big) = (site.client(), site.client());
    assert_eq!((small.cmd("MULTI"), big.cmd("MULTI")), (ok(), ok()));
    let value = vec![b'v'; 100_000];
    for i in 0..20 {
        assert_eq!(small.call(&[&b"SET"[..], format!("{{s}}{i}").as_bytes(), &value]), simple("QUEUED"));
    }
    let cut = (0..2000).find(|i| {
        let queued = big
            .try_write(&encode(&[&b"SET"[..], format!("{{b}}{i}").as_bytes(), &value]))
            .and_then(|()| big.try_reply());
        !matches!(queued, Ok(Value::Simple(_)))
    });
    let cut = cut.expect("200 MB are more than the budget");
    assert!(cut > 200, "cut after {cut} commands of 100 kB with a budget of 96 MiB");
    assert!(big.closed_within(TIMEOUT));
    assert_eq!(small.cmd("EXEC").items().len(), 20);
    assert_eq!(small.cmd("EXISTS {b}1"), int(0));
}

/// The beginning of a large request that must be complete before its nodes are known.
fn head(len: usize) -> Vec<u8> {
    format!("*5\r\n$4\r\nMSET\r\n$1\r\na\r\n$1\r\n1\r\n$1\r\nb\r\n${len}\r\n").into_bytes()
}

/// Such requests count. A collected request takes little more than its size, so both together exceed the budget, but
/// one alone does not, whatever the sizes of its pieces.
#[test]
fn collected_requests_count_and_protected_clients_are_closed_last() {
    let Some(site) = Site::router_only(2, &options("memory-max = \"112mb\"\n")) else {
        return;
    };
    let mut spared = site.client();
    assert_eq!(spared.cmd("CLIENT NO-EVICT on"), ok());
    spared.write(&head(45 * MIB));
    spared.write(&vec![b'x'; 40 * MIB]);
    let mut other = site.client();
    other.write(&head(80 * MIB));
    let _ = other.try_write(&vec![b'x'; 79 * MIB]);
    until("the other one is cut", || metric(&site, "switchyard_clients_evicted_total") > 0);
    assert!(other.closed_within(TIMEOUT));
    spared.write(&vec![b'x'; 5 * MIB]);
    spared.write(b"\r\n");
    assert_eq!(spared.reply(), ok());
    assert_eq!(metric(&site, "switchyard_clients_evicted_total"), 1);
}

/// Covers another client on a different worker, which has not published its usage: below a threshold, workers publish
/// nothing.
#[test]
fn protected_clients_are_closed_last_on_any_worker() {
    let Some(site) = Site::router_only(2, &options("memory-max = \"64mb\"\n")) else {
        return;
    };
    let used = || metric(&site, "switchyard_memory_used_bytes") as usize;
    let mut watcher = site.client();
    for round in 1..=10 {
        let (mut other, mut spared) = (site.client(), site.client());
        assert_eq!(spared.cmd("CLIENT NO-EVICT on"), ok());
        let id = spared.cmd("CLIENT ID").int();
        other.write(&head(22 * MIB));
        other.write(&vec![b'x'; 21 * MIB]);
        until("it is collected", || used() > 21 * MIB);
        spared.write(&head(48 * MIB));
        spared.write(&vec![b'x'; 46 * MIB]);
        until("one is cut", || metric(&site, "switchyard_clients_evicted_total") == round);
        let list = watcher.cmd(&format!("CLIENT LIST ID {id}")).text();
        assert!(!list.is_empty(), "round {round}: the wrong one was cut");
        assert!(other.closed_within(TIMEOUT));
        drop(spared);
        until("the memory is given back", || used() < 8 * MIB);
    }
}

/// Otherwise unknown clients could cause applications, which use more memory, to be closed.
#[test]
fn unauthenticated_clients_are_closed_before_all_others() {
    let config = "memory-max = \"64mb\"\n[clients]\npassword = \"secret\"\n".to_owned();
    let router = RouterOptions { config, password: Some("secret".to_owned()), ..RouterOptions::default() };
    let Some(site) = Site::router_only(1, &SiteOptions::router(router)) else {
        return;
    };
    let mut client = site.client();
    assert_eq!(client.cmd("AUTH secret"), ok());
    assert_eq!(client.cmd("MULTI"), ok());
    let value = vec![b'v'; 2 * MIB];
    assert_eq!(client.call(&[&b"SET"[..], b"k", &value]), simple("QUEUED"));
    // The maximum that an unauthenticated client may send: ten arguments of 16 KB, the last one incomplete.
    let mut piece = b"*10\r\n".to_vec();
    for _ in 0..10 {
        piece.extend_from_slice(b"$16384\r\n");
        piece.extend_from_slice(&[b's'; 16384]);
        piece.extend_from_slice(b"\r\n");
    }
    piece.truncate(piece.len() - 100);
    let mut strangers = Vec::new();
    until("strangers are cut", || {
        let mut stream = TcpStream::connect(site.address()).expect("connected");
        stream.write_all(&piece).expect("written");
        strangers.push(stream);
        metric(&site, "switchyard_clients_evicted_total") >= 5
    });
    let done = client.cmd("EXEC");
    assert_eq!(done.items(), [ok()], "an authenticated client stays");
}
