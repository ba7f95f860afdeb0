use super::*;
use crate::model::TextOptions;
use crate::test_models::{CHATML, TempFolder, WORDS, byte_folder};
use lockstep_core::{FinishReason, Grammar, RequestId, SamplingParams};
use lockstep_wire::{
    Begin, ChatMessages, Delta, Echo, GenerateRequest, Prompt, StepLogprobs, TextAnswer, TextParams,
    TextQuestion, TokenLogprobs, TokenOut, TokenizeParams, Usage,
};
use serde_json::json;
use std::sync::mpsc;

/// A link inside one process: both ends of a channel.
struct Channel<T>(mpsc::Receiver<T>);

impl<T> Inbox<T> for Channel<T> {
    fn recv(&self) -> Result<T, TokenizerError> {
        Ok(self.0.recv().expect("the test keeps the sender until Shutdown"))
    }

    fn try_recv(&self) -> Result<Option<T>, TokenizerError> {
        Ok(self.0.try_recv().ok())
    }
}

impl<T: Clone> Outbox<T> for mpsc::Sender<T> {
    fn send(&self, message: &T) -> Result<(), TokenizerError> {
        mpsc::Sender::send(self, message.clone()).expect("the test keeps the receiver");
        Ok(())
    }
}

fn model() -> (TempFolder, TextModel) {
    model_with(64, false)
}

fn model_with(context_max: usize, adds_bos: bool) -> (TempFolder, TextModel) {
    let folder = byte_folder(adds_bos, json!({"chat_template": CHATML}));
    let options = TextOptions { context_max: Some(context_max), ..TextOptions::default() };
    let model = TextModel::load(folder.path(), &options).unwrap();
    (folder, model)
}

fn generate(id: u64, text: &str) -> ToTokenizer {
    ToTokenizer::Generate(Box::new(GenerateRequest {
        id: RequestId(id),
        replica: 0,
        prompt: Prompt::Text(text.into()),
        tokenizing: TokenizeParams::default(),
        sampling: SamplingParams::default(),
        text: TextParams { skip_special_tokens: true, ..TextParams::default() },
        cache_salt: Some("salt".into()),
        priority: 3,
    }))
}

/// Runs a tokenizer over `messages` that are all there at the start.
fn tokenize(messages: Vec<ToTokenizer>) -> (Vec<ToScheduler>, Vec<ToApi>) {
    run_all(&model().1, messages)
}

/// Links whose replicas, started again, answer where the first one does.
fn links(
    inbox: mpsc::Receiver<ToTokenizer>,
    schedulers: Vec<mpsc::Sender<ToScheduler>>,
    api: mpsc::Sender<ToApi>,
) -> TokenizerLinks<Channel<ToTokenizer>, mpsc::Sender<ToScheduler>, mpsc::Sender<ToApi>> {
    let first = schedulers[0].clone();
    let reconnect: Reconnect<_> = Box::new(move |_inbox| Ok(first.clone()));
    TokenizerLinks { inbox: Channel(inbox), schedulers, reconnect, api }
}

fn run_all(model: &TextModel, messages: Vec<ToTokenizer>) -> (Vec<ToScheduler>, Vec<ToApi>) {
    let (to_worker, inbox) = mpsc::channel();
    let (scheduler, submitted) = mpsc::channel();
    let (api, reported) = mpsc::channel();
    for message in messages {
        to_worker.send(message).unwrap();
    }
    run_tokenizer(model, links(inbox, vec![scheduler], api)).unwrap();
    (submitted.try_iter().collect(), reported.try_iter().collect())
}

#[test]
fn every_request_is_submitted_or_refused_also_after_shutdown() {
    let (submitted, reported) = tokenize(vec![
        generate(1, "ab"),
        ToTokenizer::Shutdown,
        generate(2, &"x".repeat(64)),
        generate(3, "c"),
    ]);
    let prompts: Vec<_> = submitted
        .iter()
        .map(|m| match m {
            ToScheduler::Submit(s) => (s.id.0, s.prompt.clone()),
            other => panic!("unexpected {other:?}"),
        })
        .collect();
    assert_eq!(prompts, [(1, vec![97, 98]), (3, vec![99])]);
    assert!(matches!(&reported[..], [ToApi::Refused { id: RequestId(2), refusal }]
        if refusal.code.as_deref() == Some("context_length_exceeded")));
}

