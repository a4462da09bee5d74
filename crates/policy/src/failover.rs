//! Selects the primary among the servers of a node, and the replicas that may be read.
//!
//! A [`PrimaryMonitor`] is stepped with observations - a server's role as reported by itself, its silence, a Sentinel's
//! announcement - and returns changes of the primary and of the readable replicas. It does not elect: Sentinel, an
//! operator, or an orchestrator promotes replicas. It detects promotions, and rejects false ones: following a server
//! that merely claims to be a primary (a detached copy, the old primary after its return) would lose writes.
//!
//! - **With Sentinel**, the announcement with the highest configuration epoch counts. A Sentinel that was cut off
//!   repeats the old primary with an older epoch. This is rejected even while the current primary is silent, unless the
//!   announced primary proves its descent as below (newly created Sentinels count from 0 again).
//! - **Without**, a server's own role counts, with proof: a promoted replica knows the replication id of its former
//!   primary (`master_replid2`). It is followed once the old primary has become a replica, or has been silent for a
//!   while.
//!
//! Addresses are opaque; the caller defines their order.

use std::collections::BTreeMap;

/// State kept over a restart, so that a returned old primary is not mistaken for the current one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record<A> {
    /// Current primary.
    pub primary: A,
    /// Sentinel's configuration epoch of the promotion; 0 without Sentinel.
    pub config_epoch: u64,
    /// Replication id (`master_replid`), if reported.
    pub replication_id: Option<String>,
}

/// A point in the replication history of a primary: everything written until then.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Position {
    /// Id of the history (`master_replid`). Offsets of different histories are not comparable.
    pub replication_id: String,
    /// Offset in the replication stream, in bytes (`master_repl_offset`, `slave_repl_offset`).
    pub offset: u64,
}

impl Position {
    /// Whether a server at this position has all data of `earlier`.
    fn has(&self, earlier: &Position) -> bool {
        self.replication_id == earlier.replication_id && self.offset >= earlier.offset
    }
}

/// Role of a server as reported by itself (`INFO replication`).
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Role<A> {
    /// Accepts writes.
    Primary {
        /// `master_replid`.
        replication_id: String,
        /// `master_replid2`: id of the former primary, before the promotion; `None` without a promotion.
        followed_id: Option<String>,
        /// `master_repl_offset`.
        offset: u64,
    },
    /// Follows another server.
    Replica {
        /// Primary of this replica; `None` if the reported name cannot be compared with addresses.
        of: Option<A>,
        /// Whether the link is up and was recently active.
        is_current: bool,
        /// Executed position.
        position: Position,
    },
}

/// Returns the reason why a newly connected server must not be read as a replica, from `INFO replication` and
/// `INFO persistence`. `None`: it may be read. A server that has just started may be empty until its first
/// synchronisation has ended.
#[must_use]
pub fn why_not_readable(info: &str) -> Option<&'static str> {
    let field = |name: &str| info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim);
    match (field("role"), field("master_link_status")) {
        (Some("slave"), Some("up")) if field("master_sync_in_progress").is_none_or(|syncing| syncing == "0") => {
            field("loading").filter(|loading| *loading != "0").map(|_| "it is loading its data")
        }
        (Some("slave"), Some("up")) => Some("its synchronisation with the primary has not ended"),
        (Some("slave"), _) => Some("its link to the primary is down"),
        _ => Some("it is not a replica"),
    }
}

/// An observation.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event<A> {
    /// A server reported its role.
    RoleReported {
        /// The server.
        address: A,
        /// Reported role.
        role: Role<A>,
        /// Round-trip time in microseconds.
        round_trip_us: u32,
    },
    /// A server refused, broke the connection, or did not reply in time.
    Silent {
        /// The server.
        address: A,
    },
    /// A Sentinel announced the primary.
    Announced {
        /// The primary.
        primary: A,
        /// Sentinel's configuration epoch for this primary.
        config_epoch: u64,
    },
    /// Slots were moved to the node. A replica behind the primary's position at that time would return nil for their
    /// keys.
    Needed(Position),
    /// An operator has confirmed the unproven primary.
    Accepted,
    /// The name of a server resolves to a new address.
    Renamed {
        /// Old address; `None`: the name did not resolve.
        from: Option<A>,
        /// New address.
        to: A,
        /// Whether the name is the initial primary.
        is_first: bool,
    },
    /// A Sentinel listed the known replicas.
    Listed {
        /// Addresses of the replicas.
        replicas: Vec<A>,
    },
}

/// Reason for a change of the primary.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Why {
    /// A Sentinel announced it.
    Announced,
    /// The old primary reports that it is a replica now.
    Demoted,
    /// The old primary is silent, and one of its replicas was promoted.
    Silence,
    /// An operator confirmed it.
    Accepted,
    /// The old primary is silent, and its name resolves to the new one.
    Renamed,
}

