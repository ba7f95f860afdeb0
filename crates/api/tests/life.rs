//! Beginnings and ends: clients that leave (B8), drain, a lost engine, a full server, the
//! dispatcher.

// Helpers outside #[test] functions may unwrap too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Client, Server, check_error, config, get, post, within};
use lockstep_api::dispatch::{self, EngineSockets};
use lockstep_api::{ApiError, Ended, EngineClient, Outbound};
use lockstep_core::{FinishReason, RequestId};
use lockstep_wire::{ToApi, ToScheduler, ToTokenizer};
use serde_json::Value;
use std::collections::VecDeque;
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::sync::mpsc;

const PATH: &str = "/v1/completions";
const WHOLE: &str = r#"{"prompt":"C","max_tokens":100000}"#;
const STREAM: &str = r#"{"prompt":"C","max_tokens":100000,"stream":true}"#;
const HOUR: Duration = Duration::from_secs(3600);

/// A client whose request has reached the engine.
async fn submitted(server: &mut Server, body: &str) -> (Client, usize, RequestId) {
    let mut client = server.connect().await;
    client.send(post(PATH, body)).await;
    let (tokenizer, request) = server.engine.request_at().await;
    (client, tokenizer, request.id)
}

#[tokio::test]
async fn a_client_that_leaves_before_any_text_aborts_its_request() {
    for reset in [false, true] {
        for body in [WHOLE, STREAM] {
            let mut server = Server::start_with(config(), 2, 100).await;
            let (client, tokenizer, id) = submitted(&mut server, body).await;
            if reset {
                client.stream.set_zero_linger().unwrap();
            }
            drop(client);
            server.engine.expect_abort(tokenizer, id).await;
            // Late text of the aborted request disturbs nobody.
            server.engine.finish(id, "late", FinishReason::Stop);
            assert_eq!(server.ask(get("/health")).await.status, 200);
            server.engine.expect_silence();
        }
    }
}

#[tokio::test]
async fn a_client_that_leaves_a_stream_aborts_its_request() {
    for reset in [false, true] {
        let mut server = Server::start().await;
        let (mut client, tokenizer, id) = submitted(&mut server, STREAM).await;
        server.engine.text(id, "tick");
        client.head().await;
        client.chunk().await.unwrap();
        if reset {
            client.stream.set_zero_linger().unwrap();
        }
        drop(client);
        server.engine.expect_abort(tokenizer, id).await;
    }
}

