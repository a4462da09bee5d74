//! Binds the listening sockets of all workers.
//!
//! Each worker has its own listening socket on the same port (SO_REUSEPORT), so accepting shares nothing. With this
//! option a second router of the same user could also bind the port and silently take half the connections. The port is
//! therefore claimed first, in two exclusive ways: by a plain bind, which fails if any process listens; and by an
//! abstract socket named after the address, which covers the moment between the two binds and disappears with the
//! process.
//!
//! A Unix socket has no SO_REUSEPORT: the workers share one listening socket, and the kernel wakes one of them per
//! connection. Its file outlives the process. An existing file is replaced only if it is a socket without a listener.
//!
//! A router that replaces another router uses the very sockets of that router: a connection that waits in the queue of a
//! socket is reset when the last copy of that socket is closed. So it accepts from all of them, whatever its number of
//! workers.

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use crate::lock::lock;
use crate::settings::{ListenAddress, ListenerSettings};

/// Backlog per worker (limited by the system's somaxconn).
const BACKLOG: i32 = 1024;

/// A listening socket of a worker.
#[derive(Debug)]
pub(crate) struct Listener {
    fd: OwnedFd,
    pub(crate) settings: Arc<ListenerSettings>,
    /// Index in the settings.
    pub(crate) number: usize,
    is_shared: bool,
}

