//! Writes the inputs that a search begins with: `seeds FOLDER`. They are committed in `corpus/`; run this again when a
//! format has changed, and remove there what is older.

#![allow(clippy::unwrap_used)] // a tool for developers

use lockstep_comm::watch::WatchPage;
use lockstep_comm::{SharedRegion, ShmLayout};
use lockstep_core::{FinishReason, Grammar, RequestId, SamplingParams};
use lockstep_testkit::gguf::{GgmlType, GgufWriter};
use lockstep_testkit::{safetensors, tokenizer};
use lockstep_wire::{
    Broadcast, Delta, GenerateRequest, Prompt, TextParams, ToApi, ToDetokenizer, ToScheduler, ToTokenizer,
    TokenOut, TokenizeParams, Usage, encode,
};
use serde_json::json;
use std::os::fd::OwnedFd;
use std::path::Path;

fn main() {
    let folder = std::env::args().nth(1).expect("give a folder");
    let write = |target: &str, name: &str, content: &[u8]| {
        let folder = Path::new(&folder).join(target);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(name), content).unwrap();
    };
    for (name, body) in bodies() {
        write("requests", name, body.to_string().as_bytes());
    }
    for (name, message) in messages() {
        write("wire", name, &message[1..]);
    }
    for (name, kind, bytes) in said_by_hosts() {
        write("hosts", &name, &[&[kind], &*bytes].concat());
    }
    let page = WatchPage::create(2).unwrap().0;
    write("shared", "page", &memory(&page, 8192));
    let region = SharedRegion::create(ShmLayout::new(2, 16 << 10).unwrap()).unwrap();
    write("shared", "region", &memory(&region, 4096));
    write("gguf", "bpe.gguf", &gguf("gpt2"));
    write("gguf", "spm.gguf", &gguf("llama"));
    for (name, header, bytes) in [
        (
            "sound",
            json!({"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
            "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]}, "__metadata__": {"format": "pt"}}),
            24,
        ),
        ("empty", json!({"a": {"dtype": "F16", "shape": [0, 4], "data_offsets": [0, 0]}}), 0),
        (
            "quantised",
            json!({"model.layers.0.mlp.up_proj.qweight": {"dtype": "I32", "shape": [1, 8], "data_offsets": [0, 32]},
            "model.layers.0.mlp.up_proj.qzeros": {"dtype": "I32", "shape": [1, 1], "data_offsets": [32, 36]},
            "model.layers.0.mlp.up_proj.scales": {"dtype": "F16", "shape": [1, 8], "data_offsets": [36, 52]}}),
            52,
        ),
    ] {
        write("safetensors", name, &safetensors::encode_raw(&header.to_string(), &vec![1; bytes]));
    }
    for (name, files) in configs() {
        write("config", name, files.join("\0").as_bytes());
    }
    let config = json!({"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": "{{ messages }}",
        "clean_up_tokenization_spaces": true, "added_tokens_decoder": {"3": {"content": "<x>", "special": true}}});
    for (name, json) in
        [("word", tokenizer::word(12)), ("bytes", small_bpe()), ("metaspace", tokenizer::metaspace())]
    {
        write("tokenizer", name, format!("{json}\0{config}").as_bytes());
    }
    for (name, template) in templates() {
        write("template", name, template.as_bytes());
    }
    for (name, form) in forms() {
        write("forms", name, form.as_bytes());
    }
}

fn bodies() -> Vec<(&'static str, serde_json::Value)> {
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": schema}});
    vec![
        (
            "completion",
            json!({"prompt": ["ab", [1, 2]], "n": 2, "echo": true, "logprobs": 2, "stop": ["a"], "stream": true}),
        ),
        (
            "chat",
            json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "ab"}]}], "tools": [tool],
            "tool_choice": "required", "response_format": null}),
        ),
        ("form", json!({"prompt": "ab", "guided_grammar": "root ::= \"a\" [0-9]{1,3}"})),
        (
            "messages",
            json!({"max_tokens": 5, "system": "b", "messages": [{"role": "user", "content": "ab"}]}),
        ),
        (
            "responses",
            json!({"input": [{"role": "user", "content": [{"type": "input_text", "text": "ab"}]}]}),
        ),
        (
            "ollama",
            json!({"model": "tiny", "messages": [{"role": "user", "content": "ab"}], "options": {"top_k": 2}}),
        ),
    ]
}

