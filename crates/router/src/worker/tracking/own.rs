//! NOLOOP in the default mode: a client gets no invalidation of keys that it has changed itself.
//!
//! A node's broadcast does not name the writer, and one broadcast may stand for several writes. So no broadcast is
//! filtered. Instead the router does the same as a Redis server: a key changed by a client with NOLOOP is no longer in
//! the table of keys read by the client, until the next read. Later invalidations of the key are not for this client.
//!
//! This is right only if the client knows the new value from its own command, regardless of earlier changes: so only
//! for commands that replace or delete whole values, or whose reply is the value ([`Proof`]), and only when the reply
//! confirms it. A broadcast before this reply waits for it. After any other write the client is notified as if another
//! client had written: once too often, but never too rarely.
//!
//! Not in BCAST mode: there a client is also notified of keys that it has not read. A change by another client in the
//! same moment at the node, with the same broadcast, would be lost.

use switchyard_resp::command::Flags;
use switchyard_resp::reply;

use super::{Proof, Tracked, Tracking, Write};
use crate::slab::Handle;
use crate::worker::downstreams::{ClientEvent, Downstreams};
use crate::worker::invocation::Invocation;
use crate::worker::keyed::CommandHooks;
use crate::worker::turn::Turn;

/// Maximum number of tracked writes in flight of a client; beyond it the client is notified of its own changes.
const WRITES_MAX: usize = 1024;

/// Handles the reply to the client's command `seq`. If the reply proves a write, its keys no longer concern the
/// client, and neither do invalidations of them held in the meantime.
#[cold]
pub(in crate::worker) fn settle_own_write(down: &mut Downstreams, handle: Handle, seq: u32, answer: &[u8]) {
    let Some(tracked) = down.get_mut(handle).and_then(|c| c.state_mut::<Tracked>()) else { return };
    let Some(place) = tracked.own.iter().position(|w| w.seq == seq) else { return };
    let Some(write) = tracked.own.remove(place).filter(|w| w.proof.is_given_by(answer)) else { return };
    let mut dropped = 0;
    tracked.held.retain(|(_, payload)| {
        let told = payload.as_deref().map(reply::elements).filter(|keys| keys.remaining() == 1);
        let key = told.and_then(|mut keys| keys.next()).and_then(reply::text);
        let own = key.is_some_and(|key| write.changes(key));
        dropped += if own { payload.as_ref().map_or(0, Vec::len) + super::nodes::INVALIDATE.len() } else { 0 };
        !own
    });
    tracked.held_bytes -= dropped;
    down.emit(ClientEvent::OwnWrite { client: handle, keys: write.keys });
}

impl Tracking {
    /// Records a dispatched write of a client with NOLOOP.
    pub(super) fn note_own_write(&mut self, down: &mut Downstreams, hooks: &mut CommandHooks, call: &Invocation<'_>) {
        let Invocation { handle, command, args, .. } = *call;
        if !command.flags.has(Flags::WRITE) {
            return;
        }
        let Some(client) = down.get_mut(handle) else { return };
        if client.in_flight() == 0 {
            return; // refused: nothing was sent
        }
        let seq = client.replies().last();
        let mut places = std::mem::take(&mut hooks.keys);
        places.clear();
        let found = command.find_keys(args, &mut places).is_ok();
        let proof = Proof::of(&command.name, places.len()).filter(|_| found);
        let is_read = |key: &&[u8]| self.is_read_by(key, handle);
        let keys: Vec<Box<[u8]>> =
            places.iter().filter_map(|place| args.get(*place as usize)).filter(is_read).map(Into::into).collect();
        hooks.keys = places;
        if let Some(proof) = proof
            && !keys.is_empty()
            && let Some(tracked) = client.state_mut::<Tracked>()
            && tracked.own.len() < WRITES_MAX
        {
            tracked.own.push_back(Write { seq, proof, keys });
        }
    }

    /// Handles a proved write of a client.
    pub(in crate::worker) fn on_own_write(&mut self, turn: &Turn, client: Handle, keys: &[Box<[u8]>]) {
        for key in keys {
            self.forget_read(key, client);
        }
        self.count_tracked(turn);
    }
}
