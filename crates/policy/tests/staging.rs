//! Copying big keys in pieces: what is asked for, and in which order.

use std::sync::Arc;

use switchyard_policy::migration::staging::{
    Action, Counted, Ends, Event, Finished, Next, Piece, Place, Seen, Staging, Step, Storing, Wrote,
};
use switchyard_policy::migration::{Key, Process, Stored};

fn place() -> Place {
    (Arc::from(&b"key"[..]), 0)
}

fn ends(client_id: u64) -> Ends {
    let process = |run_id: &str| Process { run_id: run_id.to_owned(), client_id };
    Ends { source: process("a"), target: process("b") }
}

fn step(staging: &mut Staging, event: Event) -> Vec<Action> {
    let mut actions = Vec::new();
    staging.step(event, &mut actions);
    actions
}

fn go(staging: &mut Staging) -> Vec<Action> {
    step(staging, Event::Go { barrier: true })
}

fn touch(staging: &mut Staging, element: &str) {
    let elements = Some(vec![element.as_bytes().into()]);
    assert_eq!(step(staging, Event::Touched { key: place().0, elements }), []);
}

/// A key that is seen to be fit.
fn begun() -> Staging {
    let mut staging = Staging::default();
    assert_eq!(step(&mut staging, Event::Begin { big: vec![place()], ends: ends(1) }), []);
    look(&mut staging);
    staging
}

fn look(staging: &mut Staging) {
    assert_eq!(go(staging).last(), Some(&Action::Look { place: place() }));
    assert_eq!(step(staging, Event::Looked { place: place(), seen: Seen::Fit }), []);
}

fn barrier(staging: &mut Staging, epoch: u64) {
    assert_eq!(go(staging), [Action::Barrier]);
    assert_eq!(step(staging, Event::Published { epoch }), []);
    assert_eq!(staging.awaits(), Some(epoch));
}

fn reach(staging: &mut Staging, epoch: u64) {
    assert_eq!(step(staging, Event::Reached { epoch }), []);
    assert_eq!(staging.awaits(), None);
}

fn copied(staging: &mut Staging, wrote: Option<Wrote>, read: Option<Piece>) {
    assert_eq!(step(staging, Event::Copied { place: place(), wrote, read }), []);
}

#[test]
fn what_is_touched_while_a_key_is_copied_is_read_again_behind_a_later_barrier() {
    let mut staging = begun();
    barrier(&mut staging, 7);
    touch(&mut staging, "before");
    assert_eq!(go(&mut staging), [], "nothing is read before the barrier");
    reach(&mut staging, 7);
    // Nobody waits for it, but a barrier may be set now.
    assert_eq!(go(&mut staging), [Action::Barrier, Action::Copy { place: place(), afresh: true }]);
    step(&mut staging, Event::Published { epoch: 8 });
    copied(&mut staging, None, Some(Piece::More));
    touch(&mut staging, "meanwhile");
    reach(&mut staging, 8);
    // "before" was told after the first barrier and before the second; "meanwhile" waits for the third.
    let again = |element: &str, held_first| Action::ReadAgain {
        place: place(),
        elements: vec![element.as_bytes().into()],
        held_first,
        afresh: true,
    };
    assert_eq!(go(&mut staging), [again("before", true)], "what was read first is written first");
    step(&mut staging, Event::ReadAgain { place: place(), wrote: Some(Wrote::Yes) });
    assert_eq!(go(&mut staging), [Action::Barrier, Action::Copy { place: place(), afresh: false }]);
    step(&mut staging, Event::Published { epoch: 9 });
    copied(&mut staging, None, Some(Piece::Last));
    assert_eq!(go(&mut staging), [Action::Copy { place: place(), afresh: false }], "the last piece is written");
    copied(&mut staging, Some(Wrote::Yes), None);
    assert_eq!(go(&mut staging), [], "the barrier is waited for");
    touch(&mut staging, "late");
    reach(&mut staging, 9);
    assert!(matches!(&go(&mut staging)[..], [Action::ReadAgain { held_first: false, .. }]));
    step(&mut staging, Event::ReadAgain { place: place(), wrote: Some(Wrote::Yes) });
    assert_eq!(go(&mut staging), [Action::Ready]);
    assert_eq!(staging.tail(&place()), Some(vec![b"late"[..].into()]), "the leg reads it");
    assert!(staging.is_usable(&place(), Some("a"), Some("b")) && staging.is_usable(&place(), None, Some("b")));
    assert!(!staging.is_usable(&place(), Some("another"), Some("b")) && !staging.is_usable(&place(), Some("a"), Some("another")));
    step(&mut staging, Event::Flush);
    assert!(!staging.is_usable(&place(), Some("a"), Some("b")));
}

