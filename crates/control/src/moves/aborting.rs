//! Aborts moves: first reports the plan and the keys that would be lost, then ends the move. The abort is on record, so
//! a restart continues it and nothing else.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use switchyard_policy::migration::{Fingerprint, Side};
use switchyard_policy::topology::{MoveId, NodeId, Slot, Stage};
use switchyard_resp::units::{counted, describe_size};
use switchyard_router::{Link, Router, UserRequest};
use tracing::{error, warn};

use super::Moves;
use super::colocate::ColocationEvent;
use super::options::Options;
use super::queue::{Planned, Steering};
use crate::admin::{Abandon, AbortRequest, MoveState, MovesReport, OperationError, Warning, conflict};
use crate::journal::RESERVE;

/// Outage of a leg's node, in seconds, after which it counts as lost.
const LOST_TIMEOUT: f64 = 3.0;

/// Time without progress, in seconds, after which a move is reported as a problem.
const IDLE_TIMEOUT: f64 = 60.0;

/// Bytes that a change of the state directory may need, approximately.
const STORE_ROOM: u64 = 256 << 10;

/// Retry interval for records that the end of a leg requires.
const RECORD_PERIOD: Duration = Duration::from_millis(200);

/// State of a move that an abort depends on.
pub(super) struct AbortFacts {
    source: NodeId,
    target: NodeId,
    /// Upper bound of the keys of the open leg that must still be moved. `None` without an open leg.
    pub(super) leg_left: Option<u64>,
    /// Upper bound of the leg's keys that would be lost with the target.
    leg_away: u64,
    /// Slots that the target already owns.
    slots_done: u64,
    /// Whether slots are in transit by a published protocol, which cannot roll back.
    cannot_roll_back: bool,
}

/// A node of a move that cannot be reached.
pub(super) struct UnreachableSide {
    side: Side,
    pub(super) node: NodeId,
    seconds: f64,
}

impl UnreachableSide {
    /// Returns the nodes that have been unreachable for at least this long.
    fn since(planned: &Planned, seconds: f64) -> Vec<Self> {
        let lost = planned.progress.as_ref().map_or([None; 2], |progress| progress.lost);
        let sides = [(Side::Source, planned.order.source), (Side::Target, planned.order.target)].into_iter().zip(lost);
        let all = sides.filter_map(|((side, node), seconds)| Some(Self { side, node, seconds: seconds? }));
        all.filter(|unreached| unreached.seconds >= seconds).collect()
    }

    /// Returns the node that the move waits for, excluding an abandoned node. Of two nodes, returns the one that has
    /// been unreachable for longer.
    pub(super) fn awaited(planned: &Planned, seconds: f64) -> Option<Self> {
        let needed = Self::since(planned, seconds)
            .into_iter()
            .filter(|unreached| planned.steering.give_up != Some(unreached.side));
        needed.max_by(|one, other| one.seconds.total_cmp(&other.seconds))
    }
}

fn write_durably(path: &Path, text: &str) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(text.as_bytes())?;
    file.sync_all()?;
    path.parent().map_or(Ok(()), |directory| File::open(directory)?.sync_all())
}

