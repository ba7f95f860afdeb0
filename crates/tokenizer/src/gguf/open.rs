//! Metadata keys to a [`GgufVocab`].

use super::GgufVocab;
use crate::chat::TemplateSources;
use crate::error::TokenizerError;
use lockstep_weights::ModelFiles;
use lockstep_weights::gguf::Metadata;
use std::path::Path;

/// Reads the text-related metadata of a GGUF file.
pub(crate) fn read_vocab(path: &Path) -> Result<GgufVocab, TokenizerError> {
    let files = ModelFiles::open(path)?;
    let metadata = files.gguf().ok_or_else(|| TokenizerError::malformed(path, "it is not a GGUF file"))?;
    let Some((model, tokens)) = metadata.tokenizer_model().zip(metadata.tokens()) else {
        return Err(TokenizerError::malformed(
            path,
            "tokenizer.ggml.model or tokenizer.ggml.tokens is missing, so text cannot be tokenized",
        ));
    };
    Ok(GgufVocab {
        path: path.into(),
        model: model.into(),
        pre: metadata.pre_tokenizer().map(Into::into),
        tokens: tokens.map(Into::into).collect(),
        token_types: metadata.token_types().into_iter().flatten().collect(),
        scores: metadata.scores().into_iter().flatten().map(|score| score as f32).collect(),
        merges: metadata.merges().into_iter().flatten().map(Into::into).collect(),
        bos: metadata.bos_token(),
        eos: metadata.eos_token(),
        ends: metadata.end_tokens().collect(),
        unk: metadata.unknown_token(),
        pad: metadata.padding_token(),
        add_bos: metadata.add_bos(),
        add_eos: metadata.add_eos(),
        add_space_prefix: metadata.add_space_prefix(),
        templates: templates(metadata),
    })
}

/// A file may hold further templates beside the default one, each under its name.
fn templates(metadata: &Metadata) -> TemplateSources {
    const NAMED: &str = "tokenizer.chat_template.";
    let mut sources = metadata.chat_template().map(TemplateSources::single).unwrap_or_default();
    for key in metadata.keys() {
        if let Some((name, text)) = key.strip_prefix(NAMED).zip(metadata.text(key)) {
            sources.insert(name, text);
        }
    }
    sources
}
