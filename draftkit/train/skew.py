"""Training-serving skew: does the draft accept in real decoding what training says that it accepts?

Training simulates the rounds of held-out answers (`validation`); serving decodes them again with draftkit's runtime.
For a draft whose checkpoint is what was trained, on answers of the target's own, both lengths agree up to chance, and
at temperature 0 exactly. A difference is a bug between training and serving; its causes are what `checks/skew.py`
finds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftkit.checks.evidence import Evidence, SkewReplay
from draftkit.checks.registry import findings
from draftkit.data.packing import row_tensors
from draftkit.data.sample_media import MediaOfSamples, no_media
from draftkit.data.samples import Sample
from draftkit.data.states.online import States
from draftkit.finding import Finding
from draftkit.io.atomic import temporary_folder
from draftkit.layout.architecture import Architecture
from draftkit.layout.facts import facts_of
from draftkit.layout.folder import read_draft
from draftkit.loading import load_drafter
from draftkit.requests import DraftSampling, Request, SamplingParameters
from draftkit.results.cell import Interval
from draftkit.results.statistics import length_over_prompts
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.drafters.protocol import Drafter
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation
from draftkit.targets.media import Media, of_length
from draftkit.targets.pretrained import of_language_model
from draftkit.targets.states import FINAL
from draftkit.targets.target import Target
from draftkit.train.batch import TrainingBatch
from draftkit.train.recipes.recipe import Recipe
from draftkit.train.validation import Mode, acceptance, judge

SaveDraft = Callable[[Path, dict[str, Tensor]], None]
StatesOfSample = Callable[[Sample], States]


@dataclass(frozen=True)
class Skew:
    """Acceptance lengths on the same answers, as training simulates their rounds and as serving decodes them."""

    simulated: Interval
    decoded: Interval
    causes: tuple[Finding, ...]

    @property
    def closed(self) -> bool:
        """Whether the simulated and the decoded length agree within their intervals."""
        return self.simulated.overlaps(self.decoded)


def measure_skew(
    recipe: Recipe,
    samples: Sequence[Sample],
    target: PreTrainedModel,
    *,
    states_of: StatesOfSample,
    save_draft: SaveDraft,
    k: int,
    mode: Mode,
    temperature: float = 0.0,
    media: MediaOfSamples = no_media,
) -> Skew:
    """Simulate and decode the rounds of the first answer of each sample.

    `target` is the one that trains, in this process; `states_of` gives the states that training reads, `save_draft`
    writes a checkpoint's folder, which the runtime loads. `temperature`: of the answers, with the mode `sampled`;
    `media`: of samples with images.
    """
    answers = [answer for sample in samples if (answer := first_answer(sample)) is not None]
    batches = [_batch(answer, states_of(answer), target) for answer in answers]
    judged = [found for number, batch in enumerate(batches) for found in judge(recipe, batch, [number], k, mode)]
    with runtime_attention(target), temporary_folder() as scratch:
        folder = scratch / "draft"
        save_draft(folder, recipe.tensors())
        drafter = load_drafter(read_draft(folder), target)
        seen = media(answers)
        generations = _decode(answers, seen, target, drafter, k, temperature)
        served = _serving_states(answers[0], seen.get(0), target, drafter) if answers else None
    replay = SkewReplay(
        answers=answers,
        generations=generations,
        greedy=temperature == 0,
        facts=_facts(recipe, drafter),
        frequencies=_rotations(recipe, drafter),
        states=[] if served is None else [*_states(batches[0], served, recipe)],
        drafted=[batch.drafted(1)[0].tolist() for batch in batches],
        simulated=[[r.accepted for r in found.rounds] for found in judged],
        decoded=[_served_rounds(answer, found) for answer, found in zip(answers, generations, strict=True)],
    )
    decoded = length_over_prompts([(sum(rounds), len(rounds)) for rounds in replay.decoded if rounds])
    return Skew(acceptance(judged), decoded, tuple(findings(Evidence(replay=replay), "skew")))


@contextmanager
def runtime_attention(model: PreTrainedModel) -> Iterator[None]:
    """While the body runs, a model generates with the attention function of draftkit's runtime; its mode stays."""
    own, was_training = model.config._attn_implementation, model.training
    model.set_attn_implementation(of_language_model(model.config, ATTENTION))
    try:
        yield
    finally:
        model.set_attn_implementation(of_language_model(model.config, own))
        model.train(was_training)


