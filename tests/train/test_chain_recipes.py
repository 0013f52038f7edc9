"""Recipes that draft token by token: their training forward is what serving computes, their losses the published."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.engines.draft_references import rotate
from fixtures.precision import LAYER, assert_close
from torch import Tensor
from torch.nn.functional import smooth_l1_loss
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from draftkit.convert.api import convert_checkpoint
from draftkit.errors import DraftkitError, LayoutError, TargetError
from draftkit.layout.families.eagle import EagleSpec
from draftkit.layout.folder import Draft, read_draft
from draftkit.layout.spec import DraftSpec
from draftkit.loading import load_drafter
from draftkit.models.eagle import EagleModel
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.drafters.protocol import Committed, Drafter, NewSequence
from draftkit.train.batch import TrainingBatch
from draftkit.train.checkpoint import save_draft
from draftkit.train.recipes.bases.dflash import BlockRecipe
from draftkit.train.recipes.bases.eagle import EagleFamily
from draftkit.train.recipes.causal_lm_draft_model import DraftModel, DraftModelOptions
from draftkit.train.recipes.dflash import DFlash, DFlashOptions
from draftkit.train.recipes.dflash_dflash2 import DFlash2, DFlash2Options
from draftkit.train.recipes.dflash_dspark import DSpark, DSparkOptions
from draftkit.train.recipes.eagle import HASS, Eagle, EagleOptions
from draftkit.train.recipes.eagle_eagle3 import Eagle3, Eagle3Options
from draftkit.train.recipes.recipe import Chains, Origin, Recipe

V, H = pico.VOCABULARY, pico.HIDDEN
K = 4
DEPTH = K * 2 * LAYER + 1  # products from the states to the logits: at most K steps of two layers, then the head
LENGTHS = (13, 9, 11)
SPANS = ([(4, 13)], [(1, 4), (6, 9)], [(8, 11)])  # of the samples: what the target has produced
PADDING = 3
LLAMA = DraftModelOptions(num_layers=2, hidden_size=32, num_heads=4, num_key_value_heads=2)


@cache
def target() -> LlamaForCausalLM:
    return pico.llama()


@cache
def vocabulary() -> Tensor:
    """int64 [Vd]: a draft vocabulary."""
    generator = torch.Generator().manual_seed(5)
    return torch.randperm(V, generator=generator)[: pico.DRAFT_VOCABULARY].sort().values


def packed(feature_size: int, samples: tuple[int, ...] = (0, 1, 2), padding: int = PADDING) -> TrainingBatch:
    """Some of the samples; their tokens and states do not depend on what else is in the row."""
    tokens, positions, numbers, loss_mask, features, last = [], [], [], [], [], []
    for place, sample in enumerate([*samples, -1]):
        generator = torch.Generator().manual_seed(sample + 1)
        length = padding if sample < 0 else LENGTHS[sample]
        inside = torch.zeros(length, dtype=torch.bool)
        for begin, end in () if sample < 0 else SPANS[sample]:
            inside[begin:end] = True
        tokens.append(torch.randint(3, V, (length,), generator=generator))
        positions.append(torch.arange(length))
        numbers.append(torch.full((length,), -1 if sample < 0 else place))
        loss_mask.append(inside)
        features.append(torch.randn(length, feature_size, generator=generator))
        last.append(torch.randn(length, H, generator=generator))
    whole = (torch.cat(parts)[None] for parts in (tokens, positions, numbers, loss_mask, features, last))
    batch = TrainingBatch(*whole)
    return batch if feature_size else batch._replace(features=None)


def batch_of(recipe: Recipe, *samples: int) -> TrainingBatch:
    size = recipe.draft.spec.feature_size if recipe.aux_layers is not None else 0
    return packed(size, samples, padding=0) if samples else packed(size)


def shaken(recipe: Recipe) -> Recipe:
    """With random weights where training starts from small ones; not the target's."""
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in recipe.draft.parameters():
            if parameter.requires_grad:
                noise = torch.randn_like(parameter)
                parameter.copy_(1 + 0.3 * noise if parameter.ndim == 1 else 0.1 * noise)
    return recipe


def started(recipe: type[Recipe], options: object, d2t_ids: Tensor | None = None) -> Recipe:
    return shaken(recipe.start(Origin(target(), d2t_ids=d2t_ids), options)).eval()


