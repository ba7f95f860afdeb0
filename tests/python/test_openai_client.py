"""The openai package against the real server, at tp 1 and 2: what a user's program sees."""

import concurrent.futures
import itertools

import openai
import pytest

from conftest import wait_until

both_tp_sizes = pytest.mark.parametrize("tp", [1, 2])


def complete(server, prompt, **extra):
    return server.client.completions.create(**{"model": server.model, "prompt": prompt, "temperature": 0, **extra})


def chat(server, content, **extra):
    messages = [{"role": "user", "content": content}]
    return server.client.chat.completions.create(model=server.model, messages=messages, temperature=0, **extra)


@both_tp_sizes
def test_models_are_listed(servers, tp):
    server = servers("chain", tp)
    assert [m.id for m in server.client.models.list().data] == ["chain"]


@both_tp_sizes
def test_chat(servers, tp):
    answer = chat(servers("chain", tp), "ab")
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content) == ("assistant", " hello there")
    assert choice.finish_reason == "stop"
    # <|im_start|>user\nab<|im_end|>\n<|im_start|>assistant\n, then two words and the end token.
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (21, 3)
    assert answer.usage.total_tokens == 24


@both_tp_sizes
def test_chat_stream(servers, tp):
    chunks = list(chat(servers("chain", tp), "ab", stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == " hello there"
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == ["stop"]
    assert len({c.id for c in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == 21
    assert all(c.usage is None for c in chunks[:-1])


@both_tp_sizes
@pytest.mark.parametrize("key", "ABDEFGH")
def test_completions_of_every_script(servers, expect, tp, key):
    server = servers("chain", tp)
    script = expect("chain")["scripts"][key]
    whole = complete(server, key, max_tokens=16)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == (script["text"], script["finish"])
    assert whole.usage.completion_tokens == len(script["ids"])
    stream = complete(server, key, max_tokens=16, stream=True)
    assert "".join(c.choices[0].text for c in stream) == script["text"]


@both_tp_sizes
def test_length_limit(servers, tp):
    answer = complete(servers("chain", tp), "C", max_tokens=5)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (" tick tock tick tock tick", "length")
    assert answer.usage.completion_tokens == 5


@both_tp_sizes
@pytest.mark.parametrize(
    "prompt, stop, text",
    [
        ("D", "TOP", "S"),
        ("D", ["P!", "TO"], "S"),
        ("D", "STOP!", ""),
        ("A", "ta ga", " alpha be"),
        ("B", "é漢", "😀"),
        ("E", "<|end|>", "<|end not"),
    ],
)
def test_stop_strings(servers, tp, prompt, stop, text):
    server = servers("chain", tp)
    whole = complete(server, prompt, stop=stop, max_tokens=16).choices[0]
    assert (whole.text, whole.finish_reason) == (text, "stop")
    stream = complete(server, prompt, stop=stop, max_tokens=16, stream=True)
    assert "".join(c.choices[0].text for c in stream) == text


@both_tp_sizes
def test_greedy_answer_of_random_weights(servers, expect, tp):
    known = expect("rand_llama")
    answer = complete(servers("rand_llama", tp), known["prompt"], max_tokens=len(known["greedy_ids"]))
    assert answer.choices[0].text.strip() == known["greedy_text"]
    by_ids = complete(servers("rand_llama", tp), known["prompt_ids"], max_tokens=len(known["greedy_ids"]))
    assert by_ids.choices[0].text == answer.choices[0].text


def test_a_seed_gives_the_same_text_at_any_tp_size(servers, expect):
    prompt = expect("rand_llama")["prompt"]
    texts = set()
    for tp, _ in itertools.product([1, 2], range(2)):
        server = servers("rand_llama", tp)
        answer = server.client.completions.create(
            model=server.model, prompt=prompt, temperature=1.2, seed=7, max_tokens=24
        )
        texts.add(answer.choices[0].text)
    assert len(texts) == 1, texts


def test_unknown_model(servers):
    with pytest.raises(openai.NotFoundError) as raised:
        servers("chain", 1).client.completions.create(model="nobody", prompt="A")
    assert raised.value.code == "model_not_found"
    assert "chain" in raised.value.message


@both_tp_sizes
@pytest.mark.parametrize("stream", [False, True])
def test_too_long_a_prompt(servers, tp, stream):
    server = servers("chain", tp)
    for ask in (complete, chat):
        with pytest.raises(openai.BadRequestError) as raised:
            ask(server, "x" * 600, stream=stream)
        assert raised.value.code == "context_length_exceeded"
        assert "512" in raised.value.message
    assert complete(server, "A").choices[0].text == " alpha beta gamma delta"


def test_bad_parameters(servers):
    server = servers("chain", 1)
    for bad in ({"temperature": "hot"}, {"max_tokens": -1}, {"stream_options": {"include_usage": True}}):
        with pytest.raises(openai.BadRequestError):
            complete(server, "A", **bad)


@both_tp_sizes
def test_24_requests_at_once_answer_as_alone(servers, tp):
    server = servers("rand_llama", tp)
    prompts = [" ".join(f"w{i + 1 + j}" for j in range(2 + i % 11)) for i in range(24)]

    def ask(prompt):
        return complete(server, prompt, max_tokens=24).choices[0].text

    alone = [ask(p) for p in prompts]
    with concurrent.futures.ThreadPoolExecutor(len(prompts)) as threads:
        for _ in range(2):
            assert list(threads.map(ask, prompts)) == alone


@both_tp_sizes
def test_a_closed_stream_frees_its_pages(servers, tp):
    server = servers("chain_long", tp)
    before = server.pages_unheld()
    streams = [complete(server, "C", max_tokens=12000, stream=True) for _ in range(3)]
    for stream in streams:
        next(iter(stream))
    assert server.number("running") == 3
    for stream in streams:
        stream.close()
    wait_until(lambda: server.number("running") == 0, 2, "the end of the closed requests")
    wait_until(lambda: server.pages_unheld() == before, 2, "the release of their pages")
    assert complete(server, "A").choices[0].text == " alpha beta gamma delta"