impl Listener {
    /// Whether several workers accept from this socket.
    pub(crate) fn is_shared(&self) -> bool {
        self.is_shared
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

/// Listening sockets of one address, for another process.
#[derive(Debug)]
pub struct ListeningSockets {
    /// Address as in the settings: its port may be 0.
    pub address: ListenAddress,
    /// Claim on the address, so that no third router listens there.
    pub claim: OwnedFd,
    /// The sockets; at least one.
    pub sockets: Vec<OwnedFd>,
}

/// Listening sockets of a router.
#[derive(Debug)]
pub(crate) struct Bound {
    /// Addresses, with the port chosen by the system for port 0.
    pub(crate) addresses: Vec<ListenAddress>,
    places: Vec<Place>,
    workers: usize,
}

/// Listening sockets of one address.
#[derive(Debug)]
struct Place {
    settings: Arc<ListenerSettings>,
    guard: Guard,
    sockets: Vec<OwnedFd>,
}

impl Bound {
    /// Returns copies of the sockets from which a worker accepts.
    fn of_worker(&self, worker: usize) -> io::Result<Vec<Listener>> {
        let mut listeners = Vec::new();
        for (number, Place { settings, sockets, .. }) in self.places.iter().enumerate() {
            let is_unix = matches!(settings.address, ListenAddress::Unix { .. });
            let is_shared = is_unix || sockets.len() < self.workers;
            for index in share(sockets.len(), self.workers, worker) {
                let fd = sockets[index].try_clone()?;
                listeners.push(Listener { fd, settings: Arc::clone(settings), number, is_shared });
            }
        }
        Ok(listeners)
    }

    /// Returns copies of all sockets and claims.
    fn copies(&self) -> io::Result<Vec<ListeningSockets>> {
        let copy = |place: &Place| {
            Ok(ListeningSockets {
                address: place.settings.address.clone(),
                claim: OwnedFd::from(place.guard.name.try_clone()?),
                sockets: place.sockets.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>()?,
            })
        };
        self.places.iter().map(copy).collect()
    }
}

/// Indexes of the sockets of a worker. Each socket belongs to one worker, or with fewer sockets than workers, each
/// worker uses one.
fn share(sockets: usize, workers: usize, worker: usize) -> impl Iterator<Item = usize> {
    let first = if sockets < workers { worker % sockets.max(1) } else { worker };
    (first..sockets).step_by(workers.max(1))
}

/// Holder of the listening sockets, from which workers get copies.
#[derive(Debug, Default)]
pub(crate) struct Listening(Mutex<Sockets>);

#[derive(Debug, Default)]
struct Sockets {
    /// `None` after they are closed or handed over.
    bound: Option<Bound>,
    is_open: bool,
}

impl Listening {
    /// `is_open`: workers accept from their beginning.
    pub(crate) fn new(bound: Bound, is_open: bool) -> Self {
        Self(Mutex::new(Sockets { bound: Some(bound), is_open }))
    }

    /// Returns the sockets from which a worker accepts now.
    pub(crate) fn of_worker(&self, worker: usize) -> io::Result<Vec<Listener>> {
        match &*lock(&self.0) {
            Sockets { bound: Some(bound), is_open: true } => bound.of_worker(worker),
            _ => Ok(Vec::new()),
        }
    }

    /// Returns copies of the sockets for another process. Empty after they are closed.
    pub(crate) fn copies(&self) -> io::Result<Vec<ListeningSockets>> {
        lock(&self.0).bound.as_ref().map_or(Ok(Vec::new()), Bound::copies)
    }

    /// Lets workers accept.
    pub(crate) fn open(&self) {
        lock(&self.0).is_open = true;
    }

    /// Applies the modes of the settings to the files of Unix sockets.
    pub(crate) fn set_modes(&self) -> io::Result<()> {
        let sockets = lock(&self.0);
        let places = sockets.bound.iter().flat_map(|bound| &bound.places);
        for Place { settings, guard, .. } in places {
            if let ListenAddress::Unix { path, mode } = &settings.address
                && guard.file.as_ref().is_some_and(SocketFile::is_there)
            {
                fs::set_permissions(path, fs::Permissions::from_mode(*mode))?;
            }
        }
        Ok(())
    }

    /// Makes this process the owner of the files of inherited Unix sockets.
    pub(crate) fn own_files(&self) {
        lock(&self.0).own_files(true);
    }

    /// Closes the sockets, and removes the files of Unix sockets.
    pub(crate) fn close(&self) {
        drop(lock(&self.0).bound.take());
    }

    /// Closes the sockets. Another process uses the files of Unix sockets.
    pub(crate) fn leave(&self) {
        let mut sockets = lock(&self.0);
        sockets.own_files(false);
        drop(sockets.bound.take());
    }
}

impl Sockets {
    fn own_files(&mut self, is_owner: bool) {
        let places = self.bound.iter_mut().flat_map(|bound| &mut bound.places);
        places.for_each(|place| place.guard.is_owner = is_owner);
    }
}

/// A claim on an address. Released on drop.
#[derive(Debug)]
struct Guard {
    name: UnixListener,
    file: Option<SocketFile>,
    /// Whether this process removes the file. Another process that accepts from the socket needs it.
    is_owner: bool,
}

/// File of a Unix socket.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Device and inode, to recognize a replaced file.
    id: (u64, u64),
}

impl SocketFile {
    /// Identifies the file at a path.
    fn at(path: &Path) -> io::Result<Self> {
        let meta = fs::symlink_metadata(path)?;
        Ok(Self { path: path.to_owned(), id: (meta.dev(), meta.ino()) })
    }

