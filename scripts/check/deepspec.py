"""draftkit's DSpark against DeepSpec's own module, with the same weights: outputs, drafted tokens and confidence.

    git clone https://github.com/deepseek-ai/DeepSpec
    python -m scripts.check.deepspec --deepspec DeepSpec

For each kind of Markov head a random draft is made with DeepSpec's class, saved, converted, and both draft from random
target states in float32, after contexts of several lengths. Prints the largest difference of logits and of confidence,
and how many blocks agree in all tokens. Exits with 1 where one differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config

from draftkit.convert.api import convert_checkpoint
from draftkit.layout.folder import read_draft
from draftkit.models.dflash import load_dflash
from draftkit.runtime.attention import NAME
from draftkit.runtime.drafters.dflash import DFlashDrafter
from draftkit.runtime.drafters.protocol import Committed, NewSequence

V, H, BLOCK, MASK, LAYERS = 320, 64, 7, 319, 8
IDS = [1, 4, 6]
TOLERANCE = 1e-4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--deepspec", type=Path, required=True, help="a checkout of deepseek-ai/DeepSpec")
    sys.path.insert(0, str(parser.parse_args().deepspec))
    torch.set_num_threads(1)
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        for head in ("vanilla", "gated", "rnn", None):
            logits, confidence, equal, blocks = compare(head, Path(scratch) / str(head))
            print(
                f"{head or 'no Markov head'}: logits {logits:.1e}, confidence {confidence:.1e}, {equal}/{blocks} blocks"
            )
            failed |= equal < blocks or max(logits, confidence) > TOLERANCE
    sys.exit(int(failed))


def compare(head: str | None, folder: Path) -> tuple[float, float, int, int]:
    """The largest differences of logits and confidence, and how many blocks agree in all tokens, of how many."""
    from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel

    torch.manual_seed(0)
    theirs = Qwen3DSparkModel(config_of(head)).eval().float()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    theirs.save_pretrained(folder / "source")
    target = LlamaForCausalLM(
        LlamaConfig(vocab_size=V, hidden_size=H, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4)
    )
    ours = load_dflash(read_draft(convert_checkpoint(str(folder / "source"), folder / "draft")), target, attention=NAME)
    drafter = DFlashDrafter(ours, LAYERS)
    differences, equal, lengths = [], 0, (1, 2, 9, 40)
    for length in lengths:
        tokens, features = torch.randint(3, V - 1, (length,)), torch.randn(length - 1, len(IDS) * H)
        if length == 1:
            features = torch.randn(1, len(IDS) * H)
            tokens = torch.randint(3, V - 1, (2,))
        one, two = run_theirs(theirs, tokens, features), run_ours(drafter, tokens, features)
        differences.append([float((a - b).abs().max()) for a, b in zip(one[1:], two[1:], strict=True)])
        equal += torch.equal(one[0], two[0])
    logits, confidence = map(max, zip(*differences, strict=True))
    return logits, confidence, equal, len(lengths)


def config_of(head: str | None) -> Qwen3Config:
    config = Qwen3Config(
        vocab_size=V, hidden_size=H, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, tie_word_embeddings=False,
        layer_types=["full_attention"] * 2,
    )  # fmt: skip
    values = {
        "architectures": ["Qwen3DSparkModel"], "block_size": BLOCK, "mask_token_id": MASK, "target_layer_ids": IDS,
        "num_anchors": 8, "num_target_layers": LAYERS, "markov_rank": 0 if head is None else 8,
        "markov_head_type": head or "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": head is not None,
    }  # fmt: skip
    for key, value in values.items():
        setattr(config, key, value)
    config._attn_implementation = "sdpa"
    return config


@torch.inference_mode()
def run_theirs(model: Any, tokens: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Tokens, biased logits and confidence of the block after `tokens` [n], with the states of all but the last."""
    start = len(tokens) - 1
    ids = torch.cat((tokens[-1:], torch.full((BLOCK - 1,), MASK)))[None]
    hidden = model._forward_backbone(
        target_hidden_states=features[None], noise_embedding=model.embed_tokens(ids), attention_mask=None,
        position_ids=torch.arange(start + BLOCK)[None], past_key_values=DynamicCache(), use_cache=True, is_causal=False,
    )  # fmt: skip
    base = model.compute_logits(hidden)
    drafted, logits = model.sample_draft_tokens(base, first_prev_token_ids=ids[:, 0], hidden_states=hidden)
    previous = torch.cat((ids[:, :1], drafted[:, :-1]), dim=1)
    confidence = model.predict_confidence_step(hidden, prev_token_ids=previous).sigmoid().reshape(-1)
    return drafted[0], logits[0], confidence


def run_ours(drafter: DFlashDrafter, tokens: torch.Tensor, features: torch.Tensor) -> tuple[torch.Tensor, ...]:
    kept: list[torch.Tensor] = []

    def draw(step: int, logits: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        kept.append(logits[0])
        return logits.argmax(-1)

    drafter.allocate(1, len(tokens) + BLOCK, BLOCK)
    drafter.prefill([NewSequence(0, tokens[:-1], features)])
    one = torch.ones(1, dtype=torch.int64)
    committed = Committed(
        one - 1, tokens[None, -1:], one, one * (len(tokens) - 1), features[None, -1:], len(tokens) + BLOCK
    )
    proposal = drafter.propose(committed, BLOCK, draw)
    assert proposal.confidences is not None
    return proposal.tokens[0], torch.stack(kept), proposal.confidences[0]


if __name__ == "__main__":
    main()
