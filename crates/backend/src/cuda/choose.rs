//! Tokens chosen on the device, and their way to the host.
//!
//! The next step finds them on the device ([`CHOSEN_BIT`](crate::choice::CHOSEN_BIT)), so that it can be queued before the host
//! has seen them. **Invariant:** at most two steps' tokens are on their way; the device keeps those of the step queued last.

use super::device::{Device, Event};
use super::driver::Address;
use super::launch::{Args, Grid, Kernel, Module};
use super::memory::{Buffer, List, Pinned, Staging};
use super::peers::DataPlane;
use super::sample::{Logits, ROWS_MAX, RowChange, RowParams, Sampling};
use crate::changes::LogitChanges;
use crate::choice::Choice;
use crate::{BackendError, Result};
use lockstep_core::TokenId;
use std::collections::VecDeque;
use std::rc::Rc;

/// Steps whose tokens may be on their way to the host.
const STEPS: usize = 2;
/// Rows that may change their logits in a step: the second dimension of a grid.
const GRID_Y_MAX: usize = 65_535;
/// Bytes of all ranks' logits that are gathered at a time, so long as they hold one row.
const GATHERED_BYTES: usize = 64 << 20;

/// Chosen tokens.
pub(super) struct Chooser {
    device: Rc<Device>,
    sampling: Sampling,
    pick: Kernel,
    /// How each row of the step chooses.
    params: List<RowParams>,
    /// What rows of the step change, and the entries of that.
    changes: List<RowChange>,
    words: List<u32>,
    words_of_step: Vec<u32>,
    /// Each row's largest logit and its column.
    local: Option<Buffer>,
    /// The same of every rank, or every rank's logits.
    gathered: Option<Buffer>,
    chosen: Buffer,
    out: [Outgoing; STEPS],
    /// Numbers of rows on their way, oldest first, and where each is in `out`.
    pending: VecDeque<(usize, usize)>,
    next: usize,
}

/// One step's tokens on their way.
struct Outgoing {
    pinned: Pinned,
    arrived: Event,
}

impl Outgoing {
    fn new(device: &Rc<Device>) -> Result<Self> {
        Ok(Self { pinned: Pinned::new(device, 4096)?, arrived: Event::new(device)? })
    }
}

impl Chooser {
    /// With room for a small step.
    pub fn new(device: &Rc<Device>, module: &Module) -> Result<Self> {
        Ok(Self {
            device: Rc::clone(device),
            sampling: Sampling::new(device)?,
            pick: module.kernel("pick", 0)?,
            params: List::unrecorded(),
            changes: List::unrecorded(),
            words: List::unrecorded(),
            words_of_step: Vec::new(),
            local: None,
            gathered: None,
            chosen: chosen_buffer(device, 1024)?,
            out: [Outgoing::new(device)?, Outgoing::new(device)?],
            pending: VecDeque::with_capacity(STEPS),
            next: 0,
        })
    }

    /// The tokens chosen last.
    pub fn chosen(&self) -> Address {
        self.chosen.address()
    }

    /// Queues the largest of the first `cols` of `stride` columns of each row, with its column; gives where
    /// the pairs will be. `logits` is `[rows, stride]` of f32.
    pub fn queue_best(
        &mut self,
        logits: Address,
        rows: usize,
        stride: usize,
        cols: usize,
    ) -> Result<Address> {
        let pairs = room(&self.device, &mut self.local, rows * size_of::<[u32; 2]>())?;
        self.queue_best_into(Logits { start: logits, stride, vocab: cols, rows }, pairs, None);
        Ok(pairs)
    }

    /// Pairs of any number of rows of one rank, and the columns into `chosen`.
    fn queue_best_into(&self, logits: Logits, pairs: Address, chosen: Option<Address>) {
        let Logits { start, stride, vocab, rows } = logits;
        assert!(vocab <= stride, "{vocab} columns of {stride}");
        for first in (0..rows).step_by(ROWS_MAX) {
            let at = |start: Address, bytes: usize| start + (first * bytes) as u64;
            let start = at(start, stride * size_of::<f32>());
            let logits = Logits { start, stride, vocab, rows: (rows - first).min(ROWS_MAX) };
            let chosen = chosen.map(|chosen| at(chosen, size_of::<TokenId>()));
            // SAFETY: the logits are the caller's; pairs and chosen tokens have room for `rows`.
            unsafe { self.sampling.queue_best(logits, at(pairs, size_of::<[u32; 2]>()), chosen) };
        }
    }

    /// Queues the choice of a token for each row of `logits` `[rows, local_vocab]`, and its way to the host.
    /// **Collective: all ranks of the TP group.**
    pub fn queue(
        &mut self,
        staging: &mut Staging,
        plane: &DataPlane<'_>,
        logits: Address,
        choice: &Choice<'_>,
    ) -> Result<()> {
        let rows = choice.rows.len();
        if self.chosen.bytes() < rows * size_of::<TokenId>() {
            self.device.note_move();
            self.chosen = chosen_buffer(&self.device, rows.next_power_of_two())?;
        }
        if !choice.changes.is_empty() {
            self.queue_changes(staging, logits, choice)?;
        }
        match choice.rows.iter().all(|row| row.is_greedy()) {
            true => self.queue_greedy(plane, logits, choice)?,
            false => self.queue_drawn(staging, plane, logits, choice)?,
        }
        self.send(rows)
    }

