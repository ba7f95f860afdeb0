//! How the commands that talk to a server do it: HTTP/1.1 and server-sent events, over hyper.
//!
//! `chat`, `batch` and `bench serve` are clients of the same public API that every other client uses;
//! nothing here knows more of a server than `docs/api.md` says.
//!
//! **Invariants**
//! * An answer that was cut is never taken for a complete one: a stream ends well with `[DONE]` only.
//! * The time of an event is when its bytes were read from the socket, before anything is parsed.
//! * A server that was started here is gone when this process is, however it ends.
//!
//! Reading order: [`target`] (from flags to a server and a model), [`started`], [`http`], [`sse`], [`chunk`].

mod base;
pub mod chunk;
mod error;
mod http;
#[cfg(test)]
pub mod scripted;
mod sse;
mod started;
mod target;

pub use error::ClientError;
pub use http::{Answer, Client};
pub use target::{Target, runtime};
