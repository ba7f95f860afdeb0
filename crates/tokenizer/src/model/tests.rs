use super::*;
use crate::test_models::{CHATML, TempFolder, byte_folder};
use serde_json::json;

fn chat(content: &str) -> Prompt {
    Prompt::Chat(ChatMessages {
        messages_json: json!([{"role": "user", "content": content}]).to_string(),
        tools_json: None,
        template_kwargs_json: None,
        add_generation_prompt: true,
    })
}

fn load(folder: &TempFolder, context_max: Option<usize>) -> TextModel {
    TextModel::load(folder.path(), &TextOptions { context_max, ..TextOptions::default() }).unwrap()
}

#[test]
fn the_beginning_token_comes_once() {
    let template = format!("{{{{ bos_token }}}}{CHATML}");
    let model = load(&byte_folder(true, json!({ "chat_template": template })), None);
    // bos, im_start, user\n, ab, im_end, \n, im_start, assistant\n
    let prompt = model.encode_prompt(&chat("ab")).unwrap();
    assert_eq!(prompt.len(), 22);
    assert_eq!(prompt.iter().filter(|id| **id == 256).count(), 1);
    assert_eq!(model.encode_prompt(&Prompt::Text("ab".into())).unwrap(), [256, 97, 98]);
    assert_eq!(model.encode_prompt(&Prompt::Text("<|bos|>ab".into())).unwrap(), [256, 97, 98]);
    assert_eq!(model.encode_prompt(&Prompt::Text("<|bos|><|bos|>a".into())).unwrap(), [256, 256, 97]);
    assert_eq!(model.encode_prompt(&Prompt::Tokens(vec![97])).unwrap(), [97]);
}

#[test]
fn special_tokens_in_user_text_are_parsed() {
    let model = load(&byte_folder(false, json!({ "chat_template": CHATML })), None);
    assert_eq!(model.encode("a<|im_end|>", false).unwrap(), [97, 259]);
    let with = model.encode_prompt(&chat("a<|im_end|>")).unwrap().len();
    assert_eq!(with, model.encode_prompt(&chat("a")).unwrap().len() + 1);
}

#[test]
fn prompts_are_refused_at_the_context_and_early() {
    let model = load(&byte_folder(false, json!({})), Some(64));
    assert_eq!(model.encode_prompt(&Prompt::Text("a".repeat(63))).unwrap().len(), 63);
    for len in [64, 65, 1000, 1_000_000, 30_000_000] {
        let refusal = model.encode_prompt(&Prompt::Text("a".repeat(len))).unwrap_err();
        assert_eq!(
            (refusal.status, refusal.code.as_deref()),
            (400, Some("context_length_exceeded")),
            "{len}"
        );
        assert_eq!(refusal.param.as_deref(), Some("prompt"));
        assert!(refusal.message.contains("64 tokens"), "{}", refusal.message);
    }
    for len in [1000, 1_000_000] {
        let exact = model.encode_prompt(&Prompt::Text("a".repeat(len))).unwrap_err().message;
        assert!(exact.contains(&format!("the prompt has {len} tokens")), "{exact}");
    }
    let early = model.encode_prompt(&Prompt::Text("a".repeat(2_000_000))).unwrap_err().message;
    assert!(early.contains("has at least "), "{early}");
    let special = "<|eot|>".repeat(40);
    assert_eq!(model.encode_prompt(&Prompt::Text(special)).unwrap().len(), 40);
    let tokens = model.encode_prompt(&Prompt::Tokens(vec![97; 64])).unwrap_err();
    assert_eq!(tokens.code.as_deref(), Some("context_length_exceeded"));
}

#[test]
fn an_early_refusal_never_hits_a_prompt_that_fits() {
    // 1.2 MB are above the size that is encoded in one go, but few tokens.
    let model = load(&byte_folder(false, json!({})), Some(200_001));
    let text = " alpha".repeat(200_000);
    assert_eq!(model.encode_prompt(&Prompt::Text(text.clone())).unwrap().len(), 200_000);
    let model = load(&byte_folder(false, json!({})), Some(200_000));
    let refusal = model.encode_prompt(&Prompt::Text(text)).unwrap_err();
    assert!(refusal.message.contains("the prompt has 200000 tokens"), "{}", refusal.message);
}

/// A tokenizer that drops white space, so that any number of bytes can be few tokens.
#[test]
fn padding_is_accepted_up_to_a_limit_in_bytes() {
    let folder = TempFolder::new();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": {"w0": 0, "w1": 1}, "unk_token": "w0"}
    });
    folder.write("tokenizer.json", file.to_string());
    let model = load(&folder, Some(40_000));
    let prompt = |spaces: usize| Prompt::Text(format!("w1{}w0", " ".repeat(spaces)));
    assert_eq!(model.encode_prompt(&prompt(1_200_000)).unwrap(), [1, 0]);
    let refusal = model.encode_prompt(&prompt(1_300_000)).unwrap_err();
    assert_eq!(refusal.code.as_deref(), Some("context_length_exceeded"));
    assert!(
        refusal.message.contains("1300004 bytes") && refusal.message.contains("1279968"),
        "{}",
        refusal.message
    );
}

