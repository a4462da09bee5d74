//! Finds a command by the client's name for it, in any case, without allocation.
//!
//! Runs for every request, so names are compared as numbers: up to 16 bytes are converted to upper case in two `u64`s,
//! which with the length identify the name. An open-addressing table with these keys contains commands and subcommands
//! (with their container in the key). A `HashMap` would use SipHash and convert byte by byte, at several times the
//! cost.

use std::borrow::Cow;

use super::{Command, learn, table};
use crate::request::Args;

/// Result of [`CommandTable::find`].
#[derive(Clone, Copy, Debug)]
pub enum Lookup<'t> {
    /// A command or subcommand.
    Command(&'t Command),
    /// Unknown command.
    Unknown,
    /// Unknown subcommand of this container.
    UnknownSubcommand(&'t Command),
}

/// Maximum name length of a command or subcommand; longer commands of nodes are not learnt.
const NAME_MAX: usize = 64;

/// Replaces the container's id for top-level commands.
const TOP: u16 = u16::MAX;

/// Replaces the command's id in an empty slot.
const EMPTY: u16 = u16::MAX;

/// An upper-case name as numbers: equal for names that differ only in case, different for other names up to 16 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Folded {
    head: u64,
    tail: u64,
    len: u16,
}

/// Converts the ASCII lower-case letters among eight bytes to upper case, all at once.
#[inline]
fn upper(bytes: u64) -> u64 {
    const LOW: u64 = 0x7f7f_7f7f_7f7f_7f7f;
    const EACH: u64 = 0x0101_0101_0101_0101;
    let heptets = bytes & LOW;
    // In each byte, the top bit of the first sum means above 'z', and of the second sum, at or above 'a'. Neither sum
    // can carry.
    let above_z = heptets + EACH * (0x7f - b'z' as u64);
    let from_a = heptets + EACH * (0x80 - b'a' as u64);
    let lower = (from_a ^ above_z) & !bytes & !LOW;
    bytes ^ (lower >> 2)
}

#[inline]
fn fold(name: &[u8]) -> Folded {
    let len = name.len() as u16;
    // Two loads, which overlap in shorter names.
    if let (Some(head), Some(tail), true) = (name.first_chunk::<8>(), name.last_chunk::<8>(), name.len() > 8) {
        let middle = if name.len() > 16 { fold_middle(&name[8..name.len() - 8]) } else { 0 };
        return Folded { head: upper(u64::from_le_bytes(*head)) ^ middle, tail: upper(u64::from_le_bytes(*tail)), len };
    }
    let head = if let (Some(head), Some(tail)) = (name.first_chunk::<4>(), name.last_chunk::<4>()) {
        u64::from(u32::from_le_bytes(*head)) | u64::from(u32::from_le_bytes(*tail)) << 32
    } else {
        match *name {
            [] => 0,
            [a] => u64::from(a),
            [a, b] => u64::from(a) | u64::from(b) << 8,
            [a, b, c, ..] => u64::from(a) | u64::from(b) << 8 | u64::from(c) << 16,
        }
    };
    Folded { head: upper(head), tail: 0, len }
}

