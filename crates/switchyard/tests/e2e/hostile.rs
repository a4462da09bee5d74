//! Invalid and malicious bytes: the router must reply or close like Redis, reserve no memory for declared lengths, and
//! continue to serve.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use crate::support::client::TIMEOUT;
use crate::support::value::{Framer, parse};
use crate::support::{
    Client, Node, NodeOptions, Random, Router, RouterOptions, Site, SiteOptions, Value, encode, int, ok, simple, until,
    until_within, words,
};

/// Hand-written inputs: a name, and the bytes of a connection.
fn inputs() -> Vec<(String, Vec<u8>)> {
    let mut inputs: Vec<(String, Vec<u8>)> = Vec::new();
    let mut add = |name: &str, bytes: &[u8]| inputs.push((name.to_owned(), bytes.to_vec()));

    // Lengths
    for count in "-1|0|-2147483648|2147483647|2147483648|4294967297|9223372036854775807|9223372036854775808|1048577|x|| 1|1 |+1|1x|0x1|1.5|\
             --1|01"
        .split('|')
    {
        add(&format!("*{count}"), format!("*{count}\r\n$4\r\nPING\r\n").as_bytes());
        add(&format!("PING then *{count}"), format!("*1\r\n$4\r\nPING\r\n*{count}\r\n$4\r\nPING\r\n").as_bytes());
    }
    for len in
        "-1|-2147483648|536870913|2147483648|4294967300|9223372036854775807|18446744073709551617|x|| 4|4 |+4|4x|0x4|04|--4".split('|')
    {
        add(&format!("${len}"), format!("*1\r\n${len}\r\nPING\r\n*1\r\n$4\r\nPING\r\n").as_bytes());
        add(&format!("second ${len}"), format!("*2\r\n$4\r\nECHO\r\n${len}\r\nPING\r\n*1\r\n$4\r\nPING\r\n").as_bytes());
    }
    add("shorter than declared", b"*1\r\n$6\r\nPING\r\n*1\r\n$4\r\nPING\r\n");
    add("longer than declared", b"*1\r\n$2\r\nPING\r\n*1\r\n$4\r\nPING\r\n");
    add("empty command name", b"*1\r\n$0\r\n\r\n*1\r\n$4\r\nPING\r\n");
    add("several empty multibulks", b"*0\r\n*0\r\n*-1\r\n*0\r\n*1\r\n$4\r\nPING\r\n");
    add("count that never ends", &[b"*".as_slice(), &b"1".repeat(70_000)].concat());
    add("bulk length that never ends", &[b"*1\r\n$".as_slice(), &b"1".repeat(70_000)].concat());

    // Line ends
    add("no CRLF after the bulk", b"*1\r\n$4\r\nPINGxx*1\r\n$4\r\nPING\r\n");
    add("LF only", b"*1\n$4\nPING\n");
    add("LF after the count", b"*1\n$4\r\nPING\r\n");
    add("CR only", b"*1\r$4\rPING\r");
    add("CR CR LF", b"*1\r\r\n$4\r\nPING\r\n");
    add("CRLF missing at the end", b"*1\r\n$4\r\nPING");
    add("leading CRLF", b"\r\n\r\n*1\r\n$4\r\nPING\r\n");
    add("leading LF", b"\n\n*1\r\n$4\r\nPING\r\n");
    // Redis searches line ends with strchr, which stops at a NUL: it never finds a line end after a NUL and waits
    // forever, but the router answers the line. So only NULs without a line end are compared.
    add("NULs", &[0; 100]);

    // Other types within the array
    for inner in [
        ":1\r\n",
        "+PING\r\n",
        "-ERR\r\n",
        "*1\r\n$4\r\nPING\r\n",
        "PING\r\n",
        "_\r\n",
        "#t\r\n",
        "%1\r\n",
        "\r\n",
        "\0",
        "!4\r\nPING\r\n",
        "=4\r\nPING\r\n",
    ] {
        add(&format!("multibulk of {inner:?}"), format!("*1\r\n{inner}").as_bytes());
        add(&format!("second element {inner:?}"), format!("*2\r\n$4\r\nPING\r\n{inner}").as_bytes());
    }
    add("deeply nested", &[b"*1\r\n".repeat(20_000), b"$4\r\nPING\r\n".to_vec()].concat());
    for first in
        ["$4\r\nPING\r\n", "+PING\r\n", "-ERR x\r\n", ":1\r\n", "_\r\n", "%1\r\n", "~1\r\n", ">1\r\n", "#t\r\n"]
    {
        add(&format!("a reply as a request {first:?}"), first.as_bytes());
    }

    // Inline commands
    for line in [
        "PING",
        "  PING  ",
        "\tPING\t",
        "PING \"\"",
        "PING ''",
        "ECHO \"a b\"",
        "ECHO 'a b'",
        "ECHO \"a\\x41b\\n\\r\\t\\b\\a\\\"\\\\\"",
        "ECHO 'it\\'s'",
        "ECHO 'back\\slash'",
        "ECHO \"\\x4\"",
        "GET \"x\\x4\"",
        "GET \"x\\xzz\"",
        "GET \"\\",
        "GET \"unbalanced",
        "GET 'unbalanced",
        "GET \"x\"y",
        "GET 'x'y",
        "GET x\"y\"",
        "GET x'y",
        "\"PING\"",
        "\"PI\"NG",
        "''",
        "\"\"",
        "NOSUCH a b c",
        "GET",
        "GET a b",
        "echo \u{e9}\u{4e16}",
        "*1 PING",
        "\u{b}PING",
    ] {
        add(&format!("inline {line:?}"), format!("{line}\r\nPING\r\n").as_bytes());
        add(&format!("inline {line:?} with LF"), format!("{line}\nPING\n").as_bytes());
    }
    add("inline as long as allowed", &[b"ECHO ".as_slice(), &b"x".repeat(60_000), b"\r\nPING\r\n"].concat());
    add("inline that never ends", &b"x".repeat(80_000));
    add("inline of many words", &[b"EXISTS".as_slice(), &b" a".repeat(20_000), b"\r\nPING\r\n"].concat());
    add("spaces only", &[&b" ".repeat(1000), b"\r\nPING\r\n".as_slice()].concat());

    // Another protocol
    add("HTTP GET", b"GET / HTTP/1.1\r\nHost: x\r\n\r\n");
    add("HTTP POST", b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 4\r\n\r\nPING");
    add("Host: alone", b"Host: x\r\nPING\r\n");
    add("host in small letters", b"host: x\r\nPING\r\n");
    add("POST after a command", b"PING\r\nPOST x\r\nPING\r\n");
    add("POST as multibulk", b"*2\r\n$4\r\nPOST\r\n$1\r\n/\r\n*1\r\n$4\r\nPING\r\n");
    add("TLS", b"\x16\x03\x01\x02\x01\x01\x01\x01\xfc\x03\x03aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa\r\n");
    add("SSH", b"SSH-2.0-OpenSSH_9.6\r\n");
    add("memcached", b"set k 0 0 1\r\nx\r\n");

    // Well-formed but odd commands
    add("very long name", &[encode(&["N".repeat(5000)]), encode(&["PING"])].concat());
    add("binary name", &[encode(&[&[0xff, 0, 13, 10][..]]), encode(&["PING"])].concat());
    add("name with NUL", &[encode(&[&b"PING\0"[..]]), encode(&["PING"])].concat());
    add(
        "unknown with long arguments",
        &[encode(&["nosuch".to_owned(), "y".repeat(500), "z".repeat(500)]), encode(&["PING"])].concat(),
    );
    add("unknown with line ends", &[encode(&["no\r\nsuch", "a\r\nb\nc\0d"]), encode(&["PING"])].concat());
    add("unknown with 1000 arguments", &[encode(&vec!["nosuch"; 1000]), encode(&["PING"])].concat());
    add(
        "subcommand with line ends",
        &[encode(&["CLIENT", "x\r\ny"]), encode(&["OBJECT", "a\r\n+OK"]), encode(&["PING"])].concat(),
    );
    add(
        "EVAL with a huge key count",
        &[encode(&["EVAL", "return 1", "99999999999999999999", "k"]), encode(&["PING"])].concat(),
    );
    add(
        "EVAL with keys beyond its arguments",
        &[encode(&["EVAL", "return 1", "2147483647", "k"]), encode(&["PING"])].concat(),
    );
    add("ZUNION with a negative count", &[encode(&["ZUNION", "-1", "k"]), encode(&["PING"])].concat());
    add("LMPOP beyond its arguments", &[encode(&["LMPOP", "1000000", "k", "LEFT"]), encode(&["PING"])].concat());
    add("XREAD STREAMS alone", &[encode(&["XREAD", "STREAMS"]), encode(&["PING"])].concat());
    add(
        "empty key",
        &[encode(&["SET", "", "v"]), encode(&["GET", ""]), encode(&["MGET", "", "", ""]), encode(&["DEL", ""])]
            .concat(),
    );
    inputs
}

/// Sends every input to both and compares the replies. All connections share each wait, which makes a table of this
/// size fast.
fn compare(site: &Site, plain: &Node, inputs: &[(String, Vec<u8>)]) {
    struct Case<'a> {
        name: &'a str,
        bytes: &'a [u8],
        clients: [Client; 2],
        got: [Vec<u8>; 2],
        closed: [bool; 2],
    }
    let mut cases: Vec<Case<'_>> = inputs
        .iter()
        .map(|(name, bytes)| Case {
            name,
            bytes,
            clients: [site.client(), plain.client()],
            got: [Vec::new(), Vec::new()],
            closed: [false, false],
        })
        .collect();
    for case in &mut cases {
        for client in &mut case.clients {
            // The peer may have closed before it received everything.
            let _ = client.stream().write_all(case.bytes);
        }
    }
    let start = Instant::now();
    loop {
        for case in &mut cases {
            for side in 0..2 {
                if !case.closed[side] {
                    let (bytes, closed) = case.clients[side].listen(Duration::from_millis(1));
                    case.got[side].extend(bytes);
                    case.closed[side] |= closed;
                }
            }
        }
        let different: Vec<&Case<'_>> =
            cases.iter().filter(|c| c.got[0] != c.got[1] || c.closed[0] != c.closed[1]).collect();
        // Equality is not enough: further bytes may arrive.
        if different.is_empty() && start.elapsed() > Duration::from_millis(500) {
            return;
        }
        if start.elapsed() > TIMEOUT {
            let show = |bytes: &[u8]| bytes[..bytes.len().min(200)].escape_ascii().to_string();
            let list: Vec<String> = different
                .iter()
                .map(|c| {
                    format!(
                        "{}\n    sent:   {}\n    router: {} {}\n    plain:  {} {}",
                        c.name,
                        show(c.bytes),
                        show(&c.got[0]),
                        if c.closed[0] { "(closed)" } else { "(open)" },
                        show(&c.got[1]),
                        if c.closed[1] { "(closed)" } else { "(open)" },
                    )
                })
                .collect();
            panic!("{} of {} inputs are answered differently:\n  {}", list.len(), cases.len(), list.join("\n  "));
        }
    }
}

