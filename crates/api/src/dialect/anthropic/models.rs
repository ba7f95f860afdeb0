//! What Anthropic's clients ask about models: `GET /v1/models` with the header that they all send.

use crate::ApiConfig;
use crate::clock::rfc3339_seconds;
use axum::http::HeaderMap;
use serde_json::{Value, json};

/// Whether the request comes from such a client.
pub(crate) fn is_asked(headers: &HeaderMap) -> bool {
    headers.contains_key("anthropic-version")
}

/// The served model.
pub(crate) fn card(config: &ApiConfig) -> Value {
    json!({
        "type": "model",
        "id": config.served_model_name,
        "display_name": config.served_model_name,
        "created_at": rfc3339_seconds(config.created),
    })
}

/// The list of models: one page with one entry, whatever page is asked for.
pub(crate) fn list(config: &ApiConfig) -> Value {
    let id = &config.served_model_name;
    json!({"data": [card(config)], "has_more": false, "first_id": id, "last_id": id})
}
