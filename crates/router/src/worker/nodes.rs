//! Connecting to nodes, and commands of the router itself. Replies are in `replies`, broken and silent connections in
//! `breaking`.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use switchyard_policy::topology::NodeId;
use switchyard_resp::encode;
use tracing::warn;

use super::Worker;
use super::keyed::{Call, CommandSeq, KeyedCommand, Request};
use super::outage;
use super::transport::Tls;
use super::upstream::{Again, Lane, Link, Pending, Phase, Purpose};
use crate::poll::{Ready, Token};
use crate::slab::Handle;

const BACKOFF_FIRST_US: u64 = 50_000;

impl Worker {
    /// Connects to nodes without a connection in advance, so that the first command finds one.
    pub(super) fn connect_main(&mut self) {
        let routing = self.turn.routing().clone();
        self.links.know_nodes(routing.topology.node_id_bound());
        for node in routing.topology.nodes() {
            let _ = self.shared_link(node.id, Lane::Main, false);
        }
    }

    /// Closes connections to removed nodes. Such a node owns no slot: commands in flight there are parts of commands to
    /// all nodes, with no visible effect, so its zombies are dropped too.
    pub(super) fn drop_foreign_links(&mut self) {
        let gone: Vec<Handle> = self
            .links
            .iter()
            .filter(|(_, link)| self.turn.routing().topology.node(link.node).is_none())
            .map(|(handle, _)| handle)
            .collect();
        for handle in gone {
            self.break_link(handle, "the node was removed");
            // A connection that was not up would be retried indefinitely.
            self.drop_link(handle);
        }
        self.zombies.forget_foreign(&self.turn.routing().topology);
        self.turn.shared().connections.retain_nodes(|node| self.turn.routing().topology.node(node).is_some());
    }

    /// Returns the connection of a shared lane. Creates it, not necessarily connected, if it is missing.
    pub(super) fn shared_link(&mut self, node: NodeId, lane: Lane, resp3: bool) -> Handle {
        if let Some(handle) = self.links.shared(node, lane, resp3) {
            return handle;
        }
        let mut link = Link::new(
            node,
            lane,
            resp3,
            self.turn.routing().live.database,
            self.turn.counters().node(node),
            self.turn.now_us(),
        );
        // A second connection to a node known to be down is delayed like the first one. If the node is up, this
        // connection is new.
        link.failures = u32::from(!self.links.is_up(node) && self.turn.node_fails(node));
        let handle = self.links.insert_shared(link);
        self.connect(handle);
        handle
    }

    /// Whether commands may be sent on a connection, now or after an immediate attempt.
    pub(super) fn takes_commands_or_tries(&mut self, handle: Handle) -> bool {
        self.links.get(handle).is_some_and(Link::takes_commands) || self.is_worth_another_try(handle)
    }

    /// Whether commands may wait for a connection whose attempts have failed. Another connection, perhaps of another
    /// worker, may have reached the node since. Then the delay is skipped: an attempt starts now, and the commands wait
    /// for it.
    #[cold]
    pub(super) fn is_worth_another_try(&mut self, handle: Handle) -> bool {
        let Some(node) = self.links.get(handle).map(|link| link.node) else { return false };
        if self.turn.node_fails(node) {
            return false;
        }
        let Some(link) = self.links.get_mut(handle) else { return false };
        link.failures = 0;
        if matches!(link.phase, Phase::Waiting { .. }) {
            self.connect(handle);
        }
        self.links.get(handle).is_some_and(Link::takes_commands)
    }

