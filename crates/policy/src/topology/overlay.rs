//! Applies a new server list to an existing continuum, so that only the difference has to move.
//!
//! The arcs of both are cut at the points of both. A part that the new list assigns to another server gets a free slot
//! number under its current owner; a slot that changes completely keeps its number. So publishing an overlay moves no
//! key: moves follow slot by slot. A number in use never gains keys, it only loses some.
//!
//! Not a second continuum next to the old one, because each key would have two slots during the moves.

use std::collections::BTreeMap;

use super::continuum::{Arcs, Distribution, Table, in_order};
use super::slot::slot_at;
use super::{Continuum, ContinuumError, NodeId, SLOT_COUNT, Server, Slot};

/// A continuum after the application of another server list.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Overlay {
    /// The new continuum.
    pub continuum: Continuum,
    /// Newly used numbers, each with the owner of all its parts.
    pub split: Vec<(Slot, NodeId)>,
    /// Newly used numbers, each with a slot that it was split from.
    pub parts: Vec<(Slot, Slot)>,
    /// Slots that the new list assigns to another server than the old one, ascending.
    pub changed: Vec<Slot>,
}

impl Continuum {
    /// Applies a server list to this continuum. `owner` returns the current owner of a slot.
    ///
    /// # Errors
    /// As [`Continuum::new`], if the two lists have no sufficiently small refinement, or if too few numbers are free.
    pub fn overlaid(
        &self,
        servers: impl IntoIterator<Item = Server>,
        owner: impl Fn(Slot) -> NodeId,
    ) -> Result<Overlay, ContinuumError> {
        let servers = in_order(servers)?;
        let (table, homes) = self.parts();
        let next = Arcs::of(self.scheme().distribution, &servers)?;
        let (points, cut) = match self.scheme().distribution {
            Distribution::Ketama => cut_arcs(table, &next),
            Distribution::Modula => (Vec::new(), cut_places(table.slots(), &next.servers)?),
        };
        // Number of parts, by slot and new server.
        let mut parts: BTreeMap<(Slot, u16), usize> = BTreeMap::new();
        for (slot, server) in &cut {
            *parts.entry((*slot, *server)).or_default() += 1;
        }
        let old_name = |slot: Slot| &self.servers()[usize::from(homes[slot.index()])].name;
        let is_at_home = |slot: Slot, server: u16| servers[usize::from(server)].name == *old_name(slot);
        // One part keeps the number: the unchanged one, or else the biggest.
        let mut keeps: BTreeMap<Slot, (bool, usize, u16)> = BTreeMap::new();
        for ((slot, server), count) in &parts {
            let candidate = (is_at_home(*slot, *server), *count, *server);
            let best = keeps.entry(*slot).or_insert(candidate);
            *best = candidate.max(*best);
        }
        let mut new_homes = vec![0; homes.len()];
        let mut changed = Vec::new();
        for (slot, (stays, _, server)) in &keeps {
            new_homes[slot.index()] = *server;
            changed.extend((!stays).then_some(*slot));
        }
        // The other parts need numbers. If these are scarce, parts with the same owner and new server share them.
        let mut groups: BTreeMap<(NodeId, u16), Vec<(Slot, u16)>> = BTreeMap::new();
        for (slot, server) in
            parts.keys().filter(|(slot, server)| keeps.get(slot).is_some_and(|(_, _, keeps)| keeps != server))
        {
            groups.entry((owner(*slot), *server)).or_default().push((*slot, *server));
        }
        let free = SLOT_COUNT - homes.len();
        let needed: usize = groups.values().map(Vec::len).sum();
        if groups.len() > free {
            return Err(ContinuumError::NoNumbersLeft { needed: groups.len(), free });
        }
        // At most half of the free numbers, so that the next overlay has some too.
        let budget = (free / 2).max(groups.len());
        let mut number_of: BTreeMap<(Slot, u16), Slot> = BTreeMap::new();
        let mut split = Vec::new();
        for ((owner, server), members) in &groups {
            let spare = budget - groups.len();
            let count = if needed <= budget { members.len() } else { 1 + (members.len() - 1) * spare / needed };
            let first = new_homes.len();
            for (place, member) in members.iter().enumerate() {
                number_of.insert(*member, slot_at(first + place * count / members.len()));
            }
            let numbers = (first..first + count).map(slot_at);
            changed.extend(numbers.clone());
            split.extend(numbers.map(|slot| (slot, *owner)));
            new_homes.extend(std::iter::repeat_n(*server, count));
        }
        changed.sort_unstable();
        let slots: Vec<Slot> = cut.iter().map(|part| number_of.get(part).copied().unwrap_or(part.0)).collect();
        let (points, slots) = if points.is_empty() { (points, slots) } else { merged(&points, &slots) };
        let continuum = Self::of_parts(*self.scheme(), servers, new_homes, Table::new(points, slots));
        let parts = number_of.into_iter().map(|((old, _), new)| (new, old)).collect();
        Ok(Overlay { continuum, split, parts, changed })
    }
}

