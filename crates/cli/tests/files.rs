//! What stands where a file should: `plan`, `verify` and `serve` say the same about it, at once, with the same exit code;
//! and an answer that nobody could write down is no success.

mod common;

use lockstep_testkit::gguf::model::from_spec;
use lockstep_testkit::{Fixture, ModelSpec, ServeCommand, TempDir};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

/// Seconds after which a command hangs.
const PATIENCE: &str = "60";

/// A command that is ended, with exit code 124, should it hang.
fn lockstep(args: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.arg(PATIENCE).arg(common::BINARY).args(args);
    command
}

/// Exit code and what was said on stderr, without the program's name.
fn said(args: &[&str]) -> (Option<i32>, String) {
    let output: Output = lockstep(args).output().expect("the binary runs");
    let text = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    (output.status.code(), text.trim_start_matches("lockstep: ").to_owned())
}

fn text(path: &Path) -> &str {
    path.to_str().expect("paths of tests are text")
}

fn make_pipe(path: &Path) {
    let _ = fs::remove_file(path);
    let made = Command::new("mkfifo").arg(path).status().expect("mkfifo runs");
    assert!(made.success(), "{}", path.display());
}

/// A GGUF file whose tensor `name` claims to be of ggml type `number`.
fn gguf_with_type(path: &Path, name: &str, number: u32) {
    let spec = ModelSpec::default();
    let mut bytes = from_spec(&spec, &spec.weights()).encode();
    let at = bytes.windows(name.len()).position(|w| w == name.as_bytes()).expect("the tensor is there");
    let dims = at + name.len();
    let count = u32::from_le_bytes(bytes[dims..dims + 4].try_into().expect("four bytes")) as usize;
    let kind = dims + 4 + 8 * count;
    bytes[kind..kind + 4].copy_from_slice(&number.to_le_bytes());
    fs::write(path, bytes).expect("the folder is writable");
}

#[test]
fn plan_verify_and_serve_refuse_alike_what_cannot_load() {
    let temp = TempDir::new("refusals");
    let fixture = |name: &str| Fixture::named(name).write_into(temp.path());
    let pickles = temp.join("pickles");
    fs::create_dir(&pickles).expect("the folder is writable");
    fs::copy(fixture("rand_llama").join("config.json"), pickles.join("config.json")).expect("a config");
    fs::write(pickles.join("pytorch_model.bin"), "x").expect("the folder is writable");
    let quantised = temp.join("iq2.gguf");
    gguf_with_type(&quantised, "blk.1.ffn_down.weight", 16);
    for (model, words) in [
        (fixture("load_missing"), "is missing; searched"),
        (fixture("load_missing_shard"), "is missing, although"),
        (fixture("load_wrong_shape"), "but the config asks for"),
        (fixture("load_layers3_in_config"), "model.layers.2."),
        (fixture("load_truncated"), "expected"),
        (fixture("load_lfs_pointer"), "git-lfs pointer"),
        (pickles, "which can run code when opened"),
        (quantised, "stored as IQ2_XXS, which is not supported"),
    ] {
        let model = text(&model);
        let (code, plan) = said(&["plan", "--model", model, "--device", "h200"]);
        assert!(
            code == Some(3) && plan.contains(words) && plan.lines().count() == 1,
            "{model}: {code:?} {plan}"
        );
        assert_eq!(said(&["verify", "--model", model, "--tokens", "1"]), (Some(3), plan.clone()), "{model}");
        let exit =
            ServeCommand::new(common::BINARY, Path::new(model)).tp(2).run_to_exit(common::REFUSAL_LIMIT);
        assert_eq!(exit.code, Some(3), "{model}: {}", exit.output);
        assert!(exit.output.contains(&plan) && !exit.output.contains("TP0"), "{model}: {}", exit.output);
    }
}

