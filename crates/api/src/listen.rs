//! Accepting connections and speaking HTTP on them.
//!
//! **Invariants**
//! - A client can keep the server waiting only for so long ([`Patience`]): for a TLS handshake, a request head, the
//!   next request, or the taking of its answer. (Bodies: [`body`](crate::body).)
//! - At most `connections_max` connections are served; [`TURNED_AWAY_MAX`] more are answered 503 and closed at once,
//!   the rest wait in the kernel. So descriptors never run out while the limit of open files covers the sum.
//! - What a connection holds in memory beside its answer is bounded by [`BUFFER_BYTES_MAX`].
//!
//! Follows `axum::serve`, which has no time-outs.

use crate::config::Patience;
use crate::connection::{ClientStream, Connection, Overdue, Serving};
use crate::errors::ErrorForm;
use crate::request::policy::shorten;
use crate::respond::{Answer, refuse};
use crate::transport::{Tls, Transport};
use crate::unread;
use axum::Router;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::ConnectInfo;
use axum::http::{Method, Request, Version, header};
use axum::middleware::Next;
use http_body::{Frame, SizeHint};
use hyper::body::Incoming;
use hyper::server::conn::{http1, http2};
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulConnection;
use hyper_util::service::TowerToHyperService;
use lockstep_core::Refusal;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};

/// Connections beyond the limit that are told so at the same time.
pub const TURNED_AWAY_MAX: usize = 64;
/// Bytes that hyper holds of a connection in each direction. Also bounds a request head for hyper, which answers a
/// bare 431; the limits below come first and explain themselves.
const BUFFER_BYTES_MAX: usize = 64 << 10;
/// Fields of a request head, and with [`HEAD_BYTES_MAX`] what of it is accepted.
const HEADERS_MAX: usize = 100;
const HEAD_BYTES_MAX: usize = 32 << 10;
const HEADERS_PARSED_MAX: usize = 4 * HEADERS_MAX;
/// Requests at once on one HTTP/2 connection.
const HTTP_2_STREAMS_MAX: u32 = 256;
/// Pause after a failed accept: what failed (no descriptor, no memory) may be there again.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long a last word may take to be written.
const LAST_WORD_TIME: Duration = Duration::from_secs(1);

/// What every connection is served with.
#[derive(Clone)]
struct Shared {
    routes: Router,
    tls: Option<Tls>,
    patience: Patience,
    connections_max: usize,
}

/// The listening side of a server.
pub(crate) struct Listening {
    listener: TcpListener,
    shared: Arc<Shared>,
    places: Arc<Semaphore>,
    turned_away: Arc<Semaphore>,
}

