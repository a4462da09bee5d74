//! Keys of a leg: from the list made before it, by name, or from a scan of a node. Purges, with scans of their own.

use super::{Driver, DriverAction, REMOVE_KEYS_MAX};
use crate::migration::injected::Bug;
use crate::migration::{Event, Fingerprint, Key, Side, UnexpectedKeys};

/// Origin of the leg's keys.
#[derive(Debug)]
pub(super) enum Listing {
    /// The list made before the leg, read on demand. `is_requested`: a request is in flight.
    Prepared { asked: bool },
    /// The keys named by the move.
    Named,
    /// All keys are listed.
    Complete,
    /// A scan of the node.
    Walked(Walk),
}

impl Listing {
    /// Restarts an idle scan with these databases, which are final: writes have stopped.
    pub(super) fn restart_with(&mut self, databases: &[u32]) {
        if let Self::Walked(walk) = self
            && !walk.is_requested
        {
            *walk = Walk::new(walk.number, walk.side, databases);
        }
    }

    /// Adds databases found when a side is connected again.
    pub(super) fn add_databases(&mut self, databases: &[u32]) {
        if let Self::Walked(walk) = self {
            walk.add(databases);
        }
    }

    /// Marks the request in flight to a lost side as failed, so that it is repeated. Scanned keys stay.
    pub(super) fn lost(&mut self, side: Side) {
        if let Self::Walked(walk) = self
            && walk.side == side
        {
            walk.is_requested = false;
        }
    }

    /// Whether a reply belongs to this listing. If so, advances its cursor.
    pub(super) fn scanned(&mut self, number: u32, cursor: &[u8]) -> bool {
        let Self::Walked(walk) = self else { return false };
        let is_its = walk.number == number && walk.is_requested;
        if is_its {
            walk.take(cursor);
        }
        is_its
    }
}

/// Scan of the keys at a node.
#[derive(Debug)]
pub(super) struct Walk {
    pub(super) number: u32,
    pub(super) side: Side,
    /// Databases left; the last one is being scanned.
    databases: Vec<u32>,
    /// All databases of the scan, finished ones included.
    all: Vec<u32>,
    cursor: Vec<u8>,
    /// A SCAN is in flight.
    is_requested: bool,
}

impl Walk {
    pub(super) fn new(number: u32, side: Side, databases: &[u32]) -> Self {
        Self {
            number,
            side,
            databases: databases.to_vec(),
            all: databases.to_vec(),
            cursor: b"0".to_vec(),
            is_requested: false,
        }
    }

    fn add(&mut self, databases: &[u32]) {
        let new: Vec<u32> = databases.iter().copied().filter(|database| !self.all.contains(database)).collect();
        self.all.extend(&new);
        self.databases.splice(0..0, new);
    }

    fn is_over(&self) -> bool {
        self.databases.is_empty() && !self.is_requested
    }

    fn next_scan(&mut self) -> Option<DriverAction> {
        let database = self.databases.last().copied().filter(|_| !self.is_requested)?;
        self.is_requested = true;
        Some(DriverAction::Scan { walk: self.number, side: self.side, database, cursor: self.cursor.clone() })
    }

    fn take(&mut self, cursor: &[u8]) {
        self.is_requested = false;
        if cursor == b"0" {
            self.databases.pop();
        }
        self.cursor = cursor.to_vec();
    }
}

/// Removal of keys that a side must not have.
#[derive(Debug)]
pub(super) struct Purge {
    pub(super) walk: Walk,
    wrong: UnexpectedKeys,
    /// Keys to remove without a scan.
    named: Vec<Key>,
    /// Removals in flight.
    pub(super) removals: usize,
}

impl Purge {
    fn is_over(&self) -> bool {
        self.walk.is_over() && self.named.is_empty() && self.removals == 0
    }

    pub(super) fn scanned(
        &mut self,
        cursor: &[u8],
        mut keys: Vec<Key>,
        fingerprint: impl Fn(&Key) -> Fingerprint,
    ) -> Option<DriverAction> {
        let database = self.walk.databases.last().copied().unwrap_or_default();
        self.walk.take(cursor);
        keys.retain(|key| self.wrong.has(fingerprint(key)));
        if keys.is_empty() {
            return None;
        }
        self.removals += 1;
        Some(DriverAction::Unlink { walk: self.walk.number, side: self.walk.side, database, keys })
    }
}

