#!/usr/bin/env python3
"""Thousands of streams at once: none fails, all get on alike, descriptors and memory stay within bounds.

    streams.py BINARY MODEL [--streams 2000] [--tokens 150]

MODEL is the fixture `chain_long`. Opens all streams, waits until every one has its first token, and reads all to their
ends, each checked against the known text. Fair: from the moment when all have begun to the end of the first, the one
that gets least gets at least half of what the middle one gets. Bounded: the launcher holds one descriptor a stream and a few, and what a stream costs it in
memory is told.
"""
import asyncio
import json
import time

from common import arguments, ask, end, endless, idle, prompt_body, raise_file_limit, running

FAIR_SHARE_MIN = 0.5
DESCRIPTORS_SPARE = 128
# Of the launcher, for one stream: its connection, buffers and queue.
STREAM_KIB_MAX = 256
# Connections that are being opened at a time: the kernel's queue is no part of this.
OPENING = 200


class Stream:
    def __init__(self):
        self.text, self.done, self.error = "", False, None

    @property
    def tokens(self):
        return len(self.text) // 5

    async def run(self, port, tokens, gate):
        try:
            async with gate:
                answer = await ask(port, prompt_body("C", tokens, stream=True))
                if answer.status != 200:
                    raise RuntimeError(f"status {answer.status}")
            async for data in answer.events():
                if data == "[DONE]":
                    self.done = True
                    break
                chunk = json.loads(data)
                if chunk.get("error"):
                    raise RuntimeError(chunk["error"]["message"])
                self.text += chunk["choices"][0]["text"]
            answer.leave()
        except (RuntimeError, OSError, ValueError, asyncio.IncompleteReadError) as error:
            self.error = repr(error)


async def open_all(server, args):
    streams, gate = [Stream() for _ in range(args.streams)], asyncio.Semaphore(OPENING)
    memory, start = server.memory_mib(), time.monotonic()
    tasks = [asyncio.create_task(stream.run(server.port, args.tokens, gate)) for stream in streams]
    problems, all_begun, begun_tokens, gains, most, descriptors = [], None, None, None, dict(memory), 0
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0.5)
        now = server.memory_mib()
        most = {name: max(mib, now.get(name, 0)) for name, mib in most.items()}
        descriptors = max(descriptors, server.descriptors().get("lockstep", 0))
        if all_begun is None and all(stream.text or stream.error for stream in streams):
            all_begun = time.monotonic() - start
            begun_tokens = [stream.tokens for stream in streams]
        if gains is None and any(stream.done for stream in streams):
            before = begun_tokens or [stream.tokens for stream in streams]
            gains = sorted(stream.tokens - then for stream, then in zip(streams, before))
    seconds = time.monotonic() - start
    errors = [stream.error for stream in streams if stream.error]
    wrong = [stream.text[-40:] for stream in streams if not stream.error and stream.text != endless(args.tokens)]
    problems += errors[:5] + wrong[:5]
    least, middle = gains[0], gains[len(gains) // 2]
    if all_begun is None or least < FAIR_SHARE_MIN * middle:
        problems.append(f"while one got {middle} tokens, another got {least}")
    if descriptors > args.streams + DESCRIPTORS_SPARE:
        problems.append(f"{descriptors} descriptors")
    stream_kib = 1024 * (most["lockstep"] - memory["lockstep"]) / args.streams
    if stream_kib > STREAM_KIB_MAX:
        problems.append(f"{stream_kib:.0f} KiB of the launcher's memory a stream, at most {STREAM_KIB_MAX}")
    print(f"{args.streams} streams of {args.tokens} tokens: {len(errors)} errors, {len(wrong)} wrong; "
          f"all begun after {all_begun or 0:.1f} s, all done after {seconds:.1f} s; "
          f"{args.streams * args.tokens / seconds:.0f} tokens/s")
    print(f"  between all begun and the first done: {least} tokens for the least, {middle} for the middle, {gains[-1]} for "
          f"the most; {descriptors} descriptors in the launcher")
    for name, mib in sorted(most.items()):
        print(f"  {name:24} {memory[name]:7.1f} MiB before, {mib:7.1f} at most")
    info, busy = await idle(server.port)
    if busy:
        problems.append(f"the server still holds something: {info['engine']}")
    return problems


def main():
    args = arguments(__doc__, streams=2000, tokens=150)
    raise_file_limit(args.streams + 512)
    pages = args.streams * (args.tokens // 16 + 3)
    flags = ["--max-running", str(args.streams)]
    with running(args.binary, args.model, *flags, pages=pages) as server:
        problems = asyncio.run(open_all(server, args))
    end(problems, "all got on alike")


if __name__ == "__main__":
    main()
