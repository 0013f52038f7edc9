"""NaN and infinity are refused: in weights by the tensor's name, in a forward by whose it is and where in the text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Command
from fixtures.checkpoints import pico
from fixtures.checkpoints.zoo_models import requests, zoo_drafter, zoo_target
from safetensors.torch import load_file, save_file

from draftkit.errors import NonFiniteError
from draftkit.io import finite
from draftkit.io.finite import NonFinite, find_non_finite_loaded
from draftkit.requests import SamplingParameters
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.engine import Engine
from draftkit.targets.finite import has_finite_peak
from draftkit.targets.target import Target, load_target

NAN, INF = float("nan"), float("inf")
DOWN = "model.layers.3.mlp.down_proj.weight"


@pytest.fixture
def target(tmp_path: Path) -> Path:
    pico.save_tokenizer(pico.save_llama(tmp_path / "target"))
    return tmp_path / "target"


def break_tensor(folder: Path, name: str, value: float) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[9] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.slow
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_commands_refuse_a_broken_target(value: float, target: Path, tmp_path: Path, draftkit: Command) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "a b c"}]}\n')
    pico.write_checkpoint(tmp_path / "draft", pico.eagle_config(), pico.eagle_tensors())
    break_tensor(target, DOWN, value)
    prompts = tmp_path / "prompts.jsonl"
    out = tmp_path / "out"
    commands = (
        ("eval", "--target", target, "--draft", tmp_path / "draft", "--prompts", prompts),
        ("eval", "--target", target, "--draft", "ngram", "--prompts", prompts, "--out", out),
        ("doctor", "--target", target, "--draft", tmp_path / "draft", "--prompts", prompts),
        ("data", "regenerate", prompts, out, "--target", target),
    )
    for command in commands:
        ran = draftkit(*command)
        assert ran.code == 1, (command, ran)
        assert f"{DOWN} (F32 [64, 96]): " in ran.err, ran.err
        assert "at [0, 9]" in ran.err
        assert "Traceback" not in ran.err


@pytest.mark.slow
def test_a_broken_draft_is_refused(target: Path, tmp_path: Path, draftkit: Command) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "a b c"}]}\n')
    tensors = pico.eagle_tensors()
    tensors["fc.weight"][3, 5] = NAN
    pico.write_checkpoint(tmp_path / "eagle", pico.eagle_config(), tensors)
    pico.save_tokenizer(pico.save_llama(tmp_path / "standalone", num_hidden_layers=2))
    break_tensor(tmp_path / "standalone", "lm_head.weight", INF)
    for draft, named in (("eagle", "fc.weight"), ("standalone", "lm_head.weight")):
        ran = draftkit("eval", "--target", target, "--draft", tmp_path / draft, "--prompts", prompts)
        assert (ran.code, ran.out) == (1, "")
        assert f"{named} (" in ran.err


def test_numbers_that_a_dtype_cannot_hold_are_told(target: Path) -> None:
    break_tensor(target, DOWN, 1e6)
    assert load_target(target, device="cpu", dtype=torch.bfloat16, attention=ATTENTION)
    with pytest.raises(NonFiniteError, match=r"down_proj\.weight \(F16 \[64, 96\]\): 0 NaN, 1 infinite"):
        load_target(target, device="cpu", dtype=torch.float16, attention=ATTENTION)


def overflowing(token: int) -> Target:
    model = pico.overflowing(pico.llama(eos_token_id=None), token)
    model.set_attn_implementation(ATTENTION)
    return Target(model)


def test_a_prompt_that_overflows_is_told() -> None:
    engine = Engine(overflowing(7), None, num_speculative_tokens=0, num_slots=2)
    assert engine.generate([[5, 6, 8]], max_new_tokens=1)
    message = r"the target's forward gives NaN or infinity: request 1, after 4 tokens\n.*run it in bfloat16 or float32"
    with pytest.raises(NonFiniteError, match=message):
        engine.generate([[5, 6, 8], [5, 6, 7, 8]], max_new_tokens=4)


@pytest.mark.parametrize("sampling", [SamplingParameters(), SamplingParameters(temperature=1.0)])
def test_a_round_that_overflows_is_told(sampling: SamplingParameters) -> None:
    """Token 7 is written by the model itself, in a later round."""
    plain = pico.llama(eos_token_id=None)
    plain.set_attn_implementation(ATTENTION)
    engine = Engine(Target(plain), None, num_speculative_tokens=0, num_slots=2)
    (generation,) = engine.generate([[5, 6, 8]], sampling, max_new_tokens=8)
    assert len(set(generation.tokens[:6]) - {5, 6, 8}) > 1

    def infinite(module: torch.nn.Module, args: object, output: torch.Tensor) -> torch.Tensor:
        return output * torch.where(ids["ids"] == generation.tokens[4], INF, 1.0)[..., None]

    ids: dict[str, torch.Tensor] = {}
    plain.get_input_embeddings().register_forward_pre_hook(lambda _, args: ids.update(ids=args[0]))
    plain.model.layers[5].mlp.register_forward_hook(infinite)
    first = 3 + generation.tokens.index(generation.tokens[4])
    with pytest.raises(NonFiniteError, match=rf"request 0, after {first + 1} tokens"):
        engine.generate([[5, 6, 8]], sampling, max_new_tokens=8)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle", "eagle3", "p-eagle", "pard", "draft-model", "mlp-speculator", "dspark"])
def test_a_draft_that_overflows_is_told(name: str) -> None:
    drafter = zoo_drafter.__wrapped__(name)  # one of its own, which the hook is for
    assert drafter.module is not None
    linears = [part for part in drafter.module.modules() if isinstance(part, torch.nn.Linear)]
    hook = linears[0].register_forward_hook(lambda _module, _arguments, output: output * INF)
    engine = Engine(Target(zoo_target(), drafter.aux_layers), drafter, num_speculative_tokens=3, num_slots=2)
    try:
        with pytest.raises(NonFiniteError, match=r"the draft's forward gives NaN or infinity: request .*after \d+ tok"):
            engine.generate(requests()[:2])
    finally:
        hook.remove()
    assert engine.generate(requests()[:2])  # nothing is left of it


def test_logits_that_exclude_tokens_are_sound() -> None:
    rows = torch.tensor([[1.0, -INF], [-INF, -INF], [NAN, 1.0], [INF, 1.0]])
    assert has_finite_peak(rows).tolist() == [True, False, False, False]


def test_the_check_of_weights_makes_no_copies() -> None:
    tensor = torch.zeros(4, 1 << 10)
    tensor[2, 5] = NAN
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finite, "LOADED_BLOCK", 100)
        assert find_non_finite_loaded([("w", tensor), ("i", torch.ones(2, dtype=torch.int64))]) == [
            NonFinite("w", "F32", (4, 1 << 10), 1, 0, (2, 5))
        ]