/// An action for the caller.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action<A> {
    /// Make durable, before any other action.
    Record(Record<A>),
    /// Send commands to this server from now on, and none to the previous one.
    Primary {
        /// The new primary.
        address: A,
        /// Reason for the change.
        why: Why,
    },
    /// These replicas may be read from now on.
    Readable {
        /// Nearest first.
        replicas: Vec<A>,
        /// Whether the primary replies faster than all of them.
        primary_is_nearest: bool,
    },
    /// A server claims to be a primary without proof. Needs the operator's attention.
    Unproven {
        /// The claimant.
        address: A,
    },
}

/// Minimum silence of a primary before a promoted replica is followed without the primary's own report, in
/// microseconds.
pub const SILENCE_US: u64 = 1_000_000;

#[derive(Clone, Debug)]
struct Seen<A> {
    role: Option<Role<A>>,
    /// Start of the current silence; `None` while the server replies.
    silent_since_us: Option<u64>,
    /// Moving average.
    round_trip_us: Option<u32>,
}

/// Monitors the servers of one node.
#[derive(Clone, Debug)]
pub struct PrimaryMonitor<A> {
    record: Option<Record<A>>,
    has_sentinel: bool,
    seen: BTreeMap<A, Seen<A>>,
    readable: Vec<A>,
    primary_is_nearest: bool,
    /// Minimum position of a replica to be read: the primary's position at its first report (another router may have
    /// moved slots to it just before), and at later moves to it. `None` until the primary has reported its position.
    needed: Option<Position>,
    /// New address of the primary's name, if changed.
    successor: Option<A>,
    /// Server that claims to be the primary without proof, with Sentinel's epoch for it.
    unproven: Option<(A, u64)>,
}

impl<A: Clone + Ord> PrimaryMonitor<A> {
    /// Monitors `servers`. The initial primary is that of `stored`. Otherwise, without Sentinel, the first server; with
    /// Sentinel, none until the first announcement.
    pub fn new(servers: Vec<A>, has_sentinel: bool, stored: Option<Record<A>>) -> Self {
        let stored = stored.filter(|record| has_sentinel || servers.contains(&record.primary));
        let record = match stored {
            Some(record) => Some(record),
            None if has_sentinel => None,
            None => {
                servers.first().map(|first| Record { primary: first.clone(), config_epoch: 0, replication_id: None })
            }
        };
        let mut watch = Self {
            record,
            has_sentinel,
            seen: BTreeMap::new(),
            readable: Vec::new(),
            primary_is_nearest: true,
            needed: None,
            successor: None,
            unproven: None,
        };
        let primary = watch.primary().cloned();
        for server in servers.into_iter().chain(primary) {
            watch.notice(server);
        }
        watch
    }

    /// Like [`Self::new`], for a node whose primary has a name that does not resolve yet. There is no primary until it
    /// does, unless `stored` names one of `replicas`.
    pub fn without_first(replicas: Vec<A>, stored: Option<Record<A>>) -> Self {
        let is_known = stored.as_ref().is_some_and(|record| replicas.contains(&record.primary));
        let watch = Self::new(replicas, false, stored);
        if is_known { watch } else { Self { record: None, ..watch } }
    }

    /// Whether a server failed to reply and has not replied since.
    pub fn is_silent(&self, address: &A) -> bool {
        self.seen.get(address).is_some_and(|seen| seen.silent_since_us.is_some())
    }

    /// The primary, if known.
    pub fn primary(&self) -> Option<&A> {
        self.record.as_ref().map(|record| &record.primary)
    }

    /// Servers to query for their roles.
    pub fn servers(&self) -> impl Iterator<Item = &A> {
        self.seen.keys()
    }