def continued_from(spec: EagleSpec, recipe: type[Recipe], options: object, folder: Path) -> Recipe:
    """A recipe that goes on with a draft of that spec."""
    model = EagleModel(spec, ATTENTION)
    if spec.reduced_vocabulary:
        model.d2t.copy_(vocabulary() - torch.arange(len(vocabulary())))
    save_draft(folder, DraftSpec(architecture=spec, dtype="F32"), model.state_dict(), target="")
    return shaken(recipe.start(Origin(target(), read_draft(folder)), options)).eval()


# --- Serving, one anchor at a time


class TrueTokens:
    """Draws what the text says, and keeps the logits."""

    def __init__(self, tokens: Tensor):
        self.tokens = tokens
        self.logits: list[Tensor] = []

    def __call__(self, step: int, logits: Tensor, ids: Tensor | None = None) -> Tensor:
        self.logits.append(logits[0])
        return self.tokens[step : step + 1]


def served(drafter: Drafter, tokens: Tensor, features: Tensor | None, anchor: int) -> Tensor:
    """The logits [K, Vd] of a chain after a fresh prefill up to `anchor`, whose next token starts it."""
    drafter.allocate(1, len(tokens) + K + 1, K)
    known = anchor + 1
    drafter.prefill([NewSequence(0, tokens[:known], None if features is None else features[:known])])
    draw = TrueTokens(torch.cat((tokens[known + 1 :], torch.zeros(K, dtype=torch.int64))))
    committed = Committed(
        slots=torch.tensor([0]),
        tokens=tokens[known : known + 1][None],
        counts=torch.tensor([1]),
        start=torch.tensor([known]),
        features=None if features is None else features[anchor : anchor + 1][None],
        length=known + K + 1,
    )
    drafter.propose(committed, K, draw)
    return torch.stack(draw.logits)


@cache
def serving_target() -> LlamaForCausalLM:
    model = pico.llama()
    model.set_attn_implementation(ATTENTION)
    return model


def saved(recipe: Recipe, folder: Path) -> Draft:
    save_draft(folder, recipe.spec, recipe.tensors(), target="")
    return read_draft(folder)


def all_served(recipe: Recipe, folder: Path) -> Tensor:
    """The logits [K, N, Vd] of the packed batch that the runtime computes from the recipe's checkpoint, sample by
    sample and anchor by anchor; zeros where no chain starts."""
    drafter = load_drafter(saved(recipe, folder), serving_target())
    batch = batch_of(recipe)
    states = batch.last if batch.features is None else batch.features
    features = None if drafter.aux_layers is None else states[0]
    drafted = batch.drafted(K)
    out = []
    for anchor in range(batch.tokens.shape[1]):
        here = batch.sample_ids[0] == batch.sample_ids[0, anchor]
        if not drafted[0, anchor]:
            out.append(None)
            continue
        begin = int(here.nonzero()[0, 0])
        own = None if features is None else features[here]
        out.append(served(drafter, batch.tokens[0, here], own, anchor - begin))
    example = next(logits for logits in out if logits is not None)
    return torch.stack([torch.zeros_like(example) if logits is None else logits for logits in out], dim=1)


def finite(logits: Tensor) -> Tensor:
    """With zeros for the tokens that a selector rules out."""
    return logits.nan_to_num(neginf=0)


def trained(recipe: Recipe, batch: TrainingBatch) -> Tensor:
    """The same logits as the recipe's training forward has them; zeros where nothing is drafted."""
    drafted = batch.drafted(K)
    if isinstance(recipe, DraftModel):
        states = recipe.states(batch)[0]
        rows = recipe.draft.get_output_embeddings()(states)
        logits = torch.stack([rows.roll(-1 - t, 0) for t in range(K)])
        return logits * drafted[..., None]
    if isinstance(recipe, BlockRecipe):
        steps, positions, output, latent, _ = recipe.rows(batch, drafted[0].nonzero()[:, 0], K)
        found = recipe.draft.logits(output)
        if recipe.draft.markov_head is not None:
            found = found + recipe.draft.markov_head.bias(latent)
        if recipe.draft.candidate_selector is not None:
            values, ids = found.topk(recipe.draft.candidate_selector.top_k)
            values = values + recipe.draft.candidate_selector(batch.tokens[0, positions + 1 + steps], ids, output)
            found = torch.full_like(found, -torch.inf).scatter(1, ids, values)
    else:
        assert isinstance(recipe, EagleFamily)
        steps, positions, hidden = recipe.rows(recipe.steps(batch, drafted))
        found = recipe.draft.logits(hidden)
    logits = found.new_zeros(*drafted.shape, found.shape[-1])
    logits[steps, positions] = found
    return torch.where(drafted[..., None], logits, 0)


