"""B: how far the logits of one context move with the shape of the forward that computes them.

Decoding runs one row per sequence, verification K+1, a batch B times as many: other shapes, other orders of summation,
other roundings. Where two tokens are closer than that, either may win. N emitted tokens, B sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftkit.evaluate.near_ties import SAFETY, most_of_rounding, teacher_forced
from draftkit.requests import Request
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.records import Generation
from draftkit.targets.media import of_length
from draftkit.targets.target import Target

CANDIDATES = 16  # the most likely tokens of a context, among which its winner will be


@dataclass(frozen=True)
class NoiseFloor:
    """What may pass for numerics: margins up to `floor`, in logits.

    `measured` is twice the `quantile` of how far the margin between two likely tokens moves between a teacher-forced
    pass and forwards of `shapes` (sequences, rows), over `contexts`; `typical` is the root mean square of that. The
    floor is what was measured, within what rounding can do: a bug that moves logits may not raise it. In `ties`
    contexts the two best tokens are closer than the floor, in `flips` another token won in some shape. `tie_rate`: the
    share of contexts whose two best are closer than noise drawn from what was measured, the largest over all shapes.
    `resolution`: one unit in the last place of the largest logit.
    """

    floor: float
    measured: float
    quantile: float
    typical: float
    contexts: int
    shapes: tuple[tuple[int, int], ...]
    ties: int
    flips: int
    tie_rate: float
    resolution: float

    @property
    def explicable(self) -> bool:
        """Whether rounding can be all that moves the logits."""
        return self.measured <= self.floor

    @property
    def divergences_per_1000_tokens(self) -> float:
        """How often decoding may take another token, at most."""
        return 1000 * self.tie_rate

    def possible(self, tokens: int) -> float:
        """How many divergences numerics explain among so many tokens; as if one more tie had been seen."""
        return tokens * (self.tie_rate + 1 / self.contexts)


def measure_noise(target: Target, texts: Sequence[Generation], *, k: int, together: int, quantile: float) -> NoiseFloor:
    """The floor on the contexts of some texts, for rounds of K = `k` drafts in batches of `together` sequences."""
    shapes = tuple(sorted({(b, rows) for b in (1, min(together, len(texts))) for rows in (1, k + 1)}))
    whole = [teacher_forced(target.model, text.request.prompt, text.tokens) for text in texts]
    best = [logits.topk(min(CANDIDATES, logits.shape[1])) for logits in whole]
    spreads = []
    flipped = torch.zeros(sum(len(text.tokens) for text in texts), dtype=torch.bool, device=target.device)
    for sequences, rows in shapes:
        moved = [
            values
            for begin in range(0, len(texts), sequences)
            for values in logits_in_rounds(
                target, texts[begin : begin + sequences], rows, [b.indices for b in best[begin : begin + sequences]]
            )
        ]
        shift = torch.cat(moved) - torch.cat([b.values for b in best])
        spreads.append(shift.amax(-1) - shift.amin(-1))
        flipped |= torch.cat(moved).argmax(-1) != 0
    spread = torch.stack(spreads)
    gaps = torch.cat([b.values[:, 0] - b.values[:, 1] for b in best])
    resolution = float(torch.cat([b.values for b in best]).abs().max()) * torch.finfo(target.dtype).eps
    measured = SAFETY * float(spread.double().quantile(quantile))
    floor = min(max(measured, resolution), most_of_rounding(target.dtype, resolution))
    return NoiseFloor(
        floor=floor,
        measured=measured,
        quantile=quantile,
        typical=float(spread.double().square().mean().sqrt()),
        contexts=len(gaps),
        shapes=shapes,
        ties=int((gaps <= floor).sum()),
        flips=int(flipped.sum()),
        tie_rate=float((spread.amax(0) >= gaps[:, None]).double().mean()),
        resolution=resolution,
    )


@torch.inference_mode()
def logits_in_rounds(
    target: Target, texts: Sequence[Generation], rows: int, candidates: Sequence[Tensor]
) -> list[Tensor]:
    """The logits float32 [N, C] of each text's candidates int64 [N, C], from forwards of `rows` rows of every text."""
    emitted = [len(text.tokens) for text in texts]
    cache = SlotCache(len(texts), max(text.length for text in texts) + max(emitted) + rows)
    slots = torch.arange(len(texts), device=target.device)
    shifts = torch.cat([_prefill(target, cache, slot, text.request) for slot, text in enumerate(texts)])
    starts = torch.tensor([len(text.request.prompt) - 1 for text in texts], device=target.device)
    parts: list[list[Tensor]] = [[] for _ in texts]
    for begin in range(0, max(emitted), rows):
        positions = starts[:, None] + begin + torch.arange(rows, device=target.device)
        window = [_window(text, begin, rows) for text in texts]
        tokens = torch.tensor(window, device=target.device)
        places = positions + shifts[:, None] if target.shifts else positions
        logits = target.forward(tokens, places, cache.rows(slots, positions, cache.capacity)).logits
        for part, row, wanted in zip(parts, logits, candidates, strict=True):
            wanted = wanted[begin : begin + rows]
            part.append(row[: len(wanted)].gather(1, wanted).float())
    return [torch.cat(part) for part in parts]


def _prefill(target: Target, cache: SlotCache, slot: int, request: Request) -> Tensor:
    """Take in a prompt but for its last token; the `shift` of `TargetOutput`, 0 where there is none."""
    prompt, shift = request.prompt[:-1], None
    if prompt:
        media = None if request.media is None else of_length(request.media, len(prompt))
        tokens = torch.tensor([prompt], device=target.device)
        positions = torch.arange(len(prompt), device=target.device)[None]
        rows = cache.rows(torch.tensor([slot], device=target.device), positions, len(prompt), prompt=True)
        shift = target.forward(tokens, positions, rows, last_only=True, media=media).shift
    return torch.zeros(1, dtype=torch.int64, device=target.device) if shift is None else shift


def _window(text: Generation, begin: int, rows: int) -> list[int]:
    """The tokens that predict emitted tokens `begin` … `begin` + `rows` − 1; any token beyond the end."""
    inputs = [text.request.prompt[-1], *text.tokens[:-1]][begin : begin + rows]
    return inputs + [0] * (rows - len(inputs))
