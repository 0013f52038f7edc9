"""Operations that take over parts of transformers' models: they agree with them, and are found where they are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from fixtures.checkpoints import pico
from fixtures.checkpoints.targets import TEXT
from fixtures.engines.drafter_cases import Case, Load, dflash_draft, eagle3
from fixtures.gpu.kernels import DEVICE
from fixtures.precision import LAYER, assert_close
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

from draftkit.models.dflash import DFlashModel
from draftkit.models.eagle import EagleModel
from draftkit.runtime import fusion
from draftkit.runtime.attention import NAME as ATTENTION
from draftkit.runtime.cache import SlotCache
from draftkit.runtime.fusion import FusedRotary, fuse
from draftkit.runtime.fusion import layers as fused_layers
from draftkit.runtime.fusion import norms as fused_norm
from draftkit.runtime.fusion.layers import (
    GATE_UP,
    QUERY_KEY_VALUE,
    FusedAttention,
    FusedDecoder,
    FusedLayer,
    FusedMLP,
)
from draftkit.runtime.fusion.norms import FusedNorm, add_rms_norm, gated, gated_reference, rms_norm, rms_norm_reference
from draftkit.runtime.fusion.packed_linear import joint_of
from draftkit.runtime.fusion.rotary import (
    HeadNorms,
    angles,
    angles_reference,
    normed_heads,
    rotate,
    rotate_joint,
    rotate_reference,
)
from draftkit.targets.target import Target

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
        residual = normal(*rows.shape, dtype=dtype, seed=2)
        total, normed = add_rms_norm(rows, residual, weight, 1e-5, one_plus=one_plus)
        assert total.equal(rows + residual)
        assert_close(normed, rms_norm_reference(total, weight, 1e-5, one_plus), depth=1)


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
    for one_plus in (False, True):
        norms = HeadNorms(normal(width, dtype=dtype, seed=4), normal(width, dtype=dtype, seed=5), 1e-5, one_plus)
        both = zip(rotate(query, key, cos, sin, norms), normed_heads(query, key, norms), strict=True)
        for found, heads in both:
            assert_close(found, rotate_reference(heads, cos, sin), depth=2)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles(dtype: torch.dtype) -> None:
    positions = torch.tensor([[0, 1, 77, 130_000], [-1, 4, 4095, 9]], device=DEVICE)
    frequencies = 1e4 ** -torch.linspace(0, 1, 40, device=DEVICE)
    both = angles(positions, frequencies, 0.9, dtype), angles_reference(positions, frequencies, 0.9, dtype)
    for found, expected in zip(*both, strict=True):
        assert_close(found, expected, depth=1)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_gate_of_an_mlp(dtype: torch.dtype) -> None:
    for shape in ((1, 1, 2 * 48), (2, 3, 2 * 1030)):
        both = 20 * normal(*shape, dtype=dtype)
        assert_close(gated(both), gated_reference(both), depth=1)


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


def draft_output(draft: EagleModel | DFlashModel) -> Tensor:
    positions = torch.arange(3, device=DEVICE)[None]
    rows = SlotCache(1, 8).rows(torch.zeros(1, dtype=torch.int64, device=DEVICE), positions, 3)
    hidden = normal(1, 3, draft.spec.decoder.hidden_size)
    with torch.inference_mode():
        if isinstance(draft, DFlashModel):
            return draft(hidden, positions, kv=rows)
        return draft(torch.tensor([[5, 6, 7]], device=DEVICE), hidden, positions, kv=rows).head_input


def logits(made: PreTrainedModel) -> Tensor:
    tokens, positions = torch.arange(5, 11, device=DEVICE)[None], torch.arange(6, device=DEVICE)[None]
    rows = SlotCache(1, 8).rows(torch.zeros(1, dtype=torch.int64, device=DEVICE), positions, 6)
    return Target(made).forward(tokens, positions, rows).logits


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2"])
def test_a_model_computes_what_it_did(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 2's layers norm what attention gives before they add it, and its gate is no SiLU."""
    made = model(kind)
    expected = logits(made)
    fuse(made)
    ran: Counter[str] = Counter()

    def count(file: ModuleType, function: Callable[..., Any]) -> None:
        name = function.__name__
        monkeypatch.setattr(file, name, lambda *a, **k: ran.update([name]) or function(*a, **k))

    for function in (rms_norm, add_rms_norm):
        count(fused_norm, function)
    for function in (rotate_joint, gated):
        count(fused_layers, function)
    count(fusion, angles)
    assert_close(logits(made), expected, depth=2 * LAYER)
    whole = {"angles": 1, "rms_norm": 1, "add_rms_norm": 4, "rotate_joint": 2, "gated": 2}
    assert ran == ({"angles": 1, "rms_norm": 9, "rotate_joint": 2} if kind == "gemma2" else whole)


