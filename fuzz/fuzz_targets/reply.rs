//! Runs `reply`, which `cargo test` replays with the corpus.
#![no_main]

#[path = "../../crates/resp/tests/corpora/reply.rs"]
mod reply;

libfuzzer_sys::fuzz_target!(|input: &[u8]| reply::reply(input));
