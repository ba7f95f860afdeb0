//! What the sampler remembers of requests whose next token depends on their earlier ones.
//!
//! Lives in the model runner of every rank, for requests with penalties, bad words, a grammar or prompt
//! log-probabilities only. The plan gives all tokens of such a request on its first row after each admission (also after a
//! retraction); from then on the runner adds what it samples. So nothing is copied per step, and the state is
//! a function of the request's tokens alone: equal on every rank and in every batch.

use crate::masks::{MaskJob, MatcherSlot};
use crate::{EngineError, Result};
use lockstep_core::{NO_TOKEN, RequestId, SamplingParams, TokenId};
use lockstep_scheduler::PlanRow;
use lockstep_wire::TokenLogprobs;
use std::collections::BTreeMap;
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
    /// Tokens that occur; only with penalties.
    seen: BTreeMap<TokenId, Seen>,
    /// The newest tokens of the answer, as many as a bad word needs before its last one.
    tail: Vec<TokenId>,
    /// How many that are at most.
    tail_len_max: usize,
    /// Of the prompt's tokens from the second on, as far as computed.
    prompt_logprobs: Vec<TokenLogprobs>,
}

/// Where a token occurs.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// How often in the answer.
    in_output: u32,
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
                seen: BTreeMap::new(),
                tail: Vec::new(),
                tail_len_max: row.sampling.bad_words.iter().map(|word| word.len() - 1).max().unwrap_or(0),
                prompt_logprobs: Vec::new(),
            };
            if row.sampling.has_penalties() {
                let (prompt, output) = told.tokens.split_at(told.prompt_len);
                for &token in prompt {
                    history.seen.entry(token).or_default();
                }
                for &token in output {
                    history.seen.entry(token).or_default().in_output += 1;
                }
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
    pub(crate) fn of(&mut self, row: &PlanRow) -> Result<&mut History> {
        let id = row.id;
        self.by_id
            .get_mut(&id)
            .ok_or_else(|| EngineError::Internal(format!("the plan never told the tokens of request {id}")))
    }
}

impl History {
    /// Changes `logits` by the penalties of `params`, as vLLM and OpenAI define them.
    ///
    /// `l > 0 ? l / repetition : l * repetition` for tokens of prompt or answer; then, for tokens of the answer,
    /// `l -= frequency * count` and `l -= presence`.
    pub(crate) fn penalise(&self, params: &SamplingParams, logits: &mut [f32]) {
        for (&token, seen) in &self.seen {
            let Some(logit) = logits.get_mut(token as usize) else { continue };
            let repetition = params.repetition_penalty;
            *logit = if *logit > 0.0 { *logit / repetition } else { *logit * repetition };
            if seen.in_output > 0 {
                *logit -= params.frequency_penalty * seen.in_output as f32;
                *logit -= params.presence_penalty;
            }
        }
    }

    /// Makes impossible the last token of each of `bad_words` whose other tokens the answer ends with.
    pub(crate) fn ban(&self, bad_words: &[Vec<TokenId>], logits: &mut [f32]) {
        for (last, before) in bad_words.iter().filter_map(|word| word.split_last()) {
            if self.tail.ends_with(before)
                && let Some(logit) = logits.get_mut(*last as usize)
            {
                *logit = f32::NEG_INFINITY;
            }
        }
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
            self.seen.entry(token).or_default().in_output += 1;
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

    #[test]
    fn penalties_count_prompt_and_answer_as_documented() {
        let params = penalties();
        let mut histories = Histories::default();
        let first = row(&params, 0, Some((&[0, 1], 2)));
        histories.begin(std::slice::from_ref(&first));
        for (i, token) in [2, 1, 2].into_iter().enumerate() {
            histories.of(&first).unwrap().push(&row(&params, i as u32, None), token).unwrap();
        }
        let mut logits = [4.0f32, -4.0, 4.0, 4.0];
        histories.of(&first).unwrap().penalise(&params, &mut logits);
        // Prompt only; prompt and once in the answer; twice in the answer; nowhere.
        assert_eq!(logits, [2.0, -8.0 - 0.25 - 0.5, 2.0 - 0.5 - 0.5, 4.0]);
    }

    #[test]
    fn a_retraction_rebuilds_the_same_state() {
        let params = penalties();
        let (mut alone, mut retracted) = (Histories::default(), Histories::default());
        let first = row(&params, 0, Some((&[0, 1], 2)));
        alone.begin(std::slice::from_ref(&first));
        alone.of(&first).unwrap().push(&first, 3).unwrap();
        alone.of(&first).unwrap().push(&row(&params, 1, None), 3).unwrap();
        let again = row(&params, 2, Some((&[0, 1, 3, 3], 2)));
        retracted.begin(std::slice::from_ref(&again));
        let penalised = |histories: &mut Histories| {
            let mut logits = [1.0f32, -1.0, 0.5, 7.0];
            histories.of(&again).unwrap().penalise(&params, &mut logits);
            logits
        };
        assert_eq!(penalised(&mut alone), penalised(&mut retracted));
        assert!(retracted.of(&again).unwrap().push(&row(&params, 3, None), 1).is_err(), "a gap is a bug");
    }

    #[test]
    fn the_last_token_of_a_bad_word_is_banned_behind_the_others() {
        let bad_words = vec![vec![3], vec![1, 2], vec![1, 1, 0]];
        let params = Arc::new(SamplingParams { bad_words, ..SamplingParams::default() });
        let banned = |histories: &mut Histories, row: &PlanRow| {
            let mut logits = [0.0f32; 4];
            histories.of(row).unwrap().ban(&params.bad_words, &mut logits);
            (0..4).filter(|id| logits[*id as usize] < 0.0).collect::<Vec<TokenId>>()
        };
        let mut histories = Histories::default();
        // The prompt's own tokens are no part of the answer.
        let first = row(&params, 0, Some((&[1, 1], 2)));
        histories.begin(std::slice::from_ref(&first));
        assert_eq!(banned(&mut histories, &first), [3]);
        for (index, (token, expected)) in
            [(1, vec![2, 3]), (1, vec![0, 2, 3]), (0, vec![3])].into_iter().enumerate()
        {
            histories.of(&first).unwrap().push(&row(&params, index as u32, None), token).unwrap();
            assert_eq!(banned(&mut histories, &first), expected, "after token {index}");
        }
        let again = row(&params, 2, Some((&[1, 1, 1, 1], 2)));
        histories.begin(std::slice::from_ref(&again));
        assert_eq!(banned(&mut histories, &again), [0, 2, 3], "after a retraction");
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
