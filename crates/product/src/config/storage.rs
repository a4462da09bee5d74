//! `[storage]`: a Redis or Valkey Cluster in place of nodes, and the settings that do not apply to one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rustls::ClientConfig;
use switchyard_control::cluster::ClusterReader;
use switchyard_router::{CrossSlot, NodeAccess, NodeTls, OnDataLoss, RuntimeSettings, Secret};

use super::raw::Raw;
use super::tls::NodeFiles;
use super::{Config, Endpoint, NODE_PORT, Problem};

/// Time that commands wait for an owner of their slot by default.
const WAIT_MAX: Duration = Duration::from_secs(5);

/// Time for which a replaced process serves its clients by default: connections of pools usually live for minutes.
const DRAIN_MAX: Duration = Duration::from_secs(600);

/// The section as configured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct StorageConfig {
    /// Some members. Empty: the storage are nodes.
    pub(super) cluster: Vec<Endpoint>,
    /// Addresses to use in place of reported ones.
    pub(super) addresses: Vec<Mapping>,
    pub(super) wait_max: Option<Duration>,
    pub(super) drain_max: Option<Duration>,
}

/// An address to use in place of a reported one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mapping {
    reported: Endpoint,
    used: Endpoint,
}

impl std::fmt::Display for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}={}", self.reported, self.used)
    }
}

pub(super) fn read_mappings(raw: &Raw) -> Result<Vec<Mapping>, String> {
    let mapping = |text: String| {
        let (reported, used) = text
            .split_once('=')
            .ok_or_else(|| format!("{text:?} is not written as REPORTED=USED, such as 10.0.0.5:6379=nat:7001"))?;
        let place = |text: &str| Endpoint::parse(text, Some(NODE_PORT));
        Ok(Mapping { reported: place(reported)?, used: place(used)? })
    };
    raw.texts()?.into_iter().filter(|text| !text.is_empty()).map(mapping).collect()
}

/// Settings of standalone nodes, by the beginning of their paths, with the reason why they do not apply to a cluster.
const OF_NODES: [(&str, &str); 11] = [
    ("state-dir", "a router in front of a cluster keeps no state"),
    ("nodes.on-data-loss", "the cluster itself decides whether a member is served"),
    ("nodes.sentinel-", "a cluster has no Sentinels"),
    ("nodes.wait-max", "write wait-max in [storage]"),
    ("moves.", "its members copy keys themselves"),
    ("placement.", "the cluster itself places keys"),
    ("planner.policy", "other policies move single keys, which cannot leave their slot"),
    ("planner.max-keys-per-minute", "single keys cannot leave their slot"),
    ("planner.interval", "slots of a cluster are planned every 10 s"),
    ("autoscale.", "members join and leave by the cluster's own tools"),
    ("clients.cross-slot", "members of a cluster refuse commands with keys of several slots"),
];

impl Config {
    /// Whether the storage is a cluster.
    pub(crate) fn is_of_cluster(&self) -> bool {
        !self.storage.cluster.is_empty()
    }

    /// Time for which a replaced process serves its clients.
    pub(crate) fn drain_max(&self) -> Duration {
        self.storage.drain_max.unwrap_or(DRAIN_MAX)
    }

    /// Refuses settings that do not apply to the kind of storage.
    pub(super) fn check_storage(&self, problems: &mut Vec<Problem>) {
        let given: Vec<&String> = self.origins.keys().collect();
        if !self.is_of_cluster() {
            let alone = given.into_iter().filter(|path| path.starts_with("storage."));
            problems.extend(alone.map(|path| {
                self.problem(path, format!("{path} is for a cluster: name some of its members with storage.cluster"))
            }));
            if self.runtime.hot_copies.is_bounded {
                let text = "hot-copies.promise = \"bounded\" is for a cluster: copies of nodes' keys are never stale";
                problems.push(self.problem("hot-copies.promise", text));
            }
            return;
        }
        let is_of_copies = |path: &&&String| path.starts_with("hot-copies.") && path.as_str() != "hot-copies.mode";
        let of_copies = given.iter().find(is_of_copies).map(|path| (*path).clone());
        let mut refuse = |path: &str, why: &str| {
            problems.push(self.problem(path, format!("{path} does not apply to a cluster as storage: {why}")));
        };
        for path in given {
            if let Some((_, why)) = OF_NODES.iter().find(|(start, _)| path.starts_with(start)) {
                refuse(path, why);
            }
        }
        if let Some(path) = of_copies.filter(|_| !self.runtime.hot_copies.is_bounded) {
            refuse(&path, "others may write its keys, so copies need hot-copies.promise = \"bounded\"");
        }
        if self.runtime.database != 0 {
            refuse("clients.database", "it has database 0 only");
        }
        if !self.rules.is_empty() {
            refuse("placement.rule", "the cluster itself places keys");
        }
        if self.pool.is_some() {
            problems.push(Problem::new("storage.cluster: a twemproxy configuration has a list of servers instead"));
        }
        if let Some(node) = self.nodes.first() {
            let text = "nodes and storage.cluster are both given; keep one";
            problems.push(Problem { place: node.origin.as_ref().map(ToString::to_string), text: text.to_owned() });
        }
    }

    /// Adapts the settings of the router to members of a cluster.
    pub(super) fn settings_of_cluster(&self, live: RuntimeSettings) -> RuntimeSettings {
        let mut hot_copies = live.hot_copies.clone();
        hot_copies.is_on &= hot_copies.is_bounded;
        RuntimeSettings {
            wait_max: Some(self.storage.wait_max.unwrap_or(WAIT_MAX)),
            on_data_loss: OnDataLoss::Serve,
            one_database: true,
            cross_slot: CrossSlot::Refuse,
            cross_slot_max: 0,
            hot_copies,
            ..live
        }
    }

