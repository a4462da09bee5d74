//! State shared by workers and a mover: the committed keys of a leg, and messages to the mover.
//!
//! Workers read the committed keys of a leg without a message to the mover ([`Committed`]). A rollback publishes
//! another `LegView` with a new set in another snapshot, so workers never see a partial switch of direction.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use hdrhistogram::Histogram;
use rustix::event::{EventfdFlags, eventfd};
use switchyard_policy::migration::dirty_elements::Element;
use switchyard_policy::migration::published::Paper;
use switchyard_policy::migration::tracker::{State, Tracker};
use switchyard_policy::migration::{Committed, Fingerprint, FingerprintSet, Fingerprinter, Key, Legs};
use switchyard_policy::topology::{MoveId, NodeId, Placement, Slot};

use super::{Holds, MoveProgress, UserRequest};
use crate::away::Away;
use crate::limits::Bucket;
use crate::lock::lock;

/// Shards of the set of committed keys, each with its own lock.
const SHARDS: usize = 64;

/// Maximum bytes of queued elements.
const TOUCHED_MAX: usize = 64 << 20;

/// Maximum bytes of queued written keys, and the overhead per key.
const WRITTEN_MAX: usize = 16 << 20;
const KEY_OVERHEAD: usize = 48;

type Shard = RwLock<FingerprintSet>;

/// Keys of a leg that may be used at their destination.
#[derive(Debug)]
pub(crate) struct SharedLeg {
    shards: [Shard; SHARDS],
    /// All keys may be used there, including unknown ones. Set during the hand-over.
    all: AtomicBool,
    /// Workers with waiting clients, one bit each (worker number modulo 64).
    waiting: AtomicU64,
    /// Tracker of a published protocol; its paper keeps this state in a switch.
    tracker: Option<Arc<SharedTracker>>,
}

/// Tracker of a published protocol. Shared by all such moves, like the filters of a switch that serves all pairs of
/// source and target. Written by movers, read by workers for each command.
pub(crate) struct SharedTracker(RwLock<Box<dyn Tracker>>);

impl SharedTracker {
    pub(crate) fn new(paper: &Paper) -> Self {
        Self(RwLock::new(paper.tracker()))
    }
}

impl std::fmt::Debug for SharedTracker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a tracker")
    }
}

impl Default for SharedLeg {
    fn default() -> Self {
        Self {
            tracker: None,
            shards: std::array::from_fn(|_| Shard::default()),
            all: AtomicBool::new(false),
            waiting: AtomicU64::new(0),
        }
    }
}

impl SharedLeg {
    /// Returns a leg without committed keys. `tracker`: for published protocols only.
    pub(crate) fn tracked(tracker: Option<Arc<SharedTracker>>) -> Self {
        Self { tracker, ..Self::default() }
    }

    /// Returns an empty leg with the same tracker.
    pub(crate) fn empty_with_tracker(&self) -> Self {
        Self::tracked(self.tracker.clone())
    }

    /// Marks these groups as started or complete.
    pub(crate) fn track(&self, groups: Vec<Fingerprint>, complete: bool) {
        let Some(tracker) = &self.tracker else { return };
        let mut tracker = tracker.0.write().unwrap_or_else(PoisonError::into_inner);
        groups.into_iter().for_each(|group| if complete { tracker.complete(group) } else { tracker.start(group) });
    }

    /// Corrects the tracker's state of a group.
    pub(crate) fn correct_tracker(&self, group: Fingerprint, truth: State) {
        if let Some(tracker) = &self.tracker {
            tracker.0.write().unwrap_or_else(PoisonError::into_inner).correct(group, truth);
        }
    }

    fn shard(&self, key: Fingerprint) -> &Shard {
        &self.shards[(key.0 >> 64) as usize % SHARDS]
    }

    pub(crate) fn commit(&self, keys: impl IntoIterator<Item = Fingerprint>) {
        for key in keys {
            self.shard(key).write().unwrap_or_else(PoisonError::into_inner).insert(key);
        }
    }

