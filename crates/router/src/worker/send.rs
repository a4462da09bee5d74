//! Sends the output of a turn, in one system call if the kernel supports it.
//!
//! This only sends ahead: `flush_links` and `flush_clients` follow and handle the rest, if any. Output over TLS is
//! encrypted there, and sent one connection at a time. So a full or broken socket is handled in one place each, with
//! the batch and without.

use tracing::{info, warn};

use super::Worker;
use super::batching::Batching;
use crate::poll::Token;
use crate::sys::{SendBatch, UNKNOWN};

/// Reason for closing a connection.
const UNSURE: &str = "the kernel did not report how much it has sent";

/// Fewer sends than this are made one at a time: the ring would cost more than it saves.
const TOGETHER_MIN: usize = 4;

/// Sending by a worker.
#[derive(Debug)]
pub(super) struct Sender {
    pub(super) batching: Batching,
    /// Sends many at once, if the kernel supports it.
    batch: Option<SendBatch<Token>>,
    outcomes: Vec<(Token, Option<usize>)>,
}

impl Sender {
    /// Sends one at a time, until a batch is opened.
    pub(super) fn new() -> Self {
        Self { batching: Batching::new(Batching::PER_CLIENT_US), batch: None, outcomes: Vec::new() }
    }
}

impl Worker {
    pub(super) fn open_send_batch(&mut self) {
        if !self.cx.turn.shared().batched_sends {
            return;
        }
        match SendBatch::new(Token::Wake) {
            Ok(batch) => {
                self.sender.batch = Some(batch);
                self.cx.turn.set_sends_batched(true);
                self.sender.batching = Batching::new(Batching::PER_CLIENT_BATCHED_US);
            }
            Err(error) => info!(%error, "io_uring is unavailable: replies are sent one by one"),
        }
    }

    /// Sends to nodes and clients, nodes first, as far as their sockets accept it.
    pub(super) fn send_together(&mut self) {
        let Some(batch) = &mut self.sender.batch else { return };
        if self.cx.up.marked_count() + self.cx.down.marked_count() < TOGETHER_MIN {
            return;
        }
        let mut outcomes = std::mem::take(&mut self.sender.outcomes);
        let links = self.cx.up.marked().filter_map(|(handle, link)| {
            let (fd, bytes) = link.plain_output()?;
            Some((Token::Link(handle), fd, bytes))
        });
        let clients = self.cx.down.marked().filter_map(|(handle, client)| {
            let (fd, bytes) = client.socket().plain_output()?;
            Some((Token::Client(handle), fd, bytes))
        });
        // An error is found again, and handled, by the plain send that follows.
        let result = batch.send(links.chain(clients), |token, sent| match sent {
            Ok(_) | Err(UNKNOWN) => outcomes.push((token, sent.ok())),
            Err(_) => {}
        });
        if let Err(error) = result {
            warn!(worker = self.cx.turn.index(), %error, "the kernel refuses io_uring, which it accepted before: replies are sent one by one from now on");
            self.sender.batch = None;
            self.cx.turn.set_sends_batched(false);
            self.sender.batching = Batching::new(Batching::PER_CLIENT_US);
        }
        for (token, sent) in outcomes.drain(..) {
            let Some(sent) = sent else {
                // An unknown amount is not sent twice.
                match token {
                    Token::Link(handle) => {
                        self.cx.up.get_mut(handle).into_iter().for_each(|link| link.note_all_sent());
                        self.cx.up.break_link(&self.cx.turn, handle, UNSURE);
                    }
                    Token::Client(handle) => self.cx.down.close_client(&self.cx.turn, handle),
                    Token::Wake | Token::Tick | Token::Listener(_) => {}
                }
                continue;
            };
            match token {
                Token::Link(handle) => {
                    if let Some(link) = self.cx.up.get_mut(handle) {
                        link.note_sent(sent);
                    }
                }
                Token::Client(handle) => {
                    if let Some(client) = self.cx.down.get_mut(handle) {
                        client.note_sent(sent, self.cx.turn.now_us());
                        self.cx.turn.counters().bytes_sent.add(sent as u64);
                    }
                }
                Token::Wake | Token::Tick | Token::Listener(_) => {}
            }
        }
        self.sender.outcomes = outcomes;
    }
}
