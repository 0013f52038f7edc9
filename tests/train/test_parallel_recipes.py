"""P-EAGLE and PARD in training: every row against a slow reference that drafts from one anchor at a time."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.engines.draft_references import K, p_eagle_reference, pard_reference
from fixtures.engines.drafter_cases import llama_draft
from fixtures.precision import LAYER, assert_close
from fixtures.training.samples import samples
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import AutoModelForCausalLM, AutoTokenizer, MistralConfig, MistralForCausalLM, PreTrainedModel

from draftkit.convert.api import convert_checkpoint
from draftkit.data.sample_files import write_samples
from draftkit.data.samples import SamplesOrigin as TextOrigin
from draftkit.data.states.online import OnlineStates
from draftkit.errors import DraftkitError, TargetError
from draftkit.evaluate.prompts import encode_prompt, load_prompts
from draftkit.hub.locate import locate
from draftkit.io.records import from_dict, to_dict
from draftkit.layout.families.causal_lm import CausalLMSpec
from draftkit.layout.folder import Draft, read_draft
from draftkit.layout.spec import DraftSpec
from draftkit.loading import load_drafter, load_model, open_draft
from draftkit.requests import Request
from draftkit.runtime.drafters.causal_lm import PardDrafter
from draftkit.runtime.engine import Engine
from draftkit.targets.attention import Sight
from draftkit.targets.target import Target
from draftkit.train.attention import attend_masked, masks_of_parallel_rows
from draftkit.train.batch import TrainingBatch
from draftkit.train.checkpoint import save_draft
from draftkit.train.config import read_config
from draftkit.train.parallel import ConditionalDrop, ParallelRows, partitions, pick_mask_token
from draftkit.train.recipes.causal_lm_pard import Pard, PardOptions
from draftkit.train.recipes.eagle_eagle3 import Eagle3, Eagle3Options
from draftkit.train.recipes.eagle_p_eagle import PEagle, PEagleOptions
from draftkit.train.recipes.recipe import Origin, Recipe
from draftkit.train.run import train_draft
from draftkit.train.validation import simulate_rounds

V, MASK = pico.VOCABULARY, 319
DEPTH = 3 * LAYER + 2  # products from the states to the logits: a projection, at most three layers, the head
ALL = ConditionalDrop(retention=1, least=1)
# Of (tokens, those of the prompt) of each sample; then padding.
SAMPLES = ((14, 4), (11, 1), (3, 1))
PADDING = 3


@cache
def target() -> PreTrainedModel:
    return pico.llama(rms_norm_eps=1e-5)


@pytest.fixture(scope="module")
def causal_lm(tmp_path_factory: pytest.TempPathFactory) -> Draft:
    """A small language model with the target's vocabulary and a tokenizer."""
    folder = tmp_path_factory.mktemp("draft")
    source = pico.write_checkpoint(folder / "source", *llama_draft(), safetensors=True)
    pico.save_tokenizer(source)
    return read_draft(convert_checkpoint(str(source), folder / "draft"))


def p_eagle(**options: object) -> PEagle:
    origin = Origin(target())  # whose making draws random numbers too
    torch.manual_seed(0)
    recipe = PEagle.start(origin, PEagleOptions(**({"num_layers": 2, "steps": K, "mask_token_id": MASK} | options)))
    with torch.no_grad():
        for parameter in recipe.draft.parameters():
            parameter.normal_(std=0.2 if parameter.ndim > 1 else 1.0)
    return recipe


def pard(draft: Draft, **options: object) -> Pard:
    origin = Origin(target(), draft)
    torch.manual_seed(0)
    return Pard.start(origin, PardOptions(**({"steps": K, "mask_token_id": MASK} | options)))


def packed(recipe: Recipe) -> TrainingBatch:
    generator = torch.Generator().manual_seed(1)
    sizes = [size for size, _ in SAMPLES]
    tokens = torch.randint(3, V - 1, (1, sum(sizes) + PADDING), generator=generator)
    positions = torch.cat([torch.arange(size) for size in (*sizes, PADDING)])[None]
    numbers = torch.tensor([n for n, size in enumerate(sizes) for _ in range(size)] + [-1] * PADDING)[None]
    loss_mask = torch.tensor([i >= prompt for size, prompt in SAMPLES for i in range(size)] + [False] * PADDING)
    states = OnlineStates(target(), recipe.aux_layers).states(tokens, positions, numbers)
    return TrainingBatch(tokens, positions, numbers, loss_mask[None], *states)


