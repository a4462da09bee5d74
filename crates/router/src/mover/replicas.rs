//! Before the hand-over of slots: replicas of the new node either have the moved keys, or are not read until they have
//! them.
//!
//! Clients may read replicas again after the hand-over. A replica that lags would report that a key does not exist,
//! although it has existed all the time, at another node. That is worse than a stale value: no point in time had this
//! state. The component behind [`super::Host::replicas_need`] tracks replicas and selects the ones to read. The mover
//! provides the required position: the node's replication offset after the last store.
//!
//! Not `WAIT`: it returns a count, not which replicas have acknowledged, so an unread replica could stand for one that
//! is read. It also ignores replicas that reconnect a moment later.

use std::time::{Duration, Instant};

use switchyard_policy::failover::Position;
use switchyard_policy::migration::{DriverEvent, Side};
use switchyard_resp::reply;
use tracing::warn;

use super::MoverMessage;
use super::connection::field;
use super::drive::Run;
use super::run::Mover;

/// Maximum time that slots wait for replicas. A slower replica lags for other reasons, and is not read until it has
/// caught up.
const TIMEOUT: Duration = Duration::from_secs(1);

/// Delay before the position is queried again after a failure.
const AGAIN: Duration = Duration::from_millis(50);

/// Maximum time to wait for [`super::Host::replicas_need`] to call back.
const CALLBACK_TIMEOUT: Duration = Duration::from_secs(10);

/// State of a leg whose keys have all moved, and whose slots are not handed over yet.
#[derive(Debug)]
pub(super) struct CatchingUp {
    side: Side,
    step: Step,
}

#[derive(Debug)]
enum Step {
    /// Query the replication offset of the node at this time.
    Query(Instant),
    Queried,
    /// [`super::Host::replicas_need`] was called at this time.
    Notified(Instant),
}

impl Mover {
    /// Starts the hand-over of a leg whose keys have all moved to `side`.
    pub(super) fn catch_up(&mut self, run: &mut Run, side: Side) {
        run.catching_up = Some(CatchingUp { side, step: Step::Query(Instant::now()) });
        self.go_on_catching_up(run);
    }

    /// Sends the query for the replication offset when it is due, or ends the wait if no replicas are read.
    pub(super) fn go_on_catching_up(&mut self, run: &mut Run) {
        let Some(CatchingUp { side, step }) = &mut run.catching_up else { return };
        let node = self.end(*side).node;
        let routing = self.shared.routing();
        let are_read = routing.servers.contains_key(&node) && self.shared.are_replicas_read(&routing.live);
        let is_silent = matches!(step, Step::Notified(since) if since.elapsed() > CALLBACK_TIMEOUT);
        if is_silent {
            warn!(
                move_id = self.id.0,
                node = self.name(node),
                "replicas may lack the moved keys: no confirmation was received"
            );
        }
        if !are_read || is_silent {
            self.caught_up(run, Ok(()));
        } else if matches!(step, Step::Query(at) if Instant::now() >= *at) && self.end_mut(*side).query_position() {
            *step = Step::Queried;
        }
    }

    /// Handles the node's replication offset.
    pub(super) fn on_position(&mut self, run: &mut Run, answers: &[Vec<u8>]) {
        let Some(CatchingUp { side, step: step @ Step::Queried }) = &mut run.catching_up else { return };
        let answer = answers.last().map(Vec::as_slice).unwrap_or_default();
        let info = String::from_utf8_lossy(reply::text(answer).unwrap_or_default()).into_owned();
        let offset = field(&info, "master_repl_offset").and_then(|offset| offset.parse().ok());
        let Some((id, offset)) = field(&info, "master_replid").zip(offset) else {
            let name = self.name(self.end(*side).node);
            warn!(move_id = self.id.0, node = name, "its INFO has no replication offset: replicas may lack moved keys");
            return self.caught_up(run, Ok(()));
        };
        let position = Position { replication_id: id.to_owned(), offset };
        *step = Step::Notified(Instant::now());
        let (own, leg) = (self.own.clone(), run.number);
        let done = Box::new(move |outcome| own.notify(MoverMessage::CaughtUp { leg, outcome }));
        self.host.replicas_need(self.end(*side).node, position, TIMEOUT, done);
    }

    /// Repeats the query after a lost connection.
    pub(super) fn on_position_lost(&mut self, run: &mut Run, lost: Side) {
        if let Some(CatchingUp { side, step: step @ Step::Queried }) = &mut run.catching_up
            && *side == lost
        {
            *step = Step::Query(Instant::now());
        }
    }

    /// Ends the wait for replicas. After an error, the position is queried again.
    pub(super) fn caught_up(&mut self, run: &mut Run, outcome: Result<(), String>) {
        let Some(CatchingUp { step, .. }) = &mut run.catching_up else { return };
        if outcome.is_err() {
            *step = Step::Query(Instant::now() + AGAIN);
            return;
        }
        run.catching_up = None;
        run.events.push_back(DriverEvent::CaughtUp);
    }
}
