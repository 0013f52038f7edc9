"""Trials of Gemma-4's assistant: where it drafts, and which tokens have logits."""

from __future__ import annotations

from collections.abc import Iterator

from draftkit.doctor.patient import Patient
from draftkit.doctor.trial import Trial, experiment, with_facts

OTHER_ORDERING = (
    "masked_embedding is not that of this embedding: fetch the assistant's checkpoint again, or serve it with "
    "use_ordered_embeddings false"
)


@experiment("draft-position", "rows that all stand at one position")
def draft_position(patient: Patient) -> Iterator[Trial]:
    """Draft at the newest token's position, as transformers does, not at that of the state before it, as vLLM does."""
    own = patient.facts.get("position")
    if own is not None:
        advice = "vLLM drafts at the state's position all the same: it was trained with another"
        yield with_facts(patient, advice, position="token" if own == "state" else "state")


@experiment("ordered-embedding", "logits of some tokens alone")
def ordered_embedding(patient: Patient) -> Iterator[Trial]:
    """Logits of all tokens, as llama.cpp has them."""
    if patient.facts.get("num_centroids"):
        yield with_facts(patient, OTHER_ORDERING, num_centroids=0, selected_centroids=0)
