"""How quantized weights lie in files: which tensors of a module are one weight [out, in], how its inputs are rounded.

What each way of storing has is a row of `WAYS`. Sources: compressed-tensors 0.20 (`compressors/`), ModelOpt 0.47 and
vLLM 0.32 (`layers/quantization/modelopt.py`), transformers 5.23 (`integrations/finegrained_fp8.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from draftkit.io.dtypes import FLOATS, QUANTIZED

Extent = tuple[int, ...]
Found = Mapping[str, tuple[str, Extent]]  # name → dtype, shape
EXPONENTS = ("U8", "F8_E8M0")  # of scales that are powers of two
# What the tensors of a quantized module are called, but for a weight that keeps its name and a bias.
PART = re.compile(
    r"\.(weight_(packed|scale|scale_inv|scale_2|global_scale|shape|zero_point|g_idx|format)|pre_quant_scale"
    r"|input_(scale|global_scale|zero_point)|[kvq]_scale|output_scale|bitmask|compressed"
    r"|qweight|qzeros|scales|g_idx|SCB|weight\.(absmax|quant_map|nested_\w+|quant_state\.\w+))$"
    r"|_(blocks|scales|scale_inv)$"
)


class Way(NamedTuple):
    """A way to store a weight.

    `codes`: the dtypes of its numbers, of which each element of the tensor holds `per` (None: as many as the stated
    bits allow). `scales`: the dtypes of its scales, one for `group` numbers of a row (None: for all, a row or a block).
    `beside`: what else may be there; `factors`: one of these has to be.
    """

    name: str
    codes: tuple[str, ...]
    per: int | None
    scales: tuple[str, ...]
    group: int | None
    beside: frozenset[str]
    factors: frozenset[str] = frozenset()


INPUT = frozenset({"input_scale"})
GLOBAL = frozenset({"weight_global_scale", "weight_scale_2"})
WAYS = (
    Way("fp8", QUANTIZED, 1, FLOATS, None, INPUT),
    Way("mxfp8", ("F8_E4M3",), 1, EXPONENTS, 32, frozenset()),
    Way("int8", ("I8",), 1, FLOATS, None, frozenset()),
    Way("int", ("I32",), None, FLOATS, None, frozenset({"weight_shape"})),
    Way("nvfp4", ("U8",), 2, ("F8_E4M3",), 16, INPUT | GLOBAL | {"input_global_scale"}, GLOBAL),
    Way("mxfp4", ("U8",), 2, EXPONENTS, 32, frozenset()),
)


@dataclass(frozen=True)
class StoredWeight:
    """A quantized weight: how it is stored, its shape [out, in], and its tensors by what they are called in it."""

    module: str
    way: Way
    shape: Extent
    parts: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.module}.weight"


@dataclass(frozen=True)
class InputFormat:
    """How the inputs of a layer are rounded before they are multiplied.

    `bits` of a float, or of an integer where not `is_float`. `group`: neighbors that share a scale; None: those of a
    row, or all where the scale is not `dynamic` and lies in the file. `exponents`: scales are powers of two.
    """

    bits: int
    is_float: bool = True
    dynamic: bool = True
    group: int | None = None
    exponents: bool = False


# The inputs of ModelOpt's algorithms; those that are not here leave them as they are.
MODELOPT_INPUTS = {
    "FP8": InputFormat(8, dynamic=False),
    "FP8_PER_CHANNEL_PER_TOKEN": InputFormat(8),
    "NVFP4": InputFormat(4, dynamic=False, group=16),
    "MXFP8": InputFormat(8, group=32, exponents=True),
}


def module_of(name: str) -> str:
    """The module that a tensor is of; that of one that only says how another is quantized, too."""
    match = PART.search(name)
    return name.rpartition(".")[0] if match is None else name[: match.start()]


def modules_with_scales(names: Iterable[str]) -> set[str]:
    """The modules that are quantized, by the names of their tensors."""
    return {module_of(name) for name in names if PART.search(name)}


def stands_for(name: str) -> str:
    """The weight that a tensor is a part of; of any other, its own name."""
    return f"{module_of(name)}.weight" if PART.search(name) else name


def parts_by_module(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The tensors of each module that has such parts, its weight among them, by what they are called in it."""
    known = list(names)
    modules = modules_with_scales(known)
    found: dict[str, dict[str, str]] = {
        module: {} for module in (module_of(name) for name in known) if module in modules
    }
    for name in known:
        module = module_of(name)
        if module in modules and (PART.search(name) or name == f"{module}.weight"):
            found[module][name.removeprefix(f"{module}.")] = name
    return found


