"""What a training run is: one file of settings, or flags; saved with every checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

import yaml

from draftkit.errors import DraftkitError
from draftkit.layout.records import from_dict, to_dict
from draftkit.train.recipes import RECIPES, recipe_class

_SCIENTIFIC = re.compile(r"[+-]?\d+(\.\d*)?e[+-]?\d+", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Adapters instead of all weights (`peft`). `targets`: endings of module names, all linear layers where empty."""

    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    dora: bool = False
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Optimisation:
    """Optimiser and schedule, in the terms of transformers' `TrainingArguments`.

    `max_steps` goes before `epochs` where it is not 0. `clip`: the largest norm of the gradient.
    """

    lr: float = 1e-4
    schedule: str = "cosine"
    warmup: float = 0.02
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 0.5
    epochs: float = 1.0
    max_steps: int = 0
    accumulation: int = 1
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    compile: bool = False
    checkpointing: bool = False


@dataclass(frozen=True, kw_only=True)
class Validation:
    """How drafts are judged while they train.

    - `documents`: a prepared file, or empty for the `share` of the training documents that is held out.
    - `k`: draft tokens a round. `mode`: how the documents were decoded, `greedy` or `sampled` at the `temperature`.
    - `every`: steps between validations, 0 for the end only. `limit`: documents, at most.
    - `decode`: held-out prompts that are decoded for real as well, 0 for none.
    """

    documents: str = ""
    share: float = 0.05
    k: int = 4
    mode: Literal["greedy", "sampled"] = "greedy"
    temperature: float = 1.0
    every: int = 0
    limit: int = 256
    decode: int = 0


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    - `recipe`, and its own `options`. `target`, `data` (a file that `draftkit data prepare` wrote), `out` (a folder).
    - `draft`: a checkpoint to go on with, of any format. `draft_vocab_size`: 0 for the target's whole vocabulary.
    - `states`: a folder that `draftkit data states` wrote; empty to run the target in this process.
    - `tokens_per_row`: what a device computes on at once. `save_every`: steps, 0 for the end only; `keep`: checkpoints.
    - `report_to`: where the log goes besides the terminal: trackio, tensorboard, wandb.
    """

    recipe: str
    target: str
    data: str
    out: str
    draft: str = ""
    draft_vocab_size: int = 0
    states: str = ""
    tokens_per_row: int = 2048
    device: str = ""
    target_dtype: str = ""
    seed: int = 0
    save_every: int = 0
    keep: int = 2
    log_every: int = 10
    report_to: tuple[str, ...] = ()
    optimisation: Optimisation = field(default_factory=Optimisation)
    validation: Validation = field(default_factory=Validation)
    lora: LoraSettings | None = None
    options: dict[str, object] = field(default_factory=dict)

    def recipe_options(self) -> object:
        """The settings of the recipe. Raises `LayoutError` that lists what it does not know."""
        kind = recipe_class(self.recipe).options_type
        return from_dict(kind, _merged(to_dict(kind()), self.options), "options", f"recipe {self.recipe}")

    def to_yaml(self) -> str:
        """The run as a file that `read_config` reads, nothing left out."""
        resolved = to_dict(self) | {"options": to_dict(self.recipe_options())}
        return yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True)


def read_config(path: Path | None, settings: Sequence[str], flags: Mapping[str, object]) -> TrainConfig:
    """A run from a YAML file, then `flags`, then `settings` as `optimisation.lr=1e-4`.

    Raises `DraftkitError` for a file that is no YAML, and one that lists every unknown or ill-typed setting.
    """
    given: dict[str, object] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise DraftkitError(f"not a configuration: {error}", where=path, expected="a YAML file") from error
        if not isinstance(loaded, dict):
            raise DraftkitError("not a configuration", where=path, expected="settings by name")
        given = cast("dict[str, object]", _numbers(loaded))
    given = _merged(given, {name: value for name, value in flags.items() if value is not None})
    for setting in settings:
        name, equals, text = setting.partition("=")
        if not (name and equals):
            raise DraftkitError(f"--set {setting}", expected="--set SETTING=VALUE, as --set optimisation.lr=1e-4")
        given = _merged(given, _nested(name.split("."), _value(text)))
    required = {"recipe", "target", "data", "out"}
    if missing := sorted(required - set(given)):
        raise DraftkitError(
            f"the run does not say its {', '.join(missing)}", where=path, hint="add the flags, or --config"
        )
    if given["recipe"] not in RECIPES:
        raise DraftkitError(f"recipe {given['recipe']!r}", expected=", ".join(RECIPES))
    defaults = to_dict(TrainConfig(recipe="", target="", data="", out=""))
    if given.get("lora") is not None:
        defaults["lora"] = to_dict(LoraSettings())
    config = from_dict(TrainConfig, _merged(defaults, given), path or "flags", "the configuration")
    config.recipe_options()
    return config


def parse_lora(text: str) -> dict[str, object]:
    """The settings of `--lora r=16,alpha=32,targets=q_proj+v_proj`; `default` for the defaults."""
    if text == "default":
        return {}
    settings: dict[str, object] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise DraftkitError(f"--lora {text}", expected="default, or as r=16,alpha=32,targets=q_proj+v_proj")
        settings[name] = value.split("+") if name == "targets" else _value(value)
    return settings


def _value(text: str) -> object:
    return _numbers(yaml.safe_load(text))


def _numbers(value: object) -> object:
    """The value with texts such as 1e-4 as the numbers they are; YAML wants 1.0e-4."""
    if isinstance(value, dict):
        return {name: _numbers(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_numbers(inner) for inner in value]
    return float(value) if isinstance(value, str) and _SCIENTIFIC.fullmatch(value) else value


def _nested(path: Sequence[str], value: object) -> dict[str, object]:
    return {path[0]: value if len(path) == 1 else _nested(path[1:], value)}


def _merged(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """`above` over `below`, object by object."""
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        deeper = isinstance(old, dict) and isinstance(value, dict)
        merged[name] = _merged(cast("dict[str, object]", old), cast("dict[str, object]", value)) if deeper else value
    return merged
