//! What the launcher tells the api when it starts; never changed afterwards.

use crate::keys::ApiKeys;
use crate::parsers::ParserChoice;
use lockstep_core::limits::HTTP_BODY_BYTES_MAX;
use std::time::{SystemTime, UNIX_EPOCH};

/// Requests open at once when the launcher sets nothing else; above it the answer is 503.
pub const REQUESTS_OPEN_MAX: usize = 4096;

/// Settings of the HTTP server.
#[derive(Clone, Debug)]
pub struct ApiConfig {
    /// The `model` that requests name and `/v1/models` lists.
    pub served_model_name: String,
    /// Where the model was read from; shown by `/get_model_info`.
    pub model_path: String,
    /// The name of the model's architecture; shown to Ollama's clients.
    pub architecture: String,
    /// Longest prompt plus answer in tokens, as enforced by the engine.
    pub context_max: usize,
    /// Token ids at or above it are refused in prompts and `stop_token_ids`.
    pub vocab_size: usize,
    /// Requests the engine runs at once; further ones wait. Shown by `/server_info`.
    pub running_max: usize,
    /// The model's own sampling, used where the request says nothing.
    pub default_sampling: SamplingDefaults,
    /// Why chat requests cannot be rendered; `None` when they can.
    pub chat_error: Option<String>,
    /// How the model writes tool calls and reasoning; with neither, answers are text and `tools` are refused.
    pub parsers: ParserChoice,
    /// Requests must carry one of these; empty: nobody is asked for a key.
    pub api_keys: ApiKeys,
    /// Refuse unknown request fields instead of counting them.
    pub strict_api: bool,
    /// Largest request body in bytes; above it the answer is 413.
    pub body_bytes_max: usize,
    /// Start of the server in Unix seconds, the `created` of `/v1/models`; by default now.
    pub created: u64,
    /// The answer of `/version`.
    pub version: String,
    /// The processes of this server, for `/server_info`.
    pub processes: Vec<ProcessInfo>,
}

impl ApiConfig {
    /// A configuration with defaults for everything that need not come from the model.
    pub fn new(served_model_name: impl Into<String>, context_max: usize, vocab_size: usize) -> Self {
        Self {
            served_model_name: served_model_name.into(),
            model_path: String::new(),
            architecture: String::new(),
            context_max,
            vocab_size,
            running_max: 64,
            default_sampling: SamplingDefaults::default(),
            chat_error: None,
            parsers: ParserChoice::default(),
            api_keys: ApiKeys::default(),
            strict_api: false,
            body_bytes_max: HTTP_BODY_BYTES_MAX,
            created: unix_seconds(),
            version: env!("CARGO_PKG_VERSION").into(),
            processes: Vec::new(),
        }
    }
}

/// The wall clock, for `created` fields.
pub(crate) fn unix_seconds() -> u64 {
    // A clock before 1970 is no reason to fail a request.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// Sampling values of the model's `generation_config.json`. `None` leaves OpenAI's default:
/// temperature 1, everything else off.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SamplingDefaults {
    /// Used when a request has no `temperature`.
    pub temperature: Option<f32>,
    /// Used when a request has no `top_k`; 0 means all tokens.
    pub top_k: Option<u32>,
    /// Used when a request has no `top_p`.
    pub top_p: Option<f32>,
    /// Used when a request has no `min_p`.
    pub min_p: Option<f32>,
}

/// One process of the server.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ProcessInfo {
    /// Its name as `ps` shows it.
    pub name: String,
    /// Its process id.
    pub pid: u32,
}
