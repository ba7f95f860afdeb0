"""Measures what many connections cost a running server: /health beside idle ones, memory, clients that never read.

    python3 tests/bench/connections.py --port 1919 [--idle 5000] [--deaf 200] [--tokens 4000] [--seconds 5]

Memory is that of the process that listens (the API process), found through /server_info, so server and script share a
host. The clients that do not read ask for long streams with small receive buffers; meanwhile /health is asked as
before. Needs only the standard library and a limit of open files above the number of connections.
"""

import argparse
import http.client
import json
import resource
import socket
import statistics
import time

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


def connect(port, receive_bytes=None):
    stream = socket.socket()
    if receive_bytes:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.connect(("127.0.0.1", port))
    return stream


def ask(port, path):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path)
    answer = connection.getresponse()
    return json.loads(answer.read())


def api_pid(port):
    return next(process["pid"] for process in ask(port, "/server_info")["processes"] if process["name"] == "lockstep")


def resident_kib(pid):
    with open(f"/proc/{pid}/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


def health_ms(port, seconds):
    """Milliseconds of requests to /health, one after the other on one connection."""
    times, end = [], time.perf_counter() + seconds
    with connect(port) as stream:
        while (begin := time.perf_counter()) < end:
            stream.sendall(HEALTH)
            answer = b""
            while b'{"status":"ok"}' not in answer:
                answer += stream.recv(65536)
            times.append(1e3 * (time.perf_counter() - begin))
    return times


def report(what, times):
    times.sort()
    p99 = times[int(0.99 * (len(times) - 1))]
    print(f"/health {what}: p50 {statistics.median(times):.2f} ms, p99 {p99:.2f}, worst {times[-1]:.2f}, {len(times)} asked", flush=True)


def idle_connections(args, pid):
    before, begin = resident_kib(pid), time.perf_counter()
    idle = [connect(args.port) for _ in range(args.idle)]
    print(f"{args.idle} connections opened in {time.perf_counter() - begin:.2f} s")
    # Served, not merely in the kernel's queue.
    ask(args.port, "/health")
    report(f"beside {args.idle} idle connections", health_ms(args.port, args.seconds))
    each = (resident_kib(pid) - before) / args.idle
    print(f"memory of the API process: {before} KiB before, {each:.1f} KiB more per connection")
    for stream in idle:
        stream.close()


def deaf_clients(args, pid):
    body = json.dumps({"prompt": args.prompt, "max_tokens": args.tokens, "stream": True, "temperature": 0, "ignore_eos": True})
    request = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    before = resident_kib(pid)
    streams = [connect(args.port, 4096) for _ in range(args.deaf)]
    for stream in streams:
        stream.sendall(request.encode())
    peak, times, end = before, [], time.perf_counter() + args.deaf_seconds
    while time.perf_counter() < end:
        times += health_ms(args.port, 0.5)
        peak = max(peak, resident_kib(pid))
    report(f"beside {args.deaf} streams that nobody reads", times)
    print(f"memory of the API process: {before} KiB before, at most {(peak - before) / args.deaf:.1f} KiB more per stream")
    generated = ask(args.port, "/server_info")["engine"]["totals"]["generated_tokens"]
    print(f"tokens generated since the server's start: {generated}")
    for stream in streams:
        stream.close()


def run(args):
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    pid = api_pid(args.port)
    report("alone", health_ms(args.port, args.seconds))
    idle_connections(args, pid)
    if args.deaf:
        deaf_clients(args, pid)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=1919)
    parser.add_argument("--idle", type=int, default=5000)
    parser.add_argument("--deaf", type=int, default=200)
    parser.add_argument("--deaf-seconds", type=float, default=20)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--prompt", default="C")
    parser.add_argument("--seconds", type=float, default=5)
    run(parser.parse_args())