Make = Callable[[Path], Recipe]


def eagle3(**options: object) -> Make:
    return lambda _: started(Eagle3, Eagle3Options(**options), vocabulary())


def eagle3_of(**changes: object) -> Make:
    """Of what only a draft that is gone on with can have."""
    options = Eagle3Options(steps=K)
    return lambda folder: continued_from(replace(pico.EAGLE3_SPEC, **changes), Eagle3, options, folder)


def dflash(d2t_ids: bool = False, **options: object) -> Make:
    made = DFlashOptions(**{"block_size": K + 1, "mask_token_id": V - 1, "layers": (2, 5)} | options)
    return lambda _: started(DFlash, made, vocabulary() if d2t_ids else None)


def dspark(d2t_ids: bool = False, **options: object) -> Make:
    made = DSparkOptions(**{"block_size": K, "mask_token_id": V - 1, "layers": (1, 4, 8), "markov_rank": 8} | options)
    return lambda _: started(DSpark, made, vocabulary() if d2t_ids else None)


def dflash2(**options: object) -> Make:
    """With a selector whose scores change what is drafted."""
    sizes = {"block_size": K + 1, "mask_token_id": V - 1, "layers": (2, 5), "selector_rank": 8, "selector_top_k": 6}
    made = DFlash2Options(**sizes | options)

    @torch.no_grad()
    def make(_: Path) -> Recipe:
        recipe = started(DFlash2, made)
        selector = recipe.draft.candidate_selector
        for table in (selector.predecessor_codebook, selector.successor_codebook):  # type: ignore[union-attr]
            table.mul_(10)
        return recipe

    return make


def windowed(spec: EagleSpec) -> dict[str, object]:
    return {"decoder": replace(spec.decoder, sliding_window=4, sink_tokens=2)}


RECIPES: dict[str, Make] = {
    "eagle": lambda _: started(Eagle, EagleOptions()),
    "eagle, two layers, fc.bias": lambda _: started(Eagle, EagleOptions(num_layers=2, fusion_bias=True)),
    "hass": lambda _: started(Eagle, HASS),
    "eagle, all norms, scaled logits": lambda folder: continued_from(
        replace(
            pico.EAGLE_SPEC, embedding_norm=True, hidden_norm=True, input_norm=True, final_norm=True,
            feedback="post_norm", logit_scale=0.5,
        ),
        Eagle, EagleOptions(), folder,
    ),
    "eagle, window": lambda folder: continued_from(
        replace(pico.EAGLE_SPEC, **windowed(pico.EAGLE_SPEC)), Eagle, EagleOptions(), folder
    ),
    "eagle3": eagle3(),
    "eagle3, whole vocabulary": lambda _: started(Eagle3, Eagle3Options()),
    "eagle3, own embedding": eagle3(train_embeddings=True),
    "eagle3, norm before residual": eagle3(norm_before_residual=True),
    "eagle3, joint norm": eagle3(feature_norm="joint"),
    "eagle3, norm per layer, normed feedback": eagle3(feature_norm="per_layer", norm_output=True),
    "eagle3, two layers": eagle3(num_layers=2, layers=(1, 3)),
    "eagle3, window": eagle3_of(**windowed(pico.EAGLE3_SPEC)),
    "eagle3, window of one layer": eagle3_of(
        decoder=replace(pico.EAGLE3_SPEC.decoder, num_hidden_layers=2, sliding_window=4, full_attention_layers=(1,))
    ),
    "eagle3, hidden state first, without norms": eagle3_of(
        concatenation="hidden_embedding", embedding_norm=False, hidden_norm=False, final_norm=False
    ),
    "eagle3 on the last state": eagle3_of(aux_layer_ids=None),
    "dflash": dflash(),
    "dflash, reduced vocabulary": dflash(d2t_ids=True),
    "dflash, a sliding layer": dflash(sliding_window=4, sink_tokens=2),
    "dflash, a window to both sides": dflash(sliding_window=2, causal=False),
    "dflash, beyond its block": dflash(block_size=3),
    "jetspec": dflash(causal=True),
    "dflash, a longer block": dflash(block_size=9),
    "dspark": dspark(),
    "dspark, reduced vocabulary, gated": dspark(d2t_ids=True, markov_type="gated"),
    "dspark, recurrent, fill-in": dspark(markov_type="rnn", slots="fill-in", block_size=K + 1, confidence=False),
    "dflash2": dflash2(),
    "dflash2, anchor-first, a sliding layer, warm": dflash2(slots="anchor-first", sliding_window=4, temperature=0.7),
    "draft-model": lambda _: started(DraftModel, LLAMA),
    "draft-model, window": lambda _: started(DraftModel, replace(LLAMA, sliding_window=4, sink_tokens=2)),
}  # fmt: skip


