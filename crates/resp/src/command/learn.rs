//! Adds commands that nodes have and the builtin table lacks (modules, newer versions), from their `COMMAND` reply.
//!
//! Only commands with keys can be forwarded. A command without keys may concern one node's data or all nodes', and its
//! description does not state which. A reply from one node would be silently wrong, so the command is refused with this
//! reason.

use std::borrow::Cow;

use super::access::{Access, Categories};
use super::{Begin, Find, Flags, Handling, KeySpec, Keys};
use crate::reply::{self, Elements};

/// One entry of a `COMMAND` reply.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LearntCommand {
    /// Name; for a subcommand with its container: `json.debug|memory`.
    pub name: String,
    /// Number of arguments including the name; if negative, the minimum number.
    pub arity: i16,
    /// `write`, `readonly`, `movablekeys`...
    pub flags: Vec<String>,
    /// Index of the first key, or 0 without a key at a fixed position.
    pub first: i16,
    /// Index of the last key; negative from the end.
    pub last: i16,
    /// Distance between keys.
    pub step: i16,
    /// ACL categories, with `@`.
    pub categories: Vec<String>,
    /// Key specifications (Redis 7 and later).
    pub specs: Vec<KeySpec>,
}

impl LearntCommand {
    /// Flags of the table. Excludes `no_auth`: the router decides which commands need no login.
    pub(super) fn mapped_flags(&self) -> Flags {
        self.flags.iter().fold(Flags::default(), |flags, name| {
            flags.and(match name.as_str() {
                "write" => Flags::WRITE,
                "readonly" => Flags::READONLY,
                "fast" => Flags::FAST,
                "blocking" => Flags::BLOCKING,
                "admin" => Flags::ADMIN,
                "pubsub" => Flags::PUBSUB,
                "movablekeys" => Flags::MOVABLE_KEYS,
                "denyoom" => Flags::DENY_OOM,
                _ => Flags::default(),
            })
        })
    }

    /// Categories of the table. Unknown ones belong to the module.
    pub(super) fn mapped_categories(&self) -> Categories {
        self.categories
            .iter()
            .filter_map(|name| Categories::named(name.strip_prefix('@').unwrap_or(name)))
            .fold(Categories::default(), Categories::and)
    }

    /// Access to keys: from the specifications, or else everything that the flags permit.
    pub(super) fn mapped_access(&self) -> (Access, Access) {
        let readonly = self.flags.iter().any(|flag| flag == "readonly");
        let by_flags = if readonly { Access::R } else { Access::RW };
        let all = match &self.specs[..] {
            [] => by_flags,
            specs => {
                specs.iter().filter(|spec| !spec.not_key).fold(Access::NO, |all, spec| Access(all.0 | spec.access.0))
            }
        };
        (all, all)
    }

    pub(super) fn mapped_keys(&self) -> Keys {
        let said = !self.specs.is_empty()
            && self.specs.iter().all(|s| s.begin != Begin::Unknown && s.find != Find::Unknown && !s.incomplete);
        let movable = self.flags.iter().any(|flag| flag == "movablekeys");
        match (&self.specs[..], u16::try_from(self.first), u16::try_from(self.step)) {
            // One key at a fixed position has a fast path.
            (
                [
                    KeySpec {
                        begin: Begin::Index(at),
                        find: Find::Range { last: 0, .. },
                        not_key: false,
                        incomplete: false,
                        ..
                    },
                ],
                ..,
            ) if *at > 0 && *at <= i16::MAX as u32 => Keys::Range { first: *at as u16, last: *at as i16, step: 1 },
            _ if said => Keys::Specs(Cow::Owned(self.specs.clone())),
            (_, Ok(first @ 1..), Ok(step @ 1..)) if !movable => Keys::Range { first, last: self.last, step },
            _ if movable || !self.specs.is_empty() => Keys::Unknown,
            _ => Keys::None,
        }
    }
}

/// Handling of a learnt command.
pub(super) fn handling(keys: &Keys) -> Handling {
    match keys {
        Keys::None => Handling::OnlyNode(
            "it is a module command without keys, so it is unknown which nodes it concerns. Call it at the nodes themselves",
        ),
        _ => Handling::Keyed,
    }
}

