//! The copies of one worker and its fills in flight.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use super::beat::Beats;
use super::bounded::{Promise, Proof};
use super::cacheable::ByHash;
use super::{CacheableKeys, CacheableSet, Gate, GateId, Gates};
use crate::topology::{NodeId, Slot};

/// Maximum cached commands ("forms") per key: several commands read the same key.
const FORMS: usize = 16;

/// Minimum interval between replacements of a form, per key with [`FORMS`] forms, in microseconds. A key read with ever
/// new arguments (`SISMEMBER` of random members) would otherwise cost its node two commands per read.
const REPLACES_US: u64 = 10_000;

/// Delay before a key that may not be filled is checked again, in microseconds.
const RECHECK_US: u64 = 2_000;

/// Minimum interval between evictions, in microseconds: each replacement costs its node two commands.
const EVICTS_US: u64 = 1_000;

/// Keys compared per eviction to find the least used.
const EVICTION_SAMPLES: usize = 32;

/// Delay before a form that could not be stored is tried again, in microseconds.
const REST_US: u64 = 1_000_000;

/// A read request of a client.
#[derive(Clone, Copy, Debug)]
pub struct ReadRequest<'a> {
    /// Hash of the key name.
    pub hash: u64,
    /// Name of the key.
    pub key: &'a [u8],
    /// Selected database.
    pub database: u32,
    /// The whole command as sent to a node.
    pub request: &'a [u8],
    /// Node that has the key.
    pub node: NodeId,
    /// Whether the client uses RESP3.
    pub resp3: bool,
}

/// Decision about a read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Read<'a> {
    /// Send this reply.
    Hit(&'a [u8]),
    /// Send a fill to the node, numbered by [`Copies::begin`]. The client waits for it.
    Fill,
    /// Wait for this fill, already in flight.
    Wait(u32),
    /// Forward the command to the node.
    Miss,
    /// Forward the command: the key is not cacheable.
    NotCacheable,
}

/// Reason why a fill was discarded.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Discarded {
    /// A write was in flight at some time during the fill.
    Written,
    /// The node reported a change of the key, possibly by a client that bypasses the router.
    Invalidated,
    /// The connection was lost, or the node did not reply in time.
    Lost,
    /// The key has moved, or is no longer cacheable.
    Moved,
    /// The reply is too large.
    Large,
    /// The reply is an error.
    Refused,
    /// The key has expired.
    Expired,
}

impl Discarded {
    /// All reasons, in declaration order.
    pub const ALL: [Self; 7] =
        [Self::Written, Self::Invalidated, Self::Lost, Self::Moved, Self::Large, Self::Refused, Self::Expired];

    /// Label in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Written => "written",
            Self::Invalidated => "invalidated",
            Self::Lost => "lost",
            Self::Moved => "moved",
            Self::Large => "large",
            Self::Refused => "refused",
            Self::Expired => "expired",
        }
    }
}

/// A copy found by [`Copies::find_recent`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RecentHit<'a> {
    /// Name of the key.
    pub key: &'a [u8],
    /// Node that has the key.
    pub node: NodeId,
    /// Cached reply.
    pub reply: &'a [u8],
}

/// Entries of the table of recent hits, indexed by command hash.
const RECENT_HITS: usize = 1 << 10;

#[derive(Clone, Copy, Debug, Default)]
struct RecentKey {
    quick: u64,
    hash: u64,
    place: usize,
}

/// Outcome of a fill.
pub type Filled = Result<(), Discarded>;

/// Reply to a fill, in both protocols.
#[derive(Clone, Debug)]
struct Replies {
    resp3: Box<[u8]>,
    /// Only if different from RESP3.
    resp2: Option<Box<[u8]>>,
}

impl Replies {
    fn of(&self, resp3: bool) -> &[u8] {
        if resp3 { &self.resp3 } else { self.resp2.as_ref().unwrap_or(&self.resp3) }
    }

    fn len(&self) -> usize {
        self.resp3.len() + self.resp2.as_ref().map_or(0, |reply| reply.len())
    }
}

/// A stored reply and the conditions of its validity.
#[derive(Debug)]
struct CachedReply {
    replies: Replies,
    /// Gates of the key and of its node at the start of the fill.
    gates: (Gate, Gate),
    until_us: u64,
}

impl CachedReply {
    /// Whether the reply is valid under the current gates, for a command received before `exact_us`.
    #[inline]
    fn is_good(&self, gates: (Gate, Gate), exact_us: u64) -> bool {
        self.gates == gates && exact_us < self.until_us
    }
}

#[derive(Debug)]
enum State {
    Filling(u32),
    Kept(CachedReply),
    /// Could not be stored. Not tried again before this time, in microseconds.
    Failed(u64),
}

/// One cached command of a key.
#[derive(Debug)]
struct Form {
    database: u32,
    request: Box<[u8]>,
    node: NodeId,
    /// Requests since the last sweep.
    used: u32,
    state: State,
}

impl Form {
    fn bytes(&self) -> usize {
        size_of::<Self>()
            + self.request.len()
            + if let State::Kept(kept) = &self.state { kept.replies.len() } else { 0 }
    }
}

