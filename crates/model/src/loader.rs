//! Reads a rank's slices of a checkpoint into packed weights, as the rules say.
//!
//! Rows arrive in bands of about a MiB, read and packed on all threads of the rank's backend, so that
//! a rank needs little memory beyond its shard, and only the rank's own rows and columns are read.
//! **Invariant:** every parameter is filled exactly once: asking for one twice is an error at once,
//! one that nobody asked for is an error at the end ([`Loader::check_complete`]).

use crate::bands::{BandReader, Slice};
use crate::packed_cache::PackedCache;
use crate::rules::{ModelRules, check_rule};
use crate::source::{WeightSource, weight_types};
use crate::{ModelError, Result};
use lockstep_backend::{Backend, LinearSpec};
use lockstep_core::shard::{self, Group, LocalMatrix, Piece, WeightRule};
use lockstep_core::{ModelConfig, ParallelInfo, StageLayers, WeightMode};
use std::cell::RefCell;
use std::collections::HashSet;

/// Parameters that an error names one by one.
const NAMED_MAX: usize = 5;

/// Told how much of the model is loaded: parts done, parts in all (layers, embedding, head).
pub type Progress<'a> = &'a dyn Fn(usize, usize);

/// Loads one rank's part of one checkpoint.
pub struct Loader<'a, B: Backend> {
    source: &'a dyn WeightSource,
    backend: &'a B,
    parallel: ParallelInfo,
    stage: StageLayers,
    mode: WeightMode,
    exact_tp_sizes: Vec<usize>,
    progress: Progress<'a>,
    bands: BandReader<'a>,
    cache: RefCell<Option<PackedCache>>,
    state: RefCell<State>,
}

#[derive(Default)]
struct State {
    /// Parameters by tensor and first row; a fused tensor holds several.
    filled: HashSet<(String, usize)>,
    packed_bytes: u64,
}

impl<'a, B: Backend> Loader<'a, B> {
    /// A loader of all layers for the rank at `parallel`. `mode` says in which form matrices are kept.
    pub fn new(
        source: &'a dyn WeightSource,
        backend: &'a B,
        parallel: ParallelInfo,
        mode: WeightMode,
        progress: Progress<'a>,
    ) -> Self {
        let bands = BandReader::new(source, mode);
        let exact_tp_sizes = shard::exact_tp_sizes(source.config());
        let stage = StageLayers::whole(source.config().num_layers);
        let (cache, state) = (RefCell::default(), RefCell::default());
        Self { source, backend, parallel, stage, mode, exact_tp_sizes, progress, bands, cache, state }
    }

    /// The same, with matrices from `cache` where it has them. It must be of this source, rank, stage and form of weights.
    pub fn with_cache(self, cache: Option<PackedCache>) -> Self {
        Self { cache: RefCell::new(cache), ..self }
    }

    /// The cache, after all is loaded: to be [finished](PackedCache::finish).
    pub fn take_cache(&self) -> Option<PackedCache> {
        self.cache.borrow_mut().take()
    }

    /// The same for one pipeline stage: only its tensors are read.
    pub fn of_stage(self, stage: StageLayers) -> Self {
        Self { stage, ..self }
    }

