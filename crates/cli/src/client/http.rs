//! Requests over hyper, with kept connections, and answers whole or event by event.

use super::base::BaseUrl;
use super::chunk::error_message;
use super::error::ClientError;
use super::sse::EventParser;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::client::legacy::{self, Client as HyperClient};
use hyper_util::rt::{TokioExecutor, TokioTimer};
use serde_json::Value;
use std::error::Error;
use std::time::{Duration, Instant};

/// How long a connection may take to open.
const CONNECT_LIMIT: Duration = Duration::from_secs(10);
/// How long an unused connection is kept; below what servers and proxies usually keep one.
const IDLE_LIMIT: Duration = Duration::from_secs(15);
/// How long a body may stay open behind its last event.
const END_LIMIT: Duration = Duration::from_secs(1);
/// Largest answer that is read whole.
const ANSWER_BYTES_MAX: usize = 256 << 20;
/// Characters of an answer that is no JSON which a message shows.
const SHOWN_CHARS_MAX: usize = 200;

/// Asks one server. Cheap to clone; clones share connections.
#[derive(Clone, Debug)]
pub struct Client {
    http: HyperClient<HttpsConnector<HttpConnector>, Full<Bytes>>,
    base: BaseUrl,
    authorization: Option<HeaderValue>,
}

/// A whole answer.
#[derive(Clone, Debug)]
pub struct Answer {
    /// HTTP status.
    pub status: u16,
    /// When the server may be asked again.
    pub retry_after: Option<Duration>,
    /// `x-request-id`.
    pub request_id: Option<String>,
    /// The body.
    pub body: Bytes,
}

impl Answer {
    /// Whether the status is 2xx.
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// The refusal that an answer other than 2xx is.
    pub fn refusal(&self) -> ClientError {
        let message = match serde_json::from_slice::<Value>(&self.body) {
            Ok(json) => error_message(json.get("error").unwrap_or(&json)),
            Err(_) => String::from_utf8_lossy(&self.body).trim().chars().take(SHOWN_CHARS_MAX).collect(),
        };
        ClientError::Status { status: self.status, message, retry_after: self.retry_after }
    }
}

impl Client {
    /// A client of the server at `url` that sends `key`, if there is one. Keeps up to `connections_max`
    /// unused connections; 0 opens one per request, for callers that do not run the runtime in between.
    pub fn new(url: &str, key: Option<&str>, connections_max: usize) -> Result<Self, ClientError> {
        let mut tcp = HttpConnector::new();
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT_LIMIT));
        tcp.enforce_http(false);
        let connector = HttpsConnectorBuilder::new()
            .with_webpki_roots()
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let http = HyperClient::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE_LIMIT)
            .pool_max_idle_per_host(connections_max)
            .build(connector);
        let authorization = key.map(|key| {
            HeaderValue::try_from(format!("Bearer {key}")).map_err(|_| ClientError::Url {
                url: url.to_owned(),
                reason: "the --api-key does not fit into a header".into(),
            })
        });
        Ok(Self { http, base: BaseUrl::parse(url)?, authorization: authorization.transpose()? })
    }

    /// The server, for messages.
    pub fn base(&self) -> String {
        self.base.to_string()
    }

    /// GET, whole answer, whatever its status.
    pub async fn get(&self, path: &str) -> Result<Answer, ClientError> {
        let response = self.send(Method::GET, path, Bytes::new()).await?;
        self.whole(response).await
    }

    /// POST of JSON, whole answer, whatever its status.
    pub async fn post(&self, path: &str, body: Bytes) -> Result<Answer, ClientError> {
        let response = self.send(Method::POST, path, body).await?;
        self.whole(response).await
    }

    /// POST of JSON that asks for a stream. Errors also with [`ClientError::Status`] when the server refuses.
    pub async fn stream(&self, path: &str, body: Bytes) -> Result<EventStream, ClientError> {
        let response = self.send(Method::POST, path, body).await?;
        if response.status() != StatusCode::OK {
            return Err(self.whole(response).await?.refusal());
        }
        let kind = response.headers().get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
        if !kind.is_some_and(|kind| kind.starts_with("text/event-stream")) {
            return Err(ClientError::Protocol {
                base: self.base(),
                reason: format!("its content type is {kind:?} where text/event-stream was asked for"),
            });
        }
        let arrived = Instant::now();
        Ok(EventStream {
            body: response.into_body(),
            parser: EventParser::default(),
            arrived,
            base: self.base(),
        })
    }

    async fn send(&self, method: Method, path: &str, body: Bytes) -> Result<Response<Incoming>, ClientError> {
        let mut request = Request::new(Full::new(body));
        *request.uri_mut() = self.base.join(path)?;
        *request.method_mut() = method;
        let headers = request.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(
            header::USER_AGENT,
            HeaderValue::from_static(concat!("lockstep/", env!("CARGO_PKG_VERSION"))),
        );
        if let Some(value) = &self.authorization {
            headers.insert(header::AUTHORIZATION, value.clone());
        }
        self.http.request(request).await.map_err(|error| self.failed(&error))
    }

    fn failed(&self, error: &legacy::Error) -> ClientError {
        let (base, reason) = (self.base(), innermost(error));
        match error.is_connect() {
            true => ClientError::Connect { base, reason },
            false => ClientError::Broken { base, reason },
        }
    }

    async fn whole(&self, response: Response<Incoming>) -> Result<Answer, ClientError> {
        let (head, body) = response.into_parts();
        let body = Limited::new(body, ANSWER_BYTES_MAX).collect().await;
        let body =
            body.map_err(|error| ClientError::Broken { base: self.base(), reason: innermost(&*error) })?;
        Ok(Answer {
            status: head.status.as_u16(),
            retry_after: retry_after(&head.headers),
            request_id: head.headers.get("x-request-id").and_then(|v| Some(v.to_str().ok()?.to_owned())),
            body: body.to_bytes(),
        })
    }
}

