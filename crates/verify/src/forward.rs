//! Teacher-forced logits: every sequence goes through the decoder as given, under a chosen schedule.

use crate::group::{Loaded, Rank, Sizes};
use crate::place::Form;
use crate::{Result, VerifyError};
use lockstep_backend::{AttentionBatch, AttentionRow, Backend, ForwardInput};
use lockstep_comm::collective::Collective;
use lockstep_comm::group::Patience;
use lockstep_core::{ParallelInfo, TokenId};
use lockstep_model::{Observer, Workspace};
use std::sync::Arc;

/// Most positions of a sequence whose logits are compared, besides those of its answer.
pub const POSITIONS_MAX: usize = 48;

/// How sequences come through the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// Tokens of one row; `usize::MAX` for the whole sequence.
    pub chunk: usize,
    /// Tokens in a page.
    pub page_size: usize,
    /// All sequences share every step instead of following each other.
    pub batched: bool,
    /// Each sequence is computed twice; the second time starts from the first one's pages.
    pub cached: bool,
    /// How the device runs each step.
    pub form: Form,
}

impl Schedule {
    /// Every sequence alone and in one piece.
    pub const fn whole() -> Self {
        Self { chunk: usize::MAX, page_size: 16, batched: false, cached: false, form: Form::Eager }
    }

    /// For people.
    pub fn words(&self) -> String {
        let mut words = Vec::new();
        if self.batched {
            words.push("all in one batch".to_owned());
        }
        if self.chunk < usize::MAX {
            words.push(format!("in chunks of {}", self.chunk));
        }
        if self.page_size != Self::whole().page_size {
            words.push(format!("pages of {}", self.page_size));
        }
        if self.cached {
            words.push("from a cached prefix".into());
        }
        if words.is_empty() { "whole prompts alone".into() } else { words.join(", ") }
    }
}

/// Logits of the compared positions of each sequence: `[sequence][position] = (position, [vocab])`.
pub type Logits = Vec<Vec<(usize, Vec<f32>)>>;

/// The residual stream after the embedding and each layer: `[sequence][layer] = [tokens * hidden]`.
pub type Layers = Vec<Vec<Vec<f32>>>;

/// The first value of a run that is no number.
#[derive(Clone, Debug, PartialEq)]
pub struct Unsound {
    /// Residual streams before it: 0 for the embedding, then one more for each layer; `None`: it is a logit, and all
    /// residual streams are numbers.
    pub layer: Option<usize>,
    /// Number of the prompt.
    pub prompt: usize,
    /// Position in it.
    pub position: usize,
    /// Element of the residual stream, or token whose logit it is.
    pub element: usize,
    /// NaN or infinite.
    pub value: f32,
}

impl Unsound {
    /// As numbers that a stage can tell another.
    fn encode(found: &Option<Self>) -> [f32; 6] {
        let Some(Self { layer, prompt, position, element, value }) = found else { return [0.0; 6] };
        let layer = layer.map_or(-1.0, |layer| layer as f32);
        [1.0, layer, *prompt as f32, *position as f32, *element as f32, *value]
    }

    fn decode([is_there, layer, prompt, position, element, value]: [f32; 6]) -> Option<Self> {
        let layer = (layer >= 0.0).then_some(layer as usize);
        let (prompt, position, element) = (prompt as usize, position as usize, element as usize);
        (is_there > 0.0).then_some(Self { layer, prompt, position, element, value })
    }

    /// For people.
    pub fn words(&self) -> String {
        let Self { prompt, position, element, value, .. } = self;
        let (part, what) = match self.layer {
            Some(layer) => (part(layer), format!("element {element} of the residual stream")),
            None => ("the final norm and the head".into(), format!("the logit of token {element}")),
        };
        format!("{value} first after {part}: prompt {prompt}, position {position}, {what}")
    }
}

/// The first value that is NaN or infinite.
pub fn no_number(values: &[f32]) -> Option<usize> {
    values.iter().position(|value| !value.is_finite())
}

/// What made the residual stream number `layer`, for people.
pub fn part(layer: usize) -> String {
    match layer {
        0 => "the embedding".into(),
        _ => format!("layer {}", layer - 1),
    }
}

/// One run.
#[derive(Clone)]
pub struct Forward {
    /// What goes through.
    pub sequences: Arc<Vec<Vec<TokenId>>>,
    /// How.
    pub schedule: Schedule,
    /// Positions per sequence whose logits are kept: evenly spread, the last one included.
    pub positions_max: usize,
    /// Last positions of each sequence whose logits are kept too: those that choose an answer.
    pub tail: usize,
}

