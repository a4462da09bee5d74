//! Bounded copies: a hit needs a recent proof about its own key, rather than about its node.
//!
//! In front of a cluster, other routers and clients write the same keys, and slots change their owner without a message
//! to readers. So each used key is confirmed by a request for the key itself, `TOUCH`, on the connection that tracks
//! reads. An integer as the reply to a request that was *sent* at `t` proves two facts: the member owned the key's slot
//! after `t`, and had not changed the key since the copy was read, because its invalidation would have arrived first. A
//! hit within `staleness` of `t` therefore returns what the owner would have returned within this time.
//!
//! `PING` would not be enough: a member whose slot leaves sends no invalidation for an absent key, and none for the keys
//! that it deletes with the slot. To `TOUCH` it replies with a redirect.

use std::collections::BTreeMap;

use super::beat::Beats;
use crate::topology::NodeId;

/// The proof for the copies of one key. All times are CLOCK_BOOTTIME, microseconds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Proof {
    /// Member with the copies, and time at which the newest confirmed request was sent to it.
    confirmed: Option<(NodeId, u64)>,
    /// A TOUCH is due or in flight.
    is_requested: bool,
    /// Reply of a TOUCH if the key has not changed: 0 for copies of an absent key.
    count: i64,
}

impl Proof {
    /// Records a fill from a member, and whether the key existed.
    pub(super) fn filled(&mut self, node: NodeId, sent_us: u64, is_present: bool) {
        self.count = i64::from(is_present);
        self.confirm(node, sent_us);
    }

    /// Whether a reply to TOUCH shows that the member owns the key, and that it exists as before. A slot that left and
    /// returned may have lost the key, without an invalidation.
    pub(super) fn is_confirmed_by(&self, count: Option<i64>) -> bool {
        count == Some(self.count)
    }

    fn confirm(&mut self, node: NodeId, sent_us: u64) {
        let before = self.confirmed.filter(|(of, _)| *of == node).map_or(sent_us, |(_, before)| before.max(sent_us));
        self.confirmed = Some((node, before));
    }

    /// Member with the copies.
    pub(super) fn node(&self) -> Option<NodeId> {
        self.confirmed.map(|(node, _)| node)
    }

    pub(super) fn is_not_requested(&mut self) {
        self.is_requested = false;
    }

    /// Records the loss of the connection to a member.
    pub(super) fn lost(&mut self, node: NodeId) {
        self.confirmed = self.confirmed.filter(|(of, _)| *of != node);
    }

    /// Records the reply to a TOUCH. The reply of an earlier owner has no effect.
    pub(super) fn renew(&mut self, touch: Touch) {
        self.is_requested = false;
        if self.node() == Some(touch.node) {
            self.confirm(touch.node, touch.sent_us);
        }
    }
}

/// A TOUCH in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Touch {
    pub(super) hash: u64,
    node: NodeId,
    sent_us: u64,
}

/// The promise of hits, and the requests that it needs.
#[derive(Debug, Default)]
pub(super) struct Promise {
    /// `None`: copies are never stale.
    staleness_us: Option<u64>,
    due: Vec<u64>,
    in_flight: BTreeMap<u32, Touch>,
}

impl Promise {
    /// Returns whether this changes the promise.
    pub(super) fn set(&mut self, staleness_us: Option<u64>) -> bool {
        std::mem::replace(&mut self.staleness_us, staleness_us) != staleness_us
    }

    pub(super) const fn is_bounded(&self) -> bool {
        self.staleness_us.is_some()
    }

    /// Records the use of a copy, and returns whether its hit is permitted. `now_us` must be read after the client's
    /// command was received.
    #[inline]
    pub(super) fn permits(
        &mut self,
        beats: &mut Beats,
        proof: &mut Proof,
        (hash, node): (u64, NodeId),
        now_us: u64,
    ) -> bool {
        let Some(staleness_us) = self.staleness_us else { return beats.permits(node, now_us) };
        let Some((_, sent_us)) = proof.confirmed.filter(|(of, _)| *of == node) else { return false };
        let age_us = now_us.saturating_sub(sent_us);
        // A third, so that one slow reply does not end the hits.
        if age_us >= staleness_us / 3 && !proof.is_requested {
            proof.is_requested = true;
            self.due.push(hash);
        }
        age_us <= staleness_us
    }

