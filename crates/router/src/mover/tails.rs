//! Staged keys in their leg: "copy" reads only the dirty elements, and "store" writes them to the staging key and
//! renames it.
//!
//! Differs from `drive.rs` only for these keys. Also reports big keys that were not staged.

use switchyard_policy::migration::staging::{Action, Event as OfStaged, Place, StagingReply, Step};
use switchyard_policy::migration::{BatchId, Copied, Event, Key, Protocol, Side};
use tracing::warn;

use super::drive::Run;
use super::last_piece::{self, MissingElements};
use super::run::Mover;
use super::side::{Content, Form, Read, ReadContext, kind_of};

/// Returns the value read for a place. Empty if the key does not exist.
fn content_of<'c>(read: &'c [(Key, Vec<Content>)], place: &Place) -> &'c [Content] {
    let of_key =
        read.iter().find(|(key, _)| *key == place.0).map(|(_, contents)| contents.as_slice()).unwrap_or_default();
    let at = of_key.iter().position(|content| content.database == place.1);
    at.map_or(&[], |at| std::slice::from_ref(&of_key[at]))
}

/// Returns the dirty elements read for a place.
fn last_of<'c>(read: &'c [(Key, Vec<Content>)], place: &Place) -> Option<&'c MissingElements> {
    content_of(read, place).first().and_then(|content| content.last.as_deref())
}

impl Mover {
    /// Reads keys: staged keys only in their dirty elements, others whole.
    pub(super) fn copy(&mut self, run: &Run, batch: BatchId, from: Side, mut keys: Vec<Key>) {
        if self.cuts_batches() {
            keys.truncate(self.sizes.lengths.first_that_fit(&self.placement, &keys));
        }
        let (form, usage) = (self.form(run), self.usage());
        self.drop_unusable(run.driver.is_ours());
        let (end, staged) = match from {
            Side::Source => (&mut self.source, Some(&self.staging)),
            Side::Target => (&mut self.target, None),
        };
        end.copy(
            batch,
            keys,
            ReadContext { databases: run.driver.databases(), lasting: run.lasting(from), staged },
            form,
            usage,
        );
    }

    /// Whether batches may be cut short if their values are unexpectedly large. Only for the protocol that holds all
    /// keys of a batch from its copy to its end.
    pub(super) fn cuts_batches(&self) -> bool {
        self.life.order().how.protocol == Protocol::Switchyard
    }

    /// Returns the result of a read, or `None` if some keys must be read again, because they are not strings or have
    /// unusable staging.
    pub(super) fn copy_others(&mut self, run: &Run, batch: BatchId, from: Side, read: Read) -> Option<Read> {
        if !read.unusable.is_empty() {
            for place in &read.unusable {
                self.unusable(place, "its dirty elements cannot be read: its type has changed");
            }
            self.copy(run, batch, from, read.keys);
            return None;
        }
        let (end, staged) = match from {
            Side::Source => (&mut self.source, Some(&self.staging)),
            Side::Target => (&mut self.target, None),
        };
        end.copy_others(
            batch,
            read,
            ReadContext { databases: run.driver.databases(), lasting: run.lasting(from), staged },
        )
    }

    /// Records big keys that were read whole, for the report at their end.
    pub(super) fn note_big(&self, run: &mut Run, batch: BatchId, read: &Read) {
        if !self.big.matters() {
            return;
        }
        let limit = self.big.limit();
        for (key, content) in read
            .keys
            .iter()
            .zip(&read.contents)
            .flat_map(|(key, of_key)| of_key.iter().map(move |content| (key, content)))
        {
            let payload = content.payload.len() as u64;
            let found = self.big.get(self.placement.slot_of(key), &(key.clone(), content.database));
            if content.form == Form::Staged || (found.is_none() && payload < limit) {
                continue;
            }
            let bytes = found.map_or(payload, |found| found.bytes);
            let why = found.and_then(|found| found.whole.clone()).unwrap_or_else(|| {
                let why = if run.driver.is_returning() {
                    "its leg was rolled back"
                } else {
                    "it was not known to be big before its leg"
                };
                why.to_owned()
            });
            run.whole.entry(batch).or_default().push((kind_of(content), bytes, why));
        }
    }

    /// Handles an event of staged keys in the leg.
    pub(super) fn staged(&mut self, run: &mut Run, event: OfStaged) {
        let actions = self.on_staging(event);
        self.act_on_staged(run, actions);
    }

