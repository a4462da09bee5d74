//! Large values: in bounded memory, without delaying other clients.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::support::client::TIMEOUT;
use crate::support::{Client, RouterOptions, Site, SiteOptions, Value, bulk, direct, encode, int, ok, until};

const MIB: usize = 1 << 20;

/// Returns byte `at` of the test value: a pattern without a short period, so that a lost, repeated or displaced piece
/// is detected.
fn pattern(at: usize) -> u8 {
    let x = (at as u64 / 8).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 29;
    (x >> (at % 8)) as u8
}

fn upload(stream: &mut TcpStream, key: &str, len: usize) {
    let head = format!("*3\r\n$3\r\nSET\r\n${}\r\n{key}\r\n${len}\r\n", key.len());
    stream.write_all(head.as_bytes()).expect("the head");
    let mut chunk = vec![0; MIB];
    let mut at = 0;
    while at < len {
        let n = chunk.len().min(len - at);
        for (i, byte) in chunk[..n].iter_mut().enumerate() {
            *byte = pattern(at + i);
        }
        stream.write_all(&chunk[..n]).unwrap_or_else(|e| panic!("after {at} of {len} bytes: {e}"));
        at += n;
    }
    stream.write_all(b"\r\n").expect("the end");
}

/// Reads a bulk reply and checks it without storing it.
fn download(stream: &mut TcpStream, len: usize) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).expect("the head");
        head.push(byte[0]);
    }
    assert_eq!(String::from_utf8_lossy(&head), format!("${len}\r\n"));
    let mut chunk = vec![0; MIB];
    let mut at = 0;
    while at < len {
        let n =
            stream.read(&mut chunk[..MIB.min(len - at)]).unwrap_or_else(|e| panic!("after {at} of {len} bytes: {e}"));
        assert!(n > 0, "closed after {at} of {len} bytes");
        for (i, byte) in chunk[..n].iter().enumerate() {
            if *byte != pattern(at + i) {
                panic!("byte {} of {len} is wrong", at + i);
            }
        }
        at += n;
    }
    let mut end = [0; 2];
    stream.read_exact(&mut end).expect("the end");
    assert_eq!(&end, b"\r\n");
}

/// Uploads and downloads a value through the router. Returns the maximum growth of the router's memory in KiB.
fn round_trip(site: &Site, len: usize) -> u64 {
    let mut client = site.client();
    client.cmd("PING");
    let before = (!direct()).then(|| {
        let process = site.router().process();
        process.reset_peak_memory();
        process.memory_kib("VmHWM")
    });
    let mut stream = client.stream().try_clone().expect("a second handle");
    stream.set_read_timeout(Some(Duration::from_secs(120))).expect("timeout");
    stream.set_write_timeout(Some(Duration::from_secs(120))).expect("timeout");
    upload(&mut stream, "large", len);
    assert_eq!(client.reply(), ok());
    assert_eq!(client.cmd("STRLEN large"), int(len as i64));
    client.post("GET large");
    download(&mut stream, len);
    assert_eq!(client.cmd("DEL large"), int(1));
    before.map_or(0, |before| site.router().process().memory_kib("VmHWM").saturating_sub(before))
}

#[test]
fn sixty_four_megabytes_pass_in_bounded_memory() {
    let site = Site::new(2);
    let grown = round_trip(&site, 64 * MIB);
    assert!(grown < 16 << 10, "64 MB up and down grew the router by {grown} KiB");
}

/// Half a gigabyte needs about 2 GB of memory at the node, and many seconds: `make test-large`.
#[test]
#[ignore = "needs 2 GB of memory and many seconds; run by make test-large"]
fn five_hundred_and_twelve_megabytes_pass_in_bounded_memory() {
    let site = Site::new(2);
    let grown = round_trip(&site, 512 * MIB);
    assert!(grown < 16 << 10, "512 MB up and down grew the router by {grown} KiB");
    // A byte more is refused like in Redis.
    let mut client = site.client();
    client.write(b"*3\r\n$3\r\nSET\r\n$5\r\nlarge\r\n$536870913\r\n");
    assert_eq!(client.reply(), Value::Error("ERR Protocol error: invalid bulk length".into()));
    assert!(client.closed_within(TIMEOUT));
}

