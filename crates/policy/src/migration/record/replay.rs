//! Replay of records, in their order.

use std::collections::BTreeMap;

use super::{COMMITTED, OpenLeg, OpenMove, ProcessGenerations, Record, Replay, StaleCopies};
use crate::migration::{Process, Side};
use crate::topology::MoveId;

/// Error of a record that cannot follow the previous ones.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Contradiction(String);

impl std::fmt::Display for Contradiction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Contradiction {}

impl Replay {
    /// Replays the records.
    ///
    /// # Errors
    /// If a record cannot follow the previous ones: records are missing, or belong to another journal.
    pub fn of<'r>(records: impl IntoIterator<Item = &'r Record>) -> Result<Self, Contradiction> {
        let mut replay = Self::default();
        for record in records {
            replay.apply(record)?;
        }
        Ok(replay)
    }

    /// Applies the next record.
    ///
    /// # Errors
    /// If it cannot follow the previous ones. Then nothing is changed.
    pub fn apply(&mut self, record: &Record) -> Result<(), Contradiction> {
        match record {
            Record::Begun { move_id, source, target, slots, protocol, durability } => {
                if self.open.contains_key(move_id) {
                    return Err(Contradiction(format!("move {} starts twice", move_id.0)));
                }
                let begun = OpenMove {
                    source: *source,
                    target: *target,
                    slots: slots.clone(),
                    protocol: *protocol,
                    durability: *durability,
                    keys: None,
                    handed_over: Vec::new(),
                    leg: None,
                    next_leg: 0,
                };
                self.open.insert(*move_id, begun);
                self.last = self.last.max(move_id.0);
            }
            Record::Keys { move_id, keys } => {
                let open = self.open(*move_id)?;
                if open.next_leg > 0 || open.keys.is_some() {
                    return Err(Contradiction(format!("keys of move {} are listed after its first leg", move_id.0)));
                }
                open.keys = Some(keys.as_slice().into());
            }
            Record::LegBegun { move_id, leg, slots, source, target } => {
                let open = self.open(*move_id)?;
                if open.leg.as_ref().is_some_and(|before| before.moving) {
                    return Err(Contradiction(format!(
                        "leg {leg} of move {} starts before the previous leg has ended",
                        move_id.0
                    )));
                }
                let again = open.leg.as_ref().is_some_and(|before| before.leg == *leg);
                if !again && *leg < open.next_leg {
                    return Err(Contradiction(format!(
                        "leg {leg} of move {} starts after leg {}",
                        move_id.0,
                        open.next_leg - 1
                    )));
                }
                open.next_leg = leg.saturating_add(1);
                open.leg = Some(OpenLeg {
                    leg: *leg,
                    slots: slots.clone(),
                    moving: false,
                    rolled_back: None,
                    given_up: None,
                    cut_over: false,
                    behind: StaleCopies::NONE,
                    source: source.clone(),
                    target: target.clone(),
                    eras: ProcessGenerations { source: 0, target: 0 },
                    away: BTreeMap::new(),
                });
            }
            Record::LegMoving { move_id, leg } => self.leg(*move_id, *leg)?.moving = true,
            Record::Met { move_id, leg, side, process } => {
                let open = self.leg(*move_id, *leg)?;
                let met = |before: &mut Process, era: &mut u32| {
                    *era += u32::from(before.run_id != process.run_id);
                    before.clone_from(process);
                };
                match side {
                    Side::Source => met(&mut open.source, &mut open.eras.source),
                    Side::Target => met(&mut open.target, &mut open.eras.target),
                }
            }
            Record::Moved { move_id, leg, keys } => {
                let open = self.moving(*move_id, *leg)?;
                if open.rolled_back.is_some() {
                    return Err(Contradiction(format!(
                        "keys of leg {leg} of move {} move after it was rolled back",
                        move_id.0
                    )));
                }
                open.away.extend(keys.iter().map(|key| (*key, open.eras)));
            }
            Record::Committed { move_id, leg, keys } => {
                let open = self.moving(*move_id, *leg)?;
                if open.rolled_back.is_some() {
                    return Err(Contradiction(format!(
                        "keys of leg {leg} of move {} are committed after it was rolled back",
                        move_id.0
                    )));
                }
                // Not with the source's present generation: copies at a source that restarted since the move are stale.
                for key in keys {
                    open.away.entry(*key).or_insert(open.eras).target = COMMITTED;
                }
            }
            Record::RolledBack { move_id, leg, why } => self.moving(*move_id, *leg)?.rolled_back = Some(why.clone()),
            Record::Returned { move_id, leg, keys } => {
                let open = self.moving(*move_id, *leg)?;
                if open.rolled_back.is_none() {
                    return Err(Contradiction(format!(
                        "keys of leg {leg} of move {} return, but it was not rolled back",
                        move_id.0
                    )));
                }
                for key in keys {
                    open.away.remove(key);
                }
            }
            Record::GivenUp { move_id, leg, side } => {
                let open = self.moving(*move_id, *leg)?;
                open.given_up = Some(*side);
                if *side == Side::Source {
                    // There is no source to return to.
                    open.rolled_back = None;
                }
            }
            Record::CutOver { move_id, leg } => {
                let open = self.moving(*move_id, *leg)?;
                if open.rolled_back.is_some() {
                    return Err(Contradiction(format!(
                        "leg {leg} of move {} is at its target after it was rolled back",
                        move_id.0
                    )));
                }
                open.cut_over = true;
            }
            Record::Behind { move_id, leg, keys } => self.moving(*move_id, *leg)?.behind = keys.clone(),
            Record::LegEnded { move_id, leg, owner } => {
                self.moving(*move_id, *leg)?;
                let open = self.open(*move_id)?;
                if let Some(ended) = open.leg.take().filter(|_| *owner == Side::Target) {
                    open.handed_over.extend(ended.slots);
                    open.handed_over.sort_unstable();
                }
            }
            Record::Ended { move_id } => {
                // No mover writes this. So a record with the location of the leg's keys is missing, and the rest does
                // not permit a guess.
                if let Some(leg) = self.open(*move_id)?.leg.as_ref().filter(|leg| leg.moving) {
                    return Err(Contradiction(format!(
                        "move {} ends while keys of its leg {} are in transit",
                        move_id.0, leg.leg
                    )));
                }
                self.open.remove(move_id);
            }
        }
        Ok(())
    }

    fn open(&mut self, move_id: MoveId) -> Result<&mut OpenMove, Contradiction> {
        self.open
            .get_mut(&move_id)
            .ok_or_else(|| Contradiction(format!("move {} continues, but has no start", move_id.0)))
    }

    fn leg(&mut self, move_id: MoveId, leg: u32) -> Result<&mut OpenLeg, Contradiction> {
        let missing = || Contradiction(format!("leg {leg} of move {} continues, but has no start", move_id.0));
        self.open(move_id)?.leg.as_mut().filter(|open| open.leg == leg).ok_or_else(missing)
    }

    fn moving(&mut self, move_id: MoveId, leg: u32) -> Result<&mut OpenLeg, Contradiction> {
        let early = || Contradiction(format!("keys of leg {leg} of move {} move before its drain", move_id.0));
        self.leg(move_id, leg)?.moving.then_some(()).ok_or_else(early)?;
        self.leg(move_id, leg)
    }
}
