//! Functions of the fuzz targets of this crate, and the replay of their corpora.
//!
//! Only for tests and fuzzing. A module of the crate rather than of `fuzz/`, because the formats are private.

pub use crate::journal::fuzz::journal;
pub use crate::store::fuzz::store;

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::replay::replay;

    #[test]
    fn corpora_of_the_control_plane_replay_without_a_failure() {
        replay("journal", super::journal);
        replay("store", super::store);
    }
}
