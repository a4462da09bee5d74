//! The thread that chooses the cacheable keys.

use std::sync::atomic::Ordering;
use std::time::Duration;

use switchyard_policy::hot_copies::{Admission, Admitted, Knobs, hash_of_name};
use switchyard_policy::topology::Slot;

use super::HotCopies;
use crate::lock::lock;
use crate::settings::{self, Reports};
use crate::shared::Shared;

/// Interval between evaluations of the counts.
const STEP: Duration = Duration::from_secs(1);

/// Maximum interval between checks of the settings and of requests.
const LOOK: Duration = Duration::from_millis(100);

/// Minimum sampled commands per second for a reliable rate.
const SAMPLES_MIN: f64 = 4.0;

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
        let wanted = wait(&shared.hot);
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
            publish(shared, settings.knobs.all, Vec::new(), gone);
            (next_step, hears_from) = (shared.uptime(), shared.uptime() + IGNORE_REQUESTS);
            continue;
        }
        let wanted = if shared.uptime() < hears_from { Vec::new() } else { wanted };
        let now_us = shared.uptime().as_micros() as u64;
        let mut more = admission.admit_now(wanted, &settings.knobs, now_us);
        let mut less = Vec::new();
        if shared.uptime() >= next_step {
            next_step = shared.uptime() + STEP;
            lock(&shared.hot.noticed).forget();
            let admits = live.telemetry.reports != Reports::Instant;
            let knobs = Knobs { bytes_max: settings.bytes_of_worker(shared.counters.len()), ..settings.knobs };
            let (came, went) = admission.step(allowed_counts(shared, settings), &knobs, admits, now_us);
            less = went;
            more.extend(came);
        }
        publish(shared, settings.knobs.all, more, less);
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

/// Waits for requests, at most for `LOOK`, and takes them.
fn wait(hot: &HotCopies) -> Vec<(u64, Slot)> {
    let mut wanted = lock(&hot.requested);
    if wanted.is_empty() && !hot.is_stopped.load(Ordering::Acquire) {
        wanted = hot.bell.wait_timeout(wanted, LOOK).unwrap_or_else(std::sync::PoisonError::into_inner).0;
    }
    std::mem::take(&mut *wanted)
}

/// Returns the counts of all workers for allowed keys. A key in several databases counts as one.
fn allowed_counts(shared: &Shared, settings: &settings::HotCopies) -> Vec<Admitted> {
    let mut all: Vec<Admitted> = Vec::new();
    let placement = shared.routing().topology.placement().clone();
    for (one_in, hot) in
        shared.board.nodes(KEYS).into_iter().flat_map(|node| node.keys.into_iter().map(move |key| (node.one_in, key)))
    {
        // One or two samples may be chance, whatever number of uses they represent.
        if !settings.knobs.all && hot.rates.commands() < f64::from(one_in) * SAMPLES_MIN {
            continue;
        }
        // A name that was too long to store has no slot and no prefix.
        let Some(key) = hot.name.key().filter(|key| settings.allows_key(key)) else { continue };
        let reads = hot.rates.reads + hot.rates.hits;
        let bytes = (hot.rates.reply_bytes / hot.rates.commands().max(1.0)) as u64;
        all.push(Admitted {
            hash: hash_of_name(hot.hash, hot.database),
            slot: placement.slot_of(key),
            reads,
            writes: hot.rates.writes,
            bytes,
        });
    }
    all.sort_unstable_by_key(|key| key.hash);
    all.dedup_by(|other, first| {
        let is_same = other.hash == first.hash;
        if is_same {
            (first.reads, first.writes, first.bytes) =
                (first.reads + other.reads, first.writes + other.writes, first.bytes + other.bytes);
        }
        is_same
    });
    all
}

fn publish(shared: &Shared, all: bool, more: Vec<(u64, Slot)>, less: Vec<u64>) {
    let is_news = !more.is_empty() || !less.is_empty() || shared.hot.published().all != all;
    if !is_news {
        return;
    }
    shared.hot.change(all, more, less);
    shared.ring_all();
}
