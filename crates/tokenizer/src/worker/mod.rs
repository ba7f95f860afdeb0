//! The loops of the text processes: blocking, one thread per inbox, no shared state but the model.
//!
//! | process | loops |
//! |---|---|
//! | `lockstep-tokenizer-i` | [`run_tokenizer`] |
//! | `lockstep-detokenizer-0` | [`run_detokenizer`] |
//! | the shared worker (`--num-tokenizer 0`) | [`run_shared`]: both, in two threads |
//!
//! Two threads, because the inboxes are independent: a long prompt then never delays the text of
//! running requests. A third one, of the tokenizer, does the long prompts alone. The loops know their links only as [`Inbox`] and [`Outbox`], so that tests run
//! them without sockets.
//!
//! **Invariants:** every request that comes in is answered (submitted, or refused to the api), unless its
//! abort came first; every
//! per-request state ends with the request's finish, whatever the reason. A message that cannot be
//! decoded is logged and skipped; a link that cannot send ends the process with its error.

mod detokenizer;
mod encoder;
mod tokenizer;

pub use detokenizer::DetokenizerWorker;
pub use tokenizer::run_tokenizer;

use crate::error::TokenizerError;
use crate::model::TextModel;
use lockstep_comm::link::{LinkError, Receiver, Sender};
use lockstep_comm::watch::{Activity, BEAT_INTERVAL, Mark};
use lockstep_wire::{ToApi, ToDetokenizer, ToScheduler, ToTokenizer};
use serde::{Serialize, de::DeserializeOwned};
use std::sync::Arc;
use std::time::Duration;

/// How long a full queue may stay full before the worker gives up: its reader is then dead or stuck,
/// and the launcher should hear of it.
const SEND_PATIENCE: Duration = Duration::from_secs(30);

/// Where messages come from.
pub trait Inbox<T> {
    /// The next message; waits for it.
    fn recv(&self) -> Result<T, TokenizerError>;
    /// The next message, if one is there.
    fn try_recv(&self) -> Result<Option<T>, TokenizerError>;
}

/// Where messages go.
pub trait Outbox<T> {
    /// Queues a message; an error means that the receiver is gone.
    fn send(&self, message: &T) -> Result<(), TokenizerError>;
}

impl<T: DeserializeOwned> Inbox<T> for Receiver<T> {
    fn recv(&self) -> Result<T, TokenizerError> {
        loop {
            if let Some(message) = decodable(Receiver::recv(self, None))? {
                return Ok(message);
            }
        }
    }

    fn try_recv(&self) -> Result<Option<T>, TokenizerError> {
        decodable(Receiver::try_recv(self))
    }
}

/// An inbox whose loop shows on the watch page that it lives: each has a mark of its own, beats while it waits,
/// and is seen at a message from taking it to asking for the next.
#[derive(Debug)]
pub struct WatchedInbox<T> {
    inbox: Receiver<T>,
    mark: Mark,
}

impl<T> WatchedInbox<T> {
    /// Watches the loop that reads `inbox`.
    pub fn new(inbox: Receiver<T>, mark: Mark) -> Self {
        Self { inbox, mark }
    }
}

impl<T: DeserializeOwned> Inbox<T> for WatchedInbox<T> {
    fn recv(&self) -> Result<T, TokenizerError> {
        loop {
            self.mark.enter(Activity::Idle, 0);
            if let Some(message) = decodable(self.inbox.recv(Some(BEAT_INTERVAL)))? {
                self.mark.enter(Activity::Messages, 0);
                return Ok(message);
            }
        }
    }

    fn try_recv(&self) -> Result<Option<T>, TokenizerError> {
        self.mark.beat();
        decodable(self.inbox.try_recv())
    }
}

impl<T: Serialize> Outbox<T> for Sender<T> {
    fn send(&self, message: &T) -> Result<(), TokenizerError> {
        Ok(Sender::send(self, message, SEND_PATIENCE)?)
    }
}

/// Bytes that are no message come from a bug in another process; dropping them is worth a log line, not
/// the whole server.
fn decodable<T>(received: Result<Option<T>, LinkError>) -> Result<Option<T>, TokenizerError> {
    match received {
        Err(error @ LinkError::Wire { .. }) => {
            tracing::error!("{error}");
            Ok(None)
        }
        other => Ok(other?),
    }
}

/// Makes the way to a replica's new primary, whose inbox has this name.
pub type Reconnect<S> = Box<dyn Fn(&str) -> Result<S, TokenizerError> + Send>;

/// The links of a tokenizer.
pub struct TokenizerLinks<I, S, A> {
    /// From the api.
    pub inbox: I,
    /// To the primary of each replica.
    pub schedulers: Vec<S>,
    /// For a replica that is started again.
    pub reconnect: Reconnect<S>,
    /// To the api, for refusals and answers.
    pub api: A,
}

/// The links of a detokenizer.
pub struct DetokenizerLinks<I, A> {
    /// From the primaries of all replicas.
    pub inbox: I,
    /// How many replicas there are, each of which says when it ends.
    pub replicas: usize,
    /// To the api.
    pub api: A,
}

/// Detokenizes until every replica has sent its `Shutdown`; then everything received before is reported.
pub fn run_detokenizer<I, A>(model: &TextModel, links: DetokenizerLinks<I, A>) -> Result<(), TokenizerError>
where
    I: Inbox<ToDetokenizer>,
    A: Outbox<ToApi>,
{
    let mut worker = DetokenizerWorker::new(model);
    let mut speaking = links.replicas;
    loop {
        match links.inbox.recv()? {
            ToDetokenizer::Shutdown if speaking <= 1 => return Ok(()),
            ToDetokenizer::Shutdown => speaking -= 1,
            message => {
                if let Some(report) = worker.handle(message) {
                    links.api.send(&report)?;
                }
            }
        }
    }
}

/// Both loops in one process, until both have had their `Shutdown` or one fails.
///
/// A failing loop ends the whole call at once (the other thread is left to the process's end), so that
/// the launcher hears of it.
pub fn run_shared<I, S, A, J, B>(
    model: Arc<TextModel>,
    tokenizer: TokenizerLinks<I, S, A>,
    detokenizer: DetokenizerLinks<J, B>,
) -> Result<(), TokenizerError>
where
    I: Inbox<ToTokenizer> + Send + 'static,
    S: Outbox<ToScheduler> + Send + 'static,
    A: Outbox<ToApi> + Send + 'static,
    J: Inbox<ToDetokenizer> + Send + 'static,
    B: Outbox<ToApi> + Send + 'static,
{
    let (ended, ends) = std::sync::mpsc::channel();
    let spawn = |name: &'static str, body: Box<dyn FnOnce() -> Result<(), TokenizerError> + Send>| {
        let ended = ended.clone();
        std::thread::Builder::new().name(name.into()).spawn(move || {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body))
                .unwrap_or(Err(TokenizerError::Panicked(name)));
            // The receiver is gone only when the other loop failed first.
            let _ = ended.send(outcome);
        })
    };
    let shared = Arc::clone(&model);
    spawn("tokenizer", Box::new(move || run_tokenizer(&shared, tokenizer)))
        .map_err(TokenizerError::Thread)?;
    spawn("detokenizer", Box::new(move || run_detokenizer(&model, detokenizer)))
        .map_err(TokenizerError::Thread)?;
    for _ in 0..2 {
        ends.recv().expect("invariant: both threads send their outcome")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
