//! [`ModelFiles`]: one interface for Hugging Face folders and GGUF files.

use crate::error::WeightsError;
use crate::generation::GenerationDefaults;
use crate::gguf::{self, Metadata};
use crate::locate;
use crate::mapped::MappedFile;
use crate::storage::{StorageKind, TensorInfo};
use crate::tensor::{Form, Piece, Tensor};
use lockstep_core::{CodeLayout, DType, ModelConfig, TokenId};
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Resident bytes of all mappings together after which reading drops them.
const RESIDENT_BYTES_MAX: usize = 8 << 20;
/// Files that an error about a missing tensor names one by one.
const SEARCHED_NAMED_MAX: usize = 4;
/// Unused tensors that a warning names one by one.
const UNUSED_NAMED_MAX: usize = 5;

/// The files of one model: headers read, tensors mapped.
///
/// Every rank opens the files itself and reads only its own slices; opening costs a few
/// milliseconds and no memory in proportion to the weights. Tensors are found under their Hugging
/// Face names whatever the format. Can be shared among threads.
#[derive(Debug)]
pub struct ModelFiles {
    opened: Opened,
    /// Bytes read through the mappings since they were last dropped.
    touched: AtomicUsize,
}

/// What the reader of one format finds out.
#[derive(Debug)]
pub(crate) struct Opened {
    pub config: ModelConfig,
    /// Of every source, in any order, possibly repeated.
    pub eos_tokens: Vec<TokenId>,
    pub defaults: GenerationDefaults,
    pub label: String,
    pub files: Vec<Arc<MappedFile>>,
    /// By Hugging Face name.
    pub tensors: BTreeMap<String, Tensor>,
    /// Scales of activations and of the KV cache that were left out.
    pub ignored_scales: usize,
    /// Keys of the description that were not understood.
    pub unread_keys: Vec<String>,
    /// The folder, for formats that keep the tokenizer beside the weights.
    pub folder: Option<PathBuf>,
    pub metadata: Option<Metadata>,
}

/// One sentence naming keys of a description that were not understood; `None` when there are none.
pub fn unread_keys_report(keys: &[String]) -> Option<String> {
    let keys = (!keys.is_empty()).then(|| keys.join(", "))?;
    Some(format!("the description has keys that this version does not know and does not read: {keys}"))
}

impl ModelFiles {
    /// Opens a folder in Hugging Face layout, a GGUF file (or any part of one), or a folder that holds
    /// one GGUF file.
    ///
    /// Reads headers and small JSON files only. Fails on anything that is certain to fail later:
    /// missing or damaged files, an unsupported architecture.
    pub fn open(path: &Path) -> Result<Self, WeightsError> {
        let mut opened = locate::open(path)?;
        opened.eos_tokens.sort_unstable();
        opened.eos_tokens.dedup();
        Ok(Self { opened, touched: AtomicUsize::new(0) })
    }

    /// The model's description.
    pub fn config(&self) -> &ModelConfig {
        &self.opened.config
    }

    /// End tokens of every source but the tokenizer: config.json and generation_config.json, or the
    /// GGUF keys eos, eot and eom; ascending, each once.
    pub fn eos_tokens(&self) -> &[TokenId] {
        &self.opened.eos_tokens
    }

    /// The author's sampling defaults.
    pub fn generation_defaults(&self) -> GenerationDefaults {
        self.opened.defaults
    }

    /// Shape and type of a tensor by its Hugging Face name.
    pub fn tensor(&self, name: &str) -> Option<TensorInfo> {
        self.opened.tensors.get(name).map(|t| t.info.clone())
    }

