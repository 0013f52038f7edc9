"""What a training run is: one file of settings, or flags; saved with every checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, cast

from draftkit.data.states.choices import AHEAD, Encoding
from draftkit.errors import DraftkitError
from draftkit.io.records import did_you_mean, from_dict, to_dict
from draftkit.io.settings import assignments, read_value
from draftkit.io.yaml_text import read_yaml_file, write_yaml
from draftkit.train.ranges import (
    Positive,
    ProperShare,
    Repeats,
    Seed,
    Share,
    Size,
    SizeOrNone,
    Weight,
)
from draftkit.train.recipes import recipe_class, recipe_names

_log = logging.getLogger(__name__)
# Settings by the names that they had, which are read for one release more.
OLD_NAMES = {
    "optimisation": "optimization",
    "optimization.checkpointing": "optimization.recompute",
    "options.reduction.normalised": "options.reduction.normalized",
    "validation.documents": "validation.samples",
}
# Those of transformers that need no numbers of their own.
Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]
POLYNOMIAL_END = 1e-7  # the learning rate that transformers' polynomial schedule ends with


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Adapters instead of all weights (`peft`). `targets`: endings of module names, all linear layers where empty."""

    r: Size = 16
    alpha: Size = 32
    dropout: ProperShare = 0.0
    dora: bool = False
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """Optimizer and schedule, in the terms of transformers' `TrainingArguments`.

    `max_steps` goes before `epochs` where it is not 0. `warmup`: steps, or below 1 a share of them.
    `clip`: the largest norm of the gradient, 0 for any. `recompute`: activations again in the backward pass, instead of
    keeping them.
    """

    lr: Positive = 1e-4
    schedule: Schedule = "cosine"
    warmup: Weight = 0.02
    weight_decay: Weight = 0.0
    beta1: ProperShare = 0.9
    beta2: ProperShare = 0.95
    clip: Weight = 0.5
    epochs: Positive = 1.0
    max_steps: SizeOrNone = 0
    accumulation: Size = 1
    precision: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    compile: bool = False
    recompute: bool = False

    def __post_init__(self) -> None:
        if self.schedule == "polynomial" and self.lr <= POLYNOMIAL_END:
            raise DraftkitError(
                f"optimization.lr {self.lr}", expected=f"above {POLYNOMIAL_END}, where the polynomial schedule ends"
            )


@dataclass(frozen=True, kw_only=True)
class Validation:
    """How drafts are judged while they train.

    - `samples`: a prepared file, or empty for the `share` of the training samples that is held out.
    - `k`: draft tokens a round. `mode`: how the samples were decoded, `greedy` or `sampled` at the `temperature`.
    - `every`: steps between validations, 0 for the end only. `limit`: samples, at most.
    - `keep`: which checkpoint the final draft is, that of the longest acceptance length (`best`), which is saved even
      between those of `save_every`, or the `last`. Equal lengths are told apart by the chance that a draft token is
      accepted, then by the loss.
    - `patience`: validations in a row without a better draft after which the run ends; 0 for none.
    - `decode`: held-out prompts that are decoded for real as well, 0 for none.
    """

    samples: str = ""
    share: Share = 0.05
    k: Repeats = 4
    mode: Literal["greedy", "sampled"] = "greedy"
    temperature: Positive = 1.0
    every: SizeOrNone = 0
    limit: Size = 256
    keep: Literal["best", "last"] = "best"
    patience: SizeOrNone = 0
    decode: SizeOrNone = 0

    def __post_init__(self) -> None:
        if self.patience and not self.every:
            raise DraftkitError(
                f"validation.patience {self.patience} without validations in between",
                hint="set validation.every to the steps between them",
            )


