//! Placement rules in the configuration: `[placement]` and `[[placement.rule]]`.

use switchyard_policy::topology::{PRESETS, Preset, Rule, RuleSet};

use super::raw::Raw;
use super::{Config, Problem, Problems};

/// When changed rules are adopted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Adopt {
    /// After an order.
    Ask,
    /// After a start or a reload.
    Auto,
}

/// A `[[placement.rule]]` table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct RuleConfig {
    pub(super) preset: Option<&'static Preset>,
    pub(super) keys: Vec<String>,
    pub(super) tag: Option<String>,
}

/// Reads the name of a preset.
pub(super) fn read_preset(raw: &Raw) -> Result<&'static Preset, String> {
    let name = raw.text()?;
    PRESETS.iter().find(|preset| preset.name == name).ok_or_else(|| {
        let names: Vec<&str> = PRESETS.iter().map(|preset| preset.name).collect();
        format!("{name:?} is no preset: use {}", names.join(", "))
    })
}

impl Config {
    /// The placement rules of all tables.
    pub(crate) fn placement_rules(&self) -> Vec<Rule> {
        // Invalid tables have been reported when the file was read.
        self.rules.iter().filter_map(|table| table.rules().ok()).flatten().collect()
    }

    /// The placement rules of all tables, for use.
    pub(crate) fn rule_set(&self) -> Result<RuleSet, Problems> {
        RuleSet::new(self.placement_rules())
            .map_err(|error| Problems(vec![Problem::new(format!("[[placement.rule]]: {error}"))]))
    }

    /// Whether changed rules are adopted without an order.
    pub(crate) fn adopts_rules(&self) -> bool {
        self.adopt_rules == Adopt::Auto
    }
}

impl RuleConfig {
    /// Returns the rules of this table.
    ///
    /// # Errors
    /// If the table is incomplete, or a pattern is invalid.
    pub(super) fn rules(&self) -> Result<Vec<Rule>, String> {
        let rules = match (self.preset, self.keys.is_empty(), &self.tag) {
            (Some(preset), true, None) => preset.rules(),
            (Some(_), ..) => {
                return Err(
                    "a preset contains patterns and tags: write further keys in a table of their own".to_owned()
                );
            }
            (None, true, _) => {
                return Err(
                    "this [[placement.rule]] matches no keys; add keys = [\"PATTERN\"] or preset = \"NAME\"".to_owned()
                );
            }
            (None, false, tag) => vec![Rule { keys: self.keys.clone(), tag: tag.clone() }],
        };
        RuleSet::new(rules.clone()).map_err(|error| error.to_string())?;
        Ok(rules)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_table_has_a_preset_or_patterns() {
        let table = |preset: Option<&str>, keys: &[&str], tag: Option<&str>| {
            let preset = preset.map(|name| PRESETS.iter().find(|preset| preset.name == name).expect("a preset"));
            let keys = keys.iter().map(|&key| key.to_owned()).collect();
            RuleConfig { preset, keys, tag: tag.map(str::to_owned) }.rules()
        };
        assert_eq!(table(Some("bullmq"), &[], None).expect("a preset")[0].keys, ["bull:{queue}:*"]);
        assert_eq!(table(None, &["rq:*"], Some("rq")).expect("a rule").len(), 1);
        for (preset, keys, tag) in [
            (None, &[][..], None),
            (None, &[], Some("a")),
            (Some("rq"), &["a:*"], None),
            (Some("rq"), &[], Some("a")),
            (None, &["a:*"], None),
        ] {
            assert!(table(preset, keys, tag).is_err(), "{keys:?}");
        }
    }
}
