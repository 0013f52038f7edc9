"""What plans say of a GPU's memory is no less than what runs take by arithmetic."""

from __future__ import annotations

import pytest
import torch
from fixtures.gpu.fake_cuda import fake_cuda
from fixtures.gpu.memory import Live

from scripts.gpu.memory import CASES, Case, rows

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_a_plan_holds_what_is_counted_and_the_reserve(case: Case) -> None:
    for row in rows(case):
        assert row.plan.total <= row.plan.available
        assert row.arithmetic <= row.plan.total - row.plan.fixed["reserve"], row.context


def test_memory_is_counted_until_it_is_let_go() -> None:
    with fake_cuda(), Live() as live:
        kept = torch.ones(1024, device="cuda")
        assert live.during(lambda kept=kept: (kept * 2 + 1).sum()) == 2 * 4096
        assert live.now == 4096
        view = kept[:10]
        del kept
        assert live.start() == 4096
        del view
        assert live.start() == 0
