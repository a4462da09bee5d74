//! Binary encoding of records. Hand-written, because most of a journal is fingerprints, which must cost no more than
//! their 16 bytes.
//!
//! A version, a kind, and the fields in order: numbers in groups of seven bits (LEB128), texts and lists with a length
//! prefix, slots as ranges. The journal detects changed bytes (a checksum per entry); here every length is checked
//! against the remaining bytes.

use super::{Record, StaleCopies};
use crate::migration::{Durability, Fingerprint, Key, Process, Protocol, Side};
use crate::topology::{MoveId, NodeId, SLOT_NUMBERS, Slot};

/// First byte of every record. Increment it for another layout.
const VERSION: u8 = 1;

/// Error of a record that cannot be decoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Damaged {
    /// Offset from the start of the record, bytes.
    pub at: usize,
    /// Expected content at that offset.
    pub expected: &'static str,
}

impl std::fmt::Display for Damaged {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "a record of the journal of moves cannot be read: at byte {}, expected {}", self.at, self.expected)
    }
}

impl std::error::Error for Damaged {}

impl Record {
    /// Appends the encoded record to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(VERSION);
        match self {
            Self::Begun { move_id, source, target, slots, protocol, durability } => {
                out.push(0);
                number(out, move_id.0);
                number(out, source.0.into());
                number(out, target.0.into());
                put_slots(out, slots);
                out.push(*protocol as u8);
                out.push(match durability {
                    Durability::Memory => 0,
                    Durability::Aof => 1,
                    Durability::Replica => 2,
                });
            }
            Self::LegBegun { move_id, leg, slots, source, target } => {
                head(out, 1, *move_id, *leg);
                put_slots(out, slots);
                put_process(out, source);
                put_process(out, target);
            }
            Self::LegMoving { move_id, leg } => head(out, 2, *move_id, *leg),
            Self::Met { move_id, leg, side, process } => {
                head(out, 3, *move_id, *leg);
                put_side(out, *side);
                put_process(out, process);
            }
            Self::Moved { move_id, leg, keys } => {
                head(out, 4, *move_id, *leg);
                put_keys(out, keys);
            }
            Self::Committed { move_id, leg, keys } => {
                head(out, 12, *move_id, *leg);
                put_keys(out, keys);
            }
            Self::RolledBack { move_id, leg, why } => {
                head(out, 5, *move_id, *leg);
                put_text(out, why);
            }
            Self::Returned { move_id, leg, keys } => {
                head(out, 6, *move_id, *leg);
                put_keys(out, keys);
            }
            Self::LegEnded { move_id, leg, owner } => {
                head(out, 7, *move_id, *leg);
                put_side(out, *owner);
            }
            Self::GivenUp { move_id, leg, side } => {
                head(out, 10, *move_id, *leg);
                put_side(out, *side);
            }
            Self::CutOver { move_id, leg } => head(out, 11, *move_id, *leg),
            Self::Behind { move_id, leg, keys } => {
                head(out, 13, *move_id, *leg);
                let (any, keys) = if let StaleCopies::These(keys) = keys { (0, &keys[..]) } else { (1, &[][..]) };
                out.push(any);
                put_keys(out, keys);
            }
            Self::Ended { move_id } => {
                out.push(8);
                number(out, move_id.0);
            }
            Self::Keys { move_id, keys } => {
                out.push(9);
                number(out, move_id.0);
                number(out, keys.len() as u64);
                for key in keys {
                    number(out, key.len() as u64);
                    out.extend_from_slice(key);
                }
            }
        }
    }

    /// Decodes one record, which must use all bytes.
    ///
    /// # Errors
    /// If the bytes are not a valid record.
    pub fn decode(bytes: &[u8]) -> Result<Self, Damaged> {
        let mut input = Input { bytes, at: 0 };
        if input.byte()? != VERSION {
            return Err(Damaged { at: 0, expected: "a supported version (a newer switchyard may have written it)" });
        }
        let kind = input.byte()?;
        let move_id = MoveId(input.number()?);
        let record = match kind {
            0 => Self::Begun {
                move_id,
                source: input.node()?,
                target: input.node()?,
                slots: input.slots()?,
                protocol: input.one_of(&Protocol::ALL.map(|(protocol, _)| protocol))?,
                durability: input.one_of(&[Durability::Memory, Durability::Aof, Durability::Replica])?,
            },
            1 => Self::LegBegun {
                move_id,
                leg: input.leg()?,
                slots: input.slots()?,
                source: input.process()?,
                target: input.process()?,
            },
            2 => Self::LegMoving { move_id, leg: input.leg()? },
            3 => Self::Met { move_id, leg: input.leg()?, side: input.side()?, process: input.process()? },
            4 => Self::Moved { move_id, leg: input.leg()?, keys: input.keys()? },
            5 => Self::RolledBack { move_id, leg: input.leg()?, why: input.text()? },
            6 => Self::Returned { move_id, leg: input.leg()?, keys: input.keys()? },
            7 => Self::LegEnded { move_id, leg: input.leg()?, owner: input.side()? },
            8 => Self::Ended { move_id },
            9 => Self::Keys { move_id, keys: input.names()? },
            11 => Self::CutOver { move_id, leg: input.leg()? },
            12 => Self::Committed { move_id, leg: input.leg()?, keys: input.keys()? },
            13 => {
                let (leg, any, keys) = (input.leg()?, input.one_of(&[false, true])?, input.keys()?);
                Self::Behind { move_id, leg, keys: if any { StaleCopies::Any } else { StaleCopies::These(keys) } }
            }
            10 => Self::GivenUp { move_id, leg: input.leg()?, side: input.side()? },
            _ => return Err(Damaged { at: 1, expected: "a known kind of record" }),
        };
        if input.at != bytes.len() {
            return Err(input.expected("the end"));
        }
        Ok(record)
    }
}

