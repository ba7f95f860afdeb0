//! A chat that is going on: what both front ends do with an input.

use super::answer::{AnswerError, Spoken, Style, ask};
use super::command::{HELP, Input};
use super::conversation::Conversation;
use super::stats::ChatStats;
use crate::client::Target;
use crate::error::CliError;
use lockstep_core::ExitCode;
use std::io::Write;
use tokio::runtime::Runtime;

/// The server, the conversation and the counts.
pub struct Session {
    runtime: Runtime,
    target: Target,
    conversation: Conversation,
    stats: ChatStats,
}

impl Session {
    /// Before the first input.
    pub fn new(runtime: Runtime, target: Target, conversation: Conversation) -> Self {
        Self { runtime, target, conversation, stats: ChatStats::default() }
    }

    /// Name of the model.
    pub fn model(&self) -> &str {
        &self.target.model
    }

    /// Address of the server.
    pub fn server(&self) -> String {
        self.target.client.base()
    }

    /// Does what a command says; the result is what to tell the user. A message is none.
    pub fn command(&mut self, input: Input) -> std::result::Result<String, String> {
        let chat = &mut self.conversation;
        match input {
            Input::Nothing | Input::Message(_) => Ok(String::new()),
            Input::Reset => {
                chat.reset();
                Ok("the conversation is forgotten".into())
            }
            Input::ShowSystem => Ok(chat.system().unwrap_or("no system message").to_owned()),
            Input::SetSystem(text) => {
                chat.set_system(text);
                Ok(String::new())
            }
            Input::ShowParams => {
                let lines: Vec<_> =
                    chat.params().iter().map(|(name, value)| format!("{name} {value}")).collect();
                Ok(if lines.is_empty() { "the server's defaults".into() } else { lines.join("\n") })
            }
            Input::SetParam(name, value) => chat.set_param(&name, value).map(|()| String::new()),
            Input::Stats => Ok(self.stats.to_string()),
            Input::Help => Ok(HELP.trim_end().to_owned()),
        }
    }

    /// Asks for the answer to `message` and writes it to `out` as it comes. A turn is kept if there was an
    /// answer or a part of one.
    pub fn say(
        &mut self,
        message: &str,
        out: (&mut dyn Write, Style),
        stop: impl Future<Output = ()>,
    ) -> std::result::Result<Spoken, AnswerError> {
        let request = self.conversation.request(&self.target.model, message);
        let spoken = self.runtime.block_on(ask(&self.target.client, &request, out, stop))?;
        self.stats.add(spoken.stats);
        if spoken.finish_reason.is_some() || !spoken.text.is_empty() {
            self.conversation.add(message, &spoken.text);
        }
        Ok(spoken)
    }

    /// What ends the command after `error`, if anything does: the server's end when it was started here.
    pub fn fatal(&mut self, error: &AnswerError) -> Option<CliError> {
        match error {
            AnswerError::Output(_) => Some(CliError::new(ExitCode::Internal, error)),
            AnswerError::Client(_) => self.target.failure(),
        }
    }

    /// Ends the server if it was started here.
    pub fn close(self) {
        self.target.close();
    }
}
