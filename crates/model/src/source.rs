//! Where weights come from: model files, or made up from a seed ([`crate::DummyWeights`]).

use crate::Result;
use crate::rules::ModelRules;
use lockstep_core::shard::{Group, WeightRule};
use lockstep_core::{CodeLayout, DType, ModelConfig, ParallelInfo, StoredType, WeightMode, WeightType};
use lockstep_weights::{ModelFiles, WeightsError};
use std::borrow::Cow;
use std::collections::HashSet;
use std::ops::Range;

/// What the loader asks of a checkpoint. Tensors go by the names of the rules, which are those of a
/// text-only Hugging Face checkpoint. Several threads read at once.
pub trait WeightSource: Sync {
    /// The model's description.
    fn config(&self) -> &ModelConfig;
    /// Element type that [`read_rows`](Self::read_rows) gives; `None` for a tensor that cannot be read.
    fn dtype_of(&self, tensor: &str) -> Option<DType>;
    /// The layout that holds a tensor's blocks unchanged; `None` for a tensor without codes.
    fn codes_of(&self, _tensor: &str) -> Option<CodeLayout> {
        None
    }
    /// How the tensor is stored, as far as its form in memory depends on it; `None` as [`dtype_of`](Self::dtype_of).
    fn stored_type(&self, tensor: &str) -> Option<StoredType> {
        Some(StoredType { dtype: self.dtype_of(tensor)?, codes: self.codes_of(tensor) })
    }
    /// Fails unless the tensor is there, can be read and has exactly this shape; the error names it. Reads headers only.
    fn expect_shape(&self, tensor: &str, shape: &[usize]) -> Result<()>;
    /// Puts `rows` x `cols` of a matrix into `out`, row-major, little-endian, and gives their type.
    fn read_rows(
        &self,
        tensor: &str,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut Vec<u8>,
    ) -> Result<DType>;
    /// Puts `rows` x `cols` of a matrix that [has codes](Self::codes_of) into `out` as groups in `layout`, which holds
    /// them; `cols` are whole groups.
    fn read_codes(
        &self,
        tensor: &str,
        _rows: Range<usize>,
        _cols: Range<usize>,
        _layout: CodeLayout,
        _out: &mut Vec<u8>,
    ) -> Result<()> {
        unreachable!("invariant: {tensor} has no codes")
    }
    /// Elements `range` of a vector.
    fn read_vector(&self, tensor: &str, range: Range<usize>) -> Result<Vec<f32>>;
    /// What tells these weights from all others, in words, one fact a line; `None` where they are not worth keeping in
    /// another form. Reads little of them.
    fn identity(&self) -> Option<String> {
        None
    }
    /// Nobody will read the tensor again.
    fn release(&self, tensor: &str);
    /// One sentence about what the source holds beside the tensors in `used`.
    fn unused_report(&self, used: &HashSet<String>) -> Option<String>;
}

/// The form in which a backend keeps tensors of `source` as `mode` asks, by what they count as and by name, for
/// [`WeightRule::weight_type`](lockstep_core::shard::WeightRule::weight_type). `takes_codes`: [`Backend::TAKES_CODES`].
///
/// [`Backend::TAKES_CODES`]: lockstep_backend::Backend::TAKES_CODES
pub fn weight_types(
    source: &dyn WeightSource,
    mode: WeightMode,
    takes_codes: bool,
) -> impl Fn(Group, &str) -> Option<WeightType> {
    move |group, tensor| Some(mode.weight_type(source.stored_type(tensor)?, group, takes_codes))
}

/// Whether a rank of a backend that takes codes keeps some matrix of `source` as codes.
pub fn has_codes(source: &dyn WeightSource, mode: WeightMode) -> bool {
    let rules = ModelRules::new(source.config());
    let p = ParallelInfo::SINGLE;
    let coded = |rule: &WeightRule| {
        let weight_type = rule.weight_type(p, &rules.exact_tp_sizes, weight_types(source, mode, true));
        matches!(weight_type, WeightType::Coded(_))
    };
    rules.iter().any(coded)
}

/// How checkpoints that hold more than text name the text model's tensors.
const TEXT_PREFIXES: [&str; 2] = ["language_model.", "model.language_model."];

/// The name under which the files hold `tensor`: its own, or that inside a larger model
/// (`language_model.model.layers...` before transformers 4.52, `model.language_model.layers...`
/// after).
fn stored_name<'t>(files: &ModelFiles, tensor: &'t str) -> Cow<'t, str> {
    if files.tensor(tensor).is_some() {
        return tensor.into();
    }
    let inner = tensor.strip_prefix("model.").unwrap_or(tensor);
    let candidates = [format!("{}{tensor}", TEXT_PREFIXES[0]), format!("{}{inner}", TEXT_PREFIXES[1])];
    match candidates.into_iter().find(|name| files.tensor(name).is_some()) {
        Some(name) => name.into(),
        None => tensor.into(),
    }
}

impl WeightSource for ModelFiles {
    fn config(&self) -> &ModelConfig {
        ModelFiles::config(self)
    }

    fn dtype_of(&self, tensor: &str) -> Option<DType> {
        ModelFiles::dtype_of(self, &stored_name(self, tensor))
    }

    fn expect_shape(&self, tensor: &str, shape: &[usize]) -> Result<()> {
        ModelFiles::expect_shape(self, &stored_name(self, tensor), shape)?;
        Ok(())
    }

    fn read_rows(
        &self,
        tensor: &str,
        rows: Range<usize>,
        cols: Range<usize>,
        out: &mut Vec<u8>,
    ) -> Result<DType> {
        Ok(ModelFiles::read_rows(self, &stored_name(self, tensor), rows, cols, out)?)
    }

    fn codes_of(&self, tensor: &str) -> Option<CodeLayout> {
        ModelFiles::codes_of(self, &stored_name(self, tensor))
    }

    fn read_codes(
        &self,
        tensor: &str,
        rows: Range<usize>,
        cols: Range<usize>,
        layout: CodeLayout,
        out: &mut Vec<u8>,
    ) -> Result<()> {
        Ok(ModelFiles::read_codes(self, &stored_name(self, tensor), (rows, cols), layout, out)?)
    }

    fn read_vector(&self, tensor: &str, range: Range<usize>) -> Result<Vec<f32>> {
        Ok(ModelFiles::read_vector(self, &stored_name(self, tensor), range)?)
    }

    fn identity(&self) -> Option<String> {
        match ModelFiles::identity(self) {
            Ok(identity) => Some(identity),
            Err(error) => {
                tracing::warn!("packed weights are not kept: {error}");
                None
            }
        }
    }

    fn release(&self, tensor: &str) {
        ModelFiles::release(self, &stored_name(self, tensor));
    }

    fn unused_report(&self, used: &HashSet<String>) -> Option<String> {
        let stored = used.iter().map(|tensor| stored_name(self, tensor).into_owned()).collect();
        ModelFiles::unused_report(self, &stored)
    }
}

/// The error for a tensor that a source without files does not have.
pub(crate) fn missing(tensor: &str, searched: &str) -> WeightsError {
    WeightsError::MissingTensor { name: tensor.into(), searched: searched.into() }
}