impl Driver {
    fn walk_at(&mut self, side: Side) -> Walk {
        self.walks += 1;
        Walk::new(self.walks, side, &self.databases)
    }

    pub(super) fn begin_purge(&mut self, side: Side, wrong: UnexpectedKeys) {
        let has_none = match &wrong {
            UnexpectedKeys::AllBut(right) => side == Side::Target && right.is_empty() && self.target_is_clean,
            UnexpectedKeys::These(wrong) => wrong.is_empty(),
        };
        if has_none {
            self.inbox.push_back(Event::Purged);
            return;
        }
        let mut walk = self.walk_at(side);
        let mut named = Vec::new();
        if let Some(keys) = self.keys.as_ref().filter(|_| !self.planted.is(Bug::PurgedBeyondScope)) {
            // The other keys of the slots do not belong to this leg.
            walk.databases.clear();
            named = keys.iter().filter(|key| wrong.has(self.fingerprints.of(key))).cloned().collect();
        }
        self.purge = Some(Purge { walk, wrong, named, removals: 0 });
    }

    pub(super) fn relist(&mut self, at: Side) {
        self.listed.clear();
        // Requests on the old listing return no keys, neither old nor new.
        self.inbox.extend(self.lists.drain(..).map(|_| Event::Listed { keys: Vec::new(), end: false }));
        self.listing = if self.keys.is_some() { Listing::Named } else { Listing::Walked(self.walk_at(at)) };
    }

    pub(super) fn taken(&mut self, taken: Option<(Vec<Key>, bool)>) {
        if !matches!(self.listing, Listing::Prepared { .. }) {
            return;
        }
        self.listing = match taken {
            Some((keys, end)) => {
                self.listed.extend(keys);
                if end { Listing::Complete } else { Listing::Prepared { asked: false } }
            }
            // The node has all keys too.
            None => Listing::Walked(self.walk_at(Side::Source)),
        };
    }

    /// Advances a purge, or else the listing, and the latter only as far as keys are requested.
    pub(super) fn walk(&mut self, out: &mut Vec<DriverAction>) {
        if let Some(purge) = &mut self.purge {
            let (side, number) = (purge.walk.side, purge.walk.number);
            if self.is_up[side as usize] {
                for database in self.databases.iter().copied().filter(|_| !purge.named.is_empty()) {
                    for part in purge.named.chunks(REMOVE_KEYS_MAX) {
                        purge.removals += 1;
                        out.push(DriverAction::Unlink { walk: number, side, database, keys: part.to_vec() });
                    }
                }
                purge.named.clear();
                out.extend(purge.walk.next_scan());
            }
            if purge.is_over() {
                self.purge = None;
                self.inbox.push_back(Event::Purged);
            }
            return;
        }
        let is_wanted = self.lists.front().is_some_and(|count| self.listed.len() < *count as usize);
        if let Listing::Walked(walk) = &mut self.listing
            && is_wanted
            && self.is_up[walk.side as usize]
        {
            out.extend(walk.next_scan());
        }
    }

    pub(super) fn serve_lists(&mut self, out: &mut Vec<DriverAction>) {
        while let Some(count) = self.lists.front().map(|count| *count as usize) {
            if matches!(self.listing, Listing::Named) {
                self.listed = self.keys.iter().flatten().cloned().collect();
                self.listing = Listing::Complete;
            }
            if let Listing::Prepared { asked } = &mut self.listing
                && self.listed.len() < count
            {
                if !std::mem::replace(asked, true) {
                    out.push(DriverAction::TakeListed);
                }
                return;
            }
            let ended = match &self.listing {
                Listing::Complete => true,
                // While a side is down, its databases with keys are unknown.
                Listing::Walked(walk) => {
                    walk.is_over() && (self.is_up[walk.side as usize] || self.planted.is(Bug::WalkedWhileAway))
                }
                Listing::Named | Listing::Prepared { .. } => false,
            };
            if !ended && self.listed.len() < count {
                return;
            }
            self.lists.pop_front();
            let keys: Vec<Key> = self.listed.drain(..count.min(self.listed.len())).collect();
            self.inbox.push_back(Event::Listed { keys, end: ended && self.listed.is_empty() });
        }
    }
}
