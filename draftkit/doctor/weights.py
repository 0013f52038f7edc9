"""Trials of weights: tables of the target's instead of the draft's, other maps, biases, a rotation undone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from draftkit.doctor.patient import (
    Patient,
    Setup,
    changed,
    maps_inside,
    target_ids,
    with_target_ids,
)
from draftkit.doctor.rotation import find_rotation, rotate_blocks
from draftkit.doctor.trial import Trial, with_eagle_facts, with_tensors
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.families.medusa import MedusaSpec
from draftkit.models.target import FINAL, AuxLayers, Target
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.drafters.eagle import EagleDrafter

BIAS_ROUNDS = 2  # of estimating what fc.bias was; the draft's layer answers to it almost linearly
REMOVE = "remove {} from the checkpoint and convert it again"


def embedding(patient: Patient) -> Iterator[Trial]:
    """The target's embedding table instead of the draft's own."""
    spec = patient.architecture
    assert isinstance(spec, EagleSpec)
    if spec.embed_tokens == "draft" and spec.decoder.hidden_size == spec.target_hidden_size:
        yield with_eagle_facts(patient, REMOVE.format("embed_tokens.weight"), embed_tokens="target")


def head(patient: Patient) -> Iterator[Trial]:
    """The target's head, its rows of the draft's tokens, instead of the draft's own."""
    spec = patient.architecture
    if isinstance(spec, MedusaSpec):
        if spec.lm_head != "target":
            whole = replace(spec, lm_head="target")
            yield Trial(
                "lm_head=target",
                lambda: patient.setup(changed(patient.draft, whole)),
                {},
                "remove the heads' matrices from the checkpoint and convert it again",
            )
        return
    assert isinstance(spec, EagleSpec)
    if spec.lm_head == "target" or spec.decoder.hidden_size != spec.target_hidden_size:
        return
    if not spec.reduced_vocabulary:
        yield with_eagle_facts(patient, REMOVE.format("lm_head.weight"), lm_head="target")
        return
    yield with_tensors(
        patient,
        "the target's head, rows of the draft's tokens",
        lambda: {"lm_head.weight": patient.table("lm_head")[target_ids(patient.draft)]},
        "lm_head.weight is not the trained one: fetch the checkpoint again; failing that, start from the target's rows",
    )


def vocabulary_map(patient: Patient) -> Iterator[Trial]:
    """d2t read as ids where it was taken for offsets, and the reverse."""
    spec = patient.architecture
    assert isinstance(spec, EagleSpec)
    if not spec.reduced_vocabulary:
        return
    offsets = patient.original.tensors["d2t"].load()
    own, rows = target_ids(patient.original), torch.arange(spec.draft_vocab_size)
    for change, ids in (("d2t holds target ids, not offsets", offsets), ("d2t holds offsets twice", own + rows)):
        if maps_inside(ids, spec.vocab_size) and not torch.equal(ids, own):
            yield Trial(
                change,
                partial(_mapped, patient, ids),
                {},
                "write the map as offsets, target id − draft id, and convert the checkpoint again",
            )


def matched_map(patient: Patient) -> Iterator[Trial]:
    """Each draft token mapped to the target token whose head row is most like its own."""
    spec = patient.architecture
    assert isinstance(spec, EagleSpec)
    if not spec.reduced_vocabulary or spec.lm_head != "draft" or spec.decoder.hidden_size != spec.target_hidden_size:
        return
    mine = torch.nn.functional.normalize(patient.draft.tensors["lm_head.weight"].load().float(), dim=-1)
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


def biases(patient: Patient) -> Iterator[Trial]:
    """Biases of attention and MLP left out: several loaders make up those that the file lacks."""
    spec = patient.architecture
    assert isinstance(spec, EagleSpec)
    decoder = spec.decoder
    present = [name for name in ("qkv_bias", "output_bias", "mlp_bias") if getattr(decoder, name)]
    if present:
        without = replace(spec, decoder=replace(decoder, qkv_bias=False, output_bias=False, mlp_bias=False))
        yield Trial(
            "no attention and MLP biases" if len(present) > 1 else f"{present[0]}=false",
            lambda: patient.setup(changed(patient.draft, without)),
            {},
            "remove the biases from the checkpoint: they were not trained",
        )


