//! HTTP itself: paths, methods, headers, bodies, errors, probes and browsers. Cases C13, C14, C8.

// Helpers outside #[test] functions may unwrap too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod common;

use common::{Server, config, get, post};
use lockstep_api::{ApiConfig, ProcessInfo};
use lockstep_core::FinishReason;
use lockstep_wire::{EngineInfo, EngineTotals, RankInfo, ToApi, ToScheduler};
use serde_json::json;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

#[tokio::test]
async fn models() {
    let server = Server::start().await;
    let card = json!({"id": "org/tiny", "object": "model", "created": 1_700_000_000, "owned_by": "lockstep", "max_model_len": 64});
    assert_eq!(server.ask(get("/v1/models")).await.json(), json!({"object": "list", "data": [card]}));
    assert_eq!(server.ask(get("/v1/models/org/tiny")).await.json(), card);
    assert_eq!(server.ask(get("/v1/models/org%2Ftiny")).await.json(), card);
    for path in ["/v1/models/other", "/v1/models/%ff"] {
        let error = server.ask(get(path)).await.error(404);
        assert_eq!(error["code"], "model_not_found");
        assert!(error["message"].as_str().unwrap().contains("org/tiny"));
    }
}

/// Anthropic's clients name their version of the API with every request.
#[tokio::test]
async fn models_in_anthropics_form() {
    let server = Server::start().await;
    let ask =
        |path: &str| get(path).replacen("Host: x\r\n", "Host: x\r\nanthropic-version: 2023-06-01\r\n", 1);
    let card = json!({"type": "model", "id": "org/tiny", "display_name": "org/tiny", "created_at": "2023-11-14T22:13:20Z"});
    let list = json!({"data": [card], "has_more": false, "first_id": "org/tiny", "last_id": "org/tiny"});
    assert_eq!(server.ask(ask("/v1/models")).await.json(), list);
    assert_eq!(server.ask(ask("/v1/models/org/tiny")).await.json(), card);
    let error = server.ask(ask("/v1/models/other")).await;
    assert_eq!((error.status, &error.json()["error"]["type"]), (404, &json!("not_found_error")));
}

#[tokio::test]
async fn health_version_and_root() {
    let server = Server::start().await;
    assert_eq!(server.ask(get("/health")).await.json(), json!({"status": "ok"}));
    assert_eq!(server.ask(get("/version")).await.json(), json!({"version": "9.9"}));
    assert_eq!(server.ask(get("/")).await.json()["model"], "org/tiny");
}

