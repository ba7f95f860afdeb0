//! Inputs that are for the program, not for the model: they begin with a slash.

use crate::flags::client::param_value;
use serde_json::Value;

/// What `/help` says.
pub const HELP: &str = "\
/reset               forget the conversation; the system message stays
/system [TEXT]       show or replace the system message; - takes it away
/params              show the fields sent with every request
/params NAME VALUE   set one, such as temperature 0.7 or max_tokens 200; null takes it away
/stats               tokens and speed of the last answer and of the chat
/help                this text
A line that ends in \\ goes on in the next; \"\"\" opens and closes a text of several lines.
// sends a text that begins with a slash. Ctrl-C stops an answer, Ctrl-D ends the chat.
";

/// An input.
#[derive(Clone, Debug, PartialEq)]
pub enum Input {
    /// Nothing was said.
    Nothing,
    /// For the model.
    Message(String),
    /// Forget all turns.
    Reset,
    /// Show the system message.
    ShowSystem,
    /// Replace the system message; `None` takes it away.
    SetSystem(Option<String>),
    /// Show the fields.
    ShowParams,
    /// Set a field; null takes it away.
    SetParam(String, Value),
    /// Show counts and speed.
    Stats,
    /// Show the commands.
    Help,
}

impl Input {
    /// What `message` means. Errors with a sentence when it is no command that is known.
    pub fn parse(message: String) -> Result<Self, String> {
        let text = message.trim();
        if text.is_empty() {
            return Ok(Self::Nothing);
        }
        let Some(command) = text.strip_prefix('/') else { return Ok(Self::Message(message)) };
        if command.starts_with('/') {
            return Ok(Self::Message(command.to_owned()));
        }
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        match (name, rest.trim()) {
            ("reset", "") => Ok(Self::Reset),
            ("system", "") => Ok(Self::ShowSystem),
            ("system", "-") => Ok(Self::SetSystem(None)),
            ("system", text) => Ok(Self::SetSystem(Some(text.to_owned()))),
            ("params", "") => Ok(Self::ShowParams),
            ("params", rest) => match rest.split_once(|c: char| c.is_whitespace() || c == '=') {
                Some((name, value)) => Ok(Self::SetParam(name.to_owned(), param_value(value.trim()))),
                None => {
                    Err(format!("/params {rest} lacks a value; use /params {rest} VALUE, null takes it away"))
                }
            },
            ("stats", "") => Ok(Self::Stats),
            ("help", "") => Ok(Self::Help),
            ("reset" | "stats" | "help", rest) => {
                Err(format!("/{name} takes nothing behind it, got {rest:?}"))
            }
            _ => Err(format!(
                "/{name} is no command; /help lists them, // sends a text that begins with a slash"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(text: &str) -> Input {
        Input::parse(text.to_owned()).unwrap()
    }

    #[test]
    fn commands_and_messages() {
        assert_eq!(parse("  "), Input::Nothing);
        assert_eq!(parse(" hello / there"), Input::Message(" hello / there".into()));
        assert_eq!(parse("//etc is a folder"), Input::Message("/etc is a folder".into()));
        assert_eq!(parse("/reset "), Input::Reset);
        assert_eq!(parse("/system"), Input::ShowSystem);
        assert_eq!(parse("/system -"), Input::SetSystem(None));
        assert_eq!(parse("/system Be\nbrief."), Input::SetSystem(Some("Be\nbrief.".into())));
        assert_eq!(parse("/params"), Input::ShowParams);
        assert_eq!(parse("/params temperature 0.5"), Input::SetParam("temperature".into(), json!(0.5)));
        assert_eq!(parse("/params stop=END of it"), Input::SetParam("stop".into(), json!("END of it")));
        assert_eq!(parse("/params seed null"), Input::SetParam("seed".into(), Value::Null));
        assert_eq!((parse("/stats"), parse("/help")), (Input::Stats, Input::Help));
    }

    #[test]
    fn mistakes_are_named() {
        for (text, word) in [("/exot", "/help"), ("/params seed", "null"), ("/reset now", "now"), ("/", "//")]
        {
            let error = Input::parse(text.to_owned()).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }
}
