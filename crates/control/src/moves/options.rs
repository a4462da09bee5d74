//! Options of a move that the journal does not contain. The store keeps them, so that a move continues unchanged after
//! a restart.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use switchyard_policy::migration::record::OpenMove;
use switchyard_policy::migration::{Cause, Goal, MoveOptions, MoveOrder, Side};
use switchyard_router::{MoveProgress, MoveTotals};

use super::messages::keyword_of;
use super::published::PaperOptions;
use super::queue::{Planned, Steering};
use crate::admin::Abandon;

/// Store document of options.
pub(super) const OPTIONS: &str = "moves-options";

/// Options of a move.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct Options {
    #[serde(default)]
    direct_clients: bool,
    goal: String,
    max_rate: Option<u64>,
    purge_target: bool,
    paused: bool,
    #[serde(default)]
    aborting: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    give_up: Option<Abandon>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    paper: Option<PaperOptions>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    source_ops_max: Option<u32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    lost: Option<u64>,
    #[serde(default, skip_serializing_if = "is_one")]
    databases: u32,
    #[serde(default, with = "Done")]
    so_far: MoveTotals,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pattern: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    home_for: BTreeMap<String, u64>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    is_planned: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde gives a reference")]
const fn is_one(databases: &u32) -> bool {
    *databases <= 1
}

/// Field names in the document.
#[derive(Default, Serialize, Deserialize)]
#[serde(remote = "MoveTotals", default)]
struct Done {
    #[serde(rename = "keys")]
    keys_moved: u64,
    #[serde(rename = "bytes")]
    bytes_moved: u64,
    pulled: u64,
    repeated: u64,
    seconds: f64,
}

/// Extracts the totals of a move.
pub(super) const fn so_far(progress: &MoveProgress) -> MoveTotals {
    let MoveProgress { keys_moved, bytes_moved, pulled, repeated, seconds, .. } = *progress;
    MoveTotals { keys_moved, bytes_moved, pulled, repeated, seconds }
}

impl Options {
    pub(super) fn of(planned: &Planned) -> Self {
        Self::steered(planned, planned.steering)
    }

    /// Returns the options of a short move for waiting clients, which are not stored at its start.
    pub(super) fn of_short_move(keys: usize) -> Self {
        Self {
            goal: keyword_of(&Goal::ALL, Goal::Fast).to_owned(),
            home_for: [("a command before the restart".to_owned(), keys as u64)].into(),
            ..Self::default()
        }
    }

    /// Returns the options with this steering.
    pub(super) fn steered(planned: &Planned, steering: Steering) -> Self {
        let how = &planned.order.how;
        let (pattern, home_for) = match &planned.order.cause {
            Cause::Requested(pattern) => (pattern.clone(), BTreeMap::new()),
            Cause::Needed(by) => (None, by.clone()),
            Cause::Planned => (None, BTreeMap::new()),
        };
        Self {
            direct_clients: how.direct_clients,
            goal: keyword_of(&Goal::ALL, how.goal).to_owned(),
            max_rate: how.max_rate,
            purge_target: how.purge_target,
            paused: steering.paused,
            aborting: steering.aborting,
            paper: how.paper.map(PaperOptions::of),
            source_ops_max: how.source_ops_max,
            give_up: steering.give_up.map(|side| if side == Side::Source { Abandon::Source } else { Abandon::Target }),
            databases: planned.databases,
            lost: planned.lost,
            so_far: planned.so_far,
            pattern,
            home_for,
            is_planned: planned.order.cause == Cause::Planned,
        }
    }

    /// Returns the options of a move that must not continue.
    pub(super) fn stopped(self) -> Self {
        Self { aborting: true, ..self }
    }

    /// Combines the options with an open move of the journal. Fails if this build does not have its protocol.
    pub(super) fn planned(self, found: OpenMove) -> Result<Planned, &'static str> {
        let how = MoveOptions {
            protocol: found.protocol,
            durability: found.durability,
            goal: Goal::ALL.iter().find(|(_, name)| *name == self.goal).map_or(Goal::default(), |(goal, _)| *goal),
            max_rate: self.max_rate,
            purge_target: self.purge_target,
            direct_clients: self.direct_clients,
            paper: self.paper.as_ref().map(PaperOptions::paper).transpose()?,
            source_ops_max: self.source_ops_max,
        };
        let cause = match () {
            () if self.is_planned => Cause::Planned,
            () if self.home_for.is_empty() => Cause::Requested(self.pattern),
            () => Cause::Needed(self.home_for),
        };
        let OpenMove { source, target, .. } = found;
        let order = MoveOrder { source, target, slots: found.slots.clone(), keys: found.keys.clone(), how, cause };
        let steering = Steering { paused: self.paused, aborting: self.aborting, give_up: self.give_up.map(Side::from) };
        Ok(Planned {
            steering,
            so_far: self.so_far,
            databases: self.databases,
            lost: self.lost,
            left_at_start: found.leg.as_ref().map_or(0, |leg| leg.away.len() as u64) * u64::from(self.databases.max(1)),
            resume: Some(found),
            ..Planned::new(order)
        })
    }
}

