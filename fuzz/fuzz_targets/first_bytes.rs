//! Runs `first_bytes`, which `cargo test` replays with the corpus.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| switchyard_router::fuzz::first_bytes(input));
