"""Attention, MLP and decoder layers of transformers' models in fewer kernels, and fewer calls of torch on the CPU.

Found by their structure: a module whose children have the names that Llama gave them is run once on random input, its
own parts stood in for, and is taken over where what it hands on and returns is, bit for bit, what Llama's would.
B sequences, T rows, H width, I width of an MLP, N query heads, G key/value heads, D head width.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.utils import ModelOutput

from draftkit.runtime.attention import NAME, attend_slots, chunk_of, slot_attention
from draftkit.runtime.fusion.norms import FusedNorm, NormForm, gated, gated_reference, norm_form
from draftkit.runtime.fusion.packed_linear import Joint, own_parameters
from draftkit.runtime.fusion.rotary import HeadNorms, normed_heads, rotate_joint, rotate_reference
from draftkit.runtime.ops.slot_attention import Scoring
from draftkit.targets.attention import Sight, sight_of

SAMPLE = 3  # rows of random input
QUERY_KEY_VALUE = "q_proj", "k_proj", "v_proj"
GATE_UP = "gate_proj", "up_proj"
SAYS_NOTHING = {"kv", "past_key_values", "position_ids", "use_cache", "dropout"}  # of scores, to an attention function
REFUSALS = (TypeError, RuntimeError, ValueError, IndexError, KeyError, AttributeError)  # of a module of another kind


def random_rows(*shape: int, like: Tensor) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(like.device, like.dtype)


def same(found: Any, expected: Tensor) -> bool:
    return isinstance(found, Tensor) and found.shape == expected.shape and torch.equal(found, expected)


class Joints:
    """The linear modules of a model that read the same rows, and can be one product.

    Only plain ones can: not what LoRA or a quantization has made of them, what has hooks or gradients, or what shares
    its memory already.
    """

    def __init__(self, model: nn.Module):
        self._users = Counter(parameter.untyped_storage()._cdata for parameter in own_parameters(model))

    def can_join(self, modules: Sequence[object]) -> bool:
        plain: list[Any] = [module for module in modules if self._is_plain(module)]
        kinds = {(m.weight.shape[1], m.weight.dtype, m.weight.device, m.bias is None) for m in plain}
        return len(plain) == len(modules) and len(kinds) == 1

    def _is_plain(self, module: object) -> bool:
        if type(module) is not nn.Linear or "forward" in vars(module):
            return False
        weight = module.weight
        if hasattr(weight, "__tensor_flatten__"):  # a tensor made of others, as torchao's are
            return False
        hooked = module._forward_hooks or module._forward_pre_hooks
        alone = self._users[weight.untyped_storage()._cdata] == 1
        whole = weight.untyped_storage().nbytes() == weight.nbytes and weight.is_contiguous()
        return weight.is_floating_point() and not weight.requires_grad and alone and whole and not hooked


class FusedMLP:
    """The forward of down(silu(gate) · up), with one product for gate and up, and one kernel between the products."""

    def __init__(self, module: Any):
        self._module, self._down = module, module.down_proj
        self._both = Joint([module.gate_proj, module.up_proj])

    @classmethod
    def of(cls, module: Any, joints: Joints) -> FusedMLP | None:
        if not joints.can_join([getattr(module, name, None) for name in GATE_UP]):
            return None
        x = random_rows(1, SAMPLE, module.gate_proj.in_features, like=module.gate_proj.weight)
        try:
            both = torch.cat((module.gate_proj(x), module.up_proj(x)), dim=-1)
            expected = module.down_proj(gated_reference(both))
            return cls(module) if same(module(x), expected) else None
        except REFUSALS:
            return None

    def __call__(self, x: Tensor) -> Tensor:
        """[B, T, H] → [B, T, H]."""
        if torch.is_grad_enabled():
            return type(self._module).forward(self._module, x)
        return self._down(gated(self._both(x)))


class _Seen(NamedTuple):
    """The arguments that an attention function was called with."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    named: dict[str, Any]


