"""Operations that take over parts of transformers' models: they agree with them, and are found where they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fixtures import pico
from fixtures.kernels import DEVICE
from fixtures.precision import LAYER, assert_close
from fixtures.targets import TEXT
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

from draftkit.models.target import Target
from draftkit.runtime import fusion
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.fusion import FusedNorm, FusedRotation, fuse
from draftkit.runtime.ops.rms_norm import rms_norm, rms_norm_reference
from draftkit.runtime.ops.rotation import rotate, rotate_reference

torch.set_num_threads(1)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("one_plus", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 64), (2, 3, 4, 48)])
def test_norms(shape: tuple[int, ...], one_plus: bool, dtype: torch.dtype) -> None:
    x, weight = 3 * normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype, seed=1)
    for rows in (x, x.transpose(0, 1)):
        expected = rms_norm_reference(rows, weight, 1e-5, one_plus)
        assert_close(rms_norm(rows, weight, 1e-5, one_plus=one_plus), expected, depth=1)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [16, 80])
def test_rotation(width: int, dtype: torch.dtype) -> None:
    """Of projections seen as heads, in a layout that no copy has tidied."""
    query = normal(2, 3, 4, width, dtype=dtype).transpose(1, 2)
    key = normal(2, 3, 6, width, dtype=dtype, seed=1)[:, :, 2:4].transpose(1, 2)
    cos, sin = normal(2, 3, width, dtype=dtype, seed=2), normal(2, 3, width, dtype=dtype, seed=3)
    for found, heads in zip(rotate(query, key, cos, sin), (query, key), strict=True):
        assert_close(found, rotate_reference(heads, cos, sin), depth=1)


def model(kind: str) -> PreTrainedModel:
    config = CONFIG_MAPPING[kind](**TEXT | {"head_dim": 16, "num_hidden_layers": 2})
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval().requires_grad_(False)
    for parameter in made.parameters():
        if parameter.dim() == 1:  # norms that differ
            parameter.add_(0.1 * torch.randn_like(parameter))
    return made.to(DEVICE)


@pytest.fixture
def own_files() -> Iterator[None]:
    """transformers' files are as they were afterwards."""
    before = {file: file.apply_rotary_pos_emb for file in (modeling_llama,)}
    yield
    for file, function in before.items():
        file.apply_rotary_pos_emb = function


def logits(made: PreTrainedModel) -> Tensor:
    tokens, positions = torch.arange(5, 11, device=DEVICE)[None], torch.arange(6, device=DEVICE)[None]
    rows = SlotCache(1, 8).rows(torch.zeros(1, dtype=torch.int64, device=DEVICE), positions, 6)
    return Target(made).forward(tokens, positions, rows).logits


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
def test_a_model_computes_what_it_did(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = model(kind)
    expected = logits(made)
    fuse(made)
    ran: list[str] = []
    for name, function in (("rms_norm", rms_norm), ("rotate", rotate)):
        monkeypatch.setattr(
            fusion, name, lambda *a, function=function, name=name, **k: ran.append(name) or function(*a, **k)
        )
    assert_close(logits(made), expected, depth=2 * LAYER)
    norms = {"llama": 5, "qwen3": 9, "gemma2": 9}[kind]
    assert (ran.count("rms_norm"), ran.count("rotate")) == (norms, 2)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2", "olmo2", "cohere2"])
def test_what_is_not_known_is_left_alone(kind: str) -> None:
    """OLMo's norms round elsewhere, Cohere's center. On a CPU what is taken over computes as before."""
    made = model(kind).bfloat16()
    expected = logits(made)
    fuse(made)
    fused = [module for module in made.modules() if isinstance(vars(module).get("forward"), FusedNorm)]
    assert len(fused) == {"llama": 5, "qwen3": 9, "gemma2": 9}.get(kind, 0)
    assert logits(made).equal(expected)


@pytest.mark.interpreter
def test_memory_is_planned_without_kernels() -> None:
    """Rows without numbers, as a plan of memory sends through a model."""
    heads, angles = torch.empty(1, 2, 3, 8, device="meta"), torch.empty(1, 3, 8, device="meta")
    assert [x.shape for x in rotate(heads, heads, angles, angles)] == [heads.shape] * 2
    assert rms_norm(heads, angles[0, 0], 1e-5).shape == heads.shape


def test_gradients_are_the_modules_own(own_files: None) -> None:
    made = pico.llama(num_hidden_layers=1).requires_grad_(True)
    fuse(made)
    assert isinstance(modeling_llama.apply_rotary_pos_emb, FusedRotation)
    made(torch.tensor([[5, 6]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in made.parameters())


def test_only_the_same_result_is_taken_over() -> None:
    class Doubled(modeling_llama.LlamaRMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 3 * super().forward(x)

    for module in (Doubled(8), nn.LayerNorm(8, bias=False), nn.Linear(8, 8, bias=False)):
        fuse(module)
        assert "forward" not in vars(module)