@pytest.mark.interpreter
@pytest.mark.parametrize("make", [eagle3, dflash_draft])
def test_a_draft_computes_what_it_did(make: Callable[[Load], Case], load: Load) -> None:
    draft = make(load).drafter.module
    assert isinstance(draft, (EagleModel, DFlashModel))
    draft.to(DEVICE)
    expected = draft_output(draft)
    fuse(draft)
    taken = Counter(type(part.forward) for part in draft.modules())
    apart = isinstance(draft, DFlashModel) and DEVICE == "cpu"  # where one packed weight has no parts
    assert taken[FusedAttention] == (0 if apart else len(draft.layers))
    assert taken[FusedMLP] == len(draft.layers)
    assert_close(draft_output(draft), expected, depth=2 * LAYER)


TAKEN = {  # norms, decoders, layers, attention and MLPs of two layers
    "llama": (5, 1, 2, 2, 2), "qwen3": (9, 1, 2, 2, 2), "qwen2": (5, 1, 2, 2, 2), "gemma2": (9, 0, 0, 2, 0),
    "qwen3_moe": (9, 1, 2, 2, 0), "olmo2": (0, 1, 0, 0, 2), "cohere2": (0, 1, 0, 0, 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", TAKEN)
def test_what_is_not_known_is_left_alone(kind: str) -> None:
    """OLMo's norms round elsewhere, Cohere's center."""
    made = model(kind).bfloat16()
    expected = logits(made)
    fuse(made)
    found = Counter(type(vars(module).get("forward")) for module in made.modules())
    taken = tuple(found[fused] for fused in (FusedNorm, FusedDecoder, FusedLayer, FusedAttention, FusedMLP))
    assert taken == TAKEN[kind]
    assert_close(logits(made), expected, depth=2 * LAYER)


def test_weights_are_kept_once() -> None:
    """Those that a product reads together lie together; they stay the parameters that they were."""
    made = model("llama")
    parameters = dict(made.named_parameters())
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    fuse(made)
    after = dict(made.named_parameters())
    assert all(after[name] is parameter and after[name].equal(before[name]) for name, parameter in parameters.items())
    memory = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in made.parameters()}
    assert sum(memory.values()) == sum(p.nbytes for p in made.parameters())
    for layer in made.model.layers:
        for part, names in ((layer.self_attn, QUERY_KEY_VALUE), (layer.mlp, GATE_UP)):
            assert len({getattr(part, name).weight.untyped_storage().data_ptr() for name in names}) == 1
            joint = joint_of(getattr(part, names[0]))
            assert joint is not None
            assert joint.layers == tuple(getattr(part, name) for name in names)
    taken = [vars(module).get("forward") for module in made.modules()]
    fuse(made)  # as a second engine does
    assert [vars(module).get("forward") for module in made.modules()] == taken


def test_only_plain_weights_are_joined() -> None:
    """What another module shares, learns from, or computes with in its own way stays where it is."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    attention = [layer.self_attn for layer in model("llama").model.layers]
    own, other = attention
    other.k_proj.weight = nn.Parameter(own.k_proj.weight.data, requires_grad=False)
    learning, hooked, scaled, doubled = (model("llama").model.layers[0] for _ in range(4))
    learning.self_attn.v_proj.weight.requires_grad_(True)
    hooked.self_attn.q_proj.register_forward_hook(lambda *_: None)
    scaled.self_attn.q_proj.__class__ = Scaled
    doubled.mlp.act_fn = nn.GELU()
    both = nn.ModuleList(attention)
    for module in (both, learning, hooked, scaled):
        fuse(module)
    for part in (own, other, learning.self_attn, hooked.self_attn, scaled.self_attn):
        assert "forward" not in vars(part)
        assert part.v_proj.weight.untyped_storage().nbytes() == part.v_proj.weight.nbytes
    fuse(doubled)
    assert "forward" not in vars(doubled.mlp)


class Packed(nn.Module):
    """As GPTQ and AWQ have it: integers, scales, and no weight."""

    def __init__(self, own: nn.Linear):
        super().__init__()
        self.in_features, self.out_features = own.in_features, own.out_features
        scales = own.weight.abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (own.weight / scales).round().to(torch.int8))
        self.register_buffer("scales", scales)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.qweight.to(x.dtype) * self.scales.to(x.dtype))


class Narrow(nn.Linear):
    """As transformers has fp8: a weight of few bits under the usual name."""

    def __init__(self, own: nn.Linear):
        super().__init__(own.in_features, own.out_features, bias=False, device="meta")
        self.weight = nn.Parameter(own.weight.to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight.to(x.dtype))


class Flat(Narrow):
    """As bitsandbytes has four bits: the weight is a column of bytes."""

    def __init__(self, own: nn.Linear):
        super().__init__(own)
        self.weight = nn.Parameter(self.weight.view(torch.uint8).view(-1, 1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.view(torch.float8_e4m3fn).view(self.out_features, self.in_features)
        return linear(x, weight.to(x.dtype))


class Composed(Tensor):
    """As torchao's weights, in linear layers that are torch's own: another tensor that looks like a usual one."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Composed:
        made: Composed = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=torch.float32, device=inner.device)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        plain = [x.inner.float() if isinstance(x, cls) else x for x in args]
        return function(*plain, **(kwargs or {}))