    /// The model being loaded.
    pub fn config(&self) -> &'a ModelConfig {
        self.source.config()
    }

    /// Where this rank stands.
    pub fn parallel(&self) -> ParallelInfo {
        self.parallel
    }

    /// Which layers it has.
    pub fn stage(&self) -> StageLayers {
        self.stage
    }

    /// The device that packs.
    pub fn backend(&self) -> &'a B {
        self.backend
    }

    /// Tells the user that `done` of `total` parts are loaded.
    pub fn report(&self, done: usize, total: usize) {
        (self.progress)(done, total);
    }

    /// Fails unless the checkpoint has every tensor of `rules` as they state it; reads headers only.
    pub fn check_headers(&self, rules: &ModelRules) -> Result<()> {
        rules.check(self.source)
    }

    /// Bytes of packed weights so far.
    pub fn packed_bytes(&self) -> u64 {
        self.state.borrow().packed_bytes
    }

    /// Fails unless every parameter of `rules` was filled.
    pub fn check_complete(&self, rules: &ModelRules) -> Result<()> {
        let state = self.state.borrow();
        let pieces = rules.iter().flat_map(|rule| &rule.pieces);
        let missing: Vec<&str> = pieces
            .filter(|piece| !state.filled.contains(&key(piece)))
            .map(|piece| piece.tensor.as_str())
            .collect();
        match missing.len() {
            0 => Ok(()),
            count => Err(ModelError::NotFilled {
                count,
                tensors: missing.get(..NAMED_MAX).unwrap_or(&missing).join(", "),
            }),
        }
    }

    /// Reads this rank's part of a vector, f32; several pieces are joined.
    ///
    /// Norm weights of a family that stores them less 1 get the 1 back. Errors name the tensor that
    /// is missing, has the wrong shape or was read before.
    pub fn vector(&self, rule: &WeightRule) -> Result<B::Vector> {
        let offset = rule.group == Group::Norms && self.config().norm_offset;
        let mut values = Vec::new();
        check_rule(rule, self.source)?;
        for piece in &rule.pieces {
            values.extend(self.source.read_vector(&piece.tensor, piece.local_rows(self.parallel))?);
            self.note_filled(piece)?;
        }
        if offset {
            values.iter_mut().for_each(|v| *v += 1.0);
        }
        self.state.borrow_mut().packed_bytes += size_of_val(values.as_slice()) as u64;
        Ok(self.backend.vector(&values)?)
    }

    /// Reads and packs this rank's part of a matrix, band by band. Panics on the rule of a vector.
    ///
    /// Errors name the tensor that is missing, has the wrong shape or was read before.
    pub fn matrix(&self, rule: &WeightRule) -> Result<B::Linear> {
        let mut matrices = self.matrices(&[rule])?;
        Ok(matrices.pop().expect("invariant: one rule, one matrix"))
    }

    /// [`matrix`](Self::matrix) of each rule, with the bands of all of them under way at once: many small
    /// matrices load as fast as a large one.
    pub fn matrices(&self, rules: &[&WeightRule]) -> Result<Vec<B::Linear>> {
        let mut slices = Vec::new();
        let specs = rules.iter().enumerate().map(|(matrix, rule)| self.slice(rule, matrix, &mut slices));
        let specs = specs.collect::<Result<Vec<_>>>()?;
        let linears = match self.cache.borrow_mut().as_mut() {
            None => self.pack(&specs, &slices)?,
            Some(cache) => {
                let sources: Vec<String> = (0..specs.len()).map(|matrix| sources(&slices, matrix)).collect();
                let linears = match cache.fill(self.backend, &specs, &sources)? {
                    Some(linears) => linears,
                    None => self.pack(&specs, &slices)?,
                };
                cache.note(self.backend, &linears, &specs, &sources);
                linears
            }
        };
        self.state.borrow_mut().packed_bytes += slices.iter().map(Slice::packed_bytes).sum::<usize>() as u64;
        slices.iter().for_each(|slice| self.source.release(slice.tensor));
        Ok(linears)
    }

    /// Reads and packs matrices.
    fn pack(&self, specs: &[LinearSpec], slices: &[Slice<'_>]) -> Result<Vec<B::Linear>> {
        let mut linears = self.backend.linears(specs)?;
        let read_bytes = self.bands.pack(self.backend, &mut linears, slices)?;
        let expected: usize = slices.iter().map(Slice::bytes).sum();
        assert_eq!(read_bytes, expected, "invariant: a source gives every element that the rules name");
        Ok(linears)
    }

    /// Adds this rank's slices of the rule's pieces, which become matrix number `matrix`; gives what that is.
    fn slice<'r>(
        &self,
        rule: &'r WeightRule,
        matrix: usize,
        slices: &mut Vec<Slice<'r>>,
    ) -> Result<LinearSpec> {
        let type_of = weight_types(self.source, self.mode, B::TAKES_CODES);
        let weight_type = rule.weight_type(self.parallel, &self.exact_tp_sizes, type_of);
        let LocalMatrix { rows, padding_rows, columns, leaves } = rule
            .local_matrix(self.parallel, weight_type)
            .expect("invariant: layers ask for matrices by matrix rules");
        let mut first_row = 0;
        check_rule(rule, self.source)?;
        for piece in &rule.pieces {
            self.note_filled(piece)?;
            let (rows, columns) = (piece.local_rows(self.parallel), columns.clone());
            let next_row = first_row + rows.len();
            slices.push(Slice { tensor: &piece.tensor, rows, columns, weight_type, matrix, first_row });
            first_row = next_row;
        }
        assert_eq!(first_row, rows, "invariant: the pieces are the rows of the matrix");
        Ok(LinearSpec { out_features: rows + padding_rows, in_features: columns.len(), weight_type, leaves })
    }

    fn note_filled(&self, piece: &Piece) -> Result<()> {
        match self.state.borrow_mut().filled.insert(key(piece)) {
            true => Ok(()),
            false => Err(ModelError::FilledTwice { tensor: piece.tensor.clone() }),
        }
    }
}

/// What the matrix with this number is made from, in words.
fn sources(slices: &[Slice<'_>], matrix: usize) -> String {
    let of_matrix = slices.iter().filter(|slice| slice.matrix == matrix);
    let words = |slice: &Slice<'_>| format!("{} {:?} x {:?}", slice.tensor, slice.rows, slice.columns);
    of_matrix.map(words).collect::<Vec<_>>().join(", ")
}

/// What tells one parameter from another.
fn key(piece: &Piece) -> (String, usize) {
    (piece.tensor.clone(), piece.rows.start)
}
