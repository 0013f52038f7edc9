"""The facts of a target that conversions need, read from its `config.json` alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from draftkit.errors import TargetError, command
from draftkit.io.jsonfile import read_object

SIZES = ("hidden_size", "vocab_size", "num_hidden_layers")
ADAPTER_CONFIG = "adapter_config.json"  # makes a folder one of peft's adapters
ADAPTED = " + "  # between the names of a target and of an adapter on it
ADAPTER_PREFIX = "base_model.model."  # what peft puts before the names of the base model's modules
WRAPPERS = ("text_config", "llm_config", "language_config")  # where multi-modal configs keep their language model's


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """Sizes of a target and where it came from; `revision` is the Hub commit, None for what is not of the Hub.

    `path`: the folder or GGUF file on this machine; of a target of the Hub, not all files need be there.

    `architectures`: the class names of its config, `config` what it says.
    """

    name: str
    revision: str | None
    path: Path = field(compare=False)
    hidden_size: int
    vocab_size: int
    num_hidden_layers: int
    max_position_embeddings: int | None
    architectures: tuple[str, ...]
    config: Mapping[str, object] = field(repr=False, compare=False)

    def default_aux_layer_ids(self) -> tuple[int, int, int]:
        """The layers that EAGLE-3's authors capture."""
        return default_aux_layer_ids(self.num_hidden_layers)

    @cached_property
    def tied(self) -> bool:
        """Whether the target's output layer is its embedding table."""
        stated = language_model(self.config).get("tie_word_embeddings", self.config.get("tie_word_embeddings"))
        return bool(class_defaults(self.config).get("tie_word_embeddings", False) if stated is None else stated)


def default_aux_layer_ids(num_hidden_layers: int) -> tuple[int, int, int]:
    """The layers (2, N//2, N−3) in convention S that EAGLE-3's authors capture (SafeAILab/EAGLE, `cnets.py`)."""
    return (2, num_hidden_layers // 2, num_hidden_layers - 3)


def default_block_layer_ids(num_hidden_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """The layers in convention S that block drafters capture where their config names none (z-lab/dflash,
    `build_target_layer_ids`)."""
    if num_draft_layers == 1:
        return (num_hidden_layers // 2 + 1,)
    step = (num_hidden_layers - 4) / (num_draft_layers - 1)
    return tuple(round(1 + i * step) + 1 for i in range(num_draft_layers))


def adapted_name(target: str, adapter: str | None) -> str:
    """The name of a target with an adapter on it, as `open_target` takes it."""
    return target if adapter is None else f"{target}{ADAPTED}{adapter}"


def require_whole_model(folder: Path) -> None:
    """Raise `TargetError` for a folder of an adapter, which is a target only together with its base model."""
    if (folder / ADAPTER_CONFIG).is_file():
        base = read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path") or "BASE"
        merge = command("draftkit", "convert", folder, "MERGED")
        raise TargetError(
            "this is an adapter (peft) of a model, and no target by itself",
            where=folder,
            hint=f"pass {command('--target', str(base), '--target-adapter', folder)}; {merge} writes both as one model",
        )


def read_target_facts(
    folder: Path, name: str, revision: str | None, config: dict[str, object] | None = None
) -> TargetFacts:
    """Read a target's sizes; `config` is what its file says, where that has been read.

    Raises `SourceError`/`FormatError` for a bad file, `TargetError` for missing keys.

    What the file leaves to the default of its class, or says under another name, comes from transformers, which is not
    imported otherwise.
    """
    require_whole_model(folder)
    path = folder / "config.json"
    config = read_object(path) if config is None else config
    facts = language_model(config)
    if any(facts.get(key) is None for key in SIZES):
        facts = class_defaults(config) | {key: value for key, value in facts.items() if value is not None}
    sizes = {}
    for key in SIZES:
        value = facts.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise TargetError(
                f"the target's config has no usable {key} (found {value!r})",
                where=path,
                hint="pass the folder or Hub id of the target language model itself",
            )
        sizes[key] = value
    architectures, length = config.get("architectures"), facts.get("max_position_embeddings")
    return TargetFacts(
        name=name,
        revision=revision,
        path=folder,
        max_position_embeddings=length if isinstance(length, int) else None,
        architectures=tuple(map(str, architectures)) if isinstance(architectures, list) else (),
        config=config,
        **sizes,
    )


def language_model(config: Mapping[str, object]) -> dict[str, object]:
    """The configuration of the language model, which multi-modal ones keep in an object of its own."""
    for key in WRAPPERS:
        inner = config.get(key)
        if isinstance(inner, dict):
            return inner
    return dict(config)


def class_defaults(config: Mapping[str, object]) -> dict[str, object]:
    """The values that transformers' class for a configuration fills in, for its language model; empty where it has
    none."""
    from transformers import CONFIG_MAPPING

    for values in (config, language_model(config)):  # the class of a wrapper may be the author's own
        try:
            kind = CONFIG_MAPPING[str(values.get("model_type"))]
            text = kind.from_dict(_with_infinities(values)).get_text_config()
        except Exception:  # whatever its class stumbles over
            continue
        names = (*SIZES, "max_position_embeddings", "tie_word_embeddings")
        return {name: getattr(text, name, None) for name in names}
    return {}


def _with_infinities(value: Any) -> Any:
    """A JSON value with the numbers that transformers writes as `{"__float__": "Infinity"}`."""
    if isinstance(value, list):
        return [_with_infinities(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    if value.keys() == {"__float__"}:
        return float(value["__float__"])
    return {name: _with_infinities(item) for name, item in value.items()}
