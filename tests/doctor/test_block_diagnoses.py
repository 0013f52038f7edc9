"""The best-known cases of block drafters that accept little, diagnosed on drafts that accept."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import memorized
from safetensors.torch import save_file

from draftkit.convert.api import convert_checkpoint
from draftkit.doctor.diagnose import Diagnosis, diagnose_draft
from draftkit.doctor.experiments import all_experiments
from draftkit.train.recipes.bases.dflash import BlockRecipe

torch.set_num_threads(1)


def diagnosed(draft: str, monkeypatch: pytest.MonkeyPatch, *names: str) -> Diagnosis:
    """A diagnosis with these experiments only, of prompts whose answers the draft knows by heart."""
    chosen = tuple(experiment for experiment in all_experiments() if experiment.name in names)
    monkeypatch.setattr("draftkit.doctor.diagnose.all_experiments", lambda: chosen)
    return diagnose_draft("zoo:target", draft, limit=memorized.PROMPTS, max_new_tokens=memorized.NEW_TOKENS)


def published(folder: Path, recipe: BlockRecipe, unsaid: tuple[str, ...]) -> str:
    """The draft as its trainer may publish it, with keys of the config missing."""
    config = {key: value for key, value in recipe.spec.engine_config().items() if key not in unsaid}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.detach().contiguous() for n, t in recipe.tensors().items()}, folder / "model.safetensors")
    return str(folder)


@pytest.mark.long
def test_a_dspark_file_that_does_not_say_what_its_rows_predict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm #56792: DeepSpec's class, trained to fill in, taken for anchor-first."""
    recipe = memorized.fill_in_dspark()
    source = published(
        tmp_path / "source", recipe, unsaid=("sample_from_anchor", "dspark_bonus_anchor", "dflash_config")
    )
    found = diagnosed(source, monkeypatch, "slots", "markov-head")
    assert "slots" in {finding.name for finding in found.findings}
    assert [cause.name for cause in found.causes].count("slots") == 1
    assert found.causes[0].name == "slots"
    command = shlex.split(found.causes[0].fix)
    assert command[-2:] == ["--set", "slots=fill-in"]
    remedied = convert_checkpoint(source, tmp_path / "out", target="zoo:target", overrides={"slots": "fill-in"})
    sound = diagnosed(str(remedied), monkeypatch, "slots", "markov-head")
    assert sound.recommended == ()
    assert sound.length.mean > found.length.mean


@pytest.mark.long
def test_a_dflash_drafted_with_another_block_than_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-project/vllm #41834: as many masks as an engine is told, and rows that see them all."""
    longer = convert_checkpoint("zoo:dflash", tmp_path / "out", target="zoo:target", overrides={"block_size": "16"})
    found = diagnosed(str(longer), monkeypatch, "block-size")
    assert found.settings["num_speculative_tokens"] == 15
    assert found.causes[0].name == "block-size"
    (best,) = found.recommended
    assert best.after > best.before + 0.3
    alike = {best.change, *best.alike}  # six prompts do not tell them apart
    assert {"blocks of 7 rows", "blocks of 8 rows"} <= alike
    assert "blocks of 16 rows" not in alike
