//! Identity of a client: its addresses and names, its user, and its rights and limits.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::limits::ClientQuota;
use crate::settings::{ListenerSettings, Reads};
use crate::users::User;
use crate::worker::quotas::try_again;

/// Bits of [`Identity::guard`]: reasons to check a command before its execution. 0 for unrestricted clients.
mod guard {
    /// Not logged in.
    pub(super) const STRANGER: u8 = 1;
    /// The user has restricted permissions.
    pub(super) const RESTRICTED: u8 = 1 << 1;
    /// Commands count against a limit.
    pub(super) const COUNTED: u8 = 1 << 2;
}

/// Parts that are not used on the fast path.
#[derive(Debug)]
pub(in crate::worker) struct Details {
    id: u64,
    peer: Option<SocketAddr>,
    local: Option<SocketAddr>,
    /// Path of the Unix socket of its listener.
    unix: Option<PathBuf>,
    name: String,
    lib_name: String,
    lib_ver: String,
    created_us: u64,
    /// Start of the time limit for the login, if one is required.
    stranger_since_us: u64,
    no_evict: bool,
}

impl Details {
    pub(in crate::worker) fn new(
        id: u64,
        peer: Option<SocketAddr>,
        local: Option<SocketAddr>,
        unix: Option<PathBuf>,
        now_us: u64,
    ) -> Self {
        Self {
            id,
            peer,
            local,
            unix,
            name: String::new(),
            lib_name: String::new(),
            lib_ver: String::new(),
            created_us: now_us,
            stranger_since_us: now_us,
            no_evict: false,
        }
    }
}

#[derive(Debug)]
pub(in crate::worker) struct Identity {
    is_authenticated: bool,
    /// Current user. The default user before a login.
    user: Arc<User>,
    /// Reasons to check its commands, as bits of `guard`. 0: none.
    guard: u8,
    /// Read policy.
    reads: Reads,
    listener: Arc<ListenerSettings>,
    /// Usage of limits of its listener and its user, if they have limits.
    listener_share: Option<Box<ClientQuota>>,
    user_share: Option<Box<ClientQuota>>,
    /// Bytes of commands charged since the client last had no pending reply.
    charged: usize,
    details: Box<Details>,
}

impl Identity {
    /// Returns the identity of a client that is not logged in. `share`: its usage of limits of the listener.
    pub(in crate::worker) fn new(
        user: Arc<User>,
        listener: Arc<ListenerSettings>,
        share: Option<Box<ClientQuota>>,
        details: Details,
    ) -> Self {
        Self {
            is_authenticated: false,
            user,
            guard: guard::STRANGER,
            reads: Reads::Primary,
            listener,
            listener_share: share,
            user_share: None,
            charged: 0,
            details: Box::new(details),
        }
    }

    pub(in crate::worker) fn id(&self) -> u64 {
        self.details.id
    }

    /// Address of the client. `None`: it uses a Unix socket.
    pub(in crate::worker) fn peer(&self) -> Option<SocketAddr> {
        self.details.peer
    }

    /// Address of the listener. `None`: a Unix socket.
    pub(in crate::worker) fn local(&self) -> Option<SocketAddr> {
        self.details.local
    }

    /// Path of the Unix socket of its listener.
    pub(in crate::worker) fn unix(&self) -> Option<&Path> {
        self.details.unix.as_deref()
    }

    /// Address of the client, for logs.
    pub(in crate::worker) fn origin(&self) -> String {
        self.details.peer.map_or_else(|| "a Unix socket".to_owned(), |peer| peer.to_string())
    }

    pub(in crate::worker) fn name(&self) -> &str {
        &self.details.name
    }

    pub(in crate::worker) fn rename(&mut self, name: String) {
        self.details.name = name;
    }

    /// Name and version of the client's library.
    pub(in crate::worker) fn library(&mut self) -> (&mut String, &mut String) {
        (&mut self.details.lib_name, &mut self.details.lib_ver)
    }

    /// Name and version of the client's library, for CLIENT LIST.
    pub(super) fn shown_library(&self) -> (&str, &str) {
        (&self.details.lib_name, &self.details.lib_ver)
    }

    /// Time since the connection was accepted, us.
    pub(in crate::worker) fn age_us(&self, now_us: u64) -> u64 {
        now_us.saturating_sub(self.details.created_us)
    }

    /// Whether the client is exempt from disconnection for memory (CLIENT NO-EVICT).
    pub(in crate::worker) fn is_kept(&self) -> bool {
        self.details.no_evict
    }