#[derive(Debug)]
struct KeyCopies {
    cacheable: CacheableKeys,
    key: Box<[u8]>,
    forms: Vec<Form>,
    /// Node from which the key may be filled.
    ready_at: Option<NodeId>,
    recheck_at_us: u64,
    /// No form is replaced before this time.
    replaces_at_us: u64,
    /// Whether the key was used since the last sweep.
    is_used: bool,
    proof: Proof,
}

#[derive(Debug)]
struct Fill {
    hash: u64,
    node: NodeId,
    /// By the clock of turns.
    began_us: u64,
    /// CLOCK_BOOTTIME.
    sent_us: u64,
    gates: (Gate, Gate),
    until_us: u64,
    spoiled: Option<Discarded>,
    /// The connection was lost, or the node has not replied: the end of this fill proves nothing about the node.
    is_lost: bool,
    /// The key existed.
    is_present: bool,
}

/// Size of the cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Sizes {
    /// Number of stored copies.
    pub copies: usize,
    /// Bytes used by copies and their commands.
    pub bytes: usize,
}

/// The copies of one worker.
#[derive(Debug, Default)]
pub struct Copies {
    set: Arc<CacheableSet>,
    keys: ByHash<KeyCopies>,
    /// Queue of eviction candidates. May contain keys already removed.
    line: VecDeque<u64>,
    evicts_at_us: u64,
    fills: BTreeMap<u32, Fill>,
    beats: Beats,
    promise: Promise,
    recent_hits: Vec<RecentKey>,
    last: u32,
    sizes: Sizes,
    bytes_max: usize,
    reply_max: usize,
}

impl Copies {
    /// The current set of cacheable keys.
    #[must_use]
    pub fn set(&self) -> &Arc<CacheableSet> {
        &self.set
    }

    /// Beats at the nodes that have filled copies. Replies to fills are recorded by [`Self::end`].
    pub fn beats(&mut self) -> &mut Beats {
        &mut self.beats
    }

    /// Current size.
    #[must_use]
    pub const fn sizes(&self) -> Sizes {
        self.sizes
    }

    /// Sets the memory limit and the maximum size of one reply, in bytes.
    pub fn limit(&mut self, bytes_max: usize, reply_max: usize) {
        (self.bytes_max, self.reply_max) = (bytes_max, reply_max);
        if self.sizes.bytes > bytes_max {
            self.clear();
        }
    }

    /// Adopts a new set. Drops the copies of keys that are not in it or became cacheable again.
    pub fn adopt(&mut self, set: &Arc<CacheableSet>) {
        self.set = Arc::clone(set);
        self.retain(|hash, of_key| set.get(hash) == Some(&of_key.cacheable));
        for fill in self.fills.values_mut() {
            let stays = self.keys.contains_key(&fill.hash);
            fill.spoiled = fill.spoiled.or((!stays).then_some(Discarded::Moved));
        }
    }

    fn retain(&mut self, mut keep: impl FnMut(u64, &KeyCopies) -> bool) {
        let Self { keys, sizes, .. } = self;
        keys.retain(|hash, of_key| {
            let is_kept = keep(*hash, of_key);
            if !is_kept {
                of_key.forms.iter().for_each(|form| sizes.subtract(form));
            }
            is_kept
        });
    }

