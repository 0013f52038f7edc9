"""What a target makes of a text, computed once and given to every change of a draft that is tried on it.

Under coupled verification a target writes the same text whatever the draft does, and what it would make of a draft
token that is not in this text is never asked: a round ends there. So its hidden states and logits along the text are
all that rounds read, and a change costs the draft's forwards alone. P prompt tokens, n tokens after them, F width of
the captured features, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftkit.requests import DraftSampling, Request
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.engine import Engine
from draftkit.runtime.prefill import PromptRows
from draftkit.runtime.records import Generation
from draftkit.targets.states import AuxLayers
from draftkit.targets.target import Target, TargetOutput

MAX_SLOTS = 8  # sequences that are drafted for together


@dataclass(frozen=True)
class Recording:
    """`features` [P+n, F] at every position, None where the draft reads none; `logits` [n+1, V] from the prompt's last
    position on. Both on the CPU. `seconds`: what the prompt took, and what is after it."""

    request: Request
    features: Tensor | None
    logits: Tensor
    seconds: tuple[float, float] = (0.0, 0.0)

    def logits_at(self, positions: Tensor) -> Tensor:
        """[T, V] at `positions` int64 [T], those of the nearest position where there are none."""
        return self.logits[(positions - len(self.request.prompt) + 1).clamp(0, len(self.logits) - 1)]

    def features_at(self, positions: Tensor) -> Tensor:
        """[T, F] at `positions` int64 [T], those of the nearest position where there are none."""
        assert self.features is not None
        return self.features[positions.clamp(0, len(self.features) - 1)]


class _Listening(Target):
    """A target that keeps what its forwards give."""

    def __init__(self, model: PreTrainedModel, aux_layers: AuxLayers | None):
        super().__init__(model, aux_layers)
        self.outputs: list[TargetOutput] = []

    def forward(self, *args: Any, **others: Any) -> TargetOutput:
        output = super().forward(*args, **others)
        features = None if output.features is None else output.features[0].cpu()
        self.outputs.append(TargetOutput(output.logits[0, -1].cpu(), features))
        return output

    def heard(self, request: Request) -> Recording:
        """What was kept of a request, which is then forgotten."""
        outputs, self.outputs = self.outputs, []
        features = [output.features for output in outputs if output.features is not None]
        pieces = len(outputs) - request.max_new_tokens  # of the prompt, before the last
        logits = torch.stack([output.logits for output in outputs[pieces:]])
        return Recording(request, torch.cat(features) if features else None, logits)


def record(
    model: PreTrainedModel, aux_layers: AuxLayers | None, requests: Sequence[Request], k: int
) -> list[Recording]:
    """Let the target write what each request asks for, and as much beyond its end as a round of `k` drafts reaches."""
    target, recordings = _Listening(model, aux_layers), []
    engine = Engine(target, None, num_speculative_tokens=0, num_slots=1, verification="coupled", eager=True)
    engine.reserve(max(request.max_length for request in requests) + k + 1)
    for request in requests:
        longer = replace(request, max_new_tokens=request.max_new_tokens + k + 1, ignore_eos=True)
        (written,) = engine.generate([longer])
        recordings.append(replace(target.heard(longer), request=request, seconds=seconds_of(written)))
    return recordings


def seconds_of(generation: Generation) -> tuple[float, float]:
    """What a prompt took, and what is after it."""
    return generation.ttft, generation.times[-1] - generation.times[0]


class _Replayed(Target):
    """A target whose forwards are looked up, slot by slot, in recordings."""

    def __init__(self, model: PreTrainedModel, aux_layers: AuxLayers | None, recordings: Sequence[Recording]):
        super().__init__(model, aux_layers)
        self._recordings = recordings

    def slot_bytes(self, capacity: int, k: int) -> int:
        """Nothing: no keys and values are kept."""
        del capacity, k
        return 0

    def forward(
        self, tokens: Tensor, positions: Tensor, kv: Any, *, last_rows: Tensor | None = None, **_: Any
    ) -> TargetOutput:
        """Logits [B, T, V], of `last_rows` alone where they are asked for, and features [B, T, F]."""
        slots = kv.rows.slots
        of_rows = slots[None] if isinstance(kv, PromptRows) else slots[:, None].expand_as(tokens)  # [B, T]
        found = [self._sequence(own.tolist(), at.cpu(), last_rows) for own, at in zip(of_rows, positions, strict=True)]
        logits = torch.stack([logits for logits, _ in found]).to(tokens.device)
        features = [features for _, features in found if features is not None]
        return TargetOutput(logits, torch.stack(features).to(tokens.device) if features else None)

    def _sequence(self, slots: list[int], positions: Tensor, last: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What was recorded for rows of `slots` at `positions` int64 [T]."""
        rows = range(len(slots)) if last is None else last.tolist()
        logits = torch.cat([self._recordings[slots[row]].logits_at(positions[row, None]) for row in rows])
        if self.aux_layers is None:
            return logits, None
        first = [at for at, slot in enumerate(slots) if at == 0 or slot != slots[at - 1]]
        pieces = zip(first, [*first[1:], len(slots)], strict=True)
        features = [self._recordings[slots[begin]].features_at(positions[begin:end]) for begin, end in pieces]
        return logits, torch.cat(features)


def replay(model: PreTrainedModel, drafter: Drafter, k: int, recordings: Sequence[Recording]) -> list[Generation]:
    """The generations of recorded requests with at most `k` draft tokens a round, without a forward of the target."""
    most, generations = drafter.max_tokens, []
    for begin in range(0, len(recordings), MAX_SLOTS):
        together = recordings[begin : begin + MAX_SLOTS]
        engine = Engine(
            _Replayed(model, drafter.aux_layers, together),
            drafter,
            num_speculative_tokens=k if most is None else min(k, most),
            num_slots=len(together),  # so that each request has the slot of its number
            verification="coupled",
            draft_sampling=DraftSampling("probabilistic"),
            eager=True,
        )
        generations += engine.generate([recording.request for recording in together])
    return generations
