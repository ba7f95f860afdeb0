#!/usr/bin/env python3
"""Mixed traffic with faults for a long time: every request accounted for, every answer checked, memory flat.

    soak.py BINARY MODEL [--seconds 1800] [--clients 24] [--seed 1]

MODEL is the fixture `chain_long`, whose answers are known. Each client does one thing after the other, drawn at random:
whole and streamed completions and chats, long answers, answers that are left in the middle (FIN or RST) or before they
begin, requests that are wrong in different ways, a reader so slow that the server has to wait, a client that dies with
eight open streams and comes back, several requests on one connection, half a request. Each ends as answered (with the
right text), refused (with the right status) or aborted (by the client); anything else is a failure. At the end the
server holds nothing: no request, no page, no descriptor more than at the start. Memory is read every 5 s once a tenth
of the time has passed; what a process gained between the first and the last quarter of that must be small.
"""
import asyncio
import collections
import json
import random
import statistics
import time

from common import (
    CHAT, KNOWN, PAGES, Answer, arguments, ask, end, endless, get, idle, prompt_body, raise_file_limit, running,
    send,
)

CHAT_PATH = "/v1/chat/completions"
MEMORY_EVERY_S = 5
# What allocators and caches may gain: the larger of the two.
GROWTH_SHARE_MAX = 0.03
GROWTH_MIB_MAX = 4
# An answer that takes longer counts as lost.
PATIENCE_S = 120
FILL_TOKENS = 8000
# Two segments, one of them for what is lost when the older one goes.
RECORDER_BYTES = 24 << 20
# A shorter run does not fill enough of it to count as growth.
RECORDER_FROM_S = 120


class Wrong(Exception):
    """Something that must not happen."""


def check(got, wanted):
    if got != wanted:
        raise Wrong(f"{got[-80:]!r} instead of {wanted[-80:]!r}")


def expect_status(answer, status, code=None):
    if answer.status != status:
        raise Wrong(f"status {answer.status} instead of {status}")


async def whole(port):
    letter, text = random.choice(list(KNOWN.items()))
    answer = await ask(port, prompt_body(letter, 40))
    expect_status(answer, 200)
    check(json.loads(await answer.body())["choices"][0]["text"], text)
    answer.leave()
    return "answered"


async def streamed(port):
    letter, text = random.choice(list(KNOWN.items()))
    answer = await ask(port, prompt_body(letter, 40, stream=True))
    expect_status(answer, 200)
    check((await answer.text())[0], text)
    answer.leave()
    return "answered"


async def chat(port):
    stream = random.random() < 0.5
    body = {"messages": [{"role": "user", "content": f"{random.random()}"}], "temperature": 0, "stream": stream}
    answer = await ask(port, body, CHAT_PATH)
    expect_status(answer, 200)
    if stream:
        check((await answer.text())[0], CHAT)
    else:
        check(json.loads(await answer.body())["choices"][0]["message"]["content"], CHAT)
    answer.leave()
    return "answered"


async def long_answer(port):
    tokens = random.randrange(50, 400)
    answer = await ask(port, prompt_body("C", tokens, stream=True))
    expect_status(answer, 200)
    check((await answer.text())[0], endless(tokens))
    answer.leave()
    return "answered"


async def long_prompt(port):
    answer = await ask(port, {"prompt": "y" * random.randrange(500, 4000) + "A", "max_tokens": 8, "temperature": 0})
    expect_status(answer, 200)
    check(json.loads(await answer.body())["choices"][0]["text"], KNOWN["A"])
    answer.leave()
    return "answered"


async def one_connection(port):
    """Three requests, one after the other; counted as one."""
    answer = await send(port, prompt_body("A", 8))
    for letter in "ADG":
        body = json.dumps(prompt_body(letter, 8)).encode()
        if letter != "A":
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            answer.writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        answer = Answer(answer.reader, answer.writer)
        await answer.read_head()
        expect_status(answer, 200)
        check(json.loads(await answer.body())["choices"][0]["text"], KNOWN[letter])
    answer.leave()
    return "answered"


async def slow_reader(port):
    """Takes its answer in small bites with pauses, through a small window."""
    tokens = 400
    answer = await ask(port, prompt_body("C", tokens, stream=True), receive_bytes=4096)
    expect_status(answer, 200)
    text, naps = "", 0
    async for data in answer.events():
        if data == "[DONE]":
            break
        text += json.loads(data)["choices"][0]["text"]
        if naps < 40 and random.random() < 0.2:
            naps += 1
            await asyncio.sleep(random.uniform(0, 0.2))
    check(text, endless(tokens))
    answer.leave()
    return "answered"


async def leaves_stream(port):
    answer = await ask(port, prompt_body("C", 10_000, stream=True))
    expect_status(answer, 200)
    left = random.randrange(1, 30)
    async for _ in answer.events():
        left -= 1
        if not left:
            break
    answer.leave(reset=random.random() < 0.5)
    return "aborted"


async def leaves_before(port):
    """Goes away while the prompt is computed, or while it waits for a whole answer."""
    body = prompt_body("C", 10_000) if random.random() < 0.5 else {"prompt": "z" * 3000 + "C", "max_tokens": 10_000}
    answer = await send(port, body)
    await answer.writer.drain()
    await asyncio.sleep(random.uniform(0, 0.1))
    answer.leave(reset=random.random() < 0.5)
    return "aborted"


async def dies(port):
    """A client with eight streams that is killed, and comes back at once."""
    answers = await asyncio.gather(*(ask(port, prompt_body("C", 10_000, stream=True)) for _ in range(8)))
    for answer in answers:
        expect_status(answer, 200)
    await asyncio.sleep(random.uniform(0, 0.2))
    for answer in answers:
        answer.leave(reset=True)
    return "aborted"


