//! Teacher-forced logits: every sequence goes through the decoder as given, under a chosen schedule.

use crate::Result;
use crate::group::{Group, Rank, Sizes};
use lockstep_backend::{AttentionBatch, AttentionRow, Backend};
use lockstep_core::TokenId;
use lockstep_model::ForwardInput;

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
}

impl Schedule {
    /// Every sequence alone and in one piece.
    pub const fn whole() -> Self {
        Self { chunk: usize::MAX, page_size: 16, batched: false, cached: false }
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

/// One run.
pub struct Forward<'a> {
    /// What goes through.
    pub sequences: &'a [Vec<TokenId>],
    /// How.
    pub schedule: Schedule,
    /// Positions per sequence whose logits are kept: evenly spread, the last one included.
    pub positions_max: usize,
}

/// One row of a step.
#[derive(Clone, Copy)]
struct Row {
    sequence: usize,
    start: usize,
    count: usize,
}

impl Forward<'_> {
    /// Runs it; the logits of rank 0, gathered over the vocabulary.
    pub fn logits(&self, group: &Group<'_>) -> Result<Logits> {
        group.run(self.sizes(), |rank| self.on_rank(rank))
    }

    /// Every sequence whole and alone; the residual streams, equal on all ranks.
    pub fn layers(&self, group: &Group<'_>) -> Result<Layers> {
        group.run(self.sizes(), |mut rank| {
            let tables = self.page_tables();
            let mut layers = vec![Vec::new(); self.sequences.len()];
            for (sequence, kept) in layers.iter_mut().enumerate() {
                let count = self.sequences[sequence].len();
                let width = rank.config.hidden_size;
                let mut failed = None;
                let row = Row { sequence, start: 0, count };
                self.step(&mut rank, &[row], &tables, &mut |_, backend, stream| match backend
                    .read(stream, count)
                {
                    Ok(values) => kept.push(values[..count * width].to_vec()),
                    Err(error) => failed = Some(error),
                })?;
                if let Some(error) = failed {
                    return Err(error.into());
                }
            }
            Ok(layers)
        })
    }

    fn sizes(&self) -> Sizes {
        let tokens: usize = self.sequences.iter().map(Vec::len).sum();
        Sizes {
            positions_max: self.sequences.iter().map(Vec::len).max().unwrap_or(1),
            tokens_max: tokens,
            logits_max: self.sequences.len() * self.positions_max,
            page_size: self.schedule.page_size,
            num_pages: self.page_tables().iter().map(|table| table.len()).sum(),
        }
    }

    /// A page table for each sequence; pages are dealt in turn, so that no table is contiguous.
    fn page_tables(&self) -> Vec<Vec<u32>> {
        let longest = self.sequences.iter().map(Vec::len).max().unwrap_or(0);
        let mut tables = vec![Vec::new(); self.sequences.len()];
        let mut next = 0;
        for first in (0..longest).step_by(self.schedule.page_size) {
            for (table, _) in tables.iter_mut().zip(self.sequences).filter(|(_, s)| first < s.len()) {
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
        (len - 1 - position).is_multiple_of(stride)
    }

    fn on_rank(&self, mut rank: Rank) -> Result<Logits> {
        let tables = self.page_tables();
        let mut logits: Logits = vec![Vec::new(); self.sequences.len()];
        for rows in self.steps() {
            for (row, position, values) in self.step(&mut rank, &rows, &tables, &mut |_, _, _| ())? {
                // A cached run replaces what the first pass computed.
                logits[row].retain(|(at, _)| *at != position);
                logits[row].push((position, values));
            }
        }
        logits.iter_mut().for_each(|of_sequence| of_sequence.sort_by_key(|(position, _)| *position));
        Ok(logits)
    }

    /// One step; `(sequence, position, logits)` of the kept positions. **Collective.**
    fn step(
        &self,
        rank: &mut Rank,
        rows: &[Row],
        tables: &[Vec<u32>],
        observe: lockstep_model::Observer<'_, lockstep_backend::cpu::CpuBackend>,
    ) -> Result<Vec<(usize, usize, Vec<f32>)>> {
        let page_size = self.schedule.page_size;
        let (mut tokens, mut positions, mut slots) = (Vec::new(), Vec::new(), Vec::new());
        let (mut batch, mut pages, mut wanted, mut kept) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for row in rows {
            let table = &tables[row.sequence];
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
        let context = (&mut rank.backend, &*rank.collective);
        let local =
            rank.decoder.forward_observed(context, &input, &mut rank.cache, &mut rank.work, observe)?;
        let local = rank.backend.read(local, wanted.len())?.into_owned();
        gather(rank, &local, &kept)
    }
}

/// Joins the ranks' parts of the vocabulary and leaves padding out. **Collective.**
fn gather(rank: &Rank, local: &[f32], kept: &[(usize, usize)]) -> Result<Vec<(usize, usize, Vec<f32>)>> {
    let width = rank.decoder.vocab_shard().padded.len();
    let sent = kept.len() * width;
    let mut all = vec![0.0; sent * rank.parallel.tp_size];
    rank.collective.all_gather_f32(&local[..sent], &mut all)?;
    let row = |i: usize| {
        let parts = (0..rank.parallel.tp_size).flat_map(|r| &all[(r * kept.len() + i) * width..][..width]);
        parts.copied().take(rank.config.vocab_size).collect()
    };
    Ok(kept.iter().enumerate().map(|(i, &(sequence, position))| (sequence, position, row(i))).collect())
}
