"""Mixed load on a server of the fixture `chain_long`, whose right answers are known: short and long prompts, shared
prefixes, streams that are left in the middle, and a KV pool that is too small for all of it. Every answer that is not
left must be right; afterwards no request may be open and no page taken.

    lockstep serve --model FIXTURES/chain_long --num-pages 1500 --port 8000 [--device cuda] [--tp 2] &
    python3 tests/bench/mixed_load.py --url http://127.0.0.1:8000
"""

import argparse
import http.client
import json
import random
import threading
import time
import urllib.parse

ANSWER = " alpha beta gamma delta"
PREFIXES = 6


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--at-once", type=int, default=48)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


class Client:
    def __init__(self, url):
        self.at = urllib.parse.urlsplit(url)

    def open(self, method, path, body=None):
        connection = http.client.HTTPConnection(self.at.hostname, self.at.port, timeout=300)
        headers = {"Content-Type": "application/json"}
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        return connection, connection.getresponse()

    def json(self, method, path, body=None):
        connection, response = self.open(method, path, body)
        text = response.read()
        connection.close()
        assert response.status == 200, (path, response.status, text[:300])
        return json.loads(text)

    def metrics(self):
        connection, response = self.open("GET", "/metrics")
        lines = response.read().decode().splitlines()
        connection.close()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}


def prefixes():
    letters = random.Random(7)
    return ["".join(letters.choice("xyz ") for _ in range(length)) for length in (40, 200, 700, 1500, 3000, 6000)]


def one(client, choose, shared, model):
    """Sends one request; what kind it was. Fails when an answer is wrong."""
    own = "".join(choose.choice("uvw") for _ in range(choose.randrange(1, 60)))
    prompt = choose.choice(shared) + own
    kind = choose.choice(["right", "right", "endless", "left", "sampled"])
    body = {"model": model, "prompt": prompt + ("A" if kind == "right" else "C"), "temperature": 0}
    if kind == "right":
        choice = client.json("POST", "/v1/completions", body | {"max_tokens": 50})["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (ANSWER, "stop"), choice
    elif kind == "endless":
        count = choose.randrange(20, 300)
        answer = client.json("POST", "/v1/completions", body | {"max_tokens": count})
        assert answer["usage"]["completion_tokens"] == count, answer["usage"]
        words = answer["choices"][0]["text"]
        again = client.json("POST", "/v1/completions", body | {"max_tokens": 5})["choices"][0]["text"]
        assert words.startswith(again), (words[:80], again)
    elif kind == "sampled":
        answer = client.json("POST", "/v1/completions", body | {"max_tokens": 30, "temperature": 0.8, "seed": 5, "n": 2})
        assert len(answer["choices"]) == 2
    else:
        connection, response = client.open("POST", "/v1/completions", body | {"max_tokens": 9000, "stream": True})
        assert response.status == 200, response.read()[:300]
        for _ in range(choose.randrange(1, 40)):
            response.readline()
        connection.sock.close() if connection.sock else response.close()
        response.close()
    return kind


def main():
    flags = arguments()
    client, shared = Client(flags.url), prefixes()
    model = client.json("GET", "/v1/models")["data"][0]["id"]
    counts, failures, numbers, lock = {}, [], iter(range(flags.requests)), threading.Lock()

    def work():
        while True:
            with lock:
                number = next(numbers, None)
            if number is None or failures:
                return
            try:
                kind = one(client, random.Random(flags.seed * 1_000_003 + number), shared, model)
                with lock:
                    counts[kind] = counts.get(kind, 0) + 1
            except Exception as error:  # any failure of a request is a finding
                failures.append(f"request {number}: {error!r}")

    started = time.time()
    threads = [threading.Thread(target=work) for _ in range(flags.at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    while client.json("GET", "/server_info")["api"]["requests_open"] and time.time() - started < 600:
        time.sleep(0.05)
    client.json("POST", "/flush_cache")
    while (told := client.metrics())['lockstep_kv_pages{state="free"}'] != told["lockstep_kv_pool_pages"]:
        if time.time() - started > 600:
            failures.append("pages are still taken")
            break
        time.sleep(0.05)
    print(f"{sum(counts.values())} requests in {time.time() - started:.1f} s: {counts}")
    for name, value in told.items():
        if name.startswith(("lockstep_kv_p", "lockstep_retract", "lockstep_cached", "lockstep_evicted")):
            print(f"  {name} {value:.0f}")
    for failure in failures[:5]:
        print("FAILED", failure)
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
