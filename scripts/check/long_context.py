"""A draft whose keys beyond some distance draw all attention, which a window mends: does the doctor name that window?

`python -m scripts.check.long_context OUT [--draft zoo:eagle3] [--window 128]` writes the spoiled draft to OUT; then
`draftkit doctor --target zoo:target --draft OUT --context 640` names the window, and what it says brings the acceptance
back.

Some pairs of rotary dimensions are taken from the content of queries and keys, and given biases instead: the scores
that these add depend on the distance of a key alone, and are fitted to a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from draftkit.convert.unified import write_draft
from draftkit.doctor.patient import changed
from draftkit.layout.facts import with_facts
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import Draft
from draftkit.loading import open_draft

PERIODS = (
    4.0,
    8.0,
    16.0,
)  # wave lengths, as multiples of the window, in turns of a radian; of the pairs that are taken
HEIGHT = 8.0  # of the step, in the logarithm of attention weights
REACH = 8  # times the window, up to which the step is fitted


def drawn_afar(draft: Draft, window: int) -> Draft:
    """The draft with attention to keys at `window` and more tokens that outweighs all nearer ones."""
    architecture = with_facts(draft.spec.architecture, qkv_bias=True, output_bias=True)  # engines have all or none
    decoder = architecture.expect(EagleSpec).decoder
    spoiled = changed(draft, architecture)
    tensors: dict[str, Tensor] = {}
    pairs, key = _fitted(decoder.rope.base, decoder.head_dim, window)
    dims = [dim for pair in pairs for dim in (pair, pair + decoder.head_dim // 2)]
    query = torch.zeros(decoder.head_dim)
    query[list(pairs)] = decoder.head_dim**0.5
    for name, handle in spoiled.tensors.items():
        for part, bias in (("q_proj", query), ("k_proj", key)):
            if name.endswith(f"{part}.weight"):
                heads = handle.load().unflatten(0, (-1, decoder.head_dim)).clone()
                heads[:, dims] = 0
                tensors[name] = heads.flatten(0, 1)
                tensors[name.replace(".weight", ".bias")] = bias.repeat(len(heads)).to(heads.dtype)
    return changed(spoiled, tensors=tensors)


def _fitted(base: float, head_dim: int, window: int) -> tuple[Sequence[int], Tensor]:
    """The pairs that are taken, and the bias of keys [D] beside which that of queries is √D in each pair."""
    turns = base ** (-torch.arange(head_dim // 2, dtype=torch.float64) * 2 / head_dim)  # radians a token
    pairs = sorted({int((turns * window * period / 4 - 1).abs().argmin()) for period in PERIODS})
    distance = torch.arange(REACH * window, dtype=torch.float64)
    angles = distance[:, None] * turns[pairs]
    waves = torch.cat((angles.cos(), angles.sin(), torch.ones_like(angles[:, :1])), dim=1)
    near, edge = distance < window, (distance >= window) & (distance < 1.3 * window)
    weight = torch.where(near, 20.0, torch.where(edge, 0.05, 1.0)).double()[:, None]
    step = torch.where(near, 0.0, HEIGHT).double()[:, None]
    ridge = 1e-3 * len(distance) * torch.eye(waves.shape[1], dtype=torch.float64)
    found = torch.linalg.solve((waves * weight).T @ (waves * weight) + ridge, (waves * weight).T @ (step * weight))
    key = torch.zeros(head_dim)
    for number, pair in enumerate(pairs):
        key[pair], key[pair + head_dim // 2] = float(found[number]), float(found[len(pairs) + number])
    return pairs, key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="zoo:target")
    parser.add_argument("--draft", default="zoo:eagle3")
    parser.add_argument("--window", type=int, default=128)
    options = parser.parse_args()
    with open_draft(options.draft, options.target) as draft:
        write_draft(options.out, drawn_afar(draft, options.window))
    print(f"{options.out}: {options.draft}, drawn to keys {options.window} tokens away and further")


if __name__ == "__main__":
    main()
