//! Placement rules for libraries that use keys of several slots together.
//!
//! The patterns have each library's default prefix. A capture is used where all commands stay within one queue,
//! so that queues spread over the nodes; otherwise one tag keeps the whole library in one slot. Keys that are used alone
//! (results of tasks, hashes of jobs) have no rule. A capture at the start places keys next to the key with its text as
//! name, which needs no rule: `{queue...}:reserved` next to the list of any name. Each library's keys and commands are in
//! `docs/any-keys.md`.

use super::Rule;

/// Rules for a library.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Preset {
    /// Name in the configuration.
    pub name: &'static str,
    /// Patterns, and their tag if they have no capture.
    rules: &'static [(&'static [&'static str], Option<&'static str>)],
}

impl Preset {
    /// The rules.
    #[must_use]
    pub fn rules(&self) -> Vec<Rule> {
        let rule = |(keys, tag): &(&[&str], Option<&str>)| Rule {
            keys: keys.iter().map(|&key| key.to_owned()).collect(),
            tag: tag.map(str::to_owned),
        };
        self.rules.iter().map(rule).collect()
    }
}

/// All presets.
pub const PRESETS: [Preset; 7] = [
    Preset { name: "bullmq", rules: &[(&["bull:{queue}:*"], None)] },
    Preset { name: "bull", rules: &[(&["bull:{queue}:*"], None)] },
    // A process polls all its queues in one command.
    Preset {
        name: "sidekiq",
        rules: &[(&["queue:*", "queues"], Some("sidekiq")), (&["stat:*"], Some("sidekiq-stat"))],
    },
    // Laravel's queue, then Horizon. Laravel begins all names with a prefix made from the name of the application.
    Preset {
        name: "horizon",
        rules: &[
            (&["{queue...}:reserved", "{queue...}:delayed", "{queue...}:notify"], None),
            (&["{app}_horizon:*", "{app}-horizon:*"], None),
            (&["horizon:*"], Some("horizon")),
        ],
    },
    // A worker polls each queue with its priorities, and returns unacknowledged messages to them. Its queues for
    // events and remote control have unique names.
    Preset {
        name: "celery",
        rules: &[
            (&["unacked", "unacked_index", "celery", "celery\u{6}\u{16}*", "_kombu.*"], Some("celery")),
            (&["{queue}\u{6}\u{16}*", "celery-taskset-meta-{group}.*", "celery-taskset-meta-{group}"], None),
        ],
    },
    // Names of jobs do not contain their queue.
    Preset { name: "rq", rules: &[(&["rq:*"], Some("rq"))] },
    Preset {
        name: "arq",
        rules: &[(
            &["arq:queue", "arq:abort", "arq:job:*", "arq:in-progress:*", "arq:retry:*", "arq:result:*"],
            Some("arq"),
        )],
    },
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::{RuleSet, Ruled};

    #[test]
    fn presets_keep_keys_of_a_queue_in_one_slot() {
        for (preset, together, apart) in [
            ("bullmq", &["bull:mail:wait", "bull:mail:7", "bull:mail:"][..], "bull:sms:wait"),
            ("bull", &["bull:mail:wait", "bull:mail:active@token"], "bull:sms:wait"),
            ("sidekiq", &["queue:default", "queue:low", "queues"], "schedule"),
            (
                "horizon",
                &["x_queues:a", "x_queues:a:reserved", "x_queues:a:delayed", "x_queues:a:notify"],
                "x_queues:b",
            ),
            ("horizon", &["laravel_horizon:job:A", "laravel_horizon:measured_jobs"], "queues:b"),
            ("horizon", &["laravel-horizon:job:A", "laravel-horizon:measured_jobs"], "queues:b"),
            ("horizon", &["horizon:job:A", "horizon:measured_jobs"], "queues:b"),
            ("celery", &["unacked", "unacked_index", "celery", "celery\u{6}\u{16}3"], "celery-task-meta-1"),
            ("celery", &["celery-taskset-meta-1.j", "celery-taskset-meta-1"], "celery-taskset-meta-2.j"),
            ("celery", &["celeryev.1-2", "celeryev.1-2\u{6}\u{16}9"], "celeryev.1-3"),
            ("celery", &["a@b.org.celery.pidbox", "a@b.org.celery.pidbox\u{6}\u{16}3"], "a@b.net.celery.pidbox"),
            ("rq", &["rq:job:1", "rq:queues", "rq:worker:a"], "other"),
            ("arq", &["arq:queue", "arq:job:1", "arq:result:1"], "other"),
        ] {
            let rules = PRESETS.iter().find(|one| one.name == preset).expect("a preset").rules();
            let ruled = Ruled::first(RuleSet::new(rules).expect("valid rules"));
            let slots: Vec<_> = together.iter().map(|key| ruled.slot_of(key.as_bytes())).collect();
            assert!(slots.iter().all(|slot| *slot == slots[0]), "{preset} {together:?} {slots:?}");
            assert_ne!(ruled.slot_of(apart.as_bytes()), slots[0], "{preset}");
        }
    }
}
