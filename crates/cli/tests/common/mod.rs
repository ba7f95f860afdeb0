//! What the tests of the real binary share: where it is, and how a fixture is served.

// Each test file is a crate of its own and uses a part of this.
#![allow(dead_code)]

use lockstep_testkit::{Fixture, ServeCommand, Server, TempDir};
use serde_json::json;
use std::path::Path;
use std::time::Duration;

/// The binary under test.
pub const BINARY: &str = env!("CARGO_BIN_EXE_lockstep");

/// A refused start must be over in this time.
pub const REFUSAL_LIMIT: Duration = Duration::from_secs(10);

/// `default` repetitions, or as many as `LOCKSTEP_TEST_ROUNDS` says.
pub fn rounds(default: usize) -> usize {
    match std::env::var("LOCKSTEP_TEST_ROUNDS") {
        Ok(text) => {
            text.parse().unwrap_or_else(|_| panic!("LOCKSTEP_TEST_ROUNDS is {text:?}, expected a number"))
        }
        Err(_) => default,
    }
}

/// `serve` of a folder with a small pool, so that tests side by side need little memory.
pub fn command(model: &Path, tp_size: usize) -> ServeCommand {
    ServeCommand::new(BINARY, model).tp(tp_size).flag("--num-pages", 1024)
}

/// A running server and the folder it serves from.
pub struct Served {
    /// The server; first, so that it ends before its folder goes.
    pub server: Server,
    /// What must come of it.
    pub fixture: Fixture,
    /// Its folder and whatever else the test needs on disk.
    pub temp: TempDir,
}

/// Writes a fixture and serves it.
pub fn serve(name: &str, tp_size: usize) -> Served {
    serve_with(Fixture::named(name), tp_size, |command| command)
}

/// Writes a fixture and serves it with further flags.
pub fn serve_with(
    fixture: Fixture,
    tp_size: usize,
    adapt: impl FnOnce(ServeCommand) -> ServeCommand,
) -> Served {
    let temp = TempDir::new(fixture.name);
    let model = fixture.write_into(temp.path());
    let server = adapt(command(&model, tp_size)).start();
    Served { server, fixture, temp }
}

/// The greedy answer to a random fixture's prompt, as ids in text form. The word tokenizer joins
/// words with spaces, so a continuation may begin with one.
pub fn greedy_text(server: &Server, fixture: &Fixture) -> String {
    let extra = json!({"max_tokens": fixture.expect.greedy_ids.len()});
    server.complete(&fixture.expect.prompt, extra).text.trim_start().to_owned()
}

/// Asserts that a random fixture gives its fixed answer.
pub fn assert_greedy(server: &Server, fixture: &Fixture, tp_size: usize) {
    assert_eq!(greedy_text(server, fixture), fixture.expect.greedy_text, "{} at tp {tp_size}", fixture.name);
}
