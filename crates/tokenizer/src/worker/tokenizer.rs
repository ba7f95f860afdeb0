//! One tokenizer: requests from the api to rank 0.

use super::{Inbox, Outbox, TokenizerLinks};
use crate::error::TokenizerError;
use crate::model::TextModel;
use lockstep_core::{Refusal, RequestId};
use lockstep_wire::{GenerateRequest, SubmitRequest, ToApi, ToScheduler, ToTokenizer};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Messages taken in before each prompt, so that a flood of them cannot hold up the prompts.
const TAKE_IN_MAX: usize = 4096;

/// Requests waiting to be tokenized, and the rule of their order.
///
/// Requests are tokenized in order of arrival. All waiting messages are taken in before each one, so an
/// abort waits for one prompt at most: of a request that was not tokenized yet it removes the request
/// (rank 0 never hears of it), otherwise it goes on at once.
pub struct TokenizerWorker<'m> {
    model: &'m TextModel,
    waiting: VecDeque<Box<GenerateRequest>>,
    is_shutting_down: bool,
}

impl<'m> TokenizerWorker<'m> {
    /// A worker with nothing to do.
    pub fn new(model: &'m TextModel) -> Self {
        Self { model, waiting: VecDeque::new(), is_shutting_down: false }
    }

    /// Takes in what has come, tokenizes one request; waits when there is nothing. False when shut down
    /// and done.
    pub(super) fn step<I, S, A>(&mut self, links: &TokenizerLinks<I, S, A>) -> Result<bool, TokenizerError>
    where
        I: Inbox<ToTokenizer>,
        S: Outbox<ToScheduler>,
        A: Outbox<ToApi>,
    {
        if self.waiting.is_empty() {
            if self.is_shutting_down {
                return Ok(false);
            }
            let message = links.inbox.recv()?;
            self.take_in(message, links)?;
        }
        for _ in 0..TAKE_IN_MAX {
            let Some(message) = links.inbox.try_recv()? else { break };
            self.take_in(message, links)?;
        }
        if let Some(request) = self.waiting.pop_front() {
            match self.tokenize(*request) {
                Ok(submit) => links.scheduler.send(&ToScheduler::Submit(Box::new(submit)))?,
                Err(refused) => links.api.send(&refused)?,
            }
        }
        Ok(true)
    }

    fn take_in<I, S, A>(
        &mut self,
        message: ToTokenizer,
        links: &TokenizerLinks<I, S, A>,
    ) -> Result<(), TokenizerError>
    where
        S: Outbox<ToScheduler>,
    {
        match message {
            ToTokenizer::Generate(request) => self.waiting.push_back(request),
            ToTokenizer::Abort(id) => {
                if !self.remove(id) {
                    links.scheduler.send(&ToScheduler::Abort(id))?;
                }
            }
            ToTokenizer::Shutdown => self.is_shutting_down = true,
        }
        Ok(())
    }

    fn remove(&mut self, id: RequestId) -> bool {
        let at = self.waiting.iter().position(|request| request.id == id);
        at.and_then(|at| self.waiting.remove(at)).is_some()
    }

    /// The submission to rank 0, or the refusal to the api.
    fn tokenize(&self, request: GenerateRequest) -> Result<SubmitRequest, ToApi> {
        let GenerateRequest { id, prompt, sampling, text, cache_salt, priority } = request;
        // A text that makes a library panic must cost its own request only, not the server.
        let encoded =
            catch_unwind(AssertUnwindSafe(|| self.model.encode_prompt(&prompt))).unwrap_or_else(|_| {
                tracing::error!("the tokenizer panicked on the prompt of request {id}");
                Err(Refusal::internal(
                    "the tokenizer failed on this prompt; this is a bug of the server, please report it",
                ))
            });
        match encoded {
            Ok(prompt) => Ok(SubmitRequest { id, prompt, sampling, text, cache_salt, priority }),
            Err(refusal) => Err(ToApi::Refused { id, refusal }),
        }
    }
}
