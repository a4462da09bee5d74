//! Queue of passwords to check.
//!
//! A check is expensive, so: Equal attempts of one user are checked once, for all waiting clients. Checks alternate
//! between addresses, then between users: a flood from one address takes no turn of another. Within a queue, the newest
//! and the oldest alternate: among few guesses every client is served in time, and among many a new client has a
//! chance. A queue with too many failures is served rarely. All sizes are bounded; clients of dropped entries are
//! notified.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::time::{Duration, Instant};

/// Maximum waiting passwords: at 30 ms each, two threads need ten seconds.
const WAITING_MAX: usize = 600;

/// Maximum waiting passwords of one user from one address.
const LINE_MAX: usize = 64;

/// Maximum wait of an entry.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Minimum time between two checks of a queue with too many failures.
const SLOW_TURN: Duration = Duration::from_millis(500);

/// Failures of one user from one address within [`FAILURE_WINDOW`] that make its queue slow.
const FAILURES_MAX: u32 = 20;
const FAILURE_WINDOW: Duration = Duration::from_secs(60);

/// Maximum number of queues with recorded failures. Above it all are discarded.
const FAILURES_REMEMBERED: usize = 10_000;

/// Digest of user, stored hashes and password. Equal digests need one check.
pub(super) type Digest = [u8; 32];

/// Origin of a login: user and address. IPv6 addresses of a /64 network, which one host can own, count as one.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Place {
    pub(super) from: Option<IpAddr>,
    pub(super) user: String,
}

impl Place {
    pub(super) fn new(from: Option<IpAddr>, user: &str) -> Self {
        let from = from.map(|from| match from.to_canonical() {
            IpAddr::V6(address) => IpAddr::V6((u128::from(address) >> 64 << 64).into()),
            address => address,
        });
        Self { from, user: user.to_owned() }
    }
}

/// State of a digest: the work, until it starts, and the waiting clients.
#[derive(Debug)]
struct Waiting<W, A> {
    work: Option<W>,
    clients: Vec<(Place, A)>,
    since: Instant,
}

/// Next action of a helper.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Turn<W> {
    /// Check this, then call [`Queue::finish`].
    Check(Digest, W),
    /// Nothing to do before this instant.
    At(Instant),
    /// Nothing to do.
    Never,
}

#[derive(Debug)]
struct Failures {
    count: u32,
    since: Instant,
}

/// Queue of one user from one address.
#[derive(Debug)]
struct UserAttempts {
    user: String,
    /// Waiting digests, newest last.
    digests: VecDeque<Digest>,
    /// End to serve next.
    next: End,
}

#[derive(Clone, Copy, Debug)]
enum End {
    Newest,
    Oldest,
}

impl UserAttempts {
    fn take_next(&mut self) -> Option<Digest> {
        let (next, digest) = match self.next {
            End::Newest => (End::Oldest, self.digests.pop_back()),
            End::Oldest => (End::Newest, self.digests.pop_front()),
        };
        self.next = next;
        digest
    }
}

/// `W`: data for a check. `A`: a waiting client.
#[derive(Debug)]
pub(super) struct Queue<W, A> {
    waiting: HashMap<Digest, Waiting<W, A>>,
    /// Queues by address, then user. The first is next.
    turns: VecDeque<(Option<IpAddr>, VecDeque<UserAttempts>)>,
    failures: HashMap<Place, Failures>,
    /// Time of the last check of each slow queue.
    served: HashMap<Place, Instant>,
}

impl<W, A> Queue<W, A> {
    pub(super) fn new() -> Self {
        Self { waiting: HashMap::new(), turns: VecDeque::new(), failures: HashMap::new(), served: HashMap::new() }
    }

