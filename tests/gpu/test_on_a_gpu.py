"""What only a GPU can show: rounds replayed from CUDA graphs give the tokens of launched ones, with every drafter and
in every mode; output is that of plain decoding, or of its distribution; a capture that fails leaves a GPU that works; a
training step computes what it does on the CPU."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from fixtures.checkpoints.pico import save_tokenizer
from fixtures.engines.drafter_cases import Load, requests, sampled
from fixtures.engines.drafter_pairs import PAIRS, Pair
from fixtures.engines.sampling_statistics import fit, processed
from fixtures.training.recipe_options import OPTIONS
from fixtures.training.started_recipes import batch_of_two, kind_of_target, save_models, started
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

from draftkit.data.states.online import load_training_target
from draftkit.loading import load_model
from draftkit.requests import DraftSampling, Request, SamplingParameters, Verification
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.engine import Engine
from draftkit.runtime.memory import load_of, plan_of
from draftkit.runtime.prefill import Prefill
from draftkit.runtime.records import Generation
from draftkit.runtime.rounds import Rounds
from draftkit.targets.target import Target

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
K = 3
TEXTS, LENGTH, TOP_K = 4096, 3, 4  # of the test of a distribution
SPARE = 64 << 20  # bytes: libraries' workspaces, and blocks of the allocator
SEGMENT = 20 << 20  # bytes, which blocks of less than 10 MiB share; not given back while one of them lives
LIMIT = 1e-6  # of a p-value; with fixed seeds, a pass stays a pass on a device
MODES: list[tuple[Verification, bool]] = [  # whether greedy: all lossless modes are one then
    ("rejection", True),
    ("rejection", False),
    ("coupled", False),
    ("block", False),
]
RECIPES = [(name, cases[0]) for name, cases in OPTIONS.items()]

Thing = TypeVar("Thing")


def placed(thing: Thing) -> Thing:
    """A copy on the GPU, with what its tensors share."""

    def there(tensor: Tensor, memo: dict[int, object]) -> object:
        if id(tensor) not in memo:
            new = tensor.detach().to(DEVICE, copy=True)
            memo[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
        return memo[id(tensor)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "__deepcopy__", there)
        patch.setattr(nn.Parameter, "__deepcopy__", there)
        return copy.deepcopy(thing)


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, load: Load, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return placed(PAIRS[request.param](load, tmp_path_factory))


def engine(pair: Pair, mode: Verification, *, eager: bool, slots: int = 4) -> Engine:
    model, drafter = pair
    k = 0 if drafter is None else min(K, drafter.max_tokens or K)
    return Engine(
        Target(model, drafter.aux_layers if drafter else None), drafter, num_speculative_tokens=k, num_slots=slots,
        verification=mode if k else "rejection", eager=eager,
        draft_sampling=DraftSampling("probabilistic"),
    )  # fmt: skip


def decoded(pair: Pair, mode: Verification, *, greedy: bool, eager: bool = False) -> list[list[int]]:
    asked = requests() if greedy else sampled()
    return [generation.tokens for generation in engine(pair, mode, eager=eager).generate(asked)]


@pytest.mark.few(5)
@pytest.mark.parametrize(("mode", "greedy"), MODES)
def test_replayed_rounds_equal_launched_ones(pair: Pair, mode: Verification, greedy: bool) -> None:
    launched, replayed = (decoded(pair, mode, greedy=greedy, eager=eager) for eager in (True, False))
    assert replayed == launched


@pytest.mark.parametrize(("mode", "greedy"), [("rejection", True), ("coupled", False)])
def test_no_draft_changes_the_output(pair: Pair, mode: Verification, greedy: bool) -> None:
    assert decoded(pair, mode, greedy=greedy) == decoded((pair[0], None), "rejection", greedy=greedy)


CUTS = (SamplingParameters(), SamplingParameters(1.0, seed=1), SamplingParameters(0.8, top_k=7, top_p=0.9, seed=2))


@pytest.mark.parametrize("name", ["no draft", "EAGLE-3", "DFlash", "draft model"])
def test_tokens_are_those_of_the_cpu(name: str, load: Load, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Greedy and sampled ones: the same noise decides, and nothing that kernels compute is far from the reference."""
    there = PAIRS[name](load, tmp_path_factory)
    asked = [Request(f"{r.id}, {i}", r.prompt, 8, cut) for r in requests() for i, cut in enumerate(CUTS)]
    found, expected = (
        [generation.tokens for generation in engine(pair, "rejection", eager=False).generate(asked)]
        for pair in (placed(there), there)
    )
    assert found == expected


@pytest.mark.parametrize("pair", ["EAGLE-3"], indirect=True)
def test_a_prompt_in_pieces_is_that_in_one(pair: Pair) -> None:
    """In half precision, where pieces go through another function than those in float32."""
    target = Target(copy.deepcopy(pair[0]).to(torch.bfloat16))
    whole, pieces = (logits_after_prompt(target, tuple(range(5, 30)), chunk) for chunk in (32, 7))
    torch.testing.assert_close(pieces, whole, rtol=0, atol=0.1 * float(whole.std()))


def logits_after_prompt(target: Target, prompt: tuple[int, ...], chunk: int) -> Tensor:
    """[V], of a prompt taken in by so many rows at a time."""
    prefill = Prefill(target, SlotCache(1, len(prompt)), chunk)
    prefill.add(Generation(Request("0", prompt, 1)), 0)
    while prefill:
        (piece,) = prefill.step()
    return piece.logits.float()