#[test]
fn values_near_buffer_limits_are_unchanged() {
    let site = Site::new(2);
    for hello in ["HELLO 2", "HELLO 3"] {
        let mut client = site.client();
        client.cmd(hello);
        for base in [16 << 10, 32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, MIB, 2 * MIB, 4 * MIB] {
            for len in [base - 40, base - 2, base - 1, base, base + 1, base + 2, base + 40] {
                let value: Vec<u8> = (0..len).map(pattern).collect();
                client.send(&[&b"SET"[..], b"edge", &value]);
                client.post("STRLEN edge");
                client.post("GET edge");
                client.post("GETRANGE edge 0 3");
                assert_eq!(client.reply(), ok(), "{len}");
                assert_eq!(client.reply(), int(len as i64), "{len}");
                assert!(client.reply() == bulk(&value), "GET of {len} bytes differs from the SET value");
                assert_eq!(client.reply(), bulk(&value[..4]), "{len}");
            }
        }
    }
}

/// A large value in all positions: in an array, as an element, with a type error, in commands with several keys.
#[test]
fn large_values_in_all_positions() {
    let site = Site::new(3);
    let mut client = site.client();
    let big: Vec<u8> = (0..3 * MIB).map(pattern).collect();
    let small = b"small".to_vec();
    assert_eq!(client.call(&[&b"RPUSH"[..], b"list", &big, &small, &big]), int(3));
    assert!(client.cmd("LRANGE list 0 -1") == Value::Array(vec![bulk(&big), bulk(&small), bulk(&big)]));
    assert_eq!(client.call(&[&b"HSET"[..], b"hash", b"f", &big, b"g", b"v"]), int(2));
    assert!(client.cmd("HGET hash f") == bulk(&big));
    assert_eq!(client.cmd("HGET hash g"), bulk("v"));
    assert_eq!(client.call(&[&b"MSET"[..], b"a", &big, b"b", b"1", b"c", &big, b"d", b"2"]), ok());
    assert!(
        client.cmd("MGET a b none c d") == Value::Array(vec![bulk(&big), bulk("1"), Value::Nil, bulk(&big), bulk("2")])
    );
    assert_eq!(client.cmd("DEL a b c d"), int(4));
    // Refused by the node: the error must arrive, and the following commands must not be parsed as a part of the value.
    client.send(&[&b"APPEND"[..], b"list", &big]);
    client.post("GET none");
    assert!(client.reply().expect_error().starts_with("WRONGTYPE"));
    assert_eq!(client.reply(), Value::Nil);
    // Refused by the router or the node: unknown command, wrong number of arguments, keys of two slots.
    client.send(&[&b"NOSUCH"[..], b"k", &big]);
    client.send(&[&b"GET"[..], b"k", &big]);
    client.send(&[&b"EVAL"[..], b"return #ARGV[1]", b"1", b"{t}k", &big]);
    client.send(&[&b"ECHO"[..], &big]);
    client.post("PING");
    assert!(client.reply().expect_error().starts_with("ERR unknown command 'NOSUCH'"));
    assert_eq!(client.reply().expect_error(), "ERR wrong number of arguments for 'get' command");
    assert_eq!(client.reply(), int(big.len() as i64));
    assert!(client.reply() == bulk(&big));
    assert_eq!(client.reply(), crate::support::simple("PONG"));
    // A large key.
    let key: Vec<u8> = (0..2 * MIB).map(|i| pattern(i) | 0x40).collect();
    assert_eq!(client.call(&[&b"SET"[..], &key, b"v"]), ok());
    assert_eq!(client.call(&[&b"GET"[..], &key]), bulk("v"));
    assert_eq!(client.call(&[&b"DEL"[..], &key, b"other"]), int(1));
    // A large script.
    let script = format!("{}return 7", "-- comment\n".repeat(200_000));
    assert_eq!(client.call(&["EVAL", &script, "0"]), int(7));
    assert_eq!(client.call(&["DBSIZE"]), int(2));
}

#[test]
fn a_too_large_argument_is_refused_like_in_redis() {
    let options = SiteOptions {
        node: crate::support::NodeOptions {
            args: vec!["--proto-max-bulk-len".into(), "2mb".into()],
            ..Default::default()
        },
        router: RouterOptions::config("[clients]\nargument-max = \"2mb\"\n"),
    };
    let site = Site::with(1, &options);
    let mut client = site.client();
    assert_eq!(client.call(&[&b"SET"[..], b"k", &vec![b'x'; 2 * MIB]]), ok());
    client.write(format!("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n${}\r\n", 2 * MIB + 1).as_bytes());
    assert_eq!(client.reply(), Value::Error("ERR Protocol error: invalid bulk length".into()));
    assert!(client.closed_within(TIMEOUT));
    assert_eq!(site.client().cmd("STRLEN k"), int(2 * MIB as i64));
}