def fusion_bias(patient: Patient) -> Iterator[Trial]:
    """fc.bias left out; or where there is none, the one with which the draft's states have the target's mean."""
    spec = patient.architecture
    assert isinstance(spec, EagleSpec)
    if spec.fusion_bias:
        yield with_eagle_facts(patient, REMOVE.format("fc.bias"), fusion_bias=False)
    elif spec.token_entry == "fusion" and spec.aux_layer_ids is None and not spec.final_norm:
        yield Trial(
            "fc.bias estimated from the target's states",
            lambda: _with_estimated_bias(patient, spec),
            {},
            "the checkpoint has lost its fc.bias: get the file that has it, and convert it again",
        )


def _with_estimated_bias(patient: Patient, spec: EagleSpec) -> Setup:
    """An EAGLE-1 draft is trained to give the target's next state: the mean of what is missing is its bias."""
    bias = torch.zeros(spec.decoder.hidden_size)
    for _ in range(BIAS_ROUNDS):
        setup = patient.setup(changed(patient.draft, replace(spec, fusion_bias=True), {"fc.bias": bias}))
        assert isinstance(setup.drafter, EagleDrafter)
        bias = bias + _mean_shortfall(patient, setup.drafter)
    return patient.setup(changed(patient.draft, replace(spec, fusion_bias=True), {"fc.bias": bias}))


@torch.inference_mode()
def _mean_shortfall(patient: Patient, drafter: EagleDrafter) -> Tensor:
    """What the draft's states lack to the target's on the prompts, on average: float32 [H]."""
    target, missing = Target(patient.model, AuxLayers((FINAL,))), []
    for request in patient.requests:
        tokens = torch.tensor([request.prompt], device=target.device)
        length = tokens.shape[1]
        slots, positions = tokens.new_zeros(1), torch.arange(length, device=target.device)[None]
        features = target.forward(tokens, positions, SlotCache(1, length).rows(slots, positions, length)).features
        assert features is not None
        rows = SlotCache(1, length).rows(slots, positions[:, 1:] - 1, length)
        states = drafter.model(tokens[:, 1:], features[:, :-1], positions[:, 1:] - 1, kv=rows).head_input
        missing.append((features[:, 1:] - states)[0])
    return torch.cat(missing).float().mean(0).cpu()


def rotated_space(patient: Patient) -> Iterator[Trial]:
    """The target's states are those that the draft was trained with, times a rotation: undone in fc."""
    spec = patient.architecture
    assert isinstance(spec, EagleSpec)
    rotation = _rotation(patient, spec)
    if rotation is None or "fc.weight" not in patient.draft.tensors:
        return
    yield Trial(
        "fc · blockdiag(Q), Q found from the tables of draft and target",
        partial(_rotated, patient, spec, rotation),
        {},
        "the target was rotated after the draft was trained (QuaRot): serve the original, or rotate the draft's fc",
    )


def _rotation(patient: Patient, spec: EagleSpec) -> Tensor | None:
    """Q from whatever table the draft has of its own and the target has too."""
    if spec.decoder.hidden_size != spec.target_hidden_size:
        return None
    rows = {"embed_tokens": None, "lm_head": target_ids(patient.draft)}
    for table, ids in rows.items():
        if f"{table}.weight" in patient.draft.tensors:
            theirs = patient.table(table)
            mine = patient.draft.tensors[f"{table}.weight"].load().float()
            found = find_rotation(mine, theirs if ids is None else theirs[ids])
            if found is not None:
                return found
    return None


def _rotated(patient: Patient, spec: EagleSpec, rotation: Tensor) -> Setup:
    fc = patient.draft.tensors["fc.weight"].load().float()
    tensors: dict[str, Tensor] = {}
    if spec.token_entry == "attention":
        tensors["fc.weight"] = rotate_blocks(fc, rotation)
    else:
        h, embedding_first = spec.decoder.hidden_size, spec.concatenation == "embedding_hidden"
        split = h if embedding_first else spec.target_hidden_size
        parts = list(fc.split((split, fc.shape[1] - split), dim=1))
        parts[1 if embedding_first else 0] = rotate_blocks(parts[1 if embedding_first else 0], rotation)
        tensors["fc.weight"] = torch.cat(parts, dim=1)
    borrowed = [name for name in ("embed_tokens", "lm_head") if getattr(spec, name) == "target"]
    tensors |= {f"{name}.weight": patient.table(name) @ rotation.T for name in borrowed}
    return patient.setup(changed(patient.draft, replace(spec, embed_tokens="draft", lm_head="draft"), tensors))
