//! Finds the keys among the arguments of a command.
//!
//! A command is forwarded only if all its keys are known, exactly as the node will parse them. If the node would reject
//! the number or place of the keys (`EVAL s 5 k`), [`KeyError`] carries that error with Redis's text. Such a command
//! touches no key, so the router can reply for the node, and nothing runs at a guessed node. Other errors in a command
//! do not affect its keys, and the node reports them.
//!
//! Redis describes key positions by key specifications. Builtin commands use the shapes below instead: they are faster,
//! and only they know the errors. Besides, the specifications of five commands are incomplete (SORT, MIGRATE) or
//! ambiguous (`XREAD ... STREAMS` with a key named `streams`, GEORADIUS with both STORE and STOREDIST). [`Keys::Specs`]
//! is for commands reported by nodes.
//!
//! All work is bounded by the number of received arguments: declared ones (`numkeys`, a large last argument) cost
//! nothing.

use std::borrow::Cow;
use std::fmt::Write as _;

use super::{Access, Command, errors};
use crate::request::Args;

/// Key positions of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Keys {
    /// No keys.
    None,
    /// Every `step`th argument from `first` to `last`. A negative `last` counts from the end (-1 is the last argument).
    Range {
        /// Index of the first key.
        first: u16,
        /// Index of the last key, or from the end if negative.
        last: i16,
        /// Distance between keys.
        step: u16,
    },
    /// The number of keys is argument `count`; they follow it. With `destination`, argument 1 is a key too.
    Numbered {
        /// Whether argument 1 is a key (ZUNIONSTORE).
        destination: bool,
        /// Index of the number of keys.
        count: u16,
        /// Distance between keys (2 for MSETEX: key, value).
        step: u16,
        /// Redis's error family for a wrong number.
        complaint: NumkeysError,
    },
    /// Argument 1, and with `store` the last `STORE destination` (SORT; SORT_RO has no STORE).
    Sort {
        /// Whether STORE is an option.
        store: bool,
    },
    /// Argument 1, and the last `STORE key` or `STOREDIST key` at or after argument `options` (GEORADIUS).
    GeoStore {
        /// Index of the first option.
        options: u16,
    },
    /// The first half of the arguments after `STREAMS` (XREAD, XREADGROUP).
    Streams,
    /// Argument 3, or the arguments after `KEYS` if argument 3 is empty.
    Migrate,
    /// By the node's key specifications.
    Specs(Cow<'static, [KeySpec]>),
    /// The command has keys, but neither the table nor the node's `COMMAND` has their positions.
    Unknown,
}

/// Shapes under the names used in table rows.
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
    /// All arguments except the last, a timeout.
    pub const ALL_BUT_LAST: Keys = Keys::Range { first: 1, last: -2, step: 1 };
    /// All arguments from 2 on; 2 is the destination (BITOP).
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

/// Redis's error texts for a wrong number of keys, by family of commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NumkeysError {
    /// EVAL and similar commands, which allow 0.
    Script,
    /// FCALL and FCALL_RO, which allow 0.
    Function,
    /// ZUNION and similar commands.
    SortedSets,
    /// LMPOP, ZMPOP.
    Pop,
    /// SINTERCARD.
    Sets,
}

/// A key specification from a node's `COMMAND` reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeySpec {
    /// Start of the search.
    pub begin: Begin,
    /// Method to find the keys from there.
    pub find: Find,
    /// The arguments are routed like keys, but are not keys (channels of SPUBLISH).
    pub not_key: bool,
    /// Whether the specification omits keys.
    pub incomplete: bool,
    /// Access to the keys.
    pub access: Access,
}

/// Start of a key specification.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Begin {
    /// This argument.
    Index(u32),
    /// The position after the first argument equal to `word` (in any case), searched from `start`, or backwards from
    /// the end if negative.
    Keyword {
        /// The word.
        word: Cow<'static, str>,
        /// Index at which the search starts.
        start: i32,
    },
    /// Not specified.
    Unknown,
}

/// Method of a key specification to find keys from its start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Find {
    /// Every `step`th argument up to `last`, relative to the start, or to the end of the command if negative. With a
    /// `limit` of 2 or more and `last` -1, only that fraction of the arguments (2: half).
    Range {
        /// Last key.
        last: i32,
        /// Distance between keys.
        step: u32,
        /// Fraction; 0 and 1 mean all.
        limit: u32,
    },
    /// The number of keys is argument `index`; they start at `first`. Both are relative to the start.
    Numbered {
        /// Position of the number.
        index: u32,
        /// Position of the first key.
        first: u32,
        /// Distance between keys.
        step: u32,
    },
    /// Not specified.
    Unknown,
}

/// Reason why the keys of a command cannot be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyError {
    /// Too few or too many arguments.
    Arity,
    /// A key, or an argument that determines key positions, has not been received: try again with the complete command.
    Incomplete,
    /// The number of keys is not an integer.
    NumkeysNotInteger(NumkeysError),
    /// The number of keys is negative, or 0 if not allowed.
    NumkeysTooSmall(NumkeysError),
    /// The number of keys exceeds the number of arguments after it.
    NumkeysTooLarge(NumkeysError),
    /// An option is unknown, or STREAMS is missing.
    Syntax,
    /// STREAMS is followed by an odd number of arguments.
    UnbalancedStreams,
    /// SORT with a pattern of the named option, which may refer to keys at other nodes.
    SortPattern(&'static str),
    /// The node's description of the command lacks the key positions.
    Undescribed,
}