class Drafted(NamedTuple):
    """What drafts in a sample: the logits of depth `depth` at the anchor at `place` there."""

    sample: int
    place: int
    depth: int
    logits: Tensor


def drafted(recipe: PEagle | Pard, batch: TrainingBatch, kept: Tensor, parts: int = 1) -> list[Drafted]:
    found = []
    for part in partitions(kept, parts):
        rows = ParallelRows(part, batch)
        with torch.no_grad():
            logits = recipe.draft.get_submodule("lm_head")(recipe.hidden(batch, rows))
        for depth, anchor, values in zip(*(index.tolist() for index in rows.drafts), logits, strict=True):
            found.append(Drafted(int(batch.sample_ids[0, anchor]), int(batch.positions[0, anchor]), depth, values))
    return found


def sample(batch: TrainingBatch, number: int) -> tuple[Tensor, Tensor | None]:
    rows = batch.sample_ids[0] == number
    return batch.tokens[0, rows], None if batch.features is None else batch.features[0, rows]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    a, b = torch.stack(list(found)), torch.stack(list(expected))
    assert_close(a, b, depth=DEPTH)


# --- Every (anchor, depth)


@pytest.mark.slow
@pytest.mark.parametrize(
    "drop", [ALL, ConditionalDrop(), ConditionalDrop(max_anchors=5)], ids=["all", "drop", "anchors"]
)
@pytest.mark.parametrize("parts", [1, 4])
def test_p_eagle_rows_equal_serving(drop: ConditionalDrop, parts: int) -> None:
    recipe = p_eagle(norm_before_residual=parts > 1, feature_norm="none" if parts > 1 else "joint")
    weights = recipe.tensors()
    batch = packed(recipe)
    kept = drop.keep(batch.drafted(K))
    found = drafted(recipe, batch, kept, parts)
    assert len(found) == kept.sum() > 20
    expected = []
    for row in found:
        tokens, features = sample(batch, row.sample)
        assert features is not None
        known = tokens[: row.place + 2], features[: row.place + 1]
        expected.append(p_eagle_reference(weights, MASK, parts > 1, *known)[row.depth])
    assert_same([row.logits for row in found], expected)


@pytest.mark.slow
@pytest.mark.parametrize("train_prompt", [False, True])
def test_pard_rows_equal_serving(causal_lm: Draft, train_prompt: bool) -> None:
    recipe = pard(causal_lm, train_prompt=train_prompt)
    weights = recipe.tensors()
    batch = packed(recipe)
    possible = batch.complete(K) if train_prompt else batch.drafted(K)
    found = drafted(recipe, batch, possible.roll(1, -1))
    assert len(found) == possible.sum() > 20
    expected = []
    for row in found:
        tokens, _ = sample(batch, row.sample)
        known = tokens[: row.place + 1]
        expected.append(pard_reference(weights, MASK, known, known)[row.depth])
    assert_same([row.logits for row in found], expected)


@pytest.mark.parametrize("number", range(2))
def test_packed_samples_are_as_alone(causal_lm: Draft, number: int) -> None:
    for recipe in (p_eagle(), pard(causal_lm)):
        together = packed(recipe)
        own = together.sample_ids[0] == number
        alone = TrainingBatch(*(None if values is None else values[:, own] for values in together))
        shift = 0 if isinstance(recipe, PEagle) else 1
        found = drafted(recipe, together, together.drafted(K).roll(shift, -1))
        assert_same(
            [row.logits for row in found if row.sample == number],
            [row.logits for row in drafted(recipe, alone, alone.drafted(K).roll(shift, -1))],
        )


def test_a_sliding_window_is_that_of_serving(tmp_path: Path) -> None:
    """Transformers' own mask is the reference."""
    torch.manual_seed(0)
    config = MistralConfig(**(pico.llama_config(num_hidden_layers=2).to_dict() | {"sliding_window": 4}))
    model = MistralForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "source")
    recipe = pard(read_draft(convert_checkpoint(str(tmp_path / "source"), tmp_path / "draft")))
    batch = packed(recipe)
    found = drafted(recipe, batch, batch.drafted(K).roll(1, -1))
    masks = torch.full((K - 1,), MASK)
    with torch.no_grad():
        expected = [
            model(torch.cat((sample(batch, row.sample)[0][: row.place + 1], masks))[None]).logits[0, row.depth - K]
            for row in found
        ]
    assert_same([row.logits for row in found], expected)


