//! Input of clients: reading, finding commands, and stalls.
//!
//! A command is dispatched as soon as its bytes have arrived, and again from its start when its stall has ended, so no
//! intermediate state is kept.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;

use switchyard_resp::request::{Limits, ProtocolError, Scan, Scanner, inline_to_multibulk};
use tracing::debug;

use super::Worker;
use super::accept::handshake_failed;
use super::colocate::end_colocation;
use super::context::Context;
use super::downstreams::Downstreams;
use super::downstreams::client::{Repeat, Upload};
use super::downstreams::replies::ReplyMode;
use super::downstreams::socket::OUTPUT_HIGH;
use super::downstreams::waits::Stall;
use super::flow::Flow;
use super::large::run_repeat;
use super::outage::is_abandoned;
use super::reissued::leave_line;
use super::scripts::rehearsed::end_rehearsed;
use super::transport::Received;
use super::turn::Turn;
use super::upstreams::pending::Purpose;
use super::wait::go_on_waiting;
use crate::slab::Handle;

/// Maximum bytes of a request that must be collected (Redis `client-query-buffer-limit`).
const REQUEST_MAX: usize = 1 << 30;

impl Worker {
    /// Reads once. The rest is read in the next turn, so that one busy client does not delay others.
    pub(super) fn read_client(&mut self, handle: Handle, buffer: &mut [u8]) {
        let Some(client) = self.cx.down.get_mut(handle) else { return };
        client.input_mut().note_readable(true);
        if client.is_stalled() || client.input().is_closing() || client.input().has_ended() {
            if client.input().is_closing() {
                discard_input(&self.cx.turn, &mut self.cx.down, handle, buffer);
            } else if (client.stall() == Stall::Blocked || client.is_reissued()) && client.input().has_hung_up()
                || is_abandoned(client)
            {
                // As in Redis: a client that has disconnected does not wait, whatever it has sent after the command.
                self.cx.turn.counters().ended.add(1);
                self.cx.down.close_client(&self.cx.turn, handle);
            }
            return;
        }
        self.sender.batching.note(client);
        let handshaking = client.socket().is_handshaking();
        let read = client.socket_mut().receive(buffer, self.cx.turn.now_us());
        match read {
            Ok(Received { count: 0, .. }) => {
                // The client may still read: commands in flight are answered before the connection is closed.
                client.input_mut().end();
                self.cx.turn.counters().ended.add(1);
                self.cx.down.close_if_done(&self.cx.turn, handle);
            }
            Ok(Received { count, more }) => {
                self.cx.turn.counters().bytes_received.add(count as u64);
                if client.input_mut().note_read(more) {
                    self.cx.down.read_later(handle);
                }
                self.take_input(handle, &buffer[..count]);
            }
            Err(rustix::io::Errno::AGAIN) => client.input_mut().note_readable(false),
            Err(rustix::io::Errno::INTR) => self.cx.down.read_later(handle),
            Err(_) => {
                if handshaking {
                    let why = client.socket().tls_failure();
                    handshake_failed(
                        &self.cx.turn,
                        &mut self.cx.down,
                        handle,
                        why.as_deref().unwrap_or("it closed the connection"),
                    );
                }
                self.cx.turn.counters().broken.add(1);
                self.cx.down.close_client(&self.cx.turn, handle);
            }
        }
    }

    fn take_input(&mut self, handle: Handle, bytes: &[u8]) {
        let Some(client) = self.cx.down.get_mut(handle) else { return };
        if client.input().is_empty() {
            let taken = self.process(handle, bytes);
            if let Some(client) = self.cx.down.get_mut(handle)
                && taken < bytes.len()
            {
                client.input_mut().keep(&bytes[taken..]);
            }
        } else {
            client.input_mut().append(bytes);
            self.process_input(handle);
        }
    }

    /// Processes the client's buffered input.
    fn process_input(&mut self, handle: Handle) {
        let Some(client) = self.cx.down.get_mut(handle) else { return };
        let (input, at) = client.input_mut().take();
        let taken = at + self.process(handle, &input[at..]);
        if let Some(client) = self.cx.down.get_mut(handle) {
            client.input_mut().put_back(input, taken);
        }
    }

    /// Resumes a client after a stall. Unused resources that it was granted go to the next client.
    pub(super) fn resume_client(&mut self, handle: Handle) {
        end_rehearsed(&mut self.cx.down, handle);
        self.go_on(handle);
        end_colocation(&mut self.cx.down, handle);
        let held = self.cx.down.get(handle).and_then(|client| client.held());
        if let Some(held) = held.filter(|held| self.cx.up.get(*held).is_some_and(|link| link.is_unused_by(handle))) {
            self.cx.down.give_back(handle, held);
        }
    }

