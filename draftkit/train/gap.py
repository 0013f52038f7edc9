"""The gap report: does the draft accept in real decoding what training says that it accepts?

Training walks over held-out answers (`walk`); serving decodes them again with draftkit's runtime. For a draft whose
checkpoint is what was trained, on answers of the target's own, both lengths agree up to chance, and at temperature 0
exactly. A gap is a bug between training and serving; each possible cause is tested by itself and the ones found are
named with their evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftkit.data.packing import row_tensors
from draftkit.data.samples import Sample
from draftkit.data.states.online import ATTENTION as TARGET_ATTENTION
from draftkit.data.states.online import States
from draftkit.io.atomic import temporary_folder
from draftkit.layout.folder import read_draft
from draftkit.loading import load_drafter
from draftkit.models.target import FINAL, Target
from draftkit.results.statistics import Interval, bootstrap_length
from draftkit.runtime import ATTENTION, DraftSampling, Engine, Generation, Request, SamplingParameters
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.train.batch import Batch
from draftkit.train.recipes.recipe import Recipe
from draftkit.train.validation import Judged, acceptance, judge
from draftkit.train.walk import Mode

CHANCE = 0.05  # share of answers in which a rounding error may have turned a tie
STATE_TOLERANCE = 0.05  # relative difference of states; numerics of other batch shapes stay far below
SaveDraft = Callable[[Path, dict[str, Tensor]], None]
StatesOf = Callable[[Sample], States]


@dataclass(frozen=True)
class Cause:
    """What makes training and serving differ, how it was seen, and what to do."""

    name: str
    evidence: str
    remedy: str


@dataclass(frozen=True)
class Gap:
    """Acceptance lengths on the same answers, as training walks them and as serving decodes them."""

    walked: Interval
    decoded: Interval
    causes: tuple[Cause, ...]

    @property
    def closed(self) -> bool:
        """Whether they agree within their intervals."""
        return self.walked.low <= self.decoded.high and self.decoded.low <= self.walked.high

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"closed": self.closed}


def report_gap(
    recipe: Recipe,
    samples: Sequence[Sample],
    target: PreTrainedModel,
    *,
    states_of: StatesOf,
    save_draft: SaveDraft,
    k: int,
    mode: Mode,
    temperature: float = 0.0,
) -> Gap:
    """Walk and decode the first answer of each sample.

    `target` is the one that trains, in this process; `states_of` gives the states that training reads, `save_draft`
    writes a checkpoint's folder, which the runtime loads. `temperature`: of the answers, with the mode `sampled`.
    """
    answers = [answer for sample in samples if (answer := first_answer(sample)) is not None]
    batches = [_batch(answer, states_of(answer), target) for answer in answers]
    judged = [found for number, batch in enumerate(batches) for found in judge(recipe, batch, [number], k, mode)]
    target.set_attn_implementation(ATTENTION)
    try:
        with temporary_folder() as scratch:
            folder = scratch / "draft"
            save_draft(folder, recipe.tensors())
            drafter = load_drafter(read_draft(folder), target)
            generations = _decode(answers, target, drafter, k, temperature)
        serving = [_serving_states(answer, target, drafter) for answer in answers[:1]]
    finally:
        target.set_attn_implementation(TARGET_ATTENTION)
    served = [_served_rounds(answer, generation) for answer, generation in zip(answers, generations, strict=True)]
    causes = [*_other_rotation(recipe, drafter)]
    if temperature == 0:
        causes += _other_text(answers, generations)
    for batch, states in zip(batches, serving, strict=False):
        causes += _other_states(batch, states, recipe)
    if temperature == 0 and not causes:
        causes += [*_other_mask(batches, generations)] or [*_other_rounds(judged, served, answers)]
    decoded = bootstrap_length([(sum(rounds), len(rounds)) for rounds in served if rounds])
    return Gap(acceptance(judged), decoded, tuple(causes))


def first_answer(sample: Sample) -> Sample | None:
    """The sample up to the end of its mask's first span; None without one that can be drafted after a prompt."""
    if not sample.spans or sample.spans[0][0] == 0:
        return None
    _, end = sample.spans[0]
    return Sample(sample.id, sample.tokens[:end], sample.loss_mask[:end], sample.category)


def _batch(answer: Sample, states: States, target: PreTrainedModel) -> Batch:
    row = {name: tensor[None].to(target.device) for name, tensor in row_tensors([answer], len(answer)).items()}
    return Batch(**row, features=states.features, last=states.last)


def _decode(
    answers: Sequence[Sample], target: PreTrainedModel, drafter: Drafter, k: int, temperature: float
) -> list[Generation]:
    requests = []
    for number, answer in enumerate(answers):
        begin, end = answer.spans[0]
        sampling = SamplingParameters(temperature=temperature, seed=number)
        requests.append(Request(answer.id, tuple(answer.tokens[:begin].tolist()), end - begin, sampling))
    k = k if drafter.max_tokens is None else min(k, drafter.max_tokens)
    engine = Engine(
        Target(target, drafter.aux_layers),
        drafter,
        num_speculative_tokens=k,
        num_slots=min(8, len(requests)),
        draft_sampling=DraftSampling(mode="probabilistic"),
    )
    return engine.generate(requests)


