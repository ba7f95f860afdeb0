//! The api over real ZeroMQ links, with a thread as tokenizer, rank 0 and detokenizer in one.

// Helpers outside #[test] functions may unwrap too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Client, config, get, post, within};
use lockstep_api::dispatch::{self, LinkSockets, SchedulerSenders};
use lockstep_api::{Ended, EngineClient, ServerControl, serve};
use lockstep_comm::{AsyncReceiver, Context, Endpoint, Receiver, Sender};
use lockstep_core::FinishReason;
use lockstep_wire::{EngineInfo, TextAnswer, ToApi, ToScheduler, ToTokenizer};
use std::time::Duration;
use tokio::net::TcpListener;

const DEADLINE: Duration = Duration::from_secs(60);

/// Answers requests with "ok" and queries with 7 free pages, until it is told to stop.
fn engine(tokenizer: Receiver<ToTokenizer>, scheduler: Receiver<ToScheduler>, api: Sender<ToApi>) {
    for _ in 0..3 {
        match tokenizer.recv(Some(DEADLINE)).unwrap().expect("a message") {
            ToTokenizer::Generate(request) => {
                let delta = common::delta(request.id, "ok", Some(FinishReason::Stop));
                api.send(&ToApi::Deltas(vec![delta]), DEADLINE).unwrap();
            }
            ToTokenizer::Shutdown => break,
            ToTokenizer::AskText { query, .. } => {
                let result = Ok(TextAnswer::Text("as text".into()));
                api.send(&ToApi::TextAnswered { query, result }, DEADLINE).unwrap();
                continue;
            }
            ToTokenizer::ReplicaStarted { replica, .. } => panic!("replica {replica} was not started again"),
            ToTokenizer::Abort { id, .. } => panic!("unexpected abort of {id}"),
        }
        let Some(ToScheduler::Info { query }) = scheduler.recv(Some(DEADLINE)).unwrap() else {
            panic!("no query")
        };
        let info = EngineInfo { query, pages_free: 7, ..EngineInfo::default() };
        api.send(&ToApi::EngineInfo(Box::new(info)), DEADLINE).unwrap();
    }
    assert_eq!(scheduler.recv(Some(DEADLINE)).unwrap(), Some(ToScheduler::Shutdown));
}

#[tokio::test]
async fn requests_queries_and_shutdown_over_real_links() {
    let context = Context::new();
    let prefix = lockstep_comm::link::random_prefix();
    let endpoint = |name: &str| Endpoint::private(&prefix, name);
    let tokenizer = Receiver::bind(&context, &endpoint("tokenizer-0")).unwrap();
    let scheduler = Receiver::bind(&context, &endpoint("rank-0")).unwrap();
    let inbox = AsyncReceiver::new(Receiver::bind(&context, &endpoint("api")).unwrap()).unwrap();
    let to_api = Sender::connect(&context, &endpoint("api"), 100).unwrap();
    let engine = std::thread::spawn(move || engine(tokenizer, scheduler, to_api));
    let sockets = LinkSockets {
        tokenizers: vec![Sender::connect(&context, &endpoint("tokenizer-0"), 100).unwrap()],
        schedulers: SchedulerSenders::new(vec![Sender::connect(&context, &endpoint("rank-0"), 100).unwrap()]),
        inbox,
    };
    let (client, link) = EngineClient::new(1, 10);
    let dispatcher = tokio::spawn(dispatch::run(link, sockets));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (handle, control) = ServerControl::new();
    let served = tokio::spawn(serve(listener, config(), client.clone(), control));

    let mut http = Client::connect(address).await;
    http.send(post("/v1/completions", r#"{"prompt":"x"}"#)).await;
    assert_eq!(http.reply().await.json()["choices"][0]["text"], "ok");
    http.send(get("/server_info")).await;
    assert_eq!(http.reply().await.json()["engine"]["pages_free"], 7);

    http.send(post("/detokenize", r#"{"tokens":[1]}"#)).await;
    assert_eq!(http.reply().await.json()["prompt"], "as text");

    handle.drain(Duration::ZERO);
    assert_eq!(within("serve", served).await.unwrap(), Ended::Drained);
    client.shutdown_children().await;
    within("the engine", tokio::task::spawn_blocking(move || engine.join())).await.unwrap().unwrap();
    drop(client);
    within("the dispatcher", dispatcher).await.unwrap().unwrap();
}