/// Parses the reply to `COMMAND` (RESP2 or RESP3). Invalid entries are skipped.
pub fn parse_command_reply(bytes: &[u8]) -> Vec<LearntCommand> {
    let mut commands = Vec::new();
    for entry in reply::elements(bytes) {
        add_entry(entry, true, &mut commands);
    }
    commands
}

fn add_entry(entry: &[u8], has_subcommands: bool, commands: &mut Vec<LearntCommand>) {
    let mut fields = reply::elements(entry);
    let Some(name) = fields.next().and_then(string) else { return };
    let Some(arity) = fields.next().and_then(small) else { return };
    let flags = fields.next().map(|list| reply::elements(list).filter_map(string).collect()).unwrap_or_default();
    let (first, last, step) = (number(&mut fields), number(&mut fields), number(&mut fields));
    // Redis 6 ends here, or after the ACL categories. Redis 7 adds tips, key specifications, and subcommands.
    let categories = fields.next().map(|list| reply::elements(list).filter_map(string).collect()).unwrap_or_default();
    let specs = fields.nth(1).map(|list| reply::elements(list).map(parse_spec).collect()).unwrap_or_default();
    commands.push(LearntCommand { name, arity, flags, first, last, step, categories, specs });
    if has_subcommands {
        for subcommand in fields.next().into_iter().flat_map(reply::elements) {
            add_entry(subcommand, false, commands); // containers do not nest
        }
    }
}

fn string(bytes: &[u8]) -> Option<String> {
    std::str::from_utf8(reply::text(bytes)?).ok().map(str::to_owned)
}

fn small(bytes: &[u8]) -> Option<i16> {
    i16::try_from(reply::integer(bytes)?).ok()
}

fn number(fields: &mut Elements<'_>) -> i16 {
    fields.next().and_then(small).unwrap_or(0)
}

/// Value of `key` in a map, or in the equivalent RESP2 array.
fn field<'a>(map: &'a [u8], key: &str) -> Option<&'a [u8]> {
    let mut elements = reply::elements(map);
    while let (Some(name), Some(value)) = (elements.next(), elements.next()) {
        if reply::text(name) == Some(key.as_bytes()) {
            return Some(value);
        }
    }
    None
}

fn parse_spec(spec: &[u8]) -> KeySpec {
    let flags: Vec<String> =
        field(spec, "flags").map(|list| reply::elements(list).filter_map(string).collect()).unwrap_or_default();
    let has = |wanted: &str| flags.iter().any(|flag| flag == wanted);
    KeySpec {
        begin: field(spec, "begin_search").and_then(parse_begin).unwrap_or(Begin::Unknown),
        find: field(spec, "find_keys").and_then(parse_find).unwrap_or(Find::Unknown),
        not_key: has("not_key"),
        incomplete: has("incomplete"),
        access: match (has("access"), has("insert") || has("delete") || has("update")) {
            (false, false) if has("RO") => Access::NO,
            (reads, writes) if reads || writes => Access(u8::from(reads) | u8::from(writes) << 1),
            // Not specified.
            _ => Access::RW,
        },
    }
}

/// Type and details of one half of a specification.
fn typed(half: &[u8]) -> Option<(String, &[u8])> {
    Some((string(field(half, "type")?)?, field(half, "spec")?))
}

fn detail<T: TryFrom<i64>>(details: &[u8], key: &str) -> Option<T> {
    T::try_from(reply::integer(field(details, key)?)?).ok()
}

fn parse_begin(half: &[u8]) -> Option<Begin> {
    let (kind, details) = typed(half)?;
    match kind.as_str() {
        "index" => Some(Begin::Index(detail(details, "index")?)),
        "keyword" => Some(Begin::Keyword {
            word: Cow::Owned(string(field(details, "keyword")?)?),
            start: detail(details, "startfrom")?,
        }),
        _ => None,
    }
}

fn parse_find(half: &[u8]) -> Option<Find> {
    let (kind, details) = typed(half)?;
    match kind.as_str() {
        "range" => Some(Find::Range {
            last: detail(details, "lastkey")?,
            step: detail(details, "keystep")?,
            limit: detail(details, "limit")?,
        }),
        "keynum" => Some(Find::Numbered {
            index: detail(details, "keynumidx")?,
            first: detail(details, "firstkey")?,
            step: detail(details, "keystep")?,
        }),
        _ => None,
    }
}