    /// Decides on a read. `may_fill` returns whether a key that became cacheable in the given generation may be filled
    /// from its node; not called each time. `now_us` is the time of the turn. `exact` is CLOCK_BOOTTIME, read after the
    /// command was received: the worker and the host can be stopped within a turn.
    #[inline]
    pub fn read(
        &mut self,
        gates: &impl Gates,
        asked: ReadRequest<'_>,
        now_us: u64,
        exact: impl FnOnce() -> u64,
        may_fill: impl FnOnce(u64) -> bool,
    ) -> Read<'_> {
        if !self.keys.contains_key(&asked.hash) {
            let Some(armed) = self.set.get(asked.hash) else { return Read::NotCacheable };
            let key = asked.key.into();
            let new = KeyCopies {
                cacheable: *armed,
                key,
                forms: Vec::new(),
                ready_at: None,
                recheck_at_us: 0,
                replaces_at_us: 0,
                is_used: true,
                proof: Proof::default(),
            };
            self.keys.insert(asked.hash, new);
            self.line.push_back(asked.hash);
        }
        let Self { keys, sizes, beats, promise, .. } = self;
        let Some(of_key) = keys.get_mut(&asked.hash) else { return Read::Miss };
        // Hash collision: the other key is cacheable too, and has no copies.
        if *of_key.key != *asked.key {
            return Read::Miss;
        }
        of_key.is_used = true;
        let now = now_of(gates, asked.hash, asked.node);
        let place =
            of_key.forms.iter().position(|form| form.database == asked.database && *form.request == *asked.request);
        if let Some(place) = place {
            let form = &mut of_key.forms[place];
            form.used = form.used.saturating_add(1);
            let exact_us = exact();
            match &form.state {
                State::Filling(number) => return Read::Wait(*number),
                State::Failed(until_us) if now_us < *until_us => return Read::Miss,
                State::Kept(kept) if form.node == asked.node && kept.is_good(now, exact_us) => {
                    // The copy stays: the next beat or TOUCH extends its time.
                    if !promise.permits(beats, &mut of_key.proof, (asked.hash, form.node), exact_us) {
                        return Read::Miss;
                    }
                    let State::Kept(kept) = &of_key.forms[place].state else { return Read::Miss };
                    return Read::Hit(kept.replies.of(asked.resp3));
                }
                State::Kept(_) | State::Failed(_) => {
                    let form = of_key.forms.swap_remove(place);
                    sizes.subtract(&form);
                }
            }
        }
        if !are_open(now) {
            return Read::Miss;
        }
        if of_key.ready_at != Some(asked.node) {
            if now_us < of_key.recheck_at_us || !may_fill(of_key.cacheable.since) {
                of_key.recheck_at_us = of_key.recheck_at_us.max(now_us + RECHECK_US);
                return Read::Miss;
            }
            of_key.ready_at = Some(asked.node);
        }
        Read::Fill
    }

    /// Fast path of [`Self::read`] for a recent hit: found by any hash of the whole command, without a lookup of the
    /// key's node. Valid only under the plan last passed to [`Self::update_placement`]. Returns `None` if
    /// [`Self::read`] must decide.
    #[inline]
    pub fn find_recent(
        &mut self,
        gates: &impl Gates,
        quick: u64,
        (database, request, resp3): (u32, &[u8], bool),
        exact: impl FnOnce() -> u64,
    ) -> Option<RecentHit<'_>> {
        let lately = self.recent_hits.get(quick as usize % RECENT_HITS).filter(|lately| lately.quick == quick)?;
        let Self { keys, beats, promise, .. } = self;
        let of_key = keys.get_mut(&lately.hash)?;
        let form =
            of_key.forms.get_mut(lately.place).filter(|form| form.database == database && *form.request == *request)?;
        let State::Kept(kept) = &form.state else { return None };
        let exact_us = exact();
        if !kept.is_good(now_of(gates, lately.hash, form.node), exact_us)
            || !promise.permits(beats, &mut of_key.proof, (lately.hash, form.node), exact_us)
        {
            return None;
        }
        form.used = form.used.saturating_add(1);
        Some(RecentHit { key: &of_key.key, node: form.node, reply: kept.replies.of(resp3) })
    }

    /// Records a hit, so that [`Self::find_recent`] finds it by this hash of the command.
    pub fn record_hit(&mut self, quick: u64, asked: &ReadRequest<'_>) {
        let Some(of_key) = self.keys.get(&asked.hash) else { return };
        let is_it = |form: &Form| form.database == asked.database && *form.request == *asked.request;
        if let Some(place) = of_key.forms.iter().position(is_it) {
            self.recent_hits.resize(RECENT_HITS, RecentKey::default());
            self.recent_hits[quick as usize % RECENT_HITS] = RecentKey { quick, hash: asked.hash, place };
        }
    }

    /// Starts a fill at the time of the turn and the exact time, and returns its number. Call after [`Self::read`]
    /// returned [`Read::Fill`], before the request is sent. Returns `None` if there is no room, or no room yet.
    pub fn begin(&mut self, gates: &impl Gates, asked: ReadRequest<'_>, (now_us, exact_us): (u64, u64)) -> Option<u32> {
        // The stored command takes memory even if the fill fails.
        if !self.makes_room(size_of::<Form>() + asked.request.len(), now_us) {
            return None;
        }
        let Self { keys, sizes, .. } = self;
        let of_key = keys.get_mut(&asked.hash)?;
        if of_key.forms.len() >= FORMS {
            if now_us < of_key.replaces_at_us {
                return None;
            }
            let is_idle = |form: &Form| !matches!(form.state, State::Filling(_));
            let (place, _) =
                of_key.forms.iter().enumerate().filter(|(_, form)| is_idle(form)).min_by_key(|(_, form)| form.used)?;
            let form = of_key.forms.swap_remove(place);
            sizes.subtract(&form);
            of_key.replaces_at_us = now_us + REPLACES_US;
        }
        // In this order: a write that completed before this has changed the gate, and the fill reads its value.
        let now = now_of(gates, asked.hash, asked.node);
        if !are_open(now) {
            return None;
        }
        self.last = self.last.wrapping_add(1);
        let number = self.last;
        let ReadRequest { hash, database, request, node, .. } = asked;
        let form = Form { database, request: request.into(), node, used: 1, state: State::Filling(number) };
        sizes.bytes += form.bytes();
        of_key.forms.push(form);
        self.fills.insert(
            number,
            Fill {
                hash,
                node,
                began_us: now_us,
                sent_us: exact_us,
                gates: now,
                until_us: u64::MAX,
                spoiled: None,
                is_lost: false,
                is_present: true,
            },
        );
        Some(number)
    }

    /// Records that the key of a fill does not exist.
    pub fn on_absent(&mut self, number: u32) {
        self.fills.entry(number).and_modify(|fill| fill.is_present = false);
    }

    /// Records the node's reply to PTTL, in ms. Negative: the key has no expiry, or does not exist.
    pub fn on_ttl_reply(&mut self, number: u32, ms: i64) {
        if let Some(fill) = self.fills.get_mut(&number)
            && let Ok(ms) = u64::try_from(ms)
        {
            // The reply is rounded: up to one millisecond may have passed already.
            fill.until_us = fill.sent_us.saturating_add(ms.saturating_sub(1).saturating_mul(1000));
        }
    }

    /// Marks a fill as discarded, whatever the node replies.
    pub fn discard_fill(&mut self, number: u32, why: Discarded) {
        if let Some(fill) = self.fills.get_mut(&number) {
            fill.spoiled = fill.spoiled.or(Some(why));
            fill.is_lost |= why == Discarded::Lost;
        }
    }

    /// Completes a fill with the reply in RESP3, and in RESP2 if different. `lives_at` returns the current node of a
    /// key.
    ///
    /// # Errors
    ///
    /// The reason why the reply was not stored.
    pub fn end(
        &mut self,
        gates: &impl Gates,
        number: u32,
        resp3: &[u8],
        resp2: Option<&[u8]>,
        (now_us, exact_us): (u64, u64),
        lives_at: impl FnOnce(&[u8], Slot) -> Option<NodeId>,
    ) -> Filled {
        let Some(fill) = self.fills.remove(&number) else { return Err(Discarded::Moved) };
        if !fill.is_lost {
            self.beats.filled(fill.node, fill.sent_us);
        }
        let bytes = resp3.len() + resp2.map_or(0, <[u8]>::len);
        let has_room = fill.spoiled.is_some() || bytes <= self.reply_max && self.makes_room(bytes, now_us);
        let Self { keys, sizes, .. } = self;
        let of_key = keys.get_mut(&fill.hash).ok_or(Discarded::Moved)?;
        let is_it = |form: &Form| matches!(form.state, State::Filling(filling) if filling == number);
        let place = of_key.forms.iter().position(is_it).ok_or(Discarded::Moved)?;
        let why = if let Some(why) = fill.spoiled {
            Some(why)
        } else if now_of(gates, fill.hash, fill.node) != fill.gates {
            Some(Discarded::Written)
        } else if lives_at(&of_key.key, of_key.cacheable.slot) != Some(fill.node) {
            Some(Discarded::Moved)
        } else if resp3.first() == Some(&b'-') || resp3.first() == Some(&b'!') {
            Some(Discarded::Refused)
        } else if fill.until_us <= exact_us {
            Some(Discarded::Expired)
        } else if !has_room {
            Some(Discarded::Large)
        } else {
            None
        };
        let form = &mut of_key.forms[place];
        match why {
            None => {
                of_key.proof.filled(fill.node, fill.sent_us, fill.is_present);
                let replies = Replies { resp3: resp3.into(), resp2: resp2.map(Into::into) };
                form.state = State::Kept(CachedReply { replies, gates: fill.gates, until_us: fill.until_us });
                sizes.bytes += bytes;
                sizes.copies += 1;
                Ok(())
            }
            Some(why @ (Discarded::Large | Discarded::Refused)) => {
                form.state = State::Failed(now_us + REST_US);
                Err(why)
            }
            Some(why) => {
                let form = of_key.forms.swap_remove(place);
                sizes.subtract(&form);
                Err(why)
            }
        }
    }

    /// Whether `bytes` more fit. If not, evicts copies of the least used among the next [`EVICTION_SAMPLES`] keys in
    /// the queue, at most once per [`EVICTS_US`].
    fn makes_room(&mut self, bytes: usize, now_us: u64) -> bool {
        let Self { keys, line, sizes, bytes_max, evicts_at_us, .. } = self;
        if sizes.bytes + bytes <= *bytes_max {
            return true;
        }
        if bytes > *bytes_max || now_us < *evicts_at_us {
            return false;
        }
        *evicts_at_us = now_us + EVICTS_US;
        let looked_at = line.len().min(EVICTION_SAMPLES);
        let mut seen: Vec<(u32, u64)> =
            line.drain(..looked_at).filter_map(|hash| keys.get(&hash).map(|of_key| (of_key.used(), hash))).collect();
        seen.sort_unstable();
        for (place, (_, hash)) in seen.iter().enumerate() {
            // At least half, because other fills will need room soon.
            if sizes.bytes + bytes <= *bytes_max && place >= seen.len() / 2 {
                break;
            }
            if let Some(of_key) = keys.get_mut(hash) {
                of_key.drop_kept(sizes);
            }
        }
        line.extend(seen.into_iter().map(|(_, hash)| hash));
        sizes.bytes + bytes <= *bytes_max
    }

    /// Drops the copies of a key that its node has invalidated, in any database.
    pub fn changed(&mut self, hash: u64) {
        if let Some(of_key) = self.keys.get_mut(&hash) {
            of_key.drop_kept(&mut self.sizes);
        }
        self.fills.values_mut().filter(|fill| fill.hash == hash).for_each(|fill| {
            fill.spoiled = fill.spoiled.or(Some(Discarded::Invalidated));
        });
    }

    /// Drops all copies of a node: its connection is lost ([`Discarded::Lost`]), or the node has invalidated all keys.
    pub fn lost(&mut self, node: NodeId, why: Discarded) {
        if why == Discarded::Lost {
            self.beats.lost(node);
            for hash in self.promise.lost(node) {
                self.keys.entry(hash).and_modify(|of_key| of_key.proof.is_not_requested());
            }
        }
        for of_key in self.keys.values_mut() {
            of_key.drop_where(&mut self.sizes, |form| form.node == node);
            of_key.proof.lost(node);
        }
        for fill in self.fills.values_mut().filter(|fill| fill.node == node) {
            fill.spoiled = fill.spoiled.or(Some(why));
            fill.is_lost |= why == Discarded::Lost;
        }
    }

    /// Drops copies of keys that have moved or are in transit, for which `lives_at` returns `None`. Discards their
    /// fills in flight even if the key returns before the reply: the node may have read while it did not have the key.
    pub fn update_placement(&mut self, mut lives_at: impl FnMut(&[u8], Slot) -> Option<NodeId>) {
        let Self { keys, fills, sizes, .. } = self;
        for of_key in keys.values_mut() {
            let place = lives_at(&of_key.key, of_key.cacheable.slot);
            of_key.drop_where(sizes, |form| Some(form.node) != place);
            of_key.ready_at = of_key.ready_at.filter(|ready| Some(*ready) == place);
            let elsewhere = of_key.forms.iter().filter(|form| Some(form.node) != place);
            for form in elsewhere {
                if let State::Filling(number) = form.state
                    && let Some(fill) = fills.get_mut(&number)
                {
                    fill.spoiled = fill.spoiled.or(Some(Discarded::Moved));
                }
            }
        }
    }

    /// Sets the promise of hits. `None`: copies are never stale. Otherwise a hit returns what the owner would have
    /// returned within the last `staleness_us`, with any other writers.
    pub fn promise(&mut self, staleness_us: Option<u64>) {
        if self.promise.set(staleness_us) {
            self.clear();
        }
    }

    /// Whether hits have a bound ([`Self::promise`]).
    #[must_use]
    pub const fn are_bounded(&self) -> bool {
        self.promise.is_bounded()
    }

    /// Whether [`Self::due_touches`] returns any.
    #[must_use]
    pub fn has_due_touches(&self) -> bool {
        self.promise.is_any_due()
    }

    /// Returns the keys to confirm by TOUCH now: member, database, and key. `can_send` returns whether a request can be
    /// sent to a member; its time is `exact_us`. The numbers are for [`Self::touch_replied`].
    pub fn due_touches(
        &mut self,
        exact_us: u64,
        can_send: impl Fn(NodeId) -> bool,
    ) -> Vec<(u32, NodeId, u32, Box<[u8]>)> {
        let mut all = Vec::new();
        for hash in self.promise.take_due() {
            let Some(of_key) = self.keys.get_mut(&hash) else { continue };
            let database = of_key.forms.first().map(|form| form.database);
            match of_key.proof.node().filter(|node| can_send(*node)).zip(database) {
                Some((node, database)) => {
                    self.last = self.last.wrapping_add(1);
                    self.promise.sent(self.last, hash, node, exact_us);
                    all.push((self.last, node, database, of_key.key.clone()));
                }
                None => of_key.proof.is_not_requested(),
            }
        }
        all
    }

    /// Records the reply to a TOUCH: the number of keys, or `None` for a redirect or another error.
    pub fn touch_replied(&mut self, number: u32, count: Option<i64>) {
        let Some(touch) = self.promise.replied(number) else { return };
        let Some(of_key) = self.keys.get_mut(&touch.hash) else { return };
        if of_key.proof.is_confirmed_by(count) {
            of_key.proof.renew(touch);
        } else {
            of_key.proof.is_not_requested();
            self.changed(touch.hash);
        }
    }

    /// Drops all copies to free memory.
    pub fn clear(&mut self) {
        for of_key in self.keys.values_mut() {
            of_key.drop_kept(&mut self.sizes);
        }
    }

    /// Drops copies not used since the last call. Returns up to `touches` used keys with their node and database, for
    /// TOUCH: the node does not see hits.
    pub fn sweep(&mut self, touches: usize) -> Vec<(NodeId, u32, Box<[u8]>)> {
        let Self { keys, sizes, .. } = self;
        let mut used = Vec::new();
        keys.retain(|_, of_key| {
            of_key.drop_where(sizes, |form| form.used == 0);
            let fresh = of_key.forms.iter().find(|form| form.used > 0 && matches!(form.state, State::Kept(_)));
            if let Some(form) = fresh.filter(|_| used.len() < touches) {
                used.push((form.node, form.database, of_key.key.clone()));
            }
            of_key.forms.iter_mut().for_each(|form| form.used = 0);
            std::mem::take(&mut of_key.is_used) || !of_key.forms.is_empty()
        });
        self.line = self.keys.keys().copied().collect();
        used
    }

    /// Fills that started before this time in microseconds, with their nodes.
    pub fn fills_before(&self, before_us: u64) -> impl Iterator<Item = (u32, NodeId)> + '_ {
        self.fills.iter().filter(move |(_, fill)| fill.began_us < before_us).map(|(number, fill)| (*number, fill.node))
    }
}

