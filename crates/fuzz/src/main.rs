//! libFuzzer over one of the targets: `fuzz --target=NAME [FOLDER or FILE...] [-max_total_time=SECONDS]`.
//!
//! Built with everything else, so that it stays buildable; finding new inputs takes code that tells libFuzzer where it
//! went. `docs/reliability.md`, "Any bytes", has the command, for the stable compiler. `cargo test` runs a bounded
//! number of changed inputs through the same functions.

#![no_main]

use lockstep_fuzz::{TARGETS, Target};
use std::sync::OnceLock;

static CHOSEN: OnceLock<&'static Target> = OnceLock::new();

/// libFuzzer leaves flags with two dashes alone.
fn choose() {
    let name = std::env::args().find_map(|argument| argument.strip_prefix("--target=").map(str::to_owned));
    let found = TARGETS.iter().find(|target| Some(target.name) == name.as_deref());
    let Some(target) = found else {
        let names: Vec<&str> = TARGETS.iter().map(|target| target.name).collect();
        eprintln!("fuzz: give --target=NAME with one of {}", names.join(", "));
        std::process::exit(2);
    };
    CHOSEN.get_or_init(|| target);
    spare_what_is_caught();
}

/// libFuzzer's hook ends the program at any panic, but the server survives some by design: it catches what the grammar
/// and tokenizer libraries give up on. A panic that nobody catches ends the search all the same.
fn spare_what_is_caught() {
    drop(std::panic::take_hook());
}

libfuzzer_sys::fuzz_target!(init: choose(), |input: &[u8]| {
    if let Some(target) = CHOSEN.get() {
        (target.run)(input);
    }
});
