#!/usr/bin/env python3
"""Makes the golden logits of `cases/`: tiny models of every family, run by Hugging Face transformers.

Read by the test `crates/model/tests/golden`. Torch is no part of `./test`; run this by hand, in an
environment with torch (any CPU build) and transformers:

    python make_golden.py              with transformers 5: writes cases/*.json
    python make_golden.py              with transformers 4, afterwards: adds each case's config.json in
                                       that version's spelling, and checks that its logits agree
    python make_golden.py --check      compares with the files, writes nothing
    python make_golden.py NAME...      only these cases

Float32, eager attention, no cache, evaluation mode. Weights are not stored: element i of a tensor is

    center + width * (2 u - 1),   u = (splitmix64 output i, shifted right by 11) / 2^53

in f64, rounded once to f32. The stream of a tensor is seeded with the first splitmix64 output of the
seed FNV-1a(name), as `Random::named(0, name)` of the testkit crate; center and width follow from the
name and shape (`center_and_width`). Every case's logits must differ from those of its family's
other cases, or repeat those of the case that it names.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from cases import BASE, CASES, IMAGES, VOCAB, Case

FOLDER = Path(__file__).resolve().parent / "cases"
MAJOR = int(transformers.__version__.split(".")[0])
GAMMA = np.uint64(0x9E3779B97F4A7C15)
# What two versions of transformers, or two machines, may differ by, relative to the largest logit.
AGREE = 1e-5
# What two cases must differ by at least.
DIFFER = 1e-2


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def random_bits(name: str, count: int) -> np.ndarray:
    """The first `count` outputs of the stream of `name`."""
    fnv = 0xCBF29CE484222325
    for byte in name.encode():
        fnv = ((fnv ^ byte) * 0x100000001B3) % 2**64
    state = _mix(np.array([fnv], np.uint64) + GAMMA)
    return _mix(state + GAMMA * np.arange(1, count + 1, dtype=np.uint64))


def center_and_width(name: str, shape: tuple[int, ...], gemma: bool) -> tuple[float, float]:
    """Norms lie around the weight that changes nothing; matrices keep the scale of what they multiply."""
    if len(shape) == 1:
        if name.endswith("norm.weight"):
            return (0.0 if gemma else 1.0), 0.375
        return 0.0, 0.5
    if name.endswith("embed_tokens.weight"):
        return 0.0, 0.25
    return 0.0, 2.5 / float(np.sqrt(np.float64(shape[-1])))


def tensor_of(name: str, shape: tuple[int, ...], gemma: bool) -> np.ndarray:
    count = int(np.prod(shape))
    unit = (random_bits(name, count) >> np.uint64(11)).astype(np.float64) / 2.0**53
    center, width = center_and_width(name, shape, gemma)
    return (center + width * (2.0 * unit - 1.0)).astype(np.float32).reshape(shape)


def prompt_of(case: Case) -> list[int]:
    """Token ids, none of them an image's; a shorter prompt is the beginning of a longer one."""
    return [int(b % np.uint64(VOCAB - 3)) for b in random_bits("prompt", case.prompt_len)]


def config_of(case: Case) -> transformers.PretrainedConfig:
    keys = BASE | case.keys
    if case.architecture.startswith("Gemma3") and MAJOR >= 5:
        # The rope of full layers; the constructor of version 5 takes both in one nested object.
        full = {"rope_theta": keys.pop("rope_theta"), "rope_type": "default"} | keys.pop("rope_scaling", {})
        local = {"rope_theta": keys.pop("rope_local_base_freq"), "rope_type": "default"}
        keys["rope_parameters"] = {"full_attention": full, "sliding_attention": local}
    model_class = getattr(transformers, case.architecture)
    keys = json.loads(json.dumps(keys))  # a copy of its own: constructors change what they are given
    if case.architecture.endswith("ForConditionalGeneration"):
        keys = {"text_config": keys, **IMAGES}
    config = model_class.config_class(**keys)
    config.architectures = [case.architecture]
    return config


def check_implied(case: Case, config: dict) -> None:
    """Without the keys of `case.implied` transformers reads the same configuration."""
    config_class = getattr(transformers, case.architecture).config_class
    shorter = {key: value for key, value in config.items() if key not in case.implied}
    if config_class.from_dict(shorter).to_dict() != config_class.from_dict(config).to_dict():
        sys.exit(f"{case.name}: {case.implied} are not implied by the other keys")


