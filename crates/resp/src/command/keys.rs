//! Finds the keys among the arguments of a command.
//!
//! The rule: a command is forwarded only where all its keys are known, exactly as the node will see them. Where the
//! node would answer an error because the place of the keys itself is wrong (`EVAL s 5 k`), [`KeyError`] carries that
//! error, in Redis's words: such a command touches no key anywhere, so the router can answer for the node, and nothing
//! ever runs at a node that was guessed. All other mistakes in a command leave its keys where they are, and the node
//! complains about them.
//!
//! Redis's key specifications describe the places of keys as data. Builtin commands use the few shapes below, because
//! they are faster, because only they know the errors, and because for five commands the specifications are incomplete
//! (SORT, MIGRATE) or ambiguous (`XREAD ... STREAMS` where a key is called `streams`, GEORADIUS with both STORE and
//! STOREDIST). [`Keys::Specs`] is for what nodes teach.
//!
//! All work is bounded by the number of arguments that are there: what was only declared (`numkeys`, a large last
//! argument) costs nothing.

use std::borrow::Cow;
use std::fmt::Write as _;

use super::{Access, Command, errors};
use crate::request::Args;

/// Where the keys of a command are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Keys {
    /// It has none.
    None,
    /// Every `step`th argument from `first` to `last`; a negative `last` counts from the end (-1 is the last argument).
    Range {
        /// Index of the first key.
        first: u16,
        /// Index of the last key, or from the end where negative.
        last: i16,
        /// Distance between keys.
        step: u16,
    },
    /// As many keys as argument `count` says, right after it; and a destination at argument 1 in front of it where
    /// `destination`.
    Numbered {
        /// True where argument 1 is a key (ZUNIONSTORE).
        destination: bool,
        /// Index of the number of keys.
        count: u16,
        /// Distance between keys (2 for MSETEX: key, value).
        step: u16,
        /// What Redis says where the number is wrong.
        complaint: NumkeysError,
    },
    /// Argument 1, and the last `STORE destination` where `store` (SORT; SORT_RO has no STORE).
    Sort {
        /// Whether STORE is an option.
        store: bool,
    },
    /// Argument 1, and the last `STORE key` or `STOREDIST key` from argument `options` on (GEORADIUS).
    GeoStore {
        /// Index of the first option.
        options: u16,
    },
    /// The first half of what follows `STREAMS` (XREAD, XREADGROUP).
    Streams,
    /// Argument 3, or what follows `KEYS` where argument 3 is empty.
    Migrate,
    /// As the node's key specifications say.
    Specs(Cow<'static, [KeySpec]>),
    /// Has keys, but neither we nor the node's `COMMAND` can say where.
    Unknown,
}

/// The shapes by the names they have in the table's rows.
#[allow(missing_docs)] // as the variants
impl Keys {
    pub const NONE: Keys = Keys::None;
    pub const GEO_STORE: Keys = Keys::GeoStore { options: 6 };
    pub const GEO_STORE_BY_MEMBER: Keys = Keys::GeoStore { options: 5 };
    pub const STREAMS: Keys = Keys::Streams;
    pub const MIGRATE: Keys = Keys::Migrate;
    /// Argument 1.
    pub const FIRST: Keys = Keys::Range { first: 1, last: 1, step: 1 };
    /// Argument 2: the key of a subcommand.
    pub const SECOND: Keys = Keys::Range { first: 2, last: 2, step: 1 };
    /// Arguments 1 and 2.
    pub const FIRST_TWO: Keys = Keys::Range { first: 1, last: 2, step: 1 };
    /// All arguments.
    pub const ALL: Keys = Keys::Range { first: 1, last: -1, step: 1 };
    /// All arguments but the last, which is a timeout.
    pub const ALL_BUT_LAST: Keys = Keys::Range { first: 1, last: -2, step: 1 };
    /// All arguments from 2 on, which is the destination (BITOP).
    pub const FROM_SECOND: Keys = Keys::Range { first: 2, last: -1, step: 1 };
    /// Key, value, key, value...
    pub const PAIRS: Keys = Keys::Range { first: 1, last: -1, step: 2 };

    /// `SORT key ... [STORE destination]`
    pub const SORT: Keys = Keys::Sort { store: true };
    /// `SORT_RO key ...`
    pub const SORT_RO: Keys = Keys::Sort { store: false };