#[test]
fn tensors_that_nobody_reads_are_named() {
    let temp = TempDir::new("extra");
    let model = Fixture::named("load_extra").write_into(temp.path());
    let model = text(&model);
    let note = "not part of this model";
    let json_of = |args: &[&str]| -> Value {
        let output =
            lockstep(&[args, &["--model", model, "--json"]].concat()).output().expect("the binary runs");
        assert!(output.status.success(), "{output:?}");
        serde_json::from_slice(&output.stdout).expect("JSON")
    };
    let (plan, verify) =
        (json_of(&["plan", "--device", "h200"]), json_of(&["verify", "--tokens", "1", "--tp", "1"]));
    assert!(plan["notes"][0].as_str().is_some_and(|words| words.contains(note)), "{plan}");
    assert_eq!(plan["notes"], verify["notes"]);
    let output = lockstep(&["plan", "--model", model, "--device", "h200"]).output().expect("the binary runs");
    let table = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(table.lines().any(|line| line.starts_with("note: ") && line.contains(note)), "{table}");
}

#[test]
fn a_pipe_or_a_device_in_place_of_a_file_is_named_and_never_waited_for() {
    let temp = TempDir::new("pipes");
    let whole = Fixture::named("chain").write_into(temp.path());
    let (model, pipe) = (temp.join("model"), temp.join("pipe"));
    make_pipe(&pipe);
    for (name, code) in [
        ("config.json", 3),
        ("generation_config.json", 3),
        ("model.safetensors", 3),
        ("model.safetensors.index.json", 3),
        ("tokenizer.json", 3),
        ("tokenizer_config.json", 3),
        ("special_tokens_map.json", 3),
        ("chat_template.jinja", 3),
    ] {
        let _ = fs::remove_dir_all(&model);
        fs::create_dir(&model).expect("the folder is writable");
        for entry in fs::read_dir(&whole).expect("the fixture") {
            let entry = entry.expect("the fixture");
            fs::copy(entry.path(), model.join(entry.file_name())).expect("the folder is writable");
        }
        make_pipe(&model.join(name));
        let (got, words) = said(&["verify", "--model", text(&model), "--tokens", "1", "--tp", "1"]);
        assert_eq!(got, Some(code), "{name}: {words}");
        assert!(words.contains(&format!("{name} is a named pipe")) && words.lines().count() == 1, "{words}");
    }
    let (whole, pipe) = (text(&whole), text(&pipe));
    for args in [
        &["plan", "--model", pipe][..],
        &["plan", "--model", "/dev/zero"],
        &["plan", "--model", whole, "--devices", pipe],
        &["plan", "--model", whole, "--devices", "/dev/zero"],
        &["verify", "--model", whole, "--prompts", pipe],
        &["verify", "--model", whole, "--prompts", "/dev/null"],
        &["serve", "--model", whole, "--port", "0", "--api-key-file", pipe],
        &["serve", "--model", whole, "--port", "0", "--chat-template", pipe],
        &["bench", "serve", "--url", "http://127.0.0.1:9", "--trace", pipe],
        &["batch", "--url", "http://127.0.0.1:9", "--input", pipe, "--output", "/dev/null"],
        &["replay", "/dev/zero"],
    ] {
        let (code, words) = said(args);
        assert!(matches!(code, Some(1..=3)), "{args:?}: {code:?} {words}");
        assert!(words.contains(pipe) || words.contains("/dev/"), "{args:?}: {words}");
        assert!(words.contains("not a regular file") || words.contains("is not a file"), "{args:?}: {words}");
    }
}

