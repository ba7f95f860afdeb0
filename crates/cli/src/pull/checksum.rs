//! What a file must be: its size and the hash that its publisher gives for it.
//!
//! The catalogue pins SHA-256. The hub gives SHA-256 for files it keeps in large-file storage, and for
//! the others git's own name of the content: SHA-1 over `blob <size>`, a zero byte and the content.
//! The latter protects against damage and mix-ups, not against someone who can make SHA-1 collide.

use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::fmt::Write as _;

/// Size and hash of a file that is not here yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expected {
    /// Bytes of the whole file.
    pub size_bytes: u64,
    /// Hash of the whole file.
    pub checksum: Checksum,
}

/// A hash in lower-case hexadecimal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// SHA-256 of the content.
    Sha256(String),
    /// Git's name of the content.
    GitBlob(String),
}

impl Checksum {
    /// The digits.
    pub fn digits(&self) -> &str {
        match self {
            Checksum::Sha256(digits) | Checksum::GitBlob(digits) => digits,
        }
    }

    /// What kind of hash, for messages.
    pub fn kind(&self) -> &'static str {
        match self {
            Checksum::Sha256(_) => "sha256",
            Checksum::GitBlob(_) => "git hash",
        }
    }
}

/// A running hash of the kind that some [`Expected`] has.
#[derive(Clone)]
pub enum Hasher {
    /// Of the content.
    Sha256(Sha256),
    /// Of git's header and the content.
    GitBlob(Sha1),
}

impl Hasher {
    /// The hash of no content.
    pub fn new(expected: &Expected) -> Self {
        match expected.checksum {
            Checksum::Sha256(_) => Hasher::Sha256(Sha256::new()),
            Checksum::GitBlob(_) => {
                let header = format!("blob {}\0", expected.size_bytes);
                Hasher::GitBlob(Sha1::new_with_prefix(header))
            }
        }
    }

    /// More content.
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(hash) => hash.update(bytes),
            Hasher::GitBlob(hash) => hash.update(bytes),
        }
    }

    /// Its digits.
    pub fn finish(self) -> String {
        match self {
            Hasher::Sha256(hash) => hex(hash),
            Hasher::GitBlob(hash) => hex(hash),
        }
    }
}

/// Lower-case hexadecimal digits of a finished hash.
pub fn hex(hash: impl Digest) -> String {
    hash.finalize().iter().fold(String::with_capacity(64), |mut text, byte| {
        write!(text, "{byte:02x}").expect("invariant: a String takes everything");
        text
    })
}

/// Whether `text` consists of `digits` lower-case hexadecimal digits.
pub fn is_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(checksum: Checksum, content: &[u8]) -> String {
        let mut hasher = Hasher::new(&Expected { size_bytes: content.len() as u64, checksum });
        content.chunks(3).for_each(|bytes| hasher.update(bytes));
        hasher.finish()
    }

    #[test]
    fn known_hashes() {
        // As `sha256sum` and `git hash-object` print them.
        assert_eq!(
            hash(Checksum::Sha256(String::new()), b"hello\n"),
            "5891b5b522d5df086d0ff0b110fbd9d21bb4fc7163af34d08286a2e846f6be03"
        );
        let git = |content| hash(Checksum::GitBlob(String::new()), content);
        assert_eq!(git(b"hello\n"), "ce013625030ba8dba906f756967f9e9ca394464a");
        assert_eq!(git(b""), "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391");
        assert!(is_hex(&git(b""), 40) && !is_hex("E6", 2) && !is_hex("e6", 3));
    }
}
