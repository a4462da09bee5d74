//! Tests of staging, the copy of big keys in pieces: requests and their order.

use std::sync::Arc;

use switchyard_policy::migration::staging::{
    Action, Counted, Endpoints, Event, Inspection, Part, Piece, Place, Renamed, Staging, StagingReply, Step, Wrote,
};
use switchyard_policy::migration::{BatchId, Key, Process, Stored};

fn place() -> Place {
    (Arc::from(&b"key"[..]), 0)
}

fn ends(client_id: u64) -> Endpoints {
    let process = |run_id: &str| Process { run_id: run_id.to_owned(), client_id };
    Endpoints { source: process("a"), target: process("b") }
}

fn step(staging: &mut Staging, event: Event) -> Vec<Action> {
    let mut actions = Vec::new();
    staging.step(event, &mut actions);
    actions
}

fn go(staging: &mut Staging) -> Vec<Action> {
    step(staging, Event::Next { barrier: true })
}

fn touch(staging: &mut Staging, element: &str) {
    let elements = Some(vec![element.as_bytes().into()]);
    assert_eq!(step(staging, Event::Touched { key: place().0, elements }), []);
}

/// A key accepted for staging.
fn begun() -> Staging {
    let mut staging = Staging::default();
    assert_eq!(step(&mut staging, Event::Begin { big: vec![place()], ends: ends(1) }), []);
    look(&mut staging);
    staging
}

/// Returns the number of the staging key.
fn look(staging: &mut Staging) -> u64 {
    let asked = go(staging);
    let Some(Action::Inspect { number, .. }) = asked.last() else { panic!("{asked:?}") };
    assert!(staging.is_busy() && go(staging).is_empty(), "one request at a time");
    assert_eq!(step(staging, Event::Inspected { place: place(), seen: Inspection::Fit }), []);
    *number
}

fn barrier(staging: &mut Staging, epoch: u64) {
    assert_eq!(go(staging), [Action::Barrier]);
    assert_eq!(step(staging, Event::Published { epoch }), []);
    assert_eq!(staging.pending_epoch(), Some(epoch));
}

fn reach(staging: &mut Staging, epoch: u64) {
    assert_eq!(step(staging, Event::Reached { epoch }), []);
    assert_eq!(staging.pending_epoch(), None);
}

fn read(staging: &mut Staging, is_last: bool) {
    assert_eq!(step(staging, Event::Read { place: place(), piece: Piece::Taken { is_empty: false, is_last } }), []);
}

fn wrote(staging: &mut Staging, wrote: Wrote) -> Vec<Action> {
    step(staging, Event::Wrote { place: place(), wrote })
}

fn is_read() -> Action {
    Action::Read { place: place() }
}

fn is_written(part: Part, afresh: bool) -> Action {
    Action::Write { place: place(), part, is_new: afresh }
}

/// Number of staged keys unusable for a leg with these processes.
fn unusable(staging: &Staging, source: Option<&str>, target: Option<&str>) -> usize {
    let mut actions = Vec::new();
    staging.clone().drop_unusable(source, target, |_| true, &mut actions);
    actions.len()
}

