"""What a causal LM will take of memory, from its configuration alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from draftkit.errors import UnsupportedTarget
from draftkit.targets.attention import SUPPORTED, Latents, check_attention, chooses, compresses, required
from draftkit.targets.pretrained import empty_model
from draftkit.targets.recurrent import (
    NoStates,
    Recurrence,
    StateCache,
    cache_argument,
    keeps_states,
    layers_with_states,
    sizes_of,
)
from draftkit.targets.recurrent_probe import find_recurrences
from draftkit.targets.rope import give_rows_their_rope
from draftkit.targets.states import decoder_layers, decoder_of

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


def activation_bytes(
    config: PretrainedConfig, rows: int, dtype: torch.dtype, recurrences: Sequence[Recurrence] = ()
) -> int:
    """What a forward of `rows` rows holds at once beside weights and cache: a layer's residual and its norm, and the
    most that its attention, its MLP or its states add.

    Attention: queries, keys and values before and after their rotation; an MLP: gate, up, and their product; experts:
    of each that a row is sent to, four as wide as the row, before and after, and four as wide as the expert. A module
    with states, as transformers computes it without the packages that are made for it: 16 numbers in float32 for
    each that is fed into a matrix of states, and 4 for each state of other modules.
    """
    hidden, heads = largest(config, "hidden_size"), largest(config, "num_attention_heads")
    groups = largest(config, "num_key_value_heads") or heads
    latent = largest(config, "kv_lora_rank") + largest(config, "qk_rope_head_dim")
    width = max(largest(config, "head_dim") or hidden // max(heads, 1), latent)
    mlp = 3 * (largest(config, "intermediate_size") or 4 * hidden)
    if each := largest(config, "moe_intermediate_size"):
        mlp = max(mlp, max(largest(config, "num_experts_per_tok"), 1) * 4 * (hidden + each))
    layer = 2 * hidden + max(2 * (heads + 2 * groups) * width, mlp)
    states = max((_computed_with(shape) for shape, _ in _recurrent_states(recurrences)), default=0)
    return rows * max(layer * dtype.itemsize, 2 * hidden * dtype.itemsize + states * torch.float32.itemsize)


def state_bytes(recurrences: Sequence[Recurrence]) -> int:
    """What the largest state of a sequence takes."""
    return max((shape.numel() * dtype.itemsize for shape, dtype in _recurrent_states(recurrences)), default=0)


def _recurrent_states(recurrences: Sequence[Recurrence]) -> Iterator[tuple[torch.Size, torch.dtype]]:
    """The states that are no last few rows of a convolution."""
    for recurrence in recurrences:
        yield from (state for key, state in recurrence.states.items() if key.kind == "recurrent")


def _computed_with(state: torch.Size) -> int:
    """The numbers that a row takes while a state is computed."""
    return 16 * state.numel() // min(state[-2:]) if len(state) > 2 else 4 * state.numel()


def largest(config: PretrainedConfig, name: str) -> int:
    """The largest number that the configuration of a language model states under a name for any of its layers, be it
    that of older models for the same; 0 where it states none."""
    text = config.get_text_config()
    stated, own = text.to_dict(), text.attribute_map.get(name, name)
    found = [part.get(own) for part in (stated, *(stated.get("per_layer_config") or {}).values())]
    numbers = [number for value in found for number in (value if isinstance(value, list) else [value])]
    return max((number for number in numbers if isinstance(number, int)), default=0)


def footprint(config: PretrainedConfig) -> Footprint:
    """Run the model without memory (on torch's meta device) and see what its layers would keep.

    Raises `UnsupportedTarget` for a model that cannot be run so, or whose layers look back as draftkit does not know.
    """
    model = empty_model(config, PROBED, RECORDING)
    for part in model.modules():  # which look for padding in the tokens
        if isinstance(part, PreTrainedModel):
            part.warn_if_padding_and_no_attention_mask = _no_warning
    model.eval().requires_grad_(False)
    if any(hasattr(part, "create_position_ids_from_input_ids") for part in decoder_of(model).modules()):
        raise UnsupportedTarget(f"{type(model).__name__} counts its positions itself", expected="positions from 0 on")
    recurrences: tuple[Recurrence, ...] = ()
    with torch.device("meta"), _without_values(model):
        give_rows_their_rope(model)
        recorder = _run(model, 1)
        if layers_with_states(config):
            recurrences = find_recurrences(model, sizes_of(config), partial(_run, model))
    check_attention(model, len(decoder_layers(decoder_of(model))), recorder.windows)
    _check_states(model, recurrences)
    return Footprint(sum(p.numel() for p in model.parameters()), recorder.cached, recurrences)


def _no_warning(*_: object) -> None: ...


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
    mask = recorder.mask if chooses(model.config) else None
    model(input_ids=tokens, attention_mask=mask, position_ids=tokens, use_cache=False, kv=recorder, **past)
    return recorder


def _check_states(model: PreTrainedModel, recurrences: Sequence[Recurrence]) -> None:
    """Every layer must have left its states in the cache, as its kind has it."""
    with_states = {key.layer for recurrence in recurrences for key in recurrence.states}
    for layer, kind in enumerate(getattr(model.config.get_text_config(), "layer_types", None) or ()):
        if keeps_states(kind) and layer not in with_states:
            raise UnsupportedTarget(
                f"layer {layer} of {type(model).__name__} keeps its state elsewhere than in transformers' cache",
                expected=SUPPORTED,
            )


@contextmanager
def _without_values(model: nn.Module) -> Iterator[None]:
    """Forwards on the meta device, where tensors have shapes alone.

    Parts of the model that look at values, such as experts that are chosen on the host, do nothing; not those with a
    part that knows its layer, which may keep something.
    """
    looked: list[RuntimeError] = []

    def passed_over(forward: Callable[..., object], *args: object, **kwargs: object) -> object:
        try:
            return forward(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError) as error:
            rows = args[0] if args else kwargs.get("hidden_states")
            if isinstance(error, RuntimeError):
                looked.append(error)
            if not looked or not isinstance(rows, Tensor):
                raise
            return torch.empty_like(rows)

    for module in model.modules():
        if not any(hasattr(part, "layer_idx") for part in module.modules()):
            module.forward = partial(passed_over, module.forward)
    try:
        yield
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        if looked or isinstance(error, RuntimeError):
            raise UnsupportedTarget(
                f"{type(model).__name__} looks at values while it runs, so that its memory cannot be planned",
                expected="a forward that can do without, as most of transformers' models",
            ) from error
        raise UnsupportedTarget(
            f"{type(model).__name__} does not run without transformers' own cache: {error}", expected=SUPPORTED
        ) from error


class Recorder:
    """Counts what one row would store. `windows` and `whole` as of `KeyValues`."""

    whole = False

    def __init__(self) -> None:
        self.cached = 0
        self.mask = torch.zeros(1, 1, 1, 1)
        self.windows: dict[int, int | None] = {}
        self.latents = Latents(self.store_index)

    def store_index(self, layer: int, key: Tensor) -> Tensor:
        self.cached += key.numel()
        return key

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, window: int | None
    ) -> tuple[Tensor, None]:
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        stored = self.latents.waiting.pop(layer, (key, value))
        self.cached += sum(part.numel() for part in stored)
        self.windows.setdefault(layer, window)
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
