"""What only EAGLE-style drafts can have: positions of rows of their own, and the bias of `fc`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from draftkit.doctor.patient import Patient, Setup, changed
from draftkit.doctor.trial import Trial, experiment, with_facts
from draftkit.layout.facts import with_facts as other_facts
from draftkit.models.chain import ChainOutput
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.drafters.eagle import EagleDrafter, PEagleDrafter
from draftkit.runtime.drafters.protocol import Committed
from draftkit.targets.states import FINAL, AuxLayers
from draftkit.targets.target import Target

BIAS_ROUNDS = 2  # of estimating what fc.bias was; the draft's layer answers to it almost linearly


@experiment("positions", "rotary positions")
def positions(patient: Patient) -> Iterator[Trial]:
    """The rows that the draft adds itself, one position later or earlier. All rows alike would change nothing."""
    for by in (1, -1) if "token_entry" in patient.facts else ():
        yield Trial(
            f"own rows {by:+} position",
            partial(_shifted, patient, by),
            {},
            "the draft was trained with other positions than engines give its own rows: it has to be trained anew",
        )


def _shifted(patient: Patient, by: int) -> Setup:
    setup = patient.setup()
    drafter = setup.drafter
    assert isinstance(drafter, EagleDrafter)
    shifted = ShiftedMasks(drafter, by) if isinstance(drafter, PEagleDrafter) else ShiftedFeedback(drafter, by)
    return setup._replace(drafter=shifted)


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

    def _pass(self, committed: Committed, tokens: Tensor, hidden: Tensor, positions: Tensor) -> ChainOutput:
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

    def _pass(self, committed: Committed, tokens: Tensor, hidden: Tensor, positions: Tensor) -> ChainOutput:
        self.shift.rows = tokens == self.mask_token_id
        output = super()._pass(committed, tokens, hidden, positions)
        self.shift.rows = None
        return output


@experiment("fc-bias", "fc.bias, or the target's next state as what it learns")
def fusion_bias(patient: Patient) -> Iterator[Trial]:
    """fc.bias left out; or where there is none, the one with which the draft's states have the target's mean."""
    facts = patient.facts
    if facts.get("fusion_bias"):
        yield with_facts(patient, fusion_bias=False)
    elif facts.get("token_entry") == "fusion" and facts["aux_layer_ids"] is None and not facts["final_norm"]:
        yield Trial(
            "fc.bias estimated from the target's states",
            lambda: _with_estimated_bias(patient),
            {},
            "the checkpoint has lost its fc.bias: get the file that has it, and convert it again",
        )


def _with_estimated_bias(patient: Patient) -> Setup:
    """An EAGLE-1 draft is trained to give the target's next state: the mean of what is missing is its bias."""
    biased = other_facts(patient.architecture, fusion_bias=True)
    bias = torch.zeros(patient.draft.tensors["fc.weight"].shape[0])
    for _ in range(BIAS_ROUNDS):
        setup = patient.setup(changed(patient.draft, biased, {"fc.bias": bias}))
        assert isinstance(setup.drafter, EagleDrafter)
        bias = bias + _mean_shortfall(patient, setup.drafter)
    return patient.setup(changed(patient.draft, biased, {"fc.bias": bias}))


@torch.inference_mode()
def _mean_shortfall(patient: Patient, drafter: EagleDrafter) -> Tensor:
    """The mean difference from the draft's states to the target's on the prompts: float32 [H]."""
    target, missing = Target(patient.model, AuxLayers((FINAL,))), []
    for request in patient.requests:
        tokens = torch.tensor([request.prompt], device=target.device)
        length = tokens.shape[1]
        slots, positions = tokens.new_zeros(1), torch.arange(length, device=target.device)[None]
        rows = SlotCache(1, length).rows(slots, positions, length, prompt=True)
        features = target.forward(tokens, positions, rows).features
        assert features is not None
        rows = SlotCache(1, length).rows(slots, positions[:, 1:] - 1, length)
        states = drafter.model(tokens[:, 1:], features[:, :-1], positions[:, 1:] - 1, kv=rows).head_input
        missing.append((features[:, 1:] - states)[0])
    return torch.cat(missing).float().mean(0).cpu()