#[test]
fn an_argument_that_only_a_node_refuses_disconnects_no_client() {
    let options = SiteOptions {
        node: crate::support::NodeOptions {
            args: vec!["--proto-max-bulk-len".into(), "1mb".into()],
            ..Default::default()
        },
        router: RouterOptions { workers: 1, ..RouterOptions::default() },
    };
    let site = Site::with(1, &options);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Their commands are behind the long ones, on the same connection to the node.
        for _ in 0..4 {
            scope.spawn(|| {
                let mut client = site.client();
                while !stop.load(Ordering::SeqCst) {
                    match client.cmd("GET k") {
                        Value::Nil => {}
                        lost => assert!(lost.expect_error().starts_with("NODELOST")),
                    }
                }
            });
        }
        let mut client = site.client();
        let message = vec![b'm'; 3 * MIB];
        for _ in 0..25 {
            let reply = client.call(&[&b"PUBLISH"[..], b"channel", &message]);
            let error = reply.expect_error();
            assert!(error.contains("Protocol error") || error.starts_with("NODELOST"), "{error}");
        }
        stop.store(true, Ordering::SeqCst);
    });
}

/// Runs `disturb` while another client uses the same node. Panics if that client is blocked.
///
/// Asserts no time: the disturbance lasts until the other client has finished, or until a timeout.
fn others_go_on(site: &Site, disturb: impl FnOnce(&AtomicBool) + Send) {
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let disturber = scope.spawn(|| disturb(&stop));
        let mut client = site.client();
        client.timeout(Duration::from_secs(20));
        // Long enough for the full effect of the disturbance.
        let end = Instant::now() + Duration::from_millis(1500);
        let mut done = 0;
        while Instant::now() < end || done < 200 {
            client.send(&["INCR", "work"]);
            client.send(&["GET", "work"]);
            match (client.try_reply(), client.try_reply()) {
                (Ok(Value::Int(n)), Ok(got)) => assert_eq!(got, bulk(n.to_string())),
                other => {
                    stop.store(true, Ordering::SeqCst);
                    panic!("another client of the node was held up after {done} commands: {other:?}");
                }
            }
            done += 1;
        }
        stop.store(true, Ordering::SeqCst);
        disturber.join().expect("the disturber");
    });
}

#[test]
fn a_slow_upload_delays_no_other_client() {
    // One worker and one node: all clients share everything.
    let site = Site::with(1, &SiteOptions::router(RouterOptions { workers: 1, ..RouterOptions::default() }));
    for len in [20_000, 300_000, 40 * MIB] {
        others_go_on(&site, |stop| {
            let mut slow = site.client();
            let value = vec![b'u'; len];
            let bytes = encode(&[&b"SET"[..], format!("slow{len}").as_bytes(), &value]);
            // All except the last bytes, in pieces over time.
            let (most, rest) = bytes.split_at(bytes.len() - 10);
            for piece in most.chunks(most.len() / 10) {
                slow.write(piece);
                std::thread::sleep(Duration::from_millis(20));
            }
            while !stop.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(5));
            }
            slow.write(rest);
            assert_eq!(slow.reply(), ok());
        });
        assert_eq!(site.client().cmd(&format!("STRLEN slow{len}")), int(len as i64));
    }
}

#[test]
fn a_slow_reader_delays_no_other_client() {
    let site = Site::with(
        1,
        &SiteOptions::router(RouterOptions {
            workers: 1,
            config: "[nodes]\ncommand-timeout = \"60s\"\n".into(),
            ..RouterOptions::default()
        }),
    );
    let mut client = site.client();
    let value: Vec<u8> = (0..40 * MIB).map(pattern).collect();
    assert_eq!(client.call(&[&b"SET"[..], b"large", &value]), ok());
    let piece: Vec<u8> = value[..200_000].to_vec();
    assert_eq!(client.call(&[&b"SET"[..], b"piece", &piece]), ok());
    // A single large reply.
    others_go_on(&site, |stop| {
        let mut slow = site.client();
        slow.post("GET large");
        while !stop.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(slow.reply() == bulk(&value), "the slow reader must get the whole value in the end");
    });
    // Many replies of medium size: more than socket buffers hold, below the output limit.
    others_go_on(&site, |stop| {
        let mut slow = site.client();
        for _ in 0..200 {
            slow.post("GET piece");
        }
        while !stop.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
        for _ in 0..200 {
            assert!(slow.reply() == bulk(&piece));
        }
    });
}

