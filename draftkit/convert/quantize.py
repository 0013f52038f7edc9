"""Plain weights of a draft become quantized ones, part by part, as `convert --quantize` writes them.

Scales and packing are those of the library compressed-tensors. Where engines join matrices that read the same rows
(queries, keys and values; gate and up), these share the scale of a whole weight, or the engine would take one for all.
Without data, the scale of all inputs of a format that has one is that with which a DSpark draft of Qwen3-8B lost least
(ModelOpt pull request 2027).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from draftkit.errors import DraftkitError, LayoutError, SettingError
from draftkit.io.dtypes import torch_dtype
from draftkit.io.handles import TensorHandle, memory_handle
from draftkit.io.records import did_you_mean
from draftkit.layout.folder import Draft
from draftkit.layout.quantization import COMPRESSED
from draftkit.version import with_extra

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = "bf16"
ALL = "all"
# Part → the last words of its modules' names. Engines join those of `FUSED` in one matrix, which they call so.
PARTS = {
    "embed": r"embed_tokens",
    "fc": r"fc",
    "qkv": r"[qkv]_proj",
    "o": r"o_proj",
    "mlp": r"(gate|up|down)_proj",
    "head": r"lm_head",
    "markov": r"markov_head\.\w+",
    "confidence": r"confidence_head\.\w+",
}
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
USUAL = ("fc", "qkv", "o", "mlp")  # what a format alone is for
# Not quantized where a user asks for all: lookups, a head of one row, and what is added to the logits (ModelOpt 2027).
LEFT = ("embed", "markov", "confidence")


@dataclass(frozen=True)
class WeightFormat:
    """A format that weights can be written in.

    `preset`: its name in compressed-tensors; `stored`: that of its way to pack. `algorithm`: ModelOpt's name, where it
    is written as ModelOpt does. `group`: the columns that share a scale. `input_scale`: what all inputs are divided by,
    over the greatest number of the format, where no data says it.
    """

    preset: str
    stored: str
    algorithm: str | None = None
    group: int | None = None
    input_scale: float | None = None


FORMATS = {
    "fp8-dynamic": WeightFormat("FP8_DYNAMIC", "float-quantized"),
    "fp8": WeightFormat("FP8", "float-quantized", input_scale=1.0),
    "nvfp4": WeightFormat("NVFP4", "nvfp4-pack-quantized", group=16, input_scale=0.3),
    "nvfp4a16": WeightFormat("NVFP4A16", "nvfp4-pack-quantized", group=16),
    "w4a16-g128": WeightFormat("W4A16", "pack-quantized", group=128),
    "modelopt-fp8": WeightFormat("FP8", "float-quantized", "FP8", input_scale=1.0),
    "modelopt-w4a16-nvfp4": WeightFormat("NVFP4A16", "nvfp4-pack-quantized", "W4A16_NVFP4", group=16),
}
MODELOPT_METHOD = {"FP8": "modelopt", "W4A16_NVFP4": "modelopt_fp4"}
# What compressed-tensors calls the tensors of a weight, and what ModelOpt does.
MODELOPT_NAMES = {"weight_packed": "weight", "weight_global_scale": "weight_scale_2"}


def read_formats(text: str) -> dict[str, str]:
    """`head:fp8-dynamic,mlp:w4a16-g128` as part → format; a format alone is for the usual parts.

    Raises `SettingError` for what is neither.
    """
    found: dict[str, str] = {}
    for piece in text.split(","):
        part, colon, format = piece.strip().rpartition(":")
        if format not in (*FORMATS, PLAIN):
            what = f"{format} is no format of weights{did_you_mean(format, FORMATS)}"
            raise SettingError(what, "quantize", expected=f"one of {', '.join((*FORMATS, PLAIN))}")
        found |= {part: format} if colon else dict.fromkeys(USUAL, format)
    return found


def parts_of(draft: Draft) -> dict[str, list[str]]:
    """The matrices of each part of a draft, by the names of their modules; only the parts that it has."""
    matrices = [
        handle.name.removesuffix(".weight")
        for handle in draft.tensors.values()
        if handle.name.endswith(".weight") and len(handle.shape) == 2
    ]
    found = {part: [m for m in matrices if re.fullmatch(rf"(.*\.)?({end})", m)] for part, end in PARTS.items()}
    return {part: modules for part, modules in found.items() if modules}


def formats_by_part(draft: Draft, asked: Mapping[str, str]) -> dict[str, str]:
    """The format of each part of a draft that is to be quantized. `asked`: by part, or for all.

    Raises `LayoutError` for a part that the draft has not.
    """
    there = parts_of(draft)
    usual = asked.keys() == {*USUAL}  # where a format alone was given
    unknown = [part for part in asked if part not in (*there, ALL) and not usual]
    if unknown or not there:
        raise LayoutError(
            f"{draft.path.name} has no part {unknown[0] if unknown else 'to quantize'}",
            where=draft.path,
            expected=f"of this draft: {', '.join([*there, ALL])}" if there else "a draft of one's own weights",
            hint="a head or an embedding that is the target's own is not the draft's to quantize",
        )
    whole = dict.fromkeys((part for part in there if part not in LEFT), asked[ALL]) if ALL in asked else {}
    chosen = whole | {part: format for part, format in asked.items() if part in there}
    return {part: format for part, format in chosen.items() if format != PLAIN}


def quantized(draft: Draft, asked: Mapping[str, str]) -> Draft:
    """The draft with parts of its weights quantized, in memory; matrices whose columns do not fill a format's groups
    stay plain.

    Raises `LayoutError` for a draft that is quantized already, has no such part, or of which nothing would be left to
    quantize, and `DraftkitError` without the library.
    """
    if draft.spec.quantization is not None:
        hint = "quantize the draft that it was made from"
        raise LayoutError("the weights of the draft are quantized already", where=draft.path, hint=hint)
    chosen = formats_by_part(draft, asked)
    modules = {m: format for part, format in chosen.items() for m in parts_of(draft)[part] if _fits(draft, m, format)}
    if not modules:
        sizes = sorted({str(FORMATS[format].group) for format in chosen.values()})
        hint = f"groups of {', '.join(sizes)} do not fill its rows" if sizes else "name a part and a format"
        raise LayoutError("no matrix of the draft would be quantized", where=draft.path, hint=hint)
    algorithms = {FORMATS[format].algorithm for format in modules.values()}
    if len(algorithms) > 1 or (None not in algorithms and len(set(modules.values())) > 1):
        raise LayoutError("ModelOpt's formats are written for all parts alike", where=draft.path)
    parts = {m: _parts(draft, m, FORMATS[format], modules) for m, format in modules.items()}
    tensors: dict[str, TensorHandle] = {}
    for name, handle in draft.tensors.items():
        module = name.removesuffix(".weight")
        if name == f"{module}.weight" and module in parts:
            made = {f"{module}.{part}": tensor for part, tensor in parts[module].items()}
            tensors |= {key: memory_handle(key, tensor.contiguous(), handle.origin) for key, tensor in made.items()}
        else:
            tensors[name] = handle
    stated = _modelopt_config(draft, modules) if None not in algorithms else _config(draft, modules)
    return replace(draft, spec=replace(draft.spec, quantization=stated), tensors=tensors)


def _fits(draft: Draft, module: str, format: str) -> bool:
    """Whether the groups of a format fill the rows of a matrix, and of those that engines join it with.

    vLLM makes the queries of an EAGLE-3 layer as wide as the draft first, and refuses groups that do not fill that.
    """
    group = FORMATS[format].group
    joined = _joined(draft, module)
    widths = [draft.tensors[f"{m}.weight"].shape[1] for m in joined]
    output = draft.tensors.get(f"{module.rpartition('.')[0]}.o_proj.weight")
    if output is not None and len(joined) > 1:
        widths.append(output.shape[0])
    return group is None or all(width % group == 0 for width in widths)


def _joined(draft: Draft, module: str) -> list[str]:
    """The modules that engines have in one matrix with a module; it alone where that is none."""
    before, dot, last = module.rpartition(".")
    together = next((names for names in FUSED.values() if last in names), (last,))
    return [name for one in together if f"{(name := f'{before}{dot}{one}')}.weight" in draft.tensors]


def _parts(draft: Draft, module: str, format: WeightFormat, modules: Mapping[str, str]) -> dict[str, Tensor]:
    """The tensors that stand for a matrix, by what they are called in its module, as compressed-tensors makes them."""
    import torch

    try:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import preset_name_to_scheme
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
    except ImportError as error:
        hint = with_extra("quantized")
        raise DraftkitError("quantizing weights needs the library compressed-tensors", hint=hint) from error
    weight = draft.tensors[f"{module}.weight"].load().float()
    scheme = preset_name_to_scheme(format.preset, ["Linear"])
    assert scheme.weights is not None
    least, most = _ranges(draft, module, weight, format)
    whole = None
    if format.group == 16:
        whole = generate_gparam(*_of_joined(draft, module))
    scale, _ = calculate_qparams(least, most, scheme.weights, global_scale=whole)
    if format.preset == "W4A16":  # engines keep these scales in the dtype of the draft
        scale = scale.to(torch_dtype(draft.spec.dtype)).float()
    given = {"weight": weight, "weight_scale": scale} | ({} if whole is None else {"weight_global_scale": whole})
    with torch.compiler.set_stance("force_eager"):  # compressed-tensors 0.17 compiles, which takes a compiler
        made = dict(BaseCompressor.get_value_from_registry(format.stored).compress(given, scheme))
    if format.preset == "W4A16":
        made["weight_scale"] = made["weight_scale"].to(torch_dtype(draft.spec.dtype))
    if format.input_scale is not None:
        name = "input_scale" if format.group is None else "input_global_scale"
        made[name] = torch.tensor([format.input_scale if format.group is None else 1 / format.input_scale])
    return made if format.algorithm is None else _as_modelopt(made)


def _as_modelopt(made: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under ModelOpt's names: its scale of a whole weight is a factor, that of compressed-tensors the
    inverse of one."""
    named = {MODELOPT_NAMES.get(part, part): tensor for part, tensor in made.items()}
    if "weight_scale_2" in named:
        named["weight_scale_2"] = 1 / named["weight_scale_2"]
    return {part: tensor.view(()) if tensor.shape == (1,) else tensor for part, tensor in named.items()}


