//! The decoder as rank threads over real shared memory: right, and the same to the bit however it runs.

#![allow(clippy::unwrap_used)] // helpers outside #[test] functions may panic too

mod bit_equality;
mod coded;
mod dummy;
mod group;
mod loading;
mod reference;