/// One row of a step.
#[derive(Clone, Copy)]
struct Row {
    sequence: usize,
    start: usize,
    count: usize,
}

/// What one run holds on one rank.
struct Memory<B: Backend> {
    work: Workspace<B>,
    cache: B::KvCache,
    tables: Vec<Vec<u32>>,
}

impl Forward {
    /// The logits, gathered over the vocabulary, on the last stage. **Collective: all ranks.**
    pub fn logits_on<B: Backend>(&self, rank: &mut Rank<B>) -> Result<Logits> {
        let mut memory = self.memory(rank)?;
        let mut logits: Logits = vec![Vec::new(); self.sequences.len()];
        for rows in self.steps() {
            for (row, position, values) in self.step(rank, &rows, &mut memory, &mut |_, _, _| ())? {
                // A cached run replaces what the first pass computed.
                logits[row].retain(|(at, _)| *at != position);
                logits[row].push((position, values));
            }
        }
        logits.iter_mut().for_each(|of_sequence| of_sequence.sort_by_key(|(position, _)| *position));
        Ok(logits)
    }

    /// Every sequence whole and alone; the first value that is no number, of all streams by layer and then of the logits.
    /// The last stage knows of all of them. **Collective.**
    pub fn unsound_on<B: Backend>(&self, rank: &mut Rank<B>) -> Result<Option<Unsound>> {
        let mut memory = self.memory(rank)?;
        let (width, first_layer) = (rank.config.hidden_size, rank.stage.first);
        let (mut of_streams, mut of_logits) = (None::<Unsound>, None);
        for prompt in 0..self.sequences.len() {
            let count = self.sequences[prompt].len();
            let mut failed = None;
            let row = Row { sequence: prompt, start: 0, count };
            let mut look = |of_stage: usize, backend: &mut B, stream: &B::Tensor| {
                let layer = first_layer + of_stage;
                if of_streams.as_ref().is_some_and(|first| first.layer <= Some(layer)) {
                    return;
                }
                match backend.read(stream, count) {
                    Ok(values) => {
                        let found = |at: usize| {
                            let (position, element) = (at / width, at % width);
                            Unsound { layer: Some(layer), prompt, position, element, value: values[at] }
                        };
                        of_streams = no_number(&values[..count * width]).map(found).or(of_streams.take());
                    }
                    Err(error) => failed = Some(error),
                }
            };
            for (_, position, logits) in self.step(rank, &[row], &mut memory, &mut look)? {
                let found = |element: usize| {
                    let value = logits[element];
                    Unsound { layer: None, prompt, position, element, value }
                };
                of_logits = of_logits.or(no_number(&logits).map(found));
            }
            if let Some(error) = failed {
                return Err(error.into());
            }
        }
        let mine = Unsound::encode(&of_streams.or(of_logits));
        // What a stage before has found comes first.
        let mut found = mine;
        relay(rank.loaded()?.pipeline.as_deref(), mine.len(), |before| {
            if before.first().is_some_and(|is_there| *is_there > 0.0) {
                found.copy_from_slice(before);
            }
            found.to_vec()
        })?;
        Ok(Unsound::decode(found))
    }

    /// Every sequence whole and alone; the residual streams, those of all layers on the last stage. **Collective.**
    pub fn layers_on<B: Backend>(&self, rank: &mut Rank<B>) -> Result<Layers> {
        let mut memory = self.memory(rank)?;
        let mut layers = vec![Vec::new(); self.sequences.len()];
        let width = rank.config.hidden_size;
        for (sequence, kept) in layers.iter_mut().enumerate() {
            let count = self.sequences[sequence].len();
            let mut failed = None;
            let row = Row { sequence, start: 0, count };
            self.step(
                rank,
                &[row],
                &mut memory,
                &mut |_, backend, stream| match backend.read(stream, count) {
                    Ok(values) => kept.push(values[..count * width].to_vec()),
                    Err(error) => failed = Some(error),
                },
            )?;
            if let Some(error) = failed {
                return Err(error.into());
            }
            let len = count * width;
            let of_stages_before = (rank.stage.first + 1) * len;
            relay(rank.loaded()?.pipeline.as_deref(), of_stages_before, |before| {
                // The first stream of a stage is the last one of the stage before.
                let own = if before.is_empty() { 0 } else { 1 };
                let before = before.chunks_exact(len).map(<[f32]>::to_vec);
                *kept = before.chain(kept.drain(..).skip(own)).collect();
                kept.concat()
            })?;
        }
        Ok(layers)
    }

