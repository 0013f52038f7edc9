"""The memory that training takes of each device, from what is known before its first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from draftkit.train.losses.teacher import rows_at_once

FLOAT = 4  # bytes of the numbers in which a draft is trained
RANKS = (1, 8)
WIDEST = 3  # what an MLP holds of its width at a time: gate, up, and their product


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one of `ranks` devices that share a draft; on a single one nothing is sharded.

    `target`: its weights, as far as the run has them. `draft`: weights, those that are whole during a step, and the
    device's share. `gradients` likewise. `optimizer`: what it keeps of each weight. `states`: what the target gives for
    a row. `logits`: those of draft and target that are held at a time. `activations`: what a step keeps for its
    backward pass; `target_activations`: those of the target's widest layer, for a moment, where it runs here.
    """

    ranks: int
    target: int
    draft: int
    gradients: int
    optimizer: int
    states: int
    logits: int
    activations: int
    target_activations: int

    @property
    def total(self) -> int:
        weights = self.target + self.draft + self.gradients + self.optimizer
        return weights + self.states + self.logits + self.activations + self.target_activations


def memory_of_devices(
    draft: nn.Module,
    target: PreTrainedModel,
    *,
    layers: Sequence[nn.Module] = (),
    kept: int,
    ranks: int,
    vocabulary: int,
    captured: int,
    tokens: int,
    depth: int,
    activations: int,
    runs_target: bool,
) -> tuple[DeviceMemory, ...]:
    """What each of 1, 8 and `ranks` devices needs for `draft`, whose frozen parameters may be the target's.

    `kept`: the numbers that its optimizer keeps. `target`: as the run has it, with or without memory, and `runs_target`
    whether it runs there. `vocabulary`: tokens that the draft proposes among. `captured`: states of a token. `tokens`:
    of a row, each of which is drafted from `depth` times at most. `layers`: those of the draft that are gathered one by
    one where it is sharded, each while the one before it is still there.
    """
    text = target.config.get_text_config()
    trained = _trained(draft)
    of_layers = sorted(map(_trained, layers))
    together = trained - sum(of_layers[:-2])  # of several devices
    widest = WIDEST * getattr(text, "intermediate_size", 4 * text.hidden_size) * target.dtype.itemsize * tokens
    shared = {p.shape for p in target.parameters()}
    frozen = _bytes([p for p in draft.parameters() if not p.requires_grad and p.shape not in shared])
    width = text.hidden_size * target.dtype.itemsize
    logits = FLOAT * 2 * vocabulary * min(rows_at_once(vocabulary, torch.device("cuda")), tokens * depth)
    return tuple(
        DeviceMemory(
            ranks=number,
            target=_bytes([*target.parameters()]),
            draft=frozen + (trained if number == 1 else together + trained // number),
            gradients=trained if number == 1 else together + trained // number,
            optimizer=FLOAT * kept // number,
            states=captured * width * tokens,
            logits=logits,
            activations=activations,
            target_activations=widest if runs_target else 0,
        )
        for number in sorted({*RANKS, ranks})
    )


def _trained(module: nn.Module) -> int:
    return FLOAT * sum(p.numel() for p in module.parameters() if p.requires_grad)


def _bytes(tensors: Sequence[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