/// A connection's place among those that are served.
enum Place {
    /// Within the limit. Held for the connection's life.
    Served(#[allow(dead_code, reason = "its drop frees the place")] OwnedSemaphorePermit),
    /// Beyond it.
    TurnedAway(#[allow(dead_code, reason = "its drop frees the place")] OwnedSemaphorePermit),
}

impl Listening {
    pub(crate) fn new(
        listener: TcpListener,
        routes: Router,
        (tls, patience, connections_max): (Option<Tls>, Patience, usize),
    ) -> Self {
        Self {
            listener,
            shared: Arc::new(Shared { routes, tls, patience, connections_max }),
            places: Arc::new(Semaphore::new(connections_max)),
            turned_away: Arc::new(Semaphore::new(TURNED_AWAY_MAX)),
        }
    }

    /// Serves until `stop` turns true; then accepts nothing more, closes idle connections, and returns when every
    /// answer in flight is sent.
    pub(crate) async fn serve(self, mut stop: watch::Receiver<bool>) {
        let (alive, mut all_gone) = mpsc::channel::<()>(1);
        loop {
            let (stream, peer, place) = tokio::select! {
                accepted = self.accept() => accepted,
                // Errors only without a sender; then nobody will want the server to go on either.
                _ = stop.wait_for(|stop| *stop) => break,
            };
            let (shared, stop, alive) = (self.shared.clone(), stop.clone(), alive.clone());
            tokio::spawn(async move {
                if let Err(error) = serve_connection(&shared, stream, place, stop).await {
                    tracing::debug!(%peer, error, "connection ended");
                }
                drop(alive);
            });
        }
        drop((self, alive));
        // Nothing is ever sent: this waits for the last connection's sender to be dropped.
        let _ = all_gone.recv().await;
    }

    /// The next connection; waits for a place first when even those to be turned away are many.
    async fn accept(&self) -> (TcpStream, SocketAddr, Place) {
        let place = tokio::select! {
            biased;
            permit = self.places.clone().acquire_owned() => Place::Served(never_closed(permit)),
            permit = self.turned_away.clone().acquire_owned() => Place::TurnedAway(never_closed(permit)),
        };
        let (stream, peer) = self.accept_stream().await;
        // A place may have become free meanwhile.
        let place = match (place, self.places.clone().try_acquire_owned()) {
            (Place::TurnedAway(_), Ok(permit)) => Place::Served(permit),
            (place, _) => place,
        };
        (stream, peer, place)
    }

    async fn accept_stream(&self) -> (TcpStream, SocketAddr) {
        loop {
            match self.listener.accept().await {
                Ok((stream, peer)) => {
                    // A streamed token must not wait for the acknowledgement of the one before it.
                    if let Err(error) = stream.set_nodelay(true) {
                        tracing::debug!(%peer, %error, "cannot set TCP_NODELAY");
                    }
                    return (stream, peer);
                }
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    tracing::warn!(%error, "cannot accept connections; is the limit of open files too low?");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

fn never_closed<T, E>(acquired: Result<T, E>) -> T {
    acquired.ok().expect("invariant: the semaphores are never closed")
}

/// The client left before it was accepted.
fn is_of_one_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionRefused | ConnectionAborted | ConnectionReset)
}

/// Serves one connection to its end; why it ended, unless by the client's own will.
async fn serve_connection(
    shared: &Shared,
    stream: TcpStream,
    place: Place,
    stop: watch::Receiver<bool>,
) -> Result<(), String> {
    let handshake = Transport::accept(stream, shared.tls.as_ref());
    let transport = match tokio::time::timeout(shared.patience.head, handshake).await {
        Ok(transport) => transport.map_err(|e| format!("TLS handshake: {e}"))?,
        Err(_) => return Err("TLS handshake: took too long".into()),
    };
    let is_http_2 = transport.is_http_2();
    let turned_away = matches!(place, Place::TurnedAway(_)).then_some(shared.connections_max);
    let connection = Connection::new(is_http_2, turned_away);
    let io = TokioIo::new(ClientStream::new(transport, connection.clone()));
    let routes = TowerToHyperService::new(shared.routes.clone());
    let client = connection.clone();
    let service = service_fn(move |request: Request<Incoming>| {
        let serving = client.serve();
        let (mut request, watch) = match is_http_2 {
            // Its streams do not stand in each other's way.
            true => (request.map(Body::new), None),
            false => {
                let (request, watch) = unread::watch(request);
                (request, Some(watch))
            }
        };
        request.extensions_mut().insert(ConnectInfo(client.clone()));
        let answer = routes.call(request);
        async move {
            let mut answer = answer.await?;
            if let Some(watch) = watch {
                watch.settle(&mut answer).await;
            }
            Ok::<_, Infallible>(answer.map(|body| Body::new(Served { body, _serving: serving })))
        }
    });
    if is_http_2 {
        let mut conn = http_2().serve_connection(io, service);
        return drive(&mut conn, &connection, shared, stop).await.map(drop);
    }
    let mut conn = http_1(turned_away.is_none()).serve_connection(io, service);
    match drive(&mut conn, &connection, shared, stop).await? {
        Some(Overdue::Head) => {
            say_head_is_late(conn.into_parts().io.into_inner(), shared.patience.head).await
        }
        Some(Overdue::Stalled) => {
            conn.into_parts().io.inner().reset_on_drop();
            return Err("the client took no byte of its answer for too long".into());
        }
        Some(Overdue::Idle) | None => {}
    }
    Ok(())
}

fn http_1(keep_alive: bool) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.keep_alive(keep_alive).max_buf_size(BUFFER_BYTES_MAX).max_headers(HEADERS_PARSED_MAX);
    // `Connection::overdue` does this, and tells a slow head from an idle connection.
    builder.header_read_timeout(None);
    builder
}

fn http_2() -> http2::Builder<TokioExecutor> {
    let mut builder = http2::Builder::new(TokioExecutor::new());
    builder
        .timer(TokioTimer::new())
        .max_concurrent_streams(HTTP_2_STREAMS_MAX)
        .max_header_list_size(HEAD_BYTES_MAX as u32)
        .max_send_buf_size(BUFFER_BYTES_MAX);
    builder
}

/// Runs `conn` until it ends by itself, by an error, or because the client is overdue.
async fn drive<C>(
    conn: &mut C,
    connection: &Connection,
    shared: &Shared,
    mut stop: watch::Receiver<bool>,
) -> Result<Option<Overdue>, String>
where
    C: GracefulConnection + Unpin,
    C::Error: std::fmt::Display,
{
    let mut overdue = std::pin::pin!(connection.overdue(&shared.patience));
    let mut is_stopping = false;
    loop {
        tokio::select! {
            result = &mut *conn => return result.map(|()| None).map_err(|e| e.to_string()),
            overdue = &mut overdue => return Ok(Some(overdue)),
            _ = stop.wait_for(|stop| *stop), if !is_stopping => {
                is_stopping = true;
                Pin::new(&mut *conn).graceful_shutdown();
            }
        }
    }
}

/// The layer in front of everything: refuses requests on connections that are turned away (but for `/health`, which
/// tells that the server is well), and heads that are too large or that HTTP does not allow.
pub(crate) async fn check_head(
    ConnectInfo(connection): ConnectInfo<Connection>,
    request: Request<Body>,
    next: Next,
) -> Answer {
    let path = request.uri().path();
    if let Some(connections_max) = connection.turned_away().filter(|_| path != "/health") {
        let message =
            format!("the server has {connections_max} connections open, its limit; try again later");
        return refuse(&Refusal::unavailable(message).with_code("too_many_connections"));
    }
    if let Err(refusal) = check_address(&request) {
        return refuse(&refusal);
    }
    let headers = request.headers();
    let fields = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + ": \r\n".len());
    let bytes = request.uri().path_and_query().map_or(0, |path| path.as_str().len()) + fields.sum::<usize>();
    if headers.len() <= HEADERS_MAX && bytes <= HEAD_BYTES_MAX {
        return next.run(request).await;
    }
    let message = format!(
        "the head of the request to {} has {} header fields and {bytes} bytes, accepted are {HEADERS_MAX} and \
         {HEAD_BYTES_MAX}; send less, and the rest in the body",
        shorten(path),
        headers.len(),
    );
    let refusal = Refusal::with_status(431, "invalid_request_error", message);
    refuse(&refusal.with_code("header_too_large"))
}

/// HTTP/1.1 asks for one `Host` (RFC 9112, section 3.2), and a server that is no proxy has no use for CONNECT.
fn check_address(request: &Request<Body>) -> Result<(), Refusal> {
    if request.method() == Method::CONNECT {
        let message =
            "CONNECT asks for a tunnel, but this server is no proxy; send requests to its own address";
        return Err(Refusal::with_status(501, "invalid_request_error", message).with_code("not_implemented"));
    }
    let hosts = request.headers().get_all(header::HOST).iter().count();
    if request.version() == Version::HTTP_11 && hosts != 1 {
        let message = format!(
            "an HTTP/1.1 request has one Host header field, this one has {hosts}; send Host: <the server>"
        );
        return Err(Refusal::invalid(message).with_code("bad_host"));
    }
    Ok(())
}

/// The answer to a head that does not end: hyper has nothing to answer yet, so this is written by hand.
async fn say_head_is_late(mut stream: ClientStream, patience: Duration) {
    let message = format!(
        "the request's head was not complete {} s after its first byte; send it faster",
        patience.as_secs_f32()
    );
    let refusal = Refusal::with_status(408, "invalid_request_error", message).with_code("request_timeout");
    let body = ErrorForm::OpenAi.json(&refusal);
    let head = "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close";
    let answer = format!("{head}\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let say = async {
        stream.write_all(answer.as_bytes()).await?;
        stream.shutdown().await
    };
    // The connection is over either way.
    let _ = tokio::time::timeout(LAST_WORD_TIME, say).await;
}

/// A body that counts its request as being served until it is sent or given up.
struct Served {
    body: Body,
    _serving: Serving,
}

impl HttpBody for Served {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
