//! The thread of a move: performs the steps of the move's state machine (`switchyard_policy::migration::life`) and
//! passes the results back to it.
//!
//! Connecting, checks, listing and status texts are here. Legs are in `drive`. A thread rather than a task of a worker:
//! it blocks on nodes and on the disk, and must not delay clients.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use switchyard_policy::migration::life::{Begin, ListedKeys, MoveStateMachine, Step, StepResult};
use switchyard_policy::migration::{Fingerprinter, Outcome, Protocol, Side};
use switchyard_policy::topology::{MoveId, NodeId, Placement, Slot, Stage};
use tracing::{error, info, warn};

use super::big::Big;
use super::checked_pairs::NodeChecks;
use super::connection::Connection;
use super::late_keys::LateKeyCheck;
use super::list::List;
use super::pacing::Pacing;
use super::progress::ProgressReport;
use super::returning::Returning;
use super::side::SideConnection;
use super::sizes::Sizes;
use super::staging::Staging;
use super::{Host, MoveEnd, MoveTask, MoverMessage, SharedMove, SourceOps, UserRequest};
use crate::shared::{Message, Shared};

/// Reason for a mover to stop its current step.
#[derive(Debug)]
pub(super) enum MoverExit {
    /// The router stops. The journal has the state of the move.
    RouterStops,
    /// A required node is not connected. Reconnect and retry.
    Lost,
    /// The operator has aborted the move.
    Aborted,
    /// The step is impossible. The text is the reason.
    Stop(String),
}

/// A move in progress.
pub(super) struct Mover {
    pub(super) shared: Arc<Shared>,
    pub(super) own: Arc<SharedMove>,
    pub(super) id: MoveId,
    pub(super) host: Arc<dyn Host>,
    pub(super) fingerprints: Fingerprinter,
    pub(super) placement: Placement,
    /// State machine of the move: next step and the operator's requests.
    pub(super) life: MoveStateMachine,
    /// Slots, ascending, in which an earlier move of ours may have left keys at the target.
    pub(super) leftovers: Vec<Slot>,
    /// The move was started by an earlier router process.
    pub(super) is_resumed: bool,
    /// Set while the connections are those with which both nodes were checked.
    pub(super) checks: Option<NodeChecks>,
    pub(super) source: SideConnection,
    pub(super) target: SideConnection,
    pub(super) list: List,
    /// Set if the slots return to a target that was ejected.
    pub(super) returning: Option<Returning>,
    pub(super) big: Big,
    pub(super) sizes: Sizes,
    pub(super) staging: Staging,
    pub(super) late_keys: LateKeyCheck,
    pub(super) pacing: Pacing,
    pub(super) shown: ProgressReport,
    /// Workers that have requested a quiesce, by ticket.
    pub(super) tickets: BTreeMap<u64, usize>,
    databases: BTreeSet<u32>,
    /// Upper bound of keys per moved key name: the number of databases.
    pub(super) database_count: u32,
    /// Databases of the source without expiring keys, as of the last query.
    pub(super) databases_without_expiry: Vec<u32>,
    /// Whether the last batch contained only strings.
    pub(super) strings: bool,
}

/// Entry point of the mover thread.
pub(super) fn run(shared: Arc<Shared>, own: Arc<SharedMove>, task: MoveTask) {
    let id = task.id;
    let host = task.host.clone();
    let (mut mover, first) = Mover::new(shared.clone(), own, task);
    let end = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        mover.take_checked_pair();
        let end = mover.run_steps(first);
        // If the router stops, open work stays for the next start.
        if let Some(end) = &end {
            mover.discard_all();
            mover.leave_checked_pair(end);
        }
        if let Some((kept, removed)) = mover.kept() {
            info!(
                move_id = id.0,
                kept, removed, "slots returned to an ejected node: it has kept keys, and outdated ones were removed"
            );
        }
        end
    }));
    mover.source.release();
    mover.target.release();
    let end = match end {
        Ok(Some(end)) => end,
        Ok(None) => return,
        Err(_) => {
            error!(
                move_id = id.0,
                "a mover panicked. This is a bug, please report it; a restart of the router resumes the move"
            );
            MoveEnd::Stopped("the mover panicked: restart the router to resume the move".to_owned())
        }
    };
    let is_moving = mover.life.open().is_some() || shared.routing().moves.legs.keys().any(|(of, _)| *of == id);
    if !is_moving && let Err(why) = host.set_transits(id, Vec::new()) {
        warn!(move_id = id.0, reason = why, "the topology still has slots of a move that has ended");
    }
    mover.finish(&end);
    shared.change_moves(|moves| {
        moves.by_id.remove(&id);
        moves.source_ops.remove(&id);
        // The slots of a leg that stays open are not used before another mover publishes the leg again.
        moves.legs.retain(|(of, _), _| *of != id);
    });
    host.ended(id, &end);
}

