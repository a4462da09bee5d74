//! Keys about what the router makes of many nodes: commands across slots, settings of all nodes, scripts, cluster emulation, slow log.
//!
//! A file of its own only because `keys` would be too long to read.

use std::time::Duration;

use switchyard_router::EmptyReturn;

use super::Config;
use super::Endpoint;
use super::keys::{GB, HOUR, Key, Section, Takes, key, list, quoted, size, time};

pub(super) const CROSS_SLOT: &[Key<Config>] = &[key!(
    Section::Clients,
    "cross-slot-max",
    Takes::Reload,
    &[],
    "Bytes of keys that a command which reads several keys (SUNION, ZINTERSTORE, BITOP, COPY) may bring together at one node \
         where they are in different slots. 0: refuse it with CROSSSLOT, as Redis Cluster does.",
    |config, raw, _| {
        config.live.cross_slot_max = raw.size(0..=GB)?;
        Ok(())
    },
    |config| size(config.live.cross_slot_max)
)];

pub(super) const NODES_SET: &[Key<Config>] = &[
    key!(
        Section::Nodes,
        "config-set",
        Takes::Reload,
        &[],
        "Names of settings, or patterns such as \"maxmemory*\", that clients may change at every node by CONFIG SET. Settings that \
         belong to one node (ports, files, passwords) are refused all the same.",
        |config, raw, _| {
            config.live.config_set = raw.texts()?.iter().map(|name| name.to_ascii_lowercase()).collect();
            Ok(())
        },
        |config| list(config.live.config_set.iter().cloned())
    ),
    key!(
        Section::Nodes,
        "empty-return",
        Takes::Reload,
        &[],
        "What is done with a node that restarted and lost the keys that it had. serve: it is served, its keys are gone. hold: it is treated \
         as down until SWITCHYARD ACCEPT, or until it has them again. auto: hold where it keeps its data on disk (appendonly, save), else serve.",
        |config, raw, _| {
            config.live.empty_return = match raw.text()? {
                "serve" => EmptyReturn::Serve,
                "hold" => EmptyReturn::Hold,
                "auto" => EmptyReturn::Auto,
                other => return Err(format!("{other:?} is not serve, hold or auto")),
            };
            Ok(())
        },
        |config| quoted(match config.live.empty_return {
            EmptyReturn::Serve => "serve",
            EmptyReturn::Hold => "hold",
            EmptyReturn::Auto => "auto",
        })
    ),
];

pub(super) const SCRIPTS: &[Key<Config>] = &[key!(
    Section::Scripts,
    "undeclared-keys",
    Takes::Reload,
    &["allow-cross-slot-keys"],
    "refuse: a script or function that touches a key which it neither declares nor has in the slot of one that it declares, \
         gets an error. allow: it sees and changes what the node of its declared keys happens to have.",
    |config, raw, _| {
        config.live.check_scripts = match raw.text()? {
            "refuse" => true,
            "allow" => false,
            other => return Err(format!("{other:?} is not refuse or allow")),
        };
        Ok(())
    },
    |config| quoted(if config.live.check_scripts { "refuse" } else { "allow" })
)];

pub(super) const CLUSTER: &[Key<Config>] = &[
    key!(
        Section::Cluster,
        "emulate",
        Takes::Reload,
        &["cluster-enabled", "enabled"],
        "Look like a Redis Cluster to clients: answer CLUSTER, READONLY and ASKING, and say cluster_enabled:1 in INFO.",
        |config, raw, _| {
            config.cluster_emulate = raw.switch()?;
            Ok(())
        },
        |config| Some(config.cluster_emulate.to_string())
    ),
    key!(
        Section::Cluster,
        "announce",
        Takes::Reload,
        &["cluster-announce-ip", "cluster-announce-hostname"],
        "Addresses of the routers that cluster clients are told of, the same list in every router; each gets a share of the slots. \
         The default is the address that the client is connected to.",
        |config, raw, _| {
            let addresses = raw.texts()?;
            config.cluster_announce = addresses.iter().map(|text| Endpoint::parse(text, None)).collect::<Result<_, _>>()?;
            Ok(())
        },
        |config| list(config.cluster_announce.iter().map(ToString::to_string))
    ),
];

pub(super) const SLOW_LOG: &[Key<Config>] = &[
    key!(
        Section::Log,
        "slowlog-log-slower-than",
        Takes::Reload,
        &["slowlog-slower-than"],
        "Commands that take at least so long are entered into the slow log (SLOWLOG GET). 0s: all.",
        |config, raw, _| {
            config.live.slowlog_slower_than = Some(raw.time(Duration::ZERO..=HOUR)?);
            Ok(())
        },
        |config| time(config.live.slowlog_slower_than.unwrap_or_default())
    ),
    key!(
        Section::Log,
        "slowlog-max-len",
        Takes::Reload,
        &[],
        "Entries of the slow log; 0 switches it off.",
        |config, raw, _| {
            config.live.slowlog_max_len = raw.count(0..=1_000_000)? as usize;
            Ok(())
        },
        |config| Some(config.live.slowlog_max_len.to_string())
    ),
    key!(
        Section::Log,
        "slowlog-arguments",
        Takes::Reload,
        &[],
        "Whether the slow log has the arguments of commands (at most 32, of 128 bytes each), or only their names.",
        |config, raw, _| {
            config.live.slowlog_arguments = raw.switch()?;
            Ok(())
        },
        |config| Some(config.live.slowlog_arguments.to_string())
    ),
];