    const fn numbered(destination: bool, count: u16, complaint: NumkeysError) -> Keys {
        Keys::Numbered { destination, count, step: 1, complaint }
    }
    /// `EVAL script numkeys key...`
    pub const SCRIPT: Keys = Keys::numbered(false, 2, NumkeysError::Script);
    /// `FCALL function numkeys key...`
    pub const FUNCTION: Keys = Keys::numbered(false, 2, NumkeysError::Function);
    /// `ZUNION numkeys key...`
    pub const ZSETS: Keys = Keys::numbered(false, 1, NumkeysError::SortedSets);
    /// `ZUNIONSTORE destination numkeys key...`
    pub const ZSETS_STORE: Keys = Keys::numbered(true, 2, NumkeysError::SortedSets);
    /// `LMPOP numkeys key...`
    pub const POP: Keys = Keys::numbered(false, 1, NumkeysError::Pop);
    /// `BLMPOP timeout numkeys key...`
    pub const POP_AFTER_TIMEOUT: Keys = Keys::numbered(false, 2, NumkeysError::Pop);
    /// `SINTERCARD numkeys key...`
    pub const SETS: Keys = Keys::numbered(false, 1, NumkeysError::Sets);
    /// `MSETEX numkeys key value...`
    pub const NUMBERED_PAIRS: Keys =
        Keys::Numbered { destination: false, count: 1, step: 2, complaint: NumkeysError::Pop };
}

/// Which words Redis has for a wrong number of keys. They differ by family of commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumkeysError {
    /// EVAL and relatives, which allow 0.
    Script,
    /// FCALL and FCALL_RO, which allow 0.
    Function,
    /// ZUNION and relatives.
    SortedSets,
    /// LMPOP, ZMPOP.
    Pop,
    /// SINTERCARD.
    Sets,
}

/// A key specification of a node's `COMMAND` reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeySpec {
    /// Where to begin.
    pub begin: Begin,
    /// How to find keys from there.
    pub find: Find,
    /// The arguments found are routed like keys, but are none (channels of SPUBLISH).
    pub not_key: bool,
    /// There are keys that it does not say.
    pub incomplete: bool,
    /// What the command does with them.
    pub access: Access,
}

/// Where a key specification begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Begin {
    /// At this argument.
    Index(u32),
    /// After the first argument equal to `word` (in any case), searched from `start`: backwards from the end where
    /// negative.
    Keyword {
        /// The word.
        word: Cow<'static, str>,
        /// Index of the argument where the search starts.
        start: i32,
    },
    /// It does not say.
    Unknown,
}

/// How a key specification goes on from where it begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Find {
    /// Every `step`th argument up to `last`, relative to the beginning, or to the command's end where negative;
    /// with `limit` of 2 or more and `last` -1, only that fraction of what is there (2: half).
    Range {
        /// Last key.
        last: i32,
        /// Distance between keys.
        step: u32,
        /// The fraction; 0 and 1 mean all.
        limit: u32,
    },
    /// As many keys as the argument `index` says, from `first` on; both relative to the beginning.
    Numbered {
        /// Where the number is.
        index: u32,
        /// Where the first key is.
        first: u32,
        /// Distance between keys.
        step: u32,
    },
    /// It does not say.
    Unknown,
}

/// Why the keys of a command cannot be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyError {
    /// Too few or too many arguments.
    Arity,
    /// A key, or an argument that says where keys are, is not there yet: come back when the whole command is.
    Incomplete,
    /// The number of keys is no integer.
    NumkeysNotInteger(NumkeysError),
    /// The number of keys is 0 (where that is not allowed) or negative.
    NumkeysTooSmall(NumkeysError),
    /// The number of keys is larger than what follows.
    NumkeysTooLarge(NumkeysError),
    /// An option is unknown, or STREAMS is missing.
    Syntax,
    /// STREAMS is followed by an odd number of arguments.
    UnbalancedStreams,
    /// SORT with a pattern (of the option named) that may reach keys on other nodes.
    SortPattern(&'static str),
    /// The node's description of the command does not say where its keys are.
    Undescribed,
}

impl KeyError {
    /// Whether only a place is unknown: the node that has every key knows what the command uses.
    pub fn is_about_places(self) -> bool {
        matches!(self, Self::SortPattern(_) | Self::Undescribed)
    }

