//! The thread that chooses the cacheable keys.

use std::sync::atomic::Ordering;
use std::time::Duration;

use switchyard_policy::hot_copies::{Admission, Admitted, Knobs, Selection};
use switchyard_policy::topology::Slot;

use super::HotCopies;
use crate::lock::lock;
use crate::settings::{self, Reports};
use crate::shared::Shared;

/// Interval between evaluations of the counts.
const STEP: Duration = Duration::from_secs(1);

/// Maximum interval between checks of the settings and of requests.
const LOOK: Duration = Duration::from_millis(100);

/// Keys considered per node.
const KEYS: usize = 8192;

/// Time after a change of the allowed keys in which requests are ignored: workers may not have adopted the change yet.
const IGNORE_REQUESTS: Duration = Duration::from_secs(1);

/// Minimum interval between sets, because each makes every worker check all its copies.
const REST: Duration = Duration::from_millis(5);

/// Runs until the router stops.
pub(crate) fn coordinate(shared: &Shared) {
    let mut admission = Admission::default();
    let mut next_step = shared.uptime() + STEP;
    let mut prefixes = Prefixes::of(&shared.routing().live.hot_copies);
    let mut hears_from = Duration::ZERO;
    while !shared.hot.is_stopped.load(Ordering::Acquire) {
        let wanted = wait(&shared.hot, if admission.is_waiting() { REST } else { LOOK });
        shared.hot.release();
        let live = shared.routing().live.clone();
        let settings = &live.hot_copies;
        if !settings.is_on {
            let gone = admission.forget();
            publish(shared, false, Vec::new(), gone);
            continue;
        }
        if Prefixes::of(settings) != prefixes {
            // Key names are not known here, so all keys are removed. Allowed keys return by their counts.
            prefixes = Prefixes::of(settings);
            let gone = admission.forget();
            publish(shared, is_all(settings), Vec::new(), gone);
            (next_step, hears_from) = (shared.uptime(), shared.uptime() + IGNORE_REQUESTS);
            continue;
        }
        let wanted = if shared.uptime() < hears_from { Vec::new() } else { wanted };
        let now_us = shared.uptime().as_micros() as u64;
        admission.admit_now(wanted, &settings.knobs, now_us);
        let (more, less) = if shared.uptime() >= next_step {
            next_step = shared.uptime() + STEP;
            lock(&shared.hot.noticed).forget();
            let admits = live.telemetry.reports != Reports::Instant;
            let knobs = Knobs { bytes_max: settings.bytes_of_worker(shared.counters.len()), ..settings.knobs };
            let placement = shared.routing().topology.placement().clone();
            let seen = Admitted::observed(shared.board.nodes(KEYS), &placement, &knobs, |key| settings.allows_key(key));
            admission.step(seen, &knobs, admits, now_us)
        } else {
            admission.proceed(&settings.knobs, now_us)
        };
        publish(shared, is_all(settings), more, less);
        std::thread::sleep(REST);
    }
}

/// Rules for keys by name.
#[derive(PartialEq, Eq)]
struct Prefixes {
    exclude: Vec<String>,
    only: Vec<String>,
}

impl Prefixes {
    fn of(settings: &settings::HotCopies) -> Self {
        Self { exclude: settings.exclude.clone(), only: settings.only.clone() }
    }
}

/// Whether every key that is read becomes cacheable.
fn is_all(settings: &settings::HotCopies) -> bool {
    settings.knobs.selection == Selection::All
}

/// Waits for requests, at most for `longest`, and takes them.
fn wait(hot: &HotCopies, longest: Duration) -> Vec<(u64, Slot)> {
    let mut wanted = lock(&hot.requested);
    if wanted.is_empty() && !hot.is_stopped.load(Ordering::Acquire) {
        wanted = hot.bell.wait_timeout(wanted, longest).unwrap_or_else(std::sync::PoisonError::into_inner).0;
    }
    std::mem::take(&mut *wanted)
}

fn publish(shared: &Shared, all: bool, more: Vec<(u64, Slot)>, less: Vec<u64>) {
    let is_news = !more.is_empty() || !less.is_empty() || shared.hot.published().all != all;
    if !is_news {
        return;
    }
    shared.hot.change(all, more, less);
    shared.ring_all();
}
