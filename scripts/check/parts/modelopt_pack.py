"""Matrices packed by ModelOpt's own functions, with what its own dequantization makes of them in float32.

`python scripts/check/parts/modelopt_pack.py OUT.safetensors` with the Python of an environment with nvidia-modelopt; it
writes `tests/fixtures/quantized/modelopt.safetensors`, which `tests/convert/test_quantize.py` reads.
"""

import sys
from typing import Any

import torch
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import save_file


def packed(weight: torch.Tensor) -> dict[str, tuple[dict[str, Any], torch.Tensor]]:
    """Algorithm → the tensors of a module by their names, and the weight float32 that they stand for."""
    found = {}
    whole = (weight.abs().amax() / 448).reshape(())
    eighths, _ = FP8QTensor.quantize(weight.clone(), whole)
    plain = eighths.dequantize(torch.float32, scale=whole)
    found["FP8"] = (
        {"weight": eighths._quantized_data, "weight_scale": whole, "input_scale": torch.tensor(0.01)},
        plain,
    )
    blocks, scales = FP8QTensor.quantize(weight.clone(), block_sizes={-1: 32, -2: 32})
    plain = blocks.dequantize(torch.float32, scale=scales, block_sizes={-1: 32, -2: 32})
    four = scales.reshape(weight.shape[0] // 32, 1, weight.shape[1] // 32, 1).float()
    found["FP8_PB_WO"] = ({"weight": blocks._quantized_data, "weight_scale": four}, plain)
    fours, scale, double = NVFP4QTensor.quantize(weight.clone(), 16)
    plain = fours.dequantize(torch.float32, scale=scale, double_scale=double, block_sizes={-1: 16})
    parts = {"weight": fours._quantized_data, "weight_scale": scale, "weight_scale_2": double.reshape(())}
    found["W4A16_NVFP4"] = (parts, plain)
    found["NVFP4"] = (parts | {"input_scale": torch.tensor(0.02)}, plain)
    micro, scale = MXFP8QTensor.quantize(weight.clone())
    plain = micro.dequantize(torch.float32, scale=scale)
    found["MXFP8"] = ({"weight": micro._quantized_data, "weight_scale": scale}, plain)
    return found


def main() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)) * 0.05
    tensors: dict[str, torch.Tensor] = {}
    for name, (parts, plain) in packed(weight).items():
        tensors |= {f"{name}.{part}": tensor.contiguous().clone() for part, tensor in parts.items()}
        tensors[f"{name}.expected"] = plain.clone()
    save_file(tensors, sys.argv[1])


if __name__ == "__main__":
    main()
