//! Bounds of request fields: what validation enforces and the documents state.

/// Choices per prompt.
pub(crate) const N_MAX: i128 = 128;
/// Above it every distribution is flat anyway.
pub(crate) const TEMPERATURE_MAX: f64 = 100.0;
/// Further end tokens of one request.
pub(crate) const STOP_TOKEN_IDS_MAX: usize = 256;
/// What OpenAI accepts for presence and frequency penalties.
pub(crate) const PENALTY_MAX: f64 = 2.0;
/// A repetition penalty below it leaves nothing of the model's distribution.
pub(crate) const REPETITION_MIN: f64 = 0.01;
/// As [`REPETITION_MIN`], above it.
pub(crate) const REPETITION_MAX: f64 = 10.0;
/// What OpenAI accepts for a bias.
pub(crate) const BIAS_MAX: f64 = 100.0;
/// Entries of `logit_bias` and of `allowed_token_ids`.
pub(crate) const TOKEN_RULES_MAX: usize = 65_536;
/// Words that an answer must not hold.
pub(crate) const BAD_WORDS_MAX: usize = 1024;
/// Bytes of one of them.
pub(crate) const BAD_WORD_BYTES_MAX: usize = 256;
/// Alternatives per token.
pub(crate) const TOP_LOGPROBS_MAX: i128 = 20;
/// Bytes of a client's own id of a request.
pub(crate) const RID_BYTES_MAX: usize = 256;
/// Bytes of a cache salt.
pub(crate) const CACHE_SALT_BYTES_MAX: usize = 256;
/// Priorities a client may ask for lie between its negative and it.
pub(crate) const PRIORITY_MAX: i128 = 1000;
/// Prompts of one request; each becomes a choice of the answer.
pub(crate) const PROMPTS_MAX: usize = 128;
/// Bytes of the requests that the choices of one answer are: each has its prompt and its rules.
pub(crate) const CHOICES_BYTES_MAX: usize = 64 << 20;
/// Texts that an answer may be chosen from.
pub(crate) const ALLOWED_CHOICES_MAX: usize = 1024;
/// Functions of one request, as OpenAI has it.
pub(crate) const TOOLS_MAX: usize = 128;
/// Characters of a function's name, as OpenAI has it.
pub(crate) const FUNCTION_NAME_LEN_MAX: usize = 64;
