//! CLUSTER and related commands. With `cluster.emulate` the router appears as a Redis Cluster to clients that require
//! one.
//!
//! Clients see routers, not nodes: one member with all slots, or, with several announced addresses, one member per
//! address with a share of the slots. Every router serves every slot, so no client is ever redirected. The topology of
//! the nodes is hidden, because direct clients would bypass the router.
//!
//! Off by default; then subcommands are refused as by a server without cluster support. Some clients (rueidis,
//! StackExchange.Redis) query cluster support and would limit an application to the commands of a cluster. Only queries
//! for the slot of a key, and for the keys of a slot, are always answered, for operators.

#[cfg(any(test, fuzzing))]
pub(crate) mod fuzz;

use std::collections::HashSet;
use std::fmt::Write as _;

use sha1::{Digest, Sha1};
use switchyard_policy::topology::{NodeId, SLOT_COUNT, Slot};
use switchyard_resp::{encode, reply};

use super::command::parse;
use super::downstreams::Downstreams;
use super::downstreams::waits::Stall;
use super::flow::Flow;
use super::gather::Gathers;
use super::invocation::Invocation;

use super::multi_step::{MultiStepCommand, Next, StepRequest};
use super::turn::Turn;
use super::upstreams::Upstreams;
use crate::lane::Lane;
use crate::shared::RoutingSnapshot;
use crate::slab::Handle;

/// Error of a server without cluster support.
const DISABLED: &str = "ERR This instance has cluster support disabled";

/// Maximum keys of a node scanned in a search for the keys of a slot. Nodes have no index by slot, so the search scans
/// all keys.
const SEARCHED_MAX: usize = 1_000_000;

/// Keys scanned per step of such a search.
const SEARCHED_AT_ONCE: usize = 1000;

/// A router as seen by clients.
#[derive(Debug)]
struct Member {
    host: String,
    port: u16,
    id: String,
    first: u16,
    last: u16,
}

impl Member {
    /// Port of the cluster bus. It does not exist, but clients parse it.
    fn bus_port(&self) -> u16 {
        self.port.checked_add(10_000).unwrap_or(0)
    }
}

/// Returns the id of a member: constant over routers and restarts.
fn id_of(host: &str, port: u16) -> String {
    hex::encode(Sha1::digest(format!("switchyard {host}:{port}")))
}

fn members_of(addresses: &[(String, u16)]) -> Vec<Member> {
    let count = addresses.len();
    let member = |(index, (host, port)): (usize, &(String, u16))| Member {
        host: host.clone(),
        port: *port,
        id: id_of(host, *port),
        first: (index * SLOT_COUNT / count) as u16,
        last: ((index + 1) * SLOT_COUNT / count - 1) as u16,
    };
    addresses.iter().enumerate().map(member).collect()
}

/// Returns the cursor and the keys in a reply to SCAN. The cursor of another reply is 0: the search ends.
fn scanned(answer: &[u8]) -> (&[u8], impl Iterator<Item = &[u8]>) {
    let mut pair = reply::elements(answer);
    let cursor = pair.next().and_then(reply::text).unwrap_or(b"0");
    (cursor, pair.next().into_iter().flat_map(reply::elements).filter_map(reply::text))
}

/// Search for the keys of one slot by SCAN.
#[derive(Debug)]
struct SlotKeys {
    slot: Slot,
    node: NodeId,
    /// Nodes with placement overrides for keys of the slot, queried afterwards.
    others: Vec<NodeId>,
    /// GETKEYSINSLOT: maximum number of keys. COUNTKEYSINSLOT: `None`.
    wanted: Option<usize>,
    /// SCAN may return a key twice.
    keys: HashSet<Vec<u8>>,
    looked_at: usize,
}

impl SlotKeys {
    fn request(&self, cursor: &[u8]) -> Vec<StepRequest> {
        let mut request = Vec::new();
        encode::command(&mut request, [&b"SCAN"[..], cursor, b"COUNT", SEARCHED_AT_ONCE.to_string().as_bytes()]);
        vec![StepRequest { node: self.node, lane: Lane::Slow, requests: vec![request] }]
    }
}

