//! Allocates free ports that no outgoing connection can use by chance. Included by the tests of several crates, and part
//! of none.
//!
//! Binding port 0 yields ephemeral ports. After a node is killed, an outgoing connection may use its ephemeral port.
//! Worse, a router that keeps connecting to a dead ephemeral port may connect to itself, if the kernel picks that port
//! as the source. So ports come from below the ephemeral range, and are checked by binding.
//!
//! A check is not enough with several test processes: if another process takes the port of a node that is slow to
//! start, the test uses the other node by mistake. So a process allocates only from blocks that it has claimed. A claim
//! is a socket with an abstract name, which disappears with the process.

use std::net::{Ipv4Addr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::Mutex;

const FIRST: u32 = 11_000;
/// Linux's ephemeral range begins at 32768 by default.
const END: u32 = 32_000;
/// Ports per block. A run of all tests needs about ten blocks.
const BLOCK: u32 = 200;

/// Blocks claimed by this process, and the number of allocated ports.
struct Claimed {
    claims: Vec<UnixListener>,
    firsts: Vec<u32>,
    given: u32,
}

static CLAIMED: Mutex<Claimed> = Mutex::new(Claimed { claims: Vec::new(), firsts: Vec::new(), given: 0 });

impl Claimed {
    /// Claims one more block. Returns false if other processes have claimed all.
    fn grow(&mut self) -> bool {
        for first in (FIRST..END).step_by(BLOCK as usize) {
            let name = SocketAddr::from_abstract_name(format!("switchyard-test-ports-{first}")).expect("a name");
            if let Ok(claim) = UnixListener::bind_addr(&name) {
                self.claims.push(claim);
                self.firsts.push(first);
                return true;
            }
        }
        false
    }

    fn next(&mut self) -> u16 {
        let given = self.given;
        self.given += 1;
        if given / BLOCK == self.firsts.len() as u32 && !self.grow() {
            // All blocks are claimed: reuse our first block, whose ports are no longer in use.
            assert!(!self.firsts.is_empty(), "other test processes have all ports between {FIRST} and {END}");
            self.given = 1;
            return self.firsts[0] as u16;
        }
        (self.firsts[(given / BLOCK) as usize] + given % BLOCK) as u16
    }
}

/// Returns a port on 127.0.0.1 that is free now, and that no test process will allocate soon.
pub(crate) fn free() -> u16 {
    for _ in FIRST..END {
        let port = CLAIMED.lock().unwrap_or_else(|e| e.into_inner()).next();
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
    panic!("no free port between {FIRST} and {END}");
}
