//! Starts the real binary, waits until it answers, asks it, and cleans up after it.
//!
//! **Invariants**
//! * Nothing sleeps to synchronise: every wait looks at a real condition (an HTTP answer, a process
//!   list, an exit) and has a limit.
//! * Every process of a server carries its mark in the environment ([`crate::process`]); dropping a
//!   [`Server`] kills exactly those, also after a failed assertion.
//!
//! Assumed of the binary: `serve --model PATH --port N` listens on 127.0.0.1 once everything is
//! loaded, `/health` answers 200 then, and `/server_info` holds `pages_free`, `pages_cached`,
//! `pages_total`, `running` and `waiting` at any depth.

mod answer;
mod command;

pub use answer::{Answer, Streamed};
pub use command::{Exit, ServeCommand, free_port};

use crate::http::{EventStream, HttpClient, Response};
use crate::process::{self, ProcessInfo, Signal, poll};
use command::Output;
use serde_json::{Map, Value, json};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};
use std::time::Duration;

/// Limit of a start; generous, as test machines are shared.
pub const START_LIMIT: Duration = Duration::from_secs(60);
/// The server must be gone this soon after a signal or a child's death, by design.
pub const EXIT_LIMIT: Duration = Duration::from_secs(10);

/// A running server.
pub struct Server {
    child: Child,
    /// Asks it.
    pub http: HttpClient,
    /// Its port.
    pub port: u16,
    /// The name it serves its model under: the folder's.
    pub model_name: String,
    mark: String,
    output: Output,
}

/// State of an idle server, to compare with after a case.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Baseline {
    /// Pages that no request holds.
    pub pages_unheld: u64,
    /// Names of all its processes, sorted.
    pub process_names: Vec<String>,
}

impl Server {
    /// Process id of the launcher.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Everything printed so far.
    pub fn output(&self) -> String {
        self.output.snapshot()
    }

    /// Its living processes, the launcher included, also those whose parent died.
    pub fn processes(&self) -> Vec<ProcessInfo> {
        process::marked(&self.mark)
    }

    /// The process called `name`; waits for it to appear. Panics when it does not in
    /// [`START_LIMIT`].
    pub fn process(&self, name: &str) -> ProcessInfo {
        let found = poll(START_LIMIT, || self.processes().into_iter().find(|p| p.name == name));
        found.unwrap_or_else(|| panic!("no process {name:?} in {:?}\n{}", self.processes(), self.output()))
    }

    /// Sends a signal to the launcher only.
    pub fn signal(&self, signal: Signal) {
        process::signal(self.pid(), signal);
    }

    /// Sends a signal to the launcher's process group, as a terminal does.
    pub fn signal_group(&self, signal: Signal) {
        process::signal_group(self.pid(), signal);
    }

    /// Waits until `/health` is 200. Panics with the output when the server ends first.
    pub fn wait_ready(&mut self) {
        let probe = self.http.with_limit(Duration::from_secs(5));
        let ready = poll(START_LIMIT, || {
            if let Some(status) = self.try_wait() {
                return Some(Err(status));
            }
            probe.get("/health").ok().filter(|r| r.status == 200).map(|_| Ok(()))
        });
        match ready {
            Some(Ok(())) => {}
            Some(Err(status)) => panic!("the server ended while starting ({status}):\n{}", self.all_output()),
            None => panic!("the server is not ready after {START_LIMIT:?}:\n{}", self.output()),
        }
    }

    /// The exit status, if it has ended.
    pub fn try_wait(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("invariant: the child is ours")
    }

    /// Waits for the launcher's end. Panics when it still runs after `limit`.
    pub fn wait_exit(&mut self, limit: Duration) -> Exit {
        let Some(status) = poll(limit, || self.try_wait()) else {
            panic!("the server still runs after {limit:?}: {:?}\n{}", self.processes(), self.output());
        };
        Exit { code: status.code(), signal: status.signal(), output: self.all_output() }
    }