# --- Which rows


@st.composite
def possible_chains(draw: st.DrawFn) -> Tensor:
    """Of which anchors how many depths can be drafted: bool [K, N]."""
    depths = torch.tensor(draw(st.lists(st.integers(0, 6), min_size=1, max_size=40)))
    return torch.arange(draw(st.integers(1, 6)))[:, None] < depths


drops = st.builds(
    ConditionalDrop,
    retention=st.floats(0.05, 1),
    least=st.floats(0, 1),
    max_anchors=st.one_of(st.none(), st.integers(1, 50)),
)


@given(possible=possible_chains(), drop=drops, seed=st.integers(0, 5))
def test_dropped_chains(possible: Tensor, drop: ConditionalDrop, seed: int) -> None:
    kept = drop.keep(possible, torch.Generator().manual_seed(seed))
    assert torch.equal(kept, drop.keep(possible, torch.Generator().manual_seed(seed)))
    assert torch.equal(kept[0], possible[0])
    assert not (kept & ~possible).any()
    assert not (kept[2:] & ~kept[1:-1]).any()
    chains = min(int(possible[0].sum()), drop.max_anchors or 50)
    pool = chains
    for depth in range(1, len(kept)):
        size = max(int((chains - depth) * max(drop.retention**depth, drop.least)), 0)
        pool = int(kept[depth].sum())
        assert pool <= size
        if depth == 1 and chains == possible[0].sum():
            assert pool == min(size, int(possible[1].sum()))


@given(possible=possible_chains(), number=st.integers(1, 9))
def test_partitions_share_out_the_chains(possible: Tensor, number: int) -> None:
    parts = partitions(possible, number)
    assert 1 <= len(parts) <= number
    assert torch.equal(torch.stack(parts).sum(0), possible.long())
    assert torch.stack([part.any(0) for part in parts]).sum(0).max() <= 1  # a chain lies in one part


@pytest.mark.slow
@pytest.mark.parametrize("sight", [Sight(), Sight(1), Sight(3), Sight(2, 2)])
def test_visible_rows(sight: Sight) -> None:
    window = sight.window
    batch = packed(p_eagle())
    rows = ParallelRows(ConditionalDrop().keep(batch.drafted(K)), batch)
    masks = masks_of_parallel_rows(rows)
    pairs = list(zip(rows.anchors.tolist(), rows.depths.tolist(), strict=True))
    assert len(set(pairs)) == len(pairs)

    def sees(row: tuple[int, int], other: tuple[int, int]) -> bool:
        (anchor, depth), (before, its_depth) = row, other
        distance = anchor + depth - before - its_depth
        own = other == row or (before == anchor and its_depth in range(1, depth))
        true = its_depth == 0 and before <= anchor and batch.sample_ids[0, before] == batch.sample_ids[0, anchor]
        place = int(batch.positions[0, before]) + its_depth
        return bool(own or true) and (window is None or distance < window or place < sight.sink_tokens)

    at = torch.arange(len(pairs))
    expected = torch.tensor([[sees(row, other) for other in pairs] for row in pairs])
    assert torch.equal(masks.sees(at[:, None], at, sight), expected)
    names = {"sliding_window": window, "sink_tokens": sight.sink_tokens}
    query, key, value = torch.randn(1, 4, len(at), 16), torch.randn(1, 2, len(at), 16), torch.randn(1, 2, len(at), 16)
    dense = attend_masked(torch.nn.Identity(), query, key, value, masks=masks, **names)[0]
    blocks = create_block_mask(
        lambda _b, _h, row, other: masks.sees(row, other, sight), None, None, len(at), len(at), device="cpu"
    )
    flex = flex_attention(query, key, value, block_mask=blocks, enable_gqa=True).transpose(1, 2)
    assert_close(dense, flex, depth=2)


# --- Losses


