//! Batches: converts requests of the leg's machine to commands, and their replies to events. For a key copied in
//! pieces, copy reads the dirty elements, and store follows the staging machine.

use std::collections::BTreeMap;

use switchyard_policy::migration::staging::{Action, Counted, Event as OfStaged, Place, StagingReply, Step};
use switchyard_policy::migration::{BatchId, Copied, Event, Key, Protocol, Side, Stored};

use super::staging::elements_of;
use super::{Lane, Mover, What, ix};
use crate::injected::Bug;
use crate::node::{Cmd, Elements, Entry, KeyIx, Reply};
use crate::world::World;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    Dump,
    Restore,
    Overwrite,
    Remove,
    Secure,
    Migrate,
    /// Last steps of staged keys.
    Finish(Step),
    /// Whole copies after staging failed.
    DumpAgain,
    RestoreAgain,
}

#[derive(Debug)]
pub(super) struct Batch {
    kind: Kind,
    /// Replies of earlier rounds are ignored.
    round: u64,
    side: usize,
    keys: Vec<KeyIx>,
    /// Number of consecutive keys with one name, one for each database.
    of_name: usize,
    replies: Vec<Option<Reply>>,
    left: usize,
    content: BTreeMap<KeyIx, Content>,
    /// Requested fields of staged keys.
    fields: BTreeMap<KeyIx, Vec<u32>>,
}

/// Whole reads from before a restart of the batch. The source still replies, because only the target was lost.
#[derive(Debug)]
pub(super) struct Late {
    id: BatchId,
    keys: Vec<KeyIx>,
    content: BTreeMap<KeyIx, Content>,
    left: usize,
}

/// Returns the worst result of a key over its databases.
fn worst(of_key: &[Stored]) -> Stored {
    let refused = of_key.iter().find(|stored| matches!(stored, Stored::Refused(_)));
    let there = || of_key.iter().find(|stored| **stored == Stored::Exists);
    refused.or_else(there).cloned().unwrap_or(Stored::Stored)
}

#[derive(Clone, Debug)]
enum Content {
    /// Value, and the time of the read.
    Whole(Entry, u64),
    /// Last part of a staged key.
    Last { name: KeyIx, count: usize, expires_us: Option<u64>, elements: Elements },
    /// Missing at the second read.
    Gone,
}

impl World {
    pub(super) fn begin_batch(&mut self, lane: Lane, id: BatchId, side: Side, keys: &[Key], kind: Kind) {
        let Mover { batches, late, .. } = &mut self.movers[lane];
        let before = batches.remove(&id);
        if let Some(batch) = before.as_ref().filter(|batch| batch.kind == Kind::DumpAgain && batch.left > 0) {
            let read = batch.keys.iter().zip(&batch.replies).filter(|(_, reply)| reply.is_some());
            let content = read.filter_map(|(key, _)| Some((*key, batch.content.get(key)?.clone()))).collect();
            late.insert(batch.round, Late { id, keys: batch.keys.clone(), content, left: batch.left });
        }
        let content = before.map(|batch| batch.content).filter(|_| kind != Kind::Dump).unwrap_or_default();
        if kind == Kind::Dump {
            self.drop_unusable(lane);
        }
        let databases: Vec<usize> = match &self.movers[lane].driver {
            Some(driver) if !driver.databases().is_empty() => {
                driver.databases().iter().map(|database| *database as usize).collect()
            }
            _ => vec![0],
        };
        let of_key =
            |key: &Key| databases.iter().map(|database| self.key_ix(key) + database * self.names()).collect::<Vec<_>>();
        let numbers: Vec<KeyIx> = keys.iter().flat_map(of_key).collect();
        match kind {
            Kind::Dump => drop(self.stager_step(lane, OfStaged::Copying { batch: id })),
            Kind::Restore => {
                let staged = numbers.iter().filter(|key| matches!(content.get(key), Some(Content::Last { .. })));
                let staged = staged.map(|key| self.place(*key)).collect();
                self.stager_step(lane, OfStaged::Storing { batch: id, keys: keys.to_vec(), staged });
            }
            _ => {}
        }
        self.send_batch(lane, id, ix(side), (numbers, databases.len()), kind, content);
    }

