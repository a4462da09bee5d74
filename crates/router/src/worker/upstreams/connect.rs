//! Connecting to nodes, and commands of the router itself. Replies are in `replies`, broken and silent connections in
//! `breaking`.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use switchyard_policy::topology::NodeId;
use switchyard_resp::{encode, reply};
use tracing::debug;
use tracing::warn;

use super::handshake::learn;
use super::link::Phase;
use super::pending::{Pending, Purpose};
use super::{Event, Link, Upstreams};
use crate::lane::Lane;
use crate::poll::Ready;
use crate::slab::Handle;
use crate::worker::command::{Call, KeyedCommand};
use crate::worker::keyed::{CommandHooks, Request};
use crate::worker::transport::Tls;
use crate::worker::turn::Turn;

const BACKOFF_FIRST_US: u64 = 50_000;

/// Time without TCP acknowledgements after which a host counts as gone. A server that is busy with a slow command keeps
/// acknowledging, and commands that wait there do not time out. As long as keepalive, because a full receive buffer
/// counts, too.
const UNACKNOWLEDGED: std::time::Duration = std::time::Duration::from_secs(60);

fn start_connect(address: std::net::SocketAddr) -> io::Result<OwnedFd> {
    use socket2::{Domain, Protocol, Socket, TcpKeepalive, Type};
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking().cloexec(), Some(Protocol::TCP))?;
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_keepalive(
        &TcpKeepalive::new()
            .with_time(std::time::Duration::from_secs(15))
            .with_interval(std::time::Duration::from_secs(5)),
    )?;
    socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED))?;
    match socket.connect(&address.into()) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::INPROGRESS.raw_os_error()) => {}
        Err(error) => return Err(error),
    }
    let _ = socket.as_fd();
    Ok(OwnedFd::from(socket))
}

impl Upstreams {
    /// Handles readiness of a socket. Returns whether the connection must be read.
    pub(in crate::worker) fn on_ready(&mut self, turn: &Turn, handle: Handle, event: Ready) -> bool {
        let Ready { readable, writable, hangup, .. } = event;
        let Some(link) = self.get_mut(handle) else { return false };
        link.socket.note_hangup(hangup);
        if link.phase() == Phase::Connecting {
            if !writable && !readable {
                return false;
            }
            match link.socket.connected() {
                Some(Ok(())) => self.handshake(turn, handle).begin(),
                Some(Err(error)) => self.attempt_failed(turn, handle, &io::Error::from(error).to_string()),
                None => {}
            }
        }
        let Some(link) = self.get_mut(handle) else { return false };
        if writable {
            link.socket.is_free();
            if link.phase() == Phase::Securing {
                self.handshake(turn, handle).secure();
            } else if link.unsent() > 0 {
                link.socket.flows_since(turn.now_us());
                self.mark(handle);
            }
        }
        readable
    }

    /// Connects to nodes without a connection in advance, so that the first command finds one.
    pub(in crate::worker) fn connect_main(&mut self, turn: &Turn) {
        let routing = turn.routing().clone();
        let bound = routing.topology.node_id_bound();
        self.links.know_nodes(bound);
        self.pools.know_nodes(bound);
        for node in routing.topology.nodes() {
            let _ = self.shared_link(turn, node.id, Lane::Main, false);
        }
    }

    /// Closes connections to removed nodes. Such a node owns no slot: commands in flight there are parts of commands to
    /// all nodes, with no visible effect, so its zombies are dropped too.
    pub(in crate::worker) fn drop_foreign_links(&mut self, turn: &Turn) {
        let gone: Vec<Handle> = self
            .links
            .iter()
            .filter(|(_, link)| turn.routing().topology.node(link.node).is_none())
            .map(|(handle, _)| handle)
            .collect();
        for handle in gone {
            self.break_link(turn, handle, "the node was removed");
            // A connection that was not up would be retried indefinitely.
            self.drop_link(turn, handle);
        }
        self.zombies.forget_foreign(&turn.routing().topology);
        turn.shared().connections.retain_nodes(|node| turn.routing().topology.node(node).is_some());
    }

    /// Returns the connection of a shared lane. Creates it, not necessarily connected, if it is missing.
    pub(in crate::worker) fn shared_link(&mut self, turn: &Turn, node: NodeId, lane: Lane, resp3: bool) -> Handle {
        if let Some(handle) = self.links.shared(node, lane, resp3) {
            return handle;
        }
        let mut link =
            Link::new(node, lane, resp3, turn.routing().live.database, turn.counters().node(node), turn.now_us());
        // A second connection to a node known to be down is delayed like the first one. If the node is up, this
        // connection is new.
        link.life.set_failed(!self.links.is_up(node) && turn.node_fails(node));
        let handle = self.links.insert_shared(link);
        self.connect(turn, handle);
        handle
    }

