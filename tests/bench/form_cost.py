"""Measures what structured output and penalties add to a decode step: requests at once with them and without.

    python3 tests/bench/form_cost.py --port 1919 [--repeat 3] [--rows 32] [--tokens 48]

Prints, per variant, CPU time and wall time of the ranks per step: on a machine with other work on it the CPU time is
the one to compare, and masks that overlap the forward pass count in it all the same. The server must run on this
machine (CPU times come from /proc). Needs only the standard library.
"""

import argparse
import json
import os
import statistics
import threading
import time
import urllib.request

SCHEMA = {"type": "array", "minItems": 50, "items": {
    "type": "object", "additionalProperties": False, "required": ["name", "age", "tags"], "properties": {
        "name": {"type": "string", "minLength": 5, "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1}}}}
VARIANTS = {
    "sampled": {"temperature": 1, "ignore_eos": True},
    "sampled, schema": {"temperature": 1, "json_schema": SCHEMA},
    "sampled, penalty": {"temperature": 1, "ignore_eos": True, "repetition_penalty": 1.05},
    "greedy": {"temperature": 0, "ignore_eos": True},
    "greedy, schema": {"temperature": 0, "json_schema": SCHEMA},
    "greedy, penalty": {"temperature": 0, "ignore_eos": True, "repetition_penalty": 1.05},
}


def server_info(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/server_info") as answer:
        return json.load(answer)


def find(value, key):
    """The first value of `key` anywhere in a document."""
    if isinstance(value, dict):
        if key in value:
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        return next((found for item in value if (found := find(item, key)) is not None), None)
    return None


def cpu_ms(pids):
    """User and system time of processes so far."""
    stats = [open(f"/proc/{pid}/stat").read().rsplit(") ", 1)[1].split() for pid in pids]
    return sum(int(stat[11]) + int(stat[12]) for stat in stats) * 1000 / os.sysconf("SC_CLK_TCK")


def ask(port, row, extra, tokens):
    body = {"prompt": f"Person {row}: ", "max_tokens": tokens, "seed": row, **extra}
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        assert json.load(answer)["usage"]["completion_tokens"] == tokens


def burst(port, extra, rows, tokens):
    threads = [threading.Thread(target=ask, args=(port, row, extra, tokens)) for row in range(rows)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=1919)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--rows", type=int, default=32, help="requests at once")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of each answer")
    args = parser.parse_args()
    pids = [rank["pid"] for rank in find(server_info(args.port), "ranks")]
    for extra in VARIANTS.values():
        burst(args.port, extra, args.rows, 2)
    seen = {name: [] for name in VARIANTS}
    for _ in range(args.repeat):
        for name, extra in VARIANTS.items():
            steps, cpu, start = find(server_info(args.port), "steps"), cpu_ms(pids), time.perf_counter()
            burst(args.port, extra, args.rows, args.tokens)
            wall, cpu = (time.perf_counter() - start) * 1000, cpu_ms(pids) - cpu
            steps = find(server_info(args.port), "steps") - steps
            seen[name].append((cpu / steps, wall / steps))
    for name, figures in seen.items():
        cpu, wall = (statistics.median(column) for column in zip(*figures))
        print(f"{name:16} {cpu:7.1f} ms CPU, {wall:7.1f} ms wall a step")


if __name__ == "__main__":
    main()
