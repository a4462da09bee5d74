//! Password checks, outside of the workers.
//!
//! Checking an Argon2id hash takes tens of milliseconds by design; in a worker it would stall all clients. A few helper
//! threads do it while the client waits. Results are cached under a keyed hash, because many applications connect for
//! every request, and each connection would cost that time again.
//!
//! The cache is read first, so strangers cannot lock out users with cached logins. Other attempts wait in a fair queue
//! ([`super::queue`]), which limits both guessing and the CPU time that a stranger can consume.

use std::collections::HashSet;
use std::net::IpAddr;
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError, Weak};
use std::time::Instant;

use argon2::{Argon2, PasswordHash, PasswordVerifier};
use blake2::Blake2bMac;
use blake2::digest::consts::U32;
use blake2::digest::{FixedOutput, KeyInit, Mac};

use super::queue::{Digest, Place, Queue, Turn};
use super::{Proof, User};
use crate::lock::lock;
use crate::shared::{Mailboxes, Message};
use crate::slab::Handle;

/// Number of concurrent checks. Each needs a core and the memory of the hash (19 MiB).
const THREADS: usize = 2;

/// Niceness of the helpers. Workers on the same core have priority; about a quarter is left to the helpers.
const NICENESS: i32 = 5;

/// Maximum cached results, for right and wrong passwords each. Above it the cache is cleared.
const REMEMBERED_MAX: usize = 10_000;

/// Maximum length of a password (the limit of Redis for arguments before a login). Bounds the time that a worker spends
/// on hashing.
pub(super) const PASSWORD_MAX: usize = 16 << 10;

/// Result of an attempt to log in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Attempt {
    /// The password is right.
    Right,
    /// Wrong password, unknown user, or disabled user.
    Wrong,
    /// The result follows as a message.
    Queued,
    /// Too many attempts are waiting.
    Busy,
}

/// Input of a check.
struct Job {
    user: Arc<User>,
    password: Vec<u8>,
}

impl Drop for Job {
    fn drop(&mut self) {
        self.password.fill(0);
    }
}

/// Worker and handle of a waiting client.
type WaitingClient = (usize, Handle);

/// State shared by workers and helpers.
struct Waiting {
    queue: Mutex<(Queue<Job, WaitingClient>, bool)>,
    changed: Condvar,
}

/// Logins of all workers.
pub(crate) struct Logins {
    waiting: Arc<Waiting>,
    /// Whether helpers could be started.
    started: OnceLock<bool>,
    /// Cached digests of right and of wrong passwords.
    known: Mutex<[HashSet<Digest>; 2]>,
    key: [u8; 64],
    mailboxes: Arc<Mailboxes>,
}

impl std::fmt::Debug for Logins {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Logins")
    }
}

impl Drop for Logins {
    fn drop(&mut self) {
        lock(&self.waiting.queue).1 = true;
        self.waiting.changed.notify_all();
    }
}

impl Logins {
    pub(crate) fn new(mailboxes: Arc<Mailboxes>) -> Self {
        let mut key = [0; 64];
        if rustls::crypto::aws_lc_rs::default_provider().secure_random.fill(&mut key).is_err() {
            tracing::error!(
                "the system has no random bytes: cached password digests are only protected by this process's memory"
            );
        }
        let waiting = Arc::new(Waiting { queue: Mutex::new((Queue::new(), false)), changed: Condvar::new() });
        Self { waiting, started: OnceLock::new(), known: Mutex::default(), key, mailboxes }
    }

    /// Tries to log in. The result of a helper is sent to the worker's mailbox.
    pub(crate) fn attempt(
        self: &Arc<Self>,
        user: Option<&Arc<User>>,
        password: &[u8],
        from: Option<IpAddr>,
        client: (usize, Handle),
    ) -> Attempt {
        let Some(user) = user.filter(|user| user.is_on()) else { return Attempt::Wrong };
        if user.is_open() {
            return Attempt::Right;
        }
        if password.len() > PASSWORD_MAX {
            return Attempt::Wrong;
        }
        if user.proofs.iter().any(|proof| matches!(proof, Proof::Clear(secret) if same(secret.0.as_bytes(), password)))
        {
            return Attempt::Right;
        }
        if !user.proofs.iter().any(|proof| matches!(proof, Proof::Hash(_))) {
            return Attempt::Wrong;
        }
        let digest = self.digest(user, password);
        for (known, attempt) in lock(&self.known).iter().zip([Attempt::Right, Attempt::Wrong]) {
            if known.contains(&digest) {
                return attempt;
            }
        }
        if !*self.started.get_or_init(|| self.start()) {
            return Attempt::Busy;
        }
        let work = || Job { user: user.clone(), password: password.to_vec() };
        let out =
            lock(&self.waiting.queue).0.enqueue(digest, Place::new(from, user.name()), client, work, Instant::now());
        self.waiting.changed.notify_one();
        self.notify(out, Attempt::Busy);
        Attempt::Queued
    }

