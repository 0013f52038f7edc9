"""Input preparation: vLLM's published layouts, and kernel and reference against the rule written row by row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fixtures.examples import examples
from fixtures.gpu.kernels import DEVICE
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from draftkit.runtime.ops import expand_rows as module
from draftkit.runtime.ops.expand_rows import ExpandedRows, expand_rows

# By the reference, or by the kernel; each computes where it runs.
devices = pytest.mark.parametrize("device", ["cpu", pytest.param(DEVICE, marks=pytest.mark.interpreter, id="kernel")])


def expanded(device: str, *arguments: Any, **options: Any) -> ExpandedRows:
    def moved(value: Any, device: str) -> Any:
        return value.to(device) if isinstance(value, Tensor) else value

    rows = expand_rows(*(moved(a, device) for a in arguments), **{k: moved(v, device) for k, v in options.items()})
    return ExpandedRows(*(moved(part, "cpu") for part in rows))


# vLLM's layouts: what the target saw, how much of it was rejected, and what came next.

SEEN = [[10, 11, 12, 13], [20, 21, 22, 23], [30, 31, 32]]
POSITIONS = [5, 0, 7]
REJECTED = [2, 0, 1]
NEXT = [101, 102, 103]
MASK, LIMIT = 999, 50


@dataclass(frozen=True)
class Layout:
    """`slots` rows draft, rows pair tokens with the feature before where `shifts`; ids, positions and sampled rows."""

    slots: int
    shifts: bool
    ids: str
    positions: str
    sampled: str


LAYOUTS = {
    "draft model": Layout(
        1, False, "10 11 101 0 0 20 21 22 23 102 30 31 103 0", "5 6 7 0 0 0 1 2 3 4 7 8 9 0", "2 9 12"
    ),
    "PARD": Layout(
        3, False, "10 11 101 999 999 0 0 20 21 22 23 102 999 999 30 31 103 999 999 0",
        "5 6 7 8 9 0 0 0 1 2 3 4 5 6 7 8 9 10 11 0", "2 3 4 11 12 13 16 17 18",
    ),
    "P-EAGLE": Layout(
        3, True, "11 101 999 999 0 0 21 22 23 102 999 999 31 103 999 999 0",
        "5 6 7 8 0 0 0 1 2 3 4 5 7 8 9 10 0", "1 2 3 9 10 11 13 14 15",
    ),
}  # fmt: skip


@devices
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_vllm(name: str, device: str) -> None:
    layout = LAYOUTS[name]
    kept = [seen[int(layout.shifts) : len(seen) - r] for seen, r in zip(SEEN, REJECTED, strict=True)]
    committed = [[*tokens, following] for tokens, following in zip(kept, NEXT, strict=True)]
    columns = max(map(len, SEEN)) + (not layout.shifts)
    padded = torch.tensor([tokens + [7] * (columns - len(tokens)) for tokens in committed])
    rows = expanded(
        device, padded, torch.tensor([len(tokens) for tokens in committed]), torch.tensor(POSITIONS), LIMIT,
        masks=layout.slots - 1, mask_token=MASK,
    )  # fmt: skip
    ids: list[int] = []
    positions: list[int] = []
    sampled: list[int] = []
    for index, seen in enumerate(SEEN):
        size = len(seen) + layout.slots - layout.shifts  # vLLM's rows lie one request after the other
        sampled += (rows.sampled[index] + len(ids)).tolist()
        ids += rows.tokens[index, :size].tolist()
        used = int(rows.sampled[index, -1]) + 1
        positions += rows.positions[index, :used].tolist() + [0] * (size - used)  # where vLLM puts padding
    assert ids == [int(x) for x in layout.ids.split()]
    assert positions == [int(x) for x in layout.positions.split()]
    assert sampled == [int(x) for x in layout.sampled.split()]


@devices
def test_hidden_states_of_vllms_p_eagle_layout(device: str) -> None:
    """Input rows 0, 1 of request 0 and 4 … 7 of request 1 and 8, 9 of request 2 stay with their tokens."""
    hidden = torch.tensor([[0.0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, torch.nan]])[..., None]
    tokens = torch.tensor([[11, 101, 0, 0], [21, 22, 23, 102], [31, 103, 0, 0]])
    rows = expanded(
        device, tokens, torch.tensor([2, 4, 2]), torch.tensor(POSITIONS), LIMIT, masks=2, mask_token=MASK,
        hidden=hidden, mask_hidden=torch.tensor([-5.0]),
    )  # fmt: skip
    assert rows.hidden is not None
    assert rows.hidden[..., 0].tolist() == [[0, 1, -5, -5, 0, 0], [4, 5, 6, 7, -5, -5], [8, 9, -5, -5, 0, 0]]


# The rule, row by row.


@dataclass(frozen=True)
class Batch:
    tokens: Tensor
    counts: Tensor
    first: Tensor
    limit: int
    options: dict[str, Any]


@st.composite
def batches(draw: Callable[..., Any]) -> Batch:
    """Sequences with all tokens accepted, all rejected, or none at all; limits that cut rows off; NaN in rejects."""
    columns, masks = draw(st.integers(1, 6)), draw(st.integers(0, 5))
    counts = torch.tensor(draw(st.lists(st.sampled_from([0, 1, columns, *range(columns)]), min_size=1, max_size=4)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    size = (len(counts), columns)
    options: dict[str, Any] = {"masks": masks, "mask_token": MASK}
    if draw(st.booleans()):
        dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
        width = draw(st.sampled_from([1, 3, 1025]))
        hidden = torch.randn(*size, width, generator=generator).to(dtype)
        hidden[torch.arange(columns) >= counts[:, None]] = torch.nan
        options["hidden"] = hidden
        if draw(st.booleans()):
            options["mask_hidden"] = torch.randn(width, generator=generator).to(dtype)
    return Batch(
        torch.randint(1, 900, size, generator=generator),
        counts,
        torch.randint(0, 20, (len(counts),), generator=generator),
        draw(st.integers(1, 40)),
        options,
    )


@devices
@examples(40)
@given(batch=batches())
def test_every_row_follows_the_rule(batch: Batch, device: str) -> None:
    masks, hidden, mask_hidden = (batch.options.get(name, 0) for name in ("masks", "hidden", "mask_hidden"))
    rows = expanded(device, batch.tokens, batch.counts, batch.first, batch.limit, **batch.options)
    spare = batch.limit - 1
    assert (rows.hidden is None) == ("hidden" not in batch.options)
    for b, count in enumerate(batch.counts.tolist()):
        used = count + masks if count else 0
        for row in range(batch.tokens.shape[1] + masks):
            position = min(int(batch.first[b]) + min(row, used), spare) if count else spare
            token = int(batch.tokens[b, row]) if row < count else MASK if row < used else 0
            assert (int(rows.tokens[b, row]), int(rows.positions[b, row])) == (token, position)
            if rows.hidden is not None:
                repeated = hidden[b, min(row, count - 1)]
                learned = mask_hidden if "mask_hidden" in batch.options and row >= count else repeated
                assert torch.equal(rows.hidden[b, row], learned if row < used else torch.zeros_like(repeated))
        assert rows.sampled[b].tolist() == [max(count - 1, 0) + step for step in range(masks + 1)]


@pytest.mark.interpreter
def test_the_kernel_is_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []
    monkeypatch.setattr(module, "expand_rows_reference", lambda *_: ran.append("reference"))
    one = torch.ones(1, dtype=torch.int64)
    expanded(DEVICE, one[None], one, one, 4)
    assert not ran
