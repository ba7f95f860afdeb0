//! The detokenizer: token ids from rank 0 to text for the api.

use crate::model::TextModel;
use crate::stream::RequestDecoder;
use lockstep_core::{FinishReason, RequestId, TokenId};
use lockstep_wire::{
    Begin, Delta, Echo, StepLogprobs, TextLogprobs, TextParams, ToApi, ToDetokenizer, TokenLogprobs, TokenOut,
};
use std::collections::HashMap;

/// The running requests' decoders.
///
/// **Invariant:** a decoder lives from `Begin` to the request's finish, be it an end token, the token
/// limit, an abort, or a stop string found here, or until its replica, having died, is started again. Messages for other ids are ignored: after a stop
/// string rank 0 goes on until the api's abort reaches it.
pub struct DetokenizerWorker<'m> {
    model: &'m TextModel,
    /// Only ever looked up by id or filtered: its order is not stable.
    running: HashMap<RequestId, Running>,
}

/// What is held of one request.
struct Running {
    /// Whose tokens come.
    replica: usize,
    decoder: RequestDecoder,
    skip_special_tokens: bool,
    /// The token that ended the answer is part of its text, if tokens of its kind are.
    keeps_stop: bool,
    /// A prompt to be reported with the first token.
    prompt: Vec<TokenId>,
    /// Its text is wanted.
    echo: bool,
    /// Its tokens are wanted.
    prompt_tokens: bool,
}

impl<'m> DetokenizerWorker<'m> {
    /// A worker without requests.
    pub fn new(model: &'m TextModel) -> Self {
        Self { model, running: HashMap::new() }
    }

    /// Requests whose state is held.
    pub fn running_len(&self) -> usize {
        self.running.len()
    }

    /// Applies one message; the report for the api, if there is anything to say.
    pub fn handle(&mut self, message: ToDetokenizer) -> Option<ToApi> {
        match message {
            ToDetokenizer::ReplicaStarted { replica } => {
                self.running.retain(|_, running| running.replica != replica);
                None
            }
            ToDetokenizer::Begin { replica, requests } => {
                for Begin { id, text, prompt } in requests {
                    tracing::debug!(request = %id, "text begins");
                    let mut decoder = self.model.decoder(&text);
                    let TextParams { skip_special_tokens, keeps_stop, echo, prompt_tokens, .. } = text;
                    if echo {
                        decoder.continue_text();
                    }
                    let running = Running {
                        replica,
                        decoder,
                        skip_special_tokens,
                        keeps_stop,
                        prompt,
                        echo,
                        prompt_tokens,
                    };
                    self.running.insert(id, running);
                }
                None
            }
            ToDetokenizer::Step(outputs) => {
                let deltas: Vec<Delta> = outputs.into_iter().filter_map(|out| self.delta(out)).collect();
                (!deltas.is_empty()).then_some(ToApi::Deltas(deltas))
            }
            ToDetokenizer::Shutdown => None,
        }
    }

    /// The new text of one request. One delta per message even without text, since the api counts the
    /// tokens behind it.
    fn delta(&mut self, output: TokenOut) -> Option<Delta> {
        let TokenOut { id, tokens, finish, ends_with_eos, usage, logprobs, timing } = output;
        let running = self.running.get_mut(&id)?;
        let (model, skip) = (self.model, running.skip_special_tokens);
        let echo = take_echo(model, running, &tokens, logprobs.as_deref());
        let hides_end = ends_with_eos && !running.keeps_stop;
        let decoder = &mut running.decoder;
        let mut text = String::new();
        let with_text = tokens.len() - usize::from(hides_end && !tokens.is_empty());
        let mut stopped = tokens[..with_text].iter().any(|&t| model.push_token(decoder, t, &mut text));
        if finish.is_some() && !stopped {
            stopped = model.finish_text(decoder, &mut text);
        }
        let stop_string = decoder.stop_string();
        let finish = if stopped { Some(FinishReason::Stop) } else { finish };
        let is_first = usage.completion_tokens as usize <= tokens.len();
        let timing = timing.filter(|_| is_first || finish.is_some());
        if let Some(reason) = finish {
            tracing::debug!(request = %id, tokens = usage.completion_tokens, finish = reason.as_openai(), "text ends");
            self.running.remove(&id);
        }
        let logprobs = logprobs.map(|step| {
            let mut texts: Vec<_> = step.output.iter().map(|l| text_logprobs(model, l, skip)).collect();
            if hides_end && let Some(end) = texts.last_mut() {
                end.token.is_shown = false;
            }
            Box::new(texts)
        });
        Some(Delta { id, text, tokens, finish, stop_string, usage, logprobs, echo, timing })
    }
}

/// The prompt, if it was asked for and not reported yet; with the request's first token at the earliest.
fn take_echo(
    model: &TextModel,
    running: &mut Running,
    tokens: &[TokenId],
    logprobs: Option<&StepLogprobs>,
) -> Option<Box<Echo>> {
    if tokens.is_empty() {
        return None;
    }
    let prompt = std::mem::take(&mut running.prompt);
    let skip = running.skip_special_tokens;
    let token = model.token_text(*prompt.first()?, skip);
    let first = TextLogprobs { token, logprob: None, rank: 0, top: Vec::new() };
    let behind = logprobs.map_or(&[][..], |step| &step.prompt);
    // One per token from the second on, or none at all: they were not asked for.
    let tokens = match behind.len() + 1 == prompt.len() {
        true => std::iter::once(first).chain(behind.iter().map(|l| text_logprobs(model, l, skip))).collect(),
        false => Vec::new(),
    };
    let text = running.echo.then(|| model.decode(&prompt, skip));
    let ids = if running.prompt_tokens { prompt } else { Vec::new() };
    Some(Box::new(Echo { text, ids, tokens }))
}

fn text_logprobs(model: &TextModel, logprobs: &TokenLogprobs, skip_special_tokens: bool) -> TextLogprobs {
    let text = |id| model.token_text(id, skip_special_tokens);
    TextLogprobs {
        token: text(logprobs.token),
        logprob: Some(logprobs.logprob),
        rank: logprobs.rank,
        top: logprobs.top.iter().map(|&(id, logprob)| (text(id), logprob)).collect(),
    }
}
