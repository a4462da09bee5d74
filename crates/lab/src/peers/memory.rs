//! Memory of a proxy: without clients, and with many idle clients that have sent one request each.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};

use super::target::{Peer, Recipe};
use crate::procfs::resident_bytes;

/// Number of idle clients.
pub(super) const CLIENTS: usize = 10_000;
/// Files of the proxy and of this process, besides one per client.
const SPARE_FILES: u64 = 100;

/// Memory of one proxy.
#[derive(Debug, Clone)]
pub struct Memory {
    /// Name of the proxy.
    pub peer: Peer,
    /// Bytes without clients.
    pub idle: u64,
    /// Bytes with [`CLIENTS`] idle clients, or the reason for a missing value.
    pub with_clients: Result<u64, String>,
}

/// Restarts the proxy, so that memory of earlier loads does not count, and measures it.
pub(super) fn measure(recipe: &Recipe, nodes: &[SocketAddr], folder: &Path) -> Result<Memory> {
    let target = recipe.start(&format!("memory-{}", recipe.peer).replace(' ', "-"), nodes, folder)?;
    let process = target.process.as_ref().context("memory is a proxy's")?;
    std::thread::sleep(Duration::from_millis(500)); // its initialization is done
    let idle = resident_bytes(process.id())?;
    let with_clients =
        with_clients(target.address, process.id(), recipe.peer == Peer::Haproxy).map_err(|e| format!("{e:#}"));
    Ok(Memory { peer: recipe.peer.clone(), idle, with_clients })
}

fn with_clients(address: SocketAddr, pid: u32, node_per_client: bool) -> Result<u64> {
    ensure!(!node_per_client, "it opens a connection to the node for each client, more than a node accepts");
    let files = switchyard_bench::process::raise_file_limit();
    ensure!(
        files >= CLIENTS as u64 + SPARE_FILES,
        "this needs {CLIENTS} open files and the limit is {files}; raise it with ulimit -n"
    );
    let mut clients = Vec::with_capacity(CLIENTS);
    for i in 0..CLIENTS {
        let connect = || -> Result<TcpStream> {
            let mut client = TcpStream::connect_timeout(&address, Duration::from_secs(5))?;
            client.set_read_timeout(Some(Duration::from_secs(5)))?;
            client.write_all(b"*2\r\n$3\r\nGET\r\n$18\r\nswitchyard-bench:0\r\n")?;
            let mut reply = [0; 64];
            let n = client.read(&mut reply)?;
            ensure!(n > 0 && reply[0] == b'$', "the reply was \"{}\"", reply[..n].escape_ascii());
            Ok(client)
        };
        clients.push(connect().with_context(|| format!("client {} of {CLIENTS}", i + 1))?);
    }
    std::thread::sleep(Duration::from_millis(500));
    resident_bytes(pid)
}