impl Moves {
    /// Aborts a move, or (dry run) returns what the abort would do.
    pub(crate) fn abort(&self, id: MoveId, request: AbortRequest) -> Result<MovesReport, OperationError> {
        self.refresh();
        let (look, unreached, activity) = {
            let state = self.state();
            let planned = state.open.get(&id).ok_or_else(|| state.not_open(id))?;
            (
                self.abort_state(id, planned),
                UnreachableSide::since(planned, 0.0),
                planned.progress.as_ref().map(|progress| progress.activity.clone()),
            )
        };
        // A node may reply to clients while the mover cannot use it.
        let seconds =
            |node: NodeId| unreached.iter().find(|unreached| unreached.node == node).map(|unreached| unreached.seconds);
        let is_linked = |node: NodeId| self.link_of(node).is_none_or(|link| link == Link::Up);
        let is_up = |node: NodeId| is_linked(node) && seconds(node).is_none_or(|seconds| seconds < LOST_TIMEOUT);
        let (source, target) = (self.name(look.source), self.name(look.target));
        if look.cannot_roll_back && request.abandon.is_none() {
            return Err(conflict(format!(
                "move {0} uses a protocol as published, which has no rollback: it continues until everything is at {target}. If a node is permanently lost, \
                 `switchyard moves abort {0} --abandon-source` or `--abandon-target` ends it",
                id.0
            )));
        }
        let abandon = match request.abandon {
            None => None,
            Some(abandon) => {
                let (lost, other) = match abandon {
                    Abandon::Source => (look.source, look.target),
                    Abandon::Target => (look.target, look.source),
                };
                let (lost_name, other_name) = (self.name(lost), self.name(other));
                if is_up(lost) {
                    return Err(conflict(format!(
                        "{lost_name} answers, so nothing has to be lost: switchyard moves abort {}",
                        id.0
                    )));
                }
                if !(is_linked(other) && seconds(other).is_none()) && look.leg_left.is_some() {
                    return Err(conflict(format!(
                        "{other_name} does not reply either, and its keys must be kept: restore it first"
                    )));
                }
                Some(Side::from(abandon))
            }
        };
        let done = if look.slots_done > 0 {
            format!(" {} moved, and stay at {target}.", counted(look.slots_done, "slot"))
        } else {
            String::new()
        };
        let message = match (look.leg_left, abandon) {
            (None, _) => format!("move {} stops now: no slots are in transit.{done}", id.0),
            (Some(_), Some(Side::Target)) => format!(
                "move {} ends without {target}: the keys at {source} stay there and are served. At most {}, which had moved to {target} with the \
                 slots that are moving now, are lost; the log names the file with their fingerprints.{done}",
                id.0,
                counted(look.leg_away, "key")
            ),
            (Some(left), Some(Side::Source)) => format!(
                "move {} ends without {source}: of the slots that are moving now, the keys at {target} are served there, and the others are lost, {} that \
                 the move knows of. {source} keeps all its other slots, and they wait for it.{done}",
                id.0,
                counted(left, "key")
            ),
            (Some(left), None) if is_up(look.source) && is_up(look.target) => format!(
                "move {} stops: at most {} of the slots that are moving now first move back, or on if that is less, as fast as the nodes can. \
                 Nothing is lost.{done}",
                id.0,
                counted(left.max(look.leg_away), "key")
            ),
            (Some(left), None) => {
                let (lost, word) = if is_up(look.target) { (&source, "source") } else { (&target, "target") };
                let why = activity
                    .filter(|_| !unreached.is_empty())
                    .map_or_else(String::new, |activity| format!(" (now: {activity})"));
                format!(
                    "move {0} stops when it reaches {lost} again{why}: at most {1} of the slots that are moving now wait for it.{done} If {lost} is \
                     permanently lost: `switchyard moves abort {0} --abandon-{word} --dry-run` shows what would be lost",
                    id.0,
                    counted(left.max(look.leg_away), "key")
                )
            }
        };
        if !request.dry_run {
            self.request_end(id, abandon)?;
        }
        let mut report = self.report();
        report.message = message;
        Ok(report)
    }

    pub(super) fn abort_state(&self, id: MoveId, planned: &Planned) -> AbortFacts {
        let progress = planned.progress.as_ref();
        let handed_over = planned.resume.as_ref().map_or(0, |resume| resume.handed_over.len() as u64);
        // Before a mover resumes the leg, use the state that the previous router left.
        let left = || progress.and_then(|progress| progress.leg_left).unwrap_or(planned.left_at_start);
        let leg_away = progress.and_then(|progress| progress.leg_away).unwrap_or(planned.left_at_start);
        let is_under_way = self.placement.is_in_transit(id);
        AbortFacts {
            cannot_roll_back: is_under_way && planned.order.how.paper.is_some(),
            source: planned.order.source,
            target: planned.order.target,
            leg_left: is_under_way.then(left),
            leg_away,
            slots_done: progress.map_or(handed_over, |progress| progress.slots_done.into()),
        }
    }

