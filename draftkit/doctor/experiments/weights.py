"""Trials of weights: tables of the target's instead of the draft's, other maps, rotated inputs, biases left out."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from draftkit.convert.formats.vocabulary_map import problem_of_map
from draftkit.doctor.patient import Patient, Setup, changed, target_ids, with_target_ids
from draftkit.doctor.trial import Trial, experiment, with_facts, with_tensors
from draftkit.layout.facts import with_facts as other_facts


@experiment("embedding", "an embedding table of its own, as wide as the target's")
def embedding(patient: Patient) -> Iterator[Trial]:
    """The target's embedding table instead of the draft's own."""
    if patient.facts.get("embed_tokens") == "draft" and patient.as_wide_as_target:
        yield with_facts(patient, embed_tokens="target")


@experiment("head", "a head of its own, as wide as the target's")
def head(patient: Patient) -> Iterator[Trial]:
    """The target's head, its rows of the draft's tokens, instead of the draft's own."""
    if patient.facts.get("lm_head", "target") == "target" or not patient.as_wide_as_target:
        return
    if "d2t" not in patient.draft.tensors:
        yield with_facts(patient, lm_head="target")
        return
    yield with_tensors(
        patient,
        "the target's head, rows of the draft's tokens",
        lambda: {"lm_head.weight": patient.table("lm_head")[target_ids(patient.draft)]},
        "lm_head.weight is not the trained one: fetch the checkpoint again; failing that, start from the target's rows",
    )


@experiment("d2t", "a draft vocabulary whose map can be read otherwise")
def vocabulary_map(patient: Patient) -> Iterator[Trial]:
    """d2t read as ids where it was taken for offsets, and the reverse."""
    if "d2t" not in patient.original.tensors:
        return
    offsets = patient.original.tensors["d2t"].load()
    own, rows = target_ids(patient.original), torch.arange(len(offsets))
    for change, ids in (("d2t holds target ids, not offsets", offsets), ("d2t holds offsets twice", own + rows)):
        if problem_of_map(ids.tolist(), patient.architecture.vocab_size) is None and not torch.equal(ids, own):
            yield Trial(
                change,
                partial(_mapped, patient, ids),
                {},
                "write the map as offsets, target id − draft id, and convert the checkpoint again",
            )


@experiment("d2t-matched", "a draft vocabulary and a head like the target's")
def matched_map(patient: Patient) -> Iterator[Trial]:
    """Each draft token mapped to the target token whose head row is most like its own."""
    tensors = patient.draft.tensors
    if "d2t" not in tensors or "lm_head.weight" not in tensors or not patient.as_wide_as_target:
        return
    mine = torch.nn.functional.normalize(tensors["lm_head.weight"].load().float(), dim=-1)
    theirs = torch.nn.functional.normalize(patient.table("lm_head"), dim=-1)
    ids = torch.cat([(chunk @ theirs.T).argmax(-1) for chunk in mine.split(1024)])
    if not torch.equal(ids, target_ids(patient.draft)) and len(ids.unique()) > len(ids) / 2:
        yield Trial(
            "d2t found anew, by the head's rows",
            partial(_mapped, patient, ids),
            {},
            "get the file with the map that the draft was trained with; this one is found by likeness",
        )


def _mapped(patient: Patient, ids: Tensor) -> Setup:
    return patient.setup(with_target_ids(patient.draft, ids))


@experiment("biases", "biases in attention or MLP")
def biases(patient: Patient) -> Iterator[Trial]:
    """Biases of attention and MLP left out: several loaders make up those that the file lacks."""
    names = ("qkv_bias", "output_bias", "mlp_bias")
    present = [name for name in names if patient.facts.get(name)]
    if present:
        without = other_facts(patient.architecture, **dict.fromkeys(present, False))
        yield Trial(
            "no attention and MLP biases" if len(present) > 1 else f"{present[0]}=false",
            lambda: patient.setup(changed(patient.draft, without)),
            {},
            "remove the biases from the checkpoint: they were not trained",
        )


