//! The parts of one GGUF file.
//!
//! Follows llama.cpp's `gguf-split`: parts are named `<prefix>-00001-of-0000N.gguf`; each says which
//! part it is (`split.no`, from 0) and of how many (`split.count`); the first has the metadata and
//! says how many tensors there are (`split.tensors.count`). **Invariant:** what [`open`] gives is
//! complete, and in the order of the parts.

use super::Metadata;
use super::header::{self, RawTensor};
use crate::error::{Fault, WeightsError};
use crate::mapped::MappedFile;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A whole model's files, metadata and tensors.
pub(super) struct Parts {
    pub files: Vec<Arc<MappedFile>>,
    /// Of the first part.
    pub metadata: Metadata,
    /// Of all parts; [`RawTensor::file`] is the index of the part.
    pub tensors: Vec<RawTensor>,
}

/// Opens the file at `path` and, if it is a part of several, the others beside it.
///
/// Errors: a part is missing, damaged, or belongs to another model.
pub(super) fn open(path: &Path) -> Result<Parts, WeightsError> {
    let asked = Part::open(path)?;
    let count = asked.number("split.count").unwrap_or(1);
    if count <= 1 {
        return Ok(Parts { files: vec![asked.file], metadata: asked.metadata, tensors: asked.tensors });
    }
    let name = PartName::parse(path).filter(|name| i64::from(name.count) == count);
    let Some(name) = name else {
        return Err(WeightsError::NotAModel {
            path: path.to_owned(),
            reason: format!(
                "is one of {count} parts, so its name must end in -00001-of-{count:05}.gguf (or the number of \
                 its part); give all parts the names they were published with"
            ),
        });
    };
    let mut parts = Vec::new();
    for index in 0..name.count {
        let part_path = name.path(index);
        if part_path.metadata().is_err_and(|e| e.kind() == std::io::ErrorKind::NotFound) {
            let named_by = format!("split.count {count} of {}", path.display());
            return Err(WeightsError::MissingFile { path: part_path, named_by });
        }
        let part = Part::open(&part_path)?;
        part.expect("split.count", count)?;
        part.expect("split.no", i64::from(index))?;
        parts.push(part);
    }
    join(parts)
}

fn join(parts: Vec<Part>) -> Result<Parts, WeightsError> {
    let held: usize = parts.iter().map(|part| part.tensors.len()).sum();
    parts[0].expect_or_absent("split.tensors.count", held as i64, "tensors in all parts")?;
    let metadata = parts[0].metadata.clone();
    let mut files = Vec::new();
    let mut tensors = Vec::new();
    for (index, part) in parts.into_iter().enumerate() {
        tensors.extend(part.tensors.into_iter().map(|tensor| RawTensor { file: index, ..tensor }));
        files.push(part.file);
    }
    Ok(Parts { files, metadata, tensors })
}

/// One file, header read.
struct Part {
    file: Arc<MappedFile>,
    metadata: Metadata,
    tensors: Vec<RawTensor>,
}

impl Part {
    fn open(path: &Path) -> Result<Self, WeightsError> {
        let file = Arc::new(MappedFile::open(path)?);
        crate::locate::refuse_stand_in(file.bytes()).map_err(|fault| fault.at(path))?;
        if let Some(reason) = header::foreign(file.bytes()) {
            return Err(WeightsError::NotAModel { path: path.to_owned(), reason });
        }
        let header = header::parse(file.bytes()).map_err(|fault| fault.at(path))?;
        let metadata = Metadata::new(Arc::clone(&file), header.entries);
        Ok(Self { file, metadata, tensors: header.tensors })
    }

    fn number(&self, key: &str) -> Option<i64> {
        self.metadata.integer(key)
    }

    /// Checks that `key` is `expected`, as it must be in every part.
    fn expect(&self, key: &str, expected: i64) -> Result<(), WeightsError> {
        if self.number(key) == Some(expected) {
            return Ok(());
        }
        Err(Fault::new(key, expected.to_string(), self.metadata.describe(key)).at(self.file.path()))
    }

    /// Checks that `key`, if it is there, is `found`, the number of `what`.
    fn expect_or_absent(&self, key: &str, found: i64, what: &str) -> Result<(), WeightsError> {
        match self.number(key) {
            Some(expected) if expected != found => {
                let fault = Fault::new(format!("{key} ({what})"), expected.to_string(), found.to_string());
                Err(fault.at(self.file.path()))
            }
            _ => Ok(()),
        }
    }
}

/// `<prefix>-00002-of-00003.gguf`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PartName {
    folder: PathBuf,
    prefix: String,
    pub count: u32,
}

impl PartName {
    /// Reads a name; `None` when it is not that of a part. Which part it is does not matter.
    pub fn parse(path: &Path) -> Option<Self> {
        let name = path.file_name()?.to_str()?;
        let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
        let (prefix, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| {
            (text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit())).then(|| text.parse().ok()).flatten()
        };
        let (number, count): (u32, u32) = (digits(number)?, digits(count)?);
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        (1..=count).contains(&number).then(|| Self { folder, prefix: prefix.to_owned(), count })
    }

    /// The path of part `index`, from 0.
    pub fn path(&self, index: u32) -> PathBuf {
        self.folder.join(format!("{}-{:05}-of-{:05}.gguf", self.prefix, index + 1, self.count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts() {
        let name = PartName::parse(Path::new("dir/a-b-00002-of-00003.gguf")).unwrap();
        assert_eq!((name.prefix.as_str(), name.count), ("a-b", 3));
        assert_eq!(name.path(0), Path::new("dir/a-b-00001-of-00003.gguf"));
        for other in [
            "a.gguf",
            "a-00004-of-00003.gguf",
            "a-00000-of-00003.gguf",
            "a-2-of-3.gguf",
            "a-00001-of-00003.bin",
        ] {
            assert_eq!(PartName::parse(Path::new(other)), None, "{other}");
        }
    }
}
