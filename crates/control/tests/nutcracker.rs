//! Compares the placement of many unusual keys with a real `nutcracker`, using servers that reply with their number.

#[path = "../../../tests/ports.rs"]
mod ports;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use proptest::prelude::{any, prop};
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use switchyard_policy::topology::{Continuum, Distribution, Hash, Scheme, Server};

/// `make twemproxy-placement` sets a higher number.
const KEYS: &str = "SWITCHYARD_PLACEMENT_KEYS";

/// Starts a server that answers every command with its number. Returns its port.
fn numbered_server(number: usize) -> u16 {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a free port");
    let port = listener.local_addr().expect("an address").port();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let stream = stream.expect("a connection");
            std::thread::spawn(move || answer_all(stream, number));
        }
    });
    port
}

/// Answers until nutcracker closes the connection.
fn answer_all(stream: TcpStream, number: usize) -> Option<()> {
    let mut answers = stream.try_clone().ok()?;
    let mut commands = BufReader::new(stream);
    loop {
        let count = header(&mut commands)?;
        for _ in 0..count {
            let mut word = vec![0; header(&mut commands)? + 2];
            commands.read_exact(&mut word).ok()?;
        }
        write!(answers, ":{number}\r\n").ok()?;
    }
}

/// Parses the number of a line such as `*2` or `$3`.
fn header(commands: &mut impl BufRead) -> Option<usize> {
    let mut line = String::new();
    commands.read_line(&mut line).ok()?;
    line.get(1..)?.trim().parse().ok()
}

/// A `nutcracker`, killed when dropped.
struct Nutcracker(Child);

impl Drop for Nutcracker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A pool of the file, and the continuum that must agree with it.
struct Pool {
    port: u16,
    scheme: Scheme,
    servers: Vec<(String, u32)>,
}

/// Keys of all kinds that nutcracker accepts: text, bytes with the sign bit, several forms of tags, long keys.
fn keys(count: usize) -> Vec<Vec<u8>> {
    let bytes = prop::collection::vec(any::<u8>(), 1..60);
    let text = "[a-z]{1,12}:[0-9]{1,9}".prop_map(String::into_bytes);
    let tagged = "[a-z<{]{0,3}[{<][a-z]{0,5}[}>][a-z0-9}>]{0,9}".prop_map(String::into_bytes);
    let long = prop::collection::vec(any::<u8>(), 60..600);
    let one = proptest::prop_oneof![4 => bytes, 4 => text, 2 => tagged, 1 => long];
    prop::collection::vec(one, count).new_tree(&mut TestRunner::default()).expect("keys").current()
}

