"""Training in bfloat16, the default on a GPU: every recipe with every option, on a target in bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from fixtures import pico
from fixtures.mtp_targets import save_with_head
from fixtures.samples import samples
from torch import Tensor, nn

from draftkit.convert.api import convert_checkpoint
from draftkit.data.samples import SamplesOrigin, write_samples
from draftkit.train.attention import ChainSteps, attend_chain
from draftkit.train.batch import TrainingBatch
from draftkit.train.config import read_config
from draftkit.train.masked_attention import attend_visible, rows_of_chains, rows_of_samples
from draftkit.train.parallel import ParallelRows
from draftkit.train.recipes import recipe_class, recipe_names
from draftkit.train.run import train_draft

# Of each recipe, settings that between them turn every option from its default.
OPTIONS: dict[str, tuple[dict[str, object], ...]] = {
    "eagle3": (
        {"steps": 3},
        {"steps": 3, "norm_before_residual": True},
        {"steps": 3, "norm_output": True},
        {"steps": 3, "norm_before_residual": True, "norm_output": True, "num_layers": 2},
        {"steps": 3, "feature_norm": "joint", "layers": [1, 3]},
        {"steps": 3, "feature_norm": "per_layer", "norm_output": True},
        {"steps": 3, "train_head": False, "train_embeddings": True, "temperature": 0.7},
        {"steps": 3, "out_of_vocabulary": "drop", "loss": "lk(3) + tv", "reduction": {"denominator": "rows"}},
    ),
    "eagle": (
        {"regression": 0.5},
        {"forwards": 3, "loss": "0.1*soft_ce + top_k(10)", "temperature": 0.7},
        {"num_layers": 2, "fusion_bias": True},
        {"noise": 0.1, "noise_scale": "fixed"},
    ),
    "p-eagle": (
        {"steps": 3, "num_layers": 1},
        {"steps": 3, "num_layers": 2, "norm_before_residual": True, "partitions": 2},
        {"steps": 3, "num_layers": 1, "feature_norm": "joint", "layers": [1, 3], "mask_token_id": 319},
        {"steps": 3, "num_layers": 1, "feature_norm": "per_layer", "train_head": False, "train_embeddings": False},
        {"steps": 3, "num_layers": 1, "drop": {"retention": 0.5}, "out_of_vocabulary": "drop", "temperature": 0.7},
        {"steps": 3, "num_layers": 1, "loss": "0.3*ce + kl", "reduction": {"decay": 0.8}},
    ),
    "pard": (
        {"steps": 3},
        {"steps": 3, "loss": "0.1*ce + kl", "temperature": 0.7, "train_prompt": False, "confidence": True},
        {"steps": 3, "feature_layers": [-1, 3], "feature_scale": 0.3, "feature_dropout": 0.5},
        {"steps": 3, "drop": {"retention": 0.5}, "reduction": {"decay": 0.8}, "mask_token_id": 319},
    ),
    "dflash": (
        {"block_size": 4, "max_anchors": 4, "loss": "kl", "decay_length": 2.0},
        {"block_size": 4, "slots": "anchor-first", "dpace": 0.5, "temperature": 0.7, "mask_token_id": 319},
        {"block_size": 4, "layers": [1, 3], "num_layers": 3, "sliding_window": 3, "causal": True, "train_head": True},
    ),
    "dspark": (
        {"block_size": 4, "markov_rank": 8, "max_anchors": 4, "loss": "kl", "slots": "fill-in", "train_head": True},
        {"block_size": 4, "markov_rank": 8, "markov_type": "gated", "confidence_weight": 0.5, "decay_length": 2.0},
        {"block_size": 4, "markov_rank": 8, "markov_type": "rnn", "confidence": False, "dpace": 0.5},
        {"block_size": 4, "markov_rank": 8, "mask_token_id": 319, "temperature": 0.7},
        {"block_size": 4, "layers": [1, 3], "num_layers": 3, "sliding_window": 3, "causal": True},
    ),
    "mtp": (
        {"steps": 2, "loss": "0.1*ce + tv"},
        {"steps": 2, "temperature": 0.7, "reduction": {"decay": 0.8}},
    ),
    "mlp-speculator": (
        {"stage": 1},
        {"num_heads": 5, "inner_size": 24, "tied": False, "scale_input": False},
        {"loss": "kl", "temperature": 0.7},
    ),
    "draft-model": (
        {"num_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "num_key_value_heads": 2},
        {"hidden_size": 32, "num_heads": 4, "num_key_value_heads": 4, "loss": "ce + kl", "temperature": 0.7},
        {"hidden_size": 32, "num_heads": 4, "num_key_value_heads": 4, "on_policy": 1.0, "sampling_temperature": 0.7},
    ),
}  # fmt: skip
# What a run can be told of any recipe.
RUN: tuple[dict[str, object], ...] = (
    {"lora": {"r": 4}},
    {"lora": {"r": 4, "dora": True}},
    {"optimization": {"recompute": True}},
    {"validation": {"mode": "sampled", "decode": 1}},
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
    return attend_visible(nn.Identity(), query, key, value, visible=rows_of_samples(ONE_SAMPLE), scaling=0.3)[0]


def parallel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    batch = TrainingBatch(*[ONE_SAMPLE] * 3, ONE_SAMPLE == 0, None, ONE_SAMPLE)
    visible = rows_of_chains(ParallelRows(torch.ones(1, SIZE, dtype=torch.bool), batch))
    return attend_visible(nn.Identity(), query, key, value, visible=visible, scaling=0.3)[0]


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
