//! Runs `journal`, which `cargo test` replays with the corpus.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| switchyard_control::fuzz::journal(input));
