"""The settings of a training run, in the parts that several files read, and what their numbers may be.

A run that cannot work is refused before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from draftkit.data.states import AHEAD, Encoding
from draftkit.errors import DraftkitError
from draftkit.io.records import Bounds
from draftkit.layout.architecture import MAX_REPEATS, MAX_SIZE

Share = Annotated[float, Bounds(least=0, most=1)]
ProperShare = Annotated[float, Bounds(least=0, below=1)]
Finite = Annotated[float, Bounds()]
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
    - `rounds`: `decoded` for real from the samples' last prompts on, so that the text is the target's own; or
      `simulated` over the samples as they are, which takes answers of the target's own, but not the time of decoding
      them again.

    K and how tokens are drawn are those of `validation`.
    """

    share: Share = 0.5
    weight: Positive = 4.0
    rounds: Literal["decoded", "simulated"] = "decoded"


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