@torch.inference_mode()
def _serving_states(answer: Sample, target: PreTrainedModel, drafter: Drafter) -> Tensor | None:
    """What the runtime would give the draft for the whole answer: [1, T, F]."""
    tokens = torch.from_numpy(answer.tokens).long()[None].to(target.device)
    positions = torch.arange(tokens.shape[1], device=target.device)[None]
    slots = torch.zeros(1, dtype=torch.int64, device=target.device)
    rows = SlotCache(1, len(answer)).rows(slots, positions, len(answer))
    return Target(target, drafter.aux_layers).forward(tokens, positions, rows).features


def _other_text(answers: Sequence[Sample], generations: Sequence[Generation]) -> Iterator[Cause]:
    """The answers are not what the target would say."""
    differing = []
    for answer, generation in zip(answers, generations, strict=True):
        own = answer.tokens[answer.spans[0][0] :].tolist()
        if generation.tokens != own:
            pairs = zip(own, generation.tokens, strict=False)
            differing.append((answer.id, next((i for i, (a, b) in enumerate(pairs) if a != b), len(generation.tokens))))
    if len(differing) > CHANCE * len(answers):
        name, at = differing[0]
        yield Cause(
            "text",
            f"{len(differing)} of {len(answers)} answers are not the target's greedy ones: {name} from token {at} on",
            "regenerate the answers with this target as it is served; compare chat template and system prompt",
        )


def _other_states(batch: Batch, served: Tensor | None, recipe: Recipe) -> Iterator[Cause]:
    """Training and serving read other states of the target: another layer, or another norm."""
    if served is None:
        return
    trained = batch.last if batch.features is None else batch.features
    names = (FINAL,) if batch.features is None or recipe.aux_layers is None else recipe.aux_layers.states
    width = trained.shape[-1] // len(names)
    pairs = zip(trained.float().split(width, -1), served.float().split(width, -1), strict=True)
    for name, (mine, theirs) in zip(names, pairs, strict=True):
        off = float((mine - theirs).norm() / theirs.norm())
        if off > STATE_TOLERANCE:
            what = "after the final norm" if name == FINAL else f"after {name} layers"
            yield Cause(
                "states",
                f"the target's states {what} differ by {100 * off:.0f} % between training and serving",
                "write the states again; check layer ids (HF numbering) and whether the final norm is applied",
            )


def _other_rotation(recipe: Recipe, drafter: Drafter) -> Iterator[Cause]:
    """Draft and checkpoint rotate by other frequencies."""
    mine, theirs = (_frequencies(model) for model in (recipe.draft, getattr(drafter, "model", None)))
    if mine is not None and theirs is not None and not torch.allclose(mine, theirs.to(mine.device)):
        yield Cause(
            "rope",
            f"the slowest frequency is {float(mine[-1]):.3g} in training and {float(theirs[-1]):.3g} in the checkpoint",
            "rope base or scaling of the spec are not those that were trained",
        )


def _frequencies(model: object) -> Tensor | None:
    module = getattr(model, "model", model)  # a causal language model wears its own wrapper
    if not isinstance(module, nn.Module):
        return None
    return next((b.float() for name, b in module.named_buffers() if name.endswith("rotary.inv_freq")), None)


def _rounds(judged: Judged) -> list[int]:
    return [r.accepted for r in judged.rounds]


def _served_rounds(answer: Sample, generation: Generation) -> list[int]:
    """Drafts that stood, of those within the answer, as the walk counts them."""
    return [min(r.accepted, len(answer) - r.position) for r in generation.rounds]


def _other_mask(batches: Sequence[Batch], generations: Sequence[Generation]) -> Iterator[Cause]:
    """Serving drafts at positions that training does not count."""
    missed = []
    for batch, generation in zip(batches, generations, strict=True):
        drafted = batch.drafted(1)[0].tolist()
        # The round's drafts begin at its position; the feature that they come from lies two before.
        positions = [r.position for r in generation.rounds if r.position < len(drafted)]
        missed += [position for position in positions if not drafted[position - 2]]
    if missed:
        rounds = sum(len(generation.rounds) for generation in generations)
        yield Cause(
            "mask",
            f"serving drafts in {len(missed)} of {rounds} rounds where training counts nothing, as at {missed[0]}",
            "the mask of supervised tokens is shifted; prepare the data again and see draftkit data check",
        )


def _other_rounds(judged: Sequence[Judged], served: Sequence[list[int]], answers: Sequence[Sample]) -> Iterator[Cause]:
    """Same text, same states, and yet other rounds: the draft differs from its checkpoint."""
    differing = [i for i, (mine, theirs) in enumerate(zip(judged, served, strict=True)) if _rounds(mine) != theirs]
    if len(differing) <= CHANCE * len(answers):
        return
    first = differing[0]
    walked, decoded = _rounds(judged[first]), served[first]
    at = next((i for i, (a, b) in enumerate(zip(walked, decoded, strict=False)) if a != b), 0)
    evidence = (
        f"{len(differing)} of {len(answers)} answers have other rounds, as {answers[first].id} from round {at + 1} on: "
        f"walked {walked[at : at + 5]}, decoded {decoded[at : at + 5]}"
    )
    yield Cause("draft", evidence, "training and checkpoint disagree about the draft: positions, a norm, weights")