/// The cause that says most: hyper's own words around it name its parts.
fn innermost(error: &(dyn Error + 'static)) -> String {
    let mut cause = error;
    while let Some(source) = cause.source() {
        cause = source;
    }
    cause.to_string()
}

/// `Retry-After` in its form of seconds; the form of a date is left to the caller's own patience.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let seconds = headers.get(header::RETRY_AFTER)?.to_str().ok()?.trim().parse().ok()?;
    Some(Duration::from_secs(seconds))
}

/// An answer that is read event by event. Dropping it closes the connection, which ends the request
/// on the server.
#[derive(Debug)]
pub struct EventStream {
    body: Incoming,
    parser: EventParser,
    arrived: Instant,
    base: String,
}

impl EventStream {
    /// The next event's data and when its last bytes arrived; `None` after `[DONE]`.
    ///
    /// Errors when the body ends without `[DONE]`: that answer is not complete.
    pub async fn next(&mut self) -> Result<Option<(String, Instant)>, ClientError> {
        loop {
            if let Some(data) = self.parser.next_data() {
                if data == "[DONE]" {
                    // With the body's end the connection can be used again; a server that leaves it open loses it.
                    let rest = async { while let Some(Ok(_)) = self.body.frame().await {} };
                    let _ = tokio::time::timeout(END_LIMIT, rest).await;
                    return Ok(None);
                }
                return Ok(Some((data, self.arrived)));
            }
            let broken = |reason: String| ClientError::Broken { base: self.base.clone(), reason };
            let frame = self.body.frame().await;
            self.arrived = Instant::now();
            match frame {
                Some(Ok(frame)) => {
                    let bytes = frame.into_data().unwrap_or_default();
                    if !self.parser.push(&bytes) {
                        return Err(ClientError::Protocol {
                            base: self.base.clone(),
                            reason: "an event has no end".into(),
                        });
                    }
                }
                Some(Err(error)) => return Err(broken(innermost(&error))),
                None => return Err(broken("the stream ended without [DONE]".into())),
            }
        }
    }

    /// The server, for messages.
    pub fn base(&self) -> &str {
        &self.base
    }
}

#[cfg(test)]
mod tests {
    use super::super::runtime;
    use super::super::scripted::ScriptedServer;
    use super::*;

    /// What the events of a stream are, and how it ended.
    fn events(url: &str) -> (Vec<String>, Result<(), ClientError>) {
        let client = Client::new(url, Some("secret"), 0).unwrap();
        let mut events = Vec::new();
        let ended = runtime().unwrap().block_on(async {
            let mut stream = client.stream("/v1/x", "{}".into()).await?;
            while let Some((data, _)) = stream.next().await? {
                events.push(data);
            }
            Ok(())
        });
        (events, ended)
    }

    #[test]
    fn a_stream_is_whole_with_done_only() {
        const WHOLE: &str =
            "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: a\n\ndata: [DONE]\n\n";
        const EMPTY: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n";
        const CUT: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\ndata: a\n\n";
        let server = ScriptedServer::start(&[WHOLE, CUT, EMPTY]);
        assert_eq!(events(&server.url), (vec!["a".to_owned()], Ok(())));
        let (cut, ended) = events(&server.url);
        assert_eq!(cut, ["a"]);
        assert!(
            matches!(&ended, Err(ClientError::Broken { reason, .. }) if reason.contains("[DONE]")),
            "{ended:?}"
        );
        assert!(events(&server.url).1.is_err());
        let requests = server.requests();
        assert!(requests[0].starts_with("POST /v1/x HTTP/1.1\r\n") && requests[0].ends_with("\r\n\r\n{}"));
        assert!(requests[0].contains("authorization: Bearer secret\r\n"), "{}", requests[0]);
    }

    #[test]
    fn refusals_carry_the_servers_words() {
        const BUSY: &str = "HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 31\r\n\r\n{\"error\":{\"message\":\"is full\"}}";
        const PLAIN: &str =
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}";
        let server = ScriptedServer::start(&[BUSY, PLAIN, ""]);
        let refused = ClientError::Status {
            status: 503,
            message: "is full".into(),
            retry_after: Some(Duration::from_secs(7)),
        };
        assert_eq!(events(&server.url).1, Err(refused));
        assert!(matches!(events(&server.url).1, Err(ClientError::Protocol { .. })));
        assert!(matches!(events(&server.url).1, Err(ClientError::Broken { .. })));
        drop(server.requests());
        assert!(matches!(events("http://127.0.0.1:1").1, Err(ClientError::Connect { .. })));
    }
}
