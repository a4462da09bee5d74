//! Sampling of the keys that a worker sends to nodes: one command in N, chosen at random, so that no pattern of a
//! client decides.
//!
//! A command that is not sampled costs one decrement. Every form of command is covered, because all pass the command
//! hook ([`super::keyed`]). A sampled command is followed to its reply, for the size of the reply and the time at the
//! node.

use switchyard_policy::load::SlotCount;
use switchyard_policy::migration::{Fingerprinter, is_temporary};
use switchyard_policy::telemetry::{AccessKind, Identity, KeyAccess, Recent, Segment};
use switchyard_policy::topology::{NodeId, SLOT_NUMBERS, Slot, Topology};
use switchyard_resp::command::{Command, Flags};
use switchyard_resp::request::Args;

use super::command::{Call, CommandSeq, KeyedCommand, with_parsed_command, writes};
use crate::shared::RoutingSnapshot;
use crate::telemetry::WorkerCounts;

/// Maximum number of counted keys of all nodes together, and minimum and maximum per node. The minimum is enough to
/// find 18 of the 20 hottest of 10,000 keys by Zipf 0.9. More are for hot copies (up to thousands); with many nodes
/// they would take too much memory.
const KEYS: usize = 12_288;
const KEYS_OF_NODE: (usize, usize) = (256, 4096);

/// Length of a segment, microseconds.
const SEGMENT_US: u64 = 1_000_000;

/// Maximum number of sampled commands per second: each costs about a microsecond, mostly for memory outside of the
/// processor's caches. The precision of an estimate depends on the number of samples, not on their share of all
/// commands. A key with a hundredth of the load is known to about a tenth.
const COUNTED_PER_SECOND: u64 = 4096;

/// Maximum number of checked commands per second for instant reports. The last 200 of a sample show a key as reliably,
/// after a few milliseconds.
const NOTICED_PER_SECOND: f64 = 8192.0;

/// Maximum N of one command in N, at any load.
const ONE_IN_MAX: u64 = 4096;

/// Interval of checks of the nodes' load, microseconds.
const LOAD_US: u64 = 100_000;

/// Number of commands that are followed to their replies. With more in flight, only the sending of older ones is
/// counted.
const FOLLOWED: usize = 1024;

/// Maximum number of keys of a followed command: the shares of the keys in a reply are unknown.
const FOLLOWED_KEYS: usize = 4;

/// The keys of a sampled command.
#[derive(Clone, Copy, Debug)]
pub(super) struct Followed {
    end: CommandSeq,
    node: NodeId,
    /// The command may block at the node, so its duration is not counted.
    waits: bool,
    keys: u8,
    hashes: [u64; FOLLOWED_KEYS],
    slots: [Slot; FOLLOWED_KEYS],
}

impl Followed {
    /// No key yet.
    const fn at(node: NodeId, waits: bool) -> Self {
        Self {
            end: CommandSeq::NONE,
            node,
            waits,
            keys: 0,
            hashes: [0; FOLLOWED_KEYS],
            slots: [Slot::FIRST; FOLLOWED_KEYS],
        }
    }
}

/// Sampled commands by slot, since the last report.
#[derive(Debug)]
struct Slots {
    counts: Box<[SlotCount]>,
    /// Slots with a count.
    used: Vec<Slot>,
}

impl Slots {
    fn new() -> Self {
        Self { counts: vec![SlotCount::default(); SLOT_NUMBERS].into_boxed_slice(), used: Vec::new() }
    }

    fn note(&mut self, slot: Slot, used: KeyAccess) {
        let count = &mut self.counts[slot.index()];
        if *count == SlotCount::default() {
            self.used.push(slot);
        }
        count.add(SlotCount {
            commands: 1,
            writes: u64::from(used.how == AccessKind::Write),
            bytes: u64::from(used.bytes),
            samples: 1,
        });
    }

    /// Adds the size of a reply to a command counted here. If its count was reported in the meantime, it begins the
    /// next one.
    fn answered(&mut self, slot: Slot, bytes: u64) {
        let count = &mut self.counts[slot.index()];
        if *count == SlotCount::default() {
            self.used.push(slot);
        }
        count.bytes += bytes.max(1);
    }