impl Mover {
    fn new(shared: Arc<Shared>, own: Arc<SharedMove>, task: MoveTask) -> (Self, Step) {
        let MoveTask {
            id,
            order,
            leftovers,
            leftovers_at_source,
            aborted,
            give_up,
            so_far,
            databases,
            fingerprints,
            resume,
            host,
        } = task;
        if let Some(leg) = resume.as_ref().and_then(|resume| resume.leg.as_ref()) {
            shared.fences.add_broken(order.source, leg.source.clone());
            shared.fences.add_broken(order.target, leg.target.clone());
        }
        let list = List::new(host.spool_directory().join(format!("move-{}", id.0)));
        // A resumed move has no list: keys may have been written under an earlier router.
        let away = shared
            .routing()
            .moves
            .away
            .iter()
            .find(|away| away.node == order.target)
            .filter(|_| resume.is_none())
            .cloned();
        // Other protocols may store data at the target before the leg has drained.
        let how = &order.how;
        let away = away.filter(|_| {
            how.purge_target && how.protocol == Protocol::Switchyard && how.paper.is_none() && order.keys.is_none()
        });
        let returning =
            away.map(|away| Returning::new(away, host.spool_directory().join(format!("move-{}-target", id.0))));
        let names = order.nodes().map(|node| name(&shared, node));
        let is_resumed = resume.is_some();
        // The placement does not change while any move runs.
        let placement = shared.routing().topology.placement().clone();
        let shown = ProgressReport::new(&so_far);
        let pacing = Pacing::new(order.how, shown.before(), &shared.counters);
        let (life, first) = MoveStateMachine::begin(
            Begin { order, names, resume, aborted, give_up },
            shared.uptime().as_micros() as u64,
        );
        let mover = Self {
            source: SideConnection::new(life.order().source, shared.fences.clone()),
            target: SideConnection::new(life.order().target, shared.fences.clone()),
            list,
            returning,
            big: Big::new(big_limit(&shared)),
            sizes: Sizes::default(),
            staging: Staging::new(placement.clone()),
            placement,
            late_keys: LateKeyCheck::new(is_resumed, leftovers_at_source),
            pacing,
            shown,
            tickets: BTreeMap::new(),
            databases: BTreeSet::new(),
            database_count: databases,
            databases_without_expiry: Vec::new(),
            strings: false,
            shared,
            own,
            id,
            host,
            fingerprints,
            leftovers,
            is_resumed,
            checks: None,
            life,
        };
        (mover, first)
    }

    /// Performs steps until the move ends. Returns `None` if the router stops; the journal then has the state of the
    /// move.
    fn run_steps(&mut self, mut step: Step) -> Option<MoveEnd> {
        loop {
            if let Step::End(end) = step {
                return Some(end);
            }
            let came = match self.do_step(step) {
                Ok(came) => came,
                Err(MoverExit::RouterStops) => return None,
                Err(MoverExit::Lost) => StepResult::Lost,
                Err(MoverExit::Aborted) => StepResult::Aborted,
                Err(MoverExit::Stop(why)) => StepResult::Refused(why),
            };
            step = self.life.on_result(came, self.now_us());
        }
    }

    fn do_step(&mut self, step: Step) -> Result<StepResult, MoverExit> {
        let of_keys = self.life.order().keys.is_some();
        match step {
            Step::Connect { side, .. } => self.try_to_reach(side)?,
            Step::Rest { us, activity: doing, .. } => {
                self.shown.set_activity(doing);
                self.rest(Duration::from_micros(us))?;
            }
            Step::Check => {
                self.check()?;
                self.checks.get_or_insert_with(NodeChecks::now);
            }
            Step::LearnWaits => self.measure_baseline()?,
            Step::List if of_keys => self.list_named()?,
            Step::List => self.list()?,
            // After the drain of earlier commands: every command in flight now knows the move.
            Step::Functions => self.copy_functions()?,
            Step::HandleRequests => self.handle_messages_when_quiesced()?,
            Step::Measure => {
                self.measure_next_leg()?;
                return Ok(StepResult::Cut(self.next_leg(&[])));
            }
            Step::Clocks(_) => self.check_clocks()?,
            Step::Room(cut) => self.has_room(&cut.slots)?,
            Step::Stage(cut) => self.stage(&cut.slots)?,
            Step::Leg(cut) => {
                let outcome = self.run_leg(cut.number, cut.slots.clone())?;
                if outcome == Outcome::Moved {
                    self.forget_slots(&cut.slots);
                }
                return Ok(StepResult::Ended(outcome));
            }
            Step::Observe => self.observe()?,
            Step::CheckSource if of_keys => self.look_behind_keys()?,
            Step::CheckSource => self.check_late_keys()?,
            Step::End(_) => {}
        }
        Ok(StepResult::Done)
    }

