"""OpenVINO GenAI behind a small HTTP server, so that `cpu_peers.py` can drive it as it drives the others.

    python3 openvino_server.py MODEL.gguf --port 8000 --threads 2     (needs `pip install openvino-genai numpy`)

Answers `GET /health` and streamed `POST /v1/completions` whose prompt is token ids. The pipeline steps on one thread;
requests are handed over between steps.
"""

import argparse
import asyncio
import json
import queue
import threading

import numpy
import openvino
import openvino_genai


class Engine:
    """Requests, and the thread that steps the pipeline."""

    def __init__(self, model, threads, cache_gib, precision):
        config = openvino_genai.SchedulerConfig()
        config.cache_size = cache_gib
        config.max_num_batched_tokens = 512
        config.dynamic_split_fuse = True
        config.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        if precision:
            properties["INFERENCE_PRECISION_HINT"] = precision
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(model, config, "CPU", properties)
        self.arrived = queue.Queue()
        self.running = {}
        threading.Thread(target=self.run, daemon=True).start()

    def run(self):
        number = 0
        while True:
            # Sleeps while there is nothing to do.
            wait = not self.running
            while wait or not self.arrived.empty():
                prompt, tokens, tell = self.arrived.get()
                wait = False
                generation = openvino_genai.GenerationConfig()
                generation.max_new_tokens = tokens
                generation.ignore_eos = True
                generation.do_sample = False
                ids = openvino.Tensor(numpy.array([prompt], dtype=numpy.int64))
                self.running[number] = (self.pipeline.add_request(number, ids, generation), tell)
                number += 1
            self.pipeline.step()
            for key, (handle, tell) in list(self.running.items()):
                count = 0
                while handle.can_read():
                    count += sum(len(output.generated_ids) for output in handle.read().values())
                done = handle.get_status() != openvino_genai.GenerationStatus.RUNNING
                if count or done:
                    tell(count, done)
                if done:
                    del self.running[key]


async def serve(engine, reader, writer):
    """One connection, one request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    if head.startswith("GET "):
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        await writer.drain()
        return writer.close()
    length = next(int(line[15:]) for line in head.split("\r\n") if line.lower().startswith("content-length:"))
    body = json.loads(await reader.readexactly(length))
    loop, tokens = asyncio.get_running_loop(), asyncio.Queue()
    tell = lambda count, done: loop.call_soon_threadsafe(tokens.put_nowait, (count, done))
    engine.arrived.put((body["prompt"], body["max_tokens"], tell))
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    total, done = 0, False
    while not done:
        count, done = await tokens.get()
        total += count
        event = {"choices": [{"text": "x" * count, "index": 0}]}
        writer.write(f"data: {json.dumps(event)}\n\n".encode())
        await writer.drain()
    usage = {"completion_tokens": total, "prompt_tokens": len(body["prompt"])}
    writer.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\ndata: [DONE]\n\n".encode())
    await writer.drain()
    writer.close()


async def main(args):
    engine = Engine(args.model, args.threads, args.cache_gib, args.precision)
    server = await asyncio.start_server(lambda r, w: serve(engine, r, w), "127.0.0.1", args.port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--cache-gib", type=int, default=2)
    parser.add_argument("--precision", help="of its arithmetic, e.g. f32; its own choice is bf16 where the CPU has it")
    asyncio.run(main(parser.parse_args()))
