"""What a token costs, told from a config."""

from __future__ import annotations

from pathlib import Path

import pytest
from fixtures.checkpoints import pico
from fixtures.checkpoints.targets import target_model
from transformers import LlamaForCausalLM, Qwen3MoeConfig

from draftkit.targets.cost import read_cost


def test_of_the_embedding_a_token_reads_one_row(tmp_path: Path) -> None:
    config = pico.llama_config(num_hidden_layers=2)
    config.save_pretrained(tmp_path)
    model, cost = LlamaForCausalLM(config), read_cost(tmp_path)
    assert cost.parameters == sum(weight.numel() for weight in model.parameters())
    assert cost.per_token == cost.parameters - model.model.embed_tokens.weight.numel()


def test_a_tied_head_is_read_whole(tmp_path: Path) -> None:
    config = pico.llama_config(tie_word_embeddings=True)
    config.save_pretrained(tmp_path)
    cost = read_cost(tmp_path)
    assert cost.parameters == cost.per_token == sum(p.numel() for p in LlamaForCausalLM(config).parameters())


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "nemotron_h"])
def test_the_cost_is_that_of_the_language_model(kind: str, tmp_path: Path) -> None:
    model = target_model(kind)
    model.save_pretrained(tmp_path)
    text = [*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()]
    assert read_cost(tmp_path).parameters == sum(weight.numel() for weight in text)


def test_of_experts_a_token_reads_those_it_is_sent_to(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 100}
    costs = []
    for chosen in (2, 4, 8):
        Qwen3MoeConfig(num_experts=8, num_experts_per_tok=chosen, **sizes).save_pretrained(tmp_path)
        costs.append(read_cost(tmp_path))
    expert = 3 * 64 * 32 * 2  # three matrices, two layers
    assert len({cost.parameters for cost in costs}) == 1
    assert [costs[i + 1].per_token - costs[i].per_token for i in (0, 1)] == [2 * expert, 4 * expert]
