//! Slots that a member claims in its reply to `CLUSTER NODES`, with its open slots, whose keys migrate one by one.
//!
//! Only the line of the member itself counts, because this member decides which commands it serves. The other lines give
//! the addresses of the members to and from which keys migrate: a member without slots is in no other report.

use std::ops::RangeInclusive;

use crate::topology::{SLOT_COUNT, Slot};

/// A member in the reply of another member.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Peer {
    /// Id in the cluster.
    pub id: String,
    /// IP address and port for clients. `None` if the member that replied does not have them.
    pub place: Option<(String, u16)>,
}

/// Slots of one member, by its own line of `CLUSTER NODES`.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Claims {
    /// Configuration epoch of the member. It rises whenever the member takes a slot, unless it is the greatest already.
    pub epoch: u64,
    /// Slots that the member owns.
    pub slots: Vec<RangeInclusive<u16>>,
    /// Slots whose keys leave the member, with the target.
    pub migrating: Vec<(Slot, Peer)>,
    /// Slots whose keys arrive at the member, with the source.
    pub importing: Vec<(Slot, Peer)>,
    /// Other members that own slots, as this member sees it.
    pub others: Vec<Peer>,
}

impl Claims {
    /// Parses a reply. `None` if it does not have the member's own line, if a field of this line is invalid, or if it has
    /// more slots than a cluster.
    #[must_use]
    pub fn of(reply: &str) -> Option<Self> {
        let is_own = |line: &&str| line.split(' ').nth(2).is_some_and(|flags| flags.split(',').any(|f| f == "myself"));
        let line = reply.lines().find(is_own)?;
        let peer = |id: &str| Peer { id: id.to_owned(), place: place_of(reply, id) };
        let has_slots = |line: &&str| line.split(' ').skip(8).any(|field| !field.is_empty() && !field.starts_with('['));
        let others = reply.lines().filter(|line| !is_own(line)).filter(has_slots);
        let others = others.filter_map(|line| line.split(' ').next()).map(peer).collect();
        let epoch = line.split(' ').nth(6)?.parse().ok()?;
        let mut claims = Self { epoch, others, ..Self::default() };
        for field in line.split(' ').skip(8).filter(|field| !field.is_empty()) {
            if let Some(open) = field.strip_prefix('[').and_then(|field| field.strip_suffix(']')) {
                if let Some((slot, id)) = open.split_once("->-") {
                    claims.migrating.push((slot_of(slot)?, peer(id)));
                } else if let Some((slot, id)) = open.split_once("-<-") {
                    claims.importing.push((slot_of(slot)?, peer(id)));
                }
                continue;
            }
            let (first, last) = field.split_once('-').unwrap_or((field, field));
            claims.slots.push(slot_of(first)?.number()..=slot_of(last)?.number());
        }
        (claims.slots.iter().map(ExactSizeIterator::len).sum::<usize>() <= SLOT_COUNT).then_some(claims)
    }
}

fn slot_of(text: &str) -> Option<Slot> {
    text.parse::<u16>().ok().filter(|slot| usize::from(*slot) < SLOT_COUNT).and_then(Slot::new)
}

/// Address of the member with this id: `IP:PORT@BUS-PORT,HOST-NAME`.
fn place_of(reply: &str, id: &str) -> Option<(String, u16)> {
    let line = reply.lines().find(|line| line.split(' ').next() == Some(id))?;
    let (host, port) = line.split(' ').nth(1)?.split(['@', ',']).next()?.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port > 0)?;
    (!host.is_empty()).then(|| (host.to_owned(), port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_line_has_slots_and_open_slots() {
        let reply = "aa 10.0.0.1:7001@17001,host myself,master - 0 0 3 connected 0-100 200 [7->-bb] [300-<-cc]\n\
                     bb fe80::2:7002@17002,other master - 0 1 2 connected 101-199 201-16383\n\
                     cc :0@0 master,noaddr - 0 1 2 connected\n";
        let slot = |number| Slot::new(number).expect("a slot");
        let b = Peer { id: "bb".to_owned(), place: Some(("fe80::2".to_owned(), 7002)) };
        let claims = Claims {
            epoch: 3,
            slots: vec![0..=100, 200..=200],
            migrating: vec![(slot(7), b.clone())],
            importing: vec![(slot(300), Peer { id: "cc".to_owned(), place: None })],
            others: vec![b],
        };
        assert_eq!(Claims::of(reply), Some(claims));
        let none = Claims { epoch: 4, ..Claims::default() };
        assert_eq!(Claims::of("aa a:1@2 myself,slave bb 0 0 4 connected\r\n"), Some(none));
        for bad in [
            "",
            "bb a:1@2 master - 0 0 3 connected 0-5\n",
            "aa a:1@2 myself,master - 0 0 3 connected 0-16384\n",
            "aa a:1@2 myself,master - 0 0 x connected 0-5\n",
            "aa a:1@2 myself,master - 0 0\n",
            "aa a:1@2 myself,master - 0 0 3 connected 0-16383 0-1\n",
        ] {
            assert_eq!(Claims::of(bad), None, "{bad}");
        }
    }
}
