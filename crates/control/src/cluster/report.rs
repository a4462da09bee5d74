//! Reads the map of a cluster from its members: `CLUSTER SLOTS`, which every version and every managed service has.
//!
//! `CLUSTER SHARDS` would show more, but services have placed wrong addresses there, and old servers lack it.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use switchyard_policy::cluster::{Member, Shard};
use switchyard_router::NodeAccess;

use crate::nodes::{Answer, Endpoint, NodeConnection};

/// Returns the access to a server at an address, as configured for all members.
pub type AccessOf = dyn Fn(&Endpoint) -> NodeAccess + Send + Sync;

/// Owners of the slots, as reported by one member, and access to them.
#[derive(Clone, Debug)]
pub struct Report {
    /// Owners of the slots.
    pub shards: Vec<Shard>,
    /// Access to each owner.
    pub access: BTreeMap<Member, NodeAccess>,
}

/// An owner of slots that has replicas, as reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ReplicatedMember {
    pub(super) primary: (Member, NodeAccess),
    pub(super) replicas: Vec<(Member, NodeAccess)>,
}

/// Reads the map of a cluster.
pub struct ClusterReader {
    /// Configured members. Any member shows the others.
    seeds: Vec<Endpoint>,
    /// Addresses to use in place of reported addresses (NAT, tunnels).
    addresses: BTreeMap<Endpoint, Endpoint>,
    access: Box<AccessOf>,
    timeout: Duration,
}

impl std::fmt::Debug for ClusterReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClusterReader").field("seeds", &self.seeds).field("addresses", &self.addresses).finish()
    }
}

impl ClusterReader {
    /// Creates a reader. `timeout`: for connecting to a member, and for each of its replies.
    pub fn new(
        seeds: Vec<Endpoint>,
        addresses: BTreeMap<Endpoint, Endpoint>,
        access: Box<AccessOf>,
        timeout: Duration,
    ) -> Self {
        Self { seeds, addresses, access, timeout }
    }

    /// Returns the first usable report of a member: of the configured ones, and then of the known ones. `turn` selects
    /// the first member to try, so that a member that is cut off from the others is not always preferred. Members in
    /// `replaced` are only tried if there are no others.
    ///
    /// # Errors
    /// The reason of each member, if there is none.
    pub fn read(&self, known: &[Member], replaced: &[Member], turn: usize) -> Result<Report, String> {
        let mut places = self.seeds.clone();
        for member in known {
            let place = self.mapped(&member.host, member.port);
            if !places.contains(&place) {
                places.push(place);
            }
        }
        let count = places.len();
        places.rotate_left(turn % count.max(1));
        let replaced: Vec<Endpoint> = replaced.iter().map(|member| self.mapped(&member.host, member.port)).collect();
        places.sort_by_key(|place| replaced.contains(place));
        let mut reasons = Vec::new();
        for place in places {
            match self.read_from(&place) {
                Ok(report) => return Ok(report),
                Err(why) => reasons.push(format!("{place} {why}")),
            }
        }
        Err(reasons.join("; "))
    }

    /// Replaces the slots of these members by the slots that they claim themselves: none, if a member does not reply. So
    /// one such member does not prevent the use of the rest. Returns whether all members claim some.
    pub fn confirmed(&self, report: Report, members: &BTreeSet<Member>) -> (Report, bool) {
        let Report { mut shards, mut access } = report;
        let mut is_whole = true;
        for member in members {
            let own = self.read_from(&self.mapped(&member.host, member.port));
            let (own, more) = own.map_or_else(|_| (Vec::new(), BTreeMap::new()), |own| (own.shards, own.access));
            let claimed: Vec<Shard> = own.into_iter().filter(|shard| shard.primary.id == member.id).collect();
            is_whole &= !claimed.is_empty();
            access.extend(more.into_iter().filter(|(of, _)| of.id == member.id));
            shards.retain(|shard| shard.primary.id != member.id);
            shards.extend(claimed);
        }
        (Report { shards, access }, is_whole)
    }

    fn read_from(&self, place: &Endpoint) -> Result<Report, String> {
        let mut connection = NodeConnection::open(&self.resolved(place), self.timeout)?;
        let answer = connection.call(&["CLUSTER", "SLOTS"]).map_err(|error| format!("does not answer: {error}"))?;
        if let Some(error) = answer.error() {
            return Err(match error.contains("cluster support disabled") {
                true => "is not a member of a cluster: name standalone servers with --node".to_owned(),
                false => format!("refuses CLUSTER SLOTS: {error}"),
            });
        }
        let shards = shards(&answer, place)?;
        let access = shards.iter().map(|shard| (shard.primary.clone(), self.access_of(&shard.primary)));
        Ok(Report { access: access.collect(), shards })
    }

    /// Returns the member at an address. A server that refuses `CLUSTER MYID` gets its address as its id.
    pub(super) fn member_at(&self, host: &str, port: u16) -> Result<Member, String> {
        let mut connection = NodeConnection::open(&self.resolved(&self.mapped(host, port)), self.timeout)?;
        let answer = connection.call(&["CLUSTER", "MYID"]).map_err(|error| error.to_string())?;
        let id = if answer.error().is_some() { format!("{host}:{port}") } else { answer.text() };
        Ok(Member { id, host: host.to_owned(), port })
    }

