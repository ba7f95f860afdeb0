//! Messages to the api process.

use lockstep_core::{FinishReason, Refusal, RequestId, TokenId};
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// What the api receives.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToApi {
    /// A child finished loading. Rank 0 speaks for all ranks of its replica, after a barrier.
    Ready(Box<Ready>),
    /// How far a rank has loaded; for the progress bar only.
    Loading {
        /// Global rank.
        rank: usize,
        /// Parts of the model (layers, embedding, head) loaded.
        done: usize,
        /// Parts in all.
        total: usize,
    },
    /// The request will get no tokens; from a tokenizer or from rank 0.
    Refused {
        /// The request.
        id: RequestId,
        /// What to tell the client.
        refusal: Refusal,
    },
    /// Text of one step, from the detokenizer.
    Deltas(Vec<Delta>),
    /// A tokenizer's answer to `ToTokenizer::AskText`.
    TextAnswered {
        /// Number of the question this answers.
        query: u64,
        /// The answer, or what to tell the client.
        result: Result<TextAnswer, Refusal>,
    },
    /// Answer to `ToScheduler::Info`.
    EngineInfo(Box<EngineInfo>),
    /// Answer to `ToScheduler::FlushCache`.
    CacheFlushed {
        /// Number of the query this answers.
        query: u64,
        /// Pages that are free again.
        pages: usize,
    },
    /// Answer to `ToScheduler::WriteFlight`.
    FlightWritten {
        /// Number of the query this answers.
        query: u64,
        /// The file of each rank by rank number, or why rank 0 could not write its own.
        result: Result<Vec<String>, String>,
    },
}

/// What a tokenizer says of a text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TextAnswer {
    /// Of a text to tokenize.
    Tokens(Tokenized),
    /// Of tokens to turn into text.
    Text(String),
}

/// A text as tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tokenized {
    /// Its tokens.
    #[serde(with = "crate::token_bytes")]
    pub tokens: Vec<TokenId>,
    /// How the vocabulary spells them, if that was asked for.
    pub pieces: Option<Vec<String>>,
}

/// Who says it is ready.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ready {
    /// The child's part.
    pub role: Role,
    /// Facts for `/v1/models` and `/server_info`; from rank 0 only.
    pub engine: Option<EngineInfo>,
    /// Whether chat requests can be rendered; from tokenizers only. Holds why not otherwise.
    pub chat_error: Option<String>,
}

/// The part a child process plays.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Role {
    /// A scheduler process with its rank number.
    Scheduler(usize),
    /// A tokenizer process with its number.
    Tokenizer(usize),
    /// The detokenizer (or the one worker that does both when there are no tokenizers).
    Detokenizer,
}

impl Role {
    /// One word, as metrics and logs show it.
    pub const fn name(self) -> &'static str {
        match self {
            Role::Scheduler(_) => "scheduler",
            Role::Tokenizer(_) => "tokenizer",
            Role::Detokenizer => "detokenizer",
        }
    }
}

/// Token counts of a request, in OpenAI's sense.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Prompt tokens, cached ones included.
    pub prompt_tokens: u32,
    /// Prompt tokens whose KV came from the prefix cache.
    pub cached_tokens: u32,
    /// Generated tokens, end token included.
    pub completion_tokens: u32,
}

/// New text of one request.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Delta {
    /// The request.
    pub id: RequestId,
    /// Text that is complete and cannot be part of a stop string; may be empty.
    pub text: String,
    /// The ids behind it (and behind text still held back).
    #[serde(with = "crate::token_bytes")]
    pub tokens: Vec<TokenId>,
    /// Set on the last delta. `stop_string` tells an end by stop string.
    pub finish: Option<FinishReason>,
    /// The detokenizer found this stop string, by its number in
    /// [`TextParams::stop`](crate::TextParams::stop): the scheduler still runs the request, the api must
    /// abort it.
    pub stop_string: Option<u32>,
    /// Token counts so far.
    pub usage: Usage,
    /// One entry per token of `tokens`, if the request asked for log-probabilities.
    pub logprobs: Option<Box<Vec<TextLogprobs>>>,
    /// The prompt, on the first delta of a request that asked for it.
    pub echo: Option<Box<Echo>>,
    /// Where the time went: on the first delta of every request, and on the last of one that asked for it.
    pub timing: Option<Box<Timing>>,
}

