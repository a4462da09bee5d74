//! Nodes, asked directly: how they are reached, which servers they have, who uses them, and what they hold.
//!
//! Not the router's connections: those belong to its workers, and much of this is asked before a router runs, or by
//! `switchyard doctor` where none does.

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
pub use clients::{Action, DirectClient, LOOKING, direct_clients, redis_version, routers};
pub use connection::{Answer, NodeConnection};
pub use endpoint::{ENDPOINT_FORM, Endpoint};
pub use libraries::{Functions, functions};
pub use servers::{Server, servers, servers_of};

/// Port of a node whose address names none: that of Redis.
pub const NODE_PORT: u16 = 6379;

/// The address of a node as its name: with its port.
pub fn parse_endpoint(text: &str) -> Result<String, String> {
    Endpoint::parse(text, Some(NODE_PORT)).map(|endpoint| endpoint.to_string())
}

/// A node that can be connected to; its number is given by the topology.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeAddress {
    /// Its address as the user wrote it, or the name that Sentinels know it by.
    pub name: String,
    /// `None`: Sentinels say where it is, or its name does not resolve.
    pub address: Option<SocketAddr>,
    /// Why its name does not resolve.
    pub unresolved: Option<String>,
    /// As whom the router logs in.
    pub username: Option<String>,
    /// With what.
    pub password: Option<Secret>,
    /// For a TLS connection to it.
    pub tls: Option<NodeTls>,
    /// Servers that may be its replicas, or its primary after a failover.
    pub replicas: Vec<SocketAddr>,
    /// Of a node with replicas: its servers that have names.
    pub names: Vec<ServerName>,
    /// Its Sentinels, if these say where it is.
    pub sentinel: Option<SentinelAddress>,
    /// Share of the slots, beside those of the others.
    pub weight: u32,
    /// Requests in a second that it answers in time, where somebody has said so.
    pub capacity: Option<u64>,
}

/// The name of one of a node's servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerName {
    /// The name and the port.
    pub endpoint: Endpoint,
    /// The address that it led to last; `None`: it does not resolve.
    pub address: Option<SocketAddr>,
    /// Whether it names the server that is the primary at first.
    pub is_first: bool,
}

/// Who knows where a node's primary is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentinelAddress {
    /// The name that they know it by.
    pub master: String,
    /// Where they are.
    pub sentinels: Vec<SentinelPlace>,
    /// As whom the router logs in to them.
    pub username: Option<String>,
    /// With what.
    pub password: Option<Secret>,
}

/// One Sentinel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SentinelPlace {
    /// Where it is: its name is looked up whenever it is connected to.
    pub endpoint: Endpoint,
    /// For a TLS connection to it.
    pub tls: Option<NodeTls>,
}

impl SentinelAddress {
    /// The way to one of the Sentinels, at this address.
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
    /// Whether it has more servers than one, so that its primary may change.
    pub fn has_replicas(&self) -> bool {
        self.sentinel.is_some() || !self.replicas.is_empty() || !self.names.is_empty()
    }

    /// The same as the router takes it.
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