#[test]
fn messages_name_the_file_and_what_to_do() {
    let temp = TempDir::new("messages");
    let model = Fixture::named("load_sharded").write_into(temp.path());
    let empty = temp.join("empty");
    fs::write(&empty, "").expect("the folder is writable");
    for content in ["", "{", "[]"] {
        fs::write(model.join("model.safetensors.index.json"), content).expect("the folder is writable");
        let (code, words) = said(&["plan", "--model", text(&model)]);
        let expected = "model.safetensors.index.json: content: expected a JSON object";
        assert!(
            code == Some(3) && words.contains(expected) && words.contains("download it again"),
            "{words}"
        );
        assert!(!words.contains("config"), "{words}");
    }
    let sound = Fixture::named("chain").write_into(temp.path());
    let (sound, empty) = (text(&sound), text(&empty));
    for (args, words) in [
        (&["verify", "--model", sound, "--prompts", empty][..], "holds no line with text; write one"),
        (&["plan", "--model", sound, "--devices", empty], "not a list of devices"),
        (&["plan", "--model", sound, "--device", "cpu:1e30g"], "give at most 16777216 GiB"),
    ] {
        let (code, sentence) = said(args);
        assert!(code == Some(2) && sentence.contains(words), "{args:?}: {sentence}");
        assert!(sentence.contains(empty) || sentence.contains("1e30g"), "{args:?}: {sentence}");
    }
}

#[test]
fn made_up_weights_take_the_description_of_a_gguf_file() {
    let temp = TempDir::new("gguf");
    let file = temp.join("model.gguf");
    let spec = ModelSpec::default();
    from_spec(&spec, &spec.weights()).write(&file).expect("the folder is writable");
    for model in [file.as_path(), temp.path()] {
        let args =
            ["verify", "--model", text(model), "--dummy-weights", "--tokens", "2", "--tp", "1", "--json"];
        let output = lockstep(&args).output().expect("the binary runs");
        assert!(output.status.success(), "{output:?}");
    }
}

#[test]
fn verify_and_bench_refuse_what_memory_cannot_hold() {
    let temp = TempDir::new("large");
    let config = json!({"architectures": ["LlamaForCausalLM"], "hidden_size": 16384, "num_attention_heads": 128,
        "num_key_value_heads": 8, "intermediate_size": 53248, "num_hidden_layers": 126, "vocab_size": 128256,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 8192, "torch_dtype": "bfloat16"});
    fs::write(temp.join("config.json"), config.to_string()).expect("the folder is writable");
    let model = text(temp.path());
    for args in [
        &["verify", "--model", model, "--dummy-weights", "--tp", "1,2"][..],
        &["bench", "decode", "--model", model, "--dummy-weights"],
    ] {
        let (code, words) = said(args);
        assert_eq!(code, Some(5), "{args:?}: {words}");
        for part in ["% of", "MiB available", "but weights take", "leaves nothing", "--dtype bf16"] {
            assert!(words.contains(part), "{part:?} not in: {words}");
        }
    }
}

#[test]
fn an_answer_that_cannot_be_written_is_no_success() {
    let temp = TempDir::new("full");
    let model = Fixture::named("rand_llama").write_into(temp.path());
    let model = text(&model);
    for args in [
        &["plan", "--model", model, "--device", "h200"][..],
        &["plan", "--model", model, "--device", "h200", "--json"],
        &["verify", "--model", model, "--tp", "1", "--tokens", "1"],
        &["doctor", "--quick"],
        &["doctor", "--quick", "--json"],
        &["pull"],
        &["--help"],
        &["--version"],
        &["bench", "decode", "--model", model, "--prompt", "4", "--tokens", "2"],
    ] {
        let run = |sink: Stdio| {
            let child = lockstep(args).stdout(sink).stderr(Stdio::piped()).spawn().expect("the binary runs");
            let output = child.wait_with_output().expect("it ends");
            (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
        };
        let (code, words) = run(Stdio::from(fs::File::create("/dev/full").expect("there is one")));
        assert!(code == Some(1) && words.contains("No space left on device"), "{args:?}: {code:?} {words}");
        // Nobody reads: no error, and nothing is said.
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let (code, words) = run(Stdio::from(writer));
        assert!(code == Some(0) && words.is_empty(), "{args:?}: {code:?} {words}");
    }
}
