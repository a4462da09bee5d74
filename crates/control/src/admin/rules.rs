//! Placement rules in the admin API: reports and requests. As in `report`, fields are only ever added.

use serde::{Deserialize, Serialize};
use switchyard_policy::topology::Rule;

use super::moves::{MoveOptionsRequest, OperationError, PlannedReport, invalid};

/// The rules of a fleet.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RulesReport {
    /// Number of the set in force. 0: the fleet never had rules.
    pub number: u64,
    /// The set in force.
    pub rules: Vec<Rule>,
    /// Set in the configuration, if it differs from the one in force after the adoption.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub configured: Option<Vec<Rule>>,
    /// Adoption that is requested or in progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adoption: Option<AdoptionReport>,
}

/// An adoption of rules.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct AdoptionReport {
    /// The next set.
    pub rules: Vec<Rule>,
    /// `requested`, `running`, `paused` or `abandoned`: keys return to their nodes.
    pub state: String,
    /// Number of groups of keys with the same source and target.
    pub groups: u64,
    /// Number of groups that have not arrived.
    pub groups_left: u64,
    /// Ids of the moves in progress.
    pub moves: Vec<u64>,
    /// Reason why the adoption waits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waits_for: Option<String>,
}

/// A request about rules, as sent by a client.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RulesRequest {
    /// `adopt`, `pause`, `resume` or `abandon`.
    #[serde(rename = "do")]
    pub verb: String,
    /// For `adopt`: the set. Omitted: the configured one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rules: Option<Vec<Rule>>,
    /// For `adopt`: only estimate the effect.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    /// Options of the moves.
    #[serde(flatten)]
    pub how: MoveOptionsRequest,
}

/// An order about rules.
#[derive(Clone, Debug, PartialEq)]
pub enum RulesOrder {
    /// Adopt a set; `None`: the configured one.
    Adopt {
        /// The set.
        rules: Option<Vec<Rule>>,
        /// Only estimate the effect.
        dry_run: bool,
        /// Options of the moves.
        how: MoveOptionsRequest,
    },
    /// Pause the adoption (true), or resume it.
    Pause(bool),
    /// Abandon the adoption.
    Abandon,
}

impl RulesRequest {
    /// Returns the order.
    ///
    /// # Errors
    /// If the action is unknown, or the other fields do not fit it.
    pub fn order(self) -> Result<RulesOrder, OperationError> {
        let Self { verb, rules, dry_run, how } = self;
        let is_plain = rules.is_none() && !dry_run && how == MoveOptionsRequest::default();
        match (verb.as_str(), is_plain) {
            ("adopt", _) => Ok(RulesOrder::Adopt { rules, dry_run, how }),
            ("pause" | "resume", true) => Ok(RulesOrder::Pause(verb == "pause")),
            ("abandon", true) => Ok(RulesOrder::Abandon),
            ("pause" | "resume" | "abandon", false) => {
                Err(invalid("rules, dry_run and options of moves are for the action adopt"))
            }
            _ => Err(invalid(format!("unknown action {verb:?} for rules: use adopt, pause, resume or abandon"))),
        }
    }
}

/// Result of an order.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RulesResult {
    /// Result as a sentence.
    pub message: String,
    /// Estimate for each node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<RulesEstimate>,
    /// Moves that would start.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub moves: Vec<PlannedReport>,
}

/// Estimated effect of a set on a node, from a sample of its keys.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RulesEstimate {
    /// Name of the node.
    pub node: String,
    /// Number of keys now.
    pub keys: u64,
    /// Number of keys that would leave the node.
    pub leaving: u64,
    /// Bytes of these keys.
    pub leaving_bytes: u64,
    /// Number of keys afterwards.
    pub keys_after: u64,
    /// Share of the commands of the fleet now, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_percent: Option<f64>,
    /// Share of the commands of the fleet afterwards, in percent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_percent_after: Option<f64>,
}

/// Rules proposed from the keys that clients use together.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RulesProposal {
    /// The rules in force, or in adoption, and then the proposed ones. Empty if the client may not read names of keys,
    /// because patterns may be such names.
    pub rules: Vec<Rule>,
    /// Number of the proposed rules.
    pub proposed: u64,
    /// Number of sampled groups of keys that clients use together. All of them were in several slots at that time.
    pub groups: u64,
    /// Number of these groups in one slot now.
    pub together_now: u64,
    /// Number of these groups in one slot with the proposed rules.
    pub together_then: u64,
    /// Whether the proposed rules keep 95 % of the groups in one slot.
    pub is_enough: bool,
    /// Rules that are not proposed, because one tag would be too large for a node. Empty like `rules`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub too_large: Vec<TooLargeReport>,
}

/// A rule that is not proposed.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TooLargeReport {
    /// The rule.
    pub rule: Rule,
    /// The largest tag.
    pub tag: String,
    /// `load` or `bytes`.
    pub of: String,
    /// Share of this tag in the load or the bytes of the fleet, in percent.
    pub percent: u32,
}

/// Effect of the rules on keys.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RulesCheckReport {
    /// Number of the set.
    pub number: u64,
    /// Whether the set is in force. Otherwise it is in adoption, or configured.
    pub is_in_force: bool,
    /// Keys in the order of the request.
    pub keys: Vec<RuledKeyReport>,
}

/// Effect of the rules on a key.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RuledKeyReport {
    /// Name, with bytes other than UTF-8 escaped.
    pub key: String,
    /// The pattern that matches. `None` without one, or if the key has its own hash tag.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pattern: Option<String>,
    /// The part that determines the slot, if not the whole name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tag: Option<String>,
    /// Whether the tag is in the name, in braces.
    pub has_own_tag: bool,
    /// Slot of Redis Cluster.
    pub slot: u16,
    /// Owner of the slot.
    pub owner: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_adopt_takes_rules_and_options() {
        let order = |text: &str| serde_json::from_str::<RulesRequest>(text).expect("a request").order();
        assert_eq!(order(r#"{"do": "pause"}"#), Ok(RulesOrder::Pause(true)));
        assert_eq!(order(r#"{"do": "resume"}"#), Ok(RulesOrder::Pause(false)));
        assert_eq!(order(r#"{"do": "abandon"}"#), Ok(RulesOrder::Abandon));
        let adopt = order(r#"{"do": "adopt", "rules": [{"keys": ["a:{b}:*"]}], "goal": "gentle"}"#);
        assert!(matches!(adopt, Ok(RulesOrder::Adopt { rules: Some(rules), dry_run: false, how })
            if rules.len() == 1 && how.goal.as_deref() == Some("gentle")));
        for text in [r#"{"do": "pause", "goal": "fast"}"#, r#"{"do": "abandon", "dry_run": true}"#, r#"{"do": "x"}"#] {
            assert!(matches!(order(text), Err(OperationError::Invalid(_))), "{text}");
        }
    }
}
