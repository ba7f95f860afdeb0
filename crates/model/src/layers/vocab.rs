//! The vocabulary-parallel matrix: input embedding and output head.

use crate::Result;
use crate::loader::Loader;
use lockstep_backend::Backend;
use lockstep_comm::collective::Collective;
use lockstep_core::shard::{Columns, Group, Piece, RowCut, VocabShard, WeightRule};
use lockstep_core::{ModelConfig, TokenId};

/// Name of the input embedding, which is also the head of a tied model.
pub const EMBEDDING: &str = "model.embed_tokens";
/// Name of an untied output head.
pub const HEAD: &str = "lm_head";

/// The rule of `{name}.weight`, `[vocab, hidden]`.
pub fn rule(config: &ModelConfig, name: &str) -> WeightRule {
    let piece = Piece::whole(format!("{name}.weight"), config.vocab_size, RowCut::Vocabulary);
    let columns = Columns { global_len: config.hidden_size, cut: false };
    WeightRule::matrix(Group::Vocabulary, vec![piece], columns)
}

/// `[local_vocab, hidden]`: this rank's rows of the vocabulary, padded so that all ranks hold
/// equally many. Padding rows are zero and never sampled ([`VocabShard::real`]).
pub struct VocabParallel<B: Backend> {
    weight: B::Linear,
    shard: VocabShard,
}

impl<B: Backend> VocabParallel<B> {
    /// Loads this rank's rows.
    pub fn load(loader: &Loader<'_, B>, rule: &WeightRule) -> Result<Self> {
        let (config, p) = (loader.config(), loader.parallel());
        let shard = VocabShard::new(config.vocab_size, p.tp_rank, p.tp_size);
        Ok(Self { weight: loader.matrix(rule)?, shard })
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
