//! A model of the hub: from a cache if it is there, else from the hub.

use super::error::PullError;
use super::hf_cache;
use super::hub::HubOptions;
use super::id::HubId;
use super::listing::Listing;
use super::progress::Progress;
use super::select::What;
use super::snapshot::Repository;
use std::path::{Path, PathBuf};

/// Where models of the hub may be.
pub struct Places {
    /// Lockstep's cache.
    pub cache_dir: PathBuf,
    /// The user's Hugging Face cache.
    pub hf_cache: Option<PathBuf>,
    /// The hub.
    pub hub: HubOptions,
}

impl Places {
    /// The user's, as the environment says.
    pub fn from_environment(cache_dir: &Path) -> Self {
        Self {
            cache_dir: cache_dir.to_owned(),
            hf_cache: hf_cache::root(|name| std::env::var_os(name)),
            hub: HubOptions::from_environment(),
        }
    }
}

/// The path of `what`. No request is made when a cache has it: a branch then means what it was when it
/// was fetched.
pub fn obtain(
    id: &HubId,
    what: &What,
    places: &Places,
    progress: &mut dyn Progress,
) -> Result<PathBuf, PullError> {
    let repository = Repository::new(id, &places.cache_dir, &places.hub);
    // A whole model has its description too.
    let whole = (*what == What::Config).then(|| repository.find(&What::Whole, None)).flatten();
    let here = whole.or_else(|| repository.find(what, None));
    match here.or_else(|| find_in_hf_cache(id, what, places, None, progress)) {
        Some(path) => Ok(path),
        None => update(id, what, places, progress),
    }
}

/// The path of `what` as the hub has it now.
pub fn update(
    id: &HubId,
    what: &What,
    places: &Places,
    progress: &mut dyn Progress,
) -> Result<PathBuf, PullError> {
    if places.hub.offline {
        return Err(PullError::Offline { id: id.to_string() });
    }
    let listing = Listing::fetch(&places.hub, id, progress)?;
    if let Some(path) = find_in_hf_cache(id, what, places, Some(&listing.commit), progress) {
        return Ok(path);
    }
    Repository::new(id, &places.cache_dir, &places.hub).fetch(what, &listing, progress)
}

fn find_in_hf_cache(
    id: &HubId,
    what: &What,
    places: &Places,
    commit: Option<&str>,
    progress: &mut dyn Progress,
) -> Option<PathBuf> {
    let path = hf_cache::find(places.hf_cache.as_deref()?, id, what, commit)?;
    progress.note(&format!("using {id} in the Hugging Face cache, {}", path.display()));
    Some(path)
}
