//! Several choices, penalties, biases and log-probabilities from the real binary: the same whether streamed or
//! not, alone or together, at tp 1 and 2, and after a retraction. Case C7.

mod common;

use common::{serve, serve_with};
use lockstep_testkit::{Fixture, Server};
use serde_json::{Value, json};
use std::collections::BTreeMap;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

/// The document of a whole answer; panics unless it is 200.
fn document(server: &Server, path: &str, body: &Value) -> Value {
    let response = server.post(path, body);
    assert_eq!(response.status, 200, "{path} {body}: {}\n{}", response.json(), server.output());
    response.json()
}

/// Text and finish of each choice, by index.
type Choices = BTreeMap<u64, (String, String)>;

fn whole_choices(document: &Value) -> Choices {
    let choices = document["choices"].as_array().expect("choices");
    let text =
        |c: &Value| c["text"].as_str().or(c["message"]["content"].as_str()).expect("a text").to_owned();
    let finish = |c: &Value| c["finish_reason"].as_str().expect("a finish").to_owned();
    choices.iter().map(|c| (c["index"].as_u64().expect("an index"), (text(c), finish(c)))).collect()
}

/// The same of a stream, whose rules are checked on the way.
fn streamed_choices(server: &Server, path: &str, body: &Value) -> (Choices, Value) {
    let mut body = body.clone();
    body["stream_options"] = json!({"include_usage": true});
    let streamed = server.stream(path, &body);
    assert!(streamed.done && streamed.error.is_none(), "{:?}", streamed.chunks);
    let mut choices = Choices::new();
    let mut roles = BTreeMap::new();
    for choice in streamed.chunks.iter().flat_map(|chunk| chunk["choices"].as_array().expect("choices")) {
        let index = choice["index"].as_u64().expect("an index on every chunk");
        let entry = choices.entry(index).or_default();
        assert_eq!(entry.1, "", "choice {index} goes on after its finish: {choice}");
        entry.0 += choice["text"].as_str().or(choice["delta"]["content"].as_str()).unwrap_or_default();
        entry.1 = choice["finish_reason"].as_str().unwrap_or_default().into();
        *roles.entry(index).or_insert(0) += u32::from(choice["delta"]["role"].is_string());
    }
    assert!(roles.values().all(|&count| count == u32::from(path == CHAT)), "one role per choice: {roles:?}");
    (choices, streamed.usage.expect("asked for"))
}

#[test]
fn c7_several_choices() {
    let served = serve("chain", 1);
    let server = &served.server;
    let baseline = server.baseline();
    for (path, body, text, tokens) in [
        (
            COMPLETIONS,
            server.completion_body("A", json!({"n": 3, "max_tokens": 12})),
            " alpha beta gamma delta",
            5,
        ),
        (CHAT, server.chat_body("ab", json!({"n": 3})), " hello there", 3),
    ] {
        let expected: Choices = (0..3).map(|i| (i, (text.to_owned(), "stop".to_owned()))).collect();
        let whole = document(server, path, &body);
        assert_eq!(whole_choices(&whole), expected);
        let (streamed, usage) = streamed_choices(server, path, &body);
        assert_eq!(streamed, expected);
        let alone = document(server, path, &{
            let mut one = body.clone();
            one["n"] = json!(1);
            one
        });
        for usage in [&whole["usage"], &usage] {
            assert_eq!(usage["prompt_tokens"], alone["usage"]["prompt_tokens"], "the prompt counts once");
            assert_eq!(usage["completion_tokens"], json!(3 * tokens), "answers are added up");
        }
    }
    for n in [json!(0), json!(-1), json!(1000), json!("3")] {
        let refused = server.post(COMPLETIONS, &server.completion_body("A", json!({"n": n})));
        assert_eq!((refused.status, &refused.json()["error"]["param"]), (400, &json!("n")));
    }
    let two_prompts =
        document(server, COMPLETIONS, &server.completion_body("", json!({"prompt": ["A", "D"], "n": 2})));
    let texts: Vec<_> = whole_choices(&two_prompts).into_values().map(|(text, _)| text).collect();
    assert_eq!(texts, [" alpha beta gamma delta", " alpha beta gamma delta", "STOP!", "STOP!"]);
    // A client that leaves frees all three.
    let endless = server.completion_body("C", json!({"n": 3, "max_tokens": 100_000, "stream": true}));
    let mut stream = server.http.open_stream(COMPLETIONS, &endless).expect("a stream");
    stream.next_event().expect("an event");
    drop(stream);
    server.after_check(&baseline, "A", " alpha beta gamma delta");
    served.server.stop();
}

