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
    spare_the_grammar_library();
}

/// A panic ends the search, but not one that the server survives by design: it compiles grammars on a thread of its own
/// and refuses what the library gives up on.
fn spare_the_grammar_library() {
    let abort = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().name() != Some("grammar") {
            abort(info);
        }
    }));
}

libfuzzer_sys::fuzz_target!(init: choose(), |input: &[u8]| {
    if let Some(target) = CHOSEN.get() {
        (target.run)(input);
    }
});
