"""Every tensor of a draft: how often it is used, whether it is finite, whether it looks trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from torch import Tensor

from draftkit.checks.checkpoint import Finding, Severity
from draftkit.convert.api import Reading
from draftkit.convert.randomness import looks_random
from draftkit.doctor.patient import Patient
from draftkit.io.finite import find_non_finite
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.families.mlp_speculator import MlpSpeculatorSpec

Use = Literal["once", "shared", "ignored"]
Fault = tuple[str, Severity, str]  # its name, how bad it is, what is seen
SMALL_NORM, LARGE_NORM = 1e-3, 1e3  # mean size of a norm's weights, beyond which it switches its input off or swamps it
UNREAD = 0.02  # of the largest captured layer's weights in fc, below which a layer is not read


@dataclass(frozen=True)
class Audited:
    """One tensor. `remark` says where it comes from, why it is ignored, or what is wrong with it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    use: Use
    finite: bool
    plausible: bool
    remark: str

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class Audit:
    """All tensors, and what is wrong with them as findings."""

    tensors: tuple[Audited, ...]
    findings: tuple[Finding, ...]


def audit(patient: Patient, reading: Reading | None) -> Audit:
    """Look at every tensor of a draft, and at those that its conversion left out."""
    draft = patient.original
    broken = {found.name: str(found) for found in find_non_finite(draft.tensors)}
    tensors, findings = [], []
    for name, handle in draft.tensors.items():
        faults: list[Fault] = [("not-finite", "error", broken[name])] if name in broken else [*_faults(patient, name)]
        use, remark = _use(patient, name)
        remark = "; ".join(message for _, _, message in faults) or remark
        tensors.append(Audited(name, handle.dtype, handle.shape, use, name not in broken, not faults, remark))
        findings += [
            Finding(fault, severity, f"{name}: {message}", "fetch the checkpoint again", "tensor audit")
            for fault, severity, message in faults
        ]
    return Audit((*tensors, *_borrowed(patient), *_ignored(reading)), tuple(findings))


def _use(patient: Patient, name: str) -> tuple[Use, str]:
    spec = patient.architecture
    if isinstance(spec, MlpSpeculatorSpec) and spec.tied:
        return "shared", "by the steps"
    if name == "model.embed_tokens.weight" and "lm_head.weight" not in patient.draft.tensors:
        return "shared", "embedding and head"
    if name in ("embed_tokens.weight", "lm_head.weight") and _is_targets(patient, name.removesuffix(".weight")):
        return "once", "the same as the target's"
    return "once", ""


def _is_targets(patient: Patient, table: str) -> bool:
    theirs = patient.table(table)
    handle = patient.original.tensors[f"{table}.weight"]
    return handle.shape == tuple(theirs.shape) and bool((handle.load().float() - theirs).abs().max() < 1e-2)


def _borrowed(patient: Patient) -> Iterator[Audited]:
    for table in ("embed_tokens", "lm_head"):
        if getattr(patient.architecture, table, None) == "target":
            dtype = str(patient.model.dtype).removeprefix("torch.")
            yield Audited(f"{table}.weight", dtype, tuple(patient.table(table).shape), "shared", True, True, "target's")


def _ignored(reading: Reading | None) -> Iterator[Audited]:
    for move in reading.plan.moves if reading is not None else ():
        if move.operation == "drop":
            yield Audited(", ".join(move.sources), move.dtype, move.shape, "ignored", True, True, move.reason)


def _faults(patient: Patient, name: str) -> Iterator[Fault]:
    """What is wrong with a finite tensor."""
    handle = patient.original.tensors[name]
    if name in ("d2t", "token_map"):
        return  # a map may well be zero at first; known defects say when it may not
    if handle.dtype not in ("F64", "F32", "F16", "BF16"):
        return
    tensor = handle.load().float()
    if not tensor.any() and not name.endswith("bias"):
        yield f"zero-{_kind(name)}", "error", "all zero, as if it had never been set"
    elif tensor.ndim == 1 and "norm" in name and not name.endswith("bias"):
        size = float(tensor.abs().mean())
        if not SMALL_NORM < size < LARGE_NORM:
            yield "norm-weights", "warning", f"the weights of this norm are {size:.1e} on average"
    elif name == "lm_head.weight" and looks_random(handle):
        yield "random-head", "warning", "looks like an initialization, not like a trained head"
    elif name == "fc.weight":
        yield from _unread_layers(patient, tensor)


def _unread_layers(patient: Patient, fc: Tensor) -> Iterator[Fault]:
    spec = patient.architecture
    if not isinstance(spec, EagleSpec) or spec.aux_layer_ids is None or spec.token_entry == "fusion":
        return
    sizes = [float(block.norm()) for block in fc.split(spec.target_hidden_size, dim=1)]
    unread = [layer for layer, size in zip(spec.aux_layer_ids, sizes, strict=True) if size < UNREAD * max(sizes)]
    if unread:
        yield "unread-layers", "warning", f"hardly reads the states of layers {unread}"


def _kind(name: str) -> str:
    return name.removesuffix(".weight").rsplit(".", 1)[-1].replace("_", "-")