    fn memory<B: Backend>(&self, rank: &mut Rank<B>) -> Result<Memory<B>> {
        let tables = self.page_tables();
        let (work, cache) = rank.memory(self.sizes(&tables))?;
        Ok(Memory { work, cache, tables })
    }

    fn sizes(&self, tables: &[Vec<u32>]) -> Sizes {
        Sizes {
            tokens_max: self.sequences.iter().map(Vec::len).sum(),
            logits_max: self.sequences.len() * (self.positions_max + self.tail),
            page_size: self.schedule.page_size,
            num_pages: tables.iter().map(Vec::len).sum(),
        }
    }

    /// A page table for each sequence; pages are dealt in turn, so that no table is contiguous.
    fn page_tables(&self) -> Vec<Vec<u32>> {
        let longest = self.sequences.iter().map(Vec::len).max().unwrap_or(0);
        let mut tables = vec![Vec::new(); self.sequences.len()];
        let mut next = 0;
        for first in (0..longest).step_by(self.schedule.page_size) {
            for (table, _) in tables.iter_mut().zip(&*self.sequences).filter(|(_, s)| first < s.len()) {
                table.push(next);
                next += 1;
            }
        }
        tables
    }

    /// Steps in order. A cached run first computes everything, then again what follows the last full page but one.
    fn steps(&self) -> Vec<Vec<Row>> {
        let mut steps = self.pass(|_| 0);
        if self.schedule.cached {
            let page = self.schedule.page_size;
            // As the scheduler hits: whole pages, never all of the sequence.
            steps.extend(self.pass(|len| (len - 1) / 2 / page * page));
        }
        steps
    }

    fn pass(&self, first: impl Fn(usize) -> usize) -> Vec<Vec<Row>> {
        let chunk = self.schedule.chunk;
        let mut rows: Vec<Vec<Row>> = Vec::new();
        for (sequence, tokens) in self.sequences.iter().enumerate() {
            let (mut of_sequence, mut start) = (Vec::new(), first(tokens.len()));
            while start < tokens.len() {
                let count = chunk.min(tokens.len() - start);
                of_sequence.push(Row { sequence, start, count });
                start += count;
            }
            rows.push(of_sequence);
        }
        if !self.schedule.batched {
            return rows.into_iter().flatten().map(|row| vec![row]).collect();
        }
        let count = rows.iter().map(Vec::len).max().unwrap_or(0);
        (0..count)
            .map(|i| rows.iter().filter_map(|of_sequence| of_sequence.get(i).copied()).collect())
            .collect()
    }

    fn is_kept(&self, sequence: usize, position: usize) -> bool {
        let len = self.sequences[sequence].len();
        let stride = len.div_ceil(self.positions_max);
        let left = len - 1 - position;
        left < self.tail || left.is_multiple_of(stride)
    }