    /// Processes an observation at `now_us` and appends the resulting actions.
    pub fn step(&mut self, event: Event<A>, now_us: u64, actions: &mut Vec<Action<A>>) {
        match event {
            Event::RoleReported { address, role, round_trip_us } => {
                let seen = self.notice(address.clone());
                seen.silent_since_us = None;
                let mean = seen
                    .round_trip_us
                    .map_or(round_trip_us, |mean| ((u64::from(mean) * 7 + u64::from(round_trip_us)) / 8) as u32);
                seen.round_trip_us = Some(mean);
                let id = match &role {
                    Role::Primary { replication_id, .. } => Some(replication_id.clone()),
                    Role::Replica { .. } => None,
                };
                seen.role = Some(role);
                if self.primary() == Some(&address) {
                    self.renew_needed();
                }
                if let Some(record) = &mut self.record
                    && record.primary == address
                    && id.is_some()
                    && record.replication_id != id
                {
                    record.replication_id = id;
                    actions.push(Action::Record(record.clone()));
                }
            }
            Event::Silent { address } => {
                self.notice(address).silent_since_us.get_or_insert(now_us);
            }
            Event::Announced { primary, config_epoch } => {
                self.notice(primary.clone());
                let newer = self.record.as_ref().is_none_or(|record| config_epoch > record.config_epoch);
                let same = self.primary() == Some(&primary);
                if newer {
                    self.change_primary(primary, config_epoch, Why::Announced, same, actions);
                } else if !same && self.primary_lost(now_us).is_some() && self.is_primary(&primary) {
                    // An old announcement that matches the server's own role: either new Sentinels, or the old primary
                    // returned together with its Sentinel. Only proven descent distinguishes the two.
                    if self.is_proven(&primary) {
                        self.change_primary(primary, config_epoch, Why::Announced, false, actions);
                    } else {
                        self.note_unproven(primary, config_epoch, actions);
                    }
                }
            }
            Event::Needed(position) => match &mut self.needed {
                Some(needed) if needed.has(&position) => {}
                // A different history is newer than the primary's last known one; otherwise the primary's next report
                // replaces it.
                needed => *needed = Some(position),
            },
            Event::Accepted => {
                // Only if the claim still holds and the current primary is still unusable: time has passed since the
                // report.
                let is_of_no_use = self.primary_lost(now_us).is_some();
                if let Some((claimant, config_epoch)) = self.unproven.take_if(|_| is_of_no_use)
                    && self.is_primary(&claimant)
                {
                    self.change_primary(claimant, config_epoch, Why::Accepted, false, actions);
                }
            }
            Event::Renamed { from, to, is_first } => {
                self.notice(to.clone());
                let leads_from = |address: Option<&A>| address.is_some() && from.as_ref() == address;
                if leads_from(self.primary()) || leads_from(self.successor.as_ref()) {
                    self.successor = Some(to).filter(|to| self.primary() != Some(to));
                } else if is_first && self.record.is_none() {
                    self.change_primary(to, 0, Why::Renamed, false, actions);
                }
                if let Some(from) = from.filter(|from| self.primary() != Some(from)) {
                    self.seen.remove(&from);
                }
            }
            Event::Listed { replicas } => {
                for replica in replicas {
                    self.notice(replica);
                }
            }
        }
        if !self.has_sentinel {
            self.find_successor(now_us, actions);
        }
        self.choose_readable(actions);
    }

    fn notice(&mut self, address: A) -> &mut Seen<A> {
        self.seen.entry(address).or_insert(Seen { role: None, silent_since_us: None, round_trip_us: None })
    }

    fn is_primary(&self, address: &A) -> bool {
        self.seen
            .get(address)
            .is_some_and(|s| s.silent_since_us.is_none() && matches!(s.role, Some(Role::Primary { .. })))
    }

    /// Whether a server was promoted from the replicas of the current primary: it knows the replication id that it
    /// followed.
    fn is_proven(&self, address: &A) -> bool {
        let ours = self.record.as_ref().and_then(|record| record.replication_id.as_ref());
        match self.seen.get(address).and_then(|s| s.role.as_ref()) {
            Some(Role::Primary { followed_id: Some(followed), .. }) => Some(followed) == ours,
            _ => false,
        }
    }

    fn note_unproven(&mut self, address: A, config_epoch: u64, actions: &mut Vec<Action<A>>) {
        let known = self.unproven.replace((address.clone(), config_epoch));
        if known.is_none_or(|(known, _)| known != address) {
            actions.push(Action::Unproven { address });
        }
    }

    /// Whether a server claims to be the primary without proof, so that an operator could confirm it.
    pub fn has_claimant(&self) -> bool {
        self.unproven.is_some()
    }

    /// Reason why the current primary no longer is one, if so.
    fn primary_lost(&self, now_us: u64) -> Option<Why> {
        let seen = self.seen.get(self.primary()?)?;
        match (seen.silent_since_us, &seen.role) {
            (Some(since), _) => (now_us.saturating_sub(since) >= SILENCE_US).then_some(Why::Silence),
            (None, Some(Role::Replica { .. })) => Some(Why::Demoted),
            (None, _) => None,
        }
    }