    fn go_on(&mut self, handle: Handle) {
        let Some(client) = self.cx.down.get_mut(handle) else { return };
        if client.is_reissued() && client.stall() != Stall::Exclusive {
            self.reissued_commands.issue_again(&mut self.cx, handle);
            return;
        }
        // First: since the end of the wait, further input may have caused another stall, which only the reply to the
        // repeat ends.
        if client.state::<Repeat>().is_some()
            && (client.stall() == Stall::Exclusive || !run_repeat(&mut self.cx, handle))
        {
            return;
        }
        go_on_waiting(&mut self.cx, handle);
        let Some(client) = self.cx.down.get_mut(handle) else { return };
        if client.is_stalled() {
            return;
        }
        if client.input().has_unparsed() {
            self.process_input(handle);
        }
        if let Some(client) = self.cx.down.get_mut(handle)
            && !client.is_stalled()
        {
            if client.input().is_readable() {
                self.cx.down.read_later(handle);
            }
            self.cx.down.close_if_done(&self.cx.turn, handle);
        }
    }

    /// Dispatches the commands at the start of `bytes` and returns their length.
    fn process(&mut self, handle: Handle, bytes: &[u8]) -> usize {
        let Some(client) = self.cx.down.get_mut(handle).filter(|client| !client.has_yet_to_send()) else { return 0 };
        let (kept, before) = (client.input_mut().take_scanner(), client.unsent());
        let routing = self.cx.turn.routing().clone();
        let mut scanner = std::mem::take(&mut self.cx.down.scanner);
        if let Some(kept) = kept {
            scanner = *kept;
        }
        let mut pos = 0;
        let mut failed = None;
        self.cx.hooks.hot.begin_run(self.cx.turn.now_us());
        while let Some(client) = self.cx.down.get_mut(handle) {
            if client.is_stalled() || client.input().is_closing() {
                break;
            }
            if client.state::<Upload>().is_some() {
                match self.upload(handle, &routing, &bytes[pos..]) {
                    Ok((taken, done)) => {
                        pos += taken;
                        if done {
                            continue;
                        }
                        break;
                    }
                    Err(error) => {
                        failed = Some(error);
                        break;
                    }
                }
            }
            if pos == bytes.len() {
                break;
            }
            if !client.replies().has_room(routing.live.client_pipeline_max) {
                self.cx.down.stall(&self.cx.turn, handle, Stall::Pipeline);
                break;
            }
            if client.unsent() > OUTPUT_HIGH {
                if !client.socket().writes_first() && !self.cx.down.flush_client(&self.cx.turn, handle) {
                    self.cx.down.stall(&self.cx.turn, handle, Stall::Output);
                    break;
                }
                // Few input bytes can be commands with large replies.
                self.check_memory_after_growth();
                // Commands answered here do not wait, and would take the turns of other clients.
                if self.cx.down.get_mut(handle).is_some_and(|client| client.unsent() > before + OUTPUT_HIGH) {
                    self.cx.down.resume_later(handle);
                    break;
                }
            }
            let Some(client) = self.cx.down.get_mut(handle) else { break };
            let limits = Limits {
                argument_max: routing.live.argument_max,
                large: if client.input().collects_large() { usize::MAX } else { routing.live.large_value },
                authenticated: client.identity().is_authenticated(),
            };
            let flow = match scanner.scan(&bytes[pos..], &limits) {
                Ok(Scan::Complete { len, canonical: true }) => {
                    let raw = &bytes[pos..pos + len];
                    (self.dispatch(&routing, handle, raw, &scanner.args(raw)), len)
                }
                Ok(Scan::Complete { len, .. } | Scan::Inline { len }) => {
                    match rewritten(&bytes[pos..pos + len], &scanner) {
                        Ok(None) => (Flow::Next, len),
                        Ok(Some((again, rescanned))) => {
                            (self.dispatch(&routing, handle, &again, &rescanned.args(&again)), len)
                        }
                        Err(error) => {
                            failed = Some(error);
                            break;
                        }
                    }
                }
                Ok(Scan::Empty { len }) => (Flow::Next, len),
                Ok(Scan::Incomplete) => break,
                Ok(Scan::Large { data, len, after }) => {
                    let header = &bytes[pos..pos + data];
                    match self.dispatch_large(&routing, handle, header, &scanner.args(header), len, after) {
                        Flow::Buffer => {
                            self.cx.down.get_mut(handle).into_iter().for_each(|c| c.input_mut().collect_large());
                            continue;
                        }
                        flow => (flow, data),
                    }
                }
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            };
            if self.gathers.has_requests() {
                self.gathers.send_gathers(&mut self.cx);
            }
            match flow {
                (Flow::Next, len) => {
                    pos += len;
                    scanner.reset();
                    self.cx.down.get_mut(handle).into_iter().for_each(|c| c.input_mut().command_taken());
                }
                (Flow::Stall(Stall::Barrier), _)
                    if self.cx.down.get(handle).is_some_and(|client| client.in_flight() == 0) =>
                {
                    // All are answered already, because a node cannot be reached.
                    scanner.reset();
                    self.cx.down.resume_later(handle);
                    break;
                }
                (Flow::Stall(why), _) => {
                    scanner.reset();
                    if why != Stall::Exclusive {
                        self.cx.down.stall(&self.cx.turn, handle, why);
                    } // otherwise it is in the queue for a connection, or was already woken from it
                    break;
                }
                (Flow::Later, _) => {
                    scanner.reset();
                    self.cx.down.resume_later(handle);
                    break;
                }
                (Flow::Close | Flow::Buffer, len) => {
                    pos += len;
                    scanner.reset();
                    break;
                }
            }
        }
        self.cx.hooks.hot.end_run();
        if let Some(error) = failed {
            scanner.reset();
            protocol_error(&mut self.cx, handle, error);
            pos = bytes.len();
        }
        if let Some(client) = self.cx.down.get_mut(handle) {
            if client.input().is_closing() {
                pos = bytes.len();
            } else if bytes.len() - pos > REQUEST_MAX {
                scanner.reset();
                protocol_error(&mut self.cx, handle, ProtocolError::TooLarge);
                pos = bytes.len();
            } else if scanner.is_mid_command() && bytes.len() - pos > 16 << 10 {
                // Worth keeping. A small command is scanned again from its start.
                client.input_mut().keep_scanner(std::mem::take(&mut scanner));
            }
        }
        scanner.reset();
        self.cx.down.scanner = scanner;
        pos
    }
}

