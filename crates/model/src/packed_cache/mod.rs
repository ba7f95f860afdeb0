//! Packed weights kept on disk, so that a later start reads what this one made (`--packed-cache`).
//!
//! A rank's matrices are written as they lie in memory, in the order in which they are loaded, with a checksum of every MiB
//! and a description of all that they were made from; they are used only where that is the same, and each piece is checked as it
//! is read. They are read into memory of huge pages rather than mapped: pages of a file are small, which makes decoding a
//! third slower.
//!
//! **Invariants:** whatever is wrong with a cache costs a warning and the time to pack, never a start and never a wrong
//! weight. A file appears under its name only when it is whole and on the disk; nobody ever changes it there. Files that
//! nobody has used for longest give way to new ones, and a disk is never filled up.
//!
//! The order of matrices and what each is made from are the loader's; see [`Loader::with_cache`](crate::Loader::with_cache).

mod file;
mod folder;
#[cfg(test)]
mod tests;

use crate::Result;
use crate::rules::ModelRules;
use crate::source::WeightSource;
use file::PackedFile;
use folder::Folder;
use lockstep_backend::{Backend, LinearSpec, PackedBytes};
use lockstep_core::WeightMode;
use lockstep_core::shard::Group;
use std::path::PathBuf;
use std::thread::{Builder, JoinHandle};

/// Packed weights of fewer bytes are made in a fraction of a second.
const BYTES_MIN: usize = 64 << 20;

/// Where a rank's packed weights are kept and what they are.
#[derive(Clone, Debug)]
pub struct CacheKey {
    /// The folder; made when something is written.
    pub folder: PathBuf,
    /// Names the file, with a number that depends on `description`: of letters, digits, `-`, `_` and `.`.
    pub name: String,
    /// Everything that decides about the bytes, in words: model files, shard, form of weights.
    pub description: String,
}

/// Reads one rank's matrices from a file, or keeps them to write one.
pub struct PackedCache {
    folder: Folder,
    description: String,
    state: State,
    /// What was loaded so far, from the file or not.
    loaded: Vec<(String, PackedBytes)>,
}

enum State {
    /// The file has matrices for all that was asked for.
    Reading(PackedFile),
    /// There is no file, or it cannot be used.
    Packing,
}

impl PackedCache {
    /// Looks for the file. `version` is that of the backend's memory ([`Backend::PACKED_VERSION`]).
    pub fn open(key: CacheKey, version: u32) -> Self {
        let description = format!("packed weights, layout {version}\n{}", key.description);
        let folder = Folder::new(key.folder, &key.name, &description);
        let state = match PackedFile::open(&folder.file(), &description) {
            Ok(Some(file)) => State::Reading(file),
            Ok(None) => State::Packing,
            Err(problem) => {
                warn(&folder, &problem);
                State::Packing
            }
        };
        Self { folder, description, state, loaded: Vec::new() }
    }

    /// The matrices of `specs`, each made from what `sources` says, if the file has them.
    pub(crate) fn fill<B: Backend>(
        &mut self,
        backend: &B,
        specs: &[LinearSpec],
        sources: &[String],
    ) -> Result<Option<Vec<B::Linear>>> {
        let State::Reading(file) = &mut self.state else { return Ok(None) };
        let wanted = sources.iter().zip(specs).map(|(source, spec)| what(source, spec));
        let mut linears = backend.linears(specs)?;
        match file.read(backend, &mut linears, wanted) {
            Ok(()) => Ok(Some(linears)),
            Err(problem) => {
                warn(&self.folder, &problem);
                self.state = State::Packing;
                Ok(None)
            }
        }
    }

    /// Matrices that were loaded, from the file or not, in order. They are not packed again.
    pub(crate) fn note<B: Backend>(
        &mut self,
        backend: &B,
        linears: &[B::Linear],
        specs: &[LinearSpec],
        sources: &[String],
    ) {
        for ((linear, spec), source) in linears.iter().zip(specs).zip(sources) {
            self.loaded.push((what(source, spec), backend.packed(linear)));
        }
    }

    /// Where it is, or will be.
    pub fn file(&self) -> PathBuf {
        self.folder.file()
    }

    /// Whether all matrices came from the file so far.
    pub fn reads(&self) -> bool {
        matches!(self.state, State::Reading(_))
    }

    /// All is loaded: writes the file, beside whatever follows, unless it is there. The thread ends by itself; waiting
    /// for it is for tests.
    pub fn finish(self) -> Option<JoinHandle<()>> {
        if let State::Reading(file) = &self.state {
            file.mark_used();
            return None;
        }
        let Self { folder, description, loaded, .. } = self;
        let path = folder.file();
        let write = move || {
            let bytes: u64 = loaded.iter().map(|(_, bytes)| (**bytes).as_ref().len() as u64).sum();
            match folder.write(bytes, |file| file::write(file, &description, &loaded)) {
                Ok(true) => {
                    tracing::info!("wrote {} MiB of packed weights to {}", bytes >> 20, path.display())
                }
                Ok(false) => tracing::debug!("another process writes {}", path.display()),
                Err(problem) => tracing::warn!("packed weights are not kept: {problem}"),
            }
        };
        match Builder::new().name("packed-cache".into()).spawn(write) {
            Ok(thread) => Some(thread),
            Err(error) => {
                tracing::warn!("packed weights are not kept: no thread can be started: {error}");
                None
            }
        }
    }
}

/// Whether reading a rank's packed weights, `bytes` of them, saves much of the time that making them takes: where floats
/// become codes, which took 20 times as long. Everything else is packed about as fast as files are read.
pub fn pays(source: &dyn WeightSource, mode: WeightMode, bytes: usize) -> bool {
    let WeightMode::Quantize(_) = mode else { return false };
    let rules = ModelRules::new(source.config());
    let is_float = |tensor: &str| source.stored_type(tensor).is_some_and(|stored| stored.codes.is_none());
    let quantised = rules
        .iter()
        .filter(|rule| matches!(rule.group, Group::Attention | Group::Mlp | Group::Experts))
        .any(|rule| rule.pieces.iter().any(|piece| is_float(&piece.tensor)));
    quantised && bytes >= BYTES_MIN
}

/// What tells one matrix of a model from all others, and from the same in another form.
fn what(source: &str, spec: &LinearSpec) -> String {
    let LinearSpec { out_features, in_features, weight_type, leaves } = spec;
    format!("{out_features}x{in_features} {weight_type:?} leaves {leaves:?} of {source}")
}

fn warn(folder: &Folder, problem: &str) {
    let path = folder.file();
    tracing::warn!("the packed weights in {} are made anew: {problem}", path.display());
}
