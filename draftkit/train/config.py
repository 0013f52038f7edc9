"""What a training run is: one file of settings, or flags; saved with every checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast

from draftkit.errors import DraftkitError
from draftkit.io.records import did_you_mean, from_dict, to_dict
from draftkit.io.settings import as_meant, assignments, read_value, setting, settings_of
from draftkit.io.yaml_text import read_yaml_file, write_yaml
from draftkit.train.recipes import recipe_class, recipe_names
from draftkit.train.settings import (
    MUON_DECAY,
    NEW_DRAFT_LR,
    NEW_DRAFT_LR_BY_MUON,
    TRAINED_DRAFT_LR,
    LoraSettings,
    Optimization,
    Seed,
    Size,
    SizeOrNone,
    StreamSettings,
    Validation,
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The configuration of a training run.

    `stream` is None unless states come from a worker while the run goes on.
    """

    recipe: str = setting("The recipe of training, which has options of its own.")
    target: str = setting("The model that the draft is for.")
    data: str = setting("The file that `draftkit data prepare` wrote.")
    out: str = setting("The folder of the run.")
    draft: str = setting("A checkpoint to go on with, of any format.", "")
    draft_vocab_size: SizeOrNone = setting(
        "The tokens that a new draft proposes among; 0 for the target's whole vocabulary.", 0, unit="tokens"
    )
    media_root: str = setting(
        "The folder of the samples' images; empty for where they were when the data were prepared.", ""
    )
    states: str = setting("A folder that `draftkit data states` wrote; empty to run the target in this process.", "")
    verify_states: bool = setting(
        "Whether stored states are held against the checksums that were taken when they were written.", False,
        needs="states",
    )  # fmt: skip
    stream: StreamSettings | None = None
    tokens_per_row: Size = setting("What a device computes on at once.", 2048, unit="tokens")
    device: str = setting("cpu, cuda or cuda:N; default: cuda where there is one.", "")
    target_dtype: Literal["", "float32", "bfloat16", "float16"] = setting(
        "The number format in which the target runs; empty for that of its checkpoint.", ""
    )
    seed: Seed = setting("The seed of all that is drawn.", 0)
    save_every: SizeOrNone = setting("How far apart checkpoints are; 0 for the end only.", 0, unit="steps")
    keep: SizeOrNone = setting("How many checkpoints are kept, 0 for all.", 2, unit="checkpoints")
    log_every: Size = setting("How far apart lines of the log are.", 10, unit="steps")
    report_to: tuple[str, ...] = setting(
        "The trackers that the log goes to besides the terminal, by transformers' names, such as tensorboard,wandb.", ()
    )
    optimization: Optimization = field(default_factory=Optimization)
    validation: Validation = field(default_factory=Validation)
    lora: LoraSettings | None = None
    options: dict[str, object] = setting("The options of the recipe.", factory=dict)

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
        self.recipe_options()

    def recipe_options(self) -> object:
        """The settings of the recipe. Raises `LayoutError` that lists what it does not know."""
        kind = recipe_class(self.recipe).options_type
        return from_dict(
            kind, _merged(to_dict(kind()), self.options), f"recipe {self.recipe}", "the configuration", "options"
        )

    @property
    def learning_rate(self) -> float:
        """The highest learning rate: the one asked for, or that of a new draft or of one that has learned."""
        if self.optimization.lr is not None:
            return self.optimization.lr
        if self.has_learned:
            return TRAINED_DRAFT_LR
        return NEW_DRAFT_LR_BY_MUON if self.optimizer == "muon" else NEW_DRAFT_LR

    @property
    def has_learned(self) -> bool:
        """Whether the run begins with a draft that has learned."""
        return bool(self.draft or recipe_class(self.recipe).starts_from)

    @property
    def optimizer(self) -> Literal["adamw", "muon"]:
        """The one asked for, or the recipe's for a new draft, AdamW for one that has learned."""
        asked = self.optimization.optimizer
        if asked == "auto":
            return "adamw" if self.has_learned else recipe_class(self.recipe).optimizer
        return asked

    @property
    def weight_decay(self) -> float:
        """The one asked for, or that of the optimizer."""
        if self.optimization.weight_decay is not None:
            return self.optimization.weight_decay
        return MUON_DECAY if self.optimizer == "muon" else 0.0

    def by_name(self) -> dict[str, object]:
        """The settings by their names in `--set`, nothing left out."""
        return dict(_flat(self._settled()))

    def to_yaml(self) -> str:
        """The run as a file that `read_config` reads, nothing left out."""
        return write_yaml(self._settled())

    def _settled(self) -> dict[str, object]:
        """All settings, with the defaults that depend on others."""
        optimization = replace(
            self.optimization, lr=self.learning_rate, optimizer=self.optimizer, weight_decay=self.weight_decay
        )
        settled = replace(self, optimization=optimization)
        return to_dict(settled) | {"options": to_dict(self.recipe_options())}


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
        given = loaded
    given = _merged(given, {name: value for name, value in flags.items() if value is not None})
    for name, text in assignments(settings).items():
        given = _merged(given, _nested(name, read_value(text, f"--set {name}")))
    if isinstance(trackers := given.get("report_to"), str):
        given["report_to"] = [name.strip() for name in trackers.split(",") if name.strip()]
    required = {"recipe", "target", "data", "out"}
    if missing := sorted(required - set(given)):
        raise DraftkitError(f"the run has no {', '.join(missing)}", where=path, hint="add the flags, or --config")
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
    given = _as_meant(_merged(defaults, given), recipe)
    config = from_dict(TrainConfig, given, path or "flags", "the configuration")
    config.check()
    return config


def _as_meant(given: Mapping[str, object], recipe: str) -> dict[str, object]:
    """The settings of a run, with what they mean for what is written in words."""
    options = settings_of(recipe_class(recipe).options_type, "options.")
    for one in (*settings_of(TrainConfig), *options):
        *path, name = one.name.split(".")
        inner: object = given
        for part in path:
            inner = inner.get(part) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping) and name in inner:
            given = _merged(given, _nested(one.name, as_meant(one, inner[name])))
    return dict(given)


def _nested(name: str, value: object) -> dict[str, object]:
    """The nested object that a dotted name and its value stand for, as `optimization.lr`."""
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