    /// Without Sentinel: finds a server promoted as the successor.
    fn find_successor(&mut self, now_us: u64, actions: &mut Vec<Action<A>>) {
        let Some(record) = self.record.clone() else { return };
        let Some(why) = self.primary_lost(now_us) else { return };
        // The old primary's own report names its successor.
        let followed = match self.seen.get(&record.primary).and_then(|s| s.role.as_ref()) {
            Some(Role::Replica { of: Some(of), .. }) if why == Why::Demoted => Some(of.clone()),
            _ => None,
        };
        let claims = |address: &A| *address != record.primary && self.is_primary(address);
        let successor = followed.filter(|address| claims(address)).or_else(|| {
            let mut candidates = self.seen.keys().filter(|address| claims(address) && self.is_proven(address));
            // With two promoted replicas, it cannot be decided which one has the writes.
            candidates.next().filter(|_| candidates.next().is_none()).cloned()
        });
        let heir = self.successor.clone().filter(|address| why == Why::Silence && claims(address));
        if let Some(successor) = successor {
            self.change_primary(successor, 0, why, false, actions);
        } else if let Some(heir) = heir {
            self.change_primary(heir, 0, Why::Renamed, false, actions);
            self.seen.remove(&record.primary);
        } else if let Some(claimant) = self.seen.keys().find(|address| claims(address)).cloned() {
            self.note_unproven(claimant, 0, actions);
        }
    }

    fn change_primary(&mut self, address: A, config_epoch: u64, why: Why, same: bool, actions: &mut Vec<Action<A>>) {
        let told_id = match self.seen.get(&address).and_then(|s| s.role.as_ref()) {
            Some(Role::Primary { replication_id, .. }) => Some(replication_id.clone()),
            _ => None,
        };
        let replication_id =
            told_id.or_else(|| self.record.as_ref().filter(|_| same).and_then(|r| r.replication_id.clone()));
        let record = Record { primary: address.clone(), config_epoch, replication_id };
        self.record = Some(record.clone());
        (self.unproven, self.successor) = (None, None);
        actions.push(Action::Record(record));
        if !same {
            self.needed = None;
            self.renew_needed();
            actions.push(Action::Primary { address, why });
        }
    }

    /// Raises the required position if the primary is a different server or has started a new history.
    fn renew_needed(&mut self) {
        let seen = self.primary().and_then(|primary| self.seen.get(primary)).and_then(|seen| seen.role.as_ref());
        let Some(Role::Primary { replication_id, offset, .. }) = seen else { return };
        if self.needed.as_ref().is_none_or(|needed| needed.replication_id != *replication_id) {
            self.needed = Some(Position { replication_id: replication_id.clone(), offset: *offset });
        }
    }

    /// Replicas that are read but, as far as reported, have not reached this position.
    pub fn behind<'w>(&'w self, position: &'w Position) -> impl Iterator<Item = &'w A> {
        self.readable.iter().filter(|address| {
            let role = self.seen.get(address).and_then(|seen| seen.role.as_ref());
            !matches!(role, Some(Role::Replica { position: at, .. }) if at.has(position))
        })
    }

    /// Selects replicas that follow the primary closely; nearest first, with hysteresis, because every change is
    /// published to every worker.
    fn choose_readable(&mut self, actions: &mut Vec<Action<A>>) {
        let primary = self.primary().cloned();
        let fit = |address: &A| {
            let Some(seen) = self.seen.get(address) else { return false };
            match &seen.role {
                Some(Role::Replica { of, is_current, position }) if seen.silent_since_us.is_none() && *is_current => {
                    let has_all = self.needed.as_ref().is_some_and(|needed| position.has(needed));
                    has_all && Some(address) != primary.as_ref() && (of.is_none() || *of == primary)
                }
                _ => false,
            }
        };
        let round_trip = |address: &A| self.seen.get(address).and_then(|s| s.round_trip_us).unwrap_or(u32::MAX);
        let mut replicas: Vec<A> = self.seen.keys().filter(|a| fit(a)).cloned().collect();
        replicas.sort_by_key(|a| round_trip(a));
        // The first stays first unless another is clearly nearer.
        if let Some(first) = self.readable.first()
            && let Some(place) = replicas.iter().position(|a| a == first)
            && !clearly_less(round_trip(&replicas[0]), round_trip(first))
        {
            let first = replicas.remove(place);
            replicas.insert(0, first);
        }
        let ours = primary.as_ref().map_or(u32::MAX, &round_trip);
        let best = replicas.first().map_or(u32::MAX, &round_trip);
        let primary_is_nearest =
            if self.primary_is_nearest { !clearly_less(best, ours) } else { clearly_less(ours, best) };
        let set = |list: &[A]| list.iter().cloned().collect::<std::collections::BTreeSet<A>>();
        let unchanged = self.readable.first() == replicas.first() && set(&self.readable) == set(&replicas);
        if unchanged && primary_is_nearest == self.primary_is_nearest {
            return;
        }
        self.readable.clone_from(&replicas);
        self.primary_is_nearest = primary_is_nearest;
        actions.push(Action::Readable { replicas, primary_is_nearest });
    }
}

/// Whether `a` is less by a fifth, and by more than the noise of a loopback connection.
fn clearly_less(a: u32, b: u32) -> bool {
    u64::from(a) * 5 < u64::from(b) * 4 && b - a > 50
}

#[cfg(test)]
mod tests {
    use super::*;