    /// Returns the owners of slots that have replicas.
    pub(super) fn replicated(&self, shards: &[Shard]) -> Vec<ReplicatedMember> {
        let replicated: BTreeMap<&Member, &[Member]> = shards
            .iter()
            .filter(|shard| !shard.replicas.is_empty())
            .map(|shard| (&shard.primary, &shard.replicas[..]))
            .collect();
        let access = |member: &Member| (member.clone(), self.access_of(member));
        let of = |(primary, replicas): (&Member, &[Member])| ReplicatedMember {
            primary: access(primary),
            replicas: replicas.iter().map(access).collect(),
        };
        replicated.into_iter().map(of).collect()
    }

    /// Connects to a member.
    pub(super) fn connect(&self, member: &Member) -> Result<NodeConnection, String> {
        NodeConnection::open(&self.access_of(member), self.timeout)
    }

    /// Timeout of connections, and of replies by default.
    pub(super) fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Access to a member.
    pub(super) fn access_of(&self, member: &Member) -> NodeAccess {
        NodeAccess { name: member.name(), ..self.resolved(&self.mapped(&member.host, member.port)) }
    }

    /// Returns the address to use in place of a reported one.
    fn mapped(&self, host: &str, port: u16) -> Endpoint {
        let reported = Endpoint::new(&host.to_ascii_lowercase(), port);
        self.addresses.get(&reported).cloned().unwrap_or(reported)
    }

    fn resolved(&self, place: &Endpoint) -> NodeAccess {
        let access = (self.access)(place);
        match place.resolve() {
            Ok(address) => NodeAccess { address: Some(address), unresolved: None, ..access },
            Err(why) => NodeAccess { address: None, unresolved: Some(why), ..access },
        }
    }
}

/// Parses a reply to `CLUSTER SLOTS` of the member at `place`, which stands for hosts that the member does not know.
fn shards(answer: &Answer, place: &Endpoint) -> Result<Vec<Shard>, String> {
    let senseless = || "sends a reply to CLUSTER SLOTS in an unknown form".to_owned();
    let mut shards = Vec::new();
    for range in answer.items() {
        let parts = range.items();
        let number =
            |at: usize| parts.get(at).and_then(|part: &Answer| part.number()).and_then(|n| u16::try_from(n).ok());
        let primary = parts.get(2).and_then(|member| member_of(member, place));
        let (Some(first), Some(last), Some(primary)) = (number(0), number(1), primary) else { return Err(senseless()) };
        let replicas = parts.iter().skip(3).filter_map(|member| member_of(member, place)).collect();
        shards.push(Shard { slots: first..=last, primary, replicas });
    }
    if shards.is_empty() { Err("knows no owner of any slot".to_owned()) } else { Ok(shards) }
}

fn member_of(answer: &Answer, place: &Endpoint) -> Option<Member> {
    let parts = answer.items();
    let host = parts.first().map(Answer::text).unwrap_or_default();
    let host = if host.is_empty() || host == "?" { place.host().to_owned() } else { host };
    let port = parts.get(1).and_then(Answer::number).and_then(|port| u16::try_from(port).ok())?;
    let port = if port == 0 { place.parts().1 } else { port };
    // Before Redis 4 there are no ids.
    let id = parts.get(2).map(Answer::text).filter(|id| !id.is_empty());
    Some(Member { id: id.unwrap_or_else(|| format!("{host}:{port}")), host, port })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(reply: &str) -> Result<Vec<Shard>, String> {
        let place = Endpoint::new("seed", 7000);
        shards(&Answer(reply.replace(' ', "\r\n").into_bytes()), &place)
    }

    #[test]
    fn owners_are_read_from_replies_of_all_versions() {
        let member = |id: &str, host: &str, port| Member { id: id.to_owned(), host: host.to_owned(), port };
        let shard = |slots, primary, replicas: &[Member]| Shard { slots, primary, replicas: replicas.to_vec() };
        // With a replica and metadata, as Redis 7 sends it.
        let first = "*4 :0 :100 *4 $8 10.0.0.1 :7001 $2 aa *2 $2 ip $4 none *4 $8 10.0.0.2 :7002 $2 bb *0 ";
        // An unknown host, and an empty one.
        let others = "*3 :101 :200 *3 $-1 :7003 $2 cc *3 :201 :16383 *3 $1 ? :0 $2 dd ";
        let read = parsed(&format!("*3 {first}{others}")).expect("owners");
        assert_eq!(
            read,
            [
                shard(0..=100, member("aa", "10.0.0.1", 7001), &[member("bb", "10.0.0.2", 7002)]),
                shard(101..=200, member("cc", "seed", 7003), &[]),
                shard(201..=16383, member("dd", "seed", 7000), &[]),
            ]
        );
    }

    #[test]
    fn replies_without_owners_are_refused() {
        for reply in ["*0 ", "+OK ", "*1 *2 :0 :1 ", "*1 *3 :0 :99999 *3 $1 a :1 $1 b ", "*1 *3 :0 :1 *1 $1 a "] {
            assert!(parsed(reply).is_err(), "{reply}");
        }
    }
}
