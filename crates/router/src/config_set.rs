//! Settings of the router that CONFIG SET can change.
//!
//! The values are separate from the configuration: they survive when it is applied again because a node joins, and they
//! are not written to a file. A reload or a restart discards them, so that the file is authoritative.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::time::Duration;

use switchyard_resp::glob;

use crate::settings::RuntimeSettings;

/// A setting of the router that CONFIG SET can change.
pub(crate) struct Settable {
    /// Name in Redis.
    pub(crate) name: &'static str,
    /// Range accepted by Redis.
    pub(crate) range: RangeInclusive<i64>,
    set: fn(&mut RuntimeSettings, i64),
}

pub(crate) const SETTABLE: &[Settable] = &[
    Settable { name: "maxclients", range: 1..=10_000_000, set: |live, clients| live.max_clients = size(clients) },
    Settable {
        name: "proto-max-bulk-len",
        range: 1 << 20..=4 << 30,
        set: |live, bytes| live.argument_max = size(bytes),
    },
    Settable {
        name: "slowlog-log-slower-than",
        range: -1..=i64::MAX,
        set: |live, us| live.slowlog_slower_than = u64::try_from(us).ok().map(Duration::from_micros),
    },
    Settable {
        name: "slowlog-max-len",
        range: 0..=i64::MAX,
        set: |live, entries| live.slowlog_max_len = size(entries),
    },
    Settable {
        name: "timeout",
        range: 0..=i32::MAX as i64,
        set: |live, seconds| {
            live.client_idle_timeout = u64::try_from(seconds).ok().filter(|s| *s > 0).map(Duration::from_secs)
        },
    },
];

fn size(number: i64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

/// Whether `nodes.config-set` names this node setting or has a pattern for it.
pub fn allows_config_set(config_set: &[String], name: &str) -> bool {
    config_set.iter().any(|pattern| glob::matches_nocase(pattern.as_bytes(), name.as_bytes()))
}

/// Values of changed settings, by name.
#[derive(Clone, Debug, Default)]
pub(crate) struct Overrides(BTreeMap<&'static str, i64>);

impl Overrides {
    pub(crate) fn set(&mut self, settable: &Settable, number: i64) {
        self.0.insert(settable.name, number);
    }

    /// Returns the settings with these values replacing the configured ones.
    pub(crate) fn over(&self, mut live: RuntimeSettings) -> RuntimeSettings {
        for settable in SETTABLE {
            if let Some(number) = self.0.get(settable.name) {
                (settable.set)(&mut live, *number);
            }
        }
        live
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::{Overrides, SETTABLE};
    use crate::settings::RuntimeSettings;

    #[test]
    fn zero_and_minus_one_disable_a_setting() {
        let mut overrides = Overrides::default();
        let mut set = |name: &str, number| {
            let settable = SETTABLE.iter().find(|s| s.name == name).expect("a setting");
            assert!(settable.range.contains(&number), "{name}");
            overrides.set(settable, number);
            let live = overrides.over(RuntimeSettings::default());
            (live.client_idle_timeout.map(|t| t.as_secs()), live.slowlog_slower_than.map(|t| t.as_micros()))
        };
        assert_eq!(set("timeout", 7).0, Some(7));
        assert_eq!(set("timeout", 0).0, None);
        assert_eq!(set("slowlog-log-slower-than", 0).1, Some(0));
        assert_eq!(set("slowlog-log-slower-than", -1).1, None);
    }
}
