//! Messages from the primary of each replica to the detokenizer.

use crate::to_api::{Timing, Usage};
use crate::to_tokenizer::TextParams;
use lockstep_core::{FinishReason, RequestId, TokenId};
use serde::{Deserialize, Serialize};

/// What the detokenizer receives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToDetokenizer {
    /// A replica has started: what an earlier one of that number has begun will have no further token.
    ReplicaStarted {
        /// Which (`dp_rank`).
        replica: usize,
    },
    /// Requests accepted by a replica's scheduler; comes before their first token.
    Begin {
        /// Which (`dp_rank`).
        replica: usize,
        /// Its requests.
        requests: Vec<Begin>,
    },
    /// The tokens of one step, or of some of its requests where many log-probabilities come with them.
    Step(Vec<TokenOut>),
    /// From one replica: it has nothing more to say. After that of the last one, report everything received so far
    /// and exit with code 0.
    Shutdown,
}

/// What the detokenizer must know of a request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Begin {
    /// Its id everywhere.
    pub id: RequestId,
    /// Stop strings and the treatment of special tokens.
    pub text: TextParams,
    /// The prompt, when it is to be reported ([`TextParams::reports_prompt`]); empty otherwise.
    #[serde(with = "crate::token_bytes")]
    pub prompt: Vec<TokenId>,
}

/// What happened to one request in one step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenOut {
    /// The request.
    pub id: RequestId,
    /// New tokens, usually one; an end token is included (and counted) but has no text.
    #[serde(with = "crate::token_bytes")]
    pub tokens: Vec<TokenId>,
    /// Set on the request's last message. After it the id is never seen again.
    pub finish: Option<FinishReason>,
    /// The last of `tokens` is an end token: it produces no text.
    pub ends_with_eos: bool,
    /// Token counts so far.
    pub usage: Usage,
    /// For requests that asked for log-probabilities; costs the others nothing.
    pub logprobs: Option<Box<StepLogprobs>>,
    /// Where the time went so far: with a request's first token, and for those that asked ([`TextParams::timing`]) with
    /// every message, since a stop string may make any of them the last.
    pub timing: Option<Box<Timing>>,
}

/// Log-probabilities of one request, of the tokens that come with them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct StepLogprobs {
    /// Of the prompt's tokens from the second on; once, with the first generated token.
    pub prompt: Vec<TokenLogprobs>,
    /// Of the generated tokens.
    pub output: Vec<TokenLogprobs>,
}

impl StepLogprobs {
    /// Log-probabilities in it, alternatives included.
    pub fn count(&self) -> usize {
        self.prompt.iter().chain(&self.output).map(|token| 1 + token.top.len()).sum()
    }
}

/// How likely a token was, and what else was: natural logarithms of the softmax of the model's own
/// logits, before penalties, bias, masks, temperature and filters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprobs {
    /// The token.
    pub token: TokenId,
    /// Its log-probability.
    pub logprob: f32,
    /// Its place among all tokens, from 1, in the order of `top`.
    pub rank: u32,
    /// The most likely tokens, best first (the smaller id on ties), as many as asked for.
    pub top: Vec<(TokenId, f32)>,
}
