//! Display of a configuration: as a file, as an example, and as the difference between two.

use std::collections::BTreeSet;
use std::fmt::Write;

use switchyard_policy::topology::Scheme;

use super::keys::{self, AppliesOn, Key, Section};
use super::listener::ListenerConfig;
use super::{Config, NodeConfig, Origin, PoolConfig};

/// Renders the effective configuration as TOML, each value with its origin. Secrets are shown as `***`.
pub(crate) fn render(config: &Config) -> String {
    let mut out = String::new();
    let mut section = Section::Top;
    for key in keys::CONFIG {
        let Some(value) = (key.show)(config) else {
            continue;
        };
        if key.section != section {
            section = key.section;
            let _ = writeln!(out, "\n[{}]", section.name());
        }
        let origin = config.origin(&key.path()).map_or("default".to_owned(), ToString::to_string);
        let line = format!("{} = {value}", key.name);
        let _ = writeln!(out, "{line:<44} # {origin}");
    }
    config
        .listeners
        .iter()
        .for_each(|listener| item(&mut out, Section::Listener, keys::LISTENER, listener, listener.origin.as_ref()));
    config.limits.iter().for_each(|limit| item(&mut out, Section::Limit, keys::LIMIT, limit, None));
    config.rules.iter().for_each(|rule| item(&mut out, Section::Rule, keys::RULE, rule, None));
    config.nodes.iter().for_each(|node| item(&mut out, Section::Node, keys::NODE, node, node.origin.as_ref()));
    if let Some(pool) = &config.pool {
        render_pool(&mut out, pool, &config.nodes);
    }
    out
}

/// Renders the placement settings of twemproxy's file as comments, because our own file has no keys for them.
fn render_pool(out: &mut String, pool: &PoolConfig, nodes: &[NodeConfig]) {
    let Scheme { hash, tag, distribution } = &pool.scheme;
    let tag = tag.map_or("none".to_owned(), |tag| format!("\"{}\"", tag.escape_ascii()));
    let _ = writeln!(out, "\n# Keys of pool {} are placed by these values of twemproxy's file:", pool.name());
    let _ = writeln!(out, "# hash = {}\n# distribution = {}\n# hash_tag = {tag}", hash.name(), distribution.name());
    for node in nodes {
        let address = node.address.as_ref().map_or("-".to_owned(), ToString::to_string);
        let _ = writeln!(
            out,
            "# server {} = {address}, weight {}",
            node.name().unwrap_or_default(),
            node.weight.unwrap_or(1)
        );
    }
}

/// Renders a `[[...]]` table, with its origin next to its name.
fn item<T>(out: &mut String, list: Section, keys: &[Key<T>], table: &T, origin: Option<&Origin>) {
    let _ = write!(out, "\n[[{}]]\n", list.name());
    for key in keys {
        let Some(value) = (key.show)(table) else { continue };
        let line = format!("{} = {value}", key.name);
        let _ = match origin.filter(|_| matches!(key.name, "address" | "sentinel-master")) {
            Some(origin) => writeln!(out, "{line:<44} # {origin}"),
            None => writeln!(out, "{line}"),
        };
    }
}

/// Renders a complete configuration file: every key with its help and default, commented out.
pub(crate) fn example() -> String {
    let defaults = Config::default();
    let mut out = String::from(
        "# Switchyard. Every key is shown with its default; remove the # to change it.\n\
         # Sizes: 1kb = 1024, 1k = 1000, also mb, gb. Times: 250ms, 10s, 5m. `switchyard check-config -c FILE` checks it.\n",
    );
    let mut section = Section::Top;
    for key in keys::CONFIG {
        if key.section != section {
            section = key.section;
            let _ = writeln!(out, "\n[{}]", section.name());
        }
        let value = match key.name {
            // These defaults depend on the machine and the user.
            "workers" | "state-dir" => None,
            _ => (key.show)(&defaults),
        };
        comment(&mut out, key, value.as_deref());
    }
    out.push_str("\n# One for each listener with settings of its own.\n#[[listener]]\n");
    for key in keys::LISTENER {
        comment(&mut out, key, None);
    }
    out.push_str("\n# One for each limit on keys.\n#[[limit]]\n");
    for key in keys::LIMIT {
        comment(&mut out, key, None);
    }
    out.push_str("\n# One for each rule that keeps keys in one slot.\n#[[placement.rule]]\n");
    for key in keys::RULE {
        comment(&mut out, key, None);
    }
    out.push_str("\n# One for each Redis or Valkey server.\n[[node]]\n");
    for key in keys::NODE {
        if key.name == "address" {
            let _ = write!(out, "# {}\n{} = {}\n", key.help, key.name, key.example);
        } else {
            comment(&mut out, key, None);
        }
    }
    out
}

fn comment<T>(out: &mut String, key: &Key<T>, default: Option<&str>) {
    for line in wrap(key.help, 100) {
        let _ = writeln!(out, "# {line}");
    }
    let shown = match (key.name, default) {
        ("workers", _) => "2",
        ("state-dir", _) => "\"/var/lib/switchyard\"",
        (_, Some(value)) => value,
        (_, None) => key.example,
    };
    let _ = writeln!(out, "#{} = {shown}", key.name);
}

fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split(' ') {
        let last = lines.len() - 1;
        if !lines[last].is_empty() && lines[last].len() + 1 + word.len() > width {
            lines.push(word.to_owned());
        } else {
            if !lines[last].is_empty() {
                lines[last].push(' ');
            }
            lines[last].push_str(word);
        }
    }
    lines
}

/// A key with a changed value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    /// Text such as `clients.max-clients: 10 -> 20`, or a sentence about a node.
    pub(crate) description: String,
    pub(crate) takes: AppliesOn,
}

impl Config {
    /// Differences to `running`, for the log of a reload. For secrets, only a changed source is reported.
    pub(crate) fn changes_since(&self, running: &Config) -> Vec<Change> {
        let mut changes: Vec<Change> = keys::CONFIG
            .iter()
            .filter_map(|key| {
                let (old, new) = ((key.show)(running), (key.show)(self));
                let what = format!(
                    "{}: {} -> {}",
                    key.path(),
                    old.as_deref().unwrap_or("none"),
                    new.as_deref().unwrap_or("none")
                );
                (old != new).then_some(Change { description: what, takes: key.takes })
            })
            .collect();
        let plain = |config: &Config| {
            config.listeners.iter().map(|l| ListenerConfig { origin: None, ..l.clone() }).collect::<Vec<_>>()
        };
        if plain(self) != plain(running) {
            let what = match &self.pool {
                Some(pool) => format!("the listen address of pool {}", pool.name()),
                None => "the [[listener]] tables".to_owned(),
            };
            changes.push(Change { description: what, takes: AppliesOn::Restart });
        }
        if self.limits != running.limits {
            changes.push(Change { description: "the [[limit]] tables".to_owned(), takes: AppliesOn::Reload });
        }
        if self.rules != running.rules {
            changes.push(Change { description: "the [[placement.rule]] tables".to_owned(), takes: AppliesOn::Reload });
        }
        let by_name = |config: &Config, name: &str| -> Option<NodeConfig> {
            config.nodes.iter().find(|node| node.name().as_deref() == Some(name)).cloned()
        };
        let names: BTreeSet<String> = self.node_names().into_iter().chain(running.node_names()).collect();
        for name in names {
            let what = match (by_name(running, &name), by_name(self, &name)) {
                (None, Some(_)) => format!("node {name} added"),
                (Some(_), None) => format!("node {name} removed"),
                (Some(old), Some(new)) if old.tls != new.tls || old.tls_server_name != new.tls_server_name => {
                    format!("node {name}: its TLS, for new connections")
                }
                (Some(old), Some(new)) if old.replicas != new.replicas || old.sentinels != new.sentinels => {
                    format!("node {name}: its replicas or Sentinels")
                }
                (Some(old), Some(new)) if old.username != new.username || old.password != new.password => {
                    format!("node {name}: its user or password")
                }
                (Some(old), Some(new)) if old.weight != new.weight => format!("node {name}: its weight"),
                (Some(old), Some(new)) if old.capacity != new.capacity => format!("node {name}: its capacity"),
                _ => continue,
            };
            changes.push(Change { description: what, takes: AppliesOn::Reload });
        }
        changes
    }
}

/// Renders the reference in docs/configuration.md.
#[cfg(test)]
pub(super) fn reference() -> String {
    let defaults = Config::default();
    let mut out = String::new();
    let mut table = |title: &str, rows: Vec<[String; 4]>| {
        let _ = write!(out, "### {title}\n\n| key | default | reload | meaning |\n|---|---|---|---|\n");
        for [name, default, takes, help] in rows {
            let _ = writeln!(out, "| `{name}` | {default} | {takes} | {help} |");
        }
        out.push('\n');
    };
    fn row<T>(key: &Key<T>, default: Option<String>) -> [String; 4] {
        let default = match key.name {
            "workers" => "processors".to_owned(),
            "state-dir" => "see text".to_owned(),
            _ => default.map_or_else(String::new, |value| format!("`{value}`")),
        };
        let takes = match key.takes {
            AppliesOn::Reload => "yes",
            AppliesOn::Restart => "restart",
        };
        [key.name.to_owned(), default, takes.to_owned(), key.help.replace('|', "\\|")]
    }
    let of = |section: Section| {
        keys::CONFIG.iter().filter(|key| key.section == section).map(|key| row(key, (key.show)(&defaults))).collect()
    };
    table("Top of the file", of(Section::Top));
    for section in Section::TABLES {
        table(&format!("`[{}]`", section.name()), of(section));
    }
    table(
        "`[[listener]]`, one for each listener with settings of its own",
        keys::LISTENER.iter().map(|key| row(key, None)).collect(),
    );
    table("`[[limit]]`, one for each limit on keys", keys::LIMIT.iter().map(|key| row(key, None)).collect());
    table(
        "`[[placement.rule]]`, one for each rule that keeps keys in one slot",
        keys::RULE.iter().map(|key| row(key, None)).collect(),
    );
    table("`[[node]]`, one for each node", keys::NODE.iter().map(|key| row(key, None)).collect());
    out
}
