//! Compares slots of many unusual keys with a real server's `CLUSTER KEYSLOT`.

#[path = "../../../tests/ports.rs"]
mod ports;

use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use proptest::prelude::{any, prop};
use proptest::prop_oneof;
use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::TestRunner;
use switchyard_policy::topology::crc16_slot;

/// A `redis-server` in cluster mode, killed when dropped.
struct Server {
    process: Child,
    port: u16,
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Starts a server. `None` if another process took its port in the meantime.
fn start(directory: &Path) -> Option<Server> {
    let (port, bus) = (ports::free(), ports::free());
    let process = Command::new("redis-server")
        .args(["--cluster-enabled", "yes", "--save", "", "--bind", "127.0.0.1"])
        .args(["--port", &port.to_string(), "--cluster-port", &bus.to_string()])
        .arg("--dir")
        .arg(directory)
        .stdout(Stdio::null())
        .spawn()
        .expect("redis-server must be installed for this test (Debian: apt install redis-server)");
    let mut server = Server { process, port };
    for _ in 0..500 {
        if TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return Some(server);
        }
        if server.process.try_wait().expect("the state of the process").is_some() {
            return None;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    panic!("redis-server did not listen on port {port}");
}

#[test]
fn slots_agree_with_cluster_keyslot() {
    let directory = tempfile::tempdir().expect("a directory");
    let server = (0..5).find_map(|_| start(directory.path())).expect("redis-server starts");
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, server.port)).expect("connected");
    stream.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
    let mut replies = BufReader::new(stream.try_clone().expect("a second handle"));

    let odd = prop::sample::select(b"{{{}}}}ab\0\r\n\xff".to_vec());
    let byte = prop_oneof![odd, any::<u8>()];
    let keys = prop::collection::vec(prop::collection::vec(byte, 0..60), 20_000);
    let mut keys = keys.new_tree(&mut TestRunner::default()).expect("keys").current();
    keys.extend([b"".to_vec(), b"{".to_vec(), b"}".to_vec(), b"{}".to_vec(), vec![b'{'; 100_000]]);

    for batch in keys.chunks(500) {
        let mut request = Vec::new();
        for key in batch {
            write!(request, "*3\r\n$7\r\nCLUSTER\r\n$7\r\nKEYSLOT\r\n${}\r\n", key.len()).unwrap();
            request.extend_from_slice(key);
            request.extend_from_slice(b"\r\n");
        }
        stream.write_all(&request).expect("sent");
        for key in batch {
            let mut line = String::new();
            replies.read_line(&mut line).expect("a reply");
            let expected = format!(":{}\r\n", crc16_slot(key).number());
            assert_eq!(line, expected, "the slot of \"{}\"", key.escape_ascii());
        }
    }
}
