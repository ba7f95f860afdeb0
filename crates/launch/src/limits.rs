//! Limits of the process that the server needs raised.

use crate::LaunchError;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// File descriptors a process may hold; `None` means unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FdLimit {
    /// The soft limit before.
    pub before: Option<u64>,
    /// The soft limit now.
    pub now: Option<u64>,
}

/// Raises the soft limit of open files to the hard one; children inherit it. Call once at start.
///
/// Every connection takes a descriptor and the usual soft limit is 1024. Nothing in this program
/// uses `select`, the reason why the soft limit is low.
pub fn raise_fd_limit() -> Result<FdLimit, LaunchError> {
    let Rlimit { current: before, maximum } = getrlimit(Resource::Nofile);
    if before != maximum {
        setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum })
            .map_err(LaunchError::system("setrlimit(RLIMIT_NOFILE)"))?;
    }
    Ok(FdLimit { before, now: maximum })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn soft_becomes_hard() {
        let hard = getrlimit(Resource::Nofile).maximum;
        setrlimit(Resource::Nofile, Rlimit { current: Some(200), maximum: hard }).unwrap();
        assert_eq!(raise_fd_limit().unwrap(), FdLimit { before: Some(200), now: hard });
        assert_eq!(getrlimit(Resource::Nofile).current, hard);
        assert_eq!(raise_fd_limit().unwrap().before, hard);
    }
}
