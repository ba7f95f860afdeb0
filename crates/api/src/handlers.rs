//! One function per endpoint.

use crate::ApiConfig;
use crate::answer::{self, Label, Pending};
use crate::body::{Bodies, read_object};
use crate::config::unix_seconds;
use crate::connection::Connection;
use crate::dialect::{Dialect, Reading, anthropic_models};
use crate::engine::{Caller, EngineClient, together};
use crate::errors::ErrorForm;
use crate::metrics::{self, HttpErrors, Scrape};
use crate::openapi::document::document;
use crate::parsers::{ReasoningFormat, ToolFormat};
use crate::replicas;
use crate::request::{self, Call, policy::FieldPolicy};
use crate::request_id;
use crate::respond::{Answer, json, json_or_refusal, refuse};
use crate::routes;
use crate::spans::{Traced, Tracer};
use crate::timing;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{ConnectInfo, Path, State};
use axum::http::{HeaderMap, Method, Request, Uri};
use lockstep_core::Refusal;
use serde_json::{Value, json};
use std::sync::Arc;

/// What all handlers share.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) config: ApiConfig,
    pub(crate) engine: EngineClient,
    pub(crate) policy: FieldPolicy,
    /// Makes answer ids differ between runs of the server.
    pub(crate) run_id: u32,
    /// Request bodies that are being read.
    pub(crate) bodies: Bodies,
    /// Where ended requests are told of.
    pub(crate) tracer: Tracer,
    /// Error answers so far.
    pub(crate) http_errors: HttpErrors,
    /// Held by the one health check that generates a token for all.
    pub(crate) probing: tokio::sync::Mutex<()>,
}

/// An endpoint that generates: parse, validate, submit, answer.
pub(crate) async fn generate<D: Dialect>(
    State(app): State<Arc<App>>,
    ConnectInfo(connection): ConnectInfo<Connection>,
    request: Request<Body>,
) -> Answer {
    let asker = Asker {
        errors: ErrorForm::of_path(request.uri().path()),
        x_request_id: request_id::text_of(request.headers()),
        traced: app.tracer.begin(request.uri().path(), request.headers()),
        connection,
    };
    match begin::<D>(&app, &asker, request).await {
        Ok(Begun::Submitted(pending, stream)) => answer::answer(*pending, stream).await,
        Ok(Begun::WithoutText(value)) => json(&value),
        Err(refusal) => {
            let x_request_id = asker.x_request_id.as_deref();
            tracing::debug!(x_request_id, refusal.status, refusal.message, "request refused");
            refuse(&refusal)
        }
    }
}

/// Who asks.
struct Asker {
    connection: Connection,
    /// How a failure is written.
    errors: ErrorForm,
    /// Its own name of the call.
    x_request_id: Option<String>,
    /// The trace that the call belongs to, if it is traced.
    traced: Option<Traced>,
}

/// What a request has come to before its answer is written.
enum Begun {
    /// The engine works on it; whether its answer is a stream.
    Submitted(Box<Pending>, bool),
    /// It asks for no text, and this is the answer.
    WithoutText(Value),
}

async fn begin<D: Dialect>(app: &App, asker: &Asker, request: Request<Body>) -> Result<Begun, Refusal> {
    let timing = timing::is_asked(request.headers())?;
    let body = read_object(request, &app.config, &app.bodies).await?;
    let reading = Reading { config: &app.config, policy: &app.policy };
    if let Some(answer) = D::without_text(&body, &reading)? {
        return app.engine.refusing().map_or(Ok(Begun::WithoutText(answer)), Err);
    }
    let (mut call, echo) = D::read(body, &reading)?;
    if timing {
        call.ask_for_timing();
    }
    submit::<D>(app, asker, call, echo)
}

/// Hands a call to the engine.
fn submit<D: Dialect>(app: &App, asker: &Asker, mut call: Call, echo: D::Echo) -> Result<Begun, Refusal> {
    let (hold, errors) = (asker.connection.hold(), asker.errors);
    let stop = call.requests.first().map(|request| request.text.stop.clone()).unwrap_or_default();
    let caller = Caller::Client(asker.traced.clone());
    let generation = app.engine.submit(std::mem::take(&mut call.requests), call.n, caller);
    let mut generation = generation.map_err(|refusal| D::NAMES.in_their_terms(refusal))?;
    let serial = format!("{:08x}{:08x}", app.run_id, generation.id().0);
    let model = app.config.served_model_name.clone();
    let form = D::form(Label { serial: serial.clone(), created: unix_seconds(), model }, &call, echo);
    generation.go_by(form.id(), None);
    call.names.iter().for_each(|(name, choice)| generation.go_by(name, *choice));
    for request in generation.ids() {
        let (answer, x_request_id) = (form.id(), asker.x_request_id.as_deref());
        tracing::debug!(%request, answer, x_request_id, stream = call.stream, "request submitted");
    }
    let Call { n: per_prompt, parsing, prompt_only, stream, .. } = call;
    let names = D::NAMES;
    let pending =
        Pending { generation, hold, form, errors, names, serial, per_prompt, parsing, stop, prompt_only };
    Ok(Begun::Submitted(Box::new(pending), stream))
}

