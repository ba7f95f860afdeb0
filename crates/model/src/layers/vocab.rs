//! The vocabulary-parallel matrix: input embedding and output head.

use crate::Result;
use crate::loader::{Loader, MatrixPlan, Part};
use lockstep_backend::Backend;
use lockstep_comm::collective::Collective;
use lockstep_core::TokenId;
use lockstep_core::shard::VocabShard;

/// `[local_vocab, hidden]`: this rank's rows of the vocabulary, padded so that all ranks hold
/// equally many. Padding rows are zero and never sampled ([`VocabShard::real`]).
pub struct VocabParallel<B: Backend> {
    weight: B::Linear,
    shard: VocabShard,
}

impl<B: Backend> VocabParallel<B> {
    /// Loads `{name}.weight`, `[vocab, hidden]`.
    pub fn load(loader: &Loader<'_, B>, name: &str) -> Result<Self> {
        let (config, p) = (loader.config(), loader.parallel());
        let shard = VocabShard::new(config.vocab_size, p.tp_rank, p.tp_size);
        let weight = loader.linear(MatrixPlan {
            parts: vec![Part {
                name: format!("{name}.weight"),
                global_rows: config.vocab_size,
                rows: shard.real.clone(),
            }],
            padding_rows: shard.padded.len() - shard.real.len(),
            global_cols: config.hidden_size,
            cols: 0..config.hidden_size,
            leaves: vec![0, config.hidden_size],
        })?;
        Ok(Self { weight, shard })
    }

    /// The rows of this rank.
    pub fn shard(&self) -> &VocabShard {
        &self.shard
    }

    /// Embedding of `ids` into `out`, `[ids, hidden]`: each rank fills the rows it holds, zeros
    /// elsewhere, and the sum over ranks is exact. **Collective: all ranks of the TP group.**
    pub fn embed(
        &self,
        backend: &mut B,
        collective: &dyn Collective,
        ids: &[TokenId],
        out: &mut B::Tensor,
    ) -> Result<()> {
        backend.embed(&self.weight, self.shard.padded.start as TokenId, ids, out);
        Ok(backend.all_reduce(collective, out, ids.len())?)
    }

    /// Logits of this rank's vocabulary rows, `[rows, local_vocab]`; the sampler gathers.
    pub fn logits(&self, backend: &mut B, x: &B::Tensor, rows: usize, out: &mut B::Tensor) {
        backend.matmul(&self.weight, x, None, rows, out);
    }
}

/// Name of the input embedding, which is also the head of a tied model.
pub const EMBEDDING: &str = "model.embed_tokens";
/// Name of an untied output head.
pub const HEAD: &str = "lm_head";
