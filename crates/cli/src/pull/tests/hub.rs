//! The hub and its faults.

use super::server::{Answer, Server};
use super::*;

fn pull_scripted(
    cache: &Cache,
    script: Vec<Answer>,
) -> (Result<PathBuf, PullError>, Told, Vec<Option<usize>>) {
    let server = Server::scripted(script);
    let model = model(&content(), true, &[]);
    let (result, told) = pull_once(&model, cache, &server.endpoint(), &NoWheels);
    (result, told, server.requests().into_iter().map(|r| r.from).collect())
}

#[test]
fn fetches_the_pinned_revision() {
    let (cache, content) = (Cache::new(), content());
    let server = Server::of(&content);
    let (result, told) = pull_once(&model(&content, true, &[]), &cache, &server.endpoint(), &NoWheels);
    assert_eq!(std::fs::read(result.unwrap()).unwrap(), content);
    assert_eq!(server.requests()[0].path, "/owner/repo/resolve/0123abcd/tiny.gguf");
    assert_eq!(told.positions.last(), Some(&3_000_000));
    assert!(told.positions.is_sorted());
    assert!(told.notes[0].contains("licence is CC0-1.0"), "{:?}", told.notes);
    assert!(!cache.partial().exists());
}

#[test]
fn continues_an_earlier_run() {
    let (cache, content) = (Cache::new(), content());
    cache.put_partial(&content[..1_234_567]);
    let (result, told, from) = pull_scripted(&cache, vec![Answer::full(&content)]);
    assert_eq!(std::fs::read(result.unwrap()).unwrap(), content);
    assert_eq!((from, told.positions[0]), (vec![Some(1_234_567)], 1_234_567));
}

#[test]
fn continues_after_cut_connections() {
    let (cache, content) = (Cache::new(), content());
    let cut = |cut_after| Answer::Content { bytes: content.clone(), cut_after };
    let script = vec![
        cut(1_500_000),
        Answer::Hangup,
        cut(100),
        Answer::Status("503 Busy"),
        cut(1_200_000),
        Answer::full(&content),
    ];
    // Three futile attempts in a row would be too many; the fifth request makes real progress.
    let (result, _, from) = pull_scripted(&cache, script[..2].iter().chain(&script[4..]).cloned().collect());
    assert_eq!(std::fs::read(result.unwrap()).unwrap(), content);
    assert_eq!(from, [None, Some(1_500_000), Some(1_500_000), Some(2_700_000)]);
    let other = Cache::new();
    let (result, _, from) = pull_scripted(&other, script);
    let message = result.unwrap_err().to_string();
    assert!(message.contains("broke off at 1500100 of 3000000 bytes, 3 times in a row"), "{message}");
    assert_eq!(from.len(), 3);
    assert_eq!(std::fs::metadata(other.partial()).unwrap().len(), 1_500_100, "kept for the next run");
}

#[test]
fn gives_up_on_a_server_that_only_hangs_up() {
    let cache = Cache::new();
    let (result, _, from) = pull_scripted(&cache, vec![Answer::Hangup]);
    let message = result.unwrap_err().to_string();
    assert!(message.contains("cannot be reached"), "{message}");
    assert_eq!(from.len(), 1);
}

#[test]
fn a_wrong_file_is_removed() {
    let (cache, mut wrong) = (Cache::new(), content());
    let expected = sha256(&wrong);
    wrong[2_999_999] ^= 1;
    let (result, _, _) = pull_scripted(&cache, vec![Answer::full(&wrong)]);
    let message = result.unwrap_err().to_string();
    assert!(message.contains(&format!("sha256 {}, expected {expected}", sha256(&wrong))), "{message}");
    assert!(!cache.partial().exists() && !cache.file().exists());
    // The next run starts afresh.
    pull_scripted(&cache, vec![Answer::full(&content())]).0.unwrap();
}

#[test]
fn a_file_of_another_size_is_refused_before_it_is_fetched() {
    let cache = Cache::new();
    let (result, told, _) = pull_scripted(&cache, vec![Answer::full(&content()[..2_000_000])]);
    let message = result.unwrap_err().to_string();
    assert!(message.contains("a file of 2000000 bytes, expected 3000000"), "{message}");
    assert!(told.positions.is_empty());
    // Also when it only turns out on the way.
    let longer = [content(), vec![0; 10]].concat();
    let (result, _, _) = pull_scripted(&cache, vec![Answer::Unsized(longer)]);
    assert!(matches!(result, Err(PullError::WrongSize { expected: 3_000_000, .. })));
}

#[test]
fn an_unsized_answer_is_complete_or_continued() {
    let (cache, content) = (Cache::new(), content());
    let script = vec![Answer::Unsized(content[..1_000].to_vec()), Answer::full(&content)];
    let (result, _, from) = pull_scripted(&cache, script);
    assert_eq!(std::fs::read(result.unwrap()).unwrap(), content);
    assert_eq!(from, [None, Some(1_000)]);
    pull_scripted(&Cache::new(), vec![Answer::Unsized(content)]).0.unwrap();
}