    /// The output up to the end of both pipes, which ends with the last process that holds them.
    fn all_output(&self) -> String {
        let _ = poll(Duration::from_secs(5), || self.output.is_closed().then_some(()));
        self.output()
    }

    /// Waits until none of its processes lives. Panics naming those that do after `limit`.
    pub fn wait_gone(&self, limit: Duration) {
        if poll(limit, || self.processes().is_empty().then_some(())).is_none() {
            panic!("processes left after {limit:?}: {:?}\n{}", self.processes(), self.output());
        }
    }

    /// SIGTERM, then a drain: the launcher ends with code 0 in time and nothing is left. Gives all that was printed, where
    /// [`output`](Self::output) has what came so far: logs of other processes come when they come.
    pub fn stop(mut self) -> String {
        self.signal(Signal::Term);
        let exit = self.wait_exit(EXIT_LIMIT);
        assert_eq!(exit.code, Some(0), "exit after SIGTERM when idle; output:\n{}", exit.output);
        self.wait_gone(Duration::from_secs(1));
        exit.output
    }

    /// The body of a completions request: greedy, `extra` merged in.
    pub fn completion_body(&self, prompt: &str, extra: Value) -> Value {
        merged(json!({"model": self.model_name, "prompt": prompt, "temperature": 0}), extra)
    }

    /// The body of a chat request with one user message: greedy, `extra` merged in.
    pub fn chat_body(&self, content: &str, extra: Value) -> Value {
        let messages = json!([{"role": "user", "content": content}]);
        merged(json!({"model": self.model_name, "messages": messages, "temperature": 0}), extra)
    }

    /// POST; panics on a broken connection.
    pub fn post(&self, path: &str, body: &Value) -> Response {
        self.http.post(path, body).unwrap_or_else(|e| panic!("POST {path}: {e}\n{}", self.output()))
    }

    /// GET; panics on a broken connection.
    pub fn get(&self, path: &str) -> Response {
        self.http.get(path).unwrap_or_else(|e| panic!("GET {path}: {e}\n{}", self.output()))
    }

    /// A whole greedy completion. Panics unless the answer is 200.
    pub fn complete(&self, prompt: &str, extra: Value) -> Answer {
        self.answer("/v1/completions", &self.completion_body(prompt, extra))
    }

    /// A whole greedy chat answer. Panics unless the answer is 200.
    pub fn chat(&self, content: &str, extra: Value) -> Answer {
        self.answer("/v1/chat/completions", &self.chat_body(content, extra))
    }

    /// POSTs `body` and reads the answer. Panics unless it is 200.
    pub fn answer(&self, path: &str, body: &Value) -> Answer {
        let response = self.post(path, body);
        let json = response.json();
        assert_eq!(response.status, 200, "{path} {body}: {json}\n{}", self.output());
        let choice = &json["choices"][0];
        let text = choice["text"].as_str().or_else(|| choice["message"]["content"].as_str());
        Answer {
            text: text.unwrap_or_else(|| panic!("no text in {json}")).to_owned(),
            finish: choice["finish_reason"]
                .as_str()
                .unwrap_or_else(|| panic!("no finish_reason in {json}"))
                .to_owned(),
            prompt_tokens: json["usage"]["prompt_tokens"]
                .as_u64()
                .unwrap_or_else(|| panic!("no usage in {json}")),
            completion_tokens: json["usage"]["completion_tokens"].as_u64().unwrap_or_default(),
        }
    }

    /// Opens a stream of `body`, which need not say `stream`. Panics unless the answer is 200.
    pub fn open_stream(&self, path: &str, body: &Value) -> EventStream {
        let body = merged(body.clone(), json!({"stream": true}));
        let stream = self.http.open_stream(path, &body);
        let mut stream = stream.unwrap_or_else(|e| panic!("POST {path}: {e}\n{}", self.output()));
        if stream.status != 200 {
            let text = stream.rest().map(|b| String::from_utf8_lossy(&b).into_owned());
            panic!("{path} {body}: {} {text:?}", stream.status);
        }
        stream
    }