def _ranges(draft: Draft, module: str, weight: Tensor, format: WeightFormat) -> tuple[Tensor, Tensor]:
    """The least and greatest numbers that share a scale: of a group, a row, or the whole."""
    if format.group is not None:
        groups = weight.unflatten(1, (-1, format.group))
        return groups.amin(-1), groups.amax(-1)
    if format.preset == "FP8_DYNAMIC":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    return _of_joined(draft, module)


def _of_joined(draft: Draft, module: str) -> tuple[Tensor, Tensor]:
    """The least and greatest numbers of all matrices that engines join."""
    import torch

    ranges = [torch.aminmax(draft.tensors[f"{m}.weight"].load().float()) for m in _joined(draft, module)]
    return torch.stack([r.min for r in ranges]).amin(), torch.stack([r.max for r in ranges]).amax()


def _config(draft: Draft, modules: Mapping[str, str]) -> dict[str, object]:
    """The `quantization_config` as compressed-tensors writes it, a group for each format."""
    from compressed_tensors.quantization import QuantizationConfig, preset_name_to_scheme

    groups = {}
    for number, format in enumerate(dict.fromkeys(modules.values())):
        ends = [module for module, own in modules.items() if own == format]
        scheme = preset_name_to_scheme(FORMATS[format].preset, [f"re:.*{end}$" for end in _ends(ends)])
        groups[f"group_{number}"] = scheme.model_copy(update={"format": FORMATS[format].stored})
    stored = {FORMATS[format].stored for format in modules.values()}
    config = QuantizationConfig(
        config_groups=groups,
        quantization_status="compressed",
        format=stored.pop() if len(stored) == 1 else "mixed-precision",
        ignore=[f"re:.*{end}$" for end in _ends(_others(draft, modules))],
    )
    written: dict[str, object] = json.loads(config.model_dump_json())
    return {"quant_method": COMPRESSED} | written