    /// Commits all keys, including unknown ones.
    pub(crate) fn commit_all(&self) {
        self.all.store(true, Ordering::SeqCst);
    }

    /// Takes the set of workers, as bits, that must be notified of earlier commits.
    pub(crate) fn take_waiting(&self) -> u64 {
        fence(Ordering::SeqCst);
        self.waiting.swap(0, Ordering::SeqCst)
    }
}

impl Committed for SharedLeg {
    fn has(&self, key: Fingerprint) -> bool {
        self.shard(key).read().unwrap_or_else(PoisonError::into_inner).contains(&key)
    }

    fn has_all(&self) -> bool {
        self.all.load(Ordering::SeqCst)
    }

    fn state(&self, group: Fingerprint) -> State {
        self.tracker
            .as_ref()
            .map_or(State::NotStarted, |tracker| tracker.0.read().unwrap_or_else(PoisonError::into_inner).state(group))
    }

    fn will_wait(&self, worker: usize) {
        self.waiting.fetch_or(1 << (worker % 64), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }
}

/// Limit of the client commands that a source serves of keys in transit, over all workers. A change replaces it.
#[derive(Debug)]
pub(crate) struct SourceOps {
    per_second: u32,
    bucket: Bucket,
}

impl SourceOps {
    /// Creates a limit. No command may be sent at once: a full bucket would exceed the limit in the first second.
    pub(crate) fn new(per_second: u32, now_us: u64) -> Self {
        Self { per_second, bucket: Bucket::empty(per_second, now_us) }
    }

    /// Whether a command may be sent now, which is then counted.
    pub(crate) fn take(&self, now_us: u64) -> bool {
        self.bucket.take(self.per_second, now_us).is_ok()
    }
}

/// The moves of a snapshot.
#[derive(Clone, Debug, Default)]
pub(crate) struct Moves {
    pub(crate) by_id: BTreeMap<MoveId, Arc<SharedMove>>,
    pub(crate) legs: Legs<SharedLeg>,
    /// Limits of sources, by move. Empty unless a protocol as published has one.
    pub(crate) source_ops: BTreeMap<MoveId, Arc<SourceOps>>,
    /// Slots served by other nodes while their owners are ejected. One entry per ejected node.
    pub(crate) away: Vec<Arc<Away>>,
}

/// Message to a mover.
#[derive(Debug)]
pub(crate) enum MoverMessage {
    /// A client waits for these keys of the leg.
    Wanted {
        leg: u32,
        keys: Vec<Key>,
    },
    /// A client waits for all of the leg.
    WantedWhole {
        leg: u32,
    },
    /// Commands that may create these keys are about to be sent to the source.
    Written(Vec<Key>),
    /// A command that may create any key of the slot is about to be sent to the source.
    WrittenAnything(Slot),
    /// Commands that may touch these elements of a staged key are about to be sent to the source. `None`: the whole
    /// value.
    Touched {
        key: Key,
        elements: Option<Vec<Element>>,
    },
    /// Quiesce, then notify worker `from`. `flushes`: data read earlier from the nodes becomes invalid.
    Quiesce {
        from: usize,
        ticket: u64,
        flushes: bool,
    },
    /// End of the quiesce with this ticket.
    Unquiesce {
        ticket: u64,
    },
    Steer(UserRequest),
    /// Result of writing these records of the leg.
    Recorded {
        leg: u32,
        numbers: RangeInclusive<u64>,
        outcome: Result<(), String>,
    },
    /// Result of waiting for the replicas of the new node. An error means retry.
    CaughtUp {
        leg: u32,
        outcome: Result<(), String>,
    },
    HandedOver {
        leg: u32,
        outcome: Result<(), String>,
    },
}

/// Queued messages. The mover may be busy for seconds while clients write, so written keys are stored one by one up to
/// a limit, then only as slots, whose keys are listed again.
#[derive(Debug, Default)]
struct Queue {
    messages: Vec<MoverMessage>,
    /// Bytes of written keys in the queue.
    written_bytes: usize,
    /// Slots in which any key may have been written.
    slots: BTreeSet<Slot>,
    /// Staged keys that may have been touched in any element.
    touched: BTreeSet<Key>,
}

impl Queue {
    fn push(&mut self, placement: &Placement, what: MoverMessage) {
        match what {
            MoverMessage::WrittenAnything(slot) => {
                self.slots.insert(slot);
            }
            MoverMessage::Touched { key, elements: None } => {
                self.touched.insert(key);
            }
            MoverMessage::Touched { key, .. } if self.touched.contains(&key) => {}
            MoverMessage::Written(keys) => {
                self.written_bytes += keys.iter().map(|key| key.len() + KEY_OVERHEAD).sum::<usize>();
                if self.written_bytes > WRITTEN_MAX {
                    self.slots.extend(keys.iter().map(|key| placement.slot_of(key)));
                } else {
                    self.messages.push(MoverMessage::Written(keys));
                }
            }
            what => self.messages.push(what),
        }
    }

