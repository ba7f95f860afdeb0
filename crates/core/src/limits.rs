//! A limit on everything that a client, a file or a peer process can make large.

/// Largest HTTP request body in bytes; above it the answer is 413.
pub const HTTP_BODY_BYTES_MAX: usize = 32 << 20;
/// Largest control-plane message in bytes (a 1 M-token prompt is 4 MiB).
pub const WIRE_MESSAGE_BYTES_MAX: usize = 64 << 20;
/// Log-probabilities of its prompt that one request may ask for: its tokens, each with its alternatives and itself. With
/// their texts they take about half of a message.
pub const PROMPT_LOGPROBS_MAX: usize = 1 << 19;
/// Stop strings of one request (OpenAI allows 4; SGLang and vLLM clients send more).
pub const STOP_STRINGS_MAX: usize = 16;
/// Bytes of one stop string.
pub const STOP_STRING_BYTES_MAX: usize = 1024;
/// Largest tensor-parallel size the launcher accepts.
pub const TP_SIZE_MAX: usize = 64;
/// Largest page, in tokens.
pub const PAGE_SIZE_MAX: usize = 1024;
/// Largest JSON metadata file of a model (config.json, tokenizer.json, ...) in bytes.
pub const MODEL_JSON_BYTES_MAX: u64 = 256 << 20;
/// Largest file that a flag names and that is read whole (prompts, traces, recordings, keys, certificates, device
/// tables) in bytes.
pub const FLAG_FILE_BYTES_MAX: u64 = 256 << 20;
/// Largest safetensors header in bytes (the format's own limit).
pub const SAFETENSORS_HEADER_BYTES_MAX: u64 = 100 << 20;
/// Most layers a model file may claim (a 405B model: 126).
pub const MODEL_LAYERS_MAX: usize = 1 << 12;
/// Most experts of a layer that a model file may claim (a trillion-parameter model: 384).
pub const MODEL_EXPERTS_MAX: usize = 1 << 12;
/// Most experts of all layers together (a trillion-parameter model: 23,040); each has tensors of its own.
pub const MODEL_EXPERTS_TOTAL_MAX: usize = 1 << 17;
/// Most heads a model file may claim, and most elements of a head (a 405B model: 128 of each). With the other limits,
/// the bytes of a whole model fit 64 bits.
pub const MODEL_HEADS_MAX: usize = 1 << 12;
/// Widest residual stream or MLP that a model file may claim (a 405B model: 53,248).
pub const MODEL_WIDTH_MAX: usize = 1 << 20;
/// Largest vocabulary, context or window that a model file may claim.
pub const MODEL_TOKENS_MAX: usize = 1 << 28;
/// Leaves of the row-parallel summation tree; tp sizes that divide it are bit-equal.
pub const K_LEAVES: usize = 8;
/// Positions per attention summation segment, independent of the page size.
pub const ATTENTION_SEGMENT: usize = 64;
