//! Functions of the fuzz targets of this crate, and the replay of their corpora.
//!
//! The targets in `fuzz/` include these modules by their paths, so that `cargo test` calls the same functions without
//! libfuzzer.

#[path = "../../../../fuzz/replay.rs"]
mod replay;
mod twemproxy;

use replay::replay;

#[test]
fn corpora_replay_without_a_failure() {
    replay("twemproxy", twemproxy::twemproxy);
}