#[test]
fn bad_ids_and_empty_prompts_are_400() {
    let model = load(&byte_folder(false, json!({ "chat_template": "{{ messages[0].content }}" })), None);
    assert_eq!(model.vocab_size(), 267);
    let refusal = model.encode_prompt(&Prompt::Tokens(vec![1, 267])).unwrap_err();
    assert_eq!(refusal.status, 400);
    assert!(refusal.message.contains("267"), "{}", refusal.message);
    for prompt in [Prompt::Tokens(vec![]), Prompt::Text(String::new()), chat("")] {
        assert_eq!(model.encode_prompt(&prompt).unwrap_err().status, 400, "{prompt:?}");
    }
    let options = TextOptions { vocab_size: Some(100), ..TextOptions::default() };
    let small = TextModel::load(byte_folder(false, json!({})).path(), &options).unwrap();
    assert_eq!(small.encode_prompt(&Prompt::Text("z".into())).unwrap_err().status, 400);
}

#[test]
fn end_tokens_in_both_forms() {
    let folder = byte_folder(false, json!({}));
    assert_eq!(load(&folder, None).eos_tokens(), [257]);
    assert_eq!(eos_tokens_of(folder.path()).unwrap(), [257]);
    let folder = byte_folder(false, json!({"eos_token": "<|eot|>"}));
    assert_eq!(load(&folder, None).eos_tokens(), [260]);
    let folder = byte_folder(false, json!({"eos_token": null}));
    assert!(load(&folder, None).eos_tokens().is_empty());
    folder.write("special_tokens_map.json", json!({"eos_token": "<|im_end|>"}).to_string());
    assert_eq!(eos_tokens_of(folder.path()).unwrap(), [259]);
}

#[test]
fn a_named_special_token_of_the_vocabulary_becomes_special() {
    // "z" is an ordinary token until the config calls it the end token.
    let model = load(&byte_folder(false, json!({"eos_token": "z"})), None);
    assert_eq!(model.decode(&[97, 122, 98], true), "ab");
    assert_eq!(model.decode(&[97, 122, 98], false), "azb");
}