    const OLD: u8 = 1;
    const NEW: u8 = 2;
    const OTHER: u8 = 3;

    fn primary(id: &str, followed: Option<&str>) -> Role<u8> {
        Role::Primary { replication_id: id.into(), followed_id: followed.map(Into::into), offset: 100 }
    }

    fn at(id: &str, offset: u64) -> Position {
        Position { replication_id: id.into(), offset }
    }

    fn replica_at(of: u8, position: Position) -> Role<u8> {
        Role::Replica { of: Some(of), is_current: true, position }
    }

    fn replica(of: u8) -> Role<u8> {
        replica_at(of, at("a", 100))
    }

    fn readable(actions: Vec<Action<u8>>) -> Option<Vec<u8>> {
        actions.into_iter().find_map(|a| if let Action::Readable { replicas, .. } = a { Some(replicas) } else { None })
    }

    fn role_reported(address: u8, role: Role<u8>) -> Event<u8> {
        Event::RoleReported { address, role, round_trip_us: 100 }
    }

    fn step(watch: &mut PrimaryMonitor<u8>, now_us: u64, event: Event<u8>) -> Vec<Action<u8>> {
        let mut actions = Vec::new();
        watch.step(event, now_us, &mut actions);
        actions
    }

    fn changes(actions: &[Action<u8>]) -> Vec<(u8, Why)> {
        actions
            .iter()
            .filter_map(|a| if let Action::Primary { address, why } = a { Some((*address, *why)) } else { None })
            .collect()
    }

    /// OLD with its replica NEW, both observed.
    fn settled() -> PrimaryMonitor<u8> {
        let mut watch = PrimaryMonitor::new(vec![OLD, NEW], false, None);
        step(&mut watch, 0, role_reported(OLD, primary("a", None)));
        step(&mut watch, 0, role_reported(NEW, replica(OLD)));
        watch
    }

    #[test]
    fn a_replica_is_read_after_its_first_synchronisation() {
        let info = |role: &str, link: &str, syncing: &str, loading: &str| {
            format!(
                "# Replication\r\nrole:{role}\r\nmaster_link_status:{link}\r\nmaster_sync_in_progress:{syncing}\r\n# Persistence\r\nloading:{loading}\r\n"
            )
        };
        assert_eq!(why_not_readable(&info("slave", "up", "0", "0")), None);
        assert_eq!(why_not_readable("role:slave\r\nmaster_link_status:up\r\n"), None, "a server that states no more");
        for (role, link, syncing, loading) in [
            ("slave", "down", "0", "0"),
            ("slave", "down", "1", "0"),
            ("slave", "up", "1", "0"),
            ("slave", "up", "0", "1"),
            ("master", "up", "0", "0"),
        ] {
            assert!(
                why_not_readable(&info(role, link, syncing, loading)).is_some(),
                "{role} {link} {syncing} {loading}"
            );
        }
        assert!(why_not_readable("").is_some());
    }

    #[test]
    fn a_promoted_replica_is_followed_when_the_old_primary_is_silent() {
        let mut watch = settled();
        assert_eq!(changes(&step(&mut watch, 10, role_reported(NEW, primary("b", Some("a"))))), []);
        assert_eq!(changes(&step(&mut watch, 20, Event::Silent { address: OLD })), []);
        assert_eq!(changes(&step(&mut watch, 20 + SILENCE_US - 1, Event::Silent { address: OLD })), [], "not yet");
        let actions = step(&mut watch, 20 + SILENCE_US, Event::Silent { address: OLD });
        assert_eq!(changes(&actions), [(NEW, Why::Silence)]);
        let recorded = actions.iter().position(|a| matches!(a, Action::Record(_))).unwrap();
        let changed = actions.iter().position(|a| matches!(a, Action::Primary { .. })).unwrap();
        assert!(recorded < changed, "durable before it has an effect");
    }

    #[test]
    fn a_silent_primary_is_replaced_by_the_server_its_name_resolves_to() {
        let renamed = |from, to| Event::Renamed { from, to, is_first: true };
        let mut watch = settled();
        assert_eq!(changes(&step(&mut watch, 0, renamed(Some(OLD), OTHER))), []);
        // The name alone is not sufficient: the new server must report itself as a primary, and the old one must be
        // silent.
        assert_eq!(changes(&step(&mut watch, 0, role_reported(OTHER, primary("z", None)))), []);
        step(&mut watch, 10, Event::Silent { address: OLD });
        assert_eq!(changes(&step(&mut watch, 10 + SILENCE_US - 1, role_reported(OTHER, primary("z", None)))), []);
        let mut promoted = watch.clone();
        assert_eq!(
            changes(&step(&mut watch, 10 + SILENCE_US, role_reported(OTHER, primary("z", None)))),
            [(OTHER, Why::Renamed)]
        );
        assert_eq!(watch.servers().copied().collect::<Vec<_>>(), [NEW, OTHER], "the old address is no longer queried");
        // A replica promoted from the primary has precedence.
        step(&mut promoted, 20, role_reported(NEW, primary("b", Some("a"))));
        assert_eq!(
            changes(&step(&mut promoted, 10 + SILENCE_US, Event::Silent { address: OLD })),
            [(NEW, Why::Silence)]
        );
        // The name resolves to the old address again before any change.
        let mut back = settled();
        step(&mut back, 0, renamed(Some(OLD), OTHER));
        step(&mut back, 0, renamed(Some(OTHER), OLD));
        step(&mut back, 0, Event::Silent { address: OLD });
        assert_eq!(changes(&step(&mut back, 9 * SILENCE_US, Event::Silent { address: OLD })), []);
        assert_eq!(back.primary(), Some(&OLD));
    }