fn messages() -> Vec<(&'static str, Vec<u8>)> {
    let (id, usage) = (RequestId(7), Usage { prompt_tokens: 1, cached_tokens: 0, completion_tokens: 2 });
    let sampling = SamplingParams {
        grammar: Some(Grammar::Choice(vec!["yes".into()])),
        logit_bias: vec![(5, -1.5)],
        ..SamplingParams::default()
    };
    let text = TextParams { stop: vec!["é".into()], ..TextParams::default() };
    let request = GenerateRequest {
        id,
        replica: 0,
        prompt: Prompt::Text("ab".into()),
        tokenizing: TokenizeParams::default(),
        sampling,
        text,
        cache_salt: Some("s".into()),
        priority: -3,
    };
    let delta = Delta {
        id,
        text: "ab".into(),
        tokens: vec![5, 6],
        finish: Some(FinishReason::Length),
        stop_string: None,
        usage,
        logprobs: None,
        echo: None,
        timing: None,
    };
    let step = ToDetokenizer::Step(vec![TokenOut {
        id,
        tokens: vec![5],
        finish: None,
        ends_with_eos: false,
        usage,
        logprobs: None,
        timing: None,
    }]);
    let broadcast = Broadcast { sequence: 3, stamp_ms: 9, message: ToScheduler::Abort(id) };
    let encoded = [
        ("generate", encode(&ToTokenizer::Generate(Box::new(request)))),
        ("delta", encode(&ToApi::Deltas(vec![delta]))),
        ("step", encode(&step)),
        ("broadcast", encode(&broadcast)),
        ("prepare", encode(&ToScheduler::Prepare(Box::new(Grammar::Regex("a+".into()))))),
    ];
    encoded.map(|(name, message)| (name, message.unwrap())).into()
}

/// The file's size and its beginning.
fn memory(fd: &OwnedFd, bytes: usize) -> Vec<u8> {
    let size = rustix::fs::fstat(fd).unwrap().st_size as u32;
    let mut content = vec![0; bytes];
    rustix::io::pread(fd, &mut content, 0).unwrap();
    let end = content.iter().rposition(|byte| *byte != 0).unwrap() + 64;
    [&size.to_le_bytes()[..], &content[..end.min(bytes)]].concat()
}

fn gguf(model: &str) -> Vec<u8> {
    let mut file = GgufWriter::new();
    file.meta("general.architecture", "llama");
    for (key, value) in [
        ("block_count", 1_u32),
        ("context_length", 64),
        ("embedding_length", 32),
        ("feed_forward_length", 32),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
        ("rope.dimension_count", 16),
        ("vocab_size", 6),
    ] {
        file.meta(&format!("llama.{key}"), value);
    }
    file.meta("llama.attention.layer_norm_rms_epsilon", 1e-5_f32);
    file.meta("tokenizer.ggml.model", model).meta("tokenizer.ggml.pre", "llama-bpe");
    file.meta("tokenizer.ggml.tokens", vec!["<s>", "</s>", "a", "b", "ab", "▁"]);
    file.meta("tokenizer.ggml.token_type", vec![3_u32, 3, 1, 1, 1, 1]);
    file.meta("tokenizer.ggml.scores", vec![0.0_f32, 0.0, -1.0, -2.0, -3.0, -4.0]);
    file.meta("tokenizer.ggml.merges", vec!["a b"]);
    file.meta("tokenizer.ggml.bos_token_id", 0_u32).meta("tokenizer.ggml.eos_token_id", 1_u32);
    file.meta("tokenizer.chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}");
    file.tensor("token_embd.weight", GgmlType::Q8_0, &[6, 32], vec![1; 6 * 34]);
    file.tensor("blk.0.attn_q.weight", GgmlType::F32, &[2, 2], vec![1; 16]);
    file.tensor("output_norm.weight", GgmlType::F32, &[4], vec![1; 16]);
    file.encode()
}

fn configs() -> Vec<(&'static str, Vec<String>)> {
    let llama = json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 8, "rms_norm_eps": 1e-5,
        "rope_theta": 1e4, "max_position_embeddings": 64, "torch_dtype": "float32", "eos_token_id": [1, 2], "head_dim": 8,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}});
    let gemma = json!({"architectures": ["Gemma3ForCausalLM"], "hidden_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 16, "num_hidden_layers": 6, "vocab_size": 8, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64, "head_dim": 8, "sliding_window": 8, "sliding_window_pattern": 6,
        "query_pre_attn_scalar": 8, "rope_local_base_freq": 1e4, "rope_theta": 1e6, "tie_word_embeddings": true});
    let moe = json!({"architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 16, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 8, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "norm_topk_prob": true, "decoder_sparse_step": 1, "mlp_only_layers": [0], "rope_parameters": {"rope_theta": 1e4},
        "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": false}});
    let generation =
        json!({"eos_token_id": [1], "temperature": 0.5, "top_k": 20, "top_p": 0.9, "do_sample": true});
    let index = json!({"metadata": {"total_size": 0}, "weight_map": {"a": "model.safetensors"}});
    vec![
        ("llama", vec![llama.to_string(), generation.to_string(), index.to_string()]),
        ("gemma", vec![gemma.to_string()]),
        ("moe", vec![moe.to_string(), generation.to_string()]),
    ]
}