    /// Whether commands may be sent on a connection, now or after an immediate attempt.
    pub(in crate::worker) fn takes_commands_or_tries(&mut self, turn: &Turn, handle: Handle) -> bool {
        self.get(handle).is_some_and(Link::takes_commands) || self.is_worth_another_try(turn, handle)
    }

    /// Whether commands may wait for a connection whose attempts have failed. Another connection, perhaps of another
    /// worker, may have reached the node since. Then the delay is skipped: an attempt starts now, and the commands wait
    /// for it.
    #[cold]
    pub(in crate::worker) fn is_worth_another_try(&mut self, turn: &Turn, handle: Handle) -> bool {
        let Some(node) = self.get(handle).map(|link| link.node) else { return false };
        if turn.node_fails(node) {
            return false;
        }
        let Some(link) = self.get_mut(handle) else { return false };
        link.life.set_failed(false);
        if matches!(link.phase(), Phase::Waiting { .. }) {
            self.connect(turn, handle);
        }
        self.get(handle).is_some_and(Link::takes_commands)
    }

    pub(super) fn connect(&mut self, turn: &Turn, handle: Handle) {
        let Some(link) = self.get_mut(handle) else { return };
        let Some(access) = turn.routing().live.nodes.get(&link.node) else {
            self.attempt_failed(turn, handle, "no address is configured for it");
            return;
        };
        let Some(address) = turn.routing().address_of(link.node, link.replica) else {
            let why = access.unresolved.clone().unwrap_or_else(|| "no Sentinel has named its primary yet".to_owned());
            self.attempt_failed(turn, handle, &why);
            return;
        };
        let of_replica = link.replica.and_then(|replica| turn.routing().replica_member(link.node, replica));
        let tls = of_replica.map_or(&access.tls, |member| &member.tls).as_ref();
        let tls = tls.map(|tls| Tls::connect(tls.config.clone(), tls.name_at(address))).transpose();
        let tls = match tls {
            Ok(tls) => tls,
            Err(error) => {
                self.attempt_failed(turn, handle, &format!("TLS: {error}"));
                return;
            }
        };
        link.address = Some(address);
        match start_connect(address) {
            Ok(fd) => {
                link.life.connects(turn.now_us());
                if let Err(error) = link.socket.open(turn, handle, fd, tls) {
                    self.attempt_failed(turn, handle, &error.to_string());
                }
            }
            Err(error) => self.attempt_failed(turn, handle, &error.to_string()),
        }
    }

    /// Handles a failed attempt to connect.
    pub(in crate::worker) fn attempt_failed(&mut self, turn: &Turn, handle: Handle, why: &str) {
        let Some(link) = self.get_mut(handle) else { return };
        let (failures, was_up) = link.life.fails();
        link.counters().failures.add(1);
        let (node, lane) = (link.node, link.lane);
        if was_up && lane == Lane::Main {
            self.begin_outage(turn, node);
        }
        if lane == Lane::Replica {
            self.replica_failed(turn, handle, why);
            return;
        }
        let name = turn.node_name(node);
        // A single refused connection at a serving node concerns the clients that wait for it, not the node.
        let serves = (lane.is_exclusive() || lane == Lane::Fills) && self.links.is_up(node);
        let news = !serves
            && turn.routing().topology.node(node).is_some()
            && turn.shared().with_facts(node, |facts| {
                facts.tried = true;
                facts.failure.replace(why.to_string()).as_deref() != Some(why)
            });
        if news {
            warn!(node = %name, reason = why, "node cannot be reached; trying again with increasing pauses");
        }
        self.fail_all(turn, handle, &format!("NODEDOWN {name} cannot be reached: {why}"), 0);
        if lane.is_exclusive() {
            self.pool(turn, node, lane).link_failed(handle, why);
            return;
        }
        if lane == Lane::Pubsub {
            self.emit(Event::PubsubFailed { node });
        }
        let backoff_max = turn.routing().live.reconnect_backoff_max.as_micros() as u64;
        // While commands wait for the node, the first delay is repeated.
        let doublings = if self.outages().has(node) { 1 } else { failures.min(10) };
        let mut backoff = (BACKOFF_FIRST_US << doublings).min(backoff_max);
        // Jitter: workers and routers that lost a node together must not reconnect together.
        backoff -= (turn.now_us() ^ u64::from(handle.index)) % (backoff / 4).max(1);
        if let Some(link) = self.get_mut(handle) {
            link.downgraded = false;
            link.socket.close(turn);
            link.life.wait_until(turn.now_us() + backoff);
        }
    }

    /// Sends a command of the router, without keys.
    pub(in crate::worker) fn push_own(
        &mut self,
        turn: &Turn,
        handle: Handle,
        args: &[&[u8]],
        purpose: Purpose,
        seq: u32,
    ) {
        self.push_own_for(turn, handle, Handle::NONE, args, purpose, seq);
    }