    /// The error for the client, with its code.
    pub fn text(self, command: &Command) -> String {
        let name = command.name.to_ascii_lowercase();
        let mut text = String::from("ERR ");
        let fixed = match self {
            Self::Arity => return errors::arity(command),
            Self::Incomplete => "Protocol error: the command ended before its keys",
            Self::NumkeysNotInteger(NumkeysError::Function) => "Bad number of keys provided",
            Self::NumkeysNotInteger(NumkeysError::Script | NumkeysError::SortedSets) => {
                "value is not an integer or out of range"
            }
            Self::NumkeysTooSmall(NumkeysError::Script | NumkeysError::Function) => "Number of keys can't be negative",
            Self::NumkeysNotInteger(_) | Self::NumkeysTooSmall(NumkeysError::Pop | NumkeysError::Sets) => {
                "numkeys should be greater than 0"
            }
            Self::NumkeysTooLarge(NumkeysError::Script | NumkeysError::Function | NumkeysError::Sets) => {
                "Number of keys can't be greater than number of args"
            }
            Self::NumkeysTooLarge(_) | Self::Syntax => "syntax error",
            Self::NumkeysTooSmall(NumkeysError::SortedSets) => {
                let _ = write!(text, "at least 1 input key is needed for '{name}' command");
                return text;
            }
            // Redis 7.0's words, for XREADGROUP too; later versions have others, and differ among themselves.
            Self::UnbalancedStreams => {
                "Unbalanced XREAD list of streams: for each stream key an ID or '$' must be specified."
            }
            Self::SortPattern(option) => {
                // Redis Cluster's words: the reason is the same.
                let _ = write!(
                    text,
                    "{option} option of SORT denied in cluster mode when keys formed by the pattern may be in different slots."
                );
                return text;
            }
            Self::Undescribed => {
                let _ = write!(
                    text,
                    "Switchyard cannot tell where the keys of '{name}' are: the node's COMMAND INFO does not say it for these arguments. \
                     Call it at the node itself."
                );
                return text;
            }
        };
        text.push_str(fixed);
        text
    }
}

impl Command {
    /// The index of the key of a command that has exactly one at a fixed place, as most calls have. `None`: use
    /// [`Command::find_keys`].
    #[inline]
    pub fn first_key_only(&self, args: &Args<'_>) -> Option<usize> {
        match self.keys {
            Keys::Range { first, last, .. }
                if i32::from(first) == i32::from(last) && usize::from(first) < args.known() =>
            {
                Some(usize::from(first))
            }
            _ => None,
        }
    }

    /// Appends the indexes of the arguments that are keys to `out`. A key named twice is there twice.
    ///
    /// After [`KeyError::Incomplete`], `out` holds the keys that are there already; after other errors its additions
    /// mean nothing.
    pub fn find_keys(&self, args: &Args<'_>, out: &mut Vec<u32>) -> Result<(), KeyError> {
        if !self.arity_ok(args.len()) {
            return Err(KeyError::Arity);
        }
        match &self.keys {
            Keys::None => Ok(()),
            Keys::Range { first, last, step } => {
                let (first, last, step) = (usize::from(*first), isize::from(*last), usize::from(*step));
                // The argument after the last key's.
                let end = if last < 0 {
                    (args.len() + 1).saturating_sub(last.unsigned_abs())
                } else {
                    last.unsigned_abs() + 1
                };
                if last < 0 && step > 1 && end.saturating_sub(first) % step != 0 {
                    return Err(KeyError::Arity); // MSET k v k
                }
                push_range(args, first, end.min(args.len()), step, out)
            }
            Keys::Numbered { destination, count, step, complaint } => {
                if *destination {
                    push_range(args, 1, 2, 1, out)?;
                }
                let first = usize::from(*count) + 1;
                let zero_allowed = matches!(complaint, NumkeysError::Script | NumkeysError::Function);
                let number = integer(args.get(usize::from(*count)).ok_or(KeyError::Incomplete)?);
                let number = number.ok_or(KeyError::NumkeysNotInteger(*complaint))?;
                if number < i64::from(!zero_allowed) {
                    return Err(KeyError::NumkeysTooSmall(*complaint));
                }
                let room = args.len().saturating_sub(first) / usize::from(*step);
                match usize::try_from(number) {
                    Ok(number) if number <= room => {
                        push_range(args, first, first + number * usize::from(*step), usize::from(*step), out)
                    }
                    _ => Err(KeyError::NumkeysTooLarge(*complaint)),
                }
            }
            Keys::Sort { store } => sort_keys(args, *store, out),
            Keys::GeoStore { options } => {
                push_range(args, 1, 2, 1, out)?;
                let mut destination = None;
                let mut index = usize::from(*options);
                while index + 1 < args.len() {
                    let option = args.get(index).ok_or(KeyError::Incomplete)?;
                    if is_option(option, b"store") || is_option(option, b"storedist") {
                        index += 1;
                        destination = Some(index); // the last one counts
                    }
                    index += 1;
                }
                destination.map_or(Ok(()), |at| push_range(args, at, at + 1, 1, out))
            }
            Keys::Streams => {
                let options = stream_options(args);
                let first = options.streams?;
                let count = args.len().saturating_sub(first);
                if count == 0 {
                    return Err(KeyError::Syntax);
                }
                if count % 2 != 0 {
                    return Err(KeyError::UnbalancedStreams);
                }
                push_range(args, first, first + count / 2, 1, out)
            }
            Keys::Migrate => migrate_keys(args, out),
            Keys::Specs(specs) => specs.iter().filter(|s| !s.not_key).try_for_each(|spec| spec_keys(spec, args, out)),
            Keys::Unknown => Err(KeyError::Undescribed),
        }
    }
}