#[test]
fn choices_differ_by_their_index_and_share_the_prompt() {
    let prompt: String = (0..100).map(|i| format!("w{}", 3 + i)).collect::<Vec<_>>().join(" ");
    let extra = json!({"n": 4, "temperature": 1.5, "seed": 7, "max_tokens": 12, "ignore_eos": true});
    let mut known: Option<Choices> = None;
    for (tp_size, tokenizers) in [(1, 0), (2, 2)] {
        let served =
            serve_with(Fixture::named("rand_llama"), tp_size, |c| c.flag("--num-tokenizer", tokenizers));
        let server = &served.server;
        let body = server.completion_body(&prompt, extra.clone());
        let before = server.info_number("computed_tokens");
        let first = document(server, COMPLETIONS, &body);
        let computed = server.info_number("computed_tokens") - before;
        // 100 prompt tokens once, the last page (16 at most) and 12 tokens for each choice.
        assert!(computed < 100 + 4 * (16 + 12), "{computed} tokens were computed for 4 choices");
        let choices = whole_choices(&first);
        assert!((1..4).all(|i| choices[&i] != choices[&0]), "{choices:?}");
        assert_eq!(*known.get_or_insert_with(|| choices.clone()), choices, "tp {tp_size}");
        assert_eq!(streamed_choices(server, COMPLETIONS, &body).0, choices);
        served.server.stop();
    }
}

/// Requests whose next token depends on the tokens before it.
fn penalised_bodies(server: &Server) -> Vec<Value> {
    let prompt =
        |first: u32| (0..20).map(|i| format!("w{}", (first + 7 * i) % 250)).collect::<Vec<_>>().join(" ");
    let settings = [
        json!({"repetition_penalty": 1.5}),
        json!({"presence_penalty": 2, "temperature": 1.2, "seed": 3}),
        json!({"frequency_penalty": 1.5, "presence_penalty": -1}),
        json!({"logit_bias": {"17": 4, "18": -100}, "frequency_penalty": 0.5, "temperature": 0.8, "seed": 4}),
        json!({}),
        json!({"temperature": 1, "seed": 5, "logprobs": 3}),
    ];
    let body = |(i, extra): (usize, &Value)| {
        let mut body =
            server.completion_body(&prompt(i as u32), json!({"max_tokens": 40, "ignore_eos": true}));
        body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
        body
    };
    settings.iter().enumerate().map(body).collect()
}

#[test]
fn penalties_do_not_depend_on_the_batch_around() {
    let mut known: Vec<Value> = Vec::new();
    for (tp_size, pages) in [(1, 1024), (1, 14), (2, 14)] {
        let served = serve_with(Fixture::named("rand_llama"), tp_size, |c| {
            c.flag("--num-pages", pages).flag("--reserve-percent", 0)
        });
        let server = &served.server;
        let bodies = penalised_bodies(server);
        let ask = |body: &Value| document(server, COMPLETIONS, body)["choices"].clone();
        if known.is_empty() {
            known = bodies.iter().map(ask).collect();
        }
        let together: Vec<Value> = std::thread::scope(|scope| {
            let asking: Vec<_> = bodies.iter().map(|body| scope.spawn(move || ask(body))).collect();
            asking.into_iter().map(|a| a.join().expect("an answer")).collect()
        });
        assert_eq!(together, known, "tp {tp_size}, {pages} pages");
        if pages == 14 {
            assert!(server.info_number("retractions") > 0, "224 tokens for 6 requests of 60 do not suffice");
        }
        served.server.stop();
    }
}

