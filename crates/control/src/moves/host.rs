//! Implements the mover's interface to the journal and the slot map.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use switchyard_policy::failover::Position;
use switchyard_policy::migration::{Fingerprint, Key, Record};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Stage, Transit};
use switchyard_router::{Done, Host, MoveEnd};
use tracing::error;

use super::Moves;
use super::colocate::ColocationEvent;
use crate::failover::ReplicaRequirement;

impl Host for Moves {
    fn record(&self, records: Vec<Record>, done: Done) {
        self.ledger.record(records, done);
    }

    fn hand_over(&self, move_id: MoveId, slots: &[Slot], keys: Option<&[Key]>, owner: NodeId, done: Done) {
        let known = self.running.ownerships().map_or(Ok(()), |seats| seats.raise_version());
        let outcome = known.and_then(|()| self.placement.hand_over(move_id, slots, keys, owner));
        // Keys may return before their move ends.
        self.colocations.notify(ColocationEvent::Look);
        done(outcome);
    }

    fn replicas_need(&self, node: NodeId, position: Position, timeout: Duration, done: Done) {
        self.running.needs().add(ReplicaRequirement::new(node, position, timeout, done));
    }

    fn set_transits(&self, move_id: MoveId, transits: Vec<(Transit, Vec<Slot>)>) -> Result<u64, String> {
        // Before the first key moves, record at its nodes that older copies of the state directory have become invalid.
        let begins = transits.iter().find(|(transit, _)| matches!(transit.stage, Stage::Moving { .. }));
        let begins = begins.filter(|_| !self.placement.is_in_transit(move_id)).zip(self.running.ownerships());
        let told =
            begins.map(|((transit, _), seats)| seats.leg_begins(&self.running, [transit.source, transit.target]));
        let _until_it_is_in_transit = told.transpose()?;
        self.placement.set_transits(move_id, transits)
    }

    fn spool_directory(&self) -> PathBuf {
        self.spool.clone()
    }

    fn databases(&self, move_id: MoveId, count: u32) {
        if let Some(planned) = self.state().open.get_mut(&move_id) {
            planned.databases = count;
        }
        if count > 1 {
            self.save_options();
        }
    }

    fn lost(&self, move_id: MoveId, node: NodeId, keys: &[Fingerprint], most: u64) {
        self.record_lost(move_id, node, keys, most);
    }

    fn ended(&self, move_id: MoveId, end: &MoveEnd) {
        let open_leg = self.placement.is_in_transit(move_id);
        if open_leg {
            error!(
                "move {} has ended with a leg open: its keys cannot be used until the leg resumes after a restart",
                move_id.0
            );
        }
        {
            let mut state = self.state();
            let Some(planned) = state.open.get_mut(&move_id) else { return };
            if self.stopping.load(Ordering::Acquire) {
                // The move has not ended: it continues after the next start.
                planned.begun = false;
                return self.mover_ended.notify_all();
            }
            if open_leg {
                // Only the journal records where the leg's keys are, and only a start reads it. If the move were
                // Only the journal records where the leg's keys are, and only a start reads it. If the move were
                // restarted or given up, its source would serve keys that the target has. So `begun` stays set.
                // state.
                return;
            }
            planned.end = Some(end.clone());
        }
        self.mover_ended.notify_all();
        self.wake();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;
    use std::sync::{Arc, mpsc};

    use switchyard_policy::migration::{Cause, Goal, MoveOptions, MoveOrder, Process, Side};
    use switchyard_policy::topology::Stage;

    use super::super::ended::{ENDED, EndedMove};
    use super::super::options::{OPTIONS, Options};
    use super::super::queue::Planned;
    use super::*;
    use crate::admin::{AbortRequest, MoveReport, MoveState};
    use crate::journal::Sync;
    use crate::placement::Placement;
    use crate::store::{load_json, save_json};

    /// Opens an executor on a state directory, without a router.
    fn executor(dir: &Path) -> (Arc<Placement>, Arc<Moves>) {
        let placement = Arc::new(Placement::open(dir, Arc::default()).expect("opens"));
        placement.apply_nodes(&["127.0.0.1:7001", "127.0.0.1:7002"].map(str::to_owned), |_| {}).expect("places");
        let moves = Moves::open(dir, Arc::clone(&placement), Arc::default(), Sync::Always).expect("opens");
        (placement, moves)
    }

    fn under_way(slot: Slot) -> Planned {
        let (source, target) = (NodeId(0), NodeId(1));
        let order = MoveOrder {
            source,
            target,
            slots: vec![slot],
            keys: None,
            how: MoveOptions::default(),
            cause: Cause::Requested(None),
        };
        Planned { begun: true, ..Planned::new(order) }
    }

    #[test]
    fn lost_keys_are_recorded_before_the_leg_ends() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (id, slot) = (MoveId(1), Slot::new(0).expect("a slot"));
        {
            let (_, moves) = executor(dir.path());
            let planned = under_way(slot);
            let (begun, target) = (planned.order.records(id), planned.order.target);
            moves.state().open.insert(id, planned);
            let (told, durable) = mpsc::channel();
            moves.record(begun, Box::new(move |outcome| told.send(outcome).expect("awaited")));
            durable.recv().expect("told").expect("written");
            {
                let mut state = moves.state();
                let steering = &mut state.open.get_mut(&id).expect("open").steering;
                (steering.aborting, steering.give_up) = (true, Some(Side::Target));
            }
            moves.lost(id, target, &[Fingerprint(1), Fingerprint(2)], 2);
            // The process dies here, so nothing else is stored.
        }
        let (_, moves) = executor(dir.path());
        moves.end_unstarted(id);
        let report = moves.report();
        let ended = report.ended.first().expect("it is over");
        let why = "127.0.0.1:7002 was abandoned: at most 2 keys moved there before are lost";
        assert_eq!((ended.keys_lost, ended.activity.as_str()), (2, why));
        let file = dir.path().join("lost-keys-of-move-1.txt");
        assert_eq!(std::fs::read_to_string(file).expect("there").lines().count(), 2);
    }