#[test]
fn many_large_values_are_handled_at_once() {
    let site = Site::new(2);
    std::thread::scope(|scope| {
        for i in 0..24usize {
            let mut client = site.client();
            scope.spawn(move || {
                let len = MIB + i * 100_003;
                let value: Vec<u8> = (i..i + len).map(pattern).collect();
                for round in 0..3 {
                    assert_eq!(client.call(&[&b"SET"[..], format!("big{i}").as_bytes(), &value]), ok(), "client {i}");
                    assert!(client.cmd(&format!("GET big{i}")) == bulk(&value), "client {i}, round {round}");
                }
            });
        }
    });
}

/// A client that disconnects during a large transfer, in either direction, leaves nothing behind.
#[test]
fn interrupted_large_transfers_affect_no_other_client() {
    let site = Site::new(1);
    let mut client = site.client();
    let value: Vec<u8> = (0..8 * MIB).map(pattern).collect();
    assert_eq!(client.call(&[&b"SET"[..], b"whole", &value]), ok());
    for i in 0..30 {
        let mut leaver = site.client();
        if i % 2 == 0 {
            let bytes = encode(&[&b"SET"[..], b"half", &value]);
            leaver.write(&bytes[..MIB + i * 100_000]);
        } else {
            leaver.post("GET whole");
            let mut some = vec![0; 1 + i * 10_000];
            leaver.stream().read_exact(&mut some).expect("some of it");
        }
        drop(leaver);
        assert_eq!(client.cmd("EXISTS half"), int(0), "half a SET must not be executed");
    }
    assert!(client.cmd("GET whole") == bulk(&value));
    let mut fresh: Client = site.client();
    assert_eq!(fresh.call(&[&b"SET"[..], b"half", &value]), ok());
    assert_eq!(fresh.cmd("STRLEN half"), int(value.len() as i64));
}

/// The node waits for the rest of the request, so there will be no reply.
#[test]
fn a_client_killed_during_a_large_request_is_closed() {
    let site = Site::new(2);
    let (mut victim, mut killer) = (site.client(), site.client());
    victim.write(format!("*3\r\n$3\r\nSET\r\n$1\r\nk\r\n${}\r\n", 2 * MIB).as_bytes());
    victim.write(&vec![b'x'; MIB]);
    let line_of_victim = |killer: &mut Client| {
        let list = killer.cmd("CLIENT LIST").text();
        list.lines().find(|line| !line.contains("cmd=client|list")).map(str::to_owned)
    };
    let id = until("its request is in flight", || {
        let line = line_of_victim(&mut killer).filter(|line| direct() || line.contains(" oll=1 "))?;
        assert!(line.to_ascii_lowercase().contains(" cmd=null "), "it has executed nothing: {line}");
        Some(line.split([' ', '=']).nth(1).expect("an id").to_owned())
    });
    assert_eq!(killer.cmd(&format!("CLIENT KILL ID {id}")), int(1));
    assert!(victim.closed_within(TIMEOUT));
    assert_eq!(killer.cmd("EXISTS k"), int(0));
}

/// The node has half a request, and replies nothing. Still the client receives the error at once, after its pending
/// replies.
#[test]
fn a_large_request_with_a_protocol_error_is_answered_at_once() {
    let site = Site::new(2);
    let mut client = site.client();
    let value: Vec<u8> = (0..2 * MIB).map(pattern).collect();
    client.write(&encode(&[&b"SET"[..], b"{k}1", &value]));
    client.write(format!("*4\r\n$3\r\nSET\r\n$4\r\n{{k}}2\r\n${}\r\n", value.len()).as_bytes());
    client.write(&value);
    client.write(b"\r\n:EX\r\n");
    assert_eq!(client.reply(), ok());
    assert_eq!(client.reply().expect_error(), "ERR Protocol error: expected '$', got ':'");
    assert!(client.closed_within(TIMEOUT));
    let mut next = site.client();
    assert_eq!(next.call(&[&b"SET"[..], b"{k}3", &value]), ok());
    assert_eq!(next.cmd("EXISTS {k}1 {k}2 {k}3"), int(2));
}
