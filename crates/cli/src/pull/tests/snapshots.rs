//! Repositories of the hub, from a server that has one.

use super::super::hub_model::{self, Places};
use super::super::id::HubId;
use super::super::select::What;
use super::server::{Answer, Server};
use super::*;
use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::sync::{Arc, Mutex};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const NEXT_COMMIT: &str = "1123456789abcdef0123456789abcdef01234567";

/// What the server has; may change while it serves.
#[derive(Clone)]
pub struct Repo {
    pub commit: &'static str,
    /// Content by name.
    pub files: BTreeMap<String, Vec<u8>>,
}

impl Repo {
    pub fn of(files: &[(&str, &[u8])]) -> Self {
        let files = files.iter().map(|(name, content)| (name.to_string(), content.to_vec()));
        Self { commit: COMMIT, files: files.collect() }
    }

    /// A model in two shards, among what repositories have besides.
    pub fn sharded() -> Self {
        let index = br#"{"metadata": {}, "weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}"#;
        let content = content();
        Self::of(&[
            ("config.json", b"{\"model_type\": \"llama\"}"),
            ("generation_config.json", b"{}"),
            ("tokenizer.json", &content[..20_000]),
            ("tokenizer_config.json", b"{ }"),
            ("chat_template.jinja", b"{{ messages }}"),
            ("additional_chat_templates/tools.jinja", b""),
            ("model.safetensors.index.json", index),
            ("m-1.safetensors", &content[..2_000_000]),
            ("m-2.safetensors", &content[1_000_000..]),
            ("model.safetensors", b"not what the index says"),
            ("README.md", b"# Model"),
            ("pytorch_model.bin", b"pickle"),
            ("onnx/model.onnx", b"onnx"),
            ("original/consolidated.00.pth", b"pickle"),
        ])
    }

    /// What is fetched of [`Repo::sharded`].
    pub const SHARDED_NAMES: [&str; 9] = [
        "additional_chat_templates/tools.jinja",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "m-1.safetensors",
        "m-2.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ];

    /// The answer about the files; safetensors and GGUF files are in large-file storage.
    pub fn listing(&self) -> serde_json::Value {
        let siblings = self.files.iter().map(|(name, content)| {
            let mut file = serde_json::json!({
                "rfilename": name, "size": content.len(), "blobId": git_hash(content),
            });
            if name.ends_with(".safetensors") || name.ends_with(".gguf") {
                file["blobId"] = git_hash(b"a pointer").into();
                file["lfs"] =
                    serde_json::json!({"sha256": sha256(content), "size": content.len(), "pointerSize": 135});
            }
            file
        });
        let siblings: Vec<_> = siblings.collect();
        serde_json::json!({
            "id": "org/name", "sha": self.commit, "private": false, "gated": false,
            "cardData": {"license": "mit"}, "siblings": siblings,
        })
    }

    pub fn answer(&self, path: &str) -> Answer {
        if path.starts_with("/api/models/org/name/revision/") {
            return Answer::full(self.listing().to_string().as_bytes());
        }
        let file = path.strip_prefix(&format!("/org/name/resolve/{}/", self.commit));
        match file.and_then(|file| self.files.get(file)) {
            Some(content) => Answer::full(content),
            None => Answer::Status("404 Not Found\r\nX-Error-Code: EntryNotFound"),
        }
    }

    pub fn serve(&self) -> Server {
        let repo = self.clone();
        Server::answering(move |_, request| repo.answer(&request.path))
    }
}

/// As `git hash-object` prints it.
fn git_hash(content: &[u8]) -> String {
    let header = format!("blob {}\0", content.len());
    hex(sha1::Sha1::new_with_prefix(header).chain_update(content))
}

pub fn places(cache: &Cache, endpoint: &str) -> Places {
    Places { cache_dir: cache.0.clone(), hf_cache: None, hub: hub_at(endpoint) }
}

/// What `--model name` does.
pub fn obtain(name: &str, places: &Places) -> (Result<PathBuf, PullError>, Told) {
    let (id, mut told) = (HubId::parse(name).unwrap(), Told::default());
    (hub_model::obtain(&id, &What::of(&id), places, &mut told), told)
}

/// Relative names of all files under `folder`, in order.
pub fn files_in(folder: &Path) -> Vec<String> {
    fn walk(root: &Path, folder: &Path, names: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => walk(root, &path, names),
                false => names.push(path.strip_prefix(root).unwrap().to_str().unwrap().to_owned()),
            }
        }
    }
    let mut names = Vec::new();
    walk(folder, folder, &mut names);
    names.sort();
    names
}

