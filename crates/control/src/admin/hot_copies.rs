//! Hot copies in the admin API: what is told of them, and what may be asked. As in `report`, names of fields are only
//! ever added to.
//!
//! The armed keys are a number here and no list: the router knows hashes, and names are for `hotkeys` to tell.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::moves::{Refused, wrong};

/// What the router answers from hot copies.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HotCopiesReport {
    /// `on`, `off` (the configuration says so), or `suspended` (somebody has said so).
    pub state: String,
    /// Keys that may have copies now.
    pub keys: u64,
    /// Copies that there are, over all workers.
    pub copies: u64,
    /// Bytes that they take.
    pub bytes: u64,
    /// Commands that copies have answered, since the start.
    pub hits: u64,
    /// Times that a node was asked for a copy.
    pub fills: u64,
    /// Answers that were not kept, by why.
    pub discarded: BTreeMap<String, u64>,
    /// Keys of which nodes have said that they changed.
    pub invalidations: u64,
    /// Nodes that give no copies, and why.
    pub refused: BTreeMap<String, String>,
}

/// What is to be done with hot copies, as it is sent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct HotCopiesRequest {
    /// `evict`, `off` or `on`.
    #[serde(rename = "do")]
    pub verb: String,
    /// To evict: those of this key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// To evict: those of keys that begin so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefix: Option<String>,
    /// To evict: all.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub all: bool,
}

impl HotCopiesRequest {
    /// What that asks for.
    ///
    /// # Errors
    /// If it asks for nothing, or for several things at once.
    pub fn order(self) -> Result<HotCopiesOrder, Refused> {
        match (self.verb.as_str(), self.key, self.prefix, self.all) {
            ("off", None, None, false) => Ok(HotCopiesOrder::Suspend(true)),
            ("on", None, None, false) => Ok(HotCopiesOrder::Suspend(false)),
            ("evict", Some(key), None, false) => Ok(HotCopiesOrder::EvictKey(key.into_bytes())),
            ("evict", None, Some(prefix), false) => Ok(HotCopiesOrder::EvictPrefix(prefix.into_bytes())),
            ("evict", None, None, true) => Ok(HotCopiesOrder::EvictAll),
            ("evict", ..) => Err(wrong("which copies? Give one of key, prefix, and all")),
            ("off" | "on", ..) => Err(wrong("off and on are for all keys: key, prefix and all go with evict")),
            (other, ..) => Err(wrong(format!("there is no {other:?} to do with hot copies: evict, off or on"))),
        }
    }
}

/// What is to be done with hot copies. Names of keys are bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HotCopiesOrder {
    /// Whatever is known of this key is past.
    EvictKey(Vec<u8>),
    /// The same of keys that begin so.
    EvictPrefix(Vec<u8>),
    /// The same of all keys.
    EvictAll,
    /// Nothing is answered from copies any more, or (false) it is again.
    Suspend(bool),
}

/// What was done with them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HotCopiesDone {
    /// In words.
    pub says: String,
    /// Whether anything is answered from copies now: `on`, `off` or `suspended`.
    pub state: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thing_is_asked_at_a_time() {
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
            assert!(matches!(order(text), Err(Refused::Wrong(_))), "{text}");
        }
        assert!(serde_json::from_str::<HotCopiesRequest>(r#"{"do": "off", "for": 5}"#).is_err());
    }
}
