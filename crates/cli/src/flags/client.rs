//! Which server a client command asks.

use clap::Args;

/// Flags of every command that is a client of a server.
#[derive(Args, Debug)]
pub struct TargetFlags {
    /// Address of a running server, such as http://127.0.0.1:1919; with or without /v1.
    #[arg(long)]
    pub url: Option<String>,

    /// With --url: the name of the model to ask [default: the only one]. Without: the model to start a server for, as
    /// `lockstep serve` takes it.
    #[arg(long, visible_aliases = ["model-path"])]
    pub model: Option<String>,

    /// Key to send to the server of --url.
    #[arg(long, value_name = "KEY", env = "LOCKSTEP_API_KEY", hide_env_values = true)]
    pub api_key: Option<String>,

    /// Flags of `lockstep serve` for the server that is started, behind `--`.
    #[arg(last = true, value_name = "SERVE FLAGS")]
    pub serve_flags: Vec<String>,
}

/// A field of the request body, as `NAME=VALUE` spells it: JSON, or else the text itself.
pub type Param = (String, serde_json::Value);

/// Parses `NAME=VALUE`.
pub fn param(text: &str) -> Result<Param, String> {
    match text.split_once('=') {
        Some((name, value)) if !name.trim().is_empty() => Ok((name.trim().to_owned(), param_value(value))),
        _ => Err("use NAME=VALUE, such as temperature=0.7".into()),
    }
}

/// The value that `text` spells: JSON, or else the text itself.
pub fn param_value(text: &str) -> serde_json::Value {
    serde_json::from_str(text).unwrap_or_else(|_| text.into())
}