@pytest.fixture(params=RECIPES)
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> Recipe:
    return RECIPES[request.param](tmp_path / "origin")


@pytest.mark.slow
@pytest.mark.few(6)
@torch.no_grad()
def test_training_computes_what_serving_does(recipe: Recipe, tmp_path: Path) -> None:
    """At every position and step, from packed rows here and from one sample and anchor after the other there."""
    batch = batch_of(recipe)
    drafted = batch.drafted(K)
    expected = torch.where(drafted[..., None], all_served(recipe, tmp_path / "draft"), 0)
    assert drafted.sum((0, 1)) > 30
    assert_close(finite(trained(recipe, batch)), finite(expected), depth=DEPTH)


def expected_chains(recipe: Recipe, batch: TrainingBatch, logits: Tensor) -> Chains:
    """What `Recipe.chains` says of these logits [K, N, Vd]."""
    drafted = batch.drafted(K)
    ids = recipe.draft.target_ids if isinstance(recipe, EagleFamily | BlockRecipe) else None
    ids = torch.arange(V) if ids is None else ids
    temperature = recipe.options.temperature
    p = (batch.last[0] @ target().lm_head.weight.T / temperature).softmax(-1)
    fields = [torch.zeros(drafted.shape) for _ in range(4)]
    for t, i in drafted.nonzero().tolist():
        q = torch.zeros(V).index_put_((ids,), (logits[t, i] / temperature).softmax(-1))
        law, token = p[i + 1 + t], batch.tokens[0, i + 2 + t]
        found = q.argmax() == law.argmax(), (q[token] / law[token]).clamp(max=1), torch.minimum(q, law).sum()
        for field, value in zip(fields, (*found, 1 - law[ids].sum()), strict=True):
            field[t, i] = value
    return Chains(drafted, fields[0].bool(), *fields[1:])


@pytest.mark.slow
def test_chains_say_what_those_laws_mean(recipe: Recipe) -> None:
    batch = batch_of(recipe)
    chains = recipe.chains(batch, K)
    logits = trained(recipe, batch).detach()
    expected = expected_chains(recipe, batch, logits)
    assert torch.equal(chains.drafted, expected.drafted)
    for name in ("agree", "ratio", "alpha", "oov"):
        found = torch.where(expected.drafted, getattr(chains, name), 0)
        assert_close(found.float(), getattr(expected, name).float(), depth=DEPTH, magnitude=finite(logits))


@pytest.mark.slow
def test_packed_samples_know_nothing_of_each_other(recipe: Recipe) -> None:
    logits = trained(recipe, batch_of(recipe))
    together = recipe.chains(batch_of(recipe), K)
    ends = torch.tensor(LENGTHS).cumsum(0).tolist()
    for sample, end in enumerate(ends):
        alone = recipe.chains(batch_of(recipe, sample), K)
        here = slice(end - LENGTHS[sample], end)
        for ours, theirs in zip(together, alone, strict=True):
            ours, theirs = ((values * alone.drafted).float() for values in (ours[:, here], theirs))
            assert_close(ours, theirs, depth=DEPTH, magnitude=finite(logits))
    assert not together.drafted[:, ends[-1] :].any()


def test_chains_do_not_go_round_the_row() -> None:
    """A row that one sample fills, all of it supervised."""
    batch = packed(0, (0,), padding=0)
    batch = batch._replace(loss_mask=torch.ones_like(batch.loss_mask))
    assert torch.equal(batch.drafted(2), batch.complete(2))
    assert batch.drafted(2).sum(1).tolist() == [LENGTHS[0] - 2, LENGTHS[0] - 3]


