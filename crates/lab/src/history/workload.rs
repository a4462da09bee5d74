//! Commands of a history's clients: small programs on a few shared keys, made to collide.
//!
//! Every value contains its writer (key, client, number), so that no two writes are alike: a value that returns late,
//! twice or to the wrong request is recognizable.

use std::{fmt, str::FromStr};

use anyhow::bail;
use switchyard_bench::random::Rng;

/// A kind of history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// SET, GET, GETDEL, SET NX on one string.
    Register,
    /// INCR and GET.
    Counter,
    /// RPUSH and LRANGE: the whole order of the writes is in every read.
    List,
    /// HSET of four fields at once and HGETALL: a reader that sees two writers' fields has seen half a write.
    Hash,
    /// SET PX, PERSIST, DEL, SET, PTTL: removed keys stay removed, and times to live continue during a move.
    Expiry,
    /// MULTI/EXEC, WATCH, MGET, MSET over four keys of one slot.
    Transaction,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 6] = [Self::Register, Self::Counter, Self::List, Self::Hash, Self::Expiry, Self::Transaction];

    /// Name of the kind and of its file.
    pub fn name(self) -> &'static str {
        match self {
            Self::Register => "register",
            Self::Counter => "counter",
            Self::List => "list",
            Self::Hash => "hash",
            Self::Expiry => "expiry",
            Self::Transaction => "transaction",
        }
    }

    /// Number of objects of this kind in a group of clients.
    pub(super) fn objects(self) -> usize {
        match self {
            Self::Register | Self::Expiry => 4,
            Self::Counter | Self::List | Self::Hash | Self::Transaction => 2,
        }
    }

    /// Operations after which an object is replaced, because the search for an order gets expensive. Lists are read
    /// whole, and the four keys of transactions cannot be checked separately.
    pub(super) fn operations_max(self) -> u32 {
        match self {
            Self::List | Self::Transaction => 300,
            _ => 2000,
        }
    }

    /// The keys of an object.
    pub(super) fn keys(self, object: &str) -> Vec<String> {
        match self {
            Self::Transaction => ["a", "b", "c", "d"].iter().map(|k| format!("{{{object}}}{k}")).collect(),
            _ => vec![object.to_owned()],
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kind {
    type Err = anyhow::Error;

    fn from_str(s: &str) -> anyhow::Result<Self> {
        match Self::ALL.into_iter().find(|k| k.name() == s) {
            Some(kind) => Ok(kind),
            None => bail!("no workload \"{s}\"; available: {}", Self::ALL.map(Self::name).join(", ")),
        }
    }
}

/// Next step of a client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Plan {
    /// One command.
    Single(Vec<String>),
    /// MULTI, these, EXEC.
    Together(Vec<Vec<String>>),
    /// WATCH and GET of the key, then MULTI, these, EXEC.
    Watched(String, Vec<Vec<String>>),
}

/// Returns the next step of a client on an object. `tag` differs for every call of a run.
pub(super) fn next(kind: Kind, keys: &[String], tag: &str, rng: &mut Rng) -> Plan {
    let key = keys[0].as_str();
    let words = |words: &[&str]| -> Vec<String> { words.iter().map(|w| (*w).to_owned()).collect() };
    let single = |w: &[&str]| Plan::Single(words(w));
    let dice = rng.below(100);
    match kind {
        Kind::Register => match dice {
            0..45 => single(&["GET", key]),
            45..80 => single(&["SET", key, tag]),
            80..90 => single(&["GETDEL", key]),
            _ => single(&["SET", key, tag, "NX"]),
        },
        Kind::Counter => match dice {
            0..40 => single(&["GET", key]),
            _ => single(&["INCR", key]),
        },
        Kind::List => match dice {
            0..40 => single(&["LRANGE", key, "0", "-1"]),
            _ => single(&["RPUSH", key, tag]),
        },
        Kind::Hash => match dice {
            0..50 => single(&["HGETALL", key]),
            50..95 => single(&["HSET", key, "f1", tag, "f2", tag, "f3", tag, "f4", tag]),
            _ => single(&["DEL", key]),
        },
        Kind::Expiry => match dice {
            0..35 => single(&["GET", key]),
            35..60 => {
                // Mostly short enough to end within the run; some to outlast the move.
                let ms = [100, 300, 1000, 4000][rng.below(4) as usize] + rng.below(50);
                single(&["SET", key, tag, "PX", &ms.to_string()])
            }
            60..70 => single(&["PERSIST", key]),
            70..80 => single(&["DEL", key]),
            80..90 => single(&["SET", key, tag]),
            _ => single(&["PTTL", key]),
        },
        Kind::Transaction => {
            let pick = |rng: &mut Rng| keys[rng.below(keys.len() as u64) as usize].clone();
            let set = |key: &str| words(&["SET", key, tag]);
            let get = |key: &str| words(&["GET", key]);
            match dice {
                0..20 => Plan::Together(keys.iter().map(|k| set(k)).collect()),
                20..40 => Plan::Together(keys.iter().map(|k| get(k)).collect()),
                40..50 => {
                    let (one, other) = (pick(rng), pick(rng));
                    Plan::Together(vec![get(&one), set(&other), get(&other)])
                }
                50..60 => Plan::Single(std::iter::once("MGET".to_owned()).chain(keys.iter().cloned()).collect()),
                60..68 => {
                    let pairs = keys.iter().flat_map(|k| [k.clone(), tag.to_owned()]);
                    Plan::Single(std::iter::once("MSET".to_owned()).chain(pairs).collect())
                }
                68..73 => {
                    let one = pick(rng);
                    Plan::Single(words(&["DEL", &one]))
                }
                73..80 => {
                    let one = pick(rng);
                    Plan::Single(set(&one))
                }
                _ => {
                    let (watched, other) = (pick(rng), pick(rng));
                    let commands = vec![set(&watched), get(&other)];
                    Plan::Watched(watched, commands)
                }
            }
        }
    }
}

/// Returns commands that each read a part of an object, and together all of it.
pub(super) fn read_commands(kind: Kind, keys: &[String]) -> Vec<Vec<String>> {
    let on_key = |command: &str| vec![command.to_owned(), keys[0].clone()];
    match kind {
        Kind::Register | Kind::Counter => vec![on_key("GET")],
        Kind::List => vec![vec!["LRANGE".to_owned(), keys[0].clone(), "0".to_owned(), "-1".to_owned()]],
        Kind::Hash => vec![on_key("HGETALL")],
        Kind::Expiry => vec![on_key("GET"), on_key("PTTL")],
        Kind::Transaction => vec![std::iter::once("MGET".to_owned()).chain(keys.iter().cloned()).collect()],
    }
}

/// Whether a command changes nothing. Without a reply it is left out.
pub(super) fn only_reads(command: &[String]) -> bool {
    matches!(command[0].as_str(), "GET" | "MGET" | "LRANGE" | "HGETALL" | "PTTL")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn workload_names_parse() {
        for kind in Kind::ALL {
            assert_eq!(kind.name().parse::<Kind>().expect("a kind"), kind);
        }
        assert!("registers".parse::<Kind>().is_err());
    }

    #[test]
    fn plans_use_only_keys_of_their_object_and_unique_values() {
        let mut rng = Rng::new(1);
        for kind in Kind::ALL {
            let keys = kind.keys("o1");
            for n in 0..500 {
                let tag = format!("t{n}");
                let commands = match next(kind, &keys, &tag, &mut rng) {
                    Plan::Single(command) => vec![command],
                    Plan::Together(commands) => commands,
                    Plan::Watched(key, commands) => {
                        assert!(keys.contains(&key));
                        commands
                    }
                };
                for command in commands {
                    assert!(keys.contains(&command[1]), "{command:?}");
                    let writes = matches!(command[0].as_str(), "SET" | "RPUSH" | "HSET" | "MSET");
                    assert_eq!(command.contains(&tag), writes, "{command:?}");
                }
            }
        }
    }
}
