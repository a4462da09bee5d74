//! Stored history of the load, for the policies that look ahead: one document per day in the state directory.
//!
//! Recorded for all policies, so that a changed policy has a history at once. Stored every few minutes: a router that is
//! killed loses these minutes only, and the policies tolerate missing minutes.

use std::sync::{Mutex, MutexGuard, PoisonError};

use switchyard_policy::autoscale::{Advice, Advisor, HISTORY_DAYS, Knobs, Millis, Now, Observed, Progress};
use tracing::warn;

use super::intent::{Change, Stage};
use crate::store::{RedbStore, Store, StoreError};

/// Interval of observations, in milliseconds. Records are means of a minute.
const OBSERVED_EVERY: Millis = 5_000;

/// Interval of writes, in milliseconds.
const STORED_EVERY: Millis = 300_000;

/// History of a fleet and its policy's model. Only the autoscaler's thread uses it, so training blocks no report.
#[derive(Debug, Default)]
pub(super) struct LoadHistory(Mutex<Inner>);

#[derive(Debug, Default)]
struct Inner {
    advisor: Advisor,
    observed: Option<Millis>,
    stored: Option<Millis>,
}

fn document(day: u64) -> String {
    format!("autoscale-history-{}", day % HISTORY_DAYS)
}

impl LoadHistory {
    /// Restores the history. An illegible day is left out, because the policies tolerate gaps.
    pub(super) fn open(store: &RedbStore, wall: Millis) -> Result<Self, StoreError> {
        let mut documents = Vec::new();
        for day in 0..HISTORY_DAYS {
            documents.extend(store.load_document(&document(day))?);
        }
        let (advisor, illegible) = Advisor::restore(documents, wall);
        if illegible > 0 {
            warn!("{illegible} days of the autoscaler's history are illegible, and left out");
        }
        Ok(Self(Mutex::new(Inner { advisor, ..Inner::default() })))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the next observation is due.
    pub(super) fn is_due(&self, now: Now) -> bool {
        self.inner().observed.is_none_or(|observed| now.run.saturating_sub(observed) >= OBSERVED_EVERY)
    }

    /// Records an observation, and stores the history if that is due.
    pub(super) fn observe(&self, observed: &Observed, change: Option<&Change>, store: &RedbStore) {
        let mut inner = self.inner();
        let now = observed.now.run;
        inner.observed = Some(now);
        inner.advisor.observe(observed, progress(change));
        if now.saturating_sub(*inner.stored.get_or_insert(now)) < STORED_EVERY {
            return;
        }
        inner.stored = Some(now);
        let unsaved: Vec<(u64, Vec<u8>)> = inner.advisor.unsaved().collect();
        for (day, bytes) in unsaved {
            match store.save_document(&document(day), &bytes) {
                Ok(()) => inner.advisor.saved(day),
                Err(error) => warn!("the autoscaler's history is not stored: {error}"),
            }
        }
    }

    /// Returns the advice of the configured policy, if it looks ahead.
    pub(super) fn advise(&self, observed: &Observed, knobs: &Knobs) -> Option<Advice> {
        self.inner().advisor.advise(observed, knobs)
    }
}

/// Kind of change, to measure its duration. The stop of a failed change counts as idle.
fn progress(change: Option<&Change>) -> Progress {
    match change.map(|change| &change.stage) {
        Some(Stage::Provision(_) | Stage::Join(_) | Stage::Fill(_) | Stage::Share(_)) => Progress::Adding,
        Some(Stage::Drain(_) | Stage::Leave(_) | Stage::Stop(_, None)) => Progress::Removing,
        Some(Stage::Stop(_, Some(_))) | None => Progress::Idle,
    }
}

#[cfg(test)]
mod tests {
    use switchyard_policy::autoscale::{Node, Policy, Reason};
    use switchyard_policy::topology::NodeId;

    use super::*;

    const DAY: Millis = 86_400_000;

    fn observed(at: Millis) -> Observed {
        let node = Node {
            id: NodeId(0),
            requests: Some(1000.0),
            mean_us: Some(100.0),
            cpu: Some(0.1),
            memory: None,
            is_up: true,
            may_go: false,
        };
        Observed { now: Now { run: at, wall: at }, nodes: vec![node] }
    }

    /// Days of the history, as the policy reports them.
    fn known(history: &LoadHistory, at: Millis) -> Millis {
        let knobs = Knobs { policy: Policy::Predictive, ..Knobs::default() };
        match history.advise(&observed(at), &knobs) {
            Some(Advice::Unavailable(Reason::NoHistory(known, _))) => known,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_restart_keeps_the_history_except_the_last_minutes() {
        let directory = tempfile::tempdir().expect("a directory");
        let store = RedbStore::open(directory.path()).expect("a store");
        let (start, end) = (20_773 * DAY - DAY / 2, 20_773 * DAY + DAY / 2);
        let history = LoadHistory::open(&store, start).expect("opens");
        let mut at = start;
        while at < end {
            if history.is_due(Now { run: at, wall: at }) {
                history.observe(&observed(at), None, &store);
            }
            at += 20_000;
        }
        let before = known(&history, end);
        assert_eq!(before, DAY - 60_000, "all minutes except the current one");
        let after = known(&LoadHistory::open(&store, end).expect("opens"), end);
        assert!(before - after <= STORED_EVERY, "{after} of {before} ms");
        // Two days are two documents, and an illegible one does not prevent the start.
        let stored = |day: u64| store.load_document(&document(day)).expect("read").map(|bytes| bytes.len());
        assert_eq!([stored(20_771), stored(20_774)], [None, None]);
        assert!(stored(20_772).is_some() && stored(20_773).is_some());
        store.save_document(&document(20_772), b"junk").expect("saved");
        let rest = known(&LoadHistory::open(&store, end).expect("opens"), end);
        assert!(rest > 0 && rest < after, "{rest} of {after} ms");
    }
}
