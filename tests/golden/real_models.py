#!/usr/bin/env python3
"""Compares a running server with Hugging Face transformers on the same GGUF file: greedy text on 20 prompts.

Run by hand, in the environment of `requirements.txt`; the figures stand in `docs/models.md`:

    lockstep serve --model FILE.gguf --port 8000 --max-context 1024
    python real_models.py FILE.gguf http://127.0.0.1:8000

transformers runs in float32 with the file's values as Lockstep holds them: matrices in GGUF blocks are
rounded to bf16. `--as-stored` leaves the rounding out, and so shows what it costs. Prompts travel
as token ids, so tokenizers play no part. Per prompt: the tokens until the first difference, and by how
much transformers preferred its own token there (log probability over the second best). Exits 1
when a text differs where that margin is above `--margin`.
"""

import argparse
import json
import sys
import urllib.request
from pathlib import Path

import torch
from gguf import GGMLQuantizationType, GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer

PROMPTS = Path(__file__).resolve().parent / "real_prompts.json"
TOKENS = 64


def load(file: Path, as_stored: bool) -> tuple:
    place = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32, attn_implementation="eager")
    if not as_stored:
        plain = {GGMLQuantizationType.F32, GGMLQuantizationType.F16}
        for tensor in GGUFReader(file).tensors:
            if len(tensor.shape) > 1 and tensor.tensor_type in plain:
                sys.exit(f"{tensor.name} is {tensor.tensor_type.name}, which Lockstep does not round")
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.copy_(parameter.data.to(torch.bfloat16).float())
    return model.eval(), AutoTokenizer.from_pretrained(**place)


@torch.no_grad()
def greedy(model, ids: list[int]) -> tuple[list[int], list[float]]:
    """`TOKENS` tokens after `ids`, and each one's margin over the second best."""
    answer, margins, cache, step = [], [], None, ids
    for _ in range(TOKENS):
        out = model(torch.tensor([step]), past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        best = torch.log_softmax(out.logits[0, -1], -1).topk(2)
        margins.append(float(best.values[0] - best.values[1]))
        step = [int(best.indices[0])]
        answer += step
    return answer, margins


def served(url: str, ids: list[int]) -> str:
    body = {
        "prompt": ids, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == TOKENS, answer["usage"]
    return answer["choices"][0]["text"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("url")
    parser.add_argument("--as-stored", action="store_true", help="do not round block matrices to bf16")
    parser.add_argument("--margin", type=float, default=0.01, help="below this, tokens may rightly differ")
    args = parser.parse_args()
    model, tokenizer = load(args.file, args.as_stored)
    same, wrong = 0, 0
    prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))
    for number, prompt in enumerate(prompts):
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        answer, margins = greedy(model, ids)
        text = served(args.url, ids)
        # A character of which not all tokens are there decodes to U+FFFD and is not compared.
        parts = (tokenizer.decode(answer[: k + 1], skip_special_tokens=False) for k in range(TOKENS))
        begins = [part.rstrip("\ufffd") for part in parts]
        first = next((k for k, begin in enumerate(begins) if not text.startswith(begin)), None)
        # Inside one character the choice that differed may be up to three tokens before.
        margin = 0.0 if first is None else min(margins[max(0, first - 3) : first + 1])
        same += first is None
        wrong += margin > args.margin
        found = "same" if first is None else f"differs at token {first}, margin {margin:.4f}"
        print(f"{number:2} {len(ids):4} prompt tokens: {found}", flush=True)
    print(f"{same} of {len(prompts)} texts are the same; {wrong} differ above margin {args.margin}")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
