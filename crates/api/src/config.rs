//! What the launcher tells the api when it starts; never changed afterwards.

use crate::keys::ApiKeys;
use crate::parsers::ParserChoice;
use crate::spans::OtlpEndpoint;
use crate::transport::Tls;
use axum::http::HeaderValue;
use lockstep_comm::watch::WatchPage;
use lockstep_core::Topology;
use lockstep_core::limits::HTTP_BODY_BYTES_MAX;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Connections when the launcher sets nothing else.
pub const CONNECTIONS_MAX: usize = 8192;

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
    /// The text of the model's chat templates, which [`parsers::detect`](crate::parsers::detect) reads too; shown to
    /// Ollama's clients.
    pub chat_template: Option<String>,
    /// A hash that names the content of the model's files, in lower-case hexadecimal, where one is known; shown to
    /// Ollama's clients.
    pub model_digest: Option<String>,
    /// Token ids at or above it are refused in prompts and `stop_token_ids`.
    pub vocab_size: usize,
    /// Its ranks; shown by `/server_info`.
    pub topology: Topology,
    /// Requests a replica runs at once; further ones wait. Shown by `/server_info`.
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
    /// Connections at once; those beyond are told 503, see [`server`](crate::server).
    pub connections_max: usize,
    /// How long clients may keep the server waiting.
    pub patience: Patience,
    /// Certificate and key; without, connections are plain.
    pub tls: Option<Tls>,
    /// Whose web pages may use the server.
    pub cors: Cors,
    /// Start of the server in Unix seconds, the `created` of `/v1/models`; by default now.
    pub created: u64,
    /// The answer of `/version`.
    pub version: String,
    /// The processes of this server, for `/server_info`.
    pub processes: ProcessList,
    /// Where the loops of these processes stand; none in tests without processes.
    pub watch: Option<Watched>,
    /// Who collects traces of requests, if anybody.
    pub otlp: Option<OtlpEndpoint>,
}

/// The watch page, and whose mark is which.
#[derive(Clone, Debug)]
pub struct Watched {
    /// The page.
    pub page: WatchPage,
    /// Name and mark of every loop.
    pub loops: Vec<(String, usize)>,
    /// Marks of the ranks, in order.
    pub ranks: Vec<usize>,
    /// Replicas, each of which has as many ranks.
    pub replicas: usize,
    /// Pipeline stages of a replica, each of which has as many ranks.
    pub stages: usize,
}

impl Watched {
    /// Marks of the ranks of each replica.
    pub(crate) fn by_replica(&self) -> impl Iterator<Item = &[usize]> {
        self.ranks.chunks((self.ranks.len() / self.replicas.max(1)).max(1))
    }

    /// Marks of the ranks of each TP group: those that take part in the same operations on tensors.
    pub(crate) fn by_tp_group(&self) -> impl Iterator<Item = &[usize]> {
        self.ranks.chunks((self.ranks.len() / (self.replicas * self.stages).max(1)).max(1))
    }
}

impl ApiConfig {
    /// A configuration with defaults for everything that need not come from the model.
    pub fn new(served_model_name: impl Into<String>, context_max: usize, vocab_size: usize) -> Self {
        Self {
            served_model_name: served_model_name.into(),
            model_path: String::new(),
            architecture: String::new(),
            chat_template: None,
            model_digest: None,
            context_max,
            vocab_size,
            topology: Topology::tensor_parallel(1),
            running_max: 64,
            default_sampling: SamplingDefaults::default(),
            chat_error: None,
            parsers: ParserChoice::default(),
            api_keys: ApiKeys::default(),
            strict_api: false,
            body_bytes_max: HTTP_BODY_BYTES_MAX,
            connections_max: CONNECTIONS_MAX,
            patience: Patience::default(),
            tls: None,
            cors: Cors::Any,
            created: unix_seconds(),
            version: env!("CARGO_PKG_VERSION").into(),
            processes: ProcessList::default(),
            watch: None,
            otlp: None,
        }
    }
}

/// How long a client may keep the server waiting. None of them limits the time that an answer takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// From the first byte of a request to the end of its head, and for a TLS handshake; then 408.
    pub head: Duration,
    /// For a request body, plus a second for each [`Self::BODY_BYTES_PER_S`] that came; then 408.
    pub body: Duration,
    /// Between requests; then the connection is closed.
    pub idle: Duration,
    /// While a client takes no byte of its answer; then the connection is reset and the request aborted.
    pub write: Duration,
}

impl Patience {
    /// A body that comes at this rate may be as long as it likes.
    pub const BODY_BYTES_PER_S: usize = 16 << 10;

    /// The shortest one that concerns a connection as a whole.
    pub(crate) fn shortest(&self) -> Duration {
        self.head.min(self.idle).min(self.write)
    }
}

impl Default for Patience {
    fn default() -> Self {
        let seconds = Duration::from_secs;
        Self { head: seconds(10), body: seconds(30), idle: seconds(75), write: seconds(60) }
    }
}

/// Whose web pages may use the server: the origins that its answers name to browsers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Cors {
    /// Everybody's.
    #[default]
    Any,
    /// Those of these origins, e.g. `https://chat.example.org`.
    Only(Vec<HeaderValue>),
    /// Nobody's: no answer names an origin.
    Nobody,
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

/// The processes of the server, which a restart of the engine changes. Clones share the list.
#[derive(Clone, Debug, Default)]
pub struct ProcessList(Arc<Mutex<Vec<ProcessInfo>>>);

impl ProcessList {
    /// These are the processes from now on.
    pub fn set(&self, processes: Vec<ProcessInfo>) {
        *self.0.lock().expect("invariant: nothing panics while holding the list") = processes;
    }

    /// The processes now.
    pub fn get(&self) -> Vec<ProcessInfo> {
        self.0.lock().expect("invariant: nothing panics while holding the list").clone()
    }
}

/// One process of the server.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct ProcessInfo {
    /// Its name as `ps` shows it.
    pub name: String,
    /// Its process id.
    pub pid: u32,
    /// What it does: `api`, `scheduler`, `tokenizer`, `detokenizer`.
    pub role: String,
    /// Its rank, if it is one.
    pub rank: Option<usize>,
}