    // ---- input from workers and operators ----

    pub(super) fn is_stopped(&self) -> bool {
        self.shared.stop.load(Ordering::Relaxed)
    }

    pub(super) fn now_us(&self) -> u64 {
        self.shared.uptime().as_micros() as u64
    }

    pub(super) fn timeout(&self) -> Duration {
        self.shared.routing().live.command_timeout
    }

    pub(super) fn name(&self, node: NodeId) -> String {
        name(&self.shared, node)
    }

    /// Applies an operator's request.
    pub(super) fn steer(&mut self, steer: UserRequest) {
        self.life.on_user_request(steer);
        self.pacing.steer(steer);
        if let UserRequest::SourceOpsMax(max) = steer {
            let limit = max.map(|max| Arc::new(SourceOps::new(max, self.now_us())));
            self.shared.change_moves(|moves| {
                moves.source_ops.remove(&self.id);
                moves.source_ops.extend(limit.map(|limit| (self.id, limit)));
            });
        }
    }

    /// Handles a message that does not concern a running leg.
    pub(super) fn note(&mut self, what: MoverMessage) {
        match what {
            MoverMessage::Written(mut keys) => {
                self.keep_own(&mut keys);
                for key in keys {
                    let slot = self.placement.slot_of(&key);
                    self.list.add(slot, &key);
                    self.staging.written(&key);
                    self.big.note_written(slot, key);
                }
            }
            MoverMessage::Touched { key, elements } => self.staging.touched(&key, elements),
            MoverMessage::WrittenAnything(slot) => {
                self.list.add_anything(slot);
                self.staging.touched_slot(slot);
            }
            MoverMessage::Quiesce { from, ticket, flushes } => {
                self.tickets.insert(ticket, from);
                if flushes {
                    self.staging.touched_all();
                }
                self.report_quiesced();
            }
            MoverMessage::Unquiesce { ticket } => {
                self.tickets.remove(&ticket);
            }
            MoverMessage::Steer(steer) => self.steer(steer),
            // For a leg that has ended.
            MoverMessage::Wanted { .. }
            | MoverMessage::WantedWhole { .. }
            | MoverMessage::Recorded { .. }
            | MoverMessage::CaughtUp { .. }
            | MoverMessage::HandedOver { .. } => {}
        }
    }

    /// Confirms to waiting workers that nothing is in flight.
    pub(super) fn report_quiesced(&self) {
        self.own.share_temporary(self.staging.names());
        for (ticket, worker) in &self.tickets {
            self.shared.mailboxes.send(*worker, Message::Quiesced { move_id: self.id, ticket: *ticket });
        }
    }

    /// Handles messages between two long steps. Returns when no worker waits for a quiesce.
    pub(super) fn handle_messages_when_quiesced(&mut self) -> Result<(), MoverExit> {
        loop {
            self.poll_messages()?;
            if self.life.is_cut_short() {
                return Err(MoverExit::Aborted);
            }
            if self.tickets.is_empty() {
                return Ok(());
            }
            self.wait(Duration::from_millis(5));
        }
    }

    /// Handles messages without waiting. Returns whether queries to the nodes must stop for now.
    pub(super) fn poll_messages(&mut self) -> Result<bool, MoverExit> {
        if self.is_stopped() {
            return Err(MoverExit::RouterStops);
        }
        for what in self.own.drain_messages() {
            self.note(what);
        }
        self.publish_if_due(None);
        Ok(self.life.is_paused() || !self.tickets.is_empty())
    }

    pub(super) fn while_paused(&mut self) -> Result<(), MoverExit> {
        self.handle_messages_when_quiesced()?;
        while self.life.is_paused() {
            self.shown.set_activity("paused");
            self.wait(Duration::from_millis(50));
            self.handle_messages_when_quiesced()?;
        }
        Ok(())
    }

    /// Handles messages for `length`. Returns early if the abort state changes.
    pub(super) fn rest(&mut self, length: Duration) -> Result<(), MoverExit> {
        let (until, aborted) = (Instant::now() + length, self.life.is_aborted());
        while Instant::now() < until && self.life.is_aborted() == aborted {
            self.handle_messages_when_quiesced()?;
            self.wait(until.saturating_duration_since(Instant::now()).min(Duration::from_millis(20)));
        }
        Ok(())
    }