    fn take(&mut self) -> Vec<(Slot, SlotCount)> {
        let counts = &mut self.counts;
        self.used.drain(..).map(|slot| (slot, std::mem::take(&mut counts[slot.index()]))).collect()
    }
}

/// The segments of a worker.
#[derive(Debug)]
pub(super) struct Telemetry {
    fingerprints: Fingerprinter,
    /// Maximum number of counted keys of a node.
    keys_max: usize,
    /// By node number.
    segments: Vec<Option<Box<Segment>>>,
    slots: Slots,
    /// Minimum N of one command in N; 0: no sampling.
    at_most_one_in: u32,
    /// N of one command in N in this segment.
    one_in: u32,
    /// Commands sampled in this segment.
    counted: u64,
    /// Commands until the next sample.
    until_next: u32,
    /// Reads from hot copies until the next sample.
    until_hit: u32,
    random: u64,
    ends_us: u64,
    /// Start of the current counts.
    since_us: u64,
    places: Vec<u32>,
    /// By the numbers of their ends.
    followed: Box<[Followed]>,
    instant: Instant,
}

/// Instant reports: recent keys of each busy node.
#[derive(Debug, Default)]
struct Instant {
    /// By node number; `None` for a node with little load.
    recent: Vec<Option<Box<Recent>>>,
    /// By node number: commands sent to it until the last check of its load.
    sent: Vec<u64>,
    looks_at_us: u64,
    is_any: bool,
    /// N of one command in N that is checked.
    one_in: u32,
    /// Commands until the next check.
    until_next: u32,
}

impl Telemetry {
    pub(super) fn new(fingerprints: Fingerprinter, worker: usize) -> Self {
        let random = fingerprints.of(&worker.to_le_bytes()).0 as u64 | 1;
        let followed = vec![Followed::at(NodeId(0), false); FOLLOWED].into_boxed_slice();
        let (until_next, until_hit) = (u32::MAX, u32::MAX);
        let keys_max = KEYS_OF_NODE.0;
        Self {
            fingerprints,
            keys_max,
            at_most_one_in: 0,
            one_in: 0,
            counted: 0,
            segments: Vec::new(),
            slots: Slots::new(),
            until_next,
            until_hit,
            random,
            ends_us: 0,
            since_us: 0,
            places: Vec::new(),
            followed,
            instant: Instant::default(),
        }
    }

    /// Sets the minimum N of one command in N; 0: no sampling.
    pub(super) fn adopt(&mut self, at_most_one_in: usize) {
        let at_most_one_in = at_most_one_in as u32;
        if at_most_one_in != self.at_most_one_in {
            (self.at_most_one_in, self.one_in) = (at_most_one_in, at_most_one_in);
            (self.until_next, self.until_hit) = (self.draw(), self.draw());
        }
    }

    /// Adapts the sampling after a segment of this length: in the next one of this load about [`COUNTED_PER_SECOND`]
    /// commands are sampled, if there are as many.
    fn adapt(&mut self, us: u64) {
        let commands = std::mem::take(&mut self.counted) * u64::from(self.one_in);
        let wanted = commands * 1_000_000 / us.max(1) / COUNTED_PER_SECOND;
        self.one_in = match self.at_most_one_in {
            0 => 0,
            least => wanted.min(ONE_IN_MAX).max(u64::from(least)) as u32,
        };
    }

    /// Whether this command is sampled.
    #[inline]
    pub(super) fn is_due(&mut self) -> bool {
        self.until_next -= 1;
        self.until_next == 0
    }

    /// Returns the number of commands until the next sample: from 1 to twice the mean, less one.
    fn draw(&mut self) -> u32 {
        self.draw_of(self.one_in)
    }

