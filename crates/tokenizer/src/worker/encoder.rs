//! What a lane does with one job: a request becomes a submission or a refusal, a question its answer.

use crate::model::TextModel;
use lockstep_core::{Grammar, Refusal, TokenId};
use lockstep_grammar::{Checker, GrammarError};
use lockstep_wire::{
    GenerateRequest, Prompt, SubmitRequest, TextAnswer, TextQuestion, TokenizeParams, Tokenized,
};
use std::cell::OnceCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// One lane's memory.
pub(super) struct Encoder<'m> {
    model: &'m TextModel,
    /// The request before this one: choices of one prompt are tokenized and checked once.
    last: Option<Checked>,
    /// Built at the first grammar.
    checker: OnceCell<Result<Checker, GrammarError>>,
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

impl<'m> Encoder<'m> {
    /// An encoder that has seen nothing.
    pub(super) fn new(model: &'m TextModel) -> Self {
        Self { model, last: None, checker: OnceCell::new() }
    }

    /// The submission of a request to rank 0.
    pub(super) fn submission(&mut self, request: GenerateRequest) -> Result<SubmitRequest, Refusal> {
        let known = self.last.take().filter(|last| last.is_of(&request));
        let found = match known {
            Some(checked) => checked.found,
            None => self.check(&request)?,
        };
        let GenerateRequest { id, prompt, tokenizing, mut sampling, text, cache_salt, priority } = request;
        self.last =
            Some(Checked { prompt, tokenizing, grammar: sampling.grammar.clone(), found: found.clone() });
        sampling.bad_words = found.bad_words;
        Ok(SubmitRequest { id, prompt: found.prompt, sampling, text, cache_salt, priority })
    }

    /// The tokens of a request, once its grammar is known to be fine as well.
    fn check(&self, request: &GenerateRequest) -> Result<Found, Refusal> {
        if let Some(grammar) = &request.sampling.grammar {
            self.check_grammar(grammar, &request.tokenizing.grammar_field)?;
        }
        guarded(|| {
            let prompt = self.model.encode_prompt_as(&request.prompt, &request.tokenizing)?;
            let bad_words = self.model.encode_words(&request.tokenizing.bad_words)?;
            Ok(Found { prompt, bad_words })
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

    /// The answer to a question.
    pub(super) fn answer(&self, question: &TextQuestion) -> Result<TextAnswer, Refusal> {
        guarded(|| match question {
            TextQuestion::Tokenize { prompt, add_special_tokens, with_pieces } => {
                let tokens = self.model.tokenize(prompt, *add_special_tokens)?;
                let pieces = with_pieces.then(|| self.model.token_pieces(&tokens));
                Ok(TextAnswer::Tokens(Tokenized { tokens, pieces }))
            }
            TextQuestion::Detokenize { tokens, skip_special_tokens } => {
                self.model.check_ids(tokens, "tokens")?;
                Ok(TextAnswer::Text(self.model.decode(tokens, *skip_special_tokens)))
            }
        })
    }
}

/// A text that makes a library panic must cost its own request only, not the server.
fn guarded<T>(work: impl FnOnce() -> Result<T, Refusal>) -> Result<T, Refusal> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
        tracing::error!("the tokenizer panicked on a prompt; the request is answered with an error");
        Err(Refusal::internal(
            "the tokenizer failed on this prompt; this is a bug of the server, please report it",
        ))
    })
}
