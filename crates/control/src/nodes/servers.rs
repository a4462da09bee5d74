//! Finds the servers of a node by querying them or their Sentinels, without a router.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use switchyard_router::{NodeAccess, NodeTls};

use super::{Answer, NodeAddress, NodeConnection, SentinelAddress, SentinelPlace};

/// Timeout for a reply.
const TIMEOUT: Duration = Duration::from_secs(5);

/// A server of a node.
#[derive(Clone, Debug)]
pub struct Server {
    /// Address and credentials.
    pub access: NodeAccess,
    /// For a replica: the primary that it should follow.
    pub replica_of: Option<SocketAddr>,
}

/// Returns the current servers of a node, the primary first.
pub fn servers(node: &NodeAddress) -> Vec<Server> {
    servers_of(node, None)
}

/// Returns the servers of a node. `in_force`: the primary in use by a router, because several servers may claim to be
/// the primary.
pub fn servers_of(node: &NodeAddress, in_force: Option<SocketAddr>) -> Vec<Server> {
    let access = node.access();
    let (primary, replicas) = match &node.sentinel {
        Some(sentinel) => sentinel
            .sentinels
            .iter()
            .find_map(|place| from_sentinel(sentinel, place, access.tls.as_ref()))
            .unwrap_or((None, Vec::new())),
        None => {
            let is_primary = |address: &SocketAddr| {
                let candidate = NodeAccess { address: Some(*address), ..access.clone() };
                let role = NodeConnection::open(&candidate, TIMEOUT).ok().and_then(|mut c| c.call(&["ROLE"]).ok());
                role.is_some_and(|role| role.items().first().is_some_and(|r| r.text() == "master"))
            };
            let all: Vec<SocketAddr> = access.address.iter().chain(&node.replicas).copied().collect();
            // Without replicas there is nothing to find.
            let primary = if node.replicas.is_empty() { None } else { all.iter().copied().find(is_primary) };
            (primary, all)
        }
    };
    let primary = in_force.filter(|address| replicas.contains(address)).or(primary).or(access.address);
    let mut servers = vec![Server { access: NodeAccess { address: primary, ..access.clone() }, replica_of: None }];
    for address in replicas.into_iter().filter(|address| Some(*address) != primary) {
        let name = format!("{} replica {address}", node.name);
        servers.push(Server {
            access: NodeAccess { name, address: Some(address), ..access.clone() },
            replica_of: primary,
        });
    }
    servers
}

/// Returns primary and replicas according to a Sentinel, and stores their host names in `tls`. `None` if the Sentinel
/// does not reply.
fn from_sentinel(
    group: &SentinelAddress,
    place: &SentinelPlace,
    tls: Option<&NodeTls>,
) -> Option<(Option<SocketAddr>, Vec<SocketAddr>)> {
    let mut connection = NodeConnection::open(&group.access(place, place.endpoint.resolve().ok()), TIMEOUT).ok()?;
    let resolve = |host: &str, port: &str| {
        let address = (host, port.parse().ok()?).to_socket_addrs().ok()?.min_by_key(|address| !address.is_ipv4())?;
        if let Some(tls) = tls {
            tls.note_host(address, host);
        }
        Some(address)
    };
    let answer = connection.call(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", &group.master]).ok()?;
    let primary = match answer.items().as_slice() {
        [host, port] => resolve(&host.text(), &port.text()),
        _ => None,
    };
    let answer = connection.call(&["SENTINEL", "REPLICAS", &group.master]).ok()?;
    let replica = |answer: &Answer| {
        let fields: Vec<String> = answer.items().iter().map(Answer::text).collect();
        let field = |name: &str| fields.chunks_exact(2).find(|pair| pair[0] == name).map(|pair| pair[1].clone());
        resolve(&field("ip")?, &field("port")?)
    };
    Some((primary, answer.items().iter().filter_map(replica).collect()))
}
