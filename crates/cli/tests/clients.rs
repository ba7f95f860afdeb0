//! The commands that are clients: `chat`, `batch` and `bench serve` as processes of their own, against the
//! real server.

mod common;

use common::{BINARY, Served, serve};
use lockstep_testkit::process::{self, MARK_VARIABLE, Signal, poll};
use lockstep_testkit::{Fixture, TempDir};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

/// A command must be over in this time.
const LIMIT: Duration = Duration::from_secs(60);
/// What the chain models answer in a chat, whatever was said: their template ends in a line feed.
const CHAT_ANSWER: &str = " hello there";

/// `lockstep` with `args`, all streams as pipes.
fn start(args: &[&str]) -> Child {
    let mut command = Command::new(BINARY);
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env_remove("LOCKSTEP_API_KEY").spawn().expect("the binary starts")
}

/// What became of `child` after it was given `input`.
fn end(mut child: Child, input: &str) -> Output {
    // A command that refuses may be gone before it reads.
    let _ = child.stdin.take().expect("invariant: piped").write_all(input.as_bytes());
    child.wait_with_output().expect("a child of this test")
}

fn run(args: &[&str]) -> Output {
    end(start(args), "")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Exit code and stderr.
fn verdict(output: &Output) -> (Option<i32>, String) {
    (output.status.code(), text(&output.stderr))
}

fn url(served: &Served) -> String {
    format!("http://127.0.0.1:{}", served.server.port)
}

#[test]
fn chat_in_a_script() {
    let served = serve("chain", 1);
    let url = url(&served);
    let chat = |input: &str, more: &[&str]| end(start(&[&["chat", "--url", &url], more].concat()), input);

    let input = "Hi\n\n/system Be brief.\nA text\\\nof two lines\n\"\"\"\nand\none\n\"\"\"\n/params max_tokens 1\n//x\n/stats\n";
    let output = chat(input, &["--param", "temperature=0"]);
    let (code, told) = verdict(&output);
    assert_eq!(code, Some(0), "{told}");
    let expected = [CHAT_ANSWER, CHAT_ANSWER, CHAT_ANSWER, " hello", ""].join("\n");
    assert_eq!(text(&output.stdout), expected, "{told}");
    assert!(told.contains("this chat: 4 answers"), "{told}");

    // Mistakes end it with a code and the number of the line; answers before them are there.
    let output = chat("Hi\n/exot\nHi\n", &[]);
    let (code, told) = verdict(&output);
    assert_eq!((code, text(&output.stdout).lines().count()), (Some(2), 1), "{told}");
    assert!(told.contains("line 2") && told.contains("/help"), "{told}");
    // Only the server knows the model's vocabulary.
    let (code, told) = verdict(&chat("Hi\n", &["--param", r#"logit_bias={"99999999": 1}"#]));
    assert_eq!(code, Some(1), "{told}");
    assert!(told.contains("line 1") && told.contains("400") && told.contains("logit_bias"), "{told}");
    let (code, told) = verdict(&chat("Hi\n\"\"\"open\n", &[]));
    assert!(code == Some(2) && told.contains("line 2"), "{told}");

    for (args, words) in [
        (vec!["chat"], ["--model", "--url"]),
        (vec!["chat", "--url", "nonsense"], ["nonsense", "http://"]),
        (vec!["chat", "--url", &url, "--model", "other"], ["other", "serves chain"]),
        (vec!["chat", "--url", &url, "--", "--tp", "2"], ["--", "--url"]),
        (vec!["chat", "--url", &url, "--param", "stream=false"], ["--param stream", "chat"]),
        (vec!["chat", "--url", &url, "--param", "temperature=-1"], ["--param temperature", "got -1"]),
    ] {
        let (code, told) = verdict(&run(&args));
        assert_eq!(code, Some(2), "{args:?}: {told}");
        assert!(
            words.iter().all(|word| told.contains(word)) && told.lines().count() == 1,
            "{args:?}: {told}"
        );
    }
    served.server.stop();
}

/// Starts `chat --model` with a mark by which all its processes are found.
fn start_with_server(mark: &str, model: &Path, flags: &[&str]) -> Child {
    let mut command = Command::new(BINARY);
    command.args(["chat", "--model"]).arg(model).arg("--").args(["--threads", "1", "--num-pages", "1024"]);
    command.args(flags).env(MARK_VARIABLE, mark);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.spawn().expect("the binary starts")
}

fn assert_gone(mark: &str) {
    let gone = poll(Duration::from_secs(15), || process::marked(mark).is_empty().then_some(()));
    assert!(gone.is_some(), "left: {:?}", process::marked(mark));
}

#[test]
fn chat_starts_and_ends_a_server_of_its_own() {
    let temp = TempDir::new("chat-model");
    let model = Fixture::named("chain").write_into(temp.path());
    let mark = format!("chat-{}", std::process::id());
    let output = end(start_with_server(&mark, &model, &[]), "Hi\n");
    let (code, told) = verdict(&output);
    assert_eq!((code, text(&output.stdout)), (Some(0), format!("{CHAT_ANSWER}\n")), "{told}");
    assert_eq!(told, "", "a chat that goes well says nothing more");
    assert_gone(&mark);

    // Why the server did not start is the last word, with its exit code.
    let (code, told) = verdict(&end(start_with_server(&mark, &model, &["--tp", "3"]), "Hi\n"));
    assert_eq!(code, Some(2), "{told}");
    assert!(told.contains("--tp 3"), "{told}");
    assert_gone(&mark);

    // Killed, it takes the server along.
    let chat = start_with_server(&mark, &model, &[]);
    let up =
        poll(LIMIT, || process::marked(&mark).iter().any(|p| p.name.contains("scheduler")).then_some(()));
    assert!(up.is_some(), "the server never started");
    process::signal(chat.id(), Signal::Kill);
    assert_eq!(end(chat, "").status.code(), None);
    assert_gone(&mark);
}

/// One line of a batch.
fn line(id: &str, prompt: &str, max_tokens: u32) -> Value {
    let body = json!({"prompt": prompt, "max_tokens": max_tokens, "temperature": 0});
    json!({"custom_id": id, "method": "POST", "url": "/v1/completions", "body": body})
}

/// A batch to be run.
struct Batch {
    input: PathBuf,
    output: PathBuf,
    url: String,
}

impl Batch {
    fn new(served: &Served, name: &str, lines: &[Value]) -> Self {
        let batch = Self {
            input: served.temp.join(&format!("{name}.in.jsonl")),
            output: served.temp.join(&format!("{name}.out.jsonl")),
            url: url(served),
        };
        let text: String = lines.iter().map(|line| format!("{line}\n")).collect();
        std::fs::write(&batch.input, text).expect("a file for the input");
        batch
    }

    fn start(&self, more: &[&str]) -> Child {
        let (input, output) = (self.input.to_string_lossy(), self.output.to_string_lossy());
        let args = ["batch", "--url", &self.url, "--input", &input, "--output", &output];
        start(&[&args[..], more].concat())
    }

    fn run(&self, more: &[&str]) -> Output {
        end(self.start(more), "")
    }

    fn lines(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(&self.output).unwrap_or_default();
        text.lines().map(|line| serde_json::from_str(line).expect("whole lines")).collect()
    }

    /// Waits until the output has `count` whole lines.
    fn wait_lines(&self, count: usize) {
        let written =
            || std::fs::read_to_string(&self.output).is_ok_and(|text| text.matches('\n').count() >= count);
        assert!(poll(LIMIT, || written().then_some(())).is_some(), "never got {count} lines");
    }

    /// Every id once, with its text.
    fn assert_answers(&self, expected: &[(&str, &str)]) {
        let lines = self.lines();
        let ids: BTreeSet<&str> = lines.iter().filter_map(|line| line["custom_id"].as_str()).collect();
        assert_eq!((lines.len(), ids.len()), (expected.len(), expected.len()), "{lines:?}");
        for (id, text) in expected {
            let line = lines.iter().find(|line| line["custom_id"] == *id).expect("an answer to each id");
            assert_eq!(
                (&line["response"]["status_code"], &line["error"]),
                (&json!(200), &Value::Null),
                "{line}"
            );
            let got = line["response"]["body"]["choices"][0]["text"].as_str().unwrap_or_default();
            assert!(got.starts_with(text), "{id}: {got:?}");
        }
    }
}

const ALPHA: &str = " alpha beta gamma delta";

#[test]
fn batches_are_answered_resumed_and_reported() {
    let served = serve("chain_long", 1);
    let quick = |id: &str| line(id, "A", 8);
    let lines = [quick("a"), quick("b"), quick("c"), line("long", "C", 1500), quick("d"), quick("e")];
    let expected =
        [("a", ALPHA), ("b", ALPHA), ("c", ALPHA), ("long", " tick tock tick"), ("d", ALPHA), ("e", ALPHA)];

    // Killed in the middle of a request and of a line, it goes on where it was.
    let batch = Batch::new(&served, "killed", &lines);
    let killed = batch.start(&["--concurrency", "1"]);
    batch.wait_lines(3);
    process::signal(killed.id(), Signal::Kill);
    end(killed, "");
    let written = std::fs::read(&batch.output).expect("the output");
    std::fs::write(&batch.output, [&written[..], br#"{"id":"batch_req_x","custom_id":"lo"#].concat())
        .expect("torn");
    let output = batch.run(&[]);
    let (code, told) = verdict(&output);
    assert_eq!(code, Some(0), "{told}");
    batch.assert_answers(&expected);
    let done_before = written.iter().filter(|byte| **byte == b'\n').count();
    assert!(
        text(&output.stdout).contains(&format!("{done_before} were done before")),
        "{}",
        text(&output.stdout)
    );
    // Once more there is nothing to do, and no server is needed for it.
    let again = Batch { url: "http://127.0.0.1:1".into(), ..batch };
    assert_eq!(again.run(&[]).status.code(), Some(0));

    // Interrupted, it finishes what is in flight and says that there is more.
    let batch = Batch::new(&served, "interrupted", &lines);
    let interrupted = batch.start(&["--concurrency", "1"]);
    batch.wait_lines(3);
    process::signal(interrupted.id(), Signal::Int);
    let (code, told) = verdict(&end(interrupted, ""));
    assert_eq!(code, Some(130), "{told}");
    assert!(told.contains("the same command goes on") && batch.lines().len() >= 4, "{told}");
    assert_eq!(batch.run(&[]).status.code(), Some(0));
    batch.assert_answers(&expected);

    // Refused requests are answers, the exit code tells, and they can be asked again.
    let batch = Batch::new(&served, "refused", &[quick("a"), line("b", "A", 0)]);
    let (code, told) = verdict(&batch.run(&[]));
    assert!(code == Some(1) && told.contains("1 lines failed"), "{told}");
    let refused = batch.lines().into_iter().find(|line| line["custom_id"] == "b").expect("its line");
    assert_eq!(refused["response"]["status_code"], 400, "{refused}");
    assert_eq!(refused["response"]["body"]["error"]["param"], "max_tokens", "{refused}");
    Batch::new(&served, "refused", &[quick("a"), quick("b")]);
    assert_eq!(batch.run(&[]).status.code(), Some(1), "a failed line is done, and still failed");
    assert_eq!(batch.run(&["--retry-failed"]).status.code(), Some(0));
    batch.assert_answers(&[("a", ALPHA), ("b", ALPHA)]);

    // Nothing is sent before every line was found fit.
    let mut other = quick("c");
    other["body"]["model"] = json!("gpt-4o");
    let bad = Batch::new(&served, "bad", &[quick("a"), quick("a"), json!({"custom_id": "x"})]);
    let (code, told) = verdict(&bad.run(&[]));
    assert_eq!((code, bad.lines().len()), (Some(2), 0), "{told}");
    assert!(told.contains("line 2: custom_id \"a\"") && told.contains("line 3: method"), "{told}");
    let (code, told) = verdict(&bad.run(&["--skip-bad-lines"]));
    assert_eq!((code, bad.lines().len()), (Some(1), 1), "{told}");
    let named = Batch::new(&served, "named", &[other]);
    let (code, told) = verdict(&named.run(&[]));
    assert!(code == Some(2) && told.contains("gpt-4o") && told.contains("chain_long"), "{told}");
    assert_eq!(named.run(&["--model", "chain_long"]).status.code(), Some(0));
    named.assert_answers(&[("c", ALPHA)]);
    served.server.stop();
}

#[test]
fn load_is_measured() {
    let served = serve("chain_long", 1);
    let json = served.temp.join("figures.json");
    let url = url(&served);
    let bench = |args: &[&str]| {
        let _ = std::fs::remove_file(&json);
        let json = json.to_string_lossy();
        let output = run(&[&["bench", "serve", "--url", &url, "--json", &json], args].concat());
        let figures =
            std::fs::read(&*json).map_or(Value::Null, |bytes| serde_json::from_slice(&bytes).expect("JSON"));
        (output, figures)
    };
    let made_up = ["--num-requests", "20", "--input-len", "40", "--output-len", "10", "--ignore-eos"];

    // Token ids, closed loop: every count is known.
    let (output, figures) = bench(&[&made_up[..], &["--concurrency", "4", "--prefix-len", "32"]].concat());
    let (code, told) = verdict(&output);
    assert_eq!(code, Some(0), "{told}\n{}", text(&output.stdout));
    assert_eq!((&figures["completed"], &figures["failed"]), (&json!(20), &json!(0)), "{figures}");
    assert_eq!(
        (&figures["prompt_tokens"], &figures["completion_tokens"]),
        (&json!(1440), &json!(200)),
        "{figures}"
    );
    assert!(figures["cached_tokens"].as_u64() >= Some(19 * 16), "the prefix is shared: {figures}");
    assert!(figures["concurrency_max"].as_u64().is_some_and(|n| (2..=4).contains(&n)), "{figures}");
    assert!(figures["client"]["cpu_s"].as_f64() > Some(0.0), "{figures}");
    let table = text(&output.stdout);
    assert!(["TTFT", "TPOT", "ITL", "E2E"].iter().all(|row| table.contains(row)), "{table}");

    // Words through the chat endpoint, by rate: prompts are about as long as wanted.
    let (output, figures) = bench(&[&made_up[..], &["--endpoint", "chat", "--request-rate", "200"]].concat());
    assert_eq!(verdict(&output).0, Some(0), "{:?}", verdict(&output));
    let prompt_tokens = figures["prompt_tokens"].as_u64().expect("a number");
    assert!((400..=1600).contains(&prompt_tokens), "{figures}");
    assert_eq!((&figures["completion_tokens"], &figures["request_rate"]), (&json!(200), &json!(200.0)));

    // A trace; failures are counted by kind and do not hide what succeeded.
    let trace = served.temp.join("trace.jsonl");
    let lines = [
        r#"{"prompt":"C","output_length":30}"#,
        r#"{"prompt":"A"}"#,
        r#"{"prompt":"C","output_length":20}"#,
        r#"{"body":{"prompt":"A","top_p":7}}"#,
    ];
    std::fs::write(&trace, lines.join("\n")).expect("a trace");
    let (output, figures) = bench(&["--trace", &trace.to_string_lossy()]);
    assert_eq!(verdict(&output).0, Some(0), "{:?}", verdict(&output));
    assert_eq!((&figures["completed"], &figures["completion_tokens"]), (&json!(3), &json!(55)), "{figures}");
    assert_eq!(figures["errors"]["status 400"]["count"], 1, "{figures}");
    for name in ["ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"] {
        let number = |key: &str| figures[name][key].as_f64().expect("a number");
        assert!(
            0.0 < number("p50") && number("p50") <= number("p90") && number("p90") <= number("p99"),
            "{figures}"
        );
    }
    let (code, told) = verdict(&bench(&["--trace", &trace.to_string_lossy(), "--endpoint", "chat"]).0);
    assert!(code == Some(2) && told.contains("--endpoint"), "{told}");
    served.server.stop();
}
