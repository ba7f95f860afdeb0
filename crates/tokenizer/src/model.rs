//! [`TextModel`]: everything a model knows about text, loaded once and shared by threads.

use crate::chat::{ChatTemplate, TemplateSources, system_clock};
use crate::error::TokenizerError;
use crate::gguf::GgufVocab;
use crate::hf;
use crate::pieces::Pieces;
use crate::stream::RequestDecoder;
use lockstep_core::{Refusal, TokenId};
use lockstep_wire::{ChatMessages, Prompt, TextParams, TokenText, TokenizeParams, Vocabulary};
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

/// What the user and the launcher decide about text.
#[derive(Clone, Debug, Default)]
pub struct TextOptions {
    /// Used in place of the model's own chat template.
    pub chat_template: Option<PathBuf>,
    /// Prompt plus answer in tokens; prompts that leave no room are refused here, before the scheduler
    /// sees them. `None`: no limit is known yet (the scheduler still enforces its own).
    pub context_max: Option<usize>,
    /// Rows of the model's embedding (config.json's `vocab_size`); `None`: as many as the tokenizer has.
    pub vocab_size: Option<usize>,
}

/// A model's tokenizer, chat template and decoder.
///
/// Immutable after load; `Send + Sync`, so one copy serves all threads of a worker.
pub struct TextModel {
    tokenizer: Tokenizer,
    pieces: Pieces,
    cleans_up_spaces: bool,
    chat: Result<ChatTemplate, String>,
    bos: Option<TokenId>,
    eos: Vec<TokenId>,
    vocab_size: usize,
    context_max: usize,
}

/// What the two file formats have in common.
struct Parts {
    tokenizer: Tokenizer,
    templates: TemplateSources,
    special_tokens: BTreeMap<String, String>,
    cleans_up_spaces: bool,
    eos: Vec<TokenId>,
    /// Tokens that the files list, if they list more than the tokenizer uses.
    tokens_listed: usize,
}

/// Refuses files that the library loads and then panics on whatever the text, which requests would find out one by one.
fn try_out(tokenizer: &Tokenizer, path: &Path) -> Result<(), TokenizerError> {
    let round_trip = |text| tokenizer.encode_fast(text, true).map(|it| tokenizer.decode(it.get_ids(), false));
    let tried = catch_unwind(AssertUnwindSafe(|| ["", "a b"].map(round_trip)));
    // A vocabulary may have no token for these texts: that is no panic.
    tried
        .map(drop)
        .map_err(|_| TokenizerError::malformed(path, "the tokenizers library gives up on any text with it"))
}

impl TextModel {
    /// Loads a folder in Hugging Face layout, a `.gguf` file, or a folder with one `.gguf` file and no
    /// `tokenizer.json`.
    ///
    /// A chat template that is missing or cannot be parsed is no error; see [`Self::chat_error`].
    pub fn load(model_path: &Path, options: &TextOptions) -> Result<Self, TokenizerError> {
        let parts = match gguf_file(model_path)? {
            Some(file) => gguf_parts(&crate::gguf::open::read_vocab(&file)?)?,
            None => hf_parts(model_path)?,
        };
        Self::assemble(parts, model_path, options)
    }

    fn assemble(mut parts: Parts, path: &Path, options: &TextOptions) -> Result<Self, TokenizerError> {
        if let Some(file) = &options.chat_template {
            parts.templates = hf::read_template_file(file)?;
        }
        // Truncation and padding of a training setup would silently change prompts.
        parts.tokenizer.with_padding(None);
        parts.tokenizer.with_truncation(None).map_err(|e| TokenizerError::malformed(path, e))?;
        try_out(&parts.tokenizer, path)?;
        let pieces = Pieces::build(&parts.tokenizer, path)?;
        let bos = parts.special_tokens.get("bos_token").and_then(|text| parts.tokenizer.token_to_id(text));
        Ok(Self {
            bos,
            eos: parts.eos,
            vocab_size: options.vocab_size.unwrap_or(parts.tokens_listed.max(pieces.len())),
            context_max: options.context_max.unwrap_or(usize::MAX),
            cleans_up_spaces: parts.cleans_up_spaces,
            chat: ChatTemplate::compile(parts.templates, parts.special_tokens, system_clock),
            tokenizer: parts.tokenizer,
            pieces,
        })
    }

