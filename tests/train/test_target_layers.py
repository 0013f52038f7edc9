"""A new block drafter begins as the target's last layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fixtures.precision import assert_close
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from draftkit.models.dflash import DFlashModel
from draftkit.targets.tokens import load_embeddings
from draftkit.train.attention import Blocks
from draftkit.train.recipes.bases.dflash import BlockHeads, block_spec, fresh_block_draft
from draftkit.train.recipes.bases.initialization import begin_as_target
from draftkit.train.recipes.dflash import DFlash, DFlashOptions
from draftkit.train.recipes.recipe import Origin

LAYERS = 3
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "tie_word_embeddings": False,
}
OPTIONS = DFlashOptions(layers=(1, LAYERS - 1), num_layers=1, mask_token_id=63)


def target(kind: type[PreTrainedModel], config: type, **more: object) -> PreTrainedModel:
    torch.manual_seed(0)
    model = kind(config(**SIZES, **more)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(parameter + torch.randn(parameter.shape) * 0.3)
    return model


@pytest.fixture
def qwen3() -> PreTrainedModel:
    return target(Qwen3ForCausalLM, Qwen3Config)


def fresh(model: PreTrainedModel) -> DFlashModel:
    """Before it has anything of the target's layers."""
    torch.manual_seed(1)
    return fresh_block_draft(block_spec(Origin(model), OPTIONS, BlockHeads()), Origin(model))


def begun(model: PreTrainedModel) -> dict[str, Tensor]:
    torch.manual_seed(1)
    return dict(DFlash.start(Origin(model), OPTIONS).draft.state_dict())


@torch.no_grad()
def test_a_row_with_the_targets_state_goes_on_as_the_target_does(qwen3: PreTrainedModel) -> None:
    """Over a context of the last captured states; norms of queries and keys are the target's own."""
    draft = fresh(qwen3)
    assert begin_as_target(draft, qwen3)
    tokens, anchors = torch.arange(1, 11)[None], torch.tensor([2, 7])
    out = qwen3(tokens, output_hidden_states=True)
    states = out.hidden_states
    context = draft.fuse(torch.cat((states[1], states[LAYERS - 1]), dim=-1))
    positions = torch.arange(tokens.shape[1])[None]
    context_keys = draft.context(0, context, draft.rotary(context, positions))
    blocks = Blocks(anchors, 1, torch.zeros_like(tokens), [context_keys])
    found = draft(states[LAYERS - 1][0, anchors + 1, None], anchors[:, None] + 1, blocks=blocks)
    assert_close(draft.logits(found)[:, 0], out.logits[0, anchors + 1], depth=1)


def test_the_same_from_the_targets_files_alone(qwen3: PreTrainedModel, tmp_path: Path) -> None:
    qwen3.save_pretrained(tmp_path)
    embeddings = load_embeddings(tmp_path, device="cpu", dtype=torch.float32)
    torch.testing.assert_close(begun(embeddings), begun(qwen3), rtol=0, atol=0)


def test_a_norm_that_stores_what_is_added_to_one() -> None:
    model = target(GemmaForCausalLM, GemmaConfig, hidden_activation="silu")
    draft = fresh(model)
    assert begin_as_target(draft, model)
    rows = torch.randn(5, SIZES["hidden_size"])
    assert_close(draft.norm(rows), model.get_decoder().norm(rows), depth=1)


def test_queries_and_keys_keep_their_length_where_the_target_has_no_norm_of_them() -> None:
    model = target(LlamaForCausalLM, LlamaConfig)
    draft = fresh(model)
    assert begin_as_target(draft, model)
    mine, theirs = draft.layers[0], model.get_decoder().layers[-1]
    states = torch.randn(4000, SIZES["hidden_size"])
    normed = theirs.input_layernorm(states)
    for norm, projection in ((mine.self_attn.q_norm, "q_proj"), (mine.self_attn.k_norm, "k_proj")):
        whole = getattr(theirs.self_attn, projection)(normed).pow(2).mean().sqrt()
        assert float(norm.weight.detach()[0] / whole) == pytest.approx(1, abs=0.1)


def test_a_target_without_such_layers_gives_none(qwen3: PreTrainedModel, tmp_path: Path) -> None:
    """Of a mixture of experts, and quantized, which a scale beside a weight tells."""
    qwen3.save_pretrained(tmp_path)
    scale = {f"model.layers.{LAYERS - 1}.mlp.up_proj.weight_scale": torch.ones(1)}
    stored = load_file(tmp_path / "model.safetensors")
    save_file(stored | scale, tmp_path / "model.safetensors", metadata={"format": "pt"})
    for model in (
        target(Qwen3MoeForCausalLM, Qwen3MoeConfig, num_experts=2, moe_intermediate_size=16),
        load_embeddings(tmp_path, device="cpu", dtype=torch.float32),
    ):
        assert not begin_as_target(fresh(model), model)
        torch.testing.assert_close(begun(model), dict(fresh(model).state_dict()), rtol=0, atol=0)
