"""What a causal LM will take of memory, from its configuration alone."""

from __future__ import annotations

from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

RECORDING = "draftkit_recording"


class Footprint(NamedTuple):
    """`parameters`: how many numbers the weights are, tied ones once. `cached`: how many a position's keys and values
    are, over all layers."""

    parameters: int
    cached: int


def footprint(config: PretrainedConfig) -> Footprint:
    """Run the model without memory (on torch's meta device) and see what its attention would keep."""
    with torch.device("meta"):
        config = deepcopy(config)  # which keeps the name of its attention
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(
            config, dtype=torch.bfloat16, attn_implementation=RECORDING
        )
        model.tie_weights()
        recorder = Recorder()
        row = torch.zeros(1, 1, dtype=torch.int64)
        with torch.inference_mode():
            model(input_ids=row, position_ids=row, use_cache=False, kv=recorder)
    return Footprint(sum(p.numel() for p in model.parameters()), recorder.cached)


class Recorder:
    """Counts what one row would store."""

    def __init__(self) -> None:
        self.cached = 0

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, None]:
        self.cached += key.numel() + value.numel()
        return query.new_empty(*query.shape[:3], value.shape[3]).transpose(1, 2), None


def _record(*tensors: object, kv: Recorder, **options: object) -> tuple[Tensor, None]:
    return kv.attend(*tensors, **options)  # type: ignore[arg-type]


AttentionInterface.register(RECORDING, _record)
