"""Rounds simulated from teacher-forced chains, against real decoding of the embedded drafts."""

from __future__ import annotations

import statistics
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from draftkit.data.packing import row_tensors
from draftkit.data.samples import Sample
from draftkit.data.states.online import OnlineStates
from draftkit.evaluate.prompts import encode_prompt, load_prompts
from draftkit.hub.locate import locate
from draftkit.loading import load_drafter, load_model, open_draft
from draftkit.requests import Request, SamplingParameters
from draftkit.results.statistics import length_over_prompts
from draftkit.runtime.engine import Engine
from draftkit.runtime.records import Generation
from draftkit.targets.target import Target
from draftkit.train.batch import TrainingBatch
from draftkit.train.checkpoint import draft_in_memory
from draftkit.train.recipes import recipe_class
from draftkit.train.recipes.recipe import Origin, Recipe
from draftkit.train.validation import simulate_rounds

DRAFTS = ["eagle", "eagle3", "draft-model"]
BLOCKS = ["dflash", "dspark", "dflash2"]
TARGET = "zoo:target"
K = 4
SIMULATIONS = 50  # over the same texts, with other coins


@cache
def serving() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return load_model(TARGET, device="cpu", dtype=torch.float32)


@cache
def teacher() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(locate(TARGET).path, dtype=torch.float32).requires_grad_(False)


def requests(prompts: int, tokens: int, temperature: float, seeds: int = 1) -> list[Request]:
    _, tokenizer = serving()
    texts = [encode_prompt(prompt, tokenizer) for prompt in load_prompts("zoo", prompts)]
    return [
        Request(f"{seed}/{i}", text, tokens, SamplingParameters(temperature=temperature, seed=100 * seed + i))
        for seed in range(seeds)
        for i, text in enumerate(texts)
    ]


def decoded(name: str, wanted: list[Request], slots: int) -> tuple[list[Generation], Recipe]:
    """What an embedded draft makes of the requests, and its recipe."""
    model, _ = serving()
    kind = recipe_class(name)
    with open_draft("zoo:dflash" if name == "dflash2" else f"zoo:{name}", TARGET) as draft:
        recipe = kind.start(Origin(teacher(), draft), kind.options_type())
        if name == "dflash2":
            recipe = shaken(recipe)
            draft = draft_in_memory(recipe.spec, recipe.tensors(), target=TARGET)
        drafter = load_drafter(draft, model)
    engine = Engine(Target(model, drafter.aux_layers), drafter, num_speculative_tokens=K, num_slots=slots)
    return engine.generate(wanted), recipe.eval()


@torch.no_grad()
def shaken(recipe: Recipe) -> Recipe:
    """A DFlash2 whose new parts change what is drafted, though for the worse."""
    torch.manual_seed(0)
    for name, parameter in recipe.draft.named_parameters():
        if name.endswith(("codebook", "kernel_projection.weight")):
            parameter.normal_(std=0.3 if "codebook" in name else 0.01)
    return recipe


def as_batch(generations: list[Generation], recipe: Recipe) -> TrainingBatch:
    samples = []
    for g in generations:
        begin = len(g.request.prompt)
        samples.append(Sample.of(g.request.id, [*g.request.prompt, *g.tokens], [(begin, g.length)]))
    size = sum(len(sample) for sample in samples) + 3
    row = {name: tensor[None] for name, tensor in row_tensors(samples, size).items()}
    states = OnlineStates(teacher(), recipe.aux_layers).states(row["tokens"], row["positions"], row["sample_ids"])
    return TrainingBatch(**row, features=states.features, last=states.last)


def accepted(generation: Generation) -> list[int]:
    """Per round, of the drafts that ended up in the text: the last round may have drafted beyond its end."""
    return [min(r.accepted, generation.length - r.position) for r in generation.rounds]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", DRAFTS + BLOCKS)
def test_greedy_rounds_are_those_of_decoding(name: str) -> None:
    """Round by round."""
    generations, recipe = decoded(name, requests(4, 40, temperature=0), slots=2)
    batch = as_batch(generations, recipe)
    rounds = simulate_rounds(batch, recipe.chains(batch, K), "greedy")
    for number, generation in enumerate(generations):
        assert [r.accepted for r in rounds[number]] == accepted(generation)
    assert any(map(accepted, generations))


@pytest.mark.long
@pytest.mark.parametrize("name", [DRAFTS[0], *(pytest.param(name, marks=pytest.mark.long) for name in DRAFTS[1:])])
def test_sampled_rounds_are_those_of_decoding_on_average(name: str) -> None:
    """The decoded length lies within the interval of simulations on the same texts, whose coins differ, and these
    within the interval of the decoded length over texts."""
    generations, recipe = decoded(name, requests(8, 64, temperature=1, seeds=4), slots=8)
    kept, rounds = [0] * SIMULATIONS, [0] * SIMULATIONS
    for begin in range(0, len(generations), 8):
        batch = as_batch(generations[begin : begin + 8], recipe)
        chains = recipe.chains(batch, K)
        for number in range(SIMULATIONS):
            generator = torch.Generator().manual_seed(1000 * begin + number)
            simulated = [r for own in simulate_rounds(batch, chains, "sampled", generator).values() for r in own]
            kept[number] += sum(r.accepted for r in simulated)
            rounds[number] += len(simulated)
    lengths = [1 + a / b for a, b in zip(kept, rounds, strict=True)]
    decoded_length = length_over_prompts([(sum(accepted(g)), len(g.rounds)) for g in generations])
    mean, deviation = statistics.mean(lengths), statistics.stdev(lengths)
    assert abs(decoded_length.mean - mean) < 1.96 * deviation
    assert decoded_length.low < mean < decoded_length.high