impl MultiStepCommand for SlotKeys {
    fn next(&mut self, turn: &Turn, _: &Upstreams, _: bool, parts: Vec<Vec<u8>>) -> Next {
        let answer = parts.into_iter().next().unwrap_or_default();
        if reply::is_error(&answer) {
            return Next::Done(answer);
        }
        let topology = &turn.routing().topology;
        // Without placement overrides, all keys of the owner count, also while the slot moves.
        let parted = topology.has_override(self.slot);
        let (cursor, keys) = scanned(&answer);
        for key in keys {
            if topology.slot_of(key) == self.slot && (!parted || topology.node_of(key) == self.node) {
                self.keys.insert(key.to_vec());
            }
        }
        self.looked_at += SEARCHED_AT_ONCE;
        let enough = self.wanted.is_some_and(|wanted| self.keys.len() >= wanted);
        let mut out = Vec::new();
        if cursor == b"0"
            && !enough
            && let Some(other) = self.others.pop()
        {
            self.node = other;
            return Next::Round(self.request(b"0"));
        }
        if cursor != b"0" && !enough {
            if self.looked_at < SEARCHED_MAX {
                return Next::Round(self.request(cursor));
            }
            encode::error(
                &mut out,
                &format!(
                    "ERR the owner of slot {} has more than {SEARCHED_MAX} keys. It keeps no index of slots, so all of them would have to be examined; use SCAN",
                    self.slot.number()
                ),
            );
            return Next::Done(out);
        }
        match self.wanted {
            None => encode::integer(&mut out, self.keys.len() as i64),
            Some(wanted) => {
                let shown = self.keys.len().min(wanted);
                encode::header(&mut out, b'*', shown);
                for key in self.keys.iter().take(shown) {
                    encode::bulk(&mut out, key);
                }
            }
        }
        Next::Done(out)
    }
}

fn slots(out: &mut Vec<u8>, members: &[Member], resp3: bool) {
    encode::header(out, b'*', members.len());
    for m in members {
        encode::header(out, b'*', 3);
        encode::integer(out, i64::from(m.first));
        encode::integer(out, i64::from(m.last));
        encode::header(out, b'*', 4);
        encode::bulk(out, m.host.as_bytes());
        encode::integer(out, i64::from(m.port));
        encode::bulk(out, m.id.as_bytes());
        encode::map(out, 0, resp3);
    }
}

fn shards(out: &mut Vec<u8>, members: &[Member], resp3: bool) {
    encode::header(out, b'*', members.len());
    for m in members {
        encode::map(out, 2, resp3);
        encode::bulk(out, b"slots");
        encode::header(out, b'*', 2);
        encode::integer(out, i64::from(m.first));
        encode::integer(out, i64::from(m.last));
        encode::bulk(out, b"nodes");
        encode::header(out, b'*', 1);
        encode::map(out, 7, resp3);
        encode::bulk(out, b"id");
        encode::bulk(out, m.id.as_bytes());
        encode::bulk(out, b"port");
        encode::integer(out, i64::from(m.port));
        for (name, value) in [("ip", m.host.as_str()), ("endpoint", m.host.as_str()), ("role", "master")] {
            encode::bulk(out, name.as_bytes());
            encode::bulk(out, value.as_bytes());
        }
        encode::bulk(out, b"replication-offset");
        encode::integer(out, 0);
        encode::bulk(out, b"health");
        encode::bulk(out, b"online");
    }
}

fn nodes(members: &[Member], own: usize) -> String {
    let mut text = String::new();
    for (index, m) in members.iter().enumerate() {
        let myself = if index == own { "myself," } else { "" };
        let epoch = index + 1;
        let (host, port, bus) = (&m.host, m.port, m.bus_port());
        let _ = writeln!(
            text,
            "{} {host}:{port}@{bus} {myself}master - 0 0 {epoch} connected {}-{}",
            m.id, m.first, m.last
        );
    }
    text
}