@experiment("rotated-space", "a table of its own that is the target's, rotated")
def rotated_space(patient: Patient) -> Iterator[Trial]:
    """The target's states are those that the draft was trained with, times a rotation: undone in fc."""
    if "fc.weight" not in patient.draft.tensors or not patient.as_wide_as_target:
        return
    rotation = _rotation(patient)
    if rotation is not None:
        yield Trial(
            "fc · blockdiag(Q), Q found from the tables of draft and target",
            partial(_rotated, patient, rotation),
            {},
            "the target was rotated after the draft was trained (QuaRot): serve the original, or rotate the draft's fc",
        )


def _rotation(patient: Patient) -> Tensor | None:
    """Q from whatever table the draft has of its own and the target has too."""
    rows = {"embed_tokens": None, "lm_head": target_ids(patient.draft)}
    for table, ids in rows.items():
        if f"{table}.weight" in patient.draft.tensors:
            theirs = patient.table(table)
            mine = patient.draft.tensors[f"{table}.weight"].load().float()
            found = find_rotation(mine, theirs if ids is None else theirs[ids])
            if found is not None:
                return found
    return None


def _rotated(patient: Patient, rotation: Tensor) -> Setup:
    facts, fc = patient.facts, patient.draft.tensors["fc.weight"].load().float()
    if facts.get("token_entry") != "fusion":
        rotated = rotate_blocks(fc, rotation)
    else:
        embedding_first = facts["concatenation"] == "embedding_hidden"
        parts = list(fc.split(len(fc), dim=1))  # draft and target are of the same width
        parts[int(embedding_first)] = rotate_blocks(parts[int(embedding_first)], rotation)
        rotated = torch.cat(parts, dim=1)
    borrowed = [name for name in ("embed_tokens", "lm_head") if facts[name] == "target"]
    tensors = {"fc.weight": rotated} | {f"{name}.weight": patient.table(name) @ rotation.T for name in borrowed}
    own = other_facts(patient.architecture, embed_tokens="draft", lm_head="draft")
    return patient.setup(changed(patient.draft, own, tensors))


ROWS_PER_COLUMN = 4  # a matrix of H² numbers, found from this many times H rows of H numbers
FAR = 0.7  # two tables whose difference is this large, relative to either, are not the same
NEAR = 0.6  # and rotated, they are the same when this much of it remains on rows that Q was not found from


def find_rotation(mine: Tensor, theirs: Tensor) -> Tensor | None:
    """The orthogonal Q [H, H] with theirs ≈ mine · Q, for two tables [V, H] with the same rows; None without one.

    Procrustes' solution on every other row, judged on the rows between. None too where the tables are the same as they
    are, or have too few rows to tell.
    """
    rows = min(len(mine), 2 * ROWS_PER_COLUMN * mine.shape[1])
    if rows < 2 * mine.shape[1]:
        return None
    chosen = torch.linspace(0, len(mine) - 1, rows).long()
    mine, theirs = _centred(mine[chosen]), _centred(theirs[chosen])
    if _difference(mine, theirs) < FAR:
        return None
    left, _, right = torch.linalg.svd(mine[::2].T @ theirs[::2])
    rotation = left @ right
    return rotation if _difference(mine[1::2] @ rotation, theirs[1::2]) < NEAR else None


def rotate_blocks(weight: Tensor, rotation: Tensor) -> Tensor:
    """weight · blockdiag(Q, …, Q): a projection [H, A·Ht] of states that have been multiplied by Q [Ht, Ht]."""
    size = len(rotation)
    return (weight.view(len(weight), -1, size) @ rotation).reshape(weight.shape)


def _centred(table: Tensor) -> Tensor:
    """Rows of length one, so that a scale or a few large rows decide nothing."""
    return torch.nn.functional.normalize(table, dim=-1)


def _difference(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).norm() / theirs.norm())
