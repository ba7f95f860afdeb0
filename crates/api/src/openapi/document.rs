//! The OpenAPI 3.1 document of a server, `/openapi.json`.

use super::answers;
use super::operations::{path_in_document, request_schemas};
use crate::ApiConfig;
use crate::routes::ROUTES;
use serde_json::{Map, Value, json};

/// The document. It names the served model, so it differs between servers in that and the version.
pub(crate) fn document(config: &ApiConfig) -> Value {
    let mut paths: Map<String, Value> = Map::new();
    for route in ROUTES {
        let methods = paths.entry(path_in_document(route.path)).or_insert_with(|| json!({}));
        methods[route.operation.method] = route.operation.document(route.path);
    }
    let mut schemas = request_schemas(ROUTES.iter().map(|route| &route.operation));
    schemas.extend(answers::schemas(&config.served_model_name));
    let error = |schema: &str| {
        json!({
            "description": "The request was refused or failed. 429 and 503 carry Retry-After.",
            "content": {"application/json": {"schema": {"$ref": format!("#/components/schemas/{schema}")}}},
        })
    };
    let responses: Map<String, Value> = ["Error", "AnthropicError", "OllamaError"]
        .map(|name| (name.to_owned(), error(name)))
        .into_iter()
        .collect();
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Lockstep",
            "version": config.version,
            "description": "The HTTP API of a Lockstep server. In requests null means absent, unknown fields are \
                accepted (refused with --strict-api), and integers may be written 5.0.",
        },
        "paths": paths,
        "components": {
            "schemas": schemas,
            "responses": responses,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        // A server that was started without keys asks for none.
        "security": [{}, {"key": []}],
    })
}
