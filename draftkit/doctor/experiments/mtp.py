"""Trials of a target's own multi-token prediction head: what engines feed it, and how its norms are stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from torch import Tensor

from draftkit.doctor.patient import Patient
from draftkit.doctor.trial import Trial, experiment, with_facts, with_tensors

OTHER_OFFSET = (
    "the norms are stored as {}, which the target's class is not: convert them, or fetch the original checkpoint"
)


@experiment("hidden-state", "a head of the target's own")
def hidden_state(patient: Patient) -> Iterator[Trial]:
    """The target's last state before its final norm instead of after it, and the reverse."""
    own = patient.facts.get("hidden_state")
    if own is not None:
        yield with_facts(patient, hidden_state="before_norm" if own == "after_norm" else "after_norm")


@experiment("first-embedding", "a head of the target's own")
def first_embedding(patient: Patient) -> Iterator[Trial]:
    """The embedding beside the first state zeroed or not, in which engines differ."""
    own = patient.facts.get("zero_first_embedding")
    if own is not None:
        yield with_facts(patient, zero_first_embedding=not own)


@experiment("modules", "several modules of a head")
def modules(patient: Patient) -> Iterator[Trial]:
    """Always the first module instead of the next in turn, and the reverse: vLLM's two runners differ in it."""
    own = patient.facts.get("modules")
    if own is not None and patient.facts["num_modules"] != 1:
        yield with_facts(patient, modules="first" if own == "in_turn" else "in_turn")


@experiment("swapped-norms", "a head of the target's own")
def swapped_norms(patient: Patient) -> Iterator[Trial]:
    """The norm of the embedding in the place of that of the hidden state, and the reverse."""
    if isinstance(parts := patient.facts.get("parts"), dict):
        advice = f"{parts['embedding_norm']} and {parts['hidden_norm']} were swapped: put the original head back"
        yield with_tensors(patient, "norms swapped", partial(_swapped, patient, parts), advice)


def _swapped(patient: Patient, parts: Mapping[str, str]) -> Mapping[str, Tensor]:
    """The tensors of every module with both norms swapped."""
    tensors, ends = patient.draft.tensors, (parts["embedding_norm"], parts["hidden_norm"])
    swapped = {}
    for one, other in (ends, ends[::-1]):
        for name in tensors:
            prefix = name.removesuffix(f"{one}.weight")
            if prefix != name and f"{prefix}{other}.weight" in tensors:
                swapped[name] = tensors[f"{prefix}{other}.weight"].load()
    return swapped


@experiment("norm-offset", "a head of the target's own")
def norm_offset(patient: Patient) -> Iterator[Trial]:
    """Norms that hold 1 + w where the target's class has w, as in GGUF files of Qwen's, and the reverse."""
    if "zero_first_embedding" not in patient.facts:
        return
    for stored, shift in (("1 + w", -1.0), ("w", 1.0)):
        yield with_tensors(patient, f"norms {shift:+g}", partial(_shifted, patient, shift), OTHER_OFFSET.format(stored))


def _shifted(patient: Patient, shift: float) -> Mapping[str, Tensor]:
    norms = (h for h in patient.draft.tensors.values() if len(h.shape) == 1 and h.name.endswith("norm.weight"))
    return {handle.name: handle.load() + shift for handle in norms}
