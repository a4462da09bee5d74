//! Ownership record of the router that serves a fleet, stored at its nodes ([`switchyard_policy::ownership`]).
//!
//! Stored as the key patterns of a disabled ACL user without permissions: it is not a key, no database contains it, no
//! flush removes it, and the router's clients never see users of nodes. A node that refuses `ACL` stores no record, so
//! a router that was replaced is not notified there.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use switchyard_policy::ownership::{OwnershipRecord, OwnershipStatus, Predecessor, TAKE_OVER_WAIT_US};
use switchyard_policy::topology::NodeId;
use switchyard_resp::reply;

use crate::lock::lock;

/// This router's ownership record, and whether another router has taken over.
#[derive(Debug)]
pub struct FleetOwnership {
    user: String,
    term: u64,
    holder: String,
    version: AtomicU64,
    replaced: OnceLock<String>,
    before: EarlierRouters,
    admissions: Mutex<BTreeMap<NodeId, NodeAdmission>>,
}

/// Earlier routers, as far as known from the state directory.
#[derive(Clone, Debug, Default)]
pub struct EarlierRouters {
    /// Last router before this one.
    pub predecessor: Predecessor,
    /// Nodes of the slot map at the start. An earlier router may have served them.
    pub nodes: BTreeSet<NodeId>,
}

/// A node's process that has ended all connections of earlier routers.
#[derive(Debug)]
struct NodeAdmission {
    run_id: String,
    /// Time from which commands may be sent. Until then an earlier router may reply from its hot copies.
    free_at: Instant,
}

/// Whether a connection to a node may be used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Admission {
    /// The ownership record must first be read and passed to [`FleetOwnership::admit_process`].
    Unmet,
    /// Not before this time.
    Waits(Instant),
    /// Now.
    Admitted,
}

impl FleetOwnership {
    /// Creates the record of a router of this site. `holder` is unique among routers.
    #[must_use]
    pub fn new(site: &str, term: u64, holder: String, version: u64, before: EarlierRouters) -> Self {
        let (replaced, met) = (OnceLock::new(), Mutex::default());
        Self { user: user_of(site), term, holder, version: AtomicU64::new(version), replaced, before, admissions: met }
    }

    /// Whether commands may be sent to this process of a node.
    #[must_use]
    pub fn admission(&self, node: NodeId, run_id: &str) -> Admission {
        match lock(&self.admissions).get(&node).filter(|met| met.run_id == run_id) {
            None => Admission::Unmet,
            Some(met) if Instant::now() < met.free_at => Admission::Waits(met.free_at),
            Some(_) => Admission::Admitted,
        }
    }

    /// Records the ownership record of a node's process. `answer` is the reply to [`Self::question`], sent after the
    /// node has confirmed the end of all connections of other routers. If one of these may have hot copies, no command
    /// is sent for [`TAKE_OVER_WAIT_US`]. Returns whether that time begins now.
    pub fn admit_process(&self, node: NodeId, run_id: &str, answer: &[u8]) -> bool {
        let mut all = lock(&self.admissions);
        let before = all.get(&node);
        if before.is_some_and(|met| met.run_id == run_id) {
            return false;
        }
        let is_inherited = before.is_none() && self.before.nodes.contains(&node);
        let text = String::from_utf8_lossy(answer);
        // A node that refuses `ACL` has given no copies, because they need the record.
        let waits = !reply::is_error(answer)
            && self.before.predecessor.may_have_copies(words_of(&text), &self.holder, is_inherited);
        let now = Instant::now();
        let free_at = if waits { now + Duration::from_micros(TAKE_OVER_WAIT_US) } else { now };
        let free_at = before.map_or(free_at, |met| met.free_at.max(free_at));
        all.insert(node, NodeAdmission { run_id: run_id.to_owned(), free_at });
        waits
    }

    /// Sets the version of the state directory. Never decreases.
    pub fn set_version(&self, version: u64) {
        self.version.fetch_max(version, Ordering::AcqRel);
    }

