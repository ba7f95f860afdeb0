//! Files in the cache: locks, marks of what has been verified, room on the disk.

use super::checksum::{Expected, Hasher};
use super::error::PullError;
use super::partial::each_chunk;
use super::progress::Progress;
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

/// Held until dropped; waits for another process that has it. `what` is being fetched.
pub fn lock(path: &Path, what: &str, progress: &mut dyn Progress) -> Result<File, PullError> {
    let file = File::create(path).map_err(PullError::cache("create", path))?;
    match file.try_lock() {
        Ok(()) => return Ok(file),
        Err(TryLockError::WouldBlock) => {}
        Err(TryLockError::Error(error)) => return Err(PullError::cache("lock", path)(error)),
    }
    progress.note(&format!("another process is fetching {what}; waiting for it"));
    file.lock().map_err(PullError::cache("lock", path))?;
    Ok(file)
}

/// A full disk is better found before half an hour of downloading.
pub fn check_space(folder: &Path, needed_bytes: u64) -> Result<(), PullError> {
    let disk = rustix::fs::statvfs(folder).map_err(|e| PullError::cache("examine", folder)(e.into()))?;
    let free_bytes = disk.f_bavail.saturating_mul(disk.f_frsize);
    if free_bytes < needed_bytes {
        return Err(PullError::NoSpace { path: folder.to_owned(), needed_bytes, free_bytes });
    }
    Ok(())
}

/// A file that nobody vouches for (copied by the user, or changed): kept when it is as expected, else
/// removed.
pub fn adopt(file: &Path, expected: &Expected, progress: &mut dyn Progress) -> Result<bool, PullError> {
    let mut opened = match File::open(file) {
        Ok(opened) => opened,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(PullError::cache("open", file)(e)),
    };
    let mut hash = Hasher::new(expected);
    each_chunk::<io::Error>(&mut opened, |bytes| {
        hash.update(bytes);
        Ok(())
    })
    .map_err(PullError::cache("read", file))?;
    if hash.finish() == expected.checksum.digits() {
        return Ok(true);
    }
    progress.note(&format!("{} is not the published file; fetching it again", file.display()));
    std::fs::remove_file(file).map_err(PullError::cache("remove", file))?;
    Ok(false)
}

/// Size and time of change, which show cheaply whether a file is still the one that was hashed.
pub fn stamp(file: &Path) -> io::Result<String> {
    let meta = std::fs::metadata(file)?;
    Ok(format!("{} {}.{:09}", meta.len(), meta.mtime(), meta.mtime_nsec()))
}

/// The files of a folder whose hashes were right, one line each: digits, [`stamp`], name.
pub struct Marks {
    path: PathBuf,
    /// Digits and stamp by name.
    lines: BTreeMap<String, (String, String)>,
}

impl Marks {
    /// Reads `path`; none when it cannot be read. What is cut or misspelt fits no file.
    pub fn load(path: PathBuf) -> Self {
        let text = std::fs::read_to_string(&path).unwrap_or_default();
        let lines = text.lines().filter_map(|line| {
            let mut words = line.splitn(4, ' ');
            let (digits, len, time) = (words.next()?, words.next()?, words.next()?);
            Some((words.next()?.to_owned(), (digits.to_owned(), format!("{len} {time}"))))
        });
        Self { lines: lines.collect(), path }
    }

    /// Whether there are marks and all of them fit the files of `folder`.
    pub fn all_fit(&self, folder: &Path) -> bool {
        !self.lines.is_empty() && self.lines.keys().all(|name| self.stamp_fits(folder, name))
    }

    /// Whether `name` in `folder` is as `expected`.
    pub fn fits(&self, folder: &Path, name: &str, expected: &Expected) -> bool {
        self.lines.get(name).is_some_and(|(digits, _)| digits == expected.checksum.digits())
            && self.stamp_fits(folder, name)
    }

    /// A file of `folder` with the content of `expected`.
    pub fn find(&self, folder: &Path, expected: &Expected) -> Option<PathBuf> {
        let name = self.lines.keys().find(|name| self.fits(folder, name, expected))?;
        Some(folder.join(name))
    }

    /// Vouches for `name` in `folder`.
    pub fn add(&mut self, folder: &Path, name: &str, expected: &Expected) -> Result<(), PullError> {
        let file = folder.join(name);
        let stamp = stamp(&file).map_err(PullError::cache("read", &file))?;
        let digits = expected.checksum.digits();
        let line = format!("{digits} {stamp} {name}\n");
        let marks = OpenOptions::new().append(true).create(true).open(&self.path);
        marks
            .and_then(|mut marks| marks.write_all(line.as_bytes()))
            .map_err(PullError::cache("write", &self.path))?;
        self.lines.insert(name.to_owned(), (digits.to_owned(), stamp));
        Ok(())
    }

    /// The hash and the name of each file, in order of their names.
    pub fn hashes(&self) -> impl Iterator<Item = (&str, &str)> {
        self.lines.iter().map(|(name, (digits, _))| (digits.as_str(), name.as_str()))
    }

    fn stamp_fits(&self, folder: &Path, name: &str) -> bool {
        let marked = self.lines.get(name).map(|(_, stamp)| stamp);
        stamp(&folder.join(name)).is_ok_and(|now| Some(&now) == marked)
    }
}

/// Removes a folder, if it is there.
pub fn remove_all(folder: &Path) -> Result<(), PullError> {
    match std::fs::remove_dir_all(folder) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(PullError::cache("remove", folder)(e)),
        _ => Ok(()),
    }
}

/// `path` with something added to its file name.
pub fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
