//! Many sends in one system call, by io_uring.
//!
//! A turn of a worker ends with one write to each client with pending replies. At pipeline 1 these writes are most of
//! the turn, and each wakes its reader, which may preempt the worker: it then answers few clients, the next turn finds
//! few requests, and every batch is small. Submitted to the kernel together, the writes of a turn cannot be interrupted
//! by the readers that they wake.
//!
//! Only sends, and only within the call: the ring is always empty afterwards. So the ring has no state to keep
//! consistent with the connections, buffers are only borrowed, and without io_uring (often forbidden in containers)
//! plain sends are equivalent.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::Duration;

use io_uring::{IoUring, opcode, types};
use rustix::io::Errno;
use rustix::net::SendFlags;

/// Sends per system call. More need several calls.
const ENTRIES: usize = 256;

/// Outcome of a send with an unknown result: its bytes may have been sent.
pub(crate) const UNKNOWN: Errno = Errno::CANCELED;

/// A ring for non-blocking sends. `T` identifies the sends of a call.
pub(crate) struct SendBatch<T> {
    ring: IoUring,
    tags: Vec<T>,
    /// A call did not end, or the kernel refused one: the queue may have entries with dangling buffers, so the ring
    /// must not be submitted again.
    broken: bool,
}

impl<T> std::fmt::Debug for SendBatch<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SendBatch").finish_non_exhaustive()
    }
}

impl<T: Copy> SendBatch<T> {
    /// Creates a ring for the calling thread, and tests it with `tag`. Fails if the kernel is too old or forbids it.
    pub(crate) fn new(tag: T) -> io::Result<Self> {
        // Sends complete during submission, so the ring never needs to interrupt this thread.
        let ring = IoUring::builder().setup_single_issuer().setup_coop_taskrun().build(ENTRIES as u32)?;
        let mut batch = Self { ring, tags: Vec::with_capacity(ENTRIES), broken: false };
        let (ours, theirs) = std::os::unix::net::UnixStream::pair()?;
        let mut outcome = None;
        batch.send([(tag, ours.as_fd(), &b"?"[..])].into_iter(), |_, sent| outcome = Some(sent))?;
        let mut echo = [0; 2];
        match (outcome, rustix::net::recv(&theirs, &mut echo[..], rustix::net::RecvFlags::DONTWAIT)) {
            (Some(Ok(1)), Ok((_, 1))) if echo[0] == b'?' => Ok(batch),
            _ => Err(io::Error::other("a send by io_uring did not arrive")),
        }
    }

