//! Keys of a model's description that no reader knows: which of them may change the answers.
//!
//! Shared by the reader of `config.json` and that of GGUF metadata. A description says most things by keys whose names
//! are made of a few words (`moe_shared_expert_gate`, `qkv_clip`); a key with such a word that is not known here is
//! probably a feature that is newer than this reader, and leaving it out would give wrong answers without a word.

/// Parts of names that belong to the mathematics of a transformer.
const MATHEMATICAL: &[&str] = &[
    "act_fn",
    "activation",
    "adapter",
    "alibi",
    "attention",
    "attn",
    "bias",
    "bidirectional",
    "causal",
    "embd",
    "embed",
    "expert",
    "ffn",
    "gate",
    "gating",
    "head",
    "kv_share",
    "latent",
    "layer",
    "logit",
    "lora",
    "mamba",
    "mlp",
    "moe",
    "multiplier",
    "norm",
    "parallel_res",
    "position_emb",
    "qkv",
    "quant",
    "residual",
    "rope",
    "rotary",
    "routed",
    "router",
    "routing",
    "scale",
    "scaling",
    "shared_kv",
    "softcap",
    "softmax",
    "sparse",
    "ssm",
    "theta",
    "topk",
    "window",
];

/// Parts of names that belong to training, initialisation or classification, whatever else is in them.
const BOOKKEEPING: &[&str] = &["dropout", "pdrop", "loss", "init", "jitter", "label", "classifier"];

/// What such a key must say, for messages.
pub const UNKNOWN_KEY_WANT: &str =
    "this key is not known; if it changes nothing in this model, take it out of the file";

/// What the name of a key that no reader knows is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    /// It may change the answers: refused unless it is switched off.
    Mathematics,
    /// Training and the like: passes in silence.
    Bookkeeping,
    /// Nobody can say: passes with a warning.
    Unclear,
}

/// What `key` is about, by the words of its name.
fn subject_of(key: &str) -> Subject {
    let key = key.to_ascii_lowercase();
    let has = |parts: &[&str]| parts.iter().any(|part| key.contains(part));
    match (has(BOOKKEEPING), has(MATHEMATICAL)) {
        (true, _) => Subject::Bookkeeping,
        (_, true) => Subject::Mathematics,
        _ => Subject::Unclear,
    }
}

/// Of keys that no reader knows, each with whether it switches anything on: those to warn of, in order. The error is the
/// first that is refused.
pub fn noted<'a>(unknown: impl IntoIterator<Item = (&'a str, bool)>) -> Result<Vec<&'a str>, &'a str> {
    let mut noted = Vec::new();
    for (key, is_on) in unknown {
        match subject_of(key) {
            Subject::Mathematics if is_on => return Err(key),
            Subject::Bookkeeping => {}
            Subject::Mathematics | Subject::Unclear => noted.push(key),
        }
    }
    Ok(noted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_features_are_told_from_bookkeeping() {
        for key in [
            "qkv_clip",
            "moe_shared_gate",
            "attention.key_norm",
            "use_altup_layers",
            "n_rotary",
            "Quantization",
        ] {
            assert_eq!(subject_of(key), Subject::Mathematics, "{key}");
        }
        for key in ["attention_probs_dropout_prob", "router_z_loss_coef", "initializer_range", "id2label"] {
            assert_eq!(subject_of(key), Subject::Bookkeeping, "{key}");
        }
        assert_eq!(subject_of("max_sequence_length"), Subject::Unclear);
    }
}
