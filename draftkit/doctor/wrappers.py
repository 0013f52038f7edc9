"""Thin changes of what a draft is given, where no fact of the spec says them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from draftkit.models.eagle import EagleOutput
from draftkit.models.target import AuxLayers, Target, TargetOutput
from draftkit.runtime.drafters.eagle import EagleDrafter
from draftkit.runtime.drafters.eagle_parallel import PEagleDrafter
from draftkit.runtime.drafters.protocol import Committed


class TargetWithFeatures(Target):
    """A target whose features [B, T, F] are changed before the drafter sees them."""

    def __init__(self, model: PreTrainedModel, aux_layers: AuxLayers | None, change: Callable[[Tensor], Tensor]):
        super().__init__(model, aux_layers)
        self.change = change

    def forward(self, *args: Any, **others: Any) -> TargetOutput:
        output = super().forward(*args, **others)
        assert output.features is not None
        return output._replace(features=self.change(output.features))


class _Shift:
    """Moves the positions of the rows where `rows` [B, T] is true before they are rotated; the cache sees no change."""

    def __init__(self, rotary: nn.Module, by: int):
        self.by = by
        self.rows: Tensor | None = None
        rotary.register_forward_pre_hook(self._moved)

    def _moved(self, _module: nn.Module, args: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, positions = args
        return hidden, positions if self.rows is None else (positions + self.by * self.rows).clamp(min=0)


class ShiftedFeedback(EagleDrafter):
    """The rows that a draft makes of its own feedback are rotated as if they were `by` positions later."""

    def __init__(self, drafter: EagleDrafter, by: int):
        super().__init__(drafter.model)
        self.shift = _Shift(drafter.model.rotary, by)

    def _pass(self, committed: Committed, tokens: Tensor, hidden: Tensor, positions: Tensor) -> EagleOutput:
        # A round's first pass has the rows of all K + 1 tokens that may have been committed, each further one its own.
        self.shift.rows = (positions >= 0) if tokens.shape[1] == 1 else None
        output = super()._pass(committed, tokens, hidden, positions)
        self.shift.rows = None  # the next prompt's rows are true ones
        return output


class ShiftedMasks(PEagleDrafter):
    """The mask rows of a parallel draft are rotated as if they were `by` positions later."""

    def __init__(self, drafter: PEagleDrafter, by: int):
        super().__init__(drafter.model)
        self.shift = _Shift(drafter.model.rotary, by)

    def _pass(self, committed: Committed, tokens: Tensor, hidden: Tensor, positions: Tensor) -> EagleOutput:
        self.shift.rows = tokens == self.mask_token_id
        output = super()._pass(committed, tokens, hidden, positions)
        self.shift.rows = None
        return output
