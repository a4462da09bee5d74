//! Before slots are handed over: the replicas of the node that gets them have what has moved, or are not read until
//! they have it.
//!
//! Clients that may read from replicas do so again when the slots are handed over. A replica that is behind would
//! answer that a key is not there which was there all the time, at another node: no old news, but news of a time that
//! never was. How far replicas are, and which are read, is the business of those who watch them
//! ([`super::Host::replicas_need`]). The mover says how far they must be: where the node's replication stream is once
//! all has been stored.
//!
//! Not `WAIT`: that counts replicas and does not say which, so that one which nobody reads could stand for one that is
//! read; and it says nothing of those that are connected again a moment later.

use std::time::{Duration, Instant};

use switchyard_policy::failover::Position;
use switchyard_policy::migration::{DriverEvent, Side};
use switchyard_resp::reply;
use tracing::warn;

use super::MoverMessage;
use super::connection::field;
use super::drive::Run;
use super::run::Mover;

/// So long slots wait for replicas: one that takes longer is behind for other reasons, and is not read until it is
/// there.
const PATIENCE: Duration = Duration::from_secs(1);

/// Between two askings of those who watch.
const AGAIN: Duration = Duration::from_millis(50);

/// Somebody who watches and has not answered for so long is not waited for any more.
const SILENT: Duration = Duration::from_secs(10);

/// A leg whose keys have all moved, and whose slots are not handed over yet.
#[derive(Debug)]
pub(super) struct CatchingUp {
    side: Side,
    step: Step,
}

#[derive(Debug)]
enum Step {
    /// The node is to be asked where its stream is, at this time.
    Query(Instant),
    Queried,
    /// Those who watch were told then.
    Notified(Instant),
}

impl Mover {
    /// All has moved to `side`: its slots are handed over when that is right also for those who read from replicas.
    pub(super) fn catch_up(&mut self, run: &mut Run, side: Side) {
        run.catching_up = Some(CatchingUp { side, step: Step::Query(Instant::now()) });
        self.go_on_catching_up(run);
    }

    /// Asks what is to be asked.
    pub(super) fn go_on_catching_up(&mut self, run: &mut Run) {
        let Some(CatchingUp { side, step }) = &mut run.catching_up else { return };
        let node = self.end(*side).node;
        let plan = self.shared.plan();
        let are_read = plan.servers.contains_key(&node) && self.shared.are_replicas_read(&plan.live);
        let is_silent = matches!(step, Step::Notified(since) if since.elapsed() > SILENT);
        if is_silent {
            warn!(
                move_id = self.id.0,
                node = self.name(node),
                "nobody says whether replicas have what has moved: they may not have it yet"
            );
        }
        if !are_read || is_silent {
            self.caught_up(run, Ok(()));
        } else if matches!(step, Step::Query(at) if Instant::now() >= *at) && self.end_mut(*side).query_position() {
            *step = Step::Queried;
        }
    }

    /// The node has said where its stream is.
    pub(super) fn position_known(&mut self, run: &mut Run, answers: &[Vec<u8>]) {
        let Some(CatchingUp { side, step: step @ Step::Queried }) = &mut run.catching_up else { return };
        let answer = answers.last().map(Vec::as_slice).unwrap_or_default();
        let info = String::from_utf8_lossy(reply::text(answer).unwrap_or_default()).into_owned();
        let offset = field(&info, "master_repl_offset").and_then(|offset| offset.parse().ok());
        let Some((id, offset)) = field(&info, "master_replid").zip(offset) else {
            let name = self.name(self.end(*side).node);
            warn!(
                move_id = self.id.0,
                node = name,
                "its INFO does not say how far replicas must be: they may not have yet what has moved"
            );
            return self.caught_up(run, Ok(()));
        };
        let position = Position { replication_id: id.to_owned(), offset };
        *step = Step::Notified(Instant::now());
        let (own, leg) = (self.own.clone(), run.number);
        let done = Box::new(move |outcome| own.notify(MoverMessage::CaughtUp { leg, outcome }));
        self.host.replicas_need(self.end(*side).node, position, PATIENCE, done);
    }

    /// A side is lost that may have been asked.
    pub(super) fn position_unknown(&mut self, run: &mut Run, lost: Side) {
        if let Some(CatchingUp { side, step: step @ Step::Queried }) = &mut run.catching_up
            && *side == lost
        {
            *step = Step::Query(Instant::now());
        }
    }

    /// No replica is read that lacks what has moved; or (an error) that is to be asked again.
    pub(super) fn caught_up(&mut self, run: &mut Run, outcome: Result<(), String>) {
        let Some(CatchingUp { step, .. }) = &mut run.catching_up else { return };
        if outcome.is_err() {
            *step = Step::Query(Instant::now() + AGAIN);
            return;
        }
        run.catching_up = None;
        run.happened.push_back(DriverEvent::CaughtUp);
    }
}
