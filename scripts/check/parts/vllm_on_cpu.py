"""What vLLM 0.32 lacks on a CPU to be a judge of block drafts and hybrid targets; used by vllm_generate.py.

DSpark, DFlash2 and DFlash drafts of mixed windows run in its V2 model runner only, which is written in Triton, and the
CPU build finds no compiler for that. Two of the kernels that it does have fail on what these drafts give them.
"""

import os
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any


def choose_v2_runner() -> None:
    """Take the V2 model runner, its kernels run by Triton's interpreter. Before vLLM is imported.

    vLLM's CPU build asks Triton for a backend called `cpu` and uses Triton only if it has one; Triton's wheels have
    none, and the interpreter needs none, so that any active driver of this name will do.
    """
    os.environ |= {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
    from triton.backends import backends
    from triton.runtime.interpreter import InterpreterBuilder

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
    # DFlash2's walk combines a mask of bool with a flag loaded from memory: integers, at which the interpreter's load
    # and store raise.
    InterpreterBuilder.create_masked_load = with_bool_mask(InterpreterBuilder.create_masked_load, 2)
    InterpreterBuilder.create_masked_store = with_bool_mask(InterpreterBuilder.create_masked_store, 3)


def with_bool_mask(access: Callable[..., Any], position: int) -> Callable[..., Any]:
    """The interpreter's masked access, with argument `position`, the mask, as bool."""

    def access_with_bool(*arguments: Any) -> Any:
        mask = arguments[position]
        mask.data = mask.data.astype(bool)
        return access(*arguments)

    return access_with_bool


def know_mimo() -> None:
    """MiMo-7B's configuration, which comes as code with its weights: that of Qwen2. Before the engine is built."""
    from transformers import AutoConfig, Qwen2Config

    class MimoConfig(Qwen2Config):
        model_type = "mimo"

    AutoConfig.register("mimo", MimoConfig)


def mend_kernels() -> None:
    """Replace what the CPU build computes wrongly or dies of. Before the engine is built."""
    mend_norm_of_context_keys()
    mend_layers_of_no_width()
    mend_states_of_drafts()
    mend_gated_delta_net()
    mend_ordered_embedding()


def mend_norm_of_context_keys() -> None:
    """The keys of the context are normed for all layers at once, with a weight for each layer; the CPU's RMSNorm takes
    the first layer's for all."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def norm(self: Any, keys: Any) -> Any:  # [layers, tokens, heads, head size]
        mean_square = keys.square().mean(dim=-1, keepdim=True)
        return keys * (mean_square + self._rms_norm_eps).rsqrt() * self._k_norm_weights[:, None, None]

    DFlashQwen3Model._normalize_context_k = norm


def mend_layers_of_no_width() -> None:
    """DSpark without a Markov head has `markov_w2` of width 0, and oneDNN dies of packing it."""
    from torch.nn.functional import linear
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm

    def pack_unless_empty(layer: Any, remove_weight: bool) -> None:
        if layer.weight.numel() == 0:
            layer.cpu_linear = linear
        else:
            pack(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = pack_unless_empty


def mend_states_of_drafts() -> None:
    """The states of Mamba-2 layers after drafts: the CPU's kernels go on from the last token given, rejected or not.

    Like those in Triton, these find what comes before a sequence's rows at its number of accepted tokens, and keep a
    state after every row. Inputs [tokens, channels] and states [slots, channels, positions] of the convolution; inputs
    [tokens, heads, head size] and states [slots, heads, head size, state size] of the recurrence.
    """
    import torch
    from vllm import _custom_ops
    from vllm.model_executor.layers.mamba import mamba_mixer2

    convolve, fold = mamba_mixer2.causal_conv1d_update, _custom_ops.selective_state_update_cpu

    def convolve_drafts(x: Any, states: Any, weight: Any, bias: Any, activation: Any, **kwargs: Any) -> Any:
        accepted = kwargs.get("num_accepted_tokens")
        if accepted is None:
            return convolve(x, states, weight, bias, activation, **kwargs)
        begins, out = kwargs["query_start_loc"].tolist(), torch.empty_like(x)
        for sequence, (slot, *_) in enumerate(kwargs["conv_state_indices"].tolist()):
            begin, end, at = begins[sequence], begins[sequence + 1], int(accepted[sequence]) - 1
            before = states[slot, :, at : at + weight.shape[1] - 1]
            joined = torch.cat([before, x[begin:end].T], dim=1)
            convolved = torch.nn.functional.conv1d(joined[None], weight[:, None], bias, groups=len(weight))[0]
            out[begin:end] = (torch.nn.functional.silu(convolved) if activation else convolved).T
            states[slot, :, : joined.shape[1] - 1] = joined[:, 1:]
        return out

    def fold_drafts(
        states: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, z: Any, dt_bias: Any, softplus: bool, *rest: Any
    ) -> None:
        slots, _, _, out, accepted, begins = rest
        if accepted is None:
            return fold(states, x, dt, A, B, C, D, z, dt_bias, softplus, *rest)
        assert z is None
        assert softplus
        steps = torch.nn.functional.softplus(dt + dt_bias)
        B, C = (part.repeat_interleave(x.shape[1] // part.shape[1], dim=1)[:, :, None] for part in (B, C))
        for sequence, own in enumerate(slots.tolist()):
            state = states[own[int(accepted[sequence]) - 1]].clone()
            for slot, row in zip(own, range(begins[sequence], begins[sequence + 1]), strict=False):
                state = state * (A * steps[row, ..., None]).exp() + (steps[row] * x[row])[..., None] * B[row]
                states[slot] = state
                out[row] = (state * C[row]).sum(-1) + D * x[row]

    mamba_mixer2.causal_conv1d_update = convolve_drafts
    _custom_ops.selective_state_update_cpu = fold_drafts


def mend_gated_delta_net() -> None:
    """The recurrence of Qwen3-Next, whose CPU kernels are for bfloat16 alone; states where vLLM says that they lie."""
    import torch
    from torch.nn.functional import conv1d, normalize, silu, softplus
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
    from vllm.utils.torch_utils import LayerNameType  # torch reads the signature of what follows

    def attend(
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
        layer_name: LayerNameType,
    ) -> None:
        context = get_forward_context()
        layer = context.no_compile_layers[gdn_attention._resolve_layer_name(layer_name)]
        if context.attn_metadata is None:
            return
        told = context.attn_metadata[layer.prefix]
        inputs, states = gdn_attention._conv_buffer_view(layer), gdn_attention._ssm_state_view(layer)
        weight, drafted = gdn_attention._unpacked_conv_weight(layer), told.spec_sequence_masks is not None
        if drafted:
            assert told.num_prefills == told.num_decodes == 0  # one request at a time
            begins, slots = told.spec_query_start_loc.tolist(), told.spec_state_indices_tensor.tolist()
            ahead = [count - 1 for count in told.num_accepted_tokens.tolist()]
        else:
            begins, slots = told.non_spec_query_start_loc.tolist(), told.non_spec_state_indices_tensor.tolist()
            slots, ahead = [[slot] for slot in slots], [0] * len(slots)
        width, decay = weight.shape[1] - 1, -layer.A_log.float().exp() * softplus(a.float() + layer.dt_bias)
        for sequence, (begin, end) in enumerate(pairwise(begins)):
            own, at = slots[sequence], ahead[sequence]
            fresh = told.num_prefills and not told.has_initial_state[sequence]
            if fresh:
                inputs[own[0]], states[own[0]] = 0, 0
            joined = torch.cat([inputs[own[0], :, at : at + width], mixed_qkv[begin:end].T], dim=1)
            convolved = silu(conv1d(joined[None], weight[:, None], layer.conv1d.bias, groups=len(weight))[0]).T
            kept = joined[:, 1:] if drafted else joined[:, -width:]
            inputs[own[0], :, : kept.shape[1]] = kept
            query, key, value = (part[0] for part in layer.rearrange_mixed_qkv(convolved.contiguous()))
            shared = value.shape[1] // key.shape[1]
            query, key = (normalize(part, dim=-1).repeat_interleave(shared, dim=1) for part in (query, key))
            state = states[own[at]].clone()  # [heads, key size, value size]
            for row in range(end - begin):
                state = state * decay[begin + row].exp()[:, None, None]
                known = (state * key[row][..., None]).sum(1)
                new = (value[row] - known) * b[begin + row].sigmoid()[:, None]
                state = state + key[row][..., None] * new[:, None]
                if drafted:
                    states[own[row]] = state
                core_attn_out[begin + row] = (state * query[row][..., None]).sum(1) * key.shape[-1] ** -0.5
            if not drafted:
                states[own[0]] = state

    gdn_attention.cpu_gdn_attention_core = attend


def mend_ordered_embedding() -> None:
    """CUDA graphs of the ordered embedding of Gemma-4's assistant, which the first runner captures on a CPU too."""
    from vllm.v1.spec_decode.gemma4 import Gemma4Proposer

    Gemma4Proposer._setup_centroids_cuda_graphs = lambda self: None