    /// Sends each of `sends` once, without blocking, and calls `done` with its tag and outcome. After an error the ring
    /// is unusable, and sends without a call of `done` were not sent.
    pub(crate) fn send<'a>(
        &mut self,
        mut sends: impl Iterator<Item = (T, BorrowedFd<'a>, &'a [u8])>,
        mut done: impl FnMut(T, Result<usize, Errno>),
    ) -> io::Result<()> {
        let flags = (SendFlags::DONTWAIT | SendFlags::NOSIGNAL).bits() as i32;
        loop {
            if std::mem::replace(&mut self.broken, true) {
                return Err(io::Error::other("an earlier batch of sends did not end"));
            }
            self.tags.clear();
            {
                let mut queue = self.ring.submission();
                for (tag, fd, bytes) in sends.by_ref().take(ENTRIES) {
                    let len = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
                    let send = opcode::Send::new(types::Fd(fd.as_raw_fd()), bytes.as_ptr(), len).flags(flags);
                    let entry = send.build().user_data(self.tags.len() as u64);
                    // SAFETY: descriptor and bytes are borrowed for 'a, which outlives this call. The call ends when
                    // every entry is completed (`submit`). If it unwinds before, `broken` prevents any later submission
                    // of the ring.
                    if unsafe { queue.push(&entry) }.is_err() {
                        unreachable!("the queue is empty between calls and has room for {ENTRIES}");
                    }
                    self.tags.push(tag);
                }
            }
            let refused = if self.tags.is_empty() { None } else { self.submit().err() };
            let mut left = vec![true; if refused.is_some() { self.tags.len() } else { 0 }];
            for completion in self.ring.completion() {
                let (place, result) = (completion.user_data() as usize, completion.result());
                let outcome = usize::try_from(result).map_err(|_| Errno::from_raw_os_error(-result));
                done(self.tags[place], outcome);
                if let Some(left) = left.get_mut(place) {
                    *left = false;
                }
            }
            if let Some(error) = refused {
                // The ring stays broken. Entries still in the queue were not sent.
                let taken = self.tags.len() - self.ring.submission().len();
                for (_, tag) in left.iter().zip(&self.tags).take(taken).filter(|(left, _)| **left) {
                    done(*tag, Err(UNKNOWN));
                }
                return Err(error);
            }
            self.broken = false;
            if self.tags.len() < ENTRIES {
                return Ok(());
            }
        }
    }

    /// Submits the queue and waits for all completions. Does not block: with MSG_DONTWAIT a send completes during
    /// submission.
    fn submit(&mut self) -> io::Result<()> {
        while self.ring.completion().len() < self.tags.len() {
            match self.ring.submit_and_wait(self.tags.len()) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // No memory for a request at the moment.
                Err(error)
                    if matches!(Errno::from_io_error(&error), Some(Errno::AGAIN | Errno::BUSY | Errno::NOMEM)) =>
                {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// `None` if the kernel forbids io_uring. The router then sends without it.
    fn batch() -> Option<SendBatch<usize>> {
        SendBatch::new(0).inspect_err(|error| eprintln!("io_uring is unavailable here: {error}")).ok()
    }

    #[test]
    fn every_send_arrives_once_in_large_batches() {
        let Some(mut batch) = batch() else { return };
        let pairs: Vec<_> = (0..ENTRIES + 45).map(|_| UnixStream::pair().unwrap()).collect();
        let texts: Vec<String> = (0..pairs.len()).map(|n| format!("to {n}")).collect();
        let mut outcomes = Vec::new();
        let sends = pairs.iter().zip(&texts).enumerate().map(|(n, (pair, text))| (n, pair.0.as_fd(), text.as_bytes()));
        batch.send(sends, |n, outcome| outcomes.push((n, outcome))).unwrap();
        outcomes.sort_by_key(|(n, _)| *n);
        for (n, (pair, text)) in pairs.into_iter().zip(&texts).enumerate() {
            assert_eq!(outcomes[n], (n, Ok(text.len())));
            drop(pair.0);
            let (mut theirs, mut got) = (pair.1, String::new());
            theirs.read_to_string(&mut got).unwrap();
            assert_eq!(&got, text);
        }
    }

    #[test]
    fn full_and_closed_sockets_do_not_block_other_sends() {
        let Some(mut batch) = batch() else { return };
        let (full, _unread) = UnixStream::pair().unwrap();
        let (gone, peer) = UnixStream::pair().unwrap();
        let (fine, mut reader) = UnixStream::pair().unwrap();
        drop(peer);
        let big = vec![b'x'; 16 << 20];
        let mut outcomes = [const { None }; 4];
        let sends: [(usize, _, &[u8]); 4] = [
            (0, full.as_fd(), &big),
            (1, full.as_fd(), b"more"),
            (2, gone.as_fd(), b"hello"),
            (3, fine.as_fd(), b"hello"),
        ];
        batch.send(sends.into_iter(), |n, outcome| outcomes[n] = Some(outcome)).unwrap();
        let [first, second, third, fourth] = outcomes.map(Option::unwrap);
        assert!(first.unwrap() < big.len(), "what the socket takes, and no more");
        assert_eq!(second, Err(Errno::AGAIN));
        assert_eq!(third, Err(Errno::PIPE));
        assert_eq!(fourth, Ok(5));
        let mut got = [0; 5];
        reader.read_exact(&mut got).unwrap();
        assert_eq!(&got, b"hello");
    }

    #[test]
    fn a_refused_ring_sends_nothing_and_returns_an_error() {
        let Some(mut batch) = batch() else { return };
        let (ours, theirs) = UnixStream::pair().unwrap();
        theirs.set_nonblocking(true).unwrap();
        // A single-issuer ring is refused to every other thread.
        let refused = std::thread::spawn(move || {
            let mut outcomes = 0;
            let first = batch.send([(0, ours.as_fd(), &b"hello"[..])].into_iter(), |_, _| outcomes += 1);
            let second = batch.send([(0, ours.as_fd(), &b"hello"[..])].into_iter(), |_, _| outcomes += 1);
            (first.is_err(), second.is_err(), outcomes, ours)
        });
        let (first, second, outcomes, _ours) = refused.join().unwrap();
        assert!(first && second && outcomes == 0, "{first} {second} {outcomes}");
        assert_eq!((&theirs).read(&mut [0; 8]).unwrap_err().kind(), io::ErrorKind::WouldBlock);
    }
}