    pub(super) fn connect(&mut self, handle: Handle) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let Some(access) = self.turn.routing().live.nodes.get(&link.node) else {
            self.attempt_failed(handle, "no address is configured for it");
            return;
        };
        let Some(address) = self.turn.routing().address_of(link.node, link.replica()) else {
            let why = access.unresolved.clone().unwrap_or_else(|| "no Sentinel has named its primary yet".to_owned());
            self.attempt_failed(handle, &why);
            return;
        };
        let tls = access.tls.as_ref().map(|tls| Tls::connect(tls.config.clone(), tls.name_at(address))).transpose();
        let tls = match tls {
            Ok(tls) => tls,
            Err(error) => {
                self.attempt_failed(handle, &format!("TLS: {error}"));
                return;
            }
        };
        link.address = Some(address);
        match start_connect(address) {
            Ok(fd) => {
                link.tls = tls;
                link.phase = Phase::Connecting;
                link.since_us = self.turn.now_us();
                link.readable = false;
                link.hangup = false;
                link.writable = false;
                let added = self.poll.add(&fd, Token::Link(handle));
                link.fd = Some(fd);
                if let Err(error) = added {
                    self.attempt_failed(handle, &error.to_string());
                }
            }
            Err(error) => self.attempt_failed(handle, &error.to_string()),
        }
    }

    /// Handles a failed attempt to connect.
    pub(super) fn attempt_failed(&mut self, handle: Handle, why: &str) {
        let Some(link) = self.links.get_mut(handle) else { return };
        link.failures += 1;
        let was_up = std::mem::take(&mut link.renewing);
        link.counters.failures.add(1);
        let (node, lane, failures) = (link.node, link.lane, link.failures);
        if was_up && lane == Lane::Main {
            outage::lost(self, node);
        }
        if lane == Lane::Replica {
            self.replica_failed(handle, why);
            return;
        }
        let name = self.turn.node_name(node);
        // A single refused connection at a serving node concerns the clients that wait for it, not the node.
        let serves = (lane.is_exclusive() || lane == Lane::Fills) && self.links.is_up(node);
        let news = !serves
            && self.turn.routing().topology.node(node).is_some()
            && self.turn.shared().with_facts(node, |facts| {
                facts.tried = true;
                facts.failure.replace(why.to_string()).as_deref() != Some(why)
            });
        if news {
            warn!(node = %name, reason = why, "node cannot be reached; trying again with increasing pauses");
        }
        self.fail_all(handle, &format!("NODEDOWN {name} cannot be reached: {why}"), 0);
        if lane.is_exclusive() {
            self.exclusive_failed(handle, why);
            return;
        }
        if lane == Lane::Pubsub {
            self.pubsub_link_failed(node);
        }
        let backoff_max = self.turn.routing().live.reconnect_backoff_max.as_micros() as u64;
        // While commands wait for the node, the first delay is repeated.
        let doublings = if outage::is_lost(self, node) { 1 } else { failures.min(10) };
        let mut backoff = (BACKOFF_FIRST_US << doublings).min(backoff_max);
        // Jitter: workers and routers that lost a node together must not reconnect together.
        backoff -= (self.turn.now_us() ^ u64::from(handle.index)) % (backoff / 4).max(1);
        if let Some(link) = self.links.get_mut(handle) {
            link.downgraded = false;
            if let Some(fd) = link.fd.take() {
                self.poll.remove(&fd);
            }
            link.tls = None;
            link.phase = Phase::Waiting { until_us: self.turn.now_us() + backoff };
        }
    }

    pub(super) fn on_link_ready(&mut self, handle: Handle, event: Ready) {
        let Ready { readable, writable, hangup, .. } = event;
        let Some(link) = self.links.get_mut(handle) else { return };
        link.hangup |= hangup;
        if link.phase == Phase::Connecting {
            if !writable && !readable {
                return;
            }
            let failed = link.fd.as_ref().map(rustix::net::sockopt::socket_error);
            match failed {
                Some(Ok(Ok(()))) => self.secure_link(handle),
                Some(Ok(Err(error)) | Err(error)) => self.attempt_failed(handle, &io::Error::from(error).to_string()),
                None => {}
            }
        }
        let Some(link) = self.links.get_mut(handle) else { return };
        if writable {
            link.writable = true;
            if link.phase == Phase::Securing {
                self.drive_handshake(handle);
            } else if link.unsent() > 0 {
                link.flowed_us = self.turn.now_us();
                self.links.mark(handle);
            }
        }
        if readable {
            self.read_link(handle);
        }
    }

    /// Sends a command of the router, without keys.
    pub(super) fn push_own(&mut self, handle: Handle, args: &[&[u8]], purpose: Purpose, seq: u32) {
        self.push_own_for(handle, Handle::NONE, args, purpose, seq);
    }

    /// Like `push_own`, on behalf of a client.
    pub(super) fn push_own_for(&mut self, handle: Handle, who: Handle, args: &[&[u8]], purpose: Purpose, seq: u32) {
        let Some(link) = self.links.get(handle) else { return };
        let pending = Pending { who, purpose, seq, ..self.own_pending() };
        let mut request = Vec::new();
        encode::command(&mut request, args.iter().copied());
        let request = Request::of_ours(&request, link.database, pending);
        self.links.push(handle, request);
    }

    /// Sends a command with keys in a transaction and a database. Its reply is ignored.
    pub(super) fn push_own_queued(&mut self, handle: Handle, database: u32, args: &[&[u8]]) {
        let Some(node) = self.links.get(handle).map(|link| link.node) else { return };
        let mut request = Vec::new();
        encode::command(&mut request, args.iter().copied());
        let request = self.pass_queued(
            KeyedCommand { call: Call::Bytes(&request), node, database },
            &request,
            self.own_pending(),
        );
        self.links.push(handle, request);
    }

    /// Ends such a transaction on behalf of a client.
    pub(super) fn push_own_exec(&mut self, handle: Handle, who: Handle, database: u32, purpose: Purpose) {
        let pending = Pending { who, purpose, ..self.own_pending() };
        let request = self.pass_exec(database, pending);
        self.links.push(handle, request);
    }

    pub(super) fn own_pending(&self) -> Pending {
        Pending {
            who: Handle::NONE,
            seq: 0,
            len: 0,
            sent_us: self.turn.now_us() as u32,
            epoch: self.turn.routing().topology.epoch() as u32,
            purpose: Purpose::Discarded,
            class: switchyard_resp::command::CommandClass::Admin as u8,
            again: Again::Never,
            is_long: false,
            end: CommandSeq::NONE,
            cacheable: self.observers.hot.generation() as u32,
        }
    }

    /// Kills broken connections at the node, over a connection newer than all of them.
    pub(super) fn kill_zombies(&mut self, node: NodeId, handle: Handle, run_id: Option<&str>) {
        for (number, client_id) in self.zombies.take_due(node, handle, run_id) {
            self.push_own(
                handle,
                &[b"CLIENT", b"KILL", b"ID", client_id.to_string().as_bytes()],
                Purpose::Confirm,
                number,
            );
        }
        self.count_zombies(node);
    }

    pub(super) fn count_zombies(&self, node: NodeId) {
        self.turn.counters().node(node).unconfirmed.set(self.zombies.count_at(node));
    }

    /// Continues after the TCP connect: with TLS, or with the handshake.
    pub(super) fn secure_link(&mut self, handle: Handle) {
        let Some(link) = self.links.get_mut(handle) else { return };
        if link.tls.is_none() {
            self.greet_node(handle);
            return;
        }
        link.phase = Phase::Securing;
        self.drive_handshake(handle);
    }

    /// Continues the TLS handshake, and then starts the handshake with the node.
    pub(super) fn drive_handshake(&mut self, handle: Handle) {
        let Some(link) = self.links.get_mut(handle) else { return };
        let (Some(fd), Some(tls)) = (&link.fd, &mut link.tls) else { return };
        if let Err(error) = tls.drive(fd) {
            self.attempt_failed(handle, &io::Error::from(error).to_string());
        } else if !tls.is_handshaking() {
            self.greet_node(handle);
        }
    }
}

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

/// Closes connections to replaced processes. Connections to replicas lead to other servers.
pub(super) fn leave_other_processes(worker: &mut Worker) {
    for handle in worker.links.handles() {
        let Some(link) = worker.links.get(handle).filter(|link| link.phase == Phase::Up && link.lane != Lane::Replica)
        else {
            continue;
        };
        let node = link.node;
        if worker.turn.shared().with_facts(node, |facts| facts.run_id.is_some() && facts.run_id != link.run_id) {
            worker.break_link(handle, "another process serves the node now");
            // It may have received writes until now.
            worker.turn.shared().reigns.begin(node);
        }
    }
}