def gradients(recipe: Recipe, batch: TrainingBatch) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(5)
    recipe.zero_grad()
    outcome = recipe(batch)
    outcome.loss.backward()
    found = {name: p.grad for name, p in recipe.draft.named_parameters() if p.grad is not None}
    return outcome.loss.detach(), outcome.statistics, {name: gradient.clone() for name, gradient in found.items()}


@pytest.mark.parametrize("number", [2, 5])
def test_partitions_do_not_change_the_gradient(number: int) -> None:
    options = {"loss": "0.3*ce + kl", "reached": None if number == 2 else 0.1}
    whole, parts = p_eagle(**options), p_eagle(**options, partitions=number)
    loss, statistics, expected = gradients(whole, packed(whole))
    other, others, found = gradients(parts, packed(parts))
    assert expected.keys() == found.keys() == {name for name, p in whole.draft.named_parameters() if p.requires_grad}
    assert_close(loss, other, depth=DEPTH)
    assert statistics.keys() == others.keys()
    for name, value in statistics.items():
        assert_close(value, others[name], depth=DEPTH)
    for name, gradient in expected.items():
        assert_close(found[name], gradient, depth=2 * DEPTH)


def test_the_mask_state_and_the_mask_token_learn() -> None:
    recipe = p_eagle(partitions=2)
    _, _, found = gradients(recipe, packed(recipe))
    assert found["mask_hidden"].abs().max() > 0
    assert found["embed_tokens.weight"][MASK].abs().max() > 0


def test_an_embedding_that_does_not_change_is_the_targets() -> None:
    assert p_eagle().draft.spec.embed_tokens == "draft"
    recipe = p_eagle(train_embeddings=False)
    assert recipe.draft.spec.embed_tokens == "target"
    assert "embed_tokens.weight" not in recipe.tensors()


@pytest.mark.parametrize("reached", [None, 0.0, 0.1])
def test_a_loss_is_a_mean_over_all_rows_that_draft(reached: float | None) -> None:
    """A row counts the chance that the drafts before it are the target's choices."""
    recipe = p_eagle(drop=ALL, loss="ce", reached=reached)
    batch = packed(recipe)
    outcome = recipe(batch)
    best = target().lm_head(batch.last[0]).argmax(-1)
    offset = [sum(size for size, _ in SAMPLES[:n]) for n in range(len(SAMPLES))]
    chains: dict[tuple[int, int], dict[int, Tensor]] = {}  # of each anchor the losses by depth
    for row in drafted(recipe, batch, batch.drafted(K)):
        label = best[offset[row.sample] + row.place + row.depth + 1]
        chains.setdefault((row.sample, row.place), {})[row.depth] = -row.logits.log_softmax(-1)[label]
    total = weights = torch.tensor(0.0)
    for losses in chains.values():
        weight = torch.tensor(1.0)
        for depth in range(len(losses)):
            total, weights = total + weight * losses[depth], weights + weight
            if reached is not None:
                weight = weight * ((1 - reached) * (-losses[depth]).exp() + reached)
    assert_close(outcome.loss, total / weights, depth=DEPTH)


@pytest.mark.parametrize("loss", ["ce", "0.1*ce + kl"])
def test_the_loss_of_pard_is_a_mean_over_all_rows(causal_lm: Draft, loss: str) -> None:
    recipe = pard(causal_lm, drop=ALL, loss=loss, train_prompt=False)
    batch = packed(recipe)
    law = target().lm_head(batch.last[0]).log_softmax(-1)
    offset = [sum(size for size, _ in SAMPLES[:n]) for n in range(len(SAMPLES))]
    values = []
    for row in drafted(recipe, batch, batch.drafted(K).roll(1, -1)):
        anchor = offset[row.sample] + row.place
        q, p = row.logits.log_softmax(-1), law[anchor + row.depth]
        value = -q[batch.tokens[0, anchor + row.depth + 1]]
        if loss != "ce":
            value = 0.1 * value + (p.exp() * (p - q)).sum()
        values.append(value)
    assert_close(recipe(batch).loss, torch.stack(values).mean(), depth=DEPTH)


def test_half_precision(causal_lm: Draft) -> None:
    for recipe in (p_eagle(partitions=2), pard(causal_lm, loss="kl")):
        batch = packed(recipe)
        loss, _, expected = gradients(recipe, batch)
        with torch.autocast("cpu", torch.bfloat16):
            found = gradients(recipe, batch)
        torch.testing.assert_close(found[0], loss, rtol=0.02, atol=0)
        assert all(tensor.isfinite().all() for tensor in found[2].values())
        assert expected.keys() == found[2].keys()