/// Current gates of a key and of its node.
#[inline]
fn now_of(gates: &impl Gates, hash: u64, node: NodeId) -> (Gate, Gate) {
    (gates.load(GateId::of_key(hash)), gates.load(GateId::of_node(node)))
}

fn are_open((of_key, of_node): (Gate, Gate)) -> bool {
    of_key.is_open() && of_node.is_open()
}

impl KeyCopies {
    /// Drops matching forms, except those being filled: their replies will decide.
    fn drop_where(&mut self, sizes: &mut Sizes, which: impl Fn(&Form) -> bool) {
        self.forms.retain(|form| {
            let goes = !matches!(form.state, State::Filling(_)) && which(form);
            if goes {
                sizes.subtract(form);
            }
            !goes
        });
    }

    /// Requests for the most used form since the last sweep.
    fn used(&self) -> u32 {
        self.forms.iter().map(|form| form.used).max().unwrap_or(0)
    }

    fn drop_kept(&mut self, sizes: &mut Sizes) {
        self.drop_where(sizes, |_| true);
    }
}

impl Sizes {
    fn subtract(&mut self, form: &Form) {
        self.bytes = self.bytes.saturating_sub(form.bytes());
        self.copies -= usize::from(matches!(form.state, State::Kept(_)));
    }
}

