//! What a worker counts of the keys that it sends to nodes: one command in some, chosen at random, so that no pattern
//! of a client decides which.
//!
//! A command that is not chosen costs one number that is counted down. Every form of command comes by here, because all
//! pass the seam ([`super::keyed`]). A command that is chosen is followed to its answer: how many bytes that has, and
//! how long the node had the command.

use switchyard_policy::load::SlotCount;
use switchyard_policy::migration::{Fingerprinter, is_temporary};
use switchyard_policy::telemetry::{AccessKind, Identity, KeyAccess, Recent, Segment};
use switchyard_policy::topology::{NodeId, SLOT_COUNT, Slot, Topology};
use switchyard_resp::command::{Command, Flags};
use switchyard_resp::request::Args;

use super::keyed::{Call, CommandSeq, KeyedCommand, writes};
use super::transit::parsed;
use crate::shared::RoutingSnapshot;
use crate::telemetry::Counted;

/// Keys that are known of all nodes together, and of each at least and at most. Of the 20 hottest of 10,000 by Zipf 0.9
/// the least are enough to find 18. More are for hot copies, of which there may be thousands; before many nodes they
/// would take too much memory.
const KEYS: usize = 12_288;
const KEYS_OF_NODE: (usize, usize) = (256, 4096);

/// How long a segment is, microseconds.
const SEGMENT_US: u64 = 1_000_000;

/// Commands that are counted in a second where there are more: each costs about a microsecond, mostly for memory that
/// is not in the processor's caches. The precision of an estimate depends on how many were counted, and not on which
/// share of all they were. A key with a hundredth of the load is known to within a tenth or so.
const COUNTED_PER_SECOND: u64 = 4096;

/// Commands that are looked at in a second for instant reports, where there are more. The last 200 of a sample show a
/// key as surely, after a few milliseconds.
const NOTICED_PER_SECOND: f64 = 8192.0;

/// At most one command in so few is counted, whatever the load.
const ONE_IN_MAX: u64 = 4096;

/// How often it is looked whether nodes have much to do, microseconds.
const LOAD_US: u64 = 100_000;

/// Commands that are followed to their answers. Where more are under way, of the older ones nothing is known but that
/// they were sent.
const FOLLOWED: usize = 1024;

/// A command with more keys is not followed: what of the answer is of which is not known anyway.
const FOLLOWED_KEYS: usize = 4;

/// The keys of a command that was counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Followed {
    end: CommandSeq,
    node: NodeId,
    /// It may wait at the node for something: how long says nothing.
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

/// Commands of a sample, by slot, since they were handed over last.
#[derive(Debug)]
struct Slots {
    counts: Box<[SlotCount]>,
    /// Those with a count.
    used: Vec<Slot>,
}

impl Slots {
    fn new() -> Self {
        Self { counts: vec![SlotCount::default(); SLOT_COUNT].into_boxed_slice(), used: Vec::new() }
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

    /// A command was counted here, and so many bytes have answered it. They may belong to a count that is handed over
    /// by now: then they begin the next one.
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
    /// Keys that are known of each node.
    keys_max: usize,
    /// By node number.
    segments: Vec<Option<Box<Segment>>>,
    slots: Slots,
    /// One command in so many is counted at most; 0: none.
    at_most_one_in: u32,
    /// One command in so many is counted in this segment.
    one_in: u32,
    /// Commands that were counted in this segment.
    counted: u64,
    /// Commands until the next one that is counted.
    until_next: u32,
    /// The same of what hot copies answer.
    until_hit: u32,
    random: u64,
    ends_us: u64,
    /// The counts are of the time since then.
    since_us: u64,
    places: Vec<u32>,
    /// By the numbers of their ends.
    followed: Box<[Followed]>,
    instant: Instant,
}

/// Instant reports: what each node that has much to do was asked for last.
#[derive(Debug, Default)]
struct Instant {
    /// By node number; none where the node has little to do.
    recent: Vec<Option<Box<Recent>>>,
    /// By node number: commands sent to it when its load was looked at last.
    sent: Vec<u64>,
    looks_at_us: u64,
    is_any: bool,
    /// One command in so many is looked at.
    one_in: u32,
    /// Commands until the next one that is.
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

    /// From now on one command in so many is counted at most; 0: none.
    pub(super) fn adopt(&mut self, at_most_one_in: usize) {
        let at_most_one_in = at_most_one_in as u32;
        if at_most_one_in != self.at_most_one_in {
            (self.at_most_one_in, self.one_in) = (at_most_one_in, at_most_one_in);
            (self.until_next, self.until_hit) = (self.draw(), self.draw());
        }
    }

