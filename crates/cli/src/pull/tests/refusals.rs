//! What the hub will not give, and what is not taken from it: each one sentence that says what to do.

use super::server::{Answer, Server};
use super::snapshots::{COMMIT, Repo, asked, files_in, obtain, places};
use super::*;

/// The message about `name`, of a server that gives `answer` to everything.
fn refused(name: &str, answer: &'static str) -> String {
    let (cache, server) = (Cache::new(), Server::scripted(vec![Answer::Status(answer)]));
    let message = obtain(name, &places(&cache, &server.endpoint())).0.unwrap_err().to_string();
    assert_eq!(message.lines().count(), 1, "{message}");
    assert_eq!(server.requests().len(), 1, "asked once");
    assert!(files_in(&cache.0).is_empty());
    message.replace(&server.endpoint(), "HUB")
}

/// The message about `name` of a repository.
fn unusable(name: &str, repo: &Repo) -> String {
    let (cache, server) = (Cache::new(), repo.serve());
    let message = obtain(name, &places(&cache, &server.endpoint())).0.unwrap_err().to_string();
    assert_eq!(message.lines().count(), 1, "{message}");
    match asked(&server).as_slice() {
        [] => assert!(files_in(&cache.0).is_empty(), "nothing is left behind"),
        more => assert_eq!(more, ["model.safetensors.index.json"], "no weights for nothing"),
    }
    message
}

#[test]
fn gated_private_and_missing_repositories() {
    for (answer, status) in [
        ("401 Unauthorized\r\nX-Error-Code: GatedRepo", 401),
        ("403 Forbidden\r\nX-Error-Code: GatedRepo", 403),
    ] {
        let message = refused("org/name", answer);
        assert!(
            message.starts_with(&format!("HUB/org/name is not open to you (status {status});")),
            "{message}"
        );
        assert!(message.contains("accept its terms") && message.contains("HF_TOKEN"), "{message}");
    }
    for answer in [
        "401 Unauthorized\r\nX-Error-Message: Invalid username or password.",
        "404 Not Found\r\nX-Error-Code: RepoNotFound",
        "404 Not Found",
    ] {
        let message = refused("org/name", answer);
        assert!(message.starts_with("HUB has no model org/name, or it is private"), "{message}");
        assert!(message.contains("check the spelling") && message.contains("./org/name"), "{message}");
    }
    let message = refused("org/name@v9", "404 Not Found\r\nX-Error-Code: RevisionNotFound");
    assert!(message.starts_with("org/name has no revision v9; give a branch"), "{message}");
    let invalid = "401 Unauthorized\r\nX-Error-Message: Invalid credentials in Authorization header";
    assert!(refused("org/name", invalid).starts_with("HUB does not accept the token in HF_TOKEN"));
    let message = refused("org/name", "451 Unavailable For Legal Reasons");
    assert!(
        message.contains("/api/models/org/name/revision/main?blobs=true answered with status 451"),
        "{message}"
    );
}

#[test]
fn files_can_be_gated_though_their_list_is_not() {
    let (cache, repo) = (Cache::new(), Repo::sharded());
    let server = Server::answering(move |i, request| match i {
        0 => repo.answer(&request.path),
        _ => Answer::Status("401 Unauthorized\r\nX-Error-Code: GatedRepo"),
    });
    let result = obtain("org/name", &places(&cache, &server.endpoint())).0;
    assert!(matches!(result, Err(PullError::NoAccess { status: 401, .. })), "{result:?}");
}

#[test]
fn the_token_goes_to_the_hub_and_no_further() {
    let (cache, repo) = (Cache::new(), Repo::sharded());
    let content = repo.files["m-1.safetensors"].clone();
    let storage = Server::at("127.0.0.2", move |_, _| Answer::full(&content));
    let redirect: &str = format!("302 Found\r\nLocation: {}/m-1", storage.endpoint()).leak();
    let server = Server::answering(move |_, request| match request.path.ends_with("m-1.safetensors") {
        true => Answer::Status(redirect),
        false => repo.answer(&request.path),
    });
    let mut places = places(&cache, &server.endpoint());
    places.hub.token = Some(super::super::hub::Token("hf_secret".into()));
    assert!(!format!("{:?}", places.hub).contains("secret"));
    obtain("org/name", &places).0.unwrap();
    assert!(server.requests().iter().all(|r| r.token.as_deref() == Some("hf_secret")));
    assert_eq!(storage.requests().len(), 1);
    assert_eq!(storage.requests()[0].token, None);
}

