//! twemproxy's continuum: key -> hash -> arc (ketama) or place (modula) -> slot.
//!
//! A slot is a set of arcs or places that had one owner when the continuum was built. So owners remain an array by
//! slot, and moves, cursors, and records work as for CRC16. The points equal nutcracker's bit for bit: it computes
//! shares in single precision, so 25 equal servers have 156 points each rather than 160. With exact arithmetic, every
//! sixtieth key would map to another server.
//!
//! The table has slots rather than owners. Otherwise a move of an arc would rewrite the table, and nothing could name
//! the moving part.

use std::fmt;

use super::hashes::{Hash, md5_words};
use super::slot::{self, slot_at};
use super::{MAX_NODES, SLOT_COUNT, Slot};

/// Maximum slots of a new continuum, so that an [overlay](super::Overlay) finds free numbers.
pub const FIRST_SLOTS_MAX: usize = SLOT_COUNT / 2;

/// Maximum places of modula: the sum of all weights.
pub const PLACES_MAX: usize = 1 << 20;

/// Points of a server of average weight, and points per MD5.
const POINTS_PER_SERVER: f32 = 160.0;
const POINTS_PER_MD5: usize = 4;

/// nutcracker truncates the name hashed for a point to this length, in bytes.
const POINT_NAME_MAX: usize = 272;

/// Mapping from a hash to a server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Distribution {
    /// The first point at or above the hash. nutcracker's default.
    #[default]
    Ketama,
    /// The place with the number hash modulo count.
    Modula,
}

impl Distribution {
    /// Name in twemproxy's configuration.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ketama => "ketama",
            Self::Modula => "modula",
        }
    }
}

/// The constant part of a placement. With any other value, nearly every key of a fleet would map to another server.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Scheme {
    /// Hash function for keys.
    pub hash: Hash,
    /// The two bytes around a hash tag, if tags are enabled.
    pub tag: Option<[u8; 2]>,
    /// Mapping from hash to server.
    pub distribution: Distribution,
}

impl fmt::Display for Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "distribution {}, hash {}, ", self.distribution.name(), self.hash.name())?;
        match self.tag {
            Some(tag) => write!(f, "hash_tag \"{}\"", tag.escape_ascii()),
            None => f.write_str("no hash_tag"),
        }
    }
}

/// A server of the continuum.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, serde::Serialize, serde::Deserialize)]
pub struct Server {
    /// Name. Determines the points, and is the identity of the node.
    pub name: String,
    /// Weight relative to the other servers; at least 1.
    pub weight: u32,
}

/// Reason why a continuum is invalid.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum ContinuumError {
    /// No server, or more than [`MAX_NODES`].
    ServerCount(usize),
    /// Two servers with this name.
    NameTwice(String),
    /// A server with weight 0.
    NoWeight(String),
    /// The sum of the weights exceeds [`PLACES_MAX`].
    TooManyPlaces(u64),
    /// The smallest common refinement of the two lists has too many places: this number.
    TooFine(u64),
    /// Too few slot numbers are free.
    NoNumbersLeft {
        /// Numbers needed.
        needed: usize,
        /// Numbers free.
        free: usize,
    },
    /// A stored continuum is invalid, for this reason.
    Damaged(&'static str),
}

impl fmt::Display for ContinuumError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ServerCount(count) => write!(f, "{count} servers are given; give 1 to {MAX_NODES}"),
            Self::NameTwice(name) => write!(f, "two servers have the name {name}; give each server a unique name"),
            Self::NoWeight(name) => write!(f, "server {name} has weight 0; give it a weight of 1 or more"),
            Self::TooManyPlaces(places) => {
                write!(
                    f,
                    "the weights add up to {places}, but modula permits at most {PLACES_MAX}; divide all weights by a common number"
                )
            }
            Self::TooFine(places) => write!(
                f,
                "the old and the new list of servers have a common refinement of {places} places, but the maximum is {SLOT_COUNT}; choose another sum of \
                 weights, which shares factors with the old sum"
            ),
            Self::NoNumbersLeft { needed, free } => {
                write!(
                    f,
                    "the new list of servers needs {needed} more slots and {free} numbers are free; change fewer servers at once"
                )
            }
            Self::Damaged(why) => write!(f, "the stored continuum {why}"),
        }
    }
}

impl std::error::Error for ContinuumError {}