    /// Adds a waiting client for a digest. Returns clients that are dropped for it, possibly this one.
    pub(super) fn enqueue(
        &mut self,
        digest: Digest,
        place: Place,
        asker: A,
        work: impl FnOnce() -> W,
        now: Instant,
    ) -> Vec<A> {
        let mut out = Vec::new();
        let begun = match self.waiting.get_mut(&digest) {
            Some(waiting) => {
                waiting.clients.push((place.clone(), asker));
                waiting.work.is_none()
            }
            None => {
                if self.waiting.len() >= WAITING_MAX {
                    match self.longest() {
                        Some(place) => out.append(&mut self.drop_oldest(&place)),
                        None => return vec![asker],
                    }
                }
                self.waiting
                    .insert(digest, Waiting { work: Some(work()), clients: vec![(place.clone(), asker)], since: now });
                false
            }
        };
        if !begun {
            let digests = self.queue_of(&place);
            if !digests.contains(&digest) {
                digests.push_back(digest);
                if digests.len() > LINE_MAX {
                    out.append(&mut self.drop_oldest(&place));
                }
            }
        }
        out
    }

    /// Returns the next check, and clients that have waited too long.
    pub(super) fn next(&mut self, now: Instant) -> (Turn<W>, Vec<A>) {
        let late: Vec<Digest> = self
            .waiting
            .iter()
            .filter(|(_, w)| w.work.is_some() && now >= w.since + TIMEOUT)
            .map(|(d, _)| *d)
            .collect();
        let late = late
            .iter()
            .filter_map(|digest| self.waiting.remove(digest))
            .flat_map(|w| w.clients)
            .map(|(_, asker)| asker)
            .collect();
        let mut soonest: Option<Instant> =
            self.waiting.values().filter(|w| w.work.is_some()).map(|w| w.since + TIMEOUT).min();
        // Visits each queue at most once. A served queue moves behind the other users of its address, and the address
        // behind other addresses.
        for _ in 0..self.turns.len() {
            let Some((from, mut users)) = self.turns.pop_front() else { break };
            let mut found = None;
            for _ in 0..users.len() {
                let Some(mut queue) = users.pop_front() else { break };
                // Already checked for another queue, or dropped.
                queue.digests.retain(|digest| self.waiting.get(digest).is_some_and(|w| w.work.is_some()));
                if queue.digests.is_empty() {
                    continue;
                }
                let place = Place { from, user: queue.user.clone() };
                let due = self
                    .served
                    .get(&place)
                    .map(|at| *at + SLOW_TURN)
                    .filter(|due| *due > now && self.is_slow(&place, now));
                if let Some(due) = due {
                    soonest = Some(soonest.map_or(due, |soonest| soonest.min(due)));
                } else if let Some(digest) = queue.take_next() {
                    let work = self.waiting.get_mut(&digest).and_then(|waiting| waiting.work.take());
                    found = work.map(|work| (place, digest, work));
                }
                users.push_back(queue);
                if found.is_some() {
                    break;
                }
            }
            if !users.is_empty() {
                self.turns.push_back((from, users));
            }
            if let Some((place, digest, work)) = found {
                self.served.retain(|_, at| *at + SLOW_TURN > now);
                if self.is_slow(&place, now) {
                    self.served.insert(place, now);
                }
                return (Turn::Check(digest, work), late);
            }
        }
        (soonest.map_or(Turn::Never, Turn::At), late)
    }

    /// Ends a check and returns its waiting clients. Counts failures.
    pub(super) fn finish(&mut self, digest: &Digest, right: bool, now: Instant) -> Vec<A> {
        let Some(done) = self.waiting.remove(digest) else { return Vec::new() };
        if !right {
            let mut places: Vec<&Place> = done.clients.iter().map(|(place, _)| place).collect();
            places.dedup();
            places.into_iter().for_each(|place| self.count_failure(place, now));
        }
        done.clients.into_iter().map(|(_, asker)| asker).collect()
    }

    /// Counts a wrong password.
    fn count_failure(&mut self, place: &Place, now: Instant) {
        if self.failures.len() >= FAILURES_REMEMBERED {
            self.failures.retain(|_, f| now < f.since + FAILURE_WINDOW);
            if self.failures.len() >= FAILURES_REMEMBERED {
                self.failures.clear();
            }
        }
        let failures = self.failures.entry(place.clone()).or_insert(Failures { count: 0, since: now });
        if now >= failures.since + FAILURE_WINDOW {
            *failures = Failures { count: 0, since: now };
        }
        failures.count = failures.count.saturating_add(1);
    }

    fn is_slow(&self, place: &Place, now: Instant) -> bool {
        self.failures.get(place).is_some_and(|f| f.count >= FAILURES_MAX && now < f.since + FAILURE_WINDOW)
    }