    /// Why chat requests cannot be served, if so: one sentence with what to do.
    pub fn chat_error(&self) -> Option<&str> {
        self.chat.as_ref().err().map(String::as_str)
    }

    /// The end tokens that the tokenizer's own files name (other sources: `generation_config.json`,
    /// `config.json`).
    pub fn eos_tokens(&self) -> &[TokenId] {
        &self.eos
    }

    /// Ids below this are accepted as prompts.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The beginning-of-text token, if the model names one.
    pub fn bos_token(&self) -> Option<TokenId> {
        self.bos
    }

    /// Token ids of `text`; special tokens written in the text are parsed as such, as Hugging Face does.
    ///
    /// `add_special` adds what the tokenizer's post-processor adds (mostly the beginning-of-text token).
    /// Errors are the library's own failures, as a 500.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<TokenId>, Refusal> {
        let failed = |why: String| Refusal::internal(format!("the tokenizer failed on this text: {why}"));
        // The library panics on some files that it has loaded; what it works on is left as it was.
        let encoding = catch_unwind(AssertUnwindSafe(|| self.tokenizer.encode_fast(text, add_special)))
            .map_err(|_| failed("the tokenizers library gave up on it".into()))?
            .map_err(|e| failed(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The prompt of a request, ready for the scheduler: at least one token, all below
    /// [`Self::vocab_size`], fewer than the context holds.
    ///
    /// Text gets the tokenizer's special tokens, but never a second beginning-of-text token when the
    /// text already writes it. Chats are rendered and encoded without adding any (the template writes
    /// what the model wants; transformers' `apply_chat_template` does the same). Ids are taken as they
    /// are. Refusals are 400s.
    pub fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<TokenId>, Refusal> {
        self.encode_prompt_as(prompt, &TokenizeParams::default())
    }

    /// [`encode_prompt`](Self::encode_prompt) with the request's own wishes.
    pub fn encode_prompt_as(
        &self,
        prompt: &Prompt,
        params: &TokenizeParams,
    ) -> Result<Vec<TokenId>, Refusal> {
        let TokenizeParams { add_special_tokens, keep_last, .. } = *params;
        let (ids, param) = match prompt {
            Prompt::Tokens(ids) => {
                let ids = kept(ids.clone(), keep_last);
                self.check_length(ids.len(), "prompt")?;
                self.check_ids(&ids, "prompt")?;
                (ids, "prompt")
            }
            Prompt::Text(text) => {
                (self.encode_text(text, add_special_tokens != Some(false), params, "prompt")?, "prompt")
            }
            Prompt::Chat(chat) => {
                let text = self.render_chat(chat)?;
                (self.encode_text(&text, add_special_tokens == Some(true), params, "messages")?, "messages")
            }
        };
        self.check_not_empty(ids, param)
    }

    /// The tokens of a prompt's text, fewer than the context holds.
    fn encode_text(
        &self,
        text: &str,
        add_special: bool,
        params: &TokenizeParams,
        param: &str,
    ) -> Result<Vec<TokenId>, Refusal> {
        let undoubled = |ids| if add_special { self.without_doubled_bos(ids, text) } else { ids };
        if params.keep_last.is_none() {
            return self.encode_bounded(text, add_special, param).map(undoubled);
        }
        self.check_bytes(text.len(), param)?;
        let ids = kept(undoubled(self.encode(text, add_special)?), params.keep_last);
        self.check_length(ids.len(), param)?;
        self.check_ids(&ids, "prompt")?;
        Ok(ids)
    }

    /// The token sequences that spell each of `words`, at the beginning of a text and behind a space.
    pub fn encode_words(&self, words: &[String]) -> Result<Vec<Vec<TokenId>>, Refusal> {
        let mut all = Vec::new();
        for word in words.iter().map(|word| word.trim_start()).filter(|word| !word.is_empty()) {
            for spelling in [word.to_owned(), format!(" {word}")] {
                all.extend(Some(self.encode(&spelling, false)?).filter(|ids| !ids.is_empty()));
            }
        }
        all.sort_unstable();
        all.dedup();
        Ok(all)
    }

    /// The tokens of a prompt that nobody runs: no limit but one on its bytes, so that a client can ask how far a
    /// prompt is over the context.
    ///
    /// `add_special` as in [`Self::encode`], for chats as well; a beginning-of-text token is not doubled.
    pub fn tokenize(&self, prompt: &Prompt, add_special: bool) -> Result<Vec<TokenId>, Refusal> {
        let (text, param) = match prompt {
            Prompt::Tokens(ids) => {
                self.check_ids(ids, "prompt")?;
                return Ok(ids.clone());
            }
            Prompt::Text(text) => (Cow::Borrowed(text), "prompt"),
            Prompt::Chat(chat) => (Cow::Owned(self.render_chat(chat)?), "messages"),
        };
        self.check_bytes(text.len(), param)?;
        Ok(self.without_doubled_bos(self.encode(&text, add_special)?, &text))
    }

    /// How the vocabulary spells each of `ids`; empty for one that it does not have.
    pub fn token_pieces(&self, ids: &[TokenId]) -> Vec<String> {
        ids.iter().map(|id| self.tokenizer.id_to_token(*id).unwrap_or_default()).collect()
    }

    /// The prompt text of a chat. Refusals are 400s with the template's own message.
    pub fn render_chat(&self, chat: &ChatMessages) -> Result<String, Refusal> {
        self.chat.as_ref().map_err(|why| Refusal::invalid_param("messages", why.clone()))?.render(chat)
    }

    /// The text of all `ids` at once; equal to what a [`RequestDecoder`] gives piece by piece.
    pub fn decode(&self, ids: &[TokenId], skip_special_tokens: bool) -> String {
        let mut decoder = self.decoder(&TextParams { skip_special_tokens, ..TextParams::default() });
        let mut text = String::new();
        for &id in ids {
            self.push_token(&mut decoder, id, &mut text);
        }
        self.finish_text(&mut decoder, &mut text);
        text
    }

    /// What clients see of one token: the bytes it adds to a text in the middle of it, and whether a text
    /// with or without special tokens holds them at all.
    pub fn token_text(&self, id: TokenId, skip_special_tokens: bool) -> TokenText {
        let is_special = self.pieces.get(id).is_none_or(|piece| piece.is_special);
        TokenText {
            id,
            bytes: self.pieces.bytes_inside(id).unwrap_or_default().into_owned(),
            is_shown: !(is_special && skip_special_tokens),
        }
    }

    /// Every token's text, for grammars.
    pub fn vocabulary(&self) -> Vocabulary {
        let mut vocabulary = Vocabulary::default();
        for id in 0..self.pieces.len() as TokenId {
            let is_special = self.pieces.get(id).is_some_and(|piece| piece.is_special);
            vocabulary.push(&self.pieces.bytes_inside(id).unwrap_or_default(), is_special);
        }
        vocabulary
    }

    /// The text state of a new request.
    pub fn decoder(&self, params: &TextParams) -> RequestDecoder {
        RequestDecoder::new(&self.pieces, self.cleans_up_spaces, params)
    }

    /// Feeds one generated token to `decoder` and appends the text it decides to `out`. True once a stop
    /// string completed; `out` then ends right before it.
    pub fn push_token(&self, decoder: &mut RequestDecoder, token: TokenId, out: &mut String) -> bool {
        decoder.push(&self.pieces, token, out)
    }

    /// The request is over: appends what `decoder` still held back. True when that completed a stop
    /// string.
    pub fn finish_text(&self, decoder: &mut RequestDecoder, out: &mut String) -> bool {
        decoder.finish(&self.pieces, out)
    }

    /// Encodes, but gives up early on a text that cannot fit: a 30 MB body must not cost seconds.
    ///
    /// Of a long text first only a head is encoded, as long as ordinary prompts that fill the context
    /// are. Cutting can change only the tokens next to the cut, so a head with clearly more tokens than
    /// the context decides. A text that passes although it is several times longer is nearly all
    /// white space; it is encoded up to [`BYTES_PER_TOKEN_MAX`] and refused above.
    fn encode_bounded(&self, text: &str, add_special: bool, param: &str) -> Result<Vec<TokenId>, Refusal> {
        let limit = self.context_max.saturating_sub(1);
        let head_bytes = limit.saturating_mul(HEAD_BYTES_PER_TOKEN).max(HEAD_BYTES_MIN);
        if head_bytes < text.len() {
            let slack = CUT_TOKENS_MAX.max(limit / 64);
            let ids = self.encode(&text[..text.floor_char_boundary(head_bytes)], add_special)?;
            if ids.len() > limit.saturating_add(slack) {
                return Err(too_long(ids.len() - slack, false, self.context_max, param));
            }
            self.check_bytes(text.len(), param)?;
        }
        let ids = self.encode(text, add_special)?;
        self.check_length(ids.len(), param)?;
        // A vocabulary larger than the model's embedding must not reach the embedding.
        self.check_ids(&ids, "prompt")?;
        Ok(ids)
    }

    /// No text may cost seconds, also of the kind that has few tokens.
    fn check_bytes(&self, len: usize, param: &str) -> Result<(), Refusal> {
        let limit = self.context_max.saturating_sub(1);
        let bytes_max = limit.saturating_mul(BYTES_PER_TOKEN_MAX).max(HEAD_BYTES_MIN);
        if len > bytes_max { Err(too_many_bytes(len, bytes_max, self.context_max, param)) } else { Ok(()) }
    }

    fn check_length(&self, len: usize, param: &str) -> Result<(), Refusal> {
        if len >= self.context_max { Err(too_long(len, true, self.context_max, param)) } else { Ok(()) }
    }

    /// Whether all `ids` are below [`Self::vocab_size`]; the refusal blames the field `param`.
    pub(crate) fn check_ids(&self, ids: &[TokenId], param: &str) -> Result<(), Refusal> {
        match ids.iter().find(|id| **id as usize >= self.vocab_size) {
            None => Ok(()),
            Some(id) => Err(Refusal::invalid_param(
                param,
                format!(
                    "token id {id} is outside this model's vocabulary of {} tokens; send ids below that",
                    self.vocab_size
                ),
            )),
        }
    }

    fn check_not_empty(&self, ids: Vec<TokenId>, param: &str) -> Result<Vec<TokenId>, Refusal> {
        if ids.is_empty() {
            return Err(Refusal::invalid_param(
                param,
                "the prompt has no tokens, at least one is needed; send some text",
            ));
        }
        Ok(ids)
    }

    /// Drops the token that the post-processor put before a text that begins with it already.
    fn without_doubled_bos(&self, mut ids: Vec<TokenId>, text: &str) -> Vec<TokenId> {
        let Some(bos) = self.bos else { return ids };
        let is_doubled = ids.starts_with(&[bos, bos])
            && self.pieces.get(bos).is_some_and(|p| text.as_bytes().starts_with(p.bytes));
        if is_doubled {
            ids.remove(0);
        }
        ids
    }
}

/// Tokens that a cut through a text can add at most; measured: 1 or 2.
const CUT_TOKENS_MAX: usize = 64;
/// Longest prompt that is encoded in one go, in bytes per token of context (ordinary text: about 4).
const HEAD_BYTES_PER_TOKEN: usize = 8;
/// Most bytes of prompt per token of context (tables and indented code: up to about 20).
const BYTES_PER_TOKEN_MAX: usize = 32;
/// Prompts of this many bytes are always encoded, so that a refusal can name their exact length; it
/// takes a third of a second at most.
const HEAD_BYTES_MIN: usize = 1 << 20;

/// The last `keep_last` of `ids`.
fn kept(mut ids: Vec<TokenId>, keep_last: Option<u32>) -> Vec<TokenId> {
    let keep = keep_last.map_or(usize::MAX, |count| count as usize);
    ids.drain(..ids.len().saturating_sub(keep));
    ids
}

fn too_long(prompt_len: usize, is_exact: bool, context_max: usize, param: &str) -> Refusal {
    let mut refusal = Refusal::context_length(prompt_len, context_max);
    if !is_exact {
        refusal.message = refusal.message.replacen("the prompt has ", "the prompt has at least ", 1);
    }
    refusal.param = Some(param.into());
    refusal
}

fn too_many_bytes(got: usize, bytes_max: usize, context_max: usize, param: &str) -> Refusal {
    let message = format!(
        "the prompt has {got} bytes, but this server's context is {context_max} tokens, for which at most \
         {bytes_max} bytes of prompt are accepted; send less, in particular fewer spaces"
    );
    Refusal::invalid_param(param, message).with_code("context_length_exceeded")
}

/// The GGUF file that `path` means, if it means one.
fn gguf_file(path: &Path) -> Result<Option<PathBuf>, TokenizerError> {
    let is_gguf = |p: &Path| p.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"));
    if !path.is_dir() {
        return match path.exists() {
            true => Ok(Some(path.into())),
            false => Err(TokenizerError::Missing { path: path.into() }),
        };
    }
    if path.join("tokenizer.json").exists() {
        return Ok(None);
    }
    let read_error = |source| TokenizerError::Read { path: path.into(), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(path).map_err(read_error)? {
        files.extend(Some(entry.map_err(read_error)?.path()).filter(|p| is_gguf(p)));
    }
    // Several files are several quantisations: the user must say which.
    Ok(if files.len() == 1 { files.pop() } else { None })
}

fn hf_parts(folder: &Path) -> Result<Parts, TokenizerError> {
    let text = hf::read_folder(folder)?;
    let eos = text.special_tokens.get("eos_token").and_then(|t| text.tokenizer.token_to_id(t));
    Ok(Parts {
        eos: eos.into_iter().collect(),
        tokenizer: text.tokenizer,
        templates: text.templates,
        special_tokens: text.special_tokens,
        cleans_up_spaces: text.cleans_up_spaces,
        tokens_listed: 0,
    })
}

fn gguf_parts(vocab: &GgufVocab) -> Result<Parts, TokenizerError> {
    let mut eos = vocab.ends.clone();
    eos.sort_unstable();
    eos.dedup();
    Ok(Parts {
        tokenizer: vocab.tokenizer()?,
        templates: vocab.templates.clone(),
        special_tokens: vocab.special_tokens(),
        cleans_up_spaces: false,
        eos,
        tokens_listed: vocab.tokens.len(),
    })
}

/// The end tokens that the tokenizer files of a model name, without keeping the tokenizer.
pub fn eos_tokens_of(model_path: &Path) -> Result<Vec<TokenId>, TokenizerError> {
    if let Some(file) = gguf_file(model_path)? {
        let mut ends = crate::gguf::open::read_vocab(&file)?.ends;
        ends.sort_unstable();
        ends.dedup();
        return Ok(ends);
    }
    let Some(text) = hf::eos_text(model_path)? else { return Ok(Vec::new()) };
    let tokenizer = hf::read_tokenizer(&model_path.join("tokenizer.json"))?;
    Ok(tokenizer.token_to_id(&text).into_iter().collect())
}

/// The texts of a model's chat templates, joined, without loading its vocabulary: what the parsers of
/// answers are chosen by. `chat_template` is the file of `--chat-template`. `None`: there is none.
pub fn chat_template_text(
    model_path: &Path,
    chat_template: Option<&Path>,
) -> Result<Option<String>, TokenizerError> {
    let sources = match (chat_template, gguf_file(model_path)?) {
        (Some(file), _) => hf::read_template_file(file)?,
        (None, Some(file)) => crate::gguf::open::read_vocab(&file)?.templates,
        (None, None) => hf::folder_templates(model_path)?,
    };
    Ok(sources.joined())
}

impl std::fmt::Debug for TextModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut debug = f.debug_struct("TextModel");
        debug.field("vocab_size", &self.vocab_size).field("context_max", &self.context_max);
        debug.field("chat_error", &self.chat_error()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