/// `GET /v1/models`
pub(crate) async fn models(State(app): State<Arc<App>>, headers: HeaderMap) -> Answer {
    if anthropic_models::is_asked(&headers) {
        return json(&anthropic_models::list(&app.config));
    }
    json(&json!({ "object": "list", "data": [model_card(&app.config)] }))
}

/// `GET /v1/models/{id}`; ids may contain slashes.
pub(crate) async fn model(
    State(app): State<Arc<App>>,
    headers: HeaderMap,
    path: Result<Path<String>, PathRejection>,
) -> Answer {
    match path {
        Ok(Path(id)) if id == app.config.served_model_name => {
            json(&match anthropic_models::is_asked(&headers) {
                true => anthropic_models::card(&app.config),
                false => model_card(&app.config),
            })
        }
        Ok(Path(id)) => refuse(&request::model_not_found(&id, &app.config)),
        Err(_) => refuse(&request::model_not_found("(not UTF-8)", &app.config)),
    }
}

fn model_card(config: &ApiConfig) -> Value {
    json!({
        "id": config.served_model_name,
        "object": "model",
        "created": config.created,
        "owned_by": "lockstep",
        "max_model_len": config.context_max,
    })
}

/// `GET /version`
pub(crate) async fn version(State(app): State<Arc<App>>) -> Answer {
    json(&json!({ "version": app.config.version }))
}

/// `GET /`
pub(crate) async fn root(State(app): State<Arc<App>>) -> Answer {
    json(&json!({
        "server": "lockstep",
        "version": app.config.version,
        "model": app.config.served_model_name,
        "endpoints": routes::listed(),
    }))
}

/// `GET /openapi.json`
pub(crate) async fn openapi(State(app): State<Arc<App>>) -> Answer {
    json(&document(&app.config))
}

/// `GET /server_info`: the state of the engine as rank 0 sees it now, and of the api.
pub(crate) async fn server_info(State(app): State<Arc<App>>) -> Answer {
    let infos = match app.engine.infos().await {
        Ok(infos) => infos,
        Err(refusal) => return refuse(&refusal),
    };
    let config = &app.config;
    json(&json!({
        "version": config.version,
        "model": config.served_model_name,
        "topology": config.topology,
        "engine": together(&infos),
        "stages": replicas::stages(&together(&infos)),
        "replicas": replicas::described(&app, &infos),
        "api": {
            "requests_open": app.engine.requests_open(),
            "requests_open_max": app.engine.requests_open_max(),
            "running_max": config.running_max,
            "body_bytes_max": config.body_bytes_max,
            "unknown_fields": app.policy.unknown(),
            "strict_api": config.strict_api,
            "chat_error": config.chat_error,
            "tool_call_parser": config.parsers.tools.map(ToolFormat::name),
            "reasoning_parser": config.parsers.reasoning.map(ReasoningFormat::name),
            "dp_policy": app.engine.policy().name(),
            "refusing": app.engine.refusing().map(|refusal| refusal.message),
        },
        "processes": config.processes.get(),
    }))
}

/// `GET /metrics`: gauges and counters in the Prometheus text format.
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Answer {
    match app.engine.infos().await {
        Ok(infos) => metrics::answer(Scrape {
            engine: together(&infos),
            infos,
            replicas: app.engine.replica_status(),
            requests_open: app.engine.requests_open(),
            statistics: app.engine.statistics(),
            http_errors: app.http_errors.clone(),
            traced: app.tracer.outcomes(),
            watched: app.config.watch.clone(),
            processes: app.config.processes.get(),
        }),
        Err(refusal) => refuse(&refusal),
    }
}

/// `POST /debug/flight`: every rank writes what its scheduler was told and decided lately to `--flight-dir`.
pub(crate) async fn write_flight(State(app): State<Arc<App>>) -> Answer {
    json_or_refusal(app.engine.write_flight().await.map(|files| json!({ "files": files })))
}

/// Any other path.
pub(crate) async fn not_found(method: Method, uri: Uri) -> Answer {
    let path = request::policy::shorten(uri.path());
    let message =
        format!("there is no endpoint {method} {path}; endpoints are {}", routes::listed().join(", "));
    refuse(&Refusal::with_status(404, "invalid_request_error", message).with_code("not_found"))
}

/// A known path with another method; axum adds the `Allow` header.
pub(crate) async fn method_not_allowed(method: Method, uri: Uri) -> Answer {
    let path = request::policy::shorten(uri.path());
    let message = format!("{path} does not take {method}; the Allow header lists what it takes");
    refuse(&Refusal::with_status(405, "invalid_request_error", message).with_code("method_not_allowed"))
}
