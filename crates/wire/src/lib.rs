//! Control-plane messages: one file per receiver, one codec.
//!
//! | file | receiver | senders |
//! |---|---|---|
//! | [`to_tokenizer`] | a tokenizer process | api |
//! | [`to_scheduler`] | rank 0 of a replica | tokenizers, api |
//! | [`to_ranks`] | ranks 1.. of a replica (broadcast) | rank 0 |
//! | [`to_detokenizer`] | the detokenizer process | rank 0 |
//! | [`to_api`] | the api process | tokenizers, rank 0, detokenizer |
//!
//! **Invariant:** a message is decoded completely or refused with a [`WireError`]; no input makes
//! the decoder panic or allocate more than the message's own size times a small constant.

pub mod codec;
pub mod to_api;
pub mod to_detokenizer;
pub mod to_ranks;
pub mod to_scheduler;
pub mod to_tokenizer;
mod token_bytes;

pub use codec::{WireError, decode, encode};
pub use to_api::{
    Delta, Echo, EngineInfo, EngineTotals, RankInfo, Ready, Role, StageWork, TextAnswer, TextLogprobs,
    Timing, ToApi, TokenText, Tokenized, Usage,
};
pub use to_detokenizer::{Begin, StepLogprobs, ToDetokenizer, TokenLogprobs, TokenOut};
pub use to_ranks::Broadcast;
pub use to_scheduler::{SubmitRequest, ToScheduler, Vocabulary};
pub use to_tokenizer::{
    ChatMessages, GenerateRequest, Prompt, TextParams, TextQuestion, ToTokenizer, TokenizeParams,
};
