//! Endpoints for whoever runs the server: flush the prefix cache, abort requests, prove that the ranks generate,
//! tell what is served; and the refusal of endpoints that need another kind of model.

use crate::ApiConfig;
use crate::body::read_object;
use crate::engine::{Event, NewRequest};
use crate::fields::Fields;
use crate::handlers::App;
use crate::openapi::native;
use crate::request::policy::shorten;
use crate::respond::{Answer, json, json_or_refusal, refuse};
use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, Uri};
use lockstep_core::{Refusal, SamplingParams};
use lockstep_wire::{Prompt, TextParams, TokenizeParams};
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// How long the token of a health check may take; one that waits behind long prompts needs a while.
const HEALTH_PATIENCE: Duration = Duration::from_secs(20);
/// Any token that every vocabulary has.
const HEALTH_PROMPT: u32 = 0;
/// In front of everything that clients may ask for.
const HEALTH_PRIORITY: i32 = i32::MAX;

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

/// `GET /health_generate`: 200 once all ranks together have generated a token, else 503 with the reason.
pub(crate) async fn health_generate(State(app): State<Arc<App>>) -> Answer {
    let started = Instant::now();
    match tokio::time::timeout(HEALTH_PATIENCE, generate_one(&app)).await {
        Ok(Ok(())) => json(&json!({ "status": "ok", "generate_ms": started.elapsed().as_secs_f64() * 1e3 })),
        Ok(Err(refusal)) => {
            let message = format!("the engine cannot generate: {}", refusal.message);
            refuse(&Refusal { message, ..Refusal::unavailable("") })
        }
        Err(_) => refuse(&Refusal::unavailable(format!(
            "no token came within {} s; {} requests are open, so the engine is overloaded or stuck",
            HEALTH_PATIENCE.as_secs(),
            app.engine.requests_open()
        ))),
    }
}

/// Generates one token; leaving early aborts it.
async fn generate_one(app: &App) -> Result<(), Refusal> {
    let request = NewRequest {
        prompt: Prompt::Tokens(vec![HEALTH_PROMPT]),
        tokenizing: TokenizeParams::default(),
        sampling: SamplingParams { max_tokens: Some(1), ignore_eos: true, ..SamplingParams::default() },
        text: TextParams::default(),
        cache_salt: None,
        priority: HEALTH_PRIORITY,
    };
    let mut generation = app.engine.submit(vec![request], 1)?;
    loop {
        match generation.next().await {
            (_, Event::Refused(refusal)) => return Err(refusal),
            (_, Event::Delta(delta)) if delta.finish.is_some() => return Ok(()),
            (_, Event::Delta(_)) => {}
        }
    }
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
