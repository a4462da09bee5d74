//! epoll, and what an event's token says: which listener, client or link it concerns.
//!
//! Edge-triggered: each connection is registered once, and whoever stops reading early remembers that there is more
//! (`readable`); so pausing a connection costs no system call.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll;
use rustix::time::Timespec;

use crate::slab::Handle;

/// Whom an event concerns.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Token {
    Wake,
    Listener(u32),
    Client(Handle),
    Link(Handle),
}

impl Token {
    fn pack(self) -> u64 {
        let (tag, handle) = match self {
            Token::Wake => (0, Handle { index: 0, generation: 0 }),
            Token::Listener(index) => (1, Handle { index, generation: 0 }),
            Token::Client(handle) => (2, handle),
            Token::Link(handle) => (3, handle),
        };
        tag << 62 | u64::from(handle.generation) << 32 | u64::from(handle.index)
    }

    fn unpack(bits: u64) -> Self {
        let handle = Handle { index: bits as u32, generation: (bits >> 32) as u32 & 0x3fff_ffff };
        match bits >> 62 {
            0 => Token::Wake,
            1 => Token::Listener(handle.index),
            2 => Token::Client(handle),
            _ => Token::Link(handle),
        }
    }
}

/// What happened to a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ready {
    pub(crate) token: Token,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// The other side will send nothing more: read until the end is seen, because no further event tells of it.
    pub(crate) hangup: bool,
}

#[derive(Debug)]
pub(crate) struct Poll {
    epoll: OwnedFd,
}

/// Room for the events of one turn.
pub(crate) type Events = Vec<epoll::Event>;

/// Events taken per turn; more wait in the kernel for the next.
const EVENTS_MAX: usize = 1024;

impl Poll {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)? })
    }

    /// Registers a connection for reading and writing.
    pub(crate) fn add(&self, fd: impl AsFd, token: Token) -> io::Result<()> {
        let mut flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        if matches!(token, Token::Client(_) | Token::Link(_)) {
            flags |= epoll::EventFlags::OUT;
        } else {
            // Listeners and the mailbox are level-triggered: what one turn leaves, the next is told of.
            flags.remove(epoll::EventFlags::ET);
        }
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token.pack()), flags)?)
    }

    /// Registers a listening socket that other workers wait for too: the kernel wakes one of them.
    pub(crate) fn add_shared(&self, fd: impl AsFd, token: Token) -> io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::EXCLUSIVE;
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token.pack()), flags)?)
    }

    pub(crate) fn remove(&self, fd: impl AsFd) {
        // It fails only for a descriptor that is not registered, which is what is wanted.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits for events; `None` waits without end.
    pub(crate) fn wait(&self, timeout: Option<Duration>, events: &mut Events, ready: &mut Vec<Ready>) -> io::Result<()> {
        ready.clear();
        events.clear();
        events.reserve(EVENTS_MAX);
        let timeout = timeout.map(|t| Timespec { tv_sec: t.as_secs() as i64, tv_nsec: i64::from(t.subsec_nanos()) });
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(events), timeout.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        for event in events {
            // The struct is packed: copy before use.
            let (flags, data) = (event.flags, event.data);
            let broken = flags.intersects(epoll::EventFlags::ERR | epoll::EventFlags::HUP);
            ready.push(Ready {
                token: Token::unpack(data.u64()),
                readable: broken || flags.intersects(epoll::EventFlags::IN | epoll::EventFlags::RDHUP),
                writable: broken || flags.contains(epoll::EventFlags::OUT),
                hangup: broken || flags.contains(epoll::EventFlags::RDHUP),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_the_kernel() {
        for token in [
            Token::Wake,
            Token::Listener(3),
            Token::Client(Handle { index: u32::MAX, generation: (1 << 29) - 1 }),
            Token::Link(Handle { index: 7, generation: 9 }),
        ] {
            assert_eq!(Token::unpack(token.pack()), token);
        }
    }
}