/// Returns an inline or uncanonical command as nodes receive it, with its arguments. `None` if it is empty. `scanner` has
/// scanned `raw`.
fn rewritten(raw: &[u8], scanner: &Scanner) -> Result<Option<(Vec<u8>, Scanner)>, ProtocolError> {
    let mut again = Vec::with_capacity(raw.len());
    if scanner.is_mid_command() {
        switchyard_resp::encode::command(&mut again, scanner.args(raw).iter().collect::<Vec<_>>());
    } else {
        inline_to_multibulk(raw, &mut again)?;
    }
    Ok(Scanner::again(&again).map(|rescanned| (again, rescanned)))
}

/// Reads and discards input of a client that is being closed, so that its last error is not lost to a reset.
fn discard_input(turn: &Turn, down: &mut Downstreams, handle: Handle, buffer: &mut [u8]) {
    let Some(client) = down.get_mut(handle) else { return };
    if client.discard_input(buffer) {
        down.close_client(turn, handle);
    }
}

impl Downstreams {
    pub(super) fn stall(&mut self, turn: &Turn, handle: Handle, why: Stall) {
        self.begin_stall(handle, why, turn.now_us());
    }

    /// Ends a stall; the client resumes in this turn.
    pub(super) fn unstall(&mut self, turn: &Turn, handle: Handle) {
        if let Some(waiting) = self.end_stall(handle, turn.now_us()) {
            leave_line(turn, &waiting);
        }
    }
}

fn protocol_error(cx: &mut Context, handle: Handle, error: ProtocolError) {
    cx.turn.counters().protocol_errors.add(1);
    let Some(client) = cx.down.get_mut(handle) else { return };
    debug!(client = client.identity().id(), %error, "closing a client");
    client.replies_mut().set_mode(ReplyMode::On);
    let mut reply = Vec::new();
    switchyard_resp::encode::line(&mut reply, b'-', &error.reply_text());
    // The rest of an upload is not sent, and its reply is not awaited.
    let upload = client.take_state::<Upload>().and_then(|upload| upload.link);
    match upload.and_then(|link| cx.up.get_mut(link)?.last_mut()) {
        Some(pending) => {
            pending.purpose = Purpose::Discarded;
            cx.down.deliver(&cx.turn, handle, pending.seq, &reply);
        }
        None => cx.down.answer(&cx.turn, handle, 0, &reply),
    }
    cx.down.close_after_replies(handle);
}
