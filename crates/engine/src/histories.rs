//! What the sampler remembers of requests whose next token depends on their earlier ones.
//!
//! Lives in the model runner of every rank, for requests with penalties, bad words, a grammar or prompt
//! log-probabilities only. The plan gives all tokens of such a request on its first row after each admission (also after a
//! retraction); from then on the runner adds what it samples. So nothing is copied per step, and the state is
//! a function of the request's tokens alone: equal on every rank and in every batch.

use crate::masks::{MaskJob, MatcherSlot};
use crate::{EngineError, Result};
use lockstep_backend::SeenToken;
use lockstep_core::{NO_TOKEN, RequestId, SamplingParams, TokenId};
use lockstep_scheduler::PlanRow;
use lockstep_wire::TokenLogprobs;
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};

/// The remembered requests of one rank.
#[derive(Default)]
pub(crate) struct Histories {
    by_id: BTreeMap<RequestId, History>,
}

/// What is remembered of one request.
pub(crate) struct History {
    /// Dead once the scheduler and its plans have forgotten the request.
    owner: Weak<SamplingParams>,
    /// All tokens at the last admission.
    tokens: Arc<[TokenId]>,
    /// How many of them are the prompt.
    prompt_len: usize,
    /// With a grammar: how far the answer has come in it.
    matcher: MatcherSlot,
    /// Generated tokens so far.
    output_len: usize,
    /// Tokens that occur, in any order, and where each is in that list; only with penalties.
    seen: Vec<SeenToken>,
    place_of: HashMap<TokenId, usize>,
    /// The newest tokens of the answer, as many as a bad word needs before its last one.
    tail: Vec<TokenId>,
    /// How many that are at most.
    tail_len_max: usize,
    /// Of the prompt's tokens from the second on, as far as computed.
    prompt_logprobs: Vec<TokenLogprobs>,
}

impl Histories {
    /// Takes in what a plan tells of its rows, and forgets requests that are gone. Call it with every row, in
    /// order, before the step is sampled.
    pub(crate) fn begin(&mut self, rows: &[PlanRow]) {
        if !self.by_id.is_empty() {
            self.by_id.retain(|_, history| history.owner.strong_count() > 0);
        }
        for row in rows {
            let Some(told) = &row.history else { continue };
            let mut history = History {
                owner: Arc::downgrade(&row.sampling),
                tokens: told.tokens.clone(),
                prompt_len: told.prompt_len,
                matcher: MatcherSlot::default(),
                output_len: told.tokens.len() - told.prompt_len,
                seen: Vec::new(),
                place_of: HashMap::new(),
                tail: Vec::new(),
                tail_len_max: row.sampling.bad_words.iter().map(|word| word.len() - 1).max().unwrap_or(0),
                prompt_logprobs: Vec::new(),
            };
            if row.sampling.has_penalties() {
                let (prompt, output) = told.tokens.split_at(told.prompt_len);
                prompt.iter().for_each(|token| history.see(*token, 0));
                output.iter().for_each(|token| history.see(*token, 1));
            }
            history.remember(&told.tokens[told.prompt_len..]);
            self.by_id.insert(row.id, history);
        }
    }

    /// The matchers whose masks `rows` need.
    pub(crate) fn mask_jobs<'a>(&'a mut self, rows: &'a [PlanRow]) -> Vec<MaskJob<'a>> {
        let mut grammars = BTreeMap::new();
        for row in rows.iter().filter(|row| row.samples) {
            if let Some(grammar) = &row.sampling.grammar {
                grammars.insert(row.id, grammar);
            }
        }
        if grammars.is_empty() {
            return Vec::new();
        }
        let job = |(id, history): (&RequestId, &'a mut History)| {
            let grammar = grammars.get(id)?;
            let output = &history.tokens[history.prompt_len..];
            Some(MaskJob { slot: &mut history.matcher, grammar, output })
        };
        self.by_id.iter_mut().filter_map(job).collect()
    }

    /// The history of a row's request. The error is a bug of the plan.
    pub(crate) fn of(&self, row: &PlanRow) -> Result<&History> {
        self.by_id.get(&row.id).ok_or_else(|| untold(row.id))
    }

    /// The same, to be changed.
    pub(crate) fn of_mut(&mut self, row: &PlanRow) -> Result<&mut History> {
        self.by_id.get_mut(&row.id).ok_or_else(|| untold(row.id))
    }
}

fn untold(id: RequestId) -> EngineError {
    EngineError::Internal(format!("the plan never told the tokens of request {id}"))
}

impl History {
    /// The tokens that occur in prompt and answer; only with penalties.
    pub(crate) fn seen(&self) -> &[SeenToken] {
        &self.seen
    }

    fn see(&mut self, token: TokenId, in_output: u32) {
        let place = *self.place_of.entry(token).or_insert(self.seen.len());
        match self.seen.get_mut(place) {
            Some(seen) => seen.in_output += in_output,
            None => self.seen.push(SeenToken { token, in_output }),
        }
    }