#[test]
fn aborts_remove_waiting_requests_and_pass_on_the_others() {
    let abort = |id| ToTokenizer::Abort { id: RequestId(id), replica: 0 };
    let (submitted, reported) =
        tokenize(vec![generate(1, "a"), generate(2, "b"), abort(2), abort(9), ToTokenizer::Shutdown]);
    assert!(reported.is_empty());
    assert!(
        matches!(&submitted[..], [ToScheduler::Abort(RequestId(9)), ToScheduler::Submit(s)] if s.id.0 == 1)
    );
}

#[test]
fn the_abort_of_a_long_prompt_never_overtakes_it() {
    let long = || "long ".repeat(10_000);
    let (_folder, model) = model_with(1 << 20, false);
    for _ in 0..20 {
        let messages = vec![
            generate(1, &long()),
            generate(2, "short"),
            ToTokenizer::Abort { id: RequestId(1), replica: 0 },
            generate(3, &long()),
            generate(4, &long()),
            ToTokenizer::Shutdown,
        ];
        let (submitted, reported) = run_all(&model, messages);
        assert!(reported.is_empty());
        let of = |wanted: u64| {
            let of = |(at, message): (usize, &ToScheduler)| match message {
                ToScheduler::Submit(s) if s.id.0 == wanted => Some((at, "submit")),
                ToScheduler::Abort(id) if id.0 == wanted => Some((at, "abort")),
                _ => None,
            };
            submitted.iter().enumerate().filter_map(of).collect::<Vec<_>>()
        };
        assert!(matches!(of(2)[..], [(_, "submit")]));
        assert!(matches!((&of(3)[..], &of(4)[..]), ([(a, "submit")], [(b, "submit")]) if a < b));
        // Withdrawn in time, or passed on behind it.
        assert!(matches!(of(1)[..], [] | [(_, "submit"), (_, "abort")]), "{:?}", of(1));
    }
}

#[test]
fn questions_are_answered_to_the_api_alone() {
    let asking =
        |prompt, add_special_tokens| TextQuestion::Tokenize { prompt, add_special_tokens, with_pieces: true };
    let chat = ChatMessages {
        messages_json: r#"[{"role":"user","content":"a"}]"#.into(),
        tools_json: None,
        template_kwargs_json: None,
        add_generation_prompt: false,
    };
    let text = |text: &str| Prompt::Text(text.into());
    let questions = vec![
        asking(text("a alpha"), true),
        asking(text("<|bos|>a"), true),
        asking(text("a"), false),
        asking(Prompt::Chat(chat), false),
        // Longer than the context, and in the long lane; but not without any limit.
        asking(text(&"x".repeat(100_000)), false),
        asking(text(&"x".repeat(2 << 20)), false),
        TextQuestion::Detokenize { tokens: vec![256, 97, 0xC3, 0xA9], skip_special_tokens: true },
        TextQuestion::Detokenize { tokens: vec![256, 97], skip_special_tokens: false },
        TextQuestion::Detokenize { tokens: vec![97, 10_000], skip_special_tokens: false },
    ];
    let asked = questions
        .into_iter()
        .enumerate()
        .map(|(i, question)| ToTokenizer::AskText { query: i as u64, question: Box::new(question) });
    let (_folder, model) = model_with(64, true);
    let (submitted, reported) = run_all(&model, asked.chain([ToTokenizer::Shutdown]).collect());
    assert!(submitted.is_empty());
    let mut answers: Vec<_> = reported
        .into_iter()
        .map(|message| match message {
            ToApi::TextAnswered { query, result } => (query, result),
            other => panic!("unexpected {other:?}"),
        })
        .collect();
    answers.sort_by_key(|(query, _)| *query);
    let tokens = |at: usize| match &answers[at].1 {
        Ok(TextAnswer::Tokens(tokenized)) => tokenized.clone(),
        other => panic!("unexpected {other:?}"),
    };
    assert_eq!(tokens(0).tokens, [256, 97, 261]);
    assert_eq!(tokens(0).pieces.unwrap(), ["<|bos|>", "a", " alpha"]);
    assert_eq!(tokens(1).tokens, [256, 97]);
    assert_eq!(tokens(2).tokens, [97]);
    assert_eq!(tokens(3).tokens.first(), Some(&258), "the template's own tokens only");
    assert_eq!(tokens(4).tokens.len(), 100_000);
    let refused = |at: usize| answers[at].1.clone().unwrap_err();
    assert_eq!(refused(5).param.as_deref(), Some("prompt"));
    assert_eq!(answers[6].1, Ok(TextAnswer::Text("aé".into())));
    assert_eq!(answers[7].1, Ok(TextAnswer::Text("<|bos|>a".into())));
    assert_eq!((refused(8).status, refused(8).param.as_deref()), (400, Some("tokens")));
}

