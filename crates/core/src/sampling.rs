//! How the next token of a request is chosen, and why a request ended.

use crate::ids::TokenId;
use serde::{Deserialize, Serialize};

/// Sampling parameters after validation and defaults; the same on every rank.
///
/// Random numbers are counter-based, keyed by (`seed`, `choice`, position), so a seed gives the
/// same text at any batch size, tp size and after a retraction.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 means greedy, whatever the other fields say.
    pub temperature: f32,
    /// Keep the `top_k` most likely tokens; 0 means all.
    pub top_k: u32,
    /// Keep the smallest set of tokens whose probability reaches `top_p`; 1 means all.
    pub top_p: f32,
    /// Drop tokens less likely than `min_p` times the most likely one; 0 means none.
    pub min_p: f32,
    /// Key of the random numbers; the API process draws one when the client gives none.
    pub seed: u64,
    /// Index of this choice among the request's `n`.
    pub choice: u32,
    /// Tokens to generate at most; `None` means until an end token or the context is full.
    pub max_tokens: Option<u32>,
    /// Generate at least this many tokens before an end token may be chosen.
    pub min_tokens: u32,
    /// Do not stop at the model's end tokens.
    pub ignore_eos: bool,
    /// Further end tokens of this request.
    pub stop_token_ids: Vec<TokenId>,
}

impl SamplingParams {
    /// Whether every token is the most likely one.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1
    }
}

impl Default for SamplingParams {
    /// Greedy, without a token limit.
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            seed: 0,
            choice: 0,
            max_tokens: None,
            min_tokens: 0,
            ignore_eos: false,
            stop_token_ids: Vec::new(),
        }
    }
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// An end token of the model or the request, or a stop string.
    Stop,
    /// `max_tokens` or the context was reached.
    Length,
    /// The client left or asked for it.
    Abort,
}

impl FinishReason {
    /// OpenAI's `finish_reason`.
    pub const fn as_openai(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Abort => "abort",
        }
    }
}
