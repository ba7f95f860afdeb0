//! What Ollama's clients ask about models: the one that is served.

use crate::ApiConfig;
use crate::body::read_object;
use crate::clock::rfc3339;
use crate::fields::Fields;
use crate::handlers::App;
use crate::openapi::ollama;
use crate::request;
use crate::respond::{Answer, json, json_or_refusal};
use axum::body::Body;
use axum::extract::State;
use axum::http::Request;
use lockstep_core::Refusal;
use serde_json::{Map, Value, json};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

/// `GET /api/version`
pub(crate) async fn version(State(app): State<Arc<App>>) -> Answer {
    json(&json!({ "version": app.config.version }))
}

/// `GET /api/tags`
pub(crate) async fn tags(State(app): State<Arc<App>>) -> Answer {
    json_or_refusal(card(&app).await.map(|mut card| {
        card.insert("modified_at".into(), created(&app.config).into());
        json!({ "models": [card] })
    }))
}

/// `GET /api/ps`: the served model is always loaded.
pub(crate) async fn ps(State(app): State<Arc<App>>) -> Answer {
    json_or_refusal(card(&app).await.map(|mut card| {
        let size = card.get("size").cloned().unwrap_or_default();
        card.insert("size_vram".into(), size);
        card.insert("expires_at".into(), NEVER.into());
        card.insert("context_length".into(), app.config.context_max.into());
        json!({ "models": [card] })
    }))
}

/// When the served model is unloaded, as far as clients may know.
const NEVER: &str = "9999-12-31T23:59:59Z";

/// `POST /api/show`
pub(crate) async fn show(State(app): State<Arc<App>>, request: Request<Body>) -> Answer {
    json_or_refusal(shown(&app, request).await)
}

async fn shown(app: &App, request: Request<Body>) -> Result<Value, Refusal> {
    let body = read_object(request, &app.config, &app.bodies).await?;
    let config = &app.config;
    app.policy.check(&ollama::SHOW, &body, config.strict_api)?;
    let fields = Fields::new(&body, "");
    let Some(name) = fields.string("model")?.or(fields.string("name")?) else {
        return Err(fields.invalid("model", "is required: the model's name"));
    };
    if !super::translate::is_served(name, config) {
        return Err(request::model_not_found(name, config));
    }
    let mut capabilities = vec!["completion"];
    capabilities.extend(config.parsers.tools.filter(|_| config.chat_error.is_none()).map(|_| "tools"));
    capabilities.extend(config.parsers.reasoning.map(|_| "thinking"));
    let sampling = &config.default_sampling;
    let parameters: Vec<String> = [
        ("temperature", sampling.temperature.map(|value| value.to_string())),
        ("top_k", sampling.top_k.map(|value| value.to_string())),
        ("top_p", sampling.top_p.map(|value| value.to_string())),
        ("min_p", sampling.min_p.map(|value| value.to_string())),
    ]
    .into_iter()
    .filter_map(|(name, value)| value.map(|value| format!("{name} {value}")))
    .collect();
    let architecture = family(config);
    // Without the template, which is no Go template that Ollama could read.
    let modelfile = std::iter::once(format!("FROM {}", config.served_model_name))
        .chain(parameters.iter().map(|parameter| format!("PARAMETER {parameter}")));
    Ok(json!({
        "modelfile": modelfile.collect::<Vec<_>>().join("\n"),
        "parameters": parameters.join("\n"),
        "template": config.chat_template.as_deref().unwrap_or_default(),
        "details": details(config),
        "model_info": {
            "general.architecture": architecture,
            format!("{architecture}.context_length"): config.context_max,
            format!("{architecture}.vocab_size"): config.vocab_size,
        },
        "capabilities": capabilities,
        "modified_at": created(config),
    }))
}

/// What `/api/tags` and `/api/ps` have in common.
async fn card(app: &App) -> Result<Map<String, Value>, Refusal> {
    let info = app.engine.info().await?;
    let size: u64 = info.ranks.iter().map(|rank| rank.weight_bytes).sum();
    let name = &app.config.served_model_name;
    let card = json!({
        "name": name,
        "model": name,
        "size": size,
        "digest": app.config.model_digest.as_deref().unwrap_or_default(),
        "details": details(&app.config),
    });
    match card {
        Value::Object(map) => Ok(map),
        _ => Ok(Map::new()),
    }
}

/// The architecture as Ollama's clients know it, which is GGUF's name of it: `Qwen3MoeForCausalLM` is `qwen3moe`.
fn family(config: &ApiConfig) -> String {
    config.architecture.trim_end_matches("ForCausalLM").to_ascii_lowercase()
}

fn details(config: &ApiConfig) -> Value {
    let is_gguf = config.model_path.to_ascii_lowercase().ends_with(".gguf");
    let family = family(config);
    json!({
        "parent_model": "",
        "format": if is_gguf { "gguf" } else { "safetensors" },
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    })
}

fn created(config: &ApiConfig) -> String {
    rfc3339(UNIX_EPOCH + Duration::from_secs(config.created))
}