    /// What rows change in this rank's logits.
    fn queue_changes(&mut self, staging: &mut Staging, logits: Address, choice: &Choice<'_>) -> Result<()> {
        self.words_of_step.clear();
        let of_row = |(row, changes): &(usize, LogitChanges<'_>)| {
            RowChange::new(*row, changes, &mut self.words_of_step)
        };
        let changes: Vec<RowChange> = choice.changes.iter().map(of_row).collect();
        assert!(changes.len() <= GRID_Y_MAX, "{} rows that change their logits", changes.len());
        let words = self.words.set(&self.device, staging, &self.words_of_step)?;
        let on_device = (self.changes.set(&self.device, staging, &changes)?, words);
        let rows = choice.rows.len();
        let logits = Logits { start: logits, stride: choice.local_vocab, vocab: choice.local_real, rows };
        // SAFETY: the logits are the caller's and have all rows of the choice; both lists were just set.
        unsafe { self.sampling.queue_changes(logits, choice.first_id, &changes, on_device) };
        Ok(())
    }

    /// The most likely token of each row.
    fn queue_greedy(&mut self, plane: &DataPlane<'_>, logits: Address, choice: &Choice<'_>) -> Result<()> {
        let (rows, ranks) = (choice.rows.len(), plane.ranks());
        let pairs = rows * size_of::<[u32; 2]>();
        let mine = room(&self.device, &mut self.local, pairs)?;
        let local = Logits { start: logits, stride: choice.local_vocab, vocab: choice.local_real, rows };
        if ranks == 1 {
            self.queue_best_into(local, mine, Some(self.chosen.address()));
            return Ok(());
        }
        self.queue_best_into(local, mine, None);
        let all = room(&self.device, &mut self.gathered, ranks * pairs)?;
        // SAFETY: both buffers hold the pairs of `rows` rows, of one rank and of all.
        unsafe { plane.all_gather(mine, all, 2 * rows)? };
        let args = Args::default().address(all).int(ranks).int(rows).int(choice.local_vocab);
        // SAFETY: pairs and chosen tokens have room for `rows` rows.
        unsafe { self.pick.launch(Grid::elements(rows), args.address(self.chosen.address())) };
        Ok(())
    }

    /// A token of each row by its parameters, from the logits of all ranks.
    fn queue_drawn(
        &mut self,
        staging: &mut Staging,
        plane: &DataPlane<'_>,
        logits: Address,
        choice: &Choice<'_>,
    ) -> Result<()> {
        let params: Vec<RowParams> = choice.rows.iter().map(RowParams::from).collect();
        let params = self.params.set(&self.device, staging, &params)?;
        let (rows, ranks, stride) = (choice.rows.len(), plane.ranks(), choice.local_vocab);
        let row_bytes = stride * size_of::<f32>();
        let at_once = if ranks == 1 { ROWS_MAX } else { GATHERED_BYTES / (ranks * row_bytes) };
        let at_once = at_once.clamp(1, ROWS_MAX);
        for first in (0..rows).step_by(at_once) {
            let count = (rows - first).min(at_once);
            let mine = logits + (first * row_bytes) as u64;
            let mut all = mine;
            if ranks > 1 {
                all = room(&self.device, &mut self.gathered, ranks * count * row_bytes)?;
                // SAFETY: the logits are the caller's, the buffer holds those of all ranks.
                unsafe { plane.all_gather(mine, all, count * stride)? };
            }
            let logits = Logits { start: all, stride, vocab: choice.vocab_size, rows: count };
            let params = params + (first * size_of::<RowParams>()) as u64;
            let chosen = self.chosen.address() + (first * size_of::<TokenId>()) as u64;
            // SAFETY: logits as gathered; parameters and chosen tokens are there for all rows.
            unsafe { self.sampling.queue(logits, params, chosen) };
        }
        Ok(())
    }

    /// Queues the way of `rows` chosen tokens to the host.
    fn send(&mut self, rows: usize) -> Result<()> {
        if self.pending.len() == STEPS {
            return Err(BackendError::Device {
                operation: "choosing tokens".into(),
                problem: format!("the tokens of {STEPS} steps have not been taken"),
            });
        }
        let bytes = rows * size_of::<TokenId>();
        let out = &mut self.out[self.next];
        out.pinned.reserve(bytes)?;
        // SAFETY: the chosen tokens are that many; nobody looks at the pinned memory before the event.
        unsafe { out.pinned.copy_from(self.chosen.address(), bytes)? };
        out.arrived.record()?;
        self.pending.push_back((rows, self.next));
        self.next = (self.next + 1) % STEPS;
        Ok(())
    }

    /// Waits for the tokens of the oldest step that have not been taken; they replace `tokens`.
    pub fn take(&mut self, tokens: &mut Vec<TokenId>) -> Result<()> {
        tokens.clear();
        let (rows, place) = self.pending.pop_front().ok_or_else(|| BackendError::Device {
            operation: "taking chosen tokens".into(),
            problem: "no step has chosen any".into(),
        })?;
        let out = &self.out[place];
        self.device.wait_for(&out.arrived)?;
        let (words, _) = out.pinned.bytes(rows * size_of::<TokenId>()).as_chunks::<4>();
        tokens.extend(words.iter().map(|word| TokenId::from_le_bytes(*word)));
        Ok(())
    }
}

fn chosen_buffer(device: &Rc<Device>, rows: usize) -> Result<Buffer> {
    Buffer::zeroed(device, rows * size_of::<TokenId>(), "chosen tokens")
}

/// A buffer of at least `bytes`, the one that is there if it is large enough.
fn room(device: &Rc<Device>, buffer: &mut Option<Buffer>, bytes: usize) -> Result<Address> {
    let large_enough = match buffer.take().filter(|buffer| buffer.bytes() >= bytes) {
        Some(buffer) => buffer,
        None => Buffer::zeroed(device, bytes.next_power_of_two(), "the best logits")?,
    };
    Ok(buffer.insert(large_enough).address())
}
