use crate::model::{TextModel, TextOptions};
use crate::test_models::{TempFolder, WORDS, byte_folder};
use crate::test_rng::Rng;
use lockstep_wire::TextParams;
use serde_json::{Value, json};
use tokenizers::Tokenizer;

fn params(stop: &[&str]) -> TextParams {
    TextParams {
        stop: stop.iter().map(|s| (*s).to_owned()).collect(),
        skip_special_tokens: true,
        ..TextParams::default()
    }
}

fn load(folder: &TempFolder) -> TextModel {
    TextModel::load(folder.path(), &TextOptions::default()).unwrap()
}

/// Chunks as a client would see them; the last is the flush.
fn stream(model: &TextModel, ids: &[u32], stop: &[&str]) -> (Vec<String>, bool) {
    let mut decoder = model.decoder(&params(stop));
    let mut chunks = Vec::new();
    for &id in ids {
        let mut chunk = String::new();
        let stopped = model.push_token(&mut decoder, id, &mut chunk);
        chunks.push(chunk);
        if stopped {
            return (chunks, true);
        }
    }
    let mut last = String::new();
    let stopped = model.finish_text(&mut decoder, &mut last);
    chunks.push(last);
    (chunks, stopped)
}

fn text(model: &TextModel, ids: &[u32], stop: &[&str]) -> (String, bool) {
    let (chunks, stopped) = stream(model, ids, stop);
    (chunks.concat(), stopped)
}

fn word(text: &str) -> u32 {
    261 + WORDS.iter().position(|w| *w == text).unwrap() as u32
}

#[test]
fn characters_are_never_split() {
    let model = load(&byte_folder(false, json!({})));
    let mut ids: Vec<u32> = "😀é漢".bytes().map(u32::from).collect();
    ids.push(word(" ok"));
    let (chunks, _) = stream(&model, &ids, &[]);
    assert_eq!(chunks.concat(), "😀é漢 ok");
    assert!(chunks.iter().all(|c| !c.contains('\u{fffd}')), "{chunks:?}");
    assert_eq!(chunks[3], "😀");
    assert_eq!(text(&model, &[0xF0, 0x9F], &[]).0, "\u{fffd}", "an incomplete tail shows at the end");
}

#[test]
fn the_stop_cases_of_the_case_book() {
    let model = load(&byte_folder(false, json!({})));
    let stop_ids: Vec<u32> = "STOP!".bytes().map(u32::from).collect();
    let cases: [(&[&str], &str); 5] =
        [(&["TOP"], "S"), (&["P!", "TO"], "S"), (&["STOP!"], ""), (&["T"], "S"), (&["x", "!"], "STOP")];
    for (stop, expected) in cases {
        assert_eq!(text(&model, &stop_ids, stop), (expected.into(), true), "{stop:?}");
    }
    let greek = [" alpha", " beta", " gamma", " delta"].map(word);
    assert_eq!(text(&model, &greek, &["ta ga"]), (" alpha be".into(), true));
    assert_eq!(text(&model, &greek, &[]).0, " alpha beta gamma delta");
    let emoji: Vec<u32> = "😀é漢".bytes().map(u32::from).collect();
    assert_eq!(text(&model, &emoji, &["é漢"]), ("😀".into(), true));
    let mut near: Vec<u32> = "<|end".bytes().map(u32::from).collect();
    near.push(word(" not"));
    assert_eq!(text(&model, &near, &["<|end|>"]), ("<|end not".into(), false));
}

#[test]
fn special_tokens_go_by_id_not_by_text() {
    let model = load(&byte_folder(false, json!({})));
    let mut ids = vec![97, 259, 98];
    ids.extend("<|im_end|>".bytes().map(u32::from));
    assert_eq!(text(&model, &ids, &[]).0, "ab<|im_end|>");
    assert_eq!(model.decode(&ids, false), "a<|im_end|>b<|im_end|>");
    assert_eq!(text(&model, &[97, 9999, 98], &[]).0, "ab", "ids without a token have no text");
}

/// A tokenizer of words with a given decoder; `<0xXX>` tokens for all bytes.
fn word_model(decoder: Value, words: &[&str]) -> (TempFolder, TextModel, Tokenizer) {
    let mut vocab = serde_json::Map::new();
    for byte in 0..=255_u32 {
        vocab.insert(format!("<0x{byte:02X}>"), byte.into());
    }
    for (index, word) in words.iter().enumerate() {
        vocab.insert((*word).into(), (256 + index).into());
    }
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": 256, "content": words[0], "special": true, "single_word": false,
                          "lstrip": false, "rstrip": false, "normalized": false}],
        "normalizer": null, "pre_tokenizer": null, "post_processor": null, "decoder": decoder,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": words[1]}
    });
    let folder = TempFolder::new();
    folder.write("tokenizer.json", file.to_string());
    let library = Tokenizer::from_file(folder.path().join("tokenizer.json")).unwrap();
    let model = load(&folder);
    (folder, model, library)
}

