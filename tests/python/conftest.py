"""Servers for the tests: the real binary on fixtures or catalogue models, one process tree per (model, tp size).

Environment, set by ./test:
  LOCKSTEP_BIN       the binary
  LOCKSTEP_FIXTURES  folder written by `cargo run -p lockstep-testkit --example make_fixtures`
  LOCKSTEP_CACHE     where `lockstep pull` keeps models; real-model tests are skipped where it holds none
"""

import json
import os
import pathlib
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

import openai
import pytest

START_SECONDS_MAX = 120
STOP_SECONDS_MAX = 15


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def wait_until(condition, seconds_max, what):
    """Looks at `condition` until it is true; fails naming `what` after `seconds_max`."""
    deadline = time.monotonic() + seconds_max
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds_max} s"
        time.sleep(0.01)


def find_number(value, key):
    """The first number called `key` in a JSON value, at any depth."""
    if isinstance(value, dict):
        if isinstance(value.get(key), int):
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            found = find_number(inner, key)
            if found is not None:
                return found
    return None


class Server:
    """A running `lockstep serve`."""

    def __init__(self, binary, model, tp, *flags):
        self.port = free_port()
        self.origin = f"http://127.0.0.1:{self.port}"
        self.base_url = f"{self.origin}/v1"
        self.model = pathlib.Path(model).name
        self.log = tempfile.TemporaryFile(mode="w+", encoding="utf-8")
        command = [binary, "serve", "--model", str(model), "--tp", str(tp), "--port", str(self.port), *flags]
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, start_new_session=True
        )
        try:
            wait_until(self.is_ready, START_SECONDS_MAX, "readiness")
        except BaseException:
            self.kill()
            raise
        # No retries: an answer that comes only at the second try is a failure here.
        self.client = openai.OpenAI(base_url=self.base_url, api_key="none", max_retries=0, timeout=120)

    def output(self):
        self.log.seek(0)
        return self.log.read()

    def is_ready(self):
        assert self.process.poll() is None, f"the server ended while starting:\n{self.output()}"
        try:
            with urllib.request.urlopen(f"{self.origin}/health", timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    def info(self):
        with urllib.request.urlopen(f"{self.origin}/server_info", timeout=10) as answer:
            return json.load(answer)

    def number(self, key):
        info = self.info()
        found = find_number(info, key)
        assert found is not None, f"no number {key!r} in {info}"
        return found

    def pages_unheld(self):
        """Pages that no request holds: free, or kept by the prefix cache only."""
        info = self.info()
        return find_number(info, "pages_free") + find_number(info, "pages_cached")

    def stop(self):
        """SIGTERM; the server must drain and end with code 0."""
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(STOP_SECONDS_MAX)
        finally:
            self.kill()
        assert code == 0, f"exit code {code}:\n{self.output()}"

    def kill(self):
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def required(variable):
    value = os.environ.get(variable)
    if not value:
        pytest.exit(f"{variable} is not set; run ./test, which sets it", returncode=2)
    return value


@pytest.fixture(scope="session")
def binary():
    return required("LOCKSTEP_BIN")


@pytest.fixture(scope="session")
def fixtures_dir():
    return pathlib.Path(required("LOCKSTEP_FIXTURES"))


@pytest.fixture(scope="session")
def servers(binary, fixtures_dir):
    """A function (fixture name, tp size) -> Server; each is started once and stopped at the end."""
    running = {}

    def get(name, tp):
        if (name, tp) not in running:
            flags = ["--num-pages", "4096", "--threads", "1"]
            running[name, tp] = Server(binary, fixtures_dir / name, tp, *flags)
        return running[name, tp]

    yield get
    for server in running.values():
        server.stop()


@pytest.fixture(scope="session")
def expect(fixtures_dir):
    """A function: fixture name -> its expect.json."""
    return lambda name: json.loads((fixtures_dir / name / "expect.json").read_text(encoding="utf-8"))
