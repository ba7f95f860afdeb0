//! HTTPS: HTTP/1.1 and HTTP/2 through TLS, ends of connections, files that cannot be used.

// Helpers outside #[test] functions may unwrap too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod common;

use axum::body::Body;
use axum::http::{Request, Response};
use common::{Server, config, get, post, within};
use http_body::Body as _;
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use lockstep_api::{ApiConfig, Patience, Tls};
use lockstep_core::FinishReason;
use rcgen::{CertifiedKey, KeyPair, generate_simple_self_signed};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::{ClientConfig, RootCertStore, crypto::ring};

const STREAM: &str = r#"{"prompt":"C","max_tokens":100000,"stream":true}"#;

/// A folder of its own that goes with the value.
struct Files(PathBuf);

impl Files {
    fn new(name: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("lockstep-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        Self(folder)
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.0.join(name);
        std::fs::write(&path, text).unwrap();
        path
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A server with a certificate made for it, and how to reach it.
async fn start(name: &str) -> (Server, TlsConnector) {
    start_with(name, Patience::default()).await
}

async fn start_with(name: &str, patience: Patience) -> (Server, TlsConnector) {
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".into()]).unwrap();
    let files = Files::new(name);
    let (cert_file, key_file) =
        (files.write("cert.pem", &cert.pem()), files.write("key.pem", &signing_key.serialize_pem()));
    let tls = Some(Tls::from_files(&cert_file, &key_file).unwrap());
    let server = Server::start_with(ApiConfig { tls, patience, ..config() }, 1, 100).await;
    let mut roots = RootCertStore::empty();
    roots.add(cert.der().clone()).unwrap();
    let client = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    (server, TlsConnector::from(Arc::new(client)))
}

async fn connect(server: &Server, connector: &TlsConnector, alpn: &[u8]) -> TlsStream<TcpStream> {
    let mut config = (**connector.config()).clone();
    config.alpn_protocols = vec![alpn.to_vec()];
    let stream = TcpStream::connect(server.address).await.unwrap();
    let connecting = TlsConnector::from(Arc::new(config)).connect("localhost".try_into().unwrap(), stream);
    let stream = within("the handshake", connecting).await.unwrap();
    assert_eq!(stream.get_ref().1.alpn_protocol(), Some(alpn));
    stream
}

async fn read_to_end(stream: &mut TlsStream<TcpStream>) -> String {
    let mut text = String::new();
    within("the answer", stream.read_to_string(&mut text)).await.unwrap();
    text
}

#[tokio::test]
async fn https_answers_and_a_half_closed_client_gets_its_answer() {
    let (mut server, connector) = start("https").await;
    let mut stream = connect(&server, &connector, b"http/1.1").await;
    let close = get("/version").replacen("Host: x", "Host: x\r\nConnection: close", 1);
    stream.write_all(close.as_bytes()).await.unwrap();
    assert!(read_to_end(&mut stream).await.contains(r#"{"version":"9.9"}"#));
    let mut stream = connect(&server, &connector, b"http/1.1").await;
    stream.write_all(post("/v1/completions", STREAM).as_bytes()).await.unwrap();
    let id = server.engine.request().await.id;
    // TLS's own way to close one half.
    stream.shutdown().await.unwrap();
    server.engine.finish(id, "tock", FinishReason::Stop);
    let text = read_to_end(&mut stream).await;
    assert!(text.contains("tock") && text.contains("[DONE]"), "{text}");
    server.engine.expect_silence();
    // Who speaks plain HTTP to it is not answered, and does no harm.
    assert!(server.connect().await.stream.write_all(get("/health").as_bytes()).await.is_ok());
    connect(&server, &connector, b"http/1.1").await;
}

#[tokio::test]
async fn a_client_that_drops_its_tls_connection_aborts_its_request() {
    let (mut server, connector) = start("tls-drop").await;
    let mut stream = connect(&server, &connector, b"http/1.1").await;
    stream.write_all(post("/v1/completions", STREAM).as_bytes()).await.unwrap();
    let id = server.engine.request().await.id;
    drop(stream);
    server.engine.expect_abort(0, id).await;
}

#[tokio::test]
async fn http_2_streams_and_a_reset_stream_aborts_its_request() {
    let (mut server, connector) = start("http-2").await;
    let io = TokioIo::new(connect(&server, &connector, b"h2").await);
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await.unwrap();
    let connection = tokio::spawn(connection);
    let ask = |body: &'static str| {
        let request = axum::http::Request::post("https://localhost/v1/completions");
        request.header("content-type", "application/json").body(axum::body::Body::from(body)).unwrap()
    };
    let first = sender.send_request(ask(r#"{"prompt":"a"}"#));
    let first_id = server.engine.request().await.id;
    let second = sender.send_request(ask(STREAM));
    let second_id = server.engine.request().await.id;
    server.engine.text(second_id, "tick");
    let second = within("the second answer", second).await.unwrap();
    assert_eq!(second.status(), 200);
    server.engine.finish(first_id, "one", FinishReason::Stop);
    let first = within("the first answer", first).await.unwrap();
    let body = axum::body::to_bytes(axum::body::Body::new(first.into_body()), 1 << 20).await.unwrap();
    assert!(String::from_utf8_lossy(&body).contains("\"one\""));
    drop(second);
    server.engine.expect_abort(0, second_id).await;
    drop(sender);
    within("the connection's end", connection).await.unwrap().unwrap();
}

const SHORT: Duration = Duration::from_millis(200);
const LONG: Duration = Duration::from_secs(3600);
/// Nobody is ever overdue.
const ENDLESS: Patience = Patience { head: LONG, body: LONG, idle: LONG, write: LONG };

/// An HTTP/2 client that shows that it lives all the time; its task ends with the connection.
async fn http_2(
    server: &Server,
    connector: &TlsConnector,
) -> (SendRequest<Body>, JoinHandle<hyper::Result<()>>) {
    let io = TokioIo::new(connect(server, connector, b"h2").await);
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder.timer(TokioTimer::new()).initial_stream_window_size(64 << 10);
    builder.keep_alive_interval(SHORT / 8).keep_alive_while_idle(true);
    let (sender, connection) = builder.handshake(io).await.unwrap();
    (sender, tokio::spawn(connection))
}

fn http_2_post(body: Body) -> Request<Body> {
    let request = Request::post("https://localhost/v1/completions");
    request.header("content-type", "application/json").body(body).unwrap()
}

/// The next bytes of an answer; `None` at its end.
async fn next_bytes(answer: &mut Response<Incoming>) -> Option<hyper::Result<Vec<u8>>> {
    let frame = std::future::poll_fn(|cx| Pin::new(answer.body_mut()).poll_frame(cx));
    let frame = within("the next bytes", frame).await?;
    Some(frame.map(|frame| frame.into_data().unwrap_or_default().to_vec()))
}

#[tokio::test]
async fn an_http_2_answer_that_nobody_takes_is_given_up_and_the_others_go_on() {
    let (mut server, connector) = start_with("http-2-untaken", Patience { write: SHORT, ..ENDLESS }).await;
    let (mut sender, connection) = http_2(&server, &connector).await;
    let untaken = sender.send_request(http_2_post(STREAM.into()));
    let untaken_id = server.engine.request().await.id;
    let taken = sender.send_request(http_2_post(STREAM.into()));
    let taken_id = server.engine.request().await.id;
    server.engine.text(taken_id, "tick");
    let mut taken = within("the head of the answer that is taken", taken).await.unwrap();
    assert!(String::from_utf8(next_bytes(&mut taken).await.unwrap().unwrap()).unwrap().contains("tick"));
    // More than the stream's window and what the server buffers for it.
    server.engine.text(untaken_id, &"x".repeat(1 << 20));
    let mut untaken = within("the head of the answer that is not taken", untaken).await.unwrap();
    server.engine.expect_abort(0, untaken_id).await;
    server.engine.text(taken_id, "tock");
    assert!(String::from_utf8(next_bytes(&mut taken).await.unwrap().unwrap()).unwrap().contains("tock"));
    // What is cut must not look complete.
    let mut bytes = 0;
    let end = loop {
        match next_bytes(&mut untaken).await {
            Some(Ok(more)) => bytes += more.len(),
            end => break end,
        }
    };
    assert!(matches!(end, Some(Err(_))) && bytes < 1 << 20, "{end:?} after {bytes} bytes");
    server.engine.finish(taken_id, "", FinishReason::Stop);
    while next_bytes(&mut taken).await.is_some() {}
    drop((sender, taken, untaken));
    // A reset by its peer is an end as well.
    let _ = within("the connection's end", connection).await.unwrap();
    server.engine.expect_silence();
}

#[tokio::test]
async fn a_connection_whose_client_takes_none_of_its_http_2_answers_is_closed() {
    let (mut server, connector) = start_with("http-2-stalled", Patience { write: SHORT, ..ENDLESS }).await;
    let (mut sender, connection) = http_2(&server, &connector).await;
    let whole = sender.send_request(http_2_post(r#"{"prompt":"a"}"#.into()));
    let id = server.engine.request().await.id;
    server.engine.finish(id, &"x".repeat(1 << 20), FinishReason::Stop);
    let answer = within("the head", whole).await.unwrap();
    // Pings go on meanwhile.
    let _ = within("the connection's end", connection).await.unwrap();
    drop(answer);
}

#[tokio::test]
async fn pings_keep_no_http_2_connection_and_a_body_that_does_not_come_gets_a_408() {
    let patience = Patience { idle: SHORT, body: SHORT, ..ENDLESS };
    let (mut server, connector) = start_with("http-2-idle", patience).await;
    let (mut sender, connection) = http_2(&server, &connector).await;
    let never = futures::stream::pending::<Result<Vec<u8>, std::io::Error>>();
    let answer = within("the answer", sender.send_request(http_2_post(Body::from_stream(never)))).await;
    assert_eq!(answer.unwrap().status(), 408);
    let _ = within("the connection's end", connection).await.unwrap();
    server.engine.expect_silence();
}

#[test]
fn files_that_cannot_be_used_are_refused_by_name() {
    let files = Files::new("tls-files");
    let CertifiedKey { cert, signing_key } = generate_simple_self_signed(["localhost".into()]).unwrap();
    let cert = files.write("cert.pem", &cert.pem());
    let key = files.write("key.pem", &signing_key.serialize_pem());
    let other = files.write("other.pem", &KeyPair::generate().unwrap().serialize_pem());
    let garbage = files.write("garbage.pem", "hello");
    let missing = files.0.join("missing.pem");
    let refused = |cert, key| Tls::from_files(cert, key).unwrap_err().to_string();
    assert!(Tls::from_files(&cert, &key).is_ok());
    for (text, words) in [
        (refused(&missing, &key), ["cannot use the certificate: cannot read", "missing.pem"]),
        (refused(&cert, &missing), ["cannot use the private key: cannot read", "missing.pem"]),
        (refused(&garbage, &key), ["garbage.pem", "no certificate"]),
        (refused(&cert, &garbage), ["garbage.pem", "no private key"]),
        (refused(&key, &cert), ["key.pem", "no certificate"]),
        (refused(&cert, &other), ["cannot be used together", "other.pem"]),
    ] {
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
}
