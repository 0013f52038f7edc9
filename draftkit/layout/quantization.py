"""Quantized weights: how they are told by their tensors, what their format is called, and which draftkit reads.

It reads fp8 with scales for a tensor, its rows or its blocks. Source of names and shapes: compressed-tensors 0.20,
vLLM 0.32 (`layers/quantization/`) for ModelOpt, transformers 5.23 (`quantizers/`, `integrations/`) for the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from draftkit.errors import FormatError
from draftkit.io.dtypes import FLOATS, QUANTIZED
from draftkit.io.records import excerpt

SCALES = ("weight_scale", "weight_scale_inv", "input_scale")  # of an fp8 weight that is read, beside it
COMPRESSED = "compressed-tensors"
MODELOPT_FILE = "hf_quant_config.json"  # where ModelOpt's older exports say how they quantized
# What the tensors of a quantized module are called, but for a weight that keeps its name and a bias.
PART = re.compile(
    r"\.(weight_(packed|scale|scale_inv|scale_2|global_scale|shape|zero_point|g_idx|format)|pre_quant_scale"
    r"|input_(scale|global_scale|zero_point)|[kvq]_scale|output_scale|bitmask|compressed"
    r"|qweight|qzeros|scales|g_idx|SCB|weight\.(absmax|quant_map|nested_\w+|quant_state\.\w+))$"
    r"|_(blocks|scales|scale_inv)$"
)
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


def module_of(name: str) -> str:
    """The module that a tensor is of; that of one that only says how another is quantized, too."""
    match = PART.search(name)
    return name.rpartition(".")[0] if match is None else name[: match.start()]


def modules_with_scales(names: Iterable[str]) -> set[str]:
    """The modules that are quantized, by the names of their tensors."""
    return {module_of(name) for name in names if PART.search(name)}


def refuse_unread(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], stated: Mapping[str, object] | None, where: object, hint: str
) -> None:
    """Raise `FormatError` for weights that are quantized otherwise than draftkit reads, with the name of the format.

    `tensors`: name → dtype, shape. `stated`: what a `quantization_config`, or ModelOpt's file, says.
    """
    said = stated or {}
    found = next(_unread(tensors, weight_block(said)), None)
    more = _beyond_weights(said) if any(handle[0] in QUANTIZED for handle in tensors.values()) else None
    if found is None and more is None:
        return
    told = (name for end, name in TOLD_BY.items() if any(re.search(f"{end}$", tensor) for tensor in tensors))
    name = name_of_format(said) or next(told, "nothing says how")
    shown = more or f"{found} is {tensors[str(found)][0]} {list(tensors[str(found)][1])}"
    raise FormatError(
        f"the weights are quantized ({name}), and draftkit does not read them: {shown}",
        where=where,
        expected="plain weights, or fp8 ones with scales of a tensor, its rows or its blocks",
        hint=hint,
    )


def _unread(tensors: Mapping[str, tuple[str, tuple[int, ...]]], block: tuple[int, int] | None) -> Iterator[str]:
    """The tensors that tell it, the first of each module."""
    parts: dict[str, dict[str, tuple[str, tuple[int, ...]]]] = {}
    for name in tensors:
        if match := PART.search(name):
            parts.setdefault(name[: match.start()], {})[name] = tensors[name]
    for module, beside in parts.items():
        dtype, shape = tensors.get(f"{module}.weight", ("", ()))
        if dtype not in QUANTIZED:
            yield f"{module}.weight" if dtype and dtype not in FLOATS else next(iter(beside))
            continue
        for name, (scale, sizes) in beside.items():
            read = name.removeprefix(f"{module}.") in SCALES and scale in FLOATS
            if not read or not scales_fit(shape, sizes, block):
                yield name
                break


def scales_fit(weight: tuple[int, ...], scale: tuple[int, ...], block: tuple[int, int] | None) -> bool:
    """Whether a scale is one for the whole weight [out, in], for each row, or for each block, where `block` is known or
    divides the weight evenly."""
    if prod(scale) == 1 or scale in (weight[:1], (*weight[:1], 1)):
        return True
    if len(weight) != 2 or len(scale) != 2 or 0 in scale:
        return False
    sizes = block or tuple(-(-size // count) for size, count in zip(weight, scale, strict=True))
    return all(-(-size // most) == count for size, most, count in zip(weight, sizes, scale, strict=True))


def weight_block(stated: Mapping[str, object]) -> tuple[int, int] | None:
    """The rows and columns of a weight that share a scale, where that is stated."""
    found: Any = stated.get("weight_block_size")
    for weights in _of_groups(stated, "weights"):
        found = found or weights.get("block_structure")
        if found is None and weights.get("strategy") == "group":
            found = [1, weights.get("group_size")]
    sizes = found if isinstance(found, list) and len(found) == 2 else []
    return (sizes[0], sizes[1]) if sizes and all(type(size) is int and size > 0 for size in sizes) else None


def _of_groups(stated: Mapping[str, object], key: str) -> Iterator[dict[str, Any]]:
    """What compressed-tensors says of weights, or of activations, in each of its groups; empty for none."""
    groups = stated.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict):
            yield group[key] if isinstance(group.get(key), dict) else {}


def _beyond_weights(stated: Mapping[str, object]) -> str | None:
    """What else of compressed-tensors changes what fp8 weights compute."""
    if stated.get("transform_config"):
        return "they are rotated (transform_config)"
    sparsity = stated.get("sparsity_config")
    form = sparsity.get("format") if isinstance(sparsity, dict) else None
    return None if form in (None, "dense") else f"they are sparse ({excerpt(form)})"


def algorithm_of(stated: Mapping[str, object]) -> str | None:
    """The algorithm, by ModelOpt's name of it, or `compressed-tensors`; None for that of another program."""
    algorithm = _of_modelopt(stated)
    if algorithm is not None:
        return algorithm.upper()
    return COMPRESSED if stated.get("quant_method") == COMPRESSED else None


def _of_modelopt(stated: Mapping[str, object]) -> str | None:
    inner = stated.get("quantization")
    algorithm = stated.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, dict) else None)
    return algorithm if isinstance(algorithm, str) else None


def name_of_format(stated: Mapping[str, object]) -> str | None:
    """What a format calls itself, as `compressed-tensors W4A16`, `ModelOpt NVFP4`, `gptq 4-bit`."""
    if (algorithm := _of_modelopt(stated)) is not None:
        return f"ModelOpt {excerpt(algorithm)[1:-1]}"
    method = stated.get("quant_method")
    if not isinstance(method, str):
        return None
    presets = dict.fromkeys(map(_preset, _of_groups(stated, "weights"), _of_groups(stated, "input_activations")))
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
