//! The hub's list of a repository's files.
//!
//! **Invariant:** every name in a [`Listing`] stays inside the folder it is put into, and the commit is
//! one; so both can become paths. Follows the hub's public API, `/api/models/{id}/revision/{revision}`
//! with `blobs=true`: `sha` is the commit, `siblings` are the files with size, git hash (`blobId`) and,
//! for large files, the SHA-256 of the content (`lfs.sha256`).

use super::checksum::{Checksum, Expected, is_hex};
use super::error::{PullError, SourceError};
use super::hub::{self, HubOptions};
use super::id::{HubId, is_commit, is_safe_path};
use super::progress::Progress;
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};

/// A repository at one commit.
#[derive(Debug)]
pub struct Listing {
    /// The commit that the revision is now.
    pub commit: String,
    /// What the owner says about the licence, if it is one word.
    pub licence: Option<String>,
    /// Where the list came from.
    url: String,
    /// What each file must be; `None` when the hub did not say.
    files: BTreeMap<String, Option<Expected>>,
}

impl Listing {
    /// Asks the hub.
    pub fn fetch(options: &HubOptions, id: &HubId, progress: &mut dyn Progress) -> Result<Self, PullError> {
        let revision = hub::quote(id.revision(), "");
        let url = format!("{}/api/models/{}/revision/{revision}?blobs=true", options.endpoint, id.repository);
        let answer = hub::get(options, &url, progress).map_err(|e| failed(options, id, e))?;
        let listing = Self::parse(&answer, url.clone());
        let listing = listing.map_err(|reason| PullError::BadListing { url: url.clone(), reason })?;
        if id.is_pinned() && listing.commit != id.revision() {
            let reason = format!("it is of commit {}", listing.commit);
            return Err(PullError::BadListing { url, reason });
        }
        Ok(listing)
    }

    fn parse(answer: &[u8], url: String) -> Result<Self, String> {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Answer {
            sha: String,
            siblings: Vec<File>,
            card_data: Option<serde_json::Value>,
        }
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct File {
            rfilename: String,
            size: Option<u64>,
            blob_id: Option<String>,
            lfs: Option<Lfs>,
        }
        #[derive(Deserialize)]
        struct Lfs {
            sha256: String,
            size: u64,
        }
        let answer: Answer = serde_json::from_slice(answer).map_err(|e| e.to_string())?;
        if !is_commit(&answer.sha) {
            return Err(format!("{:?} is not a commit", answer.sha));
        }
        let mut files = BTreeMap::new();
        for file in answer.siblings {
            let name = file.rfilename;
            if !is_safe_path(&name) {
                return Err(format!("the file name {name:?} would leave its folder"));
            }
            let expected = match (file.lfs, file.size, file.blob_id) {
                (Some(Lfs { sha256, size }), _, _) => is_hex(&sha256, 64)
                    .then_some(Expected { size_bytes: size, checksum: Checksum::Sha256(sha256) }),
                (None, Some(size_bytes), Some(blob)) => {
                    is_hex(&blob, 40).then_some(Expected { size_bytes, checksum: Checksum::GitBlob(blob) })
                }
                _ => None,
            };
            files.insert(name, expected);
        }
        let licence = answer.card_data.as_ref().and_then(|card| card.get("license")?.as_str());
        Ok(Self { commit: answer.sha, licence: licence.map(str::to_owned), url, files })
    }

    /// All files.
    pub fn names(&self) -> BTreeSet<&str> {
        self.files.keys().map(String::as_str).collect()
    }

    /// What `name` must be. Errors: not there, or the hub does not say.
    pub fn expected(&self, id: &HubId, name: &str) -> Result<&Expected, PullError> {
        match self.files.get(name) {
            Some(Some(expected)) => Ok(expected),
            Some(None) => Err(PullError::BadListing {
                url: self.url.clone(),
                reason: format!("it has neither size nor hash of {name}"),
            }),
            None => Err(PullError::Layout {
                id: id.to_string(),
                reason: format!(
                    "its repository has no {name} at commit {}, which it should; use another revision or \
                     repository of this model",
                    self.commit
                ),
            }),
        }
    }
}

/// What a failure of the hub means for `id`.
pub fn failed(options: &HubOptions, id: &HubId, error: SourceError) -> PullError {
    let refusal = match error {
        SourceError::Refused(refusal) => refusal,
        SourceError::Unavailable(reason) => return PullError::HubUnavailable { id: id.to_string(), reason },
        SourceError::Final(error) => return error,
    };
    let (endpoint, repository) = (options.endpoint.clone(), id.repository.clone());
    match (refusal.status, refusal.code.as_str()) {
        (status, "GatedRepo") | (status @ 403, _) => {
            PullError::NoAccess { page: format!("{endpoint}/{repository}"), status }
        }
        (_, "RevisionNotFound") => PullError::NoRevision { repository, revision: id.revision().to_owned() },
        (401, "") if refusal.message.starts_with("Invalid credentials") => PullError::BadToken { endpoint },
        // Without a token the hub says 401 about what does not exist, so as not to tell what is private.
        (status @ 401, _) | (status @ 404, "RepoNotFound" | "") => {
            PullError::NoRepository { endpoint, repository, status }
        }
        _ => PullError::HubUnavailable { id: id.to_string(), reason: refusal.to_string() },
    }
}
