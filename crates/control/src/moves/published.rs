//! Options of protocols that lose keys, in requests and in the store. Compiled only with the feature `research`;
//! `unpublished.rs` replaces this module in the product.

use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};
use switchyard_policy::migration::published::{Paper, SourceShare};
use switchyard_policy::migration::tracker::Kind;
use switchyard_policy::migration::{Durability, MoveOptions, Protocol};

use super::messages::{DURABILITIES, keyword_of, parse_keyword};
use crate::admin::{MoveOptionsRequest, OperationError, PaperRequest, invalid};

/// Maximum number of groups of a published protocol: their keys are listed by group before any group starts. The higher
/// limit applies if each key is a group, because that costs only bits.
const GROUPS_MAX: u32 = 1 << 20;
const GROUPS_BY_KEY_MAX: u32 = 1 << 26;

/// Maximum number of filter bits per group.
const BITS_MAX: u8 = 64;

/// Range of the size of the counting filter, bytes: one counter for each of the four hash functions, and the paper's
/// largest filter (section 6.1: 1024 KB).
const COUNTING_BYTES: RangeInclusive<u32> = 4..=1 << 20;

/// Returns the options of a published protocol, if requested. Fails for protocols that lose keys unless the request
/// permits it.
pub(super) fn paper(request: &MoveOptionsRequest, how: &MoveOptions) -> Result<Option<Paper>, OperationError> {
    let protocol = how.protocol;
    if protocol == Protocol::StopAndCopy {
        check_stop_and_copy(request, how)?;
    }
    let Some(asked) = &request.paper else {
        if protocol == Protocol::Bloom {
            return Err(invalid(
                "bloom is available only as published (--mode paper); its correct form is the default protocol",
            ));
        }
        return Ok(None);
    };
    let PaperRequest { tracker, groups, bits, counting_bytes, groups_at_once, no_forwarding, .. } = &**asked;
    let name = keyword_of(&Protocol::ALL, protocol);
    let published = Paper::of(protocol).ok_or_else(|| {
        invalid(format!("{name} has no mode paper: only netmigrate, rocksteady, fulva and bloom have"))
    })?;
    if !request.allow_key_loss {
        return Err(invalid(format!(
            "{name} as published loses writes and returns stale values, so it is only for comparisons: omit --mode paper, or permit the loss of keys \
             (--allow-key-loss)"
        )));
    }
    let without_effect =
        |what: &str, why: &str| Err(invalid(format!("{what} has no effect on {name} as published: {why}")));
    if request.durability.is_some() {
        return without_effect("durability", "it does not wait for its writes");
    }
    if *no_forwarding && protocol != Protocol::Bloom {
        return without_effect("no-forwarding", "it selects the other variant of bloom");
    }
    let kinds = Kind::ALL.map(|kind| (kind, kind.name()));
    let chosen = tracker
        .as_ref()
        .map(|kind| parse_keyword(&kinds, kind))
        .transpose()
        .map_err(|error| invalid(format!("tracker: {error}")))?;
    let tracker = chosen.unwrap_or(published.tracker);
    let has_tracker_options =
        chosen.is_some() || groups.is_some() || bits.is_some() || counting_bytes.is_some() || groups_at_once.is_some();
    if protocol == Protocol::Rocksteady && has_tracker_options {
        return without_effect("a tracker", "everything counts as moved from the start");
    }
    if protocol == Protocol::Fulva && tracker == Kind::Adaptive {
        return without_effect("tracker adaptive", "it cannot detect errors of a tracker");
    }
    if protocol == Protocol::Bloom && tracker == Kind::BloomAndCounting {
        return without_effect("tracker bloom+counting", "it does not track keys in transit");
    }
    if bits.is_some() && tracker == Kind::Exact {
        return without_effect("bits", "an exact tracker has no filter");
    }
    if counting_bytes.is_some() && protocol == Protocol::Bloom {
        return without_effect("counting-bytes", "it does not track keys in transit");
    }
    if counting_bytes.is_some() && matches!(tracker, Kind::Exact | Kind::Bloom) {
        let why =
            format!("its tracker {} has no counting filter; use --tracker bloom+counting or adaptive", tracker.name());
        return without_effect("counting-bytes", &why);
    }
    if let Some(bytes) = counting_bytes.filter(|bytes| !COUNTING_BYTES.contains(bytes)) {
        let (least, most) = COUNTING_BYTES.into_inner();
        return Err(invalid(format!("counting-bytes: {bytes} is not between {least} and {most}")));
    }
    if groups_at_once.is_some() && protocol == Protocol::Bloom {
        return without_effect("groups-at-once", "each key is a group, and --goal and --max-rate set the rate of keys");
    }
    let at_once = groups_at_once.unwrap_or(published.at_once);
    if at_once == 0 {
        return Err(invalid(format!("groups-at-once: 0 is not between 1 and {}", u8::MAX)));
    }
    let (groups, most) =
        (groups.unwrap_or(published.groups), if protocol == Protocol::Bloom { GROUPS_BY_KEY_MAX } else { GROUPS_MAX });
    if !(1..=most).contains(&groups) {
        return Err(invalid(format!("groups: {groups} is not between 1 and {most}")));
    }
    let bits = bits.unwrap_or(published.bits);
    if !(1..=BITS_MAX).contains(&bits) {
        return Err(invalid(format!("bits: {bits} is not between 1 and {BITS_MAX}")));
    }
    Ok(Some(Paper { tracker, groups, at_once, bits, counting_bytes: *counting_bytes, forwards: !no_forwarding }))
}