/// Appends every `step`th index in `first..end`. `end` is at most `args.len()`; what is not there yet makes it
/// incomplete.
fn push_range(args: &Args<'_>, first: usize, end: usize, step: usize, out: &mut Vec<u32>) -> Result<(), KeyError> {
    let known = end.min(args.known());
    let step = step.max(1);
    out.extend((first..known).step_by(step).map(|index| index as u32));
    // The first place not pushed: beyond `end` where all is there.
    let next = if known > first { first + (known - first).div_ceil(step) * step } else { first };
    if next < end { Err(KeyError::Incomplete) } else { Ok(()) }
}

/// Whether servers take an argument for the option of this name. They compare C strings, so in any case, and up to a
/// byte 0: whoever compares otherwise overlooks an option that the node will see, and with it the keys that it names.
pub fn is_option(arg: &[u8], name: &[u8]) -> bool {
    arg.get(..name.len()).is_some_and(|front| front.eq_ignore_ascii_case(name))
        && arg.get(name.len()).is_none_or(|next| *next == 0)
}

/// An integer as Redis's `string2ll` takes it: no plus, no spaces, no leading zeros.
fn integer(text: &[u8]) -> Option<i64> {
    let digits = text.strip_prefix(b"-").unwrap_or(text);
    let canonical = match digits {
        b"0" => text.len() == 1,
        [b'1'..=b'9', ..] => digits.len() <= 19,
        _ => false,
    };
    if !canonical {
        return None;
    }
    std::str::from_utf8(text).ok()?.parse().ok()
}

/// The options of XREAD and XREADGROUP in front of the keys.
#[derive(Clone, Copy, Debug)]
pub struct StreamOptions {
    /// Whether BLOCK is among them.
    pub block: bool,
    /// Index of the timeout of BLOCK.
    pub timeout: Option<usize>,
    /// Index of the first key.
    pub streams: Result<usize, KeyError>,
}

/// Finds them.
pub fn stream_options(args: &Args<'_>) -> StreamOptions {
    let mut options = StreamOptions { block: false, timeout: None, streams: Err(KeyError::Syntax) };
    let mut index = 1;
    while index < args.len() {
        let Some(arg) = args.get(index) else {
            options.streams = Err(KeyError::Incomplete);
            break;
        };
        index += match arg {
            // CLAIM is XREADGROUP's since Redis 8.4; older nodes answer a syntax error themselves.
            _ if is_option(arg, b"count") || is_option(arg, b"claim") => 2,
            _ if is_option(arg, b"block") => {
                options.block = true;
                options.timeout = Some(index + 1);
                2
            }
            _ if is_option(arg, b"group") => 3,
            _ if is_option(arg, b"noack") => 1,
            _ if is_option(arg, b"streams") => {
                options.streams = Ok(index + 1);
                break;
            }
            _ => break,
        };
    }
    options
}

/// SORT. BY and GET patterns with `*` name keys that depend on the data; they are allowed only where a hash tag keeps
/// them all in the slot of the key that is sorted, as in Redis Cluster: otherwise the node would silently miss the keys
/// that other nodes have.
fn sort_keys(args: &Args<'_>, store: bool, out: &mut Vec<u32>) -> Result<(), KeyError> {
    push_range(args, 1, 2, 1, out)?;
    let key = args.get(1).ok_or(KeyError::Incomplete)?;
    let mut destination = None;
    let mut index = 2;
    while index < args.len() {
        let arg = args.get(index).ok_or(KeyError::Incomplete)?;
        let has_value = index + 1 < args.len();
        let pattern = if is_option(arg, b"by") {
            Some("BY")
        } else if is_option(arg, b"get") {
            Some("GET")
        } else {
            None
        };
        if let (Some(option), true) = (pattern, has_value) {
            if !pattern_stays_with(args.get(index + 1).ok_or(KeyError::Incomplete)?, key) {
                return Err(KeyError::SortPattern(option));
            }
            index += 1;
        } else if is_option(arg, b"limit") {
            index += 2;
        } else if store && has_value && is_option(arg, b"store") {
            index += 1;
            destination = Some(index); // the last one counts
        }
        index += 1;
    }
    destination.map_or(Ok(()), |at| push_range(args, at, at + 1, 1, out))
}