/// Where a request's time went, by rank 0's clock: from the moment rank 0 took it to the moment a token's text is
/// sent on. A phase that it has not reached took no time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timing {
    /// Microseconds until the first step that held it was launched.
    pub queue_us: u64,
    /// Microseconds from there to its first token.
    pub prefill_us: u64,
    /// Microseconds from its first token to its latest.
    pub decode_us: u64,
    /// Steps that held it.
    pub steps: u32,
    /// Of these, steps that computed its prompt or, after a retraction, its tokens again.
    pub prefill_chunks: u32,
    /// Requests in the smallest of these steps; 0 before the first.
    pub batch_min: u32,
    /// Requests in the largest of them.
    pub batch_max: u32,
    /// Requests of all of them, added up.
    pub batch_sum: u64,
    /// Times it was put back into the queue because pages ran out.
    pub retractions: u32,
}

/// A prompt on its way back to the client.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Echo {
    /// Its text, decoded from its tokens, where the answer's goes on with it.
    pub text: Option<String>,
    /// Its tokens, where they were asked for.
    #[serde(with = "crate::token_bytes")]
    pub ids: Vec<TokenId>,
    /// The same with log-probabilities, if those were asked for; the first one has none.
    pub tokens: Vec<TextLogprobs>,
}

/// A token as clients see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenText {
    /// Its id.
    pub id: TokenId,
    /// Its bytes, which need not be whole characters.
    #[serde(with = "serde_bytes")]
    pub bytes: Vec<u8>,
    /// False for a special token that the text leaves out.
    pub is_shown: bool,
}

/// A token of a text, how likely it was, and what else was.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TextLogprobs {
    /// The token.
    pub token: TokenText,
    /// Its log-probability; none for the first token of a prompt.
    pub logprob: Option<f32>,
    /// Its place among all tokens, from 1, in the order of `top`; 0 where there is no log-probability.
    pub rank: u32,
    /// The most likely tokens, best first.
    pub top: Vec<(TokenText, f32)>,
}

/// The state of one replica, as rank 0 sees it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EngineInfo {
    /// Number of the query this answers; 0 in the ready message.
    pub query: u64,
    /// Longest prompt plus answer, in tokens, that is enforced.
    pub context_max: usize,
    /// Tokens per page.
    pub page_size: usize,
    /// Pages of the pool (equal on all ranks).
    pub pages_total: usize,
    /// Pages that nobody uses.
    pub pages_free: usize,
    /// Pages held only by the prefix cache.
    pub pages_cached: usize,
    /// Pages held by requests.
    pub pages_held: usize,
    /// Requests waiting for admission.
    pub waiting: usize,
    /// Requests being prefilled or decoded.
    pub running: usize,
    /// Ended requests whose last launched step has not completed.
    pub draining: usize,
    /// What happened since start.
    pub totals: EngineTotals,
    /// One entry per rank.
    pub ranks: Vec<RankInfo>,
    /// Slower paths taken, and anything else worth knowing, as sentences.
    pub notes: Vec<String>,
}

/// What a replica has done since its start; every number only grows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineTotals {
    /// Steps planned.
    pub steps: u64,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Of these, tokens whose KV came from the prefix cache.
    pub cached_tokens: u64,
    /// Tokens generated.
    pub generated_tokens: u64,
    /// Tokens that went through the model, prefill and decode.
    pub computed_tokens: u64,
    /// Requests put back into the queue because pages ran out.
    pub retractions: u64,
    /// Pages of cached prefixes given up for new content.
    pub evicted_pages: u64,
    /// Times a request put off its admission to share a prefix in flight.
    pub prefix_waits: u64,
}

/// Facts about one rank.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankInfo {
    /// Global rank.
    pub rank: usize,
    /// Process id.
    pub pid: u32,
    /// Label such as `TP0`.
    pub label: String,
    /// Layers of the model that it has, its pipeline stage's.
    pub layers: Range<usize>,
    /// Device and instruction set, e.g. `cpu avx512 x1`.
    pub device: String,
    /// Bytes of weights this rank holds.
    pub weight_bytes: u64,
    /// Bytes of KV pool.
    pub kv_bytes: u64,
    /// Peak resident memory of the process in bytes, after loading.
    pub resident_bytes_max: u64,
    /// In a pipeline: what its device did so far.
    pub stage_work: StageWork,
}

/// How long the device of a pipeline stage's rank computed, of the time in which its replica had work; both only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageWork {
    /// Microseconds in which it computed, without what it waited for the stage before.
    pub computed_us: u64,
    /// Microseconds in which a step was in flight. 0 without a pipeline.
    pub work_us: u64,
}

impl StageWork {
    /// The share of the time with work in which the device did not compute; 0 before there was any.
    pub fn bubble(&self) -> f64 {
        match self.work_us {
            0 => 0.0,
            work => (1.0 - self.computed_us as f64 / work as f64).clamp(0.0, 1.0),
        }
    }

    /// What was done since `before`.
    pub fn since(&self, before: &Self) -> Self {
        Self {
            computed_us: self.computed_us.saturating_sub(before.computed_us),
            work_us: self.work_us.saturating_sub(before.work_us),
        }
    }
}
