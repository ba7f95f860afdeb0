#!/usr/bin/env python3
"""Pipelines beside the other ways to use the same cores: the bubble against load, and throughput.

    python3 tests/bench/pipelines.py --lockstep target/release/lockstep --prefix "chrt -f 50"

Every run is `bench offline` with so many requests at once, of 64 prompt tokens and 64 answer tokens each. Runs that are
compared take turns, `--rounds` times; the best is printed, and the bubbles of that run. `--dp 2` is two processes at once
with half of the requests and of the threads each: replicas share nothing else. Prints two tables in Markdown.
"""

import argparse
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor


def run(args, model, flags, requests):
    """The report of one `bench offline`; ends the program when it fails."""
    command = [*args.prefix.split(), args.lockstep, "bench", "offline", "--json", "--model", model,
               "--requests", str(requests), "--length-min", "64", "--length-max", "64", "--temperature", "0", *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def rate(args, model, way, requests):
    """Output tokens a second of one way, and the bubbles of its stages."""
    name, size = way
    threads = str(args.threads)
    if name != "dp":
        report = run(args, model, [f"--{name}", str(size), "--threads", threads], requests)
        return report["output_tokens_per_second"], report["bubbles"]
    if requests < size:
        return None, []
    share = ["--threads", str(max(1, args.threads // size))]
    with ThreadPoolExecutor(size) as pool:
        reports = list(pool.map(lambda _: run(args, model, share, requests // size), range(size)))
    # Both begin within the time of a start; the slower one counts.
    return sum(r["output_tokens"] for r in reports) / max(r["seconds"] for r in reports), []


def best_of(args, model, ways, loads):
    """(rate, bubbles) of the best round by (way, load)."""
    best = {}
    for _ in range(args.rounds):
        for load in loads:
            for way in ways:
                found = rate(args, model, way, load)
                if found[0] is not None and found[0] > best.get((way, load), (0, []))[0]:
                    best[way, load] = found
    return best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", default="target/release/lockstep")
    parser.add_argument("--prefix", default="", help="put before every command, such as 'chrt -f 50'")
    parser.add_argument("--threads", type=int, default=2, help="of all ranks of a run together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loads", default="1,2,4,8,16")
    parser.add_argument("--bubble-model", default="smollm2-135m")
    parser.add_argument("--rate-model", default="qwen2.5-coder-0.5b", help="one that tp 2 can cut")
    args = parser.parse_args()
    loads = [int(load) for load in args.loads.split(",")]

    stages = [("pp", 2), ("pp", 4)]
    found = best_of(args, args.bubble_model, stages, loads)
    print(f"| {args.bubble_model}, requests at once | pp 2: each stage waits | pp 4: each stage waits |\n|---|---|---|")
    for load in loads:
        shares = [", ".join(f"{100 * bubble:.0f} %" for bubble in found[way, load][1]) for way in stages]
        print(f"| {load} | {' | '.join(shares)} |", flush=True)

    ways = [("tp", 1), ("tp", 2), ("pp", 2), ("dp", 2)]
    found = best_of(args, args.rate_model, ways, loads)
    print(f"\n| {args.rate_model}, requests at once | " + " | ".join(f"{name} {size}" for name, size in ways) + " |")
    print("|---" * (len(ways) + 1) + "|")
    for load in loads:
        rates = [f"{found[way, load][0]:.1f}" if (way, load) in found else "-" for way in ways]
        print(f"| {load} | {' | '.join(rates)} |", flush=True)


if __name__ == "__main__":
    main()