fn head(out: &mut Vec<u8>, kind: u8, move_id: MoveId, leg: u32) {
    out.push(kind);
    number(out, move_id.0);
    number(out, leg.into());
}

fn number(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    number(out, text.len() as u64);
    out.extend_from_slice(text.as_bytes());
}

fn put_process(out: &mut Vec<u8>, process: &Process) {
    put_text(out, &process.run_id);
    number(out, process.client_id);
}

fn put_side(out: &mut Vec<u8>, side: Side) {
    out.push(match side {
        Side::Source => 0,
        Side::Target => 1,
    });
}

fn put_keys(out: &mut Vec<u8>, keys: &[Fingerprint]) {
    number(out, keys.len() as u64);
    for key in keys {
        out.extend_from_slice(&key.0.to_le_bytes());
    }
}

/// Ranges: their number, then for each its first slot and its length minus one.
fn put_slots(out: &mut Vec<u8>, slots: &[Slot]) {
    let mut ranges: Vec<(u16, u16)> = Vec::new();
    for slot in slots.iter().map(|slot| slot.number()) {
        match ranges.last_mut() {
            Some((first, more)) if u32::from(*first) + u32::from(*more) + 1 == u32::from(slot) => *more += 1,
            _ => ranges.push((slot, 0)),
        }
    }
    number(out, ranges.len() as u64);
    for (first, more) in ranges {
        number(out, first.into());
        number(out, more.into());
    }
}

struct Input<'b> {
    bytes: &'b [u8],
    at: usize,
}

impl Input<'_> {
    const fn expected(&self, expected: &'static str) -> Damaged {
        Damaged { at: self.at, expected }
    }

    fn byte(&mut self) -> Result<u8, Damaged> {
        let byte = *self.bytes.get(self.at).ok_or(self.expected("another byte"))?;
        self.at += 1;
        Ok(byte)
    }

    fn number(&mut self) -> Result<u64, Damaged> {
        let mut value = 0_u64;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            let bits = u64::from(byte & 0x7f);
            if (bits << shift) >> shift != bits {
                break;
            }
            value |= bits << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(self.expected("a number of at most 64 bits"))
    }

    fn take(&mut self, length: u64) -> Result<&[u8], Damaged> {
        let rest = self.bytes.get(self.at..).unwrap_or_default();
        let taken = usize::try_from(length).ok().and_then(|length| rest.get(..length));
        let taken = taken.ok_or(Damaged { at: self.at, expected: "the declared number of bytes" })?;
        self.at += taken.len();
        Ok(taken)
    }

    fn leg(&mut self) -> Result<u32, Damaged> {
        let at = self.at;
        u32::try_from(self.number()?).map_err(|_| Damaged { at, expected: "the number of a leg" })
    }

    fn node(&mut self) -> Result<NodeId, Damaged> {
        let at = self.at;
        u16::try_from(self.number()?).map(NodeId).map_err(|_| Damaged { at, expected: "the number of a node" })
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> Result<T, Damaged> {
        let at = self.at;
        choices.get(usize::from(self.byte()?)).copied().ok_or(Damaged { at, expected: "a known choice" })
    }

    fn side(&mut self) -> Result<Side, Damaged> {
        self.one_of(&[Side::Source, Side::Target])
    }

    fn text(&mut self) -> Result<String, Damaged> {
        let at = self.at;
        let length = self.number()?;
        let bytes = self.take(length)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| Damaged { at, expected: "a text" })
    }

    fn process(&mut self) -> Result<Process, Damaged> {
        Ok(Process { run_id: self.text()?, client_id: self.number()? })
    }

    fn keys(&mut self) -> Result<Vec<Fingerprint>, Damaged> {
        let at = self.at;
        let length = self.number()?.checked_mul(16).ok_or(Damaged { at, expected: "a number of keys" })?;
        let bytes = self.take(length)?;
        let read = |chunk: &[u8]| {
            let mut word = [0; 16];
            word.copy_from_slice(chunk);
            Fingerprint(u128::from_le_bytes(word))
        };
        Ok(bytes.chunks_exact(16).map(read).collect())
    }

    /// Names of keys, ascending.
    fn names(&mut self) -> Result<Vec<Key>, Damaged> {
        let mut names: Vec<Key> = Vec::new();
        for _ in 0..self.number()? {
            let at = self.at;
            let length = self.number()?;
            let name = Key::from(self.take(length)?);
            if names.last().is_some_and(|before| *before >= name) {
                return Err(Damaged { at, expected: "a key name, in ascending order" });
            }
            names.push(name);
        }
        Ok(names)
    }

    fn slots(&mut self) -> Result<Vec<Slot>, Damaged> {
        let mut slots = Vec::new();
        for _ in 0..self.number()? {
            let at = self.at;
            let damaged = Damaged { at, expected: "a slot range, in ascending order" };
            let (first, more) = (self.number()?, self.number()?);
            let last = first.checked_add(more).filter(|last| *last < SLOT_NUMBERS as u64).ok_or(damaged)?;
            if slots.last().is_some_and(|before: &Slot| u64::from(before.number()) >= first) {
                return Err(damaged);
            }
            slots.extend((first..=last).filter_map(|slot| Slot::new(slot as u16)));
        }
        Ok(slots)
    }
}
