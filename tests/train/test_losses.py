"""Training losses: against their formulas in float64, differentiated by autograd, and their reductions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from math import exp, log, prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from fixtures.examples import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from draftkit.errors import DraftkitError
from draftkit.io.records import from_dict, to_dict
from draftkit.train.kernels.row_loss import row_loss_reference
from draftkit.train.losses import linear, teacher
from draftkit.train.losses.linear import LinearLoss, linear_loss
from draftkit.train.losses.table import FAMILIES, LOSSES, Loss, Term, parse_loss
from draftkit.train.losses.teacher import OutputHead, TargetHead
from draftkit.train.losses.weights import Reach, Reduction, marginal, reached
from draftkit.train.recipes.eagle import smooth_l1

Formula = Callable[[Tensor, Tensor, Tensor], Tensor]  # of draft logits, target logits and labels


def top_4(draft: Tensor, target: Tensor, _: Tensor) -> Tensor:
    p = target.softmax(-1)
    kept = torch.where(p >= p.sort(-1).values[:, -4:-3], p, 0)
    return -(kept * draft.log_softmax(-1)).sum(-1)


def lk_3(draft: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    distance = FORMULAS["tv"](draft, target, labels)
    share = torch.exp(-3 * (1 - distance)).detach()
    return share * FORMULAS["kl"](draft, target, labels) + (1 - share) * distance


def divergence(of: Tensor, by: Tensor) -> Tensor:
    return kl_div(by.log(), of, reduction="none").sum(-1)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    return (divergence(p, (p + q) / 2) + divergence(q, (p + q) / 2)) / 2


FORMULAS: dict[str, Formula] = {
    "ce": lambda s, t, x: cross_entropy(s, x, reduction="none"),
    "soft_ce": lambda s, t, x: cross_entropy(s, t.softmax(-1), reduction="none"),
    "kl": lambda s, t, x: divergence(t.softmax(-1), s.softmax(-1)),
    "reverse_kl": lambda s, t, x: divergence(s.softmax(-1), t.softmax(-1)),
    "jsd": lambda s, t, x: jensen_shannon(t.softmax(-1), s.softmax(-1)),
    "tv": lambda s, t, x: (t.softmax(-1) - s.softmax(-1)).abs().sum(-1) / 2,
    "nla": lambda s, t, x: -torch.minimum(t.softmax(-1), s.softmax(-1)).sum(-1).log(),
    "lk(3)": lk_3,
    "top_k(4)": top_4,
}
MIXTURES: dict[str, Formula] = {
    "0.1*ce + 0.9*tv": lambda s, t, x: 0.1 * FORMULAS["ce"](s, t, x) + 0.9 * FORMULAS["tv"](s, t, x),
    "nla+.5*top_k(4)+2*jsd": lambda s, t, x: (
        FORMULAS["nla"](s, t, x) + 0.5 * top_4(s, t, x) + 2 * FORMULAS["jsd"](s, t, x)
    ),
}
ALL = FORMULAS | MIXTURES


def test_every_loss_has_a_formula() -> None:
    assert {name.partition("(")[0] for name in FORMULAS} == {*LOSSES, *FAMILIES}


def logits(*shape: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("spread", [0.3, 2.0, 6.0])
def test_values_and_gradients(text: str, spread: float) -> None:
    draft, target = logits(9, 13, spread=spread).requires_grad_(), logits(9, 13, seed=1, spread=spread)
    labels, weights = torch.arange(9), torch.linspace(-1, 2, 9, dtype=torch.float64)
    expected = ALL[text](draft, target, labels)
    (gradient,) = torch.autograd.grad(expected @ weights, draft)
    written = draft.detach().clone()
    found = row_loss_reference(written, target, None, labels, weights, parse_loss(text))
    torch.testing.assert_close(found.loss, expected.detach())
    torch.testing.assert_close(written, gradient)


def test_published_gradients() -> None:
    """The closed forms by which the losses are known."""
    draft, target = logits(5, 7), logits(5, 7, seed=1)
    p, q = target.softmax(-1), draft.softmax(-1)
    reverse = (q * (q / p).log()).sum(-1, keepdim=True)
    overlap = torch.where(q <= p, q, 0)
    total_variation = q * overlap.sum(-1, keepdim=True) - overlap
    expected = {
        "kl": q - p,
        "soft_ce": q - p,
        "reverse_kl": q * ((q / p).log() - reverse),
        "tv": total_variation,
        "nla": total_variation / torch.minimum(p, q).sum(-1, keepdim=True),
    }
    for text, gradient in expected.items():
        written = draft.clone()
        row_loss_reference(written, target, None, None, torch.ones(5, dtype=torch.float64), parse_loss(text))
        torch.testing.assert_close(written, gradient)


@pytest.mark.parametrize("text", ALL)
def test_laws_without_overlap_give_finite_numbers(text: str) -> None:
    """In float32, where the smaller probabilities are 0; −log α has nothing to say there."""
    draft = torch.tensor([[300.0, 0, -300], [0.0, 12, 0], [5.0, 5, 5]])
    target = torch.tensor([[-300.0, 0, 300], [13.0, 0, 0], [5.0, 5, 5]])
    found = row_loss_reference(draft, target, None, None, torch.ones(3), parse_loss(text))
    assert found.loss.isfinite().all()
    assert draft.isfinite().all()
    if text == "nla":
        assert found.loss[0] == 0
        assert not draft[0].any()
        assert found.loss[1] == pytest.approx(-log(exp(-12) + exp(-13)), rel=0.2)


# Through the head


class Problem(NamedTuple):
    """N rows of a draft of width 5 with its head, and the states of a target of width 4 with its own."""

    hidden: Tensor
    head: OutputHead
    states: Tensor
    target: TargetHead
    weights: Tensor
    labels: Tensor
    emitted: Tensor

    def run(self, text: str, **options: Any) -> LinearLoss:
        given = {"labels": self.labels, "emitted": self.emitted} | options
        return linear_loss(
            self.hidden, self.head, self.target.teacher(self.states), self.weights, parse_loss(text), **given
        )

    def gradients(self, value: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(value, [self.hidden, *(part for part in self.head if part is not None)])


def problem(
    *,
    rows: int = 12,
    draft_vocab: int | None = 7,
    bias: bool = True,
    temperature: float = 1.0,
    dtype: torch.dtype = torch.float64,
    target_vocab: int = 11,
    seed: int = 0,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    size = draft_vocab or target_vocab
    d2t_ids = None if draft_vocab is None else torch.randperm(target_vocab, generator=generator)[:size]
    mask = torch.rand(rows, generator=generator) > 0.3
    return Problem(
        hidden=normal(rows, 5).requires_grad_(),
        head=OutputHead(normal(size, 5).requires_grad_(), normal(size).requires_grad_() if bias else None),
        states=normal(rows, 4),
        target=TargetHead(
            OutputHead(normal(target_vocab, 4), normal(target_vocab) if bias else None), d2t_ids, temperature
        ),
        weights=torch.rand(rows, generator=generator) * mask,
        labels=torch.where(mask, torch.randint(0, size, (rows,), generator=generator), -100),
        emitted=torch.randint(0, target_vocab, (rows,), generator=generator),
    )


def straight(given: Problem, text: str) -> LinearLoss:
    """The same with all logits at once and autograd."""
    (weight, bias), target = given.head, given.target
    draft = given.hidden @ weight.T + (0 if bias is None else bias)
    whole = given.states @ target.head.weight.T + (0 if target.head.bias is None else target.head.bias)
    draft, whole = draft / target.temperature, whole / target.temperature
    ids = torch.arange(whole.shape[1]) if target.d2t_ids is None else target.d2t_ids
    loss = ALL[text](draft, whole[:, ids], given.labels.clamp(min=0))
    p, q = whole.softmax(-1), torch.zeros_like(whole).index_copy(1, ids, draft.softmax(-1)).detach()
    emitted, used = given.emitted[:, None], given.weights != 0
    return LinearLoss(
        value=loss @ given.weights.to(loss.dtype),
        weights=given.weights.to(loss.dtype),
        loss=loss.detach() * used,
        agree=(q.argmax(-1) == p.argmax(-1)) & used,
        alpha=torch.minimum(p, q).sum(-1) * used,
        oov=(1 - p[:, ids].sum(-1)) * used,
        ratio=(q / p).clamp(max=1).gather(1, emitted)[:, 0] * used,
    )


@pytest.mark.parametrize("text", ALL)
@pytest.mark.parametrize("draft_vocab", [None, 7])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_through_the_head(text: str, draft_vocab: int | None, temperature: float) -> None:
    given = problem(draft_vocab=draft_vocab, temperature=temperature, bias=temperature == 1)
    found, expected = given.run(text, chunk=4), straight(given, text)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    for one, other in zip(given.gradients(found.value), given.gradients(expected.value), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("text", ["reverse_kl", "0.1*ce + 0.9*tv"])
def test_gradients_by_differences(text: str) -> None:
    given = problem(rows=5)

    def value(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return given._replace(hidden=hidden, head=OutputHead(weight, bias)).run(text).value * 3

    assert torch.autograd.gradcheck(value, (given.hidden, *given.head))


@examples(40)
@given(st.integers(1, 20), st.integers(1, 25), st.sampled_from(list(ALL)), st.sampled_from([None, 3, 7]))
def test_the_chunk_size_changes_nothing(rows: int, chunk: int, text: str, draft_vocab: int | None) -> None:
    given = problem(rows=rows, draft_vocab=draft_vocab, seed=rows, dtype=torch.float32)
    whole, parts = given.run(text), given.run(text, chunk=chunk)
    for one, other in zip(
        (*whole, *given.gradients(whole.value)), (*parts, *given.gradients(parts.value)), strict=True
    ):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=2e-5)


def test_masked_rows_are_not_touched() -> None:
    given = problem()
    expected = given.run("kl")
    masked = given.weights == 0
    assert masked.any()
    poisoned = given.hidden.detach().clone()
    poisoned[masked] = torch.nan
    found = given._replace(hidden=poisoned.requires_grad_()).run("kl")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    by_hidden, by_weight = torch.autograd.grad(found.value, [poisoned, given.head.weight])
    assert not by_hidden[masked].any()
    assert by_weight.isfinite().all()


def test_nothing_but_masked_rows() -> None:
    given = problem()._replace(weights=torch.zeros(12))
    found = given.run("lk(3)")
    assert found.value == 0
    assert all(not statistic.any() for statistic in found)
    assert all(not gradient.any() for gradient in given.gradients(found.value))


@pytest.mark.parametrize("text", ["kl", "nla", "ce"])
def test_bfloat16_is_rounded_only_where_it_is_stored(text: str) -> None:
    """States and heads as given, everything between in float32, as if they had been stored in it."""
    given = problem(dtype=torch.bfloat16)
    wide = given._replace(
        hidden=given.hidden.detach().float().requires_grad_(),
        head=OutputHead(*(part.detach().float().requires_grad_() for part in given.head if part is not None)),
    )
    found, expected = given.run(text), wide.run(text)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype in (torch.float32, torch.bool)
        assert torch.equal(one, other)
    for one, other in zip(given.gradients(found.value), wide.gradients(expected.value), strict=True):
        assert torch.equal(one, other.bfloat16())


def test_autocast_rounds_the_states_and_nothing_else() -> None:
    given = problem(dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = given.run("kl")
    expected = given._replace(hidden=given.hidden.bfloat16()).run("kl")
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert given.gradients(found.value)[1].dtype == torch.float32


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_has_the_same_statistics(mode: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given = problem()
    expected = given.run("tv")
    monkeypatch.setattr(linear, "product", None)  # what gradients are made with
    with mode():
        found = given.run("tv")
    assert not found.value.requires_grad
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_a_frozen_head_gets_no_gradient() -> None:
    given = problem(bias=False)
    frozen = given._replace(head=OutputHead(given.head.weight.detach()))
    torch.autograd.backward([given.run("kl").value])
    trained = given.hidden.grad
    given.hidden.grad = None
    torch.autograd.backward([frozen.run("kl").value])
    assert torch.equal(given.hidden.grad, trained)
    assert frozen.head.weight.grad is None


def test_a_part_of_the_head_that_is_frozen_gets_no_gradient() -> None:
    given = problem()
    hidden, weight, bias = given.gradients(given.run("kl", chunk=5).value)
    found = given.gradients(given.run("kl", chunk=5, frozen=2).value)
    assert torch.equal(found[0], hidden)
    assert not found[1][:, :2].any()
    torch.testing.assert_close(found[1][:, 2:], weight[:, 2:])
    assert torch.equal(found[2], bias)


def test_the_ratio_of_emitted_tokens_has_the_mean_alpha() -> None:
    """Σ_x p(x)·min(1, q(x)/p(x)) = Σ_x min(p, q): the coin of simulated rounds is unbiased."""
    one = problem(rows=1, temperature=0.7)
    size = len(one.target.head.weight)
    every = one._replace(
        hidden=one.hidden.expand(size, -1), states=one.states.expand(size, -1), weights=torch.ones(size),
        labels=None, emitted=torch.arange(size),
    )  # fmt: skip
    found = every.run("kl")
    p = (one.states @ one.target.head.weight.T + one.target.head.bias).div(0.7).softmax(-1)[0]
    assert found.ratio is not None
    assert found.alpha is not None
    torch.testing.assert_close(p @ found.ratio, found.alpha[0])
    assert (found.ratio > 0).sum() == 7


def test_steps_in_one_call() -> None:
    """K steps whose rows are taught by shifted positions, as in a training-time test."""
    given = problem()
    hidden, weights = logits(3, 8, 5, seed=5).requires_grad_(), torch.rand(3, 8)
    shifted = torch.arange(3)[:, None] + torch.arange(8)
    whole = given.target.teacher(given.states)
    stacked = linear_loss(
        hidden.flatten(0, 1), given.head, whole.at(shifted.flatten()), weights.flatten(), parse_loss("kl")
    )
    steps = [
        linear_loss(hidden[t], given.head, given.target.teacher(given.states[t : t + 8]), weights[t], parse_loss("kl"))
        for t in range(3)
    ]
    torch.testing.assert_close(stacked.loss.view(3, 8), torch.stack([step.loss for step in steps]))
    together = torch.autograd.grad(stacked.value, [hidden, given.head.weight])
    apart = torch.autograd.grad(sum(step.value for step in steps), [hidden, given.head.weight])
    for one, other in zip(together, apart, strict=True):
        torch.testing.assert_close(one, other)


def products(chances: Tensor) -> Tensor:
    """Of each draft of chains [M, K], the chance that those before it are right."""
    rows = [[prod(chain[:depth]) for depth in range(len(chain))] for chain in chances.tolist()]
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("factors", "together"), [(reached, 1), (marginal, 3)])
@pytest.mark.parametrize(("draft_vocab", "temperature"), [(None, 1.0), (7, 0.6)])
@pytest.mark.parametrize("chunk", [4, 100])
def test_weights_by_the_chance_of_getting_there(
    factors: Any, together: int, draft_vocab: int | None, temperature: float, chunk: int
) -> None:
    """Four chains of three drafts; they are constants of the gradient, and a draft without weight ends its chain."""
    given, alpha = problem(draft_vocab=draft_vocab, temperature=temperature, bias=False), 0.2
    given = given._replace(weights=torch.tensor([1.0, 2, 1, 1, 1, 0, 0.5, 0, 0, 1, 1, 1]))
    reach = Reach(torch.arange(12), (4, 3), factors, together=together, alpha=alpha)
    found = given.run("kl", reach=reach, chunk=chunk, labels=None)
    target = given.states @ given.target.head.weight.T
    choice = target[:, given.target.d2t_ids if draft_vocab else slice(None)].argmax(-1)
    chance = (given.hidden @ given.head.weight.T / temperature).softmax(-1)[torch.arange(12), choice].detach()
    chances = (((1 - alpha) * chance + alpha) * (given.weights > 0)).view(4, 3)
    expected = products(chances)
    if factors is marginal:
        right = expected * chances
        expected = torch.stack([right[:, depth:].sum(1) for depth in range(3)], dim=1)
    weights = expected.flatten() * given.weights
    torch.testing.assert_close(found.weights, weights, atol=1e-6, rtol=1e-6)  # chances are float32
    plain = given._replace(weights=weights).run("kl", labels=None)
    torch.testing.assert_close(found.value, plain.value, atol=1e-6, rtol=1e-6)
    for one, other in zip(given.gradients(found.value), given.gradients(plain.value), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_labels_alone() -> None:
    given = problem()
    found = linear_loss(given.hidden, given.head, None, given.weights, parse_loss("ce"), labels=given.labels, chunk=5)
    draft = given.hidden @ given.head.weight.T + given.head.bias
    used = given.weights != 0
    loss = cross_entropy(draft, given.labels, reduction="none")
    torch.testing.assert_close(found.loss, loss.detach())
    assert torch.equal(found.agree, (draft.argmax(-1) == given.labels) & used)
    assert found.alpha is found.oov is found.ratio is None
    for one, other in zip(given.gradients(found.value), given.gradients(loss @ given.weights.double()), strict=True):
        torch.testing.assert_close(one, other)


def test_labels_default_to_the_choice_within_the_draft_vocabulary() -> None:
    given = problem()
    target = given.states @ given.target.head.weight.T + given.target.head.bias
    choice = target[:, given.target.d2t_ids].argmax(-1)
    assert torch.equal(given.run("ce", labels=None).loss, given.run("ce", labels=choice).loss)


class Largest(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that any operation makes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = function(*arguments, **(options or {}))
        made = result if isinstance(result, tuple | list) else [result]
        self.elements = max(self.elements, *(part.numel() for part in made if isinstance(part, Tensor)), 0)
        return result


@pytest.mark.parametrize("text", ["kl", "nla + top_k(4)"])
def test_logits_are_never_all_there(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, chunk, vocab = 2000, 16, 300
    given = problem(rows=rows, draft_vocab=100, target_vocab=vocab, dtype=torch.float32)
    monkeypatch.setattr(teacher, "rows_at_once", lambda *_: chunk)
    with Largest() as largest:
        found = given.run(text, chunk=chunk)
        given.gradients(found.value)
    assert largest.elements == given.hidden.numel() < rows * 100 / 5


def test_a_target_teaches_itself(running_target: Path) -> None:
    """A real model's final states and head: its law is the model's, and a draft with both has nothing to learn."""
    model = AutoModelForCausalLM.from_pretrained(running_target, dtype=torch.float32)
    tokens = torch.arange(3, 23)[None]
    with torch.no_grad():
        states = model.model(tokens).last_hidden_state[0]
        whole = model(tokens).logits[0]
    head = OutputHead(model.lm_head.weight)
    hidden, ids = states.clone().requires_grad_(), torch.arange(0, len(head.weight), 2)
    found = linear_loss(hidden, head, TargetHead(head).teacher(states), torch.ones(20), parse_loss("kl"))
    assert found.agree.all()
    torch.testing.assert_close(found.alpha, torch.ones(20))
    torch.testing.assert_close(torch.autograd.grad(found.value, hidden)[0], torch.zeros_like(hidden), atol=1e-5, rtol=0)
    half = linear_loss(
        hidden, OutputHead(head.weight[ids]), TargetHead(head, ids).teacher(states), torch.ones(20), parse_loss("kl")
    )
    inside = whole.softmax(-1)[:, ids].sum(-1)
    torch.testing.assert_close(half.loss, torch.zeros(20), atol=1e-5, rtol=0)
    torch.testing.assert_close(half.oov, 1 - inside)
    torch.testing.assert_close(half.alpha, inside)
    assert torch.equal(half.agree, whole.argmax(-1) % 2 == 0)


def test_what_does_not_fit_is_an_error() -> None:
    given = problem()
    ones, ce = torch.ones(12), parse_loss("ce")
    with pytest.raises(DraftkitError, match="no teacher"):
        linear_loss(given.hidden, given.head, None, ones, parse_loss("kl"), labels=given.labels)
    with pytest.raises(DraftkitError, match="without a teacher and without labels"):
        linear_loss(given.hidden, given.head, None, ones, ce)
    with pytest.raises(DraftkitError, match="outside the draft vocabulary"):
        linear_loss(given.hidden, given.head, None, ones, ce, labels=torch.full((12,), -100))
    with pytest.raises(DraftkitError, match="a head of 7 tokens"):
        linear_loss(given.hidden, given.head, problem(draft_vocab=5).target.teacher(given.states), ones, ce)
    with pytest.raises(DraftkitError, match="temperature 0"):
        TargetHead(given.head, temperature=0.0)


# As text


names = st.sampled_from([*LOSSES]).map(lambda name: (name, None)) | st.sampled_from([("lk", 2.5), ("top_k", 10.0)])
weights = st.floats(1e-12, 1e12)
sums = st.lists(names, min_size=1, unique_by=lambda pair: pair[0])


@given(sums.flatmap(lambda chosen: st.tuples(*(weights.map(lambda w, pair=pair: Term(w, *pair)) for pair in chosen))))
def test_a_loss_is_its_text(terms: tuple[Term, ...]) -> None:
    assert parse_loss(str(Loss(terms))) == Loss(terms)


def test_reading_losses() -> None:
    assert parse_loss("kl") == Loss((Term(1.0, "kl"),))
    assert parse_loss("0.1*ce+0.9*tv") == Loss((Term(0.1, "ce"), Term(0.9, "tv")))
    assert parse_loss(" 1e-1 * lk( 3 ) + top_k(10) ") == Loss((Term(0.1, "lk", 3.0), Term(1.0, "top_k", 10.0)))


@pytest.mark.parametrize(
    "text",
    ["", "+", "kl+", "kl tv", "kl++tv", "2kl", "-1*kl", "0*kl", "nan*kl", "1e999*kl", "KL", "hinge", "kl(3)", "lk",
     "lk()", "lk(-1)", "lk(1e999)", "top_k", "top_k(0)", "top_k(2.5)", "kl-tv", "kl+kl"],
)  # fmt: skip
def test_what_is_no_loss(text: str) -> None:
    with pytest.raises(DraftkitError, match="loss"):
        parse_loss(text)


# Reductions


MASK = torch.tensor([[True, True, False, True], [True, False, False, False], [False] * 4])


def test_reductions() -> None:
    factors = torch.tensor([1.0, 0.8, 0.64])
    by_tokens = MASK * (factors / torch.tensor([3, 1, 1]))[:, None]
    torch.testing.assert_close(Reduction("tokens", 0.8, normalized=False).weights(MASK), by_tokens)
    torch.testing.assert_close(Reduction("tokens", 0.8).weights(MASK), by_tokens / 2.44)
    torch.testing.assert_close(Reduction("rows", 0.8, normalized=False).weights(MASK), MASK * factors[:, None] / 4)
    torch.testing.assert_close(Reduction().weights(MASK).sum(), torch.tensor(2 / 3))


@given(st.integers(1, 3), st.floats(0.1, 1), st.sampled_from(["tokens", "rows"]), st.booleans())
def test_parts_of_a_batch_add_up(cut: int, decay: float, denominator: Any, normalized: bool) -> None:
    """With the counts of the whole batch, accumulated parts weigh what they weigh in one piece."""
    reduction = Reduction(denominator, decay, normalized)
    counts = MASK.sum(-1) if denominator == "tokens" else torch.full((3,), 4)
    parts = [reduction.weights(part, counts) for part in (MASK[:, :cut], MASK[:, cut:])]
    torch.testing.assert_close(torch.cat(parts, 1), reduction.weights(MASK))


def test_reductions_are_records() -> None:
    assert asdict(Reduction("rows", 0.8, False)) == {"denominator": "rows", "decay": 0.8, "normalized": False}
    for wrong in ({"denominator": "batch"}, {"decay": 0.0}, {"decay": 1.5}):
        with pytest.raises(DraftkitError):
            from_dict(Reduction, to_dict(Reduction()) | wrong, "options")


def test_smooth_l1() -> None:
    difference = torch.tensor([[0.5, -0.5, 3.0, -3.0], [0.0, 0.0, 0.0, 1.0]])
    torch.testing.assert_close(smooth_l1(difference.bfloat16(), torch.zeros(2, 4)), torch.tensor([1.3125, 0.125]))
