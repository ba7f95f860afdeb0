//! Any bytes as the body of every endpoint that generates: taken or refused, never a panic.
//!
//! `cargo +nightly fuzz run requests` in `crates/api`.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &[u8]| {
    lockstep_api::fuzzing::read_everywhere(body);
});