    /// Records a node's process that stores no ownership records. Hot copies need a record, so the node is used at
    /// once.
    pub fn admit_process_without_record(&self, node: NodeId, run_id: &str) {
        self.admit_process(node, run_id, b"-");
    }

    /// Record that this router stores at its nodes.
    #[must_use]
    pub fn record(&self) -> OwnershipRecord {
        let version = self.version.load(Ordering::Acquire);
        OwnershipRecord { term: self.term, holder: self.holder.clone(), version, ..OwnershipRecord::default() }
    }

    /// Command that reads a node's record.
    #[must_use]
    pub fn question(&self) -> Vec<String> {
        question(&self.user)
    }

    /// Command that adds our record to the existing ones.
    #[must_use]
    pub fn claim(&self) -> Vec<String> {
        setting(&self.user, &[], &self.record())
    }

    /// Command that replaces all records with `record`.
    #[must_use]
    pub fn replacement(&self, mark: &OwnershipRecord) -> Vec<String> {
        setting(&self.user, &["resetkeys"], mark)
    }

    /// Interprets a node's reply to [`Self::question`]. Remembers if another router has taken over.
    pub fn check_reply(&self, node: &str, answer: &[u8]) -> OwnershipStatus {
        let standing = match parse_record(answer) {
            Err(_) => OwnershipStatus::Unmarked,
            Ok(None) => OwnershipStatus::Free,
            Ok(Some(mark)) => mark.standing(&self.record()),
        };
        if let OwnershipStatus::Replaced { .. } = standing {
            let _ = self.replaced.set(refusal_reason(standing).unwrap_or_default() + &format!(" (at node {node})"));
        }
        standing
    }

    /// Reason why this router must stop, if another has taken over.
    #[must_use]
    pub fn replaced(&self) -> Option<&str> {
        self.replaced.get().map(String::as_str)
    }
}

/// Returns the reason why a node in this state must not be used, if so.
#[must_use]
pub fn refusal_reason(standing: OwnershipStatus) -> Option<String> {
    match standing {
        OwnershipStatus::Ours | OwnershipStatus::Free | OwnershipStatus::Unmarked => None,
        OwnershipStatus::Replaced { term } => {
            Some(format!("another router has taken over the nodes (term {term}), so this one must not use them"))
        }
        OwnershipStatus::Behind { version } => Some(format!(
            "it was served with a newer state directory (version {version}): with this one, keys moved since then would not be found. \
             Start with the newest state directory; if that is lost, see `switchyard recover --help`"
        )),
    }
}

/// Prefix of the names of ACL users that are ownership records.
const USER: &str = "switchyard-";

fn user_of(site: &str) -> String {
    format!("{USER}{site}")
}

fn question(user: &str) -> Vec<String> {
    ["ACL", "GETUSER", user].map(str::to_owned).to_vec()
}

fn setting(user: &str, first: &[&str], mark: &OwnershipRecord) -> Vec<String> {
    let mut command = ["ACL", "SETUSER", user, "off"].map(str::to_owned).to_vec();
    command.extend(first.iter().map(|word| (*word).to_owned()));
    command.extend(mark.words().into_iter().map(|word| format!("~{word}")));
    command
}

/// Command that reads a node's record of a site.
#[must_use]
pub fn query_of_site(site: &str) -> Vec<String> {
    question(&user_of(site))
}

