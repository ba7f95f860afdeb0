//! Shared libraries that are looked for when the program runs: the CUDA driver, NVRTC, cuBLASLt, NCCL.
//!
//! The program builds and starts on machines that have none of them. **Invariant:** a library that was
//! opened stays open until the process ends, so a function that was found stays valid.
//!
//! Where [`Library::open`] looks, in this order: the folders of `$LOCKSTEP_CUDA_LIBS` (separated by
//! colons), `$CUDA_HOME`, `/usr/local/cuda*`, the system's own search path, and the `nvidia` packages of
//! the `python3` on the PATH (which is asked once, and only when nothing else was found).

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Names the folders to search before all others, separated by colons.
pub const FOLDERS_VARIABLE: &str = "LOCKSTEP_CUDA_LIBS";

/// Why a library cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LibraryError {
    /// It is nowhere, or nothing that was found could be opened.
    #[error("cannot open {name}: {problem}; {hint}")]
    NotFound {
        /// File name.
        name: String,
        /// What the loader said last.
        problem: String,
        /// What to install or set.
        hint: String,
    },
    /// It is too old.
    #[error("{path} has no function {function}; it is older than this program needs")]
    NoFunction {
        /// File.
        path: String,
        /// Name of the function.
        function: String,
    },
}

/// An open library.
#[derive(Clone, Debug)]
pub struct Library {
    handle: *mut c_void,
    path: String,
}

impl Library {
    /// Opens the first of `names` that is found; `hint` says what a user can do if none is.
    pub fn open(names: &[&str], hint: &str) -> Result<Self, LibraryError> {
        let mut problem = String::from("there is no such file in any folder searched");
        for name in names {
            for path in near_folders().iter().map(|folder| folder.join(name)).filter(|path| path.is_file()) {
                match Self::open_path(&path) {
                    Ok(library) => return Ok(library),
                    Err(reason) => problem = reason,
                }
            }
            if let Ok(library) = Self::open_path(Path::new(name)) {
                return Ok(library);
            }
        }
        for name in names {
            for path in python_folders().iter().map(|folder| folder.join(name)).filter(|path| path.is_file())
            {
                match Self::open_path(&path) {
                    Ok(library) => return Ok(library),
                    Err(reason) => problem = reason,
                }
            }
        }
        let name = names.first().copied().unwrap_or_default().to_owned();
        Err(LibraryError::NotFound { name, problem, hint: hint.to_owned() })
    }

    /// Opens one file, or a bare name by the system's search path. Errors with the loader's words.
    pub fn open_path(path: &Path) -> Result<Self, String> {
        let name = CString::new(path.as_os_str().as_encoded_bytes()).map_err(|e| e.to_string())?;
        // Global, because libraries of one package look each other's symbols and names up.
        // SAFETY: `name` is a C string; the initialisers that run are those of the library the user has.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_LAZY | libc::RTLD_GLOBAL) };
        if handle.is_null() {
            // SAFETY: dlerror gives a C string or null, valid until the next call on this thread.
            let reason = unsafe { libc::dlerror() };
            if reason.is_null() {
                return Err("the loader gave no reason".into());
            }
            // SAFETY: not null, see above.
            return Err(unsafe { CStr::from_ptr(reason) }.to_string_lossy().into_owned());
        }
        Ok(Self { handle, path: path.display().to_string() })
    }

    /// The file, or the bare name it was found by.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// The file that was loaded; [`Self::path`] where the loader does not tell.
    pub fn file(&self) -> String {
        /// The beginning of glibc's `struct link_map`.
        #[repr(C)]
        struct LinkMap {
            address: usize,
            name: *const c_char,
        }
        let mut map: *const LinkMap = std::ptr::null();
        // SAFETY: the handle is open for ever; this request writes a pointer to the handle's link map.
        let code = unsafe { libc::dlinfo(self.handle, libc::RTLD_DI_LINKMAP, (&raw mut map).cast()) };
        if code != 0 || map.is_null() {
            return self.path.clone();
        }
        // SAFETY: link maps live as long as their library and begin so; the name ends with a zero.
        unsafe { CStr::from_ptr((*map).name) }.to_string_lossy().into_owned()
    }