#[tokio::test]
async fn server_info_asks_rank_0() {
    let config = config();
    config.processes.set(vec![ProcessInfo {
        name: "launcher".into(),
        pid: 7,
        role: "api".into(),
        rank: None,
    }]);
    let mut server = Server::start_with(config, 1, 100).await;
    server.ask(post(COMPLETIONS, r#"{"foo":1,"prompt":5}"#)).await.error(400);
    let mut client = server.connect().await;
    client.send(get("/server_info")).await;
    let lockstep_api::Outbound::Scheduler(0, ToScheduler::Info { query }) = server.engine.next().await else {
        panic!("expected a query")
    };
    let ranks = vec![RankInfo { pid: 8, label: "TP0".into(), ..RankInfo::default() }];
    let info = EngineInfo { query, pages_free: 5, ranks, ..EngineInfo::default() };
    server
        .engine
        .inbound
        .deliver(ToApi::EngineInfo(Box::new(EngineInfo { query: query + 100, ..info.clone() })));
    server.engine.inbound.deliver(ToApi::EngineInfo(Box::new(info)));
    let reply = client.reply().await.json();
    assert_eq!(reply["engine"]["pages_free"], 5);
    assert_eq!(reply["engine"]["ranks"][0]["pid"], 8);
    assert_eq!(reply["api"]["unknown_fields"], 1);
    assert_eq!(reply["api"]["requests_open"], 0);
    assert_eq!(reply["processes"], json!([{"name": "launcher", "pid": 7, "role": "api", "rank": null}]));
}

#[tokio::test]
async fn metrics_are_rank_0s_counters() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    client.send(get("/metrics")).await;
    let lockstep_api::Outbound::Scheduler(0, ToScheduler::Info { query }) = server.engine.next().await else {
        panic!("expected a query")
    };
    let info = EngineInfo {
        query,
        page_size: 16,
        pages_total: 10,
        pages_free: 5,
        pages_cached: 3,
        pages_held: 2,
        running: 4,
        totals: EngineTotals { steps: 77, retractions: 6, ..EngineTotals::default() },
        ranks: vec![RankInfo { rank: 1, weight_bytes: 123, ..RankInfo::default() }],
        ..EngineInfo::default()
    };
    server.engine.inbound.deliver(ToApi::EngineInfo(Box::new(info)));
    let reply = client.reply().await;
    assert!(reply.headers["content-type"].starts_with("application/openmetrics-text"));
    let text = String::from_utf8(reply.body).unwrap();
    for line in [
        "lockstep_kv_pool_pages 10",
        "lockstep_kv_pages{state=\"free\"} 5",
        "lockstep_kv_pages{state=\"cached\"} 3",
        "lockstep_kv_pages{state=\"held\"} 2",
        "lockstep_scheduler_requests{state=\"running\"} 4",
        "lockstep_scheduler_steps_total 77",
        "lockstep_retractions_total 6",
        "lockstep_rank_weight_bytes{rank=\"1\"} 123",
        "# EOF",
    ] {
        assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
    }
}

#[tokio::test]
async fn the_flight_recorder_is_written_on_request() {
    let mut server = Server::start().await;
    for (result, status) in [(Ok(vec!["a".to_owned(), "b".into()]), 200), (Err("no folder".to_owned()), 400)]
    {
        let mut client = server.connect().await;
        client.send(post("/debug/flight", "")).await;
        let lockstep_api::Outbound::Scheduler(0, ToScheduler::WriteFlight { query }) =
            server.engine.next().await
        else {
            panic!("expected a query")
        };
        server.engine.inbound.deliver(ToApi::FlightWritten { query, result });
        let reply = client.reply().await;
        assert_eq!(reply.status, status);
        match status {
            200 => assert_eq!(reply.json(), json!({"files": ["a", "b"]})),
            _ => assert_eq!(reply.error(400)["message"], "no folder"),
        }
    }
}

#[tokio::test]
async fn head_is_get_without_a_body() {
    let server = Server::start().await;
    for path in ["/", "/health", "/v1/models", "/version", "/v1/models/org/tiny", "/nowhere"] {
        let full = server.ask(get(path)).await;
        let mut client = server.connect().await;
        client.send(format!("HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")).await;
        let head = client.head().await;
        assert_eq!(head.status, full.status, "{path}");
        assert_eq!(head.headers["content-type"], full.headers["content-type"]);
        assert_eq!(client.rest().await, b"");
    }
}

#[tokio::test]
async fn unknown_paths_and_wrong_methods() {
    let server = Server::start().await;
    for path in ["/nope", "/v1/v1/models", "/v1/chat/completions/", "/v1/models/", "/v1", "/v1/embedding"] {
        assert_eq!(server.ask(get(path)).await.error(404)["code"], "not_found", "{path}");
    }
    assert_eq!(server.ask(post("/v1/nope", "{}")).await.error(404)["code"], "not_found");
    let reply = server.ask(get(CHAT)).await;
    assert_eq!(reply.headers["allow"], "POST");
    assert_eq!(reply.error(405)["code"], "method_not_allowed");
    let reply = server.ask(post("/v1/models", "{}")).await;
    assert!(reply.headers["allow"].contains("GET"));
    reply.error(405);
    server.ask("DELETE /health HTTP/1.1\r\nHost: x\r\n\r\n").await.error(405);
}

#[tokio::test]
async fn bad_bodies_are_refused_and_the_engine_sees_nothing() {
    let mut server = Server::start().await;
    let deep = format!("{{\"prompt\":{}1{}}}", "[".repeat(10_000), "]".repeat(10_000));
    let bodies: &[&[u8]] = &[
        b"",
        b"  ",
        b"{",
        b"[]",
        b"5",
        b"null",
        b"{\"prompt\":\"a\"} x",
        b"{\"prompt\":\"\xff\"}",
        b"{\"prompt\":\"\\ud800\"}",
        b"{\"prompt\":\"a\",\"temperature\":NaN}",
        b"{\"prompt\":\"a\",\"temperature\":1e999}",
        b"{\"prompt\":\"a\",\"temperature\":\"hot\"}",
        b"{\"prompt\":5}",
        b"{\"prompt\":\"a\",\"stream\":1}",
        b"{\"messages\":{}}",
        b"{}",
        deep.as_bytes(),
    ];
    let mut client = server.connect().await;
    for body in bodies {
        for path in [CHAT, COMPLETIONS] {
            let head = format!("POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n", body.len());
            client.send([head.as_bytes(), body].concat()).await;
            client.reply().await.error(400);
        }
    }
    server.engine.expect_silence();
}

#[tokio::test]
async fn content_types_and_encodings() {
    let mut server = Server::start().await;
    let ask = |header: &str| {
        let body = r#"{"prompt":"a"}"#;
        format!(
            "POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{header}Content-Length: {}\r\n\r\n{body}",
            body.len()
        )
    };
    for accepted in [
        "",
        "Content-Type: application/json\r\n",
        "Content-Type: Application/JSON; charset=utf-8\r\n",
        "Content-Type: application/vnd.x+json\r\n",
        "Content-Encoding: identity\r\n",
    ] {
        let mut client = server.connect().await;
        client.send(ask(accepted)).await;
        let id = server.engine.request().await.id;
        server.engine.finish(id, "", FinishReason::Stop);
        assert_eq!(client.reply().await.status, 200, "{accepted}");
    }
    for refused in [
        "Content-Type: text/plain\r\n",
        "Content-Type: application/x-www-form-urlencoded\r\n",
        "Content-Type: multipart/form-data; boundary=x\r\n",
        "Content-Encoding: gzip\r\n",
    ] {
        assert_eq!(server.ask(ask(refused)).await.error(415)["code"], "unsupported_media_type", "{refused}");
    }
    server.engine.expect_silence();
}

#[tokio::test]
async fn too_large_a_body_is_413_while_the_client_is_still_sending() {
    let config = ApiConfig { body_bytes_max: 100_000, ..config() };
    let mut server = Server::start_with(config, 1, 100).await;
    let body = "x".repeat(700_000);
    assert_eq!(server.ask(post(CHAT, &body)).await.error(413)["code"], "request_too_large");
    let mut client = server.connect().await;
    client.send(format!("POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")).await;
    for _ in 0..7 {
        client.send(format!("{:x}\r\n{}\r\n", 100_000, &body[..100_000])).await;
    }
    client.send("0\r\n\r\n").await;
    client.reply().await.error(413);
    let mut client = server.connect().await;
    client
        .send(format!(
            "POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: 700000\r\nExpect: 100-continue\r\n\r\n"
        ))
        .await;
    client.reply().await.error(413);
    server.engine.expect_silence();
}

/// An answer that ends its connection says so, and comes without the body of which nothing is wanted.
#[tokio::test]
async fn an_answer_before_its_body_closes_the_connection_and_says_so() {
    let server = Server::start_with(ApiConfig { body_bytes_max: 100_000, ..config() }, 1, 100).await;
    let head = |fields: &str| format!("POST {CHAT} HTTP/1.1\r\nHost: x\r\n{fields}\r\n");
    for (request, status) in [
        (head("Content-Length: 700000\r\n"), 413),
        (head("Content-Length: 700000\r\nExpect: 100-continue\r\n"), 413),
        (head("Content-Length: 90000\r\nContent-Type: text/plain\r\n"), 415),
        (head("Content-Length: 10\r\nContent-Type: text/plain\r\n"), 415),
        (head("Transfer-Encoding: chunked\r\nContent-Type: text/plain\r\n"), 415),
    ] {
        let mut client = server.connect().await;
        client.send(&request).await;
        let reply = client.reply().await;
        assert_eq!(reply.status, status, "{request}");
        assert_eq!(reply.headers.get("connection").map(String::as_str), Some("close"), "{request}");
        assert_eq!(client.rest().await, b"", "{request}");
    }
    // A small body that is there does not cost the connection.
    let mut client = server.connect().await;
    for _ in 0..2 {
        client.send(head("Content-Length: 2\r\nContent-Type: text/plain\r\n") + "{}").await;
        let reply = client.reply().await;
        assert_eq!((reply.status, reply.headers.get("connection")), (415, None));
    }
}

#[tokio::test]
async fn heads_that_http_does_not_allow() {
    let server = Server::start().await;
    for (head, status, code) in [
        ("GET /version HTTP/1.1\r\n\r\n", 400, "bad_host"),
        ("GET /version HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400, "bad_host"),
        ("CONNECT example.org:443 HTTP/1.1\r\nHost: example.org:443\r\n\r\n", 501, "not_implemented"),
    ] {
        assert_eq!(server.ask(head).await.error(status)["code"], code, "{head}");
    }
    assert_eq!(server.ask("GET /version HTTP/1.0\r\n\r\n").await.status, 200, "1.0 knows no Host");
}

/// What is wrong with a body is told in words that help.
#[tokio::test]
async fn broken_bodies_are_explained() {
    let server = Server::start().await;
    let chunked = format!("POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n");
    for (request, words) in [
        (post(CHAT, r#"{"messages": "\ud800"}"#), "holds \\ud800 (column 15 of line 1)"),
        (chunked, "cannot be read behind its first 0 bytes"),
    ] {
        let error = server.ask(&request).await.error(400);
        assert!(error["message"].as_str().unwrap().contains(words), "{error}");
    }
}

/// More choices than the server ever has open could never be served.
#[tokio::test]
async fn more_choices_than_the_server_takes_are_a_400() {
    let mut server = Server::start_with(config(), 1, 4).await;
    for body in [r#"{"prompt":"a","n":5}"#, r#"{"prompt":["a","b","c"],"n":2}"#] {
        let error = server.ask(post(COMPLETIONS, body)).await.error(400);
        assert_eq!(error["param"], "n", "{error}");
        assert!(error["message"].as_str().unwrap().contains("4 requests at most"), "{error}");
    }
    server.engine.expect_silence();
}

#[tokio::test]
async fn an_expected_continue_is_given() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    let body = r#"{"prompt":"a"}"#;
    client
        .send(format!(
            "POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n",
            body.len()
        ))
        .await;
    assert_eq!(client.head().await.status, 100);
    client.send(body).await;
    let id = server.engine.request().await.id;
    server.engine.finish(id, "x", FinishReason::Stop);
    assert_eq!(client.reply().await.json()["choices"][0]["text"], "x");
}

#[tokio::test]
async fn chunked_requests_and_http_1_0() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    client
        .send(format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"))
        .await;
    client.send("8\r\n{\"prompt\r\n").await;
    client.send("6\r\n\":\"a\"}\r\n0\r\n\r\n").await;
    let id = server.engine.request().await.id;
    server.engine.finish(id, "x", FinishReason::Stop);
    assert_eq!(client.reply().await.status, 200);

    for stream in [false, true] {
        let mut client = server.connect().await;
        let body = format!(r#"{{"prompt":"a","stream":{stream}}}"#);
        client
            .send(format!("POST {COMPLETIONS} HTTP/1.0\r\nContent-Length: {}\r\n\r\n{body}", body.len()))
            .await;
        let id = server.engine.request().await.id;
        server.engine.text(id, "x");
        server.engine.finish(id, "", FinishReason::Stop);
        let reply = client.reply().await;
        assert_eq!((reply.version.as_str(), reply.status), ("HTTP/1.0", 200));
        assert!(!reply.headers.contains_key("transfer-encoding"));
        assert_eq!(reply.text().ends_with("data: [DONE]\n\n"), stream);
    }
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let mut server = Server::start().await;
    let mut client = server.connect().await;
    client
        .send(
            post(COMPLETIONS, r#"{"prompt":"1"}"#)
                + &get("/version")
                + &post(COMPLETIONS, r#"{"prompt":"2"}"#),
        )
        .await;
    for text in ["one", "two"] {
        let id = server.engine.request().await.id;
        server.engine.finish(id, text, FinishReason::Stop);
        assert_eq!(client.reply().await.json()["choices"][0]["text"], text);
        if text == "one" {
            assert_eq!(client.reply().await.json()["version"], "9.9");
        }
    }
}

#[tokio::test]
async fn garbage_gets_a_400_or_a_close_and_the_server_lives() {
    let server = Server::start().await;
    for garbage in ["\x16\x03\x01\x02\x00 tls hello\r\n\r\n", "GET\r\n\r\n", "GET / HTTP/9.9\r\n\r\n"] {
        let mut client = server.connect().await;
        client.send(garbage).await;
        client.rest().await;
    }
    // After a complete request: the answer comes first, then the connection ends.
    let mut client = server.connect().await;
    client.send(get("/version") + "garbage\r\n\r\n").await;
    assert_eq!(client.reply().await.status, 200);
    client.rest().await;
    assert_eq!(server.ask(get("/health")).await.status, 200);
}

#[tokio::test]
async fn preflights_and_cors_headers() {
    let mut server = Server::start().await;
    let preflight = format!(
        "OPTIONS {CHAT} HTTP/1.1\r\nHost: x\r\nOrigin: http://app\r\nAccess-Control-Request-Method: POST\r\n\
         Access-Control-Request-Headers: authorization,content-type,x-stainless-os\r\n\r\n"
    );
    let reply = server.ask(preflight).await;
    assert!(matches!(reply.status, 200 | 204));
    assert_eq!(reply.headers["access-control-allow-origin"], "*");
    assert_eq!(reply.headers["access-control-allow-methods"], "POST");
    assert_eq!(reply.headers["access-control-allow-headers"], "authorization,content-type,x-stainless-os");
    let with_origin = |raw: String| raw.replacen("Host: x", "Host: x\r\nOrigin: http://app", 1);
    for raw in [post(CHAT, "{"), get("/nope"), get(CHAT), get("/health")] {
        let reply = server.ask(with_origin(raw)).await;
        assert_eq!(reply.headers["access-control-allow-origin"], "*", "{}", reply.text());
    }
    let mut client = server.connect().await;
    client.send(with_origin(post(COMPLETIONS, r#"{"prompt":"a","stream":true}"#))).await;
    let id = server.engine.request().await.id;
    server.engine.finish(id, "", FinishReason::Stop);
    assert_eq!(client.reply().await.headers["access-control-allow-origin"], "*");
}
