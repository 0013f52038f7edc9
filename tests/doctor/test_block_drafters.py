"""What the doctor changes of a block drafter, one by one, and what it runs for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.checkpoints import pico, templates
from fixtures.checkpoints.published import dflash
from fixtures.patients import pico_draft, pico_patient
from fixtures.precision import LAYER, assert_close

from draftkit.doctor.experiments import all_experiments
from draftkit.doctor.measure import run
from draftkit.doctor.patient import Patient, changed
from draftkit.doctor.trial import Trial
from draftkit.evaluate.prompts import encode_prompt
from draftkit.layout.facts import with_facts
from draftkit.layout.folder import Draft
from draftkit.runtime.drafters.protocol import Committed, Drafter, NewSequence

DEPTH = 2 * LAYER + 2  # two layers, the fusion and the head
SLIDING = dflash.dflash_config(**dflash.SLIDING)


def dflash_draft(folder: Path, config: Mapping[str, Any] | None = None) -> Draft:
    return pico_draft(folder, dict(config or dflash.dflash_config()), dflash.dflash_tensors(torch.float32))


def dspark_draft(folder: Path, kind: str) -> Draft:
    tensors = dflash.dspark_tensors(torch.float32, kind)
    return pico_draft(folder, dflash.deepspec_config(kind), tensors)


def trials(name: str, patient: Patient) -> list[Trial]:
    (experiment,) = (one for one in all_experiments() if one.name == name)
    return list(experiment.trials(patient))


def overrides(name: str, patient: Patient) -> list[Mapping[str, str]]:
    return [trial.overrides for trial in trials(name, patient)]


def test_rows_are_read_in_the_other_convention(tmp_path: Path) -> None:
    patient = pico_patient(tmp_path, dflash_draft(tmp_path))
    (trial,) = trials("slots", patient)
    assert trial.overrides == {"slots": "anchor-first"}
    assert not trial.setup().drafter.fill_in  # type: ignore[attr-defined]


def test_layers_are_moved_and_the_embedding_output_is_tried(tmp_path: Path) -> None:
    ids = [tried["aux_layer_ids"] for tried in overrides("layer-ids", pico_patient(tmp_path, dflash_draft(tmp_path)))]
    assert ids == ["2,4,5", "3,6,8", "1,4,6", "0,5,7"]  # the first are what others read of a target of 8 layers


def test_layers_that_a_reference_reads_are_tried(tmp_path: Path) -> None:
    """z-lab's drafts of two layers read the outputs of layers 1 and 5 of a target of 8."""
    config = dflash.dflash_config({"target_layer_ids": [3, 4]})
    tensors = dflash.dflash_tensors(torch.float32)
    tensors["fc.weight"] = tensors["fc.weight"][:, : 2 * pico.HIDDEN]
    patient = pico_patient(tmp_path, pico_draft(tmp_path, config, tensors))
    assert {"aux_layer_ids": "2,6"} in overrides("layer-ids", patient)


@pytest.mark.parametrize(
    ("config", "causal"),
    [
        (dflash.dflash_config(), ["0,1"]),
        (dflash.dflash_config({"causal": True}), ["[]"]),
        (SLIDING, ["0,1", "[]", "1"]),
    ],
)
def test_layers_are_made_causal_and_bidirectional(tmp_path: Path, config: dict[str, Any], causal: list[str]) -> None:
    patient = pico_patient(tmp_path, dflash_draft(tmp_path, config))
    assert overrides("causal-layers", patient) == [{"causal_layers": layers} for layers in causal]


def test_windows_are_counted_from_the_anchor(tmp_path: Path) -> None:
    assert overrides("window-rule", pico_patient(tmp_path, dflash_draft(tmp_path, SLIDING))) == [
        {"window_rule": "anchor"}
    ]
    assert not trials("window-rule", pico_patient(tmp_path, dflash_draft(tmp_path)))


def test_the_last_state_is_read_on_the_other_side_of_the_norm(tmp_path: Path) -> None:
    draft = dflash_draft(tmp_path, dflash.dflash_config({"target_layer_ids": [1, 4, 7]}))
    patient = pico_patient(tmp_path, draft)
    assert overrides("last-state", patient) == [{"last_state": "before_norm"}]
    assert not trials("last-state", pico_patient(tmp_path, dflash_draft(tmp_path)))


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_the_markov_head_is_left_out_and_taken_for_a_plain_one(tmp_path: Path, kind: str) -> None:
    patient = pico_patient(tmp_path, dspark_draft(tmp_path, kind))
    without, *plain = trials("markov-head", patient)
    assert "remove confidence_head.proj.bias" in without.advice
    assert without.setup().drafter.module.markov_head is None  # type: ignore[union-attr]
    assert len(plain) == (kind != "vanilla")
    for trial in plain:
        assert trial.setup().drafter.module.markov_head.markov_type == "vanilla"  # type: ignore[union-attr]


