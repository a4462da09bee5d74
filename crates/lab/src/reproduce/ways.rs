//! Compared kinds of moves: each protocol of `switchyard move`, safe and as published, with its arguments.

use super::published::Row;

/// A kind of move.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Way {
    /// Name in tables.
    pub name: &'static str,
    /// Arguments of `switchyard move`.
    pub flags: &'static [&'static str],
    /// Published numbers for comparison.
    pub published: Option<Row>,
}

impl Way {
    /// Whether the move limits the source's commands by a preset. The paper has values of presets for one cell.
    #[must_use]
    pub fn has_preset(&self) -> bool {
        self.flags.contains(&SOURCE_OPS_MAX)
    }

    /// Whether the router needs the feature `research` for it.
    #[must_use]
    pub fn loses_keys(&self) -> bool {
        self.flags.contains(&"--allow-key-loss")
    }
}

const fn way(name: &'static str, flags: &'static [&'static str], published: Option<Row>) -> Way {
    Way { name, flags, published }
}

/// Flag of the limit. Its presets are replaced by commands per second when the capacity of the source is known.
pub(super) const SOURCE_OPS_MAX: &str = "--source-ops-max";

/// All kinds of moves. The paper's tables are compared with the modes as published, and with the protocol from the
/// source.
pub const WAYS: [Way; 14] = [
    way("switchyard", &["--goal", "fast"], None),
    way("stop-and-copy", &["--protocol", "stop-and-copy", "--goal", "fast", "--allow-key-loss"], None),
    way("freeze-and-copy", &["--protocol", "freeze-and-copy", "--goal", "fast"], None),
    way("source", &["--protocol", "source", "--goal", "fast"], Some(Row::Source)),
    way("rocksteady", &["--protocol", "rocksteady", "--goal", "fast"], None),
    way("fulva", &["--protocol", "fulva", "--goal", "fast"], None),
    way("netmigrate", &["--protocol", "netmigrate", "--goal", "fast"], None),
    way(
        "rocksteady (paper)",
        &["--protocol", "rocksteady", "--goal", "fast", "--mode", "paper", "--allow-key-loss"],
        Some(Row::Rocksteady),
    ),
    way(
        "netmigrate (paper)",
        &["--protocol", "netmigrate", "--goal", "fast", "--mode", "paper", "--allow-key-loss"],
        Some(Row::NetMigrate),
    ),
    way(
        "fulva (paper)",
        &["--protocol", "fulva", "--goal", "fast", "--mode", "paper", "--allow-key-loss"],
        Some(Row::Fulva),
    ),
    way(
        "netmigrate-short (paper)",
        &["--protocol", "netmigrate", "--goal", "fast", "--mode", "paper", "--allow-key-loss", SOURCE_OPS_MAX, "short"],
        None,
    ),
    way(
        "netmigrate-medium (paper)",
        &[
            "--protocol",
            "netmigrate",
            "--goal",
            "fast",
            "--mode",
            "paper",
            "--allow-key-loss",
            SOURCE_OPS_MAX,
            "medium",
        ],
        None,
    ),
    way("bloom (paper)", &["--protocol", "bloom", "--goal", "fast", "--mode", "paper", "--allow-key-loss"], None),
    way(
        "bloom without forwarding (paper)",
        &["--protocol", "bloom", "--goal", "fast", "--mode", "paper", "--no-forwarding", "--allow-key-loss"],
        None,
    ),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn kinds_of_moves_are_unique() {
        let names: BTreeSet<_> = WAYS.iter().map(|way| way.name).collect();
        let flags: BTreeSet<_> = WAYS.iter().map(|way| way.flags).collect();
        assert_eq!((names.len(), flags.len()), (WAYS.len(), WAYS.len()));
    }
}