@dataclass(frozen=True, kw_only=True)
class OnPolicy:
    """Steps in which the drafts count more that serving, with the draft as it then is, rejects.

    - `share` of the steps, chosen by the run's seed. `weight` of a rejected draft; the others count 1.
    - `rounds`: `decoded` for real from the samples' last prompts on, so that the text is the target's own; or `walked`
      over the samples as they are, which takes answers of the target's own, but not the time of decoding them again.

    K and how tokens are drawn are those of `validation`.
    """

    share: Share = 0.5
    weight: Positive = 4.0
    rounds: Literal["decoded", "walked"] = "decoded"


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """States that a worker computes with vLLM while the run uses them up.

    - `python`: the interpreter of an environment with vLLM, for a worker that the run keeps beside itself; empty where
      one is started elsewhere, with `draftkit data stream FOLDER --target T`.
    - `folder`: shared with the worker; empty for `stream` in the run's own. `ahead`: rows that wait there, at most, for
      each process of the run.
    - `encoding`: how states lie there. `dtype`: the one in which vLLM runs the target, on `tensor_parallel` GPUs from
      `device` on.
    """

    python: str = ""
    folder: str = ""
    ahead: Size = AHEAD
    encoding: Encoding = "bf16"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    tensor_parallel: Size = 1
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """A training run.

    - `recipe`, and its own `options`. `target`, `data` (a file that `draftkit data prepare` wrote), `out` (a folder).
    - `draft`: a checkpoint to go on with, of any format. `draft_vocab_size`: 0 for the target's whole vocabulary.
    - `states`: a folder that `draftkit data states` wrote; empty to run the target in this process.
    - `tokens_per_row`: what a device computes on at once. `save_every`: steps, 0 for the end only; `keep`: checkpoints,
      0 for all.
    - `stream`: None unless states come from a worker while the run goes on.
    - `report_to`: where the log goes besides the terminal. `on_policy`: None for no such steps.
    """

    recipe: str
    target: str
    data: str
    out: str
    draft: str = ""
    draft_vocab_size: SizeOrNone = 0
    states: str = ""
    stream: StreamSettings | None = None
    tokens_per_row: Size = 2048
    device: str = ""
    target_dtype: Literal["", "float32", "bfloat16", "float16"] = ""
    seed: Seed = 0
    save_every: SizeOrNone = 0
    keep: SizeOrNone = 2
    log_every: Size = 10
    report_to: tuple[Literal["trackio", "tensorboard", "wandb"], ...] = ()
    optimization: Optimization = field(default_factory=Optimization)
    validation: Validation = field(default_factory=Validation)
    lora: LoraSettings | None = None
    on_policy: OnPolicy | None = None
    options: dict[str, object] = field(default_factory=dict)

    def check(self) -> None:
        """Raise `DraftkitError` for settings that no run can have."""
        from_dict(TrainConfig, to_dict(self), "settings", "the configuration")
        if not self.draft and recipe_class(self.recipe).needs_draft:
            raise DraftkitError(
                f"recipe {self.recipe} has no draft to start from",
                hint="pass a small causal language model of the target's tokenizer as --draft",
            )
        if self.states and self.stream is not None:
            raise DraftkitError("states are stored, and are to be streamed", hint="leave out --states or --states-from")
        if self.on_policy is not None and not recipe_class(self.recipe).weighs_drafts:
            able = [name for name in recipe_names() if recipe_class(name).weighs_drafts]
            raise DraftkitError(f"recipe {self.recipe} has no on-policy steps", expected=", ".join(able))
        self.recipe_options()

    def recipe_options(self) -> object:
        """The settings of the recipe. Raises `LayoutError` that lists what it does not know."""
        kind = recipe_class(self.recipe).options_type
        return from_dict(
            kind, _merged(to_dict(kind()), self.options), f"recipe {self.recipe}", "the configuration", "options"
        )

    def by_name(self) -> dict[str, object]:
        """The settings by their names in `--set`, nothing left out."""
        return dict(_flat(to_dict(self) | {"options": to_dict(self.recipe_options())}))

    def to_yaml(self) -> str:
        """The run as a file that `read_config` reads, nothing left out."""
        return write_yaml(to_dict(self) | {"options": to_dict(self.recipe_options())})