    /// Waits for a reply of a node or a message, at most for `at_most`.
    pub(super) fn wait(&self, at_most: Duration) {
        let mut fds = vec![PollFd::new(&self.own.wake, PollFlags::IN)];
        // Without pending replies nothing is read from the socket, so a connection closed by the node would always be
        // ready.
        let asked = |connection: &&Connection| connection.unanswered > 0;
        fds.extend(
            [&self.source, &self.target]
                .into_iter()
                .filter_map(|end| end.connection.as_ref())
                .filter(asked)
                .map(Connection::poll_fd),
        );
        let timeout = Timespec { tv_sec: at_most.as_secs() as i64, tv_nsec: at_most.subsec_nanos().into() };
        // Errors surface at the next use of the sockets.
        let _ = poll(&mut fds, Some(&timeout));
    }

    // ---- nodes ----

    pub(super) fn end(&self, side: Side) -> &SideConnection {
        match side {
            Side::Source => &self.source,
            Side::Target => &self.target,
        }
    }

    pub(super) fn end_mut(&mut self, side: Side) -> &mut SideConnection {
        match side {
            Side::Source => &mut self.source,
            Side::Target => &mut self.target,
        }
    }

    /// Connects to a side, and makes the node confirm that earlier connections of this mover are closed.
    pub(super) fn reach(&mut self, side: Side) -> Result<(), String> {
        self.checks = None;
        let routing = self.shared.routing();
        let node = self.end(side).node;
        let access = routing.live.nodes.get(&node).ok_or("no address is configured for it")?;
        let address = routing.address_of(node, None).ok_or("no Sentinel has named its primary yet")?;
        let timeout = routing.live.connect_timeout;
        let name = self.shared.connection_name(format_args!("mover-{}", self.id.0));
        let mut connection = Connection::open(access, address, &name, timeout)?;
        self.check_serving_process(node, &connection.process.run_id)?;
        let fences = &self.shared.fences;
        let broken = fences.broken(node);
        for dead in &broken {
            // A new server process has no connections of the old process.
            if dead.run_id == connection.process.run_id {
                connection.kill(dead.client_id, timeout)?;
            }
        }
        fences.remove_broken(node, &broken);
        if !fences.is_cleared(node, &connection.process.run_id) {
            connection.kill_foreign_connections(&self.shared.site, &self.shared.incarnation, timeout)?;
            fences.set_cleared(node, &connection.process.run_id);
        }
        if let Some(seat) = &self.shared.ownership {
            connection.claim_ownership(seat, &access.name, (&self.shared.site, &self.shared.incarnation), timeout)?;
            connection.wait_for_earlier_router(seat, node, timeout)?;
        }
        if side == Side::Target {
            // The new connection may lead to another process, with old keys.
            self.list.set_target_is_clean(false);
        }
        if side == Side::Source {
            self.late_keys.note_source_process(&connection.process.run_id);
        }
        let end = self.end_mut(side);
        end.next_try = None;
        end.connection = Some(connection);
        end.query_settings(timeout).inspect_err(|_| end.fail())?;
        // A new process may run on another machine.
        self.query_clock(side).map_err(|halt| match halt {
            MoverExit::Stop(why) => why,
            MoverExit::Lost | MoverExit::Aborted | MoverExit::RouterStops => "its connection was lost".to_owned(),
        })
    }

    /// Checks that the process is the one that serves clients. If a node returned without its data, its future is
    /// undecided: keys stored there would be lost when the data is restored, and missing keys would count as deleted.
    pub(super) fn check_serving_process(&self, node: NodeId, run_id: &str) -> Result<(), String> {
        self.shared.with_facts(node, |facts| match &facts.run_id {
            Some(met) if **met != *run_id && facts.is_held => {
                Err(facts.failure.clone().unwrap_or_else(|| "it returned without its data".to_owned()))
            }
            Some(met) if **met != *run_id => Err("it has restarted, and is not used yet".to_owned()),
            _ => Ok(()),
        })
    }

    /// Tries once to connect to a side that is not connected.
    fn try_to_reach(&mut self, side: Side) -> Result<(), MoverExit> {
        if self.end(side).connection.as_ref().is_some_and(Connection::is_lost) {
            self.end_mut(side).fail();
        }
        if self.end(side).connection.is_some() {
            return Ok(());
        }
        self.handle_messages_when_quiesced()?;
        self.reach(side).map_err(|why| {
            self.end_mut(side).fail();
            MoverExit::Stop(why)
        })
    }

