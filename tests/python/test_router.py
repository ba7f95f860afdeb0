"""Scaling out: sglang-router in front of two servers, as docs/operations.md tells it.

One of the two is shared with the other tests; the other one is killed under load.
"""

import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request

import openai
import pytest

from conftest import Server, free_port, wait_until

HELLO = [{"role": "user", "content": "ab"}]


class Router:
    """A running sglang-router in front of `workers`."""

    def __init__(self, workers):
        self.origin = f"http://127.0.0.1:{free_port()}"
        port = self.origin.rsplit(":", 1)[1]
        command = [
            sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", port,
            "--prometheus-port", str(free_port()), "--policy", "cache_aware", "--health-check-interval-secs", "1",
            # A worker that fails once gets no further requests, the one that failed included.
            "--health-failure-threshold", "1", "--cb-failure-threshold", "1",
            "--worker-urls", *(worker.origin for worker in workers),
        ]
        self.log = tempfile.TemporaryFile(mode="w+", encoding="utf-8")
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log)
        try:
            wait_until(lambda: self.healthy() == len(workers), 60, "the router's finding its workers")
        except BaseException:
            self.stop()
            raise
        self.client = openai.OpenAI(base_url=f"{self.origin}/v1", api_key="none", max_retries=0, timeout=60)

    def healthy(self):
        """How many workers the router holds for healthy."""
        if self.process.poll() is not None:
            self.log.seek(0)
            raise AssertionError(f"the router ended:\n{self.log.read()}")
        try:
            with urllib.request.urlopen(f"{self.origin}/workers", timeout=5) as answer:
                return sum(worker["is_healthy"] for worker in json.load(answer)["workers"])
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return 0

    def stop(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def routed(servers, binary, fixtures_dir):
    """The router, the worker that stays and the one that a test may kill."""
    stays = servers("chain_long", 1)
    goes = Server(binary, fixtures_dir / "chain_long", 1, "--num-pages", "4096", "--threads", "1")
    router = None
    try:
        router = Router([stays, goes])
        yield router, stays, goes
    finally:
        if router is not None:
            router.stop()
        goes.kill()


def test_two_servers_behind_a_router(routed):
    router, stays, goes = routed

    def complete(prompt, **extra):
        return router.client.completions.create(model="chain_long", prompt=prompt, temperature=0, **extra)

    answer = router.client.chat.completions.create(model="chain_long", messages=HELLO, temperature=0)
    assert answer.choices[0].message.content == " hello there"
    stream = router.client.chat.completions.create(model="chain_long", messages=HELLO, temperature=0, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == " hello there"

    # Prompts that begin alike go where their beginning is cached: only the first one computes it.
    for kind in "uvwxyz":
        cached = [complete(kind * 400 + "A").usage.prompt_tokens_details.cached_tokens for _ in range(3)]
        assert cached[0] == 0 and min(cached[1:]) >= 384, (kind, cached)

    # A server dies: its streams break, those of the other one go on, and new requests are all answered.
    streams = [complete(kind * 400 + "C", max_tokens=8000, stream=True) for kind in "klmnop"]
    for stream in streams:
        next(iter(stream))
    held = goes.number("running")
    assert 0 < held < len(streams) and held + stays.number("running") == len(streams), "both have work"
    goes.kill()
    for _ in range(8):
        assert complete("A").choices[0].text == " alpha beta gamma delta"
    wait_until(lambda: router.healthy() == 1, 30, "the router's noticing the dead server")
    assert stays.number("running") == len(streams) - held
    for stream in streams:
        stream.close()
    wait_until(lambda: stays.number("running") == 0, 5, "the end of the closed streams")