class FusedAttention:
    """The forward of attention over rotated queries and keys, with one product for queries, keys and values, and one
    kernel for their norms and rotation."""

    def __init__(self, module: Any, norms: HeadNorms | None, form: _AttentionForm):
        self._module, self._norms, self._form = module, norms, form
        self._out = module.o_proj
        self._names = _first_names(module)
        self._width, self._heads = module.head_dim, module.q_proj.out_features // module.head_dim
        self._projections = Joint([getattr(module, name) for name in QUERY_KEY_VALUE])
        self._scoring: Scoring | None = None  # where it tells nothing of itself that is not known
        if form.stated.keys() <= {"scaling", "sliding_window", "sink_tokens"} | SAYS_NOTHING:
            scaling, window = form.stated.get("scaling"), form.stated.get("sliding_window")
            scale = module.head_dim**-0.5 if scaling is None else scaling
            sight = sight_of(module, Sight(window, form.stated.get("sink_tokens", 0)))
            self._scoring = Scoring(scale, sight.window, chunk=chunk_of(module), sink_tokens=sight.sink_tokens)

    @classmethod
    def of(cls, module: Any, joints: Joints) -> FusedAttention | None:
        projections = [getattr(module, name, None) for name in QUERY_KEY_VALUE]
        config = getattr(module, "config", None)
        if not joints.can_join(projections) or getattr(config, "_attn_implementation", None) != NAME:
            return None
        if hasattr(module, "keys_values") and module.k_proj.weight.device.type == "cpu":
            return None  # it multiplies with keys' and values' alone, and one packed weight has no parts
        try:
            norms = _head_norms(module)
            form = _attention_form(module, norms)
        except REFUSALS:
            return None
        return None if form is None else cls(module, norms, form)

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Attend as the module does, from rows [B, T, H] and the cosines and sines [B, T, D] of their positions."""
        own, kv, cached = self._module, named.get("kv"), named.get("past_key_values") is not None
        if kv is None or cached or len(given) > len(self._names) or torch.is_grad_enabled():
            return type(own).forward(own, *given, **named)
        bound = dict(zip(self._names, given, strict=False)) | named
        hidden, (cos, sin) = bound.pop(self._names[0]), bound.pop(self._names[1])
        if cos.shape != (*hidden.shape[:-1], self._width):  # heads turn in part, or by several positions at once
            return type(own).forward(own, *given, **named)
        query, key, value = rotate_joint(self._projections(hidden), self._heads, cos, sin, self._norms)
        mask = bound.pop("attention_mask", None)
        if self._scoring is not None and mask is None and bound.keys() <= SAYS_NOTHING:
            out = attend_slots(own, query, key, value, kv, self._scoring)
        else:
            out, _ = slot_attention(own, query, key, value, mask, **self._form.stated | bound)
        out = self._out(out.flatten(-2))
        return (out, None) if self._form.pair else out


class _AttentionForm(NamedTuple):
    """`stated`: what a module tells its attention function of itself. `pair`: it returns the scores' weights too."""

    stated: dict[str, Any]
    pair: bool


def _first_names(module: nn.Module) -> tuple[str, str]:
    """What a forward calls the rows and their rotation."""
    first, second, *_ = list(inspect.signature(type(module).forward).parameters)[1:]
    return first, second


def _head_norms(module: Any) -> HeadNorms | None:
    """The norms of queries and keys. Raises ValueError where they are no RMSNorms, or differ in kind."""
    query: Any = getattr(module, "q_norm", None)
    key: Any = getattr(module, "k_norm", None)
    if all(norm is None or isinstance(norm, nn.Identity) for norm in (query, key)):
        return None
    forms = {norm_form(query), norm_form(key)}
    (form,) = forms
    if form is None:
        raise ValueError("the norms are of another kind")
    return HeadNorms(query.weight, key.weight, *form)


