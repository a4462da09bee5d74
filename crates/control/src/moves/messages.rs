//! Names of the options of moves, in requests and reports.

use switchyard_policy::migration::Durability;

/// Names of the durability levels: the guarantee required before a key leaves its source.
pub const DURABILITIES: [(Durability, &str); 3] =
    [(Durability::Memory, "memory"), (Durability::Aof, "aof"), (Durability::Replica, "replica")];

/// Error for a protocol that loses keys, in a build without the feature `research`.
pub(crate) const NO_RESEARCH: &str =
    "this build has no research modes: use a router built with `cargo build -p switchyard --features research`";

/// Parses a name. The error lists all names.
pub fn parse_keyword<T: Copy>(all: &[(T, &str)], word: &str) -> Result<T, String> {
    let found = all.iter().find(|(_, name)| *name == word).map(|(value, _)| *value);
    found.ok_or_else(|| {
        let words = all.iter().map(|(_, name)| *name).collect::<Vec<_>>().join(", ");
        format!(
            "{word:?} is not {}",
            words.rsplit_once(", ").map_or(words.clone(), |(most, last)| format!("{most} or {last}"))
        )
    })
}

/// Returns the name of a value.
pub fn keyword_of<T: PartialEq>(all: &[(T, &'static str)], value: T) -> &'static str {
    all.iter().find(|(v, _)| *v == value).map_or("", |(_, name)| *name)
}
