//! Reply of a member to `CLUSTER NODES`: its own slots and marks, and the other members as this member sees them.
//!
//! Only the own line of a member is authoritative, because this member decides which commands it serves.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;

use super::Member;
use crate::topology::{SLOT_COUNT, Slot};

/// A line of `CLUSTER NODES`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Line {
    pub(super) member: Member,
    /// Announced host name. Empty if there is none.
    host_name: String,
    pub(super) is_primary: bool,
    /// The member that reports suspects it, or the cluster counts it as failed.
    pub(super) is_failing: bool,
    /// Whether it has joined, and its address is known.
    is_joined: bool,
    /// Configuration epoch.
    pub(super) epoch: u64,
    pub(super) slots: Vec<RangeInclusive<u16>>,
}

impl Line {
    fn owns(&self, slot: Slot) -> bool {
        self.slots.iter().any(|range| range.contains(&slot.number()))
    }
}

/// A mark of a slot that migrates.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) enum Mark {
    /// Keys leave for this member.
    Migrating(String),
    /// Keys arrive from this member.
    Importing(String),
}

/// Reply of a member to `CLUSTER NODES`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Nodes {
    pub(super) me: String,
    /// By id. One is of the member itself.
    pub(super) lines: BTreeMap<String, Line>,
    /// Marks of the member itself: it does not show marks of other members.
    pub(super) marks: BTreeMap<Slot, Mark>,
}

impl Nodes {
    /// Parses a reply. `None` if it has another form, or more slots of a member than a cluster has.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut nodes = Self { me: String::new(), lines: BTreeMap::new(), marks: BTreeMap::new() };
        for line in text.lines().filter(|line| !line.is_empty()) {
            let mut fields = line.split(' ');
            let (id, address, flags) = (fields.next()?, fields.next()?, fields.next()?);
            let epoch = fields.nth(3)?.parse().ok()?;
            let _link = fields.next()?;
            let flags: Vec<&str> = flags.split(',').collect();
            let is_me = flags.contains(&"myself");
            let mut slots = Vec::new();
            for field in fields.filter(|field| !field.is_empty()) {
                match field.strip_prefix('[').and_then(|field| field.strip_suffix(']')) {
                    Some(mark) if is_me => {
                        let (slot, mark) = parse_mark(mark)?;
                        nodes.marks.insert(slot, mark);
                    }
                    Some(_) => {}
                    None => slots.push(parse_range(field)?),
                }
            }
            if slots.iter().map(ExactSizeIterator::len).sum::<usize>() > SLOT_COUNT {
                return None;
            }
            let mut parts = address.split(',');
            let place = parts.next()?;
            let place = place.split_once('@').map_or(place, |(place, _)| place);
            let (host, port) = place.rsplit_once(':')?;
            let member = Member { id: id.to_owned(), host: host.to_owned(), port: port.parse().ok()? };
            let lacks = |flag| !flags.contains(&flag);
            if is_me {
                nodes.me = id.to_owned();
            }
            let line = Line {
                host_name: parts.next().filter(|name| !name.contains('=')).unwrap_or_default().to_owned(),
                is_primary: flags.contains(&"master"),
                is_failing: flags.contains(&"fail") || flags.contains(&"fail?"),
                is_joined: lacks("handshake") && lacks("noaddr") && (is_me || member.port > 0),
                member,
                epoch,
                slots,
            };
            nodes.lines.insert(id.to_owned(), line);
        }
        nodes.lines.contains_key(&nodes.me).then_some(nodes)
    }

    /// Id of the member that sent the reply.
    #[must_use]
    pub fn me(&self) -> &str {
        &self.me
    }

    /// Primaries that may take part in a move, with the announced host name of each (empty if there is none). A failed
    /// primary without slots has been replaced.
    pub fn primaries(&self) -> impl Iterator<Item = (&Member, &str)> {
        self.lines
            .values()
            .filter(|line| line.is_primary && line.is_joined && (!line.is_failing || !line.slots.is_empty()))
            .map(|line| (&line.member, line.host_name.as_str()))
    }

    /// Address of a member, as this member sees it.
    #[must_use]
    pub fn address(&self, id: &str) -> Option<(&str, u16)> {
        self.lines.get(id).map(|line| (line.member.host.as_str(), line.member.port))
    }

    /// Whether the member itself claims a slot.
    #[must_use]
    pub fn claims(&self, slot: Slot) -> bool {
        self.lines.get(&self.me).is_some_and(|line| line.owns(slot))
    }

    pub(super) fn is_primary(&self) -> bool {
        self.lines.get(&self.me).is_some_and(|line| line.is_primary)
    }
}

/// Parses `93->-id` or `77-<-id`.
fn parse_mark(text: &str) -> Option<(Slot, Mark)> {
    let parts = text.split_once("->-").map(|(slot, id)| (slot, Mark::Migrating(id.to_owned())));
    let (slot, mark) =
        parts.or_else(|| text.split_once("-<-").map(|(slot, id)| (slot, Mark::Importing(id.to_owned()))))?;
    Some((parse_slot(slot)?, mark))
}

fn parse_slot(text: &str) -> Option<Slot> {
    text.parse::<u16>().ok().filter(|slot| usize::from(*slot) < SLOT_COUNT).and_then(Slot::new)
}

/// Parses `5` or `0-5`.
pub(super) fn parse_range(text: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let (first, last) = (parse_slot(first)?, parse_slot(last)?);
    (first <= last).then(|| first.number()..=last.number())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(number: u16) -> Slot {
        Slot::new(number).expect("a slot")
    }

    #[test]
    fn replies_of_all_versions_are_parsed() {
        let text = "aaaa 127.0.0.1:30004@31004,host.example,shard-id=1 slave bbbb 0 1426238317239 4 connected\n\
                    bbbb 10.0.0.1:30002@31002 myself,master - 0 0 2 connected 5461-10922 3 [7->-cccc] [8-<-aaaa]\n\
                    cccc ::1:30003@31003 master,fail? - 0 1426238318243 3 disconnected 10923-16383\n\
                    dddd :0@0 master,noaddr - 0 1 0 disconnected\n";
        let nodes = Nodes::parse(text).expect("a reply");
        assert_eq!((nodes.me(), nodes.address("cccc")), ("bbbb", Some(("::1", 30003))));
        assert!(nodes.claims(slot(3)) && nodes.claims(slot(10922)) && !nodes.claims(slot(4)));
        let primaries: Vec<&str> = nodes.primaries().map(|(member, _)| member.id.as_str()).collect();
        assert_eq!(primaries, ["bbbb", "cccc"]);
        assert_eq!(nodes.marks[&slot(7)], Mark::Migrating("cccc".to_owned()));
        assert_eq!(nodes.marks[&slot(8)], Mark::Importing("aaaa".to_owned()));
        assert_eq!(nodes.lines["aaaa"].host_name, "host.example");
        for wrong in [
            "",
            "aaaa",
            "aaaa 1:1@1 master - 0 0 1 connected",
            "aaaa x myself,master - 0 0 1 connected",
            "aaaa 1:1@1 myself,master - 0 0 x connected",
            "aaaa 1:1@1 myself,master - 0 0 1 connected 9-8",
            "aaaa 1:1@1 myself,master - 0 0 1 connected 16384",
            "aaaa 1:1@1 myself,master - 0 0 1 connected 0-16383 0-1",
            "aaaa 1:1@1 myself,master - 0 0",
            "aaaa 1:1@1 myself,master - 0 0 1 connected [1-bbbb]",
        ] {
            assert_eq!(Nodes::parse(wrong), None, "{wrong}");
        }
    }
}
