"""Faults of the multi-token prediction heads in a target's checkpoint that was quantized, fine-tuned or uploaded again.

Names, shapes and dtypes are told from the headers, by the target's own layer that is most like a head's; only what has
`stored` among its needs reads tensors, those of the heads and what they are copies of.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from draftkit.checks.evidence import Stored
from draftkit.checks.registry import check
from draftkit.convert.formats.mtp.heads import PACKED, WEIGHTS, TargetHeads
from draftkit.finding import Finding
from draftkit.io.dtypes import FLOATS
from draftkit.io.finite import find_non_finite
from draftkit.io.handles import TensorHandle
from draftkit.layout.mtp import COPIES, LEFT_ALONE

PUT_BACK = (
    "take them from the original: draftkit convert ORIGINAL HEADS --part mtp, then draftkit convert HEADS --into TARGET"
)
GPTQ_RULES = "dynamic"  # the key under which GPTQ has a pattern for each exception
SHOWN = 6  # names in a message


@check
def fewer_heads_than_promised(heads: TargetHeads) -> Iterator[Finding]:
    if heads.count < heads.promised:
        held = "none" if heads.count == 0 else str(heads.count)
        yield Finding(
            "heads-missing",
            "error",
            f"the config promises {heads.promised} multi-token prediction head(s), and the weights hold {held}",
            cost="engines refuse to draft with them, or run heads that were never loaded",
            fix=PUT_BACK,
            source="vllm-project/llm-compressor #1843",
        )


@check
def heads_not_promised(heads: TargetHeads) -> Iterator[Finding]:
    names = [*heads.unexpected] if heads.promised else [*heads.tensors]
    if names:
        yield Finding(
            "heads-not-promised",
            "warning",
            f"the weights hold {len(names)} tensors of heads that the config does not promise: {_listed(names)}",
            cost="engines do not load them",
            fix="give the config the number of heads that its author's has (num_nextn_predict_layers or the like)",
        )


@check
def missing_tensors(heads: TargetHeads) -> Iterator[Finding]:
    missing = heads.missing
    if missing and heads.count == heads.promised:
        shared = any("shared_expert" in name for name in missing)
        yield Finding(
            "head-tensors-missing",
            "error",
            f"{len(missing)} tensors are missing of the heads{', the shared expert among them' if shared else ''}: "
            f"{_listed(missing)}",
            cost="engines stop, or leave what they have not loaded as it was made: almost nothing is accepted",
            fix=PUT_BACK,
            source="the target's own layers have them",
        )


@check
def surplus_tensors(heads: TargetHeads) -> Iterator[Finding]:
    """Modules that neither the target's own layer has nor what is around it."""
    if heads.kind.parts is None or not heads.like:
        return
    known = {name.rpartition(".")[0] for name in heads.wanted}
    known |= {block + name.rpartition(".")[0] for block in heads.blocks for name in heads.like}
    surplus = [
        name
        for name in heads.tensors
        if name.endswith(WEIGHTS) and name.rpartition(".")[0] not in known and not name.endswith(tuple(COPIES))
    ]
    if surplus and heads.promised:
        yield Finding(
            "head-tensors-surplus",
            "warning",
            f"{len(surplus)} tensors of the heads are none that the target's own layers have: {_listed(surplus)}",
            cost="engines stop at names that they do not know, or leave such tensors out",
            fix=PUT_BACK,
        )


@check
def wrong_shapes(heads: TargetHeads) -> Iterator[Finding]:
    wrong = heads.misshapen
    if wrong and not _quantized_otherwise(heads):
        yield Finding(
            "head-shapes",
            "error",
            f"{len(wrong)} tensors of the heads have other shapes than the target's: {_listed(wrong)}",
            cost="engines stop when they load them",
            fix=PUT_BACK,
        )


@check
def not_quantized(heads: TargetHeads, config: Mapping[str, object]) -> Iterator[Finding]:
    """Plain heads beside quantized layers, where the config does not say that they were left alone."""
    plain = [name for name in _quantized_otherwise(heads) if heads.tensors[name].dtype in FLOATS]
    if plain and not _left_alone(config, heads, plain[0]):
        yield Finding(
            "heads-not-quantized",
            "error",
            f"the target is quantized and its heads are not ({plain[0]} is {heads.tensors[plain[0]].dtype}), which the "
            "config's list of modules that were left alone does not say",
            cost="engines make quantized layers for them, and load the weights wrongly or not at all",
            fix="add the heads to quantization_config (ignore or modules_to_not_convert), by their prefix "
            + heads.prefixes[0],
            source="vllm-project/llm-compressor #1843",
        )


