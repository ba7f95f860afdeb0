//! Every answer and every log-probability is bit-equal to that of one rank.

use super::group::{EOS, Heard, Outcome, Script, Setup, model, run};
use lockstep_core::{FinishReason, Grammar, RequestId, SamplingParams, TokenId};
use lockstep_wire::{SubmitRequest, TextParams, ToScheduler, Vocabulary};
use std::collections::BTreeMap;

/// Chosen so that requests outgrow it: 8 of them need about 90 pages.
const SMALL_POOL: usize = 45;
const LARGE_POOL: usize = 400;

fn prompt(tag: u32, len: u32) -> Vec<TokenId> {
    (0..len).map(|i| (tag * 31 + i * 7 + i * i % 13) % 256).collect()
}

fn submit(id: u64, prompt: Vec<TokenId>, sampling: SamplingParams) -> ToScheduler {
    ToScheduler::Submit(Box::new(SubmitRequest {
        id: RequestId(id),
        prompt,
        sampling,
        text: TextParams::default(),
        cache_salt: None,
        priority: 0,
    }))
}

fn greedy(max_tokens: u32) -> SamplingParams {
    SamplingParams { temperature: 0.0, max_tokens: Some(max_tokens), ignore_eos: true, ..Default::default() }
}

/// Two waves: prompts of all lengths and all kinds of sampling, then prompts that begin like those.
fn script() -> Script {
    let mut vocabulary = Vocabulary::default();
    (0..=u8::MAX).for_each(|byte| vocabulary.push(&[byte], false));
    vocabulary.push(b"<|eos|>", true);
    let drawn = |seed| SamplingParams { temperature: 0.8, seed, ..greedy(30) };
    let first = vec![
        ToScheduler::Vocabulary(Box::new(vocabulary)),
        submit(1, prompt(1, 5), greedy(40)),
        submit(2, prompt(2, 61), SamplingParams { logprobs: Some(3), ..drawn(5) }),
        submit(
            3,
            prompt(3, 30),
            SamplingParams { prompt_logprobs: Some(2), logprobs: Some(0), ..greedy(20) },
        ),
        submit(4, prompt(4, 17), SamplingParams { frequency_penalty: 0.7, ..drawn(6) }),
        submit(5, prompt(5, 40), greedy(40)),
        submit(
            6,
            prompt(6, 9),
            SamplingParams { grammar: Some(Grammar::Regex("[a-f]{9}".into())), ..drawn(9) },
        ),
        submit(7, prompt(7, 1), SamplingParams { ignore_eos: false, ..drawn(8) }),
        submit(8, prompt(8, 33), greedy(35)),
        submit(9, prompt(2, 50), greedy(1)),
    ];
    let second = vec![
        submit(11, prompt(2, 61), greedy(25)),
        submit(12, prompt(5, 40), drawn(3)),
        submit(13, prompt(3, 29), SamplingParams { logprobs: Some(1), ..greedy(10) }),
    ];
    Script { waves: [first, second].into(), aborts: BTreeMap::from([(RequestId(8), 4)]) }
}

/// What must not depend on the layout: all but where an abort falls and what the cache still holds.
fn answers(outcome: &Outcome) -> BTreeMap<RequestId, Heard> {
    let aborted = |id: &RequestId| *id == RequestId(8);
    let heard = outcome.heard.iter().filter(|(id, _)| !aborted(id));
    heard.map(|(id, heard)| (*id, Heard { cached_tokens: 0, ..heard.clone() })).collect()
}

fn check_reference(outcome: &Outcome) {
    let heard = |id| &outcome.heard[&RequestId(id)];
    assert_eq!(outcome.heard.len(), 12);
    assert_eq!((heard(1).tokens.len(), heard(1).finish), (40, Some(FinishReason::Length)));
    assert_eq!((heard(2).logprobs.output.len(), heard(3).logprobs.prompt.len()), (30, 29));
    let word: Vec<u8> = heard(6).tokens.iter().filter(|&&id| id != EOS).map(|&id| id as u8).collect();
    assert!(word.len() == 9 && word.iter().all(|byte| (b'a'..=b'f').contains(byte)), "{word:?}");
}

/// All layouts of the issue, each with room, with too few pages, and with prefill and decode apart.
#[test]
fn answers_are_those_of_one_rank_at_every_tp_and_pp() {
    let base = Setup { tp: 1, pp: 1, num_pages: LARGE_POOL, chunk: 24, mixed: true, prefix_cache: true };
    let reference = run(&base, script());
    check_reference(&reference);
    assert!(reference.info.totals.cached_tokens > 0);
    for (tp, pp) in [(1, 2), (1, 3), (2, 1), (2, 2), (2, 3), (4, 1), (4, 2), (4, 3)] {
        let setups = [
            Setup { tp, pp, ..base.clone() },
            Setup { tp, pp, num_pages: SMALL_POOL, ..base.clone() },
            Setup { tp, pp, mixed: false, chunk: 7, prefix_cache: false, ..base.clone() },
        ];
        for setup in setups {
            let outcome = run(&setup, script());
            let (got, want) = (answers(&outcome), answers(&reference));
            for (id, want) in &want {
                assert_eq!(got.get(id), Some(want), "{id} at {setup:?}");
            }
            let totals = outcome.info.totals;
            assert_eq!(totals.cached_tokens > 0, setup.prefix_cache, "{setup:?}");
            assert_eq!(totals.retractions > 0, setup.num_pages == SMALL_POOL, "{setup:?}");
            let aborted = &outcome.heard[&RequestId(8)];
            assert_eq!(aborted.finish, Some(FinishReason::Abort), "{setup:?}");
            let full = &reference.heard[&RequestId(8)].tokens;
            let common = full.len().min(aborted.tokens.len());
            assert_eq!(aborted.tokens[..common], full[..common]);
        }
    }
}

/// A stage holds its own layers and its own KV only.
#[test]
fn stages_share_the_model() {
    let setup = Setup { tp: 1, pp: 3, num_pages: 64, chunk: 24, mixed: true, prefix_cache: true };
    let outcome = run(
        &setup,
        Script { waves: [vec![submit(1, prompt(1, 5), greedy(2))]].into(), aborts: BTreeMap::new() },
    );
    let ranks = &outcome.info.ranks;
    let labels: Vec<_> = ranks.iter().map(|rank| rank.label.as_str()).collect();
    assert_eq!(labels, ["PP0-TP0", "PP1-TP0", "PP2-TP0"]);
    let layers: usize = ranks.iter().map(|rank| rank.layers.len()).sum();
    assert_eq!(layers, model().num_layers);
    let of_layer = ranks[1].kv_bytes / ranks[1].layers.len() as u64;
    assert!(ranks.iter().all(|rank| rank.kv_bytes == of_layer * rank.layers.len() as u64));
    // The head is the embedding: both ends hold it.
    let vocabulary = 257 * 64 * 4;
    let whole = run(&Setup { pp: 1, ..setup }, Script { waves: [].into(), aborts: BTreeMap::new() });
    let together: u64 = ranks.iter().map(|rank| rank.weight_bytes).sum();
    assert_eq!(together, whole.info.ranks[0].weight_bytes + vocabulary);
}
