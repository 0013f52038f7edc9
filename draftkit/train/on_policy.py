"""On-policy training: on text in the draft's own words, and on the drafts that serving rejects.

A share of the steps can train on samples that the draft goes on with itself (DistillSpec, arXiv 2310.08461). In another
share, drafts that serving rejects count more (after Draft-OPD, arXiv 2605.29343): a draft that learns from given text
meets each position alike; in serving the places count where its drafts are rejected, as each ends a round. The rounds
of the present draft are found by decoding the samples' prompts with it, which leaves the target's own text, or by
simulating them on answers that are the target's own already. The states that the draft has there are the ones it makes
itself in serving: up to the first rejection its own tokens are those of the text (`validation`), and what it drafts
beyond is thrown away. N positions, K drafts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftkit.data.regenerate import row_seed
from draftkit.data.samples import Sample
from draftkit.loading import load_drafter
from draftkit.requests import DraftSampling, Request, SamplingParameters
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation
from draftkit.targets.pretrained import of_language_model
from draftkit.targets.rope import Positions
from draftkit.targets.target import Target
from draftkit.train.batch import TrainingBatch
from draftkit.train.checkpoint import draft_in_memory
from draftkit.train.recipes.recipe import Recipe
from draftkit.train.settings import OnPolicy, Validation
from draftkit.train.sharding import whole
from draftkit.train.validation import simulate_rounds

NUM_SLOTS = 32  # samples that are decoded together


def continued(samples: Sequence[Sample], draft: PreTrainedModel, sampling: SamplingParameters) -> list[Sample]:
    """Each sample with the last span of its loss mask, and what follows it, replaced by what `draft` says there.

    Nothing gets longer, and the loss mask has what the draft has said alone. A sample that begins with its only span,
    has none, or is longer than the draft's positions stays as it is. Sample i is drawn with the seed
    `sampling.seed` + i. `draft` keeps its weights, mode and attention function.
    """
    requests, positions = [], Positions.of(draft.config)
    for number, sample in enumerate(samples):
        begin, end = sample.spans[-1] if sample.spans else (0, 0)
        if begin and end - begin <= positions.room(begin):
            prompt = tuple(sample.tokens[:begin].tolist())
            requests.append(Request(str(number), prompt, end - begin, sampling.numbered(number)))
    out = list(samples)
    if not requests:
        return out
    with runtime_attention(draft):
        slots = min(NUM_SLOTS, len(requests))
        # Eager: CUDA graphs would be captured anew at every call.
        engine = Engine(Target(draft), None, num_speculative_tokens=0, num_slots=slots, eager=True)
        for generation in engine.generate(requests):
            number, prompt = int(generation.request.id), generation.request.prompt
            tokens = np.array([*prompt, *generation.tokens], dtype=np.int32)
            loss_mask = np.arange(len(tokens)) >= len(prompt)
            out[number] = replace(samples[number], tokens=tokens, loss_mask=loss_mask)
    return out


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


class Rejected(NamedTuple):
    """A draft that serving rejected: draft `step` of the chain whose newest state is that of position `anchor`."""

    step: int
    anchor: int


class ServedSamples(NamedTuple):
    """Samples as serving has written them, and the drafts that it rejected in each, by positions of the sample."""

    samples: list[Sample]
    rejected: list[list[Rejected]]


class RejectionStage:
    """Finds the rejections of a draft in training in some of its steps; the same again in a run that is resumed.

    `validation` says how serving drafts and draws; `target` is the one that trains, in this process.
    """

    def __init__(self, settings: OnPolicy, validation: Validation, target: PreTrainedModel, seed: int):
        self.settings = settings
        self.validation = validation
        self.target = target
        self.seed = seed

    def due(self, step: int) -> bool:
        """Whether rejections count more in this step; the answer is the same on all devices."""
        return random.Random(f"{self.seed} {step}").random() < self.settings.share

    def serve(self, recipe: Recipe, samples: Sequence[Sample], step: int) -> ServedSamples:
        """The samples with the last span of their loss mask, and what follows, decoded anew with the recipe's draft.

        Nothing gets longer. A sample that begins with its only span, or has none, stays as it is.
        """
        temperature = self.validation.temperature if self.validation.mode == "sampled" else 0.0
        requests = []
        for number, sample in enumerate(samples):
            begin, end = sample.spans[-1] if sample.spans else (0, 0)
            if begin:
                drawn = SamplingParameters(temperature, seed=row_seed(self.seed, sample.id, step))
                requests.append(Request(str(number), tuple(sample.tokens[:begin].tolist()), end - begin, drawn))
        served = list(samples)
        rejected: list[list[Rejected]] = [[] for _ in samples]
        if requests:
            with serving(recipe, self.target, self.validation.k, min(NUM_SLOTS, len(requests))) as engine:
                for generation in engine.generate(requests):
                    number = int(generation.request.id)
                    served[number] = _as_served(samples[number], generation)
                    rejected[number] = list(rejections(generation))
        return ServedSamples(served, rejected)

    def weights(self, served: ServedSamples, size: int) -> Tensor:
        """float32 [K, N] of a row of `size` tokens that the samples are packed into, one after the other."""
        weights = torch.ones(self.validation.k, size)
        begin = 0
        for sample, rejected in zip(served.samples, served.rejected, strict=True):
            for step, anchor in rejected:
                weights[step, begin + anchor] = self.settings.weight
            begin += len(sample)
        return weights

    @torch.no_grad()
    def simulated_weights(self, recipe: Recipe, batch: TrainingBatch, step: int) -> Tensor:
        """float32 [K, N] of a batch, whose text is taken for the target's own."""
        chains = recipe.chains(batch, self.validation.k)
        generator = torch.Generator().manual_seed(row_seed(self.seed, "walk", step))
        weights = torch.ones(chains.drafted.shape, device=batch.tokens.device)
        for rounds in simulate_rounds(batch, chains, self.validation.mode, generator).values():
            for r in rounds:
                if r.accepted < r.drafted:
                    weights[r.accepted, r.anchor] = self.settings.weight
        return weights


