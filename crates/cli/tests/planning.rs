//! `lockstep plan` as users call it.

mod common;

use serde_json::{Value, json};
use std::process::{Command, Output};

fn plan(args: &[&str]) -> Output {
    Command::new(common::BINARY).arg("plan").args(args).output().expect("the binary runs")
}

/// A folder with nothing but a config.
fn folder(config: &Value) -> lockstep_testkit::TempDir {
    let temp = lockstep_testkit::TempDir::new("plan");
    std::fs::write(temp.join("config.json"), config.to_string()).expect("the folder is writable");
    temp
}

fn qwen25_32b() -> Value {
    json!({"architectures": ["Qwen2ForCausalLM"], "hidden_size": 5120, "num_attention_heads": 40,
        "num_key_value_heads": 8, "intermediate_size": 27648, "num_hidden_layers": 64, "vocab_size": 152064,
        "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "max_position_embeddings": 32768,
        "tie_word_embeddings": false, "use_sliding_window": false, "torch_dtype": "bfloat16"})
}

#[test]
fn a_config_alone_is_enough() {
    let temp = folder(&qwen25_32b());
    let model = temp.path().display().to_string();
    let output = plan(&["--model", &model, "--device", "a100-80g"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(text.contains("all bf16, from config.json alone"), "{text}");
    assert!(text.contains("tp 1 loads but does not serve 32 requests of 8192 tokens"), "{text}");
    let output = plan(&["--model", &model, "--device", "a100-80g", "--dtype", "f32", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["choices"][0]["memory"]["weight_bytes"], json!(4 * 32_763_876_352_u64));
    assert_eq!(report["parameters"], json!(32_763_876_352_u64));
}

#[test]
fn a_checkpoint_is_counted_from_its_headers() {
    let temp = lockstep_testkit::TempDir::new("plan");
    let fixture = lockstep_testkit::Fixture::named("rand_llama");
    let model = fixture.write_into(temp.path());
    let output = plan(&["--model", &model.display().to_string(), "--device", "cpu:1g", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    assert!(report["source"].as_str().is_some_and(|s| s.contains("headers")), "{report}");
    let parameters = report["parameters"].as_u64().expect("a number");
    assert_eq!(report["choices"][0]["memory"]["weight_bytes"], json!(4 * parameters), "all f32");
}

#[test]
fn wrong_flags_and_models_are_named() {
    let temp = folder(&qwen25_32b());
    let model = temp.path().display().to_string();
    let said = |args: &[&str]| {
        let output = plan(args);
        (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
    };
    for (args, code, words) in [
        (vec!["--model", &model, "--device", "tpu"], 2, "--device tpu is not known; known are h200"),
        (vec!["--model", &model, "--context", "40000"], 2, "above the 32768 positions"),
        (vec!["--model", &model, "--concurrency", "0"], 2, "--concurrency 0 is outside 1 to"),
        (vec!["--model", &model, "--memory-ratio", "1.5"], 2, "--memory-ratio 1.5 is outside"),
        (vec!["--model", &model, "--dtype", "int3"], 2, "--dtype int3 is not known"),
        (vec!["--model", &model, "--devices", "/nowhere.json"], 2, "/nowhere.json"),
        (vec!["--model", &model, "--nnodes", "65"], 2, "--nnodes 65 is outside 1..=64"),
        (vec!["--model", &model, "--nnodes", "2", "--dp", "2"], 2, "put a router in front of them"),
        (vec!["--model", &model, "--pp", "65"], 2, "--pp 65"),
        (vec!["--model", &model, "--link-gbit", "0"], 2, "--link-gbit 0.0 is not above 0"),
        (vec!["--model", &model, "--link-us", "nan"], 2, "--link-us NaN is outside 0 to"),
        (vec!["--model", "/nowhere"], 3, "/nowhere"),
    ] {
        let (got, text) = said(&args);
        assert_eq!(got, Some(code), "{args:?}: {text}");
        assert!(text.contains(words) && text.lines().count() == 1, "{args:?}: {text}");
    }
}

fn verify(args: &[&str]) -> Output {
    Command::new(common::BINARY).arg("verify").args(args).output().expect("the binary runs")
}

#[test]
fn verify_passes_on_a_sound_model_and_says_what_it_compared() {
    let temp = lockstep_testkit::TempDir::new("verify");
    let model = lockstep_testkit::Fixture::named("rand_llama").write_into(temp.path()).display().to_string();
    std::fs::write(temp.join("prompts.txt"), "w1 w2 w3\n\nw9 w8 w7 w6 w5\n").expect("the folder is writable");
    let prompts = temp.join("prompts.txt").display().to_string();
    let output = verify(&["--model", &model, "--tp", "1,2", "--tokens", "5", "--prompts", &prompts]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{output:?}");
    assert!(text.contains("every promise kept in 16 comparisons"), "{text}");
    assert!(text.contains("text at cpu tp 2 against cpu tp 1") && text.contains("tokens 10/10"), "{text}");
    let output = verify(&["--model", &model, "--tp", "2", "--tokens", "3", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["comparisons"][0]["promise"], "bit_equal");

    // What is asked for is checked as it is, or not at all.
    std::fs::write(&prompts, format!("w1\n{}\n", "w2 ".repeat(600))).expect("the folder is writable");
    let output = verify(&["--model", &model, "--tokens", "5", "--prompts", &prompts]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && text.contains("prompt 2 of --prompts has"), "{output:?}");
}

#[test]
fn verify_tells_bad_model_files_from_broken_promises() {
    let temp = lockstep_testkit::TempDir::new("verify-files");
    let model =
        lockstep_testkit::Fixture::named("load_missing").write_into(temp.path()).display().to_string();
    let output = verify(&["--model", &model, "--tp", "1,2", "--tokens", "2"]);
    assert_eq!(output.status.code(), Some(3), "{output:?}");
}

#[test]
fn verify_of_made_up_weights_needs_only_a_config() {
    let mut config = qwen25_32b();
    for (key, value) in [
        ("hidden_size", 64),
        ("num_attention_heads", 4),
        ("num_key_value_heads", 2),
        ("intermediate_size", 96),
        ("num_hidden_layers", 2),
        ("vocab_size", 321),
    ] {
        config[key] = json!(value);
    }
    let temp = folder(&config);
    let model = temp.path().display().to_string();
    let output = verify(&["--model", &model, "--dummy-weights", "--tp", "4,1", "--tokens", "4"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("every promise kept"), "{output:?}");
    for (args, words) in [
        (&["--tp", "3"][..], "--tp 3 does not divide the model's 4 query heads"),
        (&["--tp", "1,1"], "--tp names 1 twice"),
        (&["--tokens", "0"], "--tokens 0 is outside 1 to 512"),
        (&["--device", "cpu,tpu"], "--device tpu is not known; use auto, cpu, cuda or cpu,cuda"),
        (&["--device", "cpu,cpu"], "--device names cpu twice"),
        (&["--device", "cpu,cuda", "--dtype", "f32"], "--device cuda needs an NVIDIA driver"),
    ] {
        if args.contains(&"cpu,cuda") && std::path::Path::new("/dev/nvidiactl").exists() {
            continue;
        }
        let output = verify(&[&["--model", &model, "--dummy-weights"], args].concat());
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(words), "{text}");
    }
}
