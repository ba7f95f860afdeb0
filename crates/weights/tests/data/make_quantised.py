"""Writes quantised.json: small matrices packed by the programs that make such checkpoints, with their own readings.

    FP8    transformers, `Fp8Quantize` and `Fp8Dequantize` of its finegrained_fp8 integration
    GPTQ   auto-gptq, `QuantLinear.pack` (the plain and the act-order one) and its forward pass over the identity
    AWQ    autoawq, `WQLinear_GEMM.from_linear` and `dequantize_gemm`

Run once, in an environment with torch and numpy and the packages named in `VERSIONS`: `python make_quantised.py`.
The two archived packages ask for GPU libraries when they are installed; their wheels, unpacked into a folder on
PYTHONPATH, are enough. Tensors are stored as safetensors would, in hexadecimal; values are the f32 bit patterns,
computed from f32 scales, so that the comparison is exact.
"""

import importlib
import json
import sys
import types
from types import SimpleNamespace

import torch

VERSIONS = {"transformers": "5.24.0", "auto-gptq": "0.7.1", "autoawq": "0.2.7.post3", "torch": "2.8.0"}
ROWS, COLS = 32, 64
DTYPES = {torch.float8_e4m3fn: "F8_E4M3", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int32: "I32"}


def part(package: str, module: str):
    """One module of a package whose `__init__` asks for more than that module needs."""
    path = [p for p in sys.path if (importlib.machinery.PathFinder.find_spec(package, [p]))][0]
    for depth in range(1, len(module.split(".")) + 1):
        name = ".".join(module.split(".")[:depth])
        if name not in sys.modules and name != module:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [f"{path}/{name.replace('.', '/')}"]
    return importlib.import_module(module)


def stored(tensors: dict) -> dict:
    raw = lambda t: bytes(t.contiguous().view(torch.uint8).flatten().tolist())
    return {
        name: {"dtype": DTYPES[t.dtype], "shape": list(t.shape), "data": raw(t).hex()} for name, t in tensors.items()
    }


def case(config: dict, tensors: dict, values: torch.Tensor) -> dict:
    assert values.shape == (ROWS, COLS) and torch.isfinite(values).all()
    bits = values.float().contiguous().view(torch.int32).flatten().tolist()
    return {"config": config, "tensors": stored(tensors), "f32": "".join(f"{b & 0xFFFFFFFF:08x}" for b in bits)}


def fp8(tile: list | None) -> dict:
    module = importlib.import_module("transformers.integrations.finegrained_fp8")
    config = SimpleNamespace(weight_block_size=tile, scale_fmt="float")
    quantizer = SimpleNamespace(quantization_config=config)
    packed = module.Fp8Quantize(quantizer).convert({"weight": torch.randn(ROWS, COLS)})
    values = module.Fp8Dequantize(quantizer).convert({name: [t] for name, t in packed.items()})["weight"]
    config = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": tile}
    return case(config, packed, values)


def grouped(group_size: int) -> tuple:
    """A linear layer with its scales and zeros, `[out, groups]`; zeros from 1 to 15, as GPTQ stores them less 1."""
    linear = torch.nn.Linear(COLS, ROWS, bias=False)
    groups = COLS // group_size
    zeros = torch.randint(1, 16, (ROWS, groups)).float()
    scales = (torch.rand(ROWS, groups) * 0.05 + 0.01).half().float()
    numbers = torch.randint(0, 16, (ROWS, COLS)).float()
    of = torch.arange(COLS) // group_size
    return linear, scales, zeros, numbers, of


def gptq(group_size: int, act_order: bool) -> dict:
    name = "qlinear_cuda" if act_order else "qlinear_cuda_old"
    module = part("auto_gptq", f"auto_gptq.nn_modules.qlinear.{name}")
    size = COLS if group_size == -1 else group_size
    linear, scales, zeros, numbers, of = grouped(size)
    if act_order:
        of = of[torch.randperm(COLS)]
    linear.weight.data = (numbers - zeros[:, of]) * scales[:, of]
    layer = module.QuantLinear(4, size, COLS, ROWS, False, weight_dtype=torch.float32)
    layer.pack(linear, scales.clone(), zeros.clone(), of.to(torch.int32) if act_order else None)
    layer.wf = layer.wf.to(torch.int32)
    with torch.no_grad():
        values = layer(torch.eye(COLS)).t()
    tensors = {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales.half()}
    # Files hold the list also where inputs keep their order.
    tensors["g_idx"] = layer.g_idx if act_order else (torch.arange(COLS) // size).to(torch.int32)
    config = {"quant_method": "gptq", "bits": 4, "group_size": group_size, "desc_act": act_order, "sym": False}
    return case(config, tensors, values)


def awq(group_size: int) -> dict:
    sys.modules["awq.utils.utils"] = SimpleNamespace(get_best_device=lambda: "cpu")
    gemm = part("awq", "awq.modules.linear.gemm")
    linear, scales, zeros, numbers, of = grouped(group_size)
    linear.weight.data = (numbers - zeros[:, of]) * scales[:, of]
    layer = gemm.WQLinear_GEMM.from_linear(linear, 4, group_size, False, scales.t().contiguous(), zeros.t().contiguous())
    values = gemm.dequantize_gemm(layer.qweight, layer.qzeros, layer.scales.float(), 4, group_size).t()
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}
    return case(config, {"qweight": layer.qweight, "qzeros": layer.qzeros, "scales": layer.scales}, values)


def main() -> None:
    torch.manual_seed(11)
    cases = {
        "fp8 tiles of 16x32": fp8([16, 32]),
        "fp8 one scale": fp8(None),
        "gptq groups of 16": gptq(16, False),
        "gptq one group": gptq(-1, False),
        "gptq act-order": gptq(16, True),
        "awq groups of 32": awq(32),
    }
    with open("quantised.json", "w") as out:
        json.dump({"made_with": VERSIONS, "cases": cases}, out, indent=1)
        out.write("\n")


main()