/// Hash of the middle of a name longer than 16 bytes. Such names are also compared byte by byte.
#[cold]
fn fold_middle(middle: &[u8]) -> u64 {
    middle
        .iter()
        .fold(0, |hash: u64, byte| (hash ^ u64::from(byte.to_ascii_uppercase())).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    name: Folded,
    parent: u16,
    id: u16,
}

/// All known commands: the builtin ones, and those learnt from nodes.
#[derive(Clone, Debug)]
pub struct CommandTable {
    commands: Vec<Command>,
    /// The length is a power of two, at most half is used.
    slots: Box<[Slot]>,
    /// 64 minus the base-two logarithm of the length.
    shift: u32,
}

impl CommandTable {
    /// Creates the table of builtin commands: Redis, Valkey, and Switchyard.
    pub fn builtin() -> Self {
        let mut table = Self { commands: Vec::with_capacity(table::ROWS.len()), slots: Box::default(), shift: 0 };
        for row in table::ROWS {
            table.push(Command {
                name: Cow::Borrowed(row.name),
                id: 0,
                arity: row.arity,
                flags: row.flags,
                keys: row.keys.clone(),
                handling: row.handling,
                categories: row.categories(),
                access: row.access,
                container: false,
            });
        }
        table.index();
        table
    }

    /// Finds the command of a call.
    #[inline]
    pub fn find(&self, args: &Args<'_>) -> Lookup<'_> {
        let Some(command) = args.get(0).and_then(|name| self.at(name, TOP)) else { return Lookup::Unknown };
        if command.container && args.len() > 1 {
            return match args.get(1).and_then(|name| self.at(name, command.id)) {
                Some(subcommand) => Lookup::Command(subcommand),
                None => Lookup::UnknownSubcommand(command),
            };
        }
        Lookup::Command(command)
    }

    /// Finds a command by its full name (`GET`, `CONFIG|GET`), in any case.
    pub fn by_name(&self, name: &str) -> Option<&Command> {
        match name.split_once('|') {
            Some((container, subcommand)) => self.at(subcommand.as_bytes(), self.at(container.as_bytes(), TOP)?.id),
            None => self.at(name.as_bytes(), TOP),
        }
    }

    /// Command with this id.
    pub fn get(&self, id: u16) -> Option<&Command> {
        self.commands.get(usize::from(id))
    }

    /// All commands and subcommands, by id.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Command> {
        self.commands.iter()
    }

    /// Number of commands and subcommands; ids are below it.
    pub fn len(&self) -> usize {
        self.commands.len()
    }

    /// Always false: the builtin commands are always present.
    pub fn is_empty(&self) -> bool {
        self.commands.is_empty()
    }

    /// Adds unknown commands and returns their number. Existing entries never change: a node cannot redefine GET, and
    /// of two nodes with different modules for a name the first wins.
    pub fn learn<'a>(&mut self, commands: impl IntoIterator<Item = &'a learn::LearntCommand>) -> usize {
        let before = self.commands.len();
        let mut learnt: Vec<&learn::LearntCommand> = commands.into_iter().collect();
        // Containers first, so that their subcommands find them.
        learnt.sort_by_key(|command| command.name.contains('|'));
        for command in learnt {
            let name = command.name.to_ascii_uppercase();
            let (front, back) = name.split_once('|').unwrap_or((&name, "-"));
            // Names are shown to other clients and in logs.
            let fits =
                |part: &str| (1..=NAME_MAX).contains(&part.len()) && part.bytes().all(|byte| byte.is_ascii_graphic());
            let room = self.commands.len() < usize::from(EMPTY);
            let orphan = name.contains('|') && self.by_name(front).is_none();
            if !room || !fits(front) || !fits(back) || orphan || self.by_name(&name).is_some() {
                continue;
            }
            let flags = command.mapped_flags();
            let keys = command.mapped_keys();
            let handling = learn::handling(&keys);
            self.push(Command {
                name: Cow::Owned(name),
                id: 0,
                arity: command.arity,
                flags,
                keys,
                handling,
                categories: command.mapped_categories(),
                access: command.mapped_access(),
                container: false,
            });
            if self.commands.len() * 2 > self.slots.len() {
                self.index();
            } else {
                self.enter(self.commands.len() - 1);
            }
        }
        self.commands.len() - before
    }

    fn push(&mut self, command: Command) {
        let id = self.commands.len() as u16;
        self.commands.push(Command { id, ..command });
    }

    /// Rebuilds the slots.
    fn index(&mut self) {
        let size = (self.commands.len() * 2).next_power_of_two();
        self.shift = u64::BITS - size.trailing_zeros();
        let none = Slot { name: Folded { head: 0, tail: 0, len: 0 }, parent: TOP, id: EMPTY };
        self.slots = vec![none; size].into_boxed_slice();
        (0..self.commands.len()).for_each(|id| self.enter(id));
    }

    /// Adds a command to the slots, which must have a free one.
    fn enter(&mut self, id: usize) {
        let name = self.commands[id].name.clone();
        let (parent, own) = match name.split_once('|') {
            Some((container, subcommand)) => {
                let Some(parent) = self.at(container.as_bytes(), TOP).map(|c| c.id) else { return };
                self.commands[usize::from(parent)].container = true;
                (parent, subcommand)
            }
            None => (TOP, &*name),
        };
        let folded = fold(own.as_bytes());
        let mut place = self.place(folded, parent);
        while self.slots[place].id != EMPTY {
            place = (place + 1) & (self.slots.len() - 1);
        }
        self.slots[place] = Slot { name: folded, parent, id: id as u16 };
    }

    #[inline]
    fn place(&self, name: Folded, parent: u16) -> usize {
        let mixed = name.head
            ^ name.tail.rotate_left(29)
            ^ (u64::from(name.len) | u64::from(parent) << 16).wrapping_mul(0x2545_f491_4f6c_dd1d);
        (mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }

    #[inline]
    fn at(&self, name: &[u8], parent: u16) -> Option<&Command> {
        if name.len() > NAME_MAX {
            return None;
        }
        let folded = fold(name);
        let mut place = self.place(folded, parent);
        loop {
            let slot = self.slots.get(place)?;
            if slot.id == EMPTY {
                return None;
            }
            if slot.name == folded && slot.parent == parent {
                let command = self.commands.get(usize::from(slot.id))?;
                if name.len() <= 16 || own_name(&command.name).as_bytes().eq_ignore_ascii_case(name) {
                    return Some(command);
                }
            }
            place = (place + 1) & (self.slots.len() - 1);
        }
    }
}

/// Name of a subcommand without its container.
fn own_name(name: &str) -> &str {
    name.split_once('|').map_or(name, |(_, own)| own)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_letters_are_folded() {
        for byte in 0..=255u8 {
            let folded = upper(u64::from_le_bytes([byte, b'a', byte, b'z', byte, b'{', byte, b'`']));
            let b = byte.to_ascii_uppercase();
            assert_eq!(folded.to_le_bytes(), [b, b'A', b, b'Z', b, b'{', b, b'`'], "byte {byte}");
        }
    }

    #[test]
    fn names_that_differ_fold_differently() {
        let names = [
            "",
            "A",
            "AA",
            "AAA",
            "ABA",
            "AAAA",
            "AAAAA",
            "GETA",
            "AGET",
            "ABCDEFGH",
            "ABCDEFGHI",
            "ABCDEFGHIABCDEFG",
            "AB",
            "BA",
        ];
        for a in names {
            for b in names {
                assert_eq!(fold(a.as_bytes()) == fold(b.to_ascii_lowercase().as_bytes()), a == b, "{a} {b}");
            }
        }
    }
}
