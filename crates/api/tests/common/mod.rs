//! A server on a loopback port with a fake engine behind it, and a raw HTTP client.
//!
//! Nothing here sleeps to synchronise: every wait is for an event, with a deadline that only a
//! failing test meets.

#![allow(dead_code)]

use lockstep_api::engine::Replication;
use lockstep_api::{
    ApiConfig, Ended, EngineClient, EngineInbound, EngineLink, Outbound, ServerControl, ServerHandle, serve,
};
use lockstep_core::{FinishReason, Refusal, RequestId, TokenId};
use lockstep_wire::{Delta, GenerateRequest, ToApi, ToTokenizer, Usage};
use serde_json::Value;
use std::collections::BTreeMap;
use std::future::Future;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

/// Far above anything a passing test takes, also on a busy machine.
const DEADLINE: Duration = Duration::from_secs(60);

pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(DEADLINE, future).await.unwrap_or_else(|_| panic!("waited too long for {what}"))
}

/// A running server.
pub struct Server {
    pub address: SocketAddr,
    pub handle: ServerHandle,
    pub engine: FakeEngine,
    pub client: EngineClient,
    served: JoinHandle<Ended>,
}

/// The engine's side, driven by the test.
pub struct FakeEngine {
    pub outbound: mpsc::Receiver<Outbound>,
    pub inbound: EngineInbound,
}

pub fn config() -> ApiConfig {
    ApiConfig { created: 1_700_000_000, version: "9.9".into(), ..ApiConfig::new("org/tiny", 64, 300) }
}

impl Server {
    pub async fn start() -> Self {
        Self::start_with(config(), 1, 100).await
    }

    pub async fn start_with(config: ApiConfig, tokenizers: usize, requests_open_max: usize) -> Self {
        Self::run(config, EngineClient::new(tokenizers, requests_open_max)).await
    }

    /// With one tokenizer and several replicas.
    pub async fn start_replicas(config: ApiConfig, replication: Replication) -> Self {
        Self::run(config, EngineClient::with_replicas(1, replication)).await
    }

    async fn run(config: ApiConfig, (client, link): (EngineClient, EngineLink)) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (handle, control) = ServerControl::new();
        let served = tokio::spawn(serve(listener, config, client.clone(), control));
        let engine = FakeEngine { outbound: link.outbound, inbound: link.inbound };
        Self { address, handle, engine, client, served }
    }

    pub async fn connect(&self) -> Client {
        Client::connect(self.address).await
    }

    /// A request on its own connection, answered without the engine.
    pub async fn ask(&self, raw: impl AsRef<[u8]>) -> Reply {
        let mut client = self.connect().await;
        client.send(raw).await;
        client.reply().await
    }

    /// How `serve` returned.
    pub async fn ended(self) -> Ended {
        within("serve to return", self.served).await.unwrap()
    }
}

impl FakeEngine {
    pub async fn next(&mut self) -> Outbound {
        within("a message from the api", self.outbound.recv()).await.unwrap()
    }

    /// The next message, which must be a request; also tells its tokenizer.
    pub async fn request_at(&mut self) -> (usize, GenerateRequest) {
        match self.next().await {
            Outbound::Tokenizer(tokenizer, ToTokenizer::Generate(request)) => (tokenizer, *request),
            other => panic!("expected a request, got {other:?}"),
        }
    }

    pub async fn request(&mut self) -> GenerateRequest {
        self.request_at().await.1
    }

    /// The next message must be the abort of `id` at `tokenizer`.
    pub async fn expect_abort(&mut self, tokenizer: usize, id: RequestId) {
        assert_eq!(self.next().await, Outbound::Tokenizer(tokenizer, ToTokenizer::Abort { id, replica: 0 }));
    }

    pub fn expect_silence(&mut self) {
        if let Ok(message) = self.outbound.try_recv() {
            panic!("unexpected {message:?}");
        }
    }

    pub fn delta(&self, delta: Delta) {
        self.inbound.deliver(ToApi::Deltas(vec![delta]));
    }

    /// Text without an end.
    pub fn text(&self, id: RequestId, text: &str) {
        self.delta(delta(id, text, None));
    }

    /// Text and the end, with 3 prompt tokens, 1 of them cached, and 2 generated ones.
    pub fn finish(&self, id: RequestId, text: &str, finish: FinishReason) {
        self.delta(delta(id, text, Some(finish)));
    }

    pub fn refuse(&self, id: RequestId, refusal: Refusal) {
        self.inbound.deliver(ToApi::Refused { id, refusal });
    }
}

pub fn delta(id: RequestId, text: &str, finish: Option<FinishReason>) -> Delta {
    let usage = Usage { prompt_tokens: 3, cached_tokens: 1, completion_tokens: 2 };
    let (text, tokens) = (text.into(), vec![1 as TokenId]);
    let stop_string = None;
    Delta { id, text, tokens, finish, stop_string, usage, logprobs: None, echo: None, timing: None }
}

