"""IBM's MLP speculator, in its two stages (arXiv 2404.19124, fms-fsdp).

Head t starts from the target's last state at position i, has read the tokens i + 1 … i + 1 + t, and drafts token
i + 2 + t. The first stage learns from all tokens of any text, the second from what the target has produced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from draftkit.errors import DraftkitError
from draftkit.io.settings import setting
from draftkit.layout.families.mlp_speculator import MlpSpeculatorSpec
from draftkit.layout.spec import DraftSpec
from draftkit.models.mlp_speculator import MlpSpeculatorModel, load_mlp_speculator
from draftkit.targets.states import AuxLayers
from draftkit.train.batch import TrainingBatch
from draftkit.train.losses.linear import LinearLoss, joined, linear_loss
from draftkit.train.losses.table import Loss, LossText, parse_loss
from draftkit.train.losses.teacher import OutputHead, Teacher, target_head
from draftkit.train.losses.weights import Reduction
from draftkit.train.recipes.bases.chain import ChainRows
from draftkit.train.recipes.recipe import Chains, Origin, Recipe, StepOutcome, step_statistics
from draftkit.train.settings import Positive, Repeats, SizeOrNone

PREFIX = "speculator."  # what the names in the unified layout begin with
CANDIDATES = (4, 3, 2)  # a head's branches in IBM's tree of candidates; the last holds for all further heads
NUM_CANDIDATES = 5


@dataclass(frozen=True)
class MlpSpeculatorOptions:
    """The recipe's settings; those of the architecture hold for a new draft only. The heads' losses are added up."""

    stage: Literal[1, 2] = setting("1: all tokens count; 2: those that the target has produced.", 2)
    loss: LossText = setting("The loss of each head, as ce, kl or 0.1*ce + kl; ce is that of the text's tokens.", "ce")
    temperature: Positive = setting("What divides the logits of draft and target before they are compared.", 1.0)
    num_heads: Repeats = setting("The heads, one for each draft token.", 4)
    inner_size: SizeOrNone = setting("The width of the heads' states; 0 for the target's width.", 0, unit="features")
    tied: bool = setting(
        "Whether all steps share embedding, norm and head, and steps from 1 share the projection.", True
    )
    scale_input: bool = setting("Whether the first state is normed and divided by √2.", True)


class MlpSpeculator(Recipe):
    """Trains MLP speculators."""

    options_type = MlpSpeculatorOptions
    draft: MlpSpeculatorModel

    def __init__(self, origin: Origin, options: MlpSpeculatorOptions):
        if origin.draft is None:
            draft = fresh_mlp_speculator(mlp_speculator_spec(origin, options)).to(origin.target.device)
        else:
            if origin.draft.spec.method != self.name:
                raise DraftkitError(
                    f"the draft is of the kind {origin.draft.spec.method}",
                    where=origin.draft.path,
                    hint=f"recipe {self.name} trains another",
                )
            draft = load_mlp_speculator(origin.draft, origin.target, dtype=torch.float32).requires_grad_(True)
        super().__init__(draft, DraftSpec(architecture=draft.spec, dtype="F32"))
        self.head = target_head(origin.target, None, options.temperature)
        self.options = options
        self.loss = parse_loss(options.loss)
        self.reduction = Reduction(normalized=False)

    @property
    def aux_layers(self) -> AuxLayers | None:
        return None

    def forward(self, batch: TrainingBatch) -> StepOutcome:
        k = self.draft.spec.num_heads
        counted = batch.complete(k) if self.options.stage == 1 else batch.drafted(k)
        teacher = self.head.teacher(batch.last[0]) if self.loss.needs_target else None
        rows, sizes = self.rows(batch, counted)
        found = self.compare(batch, rows, sizes, teacher, self.reduction.weights(counted), self.loss)
        return StepOutcome(found.value, step_statistics(found, rows.steps, rows.positions, counted))

    @torch.no_grad()
    def chains(self, batch: TrainingBatch, k: int) -> Chains:
        """The chains of `k` drafts. Raises `DraftkitError` for more drafts than heads."""
        if k > self.draft.spec.num_heads:
            raise DraftkitError(f"chains of {k} drafts", expected=f"at most {self.draft.spec.num_heads}, one a head")
        drafted = batch.drafted(k)
        rows, sizes = self.rows(batch, drafted)
        found = self.compare(batch, rows, sizes, self.head.teacher(batch.last[0]), drafted.float(), parse_loss("tv"))
        return Chains.of(drafted, found, rows.steps, rows.positions)

    def rows(self, batch: TrainingBatch, drafted: Tensor) -> tuple[ChainRows, list[int]]:
        """The rows of `drafted` bool [K, N], whose steps run on fewer and fewer, and how many each step has.

        They are counted on the CPU: of a GPU, each count would be waited for.
        """
        state, counted = self.draft.start(batch.last[0].float()), drafted.cpu()
        steps, places = counted.nonzero().T.to(state.device)  # step after step
        sizes = counted.sum(1).tolist()
        before, states = torch.arange(len(state), device=state.device), []
        for t, positions in enumerate(places.split(sizes)):
            kept = torch.searchsorted(before, positions)  # a chain that goes on was drafted at every step before
            tokens = batch.tokens[0, positions + 1 + t]
            state = self.draft.advance(t, state.index_select(0, kept), tokens)
            states.append(state)
            before = positions
        return ChainRows(steps, places, torch.cat(states)), sizes

    def compare(
        self,
        batch: TrainingBatch,
        rows: ChainRows,
        sizes: list[int],
        teacher: Teacher | None,
        weights: Tensor,
        loss: Loss,
    ) -> LinearLoss:
        """The distribution of every row against the target's, and against the tokens of the text; `sizes`: the rows of
        each step, which all count; `weights` float32 [K, N].

        One call per head, so that of tied heads one gradient is kept.
        """
        heads = list(self.draft.head)
        taught = rows.positions + 1 + rows.steps
        labels = batch.tokens[0, taught + 1]
        weights = weights[rows.steps, rows.positions]
        every, found = torch.arange(len(taught), device=taught.device), []
        parts = every.split(sizes) if len(heads) > 1 else (every,)
        for head, part in zip(heads[: len(parts)], parts, strict=True):
            assert isinstance(head, nn.Linear)
            found.append(
                linear_loss(
                    rows.hidden[part],
                    OutputHead(head.weight),
                    None if teacher is None else teacher.at(taught[part]),
                    weights[part],
                    loss,
                    labels=labels[part],
                    emitted=labels[part],
                    rows=every[: len(part)],
                )
            )
        return joined(found)

    def stored(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return super().stored({PREFIX + name: tensor for name, tensor in state.items()})

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        super().load({name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()})


def mlp_speculator_spec(origin: Origin, options: MlpSpeculatorOptions) -> MlpSpeculatorSpec:
    """The architecture of a new draft."""
    target = origin.target.config.get_text_config()
    if origin.d2t_ids is not None:
        raise DraftkitError("a draft vocabulary", expected="none: the heads of an MLP speculator have all tokens")
    further = (CANDIDATES[-1],) * max(options.num_heads - len(CANDIDATES), 0)
    return MlpSpeculatorSpec(
        target_hidden_size=target.hidden_size,
        inner_size=options.inner_size or target.hidden_size,
        vocab_size=target.vocab_size,
        num_heads=options.num_heads,
        tied=options.tied,
        scale_input=options.scale_input,
        top_k_per_head=(CANDIDATES + further)[: options.num_heads],
        num_candidates=NUM_CANDIDATES,
    )


def fresh_mlp_speculator(spec: MlpSpeculatorSpec) -> MlpSpeculatorModel:
    """A new draft in float32: N(0, 1/√inner) everywhere, norms that do nothing."""
    model = MlpSpeculatorModel(spec)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=spec.inner_size**-0.5)
    return model