#[test]
fn templates_come_from_the_documented_places_in_order() {
    let render = |model: &TextModel| model.encode_prompt(&chat("x")).map(|ids| model.decode(&ids, false));
    let folder = byte_folder(false, json!({"chat_template": "config"}));
    assert_eq!(render(&load(&folder, None)).unwrap(), "config");
    folder.write("chat_template.json", json!({"chat_template": "json"}).to_string());
    assert_eq!(render(&load(&folder, None)).unwrap(), "json");
    folder.write("chat_template.jinja", "jinja");
    assert_eq!(render(&load(&folder, None)).unwrap(), "jinja");
    folder.write("mine.jinja", "mine {{ messages[0].content }}");
    let options =
        TextOptions { chat_template: Some(folder.path().join("mine.jinja")), ..TextOptions::default() };
    assert_eq!(render(&TextModel::load(folder.path(), &options).unwrap()).unwrap(), "mine x");
    std::fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
    folder
        .write("additional_chat_templates/tool_use.jinja", "with tools")
        .write("additional_chat_templates/note.txt", "x");
    let mut with_tools = chat("x");
    if let Prompt::Chat(chat) = &mut with_tools {
        chat.tools_json = Some(r#"[{"type": "function"}]"#.into());
    }
    let model = load(&folder, None);
    assert_eq!(model.decode(&model.encode_prompt(&with_tools).unwrap(), false), "with tools");
    assert_eq!(crate::chat_template_text(folder.path(), None).unwrap().as_deref(), Some("jinja\nwith tools"));
}

#[test]
fn a_missing_or_broken_template_refuses_chats_only() {
    for extra in [json!({}), json!({"chat_template": "{% if %}"})] {
        let model = load(&byte_folder(false, extra), None);
        let why = model.chat_error().expect("chats cannot work").to_owned();
        assert!(why.contains("/v1/completions"), "{why}");
        let refusal = model.encode_prompt(&chat("ab")).unwrap_err();
        assert_eq!((refusal.status, refusal.message), (400, why));
        assert_eq!(model.encode_prompt(&Prompt::Text("ab".into())).unwrap(), [97, 98]);
    }
}

#[test]
fn damaged_files_are_named() {
    let good = byte_folder(false, json!({}));
    let tokenizer = std::fs::read(good.path().join("tokenizer.json")).unwrap();
    let config = "{\"eos_token\": ";
    let folders = [
        (TempFolder::new(), "tokenizer.json"),
        (TempFolder::new(), "tokenizer.json"),
        (TempFolder::new(), "tokenizer_config.json"),
        (TempFolder::new(), "tokenizer.json"),
    ];
    folders[1].0.write("tokenizer.json", &tokenizer[..tokenizer.len() / 2]);
    folders[2].0.write("tokenizer.json", &tokenizer).write("tokenizer_config.json", config);
    folders[3].0.write("tokenizer.json", r#"{"version":"1.0","model":{"type":"Nonsense"}}"#);
    for (folder, file) in &folders {
        let error = TextModel::load(folder.path(), &TextOptions::default()).unwrap_err().to_string();
        assert!(error.contains(file) && error.contains("again"), "{error}");
    }
    let error = TextModel::load(Path::new("/nonexistent/x.gguf"), &TextOptions::default()).unwrap_err();
    assert!(matches!(error, TokenizerError::Missing { .. }), "{error}");
    good.write("fake.gguf", "not a model");
    assert!(TextModel::load(&good.path().join("fake.gguf"), &TextOptions::default()).is_err());
}

/// Found by the fuzzer: the library loads a template that names a token it does not list, and panics on every text.
#[test]
fn a_tokenizer_that_takes_no_text_is_refused_at_load() {
    let folder = byte_folder(true, json!({}));
    let mut file: serde_json::Value =
        serde_json::from_slice(&std::fs::read(folder.path().join("tokenizer.json")).unwrap()).unwrap();
    file["post_processor"] = json!({"type": "TemplateProcessing", "special_tokens": {},
        "single": [{"SpecialToken": {"id": "<|bos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]});
    folder.write("tokenizer.json", file.to_string());
    let error = TextModel::load(folder.path(), &TextOptions::default()).unwrap_err().to_string();
    assert!(error.contains("gives up on any text"), "{error}");
}

#[test]
fn a_decoder_that_cannot_stream_is_refused_by_name() {
    let folder = byte_folder(false, json!({}));
    let text = std::fs::read_to_string(folder.path().join("tokenizer.json")).unwrap();
    let mut file: serde_json::Value = serde_json::from_str(&text).unwrap();
    file["decoder"] =
        json!({"type": "CTC", "pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": true});
    folder.write("tokenizer.json", file.to_string());
    let error = TextModel::load(folder.path(), &TextOptions::default()).unwrap_err().to_string();
    assert!(error.contains("CTC") && error.contains("ByteLevel"), "{error}");
}

#[test]
fn a_request_says_what_is_added_and_how_much_is_kept() {
    let template = format!("{{{{ bos_token }}}}{CHATML}");
    let model = load(&byte_folder(true, json!({ "chat_template": template })), Some(64));
    let encode = |prompt: &Prompt, add_special_tokens, keep_last| {
        model
            .encode_prompt_as(prompt, &TokenizeParams { add_special_tokens, keep_last, ..Default::default() })
    };
    let text = Prompt::Text("abc".into());
    assert_eq!(encode(&text, Some(false), None).unwrap(), [97, 98, 99]);
    assert_eq!(encode(&text, Some(true), Some(2)).unwrap(), [98, 99]);
    assert_eq!(encode(&text, None, Some(9)).unwrap(), [256, 97, 98, 99]);
    let plain = model.encode_prompt(&chat("ab")).unwrap();
    assert_eq!(encode(&chat("ab"), Some(true), None).unwrap(), plain, "the template wrote it already");
    assert_eq!(encode(&chat("ab"), None, Some(3)).unwrap(), plain[plain.len() - 3..]);
    assert_eq!(encode(&Prompt::Tokens(vec![97; 100]), None, Some(5)).unwrap(), [97; 5]);
    assert_eq!(encode(&Prompt::Text("a".repeat(1000)), None, Some(63)).unwrap(), [97; 63]);
    let refusal = encode(&Prompt::Text("a".repeat(1000)), None, Some(64)).unwrap_err();
    assert_eq!(refusal.code.as_deref(), Some("context_length_exceeded"));
    assert!(encode(&Prompt::Text("a".repeat(2_000_000)), None, Some(8)).is_err(), "bytes stay bounded");
}

#[test]
fn words_are_spelled_with_and_without_a_space() {
    let model = load(&byte_folder(true, json!({})), None);
    let alpha = model.encode(" alpha", false).unwrap();
    let words = model.encode_words(&["alpha".into(), " alpha".into(), "x".into(), "".into()]).unwrap();
    assert!(words.contains(&alpha) && words.contains(&vec![97, 108, 112, 104, 97]), "{words:?}");
    assert!(words.contains(&vec![120]) && words.contains(&vec![32, 120]), "{words:?}");
    assert_eq!(words.len(), 4, "{words:?}");
}
