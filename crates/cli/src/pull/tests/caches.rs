//! The user's Hugging Face cache: used as it is, never written.

use super::super::hub_model::{self, Places};
use super::super::id::HubId;
use super::super::select::What;
use super::snapshots::{COMMIT, NEXT_COMMIT, Repo, asked, files_in, obtain, places};
use super::*;

/// Puts files of `repo` into a Hugging Face cache as its tools do: blobs, links to them, a ref.
fn put(root: &Path, repo: &Repo, names: &[&str]) -> PathBuf {
    let repository = root.join("models--org--name");
    let snapshot = repository.join("snapshots").join(repo.commit);
    std::fs::create_dir_all(repository.join("blobs")).unwrap();
    std::fs::create_dir_all(repository.join("refs/refs/pr")).unwrap();
    for name in names {
        let link = snapshot.join(name);
        let blob = name.replace('/', "_");
        std::fs::write(repository.join("blobs").join(&blob), &repo.files[*name]).unwrap();
        std::fs::create_dir_all(link.parent().unwrap()).unwrap();
        std::os::unix::fs::symlink(repository.join("blobs").join(blob), link).unwrap();
    }
    for branch in ["main", "refs/pr/1"] {
        std::fs::write(repository.join("refs").join(branch), repo.commit).unwrap();
    }
    snapshot
}

fn with_hf(cache: &Cache, endpoint: &str) -> Places {
    Places { hf_cache: Some(cache.0.join("hf")), ..places(cache, endpoint) }
}

#[test]
fn the_environment_says_where_it_is() {
    let root = |variables: &[(&str, &str)]| {
        let find = |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.into());
        super::super::hf_cache::root(find).map(|path| path.to_str().unwrap().to_owned())
    };
    let all = [("HF_HUB_CACHE", "/a"), ("HF_HOME", "/b"), ("XDG_CACHE_HOME", "/c"), ("HOME", "/d")];
    let expected = ["/a", "/b/hub", "/c/huggingface/hub", "/d/.cache/huggingface/hub"];
    for (i, expected) in expected.iter().enumerate() {
        assert_eq!(root(&all[i..]).as_deref(), Some(*expected));
    }
    assert_eq!(root(&[("HF_HOME", "")]), None);
}

#[test]
fn a_whole_snapshot_is_used_without_the_network() {
    let (cache, server) = (Cache::new(), Repo::sharded().serve());
    let snapshot = put(&cache.0.join("hf"), &Repo::sharded(), &Repo::SHARDED_NAMES);
    let before = files_in(&cache.0);
    for name in ["org/name", "org/name@refs/pr/1", &format!("org/name@{COMMIT}")] {
        let mut places = with_hf(&cache, &server.endpoint());
        places.hub.offline = name.ends_with("pr/1");
        let (result, told) = obtain(name, &places);
        assert_eq!(result.unwrap(), snapshot);
        assert!(told.notes[0].contains("in the Hugging Face cache"), "{:?}", told.notes);
    }
    let id = HubId::parse("org/name").unwrap();
    let places = with_hf(&cache, &server.endpoint());
    let config = hub_model::obtain(&id, &What::Config, &places, &mut Told::default());
    assert_eq!(config.unwrap(), snapshot);
    assert!(server.requests().is_empty());
    assert_eq!(files_in(&cache.0), before);
    // Asked for anew, it is found by the commit that the hub names.
    assert_eq!(hub_model::update(&id, &What::Whole, &places, &mut Told::default()).unwrap(), snapshot);
    assert!(asked(&server).is_empty());
}

#[test]
fn a_snapshot_that_lacks_a_file_is_not_used() {
    for lacking in ["config.json", "tokenizer.json", "m-2.safetensors", "model.safetensors.index.json"] {
        let (cache, server) = (Cache::new(), Repo::sharded().serve());
        let names: Vec<_> = Repo::SHARDED_NAMES.into_iter().filter(|name| *name != lacking).collect();
        let snapshot = put(&cache.0.join("hf"), &Repo::sharded(), &names);
        // A link to a blob that was removed is no file either.
        std::os::unix::fs::symlink("gone", snapshot.join(lacking)).unwrap();
        let folder = obtain("org/name", &with_hf(&cache, &server.endpoint())).0.unwrap();
        assert!(folder.starts_with(cache.0.join("hub")), "without {lacking}");
    }
}

#[test]
fn another_revision_and_a_damaged_ref_are_not_used() {
    let (cache, repo) = (Cache::new(), Repo { commit: NEXT_COMMIT, ..Repo::sharded() });
    let server = repo.serve();
    let root = cache.0.join("hf");
    put(&root, &Repo::sharded(), &Repo::SHARDED_NAMES);
    let places = with_hf(&cache, &server.endpoint());
    let folder = obtain(&format!("org/name@{NEXT_COMMIT}"), &places).0.unwrap();
    assert!(folder.ends_with(NEXT_COMMIT) && folder.starts_with(cache.0.join("hub")));
    std::fs::write(root.join("models--org--name/refs/main"), "../../../elsewhere").unwrap();
    assert_eq!(obtain("org/name", &places).0.unwrap(), folder);
}

#[test]
fn gguf_files_of_that_cache() {
    let cache = Cache::new();
    let parts = ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"];
    let repo = Repo::of(&[(parts[0], b"GGUF1"), (parts[1], b"GGUF2"), ("y.gguf", b"GGUF")]);
    let snapshot = put(&cache.0.join("hf"), &repo, &[parts[0], "y.gguf"]);
    let server = repo.serve();
    let places = with_hf(&cache, &server.endpoint());
    assert_eq!(obtain("org/name:y.gguf", &places).0.unwrap(), snapshot.join("y.gguf"));
    assert!(server.requests().is_empty());
    let path = obtain("org/name:x-00001-of-00002.gguf", &places).0.unwrap();
    assert!(path.starts_with(cache.0.join("hub")), "a part was missing");
}