/// twemproxy's mapping from keys to slots.
#[derive(Clone, PartialEq, Eq)]
pub struct Continuum {
    scheme: Scheme,
    /// In nutcracker's order: by length of the name, then by name.
    servers: Vec<Server>,
    /// Index of the configured server, by slot.
    homes: Vec<u16>,
    table: Table,
}

impl Continuum {
    /// Creates the continuum of these servers, independent of their order.
    ///
    /// # Errors
    /// If there is none or too many, a name occurs twice, or a weight is 0 or too big.
    pub fn new(scheme: Scheme, servers: impl IntoIterator<Item = Server>) -> Result<Self, ContinuumError> {
        let servers = in_order(servers)?;
        let (table, homes) = by_server(&Arcs::of(scheme.distribution, &servers)?, servers.len());
        Ok(Self { scheme, servers, homes, table })
    }

    /// The constant part.
    #[must_use]
    pub const fn scheme(&self) -> &Scheme {
        &self.scheme
    }

    /// Servers in nutcracker's order.
    #[must_use]
    pub fn servers(&self) -> &[Server] {
        &self.servers
    }

    /// Number of slots with arcs or places: all numbers below.
    #[inline]
    #[must_use]
    pub fn slots(&self) -> usize {
        self.homes.len()
    }

    /// Configured server of a slot; `None` for a free number. A move may have placed the slot elsewhere.
    #[must_use]
    pub fn home(&self, slot: Slot) -> Option<&Server> {
        self.homes.get(slot.index()).map(|home| &self.servers[usize::from(*home)])
    }

    /// Returns, by slot, the first fit server, starting at the slot's first arc or place; `None` if no server is fit.
    #[must_use]
    pub fn first_fit(&self, is_fit: impl Fn(&Server) -> bool) -> Option<Vec<&Server>> {
        let fit: Vec<bool> = self.servers.iter().map(is_fit).collect();
        let mut next = usize::from(*self.homes.first()?);
        if !fit.contains(&true) {
            return None;
        }
        let mut by_slot = vec![next; self.homes.len()];
        // Two rounds, because the first arc follows the last one. In the second round `next` is correct, and the first
        // arc of a slot is written last.
        for slot in self.table.slots().iter().rev().chain(self.table.slots().iter().rev()) {
            let home = usize::from(self.homes[slot.index()]);
            if fit[home] {
                next = home;
            }
            by_slot[slot.index()] = next;
        }
        Some(by_slot.into_iter().map(|server| &self.servers[server]).collect())
    }

    /// The slot of a key.
    #[inline]
    #[must_use]
    pub fn slot_of(&self, key: &[u8]) -> Slot {
        self.table.slot_at(self.scheme.hash.of(self.hashed_part(key)))
    }

    /// The part of a key that determines its slot.
    #[must_use]
    pub fn hashed_part<'k>(&self, key: &'k [u8]) -> &'k [u8] {
        match self.scheme.tag {
            Some([open, close]) => slot::tagged_part(key, open, close),
            None => key,
        }
    }

    /// The arcs with their slots, and the configured server of each slot. For an overlay.
    pub(super) fn parts(&self) -> (&Table, &[u16]) {
        (&self.table, &self.homes)
    }

    /// Combines matching parts.
    pub(super) fn of_parts(scheme: Scheme, servers: Vec<Server>, homes: Vec<u16>, table: Table) -> Self {
        Self { scheme, servers, homes, table }
    }

    /// The persistent form.
    #[must_use]
    pub fn stored(&self) -> StoredContinuum {
        let Self { scheme, servers, homes, table } = self.clone();
        let slots = table.slots.to_vec();
        StoredContinuum { scheme, servers, homes, points: table.points.to_vec(), slots }
    }
}

/// Prints counts rather than thousands of points.
impl fmt::Debug for Continuum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scheme, servers, homes, table } = self;
        let (slots, arcs) = (homes.len(), table.slots.len());
        f.debug_struct("Continuum")
            .field("scheme", scheme)
            .field("servers", servers)
            .field("slots", &slots)
            .field("arcs", &arcs)
            .finish()
    }
}

/// Persistent form of a continuum, stored with the slot map. Complete rather than recomputed, because its slots may
/// derive from several server lists.
#[derive(Clone, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
pub struct StoredContinuum {
    scheme: Scheme,
    servers: Vec<Server>,
    /// By slot, an index into `servers`.
    homes: Vec<u16>,
    /// Ascending; empty for modula.
    points: Vec<u32>,
    /// By point or place.
    slots: Vec<Slot>,
}