    /// Returns access to the cluster. `tls`: settings for all members, if they use TLS.
    pub(super) fn cluster_places(
        &self,
        password: Option<Secret>,
        tls: Option<(Arc<ClientConfig>, String)>,
    ) -> Option<ClusterPlaces> {
        self.is_of_cluster().then(|| ClusterPlaces {
            seeds: self.storage.cluster.clone(),
            addresses: self
                .storage
                .addresses
                .iter()
                .map(|mapping| (mapping.reported.clone(), mapping.used.clone()))
                .collect(),
            username: self.nodes_username.clone(),
            password,
            tls,
            server_name: self.nodes_tls.server_name.clone(),
            timeout: self.runtime.connect_timeout,
        })
    }
}

/// Access to a cluster.
#[derive(Clone, Debug)]
pub(crate) struct ClusterPlaces {
    seeds: Vec<Endpoint>,
    addresses: BTreeMap<Endpoint, Endpoint>,
    username: Option<String>,
    password: Option<Secret>,
    tls: Option<(Arc<ClientConfig>, String)>,
    server_name: Option<String>,
    timeout: Duration,
}

impl ClusterPlaces {
    /// Returns a reader of the cluster's map.
    pub(crate) fn reader(&self) -> ClusterReader {
        let places = self.clone();
        let access = move |place: &Endpoint| {
            let tls = places.tls_of(place);
            NodeAccess {
                name: place.to_string(),
                address: None,
                unresolved: tls.as_ref().err().cloned(),
                username: places.username.clone(),
                password: places.password.clone(),
                tls: tls.unwrap_or_default(),
            }
        };
        ClusterReader::new(self.seeds.clone(), self.addresses.clone(), Box::new(access), self.timeout)
    }

    /// TLS settings for a member. Its certificate must have its own name or address, unless a name is configured.
    fn tls_of(&self, place: &Endpoint) -> Result<Option<NodeTls>, String> {
        let name = self.server_name.as_deref().unwrap_or(place.host());
        self.tls.as_ref().map(|shared| NodeFiles::node(shared, name)).transpose()
    }
}

#[cfg(test)]
mod tests {
    use switchyard_control::planner::Mode;

    use super::*;
    use crate::config::Sources;

    fn read(text: &str) -> Result<Config, String> {
        let path = std::path::Path::new("s.toml");
        Sources::default().read_text(Some((path, text))).map_err(|problems| problems.to_string())
    }

    #[test]
    fn a_cluster_replaces_the_nodes() {
        let text = "[storage]\ncluster = \"redis-1\"\naddresses = [\"10.0.0.5:6379=nat:7001\"]\nwait-max = \"3s\"\n";
        let config = read(text).expect("good");
        assert!(config.is_of_cluster());
        assert_eq!(config.drain_max(), Duration::from_secs(600));
        let changed = read(&format!("{text}drain-max = \"0s\"\n")).expect("good");
        assert_eq!(changed.drain_max(), Duration::ZERO);
        let resolved = config.resolve(|_| None).expect("good");
        assert_eq!((resolved.live.wait_max, resolved.live.cross_slot_max), (Some(Duration::from_secs(3)), 0));
        let places = resolved.cluster.expect("a cluster");
        assert_eq!(places.seeds[0].to_string(), "redis-1:6379");
        assert_eq!(places.addresses.len(), 1);
        let shown = crate::config::render(&config);
        let acting = read(&format!("{text}[planner]\nmode = \"act\"\n")).expect("good");
        assert_eq!((config.planner.mode, acting.planner.mode), (Mode::Observe, Mode::On));
        assert!(shown.contains("addresses = [\"10.0.0.5:6379=nat:7001\"]"), "{shown}");
    }

    #[test]
    fn settings_of_nodes_are_refused_with_a_reason() {
        let cluster = "[storage]\ncluster = [\"a:1\"]\n";
        for (more, expected) in [
            ("[[node]]\naddress = \"b:1\"\n", "nodes and storage.cluster are both given"),
            ("[moves]\ngoal = \"fast\"\n", "s.toml:4: moves.goal does not apply to a cluster as storage"),
            ("[planner]\npolicy = \"makris-ffd\"\n", "planner.policy does not apply"),
            ("[clients]\ndatabase = 1\n", "clients.database does not apply"),
            ("[nodes]\nwait-max = \"1s\"\n", "write wait-max in [storage]"),
            ("[hot-copies]\nmemory = \"1mb\"\n", "copies need hot-copies.promise = \"bounded\""),
        ] {
            let error = read(&format!("{cluster}{more}")).map(drop).expect_err(more);
            assert!(error.contains(expected), "{error}");
        }
        let error = read("[hot-copies]\npromise = \"bounded\"\n").map(drop).expect_err("nodes");
        assert!(error.contains("s.toml:2: hot-copies.promise = \"bounded\" is for a cluster"), "{error}");
        let copies = "[hot-copies]\npromise = \"bounded\"\nstaleness-max = \"200ms\"\n";
        let live = |text: &str| read(&format!("{cluster}{text}")).expect("good").resolve(|_| None).expect("good").live;
        assert_eq!(live(copies).hot_copies.staleness(), Some(Duration::from_millis(200)));
        assert!(live(copies).hot_copies.is_on && !live("").hot_copies.is_on);
        let error = read("[storage]\nwait-max = \"1s\"\n[[node]]\naddress = \"b:1\"\n").map(drop).expect_err("alone");
        assert!(error.contains("s.toml:2: storage.wait-max is for a cluster"), "{error}");
    }
}
