//! Pulling from a server in this process and from wheels made on the spot; no network.

mod caches;
mod hub;
mod refusals;
mod server;
mod snapshots;
mod wheels;

use super::catalogue::{Hub, Model, Part};
use super::checksum::hex;
use super::error::{PullError, SourceError};
use super::hub::HubOptions;
use super::progress::Progress;
use super::pypi::WheelSource;
use super::{Sources, pull_from};
use server::Server;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// 3 MB that compress badly and differ at every place.
fn content() -> Vec<u8> {
    let mut state = 7u64;
    (0..3_000_000)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        })
        .collect()
}

fn sha256(bytes: &[u8]) -> &'static str {
    let mut hash = Sha256::new();
    hash.update(bytes);
    Box::leak(hex(hash).into_boxed_str())
}

/// The catalogue entry of `content`, on the hub and in `part_sizes` wheels.
fn model(content: &[u8], on_hub: bool, part_sizes: &[usize]) -> Model {
    const PACKAGES: [&str; 3] = ["part-a", "part-b", "part-c"];
    let mut start = 0;
    let mut parts = Vec::new();
    for (size, package) in part_sizes.iter().zip(PACKAGES) {
        let bytes = &content[start..start + size];
        let (size_bytes, sha256) = (*size as u64, sha256(bytes));
        parts.push(Part { package, version: "1.0", member: wheels::MEMBER, size_bytes, sha256 });
        start += size;
    }
    Model {
        name: "tiny",
        about: "for tests",
        licence: "CC0-1.0",
        file: "tiny.gguf",
        size_bytes: content.len() as u64,
        sha256: sha256(content),
        hub: on_hub.then_some(Hub { repository: "owner/repo", revision: "0123abcd", file: "tiny.gguf" }),
        parts: parts.leak(),
    }
}

/// A cache folder that is removed afterwards.
struct Cache(PathBuf);

impl Cache {
    fn new() -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("lockstep-pull-test-{}-{number}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self) -> PathBuf {
        self.0.join("models/tiny/tiny.gguf")
    }

    fn partial(&self) -> PathBuf {
        self.0.join("models/tiny/tiny.gguf.partial")
    }

    fn put_partial(&self, bytes: &[u8]) {
        std::fs::create_dir_all(self.partial().parent().unwrap()).unwrap();
        std::fs::write(self.partial(), bytes).unwrap();
    }
}

impl Drop for Cache {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Remembers what it was told.
#[derive(Default)]
struct Told {
    notes: Vec<String>,
    positions: Vec<u64>,
}

impl Progress for Told {
    fn begin(&mut self, _: &str, _: u64) {}

    fn at(&mut self, bytes: u64) {
        self.positions.push(bytes);
    }

    fn note(&mut self, text: &str) {
        self.notes.push(text.to_owned());
    }

