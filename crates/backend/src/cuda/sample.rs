//! Tokens chosen from logits on the device, as the host's sampler chooses them (`sample.cu`).
//!
//! **Invariants:** the launches depend on the number of rows only, and their addresses never change, so that
//! they can be recorded; a row's token depends on its logits and parameters alone. What changes logits before
//! (penalties, biases, grammars) has two launches more.

use super::compile::Source;
use super::device::Device;
use super::driver::Address;
use super::launch::{Args, Grid, Kernel};
use super::memory::Buffer;
use crate::Result;
use crate::changes::LogitChanges;
use crate::choice::RowChoice;
use bytemuck::{Pod, Zeroable};
use lockstep_core::DType;
use std::rc::Rc;

/// Rows of a launch, at most.
pub(super) const ROWS_MAX: usize = 512;
/// Threads of a block.
const THREADS: usize = 512;
/// Elements that a block of a row takes at a time: a tile of each of its warps.
const BLOCK_ELEMENTS: usize = 16 * TILE;
/// Blocks per multiprocessor that splitting rows aims at.
const BLOCKS_PER_SM: usize = 2;
/// Elements of a tile, tiles of a row, bins, and tokens that are sorted, as in `sample.cu`.
const TILE: usize = 1024;
const TILES_MAX: usize = 512;
const BINS: usize = 4096;
const SORTED_MAX: usize = 4096;
/// Tokens of a model, at most.
const VOCAB_MAX: usize = TILE * TILES_MAX;
/// Bytes of `State`.
const STATE_BYTES: usize = 32;

/// How a row chooses: `Params` of `sample.cu`.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct RowParams {
    /// 0 takes the most likely token.
    pub temperature: f32,
    /// Tokens kept; 0 keeps all.
    pub top_k: u32,
    /// Share of the mass that is kept.
    pub top_p: f32,
    /// Least weight that is kept, of the largest.
    pub min_p: f32,
    /// Lower and upper half of the key of the random number.
    pub seed: [u32; 2],
    /// Which of the answers to a request this is.
    pub choice: u32,
    /// Place of the token in its answer.
    pub position: u32,
}

impl From<&RowChoice> for RowParams {
    fn from(row: &RowChoice) -> Self {
        Self {
            temperature: row.temperature,
            top_k: row.top_k,
            top_p: row.top_p,
            min_p: row.min_p,
            seed: [row.seed as u32, (row.seed >> 32) as u32],
            choice: row.choice,
            position: row.output_index,
        }
    }
}

/// No place: `NONE` of `sample.cu`.
const NONE: u32 = u32::MAX;

/// What one row changes: `Change` of `sample.cu`, its entries places in the words of the step.
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
#[repr(C)]
pub(super) struct RowChange {
    row: u32,
    allowed: u32,
    allowed_words: u32,
    bias: u32,
    bias_count: u32,
    seen: u32,
    seen_count: u32,
    banned: u32,
    banned_count: u32,
    repetition: f32,
    frequency: f32,
    presence: f32,
}

impl RowChange {
    /// Of row `row`; its entries are appended to `words`.
    pub fn new(row: usize, changes: &LogitChanges<'_>, words: &mut Vec<u32>) -> Self {
        let mut append = |entries: &[u32]| {
            let place = words.len() as u32;
            words.extend_from_slice(entries);
            place
        };
        let allowed = changes.allowed.map_or(NONE, &mut append);
        let seen = changes.penalties.map_or(&[][..], |penalties| penalties.seen);
        let seen_at = append(bytemuck::cast_slice(seen));
        let banned = append(changes.banned);
        let bias = words.len() as u32;
        words.extend(changes.bias.iter().flat_map(|(token, bias)| [*token, bias.to_bits()]));
        let penalties = changes.penalties;
        Self {
            row: row as u32,
            allowed,
            allowed_words: changes.allowed.map_or(0, <[u32]>::len) as u32,
            bias,
            bias_count: changes.bias.len() as u32,
            seen: seen_at,
            seen_count: seen.len() as u32,
            banned,
            banned_count: changes.banned.len() as u32,
            repetition: penalties.map_or(1.0, |p| p.repetition),
            frequency: penalties.map_or(0.0, |p| p.frequency),
            presence: penalties.map_or(0.0, |p| p.presence),
        }
    }

