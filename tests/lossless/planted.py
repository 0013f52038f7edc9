"""Engines with a bug, which a certificate must notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from draftkit.runtime import rounds
from draftkit.runtime.batch import SamplingTensors
from draftkit.runtime.cache import CacheRows, SlotCache
from draftkit.runtime.emitted import Drafted, Emitted, emit_chosen
from draftkit.runtime.ops.random import target_stream
from draftkit.runtime.slot_rows import SlotRows
from draftkit.runtime.verification import recover_token
from draftkit.targets.attention import KeyValues
from draftkit.targets.target import Target, TargetOutput
from lossless.poisoned import PoisonedTarget


class OffByOneTarget(Target):
    """Stores each round's anchor one entry too early, so that rows read what the last round left in its place."""

    def forward(
        self, tokens: Tensor, positions: Tensor, kv: KeyValues, *, last_only: bool = False, **others: Any
    ) -> TargetOutput:
        rows = cast(CacheRows, kv)
        if not last_only:
            early = torch.zeros_like(positions)
            early[:, 0] = 1
            rows.rows = SlotRows(rows.rows.slots, rows.rows.positions - early)
        return super().forward(tokens, positions, kv, last_only=last_only, **others)


class PoisonedOffByOneTarget(OffByOneTarget, PoisonedTarget):
    """Reads poisoned entries: the proof that poison would be noticed."""


def without(cut: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A sampler that does not know one of the cuts."""
    neutral = {"top_k": torch.iinfo(torch.int32).max, "top_p": 1.0, "drop": float("inf")}

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        of = SamplingTensors.of

        def forgetful(*arguments: object) -> SamplingTensors:
            made = of(*arguments)  # type: ignore[arg-type]
            return made._replace(**{cut: torch.full_like(getattr(made, cut), neutral[cut])})

        monkeypatch.setattr(SamplingTensors, "of", staticmethod(forgetful))

    return plant


def plant_rare_acceptance(rate: float) -> Callable[[pytest.MonkeyPatch], None]:
    """In a share of rounds, one draft token more is accepted than may be."""

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        chance, rejection = torch.Generator().manual_seed(0), rounds.MODES["rejection"]

        def generous(drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Emitted:
            emitted = rejection(drafted, logits, parameters, start)
            too_many = torch.rand(len(emitted.counts), generator=chance) < rate
            first = torch.where(too_many & (emitted.counts == 1), drafted.tokens[:, 0], emitted.tokens[:, 0])
            return emitted._replace(tokens=torch.cat((first[:, None], emitted.tokens[:, 1:]), dim=1))

        monkeypatch.setitem(rounds.MODES, "rejection", generous)

    return plant


def accepting_too_much(drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Emitted:
    """Greedy verification that takes the first draft for granted."""
    best = logits.argmax(-1)
    agrees = drafted.tokens == best[:, :-1]
    agrees[:, :1] = True
    accepted = agrees.long().cumprod(-1).sum(-1)
    first = drafted.tokens[:, :1]
    chosen = torch.cat((first, best[:, first.shape[1] :]), dim=1)
    return emit_chosen(drafted, accepted, chosen, agrees.float())


def plant_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "verify_greedy", accepting_too_much)


def plant_cache_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds, with or without a draft, write their keys and values one entry too far."""
    rows = SlotCache.rows

    def off_by_one(self: SlotCache, slots: Tensor, positions: Tensor, length: int, **options: bool) -> object:
        found = rows(self, slots, positions, min(length + 1, self.capacity), **options)
        if int(positions.min()) > 0:
            found.rows = SlotRows(slots, (positions + 1).clamp(max=self.capacity - 1))
        return found

    monkeypatch.setattr(SlotCache, "rows", off_by_one)


def plant_one_token_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a rejection only the draft token is left out, not the whole distribution of the draft."""

    def without_one(drafted: Drafted, *rest: Tensor) -> Tensor:
        return recover_token(drafted._replace(one_hot=torch.ones_like(drafted.one_hot)), *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("draftkit.runtime.verification.recover_token", without_one)


def plant_shared_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts drawn with the target's noise where they must have their own."""
    monkeypatch.setattr(
        "draftkit.runtime.drawing.draft_stream",
        lambda seeds, positions, start: target_stream(seeds, positions),
    )


def plant_flatter_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verification takes the draft's probabilities as if they had been taken at twice the temperature."""
    rejection = rounds.MODES["rejection"]

    def mis_scaled(drafted: Drafted, logits: Tensor, parameters: SamplingTensors, start: Tensor) -> Emitted:
        assert drafted.probs is not None
        flatter = drafted.probs.sqrt()
        wrong = drafted._replace(probs=flatter / flatter.sum(-1, keepdim=True))
        return rejection(wrong, logits, parameters, start)

    monkeypatch.setitem(rounds.MODES, "rejection", mis_scaled)


def plant_uncleared_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies beyond a sequence is not cleared, and rows look one entry too far."""
    bias = SlotRows.bias
    monkeypatch.setattr(
        SlotRows,
        "bias",
        lambda self, *rest, **seen: bias(SlotRows(self.slots, self.positions + 1), *rest, **seen),
    )
