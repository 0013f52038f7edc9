"""What a causal LM will take of memory, from its configuration alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from draftkit.errors import UnsupportedTarget
from draftkit.models.recurrent import (
    NoStates,
    Recurrence,
    StateCache,
    attends,
    cache_argument,
    keeps_states,
    layers_with_states,
    sizes_of,
)
from draftkit.models.recurrent_probe import find_recurrences
from draftkit.models.rope import give_rows_their_rope

SUPPORTED = "layers that look back by softmax attention over keys and values, or by states in transformers' cache"
DEAF = "drops the model call's keyword arguments"
RECORDING = "draftkit_recording"
PROBED = torch.bfloat16  # the dtype of a model that is run without memory


class Footprint(NamedTuple):
    """`parameters`: how many numbers the weights are, tied ones once. `cached`: how many a position's keys and values
    are, over all layers. `recurrences`: the modules that keep states."""

    parameters: int
    cached: int
    recurrences: tuple[Recurrence, ...]

    def slot_bytes(self, dtype: torch.dtype, capacity: int, k: int) -> int:
        """What the model keeps of a sequence with room for `capacity` positions, of which a round may take back `k`."""
        return capacity * self.cached * dtype.itemsize + (k + 1) * self._state_bytes(dtype)

    def _state_bytes(self, dtype: torch.dtype) -> int:
        """What the states after one position take. Some are in float32 whatever the model's dtype is."""
        states = [state for recurrence in self.recurrences for state in recurrence.states.values()]
        return sum(shape.numel() * (dtype if own == PROBED else own).itemsize for shape, own in states)


def footprint(config: PretrainedConfig) -> Footprint:
    """Run the model without memory (on torch's meta device) and see what its attention would keep.

    Raises `UnsupportedTarget` for a model that cannot be run so, or that keeps the call's arguments from its attention.
    """
    key = type(config), config.to_json_string(use_diff=False)
    if key not in _FOUND:
        _FOUND[key] = _footprint(config)
    return _FOUND[key]


_FOUND: dict[tuple[type[PretrainedConfig], str], Footprint] = {}  # by configuration


def _footprint(config: PretrainedConfig) -> Footprint:
    with torch.device("meta"):
        config = deepcopy(config)  # which keeps the name of its attention
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]._from_config(
            config, dtype=PROBED, attn_implementation=RECORDING
        )
        model.tie_weights()
        give_rows_their_rope(model)
        model.eval().requires_grad_(False)
        with _without_values(model):
            recorder = _run(model, 1)
            recurrences: tuple[Recurrence, ...] = ()
            if layers_with_states(config):
                recurrences = find_recurrences(model, sizes_of(config), partial(_run, model))
                _check_hybrid(model, recurrences, recorder)
    return Footprint(sum(p.numel() for p in model.parameters()), recorder.cached, recurrences)


def _run(model: PreTrainedModel, rows: int, cache: StateCache | None = None) -> Recorder:
    """A forward of one text."""
    recorder = Recorder()
    latents = recorder.latents if compresses(model) else None
    if cache is None and layers_with_states(model.config):
        cache = StateCache(sizes_of(model.config), NoStates())
    if cache is not None:
        cache.latents = latents
    past = {cache_argument(type(model)): latents if cache is None else cache}
    tokens = torch.zeros(1, rows, dtype=torch.int64)
    model(input_ids=tokens, position_ids=tokens, use_cache=False, kv=recorder, **past)
    return recorder


def _check_hybrid(model: PreTrainedModel, recurrences: Sequence[Recurrence], recorder: Recorder) -> None:
    """Every layer must have left its states in the cache, and attended, as its kind has it."""
    with_states = {key.layer for recurrence in recurrences for key in recurrence.states}
    for layer, kind in enumerate(model.config.get_text_config().layer_types):
        if keeps_states(kind) and layer not in with_states:
            problem = "keeps its state elsewhere than in transformers' cache"
        elif attends(kind) and layer not in recorder.layers:
            problem = "does not attend through transformers' AttentionInterface"
        else:
            continue
        raise UnsupportedTarget(f"layer {layer} of {type(model).__name__} {problem}", expected=SUPPORTED)


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
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UnsupportedTarget(
            f"{type(model).__name__} does not run without transformers' own cache: {error}", expected=SUPPORTED
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
    """Counts what one row would store. `layers`: those that have attended."""

    def __init__(self) -> None:
        self.cached = 0
        self.layers: set[int] = set()
        self.latents = Latents()

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, None]:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        self.layers.add(layer)
        stored = self.latents.waiting.pop(layer, (key, value))
        self.cached += sum(part.numel() for part in stored)
        return query.new_empty(*query.shape[:3], value.shape[3]).transpose(1, 2), None


def _record(module: nn.Module, *tensors: Tensor, kv: Recorder | None = None, **_: object) -> tuple[Tensor, None]:
    if kv is None:
        raise cannot_follow(module, DEAF)
    return kv.attend(module, *tensors)


AttentionInterface.register(RECORDING, _record)