#[test]
fn elements_changed_during_a_copy_are_read_again_after_a_barrier() {
    let mut staging = begun();
    barrier(&mut staging, 7);
    touch(&mut staging, "before");
    assert_eq!(go(&mut staging), [], "nothing is read before the barrier");
    reach(&mut staging, 7);
    // No request waits for a barrier, but one may be set now.
    assert_eq!(go(&mut staging), [Action::Barrier, is_read()]);
    step(&mut staging, Event::Published { epoch: 8 });
    read(&mut staging, false);
    touch(&mut staging, "meanwhile");
    reach(&mut staging, 8);
    // "before" was touched between the first and the second barrier; "meanwhile" waits for the third.
    let again = |element: &str| Action::ReadAgain { place: place(), elements: vec![element.as_bytes().into()] };
    assert_eq!(go(&mut staging), [again("before")]);
    let read_again = Event::ReadAgain { place: place(), same_type: true };
    assert_eq!(
        step(&mut staging, read_again.clone()),
        [is_written(Part::Piece, true)],
        "parts are written in the order of reading"
    );
    assert_eq!(wrote(&mut staging, Wrote::Yes), [is_written(Part::Again, false)]);
    assert_eq!(wrote(&mut staging, Wrote::Yes), []);
    assert_eq!(go(&mut staging), [Action::Barrier, is_read()]);
    step(&mut staging, Event::Published { epoch: 9 });
    read(&mut staging, true);
    assert_eq!(go(&mut staging), [is_written(Part::Piece, false)], "the last piece is written");
    assert_eq!(wrote(&mut staging, Wrote::Yes), []);
    assert_eq!(go(&mut staging), [], "the barrier is waited for");
    touch(&mut staging, "late");
    reach(&mut staging, 9);
    assert_eq!(go(&mut staging), [again("meanwhile")]);
    assert_eq!(step(&mut staging, read_again), [is_written(Part::Again, false)]);
    assert_eq!(wrote(&mut staging, Wrote::Yes), []);
    assert_eq!(go(&mut staging), [Action::Ready]);
    assert_eq!(staging.tail(&place()), Some(vec![b"late"[..].into()]), "the leg reads it");
    assert_eq!(unusable(&staging, Some("a"), Some("b")) + unusable(&staging, None, Some("b")), 0);
    assert_eq!(
        (unusable(&staging, Some("another"), Some("b")), unusable(&staging, Some("a"), Some("another"))),
        (2, 2)
    );
    step(&mut staging, Event::Flush);
    assert_eq!(unusable(&staging, Some("a"), Some("b")), 2, "it is dropped, and moved whole");
}

#[test]
fn a_failed_write_is_not_followed_by_elements_read_again() {
    let mut staging = begun();
    barrier(&mut staging, 7);
    reach(&mut staging, 7);
    touch(&mut staging, "told");
    assert_eq!(go(&mut staging), [Action::Barrier, is_read()]);
    step(&mut staging, Event::Published { epoch: 8 });
    read(&mut staging, false);
    reach(&mut staging, 8);
    assert!(matches!(&go(&mut staging)[..], [Action::ReadAgain { .. }]));
    let written = step(&mut staging, Event::ReadAgain { place: place(), same_type: true });
    assert_eq!(written, [is_written(Part::Piece, true)]);
    let whole = Action::Whole { place: place(), why: "no".to_owned() };
    assert_eq!(wrote(&mut staging, Wrote::Refused("no".to_owned())), [Action::Drop { place: place() }, whole]);
    assert_eq!(go(&mut staging), [Action::Ready]);
}

#[test]
fn a_key_that_changes_completely_is_copied_again_then_moved_whole() {
    let mut staging = Staging::default();
    step(&mut staging, Event::Begin { big: vec![place()], ends: ends(1) });
    let mut numbers = vec![look(&mut staging)];
    for start in 1..=5 {
        assert_eq!(staging.starts(&place()), start);
        step(&mut staging, Event::Touched { key: place().0, elements: None });
        if start < 5 {
            numbers.push(look(&mut staging));
        }
    }
    assert_eq!(numbers, [1, 2, 3, 4, 5]);
    assert!(matches!(&go(&mut staging)[..], [Action::Drop { .. }, Action::Whole { .. }, Action::Ready]));
    assert!(staging.is_empty());
}

#[test]
fn an_untracked_write_voids_staging_only_during_the_copy() {
    let mut staging = begun();
    barrier(&mut staging, 2);
    step(&mut staging, Event::Written { key: place().0 });
    reach(&mut staging, 2);
    assert!(go(&mut staging).contains(&is_read()));
    step(&mut staging, Event::Written { key: place().0 });
    read(&mut staging, true);
    assert!(matches!(&go(&mut staging)[..], [Action::Drop { .. }, Action::Inspect { number: 2, .. }]));
}

#[test]
fn a_new_connection_or_a_vanished_key_restarts_the_copy() {
    let mut staging = begun();
    let dropped = step(&mut staging, Event::Begin { big: vec![place()], ends: ends(2) });
    assert_eq!(dropped, [Action::Drop { place: place() }]);
    look(&mut staging);
    barrier(&mut staging, 3);
    reach(&mut staging, 3);
    assert!(go(&mut staging).contains(&is_read()));
    read(&mut staging, false);
    step(&mut staging, Event::Published { epoch: 4 });
    assert_eq!(
        go(&mut staging),
        [is_written(Part::Piece, true), is_read()],
        "one piece is written while the next is read"
    );
    assert_eq!(wrote(&mut staging, Wrote::Vanished), []);
    assert_eq!(go(&mut staging), [], "the pending read is awaited");
    read(&mut staging, false);
    assert!(matches!(&go(&mut staging)[..], [Action::Drop { .. }, Action::Inspect { number: 3, .. }]));
}

