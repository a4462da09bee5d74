//! The simulated system: loads of a slice, and the decisions at its end.
//!
//! The queries of a slice arrive in their expected numbers, and a backend drops those above its limit. Random arrivals
//! would add losses that depend on the length of its queue, which the paper does not state.

use switchyard_policy::hot_copies;
use switchyard_policy::hot_copies::{Admitted, Knobs, Limited, Selection};
use switchyard_policy::topology::Slot;

use super::super::{Planted, admission};
use super::cache::{Clock, RuleChange, Switch};
use super::keys::{Key, KeyId, KeySpace};
use super::settings::{Architecture, Machine, Method, Settings, Written};
use super::trackers::{Backend, Trackers, admitted};

/// Length of a slice: the sender adapts its rate after each one (section 5.1).
pub(super) const SLICE_S: f64 = 0.01;
pub(super) const SLICES_PER_SECOND: u32 = 100;
const SLICE_US: u64 = 10_000;

/// Loss that the sender keeps: below the first it raises its rate, above the second it reduces it (section 5.1).
const LOSS: (f64, f64) = (0.005, 0.01);

/// Queries of a slice that the traditional method considers. Of these, more are uncached than the switch can add.
const QUERIED_MAX: usize = 64;

/// Rate of all queries that orders the hottest keys at the start.
const RATE_AT_START: f64 = 20e6;

/// Shares of the reads, by the place that serves them.
#[derive(Clone, Debug)]
struct Shares {
    /// Keys with a rank that the cache node does not serve, by backend.
    uncached: Vec<f64>,
    /// All keys with a rank, by backend.
    all: Vec<f64>,
    /// Keys that the cache node serves.
    cached: f64,
    /// Keys with a rule, but without an item: the cache node forwards their reads.
    stale: f64,
}

impl Shares {
    fn of(space: &KeySpace, backends: u16) -> Self {
        let none = vec![0.0; usize::from(backends)];
        let mut shares = Self { uncached: none.clone(), all: none, cached: 0.0, stale: 0.0 };
        for (id, share) in space.head() {
            let key = space.key(id);
            shares.all[usize::from(key.backend)] += share;
            shares.add(key, share);
        }
        shares
    }

    fn add(&mut self, key: &Key, share: f64) {
        if key.is_hit() {
            self.cached += share;
        } else {
            self.uncached[usize::from(key.backend)] += share;
        }
        if key.has_rule && !key.has_item {
            self.stale += share;
        }
    }
}

/// Choice of the cached keys.
enum Chooser {
    /// The keys at the start stay.
    Fixed,
    EveryKey(Clock, Box<Trackers>),
    Reports(Box<Reports>),
}

/// Choice by reports.
struct Reports {
    is_periodic: bool,
    is_instant: bool,
    knobs: Knobs,
    admission: hot_copies::Admission,
    trackers: Trackers,
}

/// Queries of a slice, per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Slice {
    /// Queries sent.
    pub(super) sent: f64,
    pub(super) by_cache: f64,
    pub(super) by_backends: f64,
    /// Queries that the cache node processes.
    pub(super) at_cache: f64,
    /// Rules installed and removed in the slice.
    pub(super) rules: u64,
    /// Keys added to the cache in the slice.
    pub(super) added: u64,
}

impl Slice {
    /// Queries served per second.
    pub(super) fn served(&self) -> f64 {
        self.by_cache + self.by_backends
    }
}

/// The simulated system.
pub(super) struct System<'s> {
    settings: &'s Settings,
    space: KeySpace,
    shares: Shares,
    chooser: Chooser,
    switch: Switch,
    /// Queries sent per second.
    rate: f64,
    /// Slices since the start.
    slices: u32,
    /// Queries per second for each backend in the last slice, and the part that it serves.
    offered: Vec<f64>,
    backends: Vec<Backend>,
    /// Number of keys of the last change that the cache node serves.
    new_cached: usize,
}

