"""States of samples with images: what enters each layer of the whole model, whatever stands beside them in a row."""

from __future__ import annotations

import pytest
import torch
from fixtures.checkpoints.visual import LAYERS, VISUAL, prompt_with_images, visual_model
from torch import Tensor, nn

from draftkit.data.states.online import OnlineStates
from draftkit.targets.states import AuxLayers

WANTED = (0, 1, 2, 3, LAYERS)


def entering(model: nn.Module, tokens: list[int], media: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """What enters the layers of `WANTED`, or leaves the last one, [T, F]; and what the output layer reads, [T, H]."""
    text = model.model.text_model if hasattr(model.model, "text_model") else model.model.language_model
    seen: dict[int, Tensor] = {}

    def enters(layer: int, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        seen[layer] = args[0] if args else kwargs["hidden_states"]

    def leaves(_module: nn.Module, _args: object, out: Tensor | tuple[Tensor, ...]) -> None:
        seen[LAYERS] = out[0] if isinstance(out, tuple) else out

    hooks = [
        layer.register_forward_pre_hook(lambda _, args, kwargs, i=i: enters(i, args, kwargs), with_kwargs=True)
        for i, layer in enumerate(text.layers)
    ]
    hooks.append(text.layers[-1].register_forward_hook(leaves))
    hooks.append(model.lm_head.register_forward_pre_hook(lambda _, args: seen.update({-1: args[0]})))
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), **media, use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.cat([seen[i] for i in WANTED], dim=-1)[0], seen[-1][0]


@pytest.mark.parametrize("kind", VISUAL)
def test_states_are_what_enters_the_layers(kind: str) -> None:
    model = visual_model(kind)
    samples = [prompt_with_images(kind, images, seed=images, text=4) for images in (1, 0, 2, 0)]
    row = torch.tensor([[token for tokens, _ in samples for token in tokens] + [0, 0]])
    ids = [number for number, (tokens, _) in enumerate(samples) for _ in tokens] + [-1, -1]
    positions = [place for tokens, _ in samples for place in range(len(tokens))] + [0, 0]
    media = {number: of_it for number, (_, of_it) in enumerate(samples) if of_it}
    found = OnlineStates(model, AuxLayers(WANTED)).states(
        row, torch.tensor([positions]), torch.tensor([ids]), media=media
    )
    assert found.features is not None
    begin = 0
    for tokens, of_it in samples:
        features, last = entering(model, tokens, of_it)
        own = slice(begin, begin + len(tokens))
        tolerance = {"atol": 1e-3, "rtol": 1e-3} if kind == "qwen3_5" else {"atol": 2e-5, "rtol": 1e-5}
        torch.testing.assert_close(found.features[0, own], features, **tolerance)
        torch.testing.assert_close(found.last[0, own], last, **tolerance)
        begin += len(tokens)


def test_deepstack_makes_outputs_of_layers_other_than_inputs() -> None:
    """What transformers calls `hidden_states[1]` of Qwen3-VL lacks what its images add before the next layer."""
    model = visual_model("qwen3_vl")
    tokens, media = prompt_with_images("qwen3_vl")
    said = model(input_ids=torch.tensor([tokens]), **media, use_cache=False, output_hidden_states=True).hidden_states
    width = said[0].shape[2]
    entered = entering(model, tokens, media)[0].split(width, dim=-1)
    apart = [(one[0] - other).abs().amax(1) for one, other in zip(said, entered, strict=False)]
    of_image = media["mm_token_type_ids"][0].bool()
    assert all(apart[layer][of_image].min() > 1e-2 for layer in (1, 2))
    assert all(apart[layer][~of_image].max() == 0 for layer in (1, 2))
    assert apart[0].max() == 0
