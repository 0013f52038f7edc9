"""Training in bfloat16, the default on a GPU: every recipe with every option, on a target in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.mtp_targets import save_with_head
from fixtures.training.recipe_options import OPTIONS
from fixtures.training.samples import samples
from torch import Tensor, nn

from draftkit.convert.api import convert_checkpoint
from draftkit.data.sample_files import write_samples
from draftkit.data.samples import SamplesOrigin
from draftkit.train.attention import ChainSteps, attend_chain, attend_masked, masks_of_parallel_rows, masks_of_samples
from draftkit.train.batch import TrainingBatch
from draftkit.train.config import read_config
from draftkit.train.parallel import ParallelRows
from draftkit.train.recipes import recipe_class, recipe_names
from draftkit.train.run import train_draft

# What a run can be told of any recipe.
RUN: tuple[dict[str, object], ...] = (
    {"lora": {"r": 4}},
    {"lora": {"r": 4, "dora": True}},
    {"optimization": {"recompute": True}},
    {"validation": {"mode": "sampled"}},
)
CASES = [(recipe, options, {}) for recipe, cases in OPTIONS.items() for options in cases]
CASES += [(recipe, OPTIONS[recipe][1], run) for recipe in OPTIONS for run in RUN]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A target, a causal language model to make a PARD of, and samples."""
    folder = tmp_path_factory.mktemp("given")
    target = pico.save_tokenizer(pico.save_llama(folder / "target"))
    source = pico.save_tokenizer(pico.save_llama(folder / "source", seed=1, num_hidden_layers=1))
    write_samples(folder / "data.jsonl", samples(8), SamplesOrigin(target="pico", tokenizer_sha256="0" * 64))
    draft = convert_checkpoint(str(source), folder / "draft")
    return {"target": str(target), "draft": str(draft), "data": str(folder / "data.jsonl")}


@pytest.fixture(scope="module")
def with_head(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target with a head of its own."""
    return str(pico.save_tokenizer(save_with_head("glm4_moe", tmp_path_factory.mktemp("with-head")).folder))


def test_the_cases_have_every_option() -> None:
    assert OPTIONS.keys() == set(recipe_names())
    for recipe, cases in OPTIONS.items():
        options = recipe_class(recipe).options_type
        default = options()
        turned = {name for case in cases for name, value in case.items() if value != getattr(default, name)}
        assert turned == {field.name for field in fields(options)}, recipe


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("recipe", "options", "run"), CASES, ids=[f"{r}-{' '.join([*o, *(run or [])])}" for r, o, run in CASES]
)
def test_a_run_in_bfloat16(
    recipe: str, options: dict[str, object], run: dict[str, object], given: dict[str, str], with_head: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    """A step, and the validation after it."""
    given = given | {"target": with_head} if recipe == "mtp" else given
    settings = {
        **given, "recipe": recipe, "out": str(tmp_path / "run"), "options": options, "target_dtype": "bfloat16",
        "draft": given["draft"] if recipe == "pard" else "", "tokens_per_row": 96, "seed": 3,
        "draft_vocab_size": 64 if recipe in ("eagle3", "p-eagle") and "train_embeddings" not in options else 0,
        "optimization": {"precision": "bfloat16", "max_steps": 1, **run.get("optimization", {})},
        "validation": {"share": 0.2, "k": 3, **run.get("validation", {})}, "lora": run.get("lora"),
    }  # fmt: skip
    trained = train_draft(read_config(None, [], settings))
    assert trained.metrics["eval_acceptance_length"] >= 1


def chain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    module = nn.Identity()
    module.layer_idx = 0
    return attend_chain(module, query, key, value, chain=ChainSteps(ONE_SAMPLE), scaling=0.3)[0]


def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attend_masked(nn.Identity(), query, key, value, masks=masks_of_samples(ONE_SAMPLE), scaling=0.3)[0]


def parallel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    batch = TrainingBatch(*[ONE_SAMPLE] * 3, ONE_SAMPLE == 0, None, ONE_SAMPLE)
    masks = masks_of_parallel_rows(ParallelRows(torch.ones(1, SIZE, dtype=torch.bool), batch))
    return attend_masked(nn.Identity(), query, key, value, masks=masks, scaling=0.3)[0]


SIZE = 6
ONE_SAMPLE = torch.zeros(1, SIZE, dtype=torch.int64)


@pytest.mark.parametrize("attend", [chain, packed, parallel])
def test_attention_is_in_the_dtype_of_the_values(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    """Whatever autocast has left the queries and keys in; not every attention kernel is on its list."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, SIZE, 8), torch.randn(1, 2, SIZE, 8), torch.randn(1, 2, SIZE, 8)
    found = attend(query, key, value.bfloat16())
    assert found.dtype == torch.bfloat16
    assert found.equal(attend(query.bfloat16(), key.bfloat16(), value.bfloat16()))