#[test]
fn hostile_bytes_are_answered_like_redis() {
    let site = Site::new(2);
    let plain = Node::start(&NodeOptions::default());
    compare(&site, &plain, &inputs());
    assert_eq!(site.client().cmd("PING"), simple("PONG"));
}

/// Valid commands with a few bytes changed, dropped, doubled or cut: both must reply the same.
#[test]
fn damaged_commands_are_answered_like_redis() {
    let site = Site::new(2);
    let plain = Node::start(&NodeOptions::default());
    for seed in Random::seeds(&[4]) {
        eprintln!("SWITCHYARD_E2E_SEED={seed}");
        let mut random = Random::new(seed);
        let lines = [
            "SET %k v",
            "GET %k",
            "MGET %a %b %c",
            "PING",
            "HGET %h f",
            "ECHO \"x y\"",
            "DEL %a %b",
            "EXISTS %k",
            "INCRBY %n 5",
        ];
        let inputs: Vec<(String, Vec<u8>)> = (0..250)
            .map(|i| {
                // With separate keys, because the cases run concurrently, in a different order at each server.
                let own = format!("{:012x}", random.bits() >> 16);
                let mut bytes: Vec<u8> = (0..1 + random.below(3))
                    .flat_map(|_| encode(&words(&random.pick(&lines).replace('%', &own))))
                    .collect();
                for _ in 0..1 + random.below(3) {
                    let at = random.below(bytes.len());
                    match random.below(5) {
                        // Never a NUL: see `inputs`.
                        0 => bytes[at] = 1 + random.below(255) as u8,
                        1 => {
                            bytes.remove(at);
                        }
                        2 => bytes.insert(
                            at,
                            *random.pick(&[&b'\r', &b'\n', &b'$', &b'*', &b'0', &b'9', &b' ', &b'"', &1, &0xff]),
                        ),
                        3 => bytes.truncate(at.max(1)),
                        _ => {
                            let piece = bytes[at..bytes.len().min(at + 6)].to_vec();
                            bytes.splice(at..at, piece);
                        }
                    }
                    if bytes.is_empty() {
                        bytes.push(b'*');
                    }
                }
                (format!("damaged {i} of seed {seed}"), bytes)
            })
            .collect();
        compare(&site, &plain, &inputs);
    }
    assert_eq!(site.client().cmd("PING"), simple("PONG"));
}

