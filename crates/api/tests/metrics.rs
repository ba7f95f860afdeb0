//! What `/metrics` says of requests, by a fake engine: every way to end is counted once. The scrape of a real server
//! is compared with the documents in the tests of the binary.

// Helpers outside #[test] functions may unwrap too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Server, delta, get, post, within};
use lockstep_api::Outbound;
use lockstep_core::{FinishReason, Refusal, RequestId};
use lockstep_wire::{Delta, EngineInfo, Timing, ToApi, ToScheduler};
use std::time::Duration;

const BODY: &str = r#"{"prompt":"a","stream":true}"#;

async fn scrape(server: &mut Server) -> String {
    let mut client = server.connect().await;
    client.send(get("/metrics")).await;
    let Outbound::Scheduler(0, ToScheduler::Info { query }) = server.engine.next().await else {
        panic!("expected a query")
    };
    let info = EngineInfo { query, ..EngineInfo::default() };
    server.engine.inbound.deliver(ToApi::EngineInfo(Box::new(info)));
    client.reply().await.text().to_owned()
}

/// A sample's value.
fn value(metrics: &str, sample: &str) -> f64 {
    let line = metrics.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    line.and_then(|value| value.parse().ok()).unwrap_or_else(|| panic!("{sample} is not in\n{metrics}"))
}

/// A streamed request that the engine has.
async fn submitted(server: &mut Server) -> (common::Client, RequestId) {
    let mut client = server.connect().await;
    client.send(post("/v1/completions", BODY)).await;
    let id = server.engine.request().await.id;
    (client, id)
}

#[tokio::test]
async fn every_end_is_counted_once_and_health_checks_are_not() {
    let mut server = Server::start().await;
    let mut clients = Vec::new();
    let mut ids = Vec::new();
    for _ in 0..6 {
        let (client, id) = submitted(&mut server).await;
        clients.push(client);
        ids.push(id);
    }
    for (id, reason) in ids.iter().zip([FinishReason::Stop, FinishReason::Length, FinishReason::NoToken]) {
        server.engine.finish(*id, "x", reason);
        // What comes later belongs to nobody.
        server.engine.finish(*id, "late", FinishReason::Stop);
    }
    server.engine.refuse(ids[3], Refusal::invalid("no"));
    // One leaves while its answer flows.
    server.engine.text(ids[4], "tick");
    clients[4].head().await;
    drop(clients.remove(4));
    server.engine.expect_abort(0, ids[4]).await;
    // A health check's own request.
    let mut health = server.connect().await;
    health.send(get("/health_generate")).await;
    let probe = server.engine.request().await.id;
    server.engine.finish(probe, "x", FinishReason::Length);
    assert_eq!(health.reply().await.status, 200);
    let metrics = scrape(&mut server).await;
    let ended = |metrics: &str, reason| {
        value(metrics, &format!("lockstep_requests_ended_total{{reason=\"{reason}\"}}"))
    };
    for reason in ["stop", "length", "no_token", "refused", "left"] {
        assert_eq!(ended(&metrics, reason), 1.0, "{reason}");
    }
    assert_eq!((ended(&metrics, "abort"), ended(&metrics, "failed")), (0.0, 0.0));
    assert_eq!(value(&metrics, "lockstep_requests_total"), 6.0);
    assert_eq!(value(&metrics, "lockstep_http_requests_open"), 1.0);
    // The engine is lost with the last one open; another one aborts.
    server.client.interrupt("it died");
    server.engine.expect_abort(0, ids[5]).await;
    server.client.resume();
    let (mut aborted, id) = submitted(&mut server).await;
    server.engine.text(id, "tick");
    aborted.head().await;
    server.ask(post("/abort_request", r#"{"abort_all":true}"#)).await;
    server.engine.expect_abort(0, id).await;
    let metrics = scrape(&mut server).await;
    assert_eq!((ended(&metrics, "abort"), ended(&metrics, "failed")), (1.0, 1.0));
    assert_eq!(value(&metrics, "lockstep_engine_restarts_total"), 1.0);
    assert_eq!(
        value(&metrics, "lockstep_e2e_request_latency_seconds_count"),
        4.0,
        "stop, length, no token, abort"
    );
    assert_eq!(value(&metrics, "lockstep_time_to_first_token_seconds_count"), 5.0, "and the one that left");
    assert!(value(&metrics, "lockstep_http_errors_total{status=\"400\"}") >= 1.0);
}

#[tokio::test]
async fn times_are_measured_of_requests_that_do_not_ask_for_them() {
    let mut server = Server::start().await;
    let (mut client, id) = submitted(&mut server).await;
    let timing = Timing { queue_us: 30_000, prefill_us: 1_500_000, ..Timing::default() };
    server.engine.delta(Delta { timing: Some(Box::new(timing)), ..delta(id, "a", None) });
    client.head().await;
    server.engine.finish(id, "b", FinishReason::Stop);
    let mut text = String::new();
    while let Some(chunk) = within("a chunk", client.chunk()).await {
        text += &chunk;
    }
    assert!(!text.contains("timing") && text.ends_with("data: [DONE]\n\n"), "{text}");
    let metrics = scrape(&mut server).await;
    let sum = |name: &str| value(&metrics, &format!("lockstep_{name}_sum"));
    assert_eq!((sum("request_queue_time_seconds"), sum("request_prefill_time_seconds")), (0.03, 1.5));
    assert_eq!(value(&metrics, "lockstep_inter_token_latency_seconds_count"), 1.0);
    assert_eq!((sum("request_prompt_tokens"), sum("request_generation_tokens")), (3.0, 2.0));
    assert_eq!(value(&metrics, "lockstep_request_queue_time_seconds_bucket{le=\"0.02\"}"), 0.0);
    assert_eq!(value(&metrics, "lockstep_request_queue_time_seconds_bucket{le=\"0.05\"}"), 1.0);
    assert_eq!(value(&metrics, "lockstep_request_queue_time_seconds_bucket{le=\"+Inf\"}"), 1.0);
    server.handle.drain(Duration::ZERO);
}
