"""The settings of a training run, in the parts that several files read, and what their numbers may be.

A run that cannot work is refused before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from draftkit.data.states import WAITING_ROWS, Encoding
from draftkit.errors import DraftkitError
from draftkit.io.records import Bounds
from draftkit.io.settings import setting
from draftkit.layout.architecture import MAX_REPEATS, MAX_SIZE

Share = Annotated[float, Bounds(least=0, most=1)]
ProperShare = Annotated[float, Bounds(least=0, below=1)]
Weight = Annotated[float, Bounds(least=0)]
Positive = Annotated[float, Bounds(above=0)]
Size = Annotated[int, Bounds(least=1, most=MAX_SIZE)]
SizeOrNone = Annotated[int, Bounds(least=0, most=MAX_SIZE)]  # 0 means none of it, or the default
Index = SizeOrNone
Repeats = Annotated[int, Bounds(least=1, most=MAX_REPEATS)]  # how often there is a layer, head or step
RepeatsOrDefault = Annotated[int, Bounds(least=0, most=MAX_REPEATS)]
Seed = Annotated[int, Bounds(least=0, below=2**32)]  # what numpy takes
# The schedules of transformers that need no numbers of their own.
Schedule = Literal[
    "linear", "cosine", "cosine_with_restarts", "polynomial", "constant", "constant_with_warmup", "inverse_sqrt"
]
POLYNOMIAL_END = 1e-7  # the learning rate that transformers' polynomial schedule ends with
# The learning rate of new drafts is what DeepSpec and SpecForge train block drafters with, DeepSpec EAGLE-3 too; that
# of drafts that have learned, what SpecForge trains EAGLE-3 with. SmolLM2's EAGLE-3 accepts most from 5e-4 to 4e-3
# (benchmarks/LOG.md).
NEW_DRAFT_LR, NEW_DRAFT_LR_BY_MUON, TRAINED_DRAFT_LR = 6e-4, 2e-3, 1e-4
MUON_DECAY = 0.1  # without it weights grow in long runs (arXiv 2502.16982)


def window_setting() -> Any:
    """The option of a recipe that gives its layers a window."""
    return setting("The tokens that the layers attend to, a row's own among them; none for all.", None, unit="tokens")


def sinks_setting() -> Any:
    """The option of a recipe that shows layers with a window the first tokens too."""
    said = "The first tokens of a text to which layers with a window attend besides."
    return setting(said, 0, unit="tokens", needs="options.sliding_window")


@dataclass(frozen=True, kw_only=True)
class LoraSettings:
    """Adapters instead of all weights (`peft`)."""

    r: Size = setting("The rank of the adapters.", 16)
    alpha: Size = setting("The scale of the adapters, which is divided by the rank.", 32)
    dropout: ProperShare = setting("The share of an adapter's inputs that are zeroed in training.", 0.0)
    dora: bool = setting("Whether the magnitude of weights is trained apart from their direction (DoRA).", False)
    targets: tuple[str, ...] = setting(
        "The endings of the names of adapted modules; all linear layers where empty.", ()
    )


@dataclass(frozen=True, kw_only=True)
class Optimization:
    """Optimizer and schedule, in the terms of transformers' `TrainingArguments`."""

    lr: Positive | None = setting(
        f"The highest learning rate; default: {NEW_DRAFT_LR:g} for a new draft, {NEW_DRAFT_LR_BY_MUON:g} by Muon, "
        f"{TRAINED_DRAFT_LR:g} for one that has learned.",
        None,
    )
    optimizer: Literal["auto", "adamw", "muon"] = setting(
        "adamw, or muon for all matrices but tables of tokens; auto: muon for new drafts of EAGLE-3, P-EAGLE, "
        "DFlash and DSpark, adamw for others.",
        "auto",
    )
    schedule: Schedule = setting("How the learning rate changes, as transformers names it.", "cosine")
    warmup: Weight = setting("The steps in which the learning rate rises, or below 1 the share of all steps.", 0.02)
    weight_decay: Weight | None = setting(
        f"The weight decay: AdamW's of all weights, default 0, or Muon's of its matrices, default {MUON_DECAY:g}.", None
    )
    beta1: ProperShare = setting("The decay of AdamW's mean of gradients.", 0.9)
    beta2: ProperShare = setting("The decay of AdamW's mean of squared gradients.", 0.95)
    clip: Weight = setting("The largest norm of the gradient, 0 for any.", 0.5)
    epochs: Positive = setting("Passes over the samples, where max_steps is 0.", 1.0)
    max_steps: SizeOrNone = setting("How long to train, instead of epochs; 0 for the epochs.", 0, unit="steps")
    accumulation: Size = setting("The batches whose gradients make one step.", 1, unit="batches")
    precision: Literal["auto", "float32", "bfloat16"] = setting(
        "The number format that the draft computes in; auto chooses by the device.", "auto"
    )
    compile: bool = setting("Whether torch compiles the draft.", False)
    recompute: bool = setting("Whether activations are computed again in the backward pass instead of kept.", False)

    def __post_init__(self) -> None:
        if self.schedule == "polynomial" and self.lr is not None and self.lr <= POLYNOMIAL_END:
            raise DraftkitError(
                f"optimization.lr {self.lr}", expected=f"above {POLYNOMIAL_END}, where the polynomial schedule ends"
            )


@dataclass(frozen=True, kw_only=True)
class Validation:
    """How drafts are judged while they train.

    The best checkpoint is saved even between those of `save_every`. Equal lengths are told apart by the chance that a
    draft token is accepted, then by the loss.
    """

    samples: str = setting("A prepared file of samples; empty for a share of the training samples.", "")
    share: Share = setting(
        "The share of the training samples that is held out where there is no file of samples.", 0.05
    )
    k: Repeats = setting("Draft tokens a round.", 4, unit="tokens")
    mode: Literal["greedy", "sampled"] = setting("How the samples were decoded.", "greedy")
    temperature: Positive = setting(
        "The temperature at which the samples were decoded.", 1.0, needs="validation.mode sampled"
    )
    every: SizeOrNone = setting("How far apart validations are; 0 for the end only.", 0, unit="steps")
    limit: Size = setting("The most samples that are used.", 256, unit="samples")
    keep: Literal["best", "last"] = setting(
        "Which checkpoint the final draft is: that of the longest acceptance length (best) or the last.", "best"
    )
    patience: SizeOrNone = setting(
        "Validations in a row without a better draft after which the run ends; 0 for none.", 0, needs="validation.every"
    )

    def __post_init__(self) -> None:
        if self.patience and not self.every:
            raise DraftkitError(
                f"validation.patience {self.patience} without validations in between",
                hint="set validation.every to the steps between them",
            )


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """States that a worker computes with vLLM while the run uses them up."""

    python: str = setting(
        "The interpreter of an environment with vLLM, for a worker that the run starts; empty where one is "
        "started elsewhere, with `draftkit data stream FOLDER --target T`.",
        "",
    )
    folder: str = setting("The folder that is shared with the worker; empty for stream in the run's own.", "")
    ahead: Size = setting(
        "The most rows that wait in the folder for each process of the run.", WAITING_ROWS, unit="rows"
    )
    encoding: Encoding = setting("How states are stored in the folder.", "bf16")
    dtype: Literal["float32", "bfloat16", "float16"] = setting(
        "The number format in which vLLM runs the target.", "bfloat16"
    )
    tensor_parallel: Size = setting("The GPUs that share the target.", 1, unit="GPUs")
    device: str = setting("The first GPU that the worker takes; empty for the first of all.", "")