#[cfg(test)]
mod tests {
    use super::super::beat::LEASE_US;
    use super::super::gate::OneThread;
    use super::*;

    const NODE: NodeId = NodeId(0);
    const ASKED: ReadRequest<'_> =
        ReadRequest { hash: 7 << 32, key: b"k", database: 0, request: b"GET k", node: NODE, resp3: false };

    fn copies() -> (OneThread, Copies) {
        let mut copies = Copies::default();
        copies.limit(1 << 20, 1 << 10);
        let slot = Slot::new(1).expect("a slot");
        copies.adopt(&Arc::new(CacheableSet::default().next([(ASKED.hash, slot)], [])));
        (OneThread::default(), copies)
    }

    fn read(gates: &OneThread, copies: &mut Copies, asked: ReadRequest<'_>, now_us: u64) -> String {
        match copies.read(gates, asked, now_us, || now_us, |_| true) {
            Read::Hit(reply) => String::from_utf8_lossy(reply).into_owned(),
            other => format!("{other:?}"),
        }
    }

    fn fill(gates: &OneThread, copies: &mut Copies, value: &str, ttl: i64) -> Filled {
        let number = copies.begin(gates, ASKED, (1_000, 1_000)).expect("a fill");
        copies.on_ttl_reply(number, ttl);
        copies.end(gates, number, value.as_bytes(), None, (1_000, 1_000), |_, _| Some(NODE))
    }