const BATCH: BatchId = BatchId(7);

fn finished(staging: &mut Staging, shown: StagingReply) -> Vec<Action> {
    step(staging, Event::Finished { batch: BATCH, shown: vec![(place(), shown)] })
}

fn stored(staging: &mut Staging, outcomes: &[Stored]) -> Vec<Action> {
    step(staging, Event::Stored { batch: BATCH, outcomes: outcomes.to_vec() })
}

/// A batch with a staged key and another key, which is stored already.
fn storing() -> Staging {
    let mut staging = begun();
    let keys = vec![place().0, Key::from(&b"other"[..])];
    assert_eq!(step(&mut staging, Event::Storing { batch: BATCH, keys, staged: vec![place()] }), []);
    let write = Action::Finish { batch: BATCH, step: Step::Write, places: vec![place()] };
    assert_eq!(stored(&mut staging, &[Stored::Stored, Stored::Exists]), [write]);
    staging
}

fn counted(staging_was_there: bool, key_was_there: bool, there: i64) -> StagingReply {
    StagingReply::Counted(Counted {
        key_existed: key_was_there,
        staging_existed: staging_was_there,
        there,
        at_source: 3,
    })
}

#[test]
fn a_staging_key_is_counted_and_then_renamed() {
    let mut staging = storing();
    let rename = Action::Finish { batch: BATCH, step: Step::Rename, places: vec![place()] };
    assert_eq!(finished(&mut staging, counted(true, false, 3)), [rename]);
    let done = |first| [Action::Stored { batch: BATCH, outcomes: vec![first, Stored::Exists] }];
    assert_eq!(finished(&mut staging, StagingReply::Renamed(Renamed::Yes)), done(Stored::Stored));
    let mut renamed_before = storing();
    assert_eq!(finished(&mut renamed_before, counted(false, true, 0)), done(Stored::Exists));
    let plain = step(&mut staging, Event::Stored { batch: BatchId(8), outcomes: vec![Stored::Stored] });
    assert_eq!(
        plain,
        [Action::Stored { batch: BatchId(8), outcomes: vec![Stored::Stored] }],
        "a batch without staged keys"
    );
}

/// Marks these keys as staged for a batch.
fn stage(staging: &mut Staging, places: &[Place]) {
    step(staging, Event::Begin { big: places.to_vec(), ends: ends(1) });
    for place in places {
        assert!(matches!(&go(staging)[..], [Action::Inspect { place: of, .. }] if of == place));
        step(staging, Event::Inspected { place: place.clone(), seen: Inspection::Fit });
    }
}

fn read_whole(places: &[Place]) -> Event {
    Event::ReadWhole { batch: BATCH, places: places.to_vec(), refused: None }
}

/// A late first reply: the target was lost in the meantime, and the second key, which was renamed there, has not been
/// read completely yet. If it counted as read, nothing of it would be stored, and it would be removed at the source.
#[test]
fn a_reply_to_an_earlier_request_is_ignored() {
    let mut staging = Staging::default();
    let all = [place(), (Key::from(&b"other"[..]), 0)];
    stage(&mut staging, &all);
    let keys: Vec<Key> = all.iter().map(|(key, _)| key.clone()).collect();
    step(&mut staging, Event::Storing { batch: BATCH, keys: keys.clone(), staged: all.to_vec() });
    stored(&mut staging, &[Stored::Stored, Stored::Stored]);
    let shown = vec![(all[0].clone(), counted(true, false, 4)), (all[1].clone(), counted(true, false, 3))];
    step(&mut staging, Event::Finished { batch: BATCH, shown });
    let shown = vec![(all[1].clone(), StagingReply::Renamed(Renamed::Yes))];
    let asked = step(&mut staging, Event::Finished { batch: BATCH, shown });
    assert_eq!(asked, [Action::ReadWhole { batch: BATCH, places: vec![all[0].clone()] }]);
    // The target has a new process, and the batch is stored again.
    step(&mut staging, Event::Storing { batch: BATCH, keys, staged: all.to_vec() });
    let finish = stored(&mut staging, &[Stored::Stored, Stored::Stored]);
    assert_eq!(finish, [Action::Finish { batch: BATCH, step: Step::Write, places: vec![all[1].clone()] }]);
    let gone = vec![(all[1].clone(), counted(false, false, 3))];
    let asked = step(&mut staging, Event::Finished { batch: BATCH, shown: gone });
    assert_eq!(asked.last(), Some(&Action::ReadWhole { batch: BATCH, places: all.to_vec() }));
    assert_eq!(step(&mut staging, read_whole(&all[..1])), []);
    assert_eq!(step(&mut staging, read_whole(&all)), [Action::StoreWhole { batch: BATCH, places: all.to_vec() }]);
}