    fn send_batch(
        &mut self,
        lane: Lane,
        id: BatchId,
        side: usize,
        (keys, of_name): (Vec<KeyIx>, usize),
        kind: Kind,
        content: BTreeMap<KeyIx, Content>,
    ) {
        let mut cmds = Vec::new();
        let mut fields = BTreeMap::new();
        for (at, key) in keys.iter().enumerate() {
            let cmd = match (kind, content.get(key)) {
                (Kind::Dump | Kind::DumpAgain, _) => {
                    match self.tail_of(lane, *key).filter(|_| kind == Kind::Dump && side == 0) {
                        Some((cmd, of_key)) => {
                            fields.insert(*key, of_key);
                            cmd
                        }
                        None => Cmd::Dump(*key),
                    }
                }
                (Kind::Remove, _) => Cmd::Unlink(*key),
                (Kind::Restore | Kind::RestoreAgain, Some(Content::Whole(entry, read_us))) => {
                    let mut entry = entry.clone();
                    if self.bug(Bug::RelativeTtl) {
                        entry.expires_us = entry.expires_us.map(|end| self.now + end.saturating_sub(*read_us));
                    }
                    if self.bug(Bug::RestoreReplace) { Cmd::Replace(*key, entry) } else { Cmd::Restore(*key, entry) }
                }
                (Kind::Overwrite, Some(Content::Whole(entry, _))) => Cmd::Replace(*key, entry.clone()),
                // Finished later, or gone.
                (Kind::Restore, Some(Content::Last { .. }))
                | (Kind::Restore | Kind::RestoreAgain, Some(Content::Gone)) => continue,
                (Kind::Finish(Step::Write), Some(Content::Last { name, elements, .. })) => {
                    Cmd::Count(*name, *key, elements.clone())
                }
                (Kind::Finish(Step::Rename), Some(Content::Last { name, expires_us, .. })) => {
                    Cmd::Rename(*name, *key, *expires_us)
                }
                // No value in this database.
                (Kind::Restore, None) if self.has_elsewhere(&content, *key) => continue,
                (Kind::Overwrite, None) if self.has_elsewhere(&content, *key) => Cmd::Unlink(*key),
                (Kind::Restore | Kind::RestoreAgain | Kind::Overwrite | Kind::Finish(_), _) => {
                    self.violated(format!("{id:?}: key {key} must be stored but was not read"));
                    return;
                }
                (Kind::Secure | Kind::Migrate, _) => continue,
            };
            cmds.push((at, cmd));
        }
        match kind {
            Kind::Secure => cmds.push((0, Cmd::WaitAof)),
            Kind::Migrate => cmds.push((0, Cmd::Migrate(keys.clone()))),
            _ => {}
        }
        let (left, replies) = (cmds.len(), vec![None; keys.len().max(1)]);
        self.movers[lane].rounds += 1;
        let round = self.movers[lane].rounds;
        self.movers[lane]
            .batches
            .insert(id, Batch { kind, round, side, keys, of_name, replies, left, content, fields });
        if left == 0 {
            self.batch_done(lane, id);
        }
        for (at, cmd) in cmds {
            self.demand(lane, side, cmd, What::Batch(id, round, at));
        }
    }

    pub(super) fn batch_answered(&mut self, lane: Lane, id: BatchId, round: u64, at: usize, reply: Reply) {
        let now = self.now;
        let Mover { batches, stager, .. } = &mut self.movers[lane];
        let Some(batch) = batches.get_mut(&id).filter(|batch| batch.round == round) else {
            self.late_answered(lane, round, at, reply);
            return;
        };
        let key = batch.keys.get(at).copied();
        match (batch.kind, key, &reply) {
            (Kind::Dump | Kind::DumpAgain, Some(key), Reply::Dumped(Some(entry))) => {
                batch.content.insert(key, Content::Whole(entry.clone(), now));
            }
            (Kind::DumpAgain, Some(key), Reply::Dumped(None)) => {
                batch.content.insert(key, Content::Gone);
            }
            (Kind::Dump, Some(key), Reply::Tail(Some((expires_us, count, values)))) => {
                let elements = elements_of(batch.fields.get(&key).map(Vec::as_slice).unwrap_or_default(), values);
                if let Some(name) = stager.name_of(key) {
                    batch.content.insert(key, Content::Last { name, count: *count, expires_us: *expires_us, elements });
                }
            }
            _ => {}
        }
        batch.replies[at] = Some(reply);
        batch.left -= 1;
        if batch.left == 0 {
            self.batch_done(lane, id);
        }
    }