impl Continuum {
    /// Fraction of all hashes in these slots (ascending), and so about the fraction of keys.
    #[must_use]
    pub fn share(&self, slots: &[Slot]) -> f64 {
        let table = self.parts().0;
        let is_one = |slot: &Slot| slots.binary_search(slot).is_ok();
        if table.points().is_empty() {
            return table.slots().iter().filter(|slot| is_one(slot)).count() as f64 / table.slots().len() as f64;
        }
        // An arc starts after the previous point; the first one after the last point.
        let ends = table.points().iter().copied();
        let begins = table.points().last().copied().into_iter().chain(ends.clone());
        let arcs = begins.zip(ends).zip(table.slots());
        let whole = |begin: u32, end: u32| if begin == end { 1_u64 << 32 } else { u64::from(end.wrapping_sub(begin)) };
        let sum: u64 = arcs.filter(|(_, slot)| is_one(slot)).map(|((begin, end), _)| whole(begin, end)).sum();
        sum as f64 / (1_u64 << 32) as f64
    }
}

/// Slot of the arc that contains this point.
fn arc_at(table: &Table, point: u32) -> Slot {
    let at = table.points().partition_point(|other| *other < point);
    table.slots()[if at == table.slots().len() { 0 } else { at }]
}

/// The arcs between the points of both, each with its current slot and its new server.
fn cut_arcs(table: &Table, next: &Arcs) -> (Vec<u32>, Vec<(Slot, u16)>) {
    let mut points = [table.points(), &next.points].concat();
    points.sort_unstable();
    points.dedup();
    let cut = points.iter().map(|point| (arc_at(table, *point), next.server_at(*point))).collect();
    (points, cut)
}

/// Places of the common refinement.
fn cut_places(slots: &[Slot], servers: &[u16]) -> Result<Vec<(Slot, u16)>, ContinuumError> {
    let (old, new) = (slots.len() as u64, servers.len() as u64);
    let (mut a, mut b) = (old, new);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    let places = old / a * new;
    if places > SLOT_COUNT as u64 {
        return Err(ContinuumError::TooFine(places));
    }
    let places = places as usize;
    Ok(slots.iter().cycle().zip(servers.iter().cycle()).take(places).map(|(slot, server)| (*slot, *server)).collect())
}