    #[test]
    fn a_primary_is_known_when_its_name_first_resolves() {
        let mut watch = PrimaryMonitor::without_first(vec![NEW], None);
        assert_eq!(changes(&step(&mut watch, 0, role_reported(NEW, replica(OLD)))), []);
        assert_eq!(watch.primary(), None);
        let named = Event::Renamed { from: None, to: OLD, is_first: true };
        assert_eq!(changes(&step(&mut watch, 0, named)), [(OLD, Why::Renamed)]);
        let stored = Record { primary: NEW, config_epoch: 0, replication_id: None };
        assert_eq!(
            PrimaryMonitor::without_first(vec![NEW], Some(stored)).primary(),
            Some(&NEW),
            "it was promoted before"
        );
    }

    #[test]
    fn a_demoted_primary_is_left_immediately() {
        let mut watch = settled();
        step(&mut watch, 10, role_reported(NEW, primary("b", Some("a"))));
        assert_eq!(changes(&step(&mut watch, 20, role_reported(OLD, replica(NEW)))), [(NEW, Why::Demoted)]);
    }

    #[test]
    fn a_detached_copy_is_not_followed() {
        let mut watch = settled();
        // Promoted while the primary serves: neither the primary nor an operator confirms a takeover.
        for now in 0..100 {
            assert_eq!(changes(&step(&mut watch, now * 100_000, role_reported(NEW, primary("b", Some("a"))))), []);
            assert_eq!(changes(&step(&mut watch, now * 100_000, role_reported(OLD, primary("a", None)))), []);
        }
    }

    #[test]
    fn an_unproven_primary_is_reported_once_and_not_followed() {
        let mut watch = PrimaryMonitor::new(vec![OLD, NEW], false, None);
        step(&mut watch, 0, role_reported(OLD, primary("a", None)));
        step(&mut watch, 0, Event::Silent { address: OLD });
        let claim = |watch: &mut PrimaryMonitor<u8>, now| step(watch, now, role_reported(NEW, primary("z", Some("y"))));
        assert_eq!(claim(&mut watch, 2 * SILENCE_US), [Action::Unproven { address: NEW }]);
        assert_eq!(claim(&mut watch, 3 * SILENCE_US), []);
        assert_eq!(watch.primary(), Some(&OLD));
        // Unless an operator confirms it; and no longer once the primary has returned.
        let mut back = watch.clone();
        step(&mut back, 4 * SILENCE_US, role_reported(OLD, primary("a", None)));
        assert_eq!(changes(&step(&mut back, 4 * SILENCE_US, Event::Accepted)), []);
        assert_eq!(changes(&step(&mut watch, 4 * SILENCE_US, Event::Accepted)), [(NEW, Why::Accepted)]);
        assert_eq!(changes(&step(&mut watch, 4 * SILENCE_US, Event::Accepted)), [], "no other server claims it");
    }

    #[test]
    fn two_promoted_replicas_are_not_followed() {
        let mut watch = PrimaryMonitor::new(vec![OLD, NEW, OTHER], false, None);
        step(&mut watch, 0, role_reported(OLD, primary("a", None)));
        step(&mut watch, 0, role_reported(NEW, primary("b", Some("a"))));
        step(&mut watch, 0, role_reported(OTHER, primary("c", Some("a"))));
        step(&mut watch, 0, Event::Silent { address: OLD });
        assert_eq!(changes(&step(&mut watch, 2 * SILENCE_US, Event::Silent { address: OLD })), []);
        // The old primary's report decides.
        assert_eq!(
            changes(&step(&mut watch, 3 * SILENCE_US, role_reported(OLD, replica(OTHER)))),
            [(OTHER, Why::Demoted)]
        );
    }

