//! Decode steps that the device repeats from recordings (CUDA graphs), one for each number of rows.
//!
//! A step takes the recording of the next larger number of rows; the rows that are missing are padding, which
//! no request sees. The first step of a size is queued as usual, which prepares what a recording must find
//! there; the second one is recorded.
//!
//! Steps of a pipeline with several stages are not recorded: no device that records has such.

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
    /// Queues the forward pass of `inputs`, padded if that makes it a recorded one.
    /// **Collective: all ranks of the TP group.**
    pub(crate) fn forward(&mut self, model: &mut Model<B>, inputs: &mut Inputs) -> Result<()> {
        let recorded = inputs.decode_rows().and_then(|rows| model.backend.recorded_rows(rows));
        let Some(rows) = recorded.filter(|rows| !self.is_off && *rows <= model.work.logits_max()) else {
            return model.forward(inputs);
        };
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
        let sizes = (1..=rows_max).filter_map(|rows| model.backend.recorded_rows(rows));
        let sizes: BTreeSet<usize> = sizes.filter(|rows| *rows <= model.work.logits_max()).collect();
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

    /// Queues a forward pass; its logits will be in the workspace, or the next stage gets what is in it.
    /// **Collective: all ranks of the TP group, and of the pipeline in the same order of steps.**
    pub(crate) fn forward(&mut self, inputs: &Inputs) -> Result<()> {
        let Self { backend, collective, pipeline, decoder, cache, work, waited } = self;
        let input = inputs.forward_input();
        let rows = input.token_ids.len();
        let stages = pipeline.as_deref().map(|pipeline| (pipeline, pipeline.rank()));
        if let Some((pipeline, stage)) = stages.filter(|(_, stage)| *stage > 0) {
            let from = Instant::now();
            backend.recv(pipeline, work.residual_mut(), rows, stage - 1).map_err(EngineError::from)?;
            *waited += from.elapsed();
        }
        decoder.forward((&mut *backend, &**collective), &input, cache, work)?;
        if let Some((pipeline, stage)) = stages.filter(|(pipeline, stage)| stage + 1 < pipeline.size()) {
            backend.send(pipeline, work.residual(), rows, stage + 1).map_err(EngineError::from)?;
        }
        Ok(())
    }
}