/// Names of the files asked for, without the commit.
pub fn asked(server: &Server) -> Vec<String> {
    let paths = server.requests().into_iter().map(|request| request.path);
    paths.filter_map(|path| Some(path.strip_prefix("/org/name/resolve/")?[41..].to_owned())).collect()
}

#[test]
fn fetches_what_serving_needs_and_asks_once() {
    let (cache, repo) = (Cache::new(), Repo::sharded());
    let server = repo.serve();
    let (result, told) = obtain("org/name", &places(&cache, &server.endpoint()));
    let folder = result.unwrap();
    assert_eq!(folder, cache.0.join("hub/org--name").join(COMMIT));
    assert_eq!(files_in(&folder), Repo::SHARDED_NAMES);
    for name in Repo::SHARDED_NAMES {
        assert_eq!(std::fs::read(folder.join(name)).unwrap(), repo.files[name], "{name}");
    }
    assert_eq!(server.requests()[0].path, "/api/models/org/name/revision/main?blobs=true");
    // The empty file needs no request.
    assert_eq!(server.requests().len(), Repo::SHARDED_NAMES.len());
    let total: usize = Repo::SHARDED_NAMES.iter().map(|name| repo.files[*name].len()).sum();
    assert_eq!(told.positions.last(), Some(&(total as u64)));
    assert!(told.positions.is_sorted(), "one bar for all files");
    assert!(told.notes[0].contains("licence is mit"), "{:?}", told.notes);
    // As `sha256sum` and `git hash-object` would list them.
    let hash = |name: &str| match name.ends_with(".safetensors") {
        true => sha256(&repo.files[name]).to_owned(),
        false => git_hash(&repo.files[name]),
    };
    let list: String = Repo::SHARDED_NAMES.map(|name| format!("{}  {name}\n", hash(name))).concat();
    assert_eq!(super::super::digest(&folder).as_deref(), Some(sha256(list.as_bytes())));
    assert_eq!(super::super::digest(&cache.0), None, "not what was fetched");
    // From now on without the hub, by any name for it.
    for name in ["org/name", "org/name@main", &format!("org/name@{COMMIT}")] {
        assert_eq!(obtain(name, &places(&cache, &nobody())).0.unwrap(), folder);
    }
}