#[test]
fn a_partial_command_before_a_close_has_no_effect() {
    let site = Site::new(2);
    let stream: Vec<u8> =
        ["SET cut 1", "MSET a 1 b 2 c 3", "INCR n"].iter().flat_map(|line| encode(&words(line))).collect();
    for cut in 0..stream.len() {
        let mut client = site.client();
        client.write(&stream[..cut]);
        if cut % 2 == 0 {
            client.finish_sending();
        }
        drop(client);
    }
    let mut client = site.client();
    assert_eq!(client.cmd("SET alive yes"), ok());
    // The incomplete command was not executed: the last byte of INCR was not sent.
    assert_eq!(client.cmd("EXISTS n"), crate::support::int(0));
}

/// Splitting the input at any position must not change the replies.
#[test]
fn requests_may_arrive_in_any_pieces() {
    let site = Site::new(3);
    let mut stream = Vec::new();
    for line in [
        "SET frag:1 \"with\\r\\nline\\x00ends\"",
        "GET frag:1",
        "MSET frag:1 a frag:2 b frag:3 c",
        "MGET frag:1 frag:2 frag:3 frag:4",
        "PING",
        "EVAL \"return ARGV[1]\" 1 frag:1 x",
        "DEL frag:1 frag:2",
        "NOSUCH a",
        "RENAME frag:1 other",
    ] {
        stream.extend(encode(&words(line)));
    }
    stream.extend_from_slice(b"*0\r\n\r\nGET \"frag:3\"\r\nPING\n");
    stream.extend(encode(&["ECHO", "end"]));
    let whole = {
        let mut client = site.client();
        client.write(&stream);
        let mut all = Vec::new();
        while !all.ends_with(b"$3\r\nend\r\n") {
            all.extend(client.raw());
        }
        all
    };
    let replies = |mut client: Client| {
        let mut all = Vec::new();
        while all.len() < whole.len() {
            all.extend(client.raw());
        }
        all.escape_ascii().to_string()
    };
    let expected = whole.escape_ascii().to_string();
    // Every split into two parts, on many connections at once, so that the pauses overlap. Each connection uses
    // separate keys, because all must get the same replies.
    let cuts: Vec<usize> = (1..stream.len()).collect();
    for batch in cuts.chunks(64) {
        let mut open: Vec<(usize, Vec<u8>, Client)> = batch
            .iter()
            .map(|&cut| {
                let tagged = own_keys(&stream, cut);
                let mut client = site.client();
                client.write(&tagged[..cut]);
                (cut, tagged, client)
            })
            .collect();
        std::thread::sleep(Duration::from_millis(5));
        for (cut, tagged, client) in &mut open {
            client.write(&tagged[*cut..]);
        }
        for (cut, _, client) in open {
            assert_eq!(replies(client), expected, "cut at byte {cut}");
        }
    }
    // Byte by byte.
    let mut client = site.client();
    for byte in own_keys(&stream, 99_999) {
        client.write(&[byte]);
        if byte == b'\n' {
            std::thread::sleep(Duration::from_micros(300));
        }
    }
    assert_eq!(replies(client), expected, "byte by byte");
}

