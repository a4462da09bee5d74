//! The words by which people choose how data moves.

use switchyard_policy::migration::Durability;

/// The words for what must be safe before a key leaves its source.
pub const DURABILITIES: [(Durability, &str); 3] =
    [(Durability::Memory, "memory"), (Durability::Aof, "aof"), (Durability::Replica, "replica")];

/// The value that a word stands for; the error lists the words.
pub fn named<T: Copy>(all: &[(T, &str)], word: &str) -> Result<T, String> {
    let found = all.iter().find(|(_, name)| *name == word).map(|(value, _)| *value);
    found.ok_or_else(|| {
        let words = all.iter().map(|(_, name)| *name).collect::<Vec<_>>().join(", ");
        format!(
            "{word:?} is not {}",
            words.rsplit_once(", ").map_or(words.clone(), |(most, last)| format!("{most} or {last}"))
        )
    })
}

/// The word for a value.
pub fn name_of<T: PartialEq>(all: &[(T, &'static str)], value: T) -> &'static str {
    all.iter().find(|(v, _)| *v == value).map_or("", |(_, name)| *name)
}