    /// Ends a move that has not started, or makes a running mover end its leg.
    fn request_end(&self, id: MoveId, abandon: Option<Side>) -> Result<(), OperationError> {
        let in_order = self.in_order();
        let steering = {
            let state = self.state();
            let before = state.open.get(&id).ok_or_else(|| state.not_open(id))?.steering;
            Steering { aborting: true, give_up: abandon.or(before.give_up), ..before }
        };
        // Store this before publishing it, because a restart continues from it.
        if let Err(why) = self.save_all_options(&in_order, Some((id, steering))) {
            return Err(OperationError::Failed(format!(
                "move {} continues: the abort cannot be recorded: {why}",
                id.0
            )));
        }
        let begun = {
            let mut state = self.state();
            let over = state.not_open(id);
            let planned = state.open.get_mut(&id).ok_or(over)?;
            planned.steering = steering;
            planned.begun
        };
        if begun {
            self.running.with(|router| router.steer_move(id, abandon.map_or(UserRequest::Abort, UserRequest::GiveUp)));
        }
        drop(in_order);
        if !begun {
            self.end_unstarted(id);
        }
        self.wake();
        Ok(())
    }

    /// Ends an aborted move without an open leg.
    pub(super) fn end_unstarted(&self, id: MoveId) {
        let planned = {
            let mut state = self.state();
            let is_idle =
                |planned: &Planned| !planned.begun && planned.resume.as_ref().is_none_or(|resume| resume.leg.is_none());
            match state.open.remove(&id) {
                Some(planned) if is_idle(&planned) => {
                    self.beside().insert(id, Options::of(&planned));
                    planned
                }
                Some(planned) => {
                    state.open.insert(id, planned);
                    return;
                }
                None => return,
            }
        };
        if let Some(keys) = planned.order.needed_keys() {
            self.colocations
                .notify(ColocationEvent::Stopped { keys: Arc::clone(keys), why: format!("move {} was aborted", id.0) });
        }
        let mut report = self.report_of(id, &planned);
        report.state = MoveState::Stopped;
        report.activity = match planned.steering.give_up.filter(|_| planned.lost.is_some()) {
            // Same wording as the mover's.
            Some(Side::Source) => {
                format!("{} was abandoned: its keys of the moving slots are lost", self.name(planned.order.source))
            }
            Some(Side::Target) => {
                let keys = counted(planned.lost.unwrap_or(0), "key");
                format!("{} was abandoned: at most {keys} moved there before are lost", self.name(planned.order.target))
            }
            None if report.slots_done > 0 => "aborted by the user".to_owned(),
            None => "aborted before it started".to_owned(),
        };
        self.close(id, Options::of(&planned), report);
    }

    fn link_of(&self, node: NodeId) -> Option<Link> {
        let status = self.running.with(Router::status)?;
        status.nodes.into_iter().find(|status| status.id == node).map(|status| status.link)
    }

    /// Records that a leg is about to end without a node. Durable on return, so the history of moves contains the loss
    /// even after a crash. Lost keys are identified by fingerprints only, because key names must not be disclosed.
    pub(super) fn record_lost(&self, id: MoveId, node: NodeId, keys: &[Fingerprint], most: u64) {
        if let Some(planned) = self.state().open.get_mut(&id) {
            planned.lost = Some(most);
        }
        let mut told = false;
        while let Err(why) = self.try_save_options() {
            if !std::mem::replace(&mut told, true) {
                error!("move {} cannot end yet: the loss of {} cannot be recorded: {why}", id.0, self.name(node));
            }
            if self.stopping.load(Ordering::Acquire) {
                break;
            }
            std::thread::sleep(RECORD_PERIOD);
        }
        self.log_lost_keys(id, node, keys, most);
    }