def test_the_random_state_decides(causal_lm: Draft) -> None:
    for recipe in (p_eagle(), pard(causal_lm)):
        batch = packed(recipe)
        state = torch.get_rng_state()
        losses = [recipe(batch).loss.item() for _ in range(2)]
        assert losses[0] != losses[1]
        torch.set_rng_state(state)
        assert losses == [recipe(batch).loss.item() for _ in range(2)]


@pytest.mark.parametrize("kind", ["p-eagle", "pard"])
def test_training_lowers_the_loss(causal_lm: Draft, kind: str) -> None:
    recipe = p_eagle() if kind == "p-eagle" else pard(causal_lm)
    batch = packed(recipe)
    recipe.train()
    optimiser = torch.optim.Adam([p for p in recipe.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for _ in range(20):
        torch.manual_seed(0)
        loss = recipe(batch).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]


def test_a_batch_without_drafts_has_no_loss(causal_lm: Draft) -> None:
    for recipe in (p_eagle(), pard(causal_lm, train_prompt=False)):
        batch = packed(recipe)
        outcome = recipe(batch._replace(loss_mask=torch.zeros_like(batch.loss_mask)))
        outcome.loss.backward()
        assert float(outcome.loss) == 0


# --- Saving, and drafting for real


def without_dtype(spec: DraftSpec) -> DraftSpec:
    """A checkpoint's configuration says in what its weights are stored."""
    lm = spec.architecture
    if not isinstance(lm, CausalLMSpec):
        return spec
    return replace(spec, architecture=replace(lm, config={k: v for k, v in lm.config.items() if k != "dtype"}))


def test_saved_drafts_are_what_was_trained(causal_lm: Draft, tmp_path: Path) -> None:
    for index, recipe in enumerate((p_eagle(), pard(causal_lm))):
        folder = tmp_path / str(index)
        save_draft(folder, recipe.spec, recipe.tensors(), target="target")
        draft = read_draft(folder)
        options = recipe.options_type(mask_token_id=None)
        again = type(recipe).start(Origin(target(), draft), options)
        assert without_dtype(again.spec) == without_dtype(recipe.spec)
        assert again.aux_layers == recipe.aux_layers
        torch.testing.assert_close(again.tensors(), recipe.tensors(), rtol=0, atol=0)
    model = pico.llama(rms_norm_eps=1e-5)
    model.set_attn_implementation("draftkit")
    drafter = load_drafter(draft, model)
    assert isinstance(drafter, PardDrafter)


BLOCK = {"block_size": 4, "max_anchors": 4}
RESUMED: dict[str, dict[str, object]] = {
    "p-eagle": {"options": {"steps": 3, "num_layers": 1, "partitions": 2}},
    "pard": {"options": {"steps": 3}},
    "dspark": {"options": BLOCK | {"markov_rank": 8}, "lora": {"r": 2, "dropout": 0.5}},
    "dflash2": {"options": BLOCK | {"selector_rank": 8}},
    "dflash2, LoRA": {"options": BLOCK | {"selector_rank": 8}, "lora": {"r": 2, "dropout": 0.5}},
}


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", RESUMED)
def test_a_run_resumes_bit_for_bit(causal_lm: Draft, tmp_path: Path, name: str) -> None:
    """The chains that are dropped, the anchors of blocks and what adapters leave out are the same after a resume."""
    kind = name.removesuffix(", LoRA")
    source = pico.save_tokenizer(pico.save_llama(tmp_path / "target", rms_norm_eps=1e-5))
    write_samples(tmp_path / "data.jsonl", samples(12), TextOrigin(target="pico", tokenizer_sha256="0" * 64))
    given = {
        "recipe": kind, "target": str(source), "data": str(tmp_path / "data.jsonl"),
        "tokens_per_row": 96, "optimization": {"max_steps": 4}, "save_every": 2, "validation": {"share": 0.2},
        "draft": str(causal_lm.path) if kind == "pard" else "", **RESUMED[name],
    }  # fmt: skip
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    train_draft(read_config(None, [], given | {"out": str(whole)}))
    shutil.copytree(whole / "checkpoint-2", resumed / "checkpoint-2")
    train_draft(read_config(None, [], given | {"out": str(resumed)}), resume=True)
    weights = [load_file(run / "checkpoint-4" / "model.safetensors") for run in (whole, resumed)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    before = load_file(whole / "checkpoint-2" / "model.safetensors")
    changed = {name for name, tensor in weights[0].items() if not tensor.equal(before[name])}
    assert {name for name in before if name.startswith(("markov_head", "candidate_selector"))} <= changed
    assert changed
    assert read_draft(whole / "draft").spec.method == kind


@pytest.fixture(scope="module")
def zoo() -> tuple[PreTrainedModel, PreTrainedModel, list[Request]]:
    """The target as the engine runs it and as training does, and requests."""
    model, tokenizer = load_model("zoo:target", device="cpu", dtype=torch.float32)
    trained = AutoModelForCausalLM.from_pretrained(locate("zoo:target").path, dtype=torch.float32)
    return model, trained, [Request(p.id, encode_prompt(p, tokenizer), 32) for p in load_prompts("zoo", 3)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zoo:p-eagle", "zoo:pard"])
def test_simulated_rounds_are_decoded(zoo: tuple[PreTrainedModel, PreTrainedModel, list[Request]], name: str) -> None:
    model, trained, requests = zoo
    with open_draft(name, "zoo:target") as draft:
        drafter = load_drafter(draft, model)
        engine = Engine(Target(model, drafter.aux_layers), drafter, num_speculative_tokens=K, num_slots=1)
        generations = engine.generate(requests)
        origin = Origin(trained, draft)
        recipe = PEagle.start(origin, PEagleOptions()) if name == "zoo:p-eagle" else Pard.start(origin, PardOptions())
    texts = [torch.tensor([*g.request.prompt, *g.tokens]) for g in generations]
    tokens = torch.cat(texts)[None]
    positions = torch.cat([torch.arange(len(text)) for text in texts])[None]
    samples = torch.cat([torch.full_like(text, n) for n, text in enumerate(texts)])[None]
    loss_mask = torch.cat(
        [torch.arange(len(t)) >= len(g.request.prompt) for t, g in zip(texts, generations, strict=True)]
    )
    states = OnlineStates(trained, recipe.aux_layers).states(tokens, positions, samples)
    batch = TrainingBatch(tokens, positions, samples, loss_mask[None], *states)
    rounds = simulate_rounds(batch, recipe.chains(batch, K), "greedy")
    for n, (text, generation) in enumerate(zip(texts, generations, strict=True)):
        served = [min(one.accepted, len(text) - one.position) for one in generation.rounds]
        assert [one.accepted for one in rounds[n]] == served


def test_a_parallel_draft_made_of_eagle3_begins_as_it(
    zoo: tuple[PreTrainedModel, PreTrainedModel, list[Request]],
) -> None:
    """The first draft token needs no mask row, so it has the law that it had; layers that are added change nothing."""
    _, trained, requests = zoo
    with open_draft("zoo:eagle3", "zoo:target") as draft:
        origin = Origin(trained, draft)
        older, newer = Eagle3.start(origin, Eagle3Options()), PEagle.start(origin, PEagleOptions(num_layers=3))
    tokens = torch.tensor(requests[0].prompt)[None]
    positions = torch.arange(tokens.shape[1])[None]
    samples, loss_mask = torch.zeros_like(tokens), torch.ones_like(tokens, dtype=torch.bool)
    states = OnlineStates(trained, older.aux_layers).states(tokens, positions, samples)
    batch = TrainingBatch(tokens, positions, samples, loss_mask, *states)
    logits = trained.get_output_embeddings()(batch.last)
    assert_close(newer.chains(batch, 1).alpha, older.chains(batch, 1).alpha, depth=DEPTH, magnitude=logits)
    assert newer.aux_layers == older.aux_layers
    newer(batch).loss.backward()
    assert all(layer.mlp.down_proj.weight.grad.abs().sum() > 0 for layer in newer.draft.layers)


def test_chains_do_not_depend_on_how_many_run_at_once(causal_lm: Draft, monkeypatch: pytest.MonkeyPatch) -> None:
    for recipe in (p_eagle(), pard(causal_lm)):
        batch = packed(recipe)
        whole = recipe.chains(batch, K)
        monkeypatch.setattr("draftkit.train.parallel.ROWS_AT_ONCE", 16)
        for values, expected in zip(recipe.chains(batch, K), whole, strict=True):
            values, expected = (of[whole.drafted].float() for of in (values, expected))
            assert_close(values, expected, depth=DEPTH, magnitude=target().lm_head(batch.last))
        monkeypatch.undo()


# --- The mask token, and what is refused


def test_the_mask_token_is_one_that_no_text_contains(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(pico.save_tokenizer(tmp_path))
    size = len(tokenizer)
    assert pick_mask_token(tokenizer, V) == V - 1
    assert pick_mask_token(tokenizer, V, used={V - 1}) == V - 2
    with pytest.raises(DraftkitError, match="no unused token"):
        pick_mask_token(tokenizer, size)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|reserved_0|>", "<|tool|>"]})
    assert pick_mask_token(tokenizer, size + 2) == size
    assert pick_mask_token(tokenizer, size + 2, used={size}) == size + 1  # no template writes it
    tokenizer.chat_template = "{{ '<|tool|>' }}"
    with pytest.raises(DraftkitError, match="no unused token"):
        pick_mask_token(tokenizer, size + 2, used={size})


def test_the_mask_token_is_picked_from_the_drafts_tokenizer(causal_lm: Draft) -> None:
    assert pard(causal_lm, mask_token_id=None).mask_token_id == V - 1


@pytest.mark.parametrize(
    ("options", "message"),
    [({"steps": 0}, "steps: 0"), ({"partitions": 0}, "partitions: 0"), ({"loss": "klx"}, "klx"),
     ({"mask_token_id": V}, f"mask_token_id {V}"), ({"mask_token_id": None}, "no tokenizer"),
     ({"layers": (99,)}, r"target layers \[99\]"), ({"temperature": 0.0}, "temperature: 0")],
)  # fmt: skip
def test_p_eagle_refuses(options: dict[str, object], message: str) -> None:
    with pytest.raises(DraftkitError, match=message):
        p_eagle(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"steps": 0}, "steps: 0"), ({"mask_token_id": -1}, "mask_token_id: -1"), ({"loss": ""}, "loss ''")],
)  # fmt: skip
def test_pard_refuses(causal_lm: Draft, options: dict[str, object], message: str) -> None:
    with pytest.raises(DraftkitError, match=message):
        pard(causal_lm, **options)


@pytest.mark.parametrize("options", [{"retention": 0.0}, {"least": 1.1}, {"max_anchors": 0}])
def test_shares_that_are_none(options: dict[str, float]) -> None:
    with pytest.raises(DraftkitError, match=next(iter(options))):
        from_dict(ConditionalDrop, to_dict(ConditionalDrop()) | options, "options")


def test_drafts_of_another_kind_are_refused(causal_lm: Draft) -> None:
    with pytest.raises(DraftkitError, match="no draft to start from"):
        Pard.start(Origin(target()), PardOptions())
    with pytest.raises(DraftkitError, match="draft-model"):
        PEagle.start(Origin(target(), causal_lm), PEagleOptions())
    with pytest.raises(DraftkitError, match="320 tokens, the target 64"):
        Pard.start(Origin(pico.llama(vocab_size=64), causal_lm), PardOptions())
    quantized = replace(causal_lm, spec=replace(causal_lm.spec, quantization={"quant_method": "fp8"}))
    with pytest.raises(DraftkitError, match="quantized"):
        Pard.start(Origin(target(), quantized), PardOptions())
    with open_draft("zoo:eagle3", "zoo:target") as draft, pytest.raises(DraftkitError, match="eagle3"):
        Pard.start(Origin(target(), draft), PardOptions())


def test_attention_that_is_more_than_products_is_refused() -> None:
    query = torch.randn(1, 2, 3, 4)
    with pytest.raises(TargetError, match="keyword arguments"):
        attend_masked(torch.nn.Identity(), query, query, query)
    batch = packed(p_eagle())
    masks = masks_of_parallel_rows(ParallelRows(batch.drafted(1), batch))
    with pytest.raises(TargetError, match="caps its scores"):
        attend_masked(torch.nn.Identity(), query, query, query, masks=masks, softcap=3.0)