#[test]
fn penalties_biases_and_allowed_tokens_change_the_answer() {
    let served = serve("rand_llama", 1);
    let server = &served.server;
    let prompt = &served.fixture.expect.prompt;
    let words = |extra: Value| -> Vec<String> {
        let mut body = server.completion_body(prompt, json!({"max_tokens": 24, "ignore_eos": true}));
        body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
        let text = server.answer(COMPLETIONS, &body).text;
        text.split_whitespace().map(str::to_owned).collect()
    };
    assert_eq!(words(json!({"logit_bias": {"9": 100}})), vec!["w9"; 24]);
    let plain = words(json!({}));
    let first = served.fixture.expect.greedy_ids[0];
    let banned = words(json!({"logit_bias": {first.to_string(): -100}}));
    assert!(!banned.contains(&format!("w{first}")) && banned != plain, "{banned:?}");
    let bad_words: Vec<String> = plain.iter().take(3).cloned().collect();
    let without = words(json!({"bad_words": bad_words}));
    assert!(without.len() == 24 && without.iter().all(|word| !bad_words.contains(word)), "{without:?}");
    let allowed = words(json!({"allowed_token_ids": [5, 6]}));
    assert!(allowed.len() == 24 && allowed.iter().all(|w| w == "w5" || w == "w6"), "{allowed:?}");
    // A penalty this strong forbids every repetition among the words with ordinary logits.
    let distinct = |words: &[String]| words.iter().collect::<std::collections::BTreeSet<_>>().len();
    let spread = words(
        json!({"allowed_token_ids": (5..25).collect::<Vec<_>>(), "frequency_penalty": 2, "presence_penalty": 2}),
    );
    let narrow = words(
        json!({"allowed_token_ids": (5..25).collect::<Vec<_>>(), "frequency_penalty": -2, "presence_penalty": -2}),
    );
    assert!(distinct(&spread) > distinct(&narrow), "{spread:?} {narrow:?}");
    served.server.stop();
}

/// The log-probabilities of every chunk, put together.
fn streamed_logprobs(server: &Server, body: &Value) -> Value {
    let streamed = server.stream(COMPLETIONS, body);
    let mut all = json!({"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []});
    for chunk in &streamed.chunks {
        let Some(part) = chunk["choices"][0]["logprobs"].as_object() else { continue };
        for (name, list) in part {
            let list = list.as_array().expect("a list").clone();
            all[name].as_array_mut().expect("a list").extend(list);
        }
    }
    all
}

#[test]
fn logprobs_of_completions() {
    let mut known = None;
    for tp_size in [1, 2] {
        let served = serve("rand_llama", tp_size);
        let server = &served.server;
        let expect = &served.fixture.expect;
        let extra = json!({"max_tokens": 8, "logprobs": 3, "presence_penalty": 0.25, "temperature": 0});
        let body = server.completion_body(&expect.prompt, extra);
        let answer = document(server, COMPLETIONS, &body);
        let logprobs = &answer["choices"][0]["logprobs"];
        let values: Vec<f64> =
            logprobs["token_logprobs"].as_array().expect("a list").iter().filter_map(Value::as_f64).collect();
        assert_eq!(values.len(), 8);
        for (i, value) in values.iter().enumerate() {
            let top = logprobs["top_logprobs"][i].as_object().expect("an object");
            let sum: f64 = top.values().filter_map(Value::as_f64).map(f64::exp).sum();
            assert!(*value < 0.0 && (3..=4).contains(&top.len()) && sum < 1.0 + 1e-6, "{top:?}");
            assert_eq!(top[logprobs["tokens"][i].as_str().expect("a token")].as_f64(), Some(*value));
        }
        assert_eq!(streamed_logprobs(server, &body), *logprobs, "streamed and whole");
        assert_eq!(*known.get_or_insert_with(|| logprobs.clone()), *logprobs, "tp {tp_size}");
        let without = document(server, COMPLETIONS, &server.completion_body(&expect.prompt, json!({})));
        assert_eq!(without["choices"][0]["logprobs"], Value::Null);
        served.server.stop();
    }
}

#[test]
fn echoed_prompts_have_the_logprobs_their_generation_had() {
    for tp_size in [1, 2] {
        let served = serve("rand_llama", tp_size);
        let server = &served.server;
        // Longer than the positions whose logits one step computes.
        let prompt: Vec<u32> = (0..75).map(|i| (3 + 7 * i) % 250).collect();
        let ask = |prompt: &[u32], extra: Value| {
            let mut body =
                server.completion_body("", json!({"prompt": prompt, "ignore_eos": true, "logprobs": 2}));
            body.as_object_mut().expect("an object").extend(extra.as_object().expect("an object").clone());
            document(server, COMPLETIONS, &body)
        };
        let generated = ask(&prompt, json!({"max_tokens": 10}));
        let generated = &generated["choices"][0];
        let ids: Vec<u32> = generated["text"]
            .as_str()
            .expect("a text")
            .split_whitespace()
            .map(|word| word[1..].parse().expect("a word is w and its id"))
            .collect();
        let whole = [prompt.clone(), ids].concat();
        for max_tokens in [0, 1] {
            let echoed = ask(&whole, json!({"echo": true, "max_tokens": max_tokens}));
            let (choice, usage) = (&echoed["choices"][0], &echoed["usage"]);
            assert_eq!(usage["completion_tokens"], json!(max_tokens));
            assert_eq!(choice["finish_reason"], json!("length"));
            let logprobs = &choice["logprobs"];
            assert_eq!(logprobs["token_logprobs"].as_array().map(Vec::len), Some(85 + max_tokens));
            assert_eq!(
                (&logprobs["token_logprobs"][0], &logprobs["top_logprobs"][0]),
                (&Value::Null, &Value::Null)
            );
            for name in ["tokens", "token_logprobs", "top_logprobs"] {
                let list = logprobs[name].as_array().expect("a list");
                let alone = generated["logprobs"][name].as_array().expect("a list");
                assert_eq!(list[75..85], alone[..], "{name} at tp {tp_size}");
            }
            let text = choice["text"].as_str().expect("a text");
            assert!(text.trim_start().starts_with("w3 w10 w17"), "{text}");
            assert_eq!(text.split_whitespace().count(), 85 + max_tokens);
        }
        // The same apart from the answer, by token id, once for all choices of a chat and in each of a completion.
        let apart =
            ask(&whole, json!({"prompt_logprobs": 2, "return_token_ids": true, "n": 2, "max_tokens": 1}));
        for choice in apart["choices"].as_array().expect("a list") {
            assert_eq!(choice["prompt_token_ids"], json!(whole));
            assert_eq!(choice["token_ids"].as_array().map(Vec::len), Some(1));
            let list = choice["prompt_logprobs"].as_array().expect("a list");
            assert_eq!((list.len(), &list[0]), (85, &Value::Null));
            for (at, entry) in list.iter().enumerate().skip(75) {
                let own = &entry[whole[at].to_string()];
                assert_eq!(own["logprob"], generated["logprobs"]["token_logprobs"][at - 75], "tp {tp_size}");
                // Greedy: the model chose the most likely one.
                assert_eq!((&own["rank"], entry.as_object().map(serde_json::Map::len)), (&json!(1), Some(2)));
                assert_eq!(own["decoded_token"], generated["logprobs"]["tokens"][at - 75]);
            }
        }
        // The prompt is cached by now; asking again must not read it from there.
        let again = ask(&whole, json!({"echo": true, "max_tokens": 0}));
        assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], json!(0));
        served.server.stop();
    }
}