    /// Whether the file has been neither removed nor replaced.
    fn is_there(&self) -> bool {
        Self::at(&self.path).is_ok_and(|now| now.id == self.id)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(file) = self.file.as_ref().filter(|file| self.is_owner && file.is_there()) {
            let _ = fs::remove_file(&file.path);
        }
    }
}

/// Listens on all addresses. `inherited`: sockets of another process, which are used instead of new ones.
pub(crate) fn bind(
    wanted: &[ListenerSettings],
    workers: usize,
    mut inherited: Vec<ListeningSockets>,
) -> Result<Bound, StartError> {
    let mut bound = Bound { addresses: Vec::new(), places: Vec::new(), workers };
    for settings in wanted {
        let failed = |why| StartError::Listen { address: settings.address.clone(), why };
        let known = inherited.iter().position(|known| is_same(&known.address, &settings.address));
        let (address, guard, sockets) = match (known, &settings.address) {
            (Some(at), _) => adopt(&settings.address, inherited.remove(at)).map_err(failed)?,
            (None, ListenAddress::Tcp(address)) => {
                let (address, guard) = claim(*address).map_err(failed)?;
                let sockets = (0..workers).map(|_| listen(address)).collect::<io::Result<_>>().map_err(failed)?;
                (ListenAddress::Tcp(address), guard, sockets)
            }
            (None, ListenAddress::Unix { path, mode }) => {
                let (fd, guard) = listen_unix(path, *mode).map_err(failed)?;
                (settings.address.clone(), guard, vec![fd])
            }
        };
        bound.addresses.push(address);
        bound.places.push(Place { settings: Arc::new(settings.clone()), guard, sockets });
    }
    Ok(bound)
}

/// Whether both settings name the same socket.
fn is_same(one: &ListenAddress, other: &ListenAddress) -> bool {
    match (one, other) {
        (ListenAddress::Unix { path: one, .. }, ListenAddress::Unix { path: other, .. }) => one == other,
        _ => one == other,
    }
}

/// Uses the sockets of another process. Returns their address.
fn adopt(wanted: &ListenAddress, given: ListeningSockets) -> io::Result<(ListenAddress, Guard, Vec<OwnedFd>)> {
    let unusable = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
    let first = given.sockets.first().ok_or_else(|| unusable("the old process has sent no socket for it"))?;
    for socket in &given.sockets {
        if !rustix::net::sockopt::socket_acceptconn(socket)? {
            return Err(unusable("the old process has sent a socket that does not listen"));
        }
    }
    let name = UnixListener::from(given.claim);
    let (address, file) = match wanted {
        ListenAddress::Tcp(_) => {
            let address = SocketAddr::try_from(rustix::net::getsockname(first)?);
            (ListenAddress::Tcp(address.map_err(|_| unusable("the old process has sent another socket"))?), None)
        }
        // The old process still uses the file, so its mode stays.
        ListenAddress::Unix { path, .. } => (wanted.clone(), Some(SocketFile::at(path)?)),
    };
    Ok((address, Guard { name, file, is_owner: false }, given.sockets))
}

/// Binds a name in the abstract socket namespace. Fails while another router has it.
fn claim_name(what: &str) -> io::Result<UnixListener> {
    std::os::unix::net::SocketAddr::from_abstract_name(format!("switchyard/{what}").as_bytes())
        .and_then(|a| UnixListener::bind_addr(&a))
}

/// Fails if any process listens on the address. The socket does not listen, because a client that connected to it would
/// be reset later.
fn probe(address: SocketAddr) -> io::Result<Socket> {
    let probe = Socket::new(Domain::for_address(address), Type::STREAM.cloexec(), Some(Protocol::TCP))?;
    // Lingering connections of a stopped router do not listen.
    probe.set_reuse_address(true)?;
    probe.bind(&address.into())?;
    Ok(probe)
}

/// Checks whether this process could listen on an address. An error means that it is in use or not an address of this
/// host.
pub fn could_listen(address: SocketAddr) -> io::Result<()> {
    probe(address).map(drop)
}

/// Claims an address, and chooses a port for port 0.
fn claim(address: SocketAddr) -> io::Result<(SocketAddr, Guard)> {
    let probe = probe(address)?;
    let bound = probe.local_addr()?.as_socket().unwrap_or(address);
    Ok((bound, Guard { name: claim_name(&bound.to_string())?, file: None, is_owner: true }))
}

fn listen(address: SocketAddr) -> io::Result<OwnedFd> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(TcpListener::from(socket).into())
}

fn listen_unix(path: &Path, mode: u32) -> io::Result<(OwnedFd, Guard)> {
    // Device and inode of the folder rather than the path as written, because paths are ambiguous. An abstract name has
    // room for about 100 bytes.
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let folder = fs::metadata(parent)?;
    let file_name = path.file_name().unwrap_or_default().to_string_lossy();
    let hash = rapidhash::v3::rapidhash_v3(file_name.as_bytes());
    let name = claim_name(&format!("unix:{:x}:{:x}:{hash:x}", folder.dev(), folder.ino()))?;
    remove_stale(path)?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM.nonblocking().cloexec(), None)?;
    // Prevents connections before the final mode is set. Linux creates the file with the mode of the socket.
    rustix::fs::fchmod(&socket, rustix::fs::Mode::from_raw_mode(0o600))?;
    socket.bind(&SockAddr::unix(path)?)?;
    let guard = Guard { name, file: Some(SocketFile::at(path)?), is_owner: true };
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    socket.listen(BACKLOG)?;
    Ok((socket.into(), guard))
}

