#!/usr/bin/env python3
"""Kills a random process of a server in a random phase, many times, and checks what comes of it.

    kills.py BINARY MODEL [--rounds 50] [--seed 1]

MODEL is the fixture `chain_long` (its answers to prompts that end in C have no end). Each round starts a server with
two ranks and a tokenizer of its own, brings it into a phase (load, idle, prefill, decode, drain), kills one process
with SIGKILL at a random moment, and checks: the launcher ends with code 4 (or was the victim), its last line names the process, open
streams are told within the limit, and no process, file, socket, shared memory or port is left. Prints the time from the kill
to the launcher's message, p50 and max, and exits with 1 if any round failed.
"""
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

from common import COMPLETIONS, Server, arguments, link_names, links_of, marked, until

CHILDREN = ["lockstep-TP0-scheduler", "lockstep-TP1-scheduler", "lockstep-tokenizer-0", "lockstep-detokenizer-0"]
ROLES = ["lockstep"] + CHILDREN
PHASES = ["load", "idle", "prefill", "decode", "drain"]
END_LIMIT_S = 20.0
# Between reaching a phase and the kill, at most: not always its first moment.
DELAY_MAX_S = 0.05


def stream_of(server, prompt, max_tokens):
    body = json.dumps({"prompt": prompt, "max_tokens": max_tokens, "stream": True, "temperature": 0})
    s = socket.create_connection(("127.0.0.1", server.port))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    s.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return s


def rest_of(stream, limit_s):
    stream.settimeout(limit_s)
    data = b""
    try:
        while chunk := stream.recv(65536):
            data += chunk
    except (ConnectionError, TimeoutError) as error:
        data += f" [{type(error).__name__}]".encode()
    return data


def one_round(binary, model, phase, role, delay):
    """Problems of one round, and the seconds to the message (None where there is nobody to say it)."""
    problems, shared_before = [], set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as private:
        server = Server(binary, model, private, "--grace-seconds", "10", "--chunk", "64")
        streams = []
        if phase == "load":
            if not until(END_LIMIT_S, lambda: server.pid_of(role)):
                problems.append("the process never came")
        else:
            if not until(60, server.listens):
                problems.append("never ready")
            if phase == "prefill":
                streams = [stream_of(server, "x" * 3500 + "C", 8) for _ in range(2)]
            if phase in ("decode", "drain"):
                streams = [stream_of(server, "C", 3000) for _ in range(3)]
                for stream in streams:
                    stream.settimeout(30)
                    stream.recv(4096)
            if phase == "drain":
                server.process.send_signal(signal.SIGTERM)
                until(5, lambda: any("draining" in line for _, line in server.lines))
        time.sleep(delay)
        pid = server.pid_of(role)
        links = links_of(marked(server.mark))
        killed = time.monotonic()
        if pid:
            os.kill(pid, signal.SIGKILL)
        for stream in streams:
            data = rest_of(stream, END_LIMIT_S)
            told = b'"error"' in data or b"[DONE]" in data or b"HTTP/1.1 503" in data
            if role != "lockstep" and not told:
                problems.append(f"a stream ended without a word: {data[-200:]!r}")
            stream.close()
        try:
            code = server.process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            problems.append("the launcher does not end")
            server.process.kill()
            code = server.process.wait()
        left = until(5, lambda: not marked(server.mark)) is None
        server.reader.join(5)
        words = [(at - killed, line) for at, line in server.lines if line.startswith("lockstep: ")]
        seconds = None
        if role != "lockstep" and pid:
            if code != 4:
                problems.append(f"exit code {code}")
            if not words or role not in words[-1][1] or server.lines[-1][1] != words[-1][1]:
                problems.append(f"the last line does not name it: {server.lines[-1:]}")
            else:
                seconds = words[-1][0]
        if left:
            problems.append(f"processes left: {marked(server.mark)}")
        # A process has lost its environment, by which it is known, before the kernel closes its files.
        if not until(5, lambda: not links & set(link_names().values())):
            problems.append(f"sockets left: {links & set(link_names().values())}")
        if shared := set(os.listdir("/dev/shm")) - shared_before:
            problems.append(f"shared memory left: {shared}")
        if os.listdir(private):
            problems.append(f"files left: {os.listdir(private)}")
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                s.bind(("127.0.0.1", server.port))
            except OSError as error:
                problems.append(f"the port is taken: {error}")
    return problems, seconds


def main():
    args = arguments(__doc__, rounds=50, seed=1)
    choose = random.Random(args.seed)
    # Every pair once, in random order, before any comes twice.
    pairs = [(phase, role) for phase in PHASES for role in ROLES]
    plan = []
    while len(plan) < args.rounds:
        choose.shuffle(pairs)
        plan += pairs
    times, failed = [], 0
    for number, (phase, role) in enumerate(plan[: args.rounds]):
        problems, seconds = one_round(args.binary, args.model, phase, role, choose.uniform(0, DELAY_MAX_S))
        if seconds is not None:
            times.append((seconds, phase, role))
        failed += bool(problems)
        told = "-" if seconds is None else f"{seconds * 1000:.0f} ms"
        print(f"{number:3} {phase:8} {role:24} {told:>8} {'; '.join(problems) or 'ok'}", flush=True)
    seconds = sorted(t for t, _, _ in times)
    if seconds:
        print(f"{args.rounds} rounds, {failed} failed; time to the message: p50 {statistics.median(seconds) * 1000:.0f} ms, "
              f"max {seconds[-1] * 1000:.0f} ms ({max(times)[1]}, {max(times)[2]})")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
