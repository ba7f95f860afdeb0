//! Flags of `lockstep bench serve`.

use super::client::{Param, TargetFlags, param};
use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Requests of a made-up workload.
const NUM_REQUESTS: usize = 200;
/// Requests in flight where nothing is said about the load.
const CONCURRENCY: usize = 32;
/// Longest prompt or answer that is made up, in tokens.
const TOKENS_MAX: usize = 10_000_000;

/// Which server, which load, which requests.
#[derive(Args, Debug)]
pub struct BenchServeFlags {
    /// The server and its model; any server that speaks OpenAI's API.
    #[command(flatten)]
    pub target: TargetFlags,

    /// What is asked.
    #[arg(long, value_enum, default_value_t = BenchEndpoint::Completions)]
    pub endpoint: BenchEndpoint,

    /// Requests to send [default: 200, or every line of --trace].
    #[arg(long, value_name = "N")]
    pub num_requests: Option<usize>,

    /// Requests per second, sent whether or not earlier ones are answered.
    #[arg(long, value_name = "PER SECOND")]
    pub request_rate: Option<f64>,

    /// How requests of a --request-rate follow each other.
    #[arg(long, value_enum, default_value_t = Arrival::Poisson)]
    pub arrival: Arrival,

    /// Most requests in flight [default: 32 without a rate or timestamps, else no limit].
    #[arg(long, value_name = "N")]
    pub concurrency: Option<usize>,

    /// Prompt tokens of a made-up request.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub input_len: usize,

    /// Answer tokens of a request.
    #[arg(long, value_name = "TOKENS", default_value_t = 128)]
    pub output_len: usize,

    /// Lengths are uniform between (1 - r) and (1 + r) times the two above.
    #[arg(long, value_name = "R", default_value_t = 0.0)]
    pub range_ratio: f64,

    /// Tokens before the prompt that all made-up requests share.
    #[arg(long, value_name = "TOKENS", default_value_t = 0)]
    pub prefix_len: usize,

    /// Made-up prompts as token ids or as words; auto asks the server whether it takes ids.
    #[arg(long, value_enum, default_value_t = PromptForm::Auto)]
    pub prompt_form: PromptForm,

    /// Requests from a file, one JSON object a line: prompt, messages, body, or input_length with hash_ids; output_length;
    /// timestamp in milliseconds.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,

    /// Ask for answers of exactly their length.
    #[arg(long)]
    pub ignore_eos: bool,

    /// Field of every request, such as temperature=0.7 [default: temperature=0]; may be given several times.
    #[arg(long = "param", value_name = "NAME=VALUE", value_parser = param)]
    pub params: Vec<Param>,

    /// Of lengths, prompts and arrivals.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,

    /// Seconds that one answer may take.
    #[arg(long, value_name = "SECONDS", default_value_t = 600.0)]
    pub timeout: f64,

    /// Also write the figures here, as JSON.
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum BenchEndpoint {
    /// `/v1/chat/completions`.
    Chat,
    /// `/v1/completions`.
    Completions,
}

impl BenchEndpoint {
    /// Its path.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Chat => "/v1/chat/completions",
            Self::Completions => "/v1/completions",
        }
    }
}

/// How requests follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Arrival {
    /// At random, independent of each other.
    Poisson,
    /// At equal distances.
    Constant,
}

/// How made-up prompts are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PromptForm {
    /// Ids where the server takes them.
    Auto,
    /// Lists of token ids.
    Ids,
    /// Text.
    Words,
}

impl BenchServeFlags {
    /// Numbers are in their ranges and go together.
    pub fn check(&self) -> Result<()> {
        for (name, tokens, least) in [
            ("input-len", self.input_len, 1),
            ("output-len", self.output_len, 1),
            ("prefix-len", self.prefix_len, 0),
        ] {
            if !(least..=TOKENS_MAX).contains(&tokens) {
                bail!("--{name} {tokens} is outside {least}..={TOKENS_MAX}");
            }
        }
        if !(0.0..=1.0).contains(&self.range_ratio) {
            bail!("--range-ratio {} is outside 0..=1", self.range_ratio);
        }
        if let Some(rate) = self.request_rate.filter(|rate| !(1e-6..=1e6).contains(rate)) {
            bail!("--request-rate {rate} is outside 0.000001..=1000000");
        }
        if !(0.001..=1e6).contains(&self.timeout) {
            bail!("--timeout {} is outside 0.001..=1000000 seconds", self.timeout);
        }
        match (self.num_requests, self.concurrency) {
            (Some(0), _) => bail!("--num-requests is 0; ask for at least 1"),
            (_, Some(0)) => bail!("--concurrency is 0; allow at least 1"),
            _ if self.endpoint == BenchEndpoint::Chat && self.prompt_form == PromptForm::Ids => {
                bail!("--prompt-form ids needs --endpoint completions: chats are made of text")
            }
            _ => Ok(()),
        }
    }

    /// Requests of a made-up workload.
    pub fn made_up_requests(&self) -> usize {
        self.num_requests.unwrap_or(NUM_REQUESTS)
    }

    /// Most requests in flight; `timed` says whether requests have times of their own.
    pub fn concurrency_max(&self, timed: bool) -> Option<usize> {
        self.concurrency.or((!timed).then_some(CONCURRENCY))
    }
}