def _flat(settings: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value if isinstance(value, bool | int | float | str) else str(value)


def read_config(path: Path | None, settings: Sequence[str], flags: Mapping[str, object]) -> TrainConfig:
    """A run from a YAML file, then `flags`, then `settings` as `optimization.lr=1e-4`.

    Raises `DraftkitError` for a file that is no YAML, and one that lists every unknown or ill-typed setting.
    """
    given: dict[str, object] = {}
    if path is not None:
        loaded = read_yaml_file(path)
        if not isinstance(loaded, dict):
            raise DraftkitError("not a configuration", where=path, expected="settings by name")
        given = by_current_names(loaded)
    given = _merged(given, {name: value for name, value in flags.items() if value is not None})
    for name, text in assignments(settings).items():
        given = _merged(given, by_current_names(_nested(name, read_value(text, f"--set {name}"))))
    if isinstance(trackers := given.get("report_to"), str):
        given["report_to"] = [name.strip() for name in trackers.split(",") if name.strip()]
    required = {"recipe", "target", "data", "out"}
    if missing := sorted(required - set(given)):
        raise DraftkitError(
            f"the run does not say its {', '.join(missing)}", where=path, hint="add the flags, or --config"
        )
    recipe = given["recipe"]
    if not isinstance(recipe, str) or recipe not in recipe_names():
        raise DraftkitError(
            f"recipe {recipe!r}{did_you_mean(recipe, recipe_names())}", expected=", ".join(recipe_names())
        )
    defaults = to_dict(TrainConfig(recipe="", target="", data="", out=""))
    if given.get("lora") is not None:
        defaults["lora"] = to_dict(LoraSettings())
    if given.get("stream") is not None:
        defaults["stream"] = to_dict(StreamSettings())
    if given.get("on_policy") is not None:
        defaults["on_policy"] = to_dict(OnPolicy())
    config = from_dict(TrainConfig, _merged(defaults, given), path or "flags", "the configuration")
    config.check()
    return config


def by_current_names(settings: Mapping[str, object], within: str = "") -> dict[str, object]:
    """The settings, those of the object `within`, by the names that they have now; `OLD_NAMES` has the others.

    Raises `DraftkitError` for one that is given under both.
    """
    renamed: dict[str, object] = {}
    for name, value in settings.items():
        path = OLD_NAMES.get(within + name, within + name)
        now = path.removeprefix(within)
        if now != name:
            if now in settings:
                raise DraftkitError(f"setting {path} is given twice, as {name} too", hint="give it once")
            _log.warning("setting %s is called %s now; the next release reads that name alone", within + name, path)
        renamed[now] = by_current_names(value, f"{path}.") if isinstance(value, dict) else value
    return renamed


def _nested(name: str, value: object) -> dict[str, object]:
    """`optimization.lr` and its value as the object in an object that they stand for."""
    for part in reversed(name.split(".")):
        value = {part: value}
    return cast("dict[str, object]", value)


def parse_lora(text: str) -> dict[str, object]:
    """The settings of `--lora r=16,alpha=32,targets=q_proj+v_proj`; `default` for the defaults."""
    if text == "default":
        return {}
    settings: dict[str, object] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if not equals:
            raise DraftkitError(f"--lora {text}", expected="default, or as r=16,alpha=32,targets=q_proj+v_proj")
        settings[name] = value.split("+") if name == "targets" else read_value(value, f"--lora {text}")
    return settings


def _merged(below: Mapping[str, object], above: Mapping[str, object]) -> dict[str, object]:
    """`above` over `below`, object by object."""
    merged = dict(below)
    for name, value in above.items():
        old = merged.get(name)
        deeper = isinstance(old, dict) and isinstance(value, dict)
        merged[name] = _merged(cast("dict[str, object]", old), cast("dict[str, object]", value)) if deeper else value
    return merged
