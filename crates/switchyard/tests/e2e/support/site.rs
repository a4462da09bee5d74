//! Nodes with a router in front, the setup of most tests.

use std::net::SocketAddr;

use super::client::Client;
use super::node::{Node, NodeOptions};
use super::router::{Router, RouterOptions};

/// Whether clients connect to a plain server instead of the router (`SWITCHYARD_E2E_TARGET=direct`).
pub(crate) fn direct() -> bool {
    match std::env::var("SWITCHYARD_E2E_TARGET").as_deref() {
        Ok("direct") => true,
        Ok("router") | Err(_) => false,
        Ok(other) => panic!("SWITCHYARD_E2E_TARGET must be `router` or `direct`, not `{other}`"),
    }
}

/// Options of a site.
#[derive(Clone, Debug, Default)]
pub(crate) struct SiteOptions {
    pub(crate) node: NodeOptions,
    pub(crate) router: RouterOptions,
}

impl SiteOptions {
    /// Default nodes with this router.
    pub(crate) fn router(router: RouterOptions) -> SiteOptions {
        SiteOptions { router, ..SiteOptions::default() }
    }

    /// Default nodes, and a router that refuses keys of several slots, as a Redis Cluster does.
    pub(crate) fn refusing_several_slots() -> SiteOptions {
        SiteOptions::router(RouterOptions::args(&["--set", "clients.cross-slot=refuse"]))
    }

    /// Default nodes, and a router with this configuration file.
    pub(crate) fn config(text: impl Into<String>) -> SiteOptions {
        SiteOptions::router(RouterOptions::config(text))
    }
}

/// Running nodes with a router in front.
#[derive(Debug)]
pub(crate) struct Site {
    // Dropped first, so that it does not log the end of its nodes.
    router: Option<Router>,
    nodes: Vec<Node>,
}

impl Site {
    /// Starts `nodes` nodes with default options.
    pub(crate) fn new(nodes: usize) -> Site {
        Site::with(nodes, &SiteOptions::default())
    }

    /// Starts `nodes` nodes with options.
    pub(crate) fn with(nodes: usize, options: &SiteOptions) -> Site {
        let count = if direct() { 1 } else { nodes };
        // In parallel, because a start mostly waits.
        let nodes: Vec<Node> = std::thread::scope(|scope| {
            let starts: Vec<_> = (0..count).map(|_| scope.spawn(|| Node::start(&options.node))).collect();
            starts.into_iter().map(|start| start.join().expect("a node")).collect()
        });
        let addresses: Vec<SocketAddr> = nodes.iter().map(Node::address).collect();
        let router = (!direct()).then(|| Router::start(&addresses, &options.router));
        Site { router, nodes }
    }

    /// Like [`Site::with`], for tests that need a router: `None` if clients use a plain server.
    pub(crate) fn router_only(nodes: usize, options: &SiteOptions) -> Option<Site> {
        if direct() {
            eprintln!("nothing to check against a plain server");
            return None;
        }
        Some(Site::with(nodes, options))
    }

    /// Address for clients.
    pub(crate) fn address(&self) -> SocketAddr {
        self.router.as_ref().map_or_else(|| self.nodes[0].address(), Router::address)
    }

    #[track_caller]
    pub(crate) fn client(&self) -> Client {
        Client::connect(self.address())
    }

    pub(crate) fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    pub(crate) fn node_mut(&mut self, index: usize) -> &mut Node {
        &mut self.nodes[index]
    }

    #[track_caller]
    pub(crate) fn router(&self) -> &Router {
        self.router.as_ref().expect("a test about the router begins with Site::router_only")
    }

    #[track_caller]
    pub(crate) fn router_mut(&mut self) -> &mut Router {
        self.router.as_mut().expect("a test about the router begins with Site::router_only")
    }

    /// Returns hash tags of keys on each node, found by writing through the router and reading the nodes.
    pub(crate) fn tags(&self) -> Vec<Vec<String>> {
        let mut client = self.client();
        let probes = 32 * self.nodes.len();
        for i in 0..probes {
            let reply = client.cmd(&format!("SET {{t{i}}}tag-probe {i}"));
            assert_eq!(reply, super::ok());
        }
        let mut tags = Vec::new();
        for node in &self.nodes {
            let found = node.cmd("KEYS {t*}tag-probe");
            let mut own: Vec<String> = found
                .items()
                .iter()
                .map(|key| key.text().split(['{', '}']).nth(1).expect("a tag").to_owned())
                .collect();
            own.sort_by_key(|tag| (tag.len(), tag.clone()));
            assert!(own.len() >= 4, "of {probes} tags a node has only {own:?}");
            tags.push(own);
        }
        for i in 0..probes {
            client.cmd(&format!("DEL {{t{i}}}tag-probe"));
        }
        tags
    }
}
