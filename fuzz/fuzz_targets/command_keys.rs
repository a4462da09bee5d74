//! Runs `command_keys`, which `cargo test` replays with the corpus.
#![no_main]

#[path = "../../crates/resp/tests/corpora/command_keys.rs"]
mod command_keys;

libfuzzer_sys::fuzz_target!(|input: &[u8]| command_keys::command_keys(input));