@check
def quantized_though_left_alone(heads: TargetHeads, config: Mapping[str, object]) -> Iterator[Finding]:
    quantized = [name for name, handle in heads.tensors.items() if handle.dtype not in FLOATS]
    if quantized and _left_alone(config, heads, quantized[0]):
        yield Finding(
            "heads-quantized",
            "error",
            f"the heads are quantized ({quantized[0]} is {heads.tensors[quantized[0]].dtype}), and the config says "
            "that they were left alone",
            cost="engines make plain layers for them, and load the weights wrongly or not at all",
            fix="take the heads' prefix off the list in quantization_config, or put the original heads back",
        )


@check
def quantized_otherwise_than_the_target(heads: TargetHeads, config: Mapping[str, object]) -> Iterator[Finding]:
    """Both quantized, in other dtypes or with other scales, where the config has no rule of its own for the heads."""
    differing = [
        f"{module} has {_scheme(own)}, the target's {_scheme(like)}"
        for module, own, like in _matrices(heads)
        if _is_quantized(own) and _is_quantized(like) and _scheme(own) != _scheme(like)
    ]
    if differing and not _has_own_rule(config, heads):
        yield Finding(
            "heads-quantized-otherwise",
            "error",
            f"{len(differing)} modules of the heads are quantized otherwise than the target's: {_listed(differing)}",
            cost="engines make layers of the target's scheme for them, and stop, or load the weights wrongly",
            fix="quantize the heads as the target's layers are, or give them their own rule in quantization_config",
            source="vllm-project/llm-compressor #1843",
        )


@check
def other_dtypes(heads: TargetHeads) -> Iterator[Finding]:
    """Plain weights in another dtype than those of the target's own layer; the projection, than most of them."""
    usual = Counter(handle.dtype for handle in heads.like.values() if _is_matrix(handle)).most_common(1)
    if heads.kind.parts is None or not usual or not heads.promised:
        return
    expected = {f"{prefix}{heads.kind.parts.projection}.weight": usual[0][0] for prefix in heads.prefixes}
    expected |= {block + name: handle.dtype for block in heads.blocks for name, handle in heads.like.items()}
    other = [
        f"{own.name} is {own.dtype}, the target's {dtype}"
        for name, dtype in expected.items()
        if (own := heads.tensors.get(name)) is not None
        and _is_matrix(own)
        and {own.dtype, dtype} <= set(FLOATS)
        and own.dtype != dtype
    ]
    if other:
        yield Finding(
            "head-dtypes",
            "warning",
            f"{len(other)} tensors of the heads are stored in another dtype than the target's: {_listed(other)}",
            cost="engines cast them: F16 cannot hold all that BF16 can, and F32 takes twice the space",
            fix=PUT_BACK,
        )


@check
def values_that_are_no_numbers(heads: TargetHeads, stored: Stored) -> Iterator[Finding]:
    del stored
    if found := find_non_finite(heads.tensors):
        yield Finding(
            "heads-not-finite",
            "error",
            f"{len(found)} tensors of the heads hold numbers that are not finite: {_listed([str(f) for f in found])}",
            cost="every draft is rejected",
            fix=PUT_BACK,
            source="Blaizzy/mlx-vlm #1931",
        )


@check
def nothing_but_zeros(heads: TargetHeads, stored: Stored) -> Iterator[Finding]:
    del stored
    empty = [name for name, handle in heads.tensors.items() if name.endswith("weight") and not _any_bit(handle)]
    if empty:
        yield Finding(
            "heads-zero",
            "error",
            f"{len(empty)} tensors of the heads are all zero: {_listed(empty)}",
            cost="they were made and never filled: almost nothing is accepted",
            fix=PUT_BACK,
        )


