//! Where the server listens and how it ends.

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use lockstep_api::ApiKeys;
use lockstep_api::parsers::{
    Opening, ParserChoice, REASONING_PARSERS, ReasoningFormat, TOOL_CALL_PARSERS, ToolFormat,
};
use lockstep_core::files;
use lockstep_core::limits::FLAG_FILE_BYTES_MAX;
use std::net::IpAddr;
use std::path::PathBuf;

/// Server flags of `lockstep serve`.
#[derive(Args, Debug)]
pub struct ServerFlags {
    /// Address to listen on; 0.0.0.0 opens the server to the network.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,

    /// Port to listen on; 0 picks a free one and logs it.
    #[arg(long, default_value_t = 1919)]
    pub port: u16,

    /// Seconds that running requests get to finish after SIGINT or SIGTERM.
    #[arg(long, default_value_t = 5.0)]
    pub grace_seconds: f64,

    /// What to do when a process of the engine dies or does not answer while requests are served: `never`: the server
    /// ends; `on-failure`: all of its processes are started again while the port stays open and answers 503.
    #[arg(long, value_name = "WHEN", default_value = "never")]
    pub restart: Restart,

    /// Failures in a row, with less than five minutes of service between them, after which the server ends.
    #[arg(long, default_value_t = 5)]
    pub restart_limit: u32,

    /// Answer 400 to request fields that are not known instead of ignoring them.
    #[arg(long)]
    pub strict_api: bool,

    /// Key that clients must send as `Authorization: Bearer KEY`; may be given several times. Other
    /// users of this machine can see flags: better use `--api-key-file`.
    #[arg(long, value_name = "KEY", value_parser = api_key)]
    pub api_key: Vec<String>,

    /// File with one key a line, in addition to `--api-key`; empty lines and lines that begin with # are skipped.
    #[arg(long, value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,

    /// How the model writes tool calls: a format by name, `none`, or `auto`, which reads it off the chat
    /// template.
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = tool_call_parser)]
    pub tool_call_parser: Selection<ToolFormat>,

    /// How the model writes reasoning: a format by name, `none` (it stays in the text), or `auto`.
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = reasoning_parser)]
    pub reasoning_parser: Selection<ReasoningFormat>,
}

/// `--restart`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Restart {
    /// A failure ends the server.
    Never,
    /// A failure restarts the engine.
    OnFailure,
}

/// A parser of answers, as a flag names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Selection<T> {
    /// The model's own.
    Auto,
    /// None at all.
    Nothing,
    /// This one.
    Named(T),
}

impl<T> Selection<T> {
    fn parse(name: &str, known: &[(&str, T)]) -> std::result::Result<Self, String>
    where
        T: Copy,
    {
        match (name, known.iter().find(|(known, _)| *known == name)) {
            ("auto", _) => Ok(Self::Auto),
            ("none", _) => Ok(Self::Nothing),
            (_, Some((_, format))) => Ok(Self::Named(*format)),
            _ => {
                let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
                Err(format!("use auto, none or one of {}", names.join(", ")))
            }
        }
    }
}

fn tool_call_parser(name: &str) -> std::result::Result<Selection<ToolFormat>, String> {
    Selection::parse(name, TOOL_CALL_PARSERS)
}

fn reasoning_parser(name: &str) -> std::result::Result<Selection<ReasoningFormat>, String> {
    Selection::parse(name, REASONING_PARSERS)
}

/// A key that fits into a header.
fn api_key(key: &str) -> std::result::Result<String, String> {
    match key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
        true => Err("a key consists of visible ASCII characters without spaces".into()),
        false => Ok(key.into()),
    }
}

impl ServerFlags {
    /// The address, resolved without DNS except for `localhost`.
    pub fn address(&self) -> Result<IpAddr> {
        if self.host == "localhost" {
            return Ok(IpAddr::from([127, 0, 0, 1]));
        }
        match self.host.parse() {
            Ok(address) => Ok(address),
            Err(_) => bail!("--host {} is not an IP address; use e.g. 127.0.0.1, 0.0.0.0 or ::", self.host),
        }
    }

    /// All keys that clients may use; none: nobody is asked for one.
    pub fn api_keys(&self) -> Result<ApiKeys> {
        let mut keys = self.api_key.clone();
        if let Some(path) = &self.api_key_file {
            let text = files::read_text(path, FLAG_FILE_BYTES_MAX).context("--api-key-file")?;
            let before = keys.len();
            for (at, line) in text.lines().map(str::trim).enumerate() {
                if !line.is_empty() && !line.starts_with('#') {
                    // The message must not hold the key.
                    let key =
                        api_key(line).map_err(|why| anyhow!("{}, line {}: {why}", path.display(), at + 1));
                    keys.push(key?);
                }
            }
            if keys.len() == before {
                // A server that was meant to be closed must not be open.
                bail!("--api-key-file {} holds no key; write one a line", path.display());
            }
        }
        Ok(ApiKeys::new(keys))
    }

    /// The model's own parsers (`detected`) with what the flags say instead.
    pub fn parsers(&self, mut detected: ParserChoice) -> ParserChoice {
        let (mut tools, mut reasoning) = (None, None);
        match self.tool_call_parser {
            Selection::Auto => {}
            Selection::Nothing => detected.tools = None,
            Selection::Named(format) => tools = Some(format),
        }
        match self.reasoning_parser {
            Selection::Auto => {}
            Selection::Nothing => (detected.reasoning, detected.opening) = (None, Opening::Never),
            Selection::Named(format) => reasoning = Some(format),
        }
        detected.with(tools, reasoning)
    }

    /// The grace is a sensible number of seconds.
    pub fn check_grace(&self) -> Result<()> {
        if !(0.0..=3600.0).contains(&self.grace_seconds) {
            bail!("--grace-seconds {} is outside 0..=3600", self.grace_seconds);
        }
        Ok(())
    }
}
