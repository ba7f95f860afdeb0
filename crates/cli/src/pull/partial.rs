//! The file being fetched.
//!
//! **Invariant:** `<file>.partial` is always a prefix of what its sources say the file is, and the
//! running hash covers exactly its bytes; so any source can continue what another began. It becomes
//! the file only by [`Partial::install`], after size and hash are as expected.

use super::catalogue::Part;
use super::checksum::{Expected, Hasher, hex};
use super::error::PullError;
use sha2::{Digest, Sha256};
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, Write};
use std::path::{Path, PathBuf};

/// Bytes read or written at once.
pub const CHUNK_BYTES: usize = 256 << 10;

/// A growing file with the hash of its content.
pub struct Partial {
    path: PathBuf,
    file: File,
    len: u64,
    hash: Hasher,
    expected: Expected,
}

impl Partial {
    /// Opens `path`, creating it when absent, and hashes what is there.
    pub fn open(path: &Path, expected: Expected) -> Result<Self, PullError> {
        let file = OpenOptions::new().read(true).append(true).create(true).open(path);
        let file = file.map_err(PullError::cache("open", path))?;
        let hash = Hasher::new(&expected);
        let mut partial = Self { path: path.to_owned(), file, len: 0, hash, expected };
        let hash = &mut partial.hash;
        let len = each_chunk::<io::Error>(&mut partial.file, |bytes| {
            hash.update(bytes);
            Ok(())
        });
        partial.len = len.map_err(PullError::cache("read", path))?;
        Ok(partial)
    }

    /// Bytes of the whole file.
    pub fn size_bytes(&self) -> u64 {
        self.expected.size_bytes
    }

    /// Bytes so far.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Adds bytes at the end.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), PullError> {
        let path = &self.path;
        self.file.write_all(bytes).map_err(PullError::cache("write", path))?;
        self.hash.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Forgets everything.
    pub fn clear(&mut self) -> Result<(), PullError> {
        self.reset_to(0, Hasher::new(&self.expected))
    }

    /// How many of `parts` are here, whole and right.
    pub fn whole_parts(&self, parts: &[Part]) -> Result<WholeParts, PullError> {
        let mut whole = WholeParts { count: 0, len: 0, hash: Hasher::new(&self.expected) };
        let mut file = &self.file;
        file.rewind().map_err(PullError::cache("read", &self.path))?;
        for part in parts {
            let (mut prefix_hash, mut part_hash) = (whole.hash.clone(), Sha256::new());
            let len = each_chunk::<io::Error>(&mut (&mut file).take(part.size_bytes), |bytes| {
                prefix_hash.update(bytes);
                part_hash.update(bytes);
                Ok(())
            });
            let len = len.map_err(PullError::cache("read", &self.path))?;
            if len < part.size_bytes || hex(part_hash) != part.sha256 {
                break;
            }
            whole = WholeParts { count: whole.count + 1, len: whole.len + len, hash: prefix_hash };
        }
        Ok(whole)
    }

    /// Forgets everything after `whole`.
    pub fn keep(&mut self, whole: WholeParts) -> Result<(), PullError> {
        self.reset_to(whole.len, whole.hash)
    }

    /// Checks size and hash and renames to `target`; removes the file when they differ. `from` is for
    /// the message.
    pub fn install(self, target: &Path, from: &str) -> Result<(), PullError> {
        let Expected { size_bytes, checksum } = self.expected;
        let got = self.hash.finish();
        if self.len != size_bytes || got != checksum.digits() {
            std::fs::remove_file(&self.path).map_err(PullError::cache("remove", &self.path))?;
            return Err(if self.len != size_bytes {
                PullError::WrongSize { from: from.into(), got: self.len, expected: size_bytes }
            } else {
                PullError::WrongHash {
                    from: from.into(),
                    kind: checksum.kind(),
                    got,
                    expected: checksum.digits().into(),
                }
            });
        }
        self.file.sync_all().map_err(PullError::cache("write", &self.path))?;
        std::fs::rename(&self.path, target).map_err(PullError::cache("rename", &self.path))
    }

    fn reset_to(&mut self, len: u64, hash: Hasher) -> Result<(), PullError> {
        let path = &self.path;
        self.file.set_len(len).map_err(PullError::cache("write", path))?;
        (self.len, self.hash) = (len, hash);
        Ok(())
    }
}

/// A prefix of a [`Partial`] that consists of whole parts.
pub struct WholeParts {
    /// How many.
    pub count: usize,
    len: u64,
    hash: Hasher,
}

/// Hands out everything `reader` has left; how much it was.
pub fn each_chunk<E: From<io::Error>>(
    reader: &mut impl Read,
    mut take: impl FnMut(&[u8]) -> Result<(), E>,
) -> Result<u64, E> {
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut len = 0;
    loop {
        match reader.read(&mut buffer) {
            Ok(0) => return Ok(len),
            Ok(n) => {
                take(&buffer[..n])?;
                len += n as u64;
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e.into()),
        }
    }
}