    pub(in crate::worker) fn keep(&mut self, is_kept: bool) {
        self.details.no_evict = is_kept;
    }

    // ---- rights ----

    #[inline]
    pub(in crate::worker) fn user(&self) -> &Arc<User> {
        &self.user
    }

    #[inline]
    pub(in crate::worker) fn reads(&self) -> Reads {
        self.reads
    }

    #[inline]
    pub(in crate::worker) fn is_authenticated(&self) -> bool {
        self.is_authenticated
    }

    /// Time for which the client could have logged in but has not, us.
    pub(in crate::worker) fn stranger_us(&self, now_us: u64) -> Option<u64> {
        (!self.is_authenticated).then(|| now_us.saturating_sub(self.details.stranger_since_us))
    }

    /// Whether its commands are checked at all.
    #[inline]
    pub(in crate::worker) fn is_guarded(&self) -> bool {
        self.guard != 0
    }

    pub(in crate::worker) fn is_stranger(&self) -> bool {
        self.guard & guard::STRANGER != 0
    }

    pub(in crate::worker) fn is_restricted(&self) -> bool {
        self.guard & guard::RESTRICTED != 0
    }

    #[inline]
    pub(in crate::worker) fn is_counted(&self) -> bool {
        self.guard & guard::COUNTED != 0
    }

    /// Whether the client needs a new share of the limits of this user, to become it.
    pub(in crate::worker) fn needs_share(&self, user: &User) -> bool {
        self.user_share.is_none() || self.user.name() != user.name()
    }

    /// Replaces the usage of limits of its user.
    pub(in crate::worker) fn set_share(&mut self, share: Option<Box<ClientQuota>>) {
        self.user_share = share;
    }

    /// Sets the user. `counts_keys`: keys have limits; `reads`: the default policy.
    pub(in crate::worker) fn become_user(
        &mut self,
        user: Arc<User>,
        is_authenticated: bool,
        counts_keys: bool,
        reads: Reads,
        now_us: u64,
    ) {
        if self.is_authenticated && !is_authenticated {
            self.details.stranger_since_us = now_us;
        }
        self.is_authenticated = is_authenticated;
        self.guard = 0;
        if !is_authenticated {
            self.guard |= guard::STRANGER;
        } else if !user.is_unrestricted() {
            self.guard |= guard::RESTRICTED;
        }
        if counts_keys || user.bounds().per_command() || self.listener.bounds.per_command() {
            self.guard |= guard::COUNTED;
        }
        self.reads = user.reads().or(self.listener.reads).unwrap_or(reads);
        self.user = user;
    }

    // ---- limits ----

    /// Bytes held for the client: charged commands until all are answered, and unread replies.
    fn held_bytes(&self, request: usize, is_idle: bool, output: usize) -> u64 {
        ((if is_idle { 0 } else { self.charged }) + request + output) as u64
    }

    /// Updates the bytes held by the client, without replies that were read. `is_idle`: no reply is pending.
    pub(in crate::worker) fn recount(&mut self, is_idle: bool, output: usize) {
        let held = self.held_bytes(0, is_idle, output);
        for share in [&mut self.user_share, &mut self.listener_share].into_iter().flatten() {
            if share.held() > held {
                share.hold(held, None);
            }
        }
    }

    /// Counts a command of `request` bytes against the limits of the user and the listener. The error is the text for
    /// the client.
    pub(in crate::worker) fn count(
        &mut self,
        request: usize,
        is_idle: bool,
        output: usize,
        now_us: u64,
    ) -> Result<(), String> {
        let held = self.held_bytes(request, is_idle, output);
        let user = &self.user;
        let mut shares = [
            (&mut self.user_share, user.bounds(), format_args!("user {}", user.name())),
            (&mut self.listener_share, &self.listener.bounds, format_args!("this listener")),
        ];
        for (share, bounds, whose) in &shares {
            if let (Some(share), Some(per_second)) = (share, bounds.requests_per_second) {
                share.part.take(per_second, now_us).map_err(|ns| {
                    let wait = try_again(ns);
                    format!("LIMITED {whose} is at its limit of {per_second} requests per second; {wait}")
                })?;
            }
        }
        self.charged = if is_idle { request } else { self.charged + request };
        for (share, bounds, whose) in &mut shares {
            if let (Some(share), Some(max)) = (share, bounds.bytes_in_flight)
                && !share.hold(held, Some(max))
            {
                self.charged -= request.min(self.charged);
                return Err(format!(
                    "LIMITED {whose} is at its limit of {max} bytes in flight; read replies before sending more"
                ));
            }
        }
        Ok(())
    }
}
