//! The folder of packed weights: names, who writes, and how much there may be.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Of all files together; those that were not used for longest are removed.
const FOLDER_BYTES_MAX: u64 = 64 << 30;
/// Share of a disk that stays free.
const FREE_SHARE: u64 = 20;
const SUFFIX: &str = "packed";
/// What is being written; whoever does holds its lock.
const PART_SUFFIX: &str = "part";

/// Where one rank's packed weights are.
pub(super) struct Folder {
    path: PathBuf,
    stem: String,
    bytes_max: u64,
}

impl Folder {
    pub fn new(path: PathBuf, name: &str, description: &str) -> Self {
        let stem = format!("{name}-{:08x}", crc32fast::hash(description.as_bytes()));
        Self { path, stem, bytes_max: FOLDER_BYTES_MAX }
    }

    /// With another limit.
    #[cfg(test)]
    pub fn with_bytes_max(self, bytes_max: u64) -> Self {
        Self { bytes_max, ..self }
    }

    /// The file; it may not be there.
    pub fn file(&self) -> PathBuf {
        self.path.join(format!("{}.{SUFFIX}", self.stem))
    }

    /// Lets `fill` write a file of about `bytes` bytes, which takes the place of what has its name once it is whole. False
    /// when another process is at it. Errors say what is in the way; nothing of the file stays then.
    pub fn write(&self, bytes: u64, fill: impl FnOnce(&File) -> io::Result<()>) -> Result<bool, String> {
        let shown = self.path.display();
        fs::create_dir_all(&self.path).map_err(|e| format!("cannot make the folder {shown}: {e}"))?;
        let Some((part, file)) = self.part().map_err(|e| format!("cannot write in {shown}: {e}"))? else {
            return Ok(false);
        };
        let result = self.make_room(bytes).and_then(|()| {
            let written = fill(&file).and_then(|()| fs::rename(&part, self.file()));
            written.map_err(|e| format!("cannot write {}: {e}", self.file().display()))
        });
        if result.is_err() {
            // Also after a failure of the disk: an empty name is better than half a file.
            let _ = fs::remove_file(&part);
        }
        result.map(|()| true)
    }

    /// The file to write, empty and locked; `None` when somebody else has it.
    fn part(&self) -> io::Result<Option<(PathBuf, File)>> {
        let path = self.path.join(format!("{}.{PART_SUFFIX}", self.stem));
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Ok(None),
            Err(TryLockError::Error(error)) => return Err(error),
        }
        // Between opening and locking the file may have got its final name, under which nobody changes it.
        if !is_at(&file, &path) {
            return Ok(None);
        }
        file.set_len(0)?;
        Ok(Some((path, file)))
    }

    /// Removes what others left unfinished, and the files that were not used for longest, as far as there have to be fewer.
    fn make_room(&self, bytes: u64) -> Result<(), String> {
        if bytes > self.bytes_max {
            return Err(format!("they have {bytes} bytes, more than the {} of all files", self.bytes_max));
        }
        let listed = files(&self.path).map_err(|e| format!("cannot list {}: {e}", self.path.display()))?;
        let mut others: Vec<Kept> = Vec::new();
        for file in listed {
            match file.path.extension().and_then(|extension| extension.to_str()) {
                Some(SUFFIX) if file.path != self.file() => others.push(file),
                Some(PART_SUFFIX) => remove_abandoned(&file.path),
                _ => {}
            }
        }
        others.sort_by_key(|file| file.used);
        let mut total: u64 = bytes + others.iter().map(|file| file.bytes).sum::<u64>();
        let mut others = others.into_iter();
        loop {
            let disk = rustix::fs::statvfs(&self.path);
            let disk =
                disk.map_err(|e| format!("cannot examine the disk of {}: {e}", self.path.display()))?;
            let (free, size) = (disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize);
            let fits = free >= bytes.saturating_add(size / FREE_SHARE);
            if total <= self.bytes_max && fits {
                return Ok(());
            }
            // Nothing is removed where that would not be enough.
            let could_fit = free + (total - bytes) >= bytes.saturating_add(size / FREE_SHARE);
            let Some(oldest) = others.next().filter(|_| fits || could_fit) else {
                return Err(format!(
                    "{bytes} bytes and a {FREE_SHARE}th of the disk to stay free do not fit beside what is in {}, \
                     where {free} bytes are free",
                    self.path.display()
                ));
            };
            fs::remove_file(&oldest.path)
                .map_err(|e| format!("cannot remove {}: {e}", oldest.path.display()))?;
            total -= oldest.bytes;
        }
    }
}

/// Whether the file still has this name.
fn is_at(file: &File, path: &Path) -> bool {
    let inode = |meta: io::Result<fs::Metadata>| meta.ok().map(|meta| meta.ino());
    inode(fs::metadata(path)).is_some_and(|there| inode(file.metadata()) == Some(there))
}

/// A file that is there.
struct Kept {
    path: PathBuf,
    bytes: u64,
    used: SystemTime,
}

fn files(folder: &Path) -> io::Result<Vec<Kept>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let meta = entry.metadata()?;
        if meta.is_file() {
            files.push(Kept { path: entry.path(), bytes: meta.len(), used: meta.modified()? });
        }
    }
    Ok(files)
}

/// Removes a file that nobody writes any more: the lock of a process goes with it.
fn remove_abandoned(part: &Path) {
    let Ok(file) = OpenOptions::new().write(true).open(part) else { return };
    if file.try_lock().is_ok() && is_at(&file, part) {
        let _ = fs::remove_file(part);
    }
}