    fn start(self: &Arc<Self>) -> bool {
        let mut started = false;
        for number in 0..THREADS {
            let (waiting, logins) = (self.waiting.clone(), Arc::downgrade(self));
            let thread =
                std::thread::Builder::new().name(format!("login-{number}")).spawn(move || help(&waiting, &logins));
            match thread {
                Ok(_) => started = true,
                Err(error) => {
                    tracing::error!(%error, "cannot start a thread that checks passwords: logins are slow, or fail")
                }
            }
        }
        started
    }

    /// Checks one password, in a helper thread.
    fn check_password(&self, digest: Digest, job: &Job) {
        let right = job.user.proofs.iter().any(|proof| match proof {
            Proof::Hash(hash) => PasswordHash::new(hash)
                .is_ok_and(|hash| Argon2::default().verify_password(&job.password, &hash).is_ok()),
            Proof::Clear(_) => false,
        });
        {
            let known = &mut lock(&self.known)[usize::from(!right)];
            if known.len() >= REMEMBERED_MAX {
                known.clear();
            }
            known.insert(digest);
        }
        // Later attempts find the cached result.
        let askers = lock(&self.waiting.queue).0.finish(&digest, right, Instant::now());
        self.notify(askers, if right { Attempt::Right } else { Attempt::Wrong });
    }

    fn notify(&self, askers: Vec<WaitingClient>, attempt: Attempt) {
        for (worker, client) in askers {
            self.mailboxes.send(worker, Message::Login { client, attempt });
        }
    }

    /// Keyed, so that the cache is useless without this process's memory. Includes the stored hashes, so a changed
    /// password has another digest.
    fn digest(&self, user: &User, password: &[u8]) -> Digest {
        let mut mac = <Blake2bMac<U32> as KeyInit>::new((&self.key).into());
        let mut add = |part: &[u8]| {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part);
        };
        add(user.name().as_bytes());
        for proof in &user.proofs {
            match proof {
                Proof::Hash(hash) => add(hash.as_bytes()),
                Proof::Clear(_) => add(b"clear"),
            }
        }
        add(password);
        mac.finalize_fixed().into()
    }
}

/// Helper thread: checks passwords until the router is dropped.
fn help(waiting: &Waiting, logins: &Weak<Logins>) {
    // If refused, the helper runs with the priority of workers.
    let _ = rustix::process::setpriority_process(None, NICENESS);
    loop {
        let (mut late, job) = {
            let mut line = lock(&waiting.queue);
            loop {
                if line.1 {
                    return;
                }
                let (turn, late) = line.0.next(Instant::now());
                match turn {
                    Turn::Check(digest, job) => break (late, Some((digest, job))),
                    _ if !late.is_empty() => break (late, None),
                    Turn::Never => line = waiting.changed.wait(line).unwrap_or_else(PoisonError::into_inner),
                    Turn::At(due) => {
                        let length = due.saturating_duration_since(Instant::now());
                        line = waiting.changed.wait_timeout(line, length).unwrap_or_else(PoisonError::into_inner).0;
                    }
                }
            }
        };
        let Some(logins) = logins.upgrade() else { return };
        logins.notify(std::mem::take(&mut late), Attempt::Busy);
        if let Some((digest, job)) = job {
            logins.check_password(digest, &job);
        }
    }
}

/// Compares in constant time. The length is not secret.
fn same(expected: &[u8], given: &[u8]) -> bool {
    let mut difference = expected.len() ^ given.len();
    for (index, byte) in given.iter().enumerate() {
        difference |= usize::from(byte ^ expected.get(index).copied().unwrap_or(0));
    }
    std::hint::black_box(difference) == 0
}

#[cfg(test)]
mod tests {
    use super::super::Users;
    use super::*;

    /// A worker computes the digest, and a logged-in client may send arguments of any length.
    #[test]
    fn overlong_passwords_are_rejected_without_hashing() {
        let users = Users::default().with_changed("app", &["on", ">secret"]).expect("taken");
        let logins = Arc::new(Logins::new(Arc::default()));
        let password = vec![b'x'; PASSWORD_MAX + 1];
        assert_eq!(logins.attempt(users.get(b"app"), &password, None, (0, Handle::NONE)), Attempt::Wrong);
        assert!(lock(&logins.known).iter().all(HashSet::is_empty) && logins.started.get().is_none());
    }
}