#[test]
fn a_model_in_one_file_and_a_revision_with_a_slash() {
    let cache = Cache::new();
    let repo =
        Repo::of(&[("config.json", b"{}"), ("tokenizer.json", b"{}"), ("model.safetensors", b"weights")]);
    let server = repo.serve();
    let folder = obtain("org/name@refs/pr/1", &places(&cache, &server.endpoint())).0.unwrap();
    assert_eq!(files_in(&folder), ["config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(server.requests()[0].path, "/api/models/org/name/revision/refs%2Fpr%2F1?blobs=true");
    assert_eq!(obtain("org/name@refs/pr/1", &places(&cache, &nobody())).0.unwrap(), folder);
}

#[test]
fn gguf_files_come_with_their_parts() {
    let cache = Cache::new();
    let parts = ["q4/x-00001-of-00002.gguf", "q4/x-00002-of-00002.gguf"];
    let repo =
        Repo::of(&[(parts[0], b"GGUF1"), (parts[1], b"GGUF2"), ("y.gguf", b"GGUF"), ("config.json", b"{}")]);
    let server = repo.serve();
    let places = places(&cache, &server.endpoint());
    let path = obtain("org/name:q4/x-00002-of-00002.gguf", &places).0.unwrap();
    assert!(path.ends_with(parts[0]), "{}", path.display());
    assert_eq!(std::fs::read(path.with_file_name("x-00002-of-00002.gguf")).unwrap(), b"GGUF2");
    assert_eq!(asked(&server), parts);
    let other = obtain("org/name:y.gguf", &places).0.unwrap();
    assert_eq!(files_in(other.parent().unwrap()), ["y.gguf"], "one file, as a folder may be given too");
    assert_eq!(obtain("org/name:q4/x-00001-of-00002.gguf", &places).0.unwrap(), path);
    assert_eq!(asked(&server).len(), 3);
}

#[test]
fn an_interrupted_fetch_continues_inside_the_file() {
    let (cache, repo) = (Cache::new(), Repo::sharded());
    let whole = repo.clone();
    let broken = Server::answering(move |_, request| match request.path.ends_with("m-2.safetensors") {
        true if request.from.is_none() => {
            Answer::Content { bytes: whole.files["m-2.safetensors"].clone(), cut_after: 700_000 }
        }
        true => Answer::Status("503 Busy"),
        false => whole.answer(&request.path),
    });
    let message = obtain("org/name", &places(&cache, &broken.endpoint())).0.unwrap_err().to_string();
    assert!(message.contains("broke off at 700000 of 2000000 bytes"), "{message}");
    assert!(message.contains("run `lockstep pull org/name` again"), "{message}");
    let folder = cache.0.join("hub/org--name").join(COMMIT);
    assert!(!folder.exists(), "nothing that could be taken for a model");
    let server = repo.serve();
    assert_eq!(obtain("org/name", &places(&cache, &server.endpoint())).0.unwrap(), folder);
    let requests: Vec<_> = server.requests().into_iter().map(|r| r.from).collect();
    assert_eq!((asked(&server), requests), (vec!["m-2.safetensors".into()], vec![None, Some(700_000)]));
    assert_eq!(std::fs::read(folder.join("m-2.safetensors")).unwrap(), repo.files["m-2.safetensors"]);
    assert_eq!(files_in(&folder), Repo::SHARDED_NAMES);
}

#[test]
fn wrong_bytes_are_never_installed() {
    for (name, kind) in [("m-1.safetensors", "sha256"), ("tokenizer.json", "git hash")] {
        let (cache, repo) = (Cache::new(), Repo::sharded());
        let mut damaged = repo.clone();
        damaged.files.get_mut(name).unwrap()[7] ^= 1;
        let listing = repo.listing().to_string();
        let server = Server::answering(move |i, request| match i {
            0 => Answer::full(listing.as_bytes()),
            _ => damaged.answer(&request.path),
        });
        let message = obtain("org/name", &places(&cache, &server.endpoint())).0.unwrap_err().to_string();
        assert!(message.contains(&format!("{name} gave a file with {kind}")), "{message}");
        assert!(!cache.0.join("hub/org--name").join(COMMIT).exists());
        // The next run fetches it afresh.
        obtain("org/name", &places(&cache, &repo.serve().endpoint())).0.unwrap();
    }
}

#[test]
fn whatever_the_hub_does_only_the_right_bytes_are_installed() {
    for seed in 1..=20u64 {
        println!("seed {seed}");
        let (cache, mut repo, mut state) = (Cache::new(), Repo::sharded(), seed);
        repo.files.values_mut().for_each(|content| content.truncate(30_000));
        let whole = repo.clone();
        let mut random = move |below: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % below
        };
        let faults = Mutex::new(move |answer| match (random(8), answer) {
            (0, _) => Answer::Hangup,
            (1, _) => Answer::Status("500 Internal Server Error"),
            (2, _) => Answer::Status("416 Range Not Satisfiable"),
            (3, Answer::Content { mut bytes, .. }) => {
                let place = random(bytes.len());
                bytes[place] ^= 1 << random(8);
                Answer::full(&bytes)
            }
            (4, Answer::Content { bytes, .. }) => Answer::Whole(bytes),
            (5 | 6, Answer::Content { bytes, .. }) => {
                let cut_after = random(bytes.len() + 1);
                Answer::Content { bytes, cut_after }
            }
            (_, answer) => answer,
        });
        let server = Server::answering(move |_, request| {
            let answer = whole.answer(&request.path);
            // A changed list is another list; what it says is taken for true.
            match request.path.starts_with("/api/") {
                true => answer,
                false => faults.lock().unwrap()(answer),
            }
        });
        let folder = cache.0.join("hub/org--name").join(COMMIT);
        let done = (0..500).any(|_| match obtain("org/name", &places(&cache, &server.endpoint())).0 {
            Ok(path) => path == folder,
            Err(_) => {
                assert!(!folder.exists(), "only a complete model has the name of one");
                false
            }
        });
        assert!(done, "what arrived is kept, so it ends");
        assert_eq!(files_in(&folder), Repo::SHARDED_NAMES);
        for name in Repo::SHARDED_NAMES {
            assert_eq!(std::fs::read(folder.join(name)).unwrap(), repo.files[name], "{name}");
        }
    }
}

#[test]
fn two_at_once_fetch_a_snapshot_once() {
    let (cache, server) = (Cache::new(), Repo::sharded().serve());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| obtain("org/name", &places(&cache, &server.endpoint())).0.unwrap());
        }
    });
    assert_eq!(asked(&server).len(), Repo::SHARDED_NAMES.len() - 1);
}