def stored_weights(tensors: Found, stated: Mapping[str, object] | None) -> dict[str, StoredWeight]:
    """The quantized weights among tensors, by module. `stated`: what a `quantization_config`, or ModelOpt's file,
    says; without it only fp8 tells of itself how it is read."""
    found = {}
    for module, parts in parts_by_module(tensors).items():
        way = way_of({part: tensors[name] for part, name in parts.items()}, stated, module)
        if way is not None and (stated is not None or way[0].name == "fp8"):
            found[module] = StoredWeight(module, *way, parts)
    return found


def plain_view(tensors: Found, stated: Mapping[str, object] | None) -> dict[str, tuple[str, Extent]]:
    """The tensors with the parts of each quantized weight as the one plain weight that they stand for."""
    weights = stored_weights(tensors, stated)
    parts = {name for weight in weights.values() for name in weight.parts.values()}
    plain = {name: tensor for name, tensor in tensors.items() if name not in parts}
    return plain | {weight.name: ("F32", weight.shape) for weight in weights.values()}


def way_of(parts: Found, stated: Mapping[str, object] | None, module: str) -> tuple[Way, Extent] | None:
    """How the parts of a module store its weight, and the weight's shape; None where draftkit does not read them."""
    codes = "weight_packed" if "weight_packed" in parts else "weight"
    scale = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    if codes not in parts or scale not in parts or len(parts[codes][1]) != 2:
        return None
    rows, columns = parts[codes][1]
    for way in WAYS:
        if parts[codes][0] not in way.codes or parts[scale][0] not in way.scales:
            continue
        others = parts.keys() - {codes, scale}
        per = way.per or 32 // (weight_bits(stated or {}, module) or 32)
        shape = (rows, columns * per)
        fits = _scale_fits(way, shape, parts[scale][1], weight_block(stated or {}))
        single = all(prod(parts[part][1]) == 1 and parts[part][0] in FLOATS for part in others - {"weight_shape"})
        if fits and single and others <= way.beside and (not way.factors or others & way.factors) and per > 0:
            return way, shape
    return None


