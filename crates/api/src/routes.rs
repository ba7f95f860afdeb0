//! The endpoints: path, handler, and what documents say of them. The router is made from this list, and so are
//! `/openapi.json`, the endpoints table of `docs/api.md` and the list in `/`: an endpoint is in all or in none.

use crate::dialect::{Chat, Completions, Dialect, Messages, Responses, SglangGenerate, count_tokens, ollama};
use crate::handlers::{self, App};
use crate::openapi::operations::{Answers, Operation};
use crate::openapi::{anthropic, native, ollama as ollama_fields};
use crate::{health, operations, replicas, text, trace};
use axum::Router;
use axum::routing::{MethodRouter, get, post};
use std::sync::Arc;

/// An endpoint.
pub(crate) struct Route {
    /// As the router spells it.
    pub(crate) path: &'static str,
    /// The handler of its method.
    handler: fn() -> MethodRouter<Arc<App>>,
    /// What it takes and gives.
    pub(crate) operation: Operation,
}

/// A row of [`ROUTES`].
const fn route(path: &'static str, handler: fn() -> MethodRouter<Arc<App>>, operation: Operation) -> Route {
    Route { path, handler, operation }
}

/// Every endpoint, in the order of the documents.
pub(crate) const ROUTES: &[Route] = &[
    route(
        "/v1/chat/completions",
        || post(handlers::generate::<Chat>),
        Operation::generate(
            Chat::FIELDS,
            Answers::WholeOrStream("ChatCompletion", "ChatCompletionChunk"),
            "OpenAI chat completion, whole or streamed",
        ),
    ),
    route(
        "/v1/completions",
        || post(handlers::generate::<Completions>),
        Operation::generate(
            Completions::FIELDS,
            Answers::WholeOrStream("Completion", "CompletionChunk"),
            "OpenAI text completion, whole or streamed",
        ),
    ),
    route(
        "/v1/responses",
        || post(handlers::generate::<Responses>),
        Operation::generate(
            Responses::FIELDS,
            Answers::WholeOrStream("Response", "ResponseEvent"),
            "OpenAI response, whole or streamed; nothing is kept (see \"Responses\")",
        ),
    ),
    route(
        "/v1/messages",
        || post(handlers::generate::<Messages>),
        Operation::generate(
            Messages::FIELDS,
            Answers::WholeOrStream("AnthropicMessage", "AnthropicEvent"),
            "Anthropic message, whole or streamed",
        ),
    ),
    route(
        "/v1/messages/count_tokens",
        || post(count_tokens),
        Operation::post(
            anthropic::COUNT_TOKENS,
            "AnthropicCount",
            "`{\"input_tokens\": n}`: the tokens of a conversation, tools and template included",
        ),
    ),
    route(
        "/generate",
        || post(handlers::generate::<SglangGenerate>),
        Operation::generate(
            SglangGenerate::FIELDS,
            Answers::WholeOrStream("GenerateAnswer", "GeneratedItem"),
            "SGLang's native completion, whole or streamed",
        ),
    ),
    route(
        "/api/chat",
        || post(handlers::generate::<ollama::Chat>),
        Operation::generate(
            ollama::Chat::FIELDS,
            Answers::WholeOrLines("OllamaChat", "OllamaChat"),
            "Ollama chat, streamed unless `stream` is false",
        ),
    ),
    route(
        "/api/generate",
        || post(handlers::generate::<ollama::Generate>),
        Operation::generate(
            ollama::Generate::FIELDS,
            Answers::WholeOrLines("OllamaGenerated", "OllamaGenerated"),
            "Ollama completion, streamed unless `stream` is false",
        ),
    ),
    route(
        "/api/tags",
        || get(ollama::tags),
        Operation::get("OllamaModels", "the served model, as Ollama lists it"),
    ),
    route(
        "/api/ps",
        || get(ollama::ps),
        Operation::get("OllamaModels", "the served model, which is always loaded"),
    ),
    route(
        "/api/show",
        || post(ollama::show),
        Operation::post(
            ollama_fields::SHOW,
            "OllamaModel",
            "what the served model can do, as Ollama tells it",
        ),
    ),
    route("/api/version", || get(ollama::version), Operation::get("OllamaVersion", "as `/version`")),
    route(
        "/v1/models",
        || get(handlers::models),
        Operation::get(
            "ModelList",
            "the served model; `max_model_len` is the context limit that is enforced (prompt + answer, tokens). With the \
             header `anthropic-version` in Anthropic's form",
        ),
    ),
    route(
        "/v1/models/{*id}",
        || get(handlers::model),
        Operation::get(
            "Model",
            "the same entry; another id is 404 `model_not_found`. The id may contain slashes, plain or as `%2F`",
        ),
    ),
    route("/get_model_info", || get(operations::model_info), Operation::get("ModelInfo", MODEL_INFO)),
    route("/model_info", || get(operations::model_info), Operation::get("ModelInfo", "as `/get_model_info`")),
    route("/tokenize", || post(text::tokenize), Operation::post(native::TOKENIZE, "Tokens", TOKENIZE)),
    route(
        "/v1/tokenize",
        || post(text::tokenize),
        Operation::post(native::TOKENIZE, "Tokens", "as `/tokenize`"),
    ),
    route(
        "/detokenize",
        || post(text::detokenize),
        Operation::post(native::DETOKENIZE, "Detokenized", DETOKENIZE),
    ),
    route(
        "/v1/detokenize",
        || post(text::detokenize),
        Operation::post(native::DETOKENIZE, "Detokenized", "as `/detokenize`"),
    ),
    route(
        "/health",
        || get(health::health),
        Operation::get(
            "Health",
            "200 `{\"status\":\"ok\"}`; 503 with the reason while the server drains, after the engine was lost, and \
             while a process does not answer",
        ),
    ),
    route(
        "/health/live",
        || get(health::live),
        Operation::get("Health", "200 as long as the server can answer at all, also while it drains"),
    ),
    route("/health/ready", || get(health::ready), Operation::get("Ready", HEALTH_READY)),
    route("/health_generate", || get(health::generate), Operation::get("Generated", HEALTH_GENERATE)),
    route("/version", || get(handlers::version), Operation::get("Version", "`{\"version\": ...}`")),
    route(
        "/metrics",
        || get(handlers::metrics),
        Operation {
            method: "get",
            body: None,
            answer: Answers::Text("application/openmetrics-text"),
            summary: "OpenMetrics text for Prometheus: what clients get (ends, times and sizes of requests), the \
                scheduler, the pool, where each rank's time goes, memory of processes; listed in `docs/operations.md`, \
                \"Metrics\" (503 if rank 0 does not answer within 5 s)",
        },
    ),
    route("/flush_cache", || post(operations::flush_cache), FLUSH_CACHE),
    route("/flush_cache", || get(operations::flush_cache), Operation { method: "get", ..FLUSH_CACHE }),
    route(
        "/abort_request",
        || post(operations::abort_request),
        Operation::post(native::ABORT, "Aborted", ABORT_REQUEST),
    ),
    route(
        "/drain_replica",
        || post(replicas::drain),
        Operation::post(native::REPLICA, "ReplicaState", DRAIN_REPLICA),
    ),
    route(
        "/resume_replica",
        || post(replicas::resume),
        Operation::post(native::REPLICA, "ReplicaState", "undoes `/drain_replica`"),
    ),
    route(
        "/debug/flight",
        || post(handlers::write_flight),
        Operation {
            method: "post",
            body: None,
            answer: Answers::Json("FlightFiles"),
            summary: "every rank writes its flight recorder (`docs/simulation.md`); `{\"files\": [one per rank]}`; \
                400 without `--flight-dir`",
        },
    ),
    route("/debug/trace", || get(trace::trace), Operation::get("Trace", DEBUG_TRACE)),
    route(
        "/server_info",
        || get(handlers::server_info),
        Operation::get(
            "ServerInfo",
            "`engine`: pages free, cached, held; running, waiting, draining, totals since start, ranks with pid, \
             device and memory, notes about slower paths, asked from rank 0 at that moment (503 if it does not \
             answer within 5 s). `api`: open requests and their limit, unknown fields seen. `processes`: names and \
             pids",
        ),
    ),
    route(
        "/get_server_info",
        || get(handlers::server_info),
        Operation::get("ServerInfo", "as `/server_info`"),
    ),
    route(
        "/openapi.json",
        || get(handlers::openapi),
        Operation::get(
            "OpenApi",
            "the OpenAPI 3.1 document of all this, made from the tables that validation uses",
        ),
    ),
    route(
        "/",
        || get(handlers::root),
        Operation::get("Root", "name, version, model and the list of endpoints"),
    ),
];

