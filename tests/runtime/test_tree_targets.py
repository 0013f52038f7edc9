"""The target's forward over trees against transformers, without a cache: a text of its own for every node."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel

from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.slot_rows import Branches
from draftkit.runtime.tree import Tree
from draftkit.targets.states import AuxLayers
from draftkit.targets.target import Target
from draftkit.targets.tiny import LAYERS, TEXT, random_model, tiny_config

NODES, LEVELS, CAPACITY, CLOSE = 9, 4, 80, 1e-3
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": {},
    "mistral": {"sliding_window": 4096},
    "gemma2": {},  # soft caps
    "gemma3_text": {},  # windows
    "gemma4_text": {"num_kv_shared_layers": 0},
    "llama4": {},  # chunks, and a temperature by position
    "deepseek_v3": {},  # latents
    "gpt_oss": {},  # sinks
}


def models(kind: str) -> tuple[PreTrainedModel, Target]:
    """A tiny model as transformers runs it, and as draftkit does."""
    tiny = tiny_config(CONFIG_MAPPING[kind](**KINDS[kind]))
    own = random_model(tiny, ATTENTION, seed=0, scale=0.2)
    return random_model(tiny, "eager", seed=0, scale=0.2), Target(own, AuxLayers((LAYERS // 2,)))


class Sequence:
    """A text that grows by random trees: `tokens`, the newest of which is the root."""

    def __init__(self, length: int, seed: int):
        self.random = random.Random(seed)
        self.tokens = [self.token() for _ in range(length)]

    def token(self) -> int:
        return self.random.choice(TEXT)

    def grow(self) -> None:
        """A random tree, some of whose last nodes are not there."""
        nodes = self.random.randint(1, NODES)
        depth, self.parents = [0], []
        for number in range(nodes):
            parent = self.random.choice([row for row in range(number + 1) if depth[row] < LEVELS])
            depth.append(depth[parent] + 1)
            self.parents.append(parent)
        self.parents += [-1] * (NODES - nodes)
        self.nodes = [self.token() for _ in range(NODES)]

    def path(self, row: int) -> list[int]:
        """The rows from the root to that one."""
        return [0] if row == 0 else [*self.path(self.parents[row - 1]), row]

    def text(self, row: int) -> list[int]:
        return self.tokens + [self.nodes[node - 1] for node in self.path(row)[1:]]

    @property
    def rows(self) -> list[int]:
        return [0, *(number + 1 for number, parent in enumerate(self.parents) if parent >= 0)]


@torch.inference_mode()
def expected(model: PreTrainedModel, texts: list[list[int]]) -> tuple[Tensor, Tensor]:
    """The logits [n, V] after texts, and the state [n, H] that draftkit captures there."""
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    last = torch.tensor([len(text) - 1 for text in texts])
    out = model(input_ids=ids, use_cache=False, output_hidden_states=True)
    each = torch.arange(len(texts))
    return out.logits[each, last], out.hidden_states[LAYERS // 2][each, last]


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_every_node_sees_its_own_path(kind: str) -> None:
    """Over rounds in which anything from nothing to a whole path is accepted, in slots that are out of order."""
    model, target = models(kind)
    sequences, slots = [Sequence(21, 1), Sequence(5, 2)], torch.tensor([2, 0, -1])
    cache = SlotCache(3, CAPACITY)
    for slot, sequence in zip(slots.tolist(), sequences, strict=False):
        prompt = torch.tensor([sequence.tokens[:-1]])
        positions = torch.arange(prompt.shape[1])[None]
        target.forward(prompt, positions, cache.rows(torch.tensor([slot]), positions, CAPACITY, prompt=True))
    for _ in range(4):
        for sequence in sequences:
            sequence.grow()
        vacant = [[7] * NODES], [[-1] * NODES], [[7]]
        tree = Tree(*(torch.tensor([*of, *rest]) for of, rest in zip(
            ([s.nodes for s in sequences], [s.parents for s in sequences]), vacant[:2], strict=True
        )))  # fmt: skip
        roots = torch.tensor([*([s.tokens[-1]] for s in sequences), *vacant[2]])
        first = torch.tensor([*([len(s.tokens) - 1] for s in sequences), [0]])
        ancestors = tree.ancestors(LEVELS)
        places = first + ancestors.sum(-1) - 1
        rows = cache.rows_of_tree(slots, Branches(first, places, ancestors), CAPACITY)
        output = target.forward(torch.cat((roots, tree.tokens), dim=1), places, rows, lengths=places + 1)
        path = torch.full((3, LEVELS + 1), -1)
        assert output.features is not None
        for number, sequence in enumerate(sequences):
            logits, states = expected(model, [sequence.text(row) for row in sequence.rows])
            found = output.logits[number, sequence.rows]
            assert (found - logits).abs().max() < CLOSE * logits.std()
            torch.testing.assert_close(output.features[number, sequence.rows], states, atol=1e-3, rtol=1e-3)
            taken = sequence.path(sequence.random.choice(sequence.rows))
            path[number, : len(taken)] = torch.tensor(taken)
            sequence.tokens = [*sequence.text(taken[-1]), sequence.token()]
        cache.keep_path(slots, first[:, 0], path)
