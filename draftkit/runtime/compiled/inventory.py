"""Everything that a traced round is made of: its weights by where they are, and all that decides what it computes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import cached_property
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from draftkit.runtime.cache import SlotCache
from draftkit.runtime.rounds import SlotState

PLAIN = (bool, int, float, str, bytes, NoneType, Enum, torch.dtype, torch.device, type)
OF_A_RUN = (SlotCache, SlotState)  # which every run makes anew


class Inventory:
    """What is reached from an object by its attributes: `weights`, tensors by their path, each once; and a `digest` of
    everything else, and of the tensors' shapes and dtypes.

    Attributes of modules and of draftkit's own objects are followed. Packed linear layers are left packed.
    """

    def __init__(self, thing: object):
        self.weights: dict[str, Tensor] = {}
        self._digest = hashlib.sha256()
        self._seen: dict[int, tuple[str, object]] = {}  # where first, and the thing: held, so that no id comes twice
        self._take("", thing)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def _take(self, path: str, thing: Any) -> None:
        if isinstance(thing, PLAIN):
            self._note(path, repr(thing))
        elif isinstance(thing, OF_A_RUN):
            return
        elif id(thing) in self._seen:
            self._note(path, f"the same as {self._seen[id(thing)][0]}")
        else:
            self._seen[id(thing)] = path, thing
            self._take_new(path, thing)

    def _take_new(self, path: str, thing: Any) -> None:
        self._note(path, f"{type(thing).__module__}.{type(thing).__qualname__}")
        if isinstance(thing, Tensor):
            self.weights[path] = thing
            self._note(path, f"{tuple(thing.shape)} {thing.dtype} {thing.layout}")
        elif isinstance(thing, PretrainedConfig):
            self._note(path, thing.to_json_string(use_diff=False))
        elif isinstance(thing, Mapping):
            self._take_all(path, thing.items())
        elif isinstance(thing, (list, tuple, set, frozenset)):
            self._take_all(path, enumerate(sorted(thing, key=repr) if isinstance(thing, (set, frozenset)) else thing))
        elif isinstance(thing, nn.Module) or is_dataclass(thing) or type(thing).__module__.startswith("draftkit."):
            own = getattr(thing, "__dict__", {})
            self._take_all(path, [(name, value) for name, value in own.items() if not _follows(thing, name, value)])

    def _take_all(self, path: str, things: Iterable[tuple[Any, Any]]) -> None:
        for name, thing in things:
            self._take(f"{path}.{name}", thing)

    def _note(self, path: str, text: str) -> None:
        self._digest.update(f"{path}\0{text}\0".encode())


def _follows(thing: object, name: str, value: object) -> bool:
    """Whether an attribute, which may be there or not yet, follows from the others."""
    return isinstance(value, (*PLAIN, frozenset)) and isinstance(getattr(type(thing), name, None), cached_property)
