"""The rounds that a tree would have, walked along the target's own text without the target scoring one.

The text is what plain decoding gives: with a tree it would be the same, at any temperature. So the drafter drafts at a
round's anchor, from the target's states of the text, the tree is followed along the text, and the next anchor is where
it ends. Round for round that is what a run with the tree does, up to ties of scores in rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from draftkit.evaluate.measure import Conversations
from draftkit.evaluate.runtime_lane import engine_of
from draftkit.requests import Request
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.drafters.protocol import Committed, Drafter, Expands, Grow, NewSequence
from draftkit.runtime.growth import Frontier, Growth, likeliest
from draftkit.runtime.tree import walk
from draftkit.runtime.tree_kinds import MOST_NODES, DraftTree
from draftkit.targets.media import Media, of_length
from draftkit.targets.target import Target


class Text(NamedTuple):
    """A prompt and its answer, which goes on beyond its end; `prompt` tokens of it were asked, `length` is to where the
    answer counts. `media`: of a prompt with images."""

    tokens: Tensor
    prompt: int
    length: int
    media: Media | None = None


def own_texts(target: Target, conversations: Conversations, further: int) -> list[Text]:
    """What the target answers to each first request, and `further` tokens, as the last round of a run may accept more
    than is asked for."""
    settings, requests = conversations.settings, conversations.first_requests
    engine = engine_of(Target(target.model), None, settings, num_slots=min(settings.concurrency, len(requests)))
    longer = [replace(r, max_new_tokens=r.max_new_tokens + further, ignore_eos=True) for r in requests]
    return [
        Text(
            torch.tensor([*request.prompt, *generation.tokens], device=target.device),
            len(request.prompt),
            len(request.prompt) + _end(target, request, generation.tokens),
            request.media,
        )
        for request, generation in zip(requests, engine.generate(longer), strict=True)
    ]


def _end(target: Target, request: Request, tokens: Sequence[int]) -> int:
    """How many tokens the answer has once it is cut at its end."""
    ends = request.stop_token_ids | (frozenset() if request.ignore_eos else target.eos_token_ids)
    cut = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return min(cut, request.max_new_tokens)


def simulate_trees(
    target: Target, drafter: Drafter, texts: Sequence[Text], trees: Sequence[DraftTree]
) -> dict[DraftTree, list[list[int]]]:
    """By tree, how many nodes stand in each round of each text, as a run with it would have them."""
    found: dict[DraftTree, list[list[int]]] = {tree: [] for tree in trees}
    for text, features, cache in _with_states(target, texts):
        for tree in found:
            growths = _Growing(tree, text.tokens)
            found[tree].append(_rounds(drafter, tree.depth, tree.span, text, features, cache, growths))
    return found


def rank_paths(target: Target, drafter: Drafter, texts: Sequence[Text], depth: int) -> list[tuple[int | None, ...]]:
    """Of each round of a chain of `depth` drafts, how far down in the draft's order the text's own tokens are, each
    given those before it; None beyond the first `MOST_NODES`, and where the draft has none."""
    found: list[tuple[int | None, ...]] = []

    def growths(anchor: int) -> tuple[Grow, Callable[[], int]]:
        following = _Following(text.tokens[anchor + 1 :])

        def accepted() -> int:
            found.append(tuple(following.ranks))
            return next((d for d, rank in enumerate(following.ranks) if rank != 0), depth)

        return following, accepted

    for text, features, cache in _with_states(target, texts):
        _rounds(drafter, depth, depth + 1, text, features, cache, growths)
    return found


class _Following:
    """A `Grow` that goes along a text, and notes how far down in the draft's order each of its tokens is."""

    def __init__(self, text: Tensor):
        self._text = text
        self.ranks: list[int | None] = []

    def __call__(self, logits: Tensor, ids: Tensor | None = None) -> Frontier:
        return self.children(*likeliest(logits, MOST_NODES, ids))

    def children(self, values: Tensor, tokens: Tensor) -> Frontier:
        own = self._text[len(self.ranks)]
        found = ((tokens[0, 0] == own) & (values[0, 0] > -torch.inf)).nonzero()
        self.ranks.append(int(found[0]) if len(found) else None)
        depths = torch.arange(len(self.ranks), device=own.device)
        return Frontier(own[None, None], own.new_zeros(1, 1), (depths >= 0)[None, None], depths)


class _Growing:
    """What grows a tree at each anchor of a text, and tells how much of it stands."""

    def __init__(self, tree: DraftTree, text: Tensor):
        self.tree = tree
        self.text = text

    def __call__(self, anchor: int) -> tuple[Grow, Callable[[], int]]:
        growth, depth = Growth.of(self.tree.shape), self.tree.depth

        def accepted() -> int:
            grown = growth.tree()
            below = grown.ancestors(depth).sum(-1) - 1
            chosen = self.text[anchor + 1 + below]  # what the target gives after each row, where it is on the text
            return int((walk(grown, chosen, torch.ones_like(chosen[:, 0]) > 0, depth) >= 0).sum()) - 1

        return growth, accepted


def _with_states(target: Target, texts: Sequence[Text]) -> Iterator[tuple[Text, Tensor | None, SlotCache]]:
    """Each text with the target's states [n, F] of it, None where none are read, and its keys and values."""
    for text in texts:
        cache = SlotCache(1, len(text.tokens))
        yield text, _features(target, text, cache), cache


@torch.inference_mode()
def _features(target: Target, text: Text, cache: SlotCache) -> Tensor | None:
    tokens = text.tokens
    media = None if text.media is None else of_length(text.media, len(tokens))
    positions = torch.arange(len(tokens), device=tokens.device)[None]
    rows = cache.rows(torch.zeros_like(tokens[:1]), positions, len(tokens), prompt=True)
    features = target.forward(tokens[None], positions, rows, last_only=True, media=media).features
    return None if features is None else features[0]


@torch.inference_mode()
def _rounds(
    drafter: Drafter,
    depth: int,
    span: int,
    text: Text,
    features: Tensor | None,
    cache: SlotCache,
    growths: Callable[[int], tuple[Grow, Callable[[], int]]],
) -> list[int]:
    """How many drafts stand in each round until the text has its length; `growths` gives at an anchor what is grown
    there, and what tells then how much of it stands."""
    assert isinstance(drafter, Expands)
    tokens, prompt = text.tokens, text.prompt
    capacity = len(tokens) + span + 2
    drafter.allocate(1, capacity, depth)
    drafter.prefill([NewSequence(0, tokens[:prompt], None if features is None else features[:prompt])])
    told, anchor, stood = prompt, prompt, list[int]()
    one = torch.ones_like(tokens[:1])
    while anchor + 1 < text.length:
        new = tokens[None, told : anchor + 1]
        states = None if features is None else features[None, told - 1 : anchor]
        growth, accepted = growths(anchor)
        committed = Committed(one - 1, new, one * new.shape[1], one * told, states, capacity, cache)
        drafter.expand(committed, depth, growth)
        stood.append(accepted())
        told, anchor = anchor + 1, anchor + 1 + stood[-1]
    return stood
