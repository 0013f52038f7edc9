"""Prompts with images in draftkit's own engine: what it decodes is what transformers' `generate` does."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.visual import IMAGE, LAYERS, VISUAL, prompt_with_images, visual_model
from lossless.noise import logits_in_rounds
from transformers import LlamaForCausalLM

from draftkit.errors import DraftkitError
from draftkit.evaluate.near_ties import generated, teacher_forced
from draftkit.requests import Request
from draftkit.runtime.architecture_check import Known
from draftkit.runtime.attention import NAME
from draftkit.runtime.drafters.causal_lm import CausalLMDrafter
from draftkit.runtime.drafters.protocol import NewSequence
from draftkit.runtime.engine import Engine
from draftkit.runtime.tree_kinds import read_tree
from draftkit.targets.media import HELD
from draftkit.targets.pretrained import IMAGES, of_language_model
from draftkit.targets.states import AuxLayers, TappedModel
from draftkit.targets.target import Target

NEW = 16


def requests(kind: str) -> list[Request]:
    """Prompts with one image, with two, with none, and with a longer text."""
    found = []
    for number, (images, text) in enumerate([(1, 5), (2, 3), (0, 9), (1, 12)]):
        tokens, media = prompt_with_images(kind, images, seed=number, text=text)
        found.append(Request(str(number), tuple(tokens), NEW, media=media if images else None, ignore_eos=True))
    return found


def answers(kind: str, asked: list[Request]) -> list[list[int]]:
    model = visual_model(kind)
    found = []
    for request in asked:
        tokens = torch.tensor([request.prompt])
        out = model.generate(
            input_ids=tokens, attention_mask=torch.ones_like(tokens), **(request.media or {}),
            do_sample=False, max_new_tokens=NEW, min_new_tokens=NEW,
        )  # fmt: skip
        found.append(out[0, len(request.prompt) :].tolist())
    return found


def target(kind: str) -> Target:
    model = visual_model(kind)
    model.set_attn_implementation(of_language_model(model.config, NAME))
    setattr(model.config, IMAGES, True)
    return Target(model)


def test_these_kinds_are_said_to_be_held_against_it() -> None:
    assert VISUAL.keys() == HELD


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("kind", VISUAL)
def test_decoding_equals_generate(kind: str) -> None:
    """One after the other and beside each other, in pieces that would cut images, and with drafts."""
    asked = requests(kind)
    expected = answers(kind, asked)
    texts = [[*request.prompt, *tokens] for request, tokens in zip(asked, expected, strict=True)]
    for k, slots, chunk in ((0, 1, 2048), (0, 3, 7), (3, 4, 2048)):
        drafter = Known(texts) if k else None
        engine = Engine(target(kind), drafter, num_speculative_tokens=k, num_slots=slots, prefill_chunk=chunk)
        generations = engine.generate(asked)
        assert [generation.tokens for generation in generations] == expected
    assert {r.accepted for g in generations for r in g.rounds} >= {0, 1, 2}


@pytest.mark.slow
def test_trees_after_images_equal_generate() -> None:
    asked = requests("qwen2_5_vl")
    expected = answers("qwen2_5_vl", asked)
    drafter = CausalLMDrafter(target("qwen2_5_vl"))
    tree = read_tree("eagle:topk=2,depth=2,nodes=4")
    engine = Engine(target("qwen2_5_vl"), drafter, num_speculative_tokens=2, num_slots=2, tree=tree)
    assert [generation.tokens for generation in engine.generate(asked)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", VISUAL)
def test_features_are_the_inputs_of_layers(kind: str) -> None:
    """Of the whole model at work in transformers' own way; ids in convention S, the last before the final norm."""
    tokens, media = prompt_with_images(kind, 2)
    wanted = AuxLayers((0, 1, 2, 3, LAYERS))
    plain = TappedModel(visual_model(kind), wanted)
    with plain.captured() as states:
        plain.model(input_ids=torch.tensor([tokens]), **media, use_cache=False)
    expected = plain.features(states, torch.tensor([tokens]))

    tapped = Target(target(kind).model, wanted)
    told = []

    class Heard(Known):
        def prefill(self, prompts: Sequence[NewSequence]) -> None:
            told.extend(prompt.features for prompt in prompts)

    engine = Engine(tapped, Heard([], wanted), num_speculative_tokens=1, num_slots=1, prefill_chunk=7)
    engine.generate([Request("0", tuple(tokens), 1, media=media)])
    apart = (told[0] - expected[0]).norm(dim=1) / expected[0].norm(dim=1)  # of each row
    assert apart.max() < (1e-4 if kind == "qwen3_5" else 1e-6)  # whose gated delta rule is computed otherwise