def _attention_form(module: Any, norms: HeadNorms | None) -> _AttentionForm | None:
    """The form of an attention module; None where it does something else than Llama's."""
    query_weight, width = module.q_proj.weight, module.head_dim
    hidden = random_rows(1, SAMPLE, module.q_proj.in_features, like=query_weight)
    cos, sin = random_rows(2, 1, SAMPLE, width, like=query_weight)
    mark = object()
    seen: list[_Seen] = []

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **named: Any
    ) -> tuple[Tensor, None]:
        seen.append(_Seen(module, query, key, value, attention_mask, named))
        return query.transpose(1, 2).contiguous(), None

    with _registered(attend):
        first, second = _first_names(module)
        out = module(**{first: hidden, second: (cos, sin)}, attention_mask=None, kv=mark)
    (found,) = seen
    query, key, value = (
        projection(hidden).unflatten(-1, (-1, width)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    if norms is not None:
        query, key = normed_heads(query, key, norms)
    query, key = rotate_reference(query, cos, sin), rotate_reference(key, cos, sin)
    handed_on = found.module is module and found.mask is None and found.named.pop("kv", None) is mark
    tensors = zip((found.query, found.key, found.value), (query, key, value), strict=True)
    pair = isinstance(out, tuple)
    alike = handed_on and all(same(one, other) for one, other in tensors)
    ends = same(out[0] if pair else out, module.o_proj(query.transpose(1, 2).flatten(-2)))
    return _AttentionForm(found.named, pair) if alike and ends else None


@contextmanager
def _registered(attend: Callable[..., Any]) -> Iterator[None]:
    """Replace draftkit's attention function while the body runs."""
    AttentionInterface.register(NAME, attend)
    try:
        yield
    finally:
        AttentionInterface.register(NAME, slot_attention)


class FusedLayer:
    """The forward of a decoder layer whose sums are made together with the norm that reads them.

    `next_norm`: the one that the rows go to after the layer, of the next layer or of the model.
    """

    def __init__(self, module: Any, form: NormForm):
        self._module = module
        self._input_norm, self._attention, self._mlp = module.input_layernorm, module.self_attn, module.mlp
        self._norm = FusedNorm(module.post_attention_layernorm, form)
        self.next_norm: FusedNorm | None = None

    @classmethod
    def of(cls, module: Any) -> FusedLayer | None:
        names = dict(module.named_children()).keys()
        if names != {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}:
            return None
        form = norm_form(module.post_attention_layernorm)
        try:
            return cls(module, form) if form is not None and _adds_what_it_normed(module) else None
        except REFUSALS:
            return None

    def __call__(self, hidden_states: Tensor, **named: Any) -> Tensor:
        own = self._module
        if torch.is_grad_enabled():
            return type(own).forward(own, hidden_states, **named)
        attended, _ = self._attention(hidden_states=self._input_norm(hidden_states), **named)
        total, normed = self._norm.of_sum(attended, hidden_states)
        out = self._mlp(normed)
        return total + out if self.next_norm is None else self.next_norm.add(out, total)


def _adds_what_it_normed(module: Any) -> bool:
    """Whether a layer is that of Llama around its attention and its MLP, and hands on all that it is told."""
    weight = module.input_layernorm.weight
    hidden = random_rows(1, SAMPLE, len(weight), like=weight)
    told = {name: object() for name in ("position_embeddings", "kv", "past_key_values")} | {"attention_mask": None}
    seen: list[dict[str, Any]] = []

    def attend(hidden_states: Tensor, **named: Any) -> tuple[Tensor, None]:
        seen.append(named)
        return 2 - hidden_states, None

    with _standing_in(module.self_attn, attend), _standing_in(module.mlp, lambda x: x * 3):
        found = module(hidden, **told)
    (heard,) = seen
    if any(heard.get(name) is not value for name, value in told.items()):
        return False
    total = hidden + (2 - module.input_layernorm(hidden))
    return same(found, total + module.post_attention_layernorm(total) * 3)


class FusedDecoder:
    """The forward of a decoder that embeds tokens, gives its layers one rotation, and norms what they make of it,
    without what transformers does about each call."""

    def __init__(self, module: Any, output: type[ModelOutput]):
        self._module, self._output = module, output
        self._embed, self._rotary, self._norm = module.embed_tokens, module.rotary_emb, module.norm
        self._layers = list(module.layers)

    @classmethod
    def of(cls, module: Any) -> FusedDecoder | None:
        if dict(module.named_children()).keys() != {"embed_tokens", "layers", "norm", "rotary_emb"}:
            return None
        try:
            output = _handed_on(module)
        except REFUSALS:
            return None
        return None if output is None else cls(module, output)

    def __call__(
        self,
        input_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: object = None,
        use_cache: bool | None = None,
        kv: object = None,
        **named: Any,
    ) -> Any:
        told = {"past_key_values": past_key_values, "use_cache": use_cache}
        unknown = past_key_values is not None or attention_mask is not None or named
        if unknown or kv is None or torch.is_grad_enabled():
            told |= {"inputs_embeds": inputs_embeds, "attention_mask": attention_mask, "position_ids": position_ids}
            return type(self._module).forward(self._module, input_ids, **told, kv=kv, **named)
        hidden = self._embed(input_ids) if inputs_embeds is None else inputs_embeds
        rotation = self._rotary(hidden, position_ids)
        for layer in self._layers:
            hidden = layer(
                hidden, attention_mask=None, position_embeddings=rotation, position_ids=position_ids, kv=kv, **told
            )
        return self._output(last_hidden_state=self._norm(hidden))


def _handed_on(module: Any) -> type[ModelOutput] | None:
    """The kind of output of a decoder that is that of Llama around its layers, tells them nothing that a `FusedDecoder`
    does not, and returns nothing else."""
    device = module.embed_tokens.weight.device
    tokens, positions = torch.arange(SAMPLE, device=device)[None], torch.arange(SAMPLE, device=device)[None] * 7
    mark = object()
    seen: list[tuple[Tensor, dict[str, Any]]] = []

    def run(hidden_states: Tensor, **named: Any) -> Tensor:
        seen.append((hidden_states, named))
        return hidden_states * 2 - 1

    with ExitStack() as stack:
        for layer in module.layers:
            stack.enter_context(_standing_in(layer, run))
        out = module(input_ids=tokens, position_ids=positions, use_cache=False, kv=mark)
    hidden = module.embed_tokens(tokens)
    rotation = module.rotary_emb(hidden, positions)
    for found, named in seen:
        turns = named.pop("position_embeddings")
        told = {name: value for name, value in named.items() if value is not None}
        alike = same(found, hidden) and all(same(one, other) for one, other in zip(turns, rotation, strict=True))
        if not alike or told != {"position_ids": positions, "use_cache": False, "kv": mark}:
            return None
        hidden = hidden * 2 - 1
    alike = len(seen) == len(module.layers) and same(out.last_hidden_state, module.norm(hidden))
    return type(out) if alike and out.keys() == {"last_hidden_state"} else None


@contextmanager
def _standing_in(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward while the body runs."""
    own = vars(module).get("forward")
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own
