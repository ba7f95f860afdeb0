//! Small models for tests, written as Hugging Face folders.

use serde_json::json;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use tokenizers::decoders::byte_level::ByteLevel;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::processors::template::TemplateProcessing;
use tokenizers::{AddedToken, Tokenizer};

/// Ids 256..=260 of [`byte_tokenizer`].
pub(crate) const SPECIALS: [&str; 5] = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>", "<|eot|>"];
/// Ids from 261.
pub(crate) const WORDS: [&str; 6] = [" alpha", " beta", " gamma", " delta", " ok", " not"];
/// ChatML.
pub(crate) const CHATML: &str = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n\
                                 {% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// A folder that is removed when dropped.
pub(crate) struct TempFolder(PathBuf);

impl TempFolder {
    pub(crate) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name =
            format!("lockstep-tokenizer-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn write(&self, file: &str, content: impl AsRef<[u8]>) -> &Self {
        std::fs::write(self.0.join(file), content).unwrap();
        self
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// The printable character that byte-level vocabularies write for a byte.
pub(crate) fn byte_char(byte: u8) -> char {
    let others = (0..=255_u8).filter(|b| !matches!(b, 33..=126 | 161..=172 | 174..=255));
    match byte {
        33..=126 | 161..=172 | 174..=255 => char::from(byte),
        _ => char::from_u32(256 + others.clone().position(|b| b == byte).unwrap() as u32).unwrap(),
    }
}

/// One token per byte, plus [`SPECIALS`] and whole words.
pub(crate) fn byte_tokenizer(adds_bos: bool) -> Tokenizer {
    let mut vocab = Vocab::default();
    vocab.extend((0..=255_u8).map(|b| (byte_char(b).to_string(), u32::from(b))));
    let mut tokenizer = Tokenizer::new(BPE::new(vocab, Vec::new()));
    tokenizer.with_pre_tokenizer(Some(ByteLevel::new(false, true, false)));
    tokenizer.with_decoder(Some(ByteLevel::default()));
    tokenizer.add_special_tokens(SPECIALS.map(|s| AddedToken::from(s, true).normalized(false))).unwrap();
    tokenizer.add_tokens(WORDS.map(|w| AddedToken::from(w, false).normalized(false))).unwrap();
    if adds_bos {
        let template = TemplateProcessing::builder()
            .try_single("<|bos|> $A")
            .unwrap()
            .special_tokens(vec![("<|bos|>", 256)])
            .build()
            .unwrap();
        tokenizer.with_post_processor(Some(template));
    }
    tokenizer
}

/// A folder with [`byte_tokenizer`] and `extra` entries in tokenizer_config.json.
pub(crate) fn byte_folder(adds_bos: bool, extra: serde_json::Value) -> TempFolder {
    let folder = TempFolder::new();
    let mut config = json!({"bos_token": "<|bos|>", "eos_token": {"content": "<|eos|>"}});
    config.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    folder.write("tokenizer.json", byte_tokenizer(adds_bos).to_string(false).unwrap());
    folder.write("tokenizer_config.json", config.to_string());
    folder
}