def test_what_is_not_run_is_refused_by_name() -> None:
    tokens, media = prompt_with_images("llava")
    engine = Engine(target("llava"), None, num_speculative_tokens=0, num_slots=1)
    sound = {"input_features": torch.zeros(1, 4, 4)}
    with pytest.raises(DraftkitError, match="request a has audio, which draftkit does not run in its own process yet"):
        engine.generate([Request("a", tuple(tokens), NEW, media=media | sound)])
    film = {"pixel_values_videos": torch.zeros(1, 4, 4)}
    with pytest.raises(DraftkitError, match="request a has videos"):
        engine.generate([Request("a", tuple(tokens), NEW, media=media | film)])
    other = Engine(Target(LlamaForCausalLM(pico.llama_config())), None, num_speculative_tokens=0, num_slots=1)
    with pytest.raises(DraftkitError, match="request a has images, and LlamaForCausalLM reads none"):
        other.generate([Request("a", tuple(tokens), NEW, media=media)])
    fewer = [token for token in tokens if token != IMAGE] + [IMAGE]
    with pytest.raises(DraftkitError, match="does not take in the images of a prompt: Image features"):
        engine.generate([Request("a", tuple(fewer), NEW, media=media)])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "gemma3"])
def test_passes_over_an_answer_see_the_images(kind: str) -> None:
    """What rounding does is measured by forwards of both kinds; `generate` gives what the engine does; and the tower's
    own attention is as it was."""
    model = target(kind)
    tower = model.model.get_encoder("image").config._attn_implementation
    asked = requests(kind)
    texts = Engine(model, None, num_speculative_tokens=0, num_slots=2).generate(asked)
    forced = [teacher_forced(model.model, t.request.prompt, t.tokens, t.request.media).topk(16) for t in texts]
    for together, rows in ((1, 1), (2, 3)):
        for at in range(0, len(texts), together):
            best = forced[at : at + together]
            found = logits_in_rounds(model, texts[at : at + together], rows, [one.indices for one in best])
            for logits, one in zip(found, best, strict=True):
                assert (logits - one.values).abs().max() < 5e-4
    assert [generated(model, request) for request in asked] == [tuple(text.tokens) for text in texts]
    assert model.model.get_encoder("image").config._attn_implementation == tower
    assert [text.tokens for text in Engine(model, None, num_speculative_tokens=0, num_slots=2).generate(asked)] == [
        text.tokens for text in texts
    ]


@pytest.mark.slow
def test_trees_leave_answers_to_images_as_they_are() -> None:
    model, drafter = target("qwen2_5_vl"), CausalLMDrafter(Target(target("qwen2_5_vl").model))
    asked = requests("qwen2_5_vl")
    tree = read_tree("eagle:topk=2,depth=2,nodes=4")
    run = Engine(model, drafter, num_speculative_tokens=2, num_slots=2, tree=tree).generate(asked)
    plain = Engine(model, None, num_speculative_tokens=0, num_slots=2).generate(asked)
    assert [generation.tokens for generation in run] == [generation.tokens for generation in plain]
    assert any(r.accepted for generation in run for r in generation.rounds)
