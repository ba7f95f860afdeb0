"""The anthropic package against the real server.

`chain_tools` calls `weather` with the city Rome where tools are offered, and says ` hello there` elsewhere.
"""

import anthropic
import pytest

WEATHER = {
    "name": "weather",
    "description": "The weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
QUESTION = {"role": "user", "content": "What is the weather in Rome?"}


@pytest.fixture
def client(servers):
    # The package adds /v1 itself. No retries: an answer that comes only at the second try is a failure here.
    server = servers("chain_tools", 1)
    return anthropic.Anthropic(base_url=server.origin, api_key="none", max_retries=0, timeout=60)


def ask(**extra):
    # The package has no argument for the temperature any more, the API has the field.
    greedy = {"temperature": 0}
    return {"model": "chain_tools", "max_tokens": 64, "messages": [QUESTION], "extra_body": greedy, **extra}


def test_message_and_stream(client):
    whole = client.messages.create(**ask(system="Be brief."))
    assert [(block.type, block.text) for block in whole.content] == [("text", " hello there")]
    assert (whole.role, whole.stop_reason, whole.stop_sequence) == ("assistant", "end_turn", None)
    assert whole.usage.output_tokens == 3
    with client.messages.stream(**ask(system="Be brief.")) as stream:
        assert "".join(stream.text_stream) == " hello there"
        final = stream.get_final_message()
    assert (final.content[0].text, final.stop_reason) == (" hello there", "end_turn")
    counted = client.messages.count_tokens(model="chain_tools", system="Be brief.", messages=[QUESTION])
    assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    counts = (final.usage.input_tokens + final.usage.cache_read_input_tokens, final.usage.output_tokens)
    assert counts == (whole.usage.input_tokens + whole.usage.cache_read_input_tokens, 3)


def test_limits_and_stop_sequences(client):
    short = client.messages.create(**ask(max_tokens=1))
    assert (short.content[0].text, short.stop_reason) == (" hello", "max_tokens")
    stopped = client.messages.create(**ask(stop_sequences=["there"]))
    assert (stopped.content[0].text, stopped.stop_reason, stopped.stop_sequence) == (" hello ", "stop_sequence", "there")
    prefill = client.messages.create(**ask(messages=[QUESTION, {"role": "assistant", "content": "D"}]))
    assert prefill.content[0].text == "STOP!"


@pytest.mark.parametrize("choice", ["auto", "any", "tool"])
def test_tools(client, choice):
    choice = {"type": choice, "name": "weather"} if choice == "tool" else {"type": choice}
    whole = client.messages.create(**ask(tools=[WEATHER], tool_choice=choice))
    assert whole.stop_reason == "tool_use"
    [call] = whole.content
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Rome"})
    with client.messages.stream(**ask(tools=[WEATHER], tool_choice=choice)) as stream:
        pieces = [event.partial_json for event in stream if event.type == "input_json"]
        streamed = stream.get_final_message().content
    assert len(pieces) > 1, "arguments come in pieces"
    assert [(block.name, block.input) for block in streamed] == [("weather", {"city": "Rome"})]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history = [QUESTION, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    end = client.messages.create(**ask(messages=history, tools=[WEATHER]))
    assert end.content[0].text == " hello there"


def test_errors(client):
    with pytest.raises(anthropic.NotFoundError) as raised:
        client.messages.create(**ask(model="nobody"))
    assert raised.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.BadRequestError) as raised:
        client.messages.create(**ask(messages=[{"role": "user", "content": "x" * 600}]))
    assert "512" in raised.value.body["error"]["message"]