def test_the_mask_takes_the_row_of_its_token(tmp_path: Path) -> None:
    plain = dflash_draft(tmp_path)
    own = changed(plain, with_facts(plain.spec.architecture, mask_embedding=True), {"mask_embedding": torch.ones(64)})
    (trial,) = trials("mask-embedding", pico_patient(tmp_path, own))
    assert trial.advice.startswith("remove mask_embedding")
    assert not trials("mask-embedding", pico_patient(tmp_path, plain))


def test_a_token_that_a_trainer_added_is_tried_as_mask(tmp_path: Path) -> None:
    patient = pico_patient(tmp_path, dflash_draft(tmp_path))
    assert {"mask_token_id": str(len(patient.tokenizer))} in overrides("mask-token", patient)


def test_likely_mask_tokens_come_first(tmp_path: Path) -> None:
    patient = pico_patient(tmp_path, dflash_draft(tmp_path))
    tokenizer = patient.tokenizer
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|eot|>", "<|reserved_0|>", "<|MASK|>"]})
    asked = [tokenizer.decode([int(one["mask_token_id"])]) for one in overrides("mask-token", patient)]
    assert asked[:3] == ["<|MASK|>", "<|reserved_0|>", ""]  # the last is the first row that no token has
    assert asked.index("<|eot|>") > 2


def test_thinking_is_turned_off(tmp_path: Path) -> None:
    patient = pico_patient(tmp_path, dflash_draft(tmp_path))
    assert not trials("thinking", asking(patient))
    patient.tokenizer.chat_template = templates.THINKING
    (trial,) = trials("thinking", asking(patient))
    assert trial.change == "thinking off"
    (request,) = trial.setup().requests
    text = patient.tokenizer.decode(request.prompt)
    assert text.endswith("<think></think>")
    assert "abc" in text


def asking(patient: Patient) -> Patient:
    """The patient, asked its prompts as a diagnosis would."""
    pairs = zip(patient.requests, patient.prompts, strict=True)
    return replace(patient, requests=[replace(r, prompt=encode_prompt(p, patient.tokenizer)) for r, p in pairs])


@pytest.mark.parametrize(("k", "sizes"), [(4, [16, 10, 8, 7]), (3, [5, 16, 10, 8, 7])])
def test_blocks_of_other_sizes_are_run(tmp_path: Path, k: int, sizes: list[int]) -> None:
    """All sizes but that of the block as it is now: K drafts and the anchor."""
    patient = pico_patient(tmp_path, dflash_draft(tmp_path), k)
    tried = trials("block-size", patient)
    named = [trial.overrides.get("block_size", "5") for trial in tried]
    assert named == [str(size) for size in sizes]
    assert not trials(
        "block-size", pico_patient(tmp_path, dflash_draft(tmp_path, dflash.dflash_config({"causal": True})))
    )


def test_a_whole_block_of_which_fewer_tokens_are_drafted(tmp_path: Path) -> None:
    """At K = 2 the drafts of a whole block are the first two of K = 4; those of a short block are others."""
    patient = pico_patient(tmp_path, dflash_draft(tmp_path), k=2)
    whole = next(trial for trial in trials("block-size", patient) if not trial.overrides)
    assert "K = 4" in whole.advice
    as_trained = first_logits(patient.drafter(), 4)[:2]
    assert_close(first_logits(whole.setup().drafter, 2), as_trained, depth=DEPTH)
    with pytest.raises(AssertionError):
        assert_close(first_logits(patient.drafter(), 2), as_trained, depth=DEPTH)


def test_a_smaller_block_drafts_no_more_than_it_has_rows_for(tmp_path: Path) -> None:
    patient = pico_patient(tmp_path, dflash_draft(tmp_path, dflash.dflash_config(block_size=8)), k=7)
    smaller = next(trial for trial in trials("block-size", patient) if trial.overrides == {"block_size": "5"})
    assert smaller.setup().drafter.max_tokens == 4
    (generation,) = run(smaller.setup(), patient.k, [0])
    assert {round.drafted for round in generation.rounds} <= {1, 2, 3, 4}
    assert_close(first_logits(smaller.setup().drafter, 4), first_logits(patient.drafter(), 4), depth=DEPTH)


def first_logits(drafter: Drafter, k: int) -> torch.Tensor:
    """The logits [K, V] of the drafts after a prompt of five tokens."""
    generator, found = torch.Generator().manual_seed(0), []
    features = torch.randn(6, 3 * pico.HIDDEN, generator=generator)

    def draw(step: int, logits: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        assert step == len(found)
        found.append(logits[0])
        return logits.argmax(-1)

    drafter.allocate(1, 6 + k, k)
    drafter.prefill([NewSequence(0, torch.tensor([1, 5, 6, 7, 8]), features[:5])])
    one = torch.tensor([1])
    committed = Committed(one - 1, torch.tensor([[9]]), one, 5 * one, features[None, 4:5], 6 + k)
    drafter.propose(committed, k, draw)
    return torch.stack(found)