#[test]
fn a_server_without_ranges_starts_over() {
    let (cache, content) = (Cache::new(), content());
    cache.put_partial(&content[..1_000_000]);
    let (result, _, from) = pull_scripted(&cache, vec![Answer::Whole(content.clone())]);
    assert_eq!(std::fs::read(result.unwrap()).unwrap(), content);
    assert_eq!(from, [Some(1_000_000)]);
}

#[test]
fn a_refused_range_starts_over() {
    let (cache, content) = (Cache::new(), content());
    cache.put_partial(&content[..1_000_000]);
    let script = vec![Answer::Status("416 Range Not Satisfiable"), Answer::full(&content)];
    let (result, _, from) = pull_scripted(&cache, script);
    assert_eq!(std::fs::read(result.unwrap()).unwrap(), content);
    assert_eq!(from, [Some(1_000_000), None]);
}

#[test]
fn a_partial_file_that_is_too_long_or_complete_is_handled() {
    let (cache, content) = (Cache::new(), content());
    cache.put_partial(&vec![0; 3_000_001]);
    let (_, _, from) = pull_scripted(&cache, vec![Answer::full(&content)]);
    assert_eq!(from, [None]);
    let other = Cache::new();
    other.put_partial(&content);
    let (result, _, from) = pull_scripted(&other, vec![Answer::Hangup]);
    assert_eq!(std::fs::read(result.unwrap()).unwrap(), content);
    assert!(from.is_empty());
}

#[test]
fn redirects_keep_the_range() {
    let (cache, content) = (Cache::new(), content());
    cache.put_partial(&content[..500_000]);
    let storage = Server::of(&content);
    let line = format!("302 Found\r\nLocation: {}/storage/tiny", storage.endpoint());
    let (result, _, from) = pull_scripted(&cache, vec![Answer::Status(line.leak())]);
    assert_eq!(std::fs::read(result.unwrap()).unwrap(), content);
    assert_eq!(from, [Some(500_000)]);
    let asked = server::Request { path: "/storage/tiny".into(), from: Some(500_000), token: None };
    assert_eq!(storage.requests(), [asked]);
}

#[test]
fn endless_redirects_end() {
    let cache = Cache::new();
    let (result, _, from) = pull_scripted(&cache, vec![Answer::Status("302 Found\r\nLocation: /again")]);
    assert!(matches!(result, Err(PullError::Unavailable { .. })), "{result:?}");
    assert!(from.len() < 20);
}

#[test]
fn not_found_is_said_once_with_the_address() {
    let cache = Cache::new();
    let (result, _, from) = pull_scripted(&cache, vec![Answer::Status("404 Not Found")]);
    let message = result.unwrap_err().to_string();
    assert!(message.contains("/owner/repo/resolve/0123abcd/tiny.gguf answered with status 404"), "{message}");
    assert_eq!(from.len(), 1);
}

#[test]
fn offline_is_one_sentence_with_a_way_out() {
    let cache = Cache::new();
    let (result, _) = pull_once(&model(&content(), true, &[]), &cache, &nobody(), &NoWheels);
    let message = result.unwrap_err().to_string();
    assert!(message.starts_with("cannot fetch tiny: http://127.0.0.1:"), "{message}");
    assert!(
        message.contains("cannot be reached") && message.contains("run `lockstep pull tiny` again"),
        "{message}"
    );
    assert_eq!(message.lines().count(), 1);
}

#[test]
fn the_environment_says_which_hub_and_how() {
    let options = |variables: &[(&str, &str)]| {
        let find =
            |name: &str| variables.iter().find(|(key, _)| *key == name).map(|(_, value)| value.to_string());
        let HubOptions { endpoint, token, offline, .. } = HubOptions::from_variables(find);
        (endpoint, token.map(|token| token.0), offline)
    };
    assert_eq!(options(&[]), ("https://huggingface.co".into(), None, false));
    let mirror =
        [("HF_ENDPOINT", "http://mirror/hf/"), ("HF_TOKEN", " hf_a\n"), ("HUGGING_FACE_HUB_TOKEN", "hf_b")];
    assert_eq!(options(&mirror), ("http://mirror/hf".into(), Some("hf_a".into()), false));
    assert_eq!(options(&[("HF_TOKEN", ""), ("HUGGING_FACE_HUB_TOKEN", "hf_b")]).1, Some("hf_b".into()));
    for (value, offline) in [("1", true), ("True", true), ("0", false), ("", false), ("no", false)] {
        assert_eq!(options(&[("HF_HUB_OFFLINE", value)]).2, offline, "{value:?}");
    }
}

#[test]
fn a_hub_that_must_not_be_asked_is_not() {
    let (cache, server) = (Cache::new(), Server::of(&content()));
    let hub = HubOptions { offline: true, ..hub_at(&server.endpoint()) };
    let model = model(&content(), true, &[]);
    let result = pull_from(&model, &cache.0, &Sources { hub, wheels: &NoWheels }, &mut Told::default());
    assert!(result.unwrap_err().to_string().contains("because HF_HUB_OFFLINE is set"));
    assert!(server.requests().is_empty());
}
