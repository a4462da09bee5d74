//! Reads at replicas of a cluster that the owner of the slot answers in their place.
//!
//! A replica receives migrations later than its primary: it may lack keys that have moved to another member, or that its
//! primary has just received, and it redirects slots that its primary serves. So a reply that does not prove that the key
//! exists is discarded, and so is every error. A replica's redirect does not change the map.
//!
//! Until the owner replies, the read counts as one at a replica: the client sends nothing on another lane, so no write
//! overtakes it.

use switchyard_policy::cluster::Redirect;
use switchyard_resp::reply;

use super::{Content, Redirection, Redirects, SILENCE_US, Target, is_silent, send, slots_by};
use crate::lane::Lane;
use crate::slab::Handle;
use crate::worker::context::Context;
use crate::worker::turn::Turn;
use crate::worker::upstreams::pending::Purpose;
use crate::worker::upstreams::{Link, Upstreams};

impl Redirects {
    /// Sends a client's read to the owner of its slot, in place of this reply of a replica. Returns false if the reply is
    /// not one to such a read.
    #[cold]
    pub(in crate::worker) fn read_at_owner(&mut self, cx: &mut Context, handle: Handle, answer: &[u8]) -> bool {
        let Some(link) = cx.up.get(handle) else { return false };
        let Some(pending) = link.head().copied().filter(|head| head.purpose == Purpose::Client) else { return false };
        let (requests, is_unsent) = (link.requests(), link.is_head_unsent());
        let request = requests.head_request();
        let Some(slot) = slots_by(cx.turn.routing(), request).first().copied() else { return false };
        if requests.is_head_expired() || is_unsent {
            return false;
        }
        let request = request.to_vec();
        if reply::is_error(answer) && reply::text(answer).and_then(Redirect::of).is_some() {
            cx.turn.shared().request_map();
        }
        let Some(ended) = cx.up.get_mut(handle).and_then(Link::taken_out) else { return false };
        cx.hooks.over(&cx.turn, ended, b"");
        let target = Target::Owner(cx.turn.routing().topology.owner(slot));
        let content = Content::Command(request);
        let read = Redirection { pending, client: pending.who, lane: Lane::Main, slot, target, content };
        if let Err(read) = send(cx, read) {
            self.follow(cx, Redirection { target: Target::OwnerLater, ..read });
        }
        true
    }
}

/// Ends connections to replicas that do not reply. Their reads are sent to the owners, rather than failing with the
/// replica.
pub(in crate::worker) fn leave_silent_replicas(turn: &Turn, up: &mut Upstreams) {
    let is_silent = |link: &Link| {
        let is_receiving = turn.now_us().saturating_sub(link.incoming().received_us()) <= SILENCE_US;
        link.lane() == Lane::Replica && is_silent(turn, link) && !is_receiving && !link.incoming().is_paused()
    };
    let silent: Vec<Handle> = up.links().iter().filter(|(_, link)| is_silent(link)).map(|(handle, _)| handle).collect();
    for link in silent {
        up.break_link(turn, link, "the replica does not reply");
    }
}