    fn queue_of(&mut self, place: &Place) -> &mut VecDeque<Digest> {
        let at = self.turns.iter().position(|(from, _)| *from == place.from).unwrap_or_else(|| {
            self.turns.push_back((place.from, VecDeque::new()));
            self.turns.len() - 1
        });
        let users = &mut self.turns[at].1;
        let of = users.iter().position(|queue| queue.user == place.user).unwrap_or_else(|| {
            users.push_back(UserAttempts { user: place.user.clone(), digests: VecDeque::new(), next: End::Newest });
            users.len() - 1
        });
        &mut users[of].digests
    }

    /// Returns the longest queue, if it has more than one entry.
    fn longest(&self) -> Option<Place> {
        let lines = self.turns.iter().flat_map(|(from, users)| users.iter().map(move |queue| (from, queue)));
        let (from, queue) =
            lines.max_by_key(|(_, queue)| queue.digests.len()).filter(|(_, queue)| queue.digests.len() > 1)?;
        Some(Place { from: *from, user: queue.user.clone() })
    }

    /// Drops the oldest entry of a queue. Returns its waiting clients.
    fn drop_oldest(&mut self, place: &Place) -> Vec<A> {
        let Some(digest) = self.queue_of(place).pop_front() else { return Vec::new() };
        match self.waiting.get(&digest) {
            // In other queues as well, or already being checked.
            Some(waiting) if waiting.work.is_none() || waiting.clients.iter().any(|(other, _)| other != place) => {
                Vec::new()
            }
            _ => self
                .waiting
                .remove(&digest)
                .map(|w| w.clients.into_iter().map(|(_, asker)| asker).collect())
                .unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(last: u8) -> Option<IpAddr> {
        Some(IpAddr::from([10, 0, 0, last]))
    }

    fn digest(number: u64) -> Digest {
        let mut digest = [0; 32];
        digest[..8].copy_from_slice(&number.to_le_bytes());
        digest
    }

    /// Takes the next check and ends it.
    fn check(queue: &mut Queue<u64, u32>, right: bool, now: Instant) -> Option<(u64, Vec<u32>)> {
        match queue.next(now).0 {
            Turn::Check(digest, work) => Some((work, queue.finish(&digest, right, now))),
            _ => None,
        }
    }

    /// Each guesser sends its next guess as soon as one has failed, so guesses are always newer than the waiting
    /// client.
    #[test]
    fn few_guessers_do_not_starve_a_waiting_client() {
        let now = Instant::now();
        let mut queue = Queue::new();
        let place = Place::new(at(1), "app");
        let guess = |queue: &mut Queue<u64, u32>, number: u64| {
            assert!(queue.enqueue(digest(number), place.clone(), 0, || number, now).is_empty());
        };
        guess(&mut queue, 1000);
        (0..4).for_each(|number| guess(&mut queue, number));
        let turns = (4..20).take_while(|number| {
            let (checked, _) = check(&mut queue, false, now).expect("some wait");
            guess(&mut queue, *number);
            checked != 1000
        });
        assert!(turns.count() < 10);
    }

    #[test]
    fn a_password_is_checked_once_for_all_waiting_clients() {
        let now = Instant::now();
        let mut queue = Queue::new();
        for client in 0..1000 {
            assert_eq!(
                queue.enqueue(digest(7), Place::new(at((client % 50) as u8), "app"), client, || 7, now),
                Vec::<u32>::new()
            );
        }
        let Turn::Check(found, 7) = queue.next(now).0 else { panic!("a check") };
        // A client that arrives during the check gets its result.
        queue.enqueue(digest(7), Place::new(at(1), "app"), 1000, || 7, now);
        assert_eq!(queue.next(now).0, Turn::Never);
        assert_eq!(queue.finish(&found, true, now).len(), 1001);
        assert_eq!(queue.next(now), (Turn::Never, vec![]));
    }

    #[test]
    fn a_flood_takes_no_turns_of_other_queues_and_serves_new_clients() {
        let now = Instant::now();
        let mut queue = Queue::new();
        let mut dropped = 0;
        for guess in 0..5000 {
            dropped += queue.enqueue(digest(guess), Place::new(at(1), "app"), guess as u32, || guess, now).len();
        }
        assert_eq!(dropped, 5000 - LINE_MAX, "the queue is bounded, and dropped clients are notified");
        queue.enqueue(digest(10_000), Place::new(at(2), "app"), 10_000, || 10_000, now);
        queue.enqueue(digest(10_001), Place::new(at(1), "other"), 10_001, || 10_001, now);
        queue.enqueue(digest(10_002), Place::new(at(1), "app"), 10_002, || 10_002, now);
        let served: Vec<u64> = (0..4).filter_map(|_| check(&mut queue, false, now)).map(|(work, _)| work).collect();
        for waited in [10_000, 10_001, 10_002] {
            assert!(served.contains(&waited), "{served:?}");
        }
    }

    #[test]
    fn queues_with_many_failures_are_slow_but_served() {
        let mut now = Instant::now();
        let mut queue = Queue::new();
        for guess in 0..u64::from(FAILURES_MAX) {
            queue.enqueue(digest(guess), Place::new(at(1), "app"), 0, || guess, now);
            assert!(check(&mut queue, false, now).is_some());
        }
        queue.enqueue(digest(100), Place::new(at(1), "app"), 100, || 100, now);
        assert_eq!(check(&mut queue, false, now), Some((100, vec![100])));
        queue.enqueue(digest(101), Place::new(at(1), "app"), 101, || 101, now);
        let Turn::At(due) = queue.next(now).0 else { panic!("not now") };
        assert_eq!(due, now + SLOW_TURN);
        // Another address or user is not slowed down.
        queue.enqueue(digest(200), Place::new(at(2), "app"), 200, || 200, now);
        queue.enqueue(digest(201), Place::new(at(1), "other"), 201, || 201, now);
        assert!(check(&mut queue, true, now).is_some() && check(&mut queue, true, now).is_some());
        assert_eq!(check(&mut queue, true, now), None);
        now = due;
        assert_eq!(check(&mut queue, true, now), Some((101, vec![101])), "a right one is found right");
        // The failures expire.
        now += FAILURE_WINDOW;
        for guess in 300..310 {
            queue.enqueue(digest(guess), Place::new(at(1), "app"), 0, || guess, now);
            assert!(check(&mut queue, true, now).is_some());
        }
    }

    #[test]
    fn waiting_passwords_are_bounded_and_the_longest_queue_drops() {
        let now = Instant::now();
        let mut queue = Queue::new();
        let user = |number: u64| Place::new(at(1), &format!("user{number}"));
        for guess in 0..WAITING_MAX as u64 {
            assert!(queue.enqueue(digest(guess), user(guess / 60), guess as u32, || guess, now).is_empty());
        }
        let out = queue.enqueue(digest(9999), Place::new(at(2), "app"), 9999, || 9999, now);
        assert_eq!(out.len(), 1, "one of a long queue falls out");
        assert!(out[0] != 9999 && queue.waiting.len() == WAITING_MAX);
        let mut queue = Queue::new();
        for guess in 0..WAITING_MAX as u64 {
            queue.enqueue(digest(guess), user(guess), 0, || guess, now);
        }
        assert_eq!(
            queue.enqueue(digest(9999), Place::new(at(2), "app"), 9999, || 9999, now),
            [9999],
            "queues with one entry drop none"
        );
    }

    #[test]
    fn waiting_clients_time_out() {
        let now = Instant::now();
        let mut queue: Queue<u64, u32> = Queue::new();
        queue.enqueue(digest(1), Place::new(at(1), "app"), 1, || 1, now);
        assert_eq!(queue.next(now + TIMEOUT), (Turn::Never, vec![1]));
    }

    #[test]
    fn addresses_of_one_network_count_as_one() {
        let place = |text: &str| Place::new(Some(text.parse().expect("an address")), "app");
        assert_eq!(place("2001:db8::1"), place("2001:db8::ffff:1:2:3"));
        assert_ne!(place("2001:db8:0:1::1"), place("2001:db8:0:2::1"));
        assert_eq!(place("::ffff:10.0.0.1"), place("10.0.0.1"));
        assert_ne!(place("10.0.0.1"), place("10.0.0.2"));
    }
}
