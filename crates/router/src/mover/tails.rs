//! Staged keys in their leg: for them "copy" reads the tail, and "store" writes it to the staging key and renames that.
//!
//! Beside `drive.rs`, which does what the machine says and need not know how; here is what is different for these keys, and the report about big keys
//! that were not staged.

use switchyard_policy::migration::staging::{Action, Event as OfStaged, Place, Shown, Step};
use switchyard_policy::migration::{BatchId, Copied, Event, Key, Protocol, Side};
use switchyard_policy::topology::slot_of;
use tracing::warn;

use super::drive::Run;
use super::last_piece::{self, Last};
use super::run::Mover;
use super::side::{Content, Form, Known, Read, kind_of};

/// What the staging key of a place lacks, as it was read.
fn last_of<'c>(read: &'c [(Key, Vec<Content>)], place: &Place) -> Option<&'c Last> {
    let contents = read.iter().filter(|(key, _)| *key == place.0).flat_map(|(_, contents)| contents);
    contents.filter(|content| content.database == place.1).find_map(|content| content.last.as_deref())
}

impl Mover {
    /// Reads keys: whole, or of staged ones the tail.
    pub(super) fn copy(&mut self, run: &Run, batch: BatchId, from: Side, mut keys: Vec<Key>) {
        if self.cuts_batches() {
            keys.truncate(self.sizes.lengths.first_that_fit(&keys));
        }
        let (form, usage) = (self.form(run), self.usage());
        self.drop_unusable(run.driver.is_ours());
        let (end, staged) = match from {
            Side::Source => (&mut self.source, Some(&self.staging)),
            Side::Target => (&mut self.target, None),
        };
        end.copy(batch, keys, Known { databases: run.driver.databases(), lasting: run.lasting(from), staged }, form, usage);
    }

    /// Where all keys of a batch are held from its copy to its end: it ends early where their values are larger than others were.
    pub(super) fn cuts_batches(&self) -> bool {
        self.life.order().how.protocol == Protocol::Switchyard
    }

    /// What was read, once all of it could be: what is no string, and what is staged in vain, is read once more.
    pub(super) fn copy_others(&mut self, run: &Run, batch: BatchId, from: Side, read: Read) -> Option<Read> {
        if !read.unusable.is_empty() {
            for place in &read.unusable {
                self.unusable(place, "its tail cannot be read: it is of another type now");
            }
            self.copy(run, batch, from, read.keys);
            return None;
        }
        let (end, staged) = match from {
            Side::Source => (&mut self.source, Some(&self.staging)),
            Side::Target => (&mut self.target, None),
        };
        end.copy_others(batch, read, Known { databases: run.driver.databases(), lasting: run.lasting(from), staged })
    }

    /// Big keys that were read whole are reported when they are there.
    pub(super) fn note_big(&self, run: &mut Run, batch: BatchId, read: &Read) {
        if !self.big.matters() {
            return;
        }
        let limit = self.big.limit();
        for (key, content) in
            read.keys.iter().zip(&read.contents).flat_map(|(key, of_key)| of_key.iter().map(move |content| (key, content)))
        {
            let payload = content.payload.len() as u64;
            let found = self.big.get(slot_of(key), &(key.clone(), content.database));
            if content.form == Form::Staged || (found.is_none() && payload < limit) {
                continue;
            }
            let bytes = found.map_or(payload, |found| found.bytes);
            let why = found.and_then(|found| found.whole.clone()).unwrap_or_else(|| {
                let why = if run.driver.goes_back() { "its leg went back" } else { "it was not known to be big before its leg began" };
                why.to_owned()
            });
            run.whole.entry(batch).or_default().push((kind_of(content), bytes, why));
        }
    }

    /// Something happened to staged keys of the leg.
    pub(super) fn staged(&mut self, run: &mut Run, event: OfStaged) {
        let actions = self.on_staging(event);
        self.act_on_staged(run, actions);
    }

    fn act_on_staged(&mut self, run: &mut Run, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Stored { batch, outcomes } => run.tell(Event::Stored { batch, outcomes }),
                Action::ReadWhole { batch, keys } if self.source.connection.is_some() => {
                    let known = Known { databases: run.driver.databases(), lasting: run.lasting(Side::Source), staged: None };
                    self.source.copy_again(batch, keys, known);
                }
                Action::ReadWhole { .. } => self.staged(run, OfStaged::SourceLost),
                Action::StoreWhole { batch, keys } => {
                    let read = run.contents.get(&batch).map(Vec::as_slice).unwrap_or_default();
                    let of_key =
                        |key: &Key| read.iter().find(|(of, _)| of == key).map(|(_, contents)| contents.as_slice()).unwrap_or_default();
                    let contents: Vec<(&Key, &[Content])> = keys.iter().map(|key| (key, of_key(key))).collect();
                    self.target.store(batch, &contents, None);
                }
                Action::Finish { batch, step, places } => {
                    let read = run.contents.get(&batch).map(Vec::as_slice).unwrap_or_default();
                    let of = |place: Place| {
                        let last = last_of(read, &place)?;
                        let contents = read.iter().filter(|(key, _)| *key == place.0).flat_map(|(_, contents)| contents);
                        let expires_ms = contents.filter(|content| content.database == place.1).map(|content| content.expires_ms).next()?;
                        Some((last_piece::Item { place, expires_ms, replies: 0 }, last))
                    };
                    let (items, lasts): (Vec<_>, Vec<_>) = places.into_iter().filter_map(of).unzip();
                    self.target.finish(batch, step, items, &lasts);
                }
                // Of what is copied before the leg.
                _ => {}
            }
        }
    }

    /// A step of staged keys was answered.
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
                Some(last) => last_piece::shown(step, &item, last, of_item),
                None => Shown::Unusable("what was read of it is gone".to_owned()),
            };
            shown.push((item.place, of_item));
        }
        self.staged(run, OfStaged::Finished { batch, shown });
    }

    /// Keys were read whole, of which what was staged is worth nothing. Nobody has written them since the drain, so they are what they were.
    pub(super) fn read_again(&mut self, run: &mut Run, batch: BatchId, read: Read) {
        let refused = read.outcomes.iter().find_map(|outcome| if let Copied::Refused(why) = outcome { Some(why.clone()) } else { None });
        let is_read = refused.is_none();
        let actions = self.on_staging(OfStaged::ReadWhole { batch, refused });
        if is_read && !actions.is_empty() {
            self.note_big(run, batch, &read);
            if read.contents.iter().any(Vec::is_empty) {
                // It has expired; or it was at the target, which has lost it.
                warn!(move_id = self.id.0, "a big key that was to be moved is not at its source any more, nor at the target");
            }
            let kept = run.contents.entry(batch).or_default();
            for (key, contents) in read.keys.into_iter().zip(read.contents) {
                match kept.iter_mut().find(|(of, _)| *of == key) {
                    Some((_, before)) => *before = contents,
                    None => kept.push((key, contents)),
                }
            }
        }
        self.act_on_staged(run, actions);
    }

    /// A key is committed: its staging key is not needed any more, or has become the key.
    pub(super) fn staged_is_moved(&mut self, key: &Key) {
        if !self.staging.is_empty() {
            self.big.shown.in_pieces += self.staging.drop_key(key);
        }
    }

    /// Removes staging keys that are not used any more.
    pub(super) fn discard_in_leg(&mut self) {
        if !self.staging.discarded.is_empty() && self.target.connection.is_some() {
            self.target.discard(std::mem::take(&mut self.staging.discarded));
        }
    }
}