impl TryFrom<StoredContinuum> for Continuum {
    type Error = ContinuumError;

    fn try_from(stored: StoredContinuum) -> Result<Self, ContinuumError> {
        let StoredContinuum { scheme, servers, homes, points, slots } = stored;
        let damaged = |why| Err(ContinuumError::Damaged(why));
        let sorted = in_order(servers.iter().cloned())?;
        if sorted != servers {
            return damaged("lists its servers in another order than nutcracker's");
        }
        if homes.is_empty() || homes.len() > SLOT_COUNT || homes.iter().any(|home| usize::from(*home) >= servers.len())
        {
            return damaged("has slots without a server");
        }
        let mut has_arcs = vec![false; homes.len()];
        for slot in &slots {
            match has_arcs.get_mut(slot.index()) {
                Some(has_arcs) => *has_arcs = true,
                None => return damaged("has arcs of an unknown slot"),
            }
        }
        if has_arcs.contains(&false) {
            return damaged("has a slot without any arc");
        }
        let is_right = match scheme.distribution {
            Distribution::Ketama => points.len() == slots.len() && points.is_sorted_by(|a, b| a < b),
            Distribution::Modula => points.is_empty() && slots.len() <= PLACES_MAX,
        };
        if !is_right {
            return damaged("has points in the wrong order or number");
        }
        Ok(Self { scheme, servers, homes, table: Table::new(points, slots) })
    }
}

/// Mapping from hashes to slots.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Table {
    /// Ascending and unique; empty for modula. An arc includes its end point.
    points: Box<[u32]>,
    /// By point or place; never empty.
    slots: Box<[Slot]>,
    /// By the upper bits of a hash: the first point at or above all hashes with these bits. Empty for modula.
    starts: Box<[u32]>,
}

/// Upper bits that select the start of the search for a point: one or two points remain to compare.
const START_BITS: u32 = 12;

impl Table {
    pub(super) fn new(points: Vec<u32>, slots: Vec<Slot>) -> Self {
        let buckets = if points.is_empty() { 0 } else { 1_u32 << START_BITS };
        let first_of = |bucket: u32| points.partition_point(|point| *point < bucket << (32 - START_BITS)) as u32;
        let starts = (0..buckets).map(first_of).collect();
        Self { points: points.into(), slots: slots.into(), starts }
    }

    #[inline]
    fn slot_at(&self, hash: u32) -> Slot {
        if self.points.is_empty() {
            return self.slots[hash as usize % self.slots.len()];
        }
        let start = self.starts[(hash >> (32 - START_BITS)) as usize] as usize;
        let after = self.points[start..].iter().position(|point| *point >= hash);
        // After the last point the continuum wraps around.
        self.slots[after.map_or(0, |after| start + after)]
    }

    pub(super) fn points(&self) -> &[u32] {
        &self.points
    }

    pub(super) fn slots(&self) -> &[Slot] {
        &self.slots
    }
}

/// The arcs or places of a server list.
pub(super) struct Arcs {
    /// Ascending and unique; empty for modula.
    pub(super) points: Vec<u32>,
    /// Server index by point or place.
    pub(super) servers: Vec<u16>,
}

impl Arcs {
    /// Computes nutcracker's layout.
    pub(super) fn of(distribution: Distribution, servers: &[Server]) -> Result<Self, ContinuumError> {
        match distribution {
            Distribution::Ketama => Ok(Self::ketama(servers)),
            Distribution::Modula => Self::modula(servers),
        }
    }

    fn ketama(servers: &[Server]) -> Self {
        // Single precision and a wrapping sum, as in nutcracker.
        let total = servers.iter().fold(0_u32, |sum, server| sum.wrapping_add(server.weight)) as f32;
        let mut points: Vec<(u32, u16)> = Vec::new();
        for (at, server) in servers.iter().enumerate() {
            let share = server.weight as f32 / total;
            let hashes = share * POINTS_PER_SERVER / POINTS_PER_MD5 as f32 * servers.len() as f32;
            let hashes = (f64::from(hashes) + 0.000_000_000_1) as f32;
            for hash in 0..hashes.floor() as u32 {
                let mut name = format!("{}-{hash}", server.name).into_bytes();
                name.truncate(POINT_NAME_MAX);
                points.extend(md5_words(&name).map(|point| (point, at as u16)));
            }
        }
        // With equal points the first server wins: a stable sort, like glibc's for an array of this size.
        points.sort_by_key(|(point, _)| *point);
        points.dedup_by_key(|(point, _)| *point);
        let (points, servers) = points.into_iter().unzip();
        Self { points, servers }
    }

