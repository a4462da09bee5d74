//! Binding the data port, once per worker.
//!
//! Each worker has a listening socket of its own on the same port (SO_REUSEPORT), so accepting shares nothing. The same option would
//! let a second router of the same user bind the port silently and take half the connections, so before it is used the port is
//! claimed in two ways that exclude: by a plain bind, which fails where anybody listens, and by an abstract socket named after the
//! address, which closes the moment between that bind and ours and vanishes with the process.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::UnixListener;

use socket2::{Domain, Protocol, Socket, Type};

use crate::StartError;

/// Connections that may wait to be accepted, per worker (bounded by the system's somaxconn).
const BACKLOG: i32 = 1024;

pub(crate) struct Bound {
    pub(crate) addresses: Vec<SocketAddr>,
    pub(crate) by_worker: Vec<Vec<TcpListener>>,
    /// Claims on the addresses, to be kept as long as the router runs.
    pub(crate) guards: Vec<UnixListener>,
}

pub(crate) fn bind(wanted: &[SocketAddr], workers: usize) -> Result<Bound, StartError> {
    let mut bound = Bound { addresses: Vec::new(), by_worker: (0..workers).map(|_| Vec::new()).collect(), guards: Vec::new() };
    for &address in wanted {
        let failed = |source| StartError::Listen { address, source };
        let address = claim(address, &mut bound.guards).map_err(failed)?;
        bound.addresses.push(address);
        for listeners in &mut bound.by_worker {
            listeners.push(listen(address).map_err(failed)?);
        }
    }
    Ok(bound)
}

/// Makes sure that nobody else listens on the address, and chooses a port where 0 is asked for.
fn claim(address: SocketAddr, guards: &mut Vec<UnixListener>) -> io::Result<SocketAddr> {
    let probe = Socket::new(Domain::for_address(address), Type::STREAM.cloexec(), Some(Protocol::TCP))?;
    // Connections of a router that just stopped may linger; they do not listen.
    probe.set_reuse_address(true)?;
    probe.bind(&address.into())?;
    probe.listen(1)?;
    let bound = probe.local_addr()?.as_socket().unwrap_or(address);
    let name = format!("switchyard/{bound}");
    let guard = std::os::unix::net::SocketAddr::from_abstract_name(name.as_bytes()).and_then(|a| UnixListener::bind_addr(&a))?;
    guards.push(guard);
    Ok(bound)
}

fn listen(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
    socket.set_reuse_address(true)?;
    socket.set_reuse_port(true)?;
    if address.is_ipv6() {
        socket.set_only_v6(true)?;
    }
    socket.bind(&address.into())?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use super::bind;

    #[test]
    fn a_port_is_bound_once_per_worker_and_by_one_router() {
        let first = bind(&["127.0.0.1:0".parse().expect("address")], 3).map_err(|e| e.to_string()).expect("a free port");
        assert_eq!(first.by_worker.iter().map(Vec::len).collect::<Vec<_>>(), [1, 1, 1]);
        let error = bind(&first.addresses, 1).err().expect("the port is taken");
        assert!(error.to_string().contains("cannot listen on 127.0.0.1:"), "{error}");
        let address = first.addresses[0];
        drop(first);
        assert!(bind(&[address], 1).is_ok(), "free again");
    }
}
