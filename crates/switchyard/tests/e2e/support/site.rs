//! Nodes and a router in front of them: what nearly every test begins with.

use std::net::SocketAddr;

use super::client::Client;
use super::node::{Node, NodeOptions};
use super::router::{Router, RouterOptions};

/// True where clients talk to a plain server instead of the router (`SWITCHYARD_E2E_TARGET=direct`).
pub(crate) fn direct() -> bool {
    match std::env::var("SWITCHYARD_E2E_TARGET").as_deref() {
        Ok("direct") => true,
        Ok("router") | Err(_) => false,
        Ok(other) => panic!("SWITCHYARD_E2E_TARGET must be `router` or `direct`, not `{other}`"),
    }
}

/// What to start.
#[derive(Clone, Debug, Default)]
pub(crate) struct SiteOptions {
    /// How the nodes start.
    pub(crate) node: NodeOptions,
    /// How the router starts.
    pub(crate) router: RouterOptions,
}

impl SiteOptions {
    /// Plain nodes, and this router.
    pub(crate) fn router(router: RouterOptions) -> SiteOptions {
        SiteOptions { router, ..SiteOptions::default() }
    }

    /// Plain nodes, and a router with this configuration file.
    pub(crate) fn config(text: impl Into<String>) -> SiteOptions {
        SiteOptions::router(RouterOptions::config(text))
    }
}

/// Running nodes with a router in front.
#[derive(Debug)]
pub(crate) struct Site {
    // The router goes first, so that it does not log the end of its nodes.
    router: Option<Router>,
    nodes: Vec<Node>,
}

impl Site {
    /// `nodes` nodes with everything at its default.
    pub(crate) fn new(nodes: usize) -> Site {
        Site::with(nodes, &SiteOptions::default())
    }

    /// `nodes` nodes, with options.
    pub(crate) fn with(nodes: usize, options: &SiteOptions) -> Site {
        let count = if direct() { 1 } else { nodes };
        // Started side by side: most of a start is waiting.
        let nodes: Vec<Node> = std::thread::scope(|scope| {
            let starts: Vec<_> = (0..count).map(|_| scope.spawn(|| Node::start(&options.node))).collect();
            starts.into_iter().map(|start| start.join().expect("a node")).collect()
        });
        let addresses: Vec<SocketAddr> = nodes.iter().map(Node::address).collect();
        let router = (!direct()).then(|| Router::start(&addresses, &options.router));
        Site { router, nodes }
    }

    /// The same, for a test that means nothing without a router: `None` where clients are to talk to a plain server.
    pub(crate) fn router_only(nodes: usize, options: &SiteOptions) -> Option<Site> {
        if direct() {
            eprintln!("nothing to check against a plain server");
            return None;
        }
        Some(Site::with(nodes, options))
    }

    /// Where clients connect.
    pub(crate) fn address(&self) -> SocketAddr {
        self.router.as_ref().map_or_else(|| self.nodes[0].address(), Router::address)
    }

    /// A new client.
    #[track_caller]
    pub(crate) fn client(&self) -> Client {
        Client::connect(self.address())
    }

    /// The nodes.
    pub(crate) fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// A node, to kill or restart.
    pub(crate) fn node_mut(&mut self, index: usize) -> &mut Node {
        &mut self.nodes[index]
    }

    /// The router.
    #[track_caller]
    pub(crate) fn router(&self) -> &Router {
        self.router.as_ref().expect("a test about the router begins with Site::router_only")
    }

    /// The router, to end it.
    #[track_caller]
    pub(crate) fn router_mut(&mut self) -> &mut Router {
        self.router.as_mut().expect("a test about the router begins with Site::router_only")
    }

    /// For each node, hash tags whose keys live there: found by writing through the router and looking at the nodes.
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
