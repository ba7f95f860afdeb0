//! Where this program keeps what it has fetched or made: models below the cache folder itself, compiled kernels below
//! `kernels` in it.
//!
//! **Invariant:** one rule for every crate and test; the folder is only named, never made.

use std::ffi::OsString;
use std::path::PathBuf;

/// `$LOCKSTEP_CACHE`, else `lockstep` in the user's cache folder; `None` without either (a bare container).
pub fn cache_folder() -> Option<PathBuf> {
    cache_folder_of(|name| std::env::var_os(name))
}

/// The same, with the environment as an argument. An empty variable counts as none.
pub fn cache_folder_of(environment: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let folder = |name: &str| environment(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    folder("LOCKSTEP_CACHE")
        .or_else(|| folder("XDG_CACHE_HOME").map(|cache| cache.join("lockstep")))
        .or_else(|| folder("HOME").map(|home| home.join(".cache/lockstep")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn the_nearest_variable_that_is_not_empty_decides() {
        let all = [("LOCKSTEP_CACHE", "/a"), ("XDG_CACHE_HOME", "/b"), ("HOME", "/c")];
        let folders = ["/a", "/b/lockstep", "/c/.cache/lockstep"];
        for (first, folder) in folders.iter().enumerate() {
            for emptied in [None, Some(OsString::new())] {
                let environment = |name: &str| match all.iter().position(|(known, _)| *known == name)? {
                    at if at < first => emptied.clone(),
                    at => Some(all[at].1.into()),
                };
                assert_eq!(cache_folder_of(environment).as_deref(), Some(Path::new(folder)));
            }
        }
        assert_eq!(cache_folder_of(|_| None), None);
    }
}
