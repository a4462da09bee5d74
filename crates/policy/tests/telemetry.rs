//! Tests of hot key reports: error bounds for any stream, hottest keys of skewed streams, and changes over time.

use std::collections::BTreeMap;

use proptest::prelude::*;
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::SeedableRng as _;
use switchyard_policy::telemetry::{AccessKind, Board, Counts, HotKey, Identity, KeyAccess, Name, Segment, Weights};
use switchyard_policy::topology::NodeId;

const NODE: NodeId = NodeId(0);

const READ: KeyAccess = KeyAccess { how: AccessKind::Read, bytes: 10 };

/// Seeded pseudorandom numbers.
struct Numbers(SplitMix64);

impl Numbers {
    fn new(seed: u64) -> Self {
        Self(SplitMix64::seed_from_u64(seed))
    }

    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }
}

/// Ranks by Zipf's law.
struct Zipf(Vec<f64>);

impl Zipf {
    fn new(keys: usize, skew: f64) -> Self {
        let mut sum = 0.0;
        let sums: Vec<f64> = (1..=keys)
            .map(|rank| {
                sum += (rank as f64).powf(-skew);
                sum
            })
            .collect();
        Self(sums.iter().map(|part| part / sum).collect())
    }

    fn draw(&self, numbers: &mut Numbers) -> u64 {
        let at = numbers.unit();
        self.0.partition_point(|sum| *sum < at) as u64
    }
}

/// Hash of a numbered key, similar to the router's.
fn hash(key: u64) -> u64 {
    Numbers::new(key).next()
}

fn note(segment: &mut Segment, key: u64) {
    let how = if key.is_multiple_of(3) { AccessKind::Write } else { AccessKind::Read };
    segment.note(Identity::new(hash(key), 0, key.to_string().as_bytes()), KeyAccess { how, bytes: 10 });
}

/// Ends the workers' segments for the only node.
fn end(board: &mut Board, segments: &mut [Segment], one_in: u32, us: u64) {
    let mut counts = Counts::default();
    segments.iter_mut().for_each(|segment| counts.add(segment.take().scaled(one_in)));
    board.segment(BTreeMap::from([(NODE, counts)]), us);
}

fn hottest(board: &Board, keys: usize) -> Vec<HotKey> {
    board.nodes(keys).flat_map(|node| node.keys).collect()
}

proptest! {
    #[test]
    fn counts_are_never_too_low_and_seen_uses_never_too_high(
        keys in proptest::collection::vec(prop_oneof![3 => 0_u64..6, 1 => 0_u64..60], 0..600),
        known in 1_usize..20,
    ) {
        let mut segment = Segment::new(known);
        let mut truth: BTreeMap<u64, u32> = BTreeMap::new();
        for key in &keys {
            note(&mut segment, *key);
            *truth.entry(hash(*key)).or_default() += 1;
        }
        segment.check();
        let (uses, floor) = (segment.uses(), segment.floor());
        prop_assert_eq!(uses, keys.len() as u64);
        prop_assert!(u64::from(floor) <= uses / known as u64);
        let counted = segment.take().keys;
        prop_assert!(counted.len() <= known && (counted.len() == truth.len() || counted.len() == known));
        for counted in &counted {
            let true_count = truth[&counted.hash];
            prop_assert!(counted.seen() <= true_count && true_count <= counted.seen() + counted.error);
            prop_assert_eq!(counted.bytes, 10 * u64::from(counted.seen()));
        }
        // The true count of an untracked key is at most the floor.
        let is_known = |key: &u64| counted.iter().any(|counted| counted.hash == *key);
        prop_assert!(truth.iter().filter(|(key, _)| !is_known(key)).all(|(_, count)| *count <= floor));
        segment.check();
        prop_assert_eq!((segment.uses(), segment.floor()), (0, 0));
    }
}

/// Hash collisions cost time, but never merge keys.
#[test]
fn keys_with_equal_index_positions_are_distinguished() {
    let mut segment = Segment::new(8);
    for round in 0..50_u64 {
        for key in 0..12_u64 {
            segment.note(Identity::new(key << 32 | 5, 0, b"k"), READ);
            if round % 7 == key % 7 {
                segment.note(Identity::new(key << 32 | 6, 0, b"k"), READ);
            }
            segment.check();
        }
    }
}

#[test]
fn the_hottest_keys_of_a_skewed_load_are_found() {
    for skew in [0.9, 0.99, 1.2] {
        let (zipf, mut numbers, mut segment) = (Zipf::new(10_000, skew), Numbers::new(1), Segment::new(256));
        let mut truth: BTreeMap<u64, u32> = BTreeMap::new();
        for _ in 0..1_000_000 {
            let key = zipf.draw(&mut numbers);
            note(&mut segment, key);
            *truth.entry(key).or_default() += 1;
        }
        let mut board = Board::new(Weights::default());
        end(&mut board, std::slice::from_mut(&mut segment), 1, 1_000_000);
        let mut by_count: Vec<(u64, u32)> = truth.into_iter().collect();
        by_count.sort_unstable_by_key(|(key, count)| (std::cmp::Reverse(*count), *key));
        let found: Vec<u64> = hottest(&board, 20).iter().map(|hot| hot.hash).collect();
        let recall = by_count[..20].iter().filter(|(key, _)| found.contains(&hash(*key))).count();
        assert!(recall >= 18, "skew {skew}: {recall} of the 20 hottest keys");
        assert_eq!(found[0], hash(by_count[0].0), "the hottest key is first");
    }
}

