//! Decode steps that the device repeats from recordings (CUDA graphs), one for each number of rows.
//!
//! A step takes the recording of the next larger number of rows; the rows that are missing are padding, which
//! no request sees. The first step of a size is queued as usual, which prepares what a recording must find
//! there; the second one is recorded.
//!
//! What comes from another pipeline stage and goes to one lies outside the recordings.

use crate::inputs::Inputs;
use crate::runner::Model;
use crate::{EngineError, Result};
use lockstep_backend::Backend;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

/// The recordings of one model on one device.
pub(crate) struct Recordings<B: Backend> {
    by_rows: BTreeMap<usize, B::Recording>,
    /// Sizes that have been queued once.
    prepared: BTreeSet<usize>,
    /// The device could not record, or shall not.
    is_off: bool,
}

impl<B: Backend> Default for Recordings<B> {
    fn default() -> Self {
        Self { by_rows: BTreeMap::new(), prepared: BTreeSet::new(), is_off: false }
    }
}

impl<B: Backend> Recordings<B> {
    /// Queues the step of `inputs`: what the stage before passes on, the forward pass, padded if that makes it a recorded
    /// one, and what the next stage gets.
    /// **Collective: all ranks of the TP group, and of the pipeline in the same order of steps.**
    pub(crate) fn step(&mut self, model: &mut Model<B>, inputs: &mut Inputs) -> Result<()> {
        // Padding is each stage's own.
        let rows = inputs.forward_input().token_ids.len();
        model.receive(rows)?;
        self.forward(model, inputs)?;
        model.pass_on(rows)
    }

    /// The rows of the recording that a step of `rows` rows takes.
    fn recorded_rows(&self, model: &Model<B>, rows: usize) -> Option<usize> {
        let recorded = model.backend.recorded_rows(rows).filter(|_| !self.is_off)?;
        let fits = recorded <= model.tokens_max && (recorded <= model.work.logits_max() || !model.samples());
        fits.then_some(recorded)
    }

    fn forward(&mut self, model: &mut Model<B>, inputs: &mut Inputs) -> Result<()> {
        let recorded = inputs.decode_rows().and_then(|rows| self.recorded_rows(model, rows));
        let Some(rows) = recorded else { return model.forward(inputs) };
        inputs.pad(rows, model.backend.padding_page(&model.cache));
        model.backend.stage(&inputs.forward_input()).map_err(EngineError::from)?;
        if let Some(recording) = self.by_rows.get(&rows) {
            if model.backend.replay(recording).map_err(EngineError::from)? {
                return Ok(());
            }
            // What recordings name has moved: all of them are out of date.
            self.by_rows.clear();
        }
        if self.prepared.insert(rows) {
            return model.forward(inputs);
        }
        self.record(model, inputs, rows)
    }

    /// Whether steps are recorded at all.
    pub(crate) fn set(&mut self, is_on: bool) {
        self.is_off = !is_on;
    }

    /// Records the forward pass of `inputs` and queues it.
    fn record(&mut self, model: &mut Model<B>, inputs: &Inputs, rows: usize) -> Result<()> {
        let Model { backend, collective, decoder, cache, work, .. } = model;
        let recorded = backend.record(|backend| {
            let ctx = (backend, &**collective);
            decoder.forward(ctx, &inputs.forward_input(), cache, work).map(|_| ()).map_err(EngineError::from)
        });
        match recorded {
            Ok(Some(recording)) => {
                let replayed = backend.replay(&recording).map_err(EngineError::from)?;
                self.by_rows.insert(rows, recording);
                if replayed {
                    return Ok(());
                }
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!("decode steps are not recorded, which makes small batches slower: {error}");
                self.by_rows.clear();
                self.is_off = true;
            }
        }
        model.forward(inputs)
    }

    /// Records all sizes up to `rows_max`, the largest first: its lists are the longest. Gives how many.
    /// **Collective: all ranks of the TP group.**
    pub(crate) fn prepare(
        &mut self,
        model: &mut Model<B>,
        inputs: &mut Inputs,
        rows_max: usize,
        on_progress: &dyn Fn(usize, usize),
    ) -> Result<usize> {
        let sizes: BTreeSet<usize> =
            (1..=rows_max).filter_map(|rows| self.recorded_rows(model, rows)).collect();
        for (done, &rows) in sizes.iter().rev().enumerate() {
            for _ in 0..2 {
                inputs.fill_with_padding(rows, model.backend.padding_page(&model.cache));
                self.forward(model, inputs)?;
            }
            on_progress(done + 1, sizes.len());
        }
        Ok(self.by_rows.len())
    }
}

impl<B: Backend> Model<B> {
    /// Whether this rank's stage is the last one, or the only one.
    pub(crate) fn samples(&self) -> bool {
        self.pipeline.as_ref().is_none_or(|pipeline| pipeline.rank() + 1 == pipeline.size())
    }

    /// Queues a forward pass; its logits, or the stream for the next stage, will be in the workspace.
    fn forward(&mut self, inputs: &Inputs) -> Result<()> {
        let Self { backend, collective, decoder, cache, work, .. } = self;
        decoder.forward((backend, &**collective), &inputs.forward_input(), cache, work)?;
        Ok(())
    }

    /// Takes `rows` rows from the stage before, if there is one; the step's time counts from there on.
    fn receive(&mut self, rows: usize) -> Result<()> {
        let Some(pipeline) = self.pipeline.as_deref() else { return Ok(()) };
        if let Some(before) = pipeline.rank().checked_sub(1) {
            let from = Instant::now();
            let stream = self.work.residual_mut();
            self.backend.recv(pipeline, stream, rows, before).map_err(EngineError::from)?;
            self.waited += from.elapsed();
        }
        self.backend.begin_step().map_err(EngineError::from)
    }

    /// Gives `rows` rows to the next stage, if there is one.
    fn pass_on(&mut self, rows: usize) -> Result<()> {
        let Some(pipeline) = self.pipeline.as_deref() else { return Ok(()) };
        let next = pipeline.rank() + 1;
        if next < pipeline.size() {
            let stream = self.work.residual();
            self.backend.send(pipeline, stream, rows, next).map_err(EngineError::from)?;
        }
        Ok(())
    }
}
