"""Where and in which precision models run, from what a user says."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from typing import Literal

import torch
from transformers import PreTrainedModel

from draftkit.errors import DraftkitError

SMALL_TARGET = 50_000_000  # parameters
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEPT_BYTES = 1 << 30
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device_named(name: str | None) -> str:
    """The device of that name, `cpu` or `cuda:N`; None is a GPU where there is one, else the CPU.

    `cuda` is the GPU of this process: that of its local rank under torchrun, else the current one. Raises
    `DraftkitError` for a device that this machine does not have, and for one that several processes would share.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return name
    if not re.fullmatch(r"cuda(:\d+)?", name):
        raise DraftkitError(f"device {name!r}", expected="cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        raise DraftkitError("this machine or this build of torch has no CUDA device", hint="--device cpu")
    index, rank = name.partition(":")[2], os.environ.get("LOCAL_RANK")
    if index and int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1:
        raise DraftkitError(f"device {name!r} for several processes", expected="cuda: each has a GPU of its own")
    number = int(index or rank or torch.cuda.current_device())
    count = torch.cuda.device_count()
    if number >= count:
        raise DraftkitError(
            f"device cuda:{number}: torch sees {count} CUDA device{'s' if count > 1 else ''}",
            expected="cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}",
        )
    return f"cuda:{number}"


def use_device(device: str) -> None:
    """Make a device of `device_named` the current one: Triton, streams and graphs run on that, wherever tensors are.

    On a GPU cuDNN's attention is switched off: torch prefers it on Hopper and Blackwell (`check_prefer_cudnn_attention`
    in sdp_utils.cpp), and it builds a plan for each exact length, so that nearly every new prompt would wait for one.
    """
    if device != "cpu":
        torch.cuda.set_device(device)
        torch.backends.cuda.enable_cudnn_sdp(False)


def dtype_named(name: str | None, device: str) -> torch.dtype:
    """The dtype of that name; None is bfloat16 on a GPU and float32 on the CPU. Raises `DraftkitError`."""
    if name is None:
        return torch.float32 if device == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise DraftkitError(f"dtype {name!r}", expected=", ".join(DTYPES))
    return DTYPES[name]


def fast_dtype(device: str) -> tuple[Literal["bfloat16", "float32"], str]:
    """The name of the fastest dtype for language models on a device of `device_named`, and why it is."""
    if device != "cpu":
        return "bfloat16", "GPUs are fast at it"
    if torch.cpu._is_amx_tile_supported():
        return "bfloat16", "the CPU has AMX"
    if torch.cpu._is_avx512_bf16_supported():
        return "bfloat16", "the CPU has AVX512_BF16"
    return "float32", "the CPU has neither AMX nor AVX512_BF16"


def tune_for_cpu(model: PreTrainedModel) -> None:
    """Set what makes a model run faster on the CPU; nothing for one on a GPU."""
    if model.device.type == "cpu":
        _limit_threads(model)
        _keep_freed_memory()


def _limit_threads(model: PreTrainedModel) -> None:
    """One thread for a small target: on matrices this small, waking a second thread costs more than it computes.

    An explicit OMP_NUM_THREADS is respected.
    """
    if "OMP_NUM_THREADS" not in os.environ and model.num_parameters() < SMALL_TARGET:
        torch.set_num_threads(1)


def _keep_freed_memory() -> None:
    """Have glibc keep what large tensors give back. Logits of a large vocabulary are megabytes at a time, which it
    would fetch from the kernel, page by page, for every product anew.

    MALLOC_… variables of the environment are respected.
    """
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):  # musl has none
            mallopt(M_MMAP_THRESHOLD, KEPT_BYTES)
            mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
