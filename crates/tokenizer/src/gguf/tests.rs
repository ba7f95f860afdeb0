use super::*;
use crate::model::{TextModel, TextOptions};
use crate::test_models::byte_char;
use crate::test_rng::Rng;
use serde::Deserialize;

#[derive(Deserialize)]
struct Golden {
    text: String,
    ids: Vec<TokenId>,
}

/// A real model file, if this machine has it: `$LOCKSTEP_MODELS`, else the default cache folder.
fn real_model(file: &str) -> Option<TextModel> {
    let folder = std::env::var_os("LOCKSTEP_MODELS")
        .map(PathBuf::from)
        .or_else(lockstep_core::folders::cache_folder)?;
    let path = folder.join(file);
    if !path.exists() {
        println!("skipped: {} is not there; set LOCKSTEP_MODELS to the folder that holds it", path.display());
        return None;
    }
    Some(TextModel::load(&path, &TextOptions::default()).unwrap())
}

/// The ids were made by an independent byte-level BPE in Python (regex module, merges by rank), and for
/// SmolLM2 also by the reference that produced the expected answers.
fn check(file: &str, golden: &str) {
    let Some(model) = real_model(file) else { return };
    let cases: Vec<Golden> = serde_json::from_str(golden).unwrap();
    for case in cases {
        assert_eq!(model.encode(&case.text, false).unwrap(), case.ids, "text {:?}", case.text);
        let is_nfc = !case.text.contains('\u{301}');
        if is_nfc {
            assert_eq!(model.decode(&case.ids, false), case.text);
        }
    }
}

#[test]
fn smollm2_gives_the_reference_ids() {
    check("smollm2-135m.gguf", include_str!("golden_smollm2.json"));
}

#[test]
fn qwen2_5_gives_the_reference_ids() {
    check("qwen2.5-coder-0.5b.gguf", include_str!("golden_qwen2.5.json"));
}

#[test]
fn smollm2_renders_its_own_template() {
    let Some(model) = real_model("smollm2-135m.gguf") else { return };
    let chat = lockstep_wire::ChatMessages {
        messages_json: r#"[{"role":"user","content":"What is the capital of France?"}]"#.into(),
        tools_json: None,
        template_kwargs_json: None,
        add_generation_prompt: true,
    };
    let expected = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging \
                    Face<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n";
    assert_eq!(model.render_chat(&chat).unwrap(), expected);
    assert_eq!(model.eos_tokens(), [2]);
    assert_eq!(model.encode_prompt(&lockstep_wire::Prompt::Chat(chat)).unwrap().len(), 37);
}

/// One token per byte, `merges`, and three special tokens at the end.
fn byte_vocab(pre: &str, merges: &[&str]) -> GgufVocab {
    let mut tokens: Vec<String> = (0..=255_u8).map(|b| byte_char(b).to_string()).collect();
    tokens.extend(merges.iter().map(|m| m.replace(' ', "")));
    let mut token_types = vec![1; tokens.len()];
    tokens.extend(["<s>", "</s>", "<tool>", "[PAD0]"].map(String::from));
    token_types.extend([3, 3, 4, 5]);
    let first_special = tokens.len() as TokenId - 4;
    GgufVocab {
        model: "gpt2".into(),
        pre: Some(pre.into()),
        token_types,
        merges: merges.iter().map(|m| (*m).into()).collect(),
        bos: Some(first_special),
        eos: Some(first_special + 1),
        ends: vec![first_special + 1],
        tokens,
        ..GgufVocab::default()
    }
}

fn ids(vocab: &GgufVocab, text: &str, add_special: bool) -> Vec<TokenId> {
    vocab.tokenizer().unwrap().encode(text, add_special).unwrap().get_ids().to_vec()
}

