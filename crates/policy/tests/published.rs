//! Where protocols as published send commands, and what their movers do.

use switchyard_policy::migration::published::{Paper, Rules, Way};
use switchyard_policy::migration::tracker::{Kind, Pair, State};
use switchyard_policy::migration::{Fingerprint, Fingerprinter, Protocol};

fn rules(protocol: Protocol) -> (Paper, Rules) {
    let paper = Paper::of(protocol).expect("it is published");
    (paper, Rules::new(protocol, &paper, Pair(1)))
}

#[test]
fn each_state_has_its_way() {
    use State::{Complete, NotStarted, UnderWay, Unsure};
    use Way::{Both, Pull, Source, Target};
    for (protocol, reads, writes) in [
        // S1 to S4, as NetMigrate's table has them.
        (Protocol::NetMigrate, [Source, Both, Pull, Both], [Source, Target, Target, Target]),
        (Protocol::Rocksteady, [Pull, Pull, Pull, Pull], [Target, Target, Target, Target]),
        (Protocol::Fulva, [Both, Both, Target, Both], [Target, Target, Target, Target]),
        (Protocol::Bloom, [Source, Source, Target, Source], [Source, Source, Target, Source]),
    ] {
        let (paper, rules) = rules(protocol);
        let of = |writes: bool| [NotStarted, UnderWay, Complete, Unsure].map(|state| rules.way(state, writes));
        assert_eq!((of(false), of(true)), (reads, writes), "{protocol:?}");
        let unfiltered = Rules::new(protocol, &Paper { forwards: false, ..paper }, Pair(1));
        assert_eq!(unfiltered.way(NotStarted, false), if protocol == Protocol::Bloom { Target } else { reads[0] });
    }
    assert!([Protocol::Switchyard, Protocol::StopAndCopy, Protocol::Source].into_iter().all(|protocol| Paper::of(protocol).is_none()));
}

#[test]
fn groups_are_ranges_of_hashes_of_one_size() {
    let (paper, rules) = rules(Protocol::NetMigrate);
    let fingerprints = Fingerprinter::new(7);
    let mut sizes = vec![0_u32; paper.groups as usize];
    for n in 0..100 * paper.groups {
        let key = fingerprints.of(n.to_string().as_bytes());
        let number = rules.number(key);
        assert_eq!(rules.group(key), rules.range(number));
        sizes[number as usize] += 1;
    }
    assert!(sizes.iter().all(|size| (40..180).contains(size)), "{sizes:?}");
    // Pairs share a filter, and no group.
    assert_ne!(rules.range(3), Rules::new(Protocol::NetMigrate, &paper, Pair(2)).range(3));
    let by_key = self::rules(Protocol::Bloom).1;
    assert_ne!(by_key.group(fingerprints.of(b"a")), by_key.group(fingerprints.of(b"b")));
}

/// What the paper rules out: no state returns to S1.
#[test]
fn a_group_that_has_taken_a_write_goes_back_to_its_source() {
    let (paper, rules) = rules(Protocol::NetMigrate);
    let paper = Paper { groups: 1 << 13, ..paper };
    let mut tracker = paper.tracker.tracker(paper.geometry());
    let waiting: Vec<Fingerprint> = (1 << 12..1 << 13).map(|number| rules.range(number)).collect();
    let mut regressed = 0;
    for number in 0..1 << 10 {
        tracker.start(rules.range(number));
        let written: Vec<_> = waiting.iter().filter(|group| rules.way(tracker.state(**group), true) == Way::Target).collect();
        tracker.complete(rules.range(number));
        regressed += written.iter().filter(|group| rules.way(tracker.state(***group), false) == Way::Source).count();
    }
    assert!(regressed > 0, "what was written at the target is looked for at the source");
    let mut exact = Kind::Exact.tracker(paper.geometry());
    exact.start(rules.range(0));
    assert!(waiting.iter().all(|group| rules.way(exact.state(*group), true) == Way::Source));
}