def run(case: Case) -> dict:
    """Writes the model's folder, loads it by the public path and runs it."""
    model_class = getattr(transformers, case.architecture)
    with tempfile.TemporaryDirectory() as folder:
        model_class(config_of(case)).float().save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        weights_file = Path(folder) / "model.safetensors"
        shapes = {name: tensor.shape for name, tensor in sorted(load_file(weights_file).items())}
        check_implied(case, config)
        with safe_open(weights_file, "np") as file:
            metadata = file.metadata()
        gemma = case.architecture.startswith("Gemma")
        weights = {name: tensor_of(name, shape, gemma) for name, shape in shapes.items()}
        save_file(weights, weights_file, metadata)
        model, info = model_class.from_pretrained(
            folder, attn_implementation="eager", output_loading_info=True, dtype=torch.float32
        )
    if any(info.values()):
        sys.exit(f"{case.name}: the file's tensors are not the model's: {info}")
    prompt = prompt_of(case)
    with torch.no_grad():
        logits = model.eval()(torch.tensor([prompt]), use_cache=False).logits[0]
    if not torch.isfinite(logits).all():
        sys.exit(f"{case.name}: logits are not finite")
    positions = [0, len(prompt) // 2, len(prompt) - 1]
    return {
        "config": config,
        # Of the image part, which the versions name differently, only what shows that it is passed over.
        "tensors": {n: list(shape) for n, shape in shapes.items() if not n.startswith("vision_tower.")},
        "prompt": prompt,
        "positions": positions,
        "logits": logits[positions].numpy(),
    }


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference, relative to the largest value."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(a - b).max() / np.abs(a).max())


def as_text(golden: dict) -> str:
    """JSON with one line for each key of the outer object and each row of logits."""
    lines = []
    for key, value in golden.items():
        if key == "logits":
            rows = ",\n".join("  [" + ",".join(f"{v:.7g}" for v in row) + "]" for row in value)
            lines.append(f' "logits": [\n{rows}\n ]')
        else:
            lines.append(f' "{key}": {json.dumps(value, separators=(",", ":"))}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def make(case: Case, check: bool) -> None:
    path = FOLDER / f"{case.name}.json"
    made = run(case)
    stored = json.loads(path.read_text()) if path.exists() else None
    if check or MAJOR < 5:
        if stored is None:
            sys.exit(f"{path} does not exist; make it with transformers 5 first")
        apart = distance(stored["logits"], made["logits"])
        if apart > AGREE:
            sys.exit(f"{case.name}: logits are {apart:.2e} from those in the file")
        if stored["tensors"] != made["tensors"]:
            names = set(stored["tensors"]) ^ set(made["tensors"])
            sys.exit(f"{case.name}: tensors differ from those in the file: {sorted(names)}")
    if MAJOR < 5:
        golden = stored | {"config_4": made["config"]}
        golden["made_with"] = stored["made_with"] | {"config_4": transformers.__version__}
    else:
        versions = {"transformers": transformers.__version__, "torch": torch.__version__}
        golden = {"name": case.name, "made_with": versions, "same_as": case.same_as, "implied": case.implied, **made}
        if stored and "config_4" in stored:
            golden["config_4"] = stored["config_4"]
            golden["made_with"]["config_4"] = stored["made_with"]["config_4"]
    if not check:
        order = ["name", "made_with", "same_as", "implied", "config", "config_4", "tensors", "prompt", "positions", "logits"]
        path.write_text(as_text({key: golden[key] for key in order if key in golden}))


def architecture(golden: dict) -> str:
    return golden["config"]["architectures"][0]


def check_that_cases_differ() -> None:
    goldens = {case.name: json.loads((FOLDER / f"{case.name}.json").read_text()) for case in CASES}
    cases = list(goldens.values())
    for i, a in enumerate(cases):
        for b in cases[:i]:
            if len(a["prompt"]) != len(b["prompt"]) or architecture(a) != architecture(b):
                continue
            apart = distance(a["logits"], b["logits"])
            same = (a["same_as"] or a["name"]) == (b["same_as"] or b["name"])
            if apart > AGREE if same else apart < DIFFER:
                sys.exit(f"{a['name']} and {b['name']} are {apart:.2e} apart")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="cases to make; all of them when none is named")
    parser.add_argument("--check", action="store_true", help="compare with the files, write nothing")
    args = parser.parse_args()
    unknown = set(args.names) - {case.name for case in CASES}
    if unknown:
        sys.exit(f"no such case: {', '.join(sorted(unknown))}")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    for case in CASES:
        if args.names and case.name not in args.names:
            continue
        make(case, args.check)
        print(f"{'same' if args.check else 'made'} {case.name}")
    if not args.names:
        check_that_cases_differ()


if __name__ == "__main__":
    main()