async def half_request(port):
    answer = await send(port, b"{")
    expect_status_of = random.random() < 0.5
    if expect_status_of:
        await answer.read_head()
        expect_status(answer, 400)
    answer.leave(reset=True)
    return "refused" if expect_status_of else "aborted"


BAD = [
    (400, b'{"prompt": "A"'),
    (400, {"prompt": "A", "max_tokens": -1}),
    (400, {"prompt": 7}),
    (400, {"prompt": "A", "temperature": "hot"}),
    (400, {"prompt": "A", "n": 0}),
    (400, {"prompt": "A", "stop": [""] * 100}),
    (400, {"messages": "A"}),
    (400, {"prompt": [999_999]}),
    (400, {"prompt": "w" * 40_000}),
    (400, {"prompt": "A", "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}}),
    (404, {"prompt": "A", "model": "another"}),
]


async def bad(port):
    status, body = random.choice(BAD)
    answer = await ask(port, body)
    if answer.status != status:
        raise Wrong(f"status {answer.status} instead of {status} for {body}")
    if not json.loads(await answer.body())["error"]["message"]:
        raise Wrong("a refusal without a word")
    answer.leave()
    return "refused"


ACTIONS = [(whole, 6), (streamed, 6), (chat, 4), (long_answer, 4), (long_prompt, 1), (one_connection, 2),
           (slow_reader, 1), (leaves_stream, 4), (leaves_before, 3), (dies, 1), (half_request, 1), (bad, 4)]


async def client(port, end, counts, wrong):
    actions, weights = zip(*ACTIONS)
    while time.monotonic() < end:
        action = random.choices(actions, weights)[0]
        try:
            outcome = await asyncio.wait_for(action(port), PATIENCE_S)
        except (Wrong, RuntimeError, OSError, ValueError, KeyError, TimeoutError, asyncio.IncompleteReadError) as error:
            outcome = "WRONG"
            wrong.append(f"{action.__name__}: {type(error).__name__}: {error}")
        counts[outcome] += 1
        counts[action.__name__] += 1


async def watch_memory(server, start, end, samples):
    await asyncio.sleep((end - start) / 10)
    while time.monotonic() < end:
        for name, mib in server.memory_mib().items():
            samples[name].append(mib)
        await asyncio.sleep(min(MEMORY_EVERY_S, (end - start) / 40))


def grown(samples):
    """Lines about memory, and the processes that gained too much."""
    lines, grew = [], []
    for name, values in sorted(samples.items()):
        quarter = max(1, len(values) // 4)
        first, last = statistics.median(values[:quarter]), statistics.median(values[-quarter:])
        lines.append(f"  {name:24} {first:7.1f} MiB in the first quarter, {last:7.1f} in the last, {max(values):7.1f} at most")
        if last - first > max(GROWTH_MIB_MAX, GROWTH_SHARE_MAX * first):
            grew.append(name)
    return lines, grew


async def soak(server, args):
    counts, wrong, samples = collections.Counter(), [], collections.defaultdict(list)
    # One of everything first, every page of the pool written once, and the flight recorder full (16 MiB on each rank, 4
    # bytes a token): what is made once is made.
    prompts = [f"{number:04}" for number in range(PAGES * 16 // FILL_TOKENS + 1)]
    if args.seconds >= RECORDER_FROM_S:
        prompts += ["0000"] * (RECORDER_BYTES // (4 * FILL_TOKENS))
    for prompt in prompts:
        answer = await ask(server.port, {"prompt": prompt + "f" * FILL_TOKENS, "max_tokens": 1})
        expect_status(answer, 200)
        answer.leave()
    for action, _ in ACTIONS:
        await action(server.port)
    before, _ = await idle(server.port)
    descriptors = server.descriptors()
    start = time.monotonic()
    end = start + args.seconds
    clients = [client(server.port, end, counts, wrong) for _ in range(args.clients)]
    await asyncio.gather(*clients, watch_memory(server, start, end, samples))
    info, busy = await idle(server.port)
    problems = wrong[:10]
    if busy:
        problems.append(f"the server still holds something: {info['engine']} {info['api']['requests_open']}")
    if info["processes"] != before["processes"]:
        problems.append("a process was lost")
    # Connections that were left are closed when the kernel has told of it.
    more = {}
    for _ in range(100):
        more = {n: f"{c} after {descriptors[n]}" for n, c in server.descriptors().items() if c > descriptors[n] + 1}
        if not more:
            break
        await asyncio.sleep(0.1)
    problems += [f"more descriptors in {name}: {counted}" for name, counted in more.items()]
    lines, grew = grown(samples)
    problems += [f"memory of {name} grows" for name in grew]
    outcomes = {name: counts[name] for name in ["answered", "refused", "aborted", "WRONG"]}
    print(f"{args.seconds} s, {args.clients} clients: {sum(outcomes.values())} actions: {outcomes}")
    print("  " + ", ".join(f"{action.__name__} {counts[action.__name__]}" for action, _ in ACTIONS))
    print("\n".join(lines))
    generated = info["engine"]["totals"]["generated_tokens"] - before["engine"]["totals"]["generated_tokens"]
    print(f"  {generated} tokens generated, {len(await get(server.port, '/metrics'))} bytes of metrics")
    return problems


def main():
    args = arguments(__doc__, seconds=1800, clients=24, seed=1)
    random.seed(args.seed)
    raise_file_limit(2048)
    with running(args.binary, args.model) as server:
        problems = asyncio.run(soak(server, args))
    end(problems, "everything accounted for")


if __name__ == "__main__":
    main()