#[test]
fn keys_are_placed_on_the_same_server_as_by_nutcracker() {
    let count = std::env::var(KEYS).ok().map_or(1000, |count| count.parse().expect("a number of keys"));
    let ports: Vec<u16> = (0..7).map(numbered_server).collect();
    let plain: Vec<(String, u32)> = ports.iter().map(|port| (format!("127.0.0.1:{port}"), 1)).collect();
    // Lengths differ, because nutcracker sorts by length first.
    let named: Vec<(String, u32)> = ["beta", "a", "gamma-9", "zz", "alpha", "delta", "c"]
        .into_iter()
        .zip([3, 1, 7, 2, 2, 1, 10])
        .map(|(n, w)| (n.to_owned(), w))
        .collect();
    let mut pools = Vec::new();
    for hash in Hash::ALL {
        for distribution in [Distribution::Ketama, Distribution::Modula] {
            let scheme = |tag| Scheme { hash, tag, distribution };
            pools.push(Pool { port: ports::free(), scheme: scheme(None), servers: plain.clone() });
            pools.push(Pool { port: ports::free(), scheme: scheme(Some(*b"{}")), servers: named.clone() });
            pools.push(Pool { port: ports::free(), scheme: scheme(Some(*b"<>")), servers: named[..3].to_vec() });
        }
    }
    // A number of servers that single precision miscounts: 25 of 156 points each.
    let crowd: Vec<(String, u32)> = (0..25).map(|n| (format!("crowd{n}"), 1)).collect();
    pools.push(Pool { port: ports::free(), scheme: Scheme::default(), servers: crowd });
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("nutcracker.yml");
    std::fs::write(&file, pools.iter().enumerate().map(|(i, pool)| text_of(i, pool, &ports)).collect::<String>())
        .expect("written");
    let process = Command::new("nutcracker")
        .arg("-c")
        .arg(&file)
        .args(["-s", &ports::free().to_string(), "-a", "127.0.0.1", "-v", "0"])
        .stderr(Stdio::null())
        .spawn()
        .expect("nutcracker must be installed for this test (Debian: apt install nutcracker)");
    let _nutcracker = Nutcracker(process);

    let keys = keys(count);
    for pool in &pools {
        let servers = pool.servers.iter().map(|(name, weight)| Server { name: name.clone(), weight: *weight });
        let continuum = Continuum::new(pool.scheme, servers).expect("a continuum");
        let mut used = 0;
        for (key, number) in keys.iter().zip(owners(pool.port, &keys)) {
            let home = continuum.home(continuum.slot_of(key)).expect("a slot in use");
            // The 25 servers share seven processes.
            let expected =
                pool.servers.iter().position(|(name, _)| *name == home.name).expect("one of them") % ports.len();
            assert_eq!(number, expected, "{}, {} servers: {}", pool.scheme, pool.servers.len(), key.escape_ascii());
            used |= 1 << number;
        }
        // Fifteen bits cover only a corner of the continuum, which one server owns.
        let is_corner = pool.scheme.hash == Hash::Crc32 && pool.scheme.distribution == Distribution::Ketama;
        assert!(is_corner || u32::count_ones(used) > 2, "{} uses several servers", pool.scheme);
    }
}

fn text_of(number: usize, pool: &Pool, ports: &[u16]) -> String {
    let Scheme { hash, tag, distribution } = pool.scheme;
    let mut text = format!(
        "pool{number}:\n  listen: 127.0.0.1:{}\n  hash: {}\n  distribution: {}\n  redis: true\n",
        pool.port,
        hash.name(),
        distribution.name()
    );
    if let Some(tag) = tag {
        text += &format!("  hash_tag: \"{}\"\n", String::from_utf8_lossy(&tag));
    }
    text += "  servers:\n";
    for (at, (name, weight)) in pool.servers.iter().enumerate() {
        let address = format!("127.0.0.1:{}", ports[at % ports.len()]);
        let name = if *name == address { String::new() } else { format!(" {name}") };
        text += &format!("   - {address}:{weight}{name}\n");
    }
    text
}

/// Returns the number of the server that answers for each key.
fn owners(port: u16, keys: &[Vec<u8>]) -> Vec<usize> {
    let connect = || TcpStream::connect((Ipv4Addr::LOCALHOST, port)).ok();
    let connected =
        (0..500).find_map(|_| connect().or_else(|| (std::thread::sleep(Duration::from_millis(20)), None).1));
    let mut stream = connected.expect("nutcracker listens");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
    let mut answers = BufReader::new(stream.try_clone().expect("a second handle"));
    let mut numbers = Vec::new();
    for some in keys.chunks(100) {
        let mut commands = Vec::new();
        for key in some {
            commands.extend_from_slice(format!("*2\r\n$3\r\nGET\r\n${}\r\n", key.len()).as_bytes());
            commands.extend_from_slice(key);
            commands.extend_from_slice(b"\r\n");
        }
        stream.write_all(&commands).expect("written");
        for _ in some {
            let mut line = String::new();
            answers.read_line(&mut line).expect("an answer");
            numbers.push(
                line.trim()
                    .strip_prefix(':')
                    .and_then(|number| number.parse().ok())
                    .unwrap_or_else(|| panic!("it says {line:?}")),
            );
        }
    }
    numbers
}