/// Returns the site of this ACL user, if it is an ownership record.
#[must_use]
pub fn site_of_record_user(user: &str) -> Option<&str> {
    user.strip_prefix(USER).filter(|site| site.len() == 8 && site.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// Returns the record in a node's reply.
///
/// # Errors
/// With the text of a node that stores no records.
pub fn parse_record(answer: &[u8]) -> Result<Option<OwnershipRecord>, String> {
    if reply::is_error(answer) {
        return Err(String::from_utf8_lossy(reply::text(answer).unwrap_or_default()).into_owned());
    }
    Ok(OwnershipRecord::read(words_of(&String::from_utf8_lossy(answer))))
}

/// Returns the words of a record in a reply. Key patterns are a string or an array, depending on version and protocol;
/// no other part of the reply looks like a record.
fn words_of(text: &str) -> impl Iterator<Item = &str> {
    text.split_whitespace().map(|word| word.trim_start_matches('~'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ownership_records_are_parsed_from_node_replies() {
        let mark =
            OwnershipRecord { term: 8, holder: "1f-a0".to_owned(), version: 6, beat: 3, ..OwnershipRecord::default() };
        for answer in [
            "*12\r\n$5\r\nflags\r\n*1\r\n+off\r\n$4\r\nkeys\r\n$35\r\n~holder:8:1f-a0 ~version:6 ~beat:3\r\n",
            "*10\r\n$4\r\nkeys\r\n*3\r\n$14\r\nholder:8:1f-a0\r\n$9\r\nversion:6\r\n$6\r\nbeat:3\r\n",
        ] {
            assert_eq!(parse_record(answer.as_bytes()), Ok(Some(mark.clone())));
        }
        assert_eq!(parse_record(b"*-1\r\n"), Ok(None));
        assert_eq!(parse_record(b"_\r\n"), Ok(None));
        assert!(parse_record(b"-NOPERM no\r\n").is_err());
    }

    #[test]
    fn a_replaced_router_remembers_it() {
        let seat = FleetOwnership::new("5ite", 7, "me".to_owned(), 2, EarlierRouters::default());
        assert_eq!(seat.question(), ["ACL", "GETUSER", "switchyard-5ite"]);
        assert_eq!(seat.claim(), ["ACL", "SETUSER", "switchyard-5ite", "off", "~holder:7:me", "~version:2"]);
        assert_eq!(seat.check_reply("a", b"*1\r\n$12\r\n~holder:7:me\r\n"), OwnershipStatus::Ours);
        assert_eq!(seat.check_reply("a", b"-ERR unknown command\r\n"), OwnershipStatus::Unmarked);
        assert_eq!(seat.replaced(), None);
        assert_eq!(seat.check_reply("a", b"*1\r\n$13\r\n~holder:8:you\r\n"), OwnershipStatus::Replaced { term: 8 });
        assert!(seat.replaced().is_some_and(|why| why.contains("term 8") && why.contains("node a")));
    }

    #[test]
    fn node_use_waits_for_a_predecessor_with_hot_copies() {
        let before =
            EarlierRouters { predecessor: Predecessor::Unknown, nodes: BTreeSet::from([NodeId(0), NodeId(1)]) };
        let seat = FleetOwnership::new("5ite", 7, "me".to_owned(), 2, before);
        let (old, stopped) = (b"$27\r\n~holder:6:old ~holder:7:me\r\n", b"$26\r\n~holder:6:old ~stopped:old\r\n");
        assert_eq!(seat.admission(NodeId(0), "a"), Admission::Unmet);
        seat.admit_process(NodeId(0), "a", old);
        assert!(matches!(seat.admission(NodeId(0), "a"), Admission::Waits(_)));
        seat.admit_process(NodeId(0), "a", stopped);
        assert!(matches!(seat.admission(NodeId(0), "a"), Admission::Waits(_)), "a later reading shortens nothing");
        assert_eq!(seat.admission(NodeId(0), "b"), Admission::Unmet, "another process");
        seat.admit_process(NodeId(0), "b", b"$12\r\n~holder:7:me\r\n");
        assert!(matches!(seat.admission(NodeId(0), "b"), Admission::Waits(_)), "the wait of the node continues");
        seat.admit_process(NodeId(1), "a", stopped);
        seat.admit_process(NodeId(2), "a", b"*-1\r\n");
        seat.admit_process(NodeId(3), "a", b"-NOPERM\r\n");
        assert!([1, 2, 3].iter().all(|node| seat.admission(NodeId(*node), "a") == Admission::Admitted));
    }
}
