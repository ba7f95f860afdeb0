//! Repositories of the hub in the cache.
//!
//! A repository has the folder `hub/<org>--<name>`, and in it, for each thing wanted of a commit, a
//! folder: `<commit>` for the model, `<commit>-config`, `<commit>-<file>` for a GGUF file. Beside it are
//! `<folder>.partial` while fetching, `<folder>.verified` with the [`Marks`] of its files, and
//! `<folder>.lock`. `refs/<revision>` says which commit a revision was when it was last asked for.
//! **Invariants:** `<folder>` has all its files, each verified: it is `<folder>.partial` renamed; what is
//! already here, in part or under another commit, is not fetched again.

use super::checksum::Expected;
use super::error::PullError;
use super::hub::{self, HubOptions};
use super::id::{HubId, is_commit};
use super::listing::{self, Listing};
use super::partial::Partial;
use super::progress::{Progress, Within};
use super::select::{self, CONFIG, INDEX, SINGLE, What};
use super::store::{self, Marks, with_suffix};
use std::path::{Path, PathBuf};

/// One repository in the cache.
pub struct Repository<'a> {
    id: &'a HubId,
    options: &'a HubOptions,
    folder: PathBuf,
}

impl<'a> Repository<'a> {
    /// The place of `id` in the cache, which may not exist.
    pub fn new(id: &'a HubId, cache_dir: &Path, options: &'a HubOptions) -> Self {
        Self { id, options, folder: cache_dir.join("hub").join(id.folder_name()) }
    }

    /// The path of `what`, if all of it is here and unchanged; without the network.
    pub fn find(&self, what: &What, commit: Option<&str>) -> Option<PathBuf> {
        let commit = match commit {
            Some(commit) => commit.to_owned(),
            None if self.id.is_pinned() => self.id.revision().to_owned(),
            None => std::fs::read_to_string(self.ref_path()).ok().filter(|commit| is_commit(commit))?,
        };
        let folder = self.folder_of(what, &commit);
        let marks = Marks::load(with_suffix(&folder, ".verified"));
        (folder.is_dir() && marks.all_fit(&folder)).then(|| what.path_in(&folder))
    }

    /// Fetches what is missing of `what` as `listing` describes it, and returns its path.
    pub fn fetch(
        &self,
        what: &What,
        listing: &Listing,
        progress: &mut dyn Progress,
    ) -> Result<PathBuf, PullError> {
        select::check(self.id, what, &listing.names()).map_err(|reason| self.layout(reason))?;
        let folder = self.folder_of(what, &listing.commit);
        std::fs::create_dir_all(&self.folder).map_err(PullError::cache("create", &self.folder))?;
        let _lock = store::lock(&with_suffix(&folder, ".lock"), &self.id.to_string(), progress)?;
        // Another process may have fetched it while this one waited.
        if self.find(what, Some(&listing.commit)).is_none() {
            self.fill(what, &folder, listing, progress)?;
        }
        self.remember(&listing.commit)?;
        Ok(what.path_in(&folder))
    }

    /// Makes `folder`, which is not there or not as it was.
    fn fill(
        &self,
        what: &What,
        folder: &Path,
        listing: &Listing,
        progress: &mut dyn Progress,
    ) -> Result<(), PullError> {
        let staging = with_suffix(folder, ".partial");
        if folder.exists() {
            progress.note(&format!("{} has changed since it was fetched", folder.display()));
            store::remove_all(&staging)?;
            std::fs::rename(folder, &staging).map_err(PullError::cache("rename", folder))?;
        }
        std::fs::create_dir_all(&staging).map_err(PullError::cache("create", &staging))?;
        let marks = Marks::load(with_suffix(folder, ".verified"));
        let mut download = Download { repository: self, listing, staging: &staging, marks };
        let names = match what {
            What::Whole => download.names_of_whole(progress)?,
            What::Config => vec![CONFIG.to_owned()],
            What::Gguf(parts) => parts.clone(),
        };
        download.all(&names, progress)?;
        std::fs::rename(&staging, folder).map_err(PullError::cache("rename", &staging))
    }

    fn layout(&self, reason: String) -> PullError {
        PullError::Layout { id: self.id.to_string(), reason }
    }

    fn folder_of(&self, what: &What, commit: &str) -> PathBuf {
        self.folder.join(match what {
            What::Whole => commit.to_owned(),
            What::Config => format!("{commit}-config"),
            What::Gguf(parts) => format!("{commit}-{}", hub::quote(&parts[0], "")),
        })
    }

    fn ref_path(&self) -> PathBuf {
        self.folder.join("refs").join(hub::quote(self.id.revision(), ""))
    }

