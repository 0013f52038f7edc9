"""Facts as a conversion finds them: each with its value and where the value was taken from.

A format reads a foreign config only through `Facts`, so that every key is either used, dropped with a reason, or
reported; and every fact of the spec has an origin that the report can show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from draftkit.convert.overrides import override_spec, parse_override
from draftkit.errors import FormatError, LayoutError
from draftkit.layout.provenance import FactOrigin, Origin
from draftkit.layout.spec import DraftSpec

Value = TypeVar("Value", int, float, str, bool)

# Keys that transformers writes into any config and that say nothing about what a draft computes.
BOOKKEEPING = {
    "_name_or_path": "a path of the author's machine",
    "architectures": "names the target's class; the tensors tell the format",
    "model_type": "names the target's family; the tensors tell the format",
    "attention_bias": "the tensors tell which projections have a bias",
    "attention_dropout": "used in training only",
    "bos_token_id": "the target's tokenizer decides",
    "eos_token_id": "the target's tokenizer decides",
    "pad_token_id": "the target's tokenizer decides",
    "dtype": "the tensors tell the dtype",
    "torch_dtype": "the tensors tell the dtype",
    "initializer_range": "used in training only",
    "mlp_bias": "the tensors tell which projections have a bias",
    "pretraining_tp": "splits a matrix product without changing it",
    "tie_word_embeddings": "the tensors tell whose embedding and head the draft uses",
    "transformers_version": "no effect on the weights",
    "use_cache": "no effect on the weights",
}


class Facts:
    """Reads a foreign config and records, for each fact of the spec, its value and origin.

    `overrides` are the user's own values, as text, by the name of the fact.
    """

    def __init__(self, config: dict[str, object], where: object, overrides: Mapping[str, str] | None = None):
        self._config = dict(config)
        self._paths: dict[str, str] = {}  # lifted key → where it lies in the file
        self._where = where
        self._overrides = dict(overrides or {})
        self._used: set[str] = set()
        self.found: list[FactOrigin] = []
        self.missing: list[tuple[str, str]] = []  # (fact, what to do)
        self.dropped: dict[str, str] = {}  # config key → reason; of a lifted key, its path
        self.losses: list[str] = []  # what the layout cannot hold

    def stated(self, key: str, kind: type[Value]) -> Value:
        """A key that the config must have. Raises `FormatError` when it is absent or of another type."""
        if self._config.get(key) is None:
            raise FormatError(f"config key {key} is missing", where=self._where, expected=kind.__name__)
        return self.stated_or(key, kind, default=kind(), note="")

    def stated_or(self, key: str, kind: type[Value], default: Value, note: str) -> Value:
        """A key that the config may have; `note` says why `default` holds when it does not."""
        value = self.optional(key, kind)
        if value is None:
            return self.record(key, default, "format default", note)
        return self.record(key, value, "stated")

    def optional(self, key: str, kind: type[Value], inside: dict[str, object] | None = None) -> Value | None:
        """A key that the config, or the object `inside` it, may have; None without one. Records nothing yet."""
        if inside is None:
            self._used.add(key)
        value = (self._config if inside is None else inside).get(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise FormatError(f"config key {key} is {value!r}", where=self._where, expected=kind.__name__)
        if isinstance(value, float) and not math.isfinite(value):
            raise FormatError(f"config key {key} is {value!r}", where=self._where, expected="a finite number")
        return value

    def need(self, key: str, inside: dict[str, object]) -> None:
        """Raise `FormatError` unless the object `inside` the config has a number under `key`."""
        if self.optional(key, float, inside) is None:
            raise FormatError(f"config key {key} is missing beside {inside}", where=self._where, expected="a number")

    def size(self, key: str, default: int | None = None, note: str = "") -> int:
        """A positive integer that the config must have, or, with a `default`, may have."""
        value = self.stated(key, int) if default is None else self.stated_or(key, int, default, note)
        if value <= 0:
            raise FormatError(f"config key {key} is {value}", where=self._where, expected="a positive integer")
        return value

    def measured(self, key: str, value: int, note: str) -> int:
        """A size that the tensors decide, whatever the config says; `note` says how it was measured."""
        stated = self.optional(key, int)
        if stated == value:
            return self.record(key, value, "stated")
        return self.record(key, value, "from tensors", note if stated is None else f"{note}; the config says {stated}")

    def record(self, name: str, value: Value, origin: Origin, note: str = "") -> Value:
        """Note a fact that does not come from one config key."""
        self.found.append(FactOrigin(name=name, value=str(value), origin=origin, note=note))
        return value

    def require(self, name: str, hint: str) -> object:
        """A fact that only the user can give: the override, or None and a note that it is missing.

        `hint` says what to pass. The value is as typed: the spec checks it.
        """
        if name in self._overrides:
            return parse_override(self._overrides[name])
        self.missing.append((name, hint))
        return None

    def lose(self, what: str) -> None:
        """Note something that the checkpoint has and the layout cannot hold. Converting it then takes consent."""
        self.losses.append(what)

    def overridden(self, spec: DraftSpec) -> DraftSpec:
        """The spec with the user's values, which are noted as such.

        Raises `LayoutError` for a name that is no fact of this spec, a value of another type, and a fact that the
        tensors decide.
        """
        origins = {fact.name: fact for fact in self.found}
        for name, text in self._overrides.items():
            before = origins.get(name, FactOrigin(name=name, value="", origin="format default", note=""))
            if before.origin == "from tensors":
                raise LayoutError(
                    f"{name} cannot be set: the tensors decide it, and they say {before.value}", where=self._where
                )
            note = f"instead of {before.value} ({before.origin})" if before.value else ""
            after = replace(before, value=text, origin="overridden", note=note)
            self.found = [fact for fact in self.found if fact.name != name] + [after]
        return override_spec(spec, self._overrides, self._where)

    def mapping(self, key: str) -> dict[str, object] | None:
        """A key that holds an object or null. Raises `FormatError` for anything else."""
        value = self._config.get(key)
        self._used.add(key)
        if value is not None and not isinstance(value, dict):
            raise FormatError(f"config key {key} is {value!r}", where=self._where, expected="an object or null")
        return None if value is None else dict(value)

    def integers(self, key: str) -> tuple[int, ...] | None:
        """A key that holds a list of integers or null. Raises `FormatError` for anything else."""
        self._used.add(key)
        value = self._config.get(key)
        return None if value is None else self.as_integers(key, value)

    def names(self, key: str) -> tuple[str, ...] | None:
        """A key that holds a list of names or null. Raises `FormatError` for anything else."""
        self._used.add(key)
        value = self._config.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise FormatError(f"config key {key} is {value!r}", where=self._where, expected="a list of names or null")
        return None if value is None else tuple(value)

    def as_integers(self, name: str, value: object) -> tuple[int, ...]:
        """A list of integers found elsewhere, checked. Raises `FormatError` for anything else."""
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise FormatError(f"{name} is {value!r}", where=self._where, expected="a list of integers")
        return tuple(value)

    def lift(self, key: str) -> None:
        """Read the keys of the object under `key` as if they stood beside it.

        A key that both levels have is the outer one; the inner one must say the same, or be bookkeeping. Raises
        `FormatError` when it does not, and when there is no such object.
        """
        inner = self.mapping(key)
        if inner is None:
            raise FormatError(f"config key {key} is missing", where=self._where, expected="an object")
        for name, value in inner.items():
            path = f"{key}.{name}"
            if name not in self._config:
                self._config[name], self._paths[name] = value, path
            elif name in BOOKKEEPING or value == self._config[name]:
                self.dropped[path] = BOOKKEEPING.get(name, f"{name} beside {key} says the same")
            else:
                raise FormatError(f"{path} is {value!r} and {name} is {self._config[name]!r}", where=self._where)

    def drop(self, key: str, reason: str) -> None:
        """Say why a config key has no place in the spec."""
        if key in self._config:
            self.dropped[self._path(key)] = reason

    def _path(self, key: str) -> str:
        return self._paths.get(key, key)

    def keep_config(self) -> None:
        """Say that the spec holds the whole config, verbatim."""
        self._used |= self._config.keys()

    def check_all_used(self) -> None:
        """Raise `FormatError` naming the keys that were neither used nor dropped."""
        for key, reason in BOOKKEEPING.items():
            if key not in self._used and self._path(key) not in self.dropped:
                self.drop(key, reason)
        unknown = sorted(key for key in self._config.keys() - self._used if self._path(key) not in self.dropped)
        if unknown:
            listing = "\n    ".join(f"{self._path(key)}: {self._config[key]!r}" for key in unknown)
            raise FormatError(
                f"config keys that this format does not define, so that their effect is unknown:\n    {listing}",
                where=self._where,
                hint="if they change nothing, delete them from config.json; otherwise this is another format",
            )
