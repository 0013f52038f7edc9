"""What a model's recurrent modules keep, and how they treat their rows, seen in forwards without memory or values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from draftkit.targets.recurrent import NoStates, Recurrence, StateCache, StateKey, StateKind, rows_of

ProbeForward = Callable[[int, StateCache], object]  # a forward of so many rows of one text, with the cache


def find_recurrences(model: nn.Module, sizes: Sequence[int], run: ProbeForward) -> tuple[Recurrence, ...]:
    """The recurrent modules of a model on torch's meta device, whose parameters need no gradients.

    A module is the innermost one at work when `Cache` is told of a state. `sizes` as in `StateCache`.
    """
    cache = _Told(sizes)
    calls = _Calls(model, cache)
    with calls:
        run(1, cache)
    resuming = _resuming(model, sizes, calls.found, run)
    return tuple(call.recurrence(name, resuming[name]) for name, call in calls.found.items())


class _Told(StateCache):
    """Lists the states that it has been told of in `keys`."""

    def __init__(self, sizes: Sequence[int]):
        super().__init__(sizes, NoStates())
        self.keys: list[StateKey] = []

    def update_conv_state(self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any) -> Tensor:
        self.keys.append(StateKey(layer_idx, "conv", state_idx))
        return super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self.keys.append(StateKey(layer_idx, "recurrent", state_idx))
        return super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)


@dataclass
class _Call:
    """A module at work on `rows`: the states that it has kept, and its linear layers with their inputs and outputs."""

    rows: object
    states: dict[StateKey, Tensor] = field(default_factory=dict)
    linears: list[tuple[str, object, object]] = field(default_factory=list)
    output: object = None

    def recurrence(self, name: str, resumes: bool) -> Recurrence:
        output = self.output[0] if isinstance(self.output, tuple) else self.output
        inner = [linear for linear, _, _ in self.linears]
        once = [linear for linear in self.linears if inner.count(linear[0]) == 1]
        return Recurrence(
            name,
            {key: (state.shape[1:], state.dtype) for key, state in self.states.items()},
            tuple(linear for linear, rows, _ in once if rows is self.rows),
            next((linear for linear, _, out in once if out is output), None),
            resumes,
        )


class _Calls:
    """The calls of modules during a forward; those that keep states are left in `found`, by their names."""

    def __init__(self, model: nn.Module, cache: _Told):
        self.model = model
        self.cache = cache
        self.found: dict[str, _Call] = {}
        self._open: list[tuple[str, _Call]] = []

    def __enter__(self) -> None:
        self._hooks = []
        for name, module in self.model.named_modules():
            self._hooks.append(module.register_forward_pre_hook(self._entering(name), with_kwargs=True))
            self._hooks.append(module.register_forward_hook(self._leaving))

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _entering(self, name: str) -> Callable[..., None]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._note_states()
            rows = rows_of(args, kwargs) if args or "hidden_states" in kwargs else None
            self._open.append((name, _Call(rows)))

        return enter

    def _leaving(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        self._note_states()
        name, call = self._open.pop()
        call.output = output
        if call.states:
            self.found[name] = call
        if isinstance(module, nn.Linear):
            for outer, enclosing in self._open:
                enclosing.linears.append((name.removeprefix(f"{outer}."), call.rows, output))

    def _note_states(self) -> None:
        """Note the states that the cache was told of since the last call as those of the innermost module."""
        for key in self.cache.keys:
            self._open[-1][1].states[key] = self.cache.layers[key.layer].get(key)
        self.cache.keys.clear()


def _resuming(model: nn.Module, sizes: Sequence[int], found: dict[str, _Call], run: ProbeForward) -> dict[str, bool]:
    """Whether each module's state after several rows at once depends on that before them, which gradients tell.

    Some start over: transformers' Mamba, whose kernel for several rows takes no state.
    """
    cache = _Told(sizes)
    resuming = {}

    def alone(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(_detached, args)), {name: _detached(arg) for name, arg in kwargs.items()}

    def note(name: str) -> Callable[..., Any]:
        def note(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            folded = [key for key in found[name].states if key.kind == RECURRENT]
            resuming[name] = all(cache.layers[key.layer].get(key).requires_grad for key in folded)
            return _detached(output)

        return note

    hooks = []
    for name, call in found.items():
        module = model.get_submodule(name)
        hooks.append(module.register_forward_pre_hook(alone, with_kwargs=True))
        hooks.append(module.register_forward_hook(note(name)))
        for key, state in call.states.items():
            before = torch.zeros_like(state, requires_grad=key.kind == RECURRENT)
            cache.layers[key.layer].set(key, before.clone())  # which may be written to
    with torch.enable_grad():
        run(2, cache)
    for hook in hooks:
        hook.remove()
    return resuming


RECURRENT: StateKind = "recurrent"


def _detached(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_detached, value))
    return value.detach() if isinstance(value, Tensor) else value
