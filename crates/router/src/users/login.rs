//! Checking passwords, away from the workers.
//!
//! An Argon2id hash takes tens of milliseconds to check, on purpose: in a worker's loop it would stall all of its clients. So a helper
//! thread does it, a few at a time, and the client waits. What succeeded once is remembered by a keyed hash, because applications that
//! connect for every request are common, and each of their connections would cost a core those milliseconds again.
//!
//! Attempts that fail are counted per address and user: after [`FAILURES_MAX`] within a minute further ones are refused unseen. That
//! bounds both guessing and the processor time that a stranger can make us spend.

use std::collections::{HashMap, HashSet};
use std::net::IpAddr;
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use argon2::{Argon2, PasswordHash, PasswordVerifier};
use blake2::Blake2bMac;
use blake2::digest::consts::U32;
use blake2::digest::{FixedOutput, Mac};

use super::{Proof, User};
use crate::shared::{Mailboxes, Message, lock};
use crate::slab::Handle;

/// Passwords that may wait to be checked: at 30 ms each, two threads work ten seconds on so many.
const WAITING_MAX: usize = 600;

/// Checks at once. Each takes a core and the memory that the hash says (19 MiB).
const THREADS: usize = 2;

/// Failures per address and user within [`FAILURE_WINDOW`].
const FAILURES_MAX: u32 = 20;
const FAILURE_WINDOW: Duration = Duration::from_secs(60);

/// Addresses and successes remembered. Beyond it the oldest, or all, are forgotten.
const REMEMBERED_MAX: usize = 10_000;

/// What became of an attempt, as far as it is known at once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Attempt {
    /// The password is right.
    Right,
    /// It is wrong, or there is no such user, or the user is off.
    Wrong,
    /// The answer comes as a message.
    Asked,
    /// Too many failures from there.
    TooMany,
    /// Too many others wait.
    Busy,
}

struct Job {
    user: Arc<User>,
    password: Vec<u8>,
    from: Option<IpAddr>,
    worker: usize,
    client: Handle,
}

#[derive(Debug)]
struct Failures {
    count: u32,
    since: Instant,
}

/// Logins of all workers.
pub(crate) struct Logins {
    jobs: OnceLock<Option<SyncSender<Job>>>,
    /// Of what was right: a keyed hash of user, stored hash and password.
    known: Mutex<HashSet<[u8; 32]>>,
    key: [u8; 32],
    failures: Mutex<HashMap<(Option<IpAddr>, String), Failures>>,
    mailboxes: Arc<Mailboxes>,
}

impl std::fmt::Debug for Logins {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Logins")
    }
}

impl Logins {
    pub(crate) fn new(mailboxes: Arc<Mailboxes>) -> Self {
        let mut key = [0; 32];
        // Without a secret key nothing is remembered; see `remember`.
        let filled = rustls::crypto::aws_lc_rs::default_provider().secure_random.fill(&mut key).is_ok();
        let jobs = OnceLock::new();
        if !filled {
            key = [0; 32];
        }
        Self { jobs, known: Mutex::default(), key, failures: Mutex::default(), mailboxes }
    }

    /// Tries to log in. The helper's answer goes to the worker's mailbox.
    pub(crate) fn attempt(
        self: &Arc<Self>,
        user: Option<&Arc<User>>,
        name: &[u8],
        password: &[u8],
        from: Option<IpAddr>,
        whom: (usize, Handle),
    ) -> Attempt {
        let Some(user) = user.filter(|user| user.is_on()) else {
            return if self.failed(from, name) { Attempt::Wrong } else { Attempt::TooMany };
        };
        if user.is_open() {
            return Attempt::Right;
        }
        // Before anything that could tell whether the password is right.
        if self.is_locked(from, name) {
            return Attempt::TooMany;
        }
        let digest = self.digest(user, password);
        if digest.is_some_and(|digest| lock(&self.known).contains(&digest)) {
            return Attempt::Right;
        }
        if user.proofs.iter().any(|proof| matches!(proof, Proof::Clear(secret) if same(secret.0.as_bytes(), password))) {
            return Attempt::Right;
        }
        if !user.proofs.iter().any(|proof| matches!(proof, Proof::Hash(_))) {
            return if self.failed(from, name) { Attempt::Wrong } else { Attempt::TooMany };
        }
        let Some(jobs) = self.jobs.get_or_init(|| self.start()) else { return Attempt::Busy };
        let job = Job { user: user.clone(), password: password.to_vec(), from, worker: whom.0, client: whom.1 };
        match jobs.try_send(job) {
            Ok(()) => Attempt::Asked,
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => Attempt::Busy,
        }
    }