fn small_bpe() -> serde_json::Value {
    json!({"version": "1.0", "truncation": null, "padding": null,
        "added_tokens": [{"id": 4, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": true}],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Replace", "pattern": {"String": " "}, "content": "_"}]},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|\\s+"}, "behavior": "Isolated", "invert": false},
            {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false}]},
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [4], "tokens": ["<s>"]}}},
        "decoder": {"type": "ByteLevel"},
        "model": {"type": "BPE", "unk_token": null, "byte_fallback": true, "ignore_merges": true,
            "vocab": {"a": 0, "b": 1, "ab": 2, "<0x41>": 3}, "merges": [["a", "b"]]}})
}

fn templates() -> Vec<(&'static str, String)> {
    let messages = json!([{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "ab"}]},
        {"role": "assistant", "content": null, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}]);
    vec![
        ("chatml", "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
            {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}".into()),
        ("tools", format!("{{%- set ns = namespace(n=0) -%}}{{%- for m in messages if m.content is string -%}}{{%- set ns.n = ns.n + 1 -%}}\
            {{{{ loop.index0 ~ m.content | trim }}}}{{%- else -%}}{{{{ raise_exception('no') }}}}{{%- endfor -%}}\
            {{%- macro f(x, y=2) -%}}{{{{ x | tojson(indent=2) }}}}{{%- endmacro -%}}{{{{ f(messages[-1].tool_calls) }}}}\
            {{{{ strftime_now('%d %b %Y') }}}}{{{{ 'a,b'.split(',')[::-1] | join('x') | upper }}}}\0{messages}\0{{\"x\": [1]}}")),
        ("recursive", "{% for a in [[1,[2]],[3]] recursive %}{{ loop(a) if a is sequence else a }}{% endfor %}\
            {% generation %}x{% endgeneration %}{{ '%s' | format(1) }}{{ range(5) | batch(2) | list }}{# c #}".into()),
        ("bomb", "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}".into()),
    ]
}

fn forms() -> Vec<(&'static str, String)> {
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", null]},
        "c": {"type": "array", "items": {"$ref": "#/$defs/d"}, "maxItems": 2}}, "required": ["a"], "additionalProperties": false,
        "$defs": {"d": {"anyOf": [{"type": "string", "pattern": "^a+$"}, {"const": 1.5}]}}});
    vec![
        ("regex", "\0(ab|c){1,3}[^x-z]\\d+(?i:end)?".into()),
        (
            "lark",
            "\u{1}start: \"a\" (B | c)+\nB: /[0-9]+/\nc: %json {\"type\": \"boolean\"}\n%ignore / /".into(),
        ),
        (
            "gbnf",
            "\u{1}root ::= item (\",\" item)* # all\nitem ::= [a-z0-9_]{1,4} | \"\\\"\" [^\"\\\\]* \"\\\"\""
                .into(),
        ),
        ("schema", format!("\u{2}{schema}")),
        ("schema-object", format!("\u{3}{schema}")),
        ("choices", "\u{4}yes\nno\nmaybe \u{e9}".into()),
    ]
}

/// What hosts say, with the byte that tells the target which kind it is.
fn said_by_hosts() -> Vec<(String, u8, Vec<u8>)> {
    use lockstep_comm::fuzzing::{framed, introduction};
    let mut said = Vec::new();
    // A stranger: nothing but the opening, one of another version, one that guesses at the tag.
    for (name, version) in [("opening", 1), ("version", 9)] {
        said.push((name.to_owned(), 0, [b"LOCKSTEP", &[version, b'h'][..], &[7; 64]].concat()));
    }
    let messages = lockstep_launch::fuzzing::host_messages();
    let all: Vec<&[u8]> = messages.iter().map(|message| &**message).collect();
    said.push(("frames".into(), 1, framed(&all)));
    said.push(("meeting".into(), 1, framed(&[&introduction(1, b"addresses")])));
    // Lengths that nobody has: none, one above the limit, all that fits.
    for (name, length) in [("length-0", 0), ("length-above", (1 << 20) + 1), ("length-all", u32::MAX)] {
        said.push((name.into(), 1, [&length.to_le_bytes()[..], &[0; 40]].concat()));
    }
    said.push(("length-most".into(), 1, [&(1u32 << 20).to_le_bytes()[..], b"and little else"].concat()));
    said.extend(
        messages.iter().enumerate().map(|(at, message)| (format!("message-{at:02}"), 2, message.clone())),
    );
    said.push(("addresses".into(), 3, [&[3, 0, 1, 2, 3, 2, 0, 9, 9][..]].concat()));
    said.push(("addresses-long".into(), 3, vec![0xff, 0xff, 1]));
    said
}
