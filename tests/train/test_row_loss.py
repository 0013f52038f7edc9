"""The kernel of the losses against its torch reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fixtures.gpu.kernels import DEVICE
from torch import Tensor

from draftkit.train.kernels import row_loss
from draftkit.train.losses.linear import linear_loss
from draftkit.train.losses.table import parse_loss
from draftkit.train.losses.teacher import OutputHead, TargetHead

pytest.importorskip("triton")

torch.set_num_threads(1)

FUSED = [
    "ce", "soft_ce", "kl", "reverse_kl", "jsd", "tv", "nla", "lk(3)", "0.1*ce + 0.9*tv",
    "ce + 0.5*soft_ce + 0.3*kl + 0.2*reverse_kl + 0.7*jsd + 0.4*tv + 0.6*nla + 2*lk(1.5)",
]  # fmt: skip


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 2


def guarded(tensor: Tensor) -> Tensor:
    """The same values in a larger piece of memory, where numbers around them would win every maximum."""
    guard = torch.full((5000,), 1e30)
    return torch.cat((guard, tensor.flatten(), guard)).to(DEVICE)[5000:-5000].view(tensor.shape)


def check(
    text: str, draft: Tensor, target: Tensor | None, log_sum: Tensor | None, labels: Tensor | None, weights: Any
) -> None:
    """Statistics, loss and gradient, and that nothing outside the logits is written."""
    loss, kernel_draft, expected_draft = parse_loss(text), guarded(draft), draft.clone()
    inputs = [None if x is None else x.to(DEVICE) for x in (log_sum, labels, weights)]
    found = row_loss._row_loss(kernel_draft, None if target is None else guarded(target), *inputs, loss)
    expected = row_loss.row_loss_reference(expected_draft, target, log_sum, labels, weights, loss)
    torch.testing.assert_close(kernel_draft.cpu(), expected_draft, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(found.loss.cpu(), expected.loss, atol=1e-5, rtol=1e-5)
    for law, expected_row in ((found.draft, expected.draft), (found.target, expected.target)):
        assert (law is None) == (expected_row is None)
        if law is not None and expected_row is not None:
            assert torch.equal(law.best.cpu(), expected_row.best)
            torch.testing.assert_close(law.log_sum.cpu(), expected_row.log_sum)
    assert (found.alpha is None) == (expected.alpha is None)
    if found.alpha is not None:
        torch.testing.assert_close(found.alpha.cpu(), expected.alpha)
    base = kernel_draft._base
    assert base is not None
    assert (base[:5000] == 1e30).all()
    assert (base[-5000:] == 1e30).all()


@pytest.mark.interpreter
@pytest.mark.parametrize(("text", "size"), [*((text, 33) for text in FUSED), (FUSED[-1], 5000)])  # in two blocks
def test_losses_and_gradients(text: str, size: int) -> None:
    draft, target = normal(4, size, seed=0), normal(4, size, seed=1)
    log_sum = target.logsumexp(-1) + torch.tensor([0.0, 0.1, 1.0, 5.0])
    labels, weights = torch.tensor([0, 1, size - 1, 4]), torch.tensor([1.0, 0.25, 2.0, -1.0])
    check(text, draft, target, log_sum, labels, weights)
    check(text, draft, target, None, None, weights)
    check(text, draft, target, None, labels, None)


@pytest.mark.interpreter
def test_labels_alone() -> None:
    check("0.5*ce", normal(3, 33, seed=0), None, None, torch.tensor([0, 32, 7]), torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.interpreter
@pytest.mark.parametrize("text", FUSED)
def test_laws_without_overlap(text: str) -> None:
    draft = torch.tensor([[300.0, 0, -300], [0.0, 12, 0], [5.0, 5, 5]])
    target = torch.tensor([[-300.0, 0, 300], [13.0, 0, 0], [5.0, 5, 5]])
    check(text, draft, target, None, None, torch.ones(3))


@pytest.mark.interpreter
@pytest.mark.parametrize("text", [*FUSED, "kl + top_k(4)"])
def test_through_the_head(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The dispatcher: the kernel where it has the loss, the reference for the others, with the same result."""

    def run() -> list[Tensor]:
        hidden, weight = normal(6, 8, seed=0).to(DEVICE), normal(9, 8, seed=1).to(DEVICE)
        states, rows = normal(6, 4, seed=2).to(DEVICE), OutputHead(normal(20, 4, seed=3).to(DEVICE))
        ids, weights = torch.arange(9, device=DEVICE) * 2, torch.arange(6, device=DEVICE) / 6
        head = OutputHead(weight.requires_grad_())
        teacher = TargetHead(rows, ids, 0.8).teacher(states)
        found = linear_loss(hidden.requires_grad_(), head, teacher, weights, parse_loss(text), chunk=4)
        return [*found[:6], *torch.autograd.grad(found.value, [hidden, weight])]  # type: ignore[list-item]

    kernel = run()
    monkeypatch.setattr(row_loss, "uses_triton", lambda _: False)
    for one, other in zip(kernel, run(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
