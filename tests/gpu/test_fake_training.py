"""A training step of every recipe with every option on a fake GPU, in bfloat16: no device is mixed, and no type; the
host waits for the GPU a few times, each of which is known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.gpu.fake_cuda import Recorder, backward, fake_cuda, moved
from fixtures.training.recipe_options import OPTIONS
from fixtures.training.started_recipes import kind_of_target, save_models, started
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from draftkit.data.states.online import load_training_target
from draftkit.train import attention
from draftkit.train.batch import TrainingBatch
from draftkit.train.recipes.recipe import Recipe

pytest.importorskip("triton")
torch.set_num_threads(1)

SIZE = 48
CASES = [  # into how many partitions a batch falls, numbers decide, and there are none
    (recipe, {name: value for name, value in options.items() if name != "partitions"})
    for recipe, cases in OPTIONS.items()
    for options in cases
]

# What a step waits for, by the function that asks: how many rows there are, as no others are computed. A loss asks
# which rows have a weight, and whether their labels are tokens of the draft.
LOSS = "train.losses.linear.linear_loss"
CHAIN = ["train.recipes.bases.chain.chain_steps"]
ROWS = ["train.parallel.keep", "train.parallel.__init__"]
BLOCKS = ["train.recipes.bases.dflash.forward"]
WAITS = {
    "eagle": CHAIN,
    "eagle3": CHAIN,
    "mtp": CHAIN,
    "p-eagle": ROWS,
    "pard": ROWS,
    "dflash": BLOCKS,
    "dspark": BLOCKS,
    "dflash2": BLOCKS,
    "draft-model": [],
}


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_models(tmp_path_factory.mktemp("given"))


@pytest.fixture(scope="module")
def load(given: dict[str, str]) -> Callable[[str], Any]:
    return cache(lambda name: load_training_target(given[name], device="cpu", dtype=torch.bfloat16))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder]:
    """On which FlexAttention is a stub that checks what it is given."""
    monkeypatch.setattr(attention, "_compiled_flex", flex)
    monkeypatch.setattr(attention, "_compiled_mask", block_mask)
    with fake_cuda() as recorder:

        def read(numbers: Tensor) -> list[int]:
            """Of every mask, half is set: so many rows each step of a chain has."""
            if numbers.is_cuda:
                recorder.work.read("tolist")
            return [SIZE // 2] * len(numbers)

        monkeypatch.setattr(FakeTensor, "tolist", read)
        yield recorder


class SizedMask(BlockMask):
    """A mask of which only the size is known."""

    def __init__(self, rows: int, columns: int):
        self.size = rows, columns


def block_mask(
    seen: Callable[..., Tensor], batch: None, heads: None, rows: int, columns: int, device: str
) -> BlockMask:
    row, column = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    found = seen(zero, zero, row, column)
    assert found.dtype == torch.bool
    assert found.shape == (rows, columns)
    return SizedMask(rows, columns)


def flex(
    query: Tensor, key: Tensor, value: Tensor, block_mask: SizedMask, return_aux: AuxRequest, **_: object
) -> tuple[Tensor, AuxOutput]:
    """Something that every argument is needed for."""
    assert query.dtype == key.dtype == value.dtype == torch.bfloat16
    assert key.shape == value.shape
    assert (query.shape[0], query.shape[3]) == (key.shape[0], key.shape[3])
    assert query.shape[1] % key.shape[1] == 0
    assert block_mask.size == (query.shape[2], key.shape[2])
    assert return_aux.lse
    return query * (key.sum() + value.sum()), AuxOutput(lse=query.float().sum(-1))


def batch_of(recipe: Recipe, width: int) -> TrainingBatch:
    """A row of two samples, and padding."""

    def row(dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(1, SIZE, dtype=dtype, device="cuda")

    def states(count: int) -> Tensor:
        return torch.empty(1, SIZE, count * width, dtype=torch.bfloat16, device="cuda")

    layers = recipe.aux_layers
    features = None if layers is None else states(len(layers.states))
    return TrainingBatch(row(), row(), row(), row(torch.bool), features, states(1))


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize(("name", "options"), CASES, ids=[f"{name}-{' '.join(options)}" for name, options in CASES])
def test_a_step_in_bfloat16(
    name: str, options: dict[str, object], given: dict[str, str], load: Callable[[str], Any],
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    made = started(name, options, given, load(kind_of_target(name)))
    gpu: Recorder = request.getfixturevalue("gpu")  # what is loaded is no fake
    recipe = moved(made, torch.float32)
    batch = batch_of(recipe, pico.HIDDEN)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            outcome = recipe(batch)
        backward(outcome.loss)

    work = gpu.during(step, strict=False)
    assert work.launches
    assert Counter(work.readers) <= Counter(WAITS[name]) + Counter({LOSS: 2})
    learned = [parameter for parameter in recipe.parameters() if parameter.requires_grad]
    assert any(parameter.grad is not None for parameter in learned)
    assert all(p.grad.dtype == p.dtype and p.grad.device == p.device for p in learned if p.grad is not None)
