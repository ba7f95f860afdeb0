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

/// The tokens of one step and where they stand: what a forward pass is given, and what its operations will be.
#[derive(Clone, Copy, Debug)]
pub struct ForwardInput<'a> {
    /// Input tokens of all rows, flattened; what [`Backend::embed`](crate::Backend::embed) is given.
    pub token_ids: &'a [u32],
    /// Absolute position of each token.
    pub positions: &'a [u32],
    /// KV slot of each token, `page * page_size + offset`.
    pub slots: &'a [u32],
    /// Which tokens belong to which request.
    pub batch: AttentionBatch<'a>,
    /// Indices of the tokens whose logits are wanted, ascending; what
    /// [`Backend::gather_rows`](crate::Backend::gather_rows) is given.
    pub logit_tokens: &'a [u32],
}