const LLAMA2: &str = r#"{"type":"Sequence","decoders":[
    {"type":"Replace","pattern":{"String":"▁"},"content":" "},{"type":"ByteFallback"},{"type":"Fuse"},
    {"type":"Strip","content":" ","start":1,"stop":0}]}"#;

/// Each decoder kind against the library's own full decode, on random ids.
#[test]
fn every_decoder_kind_equals_the_full_decode() {
    let decoders = [
        LLAMA2.to_owned(),
        r#"{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},
            {"type":"ByteFallback"},{"type":"Fuse"}]}"#
            .into(),
        r#"{"type":"Metaspace","replacement":"▁","prepend_scheme":"always","split":true}"#.into(),
        r#"{"type":"Metaspace","replacement":"▁","prepend_scheme":"never","split":true}"#.into(),
        r###"{"type":"WordPiece","prefix":"##","cleanup":true}"###.into(),
        r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":false}"#.into(),
        "null".into(),
    ];
    let words = ["<s>", "<unk>", "▁", "▁▁", "▁the", "cat", "##s", ".", "▁é漢", "n't", "Ġx", "Ã", "©"];
    for decoder in decoders {
        let decoder: Value = serde_json::from_str(&decoder).unwrap();
        let (_folder, model, library) = word_model(decoder.clone(), &words);
        let mut rng = Rng::new(23);
        for _ in 0..3000 {
            let ids = random_ids(&mut rng, words.len());
            for skip in [true, false] {
                let expected = library.decode(&ids, skip).unwrap();
                assert_eq!(model.decode(&ids, skip), expected, "decoder {decoder} ids {ids:?}");
            }
        }
    }
}

/// Words, and characters spelt in byte tokens (valid ones: see the module's documented difference).
fn random_ids(rng: &mut Rng, words: usize) -> Vec<u32> {
    let mut ids = Vec::new();
    for _ in 0..rng.below(10) {
        match rng.below(4) {
            0 => ids.extend(["é", "漢", "😀", " "][rng.below(4)].bytes().map(u32::from)),
            _ => ids.push(256 + rng.below(words) as u32),
        }
    }
    if rng.below(4) == 0 {
        // An incomplete character at the end of a run.
        ids.extend([256 + 5, 0xE6, 0xBC]);
    }
    ids
}

#[test]
fn the_first_space_of_a_sentencepiece_answer_follows_the_decoder() {
    let (_folder, model, _) =
        word_model(serde_json::from_str(LLAMA2).unwrap(), &["<s>", "<unk>", "▁a", "▁b"]);
    assert_eq!(stream(&model, &[258, 259], &[]).0, ["a", " b", ""]);
}

#[test]
fn cleanup_is_applied_only_when_the_model_asks() {
    let ids: Vec<u32> = "a . b n't".bytes().map(u32::from).collect();
    let folder = byte_folder(false, json!({"clean_up_tokenization_spaces": true}));
    let model = load(&folder);
    assert_eq!(text(&model, &ids, &[]).0, "a. bn't");
    assert_eq!(text(&model, &ids, &[". b"]), ("a".into(), true));
    assert_eq!(text(&load(&byte_folder(false, json!({}))), &ids, &[]).0, "a . b n't");
}

/// Counts bytes that are looked at, not time: a stream that decoded its text anew would look at five billion.
#[test]
fn tokens_that_decode_to_nothing_cost_as_much_as_others() {
    const TOKENS: u32 = 100_000;
    let model = load(&byte_folder(false, json!({"clean_up_tokenization_spaces": true})));
    // The first token of each kind, and how many there are.
    for (kind, first, count) in [
        ("special", 258, 1),
        ("no such token", 9999, 1),
        ("continuation bytes", 0x80, 64),
        ("first bytes", 0xF0, 1),
    ] {
        let mut decoder = model.decoder(&params(&["never", "\u{fffd}x"]));
        let mut out = String::new();
        super::work::take();
        for i in 0..TOKENS {
            model.push_token(&mut decoder, first + i % count, &mut out);
        }
        model.finish_text(&mut decoder, &mut out);
        let bytes = super::work::take();
        assert!(bytes <= 64 * u64::from(TOKENS), "{kind}: {bytes} bytes were looked at");
    }
}

#[test]
fn a_kept_stop_string_ends_the_text() {
    let model = load(&byte_folder(false, json!({})));
    let params = TextParams { keeps_stop: true, ..params(&["é漢"]) };
    let (mut decoder, mut out) = (model.decoder(&params), String::new());
    let stopped = "aé漢b".bytes().any(|byte| model.push_token(&mut decoder, byte.into(), &mut out));
    assert_eq!((out.as_str(), stopped), ("aé漢", true));
}
