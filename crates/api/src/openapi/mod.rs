//! What every endpoint takes and gives, as data: the source of the field policy, of `/openapi.json` and of the
//! tables in `docs/api.md`.
//!
//! Reading order: [`fields`] (what a row of a field says), [`requests`], [`responses`], [`anthropic`], [`sglang`],
//! [`ollama`], [`native`] and [`shapes`] (the rows), [`answers`]
//! (what comes back), [`operations`] (what an endpoint is), [`document`] (all of it as OpenAPI). The endpoints
//! themselves are listed in `routes`, from which the router is made too, so none can be missing here.

pub(crate) mod answers;
pub(crate) mod anthropic;
pub(crate) mod document;
pub(crate) mod fields;
#[cfg(test)]
mod markdown;
pub(crate) mod native;
pub(crate) mod ollama;
pub(crate) mod operations;
pub(crate) mod requests;
pub(crate) mod responses;
pub(crate) mod sglang;
pub(crate) mod shapes;
#[cfg(test)]
mod tests;
