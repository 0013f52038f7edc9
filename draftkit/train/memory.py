"""The memory that training takes of each device, from what is known before its first step. Activations come on top."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from draftkit.train.losses.teacher import rows_at_once

FLOAT = 4  # bytes of the numbers in which a draft is trained
RANKS = (1, 8)


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one of `ranks` devices that share a draft; on a single one nothing is sharded.

    `target`: its weights, as far as the run has them. `draft`: weights, those that are whole during a step, and the
    device's share. `gradients` likewise. `optimizer`: AdamW's two means. `states`: what the target gives for a row.
    `logits`: those of draft and target that are held at a time.
    """

    ranks: int
    target: int
    draft: int
    gradients: int
    optimizer: int
    states: int
    logits: int

    @property
    def total(self) -> int:
        return self.target + self.draft + self.gradients + self.optimizer + self.states + self.logits


def memory_of_devices(
    draft: nn.Module, target: PreTrainedModel, *, ranks: int, vocabulary: int, captured: int, tokens: int, depth: int
) -> tuple[DeviceMemory, ...]:
    """What each of 1, 8 and `ranks` devices needs for `draft`, whose frozen parameters may be the target's.

    `target`: as the run has it, with or without memory. `vocabulary`: tokens that the draft proposes among. `captured`:
    states of a token. `tokens`: of a row, each of which is drafted from `depth` times at most.
    """
    text = target.config.get_text_config()
    trained = FLOAT * sum(p.numel() for p in draft.parameters() if p.requires_grad)
    shared = {p.shape for p in target.parameters()}
    frozen = _bytes([p for p in draft.parameters() if not p.requires_grad and p.shape not in shared])
    width = text.hidden_size * target.dtype.itemsize
    logits = FLOAT * 2 * vocabulary * min(rows_at_once(vocabulary, torch.device("cuda")), tokens * depth)
    return tuple(
        DeviceMemory(
            ranks=number,
            target=_bytes([*target.parameters()]),
            draft=frozen + trained + _share(trained, number),
            gradients=trained + _share(trained, number),
            optimizer=2 * trained // number,
            states=captured * width * tokens,
            logits=logits,
        )
        for number in sorted({*RANKS, ranks})
    )


def _share(whole: int, ranks: int) -> int:
    """What a device keeps beside what is whole for a while; nothing where it has all of it anyway."""
    return 0 if ranks == 1 else whole // ranks


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