    fn act_on_staged(&mut self, run: &mut Run, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Stored { batch, outcomes } => run.on_event(Event::Stored { batch, outcomes }),
                Action::ReadWhole { batch, places } if self.source.connection.is_some() => {
                    let known = ReadContext {
                        databases: run.driver.databases(),
                        lasting: run.lasting(Side::Source),
                        staged: None,
                    };
                    self.source.copy_again(batch, places, known);
                }
                Action::ReadWhole { .. } => self.staged(run, OfStaged::SourceLost),
                Action::StoreWhole { batch, places } => {
                    let read = run.contents.get(&batch).map(Vec::as_slice).unwrap_or_default();
                    let contents: Vec<(&Key, &[Content])> =
                        places.iter().map(|place| (&place.0, content_of(read, place))).collect();
                    let is_whole = contents
                        .iter()
                        .all(|(_, of_place)| of_place.iter().all(|content| content.form != Form::Staged));
                    assert!(is_whole, "keys to store whole were read whole");
                    self.target.store(batch, &contents, None);
                }
                Action::Finish { batch, step, places } => {
                    let read = run.contents.get(&batch).map(Vec::as_slice).unwrap_or_default();
                    let of = |place: Place| {
                        let content = content_of(read, &place).first()?;
                        let last = content.last.as_deref()?;
                        Some((last_piece::Item { place, expires_ms: content.expires_ms, replies: 0 }, last))
                    };
                    let (items, lasts): (Vec<_>, Vec<_>) = places.into_iter().filter_map(of).unzip();
                    self.target.finish(batch, step, items, &lasts);
                }
                // Actions of the copy before the leg do not occur here.
                _ => {}
            }
        }
    }

    /// Handles the replies to a step of staged keys.
    pub(super) fn staged_answered(
        &mut self,
        run: &mut Run,
        batch: BatchId,
        step: Step,
        items: Vec<last_piece::Item>,
        mut answers: &[Vec<u8>],
    ) {
        let read = run.contents.get(&batch).map(Vec::as_slice).unwrap_or_default();
        let mut shown = Vec::new();
        for item in items {
            let (of_item, rest) = answers.split_at(item.replies.min(answers.len()));
            answers = rest;
            let of_item = match last_of(read, &item.place) {
                Some(last) => last_piece::step_result(step, &item, last, of_item),
                None => StagingReply::Unusable("its dirty elements were lost".to_owned()),
            };
            shown.push((item.place, of_item));
        }
        self.staged(run, OfStaged::Finished { batch, shown });
    }

    /// Takes the whole values of keys with unusable staging. They have not been written since the drain, so these are
    /// the values of the first read.
    ///
    /// Other databases may have stored keys of the same name already. Those keys are left alone.
    pub(super) fn read_again(&mut self, run: &mut Run, batch: BatchId, places: Vec<Place>, mut read: Read) {
        let refused = read
            .outcomes
            .iter()
            .find_map(|outcome| if let Copied::Refused(why) = outcome { Some(why.clone()) } else { None });
        let is_read = refused.is_none();
        let actions = self.on_staging(OfStaged::ReadWhole { batch, places: places.clone(), refused });
        if is_read && !actions.is_empty() {
            let is_asked = |key: &Key, content: &Content| {
                places.iter().any(|(of, database)| of == key && *database == content.database)
            };
            for (key, contents) in read.keys.iter().zip(&mut read.contents) {
                contents.retain(|content| is_asked(key, content));
            }
            self.note_big(run, batch, &read);
            if read.contents.iter().flatten().count() < places.len() {
                // Expired, or already moved to the target and lost there.
                warn!(move_id = self.id.0, "a big key is neither at its source nor at the target");
            }
            let kept = run.contents.entry(batch).or_default();
            for (key, contents) in read.keys.iter().zip(read.contents) {
                let Some((_, before)) = kept.iter_mut().find(|(of, _)| of == key) else { continue };
                before.retain(|content| !is_asked(key, content));
                before.extend(contents);
            }
        }
        self.act_on_staged(run, actions);
    }

    /// Discards the staging of a committed key. Its staging key is unused or has become the key.
    pub(super) fn on_committed(&mut self, key: &Key) {
        if !self.staging.is_empty() {
            self.big.shown.in_pieces += self.staging.drop_key(key);
        }
    }

    /// Removes unused staging keys.
    pub(super) fn discard_in_leg(&mut self) {
        self.staging.discarded.append(&mut self.target.not_discarded);
        if !self.staging.discarded.is_empty() && self.target.connection.is_some() {
            self.target.discard(std::mem::take(&mut self.staging.discarded));
        }
    }
}
