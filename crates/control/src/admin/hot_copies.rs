//! Hot copies in the admin API: reports and requests. As in `report`, fields are only ever added.
//!
//! Cacheable keys appear only as a count: the router knows their hashes, and `hotkeys` shows names.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::moves::{OperationError, invalid};

/// State of hot copies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HotCopiesReport {
    /// `on`, `off` (by configuration), or `suspended` (by an operator).
    pub state: String,
    /// Number of keys that may have copies now.
    pub keys: u64,
    /// Number of copies, over all workers.
    pub copies: u64,
    /// Bytes of all copies.
    pub bytes: u64,
    /// Commands answered from copies, since the start.
    pub hits: u64,
    /// Reads sent to nodes to fill a copy.
    pub fills: u64,
    /// Replies that were not stored, by reason.
    pub discarded: BTreeMap<String, u64>,
    /// Invalidations received from nodes.
    pub invalidations: u64,
    /// Nodes without hot copies, with the reason.
    pub refused: BTreeMap<String, String>,
}

/// A request about hot copies, as sent by a client.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HotCopiesRequest {
    /// `evict`, `off` or `on`.
    #[serde(rename = "do")]
    pub verb: String,
    /// For `evict`: copies of this key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// For `evict`: copies of all keys with this prefix.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    /// For `evict`: all copies.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
}

impl HotCopiesRequest {
    /// Returns the order.
    ///
    /// # Errors
    /// If the fields do not name exactly one action.
    pub fn order(self) -> Result<HotCopiesOrder, OperationError> {
        match (self.verb.as_str(), self.key, self.prefix, self.all) {
            ("off", None, None, false) => Ok(HotCopiesOrder::Suspend(true)),
            ("on", None, None, false) => Ok(HotCopiesOrder::Suspend(false)),
            ("evict", Some(key), None, false) => Ok(HotCopiesOrder::EvictKey(key.into_bytes())),
            ("evict", None, Some(prefix), false) => Ok(HotCopiesOrder::EvictPrefix(prefix.into_bytes())),
            ("evict", None, None, true) => Ok(HotCopiesOrder::EvictAll),
            ("evict", ..) => Err(invalid("which copies? Give one of key, prefix, and all")),
            ("off" | "on", ..) => Err(invalid("off and on apply to all keys: key, prefix and all are for evict")),
            (other, ..) => Err(invalid(format!("unknown action {other:?} for hot copies: use evict, off or on"))),
        }
    }
}

/// An order about hot copies. Keys are bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HotCopiesOrder {
    /// Invalidate all copies of this key.
    EvictKey(Vec<u8>),
    /// Invalidate all copies of keys with this prefix.
    EvictPrefix(Vec<u8>),
    /// Invalidate all copies.
    EvictAll,
    /// Suspend (true) or resume (false) answering from copies.
    Suspend(bool),
}

/// Result of an order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HotCopiesResult {
    /// Result as a sentence.
    pub message: String,
    /// State afterwards: `on`, `off` or `suspended`.
    pub state: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_need_exactly_one_action() {
        let order = |text: &str| serde_json::from_str::<HotCopiesRequest>(text).expect("a request").order();
        for (text, expected) in [
            (r#"{"do": "off"}"#, HotCopiesOrder::Suspend(true)),
            (r#"{"do": "on"}"#, HotCopiesOrder::Suspend(false)),
            (r#"{"do": "evict", "key": "a"}"#, HotCopiesOrder::EvictKey(b"a".to_vec())),
            (r#"{"do": "evict", "prefix": ""}"#, HotCopiesOrder::EvictPrefix(Vec::new())),
            (r#"{"do": "evict", "all": true}"#, HotCopiesOrder::EvictAll),
        ] {
            assert_eq!(order(text), Ok(expected), "{text}");
        }
        for text in [
            r#"{"do": "evict"}"#,
            r#"{"do": "evict", "key": "a", "all": true}"#,
            r#"{"do": "evict", "key": "a", "prefix": "a"}"#,
            r#"{"do": "off", "key": "a"}"#,
            r#"{"do": "on", "all": true}"#,
            r#"{"do": "explode"}"#,
        ] {
            assert!(matches!(order(text), Err(OperationError::Invalid(_))), "{text}");
        }
        assert!(serde_json::from_str::<HotCopiesRequest>(r#"{"do": "off", "for": 5}"#).is_err());
    }
}
