//! Opening files that a user or a model names: the one place that decides what counts as a file.
//!
//! A pipe that nobody writes to would be waited for, `/dev/zero` has no end, and a folder or a socket is a slip of the
//! pen: only regular files are opened, after symlinks, and those that are read whole have a limit.
//!
//! **Invariant:** nothing here waits for another process, and nothing is read beyond the limit, whatever the file
//! claims to be or becomes meanwhile.

use std::fs::{self, File, FileType, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The system refused to find, open or read it.
    #[error("cannot read {}: {source}; check the path and its permissions", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's answer.
        source: io::Error,
    },
    /// Something else of that name.
    #[error("{} is {found}, not a regular file; put the file itself there, or name another", path.display())]
    NotRegular {
        /// As named; a symlink leads to what was found.
        path: PathBuf,
        /// What it is.
        found: &'static str,
    },
    /// Larger than any real one.
    #[error("{} has {got} bytes, of which at most {limit} would be read; check that it is the right file", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// Its bytes, as far as they were counted.
        got: u64,
        /// Most bytes that are read.
        limit: u64,
    },
    /// Bytes where text is needed.
    #[error("{} is not a text file: {source}; write it in UTF-8", path.display())]
    NotText {
        /// The file.
        path: PathBuf,
        /// Where the first wrong byte is.
        source: std::str::Utf8Error,
    },
}

impl FileError {
    /// Whether there is nothing of that name.
    pub fn is_missing(&self) -> bool {
        matches!(self, Self::Io { source, .. } if source.kind() == io::ErrorKind::NotFound)
    }
}

/// Opens a regular file for reading; never waits.
pub fn open(path: &Path) -> Result<File, FileError> {
    let failed = |source| FileError::Io { path: path.to_owned(), source };
    // Before it is opened: opening a device can have effects.
    expect_regular(path, fs::metadata(path).map_err(failed)?.file_type())?;
    // Should another take its place in between, that is not waited for either.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path).map_err(failed)?;
    expect_regular(path, file.metadata().map_err(failed)?.file_type())?;
    Ok(file)
}

/// The whole of a regular file of at most `limit` bytes.
pub fn read(path: &Path, limit: u64) -> Result<Vec<u8>, FileError> {
    let failed = |source| FileError::Io { path: path.to_owned(), source };
    let file = open(path)?;
    let too_large = |got: u64| FileError::TooLarge { path: path.to_owned(), got, limit };
    let len = file.metadata().map_err(failed)?.len();
    if len > limit {
        return Err(too_large(len));
    }
    let mut bytes = Vec::with_capacity(len as usize);
    // Files of /proc say that they are empty, and others may grow.
    file.take(limit + 1).read_to_end(&mut bytes).map_err(failed)?;
    match bytes.len() as u64 {
        got if got > limit => Err(too_large(got)),
        _ => Ok(bytes),
    }
}

/// The same as text.
pub fn read_text(path: &Path, limit: u64) -> Result<String, FileError> {
    String::from_utf8(read(path, limit)?)
        .map_err(|e| FileError::NotText { path: path.to_owned(), source: e.utf8_error() })
}

fn expect_regular(path: &Path, kind: FileType) -> Result<(), FileError> {
    let found = match kind {
        kind if kind.is_file() => return Ok(()),
        kind if kind.is_dir() => "a folder",
        kind if kind.is_fifo() => "a named pipe",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    };
    Err(FileError::NotRegular { path: path.to_owned(), found })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CString;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::net::UnixListener;

    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("lockstep-files-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn what_is_no_file_is_named_and_never_waited_for() {
        let folder = Folder::new("kinds");
        let pipe = folder.0.join("pipe");
        let name = CString::new(pipe.as_os_str().as_bytes()).unwrap();
        // SAFETY: a valid, terminated path.
        assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
        let socket = folder.0.join("socket");
        let _listener = UnixListener::bind(&socket).unwrap();
        let link = folder.0.join("link");
        std::os::unix::fs::symlink(&pipe, &link).unwrap();
        for (path, kind) in [
            (pipe.as_path(), "is a named pipe"),
            (&link, "is a named pipe"),
            (&socket, "is a socket"),
            (&folder.0, "is a folder"),
            (Path::new("/dev/zero"), "is a device"),
            (Path::new("/dev/null"), "is a device"),
        ] {
            let message = read(path, 10).unwrap_err().to_string();
            assert!(message.contains(kind) && message.contains(&path.display().to_string()), "{message}");
        }
        let gone = open(&folder.0.join("gone")).unwrap_err();
        assert!(gone.is_missing() && gone.to_string().contains("check the path"), "{gone}");
        assert!(!read(&pipe, 10).unwrap_err().is_missing());
    }

    #[test]
    fn a_limit_holds_whatever_the_file_claims() {
        let folder = Folder::new("limit");
        let file = folder.0.join("file");
        fs::write(&file, "12345").unwrap();
        assert_eq!(read_text(&file, 5).unwrap(), "12345");
        let message = read(&file, 4).unwrap_err().to_string();
        assert!(message.contains("has 5 bytes, of which at most 4"), "{message}");
        // Says that it is empty.
        assert!(matches!(read(Path::new("/proc/self/status"), 10), Err(FileError::TooLarge { got: 11, .. })));
        fs::write(&file, b"ok\xff").unwrap();
        assert!(read_text(&file, 5).unwrap_err().to_string().contains("is not a text file"));
    }
}