impl<'s> System<'s> {
    pub(super) fn new(settings: &'s Settings, seed: u64, planted: Option<Planted>) -> Self {
        let mut space = KeySpace::new(settings.keys, settings.zipf, settings.backends, seed);
        let hottest: Vec<(KeyId, f64)> = space.head().take(settings.items).collect();
        for (id, _) in &hottest {
            let key = space.key_mut(*id);
            (key.has_rule, key.has_item) = (true, true);
        }
        let chooser = match settings.updates.map(|updates| (updates.method, updates.trackers)) {
            None => Chooser::Fixed,
            Some((Method::EveryKey, trackers)) => {
                let mut clock = Clock::default();
                hottest.iter().for_each(|(id, _)| clock.add(*id));
                Chooser::EveryKey(clock, Box::new(Trackers::new(trackers, settings.backends, seed)))
            }
            Some((Method::Reports { periodic, instant, admission: of }, trackers)) => {
                let knobs = of.knobs(settings.items);
                let mut admission = admission(planted);
                let all = Knobs {
                    selection: Selection::All,
                    limited: Limited::Admissions,
                    admissions_per_second: settings.items,
                    ..knobs
                };
                let seen: Vec<Admitted> =
                    hottest.iter().map(|(id, share)| admitted(id.hash(), share * RATE_AT_START)).collect();
                admission.step(seen, &all, true, 0);
                Chooser::Reports(Box::new(Reports {
                    is_periodic: periodic,
                    is_instant: instant,
                    knobs,
                    admission,
                    trackers: Trackers::new(trackers, settings.backends, seed),
                }))
            }
        };
        let (count, even) = (usize::from(settings.backends), 1.0 / f64::from(settings.backends));
        Self {
            settings,
            shares: Shares::of(&space, settings.backends),
            space,
            chooser,
            switch: Switch::new(settings.updates.and_then(|updates| updates.rules_per_second)),
            rate: 0.5 * f64::from(settings.backends) * settings.backend_limit,
            slices: 0,
            offered: vec![0.0; count],
            backends: vec![Backend { share: even, served: 1.0, is_busy: false }; count],
            new_cached: 0,
        }
    }

    /// Changes the popularity of keys.
    pub(super) fn change(&mut self) {
        if let Some(changes) = &self.settings.changes {
            self.space.change(changes.pattern, changes.keys);
            self.shares = Shares::of(&self.space, self.settings.backends);
            self.new_cached = 0;
        }
    }

    /// Share of the last change's keys that the cache node serves.
    pub(super) fn new_cached(&self) -> f64 {
        let keys = self.settings.changes.map_or(1, |changes| changes.keys.max(1));
        self.new_cached as f64 / keys as f64
    }

    /// Queries per second for each backend.
    pub(super) fn offered(&self) -> &[f64] {
        &self.offered
    }

    /// Share of the reads of cached keys.
    pub(super) fn hits(&self) -> f64 {
        self.shares.cached
    }

    /// Share of the reads that pass the cache node and a backend, although the switch avoids that, because a rule is
    /// older than the cache's content.
    pub(super) fn stale(&self) -> f64 {
        self.shares.stale
    }

    /// Simulates a slice.
    pub(super) fn slice(&mut self) -> Slice {
        let mut slice = self.serve();
        self.choose(&mut slice);
        self.slices += 1;
        self.adapt(&slice);
        slice
    }

    /// Distributes the queries of a slice.
    fn serve(&mut self) -> Slice {
        let Settings { architecture, backend_limit, cache_limit, writes, written, .. } = *self.settings;
        let Shares { uncached, all, cached, stale } = &self.shares;
        let (reads, writes) = (self.rate * (1.0 - writes), self.rate * writes);
        let hits = reads * cached;
        let passes_cache = architecture.path(false).contains(&Machine::Cache);
        let read_at_cache = if passes_cache { reads } else { reads * (cached + stale) };
        // A backend updates the cache node when a cached key is written.
        let updates = if written == Written::Skewed { writes * cached } else { 0.0 };
        let at_cache = read_at_cache + updates;
        let kept = (cache_limit / at_cache.max(1.0)).min(1.0);
        let misses = if architecture == Architecture::SwitchKv { reads } else { reads * kept };
        let busy_from = self.settings.updates.map_or(1.0, |updates| updates.trackers.instant_load);
        let (even, mut by_backends) = (1.0 / uncached.len() as f64, 0.0);
        let tail = self.space.tail() * even;
        for (place, offered) in self.offered.iter_mut().enumerate() {
            let written = match written {
                Written::Uniform => even,
                Written::Skewed => all[place] + tail,
            };
            let share = uncached[place] + tail;
            *offered = misses * share + writes * written;
            let served = (*offered).min(backend_limit);
            by_backends += served;
            self.backends[place] =
                Backend { share, served: served / offered.max(1e-9), is_busy: *offered >= busy_from * backend_limit };
        }
        Slice { sent: self.rate, by_cache: hits * kept, by_backends, at_cache: at_cache * kept, rules: 0, added: 0 }
    }