@pytest.mark.parametrize("pair", ["draft model", "EAGLE-3", "DFlash", "n-gram"], indirect=True)
@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_the_output_has_the_targets_distribution(pair: Pair, mode: Verification) -> None:
    """Of short texts after one prompt, all of which can be listed."""
    prompt, k = (5, 6, 7, 5, 6), SamplingParameters(temperature=1.0, top_k=TOP_K)
    asked = [Request(str(i), prompt, LENGTH, k.numbered(i), ignore_eos=True) for i in range(TEXTS)]
    found = Counter(tuple(g.tokens) for g in engine(pair, mode, eager=False, slots=64).generate(asked))
    probability = {(): 1.0}
    for _ in range(LENGTH):
        probability = {
            (*text, token): p * float(after[token])
            for text, p in probability.items()
            for after in [processed(logits_after(pair, (*prompt, *text)), k)]
            for token in after.nonzero()[:, 0].tolist()
        }
    assert found.keys() <= probability.keys()
    counts = torch.tensor([found[text] for text in probability])
    assert fit(counts, torch.tensor(list(probability.values()), dtype=torch.float64)) > LIMIT


def logits_after(pair: Pair, tokens: tuple[int, ...]) -> Tensor:
    """Of the target, by transformers alone: [V]."""
    model, ids = pair[0], torch.tensor([tokens], device=DEVICE)
    model.set_attn_implementation("eager")
    with torch.enable_grad():  # with which all modules compute as their own
        found = model(ids).logits[0, -1].detach().cpu()
    model.set_attn_implementation(ATTENTION)
    return found


@pytest.mark.parametrize("pair", ["draft model", "EAGLE-3", "n-gram"], indirect=True)
def test_a_capture_that_fails_leaves_a_gpu_that_works(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = decoded(pair, "rejection", greedy=True, eager=True)
    run = Rounds.run

    def looking(*arguments: object, **named: object) -> Tensor:
        packed = run(*arguments, **named)  # type: ignore[arg-type]
        packed.sum().item()
        return packed

    stream = torch.cuda.current_stream()
    with monkeypatch.context() as patch:
        patch.setattr(Rounds, "run", looking)
        with pytest.warns(UserWarning, match="without CUDA graphs, and slower"):
            found = decoded(pair, "rejection", greedy=True)
    assert found == expected
    assert torch.cuda.current_stream() == stream
    assert decoded(pair, "rejection", greedy=True) == expected


def test_weights_go_straight_to_the_gpu(tmp_path: Path) -> None:
    """None waits in the host's memory, and joining them takes as much more as the largest product, which is given
    back."""
    folder = save_wide_target(tmp_path)
    torch.cuda.empty_cache()
    before, held = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    model, _ = load_model(str(folder), device=DEVICE + ":0", dtype=torch.bfloat16)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    assert {parameter.device for parameter in model.parameters()} == {torch.device("cuda:0")}
    largest = max(parameter.nbytes for parameter in model.parameters())
    assert torch.cuda.max_memory_allocated() - before <= weights + 2 * largest + SPARE
    torch.cuda.reset_peak_memory_stats()
    Engine(Target(model), None, num_speculative_tokens=0, num_slots=1)
    assert torch.cuda.max_memory_allocated() - before <= weights + 2 * largest + SPARE
    layers = model.config.num_hidden_layers
    assert torch.cuda.memory_reserved() - held <= weights + largest + layers * SEGMENT + SPARE


@pytest.mark.parametrize("pair", ["EAGLE-3"], indirect=True)
def test_a_run_takes_no_more_than_its_plan(pair: Pair) -> None:
    """Beside the weights, its reserve left out: that is what the allocator does not see."""
    made = engine(pair, "rejection", eager=False)
    free = torch.cuda.mem_get_info()[0]
    made._release()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made.generate(requests())
    load = load_of(made.target, made.drafter, capacity=made._capacity, k=made.k)
    plan = plan_of(load, made.num_slots, {made.target.device: 1.0}, {made.target.device: free})
    assert torch.cuda.max_memory_allocated() - before <= plan.total


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize(("name", "options"), RECIPES, ids=[name for name, _ in RECIPES])
def test_a_training_step_is_that_of_the_cpu(
    name: str, options: dict[str, object], models: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float32; in bfloat16 its loss is near, and every gradient is a number."""
    target = load_training_target(models[kind_of_target(name)], device="cpu", dtype=torch.float32)
    recipe = started(name, options, models, target).eval()  # EAGLE's noise comes from the device's own generator
    batch = batch_of_two(recipe, target)
    there, moved = placed(recipe), placed(batch)
    expected = stepped(recipe, batch)
    found = stepped(there, moved)
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-3, atol=1e-4)
    for (label, own), other in zip(recipe.named_parameters(), there.parameters(), strict=True):
        if own.grad is not None:
            assert other.grad is not None, label
            scale = float(own.grad.abs().max())
            torch.testing.assert_close(other.grad.cpu(), own.grad, rtol=0, atol=1e-2 * scale + 1e-7, msg=label)
    there.zero_grad()
    with torch.autocast(DEVICE, torch.bfloat16):
        coarse = stepped(there, moved)
    torch.testing.assert_close(coarse.cpu(), expected, rtol=0.1, atol=0.05)
    assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in there.parameters())


def save_wide_target(folder: Path) -> Path:
    """A target of 0.5 GB, beside which what libraries take is small."""
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=3, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=4096,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return save_tokenizer(folder)


def stepped(recipe: nn.Module, batch: object) -> Tensor:
    """The loss of a step, whose gradients are the parameters'."""
    torch.manual_seed(0)  # of the CPU: which chains are trained
    loss: Tensor = recipe(batch).loss
    loss.backward()
    return loss.detach()