/// True where all keys that `pattern` forms have the hash tag of `key`, or where it forms none (no `*`).
fn pattern_stays_with(pattern: &[u8], key: &[u8]) -> bool {
    let Some(star) = memchr::memchr(b'*', pattern) else { return true };
    // What replaces the star may hold braces: only a tag that is closed before it counts.
    hash_tag(&pattern[..star]).is_some_and(|tag| tag == hash_tag(key).unwrap_or(key))
}

/// What stands between the first `{` and the next `}`, unless it is empty.
fn hash_tag(key: &[u8]) -> Option<&[u8]> {
    let inside = &key[memchr::memchr(b'{', key)? + 1..];
    inside.get(..memchr::memchr(b'}', inside)?).filter(|tag| !tag.is_empty())
}

fn migrate_keys(args: &Args<'_>, out: &mut Vec<u32>) -> Result<(), KeyError> {
    let single = args.get(3).ok_or(KeyError::Incomplete)?;
    let mut index = 6;
    while index < args.len() {
        let arg = args.get(index).ok_or(KeyError::Incomplete)?;
        if is_option(arg, b"keys") {
            return if single.is_empty() {
                push_range(args, index + 1, args.len(), 1, out)
            } else {
                Err(KeyError::Syntax)
            };
        }
        index += match arg {
            _ if is_option(arg, b"auth") => 2,
            _ if is_option(arg, b"auth2") => 3,
            _ => 1,
        };
    }
    push_range(args, 3, 4, 1, out)
}

/// The keys of one specification, as Redis's `getKeysUsingKeySpecs` finds them.
fn spec_keys(spec: &KeySpec, args: &Args<'_>, out: &mut Vec<u32>) -> Result<(), KeyError> {
    let len = args.len() as i64;
    let first = match &spec.begin {
        Begin::Index(index) => i64::from(*index),
        Begin::Keyword { word, start } => match find_keyword(word.as_bytes(), *start, args)? {
            Some(at) => at as i64 + 1,
            None => return Ok(()),
        },
        Begin::Unknown => return Err(KeyError::Undescribed),
    };
    // All numbers are 32-bit ones, or below `i32::MAX` arguments: nothing here can overflow an i64 but the count, which
    // is checked.
    let (first, last, step) = match spec.find {
        Find::Range { last, step, limit } => {
            let last = match (last, limit) {
                (0.., _) => first + i64::from(last),
                (_, 0) => len + i64::from(last),
                (_, limit) => first + (len - first) / i64::from(limit) + i64::from(last),
            };
            (first, last, step)
        }
        Find::Numbered { index, first: offset, step } => {
            let at = usize::try_from(first + i64::from(index)).map_err(|_| KeyError::Undescribed)?;
            if at >= args.len() {
                return Err(KeyError::Undescribed);
            }
            let count = integer(args.get(at).ok_or(KeyError::Incomplete)?)
                .filter(|n| (0..=len).contains(n))
                .ok_or(KeyError::Undescribed)?;
            let first = first + i64::from(offset);
            if count == 0 {
                return Ok(());
            }
            (first, first + (count - 1) * i64::from(step.max(1)), step)
        }
        Find::Unknown => return Err(KeyError::Undescribed),
    };
    if spec.incomplete || first < 1 || last < first || last >= len {
        return Err(KeyError::Undescribed);
    }
    push_range(args, first as usize, last as usize + 1, step as usize, out)
}

/// The argument equal to `word`, searched from `start`: forwards, or backwards from the end where negative.
fn find_keyword(word: &[u8], start: i32, args: &Args<'_>) -> Result<Option<usize>, KeyError> {
    let is_word = |index: usize| args.get(index).map(|arg| is_option(arg, word)).ok_or(KeyError::Incomplete);
    if start > 0 {
        for index in start as usize..args.len().saturating_sub(1) {
            if is_word(index)? {
                return Ok(Some(index));
            }
        }
    } else if start < 0 {
        let from = args.len().saturating_sub(start.unsigned_abs() as usize);
        for index in (2..=from.min(args.len().saturating_sub(1))).rev() {
            if is_word(index)? {
                return Ok(Some(index));
            }
        }
    }
    Ok(None)
}
