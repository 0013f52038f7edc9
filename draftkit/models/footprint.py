"""What a causal LM will take of memory, from its configuration alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig

from draftkit.errors import UnsupportedTarget
from draftkit.models.attention import (
    Latents,
    check_attention,
    chooses,
    compresses,
    note_layer,
    required,
)
from draftkit.models.pretrained import empty_model
from draftkit.models.rope import give_rows_their_rope
from draftkit.models.states import decoder_layers, decoder_of

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

    Raises `UnsupportedTarget` for a model that cannot be run so, or whose layers attend as draftkit does not know.
    """
    model = empty_model(config, torch.bfloat16, RECORDING)
    model.config.get_text_config().pad_token_id = None  # which GPT-2 looks for in the tokens
    with torch.device("meta"):
        give_rows_their_rope(model)
        recorder = Recorder()
        recorder.pass_over(model)
        row = torch.zeros(1, 1, dtype=torch.int64)
        with torch.inference_mode(), _without_values(model):
            past = recorder.latents if compresses(model) else None
            model(
                input_ids=row,
                attention_mask=recorder.mask if chooses(config) else None,
                position_ids=row,
                past_key_values=past,
                use_cache=False,
                kv=recorder,
            )
    check_attention(model, len(decoder_layers(decoder_of(model))), recorder.windows)
    return Footprint(sum(p.numel() for p in model.parameters()), recorder.cached)


@contextmanager
def _without_values(model: nn.Module) -> Iterator[None]:
    """A forward on the meta device, where tensors have shapes alone."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedTarget(
            f"{type(model).__name__} looks at values while it runs, so that its memory cannot be planned",
            expected="a forward that can do without, as most of transformers' models",
        ) from error


class Recorder:
    """Counts what one row would store. `windows` as of `KeyValues`."""

    def __init__(self) -> None:
        self.cached = 0
        self.mask = torch.zeros(1, 1, 1, 1)
        self.windows: dict[int, int | None] = {}
        self.latents = Latents(self.store_index)

    def pass_over(self, model: nn.Module) -> None:
        """Have parts of a model that look at values, such as experts that are chosen on the host, do nothing.

        Not those with a part that knows its layer, which may keep something.
        """
        for module in model.modules():
            if not any(hasattr(part, "layer_idx") for part in module.modules()):
                module.forward = partial(self._passed_over, module.forward)

    def _passed_over(self, forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        before = self.cached
        try:
            return forward(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError):
            rows = args[0] if args else kwargs.get("hidden_states")
            if self.cached > before or not isinstance(rows, Tensor):
                raise
            return torch.empty_like(rows)

    def store_index(self, layer: int, key: Tensor) -> Tensor:
        self.cached += key.numel()
        return key

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, window: int | None
    ) -> tuple[Tensor, None]:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        stored = self.latents.waiting.pop(layer, (key, value))
        self.cached += sum(part.numel() for part in stored)
        note_layer(self.windows, layer, window)
        return query.new_empty(*query.shape[:3], value.shape[3]).transpose(1, 2), None


def _record(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    *,
    kv: Recorder | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **rest: object,
) -> tuple[Tensor, None]:
    kv = required(kv, module, attention_mask, rest)
    return kv.attend(module, query, key, value, sliding_window)


AttentionInterface.register(RECORDING, _record)
