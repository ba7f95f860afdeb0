#!/usr/bin/env python3
"""A storm of clients that connect and leave at random, and what it costs those that stay.

    storm.py BINARY MODEL [--leaving 128] [--staying 8] [--seconds 120] [--seed 1]

MODEL is the fixture `chain_long`. Staying clients ask for short streamed answers, one after the other, and measure the
time to the first token. First in calm: beside them run as many endless streams as the storm has clients, and all of
them stay. Then in the storm: those clients ask for endless answers and leave after 0 to 2 s (before, at or after the
first token, by FIN or RST), for the given time. Fails when the storm's p99 is above twice that of calm, when an answer
is wrong, or when the server holds anything afterwards. Tells the same with nobody else as well.
"""
import asyncio
import json
import random
import time

from common import KNOWN, arguments, ask, end, idle, percentile, prompt_body, raise_file_limit, running, send

RATIO_MAX = 2.0
CALM_SHARE = 0.25
ENDLESS_TOKENS = 15_000


async def stay(port, end, times, wrong):
    while time.monotonic() < end:
        asked = time.monotonic()
        answer = await ask(port, prompt_body("A", 8, stream=True))
        begun, text = None, ""
        async for data in answer.events():
            begun = begun or time.monotonic()
            if data != "[DONE]":
                text += json.loads(data)["choices"][0]["text"]
        if answer.status != 200 or text != KNOWN["A"]:
            wrong.append(f"status {answer.status}, {text!r}")
        else:
            times.append(begun - asked)
        answer.leave()


async def leave(port, end, counts):
    while time.monotonic() < end:
        answer = await send(port, prompt_body("C", ENDLESS_TOKENS, stream=True))
        counts["connected"] += 1
        try:
            await asyncio.wait_for(drink(answer), random.uniform(0, 2))
        except TimeoutError:
            pass
        answer.leave(reset=random.random() < 0.5)


async def drink(answer):
    await answer.read_head()
    async for _ in answer.parts():
        pass


async def endless_stream(port):
    """Reads for as long as it is let."""
    while True:
        answer = await send(port, prompt_body("C", ENDLESS_TOKENS, stream=True))
        try:
            await drink(answer)
        finally:
            answer.leave()


async def measure(port, seconds, staying, beside):
    """Times to the first token of staying clients, while `beside` runs."""
    times, wrong, end = [], [], time.monotonic() + seconds
    tasks = [asyncio.create_task(work) for work in beside(end)]
    await asyncio.gather(*(stay(port, end, times, wrong) for _ in range(staying)))
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    wrong += [repr(error) for error in ended if isinstance(error, Exception)]
    return times, wrong


async def storm(server, args):
    port, problems, p99 = server.port, [], {}
    counts = {"connected": 0}
    phases = [
        ("alone", args.seconds * CALM_SHARE, lambda end: []),
        ("calm", args.seconds * CALM_SHARE, lambda end: [endless_stream(port) for _ in range(args.leaving)]),
        ("storm", args.seconds, lambda end: [leave(port, end, counts) for _ in range(args.leaving)]),
    ]
    for name, seconds, beside in phases:
        times, wrong = await measure(port, seconds, args.staying, beside)
        problems += wrong[:5]
        p99[name] = percentile(times, 0.99)
        print(f"{name:6} {seconds:6.0f} s  {len(times):6} answers  time to the first token: "
              f"p50 {1e3 * percentile(times, 0.5):6.1f} ms  p99 {1e3 * p99[name]:6.1f} ms  max {1e3 * max(times):6.1f} ms", flush=True)
        info, busy = await idle(port)
        if busy:
            problems.append(f"after {name} the server still holds something: {info['engine']}")
    ratio = p99["storm"] / p99["calm"]
    print(f"{counts['connected']} clients came and left; p99 of the storm is {ratio:.2f} times that of calm")
    if ratio > RATIO_MAX:
        problems.append(f"the storm costs those that stay more than {RATIO_MAX} times")
    return problems


def main():
    args = arguments(__doc__, leaving=128, staying=8, seconds=120, seed=1)
    random.seed(args.seed)
    raise_file_limit(args.leaving + args.staying + 256)
    flags = ["--max-running", str(args.leaving + args.staying + 64)]
    with running(args.binary, args.model, *flags, pages=131_072) as server:
        problems = asyncio.run(storm(server, args))
    end(problems, "those that stay do not notice")


if __name__ == "__main__":
    main()
