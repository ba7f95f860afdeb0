//! The server's life: listen, serve, drain or fail, flush, return.

use crate::body::Bodies;
use crate::config::Cors;
use crate::control::Phase;
use crate::handlers::{self, App};
use crate::listen::Listening;
use crate::metrics::{HttpErrors, count_errors};
use crate::request::policy::FieldPolicy;
use crate::respond::{Answer, refuse};
use crate::spans::{About, Tracer};
use crate::{
    ApiConfig, Ended, EngineClient, ServerControl, delivery, errors, keys, listen, operations, request_id,
    routes, timing,
};
use axum::Router;
use axum::http::header;
use axum::middleware;
use axum::routing::{any, post};
use lockstep_core::Refusal;
use std::any::Any;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::{AllowHeaders, AllowMethods, AllowOrigin, Any as AnyOrigin, CorsLayer};

/// How long the last answers may take to reach their clients after the server has ended them.
const FLUSH_TIME: Duration = Duration::from_secs(1);
/// How long browsers may remember a preflight.
const PREFLIGHT_MAX_AGE: Duration = Duration::from_secs(3600);

/// Serves HTTP on `listener` until `control` ends it; returns how.
///
/// - Drain: new requests and `/health` get 503 with Retry-After, open requests go on until they
///   end or the grace is over; then streams end with an error event and other requests with 503.
/// - Failure: every open request is answered with the cause at once.
///
/// Either way it returns once the answers are flushed, at most one second later, and the collector of traces, if there
/// is one, has had a second more for the last ones. The engine's
/// dispatcher must run beside it. Works on a single-threaded tokio runtime.
pub async fn serve(
    listener: TcpListener,
    config: ApiConfig,
    engine: EngineClient,
    mut control: ServerControl,
) -> Ended {
    // Only a label: without randomness ids may repeat between runs, nothing else.
    let run_id = getrandom::u32().unwrap_or_default();
    let (cors, keys) = (config.cors.clone(), Arc::new(config.api_keys.clone()));
    let limits = (config.tls.clone(), config.patience, config.connections_max);
    let bodies = Bodies::default();
    let (policy, probing) = (FieldPolicy::default(), Default::default());
    let about = About { model: config.served_model_name.clone(), version: config.version.clone() };
    let traces = config.otlp.clone().map(|endpoint| Tracer::start(endpoint, about));
    let (tracer, exporter) = traces.map_or_else(Default::default, |(tracer, task)| (tracer, Some(task)));
    let http_errors = HttpErrors::default();
    let counted = middleware::from_fn_with_state(http_errors.clone(), count_errors);
    let app = App { config, engine: engine.clone(), policy, run_id, bodies, tracer, http_errors, probing };
    let routes = routes(Arc::new(app))
        .layer(middleware::from_fn_with_state(keys, keys::check))
        .layer(middleware::from_fn(listen::check_head));
    let routes = with_layers(routes, &cors)
        .layer(counted)
        .layer(middleware::from_fn(request_id::echo))
        .layer(middleware::from_fn(delivery::deliver));
    let (stop, stopped) = watch::channel(false);
    let mut server = std::pin::pin!(Listening::new(listener, routes, limits).serve(stopped));
    let ended = tokio::select! {
        () = &mut server => unreachable!("the server goes on until it is told to stop"),
        ended = supervise(&mut control, &engine) => ended,
    };
    let flush = async {
        tokio::select! {
            () = engine.idle() => {}
            () = &mut server => unreachable!("the server goes on until it is told to stop"),
        }
        // Stop accepting, close idle connections, let answers in flight reach their clients.
        stop.send_replace(true);
        server.await;
    };
    if tokio::time::timeout(FLUSH_TIME, flush).await.is_err() {
        tracing::debug!("some clients did not take their answers in time");
    }
    if let Some(exporter) = exporter {
        exporter.finish().await;
    }
    ended
}

