"""Drafts as they lie on the Hub: converted, they compute what transformers or vLLM makes of the source."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.published import all_published
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaModel

import draftkit
from draftkit.convert.api import convert_checkpoint
from draftkit.layout.folder import read_draft
from draftkit.models.causal_lm import load_causal_lm
from draftkit.models.eagle import load_eagle
from draftkit.results.settings import Settings
from draftkit.runtime.attention import NAME
from draftkit.runtime.cache import SlotCache

PUBLISHED = all_published()
DRAFTS = ["llama-68m", "pythia", "gpt2", "opt-base"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*DRAFTS, "bloom-base"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_written_back_it_is_what_transformers_saves(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    source = PUBLISHED[name].write(tmp_path / "source", dtype)
    convert_checkpoint(str(source), tmp_path / "out")
    assert read_draft(tmp_path / "out").spec.dtype == {torch.float32: "F32", torch.float16: "F16"}[dtype]
    convert_checkpoint(str(tmp_path / "out"), tmp_path / "back", to="hf")
    AutoModelForCausalLM.from_pretrained(source, dtype=dtype).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("back", "theirs"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("name", DRAFTS)
def test_it_computes_what_transformers_computes_of_the_source(name: str, tmp_path: Path) -> None:
    source = PUBLISHED[name].write(tmp_path / "source", torch.float32)
    convert_checkpoint(str(source), tmp_path / "out")
    lm = load_causal_lm(read_draft(tmp_path / "out"), pico.llama(), attention=NAME)
    reference = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    tokens = torch.randint(5, 320, (1, 40), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(40)[None]
    rows = SlotCache(1, 64).rows(torch.tensor([0]), positions, 40)
    with torch.inference_mode():
        expected = reference(tokens).logits
    torch.testing.assert_close(lm.forward(tokens, positions, rows).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", DRAFTS)
def test_it_drafts(name: str, running_target: Path, tmp_path: Path) -> None:
    source = PUBLISHED[name].write(tmp_path / "source", torch.float32)
    settings = Settings(num_speculative_tokens=2, max_new_tokens=8, limit=2, device="cpu", dtype="float32")
    result = draftkit.evaluate_draft(str(running_target), [str(source)], settings)
    assert [(cell.method, cell.matches_greedy) for cell in result.cells] == [("draft-model", True)]


@pytest.mark.long
def test_a_parallel_draft_without_a_table_takes_the_targets(running_target: Path, tmp_path: Path) -> None:
    """As vLLM does: the same tokens are accepted as with a copy of that table in the file."""
    published = PUBLISHED["specforge-peagle-without-table"]
    without = published.write(tmp_path / "without", torch.float32)
    table = load_file(running_target / "model.safetensors")["model.embed_tokens.weight"]
    tensors = published.all_tensors(torch.float32) | {"embed_tokens.weight": table}
    pico.write_checkpoint(tmp_path / "with", published.config, tensors)
    settings = Settings(num_speculative_tokens=3, max_new_tokens=12, limit=3, device="cpu", dtype="float32")
    cells = []
    for source in (without, tmp_path / "with"):
        out = tmp_path / f"{source.name}-out"
        convert_checkpoint(str(source), out, target=str(running_target), overrides=published.overrides)
        cells += draftkit.evaluate_draft(str(running_target), [str(out)], settings).cells
    ours, theirs = cells
    assert (ours.method, ours.num_drafts) == ("p-eagle", theirs.num_drafts)
    assert ours.num_accepted_tokens_per_pos == theirs.num_accepted_tokens_per_pos
    assert ours.expected_acceptance_length == theirs.expected_acceptance_length


def test_automodels_eagle_is_a_llama_over_fc(tmp_path: Path) -> None:
    """The usual decoder, final norm included; the head reads its output, which is also fed back."""
    published = PUBLISHED["automodel-eagle"]
    convert_checkpoint(str(published.write(tmp_path / "source", torch.float32)), tmp_path / "out")
    model = load_eagle(read_draft(tmp_path / "out"), pico.llama(), attention="eager")
    tensors = published.all_tensors(torch.float32)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, attn_implementation="eager",
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    reference = LlamaModel(config).eval()
    reference.load_state_dict({name: tensor for name, tensor in tensors.items() if name != "fc.weight"})
    tokens, positions = torch.arange(5, 25)[None], torch.arange(20)[None]
    hidden = torch.randn(1, 20, 64, generator=torch.Generator().manual_seed(2))
    mask = torch.full((20, 20), torch.finfo(torch.float32).min).triu(1)[None, None]
    with torch.inference_mode():
        fused = torch.cat([tensors["embed_tokens.weight"][tokens], hidden], dim=-1) @ tensors["fc.weight"].T
        expected = reference(inputs_embeds=fused).last_hidden_state
        output = model(tokens, hidden, positions, attention_mask=mask)
    torch.testing.assert_close(output.head_input, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(output.feedback, output.head_input)
