//! Names of models on the hub: `org/name[@revision][:file.gguf]`.

use super::checksum::is_hex;
use std::fmt;

/// Longest `org/name` that the hub has.
const REPOSITORY_BYTES_MAX: usize = 96;
/// What a repository without a revision means.
const DEFAULT_REVISION: &str = "main";

/// A model on the hub.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubId {
    /// `org/name`.
    pub repository: String,
    /// Branch, tag or commit, when one was given.
    pub revision: Option<String>,
    /// Path of a GGUF file in the repository; `None` is the repository's safetensors model.
    pub file: Option<String>,
}

impl HubId {
    /// Reads a name; `None` when it cannot be one. Says nothing about whether it exists.
    pub fn parse(text: &str) -> Option<Self> {
        let (text, file) = match text.split_once(':') {
            Some((text, file)) => (text, Some(file)),
            None => (text, None),
        };
        let (repository, revision) = match text.split_once('@') {
            Some((repository, revision)) => (repository, Some(revision)),
            None => (text, None),
        };
        let valid = is_repository(repository)
            && revision.is_none_or(is_revision)
            && file.is_none_or(|file| is_safe_path(file) && is_gguf(file));
        valid.then(|| Self {
            repository: repository.to_owned(),
            revision: revision.map(str::to_owned),
            file: file.map(str::to_owned),
        })
    }

    /// The revision to ask for.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(DEFAULT_REVISION)
    }

    /// Whether it can come to mean something else.
    pub fn is_pinned(&self) -> bool {
        is_commit(self.revision())
    }

    /// `org--name`, which no other repository has: the hub allows no `--` in names.
    pub fn folder_name(&self) -> String {
        self.repository.replace('/', "--")
    }
}

impl fmt::Display for HubId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.repository)?;
        if let Some(revision) = &self.revision {
            write!(f, "@{revision}")?;
        }
        match &self.file {
            Some(file) => write!(f, ":{file}"),
            None => Ok(()),
        }
    }
}

/// Whether a revision is a full commit.
pub fn is_commit(revision: &str) -> bool {
    is_hex(revision, 40)
}

/// Whether a relative path stays in its folder, whoever made it up.
pub fn is_safe_path(path: &str) -> bool {
    !path.contains(|c: char| c == '\\' || c.is_control())
        && path.split('/').all(|component| !matches!(component, "" | "." | ".."))
}

/// By its name.
pub fn is_gguf(file: &str) -> bool {
    file.to_ascii_lowercase().ends_with(".gguf")
}

/// The hub's rules, and not what looks like the path of a weight file.
fn is_repository(text: &str) -> bool {
    let is_name = |name: &str| {
        !name.is_empty()
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
            && !name.starts_with(['.', '-'])
            && !name.ends_with(['.', '-'])
            && !name.contains("--")
            && !name.contains("..")
    };
    text.len() <= REPOSITORY_BYTES_MAX
        && !is_gguf(text)
        && !text.ends_with(".safetensors")
        && text.split_once('/').is_some_and(|(org, name)| is_name(org) && is_name(name))
}

fn is_revision(text: &str) -> bool {
    is_safe_path(text) && text.len() <= 200 && !text.starts_with('-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_names_of_the_hub() {
        let id = HubId::parse("Qwen/Qwen2.5-0.5B").unwrap();
        assert_eq!((id.revision(), id.is_pinned(), id.file.as_deref()), ("main", false, None));
        assert_eq!(id.folder_name(), "Qwen--Qwen2.5-0.5B");
        let text = "a/b@refs/pr/3:Q4_K_M/x-00001-of-00002.GGUF";
        let id = HubId::parse(text).unwrap();
        assert_eq!((&*id.repository, id.revision()), ("a/b", "refs/pr/3"));
        assert_eq!(id.file.as_deref(), Some("Q4_K_M/x-00001-of-00002.GGUF"));
        assert_eq!(id.to_string(), text);
        assert!(HubId::parse("a/b@0123456789abcdef0123456789abcdef01234567").unwrap().is_pinned());
    }

    #[test]
    fn leaves_paths_and_nonsense_alone() {
        for text in [
            "",
            "qwen",
            "/a/b",
            "./a/b",
            "../b",
            "~/b",
            "a/",
            "/b",
            "a//b",
            "a/b/c",
            "a/b/",
            "a/../b",
            "a/b.gguf",
            "a/b.safetensors",
            "a/b c",
            "a/b--c",
            "-a/b",
            "a/.b",
            "a/b.",
            "a/ü",
            "a/b@",
            "a/b@../..",
            "a/b@/x",
            "a/b@-x",
            "a/b:",
            "a/b:x.bin",
            "a/b:../x.gguf",
            "a/b:/x.gguf",
            "a/b:x\\y.gguf",
            "a/b:x\n.gguf",
            "@main",
            "a@x/b",
        ] {
            assert_eq!(HubId::parse(text), None, "{text:?}");
        }
        assert_eq!(HubId::parse(&format!("a/{}", "b".repeat(100))), None);
    }
}
