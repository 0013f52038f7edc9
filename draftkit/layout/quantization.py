"""Quantized weights: what their format is called, and which draftkit refuses. Which it reads: `stored_weights.py`.

Source of names and shapes: compressed-tensors 0.20, vLLM 0.32 (`layers/quantization/`) for ModelOpt, transformers 5.23
(`quantizers/`, `integrations/`) for the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from draftkit.errors import FormatError
from draftkit.io.records import excerpt
from draftkit.layout.stored_weights import (
    Found,
    group_part,
    groups_of,
    modelopt_algorithm,
    modules_with_scales,
    parts_by_module,
    stored_weights,
)

SCALES = ("weight_scale", "weight_scale_inv", "input_scale")  # of a weight that is read, beside it
READ = "compressed-tensors' and ModelOpt's fp8, NVFP4, MXFP8 and MXFP4, integers of 4 or 8 bits, or fp8 in blocks"
COMPRESSED = "compressed-tensors"
MODELOPT_FILE = "hf_quant_config.json"  # where ModelOpt's older exports say how they quantized
# What names a format where nothing else does: how one of its tensors ends.
TOLD_BY = {
    "weight_packed": COMPRESSED,
    "weight_scale_2": "ModelOpt NVFP4",
    "qweight": "GPTQ or AWQ",
    "SCB": "bitsandbytes 8-bit",
    "absmax": "bitsandbytes 4-bit",
    "_blocks": "MXFP4",
    "[kvq]_scale": "scales of the cache",
}


def refuse_unread(tensors: Found, stated: Mapping[str, object] | None, where: object, hint: str) -> None:
    """Raise `FormatError` for weights that are quantized otherwise than draftkit reads, with the name of the format.

    `tensors`: name → dtype, shape. `stated`: what a `quantization_config`, or ModelOpt's file, says.
    """
    said = stated or {}
    found = next(_unread(tensors, stated), None)
    more = _beyond_weights(said) if modules_with_scales(tensors) else None
    if found is None and more is None:
        return
    told = (name for end, name in TOLD_BY.items() if any(re.search(f"{end}$", tensor) for tensor in tensors))
    name = name_of_format(said) or next(told, "nothing says how")
    shown = more or f"{found} is {tensors[str(found)][0]} {list(tensors[str(found)][1])}{_lacking(tensors, str(found))}"
    raise FormatError(
        f"the weights are quantized ({name}), and draftkit does not read them: {shown}",
        where=where,
        expected=f"plain weights, or {READ}",
        hint=hint,
    )


def _unread(tensors: Found, stated: Mapping[str, object] | None) -> Iterator[str]:
    """The tensors that tell it, the first of each module."""
    read = stored_weights(tensors, stated)
    for module, parts in parts_by_module(tensors).items():
        if module not in read:
            odd = [name for part, name in parts.items() if part not in ("weight", *SCALES)]
            yield odd[0] if odd else parts.get("weight", next(iter(parts.values())))


def _lacking(tensors: Found, name: str) -> str:
    """The scale that a weight has not, as the end of a sentence."""
    module = name.removesuffix(".weight")
    unscaled = not any(f"{module}.weight_{scale}" in tensors for scale in ("scale", "scale_inv"))
    return f", and {module}.weight_scale is missing" if unscaled and name != module else ""


def _beyond_weights(stated: Mapping[str, object]) -> str | None:
    """What else of compressed-tensors changes what fp8 weights compute."""
    if stated.get("transform_config"):
        return "they are rotated (transform_config)"
    sparsity = stated.get("sparsity_config")
    form = sparsity.get("format") if isinstance(sparsity, dict) else None
    return None if form in (None, "dense") else f"they are sparse ({excerpt(form)})"


def algorithm_of(stated: Mapping[str, object]) -> str | None:
    """The algorithm, by ModelOpt's name of it, or `compressed-tensors`; None for that of another program."""
    algorithm = modelopt_algorithm(stated)
    if algorithm is not None:
        return algorithm.upper()
    return COMPRESSED if stated.get("quant_method") == COMPRESSED else None


def name_of_format(stated: Mapping[str, object]) -> str | None:
    """What a format calls itself, as `compressed-tensors W4A16`, `ModelOpt NVFP4`, `gptq 4-bit`."""
    if (algorithm := modelopt_algorithm(stated)) is not None:
        return f"ModelOpt {excerpt(algorithm)[1:-1]}"
    method = stated.get("quant_method")
    if not isinstance(method, str):
        return None
    groups = list(groups_of(stated))
    presets = dict.fromkeys(_preset(group_part(one, "weights"), group_part(one, "input_activations")) for one in groups)
    bits = next((f"{number}-bit" for number in (4, 8) if stated.get(f"load_in_{number}bit")), None)
    bits = bits or (f"{stated['bits']}-bit" if type(stated.get("bits")) is int else None)
    return " ".join([excerpt(method)[1:-1], *([" and ".join(presets)] if presets else []), *([bits] if bits else [])])


def _preset(weights: Mapping[str, Any], inputs: Mapping[str, Any]) -> str:
    """compressed-tensors' own name of a scheme (`quant_scheme.py`)."""
    bits, group = weights.get("num_bits"), weights.get("group_size")
    others = inputs.get("num_bits", 16)
    if weights.get("type") != "float":
        return f"W{bits}A{others}"
    if bits == 8 and group is None:
        block = "_BLOCK" if weights.get("strategy") == "block" else "_DYNAMIC" if inputs.get("dynamic") else ""
        return f"FP8{block}"
    return ("NVFP4" if group == 16 else f"MXFP{bits}") + ("A16" if others == 16 else "")
