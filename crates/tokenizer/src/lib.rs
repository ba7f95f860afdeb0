//! Text to tokens and back: tokenizers, chat templates, streaming detokenization, and the processes
//! that do it.
//!
//! Reading order: [`TextModel`] (what a model knows about text), `hf` and `gguf` (where it comes from),
//! `chat` (templates), `pieces` and `stream` (tokens to text), [`worker`] (the processes).
//!
//! **Invariants**
//! - A GGUF file and the Hugging Face folder it was made from give the same ids.
//! - The streamed text of a request equals the decode of all its ids, up to the stop string.
//! - Every refusal is decided before rank 0 sees the request, and is one sentence for people.
//!
//! Special tokens written out in a prompt or a message are parsed as special tokens, as Hugging Face
//! does, in chats and completions alike; in answers they are left out by id, never by text.
//!
//! Built on the `tokenizers` library for encoding; decoding is ours, because stop strings, byte
//! fallback and linear cost need the decoder's inside. Template dialect: transformers'. Follows
//! mini-SGLang `tokenizer/`; differs: never splits a character, frees the state of aborted requests,
//! answers every request it cannot serve.

mod chat;
mod error;
mod gguf;
mod hf;
mod model;
mod pieces;
mod stream;
#[cfg(test)]
mod test_models;
#[cfg(test)]
mod test_rng;
pub mod worker;

pub use error::TokenizerError;
pub use model::{TextModel, TextOptions, chat_template_text, eos_tokens_of};
pub use stream::RequestDecoder;