    /// All tensors, ascending by name.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.opened.tensors.keys().map(String::as_str)
    }

    /// Element type that [`read_rows`](Self::read_rows) gives; `None` for a tensor that is missing or
    /// of a type that cannot be read.
    pub fn dtype_of(&self, name: &str) -> Option<DType> {
        self.opened.tensors.get(name)?.info.stored.dtype()
    }

    /// The layout in which [`read_codes`](Self::read_codes) gives a tensor, or one that it joins; `None` for a tensor that is
    /// missing or has no codes.
    pub fn codes_of(&self, name: &str) -> Option<CodeLayout> {
        self.opened.tensors.get(name)?.info.stored.code_layout()
    }

    /// The tensor, if it can be read and has exactly this shape.
    ///
    /// Errors name the tensor, the file and both shapes or the type, or the files that were searched.
    pub fn expect_shape(&self, name: &str, shape: &[usize]) -> Result<TensorInfo, WeightsError> {
        let tensor = self.find(name)?;
        if tensor.info.shape != shape {
            return Err(WeightsError::WrongShape {
                name: name.into(),
                path: self.file_of(tensor).path().to_owned(),
                expected: shape.to_vec(),
                found: tensor.info.shape.clone(),
            });
        }
        self.readable(name, tensor)?;
        Ok(tensor.info.clone())
    }

    /// Lets go of the resident pages of a tensor.
    ///
    /// Reading already keeps all mappings together below about 12 MiB; call this after the last
    /// slice of a tensor to keep less.
    pub fn release(&self, name: &str) {
        let Some(tensor) = self.opened.tensors.get(name) else { return };
        let release = |piece: &Piece| self.opened.files[piece.file].release(piece.bytes.clone());
        release(&tensor.data);
        match &tensor.form {
            Form::Rows(_) => {}
            Form::Scaled(scales) => release(&scales.data),
            Form::Grouped(grouped) => [&grouped.zeros, &grouped.scales].into_iter().for_each(release),
        }
    }

    /// One sentence naming tensors that are in the files but not in `used`; `None` when there are
    /// none. Rope frequencies do not count: they come from the config.
    pub fn unused_report(&self, used: &HashSet<String>) -> Option<String> {
        let known = |name: &str| gguf::open::is_rope_tensor(name) || name.ends_with("rotary_emb.inv_freq");
        let unused: Vec<&str> = self.tensor_names().filter(|n| !used.contains(*n) && !known(n)).collect();
        let shown = unused.get(..UNUSED_NAMED_MAX).unwrap_or(&unused).join(", ");
        match unused.len() {
            0 => None,
            1 => Some(format!("1 tensor in the files is not part of this model and was not read: {shown}")),
            n if n <= UNUSED_NAMED_MAX => Some(format!(
                "{n} tensors in the files are not part of this model and were not read: {shown}"
            )),
            n => Some(format!(
                "{n} tensors in the files are not part of this model and were not read: {shown} and {} more",
                n - UNUSED_NAMED_MAX
            )),
        }
    }

    /// Format, type and number of files for people, e.g. `gguf Q4_K_M` or `safetensors bf16, 3 files`.
    pub fn source_label(&self) -> String {
        self.opened.label.clone()
    }

    /// What reading changes, one line for each stored kind, for the log: how many tensors are unpacked
    /// to which type, and which scales are left out.
    ///
    /// A quantised tensor is unpacked on every rank and at every tp size, never only where a cut
    /// would fall inside a block or group, so that the weights a model computes with do not depend
    /// on tp.
    ///
    /// `as_codes`: the device multiplies with codes, and nobody asked for floats.
    pub fn conversions(&self, as_codes: bool) -> Vec<String> {
        let mut tensors_by_kind = BTreeMap::new();
        for tensor in self.opened.tensors.values().filter(|t| t.info.stored.is_quantised()) {
            *tensors_by_kind.entry(tensor.info.stored).or_insert(0usize) += 1;
        }
        let mut lines: Vec<String> = tensors_by_kind
            .into_iter()
            .map(|(kind, n)| {
                let (tensors, are) = if n == 1 { ("tensor", "is") } else { ("tensors", "are") };
                match kind.code_layout().filter(|_| as_codes) {
                    Some(layout) => {
                        format!("{n} {tensors} stored as {kind} {are} kept as {}", layout.words())
                    }
                    None => format!("{n} {tensors} stored as {kind} {are} unpacked to bf16 while loading"),
                }
            })
            .collect();
        match self.opened.ignored_scales {
            0 => {}
            n => lines.push(format!(
                "{n} scales of activations or of the KV cache are not used: weights are unpacked, and \
                 activations are not quantised"
            )),
        }
        lines
    }

    /// One sentence naming keys of the description that are neither read nor known to be without effect: one may be newer
    /// than this version and change the answers.
    pub fn unread_keys_report(&self) -> Option<String> {
        unread_keys_report(&self.opened.unread_keys)
    }

    /// GGUF metadata (vocabulary, merges, chat template); `None` for Hugging Face folders.
    pub fn gguf(&self) -> Option<&Metadata> {
        self.opened.metadata.as_ref()
    }

    /// The Hugging Face folder, where tokenizer files lie; `None` for GGUF.
    pub fn folder(&self) -> Option<&Path> {
        self.opened.folder.as_deref()
    }

    /// The tensor, or an error that names the files searched.
    pub(crate) fn find(&self, name: &str) -> Result<&Tensor, WeightsError> {
        self.opened
            .tensors
            .get(name)
            .ok_or_else(|| WeightsError::MissingTensor { name: name.into(), searched: self.searched() })
    }

    /// Every file with tensors.
    pub(crate) fn files(&self) -> impl Iterator<Item = &MappedFile> {
        self.opened.files.iter().map(|file| &**file)
    }

    pub(crate) fn file_of(&self, tensor: &Tensor) -> &MappedFile {
        &self.opened.files[tensor.data.file]
    }

    /// The mapped bytes of a piece.
    pub(crate) fn stored(&self, piece: &Piece) -> &[u8] {
        &self.opened.files[piece.file].bytes()[piece.bytes.clone()]
    }

    /// The readable type of a tensor, or an error that names it.
    pub(crate) fn readable(&self, name: &str, tensor: &Tensor) -> Result<(StorageKind, DType), WeightsError> {
        let kind = tensor.info.stored;
        match kind.dtype() {
            Some(dtype) => Ok((kind, dtype)),
            None => Err(WeightsError::UnsupportedType {
                name: name.into(),
                path: self.file_of(tensor).path().to_owned(),
                kind,
            }),
        }
    }

    /// Notes that `bytes` of mappings became resident; drops all pages when that is much.
    ///
    /// Keeps the bound whatever the callers do: pages of several files and threads are counted
    /// together, and a page dropped under a reader comes back at its next access.
    pub(crate) fn touch(&self, bytes: usize) {
        // Relaxed: only the sum matters, and being off by one reader's piece does no harm.
        if self.touched.fetch_add(bytes, Ordering::Relaxed) + bytes > RESIDENT_BYTES_MAX {
            self.touched.store(0, Ordering::Relaxed);
            self.opened.files.iter().for_each(|file| file.release_all());
        }
    }

    fn searched(&self) -> String {
        let files = &self.opened.files;
        let shown: Vec<String> =
            files.iter().take(SEARCHED_NAMED_MAX).map(|f| f.path().display().to_string()).collect();
        match files.len() - shown.len() {
            0 => shown.join(", "),
            more => format!("{} and {more} more files", shown.join(", ")),
        }
    }
}