#[test]
fn every_name_builds_and_an_unknown_one_is_refused() {
    for name in pretokenizer::NAMES {
        byte_vocab(name, &["a b"]).tokenizer().unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    let error = byte_vocab("tekken-9", &[]).tokenizer().unwrap_err().to_string();
    assert!(error.contains("tekken-9") && error.contains("qwen2"), "{error}");
    let vocab = GgufVocab { model: "t5".into(), ..byte_vocab("qwen2", &[]) };
    assert!(vocab.tokenizer().unwrap_err().to_string().contains("\"t5\""));
}

#[test]
fn pre_tokenizers_cut_where_their_originals_do() {
    // "1 2" is a token only if digits may stand together.
    let merges = ["1 2", "12 3", "123 4", "Ġ a"];
    assert_eq!(ids(&byte_vocab("smollm", &merges), "1234", false).len(), 4);
    assert_eq!(ids(&byte_vocab("qwen2", &merges), "1234", false).len(), 4);
    assert_eq!(ids(&byte_vocab("llama-bpe", &merges), "1234", false).len(), 2);
    assert_eq!(ids(&byte_vocab("gpt-2", &merges), "1234", false).len(), 1);
    assert_eq!(ids(&byte_vocab("default", &merges), "1234", false).len(), 2);
    assert_eq!(
        ids(&byte_vocab("qwen2", &merges), "\u{41}\u{30a}", false),
        ids(&byte_vocab("qwen2", &merges), "\u{c5}", false)
    );
    assert_ne!(
        ids(&byte_vocab("smollm", &merges), "\u{41}\u{30a}", false),
        ids(&byte_vocab("smollm", &merges), "\u{c5}", false)
    );
}

#[test]
fn special_tokens_by_type_and_beginning_token_by_key_or_convention() {
    let vocab = byte_vocab("qwen2", &[]);
    assert_eq!(ids(&vocab, "<s>a<tool></s>", true), [256, 97, 258, 257]);
    assert_eq!(ids(&vocab, "[PAD0]", true).len(), 6, "unused tokens are ordinary text");
    let tokenizer = vocab.tokenizer().unwrap();
    assert_eq!(tokenizer.decode(&[256, 97, 258], true).unwrap(), "a<tool>");
    assert_eq!(ids(&byte_vocab("llama-bpe", &[]), "a", true), [256, 97]);
    let off = GgufVocab { add_bos: Some(false), ..byte_vocab("llama-bpe", &[]) };
    assert_eq!(ids(&off, "a", true), [97]);
    let both = GgufVocab { add_bos: Some(true), add_eos: Some(true), ..vocab };
    assert_eq!(ids(&both, "a", true), [256, 97, 257]);
}

#[test]
fn damaged_metadata_is_an_error() {
    let good = byte_vocab("qwen2", &["a b"]);
    let broken = [
        GgufVocab { tokens: Vec::new(), ..good.clone() },
        GgufVocab { token_types: vec![1; 3], ..good.clone() },
        GgufVocab { merges: vec!["ab".into()], ..good.clone() },
        GgufVocab { merges: vec!["a zz".into()], ..good.clone() },
        GgufVocab { merges: vec!["a c".into()], ..good.clone() },
        GgufVocab { bos: Some(9999), ..good.clone() },
        GgufVocab { ends: vec![9999], ..good.clone() },
        GgufVocab { model: "llama".into(), ..good.clone() },
    ];
    for (index, vocab) in broken.iter().enumerate() {
        let error = vocab.tokenizer().expect_err(&format!("case {index}"));
        assert!(matches!(error, TokenizerError::Malformed { .. }), "case {index}: {error}");
    }
    // The first of two equal tokens wins; nothing panics.
    let mut twice = byte_vocab("qwen2", &[]);
    twice.tokens[98] = "a".into();
    assert_eq!(ids(&twice, "a", false), [97]);
}

/// SentencePiece's algorithm: join the neighbouring pair with the best score, leftmost first.
fn sentencepiece(vocab: &HashSetVocab, text: &str) -> Vec<TokenId> {
    let text = format!("\u{2581}{}", text.replace(' ', "\u{2581}"));
    let mut parts: Vec<String> = text.chars().map(String::from).collect();
    loop {
        let mut best: Option<(f32, usize)> = None;
        for i in 1..parts.len() {
            if let Some(&(_, score)) = vocab.get(&format!("{}{}", parts[i - 1], parts[i]))
                && best.is_none_or(|(s, _)| score > s)
            {
                best = Some((score, i));
            }
        }
        let Some((_, at)) = best else { break };
        let right = parts.remove(at);
        parts[at - 1].push_str(&right);
    }
    let byte_id = |b: u8| vocab[&format!("<0x{b:02X}>")].0;
    parts
        .iter()
        .flat_map(|p| match vocab.get(p) {
            Some((id, _)) => vec![*id],
            None => p.bytes().map(byte_id).collect(),
        })
        .collect()
}

type HashSetVocab = std::collections::HashMap<String, (TokenId, f32)>;

#[test]
fn sentencepiece_vocabularies_merge_by_score() {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend((0..=255_u8).map(|b| format!("<0x{b:02X}>")));
    let mut token_types = vec![2, 3, 3];
    token_types.extend([6; 256]);
    let pieces = [
        "\u{2581}t",
        "he",
        "\u{2581}the",
        "in",
        "\u{2581}a",
        "ing",
        "the",
        "at",
        "\u{2581}cat",
        "ca",
        "er",
        "\u{2581}in",
        "\u{2581}\u{2581}",
        "th",
        "\u{2581}th",
        "tt",
        "\u{2581}",
        "t",
        "h",
        "e",
        "i",
        "n",
        "a",
        "g",
        "c",
        "r",
    ];
    tokens.extend(pieces.map(String::from));
    token_types.extend([1; 26]);
    let mut scores = vec![0.0; 259];
    scores.extend((0..26).map(|rank| -(rank as f32)));
    let vocab = GgufVocab {
        model: "llama".into(),
        token_types,
        scores: scores.clone(),
        unk: Some(0),
        bos: Some(1),
        eos: Some(2),
        ends: vec![2],
        tokens: tokens.clone(),
        ..GgufVocab::default()
    };
    let tokenizer = vocab.tokenizer().unwrap();
    let table: HashSetVocab =
        tokens.into_iter().zip(scores).enumerate().map(|(id, (t, s))| (t, (id as TokenId, s))).collect();
    let mut rng = Rng::new(31);
    for _ in 0..3000 {
        let text: String = (0..1 + rng.below(12))
            .map(|_| ['t', 'h', 'e', 'i', 'n', 'a', 'g', 'c', 'r', ' ', 'é'][rng.below(11)])
            .collect();
        let got = tokenizer.encode(text.as_str(), true).unwrap();
        assert_eq!(got.get_ids()[0], 1, "the beginning token is added");
        assert_eq!(got.get_ids()[1..], sentencepiece(&table, &text), "text {text:?}");
        assert_eq!(tokenizer.decode(got.get_ids(), true).unwrap(), text);
    }
}

#[derive(Deserialize)]
struct Rendered {
    messages: serde_json::Value,
    tools: Option<serde_json::Value>,
    add_generation_prompt: bool,
    rendered: String,
}

/// The texts were rendered by Python's jinja2 with transformers' settings.
#[test]
fn qwen2_5_renders_tools_as_python_does() {
    let Some(model) = real_model("qwen2.5-coder-0.5b.gguf") else { return };
    let cases: Vec<Rendered> = serde_json::from_str(include_str!("../chat/golden_qwen2.5.json")).unwrap();
    for case in cases {
        let chat = lockstep_wire::ChatMessages {
            messages_json: case.messages.to_string(),
            tools_json: case.tools.map(|tools| tools.to_string()),
            template_kwargs_json: None,
            add_generation_prompt: case.add_generation_prompt,
        };
        assert_eq!(model.render_chat(&chat).unwrap(), case.rendered);
    }
}
