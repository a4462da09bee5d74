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

use std::fs;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

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
}

impl Listener {
    pub(crate) fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { fd: self.fd.try_clone()?, settings: self.settings.clone(), number: self.number })
    }

    /// Whether all workers accept from one socket.
    pub(crate) fn is_shared(&self) -> bool {
        matches!(self.settings.address, ListenAddress::Unix { .. })
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

pub(crate) struct Bound {
    /// Addresses, with the port chosen by the system for port 0.
    pub(crate) addresses: Vec<ListenAddress>,
    pub(crate) by_worker: Vec<Vec<Listener>>,
    /// Claims on the addresses, held while the router runs.
    pub(crate) guards: Vec<Guard>,
}

/// A claim on an address. Released on drop.
#[derive(Debug)]
pub(crate) struct Guard {
    _name: UnixListener,
    file: Option<SocketFile>,
}

/// File of a Unix socket created by this process.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    /// Device and inode, to recognize a replaced file.
    id: (u64, u64),
}

impl Drop for Guard {
    fn drop(&mut self) {
        if let Some(file) = &self.file
            && fs::symlink_metadata(&file.path).is_ok_and(|meta| (meta.dev(), meta.ino()) == file.id)
        {
            let _ = fs::remove_file(&file.path);
        }
    }
}

pub(crate) fn bind(wanted: &[ListenerSettings], workers: usize) -> Result<Bound, StartError> {
    let mut bound =
        Bound { addresses: Vec::new(), by_worker: (0..workers).map(|_| Vec::new()).collect(), guards: Vec::new() };
    for (number, settings) in wanted.iter().enumerate() {
        let failed = |why| StartError::Listen { address: settings.address.clone(), why };
        let shared = Arc::new(settings.clone());
        let mut add = |worker: usize, fd: OwnedFd| {
            bound.by_worker[worker].push(Listener { fd, settings: shared.clone(), number })
        };
        match &settings.address {
            ListenAddress::Tcp(address) => {
                let (address, guard) = claim(*address).map_err(failed)?;
                bound.guards.push(guard);
                bound.addresses.push(ListenAddress::Tcp(address));
                for worker in 0..workers {
                    add(worker, listen(address).map_err(failed)?);
                }
            }
            ListenAddress::Unix { path, mode } => {
                let (fd, guard) = listen_unix(path, *mode).map_err(failed)?;
                bound.guards.push(guard);
                bound.addresses.push(settings.address.clone());
                for worker in 0..workers {
                    add(worker, fd.try_clone().map_err(failed)?);
                }
            }
        }
    }
    Ok(bound)
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
    Ok((bound, Guard { _name: claim_name(&bound.to_string())?, file: None }))
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
    let meta = fs::symlink_metadata(path)?;
    let guard = Guard { _name: name, file: Some(SocketFile { path: path.to_owned(), id: (meta.dev(), meta.ino()) }) };
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

    #[test]
    fn a_port_is_bound_once_per_worker_and_by_one_router() {
        let first = bind(&[tcp("127.0.0.1:0")], 3).map_err(|e| e.to_string()).expect("a free port");
        assert_eq!(first.by_worker.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1, 1]);
        let address = first.addresses[0].to_string();
        let error = bind(&[tcp(&address)], 1).err().expect("the port is taken");
        assert!(error.to_string().contains("cannot listen on 127.0.0.1:"), "{error}");
        drop(first);
        assert!(bind(&[tcp(&address)], 1).is_ok(), "free again");
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
        let first = bind(&[unix(&path, 0o660)], 2).map_err(|e| e.to_string()).expect("binds");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o660);
        let error = bind(&[unix(&path, 0o600)], 1).err().expect("taken").to_string();
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
        assert!(bind(&[unix(&path, 0o600)], 1).is_err(), "somebody listens");
        drop(other);
        assert!(path.exists(), "what a killed process leaves behind");
        let ours = bind(&[unix(&path, 0o600)], 1).map_err(|e| e.to_string()).expect("replaces it");
        fs::remove_file(&path).expect("removed");
        let theirs = UnixListener::bind(&path).expect("binds");
        drop(ours);
        assert!(path.exists(), "not ours to remove");
        drop(theirs);
        fs::remove_file(&path).expect("removed");
        fs::write(&path, "data").expect("written");
        assert!(bind(&[unix(&path, 0o600)], 1).is_err());
        assert_eq!(fs::read(&path).expect("still there"), b"data");
    }
}