    fn masks(&self) -> bool {
        self.allowed != NONE
    }

    fn changes_single_tokens(&self) -> bool {
        self.bias_count + self.seen_count + self.banned_count > 0
    }
}

/// The logits that tokens are chosen from: `[ranks][rows][stride]`, f32, ranks with ascending ids.
#[derive(Clone, Copy, Debug)]
pub(super) struct Logits {
    /// Where they start.
    pub start: Address,
    /// Columns of a rank.
    pub stride: usize,
    /// Tokens: the first columns over the ranks of a row.
    pub vocab: usize,
    /// Rows.
    pub rows: usize,
}

/// The kernels, and room for [`ROWS_MAX`] rows.
pub(super) struct Sampling {
    mask: Kernel,
    change: Kernel,
    best_kernel: Kernel,
    weigh: Kernel,
    pick: Kernel,
    sm_count: usize,
    /// By row: the largest logit and its column, and the same by block.
    best: Buffer,
    parts: Buffer,
    masses: Buffer,
    bins: Buffer,
    states: Buffer,
    lists: Buffer,
}

impl Sampling {
    /// Loads or compiles the kernels.
    pub fn new(device: &Rc<Device>) -> Result<Self> {
        let module = Source::Sample.load(device, DType::F32)?;
        let room = |bytes| Buffer::zeroed(device, bytes, "choosing tokens");
        let pair = 2 * size_of::<f32>();
        Ok(Self {
            mask: module.kernel("sample_mask", 0)?,
            change: module.kernel("sample_change", 0)?,
            best_kernel: module.kernel("sample_best", 0)?,
            weigh: module.kernel("sample_weigh", 0)?,
            pick: module.kernel("sample_pick", 0)?,
            sm_count: device.sm_count,
            best: room(ROWS_MAX * pair)?,
            parts: room(ROWS_MAX.max(BLOCKS_PER_SM * device.sm_count) * pair)?,
            masses: room(ROWS_MAX * TILES_MAX * size_of::<f64>())?,
            bins: room(ROWS_MAX * BINS * size_of::<u32>())?,
            states: room(ROWS_MAX * STATE_BYTES)?,
            lists: room(ROWS_MAX * SORTED_MAX * size_of::<u64>())?,
        })
    }

    /// Queues the changes of some rows of `[rows, stride]` logits, of which the first `cols` are tokens from `first_id`
    /// on. `on_device` is where `changes` and the words they name are.
    ///
    /// # Safety
    /// The logits are as described and have all rows named; `on_device` holds what it says.
    pub unsafe fn queue_changes(
        &self,
        logits: Logits,
        first_id: usize,
        changes: &[RowChange],
        on_device: (Address, Address),
    ) {
        let Logits { start, stride, vocab, .. } = logits;
        let args = || {
            let args = Args::default().address(start).int(stride).int(first_id).int(vocab);
            args.address(on_device.0).address(on_device.1)
        };
        // SAFETY: the caller's promise, for both.
        unsafe {
            if changes.iter().any(RowChange::masks) {
                let blocks = blocks_of_row(changes.len(), vocab, self.sm_count);
                self.mask.launch(Grid { blocks: [blocks, changes.len(), 1], threads: THREADS }, args());
            }
            if changes.iter().any(RowChange::changes_single_tokens) {
                self.change.launch(Grid { blocks: [changes.len(), 1, 1], threads: THREADS }, args());
            }
        }
    }

    /// Queues the largest logit of each row, f32, and its column, u32, the first of equal ones, into `pairs`;
    /// minus infinity and 0 where there is none. The columns are also written to `chosen`,
    /// [`NO_TOKEN`](lockstep_core::NO_TOKEN) where there is none.
    ///
    /// # Safety
    /// The logits are as described; `pairs` holds one for each row, and `chosen` a u32.
    pub unsafe fn queue_best(&self, logits: Logits, pairs: Address, chosen: Option<Address>) {
        let args = arguments(logits).address(pairs).optional(chosen);
        let args = args.address(self.parts.address()).address(self.states.address());
        // SAFETY: the caller's promise; `grid` keeps to the room for rows and parts.
        unsafe { self.best_kernel.launch(self.grid(logits), args) };
    }

