//! TLS as the router is told of it: what to show to clients, and what to ask of nodes.
//!
//! Certificates are read and checked by whoever configures the router; here they are finished rustls configurations with a text that
//! identifies what they were made from, so that a reload sees whether anything has changed. A connection keeps the configuration that it
//! was made with: new certificates drop nobody.

use std::fmt;
use std::sync::Arc;

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ServerConfig};

/// The server's side: certificate, key, and which clients' certificates are asked for.
#[derive(Clone)]
pub struct ServerTls {
    /// The configuration of rustls.
    pub config: Arc<ServerConfig>,
    /// Says what it was made from: equal for equal content.
    pub identity: String,
}

/// The client's side, towards one node.
#[derive(Clone)]
pub struct NodeTls {
    /// The configuration of rustls.
    pub config: Arc<ClientConfig>,
    /// The name that the node's certificate must have.
    pub name: ServerName<'static>,
    /// Says what it was made from: equal for equal content.
    pub identity: String,
}

impl PartialEq for ServerTls {
    fn eq(&self, other: &Self) -> bool {
        self.identity == other.identity
    }
}

impl Eq for ServerTls {}

impl PartialEq for NodeTls {
    fn eq(&self, other: &Self) -> bool {
        self.identity == other.identity && self.name == other.name
    }
}

impl Eq for NodeTls {}

impl fmt::Debug for ServerTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServerTls({})", self.identity)
    }
}

impl fmt::Debug for NodeTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "NodeTls({:?}, {})", self.name, self.identity)
    }
}