    fn start(self: &Arc<Self>) -> Option<SyncSender<Job>> {
        let (jobs, work) = sync_channel(WAITING_MAX);
        let work = Arc::new(Mutex::new(work));
        for number in 0..THREADS {
            let (work, logins) = (Arc::clone(&work), Arc::downgrade(self));
            let started = std::thread::Builder::new().name(format!("login-{number}")).spawn(move || {
                while let Some(job) = next(&work) {
                    let Some(logins) = logins.upgrade() else { return };
                    logins.settle(job);
                }
            });
            if let (Err(error), 0) = (&started, number) {
                tracing::error!(%error, "no thread for checking passwords can be started: nobody can log in");
                return None;
            }
        }
        Some(jobs)
    }

    /// Checks one password, in a helper thread.
    fn settle(&self, mut job: Job) {
        let right = job.user.proofs.iter().any(|proof| match proof {
            Proof::Hash(hash) => PasswordHash::new(hash).is_ok_and(|hash| Argon2::default().verify_password(&job.password, &hash).is_ok()),
            Proof::Clear(_) => false,
        });
        if right {
            if let Some(digest) = self.digest(&job.user, &job.password) {
                let mut known = lock(&self.known);
                if known.len() >= REMEMBERED_MAX {
                    known.clear();
                }
                known.insert(digest);
            }
        } else {
            self.failed(job.from, job.user.name().as_bytes());
        }
        job.password.fill(0);
        self.mailboxes.send(job.worker, Message::Login { client: job.client, right });
    }

    /// Keyed, so that what is remembered is of no use without this process's memory. The stored hashes are in it: a changed password
    /// makes another digest.
    fn digest(&self, user: &User, password: &[u8]) -> Option<[u8; 32]> {
        if self.key == [0; 32] {
            return None;
        }
        let mut mac = Blake2bMac::<U32>::new_from_slice(&self.key).ok()?;
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
        Some(mac.finalize_fixed().into())
    }

    fn is_locked(&self, from: Option<IpAddr>, name: &[u8]) -> bool {
        let failures = lock(&self.failures);
        let key = (from, String::from_utf8_lossy(name).into_owned());
        failures.get(&key).is_some_and(|f| f.count >= FAILURES_MAX && f.since.elapsed() < FAILURE_WINDOW)
    }

    /// Counts a failure; false where there were too many before.
    fn failed(&self, from: Option<IpAddr>, name: &[u8]) -> bool {
        let mut failures = lock(&self.failures);
        if failures.len() >= REMEMBERED_MAX {
            failures.retain(|_, f| f.since.elapsed() < FAILURE_WINDOW);
            if failures.len() >= REMEMBERED_MAX {
                failures.clear();
            }
        }
        let name = String::from_utf8_lossy(&name[..name.len().min(256)]).into_owned();
        let entry = failures.entry((from, name)).or_insert_with(|| Failures { count: 0, since: Instant::now() });
        if entry.since.elapsed() >= FAILURE_WINDOW {
            *entry = Failures { count: 0, since: Instant::now() };
        }
        entry.count = entry.count.saturating_add(1);
        entry.count <= FAILURES_MAX
    }
}

fn next(work: &Mutex<Receiver<Job>>) -> Option<Job> {
    lock(work).recv().ok()
}

/// Compares in the same time wherever the difference is. The length is no secret.
fn same(expected: &[u8], given: &[u8]) -> bool {
    let mut difference = expected.len() ^ given.len();
    for (index, byte) in given.iter().enumerate() {
        difference |= usize::from(byte ^ expected.get(index).copied().unwrap_or(0));
    }
    std::hint::black_box(difference) == 0
}
