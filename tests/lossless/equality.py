"""C, and D with shared noise: the tokens of plain decoding, whatever K, the batch and the way a sequence ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from draftkit.errors import NonFiniteError
from draftkit.requests import SamplingParameters
from draftkit.runtime.records import Generation
from lossless.pair import Pair
from lossless.poisoned import PoisonedTarget
from lossless.replay import Replay


@dataclass(frozen=True)
class Divergence:
    """Where the output of a request first differs from plain decoding: `position` counts emitted tokens from 0.

    `margin`: how far the worse of the two tokens lies below the best, in logits; ∞ where one output just ends.
    """

    request: str
    position: int
    margin: float


@dataclass(frozen=True)
class Equality:
    """One run beside plain decoding. `tokens` were emitted; `worst` is the token that lies furthest below the best."""

    name: str
    num_speculative_tokens: int
    concurrency: int
    requests: int
    tokens: int
    worst: Divergence
    divergences: tuple[Divergence, ...]


def greedy_equalities(
    pair: Pair, plain: Sequence[Generation], replay: Replay, ks: Sequence[int], batch: int
) -> list[Equality]:
    """Each K, one sequence at a time and batches of up to `batch`, whose sequences have different lengths; K that
    changes with the batch; ends inside a draft; and NaN in every rejected row, which must change nothing."""
    k = max(ks)
    more = min(2 * k, pair.most_tokens)
    changing = {1: 1, max(batch // 2, 2): more, max(batch, 3): k}
    stop = _common_token(plain)
    ending = [replace(request, stop_token_ids=frozenset([stop])) for request in pair.requests]

    def compare(name: str, outputs: Sequence[Generation], drafts: int, slots: int) -> Equality:
        return compare_outputs(name, outputs, plain, replay, drafts, slots)

    run = pair.speculative
    return [
        *(compare("one at a time", run(pair.requests, k=n, num_slots=1), n, 1) for n in ks),
        *(compare("in batches", run(pair.requests, k=n, num_slots=batch), n, batch) for n in ks),
        compare("one draft a round", run(pair.requests, k=1, num_slots=batch), 1, batch),
        compare(
            "K changes with the batch",
            run(pair.requests, k=more, num_slots=batch, k_by_batch=changing),
            more,
            batch,
        ),
        compare_outputs(
            "ends inside drafts",
            run(ending, k=k, num_slots=batch),
            [_ended(generation, stop) for generation in plain],
            replay,
            k,
            batch,
        ),
        _poisoned_equality(pair, plain, replay, k, batch),
    ]


def _poisoned_equality(pair: Pair, plain: Sequence[Generation], replay: Replay, k: int, batch: int) -> Equality:
    """NaN in every rejected row; the engine stops where it reads one."""
    name = "rejected rows poisoned with NaN"
    try:
        outputs = pair.speculative(pair.requests, k=k, num_slots=batch, target=PoisonedTarget, eager=True)
    except NonFiniteError:
        read = Divergence(pair.requests[0].id, 0, torch.inf)
        return Equality(name, k, batch, len(pair.requests), 0, read, (read,))
    return compare_outputs(name, outputs, plain, replay, k, batch)


def coupled_equality(pair: Pair, sampling: SamplingParameters, replay: Replay, k: int, batch: int) -> Equality:
    """Drawn tokens, where draft and target share the noise of plain decoding; cuts and all."""
    requests = pair.sampled(sampling)
    outputs = pair.speculative(requests, k=k, num_slots=batch, verification="coupled")
    name = f"drawn at temperature {sampling.temperature:g} with shared noise"
    return compare_outputs(name, outputs, pair.plain(requests), replay, k, batch)


def compare_outputs(
    name: str, outputs: Sequence[Generation], plain: Sequence[Generation], replay: Replay, k: int, batch: int
) -> Equality:
    """Outputs beside plain decoding, request by request."""
    found = [_divergence(a, b, replay) for a, b in zip(outputs, plain, strict=True)]
    return Equality(
        name=name,
        num_speculative_tokens=k,
        concurrency=batch,
        requests=len(outputs),
        tokens=sum(len(output.tokens) for output in outputs),
        worst=max((_worst(output, replay) for output in outputs), key=lambda worst: worst.margin),
        divergences=tuple(divergence for divergence in found if divergence is not None),
    )


def _divergence(output: Generation, plain: Generation, replay: Replay) -> Divergence | None:
    if output.tokens == plain.tokens:
        return None
    pairs = enumerate(zip(output.tokens, plain.tokens, strict=False))
    position = next((i for i, (mine, other) in pairs if mine != other), None)
    if position is None:
        return Divergence(output.request.id, min(len(output.tokens), len(plain.tokens)), torch.inf)
    margin = max(float(replay.margins(generation)[position]) for generation in (output, plain))
    return Divergence(output.request.id, position, margin)


def _worst(output: Generation, replay: Replay) -> Divergence:
    margin, position = replay.margins(output).max(-1)
    return Divergence(output.request.id, int(position), float(margin))


def _common_token(plain: Sequence[Generation]) -> int:
    """The token in most outputs, not counting the first of each, which no draft could hold."""
    seen = [token for generation in plain for token in set(generation.tokens[1:])]
    return max(sorted(set(seen)), key=seen.count)


def _ended(generation: Generation, stop: int) -> Generation:
    """The output up to its first `stop`."""
    tokens = generation.tokens
    return replace(generation, tokens=tokens[: tokens.index(stop) + 1] if stop in tokens else tokens)