def show_skew(skew: Skew) -> None:
    """Say what explains that serving accepts otherwise than training says."""
    for cause in skew.causes:
        print(f"skew between training and serving, {cause.name}: {cause.message}; {cause.fix}", file=sys.stderr)
    if not skew.closed and not skew.causes:
        lengths = f"{skew.simulated.mean:.3f} and {skew.decoded.mean:.3f}"
        print(f"skew between training and serving: acceptance lengths {lengths}, of no known cause", file=sys.stderr)


def first_answer(sample: Sample) -> Sample | None:
    """The sample up to the end of its mask's first span; None without one that can be drafted after a prompt."""
    if not sample.spans or sample.spans[0][0] == 0:
        return None
    return sample.until(sample.spans[0][1])


def _batch(answer: Sample, states: States, target: PreTrainedModel) -> TrainingBatch:
    row = {name: tensor[None].to(target.device) for name, tensor in row_tensors([answer], len(answer)).items()}
    return TrainingBatch(**row, features=states.features, last=states.last)


def _decode(
    answers: Sequence[Sample],
    media: Mapping[int, Media],
    target: PreTrainedModel,
    drafter: Drafter,
    k: int,
    temperature: float,
) -> list[Generation]:
    requests = []
    for number, answer in enumerate(answers):
        begin, end = answer.spans[0]
        sampling = SamplingParameters(temperature=temperature, seed=number)
        prompt = tuple(answer.tokens[:begin].tolist())
        seen = media.get(number)
        of_prompt = None if seen is None else of_length(seen, begin)
        requests.append(Request(answer.id, prompt, end - begin, sampling, media=of_prompt))
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
def _serving_states(answer: Sample, media: Media | None, target: PreTrainedModel, drafter: Drafter) -> Tensor | None:
    """The states that the runtime would give the draft for the whole answer: [1, T, F]."""
    tokens = torch.from_numpy(answer.tokens).long()[None].to(target.device)
    positions = torch.arange(tokens.shape[1], device=target.device)[None]
    slots = torch.zeros(1, dtype=torch.int64, device=target.device)
    rows = SlotCache(1, len(answer)).rows(slots, positions, len(answer), prompt=True)
    return Target(target, drafter.aux_layers).forward(tokens, positions, rows, media=media).features


def _states(batch: TrainingBatch, served: Tensor, recipe: Recipe) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The target's states that training and serving read, one by one."""
    trained = batch.last if batch.features is None else batch.features
    names = (FINAL,) if batch.features is None or recipe.aux_layers is None else recipe.aux_layers.states
    width = trained.shape[-1] // len(names)
    pairs = zip(trained.float().split(width, -1), served.float().split(width, -1), strict=True)
    for name, (mine, theirs) in zip(names, pairs, strict=True):
        yield "after the final norm" if name == FINAL else f"after {name} layers", mine, theirs


def _facts(recipe: Recipe, drafter: Drafter) -> tuple[Mapping[str, object], Mapping[str, object]] | None:
    """The facts of draft and checkpoint, where their modules are built from facts."""
    mine, theirs = (getattr(model, "spec", None) for model in (recipe.draft, drafter.module))
    if not isinstance(mine, Architecture) or not isinstance(theirs, Architecture):
        return None
    return facts_of(mine), facts_of(theirs)


def _rotations(recipe: Recipe, drafter: Drafter) -> tuple[Tensor, Tensor] | None:
    """The frequencies by which draft and checkpoint rotate."""
    mine, theirs = (_frequencies(model) for model in (recipe.draft, drafter.module))
    return None if mine is None or theirs is None else (mine, theirs)


def _frequencies(model: object) -> Tensor | None:
    module = getattr(model, "model", model)  # a causal language model wears its own wrapper
    if not isinstance(module, nn.Module):
        return None
    return next((b.float() for name, b in module.named_buffers() if name.endswith("rotary.inv_freq")), None)


def _served_rounds(answer: Sample, generation: Generation) -> list[int]:
    """The accepted drafts of each round, of those within the answer, as the simulation counts them."""
    return [min(r.accepted, len(answer) - r.position) for r in generation.rounds]
