//! Which token of a step belongs to which request, and where that request's KV is.

use lockstep_core::PageId;

/// The attention side of a step: `rows` in order, each a run of consecutive tokens of one request.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBatch<'a> {
    /// One entry per request in the step.
    pub rows: &'a [AttentionRow],
    /// Page tables of all rows, flattened.
    pub pages: &'a [PageId],
}

/// A run of tokens of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionRow {
    /// Index of its first token in the step.
    pub first_token: u32,
    /// Tokens computed in this step: 1 for decode, more for prefill.
    pub token_count: u32,
    /// Absolute position of the first token: how many tokens are already cached.
    pub start_position: u32,
    /// Where its page table starts in `AttentionBatch::pages`; page `i` holds positions
    /// `i*page_size..(i+1)*page_size` and covers at least `start_position + token_count`.
    pub first_page: u32,
}

/// The numbers of a step that its operations will be given, one after the other.
#[derive(Clone, Copy, Debug)]
pub struct StepNumbers<'a> {
    /// Input of [`Backend::embed`](crate::Backend::embed).
    pub token_ids: &'a [u32],
    /// Absolute position of each token.
    pub positions: &'a [u32],
    /// KV slot of each token.
    pub slots: &'a [u32],
    /// Input of [`Backend::attention`](crate::Backend::attention).
    pub batch: AttentionBatch<'a>,
    /// Input of [`Backend::gather_rows`](crate::Backend::gather_rows).
    pub logit_tokens: &'a [u32],
}
