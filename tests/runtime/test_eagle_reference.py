"""EAGLE and EAGLE-3 modules against a reference in straight-line tensor code, written from the published descriptions.

The reference works on the foreign checkpoint's own tensors and recomputes everything from position 0 at every step; it
shares no code with the module, the cache or transformers.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures import pico
from torch import Tensor

from draftkit.convert.api import convert_checkpoint
from draftkit.layout.folder import read_draft
from draftkit.models.eagle import load_eagle
from draftkit.models.target import load_target
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.drafters.eagle import EagleDrafter
from draftkit.runtime.drafters.protocol import Committed
from draftkit.runtime.drawing import draw_greedy

HEADS, KV_HEADS, HEAD_DIM, EPS = 4, 2, 16, 1e-5
K = 5


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + EPS) * weight


def rotate(x: Tensor, positions: Tensor, base: float) -> Tensor:
    """Rotary embedding of [T, heads, d], pairing feature i with i + d/2."""
    half = HEAD_DIM // 2
    angles = positions[:, None].double() * base ** (-2 * torch.arange(half).double() / HEAD_DIM)
    cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attend(x: Tensor, w: dict[str, Tensor], prefix: str, base: float) -> Tensor:
    """Causal attention of rows [T, in] at positions 0 … T−1, one head and one row at a time."""
    rows, positions = len(x), torch.arange(len(x))

    def project(name: str, heads: int) -> Tensor:
        out = x @ w[f"{prefix}self_attn.{name}_proj.weight"].T
        bias = w.get(f"{prefix}self_attn.{name}_proj.bias")
        return (out if bias is None else out + bias).view(rows, heads, HEAD_DIM)

    q = rotate(project("q", HEADS), positions, base)
    k = rotate(project("k", KV_HEADS), positions, base)
    v = project("v", KV_HEADS)
    out = torch.zeros(rows, HEADS, HEAD_DIM)
    for head in range(HEADS):
        group = head // (HEADS // KV_HEADS)
        for row in range(rows):
            scores = k[: row + 1, group] @ q[row, head] / HEAD_DIM**0.5
            out[row, head] = scores.softmax(0) @ v[: row + 1, group]
    return out.view(rows, -1) @ w[f"{prefix}self_attn.o_proj.weight"].T


def mlp(x: Tensor, w: dict[str, Tensor], prefix: str) -> Tensor:
    gate, up, down = (w[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
    return (torch.nn.functional.silu(x @ gate) * (x @ up)) @ down


def eagle_reference(w: dict[str, Tensor], tokens: Tensor, hidden: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """EAGLE-1: fc over [embedding, hidden] at every row; layer 0 without input norm; no final norm."""
    x = torch.cat((w["embed_tokens.weight"][tokens], hidden), dim=-1) @ w["fc.weight"].T + w.get("fc.bias", 0.0)
    for index in range(sum(name.endswith("o_proj.weight") for name in w)):
        prefix = f"layers.{index}."
        normed = x if index == 0 else rms(x, w[f"{prefix}input_layernorm.weight"])
        x = x + attend(normed, w, prefix, base)
        x = x + mlp(rms(x, w[f"{prefix}post_attention_layernorm.weight"]), w, prefix)
    return x, x


def eagle3_reference(w: dict[str, Tensor], tokens: Tensor, hidden: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """EAGLE-3: attention over [normed embedding, normed hidden], residual un-normed, feedback before the final norm."""
    embedding = rms(w["embed_tokens.weight"][tokens], w["midlayer.input_layernorm.weight"])
    both = torch.cat((embedding, rms(hidden, w["midlayer.hidden_norm.weight"])), dim=-1)
    x = hidden + attend(both, w, "midlayer.", base)
    x = x + mlp(rms(x, w["midlayer.post_attention_layernorm.weight"]), w, "midlayer.")
    return rms(x, w["norm.weight"]), x


CASES = {
    "eagle": (pico.eagle_config(), pico.eagle_tensors()),
    "eagle, rope base 500000": (pico.eagle_config(rope_theta=500000.0), pico.eagle_tensors()),
    "eagle, fc.bias": (pico.eagle_config(bias=None), pico.eagle_tensors(bias=True)),
    "eagle, borrowed embedding": (pico.eagle_config(), pico.eagle_tensors(embed=False)),
    "eagle, two layers, qkv bias": (
        pico.eagle_config(num_hidden_layers=2, qkv_bias=True),
        pico.eagle_tensors(layers=2, qkv_bias=True),
    ),
    "eagle3": (pico.eagle3_config(), pico.eagle3_tensors()),
    "eagle3, own embedding": (pico.eagle3_config(), pico.eagle3_tensors(embed=True)),
    "eagle3, whole vocabulary": (
        pico.eagle3_config(draft_vocab_size=pico.VOCABULARY),
        pico.eagle3_tensors(draft_vocabulary=pico.VOCABULARY),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_chain_equals_reference(case: str, tmp_path: Path) -> None:
    config, tensors = CASES[case]
    source = pico.write_checkpoint(tmp_path / "source", config, tensors)
    pico.save_llama(tmp_path / "target")
    draft = read_draft(convert_checkpoint(str(source), tmp_path / "draft", target=str(tmp_path / "target")))
    target = load_target(tmp_path / "target", device="cpu", dtype=torch.float32, attention=ATTENTION)
    model = load_eagle(draft, target, attention=ATTENTION)

    is_eagle3 = case.startswith("eagle3")
    weights = {name: t.float() if t.is_floating_point() else t for name, t in tensors.items()}
    weights.setdefault("embed_tokens.weight", target.get_input_embeddings().weight)
    head = weights["lm_head.weight"] if is_eagle3 else target.lm_head.weight
    base = float(config.get("rope_theta", 10000.0))
    reference = eagle3_reference if is_eagle3 else eagle_reference

    torch.manual_seed(3)
    prompt = torch.randint(3, pico.VOCABULARY, (9,))
    features = torch.randn(9, 3 * pico.HIDDEN if is_eagle3 else pico.HIDDEN)
    first = torch.tensor([5])  # what the target answered to the prompt

    drafter = EagleDrafter(model)
    drafter.allocate(1, 64)
    drafter.prefill(0, prompt, features)
    proposal = drafter.propose(
        Committed(
            slots=torch.tensor([0]),
            tokens=first[None],
            counts=torch.tensor([1]),
            start=torch.tensor([9]),
            features=features[None, -1:],
            length=64,
        ),
        K,
        draw_greedy,
    )

    tokens = torch.cat((prompt[1:], first))
    hidden = features @ weights["fc.weight"].T if is_eagle3 else features
    expected = []
    for _ in range(K):
        head_input, feedback = reference(weights, tokens, hidden, base)
        best = int((head_input[-1] @ head.T).argmax())
        token = best + int(weights["d2t"][best]) if is_eagle3 else best
        expected.append(token)
        tokens = torch.cat((tokens, torch.tensor([token])))
        hidden = torch.cat((hidden, feedback[-1:]))
    assert proposal.tokens[0].tolist() == expected

    positions = torch.arange(9)[None]
    drafter.allocate(1, 64)
    rows = drafter.cache.rows(torch.tensor([0]), positions, 9)
    shifted = torch.cat((prompt[1:], first))
    out = model(shifted[None], model.fuse(features[None]), positions, kv=rows)
    fused = features @ weights["fc.weight"].T if is_eagle3 else features
    head_input, feedback = reference(weights, shifted, fused, base)
    torch.testing.assert_close(out.feedback[0], feedback, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(model.logits(out.head_input)[0], head_input @ head.T, rtol=2e-4, atol=1e-3)
