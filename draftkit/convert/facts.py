"""Facts as a conversion finds them: each with its value and where the value was taken from.

A format reads a foreign config only through `Facts`, so that every key is either used, dropped with a reason, or
reported; and every fact of the spec has an origin that the report can show.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TypeVar

from draftkit.errors import FormatError, LayoutError
from draftkit.finding import Finding
from draftkit.io.settings import as_meant, read_value
from draftkit.layout.facts import settings_of_facts, with_facts
from draftkit.layout.provenance import DEFINITION, FactOrigin, OriginName
from draftkit.layout.spec import DraftSpec

Value = TypeVar("Value", int, float, str, bool)


class Facts:
    """Reads a foreign config and records, for each fact of the spec, its value and origin.

    `overrides` are the user's own values, as text, by the name of the fact. `ignored_keys`: the config keys (those
    inside an object by their path, `outer.key`) whose unknown effect the user accepts.
    """

    def __init__(
        self,
        config: dict[str, object],
        where: object,
        overrides: Mapping[str, str] | None = None,
        ignored_keys: Iterable[str] = (),
    ):
        self._config = dict(config)
        self._paths: dict[str, str] = {}  # lifted or renamed key → where it lies in the file
        self._renamed: set[str] = set()
        self._where = where
        self._overrides = dict(overrides or {})
        self._ignored_keys = frozenset(ignored_keys)
        self._used: set[str] = set()
        self.found: list[FactOrigin] = []
        self.missing: list[tuple[str, str]] = []  # (fact, what to do)
        self.dropped: dict[str, str] = {}  # config key → reason; of a lifted key, its path
        self.problems: list[Finding] = []  # what contradicts itself
        self.losses: list[str] = []  # what the layout cannot hold
        self.agreed_losses: dict[str, str] = {}  # config key that the user ignores → what that loses

    def beside(self, config: dict[str, object], where: object) -> Facts:
        """The facts of another file of the same checkpoint; what the user ignores there is agreed to here."""
        other = Facts(config, where, ignored_keys=self._ignored_keys)
        other.agreed_losses = self.agreed_losses
        return other

    def stated(self, key: str, kind: type[Value]) -> Value:
        """A key that the config must have. Raises `FormatError` when it is absent or of another type."""
        if self._config.get(key) is None:
            raise FormatError(f"config key {key} is missing", where=self._where, expected=kind.__name__)
        return self.stated_or(key, kind, default=kind(), note="")

    def stated_or(self, key: str, kind: type[Value], default: Value, note: str, fact: str | None = None) -> Value:
        """A key that the config may have; `note` says why `default` holds when it does not.

        `fact`: the name of the fact, where the key is another.
        """
        value = self.optional(key, kind)
        if value is None:
            return self.record(fact or key, default, "format default", note)
        called_so = fact is None and key not in self._renamed
        return self.record(fact or key, value, "stated", "" if called_so else f"config {self._path(key)}")

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
            raise FormatError(f"config key {self._path(key)} is {value!r}", where=self._where, expected=kind.__name__)
        if isinstance(value, float) and not math.isfinite(value):
            raise FormatError(f"config key {key} is {value!r}", where=self._where, expected="a finite number")
        return value

    def need(self, key: str, inside: dict[str, object]) -> None:
        """Raise `FormatError` unless the object `inside` the config has a number under `key`."""
        if self.optional(key, float, inside) is None:
            raise FormatError(f"config key {key} is missing beside {inside}", where=self._where, expected="a number")

    def size(self, key: str, default: int | None = None, note: str = "", fact: str | None = None) -> int:
        """A positive integer that the config must have, or, with a `default`, may have."""
        value = self.stated(key, int) if default is None else self.stated_or(key, int, default, note, fact)
        if value <= 0:
            raise FormatError(f"config key {key} is {value}", where=self._where, expected="a positive integer")
        return value

    def from_tensors(self, key: str, value: int, note: str) -> int:
        """A size that the tensors decide, whatever the config says; `note` says how it was measured."""
        stated = self.optional(key, int)
        if stated == value:
            return self.record(key, value, "stated")
        return self.record(key, value, "from tensors", note if stated is None else f"{note}; the config says {stated}")

    def record(self, name: str, value: Value, origin: OriginName, note: str = "", key: str = "") -> Value:
        """Note a fact that does not come from one config key, or from `key` among several that may state it."""
        self.found.append(FactOrigin(name=name, value=str(value), origin=origin, note=note, key=key))
        return value

    def record_from(self, key: str, facts: Mapping[str, Value]) -> None:
        """Note facts that one config key decides under another name: stated, or the format's default without it."""
        origin: OriginName = "format default" if self._config.get(key) is None else "stated"
        for name, value in facts.items():
            self.record(name, value, origin, f"config {key}")

    def require(self, name: str, hint: str) -> object:
        """A fact that only the user can give: the override, or None and a note that it is missing.

        `hint` says what to pass. The value is as typed: the spec checks it.
        """
        if name not in self._overrides:
            self.missing.append((name, hint))
        return self.set_by_user(name)

    def set_by_user(self, name: str) -> object:
        """The user's own value of a fact, as typed; None without one."""
        return read_value(self._overrides[name], f"--set {name}") if name in self._overrides else None

    def choice(self, name: str, options: tuple[str, ...]) -> str | None:
        """What the user says of something that is no fact of the spec, None when nothing. Raises `LayoutError`."""
        said = self._overrides.pop(name, None)
        if said is not None and said not in options:
            raise LayoutError(f"{name} is set to {said!r}", where=self._where, expected=" or ".join(options))
        return None if said is None else self.record(name, said, "overridden")

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
        values = {name: read_value(text, f"--set {name}") for name, text in self._overrides.items()}
        for one in settings_of_facts(type(spec.architecture)):
            if one.name in values:
                values[one.name] = as_meant(one, values[one.name])
        return replace(spec, architecture=with_facts(spec.architecture, self._where, **values))

    def record_definition(self, spec: DraftSpec) -> None:
        """Note the facts of a spec that come from no config key and no tensor: the format is defined by them."""
        self.record("dtype", spec.dtype, "from tensors", "that of most bytes")
        known = {fact.name for fact in self.found}
        for name, value in spec.facts().items():
            if name not in known:
                self.record(name, str(value), "format default", DEFINITION)

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

    def flags(self, key: str) -> tuple[bool, ...] | None:
        """A key that holds a list of true and false, or null. Raises `FormatError` for anything else."""
        self._used.add(key)
        value = self._config.get(key)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, bool) for item in value)):
            raise FormatError(f"config key {key} is {value!r}", where=self._where, expected="a list of true and false")
        return None if value is None else tuple(value)

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

        A key that both levels have is the outer one; the inner one must say the same, or be harmless. Raises
        `FormatError` when it does not, and when there is no such object.
        """
        inner = self.mapping(key)
        if inner is None:
            raise FormatError(f"config key {key} is missing", where=self._where, expected="an object")
        for name, value in inner.items():
            path = f"{key}.{name}"
            if name not in self._config:
                self._config[name], self._paths[name] = value, path
            elif name in HARMLESS_KEYS or value == self._config[name]:
                self.dropped[path] = HARMLESS_KEYS.get(name, f"{name} beside {key} says the same")
            else:
                raise FormatError(f"{path} is {value!r} and {name} is {self._config[name]!r}", where=self._where)

    def rename(self, names: Mapping[str, str]) -> None:
        """Read config keys of this layout (`names`: theirs → the usual one) where a reader asks for the usual one.

        Reports go on naming them as the file does. Raises `FormatError` for a file that has both.
        """
        for theirs, usual in names.items():
            if theirs not in self._config:
                continue
            if usual in self._config:
                raise FormatError(f"config has {theirs} and {usual}", where=self._where, expected="one of them")
            self._config[usual], self._paths[usual] = self._config.pop(theirs), self._path(theirs)
            self._renamed.add(usual)

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
        """Raise `FormatError` for keys that were neither used nor dropped, and for ignored ones that do not need it."""
        self.check_keys_used()
        if idle := self._ignored_keys - self.agreed_losses.keys():
            raise FormatError(
                f"there is nothing to ignore in {', '.join(sorted(idle))}",
                where=self._where,
                expected="config keys whose effect is unknown",
                hint="leave out --ignore-key for keys that are not there, or that draftkit reads (--set changes those)",
            )

    def check_keys_used(self) -> None:
        """Raise `FormatError` for keys of this file that were neither used nor dropped nor ignored."""
        for key, reason in HARMLESS_KEYS.items():
            if key not in self._used and self._path(key) not in self.dropped:
                self.drop(key, reason)
        self.refuse_unknown({self._path(key): self._config[key] for key in self._config.keys() - self._used})

    def refuse_unknown(self, keys: Mapping[str, object]) -> None:
        """Raise `FormatError` for config keys (path → value) that nothing reads: all but null, dropped and ignored."""
        unknown = {}
        for path, value in sorted(keys.items()):
            if path in self.dropped:
                continue
            if path in self._ignored_keys:
                self.dropped[path] = "its effect is unknown; ignored, as asked"
                self.agreed_losses[path] = f"config key {path}, {value!r}: its effect is unknown; ignored, as asked"
            elif value is None:
                self.dropped[path] = "null"
            else:
                unknown[path] = value
        if unknown:
            listing = "\n    ".join(f"{path}: {value!r}" for path, value in unknown.items())
            raise FormatError(
                f"config keys that this format does not define, so that their effect is unknown:\n    {listing}",
                where=self._where,
                hint="if they change nothing, convert with --ignore-key KEY for each; otherwise this is another format",
            )


def value_at(config: Mapping[str, object], path: str) -> object:
    """The value of a key that the config has."""
    holder, dot, key = path.partition(".")
    inner = config[holder]
    return inner[key] if dot and isinstance(inner, dict) else inner


def with_values(config: Mapping[str, object], values: Mapping[str, object]) -> dict[str, object]:
    """A copy of the config with the values at these paths."""
    result = dict(config)
    for path, value in values.items():
        holder, dot, key = path.partition(".")
        inner = result.get(holder, {})
        result[holder] = {**inner, key: value} if dot and isinstance(inner, dict) else value
    return result


# Config keys that transformers writes into any config and that say nothing about what a draft computes: the attributes
# that its base class `PretrainedConfig` sets or writes, in the source of releases 4.28, 4.57, 5.19 and 5.23
# (`configuration_utils.py`; the defaults of generation, which it once had too, in `generation/configuration_utils.py`),
# and of `LlamaConfig` those that the tensors tell better. Attributes that change the layers (`quantization_config`,
# `per_layer_config`) are not among them.
_BY_REASON = {
    "used in training only": (
        "attention_dropout",
        "gradient_checkpointing",
        "initializer_range",
        "task_specific_params",
    ),
    "names the target's class or family; the tensors tell the format": ("architectures", "model_type"),
    "a name, path or version on the author's side": (
        "_commit_hash",
        "_name_or_path",
        "name_or_path",
        "tokenizer_class",
        "transformers_version",
    ),
    "how transformers finds and loads a class, which draftkit does not use": (
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_attn_implementation_internal",
        "_auto_class",
        "_experts_implementation",
        "_experts_implementation_internal",
        "_output_attentions",
        "_post_init_done",
        "attn_implementation",
        "auto_map",
        "experts_implementation",
        "tf_legacy_loss",
        "torchscript",
        "use_bfloat16",
        "xla_device",
    ),
    "the tensors tell which projections have a bias": ("attention_bias", "mlp_bias"),
    "the target's tokenizer decides": (
        "bos_token_id",
        "decoder_start_token_id",
        "eos_token_id",
        "pad_token_id",
        "prefix",
        "sep_token_id",
    ),
    "the tensors tell the dtype": ("_pre_quantization_dtype", "dtype", "torch_dtype"),
    "splits a computation without changing it": ("chunk_size_feed_forward", "pretraining_tp"),
    "the tensors tell whose embedding and head the draft uses": ("tie_word_embeddings",),
    "no effect on what the layers compute": (
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "tie_last_hidden_states",
        "use_cache",
    ),
    "of encoders and decoders, which no class of this family reads": (
        "add_cross_attention",
        "cross_attention_hidden_size",
        "is_decoder",
        "is_encoder_decoder",
        "tie_encoder_decoder",
    ),
    "of classifiers": ("finetuning_task", "id2label", "label2id", "num_labels", "problem_type"),
    "the tensors are there without the heads": ("pruned_heads",),
    "a default of generation": (
        "assistant_confidence_threshold",
        "assistant_lookbehind",
        "bad_words_ids",
        "begin_suppress_tokens",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "encoder_repetition_penalty",
        "epsilon_cutoff",
        "eta_cutoff",
        "exponential_decay_length_penalty",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict_in_generate",
        "suppress_tokens",
        "target_lookbehind",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
    ),
}
HARMLESS_KEYS: Mapping[str, str] = {key: reason for reason, keys in _BY_REASON.items() for key in keys}  # key → reason
