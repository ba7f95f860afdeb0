"""Real models of the catalogue, when they are in the cache: SmolLM2 against an independent implementation, and a chat
with Qwen2.5-Coder, each at its legal tp sizes."""

import json
import os
import pathlib
import sys

import pytest

from conftest import Server

ROOT = pathlib.Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests" / "bench"))
import perplexity  # noqa: E402

# What multiplying with a file's integers and rounded activations may change of a model's perplexity: below 0.1 % over 10,000 tokens
# (docs/performance.md); of a few hundred tokens it varies by 0.7 %, and a wrong scale would change it tenfold.
PERPLEXITY_SHARE_MAX = 0.02
# Below this gap between the two best logits, implementations may rightly choose differently.
MARGIN_MIN = 0.01
REFERENCE = json.loads((pathlib.Path(__file__).parent / "data" / "smollm2_reference.json").read_text(encoding="utf-8"))


def serve(binary, name, tp, *flags):
    if os.environ.get("LOCKSTEP_TEST_MODELS") != "1":
        pytest.skip("LOCKSTEP_TEST_MODELS is not 1; ./test sets it after pulling the models")
    return Server(binary, name, tp, "--max-context", "512", *flags)


@pytest.mark.parametrize("tp", [1, 3])
def test_smollm2_continues_as_the_reference_does(binary, tp):
    # The reference computed in f32 with the blocks' values.
    server = serve(binary, "smollm2-135m", tp, "--cpu-exact")
    compared = 0
    for case in REFERENCE["cases"]:
        sure = next((i for i, m in enumerate(case["margins"]) if m < MARGIN_MIN), len(case["margins"]))
        answer = server.client.completions.create(
            model=server.model, prompt=case["prompt_ids"], temperature=0, max_tokens=sure,
            extra_body={"ignore_eos": True, "skip_special_tokens": False},
        )
        assert answer.usage.completion_tokens == sure
        # A character that ends after the last compared token is held back or cut.
        text = answer.choices[0].text.rstrip("\ufffd")
        assert text and case["output_text"].startswith(text), case["prompt_ids"]
        compared += sure
    assert compared == 155
    server.stop()


def test_products_with_codes_keep_the_perplexity(binary):
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    values = []
    for flags in ([], ["--cpu-exact"]):
        server = serve(binary, "smollm2-135m", 1, *flags)
        value, tokens = perplexity.perplexity(server.port, [text], 1000, 4)
        assert tokens > 500
        values.append(value)
        server.stop()
    assert values[0] != values[1], "one of the servers did not do what its flags say"
    assert abs(values[0] / values[1] - 1) < PERPLEXITY_SHARE_MAX, values


@pytest.mark.parametrize("tp", [1, 2])
def test_qwen_coder_answers_a_chat(binary, tp):
    server = serve(binary, "qwen2.5-coder-0.5b", tp)
    stream = server.client.chat.completions.create(
        model=server.model, temperature=0, max_tokens=24, stream=True,
        messages=[{"role": "user", "content": "What is the capital of France? Answer with one word."}],
    )
    text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert "Paris" in text
    server.stop()