/// `failed`: number of slots whose node has failed.
fn cluster_info(failed: usize, members: usize) -> String {
    let all = SLOT_COUNT;
    // Like a cluster without required full coverage: available slots are served.
    let state = if failed < all { "ok" } else { "fail" };
    format!(
        "cluster_state:{state}\r\ncluster_slots_assigned:{all}\r\ncluster_slots_ok:{}\r\ncluster_slots_pfail:0\r\n\
         cluster_slots_fail:{failed}\r\ncluster_known_nodes:{members}\r\ncluster_size:{members}\r\n\
         cluster_current_epoch:{members}\r\ncluster_my_epoch:1\r\ncluster_stats_messages_sent:0\r\n\
         cluster_stats_messages_received:0\r\ntotal_cluster_links_buffer_limit_exceeded:0\r\n",
        all - failed
    )
}

/// Returns the reply of an emulated subcommand, or the text of an error. `id`: argument of the subcommand. `own`: index
/// of the member that the client is connected to. `failed`: counts the slots whose node has failed.
fn emulated(
    subcommand: &str,
    id: &[u8],
    members: &[Member],
    own: usize,
    failed: impl FnOnce() -> usize,
    resp3: bool,
) -> Result<Vec<u8>, String> {
    let mut out = Vec::new();
    match subcommand {
        "MYID" => encode::bulk(&mut out, members[own].id.as_bytes()),
        "MYSHARDID" => encode::bulk(&mut out, id_of(&members[own].id, 0).as_bytes()),
        "LINKS" => encode::header(&mut out, b'*', 0),
        "SLOTS" => slots(&mut out, members, resp3),
        "SHARDS" => shards(&mut out, members, resp3),
        "NODES" => encode::verbatim(&mut out, nodes(members, own).as_bytes(), resp3),
        "INFO" => encode::verbatim(&mut out, cluster_info(failed(), members.len()).as_bytes(), resp3),
        "REPLICAS" | "SLAVES" | "COUNT-FAILURE-REPORTS" => {
            if !members.iter().any(|m| m.id.as_bytes() == id) {
                return Err(format!("ERR Unknown node {}", String::from_utf8_lossy(id)));
            }
            if subcommand.ends_with("REPORTS") {
                encode::integer(&mut out, 0);
            } else {
                encode::header(&mut out, b'*', 0);
            }
        }
        _ => return Err("ERR unknown subcommand. Try CLUSTER HELP.".to_owned()),
    }
    Ok(out)
}

/// Parses the arguments of COUNTKEYSINSLOT and GETKEYSINSLOT. `Err` has the text of an error.
fn slot_and_count(slot: Option<&[u8]>, count: Option<&[u8]>) -> Result<(Slot, Option<usize>), &'static str> {
    const NO_INTEGER: &str = "ERR value is not an integer or out of range";
    let slot = slot.and_then(parse::<i64>).ok_or(NO_INTEGER)?;
    let slot =
        u16::try_from(slot).ok().and_then(Slot::new).filter(|slot| !slot.is_passage()).ok_or("ERR Invalid slot")?;
    let Some(count) = count else { return Ok((slot, None)) };
    let count = parse::<i64>(count).ok_or(NO_INTEGER)?;
    Ok((slot, Some(usize::try_from(count).map_err(|_| "ERR Invalid number of keys")?)))
}

/// Answers READONLY, READWRITE and `ASKING`. No effect, because the router shows neither replicas nor slots in
/// transit.
pub(super) fn cluster_mode(
    turn: &Turn,
    down: &mut Downstreams,
    routing: &RoutingSnapshot,
    handle: Handle,
    class: u8,
) -> Flow {
    if routing.live.cluster.is_none() {
        return down.refuse(turn, handle, class, DISABLED);
    }
    down.answer(turn, handle, class, b"+OK\r\n");
    Flow::Next
}