fn begin(id: u64, stop: &[&str]) -> ToDetokenizer {
    let stop = stop.iter().map(|s| (*s).to_owned()).collect();
    let text = TextParams { stop, skip_special_tokens: true, ..TextParams::default() };
    ToDetokenizer::Begin { replica: 0, requests: vec![Begin { id: RequestId(id), text, prompt: Vec::new() }] }
}

fn out(id: u64, tokens: &[u32], finish: Option<FinishReason>) -> TokenOut {
    let usage = Usage { prompt_tokens: 1, cached_tokens: 0, completion_tokens: tokens.len() as u32 };
    let ends_with_eos = finish == Some(FinishReason::Stop);
    TokenOut {
        id: RequestId(id),
        tokens: tokens.to_vec(),
        finish,
        ends_with_eos,
        usage,
        logprobs: None,
        timing: None,
    }
}

fn deltas(report: Option<ToApi>) -> Vec<Delta> {
    match report {
        Some(ToApi::Deltas(deltas)) => deltas,
        None => Vec::new(),
        other => panic!("unexpected {other:?}"),
    }
}

#[test]
fn state_ends_with_the_request_however_it_ends() {
    let (_folder, model) = model();
    let mut worker = DetokenizerWorker::new(&model);
    for id in 0..4 {
        worker.handle(begin(id, &["TOP"]));
    }
    assert_eq!(worker.running_len(), 4);
    let stop = |s: &str| s.bytes().map(u32::from).collect::<Vec<_>>();
    let report = deltas(worker.handle(ToDetokenizer::Step(vec![
        out(0, &[97, 257], Some(FinishReason::Stop)),
        out(1, &stop("STOP!"), None),
        out(2, &stop("ST"), Some(FinishReason::Length)),
        out(3, &stop("x"), Some(FinishReason::Abort)),
    ])));
    assert_eq!(worker.running_len(), 0);
    let seen: Vec<_> =
        report.iter().map(|d| (d.text.as_str(), d.finish.unwrap().as_openai(), d.stop_string)).collect();
    assert_eq!(
        seen,
        [("a", "stop", None), ("S", "stop", Some(0)), ("ST", "length", None), ("x", "abort", None)],
        "an end token has no text, a held prefix comes out at the end"
    );
    // Rank 0 goes on until the abort of the stopped request arrives.
    assert!(worker.handle(ToDetokenizer::Step(vec![out(1, &[97], Some(FinishReason::Abort))])).is_none());
}

#[test]
fn interleaved_requests_do_not_share_bytes() {
    let (_folder, model) = model();
    let mut worker = DetokenizerWorker::new(&model);
    worker.handle(begin(1, &[]));
    worker.handle(begin(2, &[]));
    let mut texts = [String::new(), String::new()];
    let bytes: Vec<u32> = "😀é漢".bytes().map(u32::from).collect();
    for (step, &byte) in bytes.iter().enumerate() {
        let finish = (step + 1 == bytes.len()).then_some(FinishReason::Length);
        let report =
            worker.handle(ToDetokenizer::Step(vec![out(1, &[byte], finish), out(2, &[byte], finish)]));
        for delta in deltas(report) {
            texts[delta.id.0 as usize - 1] += &delta.text;
        }
    }
    assert_eq!(texts, ["😀é漢", "😀é漢"]);
}

#[test]
fn the_shared_worker_runs_both_loops_to_their_shutdown() {
    let (_folder, model) = model();
    let (to_tokenizer, tokenizer_inbox) = mpsc::channel();
    let (to_detokenizer, detokenizer_inbox) = mpsc::channel();
    let (scheduler, submitted) = mpsc::channel();
    let (api, reported) = mpsc::channel();
    to_tokenizer.send(generate(1, "ab")).unwrap();
    to_detokenizer.send(begin(1, &[])).unwrap();
    let alpha = 261 + WORDS.iter().position(|w| *w == " alpha").unwrap() as u32;
    to_detokenizer.send(ToDetokenizer::Step(vec![out(1, &[alpha], Some(FinishReason::Length))])).unwrap();
    to_detokenizer.send(ToDetokenizer::Shutdown).unwrap();
    to_tokenizer.send(ToTokenizer::Shutdown).unwrap();
    run_shared(
        Arc::new(model),
        links(tokenizer_inbox, vec![scheduler], api.clone()),
        DetokenizerLinks { inbox: Channel(detokenizer_inbox), replicas: 1, api },
    )
    .unwrap();
    assert_eq!(submitted.try_iter().count(), 1);
    let report = deltas(reported.try_iter().next());
    assert_eq!(report[0].text, " alpha");
}

