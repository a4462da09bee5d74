//! Listening sockets and their processes, read from /proc.
//!
//! The tables of TCP sockets map a port to inodes, and the open files of processes map an inode to its holders. A start
//! names the process that holds its port, and the autoscaler proves that a listener is a server that it has started.
//! Files of other users' processes are readable only as root, so such a holder remains unknown.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

const TABLES: [&str; 2] = ["/proc/net/tcp", "/proc/net/tcp6"];

/// A process that holds a socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holder {
    /// Command name, as in `ps`.
    pub name: String,
    /// Process id.
    pub pid: u32,
}

/// Returns the process that listens on `address`, or on its port at every address.
pub fn holder_of(address: SocketAddr) -> Option<Holder> {
    let inode = listener_inodes(address).into_iter().next()?;
    let pid = *holders(&BTreeSet::from([inode])).get(&inode)?.first()?;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    Some(Holder { name: name.trim().to_owned(), pid })
}

/// Inodes of the sockets that listen on `address`, or on its port at every address.
pub(crate) fn listener_inodes(address: SocketAddr) -> BTreeSet<u64> {
    let tables = TABLES.into_iter().filter_map(|table| fs::read_to_string(table).ok());
    tables
        .flat_map(|table| table.lines().skip(1).filter_map(|line| listener_inode(line, address)).collect::<Vec<_>>())
        .collect()
}

/// Processes that hold each of these sockets, by inode. Sockets without a visible holder are missing.
pub(crate) fn holders(inodes: &BTreeSet<u64>) -> BTreeMap<u64, Vec<u32>> {
    let mut found: BTreeMap<u64, Vec<u32>> = BTreeMap::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        for file in fs::read_dir(process.path().join("fd")).into_iter().flatten().flatten() {
            let target = fs::read_link(file.path()).ok();
            let inode = target
                .as_deref()
                .and_then(|target| target.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok());
            if let Some(inode) = inode.filter(|inode| inodes.contains(inode)) {
                found.entry(inode).or_default().push(pid);
            }
        }
    }
    found
}

/// Returns the inode in a line of /proc/net/tcp, if its socket listens at an address that overlaps `wanted`.
fn listener_inode(line: &str, wanted: SocketAddr) -> Option<u64> {
    const LISTEN: &str = "0A";
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (local, state, inode) = (fields.get(1)?, fields.get(3)?, fields.get(9)?);
    let (host, port) = local.split_once(':')?;
    let host = parse_host(host)?;
    let clash = host == wanted.ip() || host.is_unspecified() || wanted.ip().is_unspecified();
    let port = u16::from_str_radix(port, 16).ok()?;
    (*state == LISTEN && clash && port == wanted.port()).then(|| inode.parse().ok())?
}

/// Parses an address: 32-bit words in hexadecimal, each in the byte order of the machine.
fn parse_host(text: &str) -> Option<IpAddr> {
    let word = |at: usize| Some(u32::from_str_radix(text.get(at..at + 8)?, 16).ok()?.to_ne_bytes());
    match text.len() {
        8 => Some(IpAddr::V4(Ipv4Addr::from(word(0)?))),
        32 => {
            let mut bytes = [0; 16];
            for (i, chunk) in bytes.chunks_exact_mut(4).enumerate() {
                chunk.copy_from_slice(&word(i * 8)?);
            }
            Some(IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_listener_of_this_process_is_found() {
        for host in ["127.0.0.1:0", "0.0.0.0:0"] {
            let listener = TcpListener::bind(host).expect("a port");
            let port = listener.local_addr().expect("its address").port();
            let holder = holder_of(([127, 0, 0, 1], port).into()).expect("the holder");
            assert_eq!(holder.pid, std::process::id());
            assert!(!holder.name.is_empty());
        }
    }

    #[test]
    fn a_connection_is_not_a_listener() {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let client = std::net::TcpStream::connect(listener.local_addr().expect("its address")).expect("connected");
        assert_eq!(holder_of(client.local_addr().expect("its address")), None);
    }

    #[test]
    fn lines_of_the_table_are_read() {
        let line = "   0: 0100007F:18EB 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4242 1 0 100 0 0 10 0";
        if cfg!(target_endian = "little") {
            assert_eq!(listener_inode(line, ([127, 0, 0, 1], 6379).into()), Some(4242));
        }
        assert_eq!(listener_inode(line, ([127, 0, 0, 1], 6380).into()), None);
        assert_eq!(listener_inode("", ([127, 0, 0, 1], 6379).into()), None);
        assert_eq!(listener_inode("0: zz:zz 0:0 0A", ([127, 0, 0, 1], 6379).into()), None);
        let six = "0: 00000000000000000000000000000000:18EB 0:0 0A 0 0 0 0 0 77 1";
        assert_eq!(listener_inode(six, ([127, 0, 0, 1], 6379).into()), Some(77), "[::] takes IPv4 too");
    }
}
