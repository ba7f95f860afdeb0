//! A rank group inside one process: a thread per rank, over the shared memory that rank processes use.

use crate::{Result, Subject, VerifyError, parallel};
use lockstep_backend::cpu::{CpuBackend, CpuOptions};
use lockstep_backend::{Backend, KvLayout};
use lockstep_comm::collective::Collective;
use lockstep_comm::shm::{AbortHandle, SharedRegion, ShmCollective, ShmLayout, ShmOptions};
use lockstep_core::shard::HeadShard;
use lockstep_core::{DType, ModelConfig, ParallelInfo};
use lockstep_model::{Decoder, Loader, Workspace};
use std::sync::Arc;

/// How a group is made.
pub struct Group<'a> {
    /// What it loads.
    pub subject: &'a dyn Subject,
    /// Ranks.
    pub tp: usize,
    /// Threads of each.
    pub threads: usize,
    /// Conversion of matrices.
    pub dtype: Option<DType>,
}

/// What a run needs of memory.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Longest sequence.
    pub positions_max: usize,
    /// Tokens of the largest step.
    pub tokens_max: usize,
    /// Rows of logits of the largest step.
    pub logits_max: usize,
    /// Tokens in a page.
    pub page_size: usize,
    /// Pages of the pool.
    pub num_pages: usize,
}

/// One loaded rank.
pub struct Rank {
    /// Its place.
    pub parallel: ParallelInfo,
    /// The model as this rank was told.
    pub config: ModelConfig,
    /// Device.
    pub backend: CpuBackend,
    /// Shard.
    pub decoder: Decoder<CpuBackend>,
    /// Activations.
    pub work: Workspace<CpuBackend>,
    /// KV pool.
    pub cache: <CpuBackend as Backend>::KvCache,
    /// The TP group.
    pub collective: Box<dyn Collective>,
}

impl Group<'_> {
    /// Loads every rank and runs `body` on each; the answer of rank 0. The first rank that fails ends
    /// all of them, and its error is the answer.
    pub fn run<T: Send>(&self, sizes: Sizes, body: impl Fn(Rank) -> Result<T> + Sync) -> Result<T> {
        let layout = ShmLayout::new(self.tp, ShmLayout::SLOT_BYTES_DEFAULT)?;
        let region = Arc::new(SharedRegion::map(SharedRegion::create(layout)?)?);
        let one = |rank: usize| -> Result<T> {
            let answer = self.load(rank, sizes, Arc::clone(&region)).and_then(&body);
            if let Err(error) = &answer {
                AbortHandle::of(Arc::clone(&region)).abort(&format!("rank {rank}: {error}"));
            }
            answer
        };
        let mut answers: Vec<Result<T>> = std::thread::scope(|scope| {
            let one = &one;
            let ranks: Vec<_> = (0..self.tp).map(|rank| scope.spawn(move || one(rank))).collect();
            let joined = ranks.into_iter().enumerate();
            joined.map(|(rank, r)| r.join().unwrap_or(Err(VerifyError::Panicked(rank)))).collect()
        });
        // The cause rather than what followed from it on the other ranks.
        let is_cause = |a: &Result<T>| a.as_ref().is_err_and(|e| !is_consequence(e));
        let at = answers.iter().position(is_cause).or(answers.iter().position(|a| a.is_err())).unwrap_or(0);
        answers.swap_remove(at)
    }

    fn load(&self, rank: usize, sizes: Sizes, region: Arc<SharedRegion>) -> Result<Rank> {
        let p = parallel(rank, self.tp);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let ranks_share_cores = self.tp * self.threads > cores;
        let options = ShmOptions { ranks_share_cores, ..ShmOptions::for_ranks(self.tp) };
        let collective = Box::new(ShmCollective::new(region, rank, options)?);
        let backend = CpuBackend::new(CpuOptions { threads: self.threads, ..CpuOptions::default() })?;
        let source = self.subject.source(p);
        let config = source.config().clone();
        let silent = |_: usize, _: usize| {};
        let loader = Loader::new(source, &backend, p, self.dtype, &silent);
        let decoder = Decoder::load(&loader, sizes.positions_max)?;
        let work = Workspace::new(&backend, &config, p, sizes.tokens_max, sizes.logits_max)?;
        let heads = HeadShard::new(config.num_heads, config.num_kv_heads, p.tp_rank, p.tp_size);
        let cache = backend.kv_cache(KvLayout {
            local_layers: config.num_layers,
            local_kv_heads: heads.kv_heads.len(),
            head_dim: config.head_dim,
            page_size: sizes.page_size,
            num_pages: sizes.num_pages,
            dtype: backend.kv_dtype(),
        })?;
        Ok(Rank { parallel: p, config, backend, decoder, work, cache, collective })
    }
}

/// Whether an error only says that another rank failed.
fn is_consequence(error: &VerifyError) -> bool {
    use lockstep_comm::collective::CollectiveError::Aborted;
    match error {
        VerifyError::Collective(Aborted { .. }) => true,
        VerifyError::Backend(lockstep_backend::BackendError::Collective(Aborted { .. })) => true,
        VerifyError::Model(lockstep_model::ModelError::Backend(e)) => {
            matches!(e, lockstep_backend::BackendError::Collective(Aborted { .. }))
        }
        VerifyError::Engine(e) => e.is_consequence(),
        _ => false,
    }
}