/// A request for `text` in the form of `grammar`.
fn with_grammar(id: u64, text: &str, grammar: Grammar) -> ToTokenizer {
    let ToTokenizer::Generate(mut request) = generate(id, text) else { panic!("a request") };
    request.sampling.grammar = Some(grammar);
    request.tokenizing.grammar_field = "regex".into();
    ToTokenizer::Generate(request)
}

#[test]
fn a_grammar_is_checked_and_the_vocabulary_goes_before_the_first_one() {
    let good = || Grammar::Choice(vec!["a".into()]);
    let (submitted, reported) = tokenize(vec![
        generate(1, "ab"),
        with_grammar(2, "ab", Grammar::Regex("(".into())),
        with_grammar(3, "ab", good()),
        with_grammar(4, "ab", good()),
        with_grammar(5, "abc", good()),
        ToTokenizer::Shutdown,
    ]);
    let order: Vec<_> = submitted
        .iter()
        .map(|message| match message {
            ToScheduler::Submit(s) => (s.id.0, s.prompt.len()),
            ToScheduler::Vocabulary(v) => {
                (0, v.tokens().filter(|(_, is_special)| *is_special).count().min(1))
            }
            other => panic!("unexpected {other:?}"),
        })
        .collect();
    assert_eq!(order, [(1, 2), (0, 1), (3, 2), (4, 2), (5, 3)]);
    assert!(matches!(&reported[..], [ToApi::Refused { id: RequestId(2), refusal }]
        if refusal.code.as_deref() == Some("invalid_grammar") && refusal.param.as_deref() == Some("regex")
            && refusal.message.starts_with("regex ")));
}

#[test]
fn logprobs_become_texts_and_an_echo_comes_once() {
    let (_folder, model) = model();
    let mut worker = DetokenizerWorker::new(&model);
    let text = TextParams { skip_special_tokens: true, echo: true, ..TextParams::default() };
    let prompt = vec![b'a'.into(), 0xC3, 0xA9];
    worker.handle(ToDetokenizer::Begin {
        replica: 0,
        requests: vec![Begin { id: RequestId(1), text, prompt }],
    });
    let logprobs = |token| TokenLogprobs { token, logprob: -0.5, rank: 2, top: vec![(b'z'.into(), -0.25)] };
    let step = |prompt: &[u32], token| {
        let prompt = prompt.iter().map(|&token| logprobs(token)).collect();
        Some(Box::new(StepLogprobs { prompt, output: vec![logprobs(token)] }))
    };
    let first = TokenOut { logprobs: step(&[0xC3, 0xA9], 0xE6), ..out(1, &[0xE6], None) };
    let last = TokenOut { logprobs: step(&[], 257), ..out(1, &[257], Some(FinishReason::Stop)) };
    let first = deltas(worker.handle(ToDetokenizer::Step(vec![first]))).remove(0);
    let last = deltas(worker.handle(ToDetokenizer::Step(vec![last]))).remove(0);
    let echo = first.echo.expect("with the first token");
    assert_eq!((echo.text.as_deref(), echo.tokens.len(), echo.tokens[0].logprob), (Some("aé"), 3, None));
    assert!(echo.ids.is_empty(), "nobody asked for them");
    assert_eq!((&echo.tokens[1].token.bytes[..], echo.tokens[1].logprob), (&[0xC3][..], Some(-0.5)));
    let output = &first.logprobs.expect("asked for")[0];
    assert_eq!((&output.token.bytes[..], output.token.is_shown), (&[0xE6][..], true));
    assert_eq!((&output.top[0].0.bytes[..], output.top[0].1), (&b"z"[..], -0.25));
    assert!(last.echo.is_none() && !last.logprobs.expect("asked for")[0].token.is_shown);
    assert_eq!(last.text, "\u{fffd}", "the text ends inside a character");

    // Tokens without text: the answer's begins anew.
    let text = TextParams { prompt_tokens: true, ..TextParams::default() };
    for asked in [true, false] {
        let prompt = vec![b'a'.into(), 0xC3, 0xA9];
        worker.handle(ToDetokenizer::Begin {
            replica: 0,
            requests: vec![Begin { id: RequestId(2), text: text.clone(), prompt }],
        });
        let logprobs = step(if asked { &[0xC3, 0xA9] } else { &[] }, b'b'.into());
        let end = TokenOut { logprobs, ..out(2, &[b'b'.into()], Some(FinishReason::Length)) };
        let end = deltas(worker.handle(ToDetokenizer::Step(vec![end]))).remove(0);
        let Echo { text, ids, tokens } = *end.echo.expect("with the first token");
        assert_eq!((text, ids), (None, vec![b'a'.into(), 0xC3, 0xA9]));
        assert_eq!(
            tokens.iter().map(|t| t.rank).collect::<Vec<_>>(),
            if asked { vec![0, 2, 2] } else { vec![] }
        );
    }
}

