//! Restores moves at the start, before the router serves clients.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Condvar, Mutex, RwLock, mpsc};

use anyhow::{Context, anyhow, bail};
use switchyard_policy::migration::Key;
use switchyard_policy::migration::record::{OpenMove, Replay};
use switchyard_policy::topology::{MoveId, Slot, Stage, Transit};
use switchyard_resp::units::counted;
use tracing::{info, warn};

use super::Moves;
use super::ended::{ENDED, EndedMove};
use super::options::{OPTIONS, Options};
use super::queue::{Planned, State};
use crate::admin::MoveReport;
use crate::journal::Sync;
use crate::ledger::Ledger;
use crate::members::Drained;
use crate::placement::Placement;
use crate::running::Running;
use crate::store::load_json;

impl Moves {
    /// Opens the journal. On return the slot map contains the results of ended legs, and open legs are in transit. The
    /// router must start with that map, so that no worker serves a key of an open leg.
    pub fn open(
        directory: &Path,
        placement: Arc<Placement>,
        running: Arc<Running>,
        sync: Sync,
    ) -> anyhow::Result<Arc<Self>> {
        let store = Arc::clone(placement.store());
        let opened = Ledger::open(directory, &*store, sync)?;
        if opened.torn > 0 {
            warn!(
                "the journal of moves ended in the middle of a record, as after a power cut. Cut off: {}",
                counted(opened.torn, "byte")
            );
        }
        let spool = directory.join("spool");
        empty(&spool).with_context(|| format!("cannot empty {}", spool.display()))?;
        let mut options: BTreeMap<u64, Options> = load_json(&*store, OPTIONS)?;
        let ended: Vec<EndedMove> = load_json(&*store, ENDED)?;
        let drained = Arc::new(Drained::load(&store)?);
        // The process may have died after storing the end and before removing the record.
        let ended: VecDeque<MoveReport> = ended.into_iter().map(MoveReport::from).collect();
        // The process may have died between noting an end and taking the move off the record.
        let has_ended =
            |id: &MoveId, open: &OpenMove| open.leg.is_none() && ended.iter().any(|report| report.id == id.0);
        let over: Vec<MoveId> =
            opened.replay.open.iter().filter(|(id, open)| has_ended(id, open)).map(|(id, _)| *id).collect();
        let mut open = restore_moves(&placement, opened.replay, &mut options)?;
        for id in &over {
            open.remove(id);
            placement.release_nodes(*id);
        }
        let state = State { open, ended, ..State::default() };
        let (wake, woken) = mpsc::channel();
        let moves = Self {
            placement,
            running,
            store,
            ledger: opened.ledger,
            spool,
            tuning: RwLock::default(),
            state: Mutex::new(state),
            mover_ended: Condvar::new(),
            wake,
            woken: Mutex::new(Some(woken)),
            stopping: AtomicBool::new(false),
            recording: Mutex::default(),
            keeping: Mutex::default(),
            unopened_options: Arc::default(),
            has_unsaved_ends: AtomicBool::new(false),
            colocations: super::colocate::Colocations::default(),
            drained,
        };
        over.into_iter().for_each(|id| moves.record_end(id));
        Ok(Arc::new(moves))
    }
}

/// Key lists of an earlier run are useless.
fn empty(directory: &Path) -> std::io::Result<()> {
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    std::fs::DirBuilder::new().create(directory)
}

/// Makes the slot map agree with the journal.
fn restore_moves(
    placement: &Placement,
    replay: Replay,
    options: &mut BTreeMap<u64, Options>,
) -> anyhow::Result<BTreeMap<MoveId, Planned>> {
    let mut open = BTreeMap::new();
    for (id, found) in replay.open {
        let Some(topology) = placement.topology() else { bail!("the journal has moves, and there is no slot map") };
        for node in [found.source, found.target] {
            if topology.node(node).is_none() {
                bail!(
                    "move {} is in progress with node number {}, which is not in the list of nodes; add it again",
                    id.0,
                    node.0
                );
            }
        }
        placement.retain_nodes(id, [found.source, found.target]);
        let late: Vec<Slot> = match &found.keys {
            None => found.handed_over.iter().copied().filter(|slot| topology.owner(*slot) == found.source).collect(),
            Some(keys) => {
                let is_late = |key: &&Key| {
                    found.handed_over.binary_search(&topology.slot_of(key)).is_ok()
                        && topology.lives_at(key) != found.target
                };
                keys.iter()
                    .filter(is_late)
                    .map(|key| topology.slot_of(key))
                    .collect::<BTreeSet<_>>()
                    .into_iter()
                    .collect()
            }
        };
        if !late.is_empty() {
            placement.hand_over(id, &late, found.keys.as_deref(), found.target).map_err(anyhow::Error::msg)?;
        }
        if let Some(leg) = found.leg.as_ref().filter(|leg| leg.moving) {
            let stage = Stage::Moving { leg: leg.leg };
            let transit = Transit {
                move_id: id,
                source: found.source,
                target: found.target,
                stage,
                keys_only: found.keys.is_some(),
            };
            placement.set_transits(id, vec![(transit, leg.slots.clone())]).map_err(anyhow::Error::msg)?;
        }
        let name = |node| topology.node(node).map_or("?", |node| node.name.as_str());
        info!(
            "move {} resumes: from {} to {}, {} of {} slots have moved{}",
            id.0,
            name(found.source),
            name(found.target),
            found.handed_over.len(),
            found.slots.len(),
            if found.leg.is_some() { ", and a leg is open" } else { "" },
        );
        let kept = options.remove(&id.0).or_else(|| found.keys.as_ref().map(|keys| Options::of_short_move(keys.len())));
        let planned = kept.unwrap_or_default().planned(found).map_err(|why| {
            anyhow!("move {} is in progress with a protocol as published, and {why}. It must end there", id.0)
        })?;
        open.insert(id, planned);
    }
    Ok(open)
}
