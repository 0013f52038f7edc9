"""EAGLE and EAGLE-3 modules against a reference in straight-line tensor code."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.zoo_models import draw_greedy
from fixtures.engines.draft_references import eagle3_reference, eagle_reference

from draftkit.convert.api import convert_checkpoint
from draftkit.layout.folder import read_draft
from draftkit.models.eagle import load_eagle
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.drafters.eagle import EagleDrafter
from draftkit.runtime.drafters.protocol import Committed, NewSequence
from draftkit.targets.target import load_target

K = 5
WINDOW = 4


CASES = {
    "eagle": (pico.eagle_config(), pico.eagle_tensors()),
    "eagle, rope base 500000": (pico.eagle_config(rope_theta=500000.0), pico.eagle_tensors()),
    "eagle, fc.bias": (pico.eagle_config(bias=None), pico.eagle_tensors(bias=True)),
    "eagle, borrowed embedding": (pico.eagle_config(), pico.eagle_tensors(embed=False)),
    "eagle, two layers, qkv bias": (
        pico.eagle_config(num_hidden_layers=2, qkv_bias=True),
        pico.eagle_tensors(layers=2, qkv_bias=True),
    ),
    "eagle, a window in one of two layers": (
        pico.eagle_config(
            num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"], sliding_window=WINDOW
        ),
        pico.eagle_tensors(layers=2),
    ),
    "eagle3": (pico.eagle3_config(), pico.eagle3_tensors()),
    "eagle3, own embedding": (pico.eagle3_config(), pico.eagle3_tensors(embed=True)),
    "eagle3, whole vocabulary": (
        pico.eagle3_config(draft_vocab_size=pico.VOCABULARY),
        pico.eagle3_tensors(draft_vocabulary=pico.VOCABULARY),
    ),
}


@pytest.mark.slow
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
    one_window = partial(eagle_reference, windows={1: WINDOW} if "window" in case else {})
    reference = eagle3_reference if is_eagle3 else one_window

    torch.manual_seed(3)
    prompt = torch.randint(3, pico.VOCABULARY, (9,))
    features = torch.randn(9, 3 * pico.HIDDEN if is_eagle3 else pico.HIDDEN)
    first = torch.tensor([5])  # what the target answered to the prompt

    drafter = EagleDrafter(model)
    drafter.allocate(1, 64, 4)
    drafter.prefill([NewSequence(0, prompt, features)])
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
    drafter.allocate(1, 64, 4)
    rows = drafter.cache.rows(torch.tensor([0]), positions, 9)
    shifted = torch.cat((prompt[1:], first))
    out = model(shifted[None], model.fuse(features[None]), positions, kv=rows)
    fused = features @ weights["fc.weight"].T if is_eagle3 else features
    head_input, feedback = reference(weights, shifted, fused, base)
    torch.testing.assert_close(out.feedback[0], feedback, rtol=2e-4, atol=2e-4)
    torch.testing.assert_close(model.logits(out.head_input)[0], head_input @ head.T, rtol=2e-4, atol=1e-3)
