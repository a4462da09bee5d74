//! Ports that are free now and that no outgoing connection can take by chance.
//!
//! "Bind port 0" gives ports of the ephemeral range. A node that is killed and comes back on such a port may find it
//! used by somebody's outgoing connection; worse, a router that keeps connecting to a dead port of that range may by
//! chance connect to itself (the kernel picks the very same source port). So ports come from below the ephemeral range,
//! and are tried by binding.
//!
//! That a port is free is not enough where several test processes run at once: a node that is slow to start finds that
//! the other process has taken its port, and the test takes the other's node for its own, because somebody answers. So
//! a process gives out ports of blocks that it has claimed. A claim is a socket of an abstract name, which ends with
//! the process, however that ends.

use std::net::{Ipv4Addr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::sync::Mutex;

const FIRST: u32 = 11_000;
/// Linux's ephemeral range begins at 32768 by default.
const END: u32 = 32_000;
/// A run of all tests takes about ten blocks.
const BLOCK: u32 = 200;

/// The blocks that this process has claimed, and how many ports it has given out.
struct Claimed {
    claims: Vec<UnixListener>,
    firsts: Vec<u32>,
    given: u32,
}

static CLAIMED: Mutex<Claimed> = Mutex::new(Claimed { claims: Vec::new(), firsts: Vec::new(), given: 0 });

impl Claimed {
    /// Claims one more block; false where other processes have them all.
    fn grow(&mut self) -> bool {
        for first in (FIRST..END).step_by(BLOCK as usize) {
            let name = SocketAddr::from_abstract_name(format!("switchyard-e2e-ports-{first}")).expect("a name");
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
            // All of them are taken: from the beginning of our own, whose ports are long out of use.
            assert!(!self.firsts.is_empty(), "other test processes have all ports between {FIRST} and {END}");
            self.given = 1;
            return self.firsts[0] as u16;
        }
        (self.firsts[(given / BLOCK) as usize] + given % BLOCK) as u16
    }
}

/// A port on 127.0.0.1 that was free a moment ago, and that neither this process nor another one of these tests will
/// hand out soon.
pub(crate) fn free() -> u16 {
    for _ in FIRST..END {
        let port = CLAIMED.lock().unwrap_or_else(|e| e.into_inner()).next();
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
    panic!("no free port between {FIRST} and {END}");
}
