//! TCP relay between the router and a node that simulates network faults: splits, delays, stalls and cuts.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::{ports, until};

/// Settings that a test may change during connections.
#[derive(Debug)]
struct Mood {
    /// Bytes per write towards the router. 0: unchanged.
    chop: AtomicUsize,
    /// Remaining bytes of replies before every connection is cut. Negative: no limit.
    cut_after: AtomicI64,
    held: Mutex<Held>,
    /// Signals a change of `held`.
    changed: Condvar,
    /// Bytes that trigger a hold of one connection's requests, from there on.
    hold_from: Mutex<Option<Vec<u8>>>,
    /// Close new connections at once.
    refuse: AtomicBool,
    /// Number of accepted connections.
    accepted: AtomicU64,
    /// Bytes of all requests, in the order of arrival over all connections.
    seen: Mutex<Vec<u8>>,
    /// Both sockets of every connection.
    open: Mutex<Vec<TcpStream>>,
    /// Process whose connections transfer nothing in either direction.
    isolated: Mutex<Option<u32>>,
    target: Mutex<SocketAddr>,
}

/// Held traffic.
#[derive(Debug, Default)]
struct Held {
    replies: bool,
    requests: bool,
    /// Requests of the single connection are held.
    one: bool,
    /// The requests of the single connection were forwarded, or the node has closed.
    has_released: bool,
    /// The relay is ending: no thread waits.
    stop: bool,
}

impl Mood {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().expect("held state")
    }

    fn change(&self, change: impl FnOnce(&mut Held)) {
        change(&mut self.held());
        self.changed.notify_all();
    }

    /// Blocks until the relay ends, if the other end of this connection belongs to the isolated process. `is_isolated`
    /// caches the result, which requires a scan of all files of that process.
    fn pass(&self, near: &TcpStream, is_isolated: &mut Option<bool>) {
        let isolated = *self.isolated.lock().expect("a process");
        let Some(pid) = isolated else { return };
        if *is_isolated.get_or_insert_with(|| has_other_end(pid, near)) {
            self.wait_while(|_| true);
        }
    }

    fn wait_while(&self, waits: impl Fn(&Held) -> bool) {
        drop(self.changed.wait_while(self.held(), |held| waits(held) && !held.stop).expect("held state"));
    }
}

/// A running relay.
#[derive(Debug)]
pub(crate) struct Relay {
    address: SocketAddr,
    mood: Arc<Mood>,
}

impl Relay {
    /// Relays from a free port to `target`.
    pub(crate) fn start(target: SocketAddr) -> Relay {
        Relay::start_at((Ipv4Addr::LOCALHOST, ports::free()).into(), target)
    }

    /// Relays from `address`, which must be free, to `target`.
    pub(crate) fn start_at(address: SocketAddr, target: SocketAddr) -> Relay {
        // A process that another test is starting may hold a copy of the socket that probed the port, until its exec.
        let listener = until("the port is free", || TcpListener::bind(address).ok());
        let address = listener.local_addr().expect("an address");
        let mood = Arc::new(Mood {
            chop: AtomicUsize::new(0),
            cut_after: AtomicI64::new(-1),
            held: Mutex::default(),
            changed: Condvar::new(),
            hold_from: Mutex::default(),
            refuse: AtomicBool::new(false),
            accepted: AtomicU64::new(0),
            seen: Mutex::default(),
            open: Mutex::default(),
            isolated: Mutex::default(),
            target: Mutex::new(target),
        });
        let shared = mood.clone();
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                if shared.held().stop {
                    return;
                }
                let Ok(near) = connection else { continue };
                shared.accepted.fetch_add(1, Ordering::SeqCst);
                if shared.refuse.load(Ordering::SeqCst) {
                    continue;
                }
                let target = *shared.target.lock().expect("an address");
                let Ok(far) = TcpStream::connect(target) else {
                    continue;
                };
                let _ = near.set_nodelay(true);
                let _ = far.set_nodelay(true);
                let clone = |s: &TcpStream| s.try_clone().expect("a second handle");
                shared.open.lock().expect("list").extend([clone(&near), clone(&far)]);
                let (a, b, mood) = (clone(&near), clone(&far), shared.clone());
                std::thread::spawn(move || requests(a, b, &mood));
                let mood = shared.clone();
                std::thread::spawn(move || replies(far, near, &mood));
            }
        });
        Relay { address, mood }
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Relays new connections to another server. Open connections stay.
    pub(crate) fn turn_to(&self, target: SocketAddr) {
        *self.mood.target.lock().expect("an address") = target;
    }

    /// Forwards replies to the router in writes of `bytes` each. 0: unchanged.
    pub(crate) fn chop(&self, bytes: usize) {
        self.mood.chop.store(bytes, Ordering::SeqCst);
    }

    /// Cuts every connection after `bytes` more bytes of replies.
    pub(crate) fn cut_after(&self, bytes: i64) {
        self.mood.cut_after.store(bytes, Ordering::SeqCst);
    }

    /// Holds or releases replies.
    pub(crate) fn stall(&self, on: bool) {
        self.mood.change(|held| held.replies = on);
    }

    /// Holds or releases requests, including those of connections that were closed in the meantime. Simulates a network
    /// that drops all packets in one direction for a while, after which the sender's kernel retransmits.
    pub(crate) fn hold(&self, on: bool) {
        self.mood.change(|held| held.requests = on);
    }

    /// Holds the requests of the first connection that contains `needle`, from there on, even after that connection is
    /// closed.
    pub(crate) fn hold_from(&self, needle: &[u8]) {
        *self.mood.hold_from.lock().expect("what to look for") = Some(needle.to_vec());
    }

    /// Whether a connection is held.
    pub(crate) fn holds_one(&self) -> bool {
        self.mood.held().one
    }

    /// Forwards the held requests of that connection, if the node still has the connection.
    pub(crate) fn release(&self) {
        self.mood.change(|held| held.one = false);
        self.mood.wait_while(|held| !held.has_released);
    }

    /// Holds all traffic of one process, on old and new connections, like a network partition. Other processes are not
    /// affected.
    pub(crate) fn isolate(&self, pid: u32) {
        *self.mood.isolated.lock().expect("a process") = Some(pid);
    }

    /// Starts or stops closing new connections at once.
    pub(crate) fn refuse(&self, on: bool) {
        self.mood.refuse.store(on, Ordering::SeqCst);
    }

    /// Cuts every open connection.
    pub(crate) fn cut(&self) {
        for stream in self.mood.open.lock().expect("list").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Number of accepted connections.
    pub(crate) fn accepted(&self) -> u64 {
        self.mood.accepted.load(Ordering::SeqCst)
    }

    /// Number of accepted connections when it no longer grows: after its start, the router reads the nodes' functions
    /// on a separate connection.
    pub(crate) fn settled(&self) -> u64 {
        loop {
            let before = self.accepted();
            std::thread::sleep(Duration::from_secs(1));
            if self.accepted() == before {
                return before;
            }
        }
    }

    /// Number of occurrences of `needle` in forwarded requests.
    pub(crate) fn seen(&self, needle: &[u8]) -> usize {
        let seen = self.mood.seen.lock().expect("requests");
        seen.windows(needle.len()).filter(|w| *w == needle).count()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        self.mood.change(|held| held.stop = true);
        self.cut();
        let _ = TcpStream::connect(self.address);
    }
}