    fn modula(servers: &[Server]) -> Result<Self, ContinuumError> {
        let places: u64 = servers.iter().map(|server| u64::from(server.weight)).sum();
        if places > PLACES_MAX as u64 {
            return Err(ContinuumError::TooManyPlaces(places));
        }
        let places =
            servers.iter().enumerate().flat_map(|(at, server)| std::iter::repeat_n(at as u16, server.weight as usize));
        Ok(Self { points: Vec::new(), servers: places.collect() })
    }

    /// Server of the arc that ends at this point, or of the next arc.
    pub(super) fn server_at(&self, point: u32) -> u16 {
        let at = self.points.partition_point(|other| *other < point);
        self.servers[if at == self.points.len() { 0 } else { at }]
    }
}

/// Builds the initial table: slots ordered by server, with one arc each, or several of one server if there are too many
/// arcs.
fn by_server(arcs: &Arcs, servers: usize) -> (Table, Vec<u16>) {
    let mut of_server: Vec<Vec<usize>> = vec![Vec::new(); servers];
    for (arc, server) in arcs.servers.iter().enumerate() {
        of_server[usize::from(*server)].push(arc);
    }
    let all = arcs.servers.len();
    let mut slots = vec![Slot::FIRST; all];
    let mut homes: Vec<u16> = Vec::new();
    for (server, own) in of_server.iter().enumerate().filter(|(_, own)| !own.is_empty()) {
        // Rounded down, at least one: this adds at most `MAX_NODES` slots, far below the total.
        let count = if all <= FIRST_SLOTS_MAX { own.len() } else { (own.len() * FIRST_SLOTS_MAX / all).max(1) };
        for (place, arc) in own.iter().enumerate() {
            slots[*arc] = slot_at(homes.len() + place * count / own.len());
        }
        homes.extend(std::iter::repeat_n(server as u16, count));
    }
    (Table::new(arcs.points.clone(), slots), homes)
}