    /// A segment of so many microseconds has ended: in the next one of this load about [`COUNTED_PER_SECOND`] are
    /// counted, if that many come.
    fn adapt(&mut self, us: u64) {
        let commands = std::mem::take(&mut self.counted) * u64::from(self.one_in);
        let wanted = commands * 1_000_000 / us.max(1) / COUNTED_PER_SECOND;
        self.one_in = match self.at_most_one_in {
            0 => 0,
            least => wanted.min(ONE_IN_MAX).max(u64::from(least)) as u32,
        };
    }

    /// Whether this command is counted.
    #[inline]
    pub(super) fn is_due(&mut self) -> bool {
        self.until_next -= 1;
        self.until_next == 0
    }

    /// How many come until the next one that is counted: from 1 to twice the mean, less one.
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

    /// Counts the keys of a command; gives those whose answer is to be looked at.
    #[cold]
    pub(super) fn note(&mut self, plan: &RoutingSnapshot, keyed: KeyedCommand<'_>, bytes: usize) -> Option<Followed> {
        self.until_next = self.draw();
        self.counted += 1;
        self.keys_max = (KEYS / plan.topology.node_id_bound().max(1)).clamp(KEYS_OF_NODE.0, KEYS_OF_NODE.1);
        match keyed.call {
            Call::Found(command, args) => self.note_keys(&plan.topology, keyed, command, args, bytes),
            Call::Bytes(request) => {
                parsed(plan, request, |command, args| self.note_keys(&plan.topology, keyed, command, args, bytes))
                    .flatten()
            }
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

    /// What stands for a key, as in everything that is reported.
    pub(super) fn identity<'k>(&self, database: u32, key: &'k [u8]) -> Identity<'k> {
        Identity::new(self.fingerprints.of(key).0 as u64, database, key)
    }

    /// A hot copy answers in place of a node: so many bytes to a command of so many.
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

    /// The command ends under this number.
    pub(super) fn follow(&mut self, end: CommandSeq, followed: Followed) {
        self.followed[end.slot(FOLLOWED)] = Followed { end, ..followed };
    }

    /// A command is over: so many bytes have answered it, so long after it was sent.
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

    /// Whether this command is looked at: some node has so much to do that a key is reported as soon as it makes up a
    /// part of that.
    #[inline]
    pub(super) fn is_instant(&mut self) -> bool {
        let instant = &mut self.instant;
        instant.is_any && {
            instant.until_next = instant.until_next.saturating_sub(1);
            instant.until_next == 0
        }
    }

    /// A command goes to a node: its key, and how often it is among the last ones, where that is to be reported.
    #[inline]
    pub(super) fn notice<'k>(&mut self, keyed: KeyedCommand<'k>) -> Option<(&'k [u8], u8)> {
        self.instant.until_next = self.draw_of(self.instant.one_in);
        let recent = self.instant.recent.get_mut(keyed.node.index())?.as_mut()?;
        let Call::Found(command, args) = keyed.call else { return None };
        let key = args.get(command.first_key_only(args)?)?;
        // Which of its cells a key falls into nobody outside learns, and what is reported is looked at again by its
        // periodic report.
        let count = recent.note(rapidhash::v3::rapidhash_v3(key))?;
        (!is_temporary(key)).then_some((key, count))
    }

    /// Looks now and then which nodes have more to do than `least` commands in a second, of which one in `workers` goes
    /// by here. `sent`: how many were sent to a node in all.
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

    /// The counts of a sample: once a segment, and as soon as there are too many of them.
    pub(super) fn ended(&mut self, now_us: u64) -> Option<Counted> {
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
        Some(Counted { one_in, ends, nodes, slots: self.slots.take() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts one in some of what hot copies answer, and of the bytes; each database has keys of its own.
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

    /// A worker with much to do counts no more than one with less, and says how many it stands for.
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
        // It does not wait for the end of a segment where the load grows at once.
        (0..20_000_000).for_each(|_| telemetry.note_hit(NodeId(0), 0, b"k", 30, 100));
        let early = telemetry.ended(2 * SEGMENT_US + SEGMENT_US / 2).expect("too many were counted");
        assert!(!early.ends && telemetry.one_in > 15 * early.one_in, "{} after {}", telemetry.one_in, early.one_in);
        // It counts more again as soon as there is less.
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
        // Of a command that may wait at the node the time says nothing.
        telemetry.segment(node).note(key, KeyAccess { how: AccessKind::Read, bytes: 1 });
        telemetry.follow(end, Followed { waits: true, ..of });
        telemetry.answered(end, 50, 20);
        let counted = telemetry.segment(node).take().keys[0];
        assert_eq!((counted.reply_bytes, counted.us), (50, 0));
    }
}
