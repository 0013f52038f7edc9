"""The tensors of a draft, one by one: whether they are finite, and look trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from draftkit.checks.randomness import looks_random
from draftkit.checks.registry import check
from draftkit.finding import Finding, Severity
from draftkit.io.dtypes import FLOATS
from draftkit.io.finite import find_non_finite
from draftkit.io.handles import TensorHandle

SMALL_NORM, LARGE_NORM = 1e-3, 1e3  # mean size of a norm's weights, beyond which it switches its input off or swamps it
UNREAD = 0.02  # of the largest captured layer's weights in fc, below which a layer is not read


@check
def finite(tensors: Mapping[str, TensorHandle]) -> Iterator[Finding]:
    for found in find_non_finite(tensors):
        yield _finding("not-finite", "error", found.name, str(found))


@check
def trained(tensors: Mapping[str, TensorHandle], facts: Mapping[str, object]) -> Iterator[Finding]:
    """Whether each looks like what training leaves. A map may well be zero at first, and is no matter of this."""
    for name, handle in tensors.items():
        if handle.dtype in FLOATS:
            tensor = handle.load().float()
            if tensor.isfinite().all():
                yield from _untrained(name, handle, tensor, facts)


def _untrained(name: str, handle: TensorHandle, tensor: Tensor, facts: Mapping[str, object]) -> Iterator[Finding]:
    if not tensor.any() and not name.endswith("bias"):
        yield _finding(f"zero-{_kind(name)}", "error", name, "all zero, as if it had never been set")
    elif tensor.ndim == 1 and "norm" in name and not name.endswith("bias"):
        size = float(tensor.abs().mean())
        if not SMALL_NORM < size < LARGE_NORM:
            yield _finding("norm-weights", "warning", name, f"the weights of this norm are {size:.1e} on average")
    elif name == "lm_head.weight" and looks_random(handle):
        yield _finding("random-head", "warning", name, "looks like an initialization, not like a trained head")
    elif name == "fc.weight" and facts.get("token_entry") == "attention" and isinstance(facts["aux_layer_ids"], list):
        ids = facts["aux_layer_ids"]
        sizes = [float(block.norm()) for block in tensor.chunk(len(ids), dim=1)]
        unread = [layer for layer, size in zip(ids, sizes, strict=True) if size < UNREAD * max(sizes)]
        if unread:
            yield _finding("unread-layers", "warning", name, f"hardly reads the states of layers {unread}")


def _finding(name: str, severity: Severity, tensor: str, seen: str) -> Finding:
    return Finding(
        name,
        severity,
        f"{tensor}: {seen}",
        where=tensor,
        fix="fetch the checkpoint again",
        source="tensor audit",
    )


def _kind(name: str) -> str:
    return name.removesuffix(".weight").rsplit(".", 1)[-1].replace("_", "-")
