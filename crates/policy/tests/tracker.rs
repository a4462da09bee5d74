//! Tests of trackers: guaranteed answers, error rates, and memory.

use switchyard_policy::migration::Fingerprint;
use switchyard_policy::migration::tracker::{
    Adaptive, Exact, Filter, Filters, Geometry, Kind, Layout, Pair, State, Tracker, group,
};

/// NetMigrate's groups and threads, per pair.
const GROUPS: u64 = 1 << 17;
/// Number of unstarted groups queried.
const QUERIED: u64 = 1 << 18;

fn groups(pairs: u32, of_pair: std::ops::Range<u64>) -> impl Iterator<Item = Fingerprint> {
    (0..pairs).flat_map(move |pair| of_pair.clone().map(move |number| group(Pair(pair), number)))
}

/// Groups of these pairs beyond the first ones.
fn others(pairs: u32) -> impl Iterator<Item = Fingerprint> {
    groups(pairs, 1 << 32..(1 << 32) + QUERIED / u64::from(pairs))
}

fn wrong(tracker: &impl Tracker, pairs: u32) -> f64 {
    others(pairs).filter(|group| tracker.state(*group) != State::NotStarted).count() as f64 / QUERIED as f64
}

/// Three standard deviations of a measurement with one filter: due to the queried groups, and due to the number of
/// cells set.
fn interval(filter: Filter, added: u64) -> f64 {
    let rate = filter.false_positives(added);
    let (cells, hashes) = (filter.cells as f64, f64::from(filter.hashes));
    let mean = hashes * added as f64 / cells;
    let unset = (-mean).exp();
    let of_share = (unset * (1.0 - (1.0 + mean) * unset) / cells).sqrt();
    let of_cells = hashes * (1.0 - unset).powf(hashes - 1.0) * of_share;
    3.0 * (rate * (1.0 - rate) / QUERIED as f64 + of_cells * of_cells).sqrt()
}

fn is_within(measured: f64, formula: f64, interval: f64, what: &str) {
    assert!(
        (measured - formula).abs() <= interval,
        "{what}: {measured} was measured, {formula} is expected, within {interval}"
    );
    assert!(interval < formula / 5.0 || interval < 0.001, "{what}: {interval} is too wide for {formula}");
}

/// Table 2 of NetMigrate, in percent: 2^17 groups, four threads.
#[test]
fn the_formula_gives_the_published_table() {
    let table = [
        (512 << 10, 128, 0.038, 32.0),
        (512 << 10, 64, 0.26, 32.0),
        (512 << 10, 32, 2.42, 32.0),
        (512 << 10, 16, 16.0, 32.0),
        (256 << 10, 64, 0.48, 16.0),
        (128 << 10, 64, 2.63, 8.0),
        (64 << 10, 64, 16.2, 4.0),
        (32 << 10, 64, 56.0, 2.0),
        (16 << 10, 64, 92.9, 1.0),
    ];
    for (bytes, counters, published, bits) in table {
        let filter = |cells| Filter { cells, hashes: 4, layout: Layout::Shared };
        let geometry = Geometry { complete: filter(bytes * 8), under_way: Some(filter(counters)) };
        let percent = 100.0 * geometry.false_positives(GROUPS, 4);
        assert!(
            (percent - published).abs() <= published * 0.02,
            "{bytes} and {counters} bytes: {percent}, published {published}"
        );
        assert!((geometry.bits_per_group(GROUPS) - bits).abs() < 0.02, "{}", geometry.bits_per_group(GROUPS));
    }
    let rule = Geometry::netmigrate(GROUPS, 4);
    assert!(rule.false_positives(GROUPS, 4) < 0.005, "16 bits for a group");
    assert_eq!((rule.complete.cells, rule.under_way.map(|filter| filter.cells)), (1 << 21, Some(64)));
}

