//! Checking passwords, away from the workers.
//!
//! An Argon2id hash takes tens of milliseconds to check, on purpose: in a worker's loop it would stall all of its
//! clients. So a helper thread does it, a few at a time, and the client waits. What was found right or wrong once is
//! remembered by a keyed hash, because applications that connect for every request are common, and each of their
//! connections would cost a core those milliseconds again.
//!
//! What is known is looked up first, so nothing that a stranger does keeps out who is known. What is not known waits in
//! a line that is fair ([`super::queue`]), which bounds both guessing and the processor time that a stranger can make
//! us spend.

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
use crate::shared::{Mailboxes, Message, lock};
use crate::slab::Handle;

/// Checks at once. Each takes a core and the memory that the hash says (19 MiB).
const THREADS: usize = 2;

/// The helpers give way to workers where they share a core: about a quarter of it is left to them.
const NICENESS: i32 = 5;

/// Passwords found right, and as many found wrong. Beyond it all are forgotten.
const REMEMBERED_MAX: usize = 10_000;

/// Nothing longer is a password (Redis takes no longer argument before a login). A worker hashes what it is given, so
/// it has a bound.
pub(super) const PASSWORD_MAX: usize = 16 << 10;

/// What became of an attempt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Attempt {
    /// The password is right.
    Right,
    /// It is wrong, or there is no such user, or the user is off.
    Wrong,
    /// The answer comes as a message.
    Queued,
    /// Too many others wait.
    Busy,
}

/// What a check needs.
struct Job {
    user: Arc<User>,
    password: Vec<u8>,
}

impl Drop for Job {
    fn drop(&mut self) {
        self.password.fill(0);
    }
}

/// A client that waits, and its worker.
type Asker = (usize, Handle);

/// What the workers and the helpers share.
struct Waiting {
    queue: Mutex<(Queue<Job, Asker>, bool)>,
    changed: Condvar,
}

/// Logins of all workers.
pub(crate) struct Logins {
    waiting: Arc<Waiting>,
    /// Whether there are threads.
    started: OnceLock<bool>,
    /// Digests of what was found right, and of what was found wrong.
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
                "the system has no random bytes: what is remembered of passwords is protected by nothing but this process's memory"
            );
        }
        let waiting = Arc::new(Waiting { queue: Mutex::new((Queue::new(), false)), changed: Condvar::new() });
        Self { waiting, started: OnceLock::new(), known: Mutex::default(), key, mailboxes }
    }

    /// Tries to log in. The helper's answer goes to the worker's mailbox.
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
                    tracing::error!(%error, "a thread for checking passwords cannot be started: logins are slow, or fail")
                }
            }
        }
        started
    }

    /// Checks one password, in a helper thread.
    fn settle(&self, digest: Digest, job: &Job) {
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
        // Whoever asks from here on finds it known.
        let askers = lock(&self.waiting.queue).0.finish(&digest, right, Instant::now());
        self.notify(askers, if right { Attempt::Right } else { Attempt::Wrong });
    }

    fn notify(&self, askers: Vec<Asker>, attempt: Attempt) {
        for (worker, client) in askers {
            self.mailboxes.send(worker, Message::Login { client, attempt });
        }
    }

    /// Keyed, so that what is remembered is of no use without this process's memory. The stored hashes are in it: a
    /// changed password makes another digest.
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

/// A helper thread: checks what comes, until the router is gone.
fn help(waiting: &Waiting, logins: &Weak<Logins>) {
    // Where it is refused, the helper is as important as the workers.
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
            logins.settle(digest, &job);
        }
    }
}

/// Compares in the same time wherever the difference is. The length is no secret.
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

    /// A worker computes the digest, and a client that is somebody already may send arguments of any length.
    #[test]
    fn what_is_too_long_for_a_password_is_wrong_and_nobody_hashes_it() {
        let users = Users::default().with_changed("app", &["on", ">secret"]).expect("taken");
        let logins = Arc::new(Logins::new(Arc::default()));
        let password = vec![b'x'; PASSWORD_MAX + 1];
        assert_eq!(logins.attempt(users.get(b"app"), &password, None, (0, Handle::NONE)), Attempt::Wrong);
        assert!(lock(&logins.known).iter().all(HashSet::is_empty) && logins.started.get().is_none());
    }
}