/// Whether a process has the other end of this connection. Compares duplicates of its sockets, rather than inodes in
/// `/proc/net/tcp`: that table has the connections of all tests, and each new connection would read it.
fn has_other_end(pid: u32, near: &TcpStream) -> bool {
    let (Ok(peer), Ok(own)) = (near.peer_addr(), near.local_addr()) else { return false };
    let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { return false };
    let Ok(process) = pidfd_open(pid, PidfdFlags::empty()) else { return false };
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    files
        .filter(|file| std::fs::read_link(file.path()).is_ok_and(|link| link.to_string_lossy().starts_with("socket:")))
        .filter_map(|file| file.file_name().to_str()?.parse().ok())
        // The process may have closed it in the meantime.
        .filter_map(|file| pidfd_getfd(&process, file, PidfdGetfdFlags::empty()).ok().map(TcpStream::from))
        .any(|socket| {
            socket.local_addr().is_ok_and(|address| address == peer)
                && socket.peer_addr().is_ok_and(|address| address == own)
        })
}

fn requests(mut from: TcpStream, mut to: TcpStream, mood: &Mood) {
    let (mut chunk, mut is_isolated) = ([0; 16 * 1024], None);
    while let Ok(n @ 1..) = from.read(&mut chunk) {
        {
            // Bounded, so that a large upload does not fill the memory.
            let mut seen = mood.seen.lock().expect("requests");
            if seen.len() < 4 << 20 {
                seen.extend_from_slice(&chunk[..n]);
            }
        }
        let is_it = mood
            .hold_from
            .lock()
            .expect("what to look for")
            .take_if(|needle| chunk[..n].windows(needle.len()).any(|w| w == needle));
        if is_it.is_some() {
            mood.change(|held| held.one = true);
            mood.wait_while(|held| held.one);
            // Wait until the node has processed this and the end of the connection. It then closes its side.
            let _ = to.write_all(&chunk[..n]);
            let _ = to.shutdown(Shutdown::Write);
            let _ = to.read(&mut [0; 1000]);
            mood.change(|held| held.has_released = true);
            break;
        }
        mood.wait_while(|held| held.requests);
        mood.pass(&from, &mut is_isolated);
        if to.write_all(&chunk[..n]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

fn replies(mut from: TcpStream, mut to: TcpStream, mood: &Mood) {
    let (mut chunk, mut is_isolated) = ([0; 16 * 1024], None);
    'connection: while let Ok(n @ 1..) = from.read(&mut chunk) {
        mood.wait_while(|held| held.replies);
        mood.pass(&to, &mut is_isolated);
        let step = match mood.chop.load(Ordering::SeqCst) {
            0 => n,
            step => step,
        };
        for piece in chunk[..n].chunks(step) {
            let mut piece = piece;
            let left = mood.cut_after.load(Ordering::SeqCst);
            if left >= 0 {
                piece = &piece[..piece.len().min(left as usize)];
                mood.cut_after.store(left - piece.len() as i64, Ordering::SeqCst);
            }
            if to.write_all(piece).is_err() {
                break 'connection;
            }
            if left >= 0 && left - piece.len() as i64 <= 0 {
                // Let the bytes arrive before the close.
                std::thread::sleep(Duration::from_millis(20));
                mood.cut_after.store(-1, Ordering::SeqCst);
                for stream in mood.open.lock().expect("list").drain(..) {
                    let _ = stream.shutdown(Shutdown::Both);
                }
                break 'connection;
            }
        }
    }
    mood.pass(&to, &mut is_isolated);
    let _ = to.shutdown(Shutdown::Both);
}