    fn take(&mut self) -> Vec<MoverMessage> {
        let Self { messages: mut told, slots, touched, .. } = std::mem::take(self);
        told.extend(touched.into_iter().map(|key| MoverMessage::Touched { key, elements: None }));
        told.extend(slots.into_iter().map(MoverMessage::WrittenAnything));
        told
    }
}

/// A move, as shared with workers and status queries.
#[derive(Debug)]
pub(crate) struct SharedMove {
    placement: Placement,
    pub(crate) source: NodeId,
    pub(crate) target: NodeId,
    pub(crate) fingerprints: Fingerprinter,
    queue: Mutex<Queue>,
    pub(crate) wake: OwnedFd,
    /// Keys in the course of a copy in pieces. Workers report touched elements of these.
    staged: RwLock<FingerprintSet>,
    has_staged: AtomicBool,
    /// Bytes of queued elements.
    touched_bytes: AtomicUsize,
    /// Database and name of staging keys that may be at the target. Exact while the mover is quiesced.
    temporary: Mutex<Vec<(u32, Vec<u8>)>>,
    /// Delays of held commands, microseconds.
    holds: Mutex<Histogram<u64>>,
    pub(crate) progress: Mutex<MoveProgress>,
}

impl SharedMove {
    pub(crate) fn new(
        placement: Placement,
        fingerprints: Fingerprinter,
        progress: MoveProgress,
    ) -> std::io::Result<Self> {
        Ok(Self {
            placement,
            source: progress.source,
            target: progress.target,
            fingerprints,
            queue: Mutex::default(),
            staged: RwLock::default(),
            has_staged: AtomicBool::new(false),
            touched_bytes: AtomicUsize::new(0),
            temporary: Mutex::default(),
            wake: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
            holds: Mutex::new(Histogram::new(3).map_err(std::io::Error::other)?),
            progress: Mutex::new(progress),
        })
    }

    /// Queues a message and wakes the mover.
    pub(crate) fn notify(&self, what: MoverMessage) {
        lock(&self.queue).push(&self.placement, what);
        self.ring();
    }

    /// Queues a message without waking the mover.
    pub(crate) fn send_without_wake(&self, what: MoverMessage) {
        lock(&self.queue).push(&self.placement, what);
    }

    /// Replaces the set of staged keys. Workers see it after they adopt a topology published later.
    pub(crate) fn share_staged(&self, keys: Vec<Fingerprint>) {
        self.has_staged.store(!keys.is_empty(), Ordering::Release);
        *self.staged.write().unwrap_or_else(PoisonError::into_inner) = keys.into_iter().collect();
    }

    /// Replaces the list of staging keys that may be at the target.
    pub(crate) fn share_temporary(&self, names: Vec<(u32, Vec<u8>)>) {
        *lock(&self.temporary) = names;
    }

    /// Returns the staging keys that may be in this database of the target.
    pub(crate) fn temporary_in(&self, database: u32) -> Vec<Vec<u8>> {
        lock(&self.temporary).iter().filter(|(of, _)| *of == database).map(|(_, name)| name.clone()).collect()
    }

