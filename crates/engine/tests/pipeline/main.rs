//! Answers of whole engines, ranks as threads, at every tp x pp: loader, collectives, loop and sampler are the server's.
#![allow(clippy::unwrap_used)] // tests may unwrap

mod equality;
mod group;
