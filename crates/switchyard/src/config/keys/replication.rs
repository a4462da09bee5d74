//! Keys of nodes that have replicas, and of who is read.

use switchyard_router::Reads;

use super::{Key, Section, Takes, list, quoted};
use crate::config::listener::ListenerConfig;
use crate::config::secret::SecretForm;
use crate::config::{Config, NodeConfig};

/// Port of a Sentinel whose address names none.
const SENTINEL_PORT: u16 = 26379;

fn parse_reads(text: &str) -> Result<Reads, String> {
    Reads::parse(text).ok_or_else(|| format!("{text:?} is not primary, prefer-replica, replica or nearest"))
}

pub(super) const READS: &[Key<Config>] = &[key!(
    Section::Clients,
    "reads",
    Takes::Reload,
    &["read-from", "readfrom", "read-preference"],
    "Who answers reads, of nodes that have replicas: primary; prefer-replica (the primary where no replica is fit); replica (else an error); \
     nearest. What a replica answers may be older than the last write. Holds for clients that connect afterwards.",
    |config, raw, _| {
        config.live.reads = parse_reads(raw.text()?)?;
        Ok(())
    },
    |config| quoted(config.live.reads.name())
)];

pub(super) const LISTENER_READS: &[Key<ListenerConfig>] = &[key!(
    Section::Listener,
    "reads",
    Takes::Restart,
    &[],
    "Who answers the reads of clients of this listener, where it is not as clients.reads says.",
    |listener, raw, _| {
        listener.reads = Some(parse_reads(raw.text()?)?);
        Ok(())
    },
    |listener| listener.reads.map(Reads::name).and_then(quoted),
    "\"prefer-replica\""
)];

pub(super) const SENTINEL: &[Key<Config>] = &[
    key!(
        Section::Nodes,
        "sentinel-tls",
        Takes::Reload,
        &["sentinels-tls"],
        "Talk to the Sentinels over TLS, with the authorities and the certificate of nodes.tls-...; each Sentinel's certificate must \
         name the host under which it stands in sentinels.",
        |config, raw, _| {
            config.sentinel_tls = raw.switch()?;
            Ok(())
        },
        |config| Some(config.sentinel_tls.to_string())
    ),
    key!(
        Section::Nodes,
        "sentinel-username",
        Takes::Reload,
        &["sentinel-user"],
        "ACL user at the Sentinels; without one, the default user.",
        |config, raw, _| {
            config.sentinel_username = Some(raw.text()?.to_owned());
            Ok(())
        },
        |config| config.sentinel_username.as_ref().and_then(quoted),
        "\"switchyard\""
    ),
];

pub(super) const SENTINEL_PASSWORD: [Key<Config>; 3] =
    secret!(Config, Section::Nodes, Takes::Reload, sentinel_password, "sentinel-password", "password at the Sentinels", &[]);

pub(super) const NODE_REPLICAS: &[Key<NodeConfig>] = &[
    key!(
        Section::Node,
        "replicas",
        Takes::Reload,
        &["slaves", "replica"],
        "Replicas of this node. One that is promoted is followed; where reads may go to replicas, they go to these.",
        |node, raw, _| {
            node.replicas = raw.endpoints(Some(crate::config::NODE_PORT))?;
            Ok(())
        },
        |node| if node.replicas.is_empty() { None } else { list(node.replicas.iter().map(ToString::to_string)) },
        "[\"127.0.0.1:7101\"]"
    ),
    key!(
        Section::Node,
        "sentinel-master",
        Takes::Reload,
        &["master-name", "sentinel-primary", "master"],
        "In place of an address: the name under which Sentinels know this node. It is also the node's name.",
        |node, raw, _| {
            let name = raw.text()?;
            if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b)) {
                return Err(format!("{name:?} is not a name that Sentinel takes: letters, digits, and . _ -"));
            }
            node.sentinel_master = Some(name.to_owned());
            Ok(())
        },
        |node| node.sentinel_master.as_ref().and_then(quoted),
        "\"mymaster\""
    ),
    key!(
        Section::Node,
        "sentinels",
        Takes::Reload,
        &["sentinel"],
        "The Sentinels to ask where its primary is; together with sentinel-master.",
        |node, raw, _| {
            node.sentinels = raw.endpoints(Some(SENTINEL_PORT))?;
            Ok(())
        },
        |node| if node.sentinels.is_empty() { None } else { list(node.sentinels.iter().map(ToString::to_string)) },
        "[\"127.0.0.1:26379\"]"
    ),
];