    fn late_answered(&mut self, lane: Lane, round: u64, at: usize, reply: Reply) {
        let now = self.now;
        let Some(late) = self.movers[lane].late.get_mut(&round) else { return };
        let content = if let Reply::Dumped(Some(entry)) = reply { Content::Whole(entry, now) } else { Content::Gone };
        late.content.insert(late.keys[at], content);
        late.left -= 1;
        if late.left > 0 {
            return;
        }
        let Some(Late { id, keys, content, .. }) = self.movers[lane].late.remove(&round) else { return };
        let places = keys.iter().map(|key| self.place(*key)).collect();
        let actions = self.stager_step(lane, OfStaged::ReadWhole { batch: id, places, refused: None });
        if let Some(batch) = self.movers[lane].batches.get_mut(&id).filter(|_| !actions.is_empty()) {
            batch.content.extend(content);
        }
        self.act_on_staged(lane, actions);
    }

    /// Handles the last reply of a batch.
    fn batch_done(&mut self, lane: Lane, id: BatchId) {
        let Some(batch) = self.movers[lane].batches.get_mut(&id) else { return };
        let (kind, side, keys, of_name) = (batch.kind, batch.side, batch.keys.clone(), batch.of_name);
        let replies = std::mem::take(&mut batch.replies);
        let refused = |reply: &Reply| matches!(reply, Reply::Oom | Reply::Error).then(|| format!("{reply:?}"));
        let first = replies.first().cloned().flatten();
        let event = match kind {
            Kind::Dump => {
                // The type differs from the staged copy.
                let others = keys
                    .iter()
                    .zip(&replies)
                    .filter(|(_, reply)| **reply == Some(Reply::Error))
                    .map(|(key, _)| self.place(*key));
                let others: Vec<Place> = others.collect();
                if !others.is_empty() {
                    for place in others {
                        self.unusable(lane, place, "its dirty elements cannot be read");
                    }
                    let keys: Vec<Key> = keys.iter().map(|key| self.keys[*key].clone()).collect();
                    self.begin_batch(lane, id, if side == 0 { Side::Source } else { Side::Target }, &keys, Kind::Dump);
                    return;
                }
                let is_there =
                    |reply: &Option<Reply>| matches!(reply, Some(Reply::Dumped(Some(_)) | Reply::Tail(Some(_))));
                let outcome = |of_key: &[Option<Reply>]| match of_key.iter().any(is_there) {
                    true => Copied::Taken { bytes: 1 },
                    false => Copied::Absent,
                };
                let mut outcomes: Vec<Copied> = replies.chunks(of_name).map(outcome).collect();
                // Sometimes values are larger than expected, and only the first keys fit.
                if self.movers[lane].protocol != Protocol::StopAndCopy && id.0 % 5 == 4 {
                    outcomes.truncate(outcomes.len().div_ceil(2));
                }
                Event::Copied { batch: id, outcomes }
            }
            Kind::Restore | Kind::RestoreAgain => {
                let outcome = |reply| match reply {
                    Some(Reply::Ok) | None => Stored::Stored,
                    Some(Reply::BusyKey) => Stored::Exists,
                    Some(other) => Stored::Refused(format!("{other:?}")),
                };
                let outcomes: Vec<Stored> = replies.into_iter().map(outcome).collect();
                let outcomes = outcomes.chunks(of_name).map(worst).collect();
                self.staged(lane, OfStaged::Stored { batch: id, outcomes });
                return;
            }
            Kind::Overwrite => {
                let outcome = |reply: Option<Reply>| match reply {
                    Some(Reply::Ok | Reply::Number(_)) => Stored::Stored,
                    other => Stored::Refused(format!("{other:?}")),
                };
                let outcomes: Vec<Stored> = replies.into_iter().map(outcome).collect();
                Event::Stored { batch: id, outcomes: outcomes.chunks(of_name).map(worst).collect() }
            }
            Kind::Finish(_) => {
                self.staged_answered(lane, id, &keys, replies);
                return;
            }
            Kind::DumpAgain => {
                let places = keys.iter().map(|key| self.place(*key)).collect();
                self.staged(lane, OfStaged::ReadWhole { batch: id, places, refused: None });
                return;
            }
            Kind::Remove => Event::Removed { batch: id },
            Kind::Secure => Event::Secured { batch: id, refused: first.as_ref().and_then(refused) },
            Kind::Migrate => {
                let refused = match first {
                    Some(Reply::BusyKey) => Some("BUSYKEY Target key name already exists.".to_owned()),
                    other => other.as_ref().and_then(refused),
                };
                Event::Migrated { batch: id, refused }
            }
        };
        self.mover_event(lane, event);
    }

