//! Messages to a tokenizer process.
//!
//! The api sends a request and, later, its abort to the *same* tokenizer, so that an abort can
//! never overtake its request.

use lockstep_core::{RequestId, SamplingParams, TokenId};
use serde::{Deserialize, Serialize};

/// What a tokenizer receives from the api.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToTokenizer {
    /// Tokenize a prompt and submit it to the primary of its replica.
    Generate(Box<GenerateRequest>),
    /// Forward an abort to the request's replica.
    Abort {
        /// The request.
        id: RequestId,
        /// Where it was sent.
        replica: usize,
    },
    /// A replica was started again: what follows for it goes to its new primary.
    ReplicaStarted {
        /// Which.
        replica: usize,
        /// The name of its primary's inbox.
        inbox: String,
    },
    /// Answer the api itself (`ToApi::TextAnswered` with the same number); rank 0 hears nothing of it.
    AskText {
        /// Echoed in the answer.
        query: u64,
        /// What to answer.
        question: Box<TextQuestion>,
    },
    /// Finish what is queued, then exit with code 0.
    Shutdown,
}

/// A validated request whose prompt is still text.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GenerateRequest {
    /// Its id everywhere.
    pub id: RequestId,
    /// The replica that is to answer it (`dp_rank`).
    pub replica: usize,
    /// What to continue.
    pub prompt: Prompt,
    /// What else the tokenizer is asked.
    pub tokenizing: TokenizeParams,
    /// How tokens are chosen.
    pub sampling: SamplingParams,
    /// How tokens become text.
    pub text: TextParams,
    /// Requests share cached prefixes only within one namespace.
    pub cache_salt: Option<String>,
    /// Larger runs earlier; 0 is normal.
    pub priority: i32,
}

/// What a tokenizer does for a request besides finding the tokens of its prompt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TokenizeParams {
    /// Add what the tokenizer's post-processor adds, mostly the beginning-of-text token. `None`: to a text, but
    /// not to a chat, whose template writes what the model wants. Token ids stay as they are.
    pub add_special_tokens: Option<bool>,
    /// Keep the last so many tokens of the prompt; at least 1.
    pub keep_last: Option<u32>,
    /// What the answer must not hold; goes on as [`SamplingParams::bad_words`].
    pub bad_words: Vec<String>,
    /// The request's field that asked for [`SamplingParams::grammar`], for refusals.
    pub grammar_field: String,
}

/// A prompt as the client sent it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Prompt {
    /// Text, tokenized with the model's own rules (beginning-of-text token included).
    Text(String),
    /// Token ids, taken as they are.
    Tokens(#[serde(with = "crate::token_bytes")] Vec<TokenId>),
    /// Messages for the model's chat template.
    Chat(ChatMessages),
}

impl Prompt {
    /// Bytes that it takes in a message, about.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Tokens(tokens) => size_of_val(&tokens[..]),
            Self::Chat(ChatMessages { messages_json, tools_json, template_kwargs_json, .. }) => {
                let further = tools_json.iter().chain(template_kwargs_json).map(String::len);
                messages_json.len() + further.sum::<usize>()
            }
        }
    }
}

/// What a tokenizer is asked without a request behind it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum TextQuestion {
    /// The tokens of a prompt, whether or not it fits the context.
    Tokenize {
        /// The prompt.
        prompt: Prompt,
        /// Add what the tokenizer's post-processor adds (mostly a beginning-of-text token).
        add_special_tokens: bool,
        /// Answer the vocabulary's spelling of each token as well.
        with_pieces: bool,
    },
    /// The text of tokens.
    Detokenize {
        /// The tokens.
        #[serde(with = "crate::token_bytes")]
        tokens: Vec<TokenId>,
        /// Leave out special tokens.
        skip_special_tokens: bool,
    },
}

/// The input of a chat template. The fields are JSON text (not values), so that key order and
/// number spelling survive the journey.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatMessages {
    /// A JSON list of messages, content parts already joined.
    pub messages_json: String,
    /// A JSON list of tools, if any.
    pub tools_json: Option<String>,
    /// A JSON object of further template variables, if any.
    pub template_kwargs_json: Option<String>,
    /// Append the opening of an assistant turn.
    pub add_generation_prompt: bool,
}

/// How the detokenizer turns tokens into text, and what else it reports.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TextParams {
    /// The text ends before the earliest of these.
    pub stop: Vec<String>,
    /// A stop string counts only where a later token than the first so many completes it.
    pub min_tokens: u32,
    /// The text ends behind it instead, and shows the token that ended the answer if tokens of its kind are shown.
    pub keeps_stop: bool,
    /// Leave out special tokens (by id, never by text). Default true.
    pub skip_special_tokens: bool,
    /// The text goes on with the prompt's, which is reported before it ([`Delta::echo`](crate::Delta)), with
    /// log-probabilities if the prompt's were asked for.
    pub echo: bool,
    /// Report the prompt's tokens, with log-probabilities if they were asked for.
    pub prompt_tokens: bool,
    /// Report where the request's time went ([`Delta::timing`](crate::Delta)).
    pub timing: bool,
}

impl TextParams {
    /// Whether the prompt comes back in some form.
    pub fn reports_prompt(&self) -> bool {
        self.echo || self.prompt_tokens
    }
}
