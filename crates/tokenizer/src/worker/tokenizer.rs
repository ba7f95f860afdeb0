//! One tokenizer: requests from the api to rank 0.

use super::{Inbox, Outbox, TokenizerLinks};
use crate::error::TokenizerError;
use crate::model::TextModel;
use lockstep_core::{Grammar, Refusal, RequestId, TokenId};
use lockstep_grammar::{Checker, GrammarError};
use lockstep_wire::{
    GenerateRequest, Prompt, SubmitRequest, ToApi, ToScheduler, ToTokenizer, TokenizeParams,
};
use std::cell::OnceCell;
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
    /// The request before this one, while the next one wants the same: choices of one prompt are tokenized
    /// and checked once.
    last: Option<Checked>,
    /// Built at the first grammar.
    checker: OnceCell<Result<Checker, GrammarError>>,
    is_vocabulary_sent: bool,
}

/// A prompt and a grammar that are fine, and what came of them.
struct Checked {
    prompt: Prompt,
    tokenizing: TokenizeParams,
    grammar: Option<Grammar>,
    found: Found,
}

/// What the tokenizer says of a request.
#[derive(Clone)]
struct Found {
    prompt: Vec<TokenId>,
    bad_words: Vec<Vec<TokenId>>,
}

impl Checked {
    fn is_of(&self, request: &GenerateRequest) -> bool {
        self.prompt == request.prompt
            && self.tokenizing == request.tokenizing
            && self.grammar == request.sampling.grammar
    }
}

impl<'m> TokenizerWorker<'m> {
    /// A worker with nothing to do.
    pub fn new(model: &'m TextModel) -> Self {
        Self {
            model,
            waiting: VecDeque::new(),
            is_shutting_down: false,
            last: None,
            checker: OnceCell::new(),
            is_vocabulary_sent: false,
        }
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
                Ok(submit) => {
                    if submit.sampling.grammar.is_some() && !self.is_vocabulary_sent {
                        self.is_vocabulary_sent = true;
                        links.scheduler.send(&ToScheduler::Vocabulary(Box::new(self.model.vocabulary())))?;
                    }
                    links.scheduler.send(&ToScheduler::Submit(Box::new(submit)))?;
                }
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
    fn tokenize(&mut self, request: GenerateRequest) -> Result<SubmitRequest, ToApi> {
        let known = self.last.take().filter(|last| last.is_of(&request));
        let checked = match known {
            Some(checked) => Ok(checked.found),
            None => self.check(&request),
        };
        let GenerateRequest { id, prompt, tokenizing, mut sampling, text, cache_salt, priority } = request;
        let found = checked.map_err(|refusal| ToApi::Refused { id, refusal })?;
        let checked = Checked { prompt, tokenizing, grammar: sampling.grammar.clone(), found: found.clone() };
        self.last = self.waiting.front().is_some_and(|next| checked.is_of(next)).then_some(checked);
        sampling.bad_words = found.bad_words;
        Ok(SubmitRequest { id, prompt: found.prompt, sampling, text, cache_salt, priority })
    }

    /// The tokens of a request, once its grammar is known to be fine as well.
    fn check(&self, request: &GenerateRequest) -> Result<Found, Refusal> {
        if let Some(grammar) = &request.sampling.grammar {
            self.check_grammar(grammar, &request.tokenizing.grammar_field)?;
        }
        // A text that makes a library panic must cost its own request only, not the server.
        let encode = || {
            let prompt = self.model.encode_prompt_as(&request.prompt, &request.tokenizing)?;
            let bad_words = self.model.encode_words(&request.tokenizing.bad_words)?;
            Ok(Found { prompt, bad_words })
        };
        catch_unwind(AssertUnwindSafe(encode)).unwrap_or_else(|_| {
            tracing::error!("the tokenizer panicked on the prompt of request {}", request.id);
            Err(Refusal::internal(
                "the tokenizer failed on this prompt; this is a bug of the server, please report it",
            ))
        })
    }

    /// Refusals name `field`.
    fn check_grammar(&self, grammar: &Grammar, field: &str) -> Result<(), Refusal> {
        let checker = self.checker.get_or_init(|| Checker::new(&self.model.vocabulary()));
        let checked = checker.as_ref().map_err(Clone::clone).and_then(|checker| checker.check(grammar));
        checked.map_err(|error| {
            let message = format!("{field} asks for a form of the answer that cannot be enforced: {error}");
            Refusal::invalid_param(field, message).with_code("invalid_grammar")
        })
    }
}
