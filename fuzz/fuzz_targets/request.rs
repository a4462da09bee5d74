//! Runs `request`, which `cargo test` replays with the corpus.
#![no_main]

#[path = "../../crates/resp/tests/corpora/request.rs"]
mod request;

libfuzzer_sys::fuzz_target!(|input: &[u8]| request::request(input));
