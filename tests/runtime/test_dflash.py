"""Block drafters: their limits, their confidence, and windows counted from the anchor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fixtures.checkpoints.published import dflash
from fixtures.engines.draft_references import K, Tensors, block_reference
from fixtures.engines.drafter_cases import (
    Case,
    Load,
    confident_dspark,
    dflash_draft,
    dspark_draft,
    requests,
    sampled,
    target,
)
from test_drafters import Decoding, Recorder, started
from torch import Tensor

from draftkit.errors import DraftkitError
from draftkit.requests import DraftSampling
from draftkit.runtime.drafters.dflash import DFlashDrafter
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation
from draftkit.targets.states import FINAL
from draftkit.targets.target import Target


def generate(drafter: Drafter | None, k: int, wanted: tuple = (), floor: float = 0.0) -> list[Generation]:
    engine = Engine(
        Target(target(), drafter.aux_layers if drafter else None), drafter, num_speculative_tokens=k, num_slots=3,
        verification="coupled", draft_sampling=DraftSampling("probabilistic", min_confidence=floor),
    )  # fmt: skip
    return engine.generate(wanted or requests())


SIXTEEN: dict[str, tuple[dict[str, Any], Callable[[torch.dtype], Tensors], int]] = {
    "DFlash": (dflash.dflash_config(block_size=16), dflash.dflash_tensors, 15),
    "DFlash2": (dflash.dflash_config(dflash.DFLASH2, block_size=16), dflash.dflash2_tensors, 15),
    "DSpark": (dflash.deepspec_config(block_size=16), dflash.dspark_tensors, 16),
}


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 7, "all"])
@pytest.mark.parametrize("kind", SIXTEEN)
def test_blocks_of_sixteen(load: Load, kind: str, k: int | str) -> None:
    """Below the block and at it, four requests through three slots."""
    config, make, most = SIXTEEN[kind]
    drafter = load(config, make(torch.float32))
    drafted = most if isinstance(k, str) else k
    generations = generate(drafter, drafted)
    assert [g.tokens for g in generations] == [g.tokens for g in generate(None, 0)]
    assert {len(r.proposal) for g in generations for r in g.rounds} == {drafted}


@pytest.mark.parametrize("make", [dflash_draft, dspark_draft])
def test_more_tokens_than_a_block_drafts(load: Load, make: Callable[[Load], Case]) -> None:
    """Twelve, where the block is made for four."""
    generations = generate(make(load).drafter, 12)
    assert [g.tokens for g in generations] == [g.tokens for g in generate(None, 0)]
    assert {len(r.proposal) for g in generations for r in g.rounds} == {12}


@pytest.mark.slow
def test_drafts_end_where_confidence_does(load: Load) -> None:
    drafter = confident_dspark(load)
    for wanted in (requests(), sampled()):
        plain = [g.tokens for g in generate(None, 0, wanted)]
        free, bound = generate(drafter, 4, wanted), generate(drafter, 4, wanted, floor=0.5)
        assert [g.tokens for g in free] == [g.tokens for g in bound] == plain
        assert {r.drafted for g in free for r in g.rounds} == {4}
        assert len({r.drafted for g in bound for r in g.rounds}) > 2
    with pytest.raises(DraftkitError, match="does not estimate its chances of acceptance"):
        generate(dflash_draft(load).drafter, 4, floor=0.5)


class Other(Recorder):
    """Draws the least likely token of one step."""

    def __init__(self, step: int):
        super().__init__()
        self.step = step

    def __call__(self, step: int, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        return super().__call__(step, -logits if step == self.step else logits, ids)


def test_confidence_in_a_token_does_not_depend_on_it(load: Load) -> None:
    """Else leaving out drafts would change the distribution of the output."""
    decoding = Decoding(confident_dspark(load), 3 * dflash.H, 1)
    decoding.admit({0: 7})
    usual = decoding.drafter.propose(decoding.committed([0]), K, Recorder())
    assert usual.confidences is not None
    for step in range(K):
        other = decoding.drafter.propose(decoding.committed([0]), K, Other(step))
        assert other.tokens[0, step] != usual.tokens[0, step]
        assert other.confidences is not None
        assert torch.equal(other.confidences[:, : step + 1], usual.confidences[:, : step + 1])
        assert step == K - 1 or other.confidences[0, step + 1] != usual.confidences[0, step + 1]


def test_a_window_counted_from_the_anchor(load: Load) -> None:
    case = dflash_draft(load, dflash.dflash_config(**dflash.SLIDING))
    drafter = case.drafter
    assert isinstance(drafter, DFlashDrafter)
    spec = replace(drafter.model.spec, window_rule="anchor")
    model = type(drafter.model)(spec, "draftkit")
    model.load_state_dict(drafter.model.state_dict(), strict=False)  # the borrowed ones come next
    model.borrow(target().get_input_embeddings(), target().get_output_embeddings())
    reference = partial(
        block_reference, dflash.dflash_tensors(torch.float32), dflash.MASK, target().get_input_embeddings().weight,
        target().lm_head.weight, fill_in=True, windows={0: 8}, causal={0}, anchored=True,
    )  # fmt: skip
    decoding = started(replace(case, drafter=DFlashDrafter(model.eval(), 8), reference=reference), 4)
    for slots, _, draw in decoding.rounds(3):
        for row, slot in enumerate(slots):
            known = decoding.known[slot]
            expected = reference(decoding.tokens[slot, :known], decoding.features[slot, : known - 1])
            logits = torch.stack([step[row] for step in draw.logits])
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-3 * float(expected.std()))


def test_the_last_layer_before_or_after_the_norm(load: Load) -> None:
    config = dflash.dflash_config({"target_layer_ids": [-1, 4, 7]})
    drafter = dflash_draft(load, config).drafter
    assert isinstance(drafter, DFlashDrafter)
    assert drafter.aux_layers.states == (0, 5, FINAL)
    before = replace(drafter.model.spec, last_state="before_norm")
    drafter.model.spec = before
    assert drafter.aux_layers.states == (0, 5, 8)