    fn end(&mut self) {}
}

/// No PyPI.
struct NoWheels;

impl WheelSource for NoWheels {
    fn get(&self, _: &Part, _: &Path, _: &mut dyn FnMut(u64)) -> Result<PathBuf, SourceError> {
        Err(SourceError::Unavailable("no PyPI here".into()))
    }
}

/// Pulls `model` from `endpoint` and `wheels` into `cache`.
fn pull_once(
    model: &Model,
    cache: &Cache,
    endpoint: &str,
    wheels: &dyn WheelSource,
) -> (Result<PathBuf, PullError>, Told) {
    let mut told = Told::default();
    let result = pull_from(model, &cache.0, &Sources { hub: hub_at(endpoint), wheels }, &mut told);
    (result, told)
}

fn hub_at(endpoint: &str) -> HubOptions {
    HubOptions {
        endpoint: endpoint.to_owned(),
        token: None,
        offline: false,
        attempts: 3,
        first_pause: Duration::ZERO,
        silence: Duration::from_secs(20),
    }
}

/// An address where nobody listens.
fn nobody() -> String {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

#[test]
fn resolve_takes_names_folders_and_gguf_files() {
    let cache = Cache::new();
    let file = cache.0.join("weights.bin");
    let resolve = |path: &Path| super::resolve(path.to_str().unwrap(), &cache.0);
    assert_eq!(resolve(&cache.0).unwrap(), cache.0);
    std::fs::write(&file, b"GGUF\x03\0\0\0").unwrap();
    assert_eq!(resolve(&file).unwrap(), file);
    std::fs::write(&file, b"GGU").unwrap();
    assert!(matches!(resolve(&file), Err(PullError::NotGguf { .. })));
    let message = resolve(&cache.0.join("absent")).unwrap_err().to_string();
    assert!(message.ends_with("known names: qwen2.5-coder-0.5b, smollm2-135m"), "{message}");
    // It could be a repository of the hub, but there is a folder of that name where tests run.
    assert_eq!(resolve(Path::new("src/pull")).unwrap(), Path::new("src/pull"));
    assert_eq!(super::resolve_config("src/pull", &cache.0).unwrap(), Path::new("src/pull"));
    assert!(!super::is_name("src/pull") && super::is_name("smollm2-135m"));
    assert!(super::is_name("org/name@v1:x.gguf") && !super::is_name("./org/name"));
    assert!(matches!(super::pull("absent", &cache.0, &mut Told::default()), Err(PullError::Unknown { .. })));
}

#[test]
fn a_cache_that_cannot_be_written_is_named() {
    let cache = Cache::new();
    std::fs::write(cache.0.join("models"), b"a file in the way").unwrap();
    let content = content();
    let (result, _) = pull_once(&model(&content, true, &[]), &cache, &nobody(), &NoWheels);
    let message = result.unwrap_err().to_string();
    assert!(message.contains("models/tiny") && message.ends_with("--cache-dir"), "{message}");
}

#[test]
fn a_disk_that_is_too_small_is_found_at_once() {
    let cache = Cache::new();
    let huge = Model { size_bytes: u64::MAX / 2, ..model(&content(), true, &[]) };
    let (result, _) = pull_once(&huge, &cache, &nobody(), &NoWheels);
    assert!(matches!(result, Err(PullError::NoSpace { .. })), "{result:?}");
}

#[test]
fn a_disk_that_becomes_full_is_said_plainly() {
    let full = std::io::Error::from(std::io::ErrorKind::StorageFull);
    let message = PullError::cache("write", Path::new("/models/x"))(full).to_string();
    assert!(message.starts_with("the disk is full, cannot write /models/x; free some space"), "{message}");
}

#[test]
fn what_is_verified_is_not_looked_at_again() {
    let (cache, content) = (Cache::new(), content());
    let model = model(&content, true, &[]);
    let server = Server::of(&content);
    pull_once(&model, &cache, &server.endpoint(), &NoWheels).0.unwrap();
    assert_eq!(server.requests().len(), 1);
    assert_eq!(pull_once(&model, &cache, &nobody(), &NoWheels).0.unwrap(), cache.file());
    // A changed file is noticed although its size is the same, and replaced.
    let mut changed = content.clone();
    changed[5] ^= 1;
    std::fs::write(cache.file(), &changed).unwrap();
    pull_once(&model, &cache, &server.endpoint(), &NoWheels).0.unwrap();
    assert_eq!(std::fs::read(cache.file()).unwrap(), content);
    // A right file without a mark (copied by the user) is adopted.
    std::fs::write(cache.file(), &content).unwrap();
    std::fs::remove_file(cache.0.join("models/tiny/tiny.gguf.verified")).unwrap();
    assert_eq!(pull_once(&model, &cache, &nobody(), &NoWheels).0.unwrap(), cache.file());
}

#[test]
fn two_at_once_fetch_once() {
    let (cache, content) = (Cache::new(), content());
    let model = model(&content, true, &[]);
    let server = Server::of(&content);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| pull_once(&model, &cache, &server.endpoint(), &NoWheels).0.unwrap());
        }
    });
    assert_eq!(server.requests().len(), 1);
    assert_eq!(std::fs::read(cache.file()).unwrap(), content);
}
