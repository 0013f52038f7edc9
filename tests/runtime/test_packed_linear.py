"""Packed linear layers compute what plain ones do, and are plain again for whoever asks for the weight."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from weakref import ref

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.zoo_models import requests, zoo_drafter, zoo_target
from fixtures.precision import assert_close
from torch import nn

from draftkit.runtime import engine
from draftkit.runtime.engine import Engine
from draftkit.runtime.fusion import fuse
from draftkit.runtime.fusion.layers import FusedAttention, FusedDecoder, FusedLayer, FusedMLP
from draftkit.runtime.fusion.norms import FusedNorm
from draftkit.runtime.fusion.packed_linear import Joint, PackedLinear, joint_of, kept_twice, pack, packs
from draftkit.targets.target import Target

pytestmark = pytest.mark.skipif(not packs(torch.float32), reason="torch has no oneDNN here")


def layers(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 96, bias=False)).to(dtype).requires_grad_(False)


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
    given_up = [ref(layer.weight) for layer in model]
    pack(model)
    assert [weight() for weight in given_up] == [None, None]
    assert kept_twice(layers().to("meta"), torch.float32) == 0
    tied = pico.llama(tie_word_embeddings=True)
    assert kept_twice(tied, torch.float32) == tied.get_input_embeddings().weight.numel()


def joint_layers() -> nn.Sequential:
    """Two that read the same rows, and one that does not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64), nn.Linear(48, 32), nn.Linear(32, 8)).requires_grad_(False)
    Joint([model[0], model[1]])
    return model


@pytest.mark.parametrize("takes_apart", [lambda model: None, lambda model: model.state_dict()])
def test_joint_products(takes_apart: Callable[[nn.Sequential], object]) -> None:
    """Those of all layers at once, and of one alone, packed and as they are again."""
    model, x = joint_layers(), torch.randn(3, 48)
    expected = [layer(x) for layer in model[:2]]
    given_up = ref(model[1].weight)
    pack(model)
    assert given_up() is None
    takes_apart(model)
    joint = joint_of(model[0])
    assert joint is joint_of(model[1])
    assert joint is not None
    with torch.inference_mode():
        assert_close(joint(x), torch.cat(expected, dim=-1), depth=2)
        for layer, product in zip(model[:2], expected, strict=True):
            assert_close(layer(x), product, depth=2)


def test_joint_weights_come_back() -> None:
    """As parts of one tensor: what is written into one of them counts."""
    model, plain, x = joint_layers(), joint_layers(), torch.randn(3, 48)
    pack(model)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in plain.state_dict().items())
    model[1].weight.zero_()
    joint = joint_of(model[0])
    assert joint is not None
    for _ in range(2):
        with torch.inference_mode():
            assert_close(joint(x)[:, 64:], model[1].bias.expand(3, -1), depth=2)
        pack(model)
        assert packed(model) == [True] * 3


def test_copies_are_joined_anew() -> None:
    model, x = joint_layers(), torch.randn(3, 48, dtype=torch.float64)
    copy = deepcopy(model)
    for parameter in copy.parameters():
        parameter.data = parameter.data.double() * 2
    joint = joint_of(copy[0])
    assert joint is not None
    joint.renew()
    assert_close(joint(x), 2 * torch.cat([layer.double()(x) for layer in model[:2]], dim=-1), depth=2)


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
    quantized = nn.Sequential(Quantized(64, 96).requires_grad_(False), nn.Linear(8, 8, device="meta"))
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


def as_loaded(model: nn.Module) -> None:
    """Without what engines have made of it."""
    list(model.parameters())
    for module in model.modules():
        if type(vars(module).get("forward")) in (FusedNorm, FusedLayer, FusedDecoder, FusedAttention, FusedMLP):
            del vars(module)["forward"]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["eagle3", "draft-model", "dspark", "mlp-speculator"])
def test_engines_pack_and_fuse_and_give_the_same_tokens(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = zoo_drafter(name)
    models = [model for model in (zoo_target(), drafter.module) if model is not None]
    found = []
    for changed in (False, True):
        for model in models:
            as_loaded(model)
        with monkeypatch.context() as patch:
            if not changed:
                patch.setattr(engine, "fuse", lambda model: None)
                patch.setattr(engine, "pack", lambda model: None)
            made = Engine(Target(zoo_target(), drafter.aux_layers), drafter, num_speculative_tokens=4, num_slots=3)
        found.append([generation.tokens for generation in made.generate(requests()[:4])])
        assert set(packed(zoo_target())) == {changed}
    assert found[0] == found[1]


def test_what_is_packed_stays_so_when_another_engine_takes_the_model() -> None:
    model = pico.llama().requires_grad_(False)
    fuse(model)
    pack(model)
    fuse(model)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert layers
    assert all(isinstance(layer, PackedLinear) for layer in layers)