#[test]
fn logprobs_of_chats_spell_bytes() {
    let served = serve("chain", 1);
    let server = &served.server;
    let extra = json!({"max_tokens": 6, "logprobs": 1});
    let answer = document(server, COMPLETIONS, &server.completion_body("B", extra.clone()));
    let logprobs = &answer["choices"][0]["logprobs"];
    let bytes = |byte: &str| format!("bytes:\\x{byte}");
    assert_eq!(logprobs["tokens"], json!(["f0", "9f", "98", "80", "c3", "a9"].map(bytes)));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 1, 1, 1, 2]));
    assert_eq!(streamed_logprobs(server, &server.completion_body("B", extra)), *logprobs);

    let body = server.chat_body("ab", json!({"logprobs": true, "top_logprobs": 2}));
    let whole = document(server, CHAT, &body);
    let content = whole["choices"][0]["logprobs"]["content"].as_array().expect("a list").clone();
    let tokens: Vec<_> = content.iter().map(|t| t["token"].as_str().expect("a token")).collect();
    assert_eq!((tokens.len(), &tokens[..2]), (3, &[" hello", " there"][..]), "the end token is counted too");
    assert!(content.iter().all(|t| t["top_logprobs"].as_array().map(Vec::len) == Some(2)), "{content:?}");
    assert_eq!(content[0]["bytes"], json!(b" hello"));
    let streamed = server.stream(CHAT, &body);
    let parts = streamed.chunks.iter().filter_map(|c| c["choices"][0]["logprobs"]["content"].as_array());
    assert_eq!(parts.flatten().cloned().collect::<Vec<_>>(), content);
    let lone = server.post(CHAT, &server.chat_body("ab", json!({"top_logprobs": 2})));
    assert_eq!((lone.status, &lone.json()["error"]["param"]), (400, &json!("top_logprobs")));
    served.server.stop();
}
