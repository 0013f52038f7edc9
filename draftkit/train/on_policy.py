"""Samples that go on in the draft's own words (on-policy distillation: DistillSpec, arXiv 2310.08461)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
from transformers import PreTrainedModel

from draftkit.data.samples import Sample
from draftkit.requests import Request, SamplingParameters
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.engine import Engine
from draftkit.targets.positions import Positions
from draftkit.targets.target import Target

NUM_SLOTS = 32  # samples that are continued together


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
    with _generating(draft) as target:
        slots = min(NUM_SLOTS, len(requests))
        # Eager: CUDA graphs would be captured anew at every call.
        engine = Engine(target, None, num_speculative_tokens=0, num_slots=slots, eager=True)
        for generation in engine.generate(requests):
            number, prompt = int(generation.request.id), generation.request.prompt
            tokens = np.array([*prompt, *generation.tokens], dtype=np.int32)
            loss_mask = np.arange(len(tokens)) >= len(prompt)
            out[number] = replace(samples[number], tokens=tokens, loss_mask=loss_mask)
    return out


@contextmanager
def _generating(draft: PreTrainedModel) -> Iterator[Target]:
    """A model in training, for a while as one that generates."""
    was_training, attention = draft.training, draft.config._attn_implementation
    draft.set_attn_implementation(ATTENTION)
    try:
        yield Target(draft)
    finally:
        draft.set_attn_implementation(attention)
        draft.train(was_training)