# --- Losses


def distributions(batch: TrainingBatch, logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """p within the draft vocabulary and log q [K, N, Vd]."""
    teacher = (batch.last[0] @ target().lm_head.weight.T)[:, ids].softmax(-1)
    p = torch.stack([teacher.roll(-1 - t, 0) for t in range(len(logits))])
    return p, logits.log_softmax(-1)


@pytest.mark.parametrize("handling", ["keep", "drop"])
def test_loss_of_eagle3(handling: str) -> None:
    options = Eagle3Options(steps=K, out_of_vocabulary=handling)  # type: ignore[arg-type]
    recipe = started(Eagle3, options, vocabulary())
    batch = batch_of(recipe)
    p, log_q = distributions(batch, trained(recipe, batch), vocabulary())
    divergence = (p * (p.log() - log_q)).sum(-1)
    counted = batch.drafted(K)
    if handling == "drop":
        known = torch.isin((batch.last[0] @ target().lm_head.weight.T).argmax(-1), vocabulary())
        counted = counted & torch.stack([known.roll(-1 - t) for t in range(K)])
        assert not torch.equal(counted, batch.drafted(K))
    factors = torch.tensor([0.8**t for t in range(K)])
    steps = torch.stack([divergence[t][counted[t]].mean() for t in range(K)])
    assert_close(recipe(batch).loss, (factors / factors.sum()) @ steps, depth=DEPTH)


def test_loss_of_draft_model() -> None:
    recipe = started(DraftModel, LLAMA)
    batch = batch_of(recipe)
    p, log_q = distributions(batch, trained(recipe, batch), torch.arange(V))
    expected = (p[0] * (p[0].log() - log_q[0])).sum(-1)[batch.drafted(1)[0]].mean()
    outcome = recipe(batch)
    assert_close(outcome.loss, expected, depth=DEPTH)
    same_gradients(recipe, outcome.loss, expected)


def same_gradients(recipe: Recipe, ours: Tensor, theirs: Tensor) -> None:
    parameters = [p for p in recipe.parameters() if p.requires_grad]
    expected = torch.autograd.grad(theirs, parameters, retain_graph=True)
    for found, gradient in zip(torch.autograd.grad(ours, parameters, retain_graph=True), expected, strict=True):
        assert_close(found, gradient, depth=2 * DEPTH)


def hass_predictions(draft: EagleModel, tokens: Tensor, true: Tensor, forwards: int) -> Iterator[Tensor]:
    """HASS as published, for one sample: forward f runs all rows [N, H] on the last one's predictions, and attends
    to true features up to f − 1 places back, then to one predicted set after the other."""
    size, base = len(tokens), draft.spec.decoder.rope.base
    layer, at = draft.layers[0], torch.arange(len(tokens))
    project = layer.self_attn
    embedding = draft.embed_tokens(tokens.roll(-1))
    sets = [true]
    for f in range(forwards):
        fused = [draft.fc(torch.cat((embedding, features), -1)) for features in sets]
        query = rotate(project.q_proj(fused[-1]).view(size, 4, 16), at, base)
        keys = torch.stack([rotate(project.k_proj(x).view(size, 2, 16), at, base) for x in fused])
        values = torch.stack([project.v_proj(x).view(size, 2, 16) for x in fused])
        keys, values = (x.repeat_interleave(2, dim=2) for x in (keys, values))  # [sets, columns, heads, 16]
        seen = torch.stack([at[None] == at[:, None] - (f - s) for s in range(f + 1)], dim=1)  # [rows, sets, columns]
        seen[:, 0] = at[None] <= at[:, None] - f
        scores = torch.einsum("rhd,schd->hrsc", query, keys) / 4
        weights = scores.masked_fill(~seen, -torch.inf).flatten(2).softmax(-1).nan_to_num().view_as(scores)
        attended = torch.einsum("hrsc,schd->rhd", weights, values).reshape(size, H)
        x = fused[-1] + project.o_proj(attended)
        predicted = x + layer.mlp(layer.post_attention_layernorm(x))
        yield predicted
        sets.append(torch.cat((true[:1], predicted[:-1])).detach())


@pytest.mark.parametrize("options", [EagleOptions(), HASS], ids=["eagle", "hass"])
def test_hass_as_published(options: EagleOptions) -> None:
    """Loss and gradients, with the backward pass after every forward."""
    recipe = started(Eagle, options)
    draft = recipe.draft
    assert isinstance(draft, EagleModel)
    batch = batch_of(recipe, 0)
    tokens, true = batch.tokens[0], batch.last[0]
    own = {name: p for name, p in draft.named_parameters() if p.requires_grad}
    gradients = {name: torch.zeros_like(p) for name, p in own.items()}
    total = 0.0
    for f, predicted in enumerate(hass_predictions(draft, tokens, true, options.forwards)):
        rows = batch.drafted(f + 1)[f].nonzero()[:, 0] + f
        p = target().lm_head(true[rows + 1]).softmax(-1)
        log_q = target().lm_head(predicted[rows]).log_softmax(-1)
        loss = smooth_l1_loss(predicted[rows], true[rows + 1]) - 0.1 * (p * log_q).sum(-1).mean()
        if options is HASS:
            best = p.topk(10).indices
            loss = loss - (p.gather(-1, best) * log_q.gather(-1, best)).sum(-1).mean()
        for name, gradient in zip(own, torch.autograd.grad(loss, list(own.values()), retain_graph=True), strict=True):
            gradients[name] += gradient
        total += float(loss.detach())
    outcome = recipe(batch)
    assert float(outcome.loss.detach()) == pytest.approx(total, rel=1e-5)
    outcome.loss.backward()
    for name, parameter in own.items():
        expected = gradients[name]
        assert_close(parameter.grad, expected, depth=2 * DEPTH)
    assert all(p.grad is None for p in target().parameters())


@pytest.mark.parametrize("scale", ["length", "fixed"])
def test_noise_of_eagle(scale: str) -> None:
    recipe = started(Eagle, EagleOptions(noise=0.2, noise_scale=scale))  # type: ignore[arg-type]
    assert isinstance(recipe, Eagle)
    batch = batch_of(recipe)
    assert recipe.noisy(batch) is batch
    noise = (recipe.train().noisy(batch).last - batch.last)[0]
    for sample, length in enumerate(LENGTHS):
        bound = 0.1 * (512 / length if scale == "length" else 1)
        here = noise[batch.sample_ids[0] == sample]
        assert 0.97 * bound < here.abs().max() <= bound * 1.001
        assert abs(here.mean()) < 0.1 * bound
    quiet = started(Eagle, EagleOptions(noise=0))
    assert torch.equal(quiet.train()(batch).loss, quiet.eval()(batch).loss)


TRAINED = ["eagle", "hass", "eagle3", "draft-model"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_losses_fall(name: str, tmp_path: Path) -> None:
    recipe = RECIPES[name](tmp_path).train()
    batch = batch_of(recipe)
    optimiser = torch.optim.AdamW([p for p in recipe.parameters() if p.requires_grad], lr=3e-3, weight_decay=0)
    losses = []
    for _ in range(20):
        outcome = recipe(batch)
        optimiser.zero_grad()
        outcome.loss.backward()
        optimiser.step()
        losses.append(float(outcome.loss))
        assert not any(value.requires_grad for value in outcome.statistics.values())
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.slow
def test_a_row_without_the_targets_text(recipe: Recipe) -> None:
    batch = batch_of(recipe)
    outcome = recipe(batch._replace(loss_mask=torch.zeros_like(batch.loss_mask)))
    assert outcome.loss == 0
    outcome.loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in recipe.parameters())


@pytest.mark.parametrize("name", TRAINED)
def test_mixed_precision(name: str, tmp_path: Path) -> None:
    """Under autocast, from a target in bfloat16."""
    recipe = RECIPES[name](tmp_path)
    batch = batch_of(recipe)
    expected = float(recipe(batch).loss.detach())
    features = None if batch.features is None else batch.features.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        loss = recipe(batch._replace(features=features, last=batch.last.bfloat16())).loss
    loss.backward()
    assert float(loss.detach()) == pytest.approx(expected, rel=0.05)
    assert all(p.grad is None or p.grad.isfinite().all() for p in recipe.parameters())


# --- Checkpoints and errors


@pytest.mark.parametrize("name", TRAINED)
def test_a_checkpoint_is_the_draft(name: str, tmp_path: Path) -> None:
    """Loaded into a recipe that began otherwise, and started from."""
    recipe = RECIPES[name](tmp_path)
    batch = batch_of(recipe)
    other = type(recipe).start(Origin(target(), d2t_ids=vocabulary() if name == "eagle3" else None), recipe.options)
    other.load(recipe.tensors())
    further = type(recipe).start(Origin(target(), saved(recipe, tmp_path / "draft")), recipe.options)
    expected = recipe.chains(batch, K)
    for same in (other, further):
        assert same.eval().chains(batch, K).alpha.equal(expected.alpha)
        assert set(same.tensors()) == set(read_draft(tmp_path / "draft").tensors)
    trainable = {name for name, p in recipe.draft.named_parameters() if p.requires_grad}
    assert trainable == {name for name, p in further.draft.named_parameters() if p.requires_grad}


def test_hass_is_eagle(tmp_path: Path) -> None:
    """What one has trained the other goes on with."""
    recipe = started(Eagle, EagleOptions())
    further = Eagle.start(Origin(target(), saved(recipe, tmp_path / "draft")), HASS)
    batch = batch_of(recipe)
    assert further.eval().chains(batch, K).alpha.equal(recipe.chains(batch, K).alpha)


KINDS: dict[str, tuple[type[Recipe], object]] = {
    "eagle": (Eagle, EagleOptions()),
    "eagle3": (Eagle3, Eagle3Options()),
    "draft-model": (DraftModel, LLAMA),
}


@pytest.mark.parametrize(("name", "other"), permutations(KINDS, 2))
def test_drafts_of_another_kind(name: str, other: str, tmp_path: Path) -> None:
    draft = saved(RECIPES[other](tmp_path), tmp_path / "draft")
    kind, options = KINDS[name]
    with pytest.raises(DraftkitError, match=f"of the kind {other}\n.*\n.*{name}"):
        kind.start(Origin(target(), draft), options)


@pytest.mark.parametrize("name", ["eagle", "draft-model"])
def test_a_draft_vocabulary_where_none_can_be(name: str) -> None:
    kind, options = KINDS[name]
    with pytest.raises(DraftkitError, match="a draft vocabulary"):
        kind.start(Origin(target(), d2t_ids=vocabulary()), options)


def test_more_drafts_than_the_window(tmp_path: Path) -> None:
    recipe = RECIPES["eagle3, window"](tmp_path)
    with pytest.raises(DraftkitError, match=r"chains of 5 drafts\n.*at most 4, the draft's window"):
        recipe.chains(batch_of(recipe), 5)


def test_layers_that_the_target_lacks() -> None:
    with pytest.raises(LayoutError, match=r"target layers \[2, 9\]"):
        Eagle3.start(Origin(target()), Eagle3Options(layers=(2, 9)))


def test_draft_models_that_cannot_be_trained(tmp_path: Path) -> None:
    recipe = RECIPES["draft-model"](tmp_path)
    draft = saved(recipe, tmp_path / "draft")
    with pytest.raises(DraftkitError, match="the draft has 320 tokens, the target 300"):
        DraftModel.start(Origin(pico.llama(vocab_size=300), draft), LLAMA)
    quantized = replace(draft, spec=replace(draft.spec, quantization={"quant_method": "fp8"}))
    with pytest.raises(DraftkitError, match="quantized"):
        DraftModel.start(Origin(target(), quantized), LLAMA)
    capped = Gemma2Config(**SMALL, final_logit_softcapping=30.0)
    with pytest.raises(TargetError, match="the draft's logits are changed by final_logit_softcapping"):
        DraftModel.start(Origin(target(), foreign(Gemma2ForCausalLM(capped), tmp_path / "gemma")), LLAMA)
    experts = MixtralConfig(**SMALL, num_local_experts=2)
    with pytest.raises(DraftkitError, match="MixtralForCausalLM stores its weights under other names"):
        DraftModel.start(Origin(target(), foreign(MixtralForCausalLM(experts), tmp_path / "experts")), LLAMA)


SMALL = {
    "vocab_size": V, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


def foreign(model: PreTrainedModel, folder: Path) -> Draft:
    """A causal language model as a draft."""
    model.save_pretrained(folder / "source")
    return read_draft(convert_checkpoint(str(folder / "source"), folder / "draft", target=str(folder / "source")))
