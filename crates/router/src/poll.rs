//! epoll, and event tokens that identify a listener, client or link.
//!
//! Edge-triggered: each connection is registered once. Code that stops reading early must record that more may be
//! readable (`readable`). Pausing a connection therefore costs no system call.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use crate::slab::Handle;

/// Source of an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Token {
    Wake,
    /// Time to check timeouts.
    Tick,
    Listener(u32),
    Client(Handle),
    Link(Handle),
}

impl Token {
    fn pack(self) -> u64 {
        let (tag, handle) = match self {
            Token::Wake => (0, Handle { index: 0, generation: 0 }),
            Token::Tick => (0, Handle { index: 1, generation: 0 }),
            Token::Listener(index) => (1, Handle { index, generation: 0 }),
            Token::Client(handle) => (2, handle),
            Token::Link(handle) => (3, handle),
        };
        tag << 62 | u64::from(handle.generation) << 32 | u64::from(handle.index)
    }

    fn unpack(bits: u64) -> Self {
        let handle = Handle { index: bits as u32, generation: (bits >> 32) as u32 & 0x3fff_ffff };
        match bits >> 62 {
            0 if handle.index == 1 => Token::Tick,
            0 => Token::Wake,
            1 => Token::Listener(handle.index),
            2 => Token::Client(handle),
            _ => Token::Link(handle),
        }
    }
}

/// Readiness of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ready {
    pub(crate) token: Token,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
    /// The peer will send nothing more: read to the end, because no further event follows.
    pub(crate) hangup: bool,
}

#[derive(Debug)]
pub(crate) struct Poll {
    epoll: OwnedFd,
    /// Fires at fixed intervals, so that no wait needs to set and clear its own timeout. (Measured: no gain on an idle
    /// machine.)
    timer: OwnedFd,
    interval: Duration,
}

/// Buffer for the events of one turn.
pub(crate) type Events = Vec<epoll::Event>;

/// Maximum events per turn. More remain in the kernel for the next turn.
const EVENTS_MAX: usize = 1024;

impl Poll {
    pub(crate) fn new() -> io::Result<Self> {
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = timerfd_create(TimerfdClockId::Monotonic, flags)?;
        let poll = Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?, timer, interval: Duration::ZERO };
        poll.add(&poll.timer, Token::Tick)?;
        Ok(poll)
    }

    /// Sets the tick interval.
    #[inline]
    pub(crate) fn tick_every(&mut self, interval: Duration) -> io::Result<()> {
        if interval == self.interval {
            return Ok(());
        }
        let spec = timespec(interval);
        timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &Itimerspec { it_interval: spec, it_value: spec })?;
        self.interval = interval;
        Ok(())
    }

    /// Consumes a tick, so that the next one causes an event.
    pub(crate) fn consume_tick(&self) {
        // Fails if there is no tick, which is harmless.
        let _ = rustix::io::read(&self.timer, &mut [0u8; 8]);
    }

    /// Registers a connection for reading and writing.
    pub(crate) fn add(&self, fd: impl AsFd, token: Token) -> io::Result<()> {
        let mut flags = epoll::EventFlags::IN | epoll::EventFlags::RDHUP | epoll::EventFlags::ET;
        if matches!(token, Token::Client(_) | Token::Link(_)) {
            flags |= epoll::EventFlags::OUT;
        } else {
            // Listeners and the mailbox are level-triggered, so that unhandled events are reported again in the next
            // turn.
            flags.remove(epoll::EventFlags::ET);
        }
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token.pack()), flags)?)
    }

    /// Registers a listening socket shared with other workers. The kernel wakes one of them.
    pub(crate) fn add_shared(&self, fd: impl AsFd, token: Token) -> io::Result<()> {
        let flags = epoll::EventFlags::IN | epoll::EventFlags::EXCLUSIVE;
        Ok(epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token.pack()), flags)?)
    }

    pub(crate) fn remove(&self, fd: impl AsFd) {
        // Fails only for an unregistered descriptor, which is harmless.
        let _ = epoll::delete(&self.epoll, fd);
    }

    /// Waits for events. `None`: without a timeout.
    pub(crate) fn wait(
        &self,
        timeout: Option<Duration>,
        events: &mut Events,
        ready: &mut Vec<Ready>,
    ) -> io::Result<()> {
        ready.clear();
        events.clear();
        events.reserve(EVENTS_MAX);
        let timeout = timeout.map(timespec);
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

fn timespec(duration: Duration) -> Timespec {
    Timespec { tv_sec: duration.as_secs() as i64, tv_nsec: i64::from(duration.subsec_nanos()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_roundtrip_through_epoll_data() {
        for token in [
            Token::Wake,
            Token::Tick,
            Token::Listener(3),
            Token::Client(Handle { index: u32::MAX, generation: (1 << 29) - 1 }),
            Token::Link(Handle { index: 7, generation: 9 }),
        ] {
            assert_eq!(Token::unpack(token.pack()), token);
        }
    }
}