/// Returns the members that a client sees, and the index of the one it is connected to.
fn members(turn: &Turn, down: &Downstreams, routing: &RoutingSnapshot, handle: Handle) -> (Vec<Member>, usize) {
    let local = down.get(handle).and_then(|c| c.identity().local());
    let local = local.map_or_else(
        || ("127.0.0.1".to_string(), turn.shared().port),
        |a| (a.ip().to_canonical().to_string(), a.port()),
    );
    let announced = routing.live.cluster.as_ref().map(|c| c.announce.as_slice()).unwrap_or_default();
    if announced.is_empty() {
        return (members_of(&[local]), 0);
    }
    let own = announced.iter().position(|a| *a == local).unwrap_or(0);
    (members_of(announced), own)
}

impl Gathers {
    pub(super) fn cluster(&mut self, turn: &Turn, down: &mut Downstreams, call: &Invocation<'_>) -> Flow {
        let Invocation { routing, handle, command, args, .. } = *call;
        let class = command.class() as u8;
        let subcommand = command.name.strip_prefix("CLUSTER|").unwrap_or_default();
        // These do not depend on emulation, and no client infers a cluster from their replies.
        match subcommand {
            "KEYSLOT" => {
                let mut out = Vec::new();
                // Clients compare this with their own function, which has no rules.
                let slot = routing.topology.placement().slot_of_channel(args.get(2).unwrap_or_default());
                encode::integer(&mut out, i64::from(slot.number()));
                down.answer(turn, handle, class, &out);
                return Flow::Next;
            }
            "COUNTKEYSINSLOT" | "GETKEYSINSLOT" => return self.keys_in_slot(turn, down, call),
            _ if routing.live.cluster.is_none() => return down.refuse(turn, handle, class, DISABLED),
            _ => {}
        }
        let Some(client) = down.get(handle) else { return Flow::Close };
        let resp3 = client.resp3();
        let (members, own) = members(turn, down, routing, handle);
        let failed = || {
            let down = routing.topology.nodes().filter(|n| turn.shared().with_facts(n.id, |f| f.failure.is_some()));
            // A node may have passages, too.
            down.map(|n| routing.topology.slots_of(n.id)).sum::<usize>().min(SLOT_COUNT)
        };
        match emulated(subcommand, args.get(2).unwrap_or_default(), &members, own, failed, resp3) {
            Ok(reply) => down.answer(turn, handle, class, &reply),
            Err(error) => return down.refuse(turn, handle, class, &error),
        }
        Flow::Next
    }

    fn keys_in_slot(&mut self, turn: &Turn, down: &mut Downstreams, call: &Invocation<'_>) -> Flow {
        let Invocation { routing, handle, args, .. } = *call;
        let class = call.class();
        let (slot, wanted) = match slot_and_count(args.get(2), args.get(3)) {
            Ok(found) => found,
            Err(error) => return down.refuse(turn, handle, class, error),
        };
        let Some(client) = down.get_mut(handle) else { return Flow::Close };
        if !client.may_take(Lane::Slow) {
            return Flow::Stall(Stall::Barrier);
        }
        let node = routing.topology.owner(slot);
        let mut others: Vec<NodeId> = routing.topology.overrides_in(slot).map(|(_, at)| at).collect();
        others.sort_unstable();
        others.dedup();
        let search = SlotKeys { slot, node, others, wanted, keys: HashSet::new(), looked_at: 0 };
        let first = search.request(b"0");
        self.begin_rounds(turn, down, handle, class, Box::new(search), first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_share_all_slots_without_gap_or_overlap() {
        for count in [1, 2, 3, 7, 100] {
            let addresses: Vec<_> = (0..count).map(|i| ("10.0.0.1".to_string(), 6000 + i)).collect();
            let members = members_of(&addresses);
            let mut next = 0;
            for member in &members {
                assert_eq!(member.first, next);
                assert!(member.last >= member.first);
                next = member.last + 1;
            }
            assert_eq!(usize::from(next), SLOT_COUNT);
            let ids: HashSet<&str> = members.iter().map(|m| m.id.as_str()).collect();
            assert_eq!(ids.len(), usize::from(count));
            assert!(ids.iter().all(|id| id.len() == 40));
        }
    }
}
