//! Runs `twemproxy`, which `cargo test` replays with the corpus.
#![no_main]

#[path = "../../crates/policy/tests/corpora/twemproxy.rs"]
mod twemproxy;

libfuzzer_sys::fuzz_target!(|input: &[u8]| twemproxy::twemproxy(input));
