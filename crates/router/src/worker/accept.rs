//! Accepting clients: listeners, limits, and failed TLS handshakes.

pub(super) mod state;

use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;

use rustix::net::{SendFlags, SocketFlags};
use tracing::warn;

use super::downstreams::identity::{Details, Identity};
use super::downstreams::{Client, Downstreams};
use super::login::become_user;
use super::quotas::part_of;
use super::transport::Tls;
use super::turn::Turn;
use crate::limits::ClientQuota;
use crate::settings::ListenAddress;
use crate::slab::Handle;
use crate::users::Bounds;
use state::spare_descriptor;

/// Maximum accepts per turn and listener, so that a burst of connections does not stall existing clients.
const ACCEPTS_PER_TURN: usize = 64;

/// Maximum accepts per turn on a socket shared with other workers. A low limit spreads clients over the workers.
const ACCEPTS_PER_TURN_SHARED: usize = 4;

/// Refuses a new connection with an error.
fn refuse_connection(turn: &Turn, fd: &OwnedFd, error: &str) {
    let mut reply = Vec::new();
    switchyard_resp::encode::error(&mut reply, error);
    turn.counters().errors.count(&reply);
    let _ = rustix::net::send(fd, &reply, SendFlags::NOSIGNAL);
}

pub(super) fn accept(turn: &Turn, down: &mut Downstreams, index: usize) {
    // The event may be older than the close.
    let Some(listener) = down.door.listeners.get(index) else { return };
    let accepts = if listener.is_shared() { ACCEPTS_PER_TURN_SHARED } else { ACCEPTS_PER_TURN };
    for _ in 0..accepts {
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        match rustix::net::acceptfrom_with(&down.door.listeners[index], flags) {
            Ok((fd, peer)) => greet_client(turn, down, index, fd, peer.and_then(|p| p.try_into().ok())),
            Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => {}
            Err(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => {
                // Without a descriptor the connection cannot even be refused: release the spare one.
                down.door.spare = None;
                if let Ok(fd) = rustix::net::accept_with(&down.door.listeners[index], flags) {
                    refuse_connection(turn, &fd, "ERR max number of clients reached");
                    turn.counters().rejected.add(1);
                }
                down.door.spare = spare_descriptor();
                return;
            }
            Err(_) => return,
        }
    }
}

fn greet_client(turn: &Turn, down: &mut Downstreams, listener: usize, fd: OwnedFd, peer: Option<std::net::SocketAddr>) {
    let live = turn.routing().live.clone();
    let settings = down.door.listeners[listener].settings.clone();
    let mut share = None;
    if settings.bounds != Bounds::default() || settings.connections_per_second.is_some() {
        let name = format!("listener:{}", down.door.listeners[listener].number);
        let account = turn.shared().limits.account(&name);
        let too_fast =
            settings.connections_per_second.is_some_and(|rate| account.accepts.take(rate, turn.now_us()).is_err());
        share = ClientQuota::connect(part_of(turn, down, name), settings.bounds.connections)
            .filter(|_| !too_fast)
            .map(Box::new);
        if share.is_none() {
            turn.counters().limited_connections.add(1);
            if !settings.tls {
                refuse_connection(turn, &fd, "LIMITED this listener accepts no more connections now; try again");
            }
            return;
        }
    }
    if turn.shared().clients.fetch_add(1, Ordering::Relaxed) >= live.max_clients {
        turn.shared().clients.fetch_sub(1, Ordering::Relaxed);
        turn.counters().rejected.add(1);
        if !settings.tls {
            refuse_connection(turn, &fd, "ERR max number of clients reached");
        }
        return;
    }
    let tls = match (settings.tls, &live.tls) {
        (false, _) => None,
        (true, Some(tls)) => Tls::accept(tls.config.clone()).ok(),
        (true, None) => None,
    };
    if settings.tls && tls.is_none() {
        // Never fall back to plain text on a TLS listener.
        turn.shared().clients.fetch_sub(1, Ordering::Relaxed);
        return;
    }
    let unix = match &settings.address {
        ListenAddress::Tcp(_) => {
            let _ = rustix::net::sockopt::set_tcp_nodelay(&fd, true);
            let _ = rustix::net::sockopt::set_socket_keepalive(&fd, true);
            // As in Redis, a client whose host is gone is detected after about ten minutes rather than the system's
            // two hours. It may be in a blocking command.
            let _ = rustix::net::sockopt::set_tcp_keepidle(&fd, std::time::Duration::from_secs(300));
            let _ = rustix::net::sockopt::set_tcp_keepintvl(&fd, std::time::Duration::from_secs(100));
            let _ = rustix::net::sockopt::set_tcp_keepcnt(&fd, 3);
            None
        }
        ListenAddress::Unix { path, .. } => Some(path.clone()),
    };
    let details = Details::new(
        turn.shared().next_client_id.fetch_add(1, Ordering::Relaxed),
        peer,
        rustix::net::getsockname(&fd).ok().and_then(|a| a.try_into().ok()),
        unix,
        turn.now_us(),
    );
    let identity = Identity::new(live.users.default_user().clone(), settings, share, details);
    let client = Client::new(fd, tls, identity, live.database, turn.now_us());
    let handle = down.insert(client);
    let user = turn.routing().live.users.default_user().clone();
    let open = user.is_open();
    if become_user(turn, down, handle, user, open).is_err() {
        // The default user is at its connection limit; other users can still log in.
        turn.counters().limited_connections.add(1);
    }
    let registered = down.get(handle).map(|c| c.socket().register(turn.poll(), handle));
    if !matches!(registered, Some(Ok(()))) {
        down.remove(handle);
        turn.shared().clients.fetch_sub(1, Ordering::Relaxed);
        return;
    }
    turn.counters().accepted.add(1);
    turn.counters().clients.add(1);
}

/// Counts a failed TLS handshake and logs it with throttling, because any client can cause them.
pub(super) fn handshake_failed(turn: &Turn, down: &mut Downstreams, handle: Handle, why: &str) {
    turn.counters().handshakes_failed.add(1);
    let Some(suppressed) = down.door.handshake_log.allow(turn.now_us()) else { return };
    let Some(client) = down.get(handle) else { return };
    let from = client.identity().origin();
    warn!(from, reason = why, suppressed = suppressed.count(), "a client's TLS handshake failed");
}
