//! Runs a model folder as a group of rank threads over real shared memory and returns every logit.

use lockstep_backend::cpu::{CpuBackend, CpuOptions};
use lockstep_backend::{AttentionBatch, AttentionRow, Backend, ForwardInput, KvLayout};
use lockstep_comm::collective::Collective;
use lockstep_comm::shm::{SharedRegion, ShmCollective, ShmLayout, ShmOptions};
use lockstep_core::shard::HeadShard;
use lockstep_core::{DType, ParallelInfo, WeightMode};
use lockstep_model::{Decoder, Loader, ModelRules, ShardBytes, WeightSource, Workspace, weight_types};
use lockstep_weights::ModelFiles;
use std::path::Path;
use std::sync::Arc;

/// How a group runs.
#[derive(Clone, Copy, Debug)]
pub struct Layout {
    pub tp: usize,
    pub threads: usize,
    pub page_size: usize,
    pub weights: WeightMode,
}

impl Default for Layout {
    fn default() -> Self {
        Self { tp: 1, threads: 1, page_size: 16, weights: WeightMode::AsStored }
    }
}

/// One row of a step: `count` tokens of request `request` from position `start`.
#[derive(Clone, Copy, Debug)]
pub struct Row {
    pub request: usize,
    pub start: usize,
    pub count: usize,
}

/// Logits `[request][position][vocab]`.
pub type Logits = Vec<Vec<Vec<f32>>>;

/// Every step holds one request, `chunk` tokens at a time.
pub fn one_by_one(prompts: &[Vec<u32>], chunk: usize) -> Vec<Vec<Row>> {
    let rows = |request: usize, len: usize| {
        (0..len).step_by(chunk).map(move |start| vec![Row { request, start, count: chunk.min(len - start) }])
    };
    prompts.iter().enumerate().flat_map(|(r, p)| rows(r, p.len())).collect()
}

/// All requests share every step, each at its own pace: request `r` advances `1 + r % 3` tokens.
pub fn interleaved(prompts: &[Vec<u32>]) -> Vec<Vec<Row>> {
    let mut at = vec![0; prompts.len()];
    let mut steps = Vec::new();
    while at.iter().zip(prompts).any(|(a, p)| *a < p.len()) {
        let mut step = Vec::new();
        for (request, prompt) in prompts.iter().enumerate() {
            let count = (1 + request % 3).min(prompt.len() - at[request]);
            if count > 0 {
                step.push(Row { request, start: at[request], count });
                at[request] += count;
            }
        }
        steps.push(step);
    }
    steps
}

/// Runs `steps` over a group that loads `folder`; panics when anything fails.
pub fn run(folder: &Path, layout: Layout, prompts: &[Vec<u32>], steps: &[Vec<Row>]) -> Logits {
    run_source(&ModelFiles::open(folder).unwrap(), layout, prompts, steps)
}

/// Runs `steps` over a group that loads from `source`; panics when anything fails.
pub fn run_source<S: WeightSource + Sync>(
    source: &S,
    layout: Layout,
    prompts: &[Vec<u32>],
    steps: &[Vec<Row>],
) -> Logits {
    let shared = SharedRegion::create(ShmLayout::new(layout.tp, 1 << 16).unwrap()).unwrap();
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..layout.tp)
            .map(|rank| {
                let region = Arc::new(SharedRegion::map(&shared).unwrap());
                let options = ShmOptions { ranks_share_cores: true, ..ShmOptions::for_ranks(layout.tp) };
                scope.spawn(move || {
                    let collective = ShmCollective::new(region, rank, options).unwrap();
                    Rank::load(source, layout, rank, prompts).run(&collective, prompts, steps)
                })
            })
            .collect();
        let mut all: Vec<Logits> = ranks.into_iter().map(|r| r.join().unwrap()).collect();
        all.swap_remove(0)
    })
}

struct Rank {
    layout: Layout,
    vocab: usize,
    backend: CpuBackend,
    decoder: Decoder<CpuBackend>,
    work: Workspace<CpuBackend>,
    cache: <CpuBackend as Backend>::KvCache,
    /// Page table of each request. Pages are dealt in turn, so that no table is contiguous.
    pages: Vec<Vec<u32>>,
}

