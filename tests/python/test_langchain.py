"""LangChain's ChatOpenAI against the real server: programs built on it work without changes."""

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

from test_openai_features import Light


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@pytest.fixture
def model(servers):
    server = servers("chain_tools", 1)
    return ChatOpenAI(
        model=server.model, base_url=server.base_url, api_key="none", temperature=0, max_retries=0, stream_usage=True
    )


def test_invoke_and_stream(model):
    messages = [SystemMessage("Be brief."), HumanMessage("ab")]
    whole = model.invoke(messages)
    assert whole.content == " hello there"
    assert whole.usage_metadata["output_tokens"] == 3
    assert whole.response_metadata["finish_reason"] == "stop"
    streamed = None
    for chunk in model.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.content == whole.content
    assert streamed.usage_metadata["input_tokens"] == whole.usage_metadata["input_tokens"]
    assert [answer.content for answer in model.batch([messages] * 4)] == [" hello there"] * 4


@pytest.mark.parametrize("choice", [None, "any", "weather"])
def test_tools(model, choice):
    bound = model.bind_tools([weather], tool_choice=choice) if choice else model.bind_tools([weather])
    question = HumanMessage("What is the weather in Rome?")
    answer = bound.invoke([question])
    assert [(call["name"], call["args"]) for call in answer.tool_calls] == [("weather", {"city": "Rome"})]
    result = weather.invoke(answer.tool_calls[0])
    assert isinstance(result, ToolMessage) and result.content == "sunny in Rome"
    assert model.bind_tools([weather]).invoke([question, answer, result]).content == " hello there"
    streamed = None
    for chunk in bound.stream([question]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["args"] == {"city": "Rome"}


def test_structured_output(model):
    light = model.with_structured_output(Light, method="json_schema").invoke("ab")
    assert isinstance(light, Light)


def test_a_history_with_calls_made_elsewhere(model):
    call = {"name": "weather", "args": {"city": "Rome"}, "id": "call_1"}
    history = [HumanMessage("Rome?"), AIMessage("", tool_calls=[call]), ToolMessage("sunny", tool_call_id="call_1")]
    assert model.invoke(history).content == " hello there"
