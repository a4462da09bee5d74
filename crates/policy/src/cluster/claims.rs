//! Slots that a member claims in its reply to `CLUSTER NODES`, with its open slots, whose keys migrate one by one.
//!
//! Only the line of the member itself counts, because this member decides which commands it serves. The other lines give
//! the addresses of the members to and from which keys migrate: a member without slots is in no other report.

use std::ops::RangeInclusive;

use super::nodes::{Mark, Nodes};
use crate::topology::Slot;

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
    /// Parses a reply. `None` if it has another form.
    #[must_use]
    pub fn of(reply: &str) -> Option<Self> {
        let nodes = Nodes::parse(reply)?;
        let own = nodes.lines.get(&nodes.me)?;
        let peer = |id: &str| {
            let place = nodes.address(id).filter(|(host, port)| !host.is_empty() && *port > 0);
            Peer { id: id.to_owned(), place: place.map(|(host, port)| (host.to_owned(), port)) }
        };
        let others = nodes.lines.iter().filter(|(id, line)| **id != nodes.me && !line.slots.is_empty());
        let others = others.map(|(id, _)| peer(id)).collect();
        let mut claims = Self { epoch: own.epoch, slots: own.slots.clone(), others, ..Self::default() };
        for (slot, mark) in &nodes.marks {
            match mark {
                Mark::Migrating(target) => claims.migrating.push((*slot, peer(target))),
                Mark::Importing(source) => claims.importing.push((*slot, peer(source))),
            }
        }
        Some(claims)
    }
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
    }
}
