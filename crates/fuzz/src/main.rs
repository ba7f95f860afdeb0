//! Any bytes as the body of every endpoint that generates: taken or refused, never a panic.
//!
//! Built with everything else, so that it stays buildable; finding new bodies takes code that tells libFuzzer where it
//! went. `docs/api.md`, "Fuzzing", has the command, for the stable compiler. `cargo test` runs a bounded number of
//! changed bodies through the same function.

#![no_main]

libfuzzer_sys::fuzz_target!(|body: &[u8]| {
    lockstep_api::fuzzing::read_everywhere(body);
});
