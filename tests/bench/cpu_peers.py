"""The table of CPU workloads for Lockstep and its peers, side by side in one run.

    python3 tests/bench/cpu_peers.py --lockstep target/release/lockstep --model FILE.gguf [--llama-server BIN]
        [--openvino PYTHON] [--threads 2] [--rounds 3] [--only prefill,decode] [--json OUT]

Each round starts every server in turn, alone, and runs `http_load.py`'s workloads against it; the table has medians over the
rounds and each figure's ratio to the best peer. PYTHON is an interpreter that has openvino-genai. Servers get one
chance to be ready in 120 s and are ended by their own pid.
"""

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import time
import urllib.request

import http_load

HERE = pathlib.Path(__file__).parent
READY_S = 120
# Name, unit, whether more is better.
COLUMNS = {
    "prefill": ("prefill 512, tok/s", True), "decode": ("decode b=1, tok/s", True),
    "conc8": ("8 at once, tok/s", True), "conc32": ("32 at once, tok/s", True),
    "prefix": ("cold prefix burst, s", False), "prefix_warm": ("warm, s", False), "ttft": ("TTFT 32 tokens, ms", False),
    "start": ("start, s", False), "memory": ("memory idle, MB", False),
}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def commands(args):
    """Name and command of every server, without its port."""
    model, threads = str(args.model), str(args.threads)
    table = {"lockstep": [args.lockstep, "serve", "--model", model, "--threads", threads, *args.serve_flag]}
    if args.llama_server:
        table["llama.cpp"] = [
            args.llama_server, "-m", args.llama_model or model, "-t", threads, "-tb", threads, "--parallel", "32", "-c", "65536",
            "--no-webui",
        ]
    if args.openvino:
        table["OpenVINO"] = [
            args.openvino, str(HERE / "openvino_server.py"), args.openvino_model or model, "--threads", threads,
            *(["--precision", args.openvino_precision] if args.openvino_precision else []),
        ]
    return table


def proportional_mb(pid):
    """Memory of a process and its children, shared pages counted once, in MB."""
    total = 0
    with contextlib.suppress(OSError):
        for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) / 1024
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in pathlib.Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                total += proportional_mb(int(child))
    return total


@contextlib.contextmanager
def running(command):
    """(port, seconds until healthy, idle memory) of a server that lives as long as the block."""
    port = free_port()
    start = time.perf_counter()
    with open("/dev/null", "w") as null:
        server = subprocess.Popen([*command, "--port", str(port)], stdout=null, stderr=null)
    try:
        while True:
            if server.poll() is not None:
                raise SystemExit(f"{command[0]} ended with code {server.returncode} before it was ready")
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1) as answer:
                    if answer.status == 200:
                        break
            except OSError:
                pass
            if time.perf_counter() - start > READY_S:
                raise SystemExit(f"{command[0]} is not ready after {READY_S} s")
            time.sleep(0.02)
        yield port, time.perf_counter() - start, proportional_mb(server.pid)
    finally:
        server.terminate()
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


async def load(port, columns, args):
    options = argparse.Namespace(port=port, seed=args.seed, vocab=args.vocab, repeat=args.repeat, workload="all")
    return await http_load.run(options, columns)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lockstep", required=True)
    parser.add_argument("--model", required=True, type=pathlib.Path)
    parser.add_argument("--serve-flag", action="append", default=[], help="e.g. --serve-flag=--cpu-exact")
    parser.add_argument("--llama-server")
    parser.add_argument("--llama-model", help="another file for llama.cpp")
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--openvino-model", help="another file for OpenVINO")
    parser.add_argument("--openvino-precision", help="of its arithmetic, e.g. f32; else it chooses")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeat", type=int, default=1, help="of each workload in a round")
    parser.add_argument("--only", help="workloads, separated by commas")
    parser.add_argument("--skip", action="append", default=[], metavar="SERVER:WORKLOAD", help="one that takes too long")
    parser.add_argument("--vocab", type=int, default=40000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    wanted = args.only.split(",") if args.only else [c for c in COLUMNS if c not in ("start", "memory")]
    figures = {}
    for round_number in range(args.rounds):
        for name, command in commands(args).items():
            columns = [c for c in wanted if f"{name}:{c}" not in args.skip]
            with running(command) as (port, seconds, memory):
                measured = asyncio.run(load(port, columns, args)) | {"start": seconds, "memory": memory}
            for column, value in measured.items():
                figures.setdefault(name, {}).setdefault(column, []).append(value)
            print(f"round {round_number + 1}, {name}: {measured}", file=sys.stderr, flush=True)
        args.seed += 1
    medians = {n: {c: statistics.median(v) for c, v in row.items()} for n, row in figures.items()}
    for column, (title, more) in COLUMNS.items():
        values = {name: row[column] for name, row in medians.items() if column in row}
        if "lockstep" not in values:
            continue
        line = f"{title:22s}" + "".join(f"  {name} {value:10.2f}" for name, value in values.items())
        peers = [value for name, value in values.items() if name != "lockstep"]
        if peers:
            ratio = values["lockstep"] / max(peers) if more else min(peers) / values["lockstep"]
            line += f"   {ratio:.2f}x the best peer"
        print(line)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