impl Rank {
    fn load(source: &dyn WeightSource, layout: Layout, rank: usize, prompts: &[Vec<u32>]) -> Self {
        let model = source.config();
        let backend =
            CpuBackend::new(CpuOptions { threads: layout.threads, ..CpuOptions::default() }).unwrap();
        let parallel = ParallelInfo::tensor_parallel(rank, layout.tp);
        let loader = Loader::new(source, &backend, parallel, layout.weights, &|_, _| {});
        let longest = prompts.iter().map(Vec::len).max().unwrap();
        let decoder = Decoder::load(&loader, longest).unwrap();
        let type_of = weight_types(source, layout.weights, CpuBackend::TAKES_CODES);
        let bytes = ShardBytes::of(&ModelRules::new(model), parallel, type_of);
        assert_eq!(loader.packed_bytes() as usize, bytes.total());
        let tokens: usize = prompts.iter().map(Vec::len).sum();
        let work = Workspace::new(&backend, model, parallel, tokens, tokens).unwrap();
        let mut pages = vec![Vec::new(); prompts.len()];
        let mut next = 0;
        for slot in 0..longest.div_ceil(layout.page_size) {
            for (request, prompt) in prompts.iter().enumerate() {
                if slot * layout.page_size < prompt.len() {
                    pages[request].push(next);
                    next += 1;
                }
            }
        }
        let heads = HeadShard::new(model.num_heads, model.num_kv_heads, rank, layout.tp);
        let cache = backend
            .kv_cache(KvLayout {
                local_layers: model.num_layers,
                local_kv_heads: heads.kv_heads.len(),
                head_dim: model.head_dim,
                page_size: layout.page_size,
                num_pages: next as usize,
                dtype: DType::F32,
            })
            .unwrap();
        Self { layout, vocab: model.vocab_size, backend, decoder, work, cache, pages }
    }

    fn run(mut self, collective: &dyn Collective, prompts: &[Vec<u32>], steps: &[Vec<Row>]) -> Logits {
        let mut logits: Logits = prompts.iter().map(|p| vec![Vec::new(); p.len()]).collect();
        for step in steps {
            let rows = self.step(collective, prompts, step);
            let places = step.iter().flat_map(|r| (r.start..r.start + r.count).map(|p| (r.request, p)));
            for ((request, position), row) in places.zip(rows) {
                logits[request][position] = row;
            }
        }
        logits
    }

    /// Full-vocabulary logits of every token of the step.
    fn step(&mut self, collective: &dyn Collective, prompts: &[Vec<u32>], step: &[Row]) -> Vec<Vec<f32>> {
        let (mut ids, mut positions, mut slots, mut rows, mut pages) =
            (vec![], vec![], vec![], vec![], vec![]);
        let page_size = self.layout.page_size;
        for row in step {
            let table = &self.pages[row.request];
            rows.push(AttentionRow {
                first_token: ids.len() as u32,
                token_count: row.count as u32,
                start_position: row.start as u32,
                first_page: pages.len() as u32,
            });
            pages.extend_from_slice(table);
            for position in row.start..row.start + row.count {
                ids.push(prompts[row.request][position]);
                positions.push(position as u32);
                slots.push(table[position / page_size] * page_size as u32 + (position % page_size) as u32);
            }
        }
        let wanted: Vec<u32> = (0..ids.len() as u32).collect();
        let input = ForwardInput {
            token_ids: &ids,
            positions: &positions,
            slots: &slots,
            batch: AttentionBatch { rows: &rows, pages: &pages },
            logit_tokens: &wanted,
        };
        let ctx = (&mut self.backend, collective);
        let local = self.decoder.forward(ctx, &input, &mut self.cache, &mut self.work).unwrap();
        let local_vocab = self.decoder.vocab_shard().padded.len();
        let local = self.backend.read(local, ids.len()).unwrap().into_owned();
        let mut gathered = vec![0.0; local.len() * self.layout.tp];
        collective.all_gather_f32(&local, &mut gathered).unwrap();
        let row = |token: usize| {
            let part = |rank: usize| &gathered[(rank * ids.len() + token) * local_vocab..][..local_vocab];
            let mut all: Vec<f32> = (0..self.layout.tp).flat_map(part).copied().collect();
            all.truncate(self.vocab);
            all
        };
        (0..ids.len()).map(row).collect()
    }
}

/// The first place where two results differ in a bit, as text.
pub fn first_difference(a: &Logits, b: &Logits) -> Option<String> {
    for (request, (x, y)) in a.iter().zip(b).enumerate() {
        for (position, (x, y)) in x.iter().zip(y).enumerate() {
            if let Some(id) = (0..x.len().max(y.len())).find(|&i| x[i].to_bits() != y[i].to_bits()) {
                return Some(format!(
                    "request {request} position {position} id {id}: {} and {}",
                    x[id], y[id]
                ));
            }
        }
    }
    None
}
