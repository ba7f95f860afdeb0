//! Splitting rules by the name that GGUF files give them (`tokenizer.ggml.pre`).
//!
//! The names are llama.cpp's (`convert_hf_to_gguf.py` finds them by hashing the original tokenizer's
//! output); the rules are those of the *original* `tokenizer.json` of that name, not llama.cpp's
//! rewriting of them, so that the ids equal Hugging Face's.

use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{PreTokenizerWrapper, Result, SplitDelimiterBehavior};

/// What files without `tokenizer.ggml.pre` get, as in llama.cpp: plain GPT-2 rules would be a guess, so
/// the name stays visible in messages.
pub(crate) const DEFAULT: &str = "default";

/// The names that are known.
pub(crate) const NAMES: [&str; 14] = [
    "default",
    "gpt-2",
    "phi-2",
    "smollm",
    "starcoder",
    "refact",
    "codeshell",
    "qwen2",
    "deepseek-r1-qwen",
    "llama-bpe",
    "llama3",
    "llama-v3",
    "dbrx",
    "smaug-bpe",
];

/// `qwen2` (Qwen2 to Qwen3): single digits, words with one leading character of any other kind.
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// `llama-bpe` (Llama 3): the same with up to three digits together.
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// First cuts of llama.cpp's fallback rules, before GPT-2's.
const DEFAULT_PUNCTUATION: &str = r"[\p{P}\$\+<=>\^~\|]+";
const DEFAULT_DIGITS: &str = r"\p{N}+";
const DEFAULT_THREE_DIGITS: &str = "[0-9][0-9][0-9]";

/// How text is cut into words before BPE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cut {
    /// GPT-2's expression, built into `ByteLevel`.
    Gpt2,
    /// Single digits, then GPT-2's.
    DigitsGpt2,
    /// One expression.
    Regex(&'static str),
    /// llama.cpp's fallback: punctuation, GPT-2's, digits in threes.
    Fallback,
}

/// What a name stands for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    cut: Cut,
    /// Compose characters (NFC) first.
    pub(crate) normalises_nfc: bool,
    /// A word that is a token as a whole is taken without merging.
    pub(crate) ignores_merges: bool,
    /// Prompts begin with the beginning-of-text token unless the file says otherwise.
    pub(crate) adds_bos: bool,
}

/// The rules of a name, if it is known.
pub(crate) fn rules(name: &str) -> Option<Rules> {
    let plain = Rules { cut: Cut::Gpt2, normalises_nfc: false, ignores_merges: false, adds_bos: false };
    Some(match name {
        "gpt-2" | "phi-2" => plain,
        "smollm" | "starcoder" | "refact" | "codeshell" => Rules { cut: Cut::DigitsGpt2, ..plain },
        "qwen2" | "deepseek-r1-qwen" => Rules { cut: Cut::Regex(QWEN2), normalises_nfc: true, ..plain },
        "llama-bpe" | "llama3" | "llama-v3" => {
            Rules { cut: Cut::Regex(LLAMA3), ignores_merges: true, adds_bos: true, ..plain }
        }
        "dbrx" | "smaug-bpe" => Rules { cut: Cut::Regex(LLAMA3), ..plain },
        DEFAULT => Rules { cut: Cut::Fallback, ..plain },
        _ => return None,
    })
}

/// The pre-tokenizer of some rules.
pub(crate) fn build(rules: &Rules) -> Result<PreTokenizerWrapper> {
    let split = |pattern: &str| -> Result<PreTokenizerWrapper> {
        let pattern = SplitPattern::Regex(pattern.into());
        Ok(Split::new(pattern, SplitDelimiterBehavior::Isolated, false)?.into())
    };
    let byte_level = |cuts: bool| -> PreTokenizerWrapper { ByteLevel::new(false, true, cuts).into() };
    let steps = match rules.cut {
        Cut::Gpt2 => return Ok(byte_level(true)),
        Cut::DigitsGpt2 => vec![Digits::new(true).into(), byte_level(true)],
        Cut::Regex(pattern) => vec![split(pattern)?, byte_level(false)],
        Cut::Fallback => {
            vec![
                split(DEFAULT_PUNCTUATION)?,
                split(DEFAULT_DIGITS)?,
                split(DEFAULT_THREE_DIGITS)?,
                byte_level(true),
            ]
        }
    };
    Ok(Sequence::new(steps).into())
}