/// Removes points between arcs of the same slot.
fn merged(points: &[u32], slots: &[Slot]) -> (Vec<u32>, Vec<Slot>) {
    let mut all: Vec<(u32, Slot)> = Vec::new();
    for (point, slot) in points.iter().zip(slots) {
        match all.last_mut() {
            // Extend the previous arc.
            Some(last) if last.1 == *slot => last.0 = *point,
            _ => all.push((*point, *slot)),
        }
    }
    all.into_iter().unzip()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::{any, prop, proptest};
    use proptest::{prop_assert, prop_assert_eq};

    use super::*;
    use crate::topology::{Hash, Scheme};

    fn list(names: &[(u16, u32)]) -> Vec<Server> {
        let all: BTreeMap<u16, u32> = names.iter().copied().collect();
        all.into_iter().map(|(name, weight)| Server { name: format!("10.1.0.{name}:6379"), weight }).collect()
    }

    fn number(name: &str) -> NodeId {
        let digits = name.trim_start_matches("10.1.0.").trim_end_matches(":6379");
        NodeId(digits.parse().expect("a number"))
    }

    fn home(continuum: &Continuum, key: &[u8]) -> NodeId {
        number(&continuum.home(continuum.slot_of(key)).expect("a slot in use").name)
    }

    #[test]
    fn an_added_server_moves_only_its_own_share() {
        let old = list(&[(1, 1), (2, 1), (3, 1)]);
        let new = list(&[(1, 1), (2, 1), (3, 1), (4, 1)]);
        let before = Continuum::new(Scheme::default(), old).expect("a continuum");
        let overlay =
            before.overlaid(new, |slot| number(&before.home(slot).expect("in use").name)).expect("an overlay");
        let to_new = overlay
            .changed
            .iter()
            .all(|slot| overlay.continuum.home(*slot).is_some_and(|home| home.name.contains(".4:")));
        assert!(to_new && overlay.changed.len() <= 160, "{}", overlay.changed.len());
        assert_eq!(overlay.continuum.slots(), before.slots() + overlay.split.len());
    }

    #[test]
    fn lists_without_a_small_refinement_are_refused() {
        let scheme = Scheme { distribution: Distribution::Modula, ..Scheme::default() };
        let of = |weight| Continuum::new(scheme, list(&[(1, weight)])).expect("a continuum");
        let refused = of(131).overlaid(list(&[(1, 127), (2, 1)]), |_| NodeId(1));
        assert_eq!(refused, Err(ContinuumError::TooFine(131 * 128)));
        assert!(of(128).overlaid(list(&[(1, 127), (2, 1)]), |_| NodeId(1)).is_ok());
    }

    proptest! {
        /// Applies several lists in sequence: each key is unchanged before the moves of a step, and placed by the list
        /// of that step after them.
        #[test]
        fn owners_follow_the_old_list_before_moves_and_the_new_one_after(
            modula in any::<bool>(),
            hash in prop::sample::select(Hash::ALL.to_vec()),
            lists in prop::collection::vec(prop::collection::vec((0_u16..8, 1_u32..4), 1..8), 2..5),
            keys in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..12), 1..60),
        ) {
            let distribution = if modula { Distribution::Modula } else { Distribution::Ketama };
            let scheme = Scheme { hash, tag: None, distribution };
            let mut now = Continuum::new(scheme, list(&lists[0])).expect("a continuum");
            let mut owners: Vec<NodeId> = (0..SLOT_COUNT).map(slot_at).map(|slot| now.home(slot).map_or(NodeId(0), |home| number(&home.name))).collect();
            for servers in &lists[1..] {
                let overlay = match now.overlaid(list(servers), |slot| owners[slot.index()]) {
                    Ok(overlay) => overlay,
                    Err(ContinuumError::TooFine(_) | ContinuumError::NoNumbersLeft { .. }) => break,
                    Err(error) => panic!("{error}"),
                };
                let mut published = owners.clone();
                for (slot, owner) in &overlay.split {
                    prop_assert!(slot.index() >= now.slots() && slot.index() < overlay.continuum.slots());
                    published[slot.index()] = *owner;
                }
                let fresh = Continuum::new(scheme, list(servers)).expect("a continuum");
                let all: Vec<Slot> = (0..overlay.continuum.slots()).map(slot_at).collect();
                prop_assert!((overlay.continuum.share(&all) - 1.0).abs() < 1e-9);
                let differing = overlay.continuum.share(&overlay.changed);
                prop_assert!((0.0..=1.0).contains(&differing) && (differing > 0.0) != overlay.changed.is_empty());
                for key in &keys {
                    let (old, new) = (now.slot_of(key), overlay.continuum.slot_of(key));
                    prop_assert_eq!(published[new.index()], owners[old.index()], "publishing moves no key");
                    prop_assert!(new == old || new.index() >= now.slots(), "a number in use gets no new keys");
                    prop_assert!(new == old || overlay.parts.contains(&(new, old)), "a new number is listed with its origin");
                    prop_assert_eq!(home(&overlay.continuum, key), home(&fresh, key));
                    let moves = home(&now, key) != home(&fresh, key);
                    prop_assert_eq!(overlay.changed.binary_search(&new).is_ok(), moves, "exactly the difference moves");
                }
                for slot in &overlay.changed {
                    published[slot.index()] = number(&overlay.continuum.home(*slot).expect("in use").name);
                }
                let stored = Continuum::try_from(overlay.continuum.stored());
                prop_assert_eq!(stored.as_ref(), Ok(&overlay.continuum));
                (now, owners) = (overlay.continuum, published);
            }
        }
    }
}