    /// Counts the queries, and updates the cache and the rules. Experiments with updates have no writes.
    fn choose(&mut self, slice: &mut Slice) {
        let reads = self.rate * SLICE_S;
        // Slices count from 1: a report is due at the end of each second.
        let number = self.slices + 1;
        let now_us = u64::from(number) * SLICE_US;
        let mut chooser = std::mem::replace(&mut self.chooser, Chooser::Fixed);
        match &mut chooser {
            Chooser::Fixed => {}
            Chooser::EveryKey(clock, trackers) => {
                trackers.count(&self.space, reads, &self.backends);
                for _ in 0..QUERIED_MAX {
                    if self.switch.is_behind(SLICE_S) {
                        break;
                    }
                    let drawn = self.space.draw();
                    if drawn.chance < self.backends[usize::from(drawn.backend)].served {
                        slice.added += u64::from(self.replace_oldest(clock, trackers, drawn.key));
                    }
                }
            }
            Chooser::Reports(reports) => {
                let (more, less) = self.report(reports, reads, number, now_us);
                slice.added += more.len() as u64;
                self.publish(&more, &less);
            }
        }
        self.chooser = chooser;
        for RuleChange { key, is_installed } in self.switch.slice(SLICE_S) {
            slice.rules += 1;
            if let Some(id) = key {
                self.set(id, |key| key.has_rule = is_installed);
            }
        }
    }

    /// Replaces the least recently used key by a queried one, which may have no rank. Returns whether it was not in the
    /// cache.
    fn replace_oldest(&mut self, clock: &mut Clock, trackers: &mut Trackers, queried: Option<KeyId>) -> bool {
        let id = queried.unwrap_or_else(|| self.space.new_key());
        if self.space.key(id).has_item {
            return false;
        }
        if let Some(gone) = clock.evict(|id| trackers.was_read(id)) {
            self.set(gone, |key| key.has_item = false);
            self.switch.request(RuleChange { key: Some(gone), is_installed: false });
        }
        self.set(id, |key| key.has_item = true);
        self.switch.request(RuleChange { key: Some(id), is_installed: true });
        clock.add(id);
        true
    }

    /// Returns the keys to add and to remove, by the reports of this slice.
    fn report(&mut self, reports: &mut Reports, reads: f64, slice: u32, now_us: u64) -> (Vec<(u64, Slot)>, Vec<u64>) {
        let Reports { is_periodic, is_instant, knobs, admission, trackers } = reports;
        trackers.count(&self.space, reads, &self.backends);
        let frequent = if *is_instant { trackers.frequent(&self.space, reads, &self.backends) } else { Vec::new() };
        admission.admit_now(frequent.into_iter().map(|hash| (hash, Slot::FIRST)), knobs, now_us);
        let phases = self.settings.updates.map_or(1, |updates| updates.trackers.phases);
        let in_second = slice % SLICES_PER_SECOND;
        let phase = (0..phases).find(|phase| in_second == phase * SLICES_PER_SECOND / phases);
        match phase {
            Some(phase) => {
                let found = trackers.report(phase as usize, &self.space);
                // The cached keys have no load before the end of their first segment.
                if slice < SLICES_PER_SECOND {
                    admission.proceed(knobs, now_us)
                } else {
                    admission.step(trackers.seen(&self.space, found), knobs, *is_periodic, now_us)
                }
            }
            None => admission.proceed(knobs, now_us),
        }
    }

