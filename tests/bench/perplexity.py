"""Perplexity of a served model on a text: what its weights' form costs is the ratio of two servers' figures.

    python3 tests/bench/perplexity.py --port 1919 [--chars 1500] [--chunks 0] FILE...

The text is cut into pieces of so many characters, each scored alone by `echo` and `logprobs`; a piece's first token has
no probability. Needs only the standard library.
"""

import argparse
import json
import math
import pathlib
import urllib.request


def log_probabilities(port, text):
    """Of every token of the text but the first."""
    body = {"prompt": text, "max_tokens": 0, "echo": True, "logprobs": 0, "temperature": 0}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)["choices"][0]["logprobs"]["token_logprobs"][1:]


def perplexity(port, texts, chars, chunks):
    """(perplexity, tokens scored) of the first `chunks` pieces of all texts, or all pieces for 0."""
    pieces = [text[at : at + chars] for text in texts for at in range(0, len(text), chars)]
    scores = [score for piece in pieces[: chunks or None] for score in log_probabilities(port, piece)]
    return math.exp(-sum(scores) / len(scores)), len(scores)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, default=1919)
    parser.add_argument("--chars", type=int, default=1500)
    parser.add_argument("--chunks", type=int, default=0)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    args = parser.parse_args()
    value, tokens = perplexity(
        args.port, [file.read_text(encoding="utf-8") for file in args.files], args.chars, args.chunks
    )
    print(f"perplexity {value:.4f} over {tokens} tokens")