#[test]
fn names_that_leave_the_folder_are_refused() {
    for name in ["../../config.json", "/config.json", "a/../../x", "a\\b", "a//b", ".", "x\0y", "a/"] {
        let mut repo = Repo::sharded();
        repo.files.insert(name.into(), b"evil".to_vec());
        let message = unusable("org/name", &repo);
        assert!(message.contains("would leave its folder; nothing was fetched"), "{message}");
    }
    let mut repo = Repo::sharded();
    let index = br#"{"weight_map": {"a": "../../m-1.safetensors"}}"#;
    repo.files.insert("model.safetensors.index.json".into(), index.to_vec());
    let message = unusable("org/name", &repo);
    assert!(message.contains("names the weight file \"../../m-1.safetensors\""), "{message}");
    for commit in ["../../x", "main", ""] {
        let message = unusable("org/name", &Repo { commit, ..Repo::sharded() });
        assert!(message.contains("is not a commit"), "{message}");
    }
}

#[test]
fn repositories_that_cannot_be_served() {
    let gguf = Repo::of(&[("a-q4.gguf", b"GGUF"), ("README.md", b"")]);
    let message = unusable("org/name", &gguf);
    assert!(message.starts_with("cannot serve org/name: its repository has neither"), "{message}");
    assert!(message.contains("as in org/name:a-q4.gguf"), "{message}");
    let message = unusable("org/name:b.gguf", &gguf);
    assert!(message.contains("has no b.gguf; name one of its GGUF files"), "{message}");
    let message = unusable("org/name", &Repo::of(&[("pytorch_model.bin", b""), ("config.json", b"")]));
    assert!(message.contains("PyTorch files, which can run code"), "{message}");
    let mut repo = Repo::sharded();
    repo.files.remove("m-2.safetensors");
    assert!(unusable("org/name", &repo).contains("has no m-2.safetensors at commit"));
}

#[test]
fn lists_that_make_no_sense() {
    let answer = |text: &str| {
        let (cache, server) = (Cache::new(), Server::of(text.as_bytes()));
        obtain(&format!("org/name@{COMMIT}"), &places(&cache, &server.endpoint())).0.unwrap_err().to_string()
    };
    assert!(answer("<html>").contains("gave a list of files that cannot be used"));
    assert!(answer("{}").contains("missing field"));
    let other = r#"{"sha": "ffffffffffffffffffffffffffffffffffffffff", "siblings": []}"#;
    assert!(answer(other).contains("it is of commit ffff"));
    let files = [
        r#"{"rfilename": "model.safetensors"}"#,
        r#"{"rfilename": "config.json"}"#,
        r#"{"rfilename": "tokenizer.json", "size": 3, "blobId": "XYZ"}"#,
    ]
    .join(",");
    let message = answer(&format!(r#"{{"sha": "{COMMIT}", "siblings": [{files}]}}"#));
    assert!(message.contains("it has neither size nor hash of"), "{message}");
}

#[test]
fn a_disk_too_small_for_a_snapshot_is_found_at_once() {
    let (cache, repo) = (Cache::new(), Repo::sharded());
    let mut listing = repo.listing();
    for file in listing["siblings"].as_array_mut().unwrap() {
        if let Some(lfs) = file.get_mut("lfs") {
            lfs["size"] = u64::MAX.into();
        }
    }
    let server = Server::answering(move |i, request| match i {
        0 => Answer::full(listing.to_string().as_bytes()),
        _ => repo.answer(&request.path),
    });
    let result = obtain("org/name", &places(&cache, &server.endpoint())).0;
    assert!(matches!(result, Err(PullError::NoSpace { .. })), "{result:?}");
    assert_eq!(asked(&server), ["model.safetensors.index.json"]);
}

#[test]
fn without_the_hub() {
    let cache = Cache::new();
    let mut places = places(&cache, &nobody());
    let message = obtain("org/name:x.gguf", &places).0.unwrap_err().to_string();
    assert!(message.starts_with("cannot fetch org/name:x.gguf: http://127.0.0.1:"), "{message}");
    assert!(message.contains("cannot be reached") && message.contains("give --model a folder"), "{message}");
    let server = Repo::sharded().serve();
    places.hub = HubOptions { offline: true, ..hub_at(&server.endpoint()) };
    let message = obtain("org/name", &places).0.unwrap_err().to_string();
    assert!(message.contains("HF_HUB_OFFLINE is set; unset it, or run"), "{message}");
    assert!(server.requests().is_empty());
}

#[test]
fn a_busy_hub_is_asked_again() {
    let (cache, repo) = (Cache::new(), Repo::sharded());
    let server = Server::answering(move |i, request| match (i, repo.answer(&request.path)) {
        (0, _) => Answer::Status("429 Too Many Requests"),
        (1, Answer::Content { bytes, .. }) => Answer::Content { bytes, cut_after: 20 },
        (_, answer) => answer,
    });
    obtain("org/name", &places(&cache, &server.endpoint())).0.unwrap();
}