    /// Like `push_own`, on behalf of a client.
    pub(in crate::worker) fn push_own_for(
        &mut self,
        turn: &Turn,
        handle: Handle,
        who: Handle,
        args: &[&[u8]],
        purpose: Purpose,
        seq: u32,
    ) {
        let Some(link) = self.get(handle) else { return };
        let pending = Pending { who, purpose, seq, ..Pending::of_ours(turn) };
        let mut request = Vec::new();
        encode::command(&mut request, args.iter().copied());
        let request = Request::of_ours(&request, link.requests.database(), pending);
        self.push(handle, request);
    }

    /// Kills broken connections at the node, over a connection newer than all of them.
    pub(super) fn kill_zombies(&mut self, turn: &Turn, node: NodeId, handle: Handle, run_id: Option<&str>) {
        for (number, client_id) in self.zombies.take_due(node, handle, run_id) {
            self.push_own(
                turn,
                handle,
                &[b"CLIENT", b"KILL", b"ID", client_id.to_string().as_bytes()],
                Purpose::Confirm,
                number,
            );
        }
        self.zombies.publish_count(turn, node);
    }

    /// Closes connections to replaced processes. Connections to replicas lead to other servers.
    pub(in crate::worker) fn leave_other_processes(&mut self, turn: &Turn) {
        for handle in self.links.handles() {
            let Some(link) = self.get(handle).filter(|link| link.is_up() && link.lane != Lane::Replica) else {
                continue;
            };
            let node = link.node;
            if turn
                .shared()
                .with_facts(node, |facts| facts.run_id.is_some() && facts.run_id.as_deref() != link.run_id())
            {
                self.break_link(turn, handle, "another process serves the node now");
                // It may have received writes until now.
                turn.shared().reigns.begin(node);
            }
        }
    }

    pub(in crate::worker) fn on_own_reply(&mut self, turn: &Turn, pending: Pending, node: NodeId, answer: &[u8]) {
        match pending.purpose {
            Purpose::Confirm if reply::is_error(answer) && !answer.starts_with(b"-ERR No such") => {
                warn!(node = %turn.node_name(node), error = %reply::redacted_error(answer), "node refuses CLIENT KILL ID: commands of a broken connection stay unconfirmed there (allow the command to Switchyard's user)");
            }
            Purpose::Confirm => {
                if let Some(connection) = self.zombies.end(pending.seq) {
                    turn.shared().connections.remove(&connection);
                }
                self.zombies.publish_count(turn, node);
            }
            Purpose::Learn => learn(turn, node, answer),
            Purpose::Discarded if reply::is_error(answer) => {
                debug!(node = %turn.node_name(node), error = %reply::redacted_error(answer), "node refuses a command of the router");
            }
            _ => {}
        }
    }
}

/// Returns the replacement of an error that would redirect the client to another address: past the router, and with
/// its password.
#[cold]
pub(in crate::worker) fn rewrite_redirect(turn: &Turn, node: NodeId, error: &[u8]) -> Option<Vec<u8>> {
    let text = reply::text(error)?;
    if !text.starts_with(b"MOVED ") && !text.starts_with(b"ASK ") {
        return None;
    }
    let node = turn.node_name(node);
    let mut out = Vec::new();
    encode::error(
        &mut out,
        &format!("ERR {node} redirects to another server: it runs in cluster mode, which no node of Switchyard may"),
    );
    Some(out)
}

/// Sends a command with keys in a transaction and a database. Its reply is ignored.
pub(in crate::worker) fn push_own_queued(
    turn: &Turn,
    up: &mut Upstreams,
    hooks: &mut CommandHooks,
    handle: Handle,
    database: u32,
    args: &[&[u8]],
) {
    let Some(node) = up.get(handle).map(|link| link.node) else { return };
    let mut request = Vec::new();
    encode::command(&mut request, args.iter().copied());
    let request = hooks.pass_queued(
        turn,
        KeyedCommand { call: Call::Bytes(&request), node, database },
        &request,
        Pending::of_ours(turn),
    );
    up.push(handle, request);
}

/// Ends such a transaction on behalf of a client.
pub(in crate::worker) fn push_own_exec(
    turn: &Turn,
    up: &mut Upstreams,
    hooks: &mut CommandHooks,
    handle: Handle,
    who: Handle,
    database: u32,
    purpose: Purpose,
) {
    let pending = Pending { who, purpose, ..Pending::of_ours(turn) };
    let request = hooks.pass_exec(database, pending);
    up.push(handle, request);
}

/// Returns the connection of subscriptions to a node. Creates it if it is missing.
pub(in crate::worker) fn hopeful_link(turn: &Turn, up: &mut Upstreams, node: NodeId) -> Handle {
    let link = up.shared_link(turn, node, Lane::Pubsub, true);
    up.takes_commands_or_tries(turn, link);
    link
}