    /// One step; `(sequence, position, logits)` of the kept positions, none on stages before the last. **Collective.**
    fn step<B: Backend>(
        &self,
        rank: &mut Rank<B>,
        rows: &[Row],
        memory: &mut Memory<B>,
        observe: Observer<'_, B>,
    ) -> Result<Vec<(usize, usize, Vec<f32>)>> {
        let page_size = self.schedule.page_size;
        let (mut tokens, mut positions, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        let (mut batch, mut pages, mut wanted, mut kept) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for row in rows {
            let table = &memory.tables[row.sequence];
            batch.push(AttentionRow {
                first_token: tokens.len() as u32,
                token_count: row.count as u32,
                start_position: row.start as u32,
                first_page: pages.len() as u32,
            });
            pages.extend_from_slice(table);
            for position in row.start..row.start + row.count {
                if self.is_kept(row.sequence, position) {
                    wanted.push(tokens.len() as u32);
                    kept.push((row.sequence, position));
                }
                tokens.push(self.sequences[row.sequence][position]);
                positions.push(position as u32);
                slots.push(table[position / page_size] * page_size as u32 + (position % page_size) as u32);
            }
        }
        let input = ForwardInput {
            token_ids: &tokens,
            positions: &positions,
            slots: &slots,
            batch: AttentionBatch { rows: &batch, pages: &pages },
            logit_tokens: &wanted,
        };
        let (parallel, vocab_size) = (rank.parallel, rank.config.vocab_size);
        let Loaded { backend, decoder, replica, collective, pipeline } = rank.loaded()?;
        let Memory { work, cache, .. } = memory;
        let stages = pipeline.as_deref();
        // Before it is recorded, too, a step runs once: nothing may be made while it is.
        receive(stages, backend, work, tokens.len())?;
        decoder.forward_observed((&mut *backend, &**collective), &input, cache, work, observe)?;
        pass_on(stages, backend, work, tokens.len())?;
        if self.schedule.form == Form::Recorded {
            backend.stage(&input)?;
            let recording = backend.record(|backend| {
                decoder
                    .forward((backend, &**collective), &input, cache, work)
                    .map(|_| ())
                    .map_err(VerifyError::from)
            })?;
            let recording =
                recording.ok_or_else(|| VerifyError::Invalid("this device records no steps".into()))?;
            // Ranks that are threads on one GPU: none may still prepare when another's kernels wait for it.
            collective.all_reduce_f32(&mut [0.0])?;
            // What came from the stage before is used up.
            receive(stages, backend, work, tokens.len())?;
            if !backend.replay(&recording)? {
                return Err(VerifyError::Invalid("a recording was out of date at once".into()));
            }
            pass_on(stages, backend, work, tokens.len())?;
            // The recording ends here, so its step has to.
            backend.read(work.residual(), 0)?;
        }
        if stages.is_some() {
            // No stage is ahead of the others by more than a step.
            backend.read(work.residual(), 0)?;
            replica.barrier(Patience::Idle)?;
        }
        if stages.is_some_and(|stages| stages.rank() + 1 < stages.size()) {
            return Ok(Vec::new());
        }
        let local = backend.read(work.logits(), wanted.len())?.into_owned();
        let width = decoder.vocab_shard().padded.len();
        let joined = Joined { parallel, collective: &**collective, width, vocab_size };
        joined.rows(&local, &kept)
    }
}

/// Hands numbers from stage to stage: `join` gets the `count` that the stage before gave, none on the first, and gives those
/// for the next. **Collective: all ranks.**
fn relay(stages: Option<&dyn Collective>, count: usize, join: impl FnOnce(&[f32]) -> Vec<f32>) -> Result<()> {
    let Some(stages) = stages else { return Ok(()) };
    let mut before = Vec::new();
    if let Some(stage) = stages.rank().checked_sub(1) {
        before.resize(count, 0.0);
        stages.recv_f32(&mut before, stage)?;
    }
    let joined = join(&before);
    match stages.rank() + 1 {
        next if next < stages.size() => Ok(stages.send_f32(&joined, next)?),
        _ => Ok(()),
    }
}

/// Takes `rows` rows of the residual stream from the stage before, if there is one.
fn receive<B: Backend>(
    stages: Option<&dyn Collective>,
    backend: &mut B,
    work: &mut Workspace<B>,
    rows: usize,
) -> Result<()> {
    match stages.and_then(|stages| Some((stages, stages.rank().checked_sub(1)?))) {
        Some((stages, before)) => Ok(backend.recv(stages, work.residual_mut(), rows, before)?),
        None => Ok(()),
    }
}

/// Gives them to the next stage, if there is one.
fn pass_on<B: Backend>(
    stages: Option<&dyn Collective>,
    backend: &mut B,
    work: &Workspace<B>,
    rows: usize,
) -> Result<()> {
    match stages.filter(|stages| stages.rank() + 1 < stages.size()) {
        Some(stages) => Ok(backend.send(stages, work.residual(), rows, stages.rank() + 1)?),
        None => Ok(()),
    }
}

/// The vocabulary over its ranks.
struct Joined<'a> {
    parallel: ParallelInfo,
    collective: &'a dyn Collective,
    /// Of a row on one rank.
    width: usize,
    vocab_size: usize,
}

impl Joined<'_> {
    /// Joins the ranks' parts of the vocabulary and leaves padding out. **Collective.**
    fn rows(&self, local: &[f32], kept: &[(usize, usize)]) -> Result<Vec<(usize, usize, Vec<f32>)>> {
        let (tp, width) = (self.parallel.tp_size, self.width);
        let sent = kept.len() * width;
        let mut all = vec![0.0; sent * tp];
        self.collective.all_gather_f32(&local[..sent], &mut all)?;
        let row = |i: usize| {
            let parts = (0..tp).flat_map(|r| &all[(r * kept.len() + i) * width..][..width]);
            parts.copied().take(self.vocab_size).collect()
        };
        Ok(kept.iter().enumerate().map(|(i, &(sequence, position))| (sequence, position, row(i))).collect())
    }
}
