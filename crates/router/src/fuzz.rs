//! Functions of the fuzz targets of this crate, and the replay of their corpora.
//!
//! Only for tests and fuzzing. A module of the crate rather than of `fuzz/`, because the readers of untrusted bytes are
//! private, and `cargo test` can call the same functions without libfuzzer.

pub use crate::functions_dump::fuzz::function_dump;
pub use crate::lua::fuzz::lua;
pub use crate::users::fuzz::acl;
pub use crate::worker::fuzz::{cluster, first_bytes};

#[cfg(test)]
#[path = "../../../fuzz/replay.rs"]
mod replay;

#[cfg(test)]
mod tests {
    use super::replay::replay;

    #[test]
    fn corpora_of_the_router_replay_without_a_failure() {
        replay("acl", super::acl);
        replay("cluster", super::cluster);
        replay("first_bytes", super::first_bytes);
        replay("function_dump", super::function_dump);
        replay("lua", super::lua);
    }
}