    #[test]
    fn a_returned_old_primary_is_not_followed_after_a_router_restart() {
        let stored = Record { primary: NEW, config_epoch: 0, replication_id: Some("b".into()) };
        let mut watch = PrimaryMonitor::new(vec![OLD, NEW], false, Some(stored));
        assert_eq!(watch.primary(), Some(&NEW));
        step(&mut watch, 0, role_reported(OLD, primary("a", None)));
        step(&mut watch, 0, Event::Silent { address: NEW });
        let actions = step(&mut watch, 5 * SILENCE_US, role_reported(OLD, primary("a", None)));
        assert_eq!(changes(&actions), []);
        assert_eq!(watch.primary(), Some(&NEW));
    }

    #[test]
    fn the_highest_epoch_of_the_sentinels_counts() {
        let mut watch = PrimaryMonitor::new(Vec::new(), true, None);
        assert_eq!(watch.primary(), None);
        let announce = |watch: &mut PrimaryMonitor<u8>, primary, config_epoch| {
            changes(&step(watch, 0, Event::Announced { primary, config_epoch }))
        };
        assert_eq!(announce(&mut watch, OLD, 1), [(OLD, Why::Announced)]);
        assert_eq!(announce(&mut watch, NEW, 2), [(NEW, Why::Announced)]);
        assert_eq!(announce(&mut watch, OLD, 1), [], "a Sentinel that was cut off");
        assert_eq!(announce(&mut watch, NEW, 3), [], "the same primary under a newer epoch");
        assert_eq!(watch.primary(), Some(&NEW));
        // With Sentinel, claims of servers do not count.
        step(&mut watch, 0, Event::Silent { address: NEW });
        assert_eq!(changes(&step(&mut watch, 9 * SILENCE_US, role_reported(OLD, primary("b", Some("a"))))), []);
    }

    /// OLD was replaced by NEW, announced by Sentinels with epoch 1.
    fn failed_over() -> PrimaryMonitor<u8> {
        let mut watch = PrimaryMonitor::new(Vec::new(), true, None);
        step(&mut watch, 0, Event::Announced { primary: OLD, config_epoch: 0 });
        step(&mut watch, 0, role_reported(OLD, primary("a", None)));
        step(&mut watch, 0, Event::Announced { primary: NEW, config_epoch: 1 });
        watch
    }

    #[test]
    fn an_old_announcement_is_rejected_while_the_primary_is_silent() {
        let mut watch = failed_over();
        step(&mut watch, 0, role_reported(NEW, primary("b", Some("a"))));
        step(&mut watch, 0, Event::Silent { address: NEW });
        let now = 9 * SILENCE_US;
        step(&mut watch, now, role_reported(OLD, primary("z", None)));
        let old = Event::Announced { primary: OLD, config_epoch: 0 };
        assert_eq!(step(&mut watch, now, old.clone()), [Action::Unproven { address: OLD }]);
        assert_eq!(step(&mut watch, now, old), [], "told once");
        assert_eq!(watch.primary(), Some(&NEW));
        // If the Sentinels and their primary really are new, an operator must confirm it. Their later announcements
        // have the lower epoch.
        let actions = step(&mut watch, now, Event::Accepted);
        assert_eq!(changes(&actions), [(OLD, Why::Accepted)]);
        assert!(matches!(&actions[0], Action::Record(Record { config_epoch: 0, .. })), "{actions:?}");
    }

    #[test]
    fn an_old_announcement_is_rejected_despite_a_role_before_promotion() {
        let mut watch = failed_over();
        step(&mut watch, 0, role_reported(NEW, replica(OLD)));
        assert_eq!(changes(&step(&mut watch, 0, Event::Announced { primary: OLD, config_epoch: 0 })), []);
        assert_eq!(watch.primary(), Some(&NEW));
    }

    #[test]
    fn new_sentinels_are_followed_to_a_primary_with_proven_descent() {
        let mut watch = PrimaryMonitor::new(
            Vec::new(),
            true,
            Some(Record { primary: OLD, config_epoch: 7, replication_id: Some("a".into()) }),
        );
        step(&mut watch, 0, role_reported(NEW, primary("b", Some("a"))));
        let announced = Event::Announced { primary: NEW, config_epoch: 1 };
        step(&mut watch, 0, Event::Silent { address: OLD });
        assert_eq!(changes(&step(&mut watch, SILENCE_US - 1, announced.clone())), [], "not yet");
        assert_eq!(changes(&step(&mut watch, SILENCE_US, announced)), [(NEW, Why::Announced)]);
    }

