//! The mark of the router that serves a fleet, as its nodes keep it ([`switchyard_policy::seat`]).
//!
//! It is kept as the key patterns of an ACL user who is switched off and may do nothing: that is no key, no database holds it, no flush reaches it, and
//! clients of the router never see users of nodes. A node that refuses `ACL` keeps no mark; there a router that was replaced is not told.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use switchyard_policy::seat::{Mark, Standing};
use switchyard_resp::reply;

/// What this router leaves at nodes, and whether another has taken over.
#[derive(Debug)]
pub struct Seat {
    user: String,
    term: u64,
    holder: String,
    version: AtomicU64,
    replaced: OnceLock<String>,
}

impl Seat {
    /// Of a router of this site. `holder` is what no other has.
    #[must_use]
    pub fn new(site: &str, term: u64, holder: String, version: u64) -> Self {
        let replaced = OnceLock::new();
        Self { user: user_of(site), term, holder, version: AtomicU64::new(version), replaced }
    }

    /// The state directory has this version from now on.
    pub fn set_version(&self, version: u64) {
        self.version.fetch_max(version, Ordering::AcqRel);
    }

    /// What stands at nodes that this router serves.
    #[must_use]
    pub fn mark(&self) -> Mark {
        let version = self.version.load(Ordering::Acquire);
        Mark { term: self.term, holder: self.holder.clone(), version, ..Mark::default() }
    }

    /// The question what mark a node has.
    #[must_use]
    pub fn question(&self) -> Vec<String> {
        question(&self.user)
    }

    /// The command that adds our mark to what is there.
    #[must_use]
    pub fn claim(&self) -> Vec<String> {
        setting(&self.user, &[], &self.mark())
    }

    /// The command that puts a mark in the place of what is there.
    #[must_use]
    pub fn replacement(&self, mark: &Mark) -> Vec<String> {
        setting(&self.user, &["resetkeys"], mark)
    }

    /// What a node's answer to the question means. That another router has taken over is remembered.
    pub fn judge(&self, node: &str, answer: &[u8]) -> Standing {
        let standing = match mark_in(answer) {
            Err(_) => Standing::Untold,
            Ok(None) => Standing::Free,
            Ok(Some(mark)) => mark.standing(&self.mark()),
        };
        if let Standing::Replaced { .. } = standing {
            let _ = self.replaced.set(why_not(standing).unwrap_or_default() + &format!(" (at node {node})"));
        }
        standing
    }

    /// Why this router must end, if another has taken over.
    #[must_use]
    pub fn replaced(&self) -> Option<&str> {
        self.replaced.get().map(String::as_str)
    }
}

/// Why a node in this standing is not used, where it is not.
#[must_use]
pub fn why_not(standing: Standing) -> Option<String> {
    match standing {
        Standing::Ours | Standing::Free | Standing::Untold => None,
        Standing::Replaced { term } => {
            Some(format!("another router has taken over the nodes (term {term}), so this one must not use them"))
        }
        Standing::Behind { version } => Some(format!(
            "it was served under a newer state directory (version {version}): with this one, keys that have moved since would not be found. \
             Start with the newest state directory; if that is lost, see `switchyard recover --help`"
        )),
    }
}

/// How the users are named that are marks.
const USER: &str = "switchyard-";

fn user_of(site: &str) -> String {
    format!("{USER}{site}")
}

fn question(user: &str) -> Vec<String> {
    ["ACL", "GETUSER", user].map(str::to_owned).to_vec()
}

fn setting(user: &str, first: &[&str], mark: &Mark) -> Vec<String> {
    let mut command = ["ACL", "SETUSER", user, "off"].map(str::to_owned).to_vec();
    command.extend(first.iter().map(|word| (*word).to_owned()));
    command.extend(mark.words().into_iter().map(|word| format!("~{word}")));
    command
}

/// The question what mark of a site a node has.
#[must_use]
pub fn question_of(site: &str) -> Vec<String> {
    question(&user_of(site))
}

/// The site of which this ACL user is the mark, if it is one.
#[must_use]
pub fn site_of_mark(user: &str) -> Option<&str> {
    user.strip_prefix(USER).filter(|site| site.len() == 8 && site.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// The mark in the answer to the question.
///
/// # Errors
/// With the words of a node that keeps no marks.
pub fn mark_in(answer: &[u8]) -> Result<Option<Mark>, String> {
    if reply::is_error(answer) {
        return Err(String::from_utf8_lossy(reply::text(answer).unwrap_or_default()).into_owned());
    }
    // Key patterns are a text or an array, by version and protocol; nothing else in the answer looks like one of ours.
    let text = String::from_utf8_lossy(answer);
    Ok(Mark::read(text.split_whitespace().map(|word| word.trim_start_matches('~'))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mark_is_found_in_what_nodes_answer() {
        let mark = Mark { term: 8, holder: "1f-a0".to_owned(), version: 6, beat: 3, ..Mark::default() };
        for answer in [
            "*12\r\n$5\r\nflags\r\n*1\r\n+off\r\n$4\r\nkeys\r\n$35\r\n~holder:8:1f-a0 ~version:6 ~beat:3\r\n",
            "*10\r\n$4\r\nkeys\r\n*3\r\n$14\r\nholder:8:1f-a0\r\n$9\r\nversion:6\r\n$6\r\nbeat:3\r\n",
        ] {
            assert_eq!(mark_in(answer.as_bytes()), Ok(Some(mark.clone())));
        }
        assert_eq!(mark_in(b"*-1\r\n"), Ok(None));
        assert_eq!(mark_in(b"_\r\n"), Ok(None));
        assert!(mark_in(b"-NOPERM no\r\n").is_err());
    }

    #[test]
    fn a_router_that_was_replaced_remembers_it() {
        let seat = Seat::new("5ite", 7, "me".to_owned(), 2);
        assert_eq!(seat.question(), ["ACL", "GETUSER", "switchyard-5ite"]);
        assert_eq!(seat.claim(), ["ACL", "SETUSER", "switchyard-5ite", "off", "~holder:7:me", "~version:2"]);
        assert_eq!(seat.judge("a", b"*1\r\n$12\r\n~holder:7:me\r\n"), Standing::Ours);
        assert_eq!(seat.judge("a", b"-ERR unknown command\r\n"), Standing::Untold);
        assert_eq!(seat.replaced(), None);
        assert_eq!(seat.judge("a", b"*1\r\n$13\r\n~holder:8:you\r\n"), Standing::Replaced { term: 8 });
        assert!(seat.replaced().is_some_and(|why| why.contains("term 8") && why.contains("node a")));
    }
}