    #[test]
    fn stored_commands_count_toward_the_memory_limit() {
        let (gates, mut copies) = copies();
        let long = vec![b'x'; 300 << 10];
        let mut begun = 0;
        for number in 0..10_u8 {
            let request = [&long[..], &[number]].concat();
            let asked = ReadRequest { request: &request, ..ASKED };
            if copies.read(&gates, asked, 0, || 0, |_| true) == Read::Fill
                && copies.begin(&gates, asked, (0, 0)).is_some()
            {
                begun += 1;
            }
            assert!(copies.sizes().bytes <= 1 << 20);
        }
        assert_eq!(begun, 3);
    }

    #[test]
    fn a_key_with_many_forms_replaces_one_per_interval() {
        let (gates, mut copies) = copies();
        let begun = |copies: &mut Copies, number: usize, now_us: u64| {
            let request = format!("SISMEMBER k {number}");
            let asked = ReadRequest { request: request.as_bytes(), ..ASKED };
            assert_eq!(copies.read(&gates, asked, now_us, || now_us, |_| true), Read::Fill);
            let begun = copies.begin(&gates, asked, (now_us, now_us));
            begun.map(|number| copies.end(&gates, number, b":0", None, (now_us, now_us), |_, _| Some(NODE))).is_some()
        };
        assert_eq!((0..1_000).filter(|number| begun(&mut copies, *number, 0)).count(), FORMS + 1);
        assert!(!begun(&mut copies, 1_000, REPLACES_US - 1));
        assert!(begun(&mut copies, 1_000, REPLACES_US) && !begun(&mut copies, 1_001, REPLACES_US));
        assert_eq!(copies.sizes().copies, FORMS);
    }

    #[test]
    fn a_copy_is_served_until_its_key_is_written() {
        let (gates, mut copies) = copies();
        assert_eq!(read(&gates, &mut copies, ASKED, 0), "Fill");
        assert_eq!(fill(&gates, &mut copies, "one", -1), Ok(()));
        assert_eq!(read(&gates, &mut copies, ASKED, 1_000 + LEASE_US), "one");
        assert_eq!(read(&gates, &mut copies, ReadRequest { request: b"STRLEN k", ..ASKED }, 0), "Fill");
        assert_eq!(read(&gates, &mut copies, ReadRequest { database: 1, ..ASKED }, 0), "Fill");
        let gate = GateId::of_key(ASKED.hash);
        gates.raise(gate);
        assert_eq!(read(&gates, &mut copies, ASKED, 0), "Miss", "while it is written");
        gates.lower(gate);
        assert_eq!(read(&gates, &mut copies, ASKED, 0), "Fill", "when it was written");
        assert_eq!(copies.sizes(), Sizes::default());
    }