    #[test]
    fn only_replicas_close_behind_the_primary_are_read() {
        let mut watch = PrimaryMonitor::new(vec![OLD, NEW, OTHER], false, None);
        step(&mut watch, 0, role_reported(OLD, primary("a", None)));
        assert_eq!(readable(step(&mut watch, 0, role_reported(NEW, replica(OLD)))), Some(vec![NEW]));
        assert_eq!(readable(step(&mut watch, 0, role_reported(NEW, replica(OLD)))), None, "told once");
        assert_eq!(readable(step(&mut watch, 0, role_reported(OTHER, replica(9)))), None, "it follows another server");
        assert_eq!(readable(step(&mut watch, 0, role_reported(OTHER, replica(OLD)))), Some(vec![NEW, OTHER]));
        let behind = Role::Replica { of: Some(OLD), is_current: false, position: at("a", 100) };
        assert_eq!(readable(step(&mut watch, 0, role_reported(NEW, behind))), Some(vec![OTHER]));
        assert_eq!(readable(step(&mut watch, 0, Event::Silent { address: OTHER })), Some(vec![]));
    }

    #[test]
    fn a_replica_is_read_only_after_it_has_keys_moved_to_its_node() {
        let mut watch = settled();
        let behind = |watch: &PrimaryMonitor<u8>| watch.behind(&at("a", 150)).copied().collect::<Vec<_>>();
        assert_eq!(behind(&watch), [NEW]);
        assert_eq!(
            readable(step(&mut watch, 0, role_reported(NEW, replica_at(OLD, at("a", 149))))),
            None,
            "nothing was moved yet"
        );
        assert_eq!(readable(step(&mut watch, 0, Event::Needed(at("a", 150)))), Some(vec![]));
        assert_eq!(readable(step(&mut watch, 0, Event::Needed(at("a", 120)))), None, "it still has to have the other");
        assert_eq!(readable(step(&mut watch, 0, role_reported(NEW, replica_at(OLD, at("a", 149))))), None);
        assert_eq!(readable(step(&mut watch, 0, role_reported(NEW, replica_at(OLD, at("a", 150))))), Some(vec![NEW]));
        assert_eq!(behind(&watch), []);
        // A new process has a new history: its position is the minimum for replicas.
        assert_eq!(readable(step(&mut watch, 0, role_reported(OLD, primary("z", None)))), Some(vec![]));
        assert_eq!(readable(step(&mut watch, 0, role_reported(NEW, replica_at(OLD, at("a", 900))))), None);
        assert_eq!(readable(step(&mut watch, 0, role_reported(NEW, replica_at(OLD, at("z", 100))))), Some(vec![NEW]));
    }

    #[test]
    fn a_replica_is_read_once_it_has_the_primarys_initial_position() {
        let mut watch = PrimaryMonitor::new(vec![OLD, NEW, OTHER], false, None);
        assert_eq!(
            readable(step(&mut watch, 0, role_reported(NEW, replica(OLD)))),
            None,
            "the position of the primary is unknown"
        );
        assert_eq!(readable(step(&mut watch, 0, role_reported(OLD, primary("a", None)))), Some(vec![NEW]));
        assert_eq!(readable(step(&mut watch, 0, role_reported(OTHER, replica_at(OLD, at("a", 99))))), None);
        assert_eq!(
            readable(step(&mut watch, 0, role_reported(OTHER, replica_at(OLD, at("a", 100))))),
            Some(vec![NEW, OTHER])
        );
        // Also after a promotion.
        step(&mut watch, 0, role_reported(NEW, primary("b", Some("a"))));
        step(&mut watch, 0, role_reported(OTHER, replica_at(NEW, at("b", 99))));
        assert_eq!(readable(step(&mut watch, 0, role_reported(OLD, replica_at(NEW, at("b", 100))))), Some(vec![OLD]));
        assert_eq!(watch.primary(), Some(&NEW));
        assert_eq!(
            readable(step(&mut watch, 0, role_reported(OTHER, replica_at(NEW, at("b", 101))))),
            Some(vec![OLD, OTHER])
        );
    }

    #[test]
    fn the_nearest_server_changes_only_for_a_clear_gain() {
        let mut watch = PrimaryMonitor::new(vec![OLD, NEW], false, None);
        let seen = |address, role, round_trip_us| Event::RoleReported { address, role, round_trip_us };
        step(&mut watch, 0, seen(OLD, primary("a", None), 300));
        let nearest = |actions: &[Action<u8>]| {
            actions.iter().find_map(|a| {
                if let Action::Readable { primary_is_nearest, .. } = a { Some(*primary_is_nearest) } else { None }
            })
        };
        assert_eq!(
            nearest(&step(&mut watch, 0, seen(NEW, replica(OLD), 280))),
            Some(true),
            "280 is not clearly less than 300"
        );
        let mut last = None;
        for _ in 0..40 {
            last = nearest(&step(&mut watch, 0, seen(NEW, replica(OLD), 100))).or(last);
        }
        assert_eq!(last, Some(false));
        for _ in 0..40 {
            assert_eq!(nearest(&step(&mut watch, 0, seen(NEW, replica(OLD), 310))), None, "not clearly more");
        }
    }
}