    /// Returns all known databases with keys at either node. Queries only nodes that are connected and idle.
    pub(super) fn databases_in_use(&mut self) -> Result<Vec<u32>, MoverExit> {
        let timeout = self.timeout();
        let mut asked = [Side::Source, Side::Target].to_vec();
        asked.retain(|side| self.end_mut(*side).request_databases());
        let found: Vec<_> = asked.into_iter().map(|side| (side, self.end_mut(side).databases(timeout))).collect();
        for (side, found) in found {
            let Ok(found) = found else { return Err(MoverExit::Lost) };
            // In a single-database fleet, the other databases of a server are not ours.
            let live = &self.shared.routing().live;
            let is_ours = |database: &u32| !live.one_database || *database == live.database;
            self.databases.extend(found.iter().map(|(database, _)| *database).filter(is_ours));
            if side == Side::Source {
                self.databases_without_expiry =
                    found.into_iter().filter_map(|(database, expires)| (!expires).then_some(database)).collect();
            }
        }
        Ok(self.all_databases())
    }

    pub(super) fn all_databases(&self) -> Vec<u32> {
        self.databases.iter().copied().collect()
    }

    /// Sends a command and waits for its reply. No other command is in flight.
    pub(super) fn call(&mut self, side: Side, args: &[&[u8]]) -> Result<Vec<u8>, MoverExit> {
        let timeout = self.timeout();
        let end = self.end_mut(side);
        let Some(connection) = &mut end.connection else { return Err(MoverExit::Lost) };
        let why = match connection.call(args, timeout) {
            Ok(answer) => return Ok(answer),
            Err(why) => why,
        };
        end.fail();
        let name = self.name(self.end(side).node);
        warn!(move_id = self.id.0, node = name, reason = why, "a mover has lost its connection");
        self.shown.set_activity(format!("waiting for {name}: {why}"));
        Err(MoverExit::Lost)
    }

    /// Selects a database for the following commands. Returns false if the node has no database with this number.
    pub(super) fn select(&mut self, side: Side, database: u32) -> Result<bool, MoverExit> {
        if self.end(side).connection.as_ref().is_some_and(|c| c.database() == database) {
            return Ok(true);
        }
        let number = database.to_string();
        let answer = self.call(side, &[b"SELECT", number.as_bytes()])?;
        let selected = !switchyard_resp::reply::is_error(&answer);
        if selected && let Some(connection) = &mut self.end_mut(side).connection {
            connection.set_database(database);
        }
        Ok(selected)
    }

    // ---- listing and legs ----

    pub(super) fn publish_observed(&self) -> Result<u64, String> {
        self.host.set_transits(
            self.id,
            vec![(self.transit(Stage::Observed), self.life.slots_left().iter().copied().collect())],
        )
    }

    /// Restores the observed state after a leg that failed to start. On failure, clients wait until the next leg is
    /// published.
    pub(super) fn publish_observed_or_retry(&mut self) {
        for _ in 0..50 {
            match self.publish_observed() {
                Ok(_) => return,
                Err(why) => {
                    self.shown.set_activity(format!("the topology cannot be changed now: {why}"));
                    self.wait(Duration::from_millis(20));
                }
            }
        }
    }

    /// Returns the slots of the next leg. `without`: slots of the current leg.
    pub(super) fn next_leg(&self, without: &[bool]) -> Vec<Slot> {
        self.life.cut(self, self.pacing.leg_keys(), without)
    }

    /// Discards state of slots that now belong to the target.
    fn forget_slots(&mut self, slots: &[Slot]) {
        self.list.forget(slots);
        self.big.forget_slots(slots);
        self.forget_staged(slots);
    }
}

impl ListedKeys for Mover {
    fn keys(&self, slot: Slot) -> u32 {
        self.list.count_in_slot(slot)
    }

    fn big_bytes(&self, slot: Slot) -> u64 {
        self.big.bytes_of(slot)
    }

    fn lacks_some(&self, slot: Slot) -> bool {
        self.list.is_incomplete(slot)
    }
}

/// Minimum size of big values in bytes. `None` disables their special handling.
pub(super) fn big_limit(shared: &Shared) -> Option<u64> {
    Some(shared.routing().live.big_key as u64).filter(|limit| *limit > 0)
}

fn name(shared: &Shared, node: NodeId) -> String {
    shared.routing().topology.node(node).map_or_else(|| "a removed node".into(), |n| n.name.clone())
}
