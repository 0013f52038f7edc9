"""Attention in training, of chains and of packed samples, against every score written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.precision import LAYER, assert_close
from fixtures.training.samples import samples
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from draftkit.data.packing import row_tensors
from draftkit.data.states.online import OnlineStates
from draftkit.errors import TargetError
from draftkit.targets.attention import Sight
from draftkit.targets.states import AuxLayers
from draftkit.train import attention
from draftkit.train.attention import (
    MASKED_ATTENTION,
    Blocks,
    BlockVisibility,
    ChainSteps,
    Masks,
    chain_attention_reference,
    masks_of_samples,
)
from draftkit.train.batch import TrainingBatch
from draftkit.train.recipes.eagle_eagle3 import Eagle3, Eagle3Options
from draftkit.train.recipes.eagle_p_eagle import PEagle, PEagleOptions
from draftkit.train.recipes.recipe import Origin, Recipe

SAMPLE_IDS = torch.tensor([[0] * 9 + [1] * 6 + [2] * 4 + [-1] * 2])
N = SAMPLE_IDS.shape[1]
SMALL = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2,
}  # fmt: skip


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sight", [Sight(), Sight(4)])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_joined_attention_and_its_gradients(dtype: torch.dtype, sight: Sight, steps: int) -> None:
    """Against float64."""
    rows = torch.tensor([0, 3, 4, 8, 9, 13, 16, 20])
    shapes = [(1, 2, len(rows), 8), (1, 2, N, 8), (1, 2, N, 8)]
    shapes += [(steps, 1, 2, len(rows), 8)] * 2 if steps else []
    inputs = [random(*shape, seed=i).to(dtype) for i, shape in enumerate(shapes)]
    direction = random(*shapes[0], seed=9).to(dtype)

    def run(attend: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        query, key, value, *own = leaves = [x.to(dtype).requires_grad_() for x in inputs]
        chain = ChainSteps(SAMPLE_IDS)
        chain.go_on(rows)
        bias = chain.masks.bias((sight, 0), dtype)
        out = attend(query, key, value, tuple(own) if own else None, bias, 0.3)
        return out, *torch.autograd.grad(out, leaves, direction.to(dtype))

    for found, expected in zip(
        run(attention._joined, dtype), run(chain_attention_reference, torch.float64), strict=True
    ):
        assert_close(found, expected, depth=4)  # scores and values, and as many in the backward pass


def literal(query: Tensor, pairs: list[tuple[int, Tensor, Tensor]]) -> Tensor:
    """One row and head, [D]: softmax over keys and values, given with their positions."""
    scores = torch.stack([query @ key * 0.3 for _, key, _ in pairs])
    return scores.softmax(0) @ torch.stack([value for *_, value in pairs])


@pytest.mark.slow
@pytest.mark.parametrize("flex", [False, True])
@pytest.mark.parametrize("sight", [Sight(), Sight(5), Sight(4, 2)])
def test_steps_see_the_first_and_their_own(sight: Sight, flex: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row: true keys of the sample up to the anchor and own ones after it, within the window of where the row
    stands, and the sample's first ones; also in the FlexAttention that GPUs run."""
    window, beginnings = sight.window, {0: 0, 1: 9, 2: 15, -1: 19}
    chain = ChainSteps(SAMPLE_IDS)
    chosen = torch.tensor([2, 7, 8, 11, 18])
    keys, values = [], []
    for t in range(4):
        if t == 1:
            chain.go_on(chosen)
        elif t > 1:
            chain.go_on()
        rows = chain.rows
        query = random(1, 4, len(rows), 8, seed=10 * t, dtype=torch.float32)
        key, value = (random(1, 2, len(rows), 8, seed=10 * t + i, dtype=torch.float32) for i in (1, 2))
        keys.append(key)
        values.append(value)
        if flex:
            own = None
            if t:
                own = tuple(torch.stack([x.repeat_interleave(2, 1) for x in kind[1:]]) for kind in (keys, values))
            monkeypatch.setattr(attention, "_compiled_flex", flex_attention)
            monkeypatch.setattr(attention, "_compiled_mask", create_block_mask)
            blocks = chain.masks.blocks((sight, 0 if window is None else t))
            found = attention._joined_flex(query, keys[0], values[0], own, blocks, 0.3)
        else:
            found = chain.attend(0, query, key, value, 0.3, sight)
        for r, anchor in enumerate(rows.tolist()):
            for head in range(4):
                at = anchor + t
                true = [j for j in range(anchor + 1) if SAMPLE_IDS[0, j] == SAMPLE_IDS[0, anchor]]
                pairs = [(j, keys[0][0, head // 2, j], values[0][0, head // 2, j]) for j in true]
                pairs += [(anchor + s, keys[s][0, head // 2, r], values[s][0, head // 2, r]) for s in range(1, t + 1)]
                first = beginnings[int(SAMPLE_IDS[0, anchor])] + sight.sink_tokens
                seen = [pair for pair in pairs if window is None or pair[0] > at - window or pair[0] < first]
                expected = literal(query[0, head, r], seen)
                assert_close(found[0, head, r], expected, depth=2, magnitude=torch.cat(values, 2))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "full": lambda: LlamaForCausalLM(pico.llama_config()),
    "window": lambda: MistralForCausalLM(MistralConfig(**SMALL, sliding_window=3)),
    "windows in some layers": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SMALL, sliding_window=3, attn_logit_softcapping=None, final_logit_softcapping=None)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("flex", [False, True])
@torch.no_grad()
def test_packed_samples_are_as_alone(name: str, flex: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    tokens = torch.randint(3, 50, (1, N))
    positions = torch.cat([torch.arange(int(SAMPLE_IDS.eq(i).sum())) for i in (0, 1, 2, -1)])[None]
    model.set_attn_implementation("eager")
    alone = [model(input_ids=tokens[SAMPLE_IDS.eq(i)][None]).logits for i in range(3)]
    model.set_attn_implementation(MASKED_ATTENTION)
    masks = masks_of_samples(SAMPLE_IDS)
    if flex:  # as on a GPU
        monkeypatch.setattr(attention, "_compiled_mask", create_block_mask)
        monkeypatch.setattr(attention, "_compiled_flex", flex_attention)
        monkeypatch.setattr(masks, "bias", lambda window, dtype: masks.blocks(window))
        monkeypatch.setattr(attention, "_dense", lambda *given: attention._flex(*given)[0])
    together = model(input_ids=tokens, position_ids=positions, use_cache=False, masks=masks).logits
    depth = LAYER * model.config.num_hidden_layers + 1
    assert_close(together[:, : N - 2], torch.cat(alone, dim=1), depth=depth)


def test_models_with_other_scores_are_refused() -> None:
    model = Gemma2ForCausalLM(Gemma2Config(**SMALL))
    model.set_attn_implementation(MASKED_ATTENTION)
    tokens = torch.ones(1, N, dtype=torch.int64)
    with pytest.raises(TargetError, match="caps its scores"):
        model(input_ids=tokens, use_cache=False, masks=masks_of_samples(SAMPLE_IDS))
    with pytest.raises(TargetError, match="keyword arguments"):
        model(input_ids=tokens, use_cache=False)


@pytest.mark.parametrize(
    "visibility",
    [
        (None, True, False),
        (None, False, False),
        (3, False, False),
        (2, True, False),
        (4, True, True),
        (2, True, False, 3),
    ],
)
def test_blocks_and_their_gradients_whatever_part_of_the_context_is_multiplied(
    visibility: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against every score written out, with parts that begin within a sample, and within the one before."""
    monkeypatch.setattr(attention, "BLOCKS_AT_ONCE", 3)
    anchors, rows = torch.tensor([0, 4, 7, 10, 11, 12, 13, 16]), 3
    blocks = len(anchors)
    inputs = [random(blocks, heads, rows, 8, seed=heads + i) for i, heads in enumerate((4, 2, 2))]
    inputs += [random(1, 2, N, 8, seed=i) for i in (7, 8)]
    direction = random(blocks, 4, rows, 8, seed=9)

    def gradients(run: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        out = run(*leaves)
        return out, *torch.autograd.grad(out, leaves, direction)

    def found(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return Blocks(anchors, rows, SAMPLE_IDS, [(keys, values)]).attend(
            0, query, key, value, 0.3, BlockVisibility(*visibility)
        )

    def expected(query: Tensor, key: Tensor, value: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        window, bidirectional, anchored, sink_tokens = BlockVisibility(*visibility)
        beginnings = {0: 0, 1: 9, 2: 15}
        out = []
        for block, anchor in enumerate(anchors.tolist()):
            k, v = (
                torch.cat((context[0], own[block]), dim=1).repeat_interleave(2, 0)
                for context, own in ((keys, key), (values, value))
            )
            hidden = torch.full((rows, N + rows), -torch.inf, dtype=k.dtype)
            for row in range(rows):
                for place in range(anchor + 1):
                    near = window is None or place > anchor + 1 + (0 if anchored else row) - window
                    near |= place < beginnings[int(SAMPLE_IDS[0, anchor])] + sink_tokens
                    hidden[row, place] = 0.0 if near and SAMPLE_IDS[0, place] == SAMPLE_IDS[0, anchor] else -torch.inf
                for other in range(rows):
                    near = window is None or anchored or abs(row - other) < window
                    begins = anchor - beginnings[int(SAMPLE_IDS[0, anchor])] + 1 + other < sink_tokens
                    near |= begins and other <= row
                    hidden[row, N + other] = 0.0 if near and (bidirectional or other <= row) else -torch.inf
            out.append(((query[block] @ k.transpose(1, 2)) * 0.3 + hidden).softmax(-1) @ v)
        return torch.stack(out)

    for ours, reference in zip(gradients(found), gradients(expected), strict=True):
        assert_close(ours, reference, depth=4)


@pytest.mark.parametrize(
    ("recipe", "options"), [(Eagle3, Eagle3Options(steps=3)), (PEagle, PEagleOptions(steps=3, mask_token_id=5))]
)
def test_long_samples_attend_by_some_rows_at_a_time(
    recipe: type[Recipe], options: Eagle3Options | PEagleOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same loss and gradients, and no bias of all rows."""
    target = pico.llama(num_hidden_layers=6)
    made = recipe.start(Origin(target), replace(options, layers=(1, 3, 5)))
    row = {name: tensor[None] for name, tensor in row_tensors(samples(3), 160).items()}
    states = OnlineStates(target, made.aux_layers).states(row["tokens"], row["positions"], row["sample_ids"])

    def found() -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(0)
        made.zero_grad()
        loss = made(TrainingBatch(**row, features=states.features, last=states.last)).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in made.parameters() if p.grad is not None]

    whole = found()
    sizes: list[int] = []
    bias = Masks._bias

    def counted(self: Masks, layer: Any, dtype: torch.dtype, rows: range, columns: tuple[range, ...]) -> Tensor:
        sizes.append(len(rows) * sum(map(len, columns)))
        return bias(self, layer, dtype, rows, columns)

    monkeypatch.setattr(Masks, "_bias", counted)
    monkeypatch.setattr(attention, "SCORES_AT_ONCE", 160 * 32)
    torch.testing.assert_close(found(), whole, rtol=1e-4, atol=1e-6)
    assert len(sizes) > 4
    assert max(sizes) <= 160 * 32 or recipe is PEagle  # whose rows are more than the tokens
    assert max(sizes) <= 32 * 160 * 3


def test_a_long_row_runs_its_samples_beside_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    target = pico.llama(num_hidden_layers=2)
    online = OnlineStates(target, AuxLayers((1,)))
    row = {name: tensor[None] for name, tensor in row_tensors(samples(3), 160).items()}
    given = row["tokens"], row["positions"], row["sample_ids"]
    packed = online.states(*given)
    monkeypatch.setattr("draftkit.data.states.online.MASKED_TOKENS", 100)
    monkeypatch.setattr("draftkit.data.states.online.attention_masks", lambda *_: pytest.fail("a mask was made"))
    beside = online.states(*given)
    inside = row["sample_ids"][0] >= 0
    torch.testing.assert_close(beside.last[:, inside], packed.last[:, inside], rtol=1e-4, atol=1e-5)
    assert packed.features is not None
    assert beside.features is not None
    torch.testing.assert_close(beside.features[:, inside], packed.features[:, inside], rtol=1e-4, atol=1e-5)
