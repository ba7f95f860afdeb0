//! Several replicas behind one api: who gets what, and what becomes of requests whose replica dies.

// Helpers outside #[test] functions may unwrap too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Client, Server, check_error, config, get, post};
use lockstep_api::Outbound;
use lockstep_api::engine::Replication;
use lockstep_api::engine::router::DpPolicy;
use lockstep_core::{FinishReason, RequestId};
use lockstep_wire::{EngineInfo, ToApi, ToScheduler, ToTokenizer};
use serde_json::{Value, json};

const PATH: &str = "/v1/completions";
const WHOLE: &str = r#"{"prompt":"C","max_tokens":100}"#;
const STREAM: &str = r#"{"prompt":"C","max_tokens":100,"stream":true}"#;

/// A server of two replicas with at most `requests_open_max` open requests each.
async fn two_replicas(requests_open_max: usize) -> Server {
    let policy = DpPolicy::LeastLoad;
    Server::start_replicas(config(), Replication { replicas: 2, requests_open_max, policy, load_bound: 0 })
        .await
}

/// A client whose request has reached the engine, and where it went.
async fn submitted(server: &mut Server, body: &str) -> (Client, RequestId, usize) {
    let mut client = server.connect().await;
    client.send(post(PATH, body)).await;
    let request = server.engine.request().await;
    (client, request.id, request.replica)
}

#[tokio::test]
async fn requests_without_a_token_move_and_the_others_end_with_the_cause() {
    let mut server = two_replicas(10).await;
    let (mut stays, stays_id, first) = submitted(&mut server, WHOLE).await;
    let (mut begun, begun_id, second) = submitted(&mut server, STREAM).await;
    assert_eq!((first, second), (0, 1));
    let (_other, _, third) = submitted(&mut server, WHOLE).await;
    let (mut moves, moves_id, fourth) = submitted(&mut server, WHOLE).await;
    assert_eq!((third, fourth), (0, 1));
    server.engine.text(begun_id, "tick");
    begun.head().await;
    begun.chunk().await.unwrap();
    assert_eq!(server.client.lose_replica(1, "lockstep-DP1-TP0-scheduler was killed by signal 9"), (1, 1));
    // The one that moves: the old id is aborted where it was, a new one goes elsewhere.
    let abort = |id| Outbound::Tokenizer(0, ToTokenizer::Abort { id, replica: 1 });
    assert_eq!(server.engine.next().await, abort(moves_id));
    let again = server.engine.request().await;
    assert_eq!((again.replica, again.id == moves_id), (0, false));
    assert_eq!(server.engine.next().await, abort(begun_id));
    // What the dead replica had still said of it is nobody's.
    server.engine.finish(moves_id, "stale", FinishReason::Stop);
    server.engine.finish(again.id, "fresh", FinishReason::Stop);
    assert_eq!(moves.reply().await.json()["choices"][0]["text"], "fresh");
    let event = begun.chunk().await.unwrap();
    let error = serde_json::from_str(event.strip_prefix("data: ").unwrap()).unwrap();
    let error = check_error(&error);
    assert_eq!(error["code"], "engine_restarting");
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("replica 1") && message.contains("DP1-TP0-scheduler was killed"), "{message}");
    server.engine.finish(stays_id, "same", FinishReason::Stop);
    assert_eq!(stays.reply().await.json()["choices"][0]["text"], "same");
}

#[tokio::test]
async fn a_moved_request_is_aborted_where_it_is_when_its_client_leaves() {
    let mut server = two_replicas(10).await;
    let (_first, ..) = submitted(&mut server, WHOLE).await;
    let (client, id, replica) = submitted(&mut server, WHOLE).await;
    assert_eq!(replica, 1);
    assert_eq!(server.client.lose_replica(1, "gone"), (1, 0));
    assert_eq!(server.engine.next().await, Outbound::Tokenizer(0, ToTokenizer::Abort { id, replica: 1 }));
    let again = server.engine.request().await.id;
    drop(client);
    server.engine.expect_abort(0, again).await;
}

#[tokio::test]
async fn without_a_replica_requests_are_refused_until_one_is_back() {
    let mut server = two_replicas(10).await;
    server.client.lose_replica(0, "first cause");
    let (_client, _, replica) = submitted(&mut server, WHOLE).await;
    assert_eq!(replica, 1, "the other goes on");
    assert_eq!(server.ask(get("/health")).await.json(), json!({"status": "ok"}));
    assert_eq!(server.client.lose_replica(1, "second cause"), (0, 1), "nowhere to move to");
    server.engine.next().await;
    for request in [get("/health"), post(PATH, WHOLE)] {
        let error = server.ask(request).await.error(503);
        assert_eq!(error["code"], "engine_restarting", "{error}");
        assert!(error["message"].as_str().unwrap().contains("first cause"), "{error}");
    }
    server.client.rejoin_replica(1, "ipc://@new").await;
    let started = ToTokenizer::ReplicaStarted { replica: 1, inbox: "ipc://@new".into() };
    assert_eq!(server.engine.next().await, Outbound::Tokenizer(0, started));
    let (_client, _, replica) = submitted(&mut server, WHOLE).await;
    assert_eq!(replica, 1);
}