def _modelopt_config(draft: Draft, modules: Mapping[str, str]) -> dict[str, object]:
    """The same as ModelOpt says it, with the key `ignore` that engines read in config.json: what is left out by its
    name, by its end, and by what engines call the whole."""
    algorithm = FORMATS[next(iter(modules.values()))].algorithm
    assert algorithm is not None
    others = _others(draft, modules)
    group = FORMATS[next(iter(modules.values()))].group
    return {
        "quant_method": MODELOPT_METHOD[algorithm],
        "quant_algo": algorithm,
        "kv_cache_quant_algo": None,
        **({} if group is None else {"group_size": group}),
        "ignore": [*others, *(f"*{end}" for end in _plain_ends(others))],
    }


def _others(draft: Draft, modules: Mapping[str, str]) -> list[str]:
    """The matrices that stay as they are, and those that no draft of its own keeps plain: the borrowed tables."""
    named = [m for found in parts_of(draft).values() for m in found if m not in modules]
    return list(dict.fromkeys([*named, *(m for m in ("embed_tokens", "lm_head") if m not in modules)]))


def _plain_ends(modules: Sequence[str]) -> Iterator[str]:
    """The ends of module names, and the names of the matrices that engines join them in."""
    ends = list(dict.fromkeys(_end(module) for module in modules))
    yield from ends
    yield from (whole for whole, parts in FUSED.items() if all(part in ends for part in parts))


def _ends(modules: Sequence[str]) -> list[str]:
    """The same as patterns of the end of a name."""
    return [rf"\b{re.escape(end)}" if end == "fc" else re.escape(end) for end in _plain_ends(modules)]


def _end(module: str) -> str:
    """The last word of a module's name; two of a head's, which engines call by it."""
    words = module.split(".")
    return ".".join(words[-2:]) if words[-2:-1] in (["markov_head"], ["confidence_head"]) else words[-1]
