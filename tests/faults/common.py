"""What the fault, soak and load scripts share: a server of their own, its processes, streams, known answers.

Only the standard library. Every process of a server carries a mark in its environment, so that nothing else is ever
found, counted or ended.
"""
import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

# What the fixture `chain_long` answers, by the last letter of the prompt; "C" has no end.
KNOWN = {
    "A": " alpha beta gamma delta",
    "B": "😀é漢 ok",
    "D": "STOP!",
    "E": "<|end not",
    "F": " one",
    "G": " x y",
    "H": "\n\ndata: [DONE] tail",
}
CHAT = " hello there"
COMPLETIONS = "/v1/completions"
# Of 16 tokens each.
PAGES = 4096


def endless(tokens):
    """The first `tokens` tokens of the answer to "C"."""
    return (" tick tock" * (tokens // 2 + 1))[: 5 * tokens]


def arguments(doc, **numbers):
    """What a script is given: the binary, the model, and flags for whole numbers with these defaults."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("model")
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def end(problems, fine):
    """Says what went wrong, or that all is fine, and ends the script with that."""
    print("\n".join(problems) or fine)
    sys.exit(bool(problems))


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def raise_file_limit(needed):
    """As many open files as this user may have; ends the script when that is not enough."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SystemExit(f"this needs {needed} open files, the hard limit is {hard}; raise it (ulimit -Hn)")


def name_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as f:
            return os.path.basename(f.read().split(b"\0")[0].decode(errors="replace"))
    except OSError:
        return ""


def marked(mark):
    """Living processes that carry the mark in their environment: pid to name."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/environ", "rb") as f:
                if mark.encode() in f.read():
                    found[int(pid)] = name_of(pid)
        except OSError:
            continue
    return found


def link_names():
    """Names of links between the processes of servers, all servers' of this machine: inode to name."""
    with open("/proc/net/unix") as f:
        lines = [line.split() for line in f]
    return {words[6]: words[7] for words in lines if len(words) == 8 and words[7].startswith("@lockstep-")}


def links_of(pids):
    """Names of the links that these processes hold."""
    names, found = link_names(), set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found.add(names.get(os.readlink(f"/proc/{pid}/fd/{fd}")[len("socket:["):-1]))
    return found - {None}


def until(limit_s, condition):
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.005)
    return None


def percentile(values, share):
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Server:
    """A server of two ranks and a tokenizer of its own, unless flags say otherwise."""

    def __init__(self, binary, model, private, *flags, pages=PAGES):
        self.port = free_port()
        self.mark = f"LOCKSTEP_FAULTS={os.getpid()}-{self.port}"
        name, value = self.mark.split("=")
        environment = {**os.environ, name: value, "TMPDIR": private}
        command = [binary, "serve", "--model", model, "--port", str(self.port), "--tp", "2", "--threads", "1"]
        command += ["--num-tokenizer", "1", "--num-pages", str(pages), *flags]
        self.process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        self.lines = []
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line.rstrip("\n")))

    def pid_of(self, role):
        pids = [pid for pid, name in self.processes().items() if name == role]
        return pids[0] if pids else None

    def processes(self):
        """Living processes: pid to name. The launcher is `lockstep`, whatever its file is called."""
        found = marked(self.mark)
        return {pid: "lockstep" if pid == self.process.pid else name for pid, name in found.items()}

    def listens(self):
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def memory_mib(self):
        """Resident MiB by process."""
        found = {}
        for pid, name in self.processes().items():
            with contextlib.suppress(OSError, StopIteration):
                with open(f"/proc/{pid}/status") as f:
                    found[name] = next(int(line.split()[1]) for line in f if line.startswith("VmRSS")) / 1024
        return found

    def descriptors(self):
        """Open files by process."""
        found = {}
        for pid, name in self.processes().items():
            with contextlib.suppress(OSError):
                found[name] = len(os.listdir(f"/proc/{pid}/fd"))
        return found


