//! What a mover needs of those who keep things: the journal, and the one owner of the slot map.

use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::time::Duration;

use switchyard_policy::failover::Position;
use switchyard_policy::migration::{Key, Record};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Stage, Transit};
use switchyard_router::{Done, Host, MoveEnd};
use tracing::error;

use super::Moves;
use crate::serve::failover::Need;

impl Host for Moves {
    fn record(&self, records: Vec<Record>, done: Done) {
        self.ledger.record(records, done);
    }

    fn hand_over(&self, move_id: MoveId, slots: &[Slot], keys: Option<&[Key]>, owner: NodeId, done: Done) {
        let known = self.running.seats().map_or(Ok(()), |seats| seats.raise());
        done(known.and_then(|()| self.placement.hand_over(move_id, slots, keys, owner)));
    }

    fn replicas_need(&self, node: NodeId, position: Position, patience: Duration, done: Done) {
        self.running.needs().add(Need::new(node, position, patience, done));
    }

    fn set_transits(&self, move_id: MoveId, transits: Vec<(Transit, Vec<Slot>)>) -> Result<u64, String> {
        // Before the first key moves, its nodes know that older copies of the state directory will not do.
        let begins = transits.iter().find(|(transit, _)| matches!(transit.stage, Stage::Moving { .. }));
        let begins = begins.filter(|_| !self.placement.is_in_transit(move_id)).zip(self.running.seats());
        let told = begins.map(|((transit, _), seats)| seats.leg_begins(&self.running, [transit.source, transit.target]));
        let _until_it_is_in_transit = told.transpose()?;
        self.placement.set_transits(move_id, transits)
    }

    fn spool_directory(&self) -> PathBuf {
        self.spool.clone()
    }

    fn ended(&self, move_id: MoveId, end: &MoveEnd) {
        let open_leg = self.placement.is_in_transit(move_id);
        if open_leg {
            error!("move {} has ended with a leg open: its keys cannot be used until a restart takes the leg up again", move_id.0);
        }
        {
            let mut state = self.state();
            let Some(planned) = state.open.get_mut(&move_id) else { return };
            if self.stopping.load(Ordering::Acquire) || open_leg {
                // Not over: it goes on after the next start.
                planned.begun = false;
                return;
            }
            planned.end = Some(end.clone());
        }
        self.wake();
    }
}
