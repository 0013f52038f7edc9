"""The three ways to have the target's states for a run, and what each takes: compute them online, store, or stream."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftkit.data.states.choices import ENCODINGS, Encoding
from draftkit.data.states.encoding import channel_bytes, vector_bytes


@dataclass(frozen=True, kw_only=True)
class Way:
    """`bytes` that lie on the disk at most, and `seconds` that the target computes, in all and for a sample."""

    bytes: int
    seconds: float
    sample_bytes: int
    sample_seconds: float


@dataclass(frozen=True, kw_only=True)
class Ways:
    """What the states of `samples` with `tokens` take, of which a run reads each `passes` times.

    `online`: the target in the run's process, for every pass. `store`: once, for all of them. `stream`: a worker beside
    the run, for every pass; of its bytes no more than those of the rows that wait. `encodings`: what storing takes in
    others. `estimate`: what the seconds are from.
    """

    samples: int
    tokens: int
    passes: float
    encoding: Encoding
    online: Way
    store: Way
    stream: Way
    encodings: dict[str, int]
    estimate: str


def compare_ways(
    *,
    samples: int,
    tokens: int,
    states: int,
    size: int,
    encoding: Encoding,
    passes: float,
    waiting_tokens: int,
    token_seconds: float,
    estimate: str,
) -> Ways:
    """The ways for `states` vectors of `size` numbers a token. `waiting_tokens`: those of the rows that a stream holds;
    `token_seconds`: what the target takes."""

    def stored(tokens: float, samples: float, encoding: Encoding) -> int:
        offsets = torch.int64.itemsize * samples
        return round(
            states * (tokens * vector_bytes(size, encoding) + samples * channel_bytes(size, encoding)) + offsets
        )

    mean = tokens / samples
    once = tokens * token_seconds
    waiting = min(waiting_tokens, tokens)
    whole, part = stored(tokens, samples, encoding), stored(waiting, waiting / mean, encoding)

    def way(bytes: int, seconds: float, held: int) -> Way:
        return Way(bytes=bytes, seconds=seconds, sample_bytes=held, sample_seconds=seconds / samples)

    each = stored(mean, 1, encoding)
    return Ways(
        samples=samples,
        tokens=tokens,
        passes=passes,
        encoding=encoding,
        online=way(0, once * passes, 0),
        store=way(whole, once, each),
        stream=way(part, once * passes, each),
        encodings={other: stored(tokens, samples, other) for other in ENCODINGS},
        estimate=estimate,
    )