def _scale_fits(way: Way, shape: Extent, scale: Extent, block: tuple[int, int] | None) -> bool:
    if way.group is not None:
        return scale == (shape[0], shape[1] // way.group) and shape[1] % way.group == 0
    return scales_fit(shape, without_ones(scale), block)


def without_ones(scale: Extent) -> Extent:
    """The shape of ModelOpt's scales of blocks, [rows, 1, columns, 1], without the ones."""
    return (scale[0], scale[2]) if len(scale) == 4 and scale[1] == scale[3] == 1 else scale


def scales_fit(weight: Extent, scale: Extent, block: tuple[int, int] | None) -> bool:
    """Whether a scale is one for the whole weight [out, in], for each row, or for each block, where `block` is known or
    divides the weight evenly."""
    if prod(scale) == 1 or scale in (weight[:1], (*weight[:1], 1)):
        return True
    if len(weight) != 2 or len(scale) != 2 or 0 in scale:
        return False
    sizes = block or tuple(-(-size // count) for size, count in zip(weight, scale, strict=True))
    return all(-(-size // most) == count for size, most, count in zip(weight, sizes, scale, strict=True))


def weight_block(stated: Mapping[str, object]) -> tuple[int, int] | None:
    """The rows and columns of a weight that share a scale, where that is stated for all alike."""
    found: Any = stated.get("weight_block_size")
    if found is None:
        blocks = [_block(group_part(group, "weights")) for group in groups_of(stated)]
        found = blocks[0] if blocks and all(one == blocks[0] for one in blocks) else None
    sizes = found if isinstance(found, list) and len(found) == 2 else []
    return (sizes[0], sizes[1]) if sizes and all(type(size) is int and size > 0 for size in sizes) else None


def _block(weights: Mapping[str, Any]) -> object:
    if weights.get("block_structure"):
        return weights["block_structure"]
    return [1, weights.get("group_size")] if weights.get("strategy") == "group" else None


def weight_bits(stated: Mapping[str, object], module: str) -> int | None:
    """The bits of the integers that a module's weight is packed from: 4 or 8."""
    bits = group_part(group_of(stated, module), "weights").get("num_bits")
    return bits if bits in (4, 8) else None


def groups_of(stated: Mapping[str, object]) -> Iterator[dict[str, Any]]:
    """What compressed-tensors says of each of its groups of modules."""
    groups = stated.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        if isinstance(group, dict):
            yield group


def group_part(group: Mapping[str, Any], key: str) -> dict[str, Any]:
    """What a group says of `weights` or `input_activations`; empty for none."""
    return group[key] if isinstance(group.get(key), dict) else {}


def group_of(stated: Mapping[str, object], module: str) -> dict[str, Any]:
    """The group of compressed-tensors that a module is in: of the first target that names it, or else its class."""
    groups = list(groups_of(stated))
    return next((group for group in groups if _is_target(group, module)), groups[0] if len(groups) == 1 else {})


def _is_target(group: Mapping[str, Any], module: str) -> bool:
    targets = group.get("targets")
    return any(_names(str(target), module) for target in targets) if isinstance(targets, list) else False


def _names(target: str, module: str) -> bool:
    if not target.startswith("re:"):
        return target in ("Linear", module) or module.endswith(f".{target}")
    try:
        return re.match(target.removeprefix("re:"), module) is not None
    except re.error:
        return False


def input_format(stated: Mapping[str, object], module: str) -> InputFormat | None:
    """How the inputs of a quantized module are rounded; None where they are left as they are."""
    if (algorithm := modelopt_algorithm(stated, module)) is not None:
        return MODELOPT_INPUTS.get(algorithm.upper())
    method = stated.get("quant_method")
    if method == "fp8" and stated.get("activation_scheme") == "dynamic":
        block = weight_block(stated)
        return InputFormat(8, group=None if block is None else block[1])
    if method == "fp8" and stated.get("activation_scheme") == "static":
        return InputFormat(8, dynamic=False)
    return InputFormat(8) if method == "fbgemm_fp8" else _of_group(group_of(stated, module))


def _of_group(group: Mapping[str, Any]) -> InputFormat | None:
    inputs = group_part(group, "input_activations")
    bits = inputs.get("num_bits", 16)
    if bits not in (4, 8):
        return None
    size = inputs.get("group_size")
    local = inputs.get("dynamic") == "local"  # with a scale of all in the file
    return InputFormat(
        bits,
        is_float=inputs.get("type", "float") == "float",
        dynamic=bool(inputs.get("dynamic")) and not local,
        group=size if type(size) is int and size > 0 else (16 if local else None),
        exponents=size == 32 and "uint8" in str(inputs.get("scale_dtype", "uint8")),
    )


def modelopt_algorithm(stated: Mapping[str, object], module: str | None = None) -> str | None:
    """The algorithm by ModelOpt's name, of a module where each has its own; None of another program's weights."""
    inner = stated.get("quantization")
    said = inner if isinstance(inner, dict) and "quant_algo" not in stated else stated
    layers = said.get("quantized_layers")
    own = layers.get(module) if isinstance(layers, dict) else None
    algorithm = (own if isinstance(own, dict) else said).get("quant_algo")
    return algorithm if isinstance(algorithm, str) else None