    pub(super) fn source_lost(&mut self, lane: Lane) {
        self.staged(lane, OfStaged::SourceLost);
    }

    /// Passes an event of the leg to the staging machine.
    fn staged(&mut self, lane: Lane, event: OfStaged) {
        let actions = self.stager_step(lane, event);
        self.act_on_staged(lane, actions);
    }

    fn act_on_staged(&mut self, lane: Lane, actions: Vec<Action>) {
        let keys_of = |places: Vec<Place>| -> Vec<Key> { places.into_iter().map(|(key, _)| key).collect() };
        for action in actions {
            let (id, side, keys, kind) = match action {
                Action::Stored { batch, outcomes } => {
                    self.mover_event(lane, Event::Stored { batch, outcomes });
                    continue;
                }
                Action::Finish { batch, step, places } => (batch, 1, keys_of(places), Kind::Finish(step)),
                Action::ReadWhole { .. } if !self.movers[lane].links[0].ready => {
                    self.staged(lane, OfStaged::SourceLost);
                    continue;
                }
                Action::ReadWhole { batch, places } => (batch, 0, keys_of(places), Kind::DumpAgain),
                Action::StoreWhole { batch, places } => (batch, 1, keys_of(places), Kind::RestoreAgain),
                // Actions before the leg.
                _ => continue,
            };
            let keys: Vec<KeyIx> = keys.iter().map(|key: &Key| self.key_ix(key)).collect();
            let Some(batch) = self.movers[lane].batches.get_mut(&id) else { continue };
            let content = std::mem::take(&mut batch.content);
            self.send_batch(lane, id, side, (keys, 1), kind, content);
        }
    }

    /// Whether the name of this key was read in another database.
    fn has_elsewhere(&self, content: &BTreeMap<KeyIx, Content>, key: KeyIx) -> bool {
        (0..self.scenario.databases as usize)
            .any(|database| content.contains_key(&(key % self.names() + database * self.names())))
    }

    fn staged_answered(&mut self, lane: Lane, id: BatchId, keys: &[KeyIx], replies: Vec<Option<Reply>>) {
        let Some(batch) = self.movers[lane].batches.get(&id) else { return };
        let shown = |(key, reply): (&KeyIx, Option<Reply>)| {
            let shown = match (batch.content.get(key), reply) {
                (Some(Content::Last { count, .. }), Some(Reply::Counted(key_was_there, staging_was_there, there))) => {
                    StagingReply::Counted(Counted {
                        key_existed: key_was_there,
                        staging_existed: staging_was_there,
                        there: there as i64,
                        at_source: *count as i64,
                    })
                }
                (_, Some(Reply::Renamed(seen))) => StagingReply::Renamed(seen),
                (_, reply) => StagingReply::Refused(format!("{reply:?}")),
            };
            (self.place(*key), shown)
        };
        let shown = keys.iter().zip(replies).map(shown).collect();
        self.staged(lane, OfStaged::Finished { batch: id, shown });
    }
}