    fn log_lost_keys(&self, id: MoveId, node: NodeId, keys: &[Fingerprint], most: u64) {
        let name = self.name(node);
        if keys.is_empty() {
            warn!("move {} ends without {name}, which was abandoned: its keys of the moving slots are lost", id.0);
            return;
        }
        let file = self.lost_file(id);
        let text: String = keys.iter().map(|key| format!("{:032x}\n", key.0)).collect();
        let count = counted(most, "key");
        match write_durably(&file, &text) {
            Ok(()) => warn!(
                "move {} ends without {name}, which was abandoned: at most {count} moved there before are lost. Fingerprints are in {}",
                id.0,
                file.display()
            ),
            Err(error) => error!(
                "move {} ends without {name}, which was abandoned: at most {count} moved there before are lost. Fingerprints cannot be written \
                 to {}: {error}",
                id.0,
                file.display()
            ),
        }
    }

    fn lost_file(&self, id: MoveId) -> PathBuf {
        self.spool.with_file_name(format!("lost-keys-of-move-{}.txt", id.0))
    }

    /// Problems of moves and of the disk, for monitoring.
    pub(crate) fn warnings(&self) -> Vec<Warning> {
        self.refresh();
        let topology = self.placement.topology();
        let of_disk = self.disk_trouble().map(|what| Warning { what, ..Warning::default() });
        let state = self.state();
        let of_leg = |id: MoveId| {
            let is_moving = |slot: &Slot| {
                let transit = topology.as_ref().and_then(|topology| topology.transit(*slot));
                transit.is_some_and(|transit| transit.move_id == id && matches!(transit.stage, Stage::Moving { .. }))
            };
            topology.iter().flat_map(|topology| topology.slots()).filter(is_moving).count() as u64
        };
        let warnings = state.open.iter().filter_map(|(id, planned)| {
            let (progress, look) = (planned.progress.as_ref(), self.abort_state(*id, planned));
            let names = |side| self.name(if side == Side::Source { planned.order.source } else { planned.order.target });
            if let (Some(UnreachableSide { side, seconds, .. }), Some(_)) = (UnreachableSide::awaited(planned, LOST_TIMEOUT), look.leg_left) {
                let (slots, activity) = (of_leg(*id), progress.map_or("", |progress| &progress.activity));
                let (name, word) = (names(side), if side == Side::Source { "source" } else { "target" });
                let keys = match side {
                    Side::Target => format!("at most {} of {}", counted(look.leg_away, "key"), counted(slots, "slot")),
                    Side::Source => format!("keys of {} that have not moved", counted(slots, "slot")),
                };
                let what = format!(
                    "move {0} has not reached {name} for {seconds:.0} s: {keys} cannot be used (now: {activity}). If {name} is permanently lost: switchyard \
                     moves abort {0} --abandon-{word}",
                    id.0
                );
                return Some(Warning { id: Some(id.0), slots, what });
            }
            if let Some(trouble) = planned.trouble.as_ref().filter(|_| !planned.begun) {
                return Some(Warning { id: Some(id.0), slots: of_leg(*id), what: format!("move {} cannot start: {trouble}", id.0) });
            }
            let idle = progress.filter(|progress| !progress.paused && progress.idle_seconds >= IDLE_TIMEOUT)?;
            let what = format!("move {} has made no progress for {:.0} s: {}", id.0, idle.idle_seconds, idle.activity);
            Some(Warning { id: Some(id.0), slots: 0, what })
        });
        of_disk.into_iter().chain(warnings).collect()
    }

    /// Reason why the state directory cannot be written, or has no room for another move.
    pub(super) fn disk_trouble(&self) -> Option<String> {
        let known = self.ledger.status().write_error.or_else(|| self.store.trouble());
        let directory = || self.store.directory().display().to_string();
        if let Some(why) = known {
            return Some(format!("the state directory {} cannot be written: {why}", directory()));
        }
        // While moves are open, the journal's room is reserved.
        let (needed, cannot) = match self.state().open.is_empty() {
            true => (RESERVE, "no move can start"),
            false => (STORE_ROOM, "changes cannot be stored, and moves may have to wait,"),
        };
        let room = self.store.free_bytes().filter(|room| *room < needed)?;
        let (room, needed) = (describe_size(room), describe_size(needed));
        Some(format!("{room} are free for the state directory {}: {cannot} until {needed} are free", directory()))
    }
}