/// Sorts servers as nutcracker does: by length of the name first.
pub(super) fn in_order(servers: impl IntoIterator<Item = Server>) -> Result<Vec<Server>, ContinuumError> {
    let mut servers: Vec<Server> = servers.into_iter().collect();
    if servers.is_empty() || servers.len() > MAX_NODES {
        return Err(ContinuumError::ServerCount(servers.len()));
    }
    servers.sort_by(|a, b| (a.name.len(), &a.name).cmp(&(b.name.len(), &b.name)));
    if let Some(pair) = servers.windows(2).find(|pair| pair[0].name == pair[1].name) {
        return Err(ContinuumError::NameTwice(pair[0].name.clone()));
    }
    match servers.iter().find(|server| server.weight == 0) {
        Some(server) => Err(ContinuumError::NoWeight(server.name.clone())),
        None => Ok(servers),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn servers(count: usize) -> Vec<Server> {
        (0..count).map(|i| Server { name: format!("10.0.0.{i}:6379"), weight: 1 }).collect()
    }

    fn of(distribution: Distribution, servers: Vec<Server>) -> Continuum {
        Continuum::new(Scheme { distribution, ..Scheme::default() }, servers).expect("a continuum")
    }

    #[test]
    fn points_are_counted_in_single_precision() {
        for (count, points) in [(1, 160), (2, 160), (3, 160), (5, 160), (25, 156)] {
            let servers = servers(count);
            assert_eq!(Arcs::ketama(&servers).points.len(), count * points, "{count} servers");
        }
        let weighted = [(1, 1), (2, 3)].map(|(name, weight)| Server { name: format!("n{name}:1"), weight });
        let counts = Arcs::ketama(&weighted).servers.iter().filter(|server| **server == 1).count();
        assert_eq!(counts, 240, "three quarters of 320");
    }

    #[test]
    fn slots_have_one_server_each_and_leave_free_numbers() {
        for count in [1, 2, 25, 51, 52, 300, MAX_NODES] {
            let continuum = of(Distribution::Ketama, servers(count));
            assert!(
                continuum.slots() <= FIRST_SLOTS_MAX + MAX_NODES,
                "{count} servers have {} slots",
                continuum.slots()
            );
            let arcs = Arcs::ketama(&continuum.servers);
            for (point, server) in arcs.points.iter().zip(&arcs.servers) {
                let slot = continuum.table.slot_at(*point);
                assert_eq!(continuum.homes[slot.index()], *server);
            }
        }
        let heavy: Vec<Server> =
            servers(3).into_iter().zip([20_000, 1, 5000]).map(|(server, weight)| Server { weight, ..server }).collect();
        let continuum = of(Distribution::Modula, heavy);
        assert!(continuum.slots() <= FIRST_SLOTS_MAX + 3);
        let at = |hash| continuum.home(continuum.table.slot_at(hash)).map(|server| server.name.as_str());
        assert_eq!(
            [0, 19_999, 20_000, 20_001, 25_001].map(at),
            [0, 0, 1, 2, 0].map(|i| Some(["10.0.0.0:6379", "10.0.0.1:6379", "10.0.0.2:6379"][i]))
        );
    }

    #[test]
    fn the_search_agrees_with_a_linear_one() {
        let continuum = of(Distribution::Ketama, servers(7));
        let points = continuum.table.points();
        let plain = |hash: u32| points.iter().position(|point| *point >= hash).unwrap_or(0);
        let around = points.iter().flat_map(|point| [point.wrapping_sub(1), *point, point.wrapping_add(1)]);
        let even = (0..4096_u32).flat_map(|upper| [upper << 20, (upper << 20) | 0xf_ffff]);
        for hash in around.chain(even).chain([0, u32::MAX]) {
            assert_eq!(continuum.table.slot_at(hash), continuum.table.slots()[plain(hash)], "{hash}");
        }
    }

    #[test]
    fn hash_tags_are_those_of_the_file() {
        let scheme = Scheme { tag: Some(*b"<>"), ..Scheme::default() };
        let continuum = Continuum::new(scheme, servers(9)).expect("a continuum");
        assert_eq!(continuum.hashed_part(b"a<b>c"), b"b");
        assert_eq!(continuum.hashed_part(b"a<>c"), b"a<>c");
        assert_eq!(continuum.hashed_part(b"{b}c"), b"{b}c");
        assert_eq!(continuum.slot_of(b"a<b>c"), continuum.slot_of(b"x<b>"));
        let same = Scheme { tag: Some(*b"$$"), ..Scheme::default() };
        assert_eq!(Continuum::new(same, servers(2)).expect("a continuum").hashed_part(b"a$b$c"), b"b");
    }

    #[test]
    fn invalid_lists_are_refused() {
        let scheme = Scheme::default();
        assert_eq!(Continuum::new(scheme, []), Err(ContinuumError::ServerCount(0)));
        let twice = [servers(1), servers(2)].concat();
        assert_eq!(Continuum::new(scheme, twice), Err(ContinuumError::NameTwice("10.0.0.0:6379".into())));
        let none = [Server { name: "n".into(), weight: 0 }];
        assert_eq!(Continuum::new(scheme, none), Err(ContinuumError::NoWeight("n".into())));
        let modula = Scheme { distribution: Distribution::Modula, ..scheme };
        let huge = [Server { name: "n".into(), weight: 1 << 21 }];
        assert_eq!(Continuum::new(modula, huge), Err(ContinuumError::TooManyPlaces(1 << 21)));
    }

    #[test]
    fn a_stored_continuum_is_restored_or_refused() {
        for distribution in [Distribution::Ketama, Distribution::Modula] {
            let continuum = of(distribution, servers(4));
            assert_eq!(Continuum::try_from(continuum.stored()), Ok(continuum.clone()));
            let stored = continuum.stored();
            let broken: [fn(&mut StoredContinuum); 4] = [
                |stored| stored.servers.swap(0, 1),
                |stored| stored.homes[0] = 9,
                |stored| stored.homes.truncate(1),
                |stored| stored.points.push(0),
            ];
            for damage in broken {
                let mut stored = stored.clone();
                damage(&mut stored);
                assert!(matches!(Continuum::try_from(stored), Err(ContinuumError::Damaged(_))));
            }
        }
    }
}
