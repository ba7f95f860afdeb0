//! A chat without a terminal: prompts from stdin, answers to stdout, everything else to stderr.

use super::answer::{AnswerError, Style};
use super::command::Input;
use super::input;
use super::session::Session;
use crate::error::{CliError, Result};
use lockstep_core::ExitCode;
use std::io::{self, BufRead, ErrorKind, Write};

/// Answers one input after the other; the first that fails ends it, since later ones build on it.
pub fn run(session: &mut Session) -> Result<()> {
    let (mut text, mut first_line) = (String::new(), 1);
    for (index, line) in io::stdin().lock().lines().enumerate() {
        let number = index + 1;
        let line = line.map_err(|e| failed(number, ExitCode::Flags, &e))?;
        match text.is_empty() {
            true => first_line = number,
            false => text.push('\n'),
        }
        text += &line;
        if !input::is_open(&text) && !one(session, &std::mem::take(&mut text), first_line)? {
            return Ok(());
        }
    }
    match text.is_empty() {
        true => Ok(()),
        false => Err(failed(first_line, ExitCode::Flags, &"the input ends before this text does")),
    }
}

fn failed(line: usize, code: ExitCode, what: &dyn std::fmt::Display) -> CliError {
    CliError::new(code, format!("stdin, line {line}: {what}"))
}

/// False when nobody reads the answers any more.
fn one(session: &mut Session, text: &str, line: usize) -> Result<bool> {
    let flags = |error: String| failed(line, ExitCode::Flags, &error);
    let message = match Input::parse(input::message(text)).map_err(flags)? {
        Input::Message(message) => message,
        command => {
            let told = session.command(command).map_err(flags)?;
            if !told.is_empty() {
                let _ = writeln!(io::stderr(), "{told}");
            }
            return Ok(true);
        }
    };
    let mut out = io::stdout();
    match session.say(&message, (&mut out, Style::Plain), std::future::pending()) {
        Ok(_) => Ok(true),
        Err(AnswerError::Output(error)) if error.kind() == ErrorKind::BrokenPipe => Ok(false),
        Err(error) => {
            let fatal = session.fatal(&error);
            Err(fatal.unwrap_or_else(|| failed(line, ExitCode::Internal, &error)))
        }
    }
}