    /// Queues the choice of a token for each row, into `chosen`: `params` holds [`RowParams`] for each.
    ///
    /// # Safety
    /// The logits are as described; `params` and `chosen` hold as many as there are rows.
    pub unsafe fn queue(&self, logits: Logits, params: Address, chosen: Address) {
        let grid = self.grid(logits);
        let args = || {
            let args = arguments(logits).address(params).address(self.best.address()).address(chosen);
            let args = args.address(self.masses.address()).address(self.bins.address());
            args.address(self.states.address())
        };
        // SAFETY: the caller's promise, for all three.
        unsafe {
            self.queue_best(logits, self.best.address(), Some(chosen));
            self.weigh.launch(grid, args());
            self.pick.launch(grid, args().address(self.lists.address()));
        }
    }

    /// Blocks of each row, by the number of rows. Panics when they are more than there is room for.
    fn grid(&self, logits: Logits) -> Grid {
        let Logits { vocab, rows, .. } = logits;
        assert!(rows <= ROWS_MAX, "{rows} rows to choose for at once, of at most {ROWS_MAX}");
        assert!(vocab <= VOCAB_MAX, "{vocab} tokens to choose from, of at most {VOCAB_MAX}");
        Grid { blocks: [blocks_of_row(rows, vocab, self.sm_count), rows, 1], threads: THREADS }
    }
}

fn arguments(logits: Logits) -> Args {
    Args::default().address(logits.start).int(logits.stride).int(logits.vocab)
}

/// Blocks that share a row, so that all multiprocessors have work and every block some.
fn blocks_of_row(rows: usize, vocab: usize, sm_count: usize) -> usize {
    (BLOCKS_PER_SM * sm_count / rows.max(1)).clamp(1, vocab.div_ceil(BLOCK_ELEMENTS).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::changes::{Penalties, SeenToken};

    #[test]
    fn blocks_fit_their_room_and_have_work() {
        for sm_count in [1, 108, 132] {
            for rows in 1..700 {
                for vocab in [1, 32_000, 151_936, 262_144] {
                    let blocks = blocks_of_row(rows, vocab, sm_count);
                    assert!(rows * blocks <= rows.max(BLOCKS_PER_SM * sm_count));
                    assert!((blocks - 1) * BLOCK_ELEMENTS < vocab);
                }
            }
        }
        assert_eq!(blocks_of_row(1, 151_936, 132), 10);
    }

    #[test]
    fn entries_of_changed_rows_are_found_in_the_words() {
        let seen = [SeenToken { token: 4, in_output: 2 }];
        let changes = LogitChanges {
            allowed: Some(&[7, 8]),
            bias: &[(5, 1.0), (6, -1.0)],
            penalties: Some(Penalties { repetition: 1.5, frequency: 0.25, presence: 0.5, seen: &seen }),
            banned: &[9],
        };
        let mut words = vec![99];
        let row = RowChange::new(3, &changes, &mut words);
        let at = |place: u32, count: u32| &words[place as usize..][..count as usize];
        assert_eq!((row.row, at(row.allowed, row.allowed_words)), (3, &[7, 8][..]));
        assert_eq!(at(row.bias, 2 * row.bias_count), [5, 1f32.to_bits(), 6, (-1f32).to_bits()]);
        assert_eq!(
            (at(row.seen, 2 * row.seen_count), at(row.banned, row.banned_count)),
            (&[4, 2][..], &[9][..])
        );
        assert_eq!((row.repetition, row.frequency, row.presence), (1.5, 0.25, 0.5));
        assert!(row.masks() && row.changes_single_tokens());
        let bans = LogitChanges { banned: &[1], ..LogitChanges::default() };
        assert!(!RowChange::new(0, &bans, &mut words).masks());
    }

    #[test]
    fn parameters_are_laid_out_as_the_kernel_declares_them() {
        assert_eq!(size_of::<RowParams>(), 32);
        assert_eq!(std::mem::offset_of!(RowParams, seed), 16);
        assert_eq!(size_of::<RowChange>(), 48);
    }
}