def composed(own: nn.Linear) -> nn.Linear:
    own.weight = nn.Parameter(Composed(own.weight.detach().bfloat16()), requires_grad=False)
    return own


def with_adapter(made: PreTrainedModel) -> None:
    torch.manual_seed(1)
    inject_adapter_in_model(LoraConfig(target_modules=["q_proj", "up_proj"], init_lora_weights=False), made)
    made.requires_grad_(False)


def quantized(make: Callable[[nn.Linear], nn.Module]) -> Callable[[PreTrainedModel], None]:
    def change(made: PreTrainedModel) -> None:
        for layer in made.model.layers:
            for part in (layer.self_attn, layer.mlp):
                for name, own in list(part.named_children()):
                    if isinstance(own, nn.Linear):
                        setattr(part, name, make(own))

    return change


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "change", [with_adapter, *map(quantized, (Packed, Narrow, Flat, composed))],
    ids=["LoRA", "GPTQ", "fp8", "bitsandbytes", "torchao"],
)  # fmt: skip
def test_adapted_and_quantized_products_are_left_alone(change: Callable[[PreTrainedModel], None]) -> None:
    """The norms and sums around them are not."""
    made = model("llama")
    plain = logits(made)
    change(made)
    expected = logits(made)
    assert not expected.equal(plain)
    fuse(made)
    taken = Counter(type(vars(module).get("forward")) for module in made.modules())
    assert taken[FusedAttention] == taken[FusedMLP] == 0
    assert (taken[FusedNorm], taken[FusedLayer]) == (5, 2)
    assert_close(logits(made), expected, depth=2 * LAYER)


@pytest.mark.interpreter
def test_memory_is_planned_without_kernels() -> None:
    """Rows without numbers, as a plan of memory sends through a model."""
    heads, angles = torch.empty(1, 2, 3, 8, device="meta"), torch.empty(1, 3, 8, device="meta")
    assert [x.shape for x in rotate(heads, heads, angles, angles)] == [heads.shape] * 2
    assert rms_norm(heads, angles[0, 0], 1e-5).shape == heads.shape


def test_gradients_are_the_modules_own(own_files: None) -> None:
    made = pico.llama(num_hidden_layers=1).requires_grad_(True)
    fuse(made)
    assert isinstance(modeling_llama.apply_rotary_pos_emb, FusedRotary)
    made(torch.tensor([[5, 6]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in made.parameters())


def test_another_attention_is_the_modules_own() -> None:
    """As where a target's states are read for training, between rounds of the engine."""
    made, tokens = model("llama"), torch.arange(5, 11, device=DEVICE)[None]
    fuse(made)
    made.set_attn_implementation("eager")
    with torch.no_grad():
        found = made(tokens).logits
    made.set_attn_implementation(ATTENTION)
    assert_close(found, logits(made), depth=2 * LAYER)


def test_only_the_same_result_is_taken_over() -> None:
    class Doubled(modeling_llama.LlamaRMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 3 * super().forward(x)

    for module in (Doubled(8), nn.LayerNorm(8, bias=False), nn.Linear(8, 8, bias=False)):
        fuse(module)
        assert "forward" not in vars(module)


@pytest.mark.slow
def test_joining_weights_takes_as_much_as_the_largest_joined_one() -> None:
    """Beyond the weights, by every allocation: those of one module are dropped before the next is joined."""
    width, inner = 256, 1024
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        model = pico.llama(num_hidden_layers=4, hidden_size=width, intermediate_size=inner).requires_grad_(False)
        model.set_attn_implementation(ATTENTION)
        with torch.profiler.record_function("fuse"):
            fuse(model.eval())
    events = sorted(seen.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    began = next(event.start_ns() for event in events if event.name() == "fuse")
    held, before, peak = 0, 0, 0
    for event in events:
        if event.name() == "[memory]":
            held += event.nbytes()
            before = held if event.start_ns() < began else before
            peak = max(peak, held - before) if event.start_ns() >= began else 0
    largest = 2 * inner * width * 4
    assert isinstance(vars(model.model.layers[3].mlp)["forward"], FusedMLP)
    assert largest <= peak < 1.1 * largest