    /// Adds and removes items, and requests their rules.
    fn publish(&mut self, more: &[(u64, Slot)], less: &[u64]) {
        let more = more.iter().map(|(hash, _)| (*hash, true));
        for (hash, has_item) in more.chain(less.iter().map(|hash| (*hash, false))) {
            let key = self.space.find(hash);
            if let Some(id) = key {
                self.set(id, |key| key.has_item = has_item);
            }
            self.switch.request(RuleChange { key, is_installed: has_item });
        }
    }

    /// Changes the state of a key.
    fn set(&mut self, id: KeyId, change: impl FnOnce(&mut Key)) {
        let share = self.space.share(id);
        let before = *self.space.key(id);
        change(self.space.key_mut(id));
        let after = *self.space.key(id);
        if share > 0.0 {
            self.shares.add(&before, -share);
            self.shares.add(&after, share);
        }
        if self.space.is_of_last_change(id) {
            self.new_cached = self.new_cached + usize::from(after.is_hit()) - usize::from(before.is_hit());
        }
    }

    /// Adapts the rate to the loss. The paper states the interval and the bounds; the steps are ours. A reduction removes
    /// the loss beyond the middle of the bounds.
    fn adapt(&mut self, slice: &Slice) {
        let loss = 1.0 - slice.served() / slice.sent;
        if loss < LOSS.0 {
            self.rate *= 1.0 + self.settings.rise;
        } else if loss > LOSS.1 {
            self.rate *= 1.0 - (loss - f64::midpoint(LOSS.0, LOSS.1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::settings::{Admission, Changes, Pattern, Updates};
    use super::*;

    fn settled(settings: &Settings) -> (System<'_>, Slice) {
        let mut system = System::new(settings, 1, None);
        let mut last = Slice::default();
        (0..300).for_each(|_| last = system.slice());
        (system, last)
    }

    #[test]
    fn the_sender_keeps_its_loss() {
        for (items, zipf) in [(0, 0.0), (0, 0.99), (10_000, 0.99)] {
            let settings = Settings { items, zipf, ..Settings::default() };
            let (_, slice) = settled(&settings);
            let loss = 1.0 - slice.served() / slice.sent;
            assert!((0.004..=0.03).contains(&loss), "{items} items, {zipf}: {loss}");
        }
    }

    #[test]
    fn a_miss_uses_the_cache_node_only_if_it_is_on_the_path() {
        let of = |architecture| {
            let settings = Settings { architecture, cache_limit: 1e9, ..Settings::default() };
            let (system, slice) = settled(&settings);
            (slice.at_cache / slice.sent, system.hits())
        };
        let (share, hits) = of(Architecture::SwitchKv);
        assert!((share - hits).abs() < 1e-6);
        assert!((of(Architecture::LookAside).0 - 1.0).abs() < 1e-6);
        assert!((of(Architecture::LookThrough).0 - 1.0).abs() < 1e-6);
    }

    #[test]
    fn shares_follow_the_states_of_the_keys() {
        let updates = Updates::reports(true, true, Admission::PUBLISHED);
        let changes = Changes { pattern: Pattern::HotIn, keys: 50, first: 0.0, every: 1.0 };
        let settings = Settings {
            backends: 8,
            keys: 1e6,
            items: 500,
            updates: Some(updates),
            changes: Some(changes),
            ..Settings::default()
        };
        let (mut system, _) = settled(&settings);
        system.change();
        for _ in 0..200 {
            system.slice();
        }
        let exact = Shares::of(&system.space, settings.backends);
        assert!((exact.cached - system.shares.cached).abs() < 1e-9);
        assert!((exact.stale - system.shares.stale).abs() < 1e-9);
        let served = |id: KeyId| system.space.is_of_last_change(id) && system.space.key(id).is_hit();
        assert_eq!(system.new_cached, system.space.head().filter(|(id, _)| served(*id)).count());
        assert!(system.new_cached() > 0.5, "{}", system.new_cached());
    }
}
