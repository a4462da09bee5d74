//! What access rules say about commands: their categories (`@read`, `@dangerous`), and whether each of their keys is
//! read or written.
//!
//! The rows in `table.rs` say it of each command; a test asks a real server's `ACL DRYRUN` about every command.
//!
//! A command's keys are at most of two kinds, in the order in which `find_keys` gives them: the first, and the rest.
//! What depends on the options (`SET ... GET`, `BITFIELD` without a write) is in [`Command::key_access`].

use super::{Command, Keys, is_option};
use crate::request::Args;

/// What a command does with a key, or a rule permits: reading, writing, both or neither (`EXISTS` needs no permission
/// on the value).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Access(pub u8);

impl Access {
    /// Neither: only whether the key is there, or what it is.
    pub const NO: Access = Access(0);
    /// Its value is returned, copied or decides what happens.
    pub const R: Access = Access(1);
    /// It is changed or deleted.
    pub const W: Access = Access(2);
    /// Both.
    pub const RW: Access = Access(3);

    /// True where everything of `other` is in `self`.
    #[inline]
    pub const fn covers(self, other: Access) -> bool {
        self.0 & other.0 == other.0
    }
}

/// A set of categories.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Categories(pub u32);

/// The categories by name, in the order in which Redis lists them; the place is the bit.
pub const CATEGORIES: [&str; 21] = [
    "keyspace",
    "read",
    "write",
    "set",
    "sortedset",
    "list",
    "hash",
    "string",
    "bitmap",
    "hyperloglog",
    "geo",
    "stream",
    "pubsub",
    "admin",
    "fast",
    "slow",
    "blocking",
    "dangerous",
    "connection",
    "transaction",
    "scripting",
];

impl Categories {
    /// The category of that name, in any case.
    pub fn named(name: &str) -> Option<Self> {
        CATEGORIES.iter().position(|known| known.eq_ignore_ascii_case(name)).map(|bit| Self(1 << bit))
    }

    /// The category that the table calls so; a name that is none does not compile there.
    pub(super) const fn of(name: &str) -> Self {
        let mut bit = 0;
        while !CATEGORIES[bit].as_bytes().eq_ignore_ascii_case(name.as_bytes()) {
            bit += 1;
        }
        Self(1 << bit)
    }

    /// True where the two have one in common.
    pub const fn meets(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Both together.
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl Command {
    /// What the command does with the key that [`Command::find_keys`] found as number `place`.
    pub fn key_access(&self, args: &Args<'_>, place: usize) -> Access {
        match &*self.name {
            "SET" => {
                let asks = (3..args.len()).any(|i| args.get(i).is_none_or(|arg| is_option(arg, b"get")));
                if asks { Access::RW } else { Access::W }
            }
            "BITFIELD" if bitfield_only_reads(args) => Access::R,
            _ => match &self.keys {
                Keys::Specs(specs) => specs
                    .iter()
                    .filter(|spec| !spec.not_key)
                    .fold(Access::NO, |all, spec| Access(all.0 | spec.access.0)),
                _ if place == 0 => self.access.0,
                _ => self.access.1,
            },
        }
    }

    /// The categories it is in.
    pub fn categories(&self) -> Categories {
        self.categories
    }
}

/// As Redis's `bitfieldGetKeys`: what is no option it knows counts as writing.
fn bitfield_only_reads(args: &Args<'_>) -> bool {
    let mut index = 2;
    while index < args.len() {
        let Some(arg) = args.get(index) else { return false };
        let rest = args.len() - index - 1;
        if is_option(arg, b"get") && rest >= 2 {
            index += 3;
        } else if is_option(arg, b"overflow") && rest >= 1 {
            index += 2;
        } else {
            return false;
        }
    }
    true
}