#[test]
fn pairs_that_share_a_bloom_filter_match_the_formula() {
    for layout in [Layout::Shared, Layout::Partitioned] {
        for (hashes, pairs) in [(4, 1), (4, 4), (4, 16), (2, 4), (7, 1)] {
            // Sixteen bits per group with one pair, four with four pairs, one with sixteen.
            let filter = Filter { cells: 1 << 21, hashes, layout };
            let mut tracker = Filters::new(Geometry { complete: filter, under_way: None });
            groups(pairs, 0..GROUPS).for_each(|group| tracker.complete(group));
            let added = GROUPS * u64::from(pairs);
            let (measured, interval) = (wrong(&tracker, pairs), interval(filter, added));
            is_within(
                measured,
                filter.false_positives(added),
                interval,
                &format!("{hashes} functions, {pairs} pairs, {layout:?}"),
            );
            let saturation = tracker.saturation();
            is_within(measured, saturation.false_positives, interval, "by the cells that are set");
            assert_eq!((saturation.under_way, saturation.stuck), (0.0, 0));
        }
    }
}

#[test]
fn pairs_that_share_counting_filters_match_the_formula() {
    for pairs in [1, 4, 16] {
        let filter = |cells| Filter { cells, hashes: 4, layout: Layout::Shared };
        let (complete, under_way) = (filter(1 << 22), filter(1 << 17));
        let mut tracker = Filters::new(Geometry { complete, under_way: Some(under_way) });
        // Eight thousand groups per pair in progress: sixteen counters each with one pair, one with sixteen.
        let started = GROUPS / 2 + (1 << 13);
        groups(pairs, 0..started).for_each(|group| tracker.start(group));
        groups(pairs, 0..GROUPS / 2).for_each(|group| tracker.complete(group));
        let (done, left) = (GROUPS / 2 * u64::from(pairs), (1 << 13) * u64::from(pairs));
        let interval = interval(complete, done).hypot(interval(under_way, left));
        is_within(
            wrong(&tracker, pairs),
            tracker.geometry().false_positives(done, left),
            interval,
            &format!("{pairs} pairs"),
        );
        // No group is lost, and a group removed from the counters is removed from all of them.
        assert!(
            groups(pairs, 0..GROUPS / 2).all(|group| matches!(tracker.state(group), State::Complete | State::Unsure))
        );
        assert!(
            groups(pairs, GROUPS / 2..started)
                .all(|group| matches!(tracker.state(group), State::InProgress | State::Unsure))
        );
        groups(pairs, GROUPS / 2..started).for_each(|group| tracker.complete(group));
        let saturation = tracker.saturation();
        assert_eq!((saturation.under_way, saturation.stuck), (0.0, 0));
        tracker.reset();
        assert_eq!((wrong(&tracker, pairs), tracker.saturation().complete), (0.0, 0.0));
    }
}

/// Permitted answers for a group in this true state.
fn is_allowed(kind: Kind, truth: State, said: State) -> bool {
    match (kind, truth) {
        (Kind::Exact, _) => said == truth,
        (_, State::NotStarted) => true,
        // This tracker does not track groups in progress.
        (Kind::Bloom, State::InProgress) => matches!(said, State::NotStarted | State::Complete),
        (_, truth) => said == truth || said == State::Unsure,
    }
}

#[test]
fn trackers_err_only_in_the_permitted_direction() {
    for kind in Kind::ALL {
        assert_eq!(Kind::named(kind.name()), Some(kind));
        // So small that most answers for unstarted groups are wrong; and 8192 groups in progress fill no counter.
        let mut tracker = kind.tracker(Geometry::netmigrate(1 << 10, 1 << 10));
        let all: Vec<Fingerprint> = groups(4, 0..1 << 11).collect();
        let mut truth = vec![State::NotStarted; all.len()];
        for round in 0..all.len() {
            // In an order without pattern, with a thousand in progress at a time.
            let place = |round: usize| round.wrapping_mul(5_003) % all.len();
            tracker.start(all[place(round)]);
            truth[place(round)] = State::InProgress;
            if let Some(round) = round.checked_sub(1_000) {
                tracker.complete(all[place(round)]);
                truth[place(round)] = State::Complete;
            }
            if round % 512 == 0 {
                for (group, truth) in all.iter().zip(&truth) {
                    let said = tracker.state(*group);
                    assert!(is_allowed(kind, *truth, said), "{kind:?}: {truth:?}, and {said:?} is said");
                    if said != *truth {
                        assert_eq!(tracker.correct(*group, *truth), kind == Kind::Adaptive);
                    }
                }
            }
        }
        tracker.reset();
        assert!(all.iter().all(|group| tracker.state(*group) == State::NotStarted), "{kind:?}");
    }
}