/// Each random key inherits a high count from the key that it replaces.
#[test]
fn a_flood_of_random_keys_neither_hides_a_hot_key_nor_is_hot() {
    // The hot key has slightly more than a hundredth of the load. A worker tracks at least 256 keys per node.
    let (mut numbers, mut segment) = (Numbers::new(2), Segment::new(256));
    for number in 0..10_000_000_u64 {
        let key = if number % 95 == 0 { 7 } else { numbers.next() };
        note(&mut segment, key);
    }
    let mut board = Board::new(Weights { newest: 1.0, ..Weights::default() });
    end(&mut board, std::slice::from_mut(&mut segment), 1, 1_000_000);
    let hottest = hottest(&board, 2);
    assert_eq!((hottest[0].hash, hottest[0].name), (hash(7), Name::of(b"7")));
    let (hot, flood) = (hottest[0].rates.commands(), hottest[1].rates.commands());
    assert!((100_000.0..=105_264.0).contains(&hot) && flood < 5_000.0, "{hot} and {flood} a second");
}

/// Two workers with half of the load each. Keys become hot and then cold.
#[test]
fn hot_keys_are_reported_after_one_segment_and_then_forgotten() {
    let zipf = Zipf::new(1000, 0.9);
    let (mut numbers, mut board) = (Numbers::new(3), Board::new(Weights::default()));
    let mut second = |board: &mut Board, first: u64| {
        let mut workers = [Segment::new(128), Segment::new(128)];
        for number in 0..20_000 {
            let key = first + zipf.draw(&mut numbers);
            note(&mut workers[number % 2], key);
        }
        end(board, &mut workers, 1, 1_000_000);
    };
    for _ in 0..5 {
        second(&mut board, 0);
    }
    let before = hottest(&board, 1)[0];
    assert_eq!(before.hash, hash(0));
    // Other keys from now on.
    second(&mut board, 1_000_000);
    let (top, now) = (hottest(&board, 2), hash(1_000_000));
    assert!(top.iter().any(|hot| hot.hash == now), "after one segment");
    assert!(top.iter().all(|hot| [now, before.hash].contains(&hot.hash)));
    for _ in 0..30 {
        second(&mut board, 1_000_000);
    }
    assert!(hottest(&board, 256).iter().all(|hot| hot.hash != before.hash), "the formerly hot key is forgotten");
    let settled = hottest(&board, 1)[0];
    assert!((settled.rates.commands() / before.rates.commands() - 1.0).abs() < 0.1);
    // Rates are per second and for all commands, even if the segment is shorter or sampled.
    let mut segment = Segment::new(4);
    (0..100).for_each(|_| note(&mut segment, 1));
    let mut board = Board::new(Weights { newest: 1.0, ..Weights::default() });
    end(&mut board, std::slice::from_mut(&mut segment), 8, 500_000);
    let hot = hottest(&board, 1)[0];
    assert_eq!((hot.rates.reads, hot.rates.writes, hot.rates.bytes), (1600.0, 0.0, 16_000.0));
    assert_eq!(board.nodes(1).map(|node| node.uses).collect::<Vec<_>>(), [1600.0]);
    // An unused node is forgotten.
    board.segment(BTreeMap::new(), 1_000_000);
    assert_eq!(board.nodes(1).count(), 0);
}

#[test]
fn short_names_are_stored() {
    assert_eq!(Name::of(b"user:1").key(), Some(&b"user:1"[..]));
    assert_eq!(Name::of(&[b'x'; 64]).key().map(<[u8]>::len), Some(64));
    assert_eq!((Name::of(&[b'x'; 65]).key(), Name::NONE.key()), (None, None));
    assert!(!format!("{:?}", Name::of(b"secret")).contains("secret"));
}

/// Keys with the same name in different databases are different keys.
#[test]
fn keys_of_different_databases_are_distinguished() {
    let mut segment = Segment::new(8);
    for database in [0, 0, 0, 1, 1, 7] {
        segment.note(Identity::new(hash(1), database, b"k"), READ);
    }
    segment.check();
    let mut seen: Vec<(u32, u32)> =
        segment.take().keys.iter().map(|counted| (counted.database, counted.seen())).collect();
    seen.sort_unstable();
    assert_eq!(seen, [(0, 3), (1, 2), (7, 1)]);
    assert_eq!(Identity::new(5, 0, b"k").hash, 5, "database 0 does not change the hash");
}

#[test]
fn hits_count_as_load_of_the_key_but_not_of_the_node() {
    let mut segment = Segment::new(8);
    let key = Identity::new(hash(1), 0, b"k");
    let uses = [(AccessKind::Hit, 60), (AccessKind::Read, 30), (AccessKind::Write, 10)];
    for (how, count) in uses {
        (0..count).for_each(|_| segment.note(key, KeyAccess { how, bytes: 10 }));
    }
    segment.check();
    segment.answered(key.hash, 5000, 2000);
    segment.answered(hash(2), 7, 7);
    let mut board = Board::new(Weights { newest: 1.0, ..Weights::default() });
    end(&mut board, std::slice::from_mut(&mut segment), 1, 1_000_000);
    let node = board.nodes(1).next().expect("a node");
    assert_eq!((node.uses, node.hits), (40.0, 60.0));
    let rates = node.keys[0].rates;
    assert_eq!((rates.hits, rates.reads, rates.writes), (60.0, 30.0, 10.0));
    assert_eq!((rates.commands(), rates.at_node()), (100.0, 40.0));
    assert_eq!((rates.bytes, rates.reply_bytes, rates.busy), (1000.0, 5000.0, 0.002));
    // A node whose keys are all served from hot copies is still reported.
    segment.note(key, KeyAccess { how: AccessKind::Hit, bytes: 10 });
    end(&mut board, std::slice::from_mut(&mut segment), 1, 1_000_000);
    assert_eq!(board.nodes(1).map(|node| (node.uses, node.hits)).collect::<Vec<_>>(), [(0.0, 1.0)]);
}
