"""What people type: `curl` against the real server, to the letter of server-sent events."""

import json
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def curl(server, path, *arguments):
    command = ["curl", "--silent", "--show-error", "--no-buffer", "--max-time", "60", *arguments]
    answer = subprocess.run([*command, server.origin + path], capture_output=True, check=True, timeout=90)
    return answer.stdout.decode("utf-8")


def post(server, path, body, *arguments):
    return curl(server, path, "--header", "Content-Type: application/json", "--data", json.dumps(body), *arguments)


def test_chat(servers):
    server = servers("chain_tools", 1)
    body = {"messages": [{"role": "user", "content": "ab"}], "temperature": 0}
    answer = json.loads(post(server, "/v1/chat/completions", body))
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": " hello there"}


def test_stream(servers):
    server = servers("chain_tools", 1)
    body = {"prompt": "H", "temperature": 0, "stream": True}
    text = post(server, "/v1/completions", body, "--include")
    head, events = text.split("\r\n\r\n", 1)
    assert head.startswith("HTTP/1.1 200") and "content-type: text/event-stream" in head.lower()
    # Every event is one line of JSON; what the model wrote cannot break the frame.
    *events, last = events.removesuffix("\n\n").split("\n\n")
    assert last == "data: [DONE]"
    assert all(event.startswith("data: {") and "\n" not in event for event in events)
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events]
    assert "".join(texts) == "\n\ndata: [DONE] tail"


def test_errors_and_methods(servers):
    server = servers("chain_tools", 1)
    status = ["--output", "/dev/null", "--write-out", "%{http_code}"]
    assert curl(server, "/health", *status) == "200"
    assert curl(server, "/nothing", *status) == "404"
    assert curl(server, "/v1/completions", *status) == "405"
    assert post(server, "/v1/completions", {"prompt": "A", "n": "two"}, *status) == "400"
    assert json.loads(post(server, "/v1/completions", {"prompt": 5}))["error"]["param"] == "prompt"
    # As curl sends --data without a content type of its own: refused with the reason.
    form = json.loads(curl(server, "/v1/completions", "--data", '{"prompt": "A"}'))
    assert form["error"]["code"] == "unsupported_media_type"
