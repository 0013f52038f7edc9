"""What vLLM 0.32 lacks on a CPU to be a judge of block drafts; used by vllm_generate.py in vLLM's own environment.

DSpark, DFlash2 and DFlash drafts of mixed windows run in its V2 model runner only, which is written in Triton, and the
CPU build finds no compiler for that. Two of the kernels that it does have fail on what these drafts give them.
"""

import os
from collections.abc import Callable
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


def mend_kernels() -> None:
    """Replace what the CPU build computes wrongly or dies of in block drafts. Before the engine is built."""
    mend_norm_of_context_keys()
    mend_layers_of_no_width()


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
