"""The tiny models of the golden logits: one `Case` per thing that a family or a configuration key changes.

Keys are given in the spelling that transformers 4 and 5 both accept as constructor arguments; each
version then writes its own spelling of `config.json` into the case's file.
"""

from dataclasses import dataclass, field

# Odd, so that the vocabulary is padded at every tp size.
VOCAB = 97
SHORT = 40
# Longer than 64 positions, over which attention is cut into segments.
LONG = 80

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


# The smallest image part that the nested architectures accept; it plays no part in text.
IMAGES = {
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    },
    "mm_tokens_per_image": 4,
    "boi_token_index": 94,
    "eoi_token_index": 95,
    "image_token_index": 96,
}


@dataclass(frozen=True)
class Case:
    """One model. `keys` change `BASE`."""

    name: str
    architecture: str
    keys: dict = field(default_factory=dict)
    prompt_len: int = SHORT
    # A case whose logits this one must repeat; all other cases of an architecture differ.
    same_as: str | None = None
    # Keys of config.json that say nothing new: files of older releases lack them.
    implied: tuple[str, ...] = ()


def _rope(rope_type: str, **values) -> dict:
    return {"rope_scaling": {"rope_type": rope_type, **values}}


LLAMA3 = _rope(
    "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
YARN = {"factor": 4.0, "original_max_position_embeddings": 512}
SHORT_FACTOR = [1.0, 1.05, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0]
LONG_FACTOR = [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 12.0, 16.0]


def _llama() -> list[Case]:
    def case(name: str, keys: dict, **kw) -> Case:
        return Case(f"llama_{name}", "LlamaForCausalLM", keys, **kw)

    longrope = _rope("longrope", short_factor=SHORT_FACTOR, long_factor=LONG_FACTOR)
    return [
        case("default", {}),
        case("long_prompt", {"rope_theta": 500000.0}, prompt_len=LONG),
        case("head_dim", {"head_dim": 24}),
        case("multi_head", {"num_key_value_heads": 4}),
        case("attention_bias", {"attention_bias": True}),
        case("mlp_bias", {"mlp_bias": True}),
        case("tied", {"tie_word_embeddings": True}),
        case("linear", _rope("linear", factor=2.5)),
        # Up to max_position_embeddings, dynamic scaling is none.
        case("dynamic", _rope("dynamic", factor=4.0), same_as="llama_default"),
        case("llama3", LLAMA3),
        case("yarn", _rope("yarn", **YARN)),
        case("yarn_attention_factor", _rope("yarn", **YARN, attention_factor=1.5)),
        case("yarn_betas", _rope("yarn", **YARN, beta_fast=8.0, beta_slow=2.0)),
        case("yarn_not_truncated", _rope("yarn", **YARN, truncate=False)),
        case("yarn_mscale", _rope("yarn", **YARN, mscale=2.0, mscale_all_dim=0.7)),
        case("longrope_short", longrope | {"original_max_position_embeddings": 64}),
        case("longrope_long", longrope | {"original_max_position_embeddings": 32}),
    ]


def _mistral() -> list[Case]:
    def case(name: str, keys: dict, **kw) -> Case:
        return Case(f"mistral_{name}", "MistralForCausalLM", keys, **kw)

    return [
        case("window", {"sliding_window": 24}, prompt_len=LONG),
        case("window_1", {"sliding_window": 1}),
        case("no_window", {"sliding_window": None}, prompt_len=LONG),
        # Wider than the prompt: no token is out of sight.
        case("wide_window", {"sliding_window": 200}, prompt_len=LONG, same_as="mistral_no_window"),
        # Mistral Nemo: heads x head_dim is not the hidden size.
        case("head_dim", {"sliding_window": None, "head_dim": 32}),
    ]


def _qwen() -> list[Case]:
    window = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1, "num_hidden_layers": 3}
    moe = {
        "head_dim": 16,
        "num_hidden_layers": 3,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "norm_topk_prob": False,
    }
    qwen2, qwen3, qwen3_moe = "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM"
    return [
        Case("qwen2_default", qwen2),
        Case("qwen2_tied", qwen2, {"tie_word_embeddings": True, "rope_theta": 1000000.0}),
        Case("qwen2_yarn", qwen2, _rope("yarn", **YARN)),
        Case("qwen2_window", qwen2, window, LONG, implied=("layer_types",)),
        # sliding_window without use_sliding_window says nothing.
        Case("qwen2_window_off", qwen2, {"sliding_window": 16}, same_as="qwen2_default"),
        Case("qwen3_default", qwen3, {"head_dim": 16}),
        Case("qwen3_head_dim", qwen3, {"head_dim": 32, "tie_word_embeddings": True}),
        Case("qwen3_attention_bias", qwen3, {"head_dim": 16, "attention_bias": True}),
        Case("qwen3_window", qwen3, window | {"head_dim": 16}, LONG, implied=("layer_types",)),
        Case("qwen3_moe_plain", qwen3_moe, moe),
        Case("qwen3_moe_norm_topk", qwen3_moe, moe | {"norm_topk_prob": True}),
        Case("qwen3_moe_mlp_only", qwen3_moe, moe | {"norm_topk_prob": True, "mlp_only_layers": [1]}),
        # All layers slide: the class has the key max_window_layers and no use for it.
        Case("qwen3_moe_window", qwen3_moe, moe | {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}, LONG),
        Case("qwen3_moe_sparse_step", qwen3_moe, moe | {"decoder_sparse_step": 2, "tie_word_embeddings": True}),
    ]