#[test]
fn what_changes_as_a_whole_is_copied_again_under_another_name_and_at_last_moved_whole() {
    let mut staging = begun();
    let mut numbers = vec![staging.number(&place())];
    for start in 1..=5 {
        assert_eq!(staging.starts(&place()), start);
        step(&mut staging, Event::Touched { key: place().0, elements: None });
        if start < 5 {
            look(&mut staging);
            numbers.push(staging.number(&place()));
        }
    }
    assert_eq!(numbers, [1, 2, 3, 4, 5].map(Some));
    assert!(matches!(&go(&mut staging)[..], [Action::Drop { number: 5, .. }, Action::Whole { .. }, Action::Ready]));
    assert!(staging.is_empty());
}

#[test]
fn who_did_not_know_that_a_key_is_staged_does_harm_only_once_it_is_copied() {
    let mut staging = begun();
    barrier(&mut staging, 2);
    step(&mut staging, Event::Written { key: place().0 });
    reach(&mut staging, 2);
    assert!(go(&mut staging).contains(&Action::Copy { place: place(), afresh: true }));
    step(&mut staging, Event::Written { key: place().0 });
    copied(&mut staging, None, Some(Piece::Last));
    assert!(matches!(&go(&mut staging)[..], [Action::Drop { number: 1, .. }, Action::Look { .. }]));
}

#[test]
fn another_connection_copies_anew_and_what_vanished_too() {
    let mut staging = begun();
    let dropped = step(&mut staging, Event::Begin { big: vec![place()], ends: ends(2) });
    assert_eq!(dropped, [Action::Drop { place: place(), number: 1 }]);
    look(&mut staging);
    barrier(&mut staging, 3);
    reach(&mut staging, 3);
    assert!(go(&mut staging).contains(&Action::Copy { place: place(), afresh: true }));
    copied(&mut staging, None, Some(Piece::More));
    step(&mut staging, Event::Published { epoch: 4 });
    assert_eq!(go(&mut staging), [Action::Copy { place: place(), afresh: true }]);
    copied(&mut staging, Some(Wrote::Vanished), Some(Piece::More));
    assert!(matches!(&go(&mut staging)[..], [Action::Drop { number: 2, .. }, Action::Look { .. }]));
}

#[test]
fn what_was_staged_in_vain_is_read_again() {
    let other: Key = Arc::from(&b"other"[..]);
    let mut storing = Storing::of(vec![place().0, other]);
    let next = storing.stored(vec![Stored::Stored, Stored::Exists], vec![(place(), true)]);
    assert_eq!(next, Next::Finish(Step::Write, vec![place()]));
    let seen = Counted { key_was_there: false, staging_was_there: true, there: 3, at_source: 3 };
    assert_eq!(storing.counted(seen), Finished::GoOn);
    assert!(matches!(storing.counted(Counted { there: 4, ..seen }), Finished::Unusable(_)));
    let gone = Counted { staging_was_there: false, ..seen };
    assert_eq!(storing.counted(Counted { key_was_there: true, ..gone }), Finished::Over(Stored::Exists));
    let unusable = storing.counted(gone);
    assert!(matches!(unusable, Finished::Unusable(_)));
    assert_eq!(storing.finished(vec![(place(), unusable)]), Next::ReadAgain(vec![place().0]));
    assert!(storing.is_reading_again());
    assert_eq!(storing.stored(vec![Stored::Stored], Vec::new()), Next::Done(vec![Stored::Stored, Stored::Exists]));
}
