"""Modules that fold a text into a state of fixed size: linear attention, state spaces, short convolutions.

A state cannot be shortened as keys and values can, so that of every row is kept, and a rejected token is undone by
going on from an earlier row's. For that such a module runs row by row, through the path that transformers' own
decoding takes; what it multiplies its rows with on their way in and out, most of its weights, is done for all at once.
What a module keeps is what it gives to transformers' `Cache` (`recurrent_probe.py` finds out).

B sequences, T rows, H width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

StateKind = Literal["conv", "recurrent"]
NOTHING_KEPT = {"moe", "mlp"}  # kinds of layers that some releases of transformers give an empty recurrent cache


class StateKey(NamedTuple):
    """One of the states of a layer, as transformers' `Cache` tells them apart."""

    layer: int
    kind: StateKind
    number: int


@dataclass(frozen=True)
class Recurrence:
    """A module with states, as found by `recurrent_probe`.

    `name` is the module's name in the model, `states` have the shapes and dtypes of one sequence. `input_projections`
    names the linear layers inside the module that read its own input; `output_projection` the one that gives its
    output. `resumes` says whether the module goes on from a state with several rows at a time, or must take them one
    by one.
    """

    name: str
    states: dict[StateKey, tuple[torch.Size, torch.dtype]]
    input_projections: tuple[str, ...]
    output_projection: str | None
    resumes: bool


class KeptStates(Protocol):
    """Where the rows of one forward find the states before them, and leave their own."""

    @property
    def at_once(self) -> bool:
        """Whether only the states after the last rows are wanted, as of a prompt or a piece of it."""

    @property
    def begins(self) -> bool:
        """Whether only the last states are wanted and none comes before the first rows, as of a whole prompt."""

    def load(self, key: StateKey) -> Tensor | None:
        """The states [B, …] before the first rows, in memory of their own; None where none has ever been kept."""

    def keep(self, key: StateKey, state: Tensor, row: int) -> None:
        """Keep the states [B, …] after a row; −1 is the last one."""


class NoStates:
    """`KeptStates` of a text that begins, and is not gone on with."""

    at_once = begins = True

    def load(self, key: StateKey) -> None:
        return None

    def keep(self, key: StateKey, state: Tensor, row: int) -> None:
        pass


class LatentCache(Protocol):
    """What layers with multi-head latent attention hand their latents to (`attention.Latents`)."""

    def update(self, content: Tensor, rotary: Tensor, layer: int) -> tuple[Tensor, Tensor]: ...


def cache_argument(model: type[nn.Module]) -> str:
    """What the forward of a causal LM calls its `Cache`."""
    parameters = signature(model.forward).parameters
    return "past_key_values" if "past_key_values" in parameters else "cache_params"


def keeps_states(kind: str) -> bool:
    """Whether transformers keeps states for layers of a kind, as configurations call it."""
    return kind not in NOTHING_KEPT and issubclass(_cache_class(kind), LinearAttentionCacheLayerMixin)


def attends(kind: str) -> bool:
    """Whether transformers keeps keys and values for these layers."""
    return issubclass(_cache_class(kind), CacheLayerMixin)


def _cache_class(kind: str) -> type:
    return DYNAMIC_LAYER_TYPE_MAPPING.get(kind, object)


def layers_with_states(config: PretrainedConfig) -> dict[int, int]:
    """The layers that transformers keeps states for, with how many of a sort each has."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None) or []
    if not any(map(keeps_states, kinds)):
        return {}
    layers: list[Any] = DynamicCache(config=text).layers
    return {number: layers[number].number_of_states for number, kind in enumerate(kinds) if keeps_states(kind)}


def sizes_of(config: PretrainedConfig) -> list[int]:
    """How many states of a sort each layer has, 1 where it has none."""
    layers = layers_with_states(config)
    return [layers.get(layer, 1) for layer in range(config.get_text_config().num_hidden_layers)]


class _Layer(LinearAttentionLayer):
    """The recurrent states of one layer, as transformers' modules ask for them."""

    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_: object) -> Tensor:
        """Take the tensor as it is, where transformers copies it."""
        self.recurrent_states[state_idx] = recurrent_states
        self.is_recurrent_states_initialized[state_idx] = True
        return recurrent_states

    def set(self, key: StateKey, state: Tensor) -> None:
        self.has_previous_state[key.number] = True
        if key.kind == "conv":
            self.conv_states[key.number] = state
            self.is_conv_states_initialized[key.number] = True
            self.conv_kernel_size[key.number] = state.shape[-1]
        else:
            self.update_recurrent_state(state, key.number)

    def get(self, key: StateKey) -> Tensor:
        state = self._of(key.kind)[key.number]
        assert state is not None
        return state

    def drop(self, key: StateKey) -> None:
        self._of(key.kind)[key.number] = None

    def _of(self, kind: StateKind) -> dict[int, Tensor | None]:
        return self.conv_states if kind == "conv" else self.recurrent_states


