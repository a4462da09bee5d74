//! Runs `translate`, which `cargo test` replays with the corpus.
#![no_main]

#[path = "../../crates/resp/tests/corpora/translate.rs"]
mod translate;

libfuzzer_sys::fuzz_target!(|input: &[u8]| translate::translate(input));