    #[test]
    fn a_recent_hit_is_found_again_while_it_is_valid() {
        let (gates, mut copies) = copies();
        let again = |copies: &mut Copies, request: &[u8], database: u32, now_us: u64| {
            copies.find_recent(&gates, 9, (database, request, false), || now_us).map(|again| again.reply.to_vec())
        };
        read(&gates, &mut copies, ASKED, 0);
        assert_eq!(fill(&gates, &mut copies, "one", 500), Ok(()));
        assert_eq!(again(&mut copies, ASKED.request, 0, 0), None, "no hit was recorded");
        copies.record_hit(9, &ASKED);
        assert_eq!(again(&mut copies, ASKED.request, 0, 0), Some(b"one".to_vec()));
        assert_eq!(again(&mut copies, b"GET x", 0, 0), None, "another command of the same hash");
        assert_eq!(again(&mut copies, ASKED.request, 1, 0), None, "another database");
        assert_eq!(again(&mut copies, ASKED.request, 0, 1_000 + 499_000), None, "its time is over");
        gates.renew(GateId::of_node(NODE));
        assert_eq!(again(&mut copies, ASKED.request, 0, 0), None, "its node is another");
        read(&gates, &mut copies, ASKED, 0);
        assert_eq!(fill(&gates, &mut copies, "two", -1), Ok(()));
        assert_eq!(again(&mut copies, ASKED.request, 0, 0), Some(b"two".to_vec()));
        gates.raise(GateId::of_key(ASKED.hash));
        assert_eq!(again(&mut copies, ASKED.request, 0, 0), None, "it is written");
        copies.clear();
        assert_eq!(again(&mut copies, ASKED.request, 0, 0), None, "it is gone");
    }

    #[test]
    fn a_read_concurrent_with_a_write_is_not_stored() {
        let (gates, mut copies) = copies();
        for gate in [GateId::of_key(ASKED.hash), GateId::of_node(NODE)] {
            read(&gates, &mut copies, ASKED, 0);
            let number = copies.begin(&gates, ASKED, (0, 0)).expect("a fill");
            assert_eq!(read(&gates, &mut copies, ASKED, 0), format!("Wait({number})"), "one fill is enough");
            gates.renew(gate);
            assert_eq!(copies.end(&gates, number, b"old", None, (0, 0), |_, _| Some(NODE)), Err(Discarded::Written));
        }
        read(&gates, &mut copies, ASKED, 0);
        let number = copies.begin(&gates, ASKED, (0, 0)).expect("a fill");
        copies.changed(ASKED.hash);
        assert_eq!(copies.end(&gates, number, b"old", None, (0, 0), |_, _| Some(NODE)), Err(Discarded::Invalidated));
    }

    #[test]
    fn a_copy_is_served_only_while_its_node_confirms_beats() {
        let (gates, mut copies) = copies();
        read(&gates, &mut copies, ASKED, 0);
        assert_eq!(fill(&gates, &mut copies, "one", -1), Ok(()));
        copies.record_hit(9, &ASKED);
        let again = |copies: &mut Copies, now_us: u64| {
            copies.find_recent(&gates, 9, (0, ASKED.request, false), || now_us).is_some()
        };
        let end_us = 1_000 + LEASE_US;
        assert!(again(&mut copies, end_us) && !again(&mut copies, end_us + 1));
        assert_eq!(read(&gates, &mut copies, ASKED, end_us + 1), "Miss");
        copies.beats().sent(NODE, end_us);
        assert_eq!(read(&gates, &mut copies, ASKED, end_us + 1), "Miss", "the beat is not confirmed");
        copies.beats().replied(NODE);
        assert_eq!(read(&gates, &mut copies, ASKED, end_us + LEASE_US), "one");
        let number =
            copies.begin(&gates, ReadRequest { database: 1, ..ASKED }, (0, end_us + LEASE_US)).expect("a fill");
        copies.discard_fill(number, Discarded::Lost);
        assert_eq!(copies.end(&gates, number, b"", None, (0, 0), |_, _| Some(NODE)), Err(Discarded::Lost));
        assert_eq!(
            read(&gates, &mut copies, ASKED, end_us + LEASE_US + 1),
            "Miss",
            "a fill without a reply is no beat"
        );
    }

    #[test]
    fn a_copy_expires_with_its_key() {
        let (gates, mut copies) = copies();
        read(&gates, &mut copies, ASKED, 0);
        assert_eq!(fill(&gates, &mut copies, "one", 500), Ok(()));
        assert_eq!(read(&gates, &mut copies, ASKED, 1_000 + 498_999), "one");
        assert_eq!(read(&gates, &mut copies, ASKED, 1_000 + 499_000), "Fill");
        assert_eq!(fill(&gates, &mut copies, "one", 1), Err(Discarded::Expired));
    }

    #[test]
    fn a_copy_expires_with_its_key_during_a_long_turn() {
        let (gates, mut copies) = copies();
        read(&gates, &mut copies, ASKED, 0);
        assert_eq!(fill(&gates, &mut copies, "one", 60_000), Ok(()));
        copies.record_hit(9, &ASKED);
        let an_hour_later = || 3_600_000_000;
        assert_eq!(copies.find_recent(&gates, 9, (0, ASKED.request, false), an_hour_later), None);
        assert_eq!(
            copies.read(&gates, ASKED, 0, an_hour_later, |_| true),
            Read::Fill,
            "the host was suspended within this turn"
        );
    }