#[test]
fn requests_go_to_their_replica_and_each_gets_the_vocabulary() {
    let (_folder, model) = model();
    let of = |id, replica, grammar: bool| {
        let message = if grammar {
            with_grammar(id, "ab", Grammar::Choice(vec!["a".into()]))
        } else {
            generate(id, "ab")
        };
        let ToTokenizer::Generate(request) = message else { panic!("a request") };
        ToTokenizer::Generate(Box::new(GenerateRequest { replica, ..*request }))
    };
    let (sender, inbox) = mpsc::channel();
    let (first, to_first) = mpsc::channel();
    let (second, to_second) = mpsc::channel();
    let (api, _reported) = mpsc::channel();
    sender.send(of(1, 1, true)).unwrap();
    run_with(&model, (sender, inbox), (vec![first, second], api), |sender| {
        let heard = |receiver: &mpsc::Receiver<ToScheduler>, count: usize| -> Vec<String> {
            let messages = (0..count).map(|_| receiver.recv().expect("a message"));
            messages.map(|message| format!("{message:?}").chars().take(6).collect()).collect()
        };
        assert_eq!(heard(&to_second, 2), ["Vocabu", "Submit"]);
        sender.send(of(2, 0, true)).unwrap();
        sender.send(ToTokenizer::Abort { id: RequestId(1), replica: 1 }).unwrap();
        assert_eq!(heard(&to_first, 2), ["Vocabu", "Submit"]);
        assert_eq!(heard(&to_second, 1), ["Abort("]);
        // Here the new primary of replica 1 is heard where replica 0 is.
        sender.send(ToTokenizer::ReplicaStarted { replica: 1, inbox: "new".into() }).unwrap();
        sender.send(of(3, 1, true)).unwrap();
        assert_eq!(heard(&to_first, 2), ["Vocabu", "Submit"], "a new one has no vocabulary");
        assert!(to_second.recv().is_err(), "the old way is closed");
    });
}

/// Runs a tokenizer beside `drive`, which talks to it.
fn run_with(
    model: &TextModel,
    (sender, inbox): (mpsc::Sender<ToTokenizer>, mpsc::Receiver<ToTokenizer>),
    (schedulers, api): (Vec<mpsc::Sender<ToScheduler>>, mpsc::Sender<ToApi>),
    drive: impl FnOnce(&mpsc::Sender<ToTokenizer>),
) {
    let links = links(inbox, schedulers, api);
    std::thread::scope(|scope| {
        let tokenizer = scope.spawn(|| run_tokenizer(model, links));
        drive(&sender);
        sender.send(ToTokenizer::Shutdown).unwrap();
        tokenizer.join().unwrap().unwrap();
    });
}

#[test]
fn a_replica_that_starts_again_leaves_nothing_of_the_one_before() {
    let (_folder, model) = model();
    let mut worker = DetokenizerWorker::new(&model);
    for (replica, id) in [(0, 1), (1, 2), (1, 3)] {
        let text = TextParams { skip_special_tokens: true, ..TextParams::default() };
        let requests = vec![Begin { id: RequestId(id), text, prompt: Vec::new() }];
        worker.handle(ToDetokenizer::Begin { replica, requests });
    }
    assert!(worker.handle(ToDetokenizer::ReplicaStarted { replica: 1 }).is_none());
    assert_eq!(worker.running_len(), 1);
    assert_eq!(deltas(worker.handle(ToDetokenizer::Step(vec![out(1, &[97], None)])))[0].text, "a");
    assert!(worker.handle(ToDetokenizer::Step(vec![out(2, &[97], None)])).is_none());
}
