//! Models that other tools have put into the user's Hugging Face cache. Only ever read.
//!
//! Layout, as `huggingface_hub` documents it: `models--org--name/refs/<revision>` holds a commit,
//! `models--org--name/snapshots/<commit>/` the files, as links into `blobs/`. **Invariant:** a link is
//! made only when its file is complete, so a file that is there is whole; whether all files are there is
//! checked here, since tools may fetch only some.

use super::id::{HubId, is_commit};
use super::select::{self, INDEX, What};
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::{Path, PathBuf};

/// Where that cache is: `HF_HUB_CACHE`, else `hub` in `HF_HOME`, else in the user's cache folder. `get`
/// looks into the environment.
pub fn root(get: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let variable = |name| get(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable("HF_HUB_CACHE")
        .or_else(|| variable("HF_HOME").map(|folder| folder.join("hub")))
        .or_else(|| variable("XDG_CACHE_HOME").map(|folder| folder.join("huggingface/hub")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/huggingface/hub")))
}

/// The path of `what` in the snapshot of `commit`, else of what `id`'s revision was when it was fetched;
/// `None` when any file is missing.
pub fn find(root: &Path, id: &HubId, what: &What, commit: Option<&str>) -> Option<PathBuf> {
    let repository = root.join(format!("models--{}", id.folder_name()));
    let commit = match commit {
        Some(commit) => commit.to_owned(),
        None if id.is_pinned() => id.revision().to_owned(),
        None => std::fs::read_to_string(repository.join("refs").join(id.revision())).ok()?.trim().to_owned(),
    };
    if !is_commit(&commit) {
        return None;
    }
    let snapshot = repository.join("snapshots").join(commit);
    let has = |name: &str| snapshot.join(name).is_file();
    let is_whole = match what {
        What::Gguf(parts) => parts.iter().all(|part| has(part)),
        What::Whole | What::Config => has_whole_model(id, &snapshot),
    };
    is_whole.then(|| what.path_in(&snapshot))
}

fn has_whole_model(id: &HubId, snapshot: &Path) -> bool {
    let Ok(entries) = std::fs::read_dir(snapshot) else { return false };
    let names: Vec<String> = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).collect();
    let has = |name: &str| snapshot.join(name).is_file();
    let names: BTreeSet<&str> = names.iter().map(String::as_str).filter(|name| has(name)).collect();
    let indexed = || {
        let index = std::fs::read(snapshot.join(INDEX)).ok()?;
        select::shards(&index).ok().map(|shards| shards.iter().all(|shard| has(shard)))
    };
    select::check(id, &What::Whole, &names).is_ok() && (!names.contains(INDEX) || indexed().unwrap_or(false))
}
