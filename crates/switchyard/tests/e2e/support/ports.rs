//! Ports that are free now and that no outgoing connection can take by chance.
//!
//! "Bind port 0" gives ports of the ephemeral range. A node that is killed and comes back on such a port may find it used by somebody's
//! outgoing connection; worse, a router that keeps connecting to a dead port of that range may by chance connect to itself (the kernel
//! picks the very same source port). So ports come from below the ephemeral range, and are tried by binding.

use std::net::{Ipv4Addr, TcpListener};
use std::sync::atomic::{AtomicU32, Ordering};

const FIRST: u32 = 11_000;
/// Linux's ephemeral range begins at 32768 by default.
const COUNT: u32 = 32_000 - FIRST;

/// A port on 127.0.0.1 that was free a moment ago, and that this process will not hand out again soon.
pub(crate) fn free() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    // Test processes that run at the same time start at different places.
    let offset = std::process::id().wrapping_mul(7919);
    for _ in 0..COUNT {
        let step = NEXT.fetch_add(1, Ordering::Relaxed);
        let port = (FIRST + offset.wrapping_add(step) % COUNT) as u16;
        if TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok() {
            return port;
        }
    }
    panic!("no free port between {FIRST} and {}", FIRST + COUNT);
}
