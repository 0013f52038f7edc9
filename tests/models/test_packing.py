"""Packed linear layers compute what plain ones do, and are plain again for whoever asks for the weight."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from fixtures import pico
from fixtures.precision import assert_close
from fixtures.zoo_models import requests, zoo_drafter, zoo_target
from torch import nn

from draftkit.models import packing
from draftkit.models.packing import PackedLinear, kept_twice, pack, packs
from draftkit.models.target import Target
from draftkit.runtime.engine import Engine

BIG = packing.LITTLE_WEIGHT // 64

pytestmark = pytest.mark.skipif(not packs(torch.float32), reason="torch has no oneDNN here")


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """A layer that is kept in both ways in float32, and one that is not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.Linear(64, BIG, bias=False)).to(dtype).requires_grad_(False)


def packed(model: nn.Module) -> list[bool]:
    return [isinstance(module, PackedLinear) for module in model.modules() if isinstance(module, nn.Linear)]


@pytest.mark.parametrize("shape", [(48,), (1, 48), (0, 48), (2, 3, 48), (300, 48)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_products(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not packs(dtype):
        pytest.skip("this CPU does not multiply in bfloat16")
    model, x = layers(dtype), torch.randn(*shape).to(dtype)
    expected = model(x)
    pack(model)
    with torch.inference_mode():
        found = model(x)
    assert packed(model) == [True, True]
    assert found.shape == expected.shape
    if x.numel():
        assert_close(found, expected, depth=2)


def test_the_weight_is_there_once() -> None:
    model = layers()
    little, big = model
    kept, given_up = little.weight, big.weight
    pack(model)
    assert vars(little)["plain"] is kept
    assert vars(big)["plain"] is None
    assert not any(value is given_up for value in vars(big).values())
    assert kept_twice(layers().to("meta"), torch.float32) == kept.numel()
    assert kept_twice(layers().to("meta"), torch.bfloat16) == 0


def test_whoever_asks_gets_the_weight_back() -> None:
    plain = layers()
    for ask in (
        lambda model: model.state_dict(),
        lambda model: dict(model.named_parameters()),
        lambda model: deepcopy(model).state_dict(),
        lambda model: {"0.weight": model[0].weight, "0.bias": model[0].bias, "1.weight": model[1].weight},
    ):
        model = layers()
        pack(model)
        given = ask(model)
        assert list(given) == list(plain.state_dict())
        assert all(torch.equal(given[name], tensor) for name, tensor in plain.state_dict().items())
        assert packed(model) == [False, False]


def test_what_is_written_into_a_weight_counts() -> None:
    model, x = layers(), torch.randn(300, 48)
    pack(model)
    model[1].weight.mul_(2)
    pack(model)
    with torch.inference_mode():
        assert_close(model(x), 2 * layers()(x), depth=2)


def test_gradients_flow() -> None:
    model, plain, x = layers(), layers(), torch.randn(3, 48)
    pack(model)
    found, expected = (torch.autograd.functional.jacobian(lambda x, m=m: m(x).sum(), x) for m in (model, plain))
    assert torch.equal(found, expected)


def test_what_is_not_its_own_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Quantized(nn.Linear):
        pass

    learning = layers().requires_grad_(True)
    replaced = layers()
    replaced[1].forward = lambda x: x  # as accelerate does for what lies elsewhere
    quantized = nn.Sequential(Quantized(64, BIG).requires_grad_(False), nn.Linear(8, 8, device="meta"))
    for model in (learning, replaced, quantized):
        pack(model)
    assert packed(learning) == [False, False]
    assert packed(replaced) == [True, False]
    assert packed(quantized) == [False, False]
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = layers()
    pack(model)
    assert packed(model) == [False, False]


def test_tied_weights_stay_tied() -> None:
    model = pico.llama(tie_word_embeddings=True).requires_grad_(False)
    pack(model)
    head, table = model.get_output_embeddings(), model.get_input_embeddings().weight
    assert isinstance(head, PackedLinear)
    assert vars(head)["plain"] is table
    assert head.weight is table


@pytest.mark.parametrize("name", ["eagle3", "draft-model", "dspark", "mlp-speculator"])
def test_engines_pack_and_give_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "LITTLE_WORK", 0)  # every product is one of packed weights
    drafter = zoo_drafter(name)
    found = []
    for available in (False, True):
        if drafter.module is not None:
            list(drafter.module.parameters())
        list(zoo_target().parameters())
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda available=available: available)
        engine = Engine(Target(zoo_target(), drafter.aux_layers), drafter, num_speculative_tokens=4, num_slots=3)
        found.append([generation.tokens for generation in engine.generate(requests()[:4])])
        assert set(packed(zoo_target())) == {available}
    assert found[0] == found[1]
