//! Every message survives the journey, and no bytes make the decoder panic or take much memory.
#![allow(clippy::unwrap_used)] // tests may unwrap

use lockstep_core::{FinishReason, Grammar, Refusal, RequestId, SamplingParams};
use lockstep_wire::codec::WIRE_VERSION;
use lockstep_wire::*;
use std::fmt::Debug;

/// SplitMix64 (Steele et al. 2014).
fn random(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn text_params() -> TextParams {
    let stop = vec!["é漢".into(), "\n".into()];
    TextParams {
        stop,
        min_tokens: 3,
        keeps_stop: true,
        skip_special_tokens: true,
        echo: true,
        prompt_tokens: true,
        timing: true,
    }
}

fn sampling() -> SamplingParams {
    SamplingParams {
        temperature: 0.7,
        seed: u64::MAX,
        max_tokens: Some(9),
        stop_token_ids: vec![1],
        logit_bias: vec![(5, -1.5)],
        allowed_token_ids: Some(vec![5, 6]),
        bad_words: vec![vec![5, 6], vec![7]],
        logprobs: Some(2),
        grammar: Some(Grammar::Choice(vec!["yes".into(), "no".into()])),
        ..Default::default()
    }
}

fn to_tokenizer() -> Vec<ToTokenizer> {
    let chat = ChatMessages {
        messages_json: r#"[{"role":"user","content":"ab"}]"#.into(),
        tools_json: Some("[]".into()),
        template_kwargs_json: None,
        add_generation_prompt: true,
    };
    let prompts = [Prompt::Text("ab".into()), Prompt::Tokens(vec![0, 1, u32::MAX]), Prompt::Chat(chat)];
    let generate = |prompt| {
        ToTokenizer::Generate(Box::new(GenerateRequest {
            id: RequestId(7),
            replica: 1,
            prompt,
            tokenizing: TokenizeParams {
                add_special_tokens: Some(false),
                keep_last: Some(8),
                bad_words: vec!["no".into()],
                grammar_field: "regex".into(),
            },
            sampling: sampling(),
            text: text_params(),
            cache_salt: Some("s".into()),
            priority: -3,
        }))
    };
    let mut all: Vec<_> = prompts.map(generate).into();
    let tokenize = TextQuestion::Tokenize {
        prompt: Prompt::Text("é".into()),
        add_special_tokens: true,
        with_pieces: false,
    };
    let detokenize = TextQuestion::Detokenize { tokens: vec![0, u32::MAX], skip_special_tokens: true };
    all.extend([tokenize, detokenize].map(|q| ToTokenizer::AskText { query: 9, question: Box::new(q) }));
    let started = ToTokenizer::ReplicaStarted { replica: 1, inbox: "ipc://@x".into() };
    all.extend([ToTokenizer::Abort { id: RequestId(u64::MAX), replica: 3 }, started, ToTokenizer::Shutdown]);
    all
}

fn to_scheduler() -> Vec<ToScheduler> {
    let submit = SubmitRequest {
        id: RequestId(1),
        prompt: (0..2000).collect(),
        sampling: sampling(),
        text: text_params(),
        cache_salt: None,
        priority: 2,
    };
    let mut vocabulary = Vocabulary::default();
    [(&b"ab"[..], false), (b"", false), (b"<s>", true)].iter().for_each(|(b, s)| vocabulary.push(b, *s));
    assert!(vocabulary.tokens().eq([(&b"ab"[..], false), (b"", false), (b"<s>", true)]));
    vec![
        ToScheduler::Submit(Box::new(submit)),
        ToScheduler::Abort(RequestId(0)),
        ToScheduler::Info { query: 3 },
        ToScheduler::FlushCache { query: 4 },
        ToScheduler::Vocabulary(Box::new(vocabulary)),
        ToScheduler::Prepare(Box::new(Grammar::Choice(vec!["yes".into(), "no".into()]))),
        ToScheduler::Shutdown,
    ]
}

fn to_detokenizer() -> Vec<ToDetokenizer> {
    let out = TokenOut {
        id: RequestId(2),
        tokens: vec![5, 6],
        finish: Some(FinishReason::Length),
        ends_with_eos: true,
        usage: Usage { prompt_tokens: 1, cached_tokens: 2, completion_tokens: 3 },
        logprobs: Some(Box::new(StepLogprobs {
            prompt: vec![],
            output: vec![TokenLogprobs {
                token: 5,
                logprob: -0.5,
                rank: 2,
                top: vec![(5, -0.5), (6, -9.25)],
            }],
        })),
        timing: Some(Box::new(Timing { queue_us: 1, batch_sum: u64::MAX, ..Timing::default() })),
    };
    vec![
        ToDetokenizer::ReplicaStarted { replica: 1 },
        ToDetokenizer::Begin {
            replica: 1,
            requests: vec![Begin { id: RequestId(2), text: text_params(), prompt: vec![1, 2] }],
        },
        ToDetokenizer::Step(vec![out]),
        ToDetokenizer::Shutdown,
    ]
}

fn text_logprobs(logprob: Option<f32>) -> TextLogprobs {
    let token = TokenText { id: 9, bytes: vec![0xF0, 0x9F], is_shown: true };
    TextLogprobs { token: token.clone(), logprob, rank: 3, top: vec![(token, -0.25)] }
}

fn to_api() -> Vec<ToApi> {
    let info = EngineInfo {
        query: 1,
        notes: vec!["n".into()],
        ranks: vec![RankInfo::default()],
        ..Default::default()
    };
    let delta = Delta {
        id: RequestId(3),
        text: "😀".into(),
        tokens: vec![1],
        finish: Some(FinishReason::Stop),
        stop_string: Some(1),
        usage: Usage::default(),
        logprobs: Some(Box::new(vec![text_logprobs(Some(-1.5))])),
        echo: Some(Box::new(Echo {
            text: Some("ab".into()),
            ids: vec![7],
            tokens: vec![text_logprobs(None)],
        })),
        timing: Some(Box::new(Timing { retractions: 7, ..Timing::default() })),
    };
    let ready = Ready { role: Role::Tokenizer(1), engine: Some(info.clone()), chat_error: Some("x".into()) };
    let tokenized = Tokenized { tokens: vec![7], pieces: Some(vec!["Ġé".into()]) };
    vec![
        ToApi::Ready(Box::new(ready)),
        ToApi::Loading { rank: 1, done: 2, total: 3 },
        ToApi::Refused { id: RequestId(4), refusal: Refusal::context_length(10, 5) },
        ToApi::Deltas(vec![delta]),
        ToApi::EngineInfo(Box::new(info)),
        ToApi::CacheFlushed { query: 4, pages: 5 },
        ToApi::TextAnswered { query: 9, result: Ok(TextAnswer::Tokens(tokenized)) },
        ToApi::TextAnswered { query: 9, result: Ok(TextAnswer::Text("é".into())) },
        ToApi::TextAnswered { query: 9, result: Err(Refusal::internal("x")) },
    ]
}

fn assert_round_trip<T>(messages: Vec<T>)
where
    T: serde::Serialize + serde::de::DeserializeOwned + PartialEq + Debug,
{
    for message in messages {
        let bytes = encode(&message).unwrap();
        assert_eq!(decode::<T>(&bytes).unwrap(), message);
        // Every cut is refused, never misread.
        for len in 0..bytes.len().min(300) {
            assert!(decode::<T>(&bytes[..len]).is_err(), "{len} of {} bytes of {message:?}", bytes.len());
        }
    }
}

#[test]
fn every_message_survives() {
    assert_round_trip(to_tokenizer());
    assert_round_trip(to_scheduler());
    assert_round_trip(to_detokenizer());
    assert_round_trip(to_api());
    let broadcast = |message| Broadcast { sequence: u64::MAX, stamp_ms: 5, message };
    assert_round_trip(to_scheduler().into_iter().map(broadcast).collect());
}

#[test]
fn other_versions_and_sizes_are_refused_by_name() {
    let mut bytes = encode(&ToScheduler::Shutdown).unwrap();
    bytes[0] = WIRE_VERSION + 1;
    let message = decode::<ToScheduler>(&bytes).unwrap_err().to_string();
    assert!(message.contains(&format!("version {}", WIRE_VERSION + 1)), "{message}");
    assert!(matches!(decode::<ToScheduler>(&[]), Err(WireError::Size { got: 0 })));
    let huge = SubmitRequest { prompt: vec![0; 17 << 20], ..submit() };
    assert!(matches!(encode(&ToScheduler::Submit(Box::new(huge))), Err(WireError::Size { .. })));
}

fn submit() -> SubmitRequest {
    match to_scheduler().swap_remove(0) {
        ToScheduler::Submit(submit) => *submit,
        other => panic!("{other:?}"),
    }
}

#[test]
fn damaged_bytes_never_panic() {
    let mut state = 1;
    let originals: Vec<Vec<u8>> = to_scheduler()
        .iter()
        .map(|m| encode(m).unwrap())
        .chain(to_tokenizer().iter().map(|m| encode(m).unwrap()))
        .chain(to_api().iter().map(|m| encode(m).unwrap()))
        .collect();
    let (mut refused, mut read) = (0, 0);
    for _ in 0..20_000 {
        let mut bytes = originals[random(&mut state) as usize % originals.len()].clone();
        for _ in 0..=random(&mut state) % 4 {
            let at = random(&mut state) as usize % bytes.len();
            bytes[at] = random(&mut state) as u8;
        }
        let outcome = [
            decode::<ToScheduler>(&bytes).is_ok(),
            decode::<ToTokenizer>(&bytes).is_ok(),
            decode::<ToDetokenizer>(&bytes).is_ok(),
            decode::<ToApi>(&bytes).is_ok(),
            decode::<Broadcast>(&bytes).is_ok(),
        ];
        if outcome.contains(&true) { read += 1 } else { refused += 1 }
    }
    assert!(
        refused > 1000 && read > 100,
        "the damage is neither harmless nor total: {refused} refused, {read} read"
    );
}