def rejections(generation: Generation) -> Iterator[Rejected]:
    """The drafts that were rejected, one at most a round; positions are those of prompt and output."""
    for r in generation.rounds:
        anchor = r.position - 2  # the newest token has no state yet
        if r.accepted < r.drafted and r.position + r.accepted < generation.length:
            yield Rejected(r.accepted, anchor)


@contextmanager
def serving(recipe: Recipe, target: PreTrainedModel, k: int, num_slots: int) -> Iterator[Engine]:
    """Draft and target in training, for a while as an engine with `k` drafts a round, as many as the draft can make."""
    with runtime_attention(target), judging(recipe), torch.autocast(target.device.type, enabled=False):
        draft = draft_in_memory(recipe.spec, recipe.tensors(), target=target.name_or_path)
        drafter = load_drafter(draft, target)
        yield Engine(
            Target(target, drafter.aux_layers),
            drafter,
            num_speculative_tokens=k if drafter.max_tokens is None else min(k, drafter.max_tokens),
            num_slots=num_slots,
            draft_sampling=DraftSampling(mode="probabilistic"),
            eager=True,  # CUDA graphs would be captured anew at every call
        )


@contextmanager
def judging(recipe: Recipe) -> Iterator[None]:
    """A recipe in training, for a while whole on each device and without dropout."""
    was_training = recipe.training
    recipe.eval()
    try:
        with whole(recipe):  # its forward would do so, but chains and tensors are methods of their own
            yield
    finally:
        recipe.train(was_training)


def _as_served(sample: Sample, generation: Generation) -> Sample:
    """The sample up to its last span, then what was generated; earlier spans stay in the loss mask."""
    begin = len(generation.request.prompt)
    tokens = np.array([*generation.request.prompt, *generation.tokens], dtype=np.int32)
    loss_mask = np.ones(len(tokens), dtype=np.bool_)
    loss_mask[:begin] = sample.loss_mask[:begin]
    return replace(sample, tokens=tokens, loss_mask=loss_mask)