    /// A function by its name.
    pub fn function(&self, name: &CStr) -> Result<*mut c_void, LibraryError> {
        // SAFETY: the handle is open for ever, `name` is a C string.
        let found = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        if found.is_null() {
            let function = name.to_string_lossy().into_owned();
            return Err(LibraryError::NoFunction { path: self.path.clone(), function });
        }
        Ok(found)
    }
}

/// Folders that come before the system's own search.
fn near_folders() -> Vec<PathBuf> {
    let mut folders: Vec<PathBuf> = Vec::new();
    if let Some(listed) = std::env::var_os(FOLDERS_VARIABLE) {
        folders.extend(std::env::split_paths(&listed));
    }
    let mut toolkits: Vec<PathBuf> = std::env::var_os("CUDA_HOME").map(PathBuf::from).into_iter().collect();
    let installed = std::fs::read_dir("/usr/local").into_iter().flatten().flatten().map(|entry| entry.path());
    let is_toolkit =
        |path: &PathBuf| path.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(b"cuda"));
    toolkits.extend(installed.filter(is_toolkit));
    folders.extend(toolkits.iter().flat_map(|toolkit| [toolkit.join("lib64"), toolkit.join("lib")]));
    folders
}

/// `site-packages/nvidia/*/lib` of the `python3` on the PATH.
fn python_folders() -> &'static [PathBuf] {
    static FOLDERS: OnceLock<Vec<PathBuf>> = OnceLock::new();
    FOLDERS.get_or_init(|| {
        let program = "import sys; print('\\n'.join(p for p in sys.path if p.endswith('-packages')))";
        let output = std::process::Command::new("python3").args(["-c", program]).output();
        let text = output.map(|o| String::from_utf8_lossy(&o.stdout).into_owned()).unwrap_or_default();
        let packages = text.lines().map(|line| Path::new(line).join("nvidia"));
        let parts = packages.flat_map(|folder| std::fs::read_dir(folder).into_iter().flatten().flatten());
        let mut folders: Vec<PathBuf> =
            parts.map(|part| part.path().join("lib")).filter(|f| f.is_dir()).collect();
        folders.sort();
        folders
    })
}

/// Declares a table of C functions that return an `int` status, loaded from a [`Library`] by name.
///
/// The caller of each function answers for what the library's documentation asks.
#[macro_export]
macro_rules! function_table {
    ($(#[$meta:meta])* $name:ident { $($function:ident = $symbol:literal ($($type:ty),* $(,)?);)* }) => {
        $(#[$meta])*
        pub(crate) struct $name {
            $(pub(crate) $function: unsafe extern "C" fn($($type),*) -> std::ffi::c_int,)*
        }

        impl $name {
            /// Finds every function; errors with the first that is missing.
            pub(crate) fn load(
                library: &$crate::library::Library,
            ) -> std::result::Result<Self, $crate::library::LibraryError> {
                Ok(Self {
                    $($function: {
                        let found = library.function($symbol)?;
                        // SAFETY: the library's headers declare this function with these types, and the
                        // library stays open.
                        unsafe {
                            std::mem::transmute::<
                                *mut std::ffi::c_void,
                                unsafe extern "C" fn($($type),*) -> std::ffi::c_int,
                            >(found)
                        }
                    },)*
                })
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_is_one_sentence_with_the_hint() {
        let error = Library::open(&["libdoes-not-exist.so.7"], "install the package nothing").unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("libdoes-not-exist.so.7") && text.ends_with("install the package nothing"),
            "{text}"
        );
        assert!(!text.contains('\n'), "{text}");
    }

    #[test]
    fn functions_are_found_by_name() {
        let library = Library::open(&["libc.so.6"], "this is Linux").unwrap();
        assert!(library.function(c"getpid").is_ok());
        assert!(Path::new(&library.file()).is_absolute() && library.file().ends_with("/libc.so.6"));
        let error = library.function(c"no_such_function_here").unwrap_err().to_string();
        assert!(error.contains("no_such_function_here"), "{error}");
    }
}