@contextlib.contextmanager
def running(binary, model, *flags, pages=PAGES):
    """A server that listens; afterwards it drains, and must end with code 0 and leave nothing."""
    with tempfile.TemporaryDirectory() as private:
        server = Server(binary, model, private, *flags, pages=pages)
        try:
            if not until(60, server.listens):
                raise SystemExit("the server never came:\n" + "\n".join(line for _, line in server.lines))
            yield server
            server.process.terminate()
            code = server.process.wait(60)
            left = until(5, lambda: not marked(server.mark)) is None
            if code != 0 or left or os.listdir(private):
                log = "\n".join(line for _, line in server.lines[-20:])
                raise SystemExit(f"exit code {code}, left {marked(server.mark)} {os.listdir(private)}\n{log}")
        finally:
            server.process.kill()
            server.process.wait()
            server.reader.join(5)


class Answer:
    """One answer on a connection of its own, read as it comes."""

    def __init__(self, reader, writer):
        self.reader, self.writer = reader, writer
        self.status, self.headers = None, {}

    async def read_head(self):
        line = await self.reader.readline()
        if not line:
            raise ConnectionError("closed before an answer")
        self.status = int(line.split()[1])
        while (line := await self.reader.readline()) not in (b"\r\n", b""):
            name, value = line.decode().split(":", 1)
            self.headers[name.lower()] = value.strip()

    async def parts(self):
        """The body's pieces as they come."""
        if "content-length" in self.headers:
            yield await self.reader.readexactly(int(self.headers["content-length"]))
            return
        while size := int(await self.reader.readline(), 16):
            yield (await self.reader.readexactly(size + 2))[:-2]
        await self.reader.readline()

    async def body(self):
        return b"".join([part async for part in self.parts()])

    async def events(self):
        """The `data:` of every event."""
        rest = b""
        async for part in self.parts():
            *events, rest = (rest + part).split(b"\n\n")
            for event in events:
                if event.startswith(b"data: "):
                    yield event[6:].decode()

    async def text(self):
        """A whole stream's text and finish; raises on an error event or a stream that has no end."""
        text, finish = "", None
        async for data in self.events():
            if data == "[DONE]":
                return text, finish
            chunk = json.loads(data)
            if chunk.get("error"):
                raise RuntimeError(chunk["error"]["message"])
            for choice in chunk["choices"]:
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                finish = choice["finish_reason"] or finish
        raise RuntimeError("a stream without [DONE]")

    def leave(self, reset=False):
        """Closes the connection; `reset`: with a RST instead of a FIN."""
        if reset and (s := self.writer.get_extra_info("socket")):
            s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.close()


async def send(port, body, path=COMPLETIONS, receive_bytes=None):
    """A connection on which `body` (bytes, or anything JSON) was posted; nothing is read yet."""
    s = socket.socket()
    if receive_bytes:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    s.setblocking(False)
    await asyncio.get_running_loop().sock_connect(s, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=s, limit=receive_bytes or 1 << 16)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    return Answer(reader, writer)


async def ask(port, body, path=COMPLETIONS, receive_bytes=None):
    """The same with the answer's head read."""
    answer = await send(port, body, path, receive_bytes)
    await answer.read_head()
    return answer


def prompt_body(letter, tokens, **fields):
    """A greedy request for the answer to `letter`, with a beginning that varies."""
    return {"prompt": f"{random.randrange(1 << 20):x}{letter}", "max_tokens": tokens, "temperature": 0, **fields}


async def get(port, path):
    """A GET's JSON or text."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    answer = Answer(reader, writer)
    await answer.read_head()
    body = await answer.body()
    writer.close()
    return json.loads(body) if "json" in answer.headers.get("content-type", "") else body.decode()


async def idle(port, limit_s=10):
    """Waits until nothing runs, waits or holds pages; the last /server_info."""
    end = time.monotonic() + limit_s
    while True:
        info = await get(port, "/server_info")
        engine = info["engine"]
        busy = engine["running"] + engine["waiting"] + engine["pages_held"] + info["api"]["requests_open"]
        if not busy or time.monotonic() > end:
            return info, busy
        await asyncio.sleep(0.1)