    /// Adds the number of staging keys per database. May be slightly out of date.
    pub(crate) fn count_temporary(&self, counts: &mut BTreeMap<u32, u64>) {
        for (database, _) in lock(&self.temporary).iter() {
            *counts.entry(*database).or_default() += 1;
        }
    }

    /// Whether a key is being copied in pieces.
    pub(crate) fn is_staged(&self, key: &[u8]) -> bool {
        self.has_staged.load(Ordering::Acquire)
            && self.staged.read().unwrap_or_else(PoisonError::into_inner).contains(&self.fingerprints.of(key))
    }

    /// Records that a command may touch these elements of a staged key. `None`: the whole value. Call before it is
    /// sent.
    pub(crate) fn note_touched(&self, key: Key, elements: Option<Vec<Element>>) {
        let bytes = elements.iter().flatten().map(|element| element.len() + 32).sum();
        let so_far = self.touched_bytes.fetch_add(bytes, Ordering::Relaxed);
        // Above the limit the copy of this key restarts.
        let elements = elements.filter(|_| so_far < TOUCHED_MAX);
        self.send_without_wake(MoverMessage::Touched { key, elements });
    }

    pub(crate) fn ring(&self) {
        // Fails only when the counter is full, and then the mover is awake already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub(crate) fn drain_messages(&self) -> Vec<MoverMessage> {
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        self.touched_bytes.store(0, Ordering::Relaxed);
        lock(&self.queue).take()
    }

    /// Records the delay of a held command.
    pub(crate) fn note_hold(&self, us: u64) {
        // The histogram resizes for large values; a saturating record would clip them.
        let _ = lock(&self.holds).record(us);
    }

    pub(crate) fn progress(&self) -> MoveProgress {
        let mut progress = lock(&self.progress).clone();
        let holds = lock(&self.holds);
        progress.holds = Holds {
            count: holds.len(),
            p50_us: holds.value_at_quantile(0.5),
            p99_us: holds.value_at_quantile(0.99),
            max_us: holds.max(),
        };
        progress
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queued_messages_use_bounded_memory() {
        let mut queue = Queue::default();
        let key = |number: usize| Key::from(format!("key:{number}").into_bytes());
        queue.push(&Placement::Crc16, MoverMessage::Written(vec![key(0)]));
        for number in 0..1_000_000 {
            queue.push(&Placement::Crc16, MoverMessage::Written(vec![key(number)]));
            queue.push(&Placement::Crc16, MoverMessage::WrittenAnything(Placement::Crc16.slot_of(b"a")));
            queue.push(&Placement::Crc16, MoverMessage::Touched { key: key(number % 3), elements: None });
        }
        assert!(
            queue.messages.len() < WRITTEN_MAX / KEY_OVERHEAD
                && queue.touched.len() == 3
                && queue.slots.len() <= 16_384
        );
        let told = queue.take();
        let named =
            |wanted: &Key| told.iter().any(|what| matches!(what, MoverMessage::Written(keys) if keys.contains(wanted)));
        let of_slot = |wanted: &Key| {
            told.iter().any(
                |what| matches!(what, MoverMessage::WrittenAnything(slot) if *slot == Placement::Crc16.slot_of(wanted)),
            )
        };
        assert!(
            (0..1_000_000).step_by(1000).all(|number| named(&key(number)) || of_slot(&key(number))),
            "all keys or their slots are queued"
        );
        assert!(named(&key(0)) && of_slot(&Key::from(&b"a"[..])));
        assert_eq!(told.iter().filter(|what| matches!(what, MoverMessage::Touched { .. })).count(), 3);
        assert!(queue.take().is_empty());
        queue.push(&Placement::Crc16, MoverMessage::Written(vec![key(7)]));
        assert!(matches!(queue.take()[..], [MoverMessage::Written(_)]), "then key by key again");
    }

    #[test]
    fn waiting_workers_are_notified_once() {
        let leg = SharedLeg::default();
        assert_eq!(leg.take_waiting(), 0);
        leg.will_wait(3);
        leg.will_wait(65);
        assert_eq!(leg.take_waiting(), 1 << 3 | 1 << 1);
        assert_eq!(leg.take_waiting(), 0);
    }
}