/// Replaces the keys of the stream by unique ones of the same length.
fn own_keys(stream: &[u8], number: usize) -> Vec<u8> {
    let tag = format!("{:04x}", number % 0x10000);
    let mut out = stream.to_vec();
    for at in 0..out.len().saturating_sub(5) {
        if &out[at..at + 5] == b"frag:" {
            out[at..at + 4].copy_from_slice(tag.as_bytes());
        }
    }
    out
}

#[test]
fn a_million_arguments_are_handled() {
    let site = Site::new(2);
    let plain = Node::start(&NodeOptions::default());
    let n = 1_000_000;
    let mut command = Vec::with_capacity(n * 9);
    command.extend_from_slice(format!("*{}\r\n$6\r\nEXISTS\r\n", n + 1).as_bytes());
    for i in 0..n {
        command.extend_from_slice(if i % 2 == 0 { b"$1\r\na\r\n" } else { b"$1\r\nb\r\n" });
    }
    let (mut client, mut reference) = (site.client(), plain.client());
    client.cmd("SET a 1");
    reference.cmd("SET a 1");
    assert_eq!(client.pipeline(&command, 1), reference.pipeline(&command, 1));
    assert_eq!(client.cmd("PING"), simple("PONG"));
}

/// Twenty bytes that declare half a gigabyte must cost about twenty bytes.
#[test]
fn declared_lengths_cost_no_memory() {
    let Some(site) = Site::router_only(2, &SiteOptions::default()) else {
        return;
    };
    let process = site.router().process();
    let warm: Vec<Client> = (0..300).map(|_| site.client()).collect();
    for mut client in warm {
        client.cmd("PING");
    }
    let before = process.memory_kib("VmRSS");
    let mut open = Vec::new();
    for i in 0..300 {
        let mut client = site.client();
        client.write(match i % 6 {
            0 => b"*1\r\n$536870912\r\n".as_slice(),
            1 => b"*1048576\r\n",
            2 => b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$536870912\r\nx",
            3 => b"*1000000\r\n$4\r\nMGET\r\n$1\r\na\r\n",
            4 => b"*2\r\n$536870912\r\nabc",
            _ => b"*1048576\r\n$4\r\nMSET\r\n$400000000\r\nx",
        });
        open.push(client);
    }
    let mut probe = site.client();
    assert_eq!(probe.cmd("PING"), simple("PONG"));
    std::thread::sleep(Duration::from_millis(300));
    let after = process.memory_kib("VmRSS");
    let grown = after.saturating_sub(before);
    // 300 connections need buffers, but memory for the declared lengths would be gigabytes.
    assert!(grown < 30 << 10, "300 declarations cost {grown} KiB");
    drop(open);
    assert_eq!(probe.cmd("SET k v"), ok());
}

