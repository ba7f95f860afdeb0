//! Endpoints for whoever runs the server: flush the prefix cache, abort requests, tell what is served; and the refusal of endpoints that need another kind of model.

use crate::ApiConfig;
use crate::body::read_object;
use crate::fields::Fields;
use crate::handlers::App;
use crate::openapi::native;
use crate::request::policy::shorten;
use crate::respond::{Answer, json, json_or_refusal, refuse};
use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, Uri};
use lockstep_core::Refusal;
use serde_json::{Value, json};
use std::sync::Arc;

/// Endpoints of OpenAI's and its kin's API that a generation model cannot serve, and what they need.
pub(crate) const UNSUPPORTED: &[(&str, &str)] = &[
    ("/v1/embeddings", "an embedding model"),
    ("/embeddings", "an embedding model"),
    ("/encode", "an embedding model"),
    ("/api/embed", "an embedding model"),
    ("/api/embeddings", "an embedding model"),
    ("/pooling", "a pooling model"),
    ("/classify", "a classification model"),
    ("/v1/rerank", "a reranking model"),
    ("/v2/rerank", "a reranking model"),
    ("/rerank", "a reranking model"),
    ("/v1/score", "a scoring model"),
    ("/score", "a scoring model"),
    ("/v1/moderations", "a moderation model"),
    ("/v1/audio/transcriptions", "a speech model"),
    ("/v1/audio/translations", "a speech model"),
    ("/v1/audio/speech", "a speech model"),
    ("/v1/images/generations", "an image model"),
    ("/v1/images/edits", "an image model"),
    ("/v1/images/variations", "an image model"),
];

/// Endpoints of Ollama's API that change which models there are.
pub(crate) const MANAGING: &[&str] = &["/api/pull", "/api/push", "/api/create", "/api/copy", "/api/delete"];

/// Any method on one of [`MANAGING`]
pub(crate) async fn unmanaged(State(app): State<Arc<App>>, uri: Uri) -> Answer {
    let model = shorten(&app.config.served_model_name);
    let message = format!(
        "{} manages models, but this server has the one it was started with, {model:?}; use `lockstep pull` and \
         start another server for another model",
        uri.path()
    );
    refuse(&Refusal::invalid(message).with_code("unsupported_endpoint"))
}

/// `POST` on one of [`UNSUPPORTED`]
pub(crate) async fn unsupported(State(app): State<Arc<App>>, uri: Uri) -> Answer {
    let path = uri.path();
    let known = UNSUPPORTED.iter().find(|(endpoint, _)| *endpoint == path);
    let needs = known.map_or("another kind of model", |(_, needs)| *needs);
    let model = shorten(&app.config.served_model_name);
    let message = format!(
        "{path} needs {needs}, but this server serves {model:?}, which generates text; use \
         /v1/chat/completions or /v1/completions here, or send this to a server with {needs}"
    );
    refuse(&Refusal::invalid(message).with_code("unsupported_endpoint"))
}

/// `POST /flush_cache`, `GET /flush_cache`: every rank forgets the cached prefixes that no request holds.
pub(crate) async fn flush_cache(State(app): State<Arc<App>>) -> Answer {
    json_or_refusal(flushed(&app).await)
}

async fn flushed(app: &App) -> Result<Value, Refusal> {
    let pages_flushed = app.engine.flush_cache().await?;
    let info = app.engine.info().await?;
    let message = match info.pages_held {
        0 => format!("{pages_flushed} cached pages are free again"),
        held => format!("{pages_flushed} cached pages are free again; {held} belong to requests and stay"),
    };
    Ok(json!({
        "status": "ok",
        "message": message,
        "pages_flushed": pages_flushed,
        "pages_held": info.pages_held,
        "pages_cached": info.pages_cached,
        "pages_free": info.pages_free,
    }))
}

/// `POST /abort_request`: `{"rid": "..."}` with the id of an answer or the one that the client gave its request,
/// or `{"abort_all": true}`. The clients of the aborted requests get their end.
pub(crate) async fn abort_request(State(app): State<Arc<App>>, request: Request<Body>) -> Answer {
    let aborted = aborted(&app, request).await;
    json_or_refusal(aborted.map(|count| json!({ "status": "ok", "requests_aborted": count })))
}

async fn aborted(app: &App, request: Request<Body>) -> Result<usize, Refusal> {
    let body = read_object(request, &app.config, &app.bodies).await?;
    app.policy.check(&native::ABORT, &body, app.config.strict_api)?;
    let fields = Fields::new(&body, "");
    let names = [fields.string("rid")?, fields.string("request_id")?];
    if fields.boolean("abort_all")? == Some(true) {
        return Ok(app.engine.abort(None));
    }
    let Some(name) = names.into_iter().flatten().find(|name| !name.is_empty()) else {
        return Err(fields.invalid("rid", "is required: the id of an answer, or abort_all: true"));
    };
    Ok(app.engine.abort(Some(name)))
}

/// `GET /get_model_info`, `GET /model_info`
pub(crate) async fn model_info(State(app): State<Arc<App>>) -> Answer {
    let ApiConfig { default_sampling: sampling, .. } = &app.config;
    json(&json!({
        "model_path": app.config.model_path,
        "tokenizer_path": app.config.model_path,
        "served_model_name": app.config.served_model_name,
        "is_generation": true,
        "context_length": app.config.context_max,
        "vocab_size": app.config.vocab_size,
        "has_chat_template": app.config.chat_error.is_none(),
        "has_image_understanding": false,
        "has_audio_understanding": false,
        "preferred_sampling_params": {
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
        },
    }))
}