def _phi3() -> list[Case]:
    def case(name: str, keys: dict, **kw) -> Case:
        return Case(f"phi3_{name}", "Phi3ForCausalLM", keys, **kw)

    def longrope(original: int, dims: int) -> dict:
        # transformers 4 asks for exactly these three keys.
        scaling = {
            "type": "longrope", "short_factor": SHORT_FACTOR[:dims], "long_factor": LONG_FACTOR[:dims],
        }
        return {"rope_scaling": scaling, "original_max_position_embeddings": original}

    # Phi-4-mini: three quarters of each head turn, the rest passes.
    partial = {"partial_rotary_factor": 0.75, "tie_word_embeddings": True}
    return [
        case("default", {}),
        case("window", {"sliding_window": 24}, prompt_len=LONG),
        case("longrope_short", longrope(64, 8)),
        case("longrope_long", longrope(32, 8)),
        case("partial", partial),
        case("partial_longrope_short", partial | longrope(64, 6)),
        case("partial_longrope_long", partial | longrope(32, 6)),
    ]


def _gemma() -> list[Case]:
    gemma2, gemma3 = "Gemma2ForCausalLM", "Gemma3ForCausalLM"
    base = {
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "num_hidden_layers": 4,
        "query_pre_attn_scalar": 24,
        "sliding_window": 20,
    }
    caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0}
    # Full attention on every third layer; the released models have it on every sixth.
    three = base | {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    }
    # The pattern of the released models, as a number.
    six = {key: value for key, value in three.items() if key != "layer_types"}
    six |= {"num_hidden_layers": 7, "sliding_window_pattern": 6}
    none = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    return [
        Case("gemma2_default", gemma2, base | caps, LONG, implied=("layer_types",)),
        Case("gemma2_no_caps", gemma2, base | none, LONG),
        Case("gemma2_attention_cap", gemma2, base | none | {"attn_logit_softcapping": 3.0}, LONG),
        Case("gemma2_logit_cap", gemma2, base | none | {"final_logit_softcapping": 4.0}, LONG),
        Case("gemma2_head_dim", gemma2, base | caps | {"head_dim": 32, "query_pre_attn_scalar": 32}),
        Case("gemma3_default", gemma3, three, LONG),
        Case("gemma3_linear", gemma3, three | _rope("linear", factor=8.0), LONG),
        Case("gemma3_no_window", gemma3, three | {"layer_types": ["full_attention"] * 3}, LONG),
        Case("gemma3_pattern_6", gemma3, six, LONG, implied=("layer_types", "_sliding_window_pattern")),
        # The released 4B, 12B and 27B: the text model inside a model of text and images.
        Case("gemma3_nested", "Gemma3ForConditionalGeneration", three, LONG),
    ]


CASES = [*_llama(), *_mistral(), *_qwen(), *_phi3(), *_gemma()]