/// Random bytes on many connections: the process survives, memory is released, and other clients are not affected.
#[test]
fn garbage_does_not_end_the_process() {
    let site = Site::new(2);
    let mut steady = site.client();
    for seed in Random::seeds(&[21]) {
        eprintln!("SWITCHYARD_E2E_SEED={seed}");
        let mut random = Random::new(seed);
        for i in 0..400 {
            let mut client = site.client();
            let len = 1 + random.below(4000);
            let mut bytes = random.bytes(len);
            match i % 4 {
                // Bytes similar to the protocol reach further code.
                0 => bytes.iter_mut().for_each(|b| *b = b"*$0123456789\r\n\r\nGETSPING "[*b as usize % 25]),
                1 => bytes.splice(0..0, b"*3\r\n$3\r\nSET\r\n$".iter().copied()).for_each(drop),
                2 => bytes.splice(0..0, b"*2\r\n$4\r\nECHO\r\n$5000\r\n".iter().copied()).for_each(drop),
                _ => {}
            }
            let _ = client.stream().write_all(&bytes);
            if i % 3 == 0 {
                client.listen(Duration::from_millis(1));
            }
            if i % 20 == 0 {
                assert_eq!(steady.cmd(&format!("SET steady {i}")), ok());
                assert_eq!(steady.cmd("GET steady"), crate::support::bulk(i.to_string()));
            }
        }
    }
    until("the connections are gone", || {
        let clients = steady.cmd("CLIENT LIST").text().lines().count();
        clients <= 2
    });
}

/// Maximum number of bytes that an endless node sends: without a limit the router would store all of them.
const ENDLESS: usize = 400 << 20;

