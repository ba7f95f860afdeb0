//! A text process: tokenizer, detokenizer, or both.

use lockstep_comm::link::{Context, Endpoint, LinkError, Receiver, Sender};
use lockstep_comm::watch::WatchPage;
use lockstep_core::ExitCode;
use lockstep_tokenizer::worker::{
    DetokenizerLinks, Reconnect, TokenizerLinks, WatchedInbox, run_detokenizer, run_shared, run_tokenizer,
};
use lockstep_tokenizer::{TextModel, TextOptions, TokenizerError};
use lockstep_wire::{Ready, Role, ToApi, ToDetokenizer, ToScheduler, ToTokenizer};
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use std::sync::Arc;

/// Messages that may wait for a receiver before the sender has to.
const QUEUE_LEN_MAX: i32 = 4096;
/// The same towards a replica's primary. More than the api lets be open: one that is stopped must not hold up what is
/// meant for others, until it is given up.
const SCHEDULER_QUEUE_LEN_MAX: i32 = 1 << 16;

/// What the launcher tells a text process.
#[derive(Debug, Serialize, Deserialize)]
pub struct TextConfig {
    /// Its part, for the acknowledgement.
    pub role: Role,
    /// What it does.
    pub duties: Duties,
    /// Model folder or GGUF file.
    pub model: PathBuf,
    /// `--chat-template`.
    pub chat_template: Option<PathBuf>,
    /// Prompts that leave no room in this context are refused before the scheduler sees them.
    pub context_max: usize,
    /// Rows of the model's embedding.
    pub vocab_size: usize,
    /// The inbox of each replica's primary.
    pub schedulers: Vec<Endpoint>,
    /// The api's inbox.
    pub api: Endpoint,
}

/// Which loops run in the process.
#[derive(Debug, Serialize, Deserialize)]
pub enum Duties {
    /// Text to ids.
    Tokenize {
        /// Requests from the api.
        inbox: Endpoint,
    },
    /// Ids to text.
    Detokenize {
        /// Tokens from the primaries.
        detokenizer: Endpoint,
    },
    /// Both (`--num-tokenizer 0`).
    Both {
        /// Requests from the api.
        inbox: Endpoint,
        /// Tokens from the primaries.
        detokenizer: Endpoint,
    },
}

/// Runs the process to its end; returns its exit code. Its loops show on `page` what they do, from mark `mark` on: the
/// tokenizer first.
pub fn run(config: &TextConfig, page: &WatchPage, mark: usize) -> i32 {
    match try_run(config, page, mark) {
        Ok(()) => ExitCode::Drained.code(),
        Err(error) => {
            tracing::error!("{error}");
            error.exit_code().code()
        }
    }
}

/// Why a text process ended.
#[derive(Debug, thiserror::Error)]
enum TextError {
    /// `--chat-template` names a file that is no template.
    #[error("{0}")]
    ChatTemplate(String),
    /// The model's text side, or a link.
    #[error(transparent)]
    Text(#[from] TokenizerError),
    /// A link.
    #[error(transparent)]
    Link(#[from] LinkError),
}

impl TextError {
    /// Whose fault it is: the flags, the model's files or the system.
    fn exit_code(&self) -> ExitCode {
        match self {
            TextError::ChatTemplate(_) => ExitCode::Flags,
            TextError::Link(_)
            | TextError::Text(
                TokenizerError::Link(_) | TokenizerError::Thread(_) | TokenizerError::Panicked(_),
            ) => ExitCode::Internal,
            TextError::Text(_) => ExitCode::ModelFiles,
        }
    }
}

fn try_run(config: &TextConfig, page: &WatchPage, mark: usize) -> Result<(), TextError> {
    let context = Context::new();
    // Bind before loading: messages that come early wait in the socket.
    let tokens = |endpoint, mark| {
        Receiver::<ToDetokenizer>::bind(&context, endpoint).map(|i| WatchedInbox::new(i, page.mark(mark)))
    };
    let requests = |endpoint, mark| {
        Receiver::<ToTokenizer>::bind(&context, endpoint).map(|i| WatchedInbox::new(i, page.mark(mark)))
    };
    let to_api = || Sender::<ToApi>::connect(&context, &config.api, QUEUE_LEN_MAX);
    let replicas = config.schedulers.len();
    match &config.duties {
        Duties::Tokenize { inbox } => {
            let links = tokenizer_links(config, &context, requests(inbox, mark)?)?;
            Ok(run_tokenizer(&load(config, &links.api)?, links)?)
        }
        Duties::Detokenize { detokenizer } => {
            let links = DetokenizerLinks { inbox: tokens(detokenizer, mark)?, replicas, api: to_api()? };
            Ok(run_detokenizer(&load(config, &links.api)?, links)?)
        }
        Duties::Both { inbox, detokenizer } => {
            let first = tokenizer_links(config, &context, requests(inbox, mark)?)?;
            let inbox = tokens(detokenizer, mark + 1)?;
            let second = DetokenizerLinks { inbox, replicas, api: to_api()? };
            let model = load(config, &first.api)?;
            Ok(run_shared(Arc::new(model), first, second)?)
        }
    }
}

/// The ways out of a tokenizer, also to replicas that are started later.
fn tokenizer_links<I>(
    config: &TextConfig,
    context: &Context,
    inbox: I,
) -> Result<TokenizerLinks<I, Sender<ToScheduler>, Sender<ToApi>>, LinkError> {
    let connect = |context: &Context, inbox: &Endpoint| {
        Sender::<ToScheduler>::connect(context, inbox, SCHEDULER_QUEUE_LEN_MAX)
    };
    let schedulers =
        config.schedulers.iter().map(|inbox| connect(context, inbox)).collect::<Result<_, _>>()?;
    let later = context.clone();
    let reconnect: Reconnect<_> = Box::new(move |inbox| Ok(connect(&later, &Endpoint(inbox.into()))?));
    let api = Sender::connect(context, &config.api, QUEUE_LEN_MAX)?;
    Ok(TokenizerLinks { inbox, schedulers, reconnect, api })
}

/// Loads the text model and acknowledges.
fn load(config: &TextConfig, api: &Sender<ToApi>) -> Result<TextModel, TextError> {
    let options = TextOptions {
        chat_template: config.chat_template.clone(),
        context_max: Some(config.context_max),
        vocab_size: Some(config.vocab_size),
    };
    let model = TextModel::load(&config.model, &options)?;
    if let (Some(file), Some(error)) = (&config.chat_template, model.chat_error()) {
        return Err(TextError::ChatTemplate(format!(
            "--chat-template {} cannot be used: {error}",
            file.display()
        )));
    }
    let chat_error = match config.duties {
        Duties::Detokenize { .. } => None,
        _ => model.chat_error().map(str::to_owned),
    };
    let ready = Ready { role: config.role, engine: None, chat_error };
    api.send(&ToApi::Ready(Box::new(ready)), std::time::Duration::from_secs(30))?;
    Ok(model)
}