    /// A streamed answer to `body`, read to its end.
    pub fn stream(&self, path: &str, body: &Value) -> Streamed {
        Streamed::read(&mut self.open_stream(path, body))
    }

    /// `/server_info`.
    pub fn info(&self) -> Value {
        let response = self.get("/server_info");
        assert_eq!(response.status, 200, "/server_info");
        response.json()
    }

    /// A number of `/server_info`, looked for at any depth. Panics when there is none.
    pub fn info_number(&self, key: &str) -> u64 {
        let info = self.info();
        find_number(&info, key).unwrap_or_else(|| panic!("no number {key:?} in {info}"))
    }

    /// Pages that no request holds: free, or kept by the prefix cache only.
    pub fn pages_unheld(&self) -> u64 {
        let info = self.info();
        let number =
            |key: &str| find_number(&info, key).unwrap_or_else(|| panic!("no number {key:?} in {info}"));
        number("pages_free") + number("pages_cached")
    }

    /// What to compare with after a case.
    pub fn baseline(&self) -> Baseline {
        let mut process_names: Vec<String> = self.processes().into_iter().map(|p| p.name).collect();
        process_names.sort_unstable();
        Baseline { pages_unheld: self.pages_unheld(), process_names }
    }

    /// The check after every case: a fresh request is answered rightly within 5 s, every page is
    /// unheld again, nothing runs or waits, and no process was lost.
    pub fn after_check(&self, baseline: &Baseline, prompt: &str, text: &str) {
        let quick = self.http.with_limit(Duration::from_secs(5));
        let body = self.completion_body(prompt, json!({"max_tokens": text.split(' ').count() + 1}));
        let response = quick.post("/v1/completions", &body);
        let response = response.unwrap_or_else(|e| panic!("after-check: {e}\n{}", self.output()));
        let got = response.json()["choices"][0]["text"].as_str().map(str::to_owned);
        assert!(
            got.as_deref().is_some_and(|got| got.trim_start().starts_with(text.trim_start())),
            "after-check: {got:?}, expected {text:?}"
        );
        let idle = poll(Duration::from_secs(5), || (self.baseline() == *baseline).then_some(()));
        assert!(
            idle.is_some(),
            "after-check: {:?}, at the start {baseline:?}\n{}",
            self.baseline(),
            self.info()
        );
        assert_eq!((self.info_number("running"), self.info_number("waiting")), (0, 0), "after-check");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Children first appear in the list after their fork; killing the launcher first ends the
        // supply.
        let _ = self.child.kill();
        let _ = self.child.wait();
        poll(Duration::from_secs(5), || {
            let left = self.processes();
            left.iter().for_each(|p| process::signal(p.pid, Signal::Kill));
            left.is_empty().then_some(())
        });
    }
}

/// `base` with the fields of `extra`; null in `extra` is kept as an explicit null.
fn merged(mut base: Value, extra: Value) -> Value {
    let extra: Map<String, Value> = match extra {
        Value::Object(map) => map,
        Value::Null => Map::new(),
        other => panic!("extra fields must be an object, got {other}"),
    };
    base.as_object_mut().expect("invariant: bodies are objects").extend(extra);
    base
}

/// The first number called `key`, at any depth.
fn find_number(value: &Value, key: &str) -> Option<u64> {
    match value {
        Value::Object(map) => map
            .get(key)
            .and_then(Value::as_u64)
            .or_else(|| map.values().find_map(|inner| find_number(inner, key))),
        Value::Array(list) => list.iter().find_map(|inner| find_number(inner, key)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_found_at_any_depth() {
        let info = json!({"a": [{"x": "no"}, {"engine": {"pages_free": 7}}], "running": 1});
        assert_eq!(find_number(&info, "pages_free"), Some(7));
        assert_eq!(find_number(&info, "running"), Some(1));
        assert_eq!(find_number(&info, "waiting"), None);
    }
}