/// A node that replies until it receives a command of this name. Then it sends `piece` after `head` endlessly, or only
/// `head` and closes.
struct EndlessNode {
    address: SocketAddr,
    /// Number of connections that the router has closed, or on which [`ENDLESS`] bytes were sent.
    over: Arc<AtomicUsize>,
}

impl EndlessNode {
    fn start(trigger: &'static str, head: &'static str, piece: &'static str) -> EndlessNode {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address");
        let over = Arc::new(AtomicUsize::new(0));
        let count = over.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let count = count.clone();
                std::thread::spawn(move || EndlessNode::serve(stream, trigger, head, &piece.repeat(20_000), &count));
            }
        });
        EndlessNode { address, over }
    }

    fn serve(mut stream: TcpStream, trigger: &str, head: &str, piece: &str, over: &AtomicUsize) {
        let (mut buffer, mut framer) = (Vec::new(), Framer::default());
        loop {
            while let Some(len) = framer.end(&buffer) {
                let command: Vec<u8> = buffer.drain(..len).collect();
                let command = parse(&command);
                let name = command.items()[0].text().to_ascii_uppercase();
                if name == trigger {
                    let mut sent = 0;
                    let _ = stream.write_all(head.as_bytes());
                    while !piece.is_empty() && sent < ENDLESS && stream.write_all(piece.as_bytes()).is_ok() {
                        sent += piece.len();
                    }
                    over.fetch_add(1, Ordering::SeqCst);
                    return;
                }
                if stream.write_all(usual_answer(&command, "7.0.15").as_bytes()).is_err() {
                    return;
                }
            }
            let mut piece = [0; 4096];
            match stream.read(&mut piece) {
                Ok(0) | Err(_) => return,
                Ok(count) => buffer.extend_from_slice(&piece[..count]),
            }
        }
    }
}

/// Replies with the node properties that the router needs, and OK to all other commands.
fn usual_answer(command: &Value, version: &str) -> String {
    let words = command.items();
    let info = format!("run_id:abc\r\nredis_version:{version}\r\n");
    match words[0].text().to_ascii_uppercase().as_str() {
        "HELLO" => "-NOPROTO unsupported protocol version\r\n".to_owned(),
        "INFO" => format!("${}\r\n{info}\r\n", info.len()),
        "CLIENT" if words[1].text() == "ID" => ":7\r\n".to_owned(),
        "CONFIG" => "*2\r\n$4\r\nsave\r\n$0\r\n\r\n".to_owned(),
        "EXEC" | "COMMAND" => "*0\r\n".to_owned(),
        "ACL" => "-NOPERM it keeps no marks\r\n".to_owned(),
        _ => "+OK\r\n".to_owned(),
    }
}

/// A node with escape sequences in its version, commands that claim to need no login and are named like a line of
/// CLIENT LIST, and redirections of clients.
fn lie(mut stream: TcpStream, number: usize) {
    let (mut buffer, mut framer) = (Vec::new(), Framer::default());
    loop {
        while let Some(len) = framer.end(&buffer) {
            let command: Vec<u8> = buffer.drain(..len).collect();
            let command = parse(&command);
            let learnt = |name: &str| {
                format!("*6\r\n${}\r\n{name}\r\n:2\r\n*2\r\n+readonly\r\n+no_auth\r\n:1\r\n:1\r\n:1\r\n", name.len())
            };
            let answer = match command.items()[0].text().to_ascii_uppercase().as_str() {
                "COMMAND" => format!("*2\r\n{}{}", learnt("open.get"), learnt("get\nid=9")),
                "DBSIZE" => format!(":{}\r\n", i64::MAX),
                "GET" => "-MOVED 866 192.0.2.1:6379\r\n".to_owned(),
                "STRLEN" => "-ASK 866 192.0.2.1:6379\r\n".to_owned(),
                _ => usual_answer(&command, "7.0.15\u{1b}[2J\rFAKE LINE")
                    .replace("run_id:abc", &format!("run_id:ab{number}")),
            };
            if stream.write_all(answer.as_bytes()).is_err() {
                return;
            }
        }
        let mut piece = [0; 4096];
        match stream.read(&mut piece) {
            Ok(0) | Err(_) => return,
            Ok(count) => buffer.extend_from_slice(&piece[..count]),
        }
    }
}