    #[test]
    fn the_least_used_copies_are_evicted_when_memory_is_full() {
        let (gates, mut copies) = copies();
        let slot = Slot::new(1).expect("a slot");
        let hashes = 1..=EVICTION_SAMPLES as u64;
        copies.adopt(&Arc::new(CacheableSet::default().next(hashes.clone().chain([99]).map(|hash| (hash, slot)), [])));
        let value = [b'x'; 500];
        let keep = |copies: &mut Copies, hash: u64, now_us: u64| {
            let asked = ReadRequest { hash, ..ASKED };
            read(&gates, copies, asked, now_us);
            let number = copies.begin(&gates, asked, (now_us, now_us))?;
            copies.end(&gates, number, &value, None, (now_us, now_us), |_, _| Some(NODE)).ok()
        };
        let is_kept = |copies: &Copies, hash: u64| {
            copies.keys[&hash].forms.iter().any(|form| matches!(form.state, State::Kept(_)))
        };
        hashes.clone().for_each(|hash| assert_eq!(keep(&mut copies, hash, 0), Some(())));
        // Keys in the second half are used.
        let used = EVICTION_SAMPLES as u64 / 2 + 1..=EVICTION_SAMPLES as u64;
        used.clone()
            .for_each(|hash| assert!(read(&gates, &mut copies, ReadRequest { hash, ..ASKED }, 0).starts_with('x')));
        copies.limit(copies.sizes().bytes, 1 << 10);
        assert_eq!(keep(&mut copies, 99, 1), Some(()));
        assert!({ used }.all(|hash| is_kept(&copies, hash)), "used copies are not evicted");
        assert_eq!(hashes.filter(|hash| is_kept(&copies, *hash)).count(), EVICTION_SAMPLES / 2);
        copies.limit(copies.sizes().bytes, 1 << 10);
        assert_eq!(keep(&mut copies, 1, EVICTS_US), None, "not again at once");
        assert!(copies.sizes().bytes <= copies.bytes_max);
    }

    #[test]
    fn copies_are_dropped_with_connection_placement_or_cacheability() {
        let (gates, mut copies) = copies();
        let mut again = |gone: &dyn Fn(&mut Copies)| {
            assert_eq!(read(&gates, &mut copies, ASKED, 0), "Fill");
            assert_eq!(fill(&gates, &mut copies, "one", -1), Ok(()));
            gone(&mut copies);
            assert_eq!(copies.sizes(), Sizes::default());
        };
        again(&|copies| copies.lost(NODE, Discarded::Lost));
        again(&|copies| copies.update_placement(|_, _| None));
        again(&|copies| copies.update_placement(|_, _| Some(NodeId(1))));
        again(&|copies| copies.changed(ASKED.hash));
        again(&|copies| copies.clear());
        again(&|copies| {
            let anew = Arc::new(copies.set().renewed());
            copies.adopt(&anew);
        });
    }

    #[test]
    fn a_fill_is_discarded_if_its_key_moved_and_returned() {
        let (gates, mut copies) = copies();
        for place in [None, Some(NodeId(1))] {
            assert_eq!(read(&gates, &mut copies, ASKED, 0), "Fill");
            let number = copies.begin(&gates, ASKED, (0, 0)).expect("a fill");
            copies.update_placement(|_, _| place);
            copies.update_placement(|_, _| Some(NODE));
            assert_eq!(copies.end(&gates, number, b"nothing", None, (0, 0), |_, _| Some(NODE)), Err(Discarded::Moved));
        }
        assert_eq!(copies.sizes(), Sizes::default());
    }

    #[test]
    fn errors_and_large_replies_are_not_filled_again_immediately() {
        let (gates, mut copies) = copies();
        for (reply, why) in [("-WRONGTYPE", Discarded::Refused), (&"x".repeat(2_000), Discarded::Large)] {
            let now_us = if why == Discarded::Large { REST_US * 2 } else { 0 };
            assert_eq!(read(&gates, &mut copies, ASKED, now_us), "Fill");
            let number = copies.begin(&gates, ASKED, (now_us, now_us)).expect("a fill");
            assert_eq!(
                copies.end(&gates, number, reply.as_bytes(), None, (now_us, now_us), |_, _| Some(NODE)),
                Err(why)
            );
            assert_eq!(read(&gates, &mut copies, ASKED, now_us + REST_US - 1), "Miss");
        }
    }

    #[test]
    fn a_sweep_drops_unused_copies_and_returns_used_keys() {
        let (gates, mut copies) = copies();
        read(&gates, &mut copies, ASKED, 0);
        assert_eq!(fill(&gates, &mut copies, "one", -1), Ok(()));
        assert_eq!(copies.sweep(10), [(NODE, 0, b"k".as_slice().into())]);
        assert_eq!(read(&gates, &mut copies, ASKED, 0), "one");
        assert_eq!(copies.sweep(0), []);
        assert_eq!(copies.sizes().copies, 1);
        assert_eq!(copies.sweep(10), []);
        assert_eq!(copies.sizes(), Sizes::default());
    }
}
