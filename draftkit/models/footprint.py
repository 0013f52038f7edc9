"""What a causal LM will take of memory, from its configuration alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from draftkit.errors import UnsupportedTarget
from draftkit.models.rope import give_rows_their_rope

DEAF = "drops the model call's keyword arguments"
RECORDING = "draftkit_recording"


class Footprint(NamedTuple):
    """`parameters`: how many numbers the weights are, tied ones once. `cached`: how many a position's keys and values
    are, over all layers."""

    parameters: int
    cached: int

    def slot_bytes(self, dtype: torch.dtype, capacity: int, k: int) -> int:
        """What the model keeps of a sequence with room for `capacity` positions, of which a round may take back `k`."""
        return capacity * self.cached * dtype.itemsize


def footprint(config: PretrainedConfig) -> Footprint:
    """Run the model without memory (on torch's meta device) and see what its attention would keep.

    Raises `UnsupportedTarget` for a model that cannot be run so, or that keeps the call's arguments from its attention.
    """
    with torch.device("meta"):
        config = deepcopy(config)  # which keeps the name of its attention
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(
            config, dtype=torch.bfloat16, attn_implementation=RECORDING
        )
        model.tie_weights()
        give_rows_their_rope(model)
        recorder = Recorder()
        row = torch.zeros(1, 1, dtype=torch.int64)
        with torch.inference_mode(), _without_values(model):
            past = recorder.latents if compresses(model) else None
            model(input_ids=row, position_ids=row, past_key_values=past, use_cache=False, kv=recorder)
    return Footprint(sum(p.numel() for p in model.parameters()), recorder.cached)


@contextmanager
def _without_values(model: nn.Module) -> Iterator[None]:
    """A forward on the meta device, where tensors have shapes alone."""
    try:
        yield
    except RuntimeError as error:
        raise UnsupportedTarget(
            f"{type(model).__name__} looks at values while it runs, so that its memory cannot be planned",
            expected="a forward that can do without, as most of transformers' models",
        ) from error


def cannot_follow(module: nn.Module, problem: str) -> UnsupportedTarget:
    """Of a module that calls the attention function in another way than transformers' Llama."""
    return UnsupportedTarget(
        f"{type(module).__name__} {problem}, which draftkit's attention function cannot follow",
        expected="keys, values and keyword arguments as in transformers' Llama",
    )


class Latents:
    """What layers with multi-head latent attention would cache: content [B, 1, T, R] and rotary part [B, 1, T, P].

    It is given to the model in the place of a cache, to which such a layer hands its latents before it makes keys and
    values of them, by its method `expand_kv`, for the attention function. Until that is called they wait here.
    """

    def __init__(self) -> None:
        self.waiting: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, content: Tensor, rotary: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """As the method of transformers' `Cache`; there is nothing cached to be joined with."""
        self.waiting[layer] = content, rotary
        return content, rotary


def compresses(model: nn.Module) -> bool:
    """Whether layers of a model cache latents."""
    return any(hasattr(module, "expand_kv") for module in model.modules())


class Recorder:
    """Counts what one row would store."""

    def __init__(self) -> None:
        self.cached = 0
        self.latents = Latents()

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, None]:
        stored = self.latents.waiting.pop(int(module.layer_idx), (key, value))  # type: ignore[arg-type]
        self.cached += sum(part.numel() for part in stored)
        return query.new_empty(*query.shape[:3], value.shape[3]).transpose(1, 2), None


def _record(module: nn.Module, *tensors: Tensor, kv: Recorder | None = None, **_: object) -> tuple[Tensor, None]:
    if kv is None:
        raise cannot_follow(module, DEAF)
    return kv.attend(module, *tensors)


AttentionInterface.register(RECORDING, _record)
