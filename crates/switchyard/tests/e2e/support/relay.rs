//! A TCP relay that stands between the router and a node and does to the bytes what networks do: chops, delays, stalls,
//! cuts.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use super::{ports, until};

/// What a test may change while connections live.
#[derive(Debug)]
struct Mood {
    /// Bytes per write towards the router; 0: as they come.
    chop: AtomicUsize,
    /// Bytes of replies that may still pass before every connection is cut; negative: no limit.
    cut_after: AtomicI64,
    held: Mutex<Held>,
    /// What is held back has changed.
    changed: Condvar,
    /// The requests of one connection are held back, from those on in which this occurs.
    hold_from: Mutex<Option<Vec<u8>>>,
    /// New connections are closed at once.
    refuse: AtomicBool,
    /// Connections accepted so far.
    accepted: AtomicU64,
    /// Requests seen, as bytes, in the order of arrival over all connections.
    seen: Mutex<Vec<u8>>,
    /// Both ends of every connection.
    open: Mutex<Vec<TcpStream>>,
    /// The process whose connections pass nothing, in either direction.
    isolated: Mutex<Option<u32>>,
    target: Mutex<SocketAddr>,
}

/// What is held back.
#[derive(Debug, Default)]
struct Held {
    replies: bool,
    requests: bool,
    /// The requests of the one connection.
    one: bool,
    /// What that held back has been passed on, or could not be any more.
    has_released: bool,
    /// The relay ends: nothing waits.
    stop: bool,
}

impl Mood {
    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().expect("what is held back")
    }

    fn change(&self, change: impl FnOnce(&mut Held)) {
        change(&mut self.held());
        self.changed.notify_all();
    }

    /// Waits until the relay ends if the process that has the other end of this connection is isolated. `is_isolated`
    /// keeps the answer, which costs a look at all its files.
    fn pass(&self, near: &TcpStream, is_isolated: &mut Option<bool>) {
        let isolated = *self.isolated.lock().expect("a process");
        let Some(pid) = isolated else { return };
        if *is_isolated.get_or_insert_with(|| has_other_end(pid, near)) {
            self.wait_while(|_| true);
        }
    }

    fn wait_while(&self, waits: impl Fn(&Held) -> bool) {
        drop(self.changed.wait_while(self.held(), |held| waits(held) && !held.stop).expect("what is held back"));
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Relay {
    address: SocketAddr,
    mood: Arc<Mood>,
}

impl Relay {
    /// Relays from a port of its own to `target`.
    pub(crate) fn start(target: SocketAddr) -> Relay {
        Relay::start_at((Ipv4Addr::LOCALHOST, ports::free()).into(), target)
    }

    /// Relays from `address`, where nobody listens, to `target`.
    pub(crate) fn start_at(address: SocketAddr, target: SocketAddr) -> Relay {
        // A process that another test is just starting has a copy of the socket by which the port was tried, until it
        // is another program.
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

    /// Where it listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    /// Relays new connections to another server. The open ones stay.
    pub(crate) fn turn_to(&self, target: SocketAddr) {
        *self.mood.target.lock().expect("an address") = target;
    }

    /// Replies reach the router in writes of `bytes` each (0: as they come).
    pub(crate) fn chop(&self, bytes: usize) {
        self.mood.chop.store(bytes, Ordering::SeqCst);
    }

    /// After that many more bytes of replies, every connection is cut.
    pub(crate) fn cut_after(&self, bytes: i64) {
        self.mood.cut_after.store(bytes, Ordering::SeqCst);
    }

    /// Holds replies back, or lets them go.
    pub(crate) fn stall(&self, on: bool) {
        self.mood.change(|held| held.replies = on);
    }

    /// Holds requests back, or lets them go, also those of connections that were closed meanwhile: as a network does
    /// that loses everything in one direction for a while, since what was sent is sent again by the sender's kernel.
    pub(crate) fn hold(&self, on: bool) {
        self.mood.change(|held| held.requests = on);
    }

    /// Holds back the requests of the first connection in which `needle` comes, from there on, also when that was
    /// closed meanwhile.
    pub(crate) fn hold_from(&self, needle: &[u8]) {
        *self.mood.hold_from.lock().expect("what to look for") = Some(needle.to_vec());
    }

    /// Whether there was such a connection.
    pub(crate) fn holds_one(&self) -> bool {
        self.mood.held().one
    }

    /// Passes on what was held back of that connection, as far as the node still has it.
    pub(crate) fn release(&self) {
        self.mood.change(|held| held.one = false);
        self.mood.wait_while(|held| !held.has_released);
    }

    /// Holds back everything of the connections of one process, old and new, as a partition of the network does. Other
    /// processes are not affected.
    pub(crate) fn isolate(&self, pid: u32) {
        *self.mood.isolated.lock().expect("a process") = Some(pid);
    }

    /// Closes new connections at once, or serves them again.
    pub(crate) fn refuse(&self, on: bool) {
        self.mood.refuse.store(on, Ordering::SeqCst);
    }

    /// Cuts every open connection.
    pub(crate) fn cut(&self) {
        for stream in self.mood.open.lock().expect("list").drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Connections accepted so far.
    pub(crate) fn accepted(&self) -> u64 {
        self.mood.accepted.load(Ordering::SeqCst)
    }

    /// The same once no more come: after its start the router looks at the nodes' functions on a connection of its own.
    pub(crate) fn settled(&self) -> u64 {
        loop {
            let before = self.accepted();
            std::thread::sleep(Duration::from_secs(1));
            if self.accepted() == before {
                return before;
            }
        }
    }

    /// How often `needle` occurs in the requests that passed.
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

/// Whether a process has the other end of a connection of this one.
fn has_other_end(pid: u32, near: &TcpStream) -> bool {
    let (Ok(peer), Ok(own)) = (near.peer_addr(), near.local_addr()) else { return false };
    let [local, remote] = [peer, own].map(|address| format!(":{:04X}", address.port()));
    let table = std::fs::read_to_string("/proc/net/tcp").unwrap_or_default();
    let inodes: Vec<String> = table
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>())
        .filter(|row| {
            row.get(1).is_some_and(|end| end.ends_with(&local)) && row.get(2).is_some_and(|end| end.ends_with(&remote))
        })
        .filter_map(|row| Some(format!("socket:[{}]", row.get(9)?)))
        .collect();
    let files = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    files
        .filter_map(|file| std::fs::read_link(file.path()).ok())
        .any(|link| inodes.iter().any(|inode| link.as_os_str() == inode.as_str()))
}

fn requests(mut from: TcpStream, mut to: TcpStream, mood: &Mood) {
    let (mut chunk, mut is_isolated) = ([0; 16 * 1024], None);
    while let Ok(n @ 1..) = from.read(&mut chunk) {
        {
            // Enough for what tests look for; a large upload must not fill the memory of the test.
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
            // What the node does with it, and with the end of the connection, is awaited: it closes its side then.
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
                // Let the bytes arrive before the end does.
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