/// Returns the limit of a request in commands per second: a number, or a share of the source's capacity.
pub(crate) fn source_ops_max(text: &str, capacity: Option<u64>) -> Result<u32, OperationError> {
    if let Some((share, _)) = SourceShare::ALL.into_iter().find(|(_, name)| *name == text) {
        let capacity = capacity.ok_or_else(|| {
            invalid(format!(
                "source-ops-max: {text} is {} % of the capacity of the source, which is unknown here: name the source (--from) and set its capacity \
                 in [[node]] (`switchyard bench capacity` measures it), or give a number of commands per second",
                share.percent()
            ))
        })?;
        return Ok(share.of(capacity));
    }
    text.parse().ok().filter(|max| *max > 0).ok_or_else(|| {
        invalid(format!(
            "source-ops-max: {text:?} is neither a number of commands per second from 1, nor short, medium or long"
        ))
    })
}

/// Fails unless clients' commands go to the source during a move with these options, and can be limited.
pub(super) fn check_source_ops(how: &MoveOptions) -> Result<(), OperationError> {
    let name = keyword_of(&Protocol::ALL, how.protocol);
    let Some(paper) = how.paper else {
        return Err(invalid(format!(
            "source-ops-max has no effect on {name} in mode safe: it is a policy of protocols as published (--mode paper); --goal and --max-rate limit the move"
        )));
    };
    if how.protocol == Protocol::Rocksteady || how.protocol == Protocol::Bloom && !paper.forwards {
        return Err(invalid(format!(
            "source-ops-max has no effect on {name} as published: all commands go to the target"
        )));
    }
    Ok(())
}

/// Fails unless the request accepts the risk of stop-and-copy.
fn check_stop_and_copy(request: &MoveOptionsRequest, how: &MoveOptions) -> Result<(), OperationError> {
    // MIGRATE removes each key at the source before anything is recorded or stored.
    if how.durability != Durability::Memory {
        return Err(invalid(format!(
            "stop-and-copy does not support durability {}: request durability memory, or use the default protocol",
            keyword_of(&DURABILITIES, how.durability)
        )));
    }
    if !request.allow_key_loss {
        return Err(invalid(
            "stop-and-copy loses keys if a node restarts during the move, so it is only for comparisons: use the default protocol, \
             or permit the loss of keys (--allow-key-loss)",
        ));
    }
    Ok(())
}

/// Stored options of a published protocol.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct PaperOptions {
    tracker: String,
    groups: u32,
    at_once: u8,
    bits: u8,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    counting_bytes: Option<u32>,
    forwards: bool,
}

impl PaperOptions {
    pub(super) fn of(Paper { tracker, groups, at_once, bits, counting_bytes, forwards }: Paper) -> Self {
        Self { tracker: tracker.name().to_owned(), groups, at_once, bits, counting_bytes, forwards }
    }

    pub(super) fn paper(&self) -> Result<Paper, &'static str> {
        let Self { ref tracker, groups, at_once, bits, counting_bytes, forwards } = *self;
        let tracker = Kind::named(tracker).unwrap_or(Kind::Exact);
        Ok(Paper { tracker, groups, at_once, bits, counting_bytes, forwards })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_sources_are_numbers_or_shares_of_a_known_capacity() {
        let max = |text: &str, capacity| source_ops_max(text, capacity).map_err(|error| error.text().to_owned());
        assert_eq!(max("25000", None), Ok(25_000));
        assert_eq!(max("short", Some(100_000)), Ok(23_000));
        for (text, capacity, expected) in [
            ("long", None, "switchyard bench capacity"),
            ("0", Some(1), "from 1"),
            ("-1", None, "short, medium or long"),
            ("quick", Some(1), "short, medium or long"),
        ] {
            assert!(max(text, capacity).is_err_and(|error| error.contains(expected)), "{text}");
        }
    }

    #[test]
    fn only_protocols_that_read_the_source_have_its_limit() {
        let how = |protocol, forwards| MoveOptions {
            protocol,
            paper: Paper::of(protocol).map(|paper| Paper { forwards, ..paper }),
            ..MoveOptions::default()
        };
        for (protocol, forwards, is_limited) in [
            (Protocol::NetMigrate, true, true),
            (Protocol::Fulva, true, true),
            (Protocol::Bloom, true, true),
            (Protocol::Bloom, false, false),
            (Protocol::Rocksteady, true, false),
            (Protocol::Switchyard, true, false),
        ] {
            assert_eq!(check_source_ops(&how(protocol, forwards)).is_ok(), is_limited, "{protocol:?} {forwards}");
        }
    }
}
