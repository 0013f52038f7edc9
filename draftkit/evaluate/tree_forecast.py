"""What a tree would accept, told without the target scoring one.

The text is the target's own, as plain decoding gives it: with a tree it would be the same, at any temperature. So the
rounds that a tree would have are walked again: the drafter drafts at the round's anchor, from the target's states of
the text, the tree is followed along the text, and the next anchor is where it ends. Round for round that is what a run
with the tree does, up to ties of scores in rounding. Anchors of a chain's run are others, and make trees look better
than they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile

import torch
from torch import Tensor

from draftkit.evaluate.measure import Conversations
from draftkit.evaluate.runtime_lane import engine_of
from draftkit.evaluate.speed import ROUNDS, round_time
from draftkit.requests import DraftSampling, Request
from draftkit.results.cell import Cell, ForecastTree, MeasuredTree, TreeSpeed
from draftkit.results.settings import Settings
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.drafters.protocol import Committed, Drafter, Expands, NewSequence
from draftkit.runtime.growth import Growth
from draftkit.runtime.tree import walk
from draftkit.runtime.tree_kinds import BLOCK_DEPTH, MOST_DEPTH, DraftTree, read_tree
from draftkit.targets.target import Target

WIDTH = 10  # children of a node, and nodes of a frontier, of drafts that read their own tokens


def usual_tree(drafter: Drafter, nodes: int, depth: int) -> DraftTree:
    """The tree of so many nodes that is drafted with a draft of its kind: dynamic where it reads its own tokens, else
    the likeliest paths; of at least `depth` levels where it drafts as many."""
    kind = getattr(drafter, "usual_tree", "best")
    depth = min(max(depth, BLOCK_DEPTH), drafter.max_tokens or MOST_DEPTH, nodes)
    width = {"eagle": f",topk={min(WIDTH, nodes)}", "suffix": ",width=4"}.get(kind, "")
    return read_tree(f"{kind}:nodes={nodes},depth={depth}{width}")


def forecast_trees(
    target: Target,
    drafter: Drafter,
    conversations: Conversations,
    cell: Cell,
    nodes: Sequence[int],
    batches: Sequence[int],
) -> list[ForecastTree]:
    """What trees of so many nodes would bring at each batch, against the chain of a cell and plain decoding."""
    settings, first = conversations.settings, conversations.first_requests
    trees = [usual_tree(drafter, number, cell.num_speculative_tokens) for number in nodes]
    stood = simulate_trees(target, drafter, conversations, trees)
    chain = 1.0 if cell.acceptance_length is None else cell.acceptance_length.mean
    plain = Target(target.model)
    times: dict[str | None, dict[int, float]] = {}
    new = (ROUNDS + 1) * (max(tree.depth for tree in trees) + 1)
    for name in ("", None, *(tree.name for tree in trees)):  # plain decoding, the chain, and the trees
        times[name] = {}
        runs, drafts = (plain, None) if name == "" else (target, drafter)
        for batch in batches:
            asked = [
                replace(first[i % len(first)], id=str(i), max_new_tokens=new, ignore_eos=True) for i in range(batch)
            ]
            times[name][batch] = round_time(runs, drafts, asked, _drafting(settings, name or None))
    found = []
    for tree in trees:
        rounds = [accepted for request in stood[tree] for accepted in request]
        length = 1 + sum(rounds) / max(len(rounds), 1)
        speeds = tuple(
            TreeSpeed(
                batch, length * times[""][batch] / times[tree.name][batch],
                length / chain * times[None][batch] / times[tree.name][batch],
            )
            for batch in batches
        )  # fmt: skip
        paying = [s.concurrency for s in takewhile(lambda s: min(s.over_plain, s.over_chain) > 1, speeds)]
        measured = MeasuredTree.of(tree)
        assert measured is not None
        found.append(ForecastTree(measured, length, speeds, max(paying, default=None)))
    return found


def _drafting(settings: Settings, tree: str | None) -> Settings:
    """The settings with a tree, without what goes with chains alone; or as they are."""
    if tree is None:
        return settings
    return replace(
        settings, tree=tree, verification="coupled", draft_sampling=DraftSampling(), acceptance_rates=None,
        k_by_batch=None, disable_above_batch=None,
    )  # fmt: skip


def simulate_trees(
    target: Target, drafter: Drafter, conversations: Conversations, trees: Sequence[DraftTree]
) -> dict[DraftTree, list[list[int]]]:
    """By tree, how many nodes stand in each round of each request, as a run with it would have them.

    The texts go on beyond their ends, as the last round of a run may accept more than is asked for.
    """
    settings = conversations.settings
    requests = conversations.first_requests
    further = max(tree.depth for tree in trees) + 1
    engine = engine_of(Target(target.model), None, settings, num_slots=min(settings.concurrency, len(requests)))
    longer = [replace(r, max_new_tokens=r.max_new_tokens + further, ignore_eos=True) for r in requests]
    found: dict[DraftTree, list[list[int]]] = {tree: [] for tree in trees}
    for request, generation in zip(requests, engine.generate(longer), strict=True):
        text = torch.tensor([*request.prompt, *generation.tokens], device=target.device)
        length = len(request.prompt) + _end(target, request, generation.tokens)
        cache = SlotCache(1, len(text))
        features = _features(target, text, cache)
        for tree in trees:
            found[tree].append(_rounds(drafter, tree, text, features, cache, len(request.prompt), length))
    return found


def _end(target: Target, request: Request, tokens: Sequence[int]) -> int:
    """How many tokens the answer has once it is cut at its end."""
    ends = request.stop_token_ids | (frozenset() if request.ignore_eos else target.eos_token_ids)
    cut = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
    return min(cut, request.max_new_tokens)


@torch.inference_mode()
def _features(target: Target, text: Tensor, cache: SlotCache) -> Tensor | None:
    """The target's states [n, F] of a whole text."""
    positions = torch.arange(len(text), device=text.device)[None]
    rows = cache.rows(torch.zeros_like(text[:1]), positions, len(text), prompt=True)
    features = target.forward(text[None], positions, rows, last_only=True).features
    return None if features is None else features[0]


@torch.inference_mode()
def _rounds(
    drafter: Drafter, tree: DraftTree, text: Tensor, features: Tensor | None, cache: SlotCache, prompt: int, length: int
) -> list[int]:
    """How many nodes stand in each round until the text has `length` tokens."""
    assert isinstance(drafter, Expands)
    capacity = len(text) + tree.span + 2
    drafter.allocate(1, capacity, tree.depth)
    drafter.prefill([NewSequence(0, text[:prompt], None if features is None else features[:prompt])])
    told, anchor, stood = prompt, prompt, list[int]()
    one = torch.ones_like(text[:1])
    while anchor + 1 < length:
        new = text[None, told : anchor + 1]
        states = None if features is None else features[None, told - 1 : anchor]
        growth = Growth.of(tree.shape)
        drafter.expand(
            Committed(one - 1, new, one * new.shape[1], one * told, states, capacity, cache), tree.depth, growth
        )
        grown = growth.tree()
        depth = grown.ancestors(tree.depth).sum(-1) - 1
        chosen = text[anchor + 1 + depth]  # what the target gives after each row, where it is on the text
        accepted = int((walk(grown, chosen, one > 0, tree.depth) >= 0).sum()) - 1
        stood.append(accepted)
        told, anchor = anchor + 1, anchor + 1 + accepted
    return stood