    pub(super) fn is_any_due(&self) -> bool {
        !self.due.is_empty()
    }

    /// Hashes of the keys that need a TOUCH now.
    pub(super) fn take_due(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.due)
    }

    /// Records a TOUCH. To be called before its bytes are handed to the connection.
    pub(super) fn sent(&mut self, number: u32, hash: u64, node: NodeId, now_us: u64) {
        self.in_flight.insert(number, Touch { hash, node, sent_us: now_us });
    }

    pub(super) fn replied(&mut self, number: u32) -> Option<Touch> {
        self.in_flight.remove(&number)
    }

    /// Removes the requests in flight at a member, and returns their keys.
    pub(super) fn lost(&mut self, node: NodeId) -> Vec<u64> {
        let is_of_it = |touch: &Touch| touch.node == node;
        let lost = self.in_flight.values().filter(|touch| is_of_it(touch)).map(|touch| touch.hash).collect();
        self.in_flight.retain(|_, touch| !is_of_it(touch));
        lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeId = NodeId(1);
    const OTHER: NodeId = NodeId(2);
    const HASH: u64 = 7;

    fn permits(promise: &mut Promise, proof: &mut Proof, node: NodeId, now_us: u64) -> bool {
        promise.permits(&mut Beats::default(), proof, (HASH, node), now_us)
    }

    fn bounded() -> (Promise, Proof) {
        let (mut promise, mut proof) = (Promise::default(), Proof::default());
        assert!(promise.set(Some(900)) && !promise.set(Some(900)));
        proof.filled(NODE, 1000, true);
        (promise, proof)
    }

    #[test]
    fn hits_end_with_the_bound_unless_a_touch_is_confirmed() {
        let (mut promise, mut proof) = bounded();
        assert!(permits(&mut promise, &mut proof, NODE, 1299) && !promise.is_any_due());
        assert!(permits(&mut promise, &mut proof, NODE, 1300));
        assert_eq!(promise.take_due(), [HASH]);
        promise.sent(5, HASH, NODE, 1310);
        assert!(permits(&mut promise, &mut proof, NODE, 1900) && !permits(&mut promise, &mut proof, NODE, 1901));
        assert!(!promise.is_any_due(), "one is in flight");
        proof.renew(promise.replied(5).expect("sent"));
        assert!(permits(&mut promise, &mut proof, NODE, 2210) && !permits(&mut promise, &mut proof, NODE, 2211));
        assert!(promise.replied(5).is_none());
        assert_eq!(promise.take_due(), [HASH], "the next one");
    }

    #[test]
    fn a_reply_of_an_earlier_owner_confirms_nothing() {
        let (mut promise, mut proof) = bounded();
        promise.sent(5, HASH, NODE, 5000);
        assert!(!permits(&mut promise, &mut proof, OTHER, 1001));
        proof.filled(OTHER, 1500, false);
        assert!(proof.is_confirmed_by(Some(0)) && !proof.is_confirmed_by(Some(1)) && !proof.is_confirmed_by(None));
        proof.renew(promise.replied(5).expect("sent"));
        assert!(permits(&mut promise, &mut proof, OTHER, 2400) && !permits(&mut promise, &mut proof, OTHER, 2401));
    }

    #[test]
    fn a_lost_connection_ends_proofs_and_requests() {
        let (mut promise, mut proof) = bounded();
        promise.sent(5, HASH, NODE, 1100);
        promise.sent(6, 8, OTHER, 1100);
        assert_eq!(promise.lost(NODE), [HASH]);
        proof.lost(OTHER);
        assert!(permits(&mut promise, &mut proof, NODE, 1001));
        proof.lost(NODE);
        assert!(!permits(&mut promise, &mut proof, NODE, 1001));
        assert!(promise.replied(5).is_none() && promise.replied(6).is_some());
    }
}
