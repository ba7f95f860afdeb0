"""The ollama package against the real server.

`chain_tools` calls `weather` with the city Rome where tools are offered, and says ` hello there` elsewhere.
"""

import json

import ollama
import pytest

from test_openai_features import WEATHER, Light

ASK = {"model": "chain_tools", "options": {"temperature": 0}}
MESSAGES = [{"role": "user", "content": "What is the weather in Rome?"}]


@pytest.fixture
def client(servers):
    return ollama.Client(host=servers("chain_tools", 1).origin, timeout=60)


def test_chat(client):
    whole = client.chat(messages=MESSAGES, **ASK)
    assert (whole.message.role, whole.message.content, whole.done_reason) == ("assistant", " hello there", "stop")
    assert whole.eval_count == 3 and whole.total_duration > 0
    parts = list(client.chat(messages=MESSAGES, stream=True, **ASK))
    assert "".join(part.message.content for part in parts) == " hello there"
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].prompt_eval_count == whole.prompt_eval_count


def test_generate(client):
    whole = client.generate(prompt="A", raw=True, **ASK)
    assert whole.response == " alpha beta gamma delta"
    assert "".join(part.response for part in client.generate(prompt="A", raw=True, stream=True, **ASK)) == whole.response
    short = client.generate(model="chain_tools", prompt="C", raw=True, options={"temperature": 0, "num_predict": 2})
    assert (short.response, short.done_reason) == (" tick tock", "length")


def test_logprobs(client):
    ask = {**ASK, "logprobs": True, "top_logprobs": 2}
    whole = client.chat(messages=MESSAGES, **ask)
    tokens = whole.logprobs
    assert [token.token for token in tokens[:2]] == [" hello", " there"] and len(tokens) == whole.eval_count
    assert all(token.logprob == token.top_logprobs[0].logprob for token in tokens)
    parts = list(client.chat(messages=MESSAGES, stream=True, **ask))
    assert [token for part in parts for token in part.logprobs or []] == tokens
    raw = client.generate(prompt="A", raw=True, **ask).logprobs
    assert [token.token for token in raw[:2]] == [" alpha", " beta"]
    assert client.chat(messages=MESSAGES, **ASK).logprobs is None


def test_tools(client):
    [call] = client.chat(messages=MESSAGES, tools=[WEATHER], **ASK).message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Rome"})
    parts = list(client.chat(messages=MESSAGES, tools=[WEATHER], stream=True, **ASK))
    calls = [call for part in parts for call in part.message.tool_calls or []]
    assert [(call.function.name, call.function.arguments) for call in calls] == [("weather", {"city": "Rome"})]
    history = [*MESSAGES, {"role": "assistant", "content": "", "tool_calls": [call]},
               {"role": "tool", "content": "sunny", "tool_name": "weather"}]
    assert client.chat(messages=history, tools=[WEATHER], **ASK).message.content == " hello there"


def test_format(client):
    answer = client.chat(messages=MESSAGES, format=Light.model_json_schema(), **ASK).message.content
    assert isinstance(Light.model_validate(json.loads(answer)), Light)


def test_models_and_errors(client):
    assert [model.model.removesuffix(":latest") for model in client.list().models] == ["chain_tools"]
    assert "<|im_start|>" in client.show("chain_tools").template
    with pytest.raises(ollama.ResponseError) as raised:
        client.chat(model="nobody", messages=MESSAGES)
    assert raised.value.status_code == 404