/// A POST with a JSON body.
pub fn post(path: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    )
}

pub fn get(path: &str) -> String {
    format!("GET {path} HTTP/1.1\r\nHost: x\r\n\r\n")
}

/// A raw connection.
pub struct Client {
    pub stream: TcpStream,
    buffer: Vec<u8>,
}

/// An HTTP answer.
#[derive(Debug)]
pub struct Reply {
    pub version: String,
    pub status: u16,
    pub headers: BTreeMap<String, String>,
    /// Chunks joined.
    pub body: Vec<u8>,
}

impl Reply {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn json(&self) -> Value {
        assert_eq!(self.headers["content-type"], "application/json");
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.text()))
    }

    /// The error object; checks status, form and content type.
    pub fn error(&self, status: u16) -> Value {
        assert_eq!(self.status, status, "{}", self.text());
        check_error(&self.json())
    }
}

/// `{"error": {"message", "type", "param", "code"}}` and nothing else.
pub fn check_error(body: &Value) -> Value {
    assert_eq!(body.as_object().unwrap().len(), 1, "{body}");
    let error = body["error"].as_object().unwrap();
    assert_eq!(error.keys().collect::<Vec<_>>(), ["message", "type", "param", "code"]);
    assert!(error["message"].is_string() && error["type"].is_string());
    body["error"].clone()
}

impl Client {
    pub async fn connect(address: SocketAddr) -> Self {
        Self { stream: TcpStream::connect(address).await.unwrap(), buffer: Vec::new() }
    }

    pub async fn send(&mut self, bytes: impl AsRef<[u8]>) {
        within("a write", self.stream.write_all(bytes.as_ref())).await.unwrap();
    }

    /// Reads more; false at the end of file.
    async fn fill(&mut self) -> bool {
        within("bytes from the server", self.stream.read_buf(&mut self.buffer)).await.unwrap() > 0
    }

    async fn take_line(&mut self) -> String {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|pair| pair == b"\r\n") {
                let line: Vec<u8> = self.buffer.drain(..end + 2).collect();
                return String::from_utf8(line[..end].to_vec()).unwrap();
            }
            assert!(self.fill().await, "connection closed inside a line: {:?}", self.buffer);
        }
    }

    async fn take(&mut self, count: usize) -> Vec<u8> {
        while self.buffer.len() < count {
            assert!(self.fill().await, "connection closed inside a body");
        }
        self.buffer.drain(..count).collect()
    }

    /// Status line and headers.
    pub async fn head(&mut self) -> Reply {
        let status_line = self.take_line().await;
        let (version, rest) = status_line.split_once(' ').unwrap();
        let mut headers = BTreeMap::new();
        loop {
            let line = self.take_line().await;
            let Some((name, value)) = line.split_once(':') else { break };
            headers.insert(name.to_ascii_lowercase(), value.trim().to_string());
        }
        Reply { version: version.into(), status: rest[..3].parse().unwrap(), headers, body: Vec::new() }
    }

    /// One chunk of a chunked body; `None` after the last.
    pub async fn chunk(&mut self) -> Option<String> {
        let size = usize::from_str_radix(&self.take_line().await, 16).unwrap();
        let bytes = self.take(size).await;
        assert_eq!(self.take(2).await, b"\r\n");
        (size > 0).then(|| String::from_utf8(bytes).unwrap())
    }

    /// A whole answer, however its length is told.
    pub async fn reply(&mut self) -> Reply {
        let mut reply = self.head().await;
        if reply.headers.get("transfer-encoding").is_some_and(|v| v == "chunked") {
            while let Some(chunk) = self.chunk().await {
                reply.body.extend(chunk.into_bytes());
            }
        } else if let Some(length) = reply.headers.get("content-length") {
            reply.body = self.take(length.parse().unwrap()).await;
        } else {
            reply.body = self.rest().await;
        }
        reply
    }

    /// Everything until the server closes.
    pub async fn rest(&mut self) -> Vec<u8> {
        while self.fill().await {}
        std::mem::take(&mut self.buffer)
    }

    /// Bytes received but not taken.
    pub fn unread(&self) -> &[u8] {
        &self.buffer
    }
}

/// Messages, tools and template variables of a chat prompt.
pub fn chat(request: GenerateRequest) -> (Value, Value, Value) {
    let lockstep_wire::Prompt::Chat(chat) = request.prompt else { panic!("not a chat") };
    let json = |text: Option<String>| text.map_or(Value::Null, |text| serde_json::from_str(&text).unwrap());
    (json(Some(chat.messages_json)), json(chat.tools_json), json(chat.template_kwargs_json))
}
