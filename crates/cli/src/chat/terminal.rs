//! A chat on a terminal: line editing, history, Ctrl-C for the answer and Ctrl-D for the end.

use super::answer::Style;
use super::command::Input;
use super::input;
use super::session::Session;
use crate::error::{CliError, Result};
use lockstep_core::ExitCode;
use rustyline::completion::Completer;
use rustyline::error::ReadlineError;
use rustyline::highlight::Highlighter;
use rustyline::hint::Hinter;
use rustyline::history::FileHistory;
use rustyline::validate::{ValidationContext, ValidationResult, Validator};
use rustyline::{Config, Editor, Helper};
use std::io::{self, Write};
use std::path::PathBuf;
use tokio::signal::unix::SignalKind;

const PROMPT: &str = ">>> ";
/// Inputs that are remembered from one chat to the next.
const HISTORY_LEN_MAX: usize = 1000;

/// Reads inputs and answers them until Ctrl-D.
pub fn run(session: &mut Session, keeps_history: bool) -> Result<()> {
    let config = Config::builder().max_history_size(HISTORY_LEN_MAX).map_err(internal)?;
    let config = config.history_ignore_space(true).auto_add_history(true).build();
    let mut editor: Editor<Lines, FileHistory> = Editor::with_config(config).map_err(internal)?;
    editor.set_helper(Some(Lines));
    let history = History::open(&mut editor, keeps_history);
    let style = Style::Terminal { dims: std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty()) };
    tell(&format!("{} at {}; /help lists the commands, Ctrl-D ends", session.model(), session.server()));
    let ended = loop {
        match editor.readline(PROMPT) {
            Ok(text) => {
                if let Err(error) = one(session, &text, style) {
                    break Err(error);
                }
            }
            Err(ReadlineError::Interrupted) => tell("Ctrl-D ends the chat"),
            Err(ReadlineError::Eof) => break Ok(()),
            Err(error) => break Err(internal(error)),
        }
    };
    history.save(&mut editor);
    ended
}

fn internal(error: ReadlineError) -> CliError {
    CliError::new(ExitCode::Internal, format!("the terminal cannot be used: {error}"))
}

/// Says something about the chat; the answers alone are its output.
fn tell(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

/// Errors only when the chat cannot go on.
fn one(session: &mut Session, text: &str, style: Style) -> Result<()> {
    let message = match Input::parse(input::message(text)) {
        Ok(Input::Message(message)) => message,
        Ok(command) => {
            let told = session.command(command).unwrap_or_else(|error| error);
            if !told.is_empty() {
                tell(&told);
            }
            return Ok(());
        }
        Err(error) => {
            tell(&error);
            return Ok(());
        }
    };
    let interrupted = async {
        lockstep_launch::init::hand_over(SignalKind::interrupt().as_raw_value());
        // Without a handler Ctrl-C ends the program, which is the next best.
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    match session.say(&message, (&mut io::stdout(), style), interrupted) {
        Ok(spoken) => match spoken.finish_reason.as_deref() {
            None => tell("(stopped)"),
            Some("length") => tell("(cut: no more tokens were allowed or had room)"),
            Some(_) => {}
        },
        Err(error) => match session.fatal(&error) {
            Some(fatal) => return Err(fatal),
            None => tell(&error.to_string()),
        },
    }
    Ok(())
}

/// Lets the editor ask for more lines where an input needs them.
struct Lines;

impl Helper for Lines {}
impl Highlighter for Lines {}
impl Hinter for Lines {
    type Hint = String;
}
impl Completer for Lines {
    type Candidate = String;
}
impl Validator for Lines {
    fn validate(&self, context: &mut ValidationContext<'_>) -> rustyline::Result<ValidationResult> {
        Ok(match input::is_open(context.input()) {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Valid(None),
        })
    }
}

/// The file of earlier inputs; readable by its owner only.
struct History(Option<PathBuf>);

impl History {
    fn open(editor: &mut Editor<Lines, FileHistory>, keeps: bool) -> Self {
        let path = keeps.then(path).flatten();
        if let Some(path) = path.as_ref().filter(|path| path.exists())
            && let Err(error) = editor.load_history(path)
        {
            tell(&format!("{}: {error}; earlier inputs are not there", path.display()));
        }
        Self(path)
    }

    fn save(&self, editor: &mut Editor<Lines, FileHistory>) {
        let Some(path) = &self.0 else { return };
        let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        let saved = folder.map_err(ReadlineError::from).and_then(|()| editor.append_history(path));
        if let Err(error) = saved {
            tell(&format!("{}: {error}; the inputs of this chat are not kept", path.display()));
        }
    }
}

/// `lockstep/chat_history` in the user's folder for state.
fn path() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let state = folder("XDG_STATE_HOME").or_else(|| Some(folder("HOME")?.join(".local/state")))?;
    Some(state.join("lockstep").join("chat_history"))
}
