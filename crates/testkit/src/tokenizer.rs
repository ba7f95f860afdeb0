//! `tokenizer.json` files of the tiny models, as JSON values.
//!
//! * [`word`]: `w5 w6` is ids 5 6, so ids can be read back through any text API.
//! * [`byte_level`]: GPT-2 kind; one byte is one token, with a few whole words after them.
//! * [`metaspace`]: Llama-2 kind; `▁` for spaces, bytes as `<0xF0>`, decoder Replace, ByteFallback,
//!   Fuse, Strip.
//!
//! The layouts follow what the `tokenizers` library saves.

use serde_json::{Map, Value, json};

/// Special tokens of the byte-level vocabulary: ids 256 to 260.
pub const SPECIAL: [&str; 5] = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|eot|>"];

/// Whole-word tokens of the byte-level vocabulary: ids 261 and up.
pub const PIECES: [&str; 21] = [
    " alpha",
    " beta",
    " gamma",
    " delta",
    " tick",
    " tock",
    " ok",
    " not",
    " one",
    " two",
    " three",
    " x",
    " y",
    "\n\n",
    "data: [DONE]",
    " tail",
    " hello",
    " there",
    // A tool call in Hermes' form, in three tokens.
    "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"",
    "Rome",
    "\"}}\n</tool_call>",
];

/// Id of the first of [`PIECES`] in the byte-level vocabulary.
pub const FIRST_PIECE: u32 = 261;

/// Metaspace vocabulary: `<unk>`, `<s>`, `</s>`, then 256 bytes, then [`METASPACE_CHARS`].
pub const METASPACE_EOS: u32 = 2;
/// Id of byte 0 in the metaspace vocabulary.
pub const METASPACE_FIRST_BYTE: u32 = 3;
/// Single characters of the metaspace vocabulary; `▁` first.
pub const METASPACE_CHARS: &str =
    "▁ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789.,:;!?<>|_-+*/()[]{}'\"#";

/// Text of token ids for the word tokenizer.
pub fn words(ids: &[u32]) -> String {
    ids.iter().map(|id| format!("w{id}")).collect::<Vec<_>>().join(" ")
}

/// WordLevel over `w0 .. w{vocab-1}`, split at white space; unknown words are `w0`.
pub fn word(vocab: usize) -> Value {
    let words: Map<String, Value> = (0..vocab).map(|i| (format!("w{i}"), json!(i))).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": null, "decoder": null,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "w0"},
    })
}

/// BPE without merges over GPT-2's byte alphabet; `add_bos` makes the tokenizer itself put
/// `<|bos|>` in front.
pub fn byte_level(add_bos: bool) -> Value {
    let vocab: Map<String, Value> =
        byte_alphabet().iter().enumerate().map(|(byte, c)| (c.to_string(), json!(byte))).collect();
    let mut added: Vec<Value> =
        SPECIAL.iter().zip(256..).map(|(text, id)| added_token(text, id, true)).collect();
    added.extend(PIECES.iter().zip(FIRST_PIECE..).map(|(text, id)| added_token(text, id, false)));
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer":
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false},
        "post_processor": if add_bos { bos_template("<|bos|>", 256) } else { Value::Null },
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    })
}

/// BPE with byte fallback and `▁` for spaces, as Llama 2 has it; the tokenizer puts `<s>` in front.
pub fn metaspace() -> Value {
    let mut vocab: Map<String, Value> =
        ["<unk>", "<s>", "</s>"].iter().zip(0..).map(|(t, id)| ((*t).to_owned(), json!(id))).collect();
    for byte in 0..256_u32 {
        vocab.insert(format!("<0x{byte:02X}>"), json!(METASPACE_FIRST_BYTE + byte));
    }
    for (c, id) in METASPACE_CHARS.chars().zip(METASPACE_FIRST_BYTE + 256..) {
        vocab.insert(c.to_string(), json!(id));
    }
    for piece in metaspace_pieces() {
        let id = vocab.len();
        vocab.insert(piece, json!(id));
    }
    let special: Vec<Value> =
        ["<unk>", "<s>", "</s>"].iter().zip(0..).map(|(text, id)| added_token(text, id, true)).collect();
    json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": special,
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ]},
        "pre_tokenizer": null,
        "post_processor": bos_template("<s>", 1),
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ]},
        "model": {
            "type": "BPE", "dropout": null, "unk_token": "<unk>", "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": true, "byte_fallback": true, "ignore_merges": false,
            "vocab": vocab, "merges": [],
        },
    })
}

/// Id of `text` in the metaspace vocabulary: a character, or one of [`PIECES`] with a leading space.
pub fn metaspace_id(text: &str) -> Option<u32> {
    let first_char = METASPACE_FIRST_BYTE + 256;
    let mut chars = text.chars();
    if let (Some(c), None) = (chars.next(), chars.next()) {
        return METASPACE_CHARS.chars().position(|m| m == c).map(|i| first_char + i as u32);
    }
    let piece = text.replace(' ', "▁");
    let first_piece = first_char + METASPACE_CHARS.chars().count() as u32;
    metaspace_pieces().position(|p| p == piece).map(|i| first_piece + i as u32)
}

/// Entries of the metaspace vocabulary.
pub fn metaspace_vocab_len() -> usize {
    METASPACE_FIRST_BYTE as usize + 256 + METASPACE_CHARS.chars().count() + metaspace_pieces().count()
}

fn metaspace_pieces() -> impl Iterator<Item = String> {
    PIECES.iter().filter(|p| p.starts_with(' ')).map(|p| p.replace(' ', "▁"))
}

fn added_token(text: &str, id: u32, special: bool) -> Value {
    json!({"id": id, "content": text, "single_word": false, "lstrip": false, "rstrip": false,
           "normalized": false, "special": special})
}

fn bos_template(bos: &str, id: u32) -> Value {
    let bos_piece = json!({"SpecialToken": {"id": bos, "type_id": 0}});
    let text = |name: &str| json!({"Sequence": {"id": name, "type_id": 0}});
    json!({
        "type": "TemplateProcessing",
        "single": [bos_piece, text("A")],
        "pair": [bos_piece, text("A"), text("B")],
        "special_tokens": {bos: {"id": bos, "ids": [id], "tokens": [bos]}},
    })
}

/// GPT-2's printable stand-in for each byte.
fn byte_alphabet() -> Vec<char> {
    let mut next = 256_u32;
    (0..=255_u32)
        .map(|byte| {
            let printable = matches!(byte, 33..=126 | 161..=172 | 174..=255);
            let code = if printable { byte } else { next };
            next += u32::from(!printable);
            char::from_u32(code).expect("invariant: below the surrogates")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_alphabet_is_gpt2s() {
        let alphabet = byte_alphabet();
        assert_eq!(
            (alphabet[b'A' as usize], alphabet[b' ' as usize], alphabet[b'\n' as usize]),
            ('A', 'Ġ', 'Ċ')
        );
        let distinct: std::collections::BTreeSet<char> = alphabet.iter().copied().collect();
        assert_eq!(distinct.len(), 256);
    }

    #[test]
    fn metaspace_ids_agree_with_the_file() {
        let file = metaspace();
        let vocab = file["model"]["vocab"].as_object().unwrap();
        assert_eq!(vocab.len(), metaspace_vocab_len());
        assert_eq!(vocab["A"], json!(metaspace_id("A").unwrap()));
        assert_eq!(vocab["▁alpha"], json!(metaspace_id(" alpha").unwrap()));
        assert_eq!(metaspace_id("é"), None);
    }
}
