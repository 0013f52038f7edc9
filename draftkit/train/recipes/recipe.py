"""What every recipe is: a draft with its training loss, and what its chains would have met in serving.

N positions, K draft tokens of a chain, R rows of all steps.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from draftkit.io.records import from_dict, to_dict
from draftkit.layout.families import name_of_file
from draftkit.layout.folder import Draft
from draftkit.layout.spec import DraftSpec
from draftkit.targets.states import AuxLayers
from draftkit.train.batch import TrainingBatch
from draftkit.train.lora import merged_state
from draftkit.train.losses.linear import LinearLoss
from draftkit.train.losses.teacher import OutputHead, TargetHead


class StepOutcome(NamedTuple):
    """`loss`: a scalar to be differentiated. `statistics`: detached scalars by name, for the log."""

    loss: Tensor
    statistics: dict[str, Tensor]


class Chains(NamedTuple):
    """Chains of K drafts from every position of a batch, with the true tokens as their prefix: all [K, N].

    - `drafted` bool: `TrainingBatch.drafted`; the others mean nothing elsewhere.
    - `agree` bool: the draft's choice for token i + 2 + t is the target's own choice there.
    - `ratio`: min(1, q/p) of that token, the probability that it had been drafted, given that it was emitted.
    - `alpha`: Σ_v min(p_v, q_v). `oov`: the target's mass outside the draft vocabulary.
    """

    drafted: Tensor
    agree: Tensor
    ratio: Tensor
    alpha: Tensor
    oov: Tensor

    @classmethod
    def of(cls, drafted: Tensor, found: LinearLoss, steps: Tensor, positions: Tensor) -> Self:
        """The chains of `drafted` bool [K, N], by what was found of their rows at `steps` and `positions` int64 [R]."""
        columns = []
        for values in (found.agree, found.ratio, found.alpha, found.oov):
            assert values is not None
            column = values.new_zeros(drafted.shape)
            column[steps, positions] = values
            columns.append(column)
        return cls(drafted, *columns)


@dataclass(frozen=True)
class Origin:
    """What a recipe starts from: the target, a draft to go on with, the chosen draft vocabulary.

    Of `target`, only its embedding and output layer are needed (`targets.tokens.TargetEmbeddings`).
    `d2t_ids` int64 [Vd]: the target's ids of the draft vocabulary, None for all of them.
    """

    target: PreTrainedModel
    draft: Draft | None = None
    d2t_ids: Tensor | None = None


class Recipe(nn.Module, ABC):
    """A draft in training.

    `draft`: its parameters carry the names of the unified layout, the target's on loan aside; `spec` describes it.
    """

    name: ClassVar[str]  # what users call it, from the name of its file
    options_type: ClassVar[type]  # a frozen dataclass: what can be set of the recipe, with defaults
    needs_draft: ClassVar[bool] = False  # whether there has to be one to start from
    optimizer: ClassVar[Literal["adamw", "muon"]] = "adamw"  # of a new draft, where the run names none
    starts_from: ClassVar[str] = ""  # the draft that it starts from where the run names none
    head: TargetHead  # the target's output layer as a teacher

    def __init_subclass__(cls) -> None:
        cls.name = name_of_file(cls.__module__.rpartition(".")[2]) or cls.__name__

    def __init__(self, draft: nn.Module, spec: DraftSpec):
        super().__init__()
        self.draft = draft
        self.spec = spec
        self.stored_names = frozenset(name for name, schema in spec.tensors().items() if schema.required)

    @classmethod
    def start(cls, origin: Origin, options: object) -> Self:
        """A recipe with a new draft, or with the origin's. Raises `DraftkitError` when that draft is of another kind,
        or an option does not fit."""
        assert isinstance(options, cls.options_type)
        checked: object = from_dict(
            cls.options_type, to_dict(options), f"recipe {cls.name}", "the configuration", "options"
        )
        return cls(origin, checked)  # type: ignore[arg-type]  # all recipes are made of these two

    def follow(self, target: PreTrainedModel) -> None:
        """Take the target's output layer anew, after its weights have changed."""
        layer = target.get_output_embeddings()
        self.head = replace(self.head, head=OutputHead(layer.weight.detach(), getattr(layer, "bias", None)))

    @property
    @abstractmethod
    def aux_layers(self) -> AuxLayers | None:
        """The target's states that the draft reads, as a batch's `features`; None where the last ones are enough."""

    @abstractmethod
    def forward(self, batch: TrainingBatch) -> StepOutcome:
        """The training loss of a batch."""

    @abstractmethod
    def chains(self, batch: TrainingBatch, k: int) -> Chains:
        """Chains of `k` drafts as serving would draft them; without gradients."""

    @property
    def layers_run_once(self) -> Sequence[nn.Module]:
        """The layers that run once in each forward, whatever the batch, and whose weights nothing else reads: each may
        be gathered for itself where the draft is sharded."""
        return ()

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of a checkpoint, by their names in the unified layout."""
        found = self.stored(merged_state(self.draft))
        sharded = isinstance(self, FSDPModule)  # what is whole for a while does not stay
        return {name: tensor.clone() for name, tensor in found.items()} if sharded else found

    def stored(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The part of the draft's `state_dict` that belongs to it and not to the target."""
        return {name: tensor for name, tensor in state.items() if name in self.stored_names}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over the tensors of a checkpoint."""
        state = self.draft.state_dict()
        for name, tensor in tensors.items():
            state[name].copy_(tensor)


@torch.no_grad()
def step_statistics(found: LinearLoss, steps: Tensor, positions: Tensor, counted: Tensor) -> dict[str, Tensor]:
    """What a training step logs of each step of its chains: means over the counted rows of the loss, of the agreement
    with the target's choice and of the acceptance probability; and over all rows the target's mass that the draft
    vocabulary lacks.

    `steps`, `positions` int64 [R] of the rows; `counted` bool [K, N].
    """
    weight = counted[steps, positions].float()
    k = len(counted)
    totals = weight.new_zeros(k).index_add_(0, steps, weight).clamp(min=1)
    out: dict[str, Tensor] = {}
    for name, values in (("loss", found.loss), ("agree", found.agree), ("alpha", found.alpha)):
        if values is not None:
            means = weight.new_zeros(k).index_add_(0, steps, values.float() * weight) / totals
            out |= {f"{name}_{t + 1}": mean for t, mean in enumerate(means)}
    if found.oov is not None:
        out["oov"] = (found.oov.float() * weight).sum() / weight.sum().clamp(min=1)
    return out
