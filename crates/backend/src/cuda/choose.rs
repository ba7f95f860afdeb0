//! Tokens chosen on the device, and their way to the host.
//!
//! The next step finds them on the device ([`CHOSEN_BIT`](crate::choice::CHOSEN_BIT)), so that it can be queued before the host
//! has seen them. **Invariant:** at most two steps' tokens are on their way; the device keeps those of the step queued last.

use super::driver::{Address, Device, Event};
use super::launch::{Args, Grid, Kernel, Module};
use super::memory::{Buffer, Pinned};
use crate::choice::Choice;
use crate::{BackendError, Result};
use lockstep_comm::collective::{Collective, StreamHandle};
use lockstep_core::{DType, TokenId};
use std::collections::VecDeque;
use std::rc::Rc;

/// Steps whose tokens may be on their way to the host.
const STEPS: usize = 2;

/// Chosen tokens.
pub(super) struct Chooser {
    device: Rc<Device>,
    argmax: Kernel,
    pick: Kernel,
    /// Each row's largest logit and its column: this rank's, and every rank's.
    local: Option<Buffer>,
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
            argmax: module.kernel("argmax", 0)?,
            pick: module.kernel("pick", 0)?,
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
        assert!(cols <= stride, "{cols} columns of {stride}");
        let pairs = room(&self.device, &mut self.local, rows * size_of::<[u32; 2]>())?;
        let args = Args::default().address(logits).int(stride).int(cols).address(pairs);
        // SAFETY: the logits are the caller's, the pairs have room for `rows`.
        unsafe { self.argmax.launch(Grid::rows(rows, 1024), args) };
        Ok(pairs)
    }

    /// Queues the choice of a token for each row, and its way to the host. **Collective: all ranks of the
    /// TP group.**
    pub fn queue(&mut self, collective: &dyn Collective, logits: Address, choice: &Choice<'_>) -> Result<()> {
        let (rows, ranks) = (choice.rows.len(), collective.size());
        assert!(choice.rows.iter().all(|row| row.is_greedy()), "rows that sample are chosen on the host");
        let mine = self.queue_best(logits, rows, choice.local_vocab, choice.local_real)?;
        let mut best = mine;
        if ranks > 1 {
            best = room(&self.device, &mut self.gathered, ranks * rows * size_of::<[u32; 2]>())?;
            let stream = StreamHandle(self.device.stream);
            // SAFETY: both buffers hold the pairs of `rows` rows, of one rank and of all.
            unsafe { collective.all_gather(mine as *const _, best as *mut _, 2 * rows, DType::F32, stream)? };
        }
        if self.chosen.bytes() < rows * size_of::<TokenId>() {
            self.device.note_move();
            self.chosen = chosen_buffer(&self.device, rows.next_power_of_two())?;
        }
        let args = Args::default().address(best).int(ranks).int(rows).int(choice.local_vocab);
        // SAFETY: pairs and chosen tokens have room for `rows` rows.
        unsafe { self.pick.launch(Grid::elements(rows), args.address(self.chosen.address())) };
        self.send(rows)
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
