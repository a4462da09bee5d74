//! Functions of the fuzz targets of this crate, and the replay of their corpora.
//!
//! The targets in `fuzz/` include these modules by their paths, so that `cargo test` calls the same functions without
//! libfuzzer.

mod command_keys;
#[path = "../../../../fuzz/replay.rs"]
mod replay;
mod reply;
mod request;
mod translate;

use replay::replay;

#[test]
fn corpora_replay_without_a_failure() {
    replay("command_keys", command_keys::command_keys);
    replay("reply", reply::reply);
    replay("request", request::request);
    replay("translate", translate::translate);
}
