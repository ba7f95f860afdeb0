"""Measures a running server over HTTP: prefill, batch-1 decode, N at once, and bursts with one shared prefix.

    python3 tests/bench/http_load.py --port 1919 [--workload all|prefill|decode|conc8|conc32|prefix] [--repeat 3]

Prompts are token ids, fresh in every repetition, so that no answer comes from the prefix cache unless the workload is
about it. Needs only the standard library. Prints one line per workload: the median over repetitions.
"""

import argparse
import asyncio
import json
import random
import statistics
import time


async def generate(port, prompt, max_tokens):
    """One streamed completion: (seconds to the first token, seconds in all, cached tokens)."""
    body = json.dumps({
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "skip_special_tokens": False, "stream_options": {"include_usage": True},
    }).encode()
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    first, usage = None, None
    async for line in reader:
        if not line.startswith(b"data: {"):
            if line.startswith(b"HTTP/1.1 ") and b" 200 " not in line:
                raise SystemExit(line.decode() + (await reader.read()).decode())
            continue
        first = first or time.perf_counter() - start
        usage = json.loads(line[6:]).get("usage") or usage
    writer.close()
    assert usage["completion_tokens"] == max_tokens, usage
    # Not every server says how much came from its cache.
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return first, time.perf_counter() - start, cached


async def burst(port, prompts, max_tokens):
    """All prompts at once: (tokens per second, seconds in all, median seconds to first token, share of prompt tokens cached)."""
    start = time.perf_counter()
    results = await asyncio.gather(*(generate(port, p, max_tokens) for p in prompts))
    seconds = time.perf_counter() - start
    cached = sum(r[2] for r in results) / sum(map(len, prompts))
    return len(prompts) * max_tokens / seconds, seconds, statistics.median(r[0] for r in results), cached


def fresh(rng, vocab, length):
    return [rng.randrange(100, vocab) for _ in range(length)]


async def run(args, workloads=None):
    """Prints each workload's median and gives them by key; `workloads` names those wanted, else `args.workload`."""
    rng = random.Random(args.seed)
    make = lambda n: fresh(rng, args.vocab, n)
    await generate(args.port, make(32), 8)
    medians = {}

    async def measure(key, name, unit, once):
        medians[key] = statistics.median([await once() for _ in range(args.repeat)])
        print(f"{name:28s} {medians[key]:10.2f} {unit}", flush=True)

    # The ends of answers, since a first token may be held back: random tokens are seldom whole characters.
    async def prefill():
        return 512 / (await generate(args.port, make(512), 1))[1]

    async def decode():
        one, many = [(await generate(args.port, make(16), count))[1] for count in (1, 129)]
        return 128 / (many - one)

    async def ttft():
        return 1e3 * (await generate(args.port, make(32), 1))[1]

    async def at_once(n):
        return (await burst(args.port, [make(64) for _ in range(n)], 64))[0]

    async def prefix(prewarm):
        shared = make(1000)
        if prewarm:
            await generate(args.port, shared + make(1), 1)
        speed, seconds, first, cached = await burst(args.port, [shared + make(20) for _ in range(32)], 32)
        print(f"    32 x (1000 shared + 20), {'warm' if prewarm else 'cold'}: {seconds:.2f} s, TTFT p50 {first:.2f} s, {cached:.1%} of prompt tokens cached")
        return seconds

    jobs = {
        "prefill": ("prefill 512", "tok/s", prefill), "decode": ("decode batch 1", "tok/s", decode),
        "ttft": ("TTFT 32-token prompt", "ms", ttft),
        "conc8": ("8 at once (64+64)", "tok/s", lambda: at_once(8)), "conc32": ("32 at once (64+64)", "tok/s", lambda: at_once(32)),
        "prefix": ("shared prefix, cold", "s", lambda: prefix(False)), "prefix_warm": ("shared prefix, warm", "s", lambda: prefix(True)),
    }
    for key, job in jobs.items():
        if key in workloads if workloads is not None else args.workload in ("all", key):
            await measure(key, *job)
    return medians


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=1919)
    parser.add_argument("--workload", default="all")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--vocab", type=int, default=40000)
    parser.add_argument("--seed", type=int, default=1)
    asyncio.run(run(parser.parse_args()))
