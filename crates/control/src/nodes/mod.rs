//! Direct queries of nodes: addresses, servers, clients and keys.
//!
//! Independent of the router's connections: those belong to its workers, and many queries run before a router starts,
//! or in `switchyard doctor` without one.

pub(crate) mod check;
mod clients;
mod connection;
mod endpoint;
pub(crate) mod fit;
pub mod holdings;
mod libraries;
mod servers;
pub(crate) mod wire;

use std::net::SocketAddr;

use switchyard_router::{NodeAccess, NodeTls, Secret};

pub(crate) use clients::settled_list;
pub use clients::{Action, DirectClient, PROBE_NAME, direct_clients, redis_version, routers};
pub use connection::{Answer, NodeConnection};
pub use endpoint::{ENDPOINT_FORM, Endpoint};
pub use libraries::{Functions, functions};
pub use servers::{Server, servers, servers_of};

/// Default port of a node, as in Redis.
pub const NODE_PORT: u16 = 6379;

/// Normalizes a node's address to its name, which includes the port.
pub fn parse_endpoint(text: &str) -> Result<String, String> {
    Endpoint::parse(text, Some(NODE_PORT)).map(|endpoint| endpoint.to_string())
}

/// Address and credentials of a node. The topology assigns its number.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeAddress {
    /// Address as written in the configuration, or the master name that Sentinels use.
    pub name: String,
    /// `None` if Sentinels provide the address, or the name does not resolve.
    pub address: Option<SocketAddr>,
    /// Error of resolving the name.
    pub unresolved: Option<String>,
    /// User name for the login.
    pub username: Option<String>,
    /// Password for the login.
    pub password: Option<Secret>,
    /// TLS settings, if the node uses TLS.
    pub tls: Option<NodeTls>,
    /// Possible replicas, one of which may be the primary after a failover.
    pub replicas: Vec<SocketAddr>,
    /// Servers with host names, for a node with replicas.
    pub names: Vec<ServerName>,
    /// Sentinels, if they provide the address.
    pub sentinel: Option<SentinelAddress>,
    /// Weight of the node's share of the slots.
    pub weight: u32,
    /// Requests per second that the node can serve in time, if configured.
    pub capacity: Option<u64>,
}

/// Host name of one of a node's servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerName {
    /// Name and port.
    pub endpoint: Endpoint,
    /// Last resolved address. `None` if the name does not resolve.
    pub address: Option<SocketAddr>,
    /// Whether this server is the initial primary.
    pub is_first: bool,
}

/// Sentinels that provide the address of a node's primary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentinelAddress {
    /// Master name at the Sentinels.
    pub master: String,
    /// Addresses of the Sentinels.
    pub sentinels: Vec<SentinelPlace>,
    /// User name for the login.
    pub username: Option<String>,
    /// Password for the login.
    pub password: Option<Secret>,
}

/// A single Sentinel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentinelPlace {
    /// Address. A name is resolved at each connection attempt.
    pub endpoint: Endpoint,
    /// TLS settings, if the Sentinel uses TLS.
    pub tls: Option<NodeTls>,
}

impl SentinelAddress {
    /// Returns the access data of a Sentinel at this address.
    pub fn access(&self, place: &SentinelPlace, address: Option<SocketAddr>) -> NodeAccess {
        NodeAccess {
            name: self.master.clone(),
            address,
            unresolved: None,
            username: self.username.clone(),
            password: self.password.clone(),
            tls: place.tls.clone(),
        }
    }
}

impl NodeAddress {
    /// Whether it has several servers, so that its primary may change.
    pub fn has_replicas(&self) -> bool {
        self.sentinel.is_some() || !self.replicas.is_empty() || !self.names.is_empty()
    }

    /// Converts to the router's access data.
    pub fn access(&self) -> NodeAccess {
        NodeAccess {
            name: self.name.clone(),
            address: self.address,
            unresolved: self.unresolved.clone(),
            username: self.username.clone(),
            password: self.password.clone(),
            tls: self.tls.clone(),
        }
    }
}