@check
def stale_copies(heads: TargetHeads, stored: Stored) -> Iterator[Finding]:
    for end, own_end in COPIES.items():
        copies = [handle for name, handle in heads.tensors.items() if name.endswith(end)]
        own = [h for n, h in stored.tensors.items() if n not in heads.tensors and n.endswith(own_end)]
        for copy in copies if own else []:
            same = _same(copy, own[0])
            yield Finding(
                "head-copies",
                "ok" if same else "warning",
                f"{copy.name} is {'byte for byte' if same else 'not'} the target's {own[0].name}",
                cost="" if same else "vLLM drafts with the target's table, engines that read the copy with another one",
                fix="" if same else f"replace it with a copy of {own[0].name}, or leave it out",
                source="vLLM shares both tables",
            )


def _is_matrix(handle: TensorHandle) -> bool:
    return handle.name.endswith("weight") and len(handle.shape) > 1


def _matrices(heads: TargetHeads) -> Iterator[tuple[str, dict[str, str], dict[str, str]]]:
    """Modules of the first head's decoder layer that the target's has too, each as the dtypes of its tensors, by the
    ends of their names: the head's and the target's."""
    if not heads.promised or heads.kind.parts is None:
        return
    own, like = _modules(heads.tensors), _modules(heads.like)
    for module, dtypes in like.items():
        if (name := heads.blocks[0] + module) in own:
            yield name, own[name], dtypes


def _modules(tensors: Mapping[str, TensorHandle]) -> dict[str, dict[str, str]]:
    modules: dict[str, dict[str, str]] = {}
    for name, handle in tensors.items():
        module, _, end = name.rpartition(".")
        modules.setdefault(module, {})[end] = handle.dtype
    return modules


def _is_quantized(module: Mapping[str, str]) -> bool:
    return any(dtype not in FLOATS for end, dtype in module.items() if "weight" in end or end.startswith("q"))


def _scheme(module: Mapping[str, str]) -> str:
    return ", ".join(f"{end} {dtype}" for end, dtype in sorted(module.items()) if end != "bias")


def _has_own_rule(config: Mapping[str, object], heads: TargetHeads) -> bool:
    """Whether the quantizer's settings say anything about the heads."""
    return any(prefix.rstrip(".") in json.dumps(_settings(config)) for prefix in heads.prefixes)


def _settings(config: Mapping[str, object]) -> dict[str, Any]:
    settings: Any = config.get("quantization_config")
    text: Any = config.get("text_config")
    if not isinstance(settings, dict) and isinstance(text, dict):
        settings = text.get("quantization_config")
    return settings if isinstance(settings, dict) else {}


def _quantized_otherwise(heads: TargetHeads) -> list[str]:
    """The matrices of the first head's decoder layer that are quantized where the target's are not, or the reverse."""
    if not heads.promised or heads.kind.parts is None:
        return []
    block, found = heads.blocks[0], []
    for name, handle in heads.like.items():
        own = heads.tensors.get(block + name)
        if own is not None and len(handle.shape) > 1 and (own.dtype in FLOATS) != (handle.dtype in FLOATS):
            found.append(own.name)
    # Weights that are packed have other names: a plain matrix beside a module with packed ones.
    packed = {name.rpartition(".")[0] for name in heads.like if name.endswith(PACKED)}
    own_plain = (f"{block}{module}.weight" for module in sorted(packed))
    return found + [name for name in own_plain if name in heads.tensors]


def _left_alone(config: Mapping[str, object], heads: TargetHeads, name: str) -> bool:
    """Whether a quantizer's list names the module of a tensor, one that holds it, or a pattern for it."""
    settings = _settings(config)
    stated = [settings.get(key) for key in (*LEFT_ALONE, GPTQ_RULES)]
    listed = [str(entry) for entries in stated if isinstance(entries, list | dict) for entry in entries]
    return any(_names(entry, name) or _names(entry, heads.prefixes[0] + "x") for entry in listed)


def _names(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        try:
            return re.match(entry.removeprefix("re:"), name) is not None
        except re.error:  # quantizers do not take such a pattern either
            return False
    plain = entry.removeprefix("-:").strip("^$.*").replace("\\.", ".")
    return bool(plain) and (name == plain or f".{plain}." in f".{name}")


def _any_bit(handle: TensorHandle) -> bool:
    return any(any(memoryview(chunk)) for chunk in handle.chunks())


def _same(one: TensorHandle, other: TensorHandle) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(bytes(a) == bytes(b) for a, b in zip(one.chunks(), other.chunks(), strict=True))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
