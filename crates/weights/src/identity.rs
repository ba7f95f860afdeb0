//! Which files these are, without reading all of them.

use crate::error::WeightsError;
use crate::files::ModelFiles;
use crate::mapped::MappedFile;
use std::fmt::Write as _;
use std::os::unix::fs::MetadataExt;

/// Pieces of a file that are read, evenly spread: names, types and shapes stand at its beginning, and another training or
/// format changes every one of the others.
const SAMPLES: usize = 64;
const SAMPLE_BYTES: usize = 4096;

impl ModelFiles {
    /// Name, size, time of change and a checksum of some content of every file with tensors, a line each, and a checksum of
    /// the model's description: what was made of the weights before is still right where this is the same.
    ///
    /// Errors when a file is not there any more.
    pub fn identity(&self) -> Result<String, WeightsError> {
        let mut lines = String::new();
        for file in self.files() {
            let path = file.path();
            let meta = std::fs::metadata(path).map_err(|source| WeightsError::io(path, source))?;
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let (seconds, nanoseconds, sampled) = (meta.mtime(), meta.mtime_nsec(), sample(file));
            let size = file.bytes().len();
            let _ = writeln!(lines, "file {name} of {size} bytes, {seconds}.{nanoseconds:09}, {sampled:08x}");
        }
        let _ = writeln!(
            lines,
            "described by {:08x}",
            crc32fast::hash(format!("{:?}", self.config()).as_bytes())
        );
        Ok(lines)
    }
}

fn sample(file: &MappedFile) -> u32 {
    let (bytes, mut hash) = (file.bytes(), crc32fast::Hasher::new());
    let last = bytes.len().saturating_sub(SAMPLE_BYTES);
    for index in 0..SAMPLES {
        let at = (last as u128 * index as u128 / (SAMPLES as u128 - 1)) as usize;
        hash.update(&bytes[at..bytes.len().min(at + SAMPLE_BYTES)]);
    }
    file.release_all();
    hash.finalize()
}