/// Follows the phases until every request has, or has been given, its end.
async fn supervise(control: &mut ServerControl, engine: &EngineClient) -> Ended {
    loop {
        let phase = control.phase.borrow_and_update().clone();
        match phase {
            Phase::Serving => control.changed().await,
            Phase::Failed { cause } => {
                engine.close(failed(&cause));
                return Ended::Failed;
            }
            Phase::Draining { grace } => {
                engine.stop_admission(draining());
                tokio::select! {
                    biased;
                    () = engine.idle() => return Ended::Drained,
                    () = control.changed() => {}
                    () = tokio::time::sleep(grace) => {
                        return Ended::Cut { requests: engine.close(draining()) };
                    }
                }
            }
        }
    }
}

fn failed(cause: &str) -> Refusal {
    Refusal::unavailable(format!("the engine stopped: {cause}")).with_code("engine_failed")
}

fn draining() -> Refusal {
    Refusal::unavailable("the server is shutting down; try again later or elsewhere")
        .with_code("shutting_down")
}

fn routes(app: Arc<App>) -> Router {
    routes::router()
        .merge(unsupported_routes())
        .fallback(handlers::not_found)
        .method_not_allowed_fallback(handlers::method_not_allowed)
        .with_state(app)
}

/// Endpoints that are known and that this server cannot have.
fn unsupported_routes() -> Router<Arc<App>> {
    let add = |routes: Router<Arc<App>>, (path, _): &(&str, &str)| {
        routes.route(path, post(operations::unsupported))
    };
    let managing = |routes: Router<Arc<App>>, path: &&str| routes.route(path, any(operations::unmanaged));
    let routes = operations::UNSUPPORTED.iter().fold(Router::new(), add);
    operations::MANAGING.iter().fold(routes, managing)
}

/// What every answer passes: CORS outside, so that errors carry its headers too; inside it, errors get the
/// form of their endpoint; innermost, a handler that panics becomes a 500.
fn with_layers(routes: Router, cors: &Cors) -> Router {
    let errors = middleware::from_fn(errors::in_the_endpoints_form);
    let routes = routes.layer(CatchPanicLayer::custom(panicked)).layer(errors);
    let origins: AllowOrigin = match cors {
        Cors::Any => AnyOrigin.into(),
        Cors::Only(origins) => AllowOrigin::list(origins.iter().cloned()),
        Cors::Nobody => return routes,
    };
    let cors = CorsLayer::new()
        .allow_origin(origins)
        .allow_methods(AllowMethods::mirror_request())
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([header::RETRY_AFTER, timing::HEADER, request_id::HEADER])
        .max_age(PREFLIGHT_MAX_AGE);
    routes.layer(cors)
}

fn panicked(panic: Box<dyn Any + Send>) -> Answer {
    let text = panic.downcast_ref::<&str>().copied().or(panic.downcast_ref::<String>().map(String::as_str));
    tracing::error!(panic = text.unwrap_or("without a message"), "a request handler panicked");
    refuse(&Refusal::internal("the server made an error on this request; its log says which"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::routing::get;
    use std::future::IntoFuture;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    #[tokio::test]
    async fn a_panic_in_a_handler_is_a_500_and_the_server_goes_on() {
        async fn broken() -> Answer {
            panic!("boom")
        }
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let server = axum::serve(listener, with_layers(Router::new().route("/", get(broken)), &Cors::Any));
        tokio::spawn(server.into_future());
        for _ in 0..2 {
            let mut client = TcpStream::connect(address).await.unwrap();
            client.write_all(b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n").await.unwrap();
            let mut reply = String::new();
            client.read_to_string(&mut reply).await.unwrap();
            assert!(reply.starts_with("HTTP/1.1 500"), "{reply}");
            assert!(reply.contains("access-control-allow-origin: *"), "{reply}");
            assert!(
                reply.contains("\"type\":\"internal_server_error\"") && !reply.contains("boom"),
                "{reply}"
            );
        }
    }
}
