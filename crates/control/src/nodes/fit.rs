//! Requirements for a server to be a node, regardless of its keys. Checked when a server joins, and for all nodes at a
//! first start.

use super::check::REDIS_MIN;
use super::{Answer, redis_version};

/// Whether a reply to `SWITCHYARD STATUS` is a router's. Servers do not know the command, and a server that accepts any
/// command is no router either. `INFO` cannot decide, because a router composes it from its nodes' INFO.
pub(crate) fn is_router(marker: &Answer) -> bool {
    let is_status = || marker.items().first().is_some_and(|name| name.text() == "epoch");
    marker.error().map_or_else(is_status, |error| error.starts_with("NOPERM"))
}

/// Whether a server of this version may be unable to read values written by the other. Versions have the router's form,
/// such as `valkey 8.1.0`.
pub(crate) fn is_older(version: &str, than: &str) -> bool {
    let numbers = |text: &str| -> Option<(bool, (u32, u32))> {
        let (flavour, version) = text.split_once(' ')?;
        let mut parts = version.split('.').map(|part| part.parse().ok());
        Some((flavour == "valkey", (parts.next()??, parts.next()??)))
    };
    let (Some((is_valkey, own)), Some((other_is_valkey, other))) = (numbers(version), numbers(than)) else {
        return false;
    };
    match (is_valkey, other_is_valkey) {
        (true, true) | (false, false) => own < other,
        // Every Valkey version writes the format of Redis 7.2 or a later one.
        (false, true) => own < (7, 2),
        (true, false) => other > (7, 2),
    }
}

/// Reason, from `INFO`, why a server cannot be a node.
pub(crate) fn unfit_reason(name: &str, info: &str, is_router: bool) -> Option<String> {
    let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
    if is_router {
        return Some(format!("{name} is a Switchyard router: a node must be a Redis or Valkey server"));
    }
    if redis_version(info).is_some_and(|version| version < REDIS_MIN) {
        let version = field("redis_version").unwrap_or_default();
        return Some(format!("{name} is redis {version}, which is too old: nodes need Redis 6.2 or later, or Valkey"));
    }
    if field("cluster_enabled") == Some("1") {
        return Some(format!(
            "{name} runs in cluster mode, where it refuses keys of slots that it does not own: set cluster-enabled no there"
        ));
    }
    if field("role") == Some("slave") {
        let primary = |part| field(part).unwrap_or("?");
        return Some(format!(
            "{name} is a replica of {}:{}, so it takes no writes: add its primary, or promote it first (REPLICAOF NO ONE)",
            primary("master_host"),
            primary("master_port")
        ));
    }
    None
}

#[cfg(test)]
mod tests {
    use super::is_older;

    #[test]
    fn values_are_readable_by_newer_servers_only() {
        for (version, than, expected) in [
            ("redis 7.0.15", "redis 7.2.4", true),
            ("redis 7.2.4", "redis 7.0.15", false),
            ("redis 7.2.4", "redis 7.2.9", false),
            ("redis 7.0.15", "valkey 8.0.1", true),
            ("redis 7.2.4", "valkey 7.2.5", false),
            ("valkey 8.0.1", "valkey 9.0.0", true),
            ("valkey 8.0.1", "redis 7.2.4", false),
            ("valkey 8.0.1", "redis 8.0.0", true),
            ("unknown", "redis 7.2.4", false),
        ] {
            assert_eq!(is_older(version, than), expected, "{version} and {than}");
        }
    }
}