class StateCache(Cache):
    """The `Cache` of one forward, which keeps nothing itself. `sizes` as of `sizes_of`; `latents`: None for none."""

    def __init__(self, sizes: Sequence[int], states: KeptStates, latents: LatentCache | None = None):
        super().__init__(layers=[_Layer(number_of_states=size) for size in sizes])
        self.states = states
        self.latents = latents
        self.layer: int | None = None  # whose module is at work

    def load(self, keys: Iterable[StateKey]) -> None:
        """Let a module that has these states begin."""
        for key in keys:
            self.layer = key.layer
            state = None if self.states.begins else self.states.load(key)
            if state is not None:
                self.layers[key.layer].set(key, state)

    def keep(self, keys: Iterable[StateKey], row: int) -> None:
        for key in keys:
            self.states.keep(key, self.layers[key.layer].get(key), row)

    def drop(self, keys: Iterable[StateKey]) -> None:
        """Free what a module that is done has read and left; it is kept elsewhere."""
        for key in keys:
            self.layers[key.layer].drop(key)

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Leave keys and values to the attention function."""
        return (keys, values) if self.latents is None else self.latents.update(keys, values, layer_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Answer for a layer; some modules mean their own where they name none."""
        layer = self.layer if layer_idx is None else layer_idx
        return layer is not None and super().has_previous_state(layer, state_idx)

    def get_linear_cache(self, layer: int) -> Tensor | None:
        """The method of that name of `MiniMaxCache`."""
        return self.layers[layer].recurrent_states[0]

    def set_linear_cache(self, layer: int, state: Tensor) -> None:
        self.update_recurrent_state(state, layer)


def run_row_by_row(model: nn.Module, find: Callable[[], Sequence[Recurrence]]) -> list[Recurrence]:
    """Replace the forwards of a model's recurrent modules, unless that is done; `find` says which they are."""
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    done = [forward.recurrence for forward in forwards if isinstance(forward, RowByRow)]
    found = done or list(find())
    for recurrence in found if not done else []:
        module = model.get_submodule(recurrence.name)
        module.forward = RowByRow(module, recurrence)
    return found


class RowByRow:
    """The forward of a recurrent module, which leaves the state after every row in the call's `StateCache`."""

    def __init__(self, module: nn.Module, recurrence: Recurrence):
        self.module = module
        self.whole = module.forward
        self.recurrence = recurrence

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        cache = next((value for value in (*args, *kwargs.values()) if isinstance(value, StateCache)), None)
        if cache is None:
            return self.whole(*args, **kwargs)
        kwargs.pop("kv", None)  # which some kernels would be handed
        hidden = rows_of(args, kwargs)
        states = cache.states
        cache.load(self.recurrence.states)
        if hidden.shape[1] == 1 or states.begins or (states.at_once and self.recurrence.resumes):
            output = self.whole(*args, **kwargs)
            cache.keep(self.recurrence.states, -1)
        else:
            output = self._row_by_row(args, kwargs, hidden, cache)
        cache.drop(self.recurrence.states)
        return output

    def _row_by_row(self, args: Any, kwargs: Any, hidden: Tensor, cache: StateCache) -> Any:
        batch, rows = hidden.shape[:2]
        names, last_name = self.recurrence.input_projections, self.recurrence.output_projection
        last = None if last_name is None else self.module.get_submodule(last_name)
        linears = map(self.module.get_submodule, names)  # looked up now, as adapters may have come in between
        projected = [(linear, linear(hidden)) for linear in linears]
        outputs = []
        for row in range(rows):
            of_row = partial(_row, row=row, batch=batch, rows=rows)
            given = {linear: of_row(whole) for linear, whole in projected}
            with _giving(given, last):
                outputs.append(self.whole(*map(of_row, args), **{name: of_row(arg) for name, arg in kwargs.items()}))
            cache.keep(self.recurrence.states, row)
        if not isinstance(outputs[0], tuple):
            return _joined(outputs, last)
        first, *rest = zip(*outputs, strict=True)
        return _joined(first, last), *(_along_rows(values) for values in rest)


def rows_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states [B, T, H] that a module of transformers is called with."""
    return kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]


def _joined(outputs: Sequence[Tensor], last: nn.Module | None) -> Tensor:
    joined = torch.cat(list(outputs), dim=1)
    return joined if last is None else last(joined)


def _along_rows(values: tuple[Any, ...]) -> Any:
    """A further output of a module: one for every row, or the last of what is none."""
    of_rows = isinstance(values[0], Tensor) and values[0].dim() > 1 and values[0].shape[1] == 1
    return torch.cat(values, dim=1) if of_rows else values[-1]


def _row(value: Any, row: int, batch: int, rows: int) -> Any:
    """An argument as a single row has it; what does not go by rows is left."""
    if isinstance(value, tuple):
        return tuple(_row(item, row, batch, rows) for item in value)
    by_rows = isinstance(value, Tensor) and value.dim() > 1 and value.shape[0] in (1, batch) and value.shape[1] == rows
    return value[:, row : row + 1] if by_rows else value


@contextmanager
def _giving(outputs: dict[nn.Module, Tensor], last: nn.Module | None) -> Iterator[None]:
    """Let linear layers give what is known already, and the last one hand on its input."""
    own = {module: module.__dict__.get("forward") for module in (*outputs, *([] if last is None else [last]))}
    for module, output in outputs.items():
        module.forward = lambda _, output=output: output
    if last is not None:
        last.forward = lambda rows: rows
    try:
        yield
    finally:
        for module, forward in own.items():
            if forward is None:
                del module.forward
            else:
                module.forward = forward
