"""Every tensor of a draft: how often it is used, whether it is finite, whether it looks trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from draftkit.convert.api import Reading
from draftkit.doctor.patient import Patient
from draftkit.finding import Finding

Use = Literal["once", "shared", "ignored"]


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


def audit(patient: Patient, reading: Reading | None, findings: Sequence[Finding]) -> tuple[Audited, ...]:
    """Look at every tensor of a draft, beside what was found of it, and at those that its conversion left out."""
    audited = []
    for name, handle in patient.original.tensors.items():
        faults = [finding for finding in findings if finding.where == name]
        use, remark = _use(patient, name)
        remark = "; ".join(fault.message.removeprefix(f"{name}: ") for fault in faults) or remark
        finite = all(fault.name != "not-finite" for fault in faults)
        audited.append(Audited(name, handle.dtype, handle.shape, use, finite, not faults, remark))
    return (*audited, *_borrowed(patient), *_ignored(reading))


def _use(patient: Patient, name: str) -> tuple[Use, str]:
    if patient.facts.get("tied"):
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
        if patient.facts.get(table) == "target":
            dtype = str(patient.model.dtype).removeprefix("torch.")
            yield Audited(f"{table}.weight", dtype, tuple(patient.table(table).shape), "shared", True, True, "target's")


def _ignored(reading: Reading | None) -> Iterator[Audited]:
    for move in reading.plan.moves if reading is not None else ():
        if move.operation == "drop":
            yield Audited(", ".join(move.sources), move.dtype, move.shape, "ignored", True, True, move.reason)