const MODEL_INFO: &str =
    "what is served, in SGLang's words: paths, context, vocabulary, the model's own sampling";
const TOKENIZE: &str = "the tokens of a prompt or a chat, from a tokenizer process; see \"Tokens and text\"";
const DETOKENIZE: &str = "the text of tokens, as `prompt` (vLLM's name) and `text` (SGLang's)";
const HEALTH_GENERATE: &str = "generates one token on all ranks, in front of waiting requests: 200 with `generate_ms`, \
    or 503 with the reason: refused, or nothing within 20 s";
const DEBUG_TRACE: &str = "what every rank, tokenizer and detokenizer does for the next `?seconds=5` (at most 60), with the \
    arrival and departure of each rank at each collective, and in a pipeline what each stage's device computed \
    (`otherData.stages` has their bubbles), as a trace for Perfetto or `chrome://tracing`";
const HEALTH_READY: &str = "200 `{\"status\":\"ready\",\"token_age_seconds\":s}` if a token went round every rank within \
    the last 10 s, or one does within 2 s now; else 503 as `/health`, or with what did not come";
const DRAIN_REPLICA: &str = "sends no further request to one replica (`docs/parallelism.md`); those that it has go on. \
    `state` is `draining`, then `drained` once none is open";
const ABORT_REQUEST: &str =
    "ends an answer by the `id` that its client saw, or all; see \"Running the server\"";
const FLUSH_CACHE: Operation = Operation {
    method: "post",
    body: None,
    answer: Answers::Json("Flushed"),
    summary: "every rank forgets the cached prefixes that no request holds, also while requests run: \
        `pages_flushed`, and what is held, cached and free after it",
};

/// The router of [`ROUTES`].
pub(crate) fn router() -> Router<Arc<App>> {
    ROUTES.iter().fold(Router::new(), |router, route| router.route(route.path, (route.handler)()))
}

/// What `/` and the 404 list: the paths that take no parameter.
pub(crate) fn listed() -> Vec<&'static str> {
    let paths = ROUTES.iter().map(|route| route.path);
    let mut listed: Vec<&str> = paths.filter(|path| *path != "/" && !path.contains('{')).collect();
    listed.dedup();
    listed
}
