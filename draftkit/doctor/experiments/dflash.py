"""What only block drafters can have: blocks of more or fewer rows than they were trained with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from torch import Tensor

from draftkit.doctor.patient import Patient, Setup
from draftkit.doctor.trial import Trial, experiment
from draftkit.layout.families.dflash import DFlashSpec
from draftkit.runtime.drafters.dflash import DFlashDrafter
from draftkit.runtime.drafters.protocol import Committed

SIZES = (16, 10, 8, 7, 5)  # rows of published blocks; of those that accept alike, the largest drafts most


@experiment("block-size", "rows that see the later ones of their block")
def block_size(patient: Patient) -> Iterator[Trial]:
    """Whole blocks of the draft's size, of which as many tokens are drafted as now, and blocks of other sizes."""
    if not patient.architecture.fixed_length:
        return
    spec = patient.architecture.expect(DFlashSpec)
    own, rows_now = spec.block_size, patient.k + spec.block_size - spec.draft_tokens
    for rows in dict.fromkeys((own, *SIZES)):
        if rows == rows_now:
            continue
        if rows == own:
            change = f"whole blocks of {own} rows"
            advice = f"serve it with K = {spec.draft_tokens}, for which its block is made: rows see the later masks"
            yield Trial(change, partial(_whole_blocks, patient, spec), {}, advice)
        else:
            other = replace(spec, block_size=rows)
            yield Trial(f"blocks of {rows} rows", partial(_whole_blocks, patient, other), {"block_size": str(rows)}, "")


def _whole_blocks(patient: Patient, spec: DFlashSpec) -> Setup:
    setup = patient.setup()
    assert isinstance(setup.drafter, DFlashDrafter)
    return setup._replace(drafter=WholeBlocks(setup.drafter, patient.num_layers, spec.draft_tokens))


class WholeBlocks(DFlashDrafter):
    """Every block has the rows of `most` draft tokens, though fewer may be drafted."""

    def __init__(self, drafter: DFlashDrafter, num_layers: int, most: int):
        super().__init__(drafter.model, num_layers)
        self.max_tokens = self._most = most
        kept = drafter.slot_bytes
        self.slot_bytes = kept and (lambda capacity, k: kept(capacity + most, k))

    def allocate(self, num_slots: int, capacity: int, k: int) -> None:
        super().allocate(num_slots, capacity + self._most, k)

    def _block(self, committed: Committed, anchor: Tensor, k: int) -> Tensor:
        surplus = self._most - k
        longer = committed._replace(length=committed.length + surplus)
        output = super()._block(longer, anchor, self._most)
        return output[:, : output.shape[1] - surplus]