#[test]
fn a_node_with_false_reports_misleads_no_client() {
    if crate::support::direct() {
        return;
    }
    let nodes: [SocketAddr; 3] = std::array::from_fn(|number| {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address");
        std::thread::spawn(move || {
            listener.incoming().flatten().for_each(|stream| drop(std::thread::spawn(move || lie(stream, number))))
        });
        address
    });
    let config = "[clients]\npassword = \"secret\"\n".to_owned();
    let options = RouterOptions {
        nodes_may_be_down: true,
        config,
        password: Some("secret".to_owned()),
        ..RouterOptions::default()
    };
    let router = Router::start(&nodes, &options);
    let mut client = Client::connect(router.address());
    assert_eq!(client.cmd("AUTH secret"), ok());
    until("the router has learnt the node's commands", || client.cmd("OPEN.GET k") == ok());
    let stranger = Client::connect(router.address()).cmd("OPEN.GET k");
    assert!(stranger.expect_error().starts_with("NOAUTH"), "{stranger:?}");
    client.send(&["get\nid=9", "k"]);
    assert!(client.reply().expect_error().starts_with("ERR unknown command"));
    until("every node reports its number of keys", || client.cmd("DBSIZE") == int(i64::MAX));
    // With this many keys at each node, no worker ends.
    client.cmd("RANDOMKEY");
    for command in ["GET k", "STRLEN k"] {
        let reply = client.cmd(command);
        assert!(
            reply.expect_error().starts_with("ERR 127.0.0.1:") && !reply.expect_error().contains("192.0.2.1"),
            "{reply:?}"
        );
    }
    assert!(!router.process().log().contains("a bug in Switchyard"));
    let shown = router.process().log() + &client.cmd("INFO switchyard").text();
    assert!(shown.contains("redis 7.0.15") && !shown.contains('\u{1b}') && !shown.contains("\rFAKE"), "{shown:?}");
}

/// In the handshake, the list of commands, messages, or a part of a gather: no endless reply of a node takes unbounded
/// memory.
#[test]
fn an_endless_reply_takes_no_unbounded_memory() {
    if crate::support::direct() {
        return;
    }
    for (trigger, ask) in
        [("CLIENT", ""), ("INFO", ""), ("COMMAND", ""), ("SUBSCRIBE", "SUBSCRIBE c"), ("KEYS", "KEYS *")]
    {
        for (head, piece) in [("$100000000000\r\n", "xxx"), ("*1000000000\r\n", ":1\r\n"), ("+", "x")] {
            let node = EndlessNode::start(trigger, head, piece);
            let config = "memory-max = \"96mb\"\n".to_owned();
            let options = RouterOptions { nodes_may_be_down: true, config, ..RouterOptions::default() };
            let router = Router::start(&[node.address], &options);
            let mut client = Client::connect(router.address());
            if !ask.is_empty() {
                // The command is refused until the node is up.
                until("the node serves", || client.cmd("GET k") == ok());
                client.post(ask);
            }
            // A node that sends slowly on a busy machine needs time to exceed the limit.
            until_within(Duration::from_secs(120), "the node is given up", || node.over.load(Ordering::SeqCst) > 0);
            let peak = router.process().memory_kib("VmHWM");
            assert!(peak < (2 * 96 + 40) << 10, "{trigger} {head:?}: the router took {peak} KiB");
            assert_eq!(Client::connect(router.address()).cmd("PING"), simple("PONG"), "{trigger} {head:?}");
        }
    }
}

/// The router reconnects, and surplus replies answer no command on the new connection.
#[test]
fn a_node_with_surplus_replies_is_reconnected() {
    if crate::support::direct() {
        return;
    }
    let node = EndlessNode::start("GET", "+OK\r\n+more\r\n+and more\r\n$5\r\nhal", "");
    let options = RouterOptions { nodes_may_be_down: true, ..RouterOptions::default() };
    let router = Router::start(&[node.address], &options);
    let mut client = Client::connect(router.address());
    until("the node serves", || client.cmd("SET k v") == ok());
    for round in 0..10 {
        assert_eq!(client.cmd("GET k"), ok(), "round {round}");
    }
}
