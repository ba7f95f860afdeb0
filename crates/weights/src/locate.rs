//! Decides what the path that the user named is.

use crate::error::{Fault, WeightsError};
use crate::files::Opened;
use crate::gguf::split::PartName;
use crate::{gguf, hf};
use lockstep_core::files;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

const NEITHER: &str =
    "is neither a folder nor a GGUF file; name a folder in Hugging Face layout or a .gguf file";

/// Ends of the names of weights that can run code when they are opened.
const PICKLES: [&str; 3] = ["bin", "pt", "pth"];
/// Ends of the names of all weight files.
const WEIGHTS: [&str; 5] = ["safetensors", "gguf", PICKLES[0], PICKLES[1], PICKLES[2]];

/// Opens a folder in Hugging Face layout, a GGUF file, or a folder with exactly one GGUF file, which
/// may be in parts.
pub(crate) fn open(path: &Path) -> Result<Opened, WeightsError> {
    if path.is_dir() { open_folder(path) } else { open_file(path) }
}

/// Whether a folder holds weights in any form, one that is not read included, or a list of them; without any it can
/// only be described.
pub fn holds_weights(folder: &Path) -> Result<bool, WeightsError> {
    let is_weights = |name: &PathBuf| WEIGHTS.iter().any(|extension| has_extension(name, extension));
    Ok(hf::has_weights(folder) || names_in(folder)?.iter().any(is_weights))
}

/// What stands in a folder, ascending.
fn names_in(folder: &Path) -> Result<Vec<PathBuf>, WeightsError> {
    let failed = |source| WeightsError::io(folder, source);
    let entries = fs::read_dir(folder).map_err(failed)?;
    let names = entries.map(|entry| Ok(PathBuf::from(entry.map_err(failed)?.file_name())));
    let mut names = names.collect::<Result<Vec<_>, WeightsError>>()?;
    names.sort();
    Ok(names)
}

fn open_file(path: &Path) -> Result<Opened, WeightsError> {
    let mut head = Vec::new();
    let file = files::open(path)?;
    file.take(256).read_to_end(&mut head).map_err(|source| WeightsError::io(path, source))?;
    refuse_stand_in(&head).map_err(|fault| fault.at(path))?;
    if head.starts_with(gguf::header::MAGIC) || has_extension(path, "gguf") {
        return gguf::open::open(path);
    }
    let reason = if has_extension(path, "safetensors") {
        "is a single weight file; name the folder that holds it with its config.json"
    } else {
        NEITHER
    };
    Err(WeightsError::NotAModel { path: path.to_owned(), reason: reason.into() })
}

fn open_folder(folder: &Path) -> Result<Opened, WeightsError> {
    if hf::has_weights(folder) {
        return hf::open(folder);
    }
    let names = names_in(folder)?;
    let with = |extensions: &[&str]| -> Vec<String> {
        let matching = names.iter().filter(|n| extensions.iter().any(|e| has_extension(n, e)));
        matching.map(|n| n.display().to_string()).collect()
    };
    let gguf_files = with(&["gguf"]);
    let paths: Vec<PathBuf> = gguf_files.iter().map(|name| folder.join(name)).collect();
    if let Some(name) = paths.first().and_then(|path| PartName::parse(path))
        && paths.iter().all(|path| PartName::parse(path).as_ref() == Some(&name))
    {
        // Any part will do; a missing one is reported by its name.
        return open_file(&paths[0]);
    }
    let reason = match (gguf_files.len(), with(&["safetensors"]), with(&PICKLES)) {
        (1, _, _) => {
            let only = names.iter().find(|n| has_extension(n, "gguf")).expect("invariant: one was counted");
            return open_file(&folder.join(only));
        }
        (0, safetensors, _) if !safetensors.is_empty() => format!(
            "holds {}, but neither {} nor {}; add the index, or download the model again",
            safetensors.join(", "),
            hf::SINGLE,
            hf::INDEX
        ),
        (0, _, pickles) if !pickles.is_empty() => format!(
            "holds its weights only as {}, which can run code when opened and is not read; use a safetensors \
             or GGUF version of the model",
            pickles.join(", ")
        ),
        (0, _, _) => format!(
            "holds no weights; expected {}, {} or one .gguf file: name another folder, or download the model again",
            hf::SINGLE,
            hf::INDEX
        ),
        (n, _, _) => format!("holds {n} GGUF files ({}); name the one to load", gguf_files.join(", ")),
    };
    Err(WeightsError::NotAModel { path: folder.to_owned(), reason })
}

/// Refuses what downloads leave instead of a model's file: git-lfs pointers and web pages.
pub(crate) fn refuse_stand_in(head: &[u8]) -> Result<(), Fault> {
    let head = &head[..head.len().min(256)];
    if head.starts_with(b"version https://git-lfs") {
        let text = String::from_utf8_lossy(head);
        let size = text.lines().find_map(|line| line.strip_prefix("size ")).unwrap_or("unknown");
        let expected = format!("the file itself ({size} bytes)");
        return Err(Fault::new("content", expected, "a git-lfs pointer (run `git lfs pull` in a clone)"));
    }
    if head.trim_ascii_start().starts_with(b"<") {
        let start = String::from_utf8_lossy(&head[..head.len().min(16)]);
        return Err(Fault::new("content", "the file itself", format!("a web page or XML: {start:?}")));
    }
    Ok(())
}

fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case(extension))
}