#[test]
fn an_adaptive_tracker_repairs_reported_errors() {
    let small = Filters::new(Geometry::netmigrate(1 << 8, 1 << 4));
    let mut tracker = Adaptive::new(small, 100);
    groups(1, 0..1 << 11).for_each(|group| tracker.complete(group));
    let wrong: Vec<Fingerprint> =
        others(1).filter(|group| tracker.state(*group) != State::NotStarted).take(150).collect();
    assert_eq!(wrong.len(), 150);
    let before = tracker.bytes();
    for group in &wrong[..100] {
        assert!(tracker.correct(*group, State::NotStarted));
        assert_eq!(tracker.state(*group), State::NotStarted, "the state is not reported again");
    }
    assert!(tracker.bytes() > before && tracker.repairs() == 100);
    // A repaired group starts and completes like any other.
    tracker.start(wrong[0]);
    assert_eq!(tracker.state(wrong[0]), State::Unsure);
    tracker.complete(wrong[0]);
    assert_eq!(tracker.state(wrong[0]), State::Complete);
    // If there are too many, the oldest are forgotten.
    wrong[100..].iter().for_each(|group| assert!(tracker.correct(*group, State::NotStarted)));
    assert_eq!(tracker.repairs(), 100);
    assert_ne!(tracker.state(wrong[1]), State::NotStarted);
    assert_eq!(tracker.state(wrong[149]), State::NotStarted);
}

/// Excluded by the papers: a group goes back from in progress to not started, although it was neither.
#[test]
fn a_group_colliding_with_a_completing_one_seems_to_go_back() {
    let filter = |cells| Filter { cells, hashes: 4, layout: Layout::Shared };
    let mut tracker = Filters::new(Geometry { complete: filter(1 << 22), under_way: Some(filter(64)) });
    groups(1, 0..16).for_each(|group| tracker.start(group));
    let seems: Vec<Fingerprint> = others(1).filter(|group| tracker.state(*group) == State::InProgress).collect();
    assert!(seems.len() > 10_000);
    groups(1, 0..16).for_each(|group| tracker.complete(group));
    assert!(seems.iter().filter(|group| tracker.state(**group) == State::NotStarted).count() > seems.len() / 2);
}

#[test]
fn a_counter_that_is_full_stays_until_the_reset() {
    let one = Filter { cells: 1, hashes: 1, layout: Layout::Shared };
    let mut tracker = Filters::new(Geometry { complete: one, under_way: Some(one) });
    groups(1, 0..300).for_each(|group| tracker.start(group));
    groups(1, 0..300).for_each(|group| tracker.complete(group));
    assert_eq!((tracker.saturation().stuck, tracker.saturation().false_positives), (1, 1.0));
    assert_eq!(tracker.state(group(Pair(0), 0)), State::Unsure, "no group in progress can be missed");
    tracker.reset();
    assert_eq!((tracker.saturation().stuck, tracker.state(group(Pair(0), 0))), (0, State::NotStarted));
}

#[test]
fn memory_matches_the_geometry() {
    for geometry in [Geometry::NETMIGRATE, Geometry::NETMIGRATE_SHIPPED, Geometry::BLOOM_TELEMETRY] {
        assert_eq!(Filters::new(geometry).bytes() as u64, geometry.bytes());
    }
    assert_eq!(Geometry::NETMIGRATE.bytes(), (512 + 1024) << 10);
    assert_eq!(Geometry::NETMIGRATE_SHIPPED.bytes(), (16 << 10) + 64);
    assert_eq!(Geometry::BLOOM_TELEMETRY.bytes(), 125_000_000);
    assert!((Geometry::BLOOM_TELEMETRY.bits_per_group(50_000_000) - 20.0).abs() < 1e-6);
    assert!((Geometry::BLOOM_TELEMETRY.false_positives(50_000_000, 0) - 0.0011).abs() < 0.0001);
    let mut exact = Exact::default();
    for count in [1, 5, 100, 10_000, 1_000_000] {
        groups(1, 0..count).for_each(|group| exact.complete(group));
        assert_eq!(exact.bytes(), Exact::bytes_for(count as usize), "{count} groups");
        assert!(groups(1, 0..count).all(|group| exact.is_complete(group)));
    }
    exact.reset();
    assert_eq!(exact.bytes(), 0);
}
