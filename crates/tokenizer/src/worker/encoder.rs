//! What a lane does with one job: a request becomes a submission or a refusal, a question its answer.

use crate::model::TextModel;
use lockstep_core::limits::{PROMPT_LOGPROBS_MAX, WIRE_MESSAGE_BYTES_MAX};
use lockstep_core::{Grammar, Refusal, TokenId};
use lockstep_grammar::{Checker, GrammarError};
use lockstep_wire::{
    GenerateRequest, Prompt, SubmitRequest, TextAnswer, TextQuestion, TokenizeParams, Tokenized,
};
use std::cell::OnceCell;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Bytes of an answer to a question, of which its message is not much more than the double.
const ANSWER_BYTES_MAX: usize = WIRE_MESSAGE_BYTES_MAX / 4;

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
        check_report(found.prompt.len(), &request)?;
        let GenerateRequest { id, prompt, tokenizing, mut sampling, text, cache_salt, priority, .. } =
            request;
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
                let of_pieces = pieces.iter().flatten().map(|piece| piece.len() + size_of::<TokenId>());
                check_answer("prompt", size_of_val(&tokens[..]) + of_pieces.sum::<usize>())?;
                Ok(TextAnswer::Tokens(Tokenized { tokens, pieces }))
            }
            TextQuestion::Detokenize { tokens, skip_special_tokens } => {
                self.model.check_ids(tokens, "tokens")?;
                let text = self.model.decode(tokens, *skip_special_tokens);
                check_answer("tokens", text.len())?;
                Ok(TextAnswer::Text(text))
            }
        })
    }
}

/// What is reported of a prompt of so many tokens must fit a message.
fn check_report(prompt_len: usize, request: &GenerateRequest) -> Result<(), Refusal> {
    let Some(count) = request.sampling.prompt_logprobs else { return Ok(()) };
    let wanted = prompt_len.saturating_mul(count as usize + 1);
    if wanted <= PROMPT_LOGPROBS_MAX {
        return Ok(());
    }
    let field = if request.text.echo { "logprobs" } else { "prompt_logprobs" };
    let message = format!(
        "{field} asks for {wanted} log-probabilities of the prompt ({prompt_len} tokens with {count} alternatives each), \
         accepted are {PROMPT_LOGPROBS_MAX}; ask for fewer alternatives or send a shorter prompt"
    );
    Err(Refusal::invalid_param(field, message))
}

/// An answer of so many bytes to what `field` holds must fit a message.
fn check_answer(field: &str, bytes: usize) -> Result<(), Refusal> {
    if bytes <= ANSWER_BYTES_MAX {
        return Ok(());
    }
    let message =
        format!("{field} has an answer of {bytes} bytes, accepted are {ANSWER_BYTES_MAX}; send it in parts");
    Err(Refusal::invalid_param(field, message))
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

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_core::{RequestId, SamplingParams};
    use lockstep_wire::TextParams;

    #[test]
    fn what_no_message_holds_is_refused_by_its_field() {
        let request = |count, echo| GenerateRequest {
            id: RequestId(1),
            replica: 0,
            prompt: Prompt::Text("a".into()),
            tokenizing: TokenizeParams::default(),
            sampling: SamplingParams { prompt_logprobs: count, ..SamplingParams::default() },
            text: TextParams { echo, ..TextParams::default() },
            cache_salt: None,
            priority: 0,
        };
        let most = PROMPT_LOGPROBS_MAX / 21;
        assert!(check_report(most, &request(Some(20), true)).is_ok());
        assert!(check_report(usize::MAX, &request(None, true)).is_ok());
        for (echo, field) in [(true, "logprobs"), (false, "prompt_logprobs")] {
            let refusal = check_report(most + 1, &request(Some(20), echo)).unwrap_err();
            assert_eq!((refusal.status, refusal.param.as_deref()), (400, Some(field)));
            assert!(refusal.message.starts_with(field), "{}", refusal.message);
        }
        assert!(check_answer("prompt", ANSWER_BYTES_MAX).is_ok());
        let refusal = check_answer("tokens", ANSWER_BYTES_MAX + 1).unwrap_err();
        assert!(refusal.message.starts_with("tokens has an answer of 16777217 bytes"), "{}", refusal.message);
    }
}
