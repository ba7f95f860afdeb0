//! `lockstep chat`: talk to a model, on a terminal or from a script.
//!
//! A thin client of `/v1/chat/completions`: it holds the conversation and sends all of it each turn; the
//! server's prefix cache makes that cheap. On a terminal ([`terminal`]) there is line editing, Ctrl-C stops an
//! answer and Ctrl-D ends. Where stdin or stdout is no terminal ([`script`]) each line is a prompt, stdout holds
//! the answers and nothing else, and the first failure ends the command.
//!
//! Reading order: [`input`], [`command`], [`conversation`], [`answer`], [`session`], then the two front ends.

mod answer;
mod command;
mod conversation;
mod input;
mod script;
mod session;
mod stats;
mod terminal;

use crate::client::{Target, runtime};
use crate::error::{CliError, Result};
use crate::flags::chat::ChatFlags;
use conversation::Conversation;
use lockstep_core::ExitCode;
use session::Session;
use std::io::IsTerminal;

/// Chats until the input ends.
pub fn run(flags: &ChatFlags) -> Result<()> {
    let mut conversation = Conversation::new(flags.system.clone());
    for (name, value) in &flags.params {
        let set = conversation.set_param(name, value.clone());
        set.map_err(|error| CliError::new(ExitCode::Flags, format!("--param {name}: {error}")))?;
    }
    let runtime = runtime()?;
    // No kept connections: between two answers nobody would notice that one was closed.
    let target = Target::open(&flags.target, &runtime, 0)?;
    let mut session = Session::new(runtime, target, conversation);
    let ended = match std::io::stdin().is_terminal() && std::io::stdout().is_terminal() {
        true => terminal::run(&mut session, !flags.no_history),
        false => script::run(&mut session),
    };
    session.close();
    ended
}