#[test]
fn another_commit_fetches_what_differs() {
    let (cache, repo) = (Cache::new(), Arc::new(Mutex::new(Repo::sharded())));
    let served = repo.clone();
    let server = Server::answering(move |_, request| served.lock().unwrap().answer(&request.path));
    let places = places(&cache, &server.endpoint());
    let old = obtain("org/name", &places).0.unwrap();
    let before = asked(&server).len();
    let mut next = Repo { commit: NEXT_COMMIT, ..Repo::sharded() };
    next.files.insert("chat_template.jinja".into(), b"{{ other }}".to_vec());
    *repo.lock().unwrap() = next;
    // A branch is what it was, until it is asked for.
    assert_eq!(obtain("org/name", &places).0.unwrap(), old);
    let id = HubId::parse("org/name@main").unwrap();
    let new = hub_model::update(&id, &What::Whole, &places, &mut Told::default()).unwrap();
    assert_eq!(new, cache.0.join("hub/org--name").join(NEXT_COMMIT));
    assert_eq!(asked(&server)[before..], ["chat_template.jinja"]);
    let inode = |folder: &Path| std::fs::metadata(folder.join("m-1.safetensors")).unwrap().ino();
    assert_eq!(inode(&new), inode(&old), "shared on the disk");
    assert_eq!(std::fs::read(new.join("chat_template.jinja")).unwrap(), b"{{ other }}");
    assert_eq!(obtain("org/name", &places).0.unwrap(), new);
    assert_eq!(obtain(&format!("org/name@{COMMIT}"), &places).0.unwrap(), old);
}

#[test]
fn what_was_changed_is_fetched_again() {
    let (cache, repo) = (Cache::new(), Repo::sharded());
    let server = repo.serve();
    let places = places(&cache, &server.endpoint());
    let folder = obtain("org/name", &places).0.unwrap();
    let before = asked(&server).len();
    std::fs::write(folder.join("m-1.safetensors"), b"short").unwrap();
    std::fs::remove_file(folder.join("config.json")).unwrap();
    assert_eq!(obtain("org/name", &places).0.unwrap(), folder);
    assert_eq!(asked(&server)[before..], ["config.json", "m-1.safetensors"]);
    assert_eq!(std::fs::read(folder.join("m-1.safetensors")).unwrap(), repo.files["m-1.safetensors"]);
}

#[test]
fn the_description_alone() {
    let (cache, server) = (Cache::new(), Repo::sharded().serve());
    let places = places(&cache, &server.endpoint());
    let (id, mut told) = (HubId::parse("org/name").unwrap(), Told::default());
    let mut config = |places| hub_model::obtain(&id, &What::Config, places, &mut told).unwrap();
    let folder = config(&places);
    assert_eq!(files_in(&folder), ["config.json"]);
    assert_eq!(asked(&server), ["config.json"]);
    assert_eq!(config(&places), folder);
    assert_eq!(server.requests().len(), 2);
    let whole = obtain("org/name", &places).0.unwrap();
    assert_eq!(config(&places), whole, "tensor headers say more than the description");
    assert_eq!(asked(&server).iter().filter(|name| *name == "config.json").count(), 1);
}
