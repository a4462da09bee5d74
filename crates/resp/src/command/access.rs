//! Access control properties of commands: categories (`@read`, `@dangerous`), and read or write access to each key.
//!
//! Defined by the rows in `table.rs`. A test compares every command with a real server's `ACL DRYRUN`.
//!
//! A command has at most two kinds of keys, in the order of `find_keys`: the first, and the rest.
//! [`Command::key_access`] handles access that depends on options (`SET ... GET`, `BITFIELD` without a write).

use super::{Command, Keys, is_option};
use crate::request::Args;

/// Access of a command to a key, or permission of a rule: read, write, both, or neither (`EXISTS` needs no permission
/// on the value).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Access(pub u8);

impl Access {
    /// Neither: only existence or metadata.
    pub const NO: Access = Access(0);
    /// The value is returned, copied, or determines the effect.
    pub const R: Access = Access(1);
    /// The key is changed or deleted.
    pub const W: Access = Access(2);
    /// Read and write.
    pub const RW: Access = Access(3);

    /// Whether `self` includes all of `other`.
    #[inline]
    pub const fn covers(self, other: Access) -> bool {
        self.0 & other.0 == other.0
    }
}

/// A set of categories.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Categories(pub u32);

/// Category names in the order of Redis. The index is the bit.
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
    /// Category with this name, in any case.
    pub fn named(name: &str) -> Option<Self> {
        CATEGORIES.iter().position(|known| known.eq_ignore_ascii_case(name)).map(|bit| Self(1 << bit))
    }

    /// Category of a table row. An unknown name does not compile there.
    pub(super) const fn of(name: &str) -> Self {
        let mut bit = 0;
        while !CATEGORIES[bit].as_bytes().eq_ignore_ascii_case(name.as_bytes()) {
            bit += 1;
        }
        Self(1 << bit)
    }

    /// Whether the sets intersect.
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Union of the sets.
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl Command {
    /// Access to the key at index `place` of [`Command::find_keys`].
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

    /// Categories of the command.
    pub fn categories(&self) -> Categories {
        self.categories
    }
}

/// Like Redis's `bitfieldGetKeys`: unknown options count as writes.
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
