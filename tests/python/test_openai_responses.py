"""The openai package's responses: whole, streamed, with tools and structured output.

`chain_tools` calls `weather` with the city Rome where tools are offered, and says ` hello there` elsewhere.
"""

import json

import openai
import pytest

from test_openai_features import WEATHER, Light

TOOL = {"type": "function", **WEATHER["function"]}
QUESTION = "What is the weather in Rome?"


def ask(server, **extra):
    return {"model": server.model, "input": QUESTION, "temperature": 0, **extra}


def test_whole_and_streamed(servers):
    server = servers("chain_tools", 1)
    whole = server.client.responses.create(**ask(server, instructions="Be brief."))
    assert (whole.status, whole.output_text) == ("completed", " hello there")
    assert whole.usage.output_tokens == 3
    with server.client.responses.stream(**ask(server, instructions="Be brief.")) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        final = stream.get_final_response()
    assert (text, final.output_text) == (" hello there", " hello there")
    short = server.client.responses.create(**ask(server, max_output_tokens=1))
    assert (short.status, short.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.parametrize("choice", ["auto", "required", {"type": "function", "name": "weather"}])
def test_tools(servers, choice):
    server = servers("chain_tools", 1)
    whole = server.client.responses.create(**ask(server, tools=[TOOL], tool_choice=choice))
    [call] = [item for item in whole.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
    stream = server.client.responses.create(**ask(server, tools=[TOOL], tool_choice=choice, stream=True))
    events = list(stream)
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads("".join(pieces)) == {"city": "Rome"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    history = [{"role": "user", "content": QUESTION}, call.model_dump(exclude_none=True), output]
    end = server.client.responses.create(**ask(server, input=history, tools=[TOOL]))
    assert end.output_text == " hello there"


def test_structured_output(servers):
    server = servers("chain_tools", 1)
    parsed = server.client.responses.parse(**ask(server), text_format=Light).output_parsed
    assert isinstance(parsed, Light)


def test_nothing_is_kept(servers):
    server = servers("chain_tools", 1)
    with pytest.raises(openai.BadRequestError) as raised:
        server.client.responses.create(**ask(server, previous_response_id="resp_1"))
    assert raised.value.param == "previous_response_id"