    fn draw_of(&mut self, one_in: u32) -> u32 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        match one_in {
            0 => u32::MAX,
            _ => 1 + (self.random >> 32) as u32 % (2 * one_in - 1),
        }
    }

    /// Counts the keys of a command. Returns the ones to follow to the reply.
    #[cold]
    pub(super) fn note(
        &mut self,
        routing: &RoutingSnapshot,
        keyed: KeyedCommand<'_>,
        bytes: usize,
    ) -> Option<Followed> {
        self.until_next = self.draw();
        self.counted += 1;
        self.keys_max = (KEYS / routing.topology.node_id_bound().max(1)).clamp(KEYS_OF_NODE.0, KEYS_OF_NODE.1);
        match keyed.call {
            Call::Found(command, args) => self.note_keys(&routing.topology, keyed, command, args, bytes),
            Call::Bytes(request) => with_parsed_command(routing, request, |command, args| {
                self.note_keys(&routing.topology, keyed, command, args, bytes)
            })
            .flatten(),
        }
    }

    fn note_keys(
        &mut self,
        topology: &Topology,
        keyed: KeyedCommand<'_>,
        command: &Command,
        args: &Args<'_>,
        bytes: usize,
    ) -> Option<Followed> {
        let mut places = std::mem::take(&mut self.places);
        places.clear();
        let mut followed = None;
        if !command.flags.has(Flags::PUBSUB) && command.find_keys(args, &mut places).is_ok() && !places.is_empty() {
            followed =
                (places.len() <= FOLLOWED_KEYS).then(|| Followed::at(keyed.node, command.flags.has(Flags::BLOCKING)));
            let how = if writes(command) { AccessKind::Write } else { AccessKind::Read };
            let used = KeyAccess { how, bytes: (bytes / places.len()).min(u32::MAX as usize) as u32 };
            for key in places.iter().filter_map(|place| args.get(*place as usize)).filter(|key| !is_temporary(key)) {
                let slot = topology.slot_of(key);
                let key = self.identity(keyed.database, key);
                self.segment(keyed.node).note(key, used);
                self.slots.note(slot, used);
                if let Some(followed) = &mut followed {
                    followed.hashes[usize::from(followed.keys)] = key.hash;
                    followed.slots[usize::from(followed.keys)] = slot;
                    followed.keys += 1;
                }
            }
        }
        self.places = places;
        followed
    }

    fn segment(&mut self, node: NodeId) -> &mut Segment {
        if self.segments.len() <= node.index() {
            self.segments.resize_with(node.index() + 1, || None);
        }
        let keys_max = self.keys_max;
        self.segments[node.index()].get_or_insert_with(|| Box::new(Segment::new(keys_max)))
    }

    /// Returns the identity of a key, as in all reports.
    pub(super) fn identity<'k>(&self, database: u32, key: &'k [u8]) -> Identity<'k> {
        Identity::new(self.fingerprints.of(key).0 as u64, database, key)
    }

    /// Counts a read from a hot copy in place of a node, with the sizes of reply and command.
    #[inline]
    pub(super) fn note_hit(&mut self, node: NodeId, database: u32, key: &[u8], bytes: usize, reply_bytes: usize) {
        self.until_hit -= 1;
        if self.until_hit == 0 {
            self.count_hit(node, database, key, bytes, reply_bytes);
        }
    }

    #[cold]
    fn count_hit(&mut self, node: NodeId, database: u32, key: &[u8], bytes: usize, reply_bytes: usize) {
        self.until_hit = self.draw();
        self.counted += 1;
        let key = self.identity(database, key);
        let segment = self.segment(node);
        segment.note(key, KeyAccess { how: AccessKind::Hit, bytes: bytes.min(u32::MAX as usize) as u32 });
        segment.answered(key.hash, reply_bytes as u64, 0);
    }

    /// Follows a command to the end with this number.
    pub(super) fn follow(&mut self, end: CommandSeq, followed: Followed) {
        self.followed[end.slot(FOLLOWED)] = Followed { end, ..followed };
    }

    /// Counts the reply to a command: its size, and the time since sending.
    pub(super) fn answered(&mut self, end: CommandSeq, bytes: u64, us: u64) {
        let place = &mut self.followed[end.slot(FOLLOWED)];
        let Followed { node, waits, keys, hashes, slots, .. } = *place;
        if place.end != end || keys == 0 {
            return;
        }
        place.keys = 0;
        let us = if waits { 0 } else { us };
        let share = |whole: u64| whole / u64::from(keys);
        slots[..usize::from(keys)].iter().for_each(|slot| self.slots.answered(*slot, share(bytes)));
        if let Some(Some(segment)) = self.segments.get_mut(node.index()) {
            hashes[..usize::from(keys)].iter().for_each(|hash| segment.answered(*hash, share(bytes), share(us)));
        }
    }

    /// Whether this command is checked: some node has so much load that a key is reported as soon as it makes up a part
    /// of that.
    #[inline]
    pub(super) fn is_instant(&mut self) -> bool {
        let instant = &mut self.instant;
        instant.is_any && {
            instant.until_next = instant.until_next.saturating_sub(1);
            instant.until_next == 0
        }
    }

    /// Records the key of a command to a node. Returns it with its number among the last ones, if it should be
    /// reported.
    #[inline]
    pub(super) fn notice<'k>(&mut self, keyed: KeyedCommand<'k>) -> Option<(&'k [u8], u8)> {
        self.instant.until_next = self.draw_of(self.instant.one_in);
        let recent = self.instant.recent.get_mut(keyed.node.index())?.as_mut()?;
        let Call::Found(command, args) = keyed.call else { return None };
        let key = args.get(command.first_key_only(args)?)?;
        // The cell of a key cannot be known from outside, and instant reports are verified by periodic ones.
        let count = recent.note(rapidhash::v3::rapidhash_v3(key))?;
        (!is_temporary(key)).then_some((key, count))
    }

    /// Periodically finds nodes with a load above `least` commands per second, one `workers`-th of which goes through
    /// this worker. `sent`: total number of commands sent to a node.
    pub(super) fn look_at_load(
        &mut self,
        now_us: u64,
        least: Option<usize>,
        workers: usize,
        nodes: usize,
        sent: impl Fn(NodeId) -> u64,
    ) {
        let instant = &mut self.instant;
        if now_us < instant.looks_at_us {
            return;
        }
        let us = LOAD_US + now_us - instant.looks_at_us;
        instant.looks_at_us = now_us + LOAD_US;
        instant.recent.resize_with(nodes, || None);
        instant.sent.resize(nodes, 0);
        let mut all = 0.0;
        for (number, (recent, before)) in instant.recent.iter_mut().zip(&mut instant.sent).enumerate() {
            let now = sent(NodeId(number as u16));
            let rate = (now - std::mem::replace(before, now)) as f64 * 1e6 / us as f64;
            all += rate;
            if least.is_none_or(|least| rate * (workers as f64) < least as f64) {
                *recent = None;
            } else if recent.is_none() {
                *recent = Some(Box::new(Recent::for_workers(workers)));
            }
        }
        instant.one_in = (all / NOTICED_PER_SECOND).clamp(1.0, ONE_IN_MAX as f64) as u32;
        instant.is_any = instant.recent.iter().any(Option::is_some);
    }

    /// Returns the counts of a sample: once per segment, or earlier if there are too many of them.
    pub(super) fn ended(&mut self, now_us: u64) -> Option<WorkerCounts> {
        let ends = now_us >= self.ends_us;
        if !ends && self.counted < COUNTED_PER_SECOND / 2 {
            return None;
        }
        let us = now_us - std::mem::replace(&mut self.since_us, now_us);
        if ends {
            self.ends_us = now_us + SEGMENT_US;
        }
        let one_in = self.one_in;
        self.adapt(us);
        let of_node = |(number, segment): (usize, &mut Option<Box<Segment>>)| {
            let segment = segment.as_mut().filter(|segment| segment.uses() + segment.hits() > 0)?;
            Some((NodeId(number as u16), segment.take()))
        };
        let nodes = self.segments.iter_mut().enumerate().filter_map(of_node).collect();
        Some(WorkerCounts { one_in, ends, nodes, slots: self.slots.take() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hits of hot copies and their bytes are sampled; each database has keys of its own.
    #[test]
    fn hits_are_sampled_and_counted_beside_what_goes_to_the_node() {
        let mut telemetry = Telemetry::new(Fingerprinter::new(7), 0);
        telemetry.adopt(16);
        let hits = 16_000;
        for number in 0..hits {
            telemetry.note_hit(NodeId(1), number % 2, b"hot", 30, 100);
        }
        let counts = telemetry.ended(0).expect("the first segment ends");
        let [(NodeId(1), counts)] = counts.nodes.as_slice() else { panic!("one node") };
        assert_eq!((counts.uses, counts.keys.len()), (0, 2));
        assert!((900..=1100).contains(&counts.hits), "{} of {hits}", counts.hits);
        for key in &counts.keys {
            assert_eq!((key.bytes, key.reply_bytes, key.us), (30 * u64::from(key.hits), 100 * u64::from(key.hits), 0));
        }
    }

    /// A busy worker samples no more commands than an idle one, and reports the factor.
    #[test]
    fn a_busy_worker_counts_a_smaller_share() {
        let mut telemetry = Telemetry::new(Fingerprinter::new(7), 0);
        telemetry.adopt(16);
        telemetry.ended(0);
        let second = |telemetry: &mut Telemetry, number: u64, commands: u64| {
            (0..commands).for_each(|_| telemetry.note_hit(NodeId(0), 0, b"k", 30, 100));
            let counted = telemetry.ended(number * SEGMENT_US).expect("a second has passed");
            (counted.one_in, counted.nodes.first().map_or(0, |(_, counts)| counts.hits))
        };
        assert_eq!(second(&mut telemetry, 1, 1_000_000).0, 16);
        let (one_in, counted) = second(&mut telemetry, 2, 1_000_000);
        assert!((COUNTED_PER_SECOND * 9 / 10..COUNTED_PER_SECOND * 11 / 10).contains(&counted), "{counted}");
        assert!((950_000..1_050_000).contains(&(counted * u64::from(one_in))), "{counted} of {one_in}");
        // If the load grows quickly, the segment ends early.
        (0..20_000_000).for_each(|_| telemetry.note_hit(NodeId(0), 0, b"k", 30, 100));
        let early = telemetry.ended(2 * SEGMENT_US + SEGMENT_US / 2).expect("too many were counted");
        assert!(!early.ends && telemetry.one_in > 15 * early.one_in, "{} after {}", telemetry.one_in, early.one_in);
        // The share grows again as soon as there is less load.
        second(&mut telemetry, 3, 100);
        assert_eq!(second(&mut telemetry, 4, 100).0, 16);
        telemetry.adopt(0);
        assert_eq!(second(&mut telemetry, 5, 2_000_000), (0, 0));
    }

    #[test]
    fn an_answer_counts_once_and_only_under_its_own_number() {
        let mut telemetry = Telemetry::new(Fingerprinter::new(7), 0);
        let (node, end) = (NodeId(0), CommandSeq::of(5));
        let key = telemetry.identity(0, b"k");
        telemetry.segment(node).note(key, KeyAccess { how: AccessKind::Read, bytes: 1 });
        let of = Followed { keys: 1, hashes: [key.hash, 0, 0, 0], ..Followed::at(node, false) };
        telemetry.follow(end, of);
        telemetry.answered(CommandSeq::of(5 + FOLLOWED as u64), 1000, 1000);
        telemetry.answered(end, 50, 20);
        telemetry.answered(end, 50, 20);
        let counted = telemetry.segment(node).take().keys[0];
        assert_eq!((counted.reply_bytes, counted.us), (50, 20));
        // The duration of a command that may block at the node is not counted.
        telemetry.segment(node).note(key, KeyAccess { how: AccessKind::Read, bytes: 1 });
        telemetry.follow(end, Followed { waits: true, ..of });
        telemetry.answered(end, 50, 20);
        let counted = telemetry.segment(node).take().keys[0];
        assert_eq!((counted.reply_bytes, counted.us), (50, 0));
    }
}
