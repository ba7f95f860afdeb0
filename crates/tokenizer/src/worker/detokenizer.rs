//! The detokenizer: token ids from rank 0 to text for the api.

use crate::model::TextModel;
use crate::stream::RequestDecoder;
use lockstep_core::{FinishReason, RequestId};
use lockstep_wire::{Begin, Delta, ToApi, ToDetokenizer, TokenOut};
use std::collections::HashMap;

/// The running requests' decoders.
///
/// **Invariant:** a decoder lives from `Begin` to the request's finish, be it an end token, the token
/// limit, an abort, or a stop string found here. Messages for other ids are ignored: after a stop
/// string rank 0 goes on until the api's abort reaches it.
pub struct DetokenizerWorker<'m> {
    model: &'m TextModel,
    /// Only ever looked up by id, never iterated: its order is not stable.
    running: HashMap<RequestId, RequestDecoder>,
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
            ToDetokenizer::Begin(list) => {
                for Begin { id, text } in list {
                    self.running.insert(id, self.model.decoder(&text));
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
        let TokenOut { id, tokens, finish, ends_with_eos, usage } = output;
        let decoder = self.running.get_mut(&id)?;
        let mut text = String::new();
        let with_text = tokens.len() - usize::from(ends_with_eos && !tokens.is_empty());
        let mut stopped = tokens[..with_text].iter().any(|&t| self.model.push_token(decoder, t, &mut text));
        if finish.is_some() && !stopped {
            stopped = self.model.finish_text(decoder, &mut text);
        }
        let finish = if stopped { Some(FinishReason::Stop) } else { finish };
        if finish.is_some() {
            self.running.remove(&id);
        }
        Some(Delta { id, text, tokens, finish, stopped_by_text: stopped, usage })
    }
}