impl KeyError {
    /// Whether only the key positions are unknown. The command can then be executed at a node that has every key.
    pub fn is_unknown_position(self) -> bool {
        matches!(self, Self::SortPattern(_) | Self::Undescribed)
    }

    /// Error text for the client, with its code.
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
            // Text of Redis 7.0, also for XREADGROUP; later versions differ among themselves.
            Self::UnbalancedStreams => {
                "Unbalanced XREAD list of streams: for each stream key an ID or '$' must be specified."
            }
            Self::SortPattern(option) => {
                // Redis Cluster's text, because the reason is the same.
                let _ = write!(
                    text,
                    "{option} option of SORT denied in cluster mode when keys formed by the pattern may be in different slots."
                );
                return text;
            }
            Self::Undescribed => {
                let _ = write!(
                    text,
                    "Switchyard cannot find the keys of '{name}': the node's COMMAND INFO does not report them for these arguments. \
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
    /// Index of the key of a command with exactly one key at a fixed position, as for most commands. `None`: use
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

    /// Returns the option of a SORT whose pattern shares the slot of the sorted key only if the slot of that key is
    /// determined by its whole name.
    #[must_use]
    pub fn sorts_by_whole_name(&self, args: &Args<'_>) -> Option<&'static str> {
        if !matches!(self.keys, Keys::Sort { .. }) || hash_tag(args.get(1)?).is_some() {
            return None;
        }
        (2..args.len().saturating_sub(1)).find_map(|index| {
            let option = match args.get(index)? {
                option if is_option(option, b"by") => "BY",
                option if is_option(option, b"get") => "GET",
                _ => return None,
            };
            args.get(index + 1)?.contains(&b'*').then_some(option)
        })
    }

    /// Appends the indexes of the key arguments to `out`. Repeated keys are not removed.
    ///
    /// After [`KeyError::Incomplete`], `out` contains the keys received so far; after other errors its additions are
    /// meaningless.
    pub fn find_keys(&self, args: &Args<'_>, out: &mut Vec<u32>) -> Result<(), KeyError> {
        if !self.arity_ok(args.len()) {
            return Err(KeyError::Arity);
        }
        match &self.keys {
            Keys::None => Ok(()),
            Keys::Range { first, last, step } => {
                let (first, last, step) = (usize::from(*first), isize::from(*last), usize::from(*step));
                // End of the range, exclusive.
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

/// Appends every `step`th index in `first..end`. `end` is at most `args.len()`. Arguments not yet received cause
/// [`KeyError::Incomplete`].
fn push_range(args: &Args<'_>, first: usize, end: usize, step: usize, out: &mut Vec<u32>) -> Result<(), KeyError> {
    let known = end.min(args.known());
    let step = step.max(1);
    out.extend((first..known).step_by(step).map(|index| index as u32));
    // First index not pushed: at or after `end` if complete.
    let next = if known > first { first + (known - first).div_ceil(step) * step } else { first };
    if next < end { Err(KeyError::Incomplete) } else { Ok(()) }
}

/// Whether servers accept an argument as the option of this name. They compare C strings ignoring case, up to a NUL. A
/// stricter comparison would overlook an option, and the keys that it names.
pub fn is_option(arg: &[u8], name: &[u8]) -> bool {
    arg.get(..name.len()).is_some_and(|front| front.eq_ignore_ascii_case(name))
        && arg.get(name.len()).is_none_or(|next| *next == 0)
}

/// Parses an integer like Redis's `string2ll`: no plus, no spaces, no leading zeros.
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

/// Options of XREAD and XREADGROUP before the keys.
#[derive(Clone, Copy, Debug)]
pub struct StreamOptions {
    /// Whether BLOCK is present.
    pub block: bool,
    /// Index of the timeout of BLOCK.
    pub timeout: Option<usize>,
    /// Index of the first key.
    pub streams: Result<usize, KeyError>,
}

/// Parses the options of XREAD or XREADGROUP.
pub fn stream_options(args: &Args<'_>) -> StreamOptions {
    let mut options = StreamOptions { block: false, timeout: None, streams: Err(KeyError::Syntax) };
    let mut index = 1;
    while index < args.len() {
        let Some(arg) = args.get(index) else {
            options.streams = Err(KeyError::Incomplete);
            break;
        };
        index += match arg {
            // CLAIM is an option of XREADGROUP since Redis 8.4; older nodes reply with a syntax error.
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

/// Finds the keys of SORT. BY and GET patterns with `*` refer to keys that depend on the data. As in Redis Cluster,
/// they are allowed only with a hash tag that keeps them in the slot of the sorted key: otherwise the node would
/// silently miss keys at other nodes.
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

/// Whether all keys formed by `pattern` have the hash tag of `key`, or none is formed (no `*`).
fn pattern_stays_with(pattern: &[u8], key: &[u8]) -> bool {
    let Some(star) = memchr::memchr(b'*', pattern) else { return true };
    // The text inserted for the star may contain braces: only a tag closed before it counts.
    hash_tag(&pattern[..star]).is_some_and(|tag| tag == hash_tag(key).unwrap_or(key))
}

/// The text between the first `{` and the next `}`, unless empty.
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

/// Finds the keys of one specification, like Redis's `getKeysUsingKeySpecs`.
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
    // All numbers are 32-bit, or below `i32::MAX` arguments: no i64 can overflow, except by the count, which is
    // checked.
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

/// Index of the argument equal to `word`, searched from `start`: forwards, or backwards from the end if negative.
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
