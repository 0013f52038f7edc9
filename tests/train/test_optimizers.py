"""Muon and AdamW as one optimizer are what each is by itself; what is a table of tokens is AdamW's."""

from __future__ import annotations

import copy

import pytest
import torch
from fixtures.checkpoints import pico
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import get_scheduler

from draftkit.layout.spec import DraftSpec
from draftkit.train import optimizers
from draftkit.train.config import TrainConfig
from draftkit.train.optimizers import Muon, MuonAndAdamW, is_matrix, optimizer_of, orthogonal
from draftkit.train.recipes import recipe_class
from draftkit.train.recipes.eagle_eagle3 import Eagle3, Eagle3Options
from draftkit.train.recipes.recipe import Origin, Recipe
from draftkit.train.settings import Optimization


@pytest.fixture
def recipe() -> Eagle3:
    target = pico.llama(num_hidden_layers=6)
    return Eagle3.start(Origin(target, d2t_ids=torch.arange(64)), Eagle3Options(layers=(1, 3, 5)))


def trained(recipe: Recipe) -> list[nn.Parameter]:
    return [p for p in recipe.parameters() if p.requires_grad]


def run(parameters: list[nn.Parameter], optimizers: list[Optimizer], steps: range) -> None:
    """Steps with gradients that only their number decides, the learning rate falling."""
    schedules = [LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in optimizers]
    for step in steps:
        noise = torch.Generator().manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=noise)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()


def both(parameters: list[nn.Parameter], spec: DraftSpec) -> MuonAndAdamW:
    return MuonAndAdamW(parameters, spec=spec, lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))


def test_every_schedule_of_transformers_takes_it(recipe: Eagle3) -> None:
    """The polynomial one reads the rate from the defaults."""
    optimizer = both(trained(recipe), recipe.spec)
    for name in ("linear", "cosine", "polynomial", "constant_with_warmup", "inverse_sqrt"):
        get_scheduler(name, optimizer, num_warmup_steps=1, num_training_steps=10)


def test_each_part_is_the_optimizer_by_itself(recipe: Eagle3) -> None:
    other = copy.deepcopy(recipe)
    alone = trained(other)
    matrices = [p for p in alone if is_matrix(p, other.spec)]
    tables = [p for p in alone if not is_matrix(p, other.spec)]
    muon = Muon(matrices, lr=1e-2, weight_decay=0.1)
    adamw = AdamW(tables, lr=1e-2, weight_decay=0.0, betas=(0.9, 0.95))
    run(alone, [muon, adamw], range(3))
    run(trained(recipe), [both(trained(recipe), recipe.spec)], range(3))
    for one, two in zip(trained(recipe), alone, strict=True):
        assert torch.equal(one, two)


SHAPES = (8, 12), (12, 8), (8, 8)


@pytest.mark.parametrize(("fast", "apart"), [("bfloat16", 0.0), ("float32", 0.05)])
def test_muon_is_that_of_torch(monkeypatch: pytest.MonkeyPatch, fast: str, apart: float) -> None:
    """Bit for bit where the device is fast at bfloat16; else within what rounding to it moves the updates."""
    monkeypatch.setattr(optimizers, "fast_dtype", lambda device: (fast, ""))
    start = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in SHAPES]
    ours, theirs = ([nn.Parameter(matrix.clone()) for matrix in start] for _ in range(2))
    reference = torch.optim.Muon(theirs, lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    run(ours, [Muon(ours, lr=1e-2, weight_decay=0.1)], range(4))
    run(theirs, [reference], range(4))
    for one, two, begun in zip(ours, theirs, start, strict=True):
        assert (one - two).norm() <= apart * (two - begun).norm()
        assert not torch.equal(one, begun)


@pytest.mark.parametrize("shape", SHAPES)
def test_updates_are_nearly_orthogonal(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    singular = torch.linalg.svdvals(orthogonal(matrix, torch.float32))
    assert 0.5 < singular.min() <= singular.max() < 1.5


def test_goes_on_with_its_state(recipe: Eagle3) -> None:
    other = copy.deepcopy(recipe)
    first, whole = both(trained(recipe), recipe.spec), both(trained(other), other.spec)
    run(trained(recipe), [first], range(2))
    run(trained(other), [whole], range(2))
    second = both(trained(recipe), recipe.spec)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for optimizer in (second, whole):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] = 1e-3
    run(trained(recipe), [second], range(2, 4))
    run(trained(other), [whole], range(2, 4))
    for one, two in zip(trained(recipe), trained(other), strict=True):
        assert torch.equal(one, two)


OPTIONS: dict[str, dict[str, object]] = {
    "eagle3": {"layers": (1, 3, 5)},
    "dflash": {"layers": (1, 3), "mask_token_id": 5},
    "dspark": {"layers": (1, 3), "mask_token_id": 5, "markov_rank": 8},
    "dflash2": {"layers": (1, 3), "mask_token_id": 5, "selector_rank": 8},
    "p-eagle": {"layers": (1, 3, 5), "mask_token_id": 5},
    "draft-model": {"hidden_size": 32, "num_heads": 4, "num_key_value_heads": 4},
}
TABLES = ("embed", "emb.", "lm_head", "head.", "markov_w", "codebook")


@pytest.mark.parametrize("name", OPTIONS)
def test_tables_of_tokens_are_no_matrices(name: str) -> None:
    kind = recipe_class(name)
    recipe = kind.start(Origin(pico.llama(num_hidden_layers=6)), kind.options_type(**OPTIONS[name]))
    found = {n: p for n, p in recipe.draft.named_parameters() if p.requires_grad and p.ndim == 2}
    for parameter_name, parameter in found.items():
        is_table = any(part in parameter_name for part in TABLES) and min(parameter.shape) > 1
        assert is_matrix(parameter, recipe.spec) != (is_table or min(parameter.shape) == 1), parameter_name
    assert any(is_matrix(p, recipe.spec) for p in found.values())


@pytest.mark.parametrize(
    ("name", "draft", "asked", "expected", "rate", "decay"),
    [
        ("eagle3", "", "auto", "muon", 2e-3, 0.1),
        ("eagle3", "", "adamw", "adamw", 6e-4, 0.0),
        ("eagle3", "D", "auto", "adamw", 1e-4, 0.0),
        ("eagle3", "D", "muon", "muon", 1e-4, 0.1),
        ("p-eagle", "", "auto", "muon", 2e-3, 0.1),
        ("p-eagle", "D", "auto", "adamw", 1e-4, 0.0),
        ("dspark", "", "auto", "muon", 2e-3, 0.1),
        ("dflash", "", "auto", "muon", 2e-3, 0.1),
        ("dflash2", "", "auto", "adamw", 6e-4, 0.0),
        ("dflash2", "", "muon", "muon", 2e-3, 0.1),
    ],
)
def test_some_new_drafts_have_muon(
    recipe: Eagle3, name: str, draft: str, asked: str, expected: str, rate: float, decay: float
) -> None:
    settings = Optimization(optimizer=asked)  # type: ignore[arg-type]
    config = TrainConfig(recipe=name, target="", data="", out="", draft=draft, optimization=settings)
    assert (config.optimizer, config.learning_rate, config.weight_decay) == (expected, rate, decay)
    assert config.by_name()["optimization.optimizer"] == expected
    optimizer = optimizer_of(trained(recipe), config, recipe.spec)
    assert isinstance(optimizer, MuonAndAdamW if expected == "muon" else AdamW)
    assert {group["weight_decay"] for group in optimizer.param_groups} == ({0.1, 0.0} if expected == "muon" else {0.0})
