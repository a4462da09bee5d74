//! Hands the listening sockets of a router over to the router of another process.
//!
//! The successor starts with copies of the sockets, and does not accept yet. Only when it is ready, it opens, and then
//! the old router closes its copies. Both accept for a moment: each serves the clients that it has accepted. No
//! connection waits in a socket without an owner, so none is refused or reset.

use std::io;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

use crate::Router;
use crate::listener::ListeningSockets;
use crate::shared::Message;

/// Maximum time until all workers have changed their listeners. Longer only if a worker hangs.
const TIMEOUT: Duration = Duration::from_secs(5);

impl Router {
    /// Accepts clients, after [`Router::start_closed`]. The other process may still accept, too, and owns the files of
    /// Unix sockets until [`Router::own_socket_files`].
    ///
    /// # Errors
    /// If the system refuses a descriptor or the mode of a Unix socket, or a worker hangs.
    pub fn open(&self) -> io::Result<()> {
        self.shared.listening.open();
        self.renew_listeners()?;
        // The last step, so that a failure does not change the modes for the other process.
        self.shared.listening.set_modes()
    }

    /// Removes the files of inherited Unix sockets at the end of this router, because the other process has left them.
    pub fn own_socket_files(&self) {
        self.shared.listening.own_files();
    }

    /// Returns copies of the listening sockets, for a process that replaces this one. Close them before
    /// [`Router::leave_listeners`].
    ///
    /// # Errors
    /// If the system refuses a descriptor.
    pub fn listening_sockets(&self) -> io::Result<Vec<ListeningSockets>> {
        self.shared.listening.copies()
    }

    /// Closes the listening sockets, from which another process accepts already. Clients stay, and are served as before. On
    /// return no client is accepted any more.
    ///
    /// # Errors
    /// If a worker hangs.
    pub fn leave_listeners(&self) -> io::Result<()> {
        self.shared.listening.leave();
        self.renew_listeners()
    }

    /// Makes all workers accept from the present listening sockets only.
    fn renew_listeners(&self) -> io::Result<()> {
        let (done, results) = mpsc::channel();
        for mailbox in self.shared.mailboxes.iter() {
            mailbox.send(Message::Listeners { done: done.clone() });
        }
        drop(done);
        let end = Instant::now() + TIMEOUT;
        loop {
            match results.recv_timeout(end.saturating_duration_since(Instant::now())) {
                Ok(result) => result?,
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Err(RecvTimeoutError::Timeout) => return Err(io::ErrorKind::TimedOut.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::net::TcpStream;
    use std::sync::Arc;

    use super::*;
    use crate::tests::{ping, settings};
    use crate::{Drained, Settings, shared};

    #[test]
    fn successor_accepts_while_the_old_router_serves_its_clients() {
        let (settings, topology) = settings();
        let old = Router::start(settings.clone(), Arc::clone(&topology)).expect("starts");
        let mut client = ping(&old);
        let sockets = old.listening_sockets().expect("copies");
        let two_workers = Settings { workers: 2, ..settings };
        let new = Router::start_closed(two_workers, topology, sockets).expect("starts");
        assert_eq!(new.addresses(), old.addresses());
        let _accepted_by_old = ping(&old);
        assert_eq!((old.status().clients, new.status().clients), (2, 0), "the new one is closed");
        new.open().expect("opens");
        old.leave_listeners().expect("leaves");
        let others: Vec<TcpStream> = (0..10).map(|_| ping(&new)).collect();
        assert_eq!((old.status().clients, new.status().clients), (2, 10));
        old.shared.mailboxes[0].send(shared::Message::Panic);
        assert_eq!(client.read(&mut [0; 1]).expect("closed, not timed out"), 0);
        // The replacement of the worker must not accept again.
        let more: Vec<TcpStream> = (0..10).map(|_| ping(&new)).collect();
        let end = Instant::now() + Duration::from_secs(10);
        while old.status().clients > 0 {
            assert!(Instant::now() < end, "the old router still has clients");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(new.status().clients, 20);
        drop((others, more));
        assert_eq!(old.drain(Duration::from_secs(5)), Drained { cut: 0 });
        let _after_the_end = ping(&new);
    }
}