#[tokio::test]
async fn choices_of_one_prompt_stay_together_and_each_replica_has_its_bound() {
    let mut server = two_replicas(4).await;
    let mut client = server.connect().await;
    client.send(post(PATH, r#"{"prompt":["C","D"],"n":3,"max_tokens":5}"#)).await;
    let mut replicas = Vec::new();
    for _ in 0..6 {
        replicas.push(server.engine.request().await.replica);
    }
    assert_eq!(replicas, [0, 0, 0, 1, 1, 1]);
    let full = server.ask(post(PATH, r#"{"prompt":"C","n":2}"#)).await.error(503);
    assert_eq!(full["code"], "queue_full");
    let never = server.ask(post(PATH, r#"{"prompt":"C","n":5}"#)).await.error(400);
    assert_eq!(never["param"], "n", "more than one replica ever takes");
    server.engine.expect_silence();
}

/// The body of `path` after each primary that is asked has answered with its number as free pages.
async fn asked(server: &mut Server, path: &str, replicas: &[usize]) -> String {
    let mut client = server.connect().await;
    client.send(get(path)).await;
    for expected in replicas {
        let Outbound::Scheduler(replica, ToScheduler::Info { query }) = server.engine.next().await else {
            panic!("expected a query")
        };
        assert_eq!(replica, *expected);
        let info = EngineInfo { query, pages_free: 5 + replica, ..EngineInfo::default() };
        server.engine.inbound.deliver(ToApi::EngineInfo(Box::new(info)));
    }
    client.reply().await.text().to_owned()
}

#[tokio::test]
async fn a_drained_replica_gets_nothing_and_everything_tells_of_each() {
    let mut server = two_replicas(10).await;
    let (_client, id, _) = submitted(&mut server, WHOLE).await;
    let drain = server.ask(post("/drain_replica", r#"{"replica":0}"#)).await.json();
    let expected = json!({"status": "ok", "replica": 0, "state": "draining", "requests_open": 1});
    assert_eq!(drain, expected);
    assert_eq!((submitted(&mut server, WHOLE).await.2, submitted(&mut server, WHOLE).await.2), (1, 1));
    let wrong = server.ask(post("/drain_replica", r#"{"replica":2}"#)).await.error(400);
    assert_eq!(wrong["param"], "replica");
    server.ask(post("/drain_replica", "{}")).await.error(400);
    server.engine.finish(id, "done", FinishReason::Stop);
    server.client.lose_replica(1, "gone");
    // Two move back only when their replica is not drained: here they end.
    for _ in 0..2 {
        server.engine.next().await;
    }
    let info: Value = serde_json::from_str(&asked(&mut server, "/server_info", &[0]).await).unwrap();
    assert_eq!(info["engine"]["pages_free"], 5);
    let states: Vec<&str> =
        info["replicas"].as_array().unwrap().iter().map(|r| r["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["drained", "restarting"]);
    assert_eq!(info["replicas"][1]["engine"], Value::Null);
    let resumed = server.ask(post("/resume_replica", r#"{"replica":0}"#)).await.json();
    assert_eq!(resumed["state"], "serving");
    assert_eq!(submitted(&mut server, WHOLE).await.2, 0);
    let metrics = asked(&mut server, "/metrics", &[0]).await;
    for line in [
        r#"lockstep_replica_state{dp="0",state="serving"} 1"#,
        r#"lockstep_replica_state{dp="1",state="restarting"} 1"#,
        r#"lockstep_replica_requests_routed_total{dp="0",reason="load"} 1"#,
        r#"lockstep_replica_requests_routed_total{dp="0",reason="only"} 1"#,
        r#"lockstep_replica_kv_pages{dp="0",state="free"} 5"#,
    ] {
        assert!(metrics.lines().any(|l| l == line), "{line} is not in\n{metrics}");
    }
}

#[tokio::test]
async fn a_replica_that_does_not_answer_is_spared_while_another_does() {
    let mut server = two_replicas(10).await;
    server.client.set_suspicion(Some(("DP0-TP0 does not answer".into(), vec![0])));
    assert_eq!(server.ask(get("/health")).await.json(), json!({"status": "ok"}));
    assert_eq!(submitted(&mut server, WHOLE).await.2, 1);
    assert_eq!(submitted(&mut server, WHOLE).await.2, 1);
    asked(&mut server, "/server_info", &[1]).await;
    server.client.set_suspicion(Some(("DP0-TP0, DP1-TP0 does not answer".into(), vec![0, 1])));
    assert_eq!(server.ask(get("/health")).await.error(503)["code"], "not_answering");
    server.client.set_suspicion(None);
    assert_eq!(submitted(&mut server, WHOLE).await.2, 0);
    asked(&mut server, "/server_info", &[0, 1]).await;
}
