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
    /// Subtracted once from the logit of every token that the answer holds already; 0 is off.
    pub presence_penalty: f32,
    /// Subtracted from a token's logit once for each time the answer holds it; 0 is off.
    pub frequency_penalty: f32,
    /// Divides positive and multiplies negative logits of tokens in prompt or answer; 1 is off.
    pub repetition_penalty: f32,
    /// Added to the logits of these tokens, before the penalties.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// Only these tokens may be chosen; `None` means all.
    pub allowed_token_ids: Option<Vec<TokenId>>,
    /// The answer holds none of these token sequences.
    pub bad_words: Vec<Vec<TokenId>>,
    /// Report the log-probability of each chosen token and of the so many most likely ones.
    pub logprobs: Option<u32>,
    /// The same for every token of the prompt but the first. Such a request reads no cached prefix.
    pub prompt_logprobs: Option<u32>,
    /// What the answer must look like.
    pub grammar: Option<Grammar>,
}

/// The white space that an answer's JSON may hold between two of its tokens, as a regular expression: a space or two,
/// or a line feed and its indentation.
pub const JSON_WHITE_SPACE: &str = r" {1,2}|\r?\n[ \t]{0,32}";

/// The form an answer is held to: only tokens that can still lead to it may be chosen.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Grammar {
    /// Any JSON object.
    JsonObject,
    /// JSON that satisfies this JSON schema (its text, so that key order survives).
    JsonSchema(String),
    /// Text that this regular expression matches whole.
    Regex(String),
    /// A grammar in llguidance's Lark dialect.
    Lark(String),
    /// One of these texts.
    Choice(Vec<String>),
}

impl SamplingParams {
    /// Whether every token is the most likely one.
    pub fn is_greedy(&self) -> bool {
        self.temperature == 0.0 || self.top_k == 1
    }

    /// Whether the logits of a token depend on the tokens before it.
    pub fn has_penalties(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.repetition_penalty != 1.0
    }

    /// Whether the choice of a token depends on the answer's tokens before it.
    pub fn follows_output(&self) -> bool {
        self.has_penalties() || self.grammar.is_some() || !self.bad_words.is_empty()
    }

    /// Whether logits are changed before a token is chosen (apart from `min_tokens`).
    pub fn changes_logits(&self) -> bool {
        self.follows_output() || !self.logit_bias.is_empty() || self.allowed_token_ids.is_some()
    }

    /// Whether a grammar, and nothing else, changes logits.
    pub fn is_only_masked(&self) -> bool {
        self.grammar.is_some()
            && !self.has_penalties()
            && self.bad_words.is_empty()
            && self.logit_bias.is_empty()
            && self.allowed_token_ids.is_none()
    }

    /// Bytes of what it says about single tokens and of its grammar.
    pub fn rule_bytes(&self) -> usize {
        let grammar = match &self.grammar {
            None | Some(Grammar::JsonObject) => 0,
            Some(Grammar::JsonSchema(text) | Grammar::Regex(text) | Grammar::Lark(text)) => text.len(),
            Some(Grammar::Choice(texts)) => texts.iter().map(String::len).sum(),
        };
        grammar
            + size_of_val(&self.logit_bias[..])
            + self.allowed_token_ids.as_deref().map_or(0, size_of_val)
            + size_of_val(&self.stop_token_ids[..])
    }

    /// Whether the sampler must know the request's earlier tokens.
    pub fn needs_history(&self) -> bool {
        self.follows_output() || self.prompt_logprobs.is_some()
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
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            allowed_token_ids: None,
            bad_words: Vec::new(),
            logprobs: None,
            prompt_logprobs: None,
            grammar: None,
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
    /// What the request asks for left no token to choose ([`NO_TOKEN`](crate::NO_TOKEN)): its answer is an error.
    NoToken,
}

impl FinishReason {
    /// OpenAI's `finish_reason`.
    pub const fn as_openai(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Abort => "abort",
            FinishReason::NoToken => "error",
        }
    }
}