    /// The last token of each of `bad_words` whose other tokens the answer ends with.
    pub(crate) fn banned_by<'a>(&self, bad_words: &'a [Vec<TokenId>]) -> impl Iterator<Item = &'a TokenId> {
        let words = bad_words.iter().filter_map(|word| word.split_last());
        words.filter(|(_, before)| self.tail.ends_with(before)).map(|(last, _)| last)
    }

    /// `tokens` are the answer's newest.
    fn remember(&mut self, tokens: &[TokenId]) {
        self.tail.extend_from_slice(tokens);
        self.tail.drain(..self.tail.len().saturating_sub(self.tail_len_max));
    }

    /// What the request's grammar allows next.
    pub(crate) fn matcher(&self) -> &MatcherSlot {
        &self.matcher
    }

    /// A token was chosen by `row`, or [`NO_TOKEN`]: whatever a step that is launched already makes of the rest is
    /// thrown away. The error is a bug: the plan and this rank know different tokens.
    pub(crate) fn push(&mut self, row: &PlanRow, token: TokenId) -> Result<()> {
        if self.output_len != row.output_index as usize {
            return Err(EngineError::Internal(format!(
                "request {} samples token {}, but the sampler has seen {} tokens of it",
                row.id, row.output_index, self.output_len
            )));
        }
        self.output_len += 1;
        if token == NO_TOKEN {
            return Ok(());
        }
        self.matcher.push(token);
        self.remember(&[token]);
        if row.sampling.has_penalties() {
            self.see(token, 1);
        }
        Ok(())
    }

    /// The prompt's token at `position`.
    pub(crate) fn prompt_token(&self, position: usize) -> Option<TokenId> {
        self.tokens.get(position).copied()
    }

    /// The log-probability of the prompt's next token.
    pub(crate) fn push_prompt_logprobs(&mut self, logprobs: TokenLogprobs) {
        self.prompt_logprobs.push(logprobs);
    }

    /// What [`push_prompt_logprobs`](Self::push_prompt_logprobs) has collected.
    pub(crate) fn take_prompt_logprobs(&mut self) -> Vec<TokenLogprobs> {
        std::mem::take(&mut self.prompt_logprobs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_scheduler::{History as Told, RowInput};

    fn row(params: &Arc<SamplingParams>, output_index: u32, told: Option<(&[TokenId], usize)>) -> PlanRow {
        PlanRow {
            id: RequestId(1),
            first_token: 0,
            token_count: 1,
            start_position: 0,
            first_page: 0,
            page_count: 1,
            input: RowInput::Known,
            is_prefill: false,
            samples: true,
            output_index,
            sampling: params.clone(),
            prompt_logits: false,
            history: told.map(|(tokens, prompt_len)| Told { tokens: tokens.into(), prompt_len }),
        }
    }

    fn penalties() -> Arc<SamplingParams> {
        Arc::new(SamplingParams {
            presence_penalty: 0.5,
            frequency_penalty: 0.25,
            repetition_penalty: 2.0,
            ..SamplingParams::default()
        })
    }

    /// The tokens that occur and how often in the answer, ascending.
    fn counts(histories: &Histories, row: &PlanRow) -> Vec<(TokenId, u32)> {
        let seen = histories.of(row).unwrap().seen().iter();
        let mut counts: Vec<_> = seen.map(|seen| (seen.token, seen.in_output)).collect();
        counts.sort();
        counts
    }

    #[test]
    fn prompt_and_answer_are_counted() {
        let params = penalties();
        let mut histories = Histories::default();
        let first = row(&params, 0, Some((&[0, 1], 2)));
        histories.begin(std::slice::from_ref(&first));
        for (i, token) in [2, 1, 2].into_iter().enumerate() {
            histories.of_mut(&first).unwrap().push(&row(&params, i as u32, None), token).unwrap();
        }
        assert_eq!(counts(&histories, &first), [(0, 0), (1, 1), (2, 2)]);
    }

    #[test]
    fn a_retraction_rebuilds_the_same_state() {
        let params = penalties();
        let (mut alone, mut retracted) = (Histories::default(), Histories::default());
        let first = row(&params, 0, Some((&[0, 1], 2)));
        alone.begin(std::slice::from_ref(&first));
        alone.of_mut(&first).unwrap().push(&first, 3).unwrap();
        alone.of_mut(&first).unwrap().push(&row(&params, 1, None), 3).unwrap();
        let again = row(&params, 2, Some((&[0, 1, 3, 3], 2)));
        retracted.begin(std::slice::from_ref(&again));
        assert_eq!(counts(&alone, &again), counts(&retracted, &again));
        assert!(retracted.of_mut(&again).unwrap().push(&row(&params, 3, None), 1).is_err(), "a gap is a bug");
    }

    #[test]
    fn the_last_token_of_a_bad_word_is_banned_behind_the_others() {
        let bad_words = vec![vec![3], vec![1, 2], vec![1, 1, 0]];
        let params = Arc::new(SamplingParams { bad_words, ..SamplingParams::default() });
        let banned = |histories: &Histories, row: &PlanRow| {
            let mut banned: Vec<_> =
                histories.of(row).unwrap().banned_by(&params.bad_words).copied().collect();
            banned.sort();
            banned
        };
        let mut histories = Histories::default();
        // The prompt's own tokens are no part of the answer.
        let first = row(&params, 0, Some((&[1, 1], 2)));
        histories.begin(std::slice::from_ref(&first));
        assert_eq!(banned(&histories, &first), [3]);
        for (index, (token, expected)) in
            [(1, vec![2, 3]), (1, vec![0, 2, 3]), (0, vec![3])].into_iter().enumerate()
        {
            histories.of_mut(&first).unwrap().push(&row(&params, index as u32, None), token).unwrap();
            assert_eq!(banned(&histories, &first), expected, "after token {index}");
        }
        let again = row(&params, 2, Some((&[1, 1, 1, 1], 2)));
        histories.begin(std::slice::from_ref(&again));
        assert_eq!(banned(&histories, &again), [0, 2, 3], "after a retraction");
    }

    #[test]
    fn gone_requests_are_forgotten() {
        let mut histories = Histories::default();
        let params = penalties();
        histories.begin(&[row(&params, 0, Some((&[0], 1)))]);
        assert_eq!(histories.by_id.len(), 1);
        drop(params);
        histories.begin(&[]);
        assert!(histories.by_id.is_empty());
    }
}
