//! The HTTP server of Lockstep: generation in several APIs, models, health, version and server information.
//!
//! **Invariants**
//! - A request that is refused never reaches the engine, and no input ends the process: every
//!   fault is an answer in the form of the endpoint's API (`errors`).
//! - Every request that reaches the engine gets exactly one end: a finish, an error, or (when the
//!   client left) an abort through the tokenizer that took it.
//! - A streamed answer joins to the same text as the answer sent whole.
//!
//! Runs in the launcher process, on its single-threaded event loop. A request passes through four
//! steps, one module each: parse (`body`), validate (`request`), submit ([`engine`]), answer
//! (`answer`, which takes text apart with [`parsers`]); `handlers` strings them together. What differs
//! between the APIs is in `dialect`: how a request reads and how an answer is written. Reading order: those,
//! then [`server`], `listen`, `connection` and [`transport`]. The behaviour of every field is in `docs/api.md`.

mod answer;
mod body;
mod clock;
pub mod config;
mod connection;
pub mod control;
mod delivery;
mod dialect;
pub mod engine;
pub mod error;
mod errors;
mod fields;
pub mod fuzzing;
mod handlers;
mod health;
pub mod keys;
mod listen;
mod metrics;
mod openapi;
mod operations;
pub mod parsers;
#[cfg(test)]
mod random;
mod replicas;
mod request;
mod request_id;
mod respond;
mod routes;
pub mod server;
mod spans;
mod statistics;
mod text;
mod timing;
mod trace;
pub mod transport;
mod unread;

pub use config::{
    ApiConfig, CONNECTIONS_MAX, Cors, Patience, ProcessInfo, ProcessList, SamplingDefaults, Watched,
};
pub use control::{Ended, ServerControl, ServerHandle};
pub use engine::{EngineClient, EngineInbound, EngineLink, Outbound, dispatch};
pub use error::ApiError;
pub use keys::ApiKeys;
pub use listen::TURNED_AWAY_MAX;
pub use request::check_chat_fields;
pub use server::serve;
pub use spans::OtlpEndpoint;
pub use transport::{Tls, TlsError};

/// An origin of web pages, as the header `Origin` writes it.
pub use axum::http::HeaderValue as Origin;
