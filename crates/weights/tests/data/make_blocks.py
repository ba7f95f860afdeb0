"""Writes blocks.json: random ggml blocks and what the `gguf` package (numpy) unpacks them to.

Run once with `pip install gguf==0.19.0 numpy`, from this folder: `python make_blocks.py`. Values are
the f32 bit patterns in hexadecimal, so that the comparison is exact.
"""

import json

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

# New kinds go to the end, so that the numbers of the others stay.
KINDS = ["F32", "F16", "BF16", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K"]
KINDS += ["Q4_0", "Q5_1", "Q5_K", "Q2_K", "Q3_K", "IQ4_NL"]
BLOCKS = 4
# Byte offsets of the f16 scales of each kind, which must be finite numbers.
SCALES = {"Q4_1": [0, 2], "Q5_0": [0], "Q8_0": [0], "Q4_K": [0, 2], "Q6_K": [208]}
SCALES |= {"Q4_0": [0], "Q5_1": [0, 2], "Q5_K": [0, 2], "Q2_K": [80, 82], "Q3_K": [108], "IQ4_NL": [0]}


def blocks(kind, rng):
    """Random bytes with sensible scales; the last block has a negative and a subnormal one."""
    _, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    data = rng.integers(0, 256, (BLOCKS, size), dtype=np.uint8)
    for column, at in enumerate(SCALES.get(kind, [])):
        scales = rng.uniform(0.001, 0.3, BLOCKS)
        scales[-1] = [-0.0625, 3e-6][column % 2]
        data[:, at : at + 2] = scales.astype(np.float16).view(np.uint8).reshape(BLOCKS, 2)
    if kind in ("F32", "F16", "BF16"):
        floats = rng.normal(size=BLOCKS).astype(np.float32)
        raw = {"F32": floats, "F16": floats.astype(np.float16), "BF16": (floats.view(np.uint32) >> 16).astype(np.uint16)}
        data = raw[kind].view(np.uint8).reshape(BLOCKS, size)
    return data


def main():
    rng = np.random.default_rng(7)
    golden = {}
    for kind in KINDS:
        data = blocks(kind, rng)
        values = dequantize(data, GGMLQuantizationType[kind]).astype(np.float32).reshape(-1)
        golden[kind] = {"blocks": data.tobytes().hex(), "f32": values.view(np.uint32).astype(">u4").tobytes().hex()}
    with open("blocks.json", "w") as out:
        json.dump(golden, out, indent=1)
        out.write("\n")


main()
