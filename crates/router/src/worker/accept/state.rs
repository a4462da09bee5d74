//! Listeners of a worker.

use std::os::fd::OwnedFd;

use crate::listener::Listener;
use crate::poll::{Poll, Token};
use crate::worker::log_throttle::LogThrottle;

/// The listeners of a worker.
#[derive(Debug)]
pub(in crate::worker) struct Acceptor {
    pub(super) listeners: Vec<Listener>,
    /// Spare descriptor, released briefly to accept and refuse a client when descriptors have run out.
    pub(super) spare: Option<OwnedFd>,
    pub(super) handshake_log: LogThrottle,
}

impl Acceptor {
    /// Starts to watch the listeners.
    pub(in crate::worker) fn open(listeners: Vec<Listener>, poll: &Poll) -> std::io::Result<Self> {
        let mut door = Self { listeners: Vec::new(), spare: spare_descriptor(), handshake_log: LogThrottle::default() };
        door.adopt(listeners, poll)?;
        Ok(door)
    }

    /// Accepts from these listeners, and from no others.
    pub(in crate::worker) fn adopt(&mut self, listeners: Vec<Listener>, poll: &Poll) -> std::io::Result<()> {
        self.close(poll);
        for (number, listener) in listeners.iter().enumerate() {
            let token = Token::Listener(number as u32);
            if listener.is_shared() { poll.add_shared(listener, token)? } else { poll.add(listener, token)? }
        }
        self.listeners = listeners;
        Ok(())
    }

    /// Stops accepting clients.
    pub(in crate::worker) fn close(&mut self, poll: &Poll) {
        for listener in self.listeners.drain(..) {
            poll.remove(&listener);
        }
    }
}

pub(super) fn spare_descriptor() -> Option<OwnedFd> {
    rustix::fs::open("/dev/null", rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC, rustix::fs::Mode::empty())
        .ok()
}