/// The value of the key in another database was stored with the others, and is not stored again: it would exist and
/// count as another client's key.
#[test]
fn a_key_is_read_whole_only_in_the_database_with_failed_staging() {
    let mut staging = Staging::default();
    let two = [(place().0, 0), (place().0, 1)];
    stage(&mut staging, &two);
    step(&mut staging, Event::Storing { batch: BATCH, keys: vec![place().0], staged: two.to_vec() });
    stored(&mut staging, &[Stored::Stored]);
    let shown = vec![(two[0].clone(), counted(true, false, 4)), (two[1].clone(), counted(true, false, 3))];
    step(&mut staging, Event::Finished { batch: BATCH, shown });
    let shown = vec![(two[1].clone(), StagingReply::Renamed(Renamed::Yes))];
    let asked = step(&mut staging, Event::Finished { batch: BATCH, shown });
    assert_eq!(asked, [Action::ReadWhole { batch: BATCH, places: vec![two[0].clone()] }]);
    assert_eq!(
        step(&mut staging, read_whole(&two[..1])),
        [Action::StoreWhole { batch: BATCH, places: vec![two[0].clone()] }]
    );
}

#[test]
fn a_key_with_failed_staging_is_read_whole() {
    for in_vain in [counted(true, false, 4), counted(false, false, 3), StagingReply::Unusable("no".to_owned())] {
        let mut staging = storing();
        let places = vec![place()];
        let actions = finished(&mut staging, in_vain);
        assert!(
            matches!(&actions[..], [Action::Drop { .. }, Action::Whole { .. }, Action::ReadWhole { places: of, .. }] if *of == places)
        );
        let store = step(&mut staging, read_whole(&places));
        assert_eq!(store, [Action::StoreWhole { batch: BATCH, places }]);
        assert_eq!(step(&mut staging, Event::SourceLost), [], "it is read already");
        let all = vec![Stored::Stored, Stored::Exists];
        assert_eq!(stored(&mut staging, &[Stored::Stored]), [Action::Stored { batch: BATCH, outcomes: all }]);
    }
}

#[test]
fn a_key_that_cannot_be_read_whole_is_refused_once() {
    let mut staging = storing();
    finished(&mut staging, counted(false, false, 0));
    let refused = step(&mut staging, Event::SourceLost);
    assert!(
        matches!(&refused[..], [Action::Stored { outcomes, .. }] if matches!(&outcomes[..], [Stored::Refused(_), Stored::Exists]))
    );
    assert_eq!(step(&mut staging, read_whole(&[place()])), []);
    // A batch that is copied again starts from the beginning.
    let mut again = storing();
    assert_eq!(step(&mut again, Event::Copying { batch: BATCH }), []);
    assert_eq!(finished(&mut again, counted(true, false, 3)), []);
}

#[test]
fn a_key_read_whole_is_stored_again_like_any_other() {
    let mut staging = storing();
    finished(&mut staging, counted(false, false, 0));
    step(&mut staging, read_whole(&[place()]));
    // The target has restarted without the keys of the batch. Now it has no room for the second key.
    let keys = vec![place().0, Key::from(&b"other"[..])];
    step(&mut staging, Event::Storing { batch: BATCH, keys, staged: Vec::new() });
    let outcomes = vec![Stored::Stored, Stored::Refused("OOM".to_owned())];
    assert_eq!(stored(&mut staging, &outcomes), [Action::Stored { batch: BATCH, outcomes }]);
}