    #[test]
    fn moves_in_the_history_are_ended_despite_an_open_record() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (id, slot) = (MoveId(1), Slot::new(0).expect("a slot"));
        {
            let (_, moves) = executor(dir.path());
            let planned = under_way(slot);
            let (told, durable) = mpsc::channel();
            let begun = planned.order.records(id);
            moves.record(begun, Box::new(move |outcome| told.send(outcome).expect("awaited")));
            durable.recv().expect("told").expect("written");
            let report = MoveReport { id: id.0, state: MoveState::Done, ..MoveReport::default() };
            save_json(&*moves.store, ENDED, &[EndedMove::from(report)]).expect("kept");
            // The process dies here.
        }
        for _ in 0..2 {
            let (_, moves) = executor(dir.path());
            assert_eq!(moves.open_ids(), []);
            let report = moves.report();
            assert_eq!(
                report.ended.iter().map(|report| (report.id, report.state)).collect::<Vec<_>>(),
                [(1, MoveState::Done)]
            );
            while !moves.beside().is_empty() {
                std::thread::yield_now();
            }
        }
    }

    /// A crash while the journal removes a move must leave the move in the history.
    #[test]
    fn the_history_contains_a_move_before_the_journal_drops_it() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (_, moves) = executor(dir.path());
        let (id, slot) = (MoveId(1), Slot::new(0).expect("a slot"));
        let planned = Planned { end: Some(MoveEnd::Done), ..under_way(slot) };
        let (told, durable) = mpsc::channel();
        moves.record(planned.order.records(id), Box::new(move |outcome| told.send(outcome).expect("awaited")));
        durable.recv().expect("told").expect("written");
        moves.state().open.insert(id, planned);
        // Blocks the store, and so all changes of options.
        let held = moves.in_order();
        let ending = {
            let moves = Arc::clone(&moves);
            std::thread::spawn(move || moves.finish(id))
        };
        while moves.state().open.contains_key(&id) || !moves.beside().is_empty() {
            std::thread::yield_now();
        }
        // The journal has removed it.
        let ended: Vec<EndedMove> = load_json(&*moves.store, ENDED).expect("readable");
        assert_eq!(ended.into_iter().map(|ended| MoveReport::from(ended).id).collect::<Vec<_>>(), [1]);
        drop(held);
        ending.join().expect("no panic");
    }

    #[test]
    fn ends_of_moves_for_commands_are_stored_together() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (_, moves) = executor(dir.path());
        let stored = || load_json::<Vec<EndedMove>>(&*moves.store, ENDED).expect("readable").len();
        for id in [MoveId(1), MoveId(2)] {
            let mut planned =
                Planned { end: Some(MoveEnd::Done), ..under_way(Slot::new(id.0 as u16).expect("a slot")) };
            planned.order.keys = Some([Key::from(&b"key"[..])].into());
            planned.order.cause = Cause::Needed([("RENAME".to_owned(), 1)].into());
            moves.state().open.insert(id, planned);
            moves.finish(id);
        }
        assert_eq!((stored(), moves.report().ended.len()), (0, 2));
        moves.save_unsaved_ends();
        assert_eq!(stored(), 2);
    }

    #[test]
    fn a_short_move_for_a_command_keeps_its_cause_over_a_restart() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let id = MoveId(1);
        {
            let (placement, moves) = executor(dir.path());
            let topology = placement.topology().expect("a map");
            let keys: Arc<[Key]> = [Key::from(&b"key"[..])].into();
            let slots = MoveOrder::slots_of(topology.placement(), &keys);
            let mut planned = under_way(slots[0]);
            planned.order.keys = Some(keys);
            planned.order.cause = Cause::Needed([("RENAME".to_owned(), 1)].into());
            moves.queue_moves(BTreeMap::from([(id, planned)])).expect("on record");
            assert!(kept(&moves).is_empty());
            // The process dies here.
        }
        let (_, moves) = executor(dir.path());
        let state = moves.state();
        assert!(state.open[&id].order.needed_keys().is_some() && state.open[&id].order.how.goal == Goal::Fast);
    }

    /// After a restart, the node that had the keys may not be reachable.
    #[test]
    fn moved_names_count_once_per_database_after_a_restart() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (id, slot) = (MoveId(1), Slot::new(0).expect("a slot"));
        {
            let (_, moves) = executor(dir.path());
            let planned = under_way(slot);
            let process = Process { run_id: "r".to_owned(), client_id: 1 };
            let mut records = planned.order.records(id);
            moves.state().open.insert(id, planned);
            moves.databases(id, 3);
            let (slots, keys) = (vec![slot], vec![Fingerprint(1), Fingerprint(2)]);
            records.push(Record::LegBegun { move_id: id, leg: 0, slots, source: process.clone(), target: process });
            records.push(Record::LegMoving { move_id: id, leg: 0 });
            records.push(Record::Moved { move_id: id, leg: 0, keys });
            for record in records {
                let (told, durable) = mpsc::channel();
                moves.record(vec![record], Box::new(move |outcome| told.send(outcome).expect("awaited")));
                durable.recv().expect("told").expect("written");
            }
        }
        let (_, moves) = executor(dir.path());
        let message = moves.abort(id, AbortRequest { abandon: None, dry_run: true }).expect("heard").message;
        assert!(message.contains("at most 6 keys"), "{message}");
        assert_eq!(moves.state().open[&id].databases, 3);
    }

    /// Blocks the journal until the sender is used. Later records wait behind it.
    fn hold_journal(moves: &Moves, first: Record) -> mpsc::Sender<()> {
        let (go_on, awaited) = mpsc::channel();
        let (told, held) = mpsc::channel();
        let hold = move |outcome: Result<(), String>| {
            told.send(outcome).expect("awaited");
            // Regardless of how the test ends.
            let _ = awaited.recv();
        };
        moves.record(vec![first], Box::new(hold));
        held.recv().expect("told").expect("written");
        go_on
    }

    /// Options that a restart would read.
    fn kept(moves: &Moves) -> BTreeMap<u64, Options> {
        load_json(&*moves.store, OPTIONS).expect("readable")
    }

    #[test]
    fn move_options_are_stored_while_the_move_may_be_on_record() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (_, moves) = executor(dir.path());
        let planned = |number| Planned { begun: false, ..under_way(Slot::new(number).expect("a slot")) };
        let (id, other) = (MoveId(1), MoveId(2));
        let mut accepted = planned(0);
        accepted.order.how.max_rate = Some(20);
        let wanted = Options::of(&accepted);
        // The record is being written: it may be durable, without a confirmation.
        let go_on = hold_journal(&moves, planned(1).order.records(other).remove(0));
        let accepting = {
            let moves = Arc::clone(&moves);
            std::thread::spawn(move || moves.queue_moves(BTreeMap::from([(id, accepted)])))
        };
        while kept(&moves).is_empty() {
            std::thread::yield_now();
        }
        moves.state().open.insert(other, planned(1));
        moves.save_options();
        assert_eq!(kept(&moves).get(&1), Some(&wanted), "another move is kept at that moment");
        drop(go_on);
        accepting.join().expect("no panic").expect("on record");
        // The record is being removed: it may still exist. The move must not continue.
        let go_on = hold_journal(&moves, Record::Ended { move_id: other });
        let stopped = MoveEnd::Stopped("its target refuses".to_owned());
        moves.state().open.get_mut(&id).expect("open").end = Some(stopped);
        moves.finish(id);
        assert_eq!(kept(&moves).get(&1), Some(&wanted.stopped()));
        drop(go_on);
        while !moves.beside().is_empty() {
            std::thread::yield_now();
        }
        moves.save_options();
        assert_eq!(kept(&moves).keys().copied().collect::<Vec<_>>(), [2]);
    }

    #[test]
    fn a_move_with_an_open_leg_and_no_mover_stays_begun() {
        let dir = tempfile::tempdir().expect("a temporary directory");
        let (placement, moves) = executor(dir.path());
        let (id, slot) = (MoveId(1), Slot::new(0).expect("a slot"));
        let planned = under_way(slot);
        let [source, target] = planned.order.nodes();
        let transit = Transit { move_id: id, source, target, stage: Stage::Moving { leg: 0 }, keys_only: false };
        placement.set_transits(id, vec![(transit, vec![slot])]).expect("few");
        moves.state().open.insert(id, planned);
        moves.ended(id, &MoveEnd::Stopped("the mover panicked".to_owned()));
        moves.abort(id, AbortRequest::default()).expect("heard");
        let state = moves.state();
        let planned = state.open.get(&id).expect("it is not over");
        assert!(planned.begun && planned.end.is_none() && placement.is_in_transit(id));
    }
}