#[tokio::test]
async fn leaving_with_several_prompts_aborts_all_of_them() {
    let mut server = Server::start_with(config(), 2, 100).await;
    let mut client = server.connect().await;
    client.send(post(PATH, r#"{"prompt":["a","b","c"],"stream":true}"#)).await;
    let mut open = Vec::new();
    for _ in 0..3 {
        let (tokenizer, request) = server.engine.request_at().await;
        open.push((tokenizer, request.id));
    }
    server.engine.finish(open[1].1, "done", FinishReason::Stop);
    client.head().await;
    drop(client);
    server.engine.expect_abort(open[0].0, open[0].1).await;
    server.engine.expect_abort(open[2].0, open[2].1).await;
    server.engine.expect_silence();
}

#[tokio::test]
async fn a_half_closed_client_gets_its_answer() {
    for body in [WHOLE, STREAM] {
        let mut server = Server::start().await;
        let (mut client, _, id) = submitted(&mut server, body).await;
        client.stream.shutdown().await.unwrap();
        // The head comes without any text: the server probes whether anybody is there.
        assert_eq!(client.head().await.status, 200);
        let probe = client.chunk().await.unwrap();
        assert!(probe == "\n" || probe == ": keep-alive\n\n");
        server.engine.text(id, "tick");
        server.engine.finish(id, "tock", FinishReason::Stop);
        let mut text = String::new();
        while let Some(chunk) = client.chunk().await {
            text += &chunk;
        }
        if body == WHOLE {
            let answer: Value = serde_json::from_str(&text).unwrap();
            assert_eq!(answer["choices"][0]["text"], "ticktock");
        } else {
            assert!(
                text.contains("\"tick\"") && text.contains("\"tock\"") && text.ends_with("data: [DONE]\n\n")
            );
        }
        assert_eq!(client.rest().await, b"", "the server closes after the answer");
        server.engine.expect_silence();
    }
}

#[tokio::test]
async fn a_half_closed_client_gets_quick_answers_unprobed() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    client.send(get("/version")).await;
    client.stream.shutdown().await.unwrap();
    assert_eq!(client.reply().await.json()["version"], "9.9");
    assert_eq!(client.rest().await, b"");
    let (mut client, _, id) = submitted(&mut server, WHOLE).await;
    client.stream.shutdown().await.unwrap();
    server.engine.finish(id, "x", FinishReason::Stop);
    assert!(client.reply().await.headers.contains_key("content-length"));
}

#[tokio::test]
async fn half_a_request_is_forgotten() {
    let mut server = Server::start().await;
    for part in
        ["POST /v1/comp", "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{\"pro"]
    {
        let mut client = server.connect().await;
        client.send(part).await;
        client.stream.shutdown().await.unwrap();
        client.rest().await;
    }
    server.engine.expect_silence();
    assert_eq!(server.ask(get("/health")).await.status, 200);
}

#[tokio::test]
async fn a_full_server_says_so_and_recovers() {
    let mut server = Server::start_with(config(), 1, 2).await;
    let (first, ..) = submitted(&mut server, WHOLE).await;
    let (mut second, _, id) = submitted(&mut server, WHOLE).await;
    let reply = server.ask(post(PATH, WHOLE)).await;
    assert_eq!(reply.headers["retry-after"], "1");
    assert_eq!(reply.error(503)["code"], "queue_full");
    assert_eq!(server.ask(get("/health")).await.status, 200);
    server.engine.finish(id, "x", FinishReason::Stop);
    assert_eq!(second.reply().await.status, 200);
    let (_third, ..) = submitted(&mut server, WHOLE).await;
    drop(first);
}

#[tokio::test]
async fn drain_refuses_new_requests_and_waits_for_open_ones() {
    let mut server = Server::start().await;
    let (mut stream, _, stream_id) = submitted(&mut server, STREAM).await;
    let (mut whole, _, whole_id) = submitted(&mut server, WHOLE).await;
    server.engine.text(stream_id, "tick");
    stream.head().await;
    server.handle.drain(HOUR);
    let health = loop {
        let reply = server.ask(get("/health")).await;
        if reply.status != 200 {
            break reply;
        }
    };
    assert_eq!(health.error(503)["code"], "shutting_down");
    let reply = server.ask(post(PATH, WHOLE)).await;
    assert_eq!(reply.headers["retry-after"], "1");
    assert_eq!(reply.error(503)["code"], "shutting_down");
    server.engine.finish(whole_id, "x", FinishReason::Stop);
    assert_eq!(whole.reply().await.status, 200);
    server.engine.finish(stream_id, "", FinishReason::Stop);
    let mut text = String::new();
    while let Some(chunk) = stream.chunk().await {
        text += &chunk;
    }
    assert!(text.ends_with("data: [DONE]\n\n"));
    assert_eq!(server.ended().await, Ended::Drained);
}

#[tokio::test]
async fn a_drain_of_an_idle_server_closes_idle_connections() {
    let server = Server::start().await;
    let mut idle = server.connect().await;
    idle.send(get("/version")).await;
    idle.reply().await;
    server.handle.drain(HOUR);
    assert_eq!(server.ended().await, Ended::Drained);
    assert_eq!(idle.rest().await, b"");
}

#[tokio::test]
async fn after_the_grace_open_requests_end_with_an_error() {
    let mut server = Server::start().await;
    let (mut stream, _, stream_id) = submitted(&mut server, STREAM).await;
    let (mut whole, _, whole_id) = submitted(&mut server, WHOLE).await;
    server.engine.text(stream_id, "tick");
    stream.head().await;
    stream.chunk().await.unwrap();
    server.handle.drain(HOUR);
    // The second signal of an impatient user.
    server.handle.drain(Duration::ZERO);
    let event = stream.chunk().await.unwrap();
    let error = serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(check_error(&error)["code"], "shutting_down");
    assert_eq!(stream.chunk().await, None);
    assert_eq!(whole.reply().await.error(503)["code"], "shutting_down");
    let mut aborted = [server.engine.next().await, server.engine.next().await];
    aborted.sort_by_key(|message| format!("{message:?}"));
    let abort = |id| Outbound::Tokenizer(0, ToTokenizer::Abort { id, replica: 0 });
    assert_eq!(aborted, [abort(stream_id), abort(whole_id)]);
    assert_eq!(server.ended().await, Ended::Cut { requests: 2 });
}

#[tokio::test]
async fn a_lost_engine_answers_every_open_request_at_once() {
    let mut server = Server::start().await;
    let (mut stream, _, stream_id) = submitted(&mut server, STREAM).await;
    let (mut early_stream, ..) = submitted(&mut server, STREAM).await;
    let (mut whole, ..) = submitted(&mut server, WHOLE).await;
    let mut info = server.connect().await;
    info.send(get("/server_info")).await;
    server.engine.next().await;
    server.engine.text(stream_id, "tick");
    stream.head().await;
    stream.chunk().await.unwrap();
    server.handle.drain(HOUR);
    server.handle.fail("lockstep-TP1-scheduler was killed by signal 9");
    server.handle.fail("a later cause");
    let event = stream.chunk().await.unwrap();
    let error = serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
    assert!(
        check_error(&error)["message"].as_str().unwrap().contains("TP1-scheduler was killed by signal 9")
    );
    assert_eq!(stream.chunk().await, None);
    for client in [&mut whole, &mut early_stream, &mut info] {
        let error = client.reply().await.error(503);
        assert_eq!(error["code"], "engine_failed");
        assert!(error["message"].as_str().unwrap().contains("signal 9"));
    }
    assert_eq!(server.ended().await, Ended::Failed);
}

#[tokio::test]
async fn a_lost_engine_is_not_held_up_by_a_client_that_does_not_read() {
    let mut server = Server::start().await;
    let (_client, _, id) = submitted(&mut server, STREAM).await;
    for _ in 0..64 {
        server.engine.text(id, &"x".repeat(1 << 20));
    }
    server.handle.fail("gone");
    assert_eq!(server.ended().await, Ended::Failed);
}

/// Tokenizer sockets that are full for a while; messages arrive through a channel.
struct FakeSockets {
    full: VecDeque<bool>,
    sent: mpsc::UnboundedSender<Outbound>,
    inbox: mpsc::UnboundedReceiver<Result<ToApi, ApiError>>,
}

impl EngineSockets for FakeSockets {
    fn try_send_tokenizer(&mut self, tokenizer: usize, message: &ToTokenizer) -> Result<bool, ApiError> {
        if self.full.pop_front() == Some(true) {
            return Ok(false);
        }
        self.sent.send(Outbound::Tokenizer(tokenizer, message.clone())).unwrap();
        Ok(true)
    }

    fn try_send_scheduler(&mut self, replica: usize, message: &ToScheduler) -> Result<bool, ApiError> {
        self.sent.send(Outbound::Scheduler(replica, message.clone())).unwrap();
        Ok(true)
    }

    async fn recv(&mut self) -> Result<ToApi, ApiError> {
        self.inbox.recv().await.unwrap()
    }
}

#[tokio::test]
async fn the_dispatcher_keeps_order_on_full_sockets_and_reports_failures() {
    let (client, link) = EngineClient::new(2, 4);
    let (sent_tx, mut sent) = mpsc::unbounded_channel();
    let (inbox_tx, inbox) = mpsc::unbounded_channel();
    let sockets = FakeSockets { full: [true, true, false, true].into(), sent: sent_tx, inbox };
    let dispatcher = tokio::spawn(dispatch::run(link, sockets));
    client.shutdown_children().await;
    let expected = [
        Outbound::Tokenizer(0, ToTokenizer::Shutdown),
        Outbound::Tokenizer(1, ToTokenizer::Shutdown),
        Outbound::Scheduler(0, ToScheduler::Shutdown),
    ];
    for message in expected {
        assert_eq!(within("a sent message", sent.recv()).await, Some(message));
    }
    inbox_tx.send(Err(ApiError::Link { peer: "api inbox".into(), cause: "broken".into() })).unwrap();
    let error = within("the dispatcher", dispatcher).await.unwrap().unwrap_err();
    assert!(error.to_string().contains("api inbox"));
}

#[tokio::test]
async fn the_dispatcher_ends_with_its_clients() {
    let (client, link) = EngineClient::new(1, 4);
    let (sent, _sent_rx) = mpsc::unbounded_channel();
    let (_inbox_tx, inbox) = mpsc::unbounded_channel();
    let dispatcher = tokio::spawn(dispatch::run(link, FakeSockets { full: VecDeque::new(), sent, inbox }));
    drop(client);
    within("the dispatcher", dispatcher).await.unwrap().unwrap();
}