#[cfg(test)]
mod tests {
    use switchyard_policy::migration::Protocol;
    use switchyard_policy::topology::NodeId;

    use super::*;

    fn found(MoveOptions { protocol, durability, .. }: MoveOptions) -> OpenMove {
        OpenMove {
            source: NodeId(0),
            target: NodeId(1),
            slots: Vec::new(),
            protocol,
            durability,
            keys: None,
            handed_over: Vec::new(),
            leg: None,
            next_leg: 0,
        }
    }

    #[test]
    fn moves_as_published_resume_only_in_builds_that_have_them() {
        let text = r#"{"goal":"fast","max_rate":null,"purge_target":false,"paused":false,
            "paper":{"tracker":"bloom","groups":8,"at_once":4,"bits":20,"forwards":true}}"#;
        let read: Options = serde_json::from_str(text).expect("every build reads it");
        let resumed = read.planned(found(MoveOptions { protocol: Protocol::Bloom, ..MoveOptions::default() }));
        if cfg!(feature = "research") {
            assert!(resumed.expect("it has the protocol").order.how.paper.is_some());
        } else {
            assert!(resumed.expect_err("the protocol is missing").contains("--features research"));
        }
    }

    #[cfg(feature = "research")]
    #[test]
    fn moves_as_published_resume_with_their_settings() {
        let protocol = Protocol::NetMigrate;
        let published = switchyard_policy::migration::published::Paper::of(protocol).expect("it is published");
        for counting_bytes in [None, Some(16)] {
            let paper =
                Some(switchyard_policy::migration::published::Paper { at_once: 7, counting_bytes, ..published });
            let how = MoveOptions { protocol, paper, source_ops_max: counting_bytes, ..MoveOptions::default() };
            let order = MoveOrder {
                source: NodeId(0),
                target: NodeId(1),
                slots: Vec::new(),
                keys: None,
                how,
                cause: Cause::Requested(None),
            };
            let text = serde_json::to_string(&Options::of(&Planned::new(order.clone()))).expect("JSON");
            let read: Options = serde_json::from_str(&text).expect("its own");
            assert_eq!(read.planned(found(how)).expect("it has the protocol").order, order, "{text}");
        }
    }

    #[test]
    fn moves_resume_with_their_options() {
        let how = MoveOptions {
            goal: Goal::Gentle,
            max_rate: Some(7),
            purge_target: true,
            direct_clients: true,
            ..MoveOptions::default()
        };
        let (source, target) = (NodeId(0), NodeId(1));
        let order = MoveOrder {
            source,
            target,
            slots: Vec::new(),
            keys: None,
            how,
            cause: Cause::Needed([("RENAME".to_owned(), 2)].into()),
        };
        let steering = Steering { paused: true, aborting: true, give_up: Some(Side::Target) };
        let so_far = MoveTotals { keys_moved: 5, ..MoveTotals::default() };
        let options = Options::of(&Planned { steering, so_far, lost: Some(3), ..Planned::new(order.clone()) });
        let text = serde_json::to_string(&options).expect("JSON");
        assert_eq!(
            text,
            r#"{"direct_clients":true,"goal":"gentle","max_rate":7,"purge_target":true,"paused":true,"aborting":true,"give_up":"target","lost":3,"#
                .to_owned()
                + r#""so_far":{"keys":5,"bytes":0,"pulled":0,"repeated":0,"seconds":0.0},"home_for":{"RENAME":2}}"#,
            "as earlier versions have it"
        );
        let read: Options = serde_json::from_str(&text).expect("its own");
        let planned = read.clone().planned(found(how)).expect("every build has it");
        assert_eq!((&planned.order, &read), (&order, &Options::of(&planned)));
    }
}
