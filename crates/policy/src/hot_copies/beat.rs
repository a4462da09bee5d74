//! The lease of hot copies: a hit needs a recent proof that the node still serves this router.
//!
//! Replies and invalidations share the fill connection. A reply to a request that was *sent* there at `t` proves that
//! the connection was alive at `t`, and that every invalidation of an earlier change has been received. A router that
//! takes over ends that connection, then sends no command to the node for
//! [`TAKE_OVER_WAIT_US`](crate::ownership::TAKE_OVER_WAIT_US). So each hit of the replaced router precedes the first
//! write of its successor, also if the replaced router was stopped, suspended, or cut off from its nodes.
//!
//! A request of the router rather than a message of the successor, because a router that is cut off receives no
//! message.

use crate::topology::NodeId;

/// Maximum age of the newest confirmed beat at a hit, microseconds.
pub const LEASE_US: u64 = 1_000_000;

/// Interval between two beats at a node whose copies are used, microseconds: a quarter of the lease, so that one slow
/// reply does not end the hits.
const INTERVAL_US: u64 = LEASE_US / 4;

/// Time after the last use of a node's copies during which beats continue, microseconds. Unused copies are dropped
/// after about as long.
const IDLE_US: u64 = 10_000_000;

/// Beats of one worker at one node, on the current fill connection. All times are CLOCK_BOOTTIME.
#[derive(Clone, Copy, Debug, Default)]
struct Beat {
    /// Time at which the newest confirmed beat was sent.
    confirmed_us: Option<u64>,
    /// Time at which the newest PING was sent.
    sent_us: u64,
    /// Whether that PING has no reply yet.
    is_in_flight: bool,
    /// Last use of a copy of this node.
    used_us: Option<u64>,
}

/// Beats of one worker, by node number.
#[derive(Clone, Debug, Default)]
pub struct Beats(Vec<Beat>);

impl Beats {
    fn at(&mut self, node: NodeId) -> &mut Beat {
        if self.0.len() <= node.index() {
            self.0.resize(node.index() + 1, Beat::default());
        }
        &mut self.0[node.index()]
    }

    /// Records the use of a copy, and returns whether the lease of its node permits the hit. `now_us` must be read
    /// after the client's command was received.
    #[inline]
    pub(super) fn permits(&mut self, node: NodeId, now_us: u64) -> bool {
        let Some(beat) = self.0.get_mut(node.index()) else { return false };
        beat.used_us = Some(now_us);
        beat.confirmed_us.is_some_and(|sent_us| now_us.saturating_sub(sent_us) <= LEASE_US)
    }

    /// Returns the nodes that need a beat now.
    pub fn due(&self, now_us: u64) -> impl Iterator<Item = NodeId> {
        let is_due = move |beat: &Beat| {
            !beat.is_in_flight
                && beat.used_us.is_some_and(|used_us| now_us.saturating_sub(used_us) <= IDLE_US)
                && now_us.saturating_sub(beat.sent_us) >= INTERVAL_US
        };
        (0u16..).zip(&self.0).filter(move |(_, beat)| is_due(beat)).map(|(number, _)| NodeId(number))
    }

    /// Records a beat. To be called before its bytes are handed to the fill connection.
    pub fn sent(&mut self, node: NodeId, now_us: u64) {
        let beat = self.at(node);
        (beat.sent_us, beat.is_in_flight) = (now_us, true);
    }

    /// Records the reply to the beat in flight. A reply of an earlier connection, which [`Self::lost`] has ended, has
    /// no effect.
    pub fn replied(&mut self, node: NodeId) {
        let beat = self.at(node);
        if std::mem::take(&mut beat.is_in_flight) {
            beat.confirmed_us = beat.confirmed_us.max(Some(beat.sent_us));
        }
    }

    /// Records the reply to a fill that was sent on the current connection at that time: a fill counts as a beat.
    pub(super) fn filled(&mut self, node: NodeId, sent_us: u64) {
        let beat = self.at(node);
        beat.confirmed_us = beat.confirmed_us.max(Some(sent_us));
        beat.used_us = beat.used_us.max(Some(sent_us));
    }

    /// Ends the lease of a node: its fill connection is lost.
    pub(super) fn lost(&mut self, node: NodeId) {
        let beat = self.at(node);
        (beat.confirmed_us, beat.is_in_flight) = (None, false);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NODE: NodeId = NodeId(2);

    #[test]
    fn a_lease_starts_when_its_beat_is_sent() {
        let mut beats = Beats::default();
        assert!(!beats.permits(NODE, 5));
        beats.filled(NODE, 1_000);
        assert!(beats.permits(NODE, 1_000 + LEASE_US) && !beats.permits(NODE, 1_001 + LEASE_US));
        beats.sent(NODE, 2_000_000);
        assert!(!beats.permits(NODE, 2_000_001), "a beat without a reply proves nothing");
        beats.replied(NODE);
        assert!(beats.permits(NODE, 2_000_000 + LEASE_US) && !beats.permits(NODE, 2_000_001 + LEASE_US));
        assert!(!beats.permits(NodeId(0), 2_000_001), "another node");
    }

    #[test]
    fn a_lost_connection_ends_the_lease_and_its_beat() {
        let mut beats = Beats::default();
        beats.filled(NODE, 1_000);
        beats.sent(NODE, 300_000);
        beats.lost(NODE);
        beats.replied(NODE);
        assert!(!beats.permits(NODE, 300_001));
    }

    #[test]
    fn beats_are_sent_one_at_a_time_while_copies_are_used() {
        let mut beats = Beats::default();
        let due = |beats: &Beats, now_us| beats.due(now_us).collect::<Vec<_>>();
        assert_eq!(due(&beats, 1_000_000), []);
        beats.filled(NODE, 1_000_000);
        assert_eq!(due(&beats, 1_000_000), [NODE]);
        beats.sent(NODE, 1_000_000);
        assert_eq!(due(&beats, 5_000_000), [], "one is in flight");
        beats.replied(NODE);
        assert_eq!((due(&beats, 1_249_999), due(&beats, 1_250_000)), (vec![], vec![NODE]));
        assert_eq!(due(&beats, 11_000_001), [], "no copy was used for ten seconds");
        beats.permits(NODE, 11_000_001);
        assert_eq!(due(&beats, 11_000_001), [NODE]);
    }
}
