"""The openai package: tools, structured output, log-probabilities and several choices.

`chain_tools` calls `weather` with the city Rome where tools are offered, and says ` hello there` elsewhere.
"""

import json
import math
from typing import Literal

import openai
import pydantic
import pytest

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Light(pydantic.BaseModel):
    """Every value has one short spelling, so that answers end soon whatever the model prefers."""

    model_config = pydantic.ConfigDict(
        extra="forbid", json_schema_extra={"x-guidance": {"whitespace_flexible": False}}
    )
    on: bool
    colour: Literal["red", "green"]


def chat(server, **extra):
    messages = extra.pop("messages", [{"role": "user", "content": "What is the weather in Rome?"}])
    return server.client.chat.completions.create(
        **{"model": server.model, "messages": messages, "temperature": 0, **extra}
    )


@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "weather"}}], ids=["auto", "required", "named"]
)
def test_tool_calls_and_their_result(servers, choice):
    server = servers("chain_tools", 1)
    answer = chat(server, tools=[WEATHER], tool_choice=choice).choices[0]
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    [call] = answer.message.tool_calls
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    history = [
        {"role": "user", "content": "What is the weather in Rome?"},
        answer.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    end = chat(server, messages=history, tools=[WEATHER]).choices[0]
    assert (end.message.content, end.message.tool_calls, end.finish_reason) == (" hello there", None, "stop")


def test_tool_choice_none(servers):
    answer = chat(servers("chain_tools", 1), tools=[WEATHER], tool_choice="none").choices[0]
    assert (answer.message.content, answer.message.tool_calls) == (" hello there", None)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_streamed_tool_calls(servers, choice):
    server = servers("chain_tools", 1)
    messages = [{"role": "user", "content": "What is the weather in Rome?"}]
    with server.client.chat.completions.stream(
        model=server.model, messages=messages, tools=[WEATHER], tool_choice=choice, temperature=0
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    pieces = [e.arguments_delta for e in events if e.type == "tool_calls.function.arguments.delta"]
    done = [e for e in events if e.type == "tool_calls.function.arguments.done"]
    assert len([piece for piece in pieces if piece]) > 1, "arguments come in pieces"
    assert [(e.name, json.loads(e.arguments)) for e in done] == [("weather", {"city": "Rome"})]
    assert "".join(pieces) == done[0].arguments
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.name == "weather"


def test_structured_output(servers):
    server = servers("chain_tools", 1)
    ask = {"model": server.model, "messages": [{"role": "user", "content": "ab"}], "temperature": 0}
    whole = server.client.chat.completions.parse(response_format=Light, **ask).choices[0]
    assert isinstance(whole.message.parsed, Light) and whole.finish_reason == "stop"
    with server.client.chat.completions.stream(response_format=Light, **ask) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == whole.message.parsed


def test_structured_output_that_cannot_be_compiled(servers):
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "alien"}}}
    with pytest.raises(openai.BadRequestError) as raised:
        chat(servers("chain_tools", 1), response_format=schema)
    assert raised.value.code == "invalid_grammar"


def test_log_probabilities(servers):
    server = servers("chain_tools", 1)
    content = chat(server, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert [entry.token for entry in content] == [" hello", " there", "<|eos|>"]
    for entry in content:
        assert bytes(entry.bytes).decode() == entry.token
        assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token
        assert entry.logprob <= 0 and math.isclose(entry.logprob, entry.top_logprobs[0].logprob)
    answer = server.client.completions.create(
        model=server.model, prompt="A", temperature=0, max_tokens=2, logprobs=1, echo=True
    )
    shown = answer.choices[0].logprobs
    assert shown.tokens == ["A", " alpha", " beta"] and shown.text_offset == [0, 1, 7]
    assert shown.token_logprobs[0] is None and all(value <= 0 for value in shown.token_logprobs[1:])


def test_tokens_and_log_probabilities_of_prompts(servers):
    server = servers("chain_tools", 1)
    wish = {"prompt_logprobs": 2, "return_token_ids": True}
    answer = server.client.completions.create(
        model=server.model, prompt="AB", temperature=0, max_tokens=2, n=2, extra_body=wish
    )
    for choice in answer.choices:
        first, *others = choice.prompt_logprobs
        assert first is None and len(others) == len(choice.prompt_token_ids) - 1 and len(choice.token_ids) == 2
        for token, entry in zip(choice.prompt_token_ids[1:], others):
            own = entry[str(token)]
            assert own["logprob"] <= 0 and 2 <= len(entry) <= 3
            assert {1, 2} <= {each["rank"] for each in entry.values()}
    answer = chat(server, extra_body=wish)
    assert len(answer.prompt_logprobs) == len(answer.prompt_token_ids) == answer.usage.prompt_tokens
    assert len(answer.choices[0].token_ids) == answer.usage.completion_tokens
    chunks = list(chat(server, stream=True, extra_body={"return_token_ids": True}))
    assert chunks[0].prompt_token_ids == answer.prompt_token_ids
    ids = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or []]
    assert ids == answer.choices[0].token_ids


def test_several_choices(servers):
    server = servers("chain_tools", 1)
    answer = chat(server, n=3)
    assert [(c.index, c.message.content) for c in answer.choices] == [(i, " hello there") for i in range(3)]
    texts = ["", "", ""]
    for chunk in chat(server, n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [" hello there"] * 3
    # One prompt, several endings: the counts hold the prompt once.
    assert answer.usage.completion_tokens == 9
    assert answer.usage.prompt_tokens == chat(server).usage.prompt_tokens
