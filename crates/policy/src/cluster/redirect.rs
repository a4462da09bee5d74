//! Redirects: errors with which members of a cluster refuse commands (Redis Cluster specification, "Redirection
//! and resharding").

use crate::topology::{SLOT_COUNT, Slot};

/// Address of a member in a redirect.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place<'a> {
    /// Host name or IP address. `None`: the host of the member that sent the redirect.
    pub host: Option<&'a str>,
    /// Port.
    pub port: u16,
}

/// Refusal of a command by a member. The member has not executed it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Redirect<'a> {
    /// The slot belongs to another member.
    Moved {
        /// Slot of the command's keys.
        slot: Slot,
        /// Owner of the slot.
        to: Place<'a>,
    },
    /// The slot migrates, and its owner does not have the key: only this command belongs to the other member, after
    /// `ASKING`.
    Ask {
        /// Slot of the command's keys.
        slot: Slot,
        /// Target of the migration.
        to: Place<'a>,
    },
    /// The slot migrates, and each of the two members has some of the command's keys.
    TryAgain,
    /// No member serves the slot, or the member cannot reach most of the cluster.
    Down,
}

impl<'a> Redirect<'a> {
    /// Parses the text of an error, without its type byte. `None` for other errors. A script may return any text, so for
    /// scripts the caller must compare the slot with that of their keys.
    #[must_use]
    pub fn of(error: &'a [u8]) -> Option<Self> {
        let text = std::str::from_utf8(error).ok()?.trim_end();
        let (code, rest) = text.split_once(' ').unwrap_or((text, ""));
        match code {
            "MOVED" => target(rest).map(|(slot, to)| Self::Moved { slot, to }),
            "ASK" => target(rest).map(|(slot, to)| Self::Ask { slot, to }),
            "TRYAGAIN" => Some(Self::TryAgain),
            "CLUSTERDOWN" => Some(Self::Down),
            _ => None,
        }
    }
}

/// Parses `3999 127.0.0.1:6381`. The host may be empty, `?` (unknown), or an IPv6 address with or without brackets.
fn target(text: &str) -> Option<(Slot, Place<'_>)> {
    let (slot, address) = text.split_once(' ')?;
    let slot = slot.parse::<u16>().ok().filter(|slot| usize::from(*slot) < SLOT_COUNT).and_then(Slot::new)?;
    let (host, port) = address.rsplit_once(':')?;
    let port = port.parse().ok().filter(|port| *port > 0)?;
    let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    Some((slot, Place { host: Some(host).filter(|host| !host.is_empty() && *host != "?"), port }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects_are_parsed_in_all_forms_of_servers() {
        let slot = Slot::new(3999).expect("a slot");
        let to = |host| Place { host, port: 6381 };
        for (text, expected) in [
            ("MOVED 3999 127.0.0.1:6381", Some(Redirect::Moved { slot, to: to(Some("127.0.0.1")) })),
            ("MOVED 3999 redis-1.example:6381", Some(Redirect::Moved { slot, to: to(Some("redis-1.example")) })),
            ("MOVED 3999 :6381", Some(Redirect::Moved { slot, to: to(None) })),
            ("MOVED 3999 ?:6381", Some(Redirect::Moved { slot, to: to(None) })),
            ("ASK 3999 ::1:6381", Some(Redirect::Ask { slot, to: to(Some("::1")) })),
            ("ASK 3999 [::1]:6381", Some(Redirect::Ask { slot, to: to(Some("::1")) })),
            ("TRYAGAIN Multiple keys request during rehashing of slot", Some(Redirect::TryAgain)),
            ("CLUSTERDOWN Hash slot not served", Some(Redirect::Down)),
            ("MOVED 16384 a:1", None),
            ("MOVED 3999 a:0", None),
            ("MOVED 3999 a:99999", None),
            ("MOVED 3999", None),
            ("MOVED", None),
            ("ERR MOVED 3999 a:1", None),
            ("", None),
        ] {
            assert_eq!(Redirect::of(text.as_bytes()), expected, "{text}");
        }
        assert_eq!(Redirect::of(b"MOVED 3999 \xff:1"), None);
    }
}