/// Removes the file of a socket without a listener. Any other file is an error.
fn remove_stale(path: &Path) -> io::Result<()> {
    let meta = match fs::symlink_metadata(path) {
        Ok(meta) => meta,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    if !meta.file_type().is_socket() {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "a file of that name exists, and is not a socket"));
    }
    match UnixStream::connect(path) {
        Ok(_) => Err(io::ErrorKind::AddrInUse.into()),
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
        // A full backlog or missing rights: the socket may be in use.
        Err(error) => Err(error),
    }
}

/// Reason why the router did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The address is in use or cannot be bound.
    #[error("cannot listen on {address}: {why}")]
    Listen {
        /// Requested address.
        address: ListenAddress,
        /// Error of the system.
        why: io::Error,
    },
    /// The system refused a thread, an epoll instance or the like.
    #[error("cannot start a worker: {0}")]
    System(#[from] io::Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tcp(address: &str) -> ListenerSettings {
        ListenerSettings::tcp(address.parse().expect("address"))
    }

    fn unix(path: &Path, mode: u32) -> ListenerSettings {
        ListenerSettings { address: ListenAddress::Unix { path: path.to_owned(), mode }, ..tcp("127.0.0.1:0") }
    }

    fn bound(wanted: &[ListenerSettings], workers: usize) -> Bound {
        bind(wanted, workers, Vec::new()).map_err(|e| e.to_string()).expect("binds")
    }

    /// Number of sockets of each worker.
    fn counts(bound: &Bound) -> Vec<usize> {
        (0..bound.workers).map(|worker| bound.of_worker(worker).expect("copies").len()).collect()
    }

    #[test]
    fn a_port_is_bound_once_per_worker_and_by_one_router() {
        let first = bound(&[tcp("127.0.0.1:0")], 3);
        assert_eq!(counts(&first), [1, 1, 1]);
        let address = first.addresses[0].to_string();
        let error = bind(&[tcp(&address)], 1, Vec::new()).expect_err("the port is taken");
        assert!(error.to_string().contains("cannot listen on 127.0.0.1:"), "{error}");
        drop(first);
        assert!(bind(&[tcp(&address)], 1, Vec::new()).is_ok(), "free again");
    }

    #[test]
    fn address_probe_accepts_no_client() {
        let tried = probe(([127, 0, 0, 1], 0).into()).expect("a free port");
        let address = tried.local_addr().expect("an address").as_socket().expect("an address of TCP");
        assert!(std::net::TcpStream::connect(address).is_err());
        assert!(could_listen(address).is_ok());
        let taken = listen(address).expect("nobody listens");
        assert!(could_listen(address).is_err());
        drop((tried, taken));
    }

    #[test]
    fn unix_socket_has_its_mode_and_is_removed_on_drop() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("s");
        let first = bound(&[unix(&path, 0o660)], 2);
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o660);
        let error = bind(&[unix(&path, 0o600)], 1, Vec::new()).expect_err("taken").to_string();
        assert!(error.contains("in use"), "{error}");
        assert!(path.exists(), "the file of the first is left alone");
        drop(first);
        assert!(!path.exists());
    }

    #[test]
    fn only_a_socket_without_listener_is_replaced() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("s");
        let other = UnixListener::bind(&path).expect("binds");
        assert!(bind(&[unix(&path, 0o600)], 1, Vec::new()).is_err(), "somebody listens");
        drop(other);
        assert!(path.exists(), "what a killed process leaves behind");
        let ours = bound(&[unix(&path, 0o600)], 1);
        fs::remove_file(&path).expect("removed");
        let theirs = UnixListener::bind(&path).expect("binds");
        drop(ours);
        assert!(path.exists(), "not ours to remove");
        drop(theirs);
        fs::remove_file(&path).expect("removed");
        fs::write(&path, "data").expect("written");
        assert!(bind(&[unix(&path, 0o600)], 1, Vec::new()).is_err());
        assert_eq!(fs::read(&path).expect("still there"), b"data");
    }
    #[test]
    fn inherited_sockets_are_shared_by_any_number_of_workers() {
        let old = bound(&[tcp("127.0.0.1:0"), tcp("127.0.0.1:0")], 3);
        for (workers, expected) in [(1, vec![6]), (2, vec![4, 2]), (3, vec![2; 3]), (5, vec![2; 5])] {
            let settings = [tcp("127.0.0.1:0"), tcp("127.0.0.1:0")];
            let copies = old.copies().expect("copies");
            let new = bind(&settings, workers, copies).map_err(|e| e.to_string()).expect("adopted");
            assert_eq!(counts(&new), expected, "{workers} workers");
            let is_shared = new.of_worker(0).expect("copies").iter().all(Listener::is_shared);
            assert_eq!(is_shared, workers > 3);
            let all: std::collections::BTreeSet<String> = new.addresses.iter().map(ToString::to_string).collect();
            assert_eq!(all, old.addresses.iter().map(ToString::to_string).collect());
        }
    }

    #[test]
    fn connections_wait_in_a_socket_while_its_owner_changes() {
        let old = Listening::new(bound(&[tcp("127.0.0.1:0")], 2), true);
        let copies = old.copies().expect("copies");
        let new = bind(&[tcp("127.0.0.1:0")], 1, copies).map_err(|e| e.to_string()).expect("adopted");
        let ListenAddress::Tcp(address) = new.addresses[0] else { panic!("TCP") };
        let waiting: Vec<_> =
            (0..20).map(|_| std::net::TcpStream::connect(address).expect("connected before")).collect();
        old.leave();
        assert!(old.copies().expect("none").is_empty() && old.of_worker(0).expect("none").is_empty());
        let listeners = new.of_worker(0).expect("copies");
        let accepted =
            listeners.iter().map(|listener| std::iter::from_fn(|| rustix::net::accept(listener).ok()).count());
        assert_eq!(accepted.sum::<usize>(), waiting.len());
        let rival = bind(&[tcp(&address.to_string())], 1, Vec::new()).map(drop);
        assert!(rival.is_err(), "the address is in use");
    }

    #[test]
    fn the_file_of_a_unix_socket_belongs_to_the_last_process_that_accepts() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let path = dir.path().join("s");
        let old = Listening::new(bound(&[unix(&path, 0o600)], 1), true);
        let adopt = || {
            let copies = old.copies().expect("copies");
            let new = bind(&[unix(&path, 0o660)], 2, copies).map_err(|e| e.to_string()).expect("adopted");
            Listening::new(new, false)
        };
        let mode = || fs::metadata(&path).expect("there").permissions().mode() & 0o777;
        let failed = adopt();
        failed.open();
        drop(failed);
        UnixStream::connect(&path).expect("the old process listens, because the new one has failed");
        let new = adopt();
        new.open();
        assert_eq!(mode(), 0o600, "the old mode");
        new.set_modes().expect("set");
        assert_eq!(mode(), 0o660, "the new mode");
        old.leave();
        new.own_files();
        drop(old);
        UnixStream::connect(&path).expect("the new process listens");
        drop(new);
        assert!(!path.exists());
    }

    #[test]
    fn sockets_that_do_not_listen_are_refused() {
        let given = |sockets| ListeningSockets {
            address: tcp("127.0.0.1:0").address,
            claim: Socket::new(Domain::UNIX, Type::STREAM, None).expect("a socket").into(),
            sockets,
        };
        let idle: OwnedFd = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket").into();
        let file: OwnedFd = fs::File::open("/dev/null").expect("a file").into();
        let other: OwnedFd = claim_name("test of other sockets").expect("free").into();
        for sockets in [vec![], vec![idle], vec![file], vec![other]] {
            assert!(bind(&[tcp("127.0.0.1:0")], 1, vec![given(sockets)]).is_err());
        }
    }
}