    /// Notes what the revision is now.
    fn remember(&self, commit: &str) -> Result<(), PullError> {
        if self.id.is_pinned() {
            return Ok(());
        }
        let path = self.ref_path();
        let new = with_suffix(&path, &format!(".{}", std::process::id()));
        let folder = self.folder.join("refs");
        std::fs::create_dir_all(&folder)
            .and_then(|()| std::fs::write(&new, commit))
            .and_then(|()| std::fs::rename(&new, &path))
            .map_err(PullError::cache("write", &path))
    }

    /// A file with the content of `expected` that was fetched for another commit.
    fn find_elsewhere(&self, expected: &Expected) -> Option<PathBuf> {
        let entries = std::fs::read_dir(&self.folder).ok()?;
        entries.flatten().find_map(|entry| {
            let marks = entry.path();
            let folder = marks.to_str()?.strip_suffix(".verified")?.to_owned();
            Marks::load(marks).find(Path::new(&folder), expected)
        })
    }
}

/// A folder being filled.
struct Download<'a> {
    repository: &'a Repository<'a>,
    listing: &'a Listing,
    staging: &'a Path,
    marks: Marks,
}

impl Download<'_> {
    /// The files of a safetensors model; fetches the index, which names some.
    fn names_of_whole(&mut self, progress: &mut dyn Progress) -> Result<Vec<String>, PullError> {
        let present = self.listing.names();
        let mut names = select::texts(&present);
        // The index decides, whatever other weight files there are.
        if present.contains(INDEX) {
            self.one(INDEX, &mut Within { whole: progress, start: None })?;
            let index = self.staging.join(INDEX);
            let text = std::fs::read(&index).map_err(PullError::cache("read", &index))?;
            names.push(INDEX.to_owned());
            names.extend(select::shards(&text).map_err(|reason| self.repository.layout(reason))?);
        } else {
            names.push(SINGLE.to_owned());
        }
        Ok(names)
    }

    /// Gets all of `names`.
    fn all(&mut self, names: &[String], progress: &mut dyn Progress) -> Result<(), PullError> {
        let id = self.repository.id;
        let (mut total_bytes, mut needed_bytes) = (0u64, 0u64);
        for name in names {
            let expected = self.listing.expected(id, name)?;
            total_bytes = total_bytes.saturating_add(expected.size_bytes);
            if self.repository.find_elsewhere(expected).is_none() {
                let file = self.staging.join(name);
                let len = |path: &Path| std::fs::metadata(path).map_or(0, |meta| meta.len());
                let here_bytes = len(&file).max(len(&with_suffix(&file, ".partial")));
                needed_bytes = needed_bytes.saturating_add(expected.size_bytes.saturating_sub(here_bytes));
            }
        }
        store::check_space(self.staging, needed_bytes)?;
        let licence = self.listing.licence.as_deref().unwrap_or("not stated; see its page");
        progress.note(&format!(
            "fetching {id} at commit {} for you; its licence is {licence}, and Lockstep never redistributes it",
            self.listing.commit
        ));
        progress.begin(&id.to_string(), total_bytes);
        let mut start = 0;
        let fetched = names.iter().try_for_each(|name| {
            self.one(name, &mut Within { whole: progress, start: Some(start) })?;
            start = self.listing.expected(id, name)?.size_bytes.saturating_add(start);
            progress.at(start);
            Ok(())
        });
        progress.end();
        fetched
    }

    /// Gets `name`: what is here, from another commit's folder, or from the hub.
    fn one(&mut self, name: &str, progress: &mut dyn Progress) -> Result<(), PullError> {
        let Repository { id, options, .. } = self.repository;
        let expected = self.listing.expected(id, name)?;
        if self.marks.fits(self.staging, name, expected) {
            return Ok(());
        }
        let file = self.staging.join(name);
        let folder = file.parent().unwrap_or(self.staging);
        std::fs::create_dir_all(folder).map_err(PullError::cache("create", folder))?;
        if !store::adopt(&file, expected, progress)? && !self.link(&file, expected) {
            let url = options.file_url(&id.repository, &self.listing.commit, name);
            let mut partial = Partial::open(&with_suffix(&file, ".partial"), expected.clone())?;
            hub::fetch(options, &url, &mut partial, progress)
                .map_err(|error| listing::failed(options, id, error))?;
            partial.install(&file, &url)?;
        }
        self.marks.add(self.staging, name, expected)
    }

    /// Whether `file` now shares the content of one that was fetched for another commit.
    fn link(&self, file: &Path, expected: &Expected) -> bool {
        // Not every file system can; then it is fetched.
        let other = self.repository.find_elsewhere(expected);
        other.is_some_and(|other| std::fs::hard_link(other, file).is_ok())
    }
}
