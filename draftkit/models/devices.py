"""Where and in which precision models run, from what a user says."""

from __future__ import annotations

import os

import torch
from transformers import PreTrainedModel

from draftkit.errors import DraftkitError

SMALL_TARGET = 50_000_000  # parameters
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def device_named(name: str | None) -> str:
    """The device of that name; None is a GPU where there is one, else the CPU. Raises `DraftkitError`."""
    if name is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise DraftkitError("this machine or this build of torch has no CUDA device", hint="--device cpu")
    if name != "cpu" and not name.startswith("cuda"):
        raise DraftkitError(f"device {name!r}", expected="cpu or cuda")
    return name


def dtype_named(name: str | None, device: str) -> torch.dtype:
    """The dtype of that name; None is bfloat16 on a GPU and float32 on the CPU. Raises `DraftkitError`."""
    if name is None:
        return torch.float32 if device == "cpu" else torch.bfloat16
    if name not in DTYPES:
        raise DraftkitError(f"dtype {name!r}", expected=", ".join(DTYPES))
    return DTYPES[name]


def limit_threads(model: PreTrainedModel) -> None:
    """One CPU thread for a small target: on matrices this small, waking a second thread costs more than it computes.

    An explicit OMP_NUM_THREADS is respected.
    """
    if "OMP_NUM_THREADS" not in os.environ and model.device.type == "cpu" and model.num_parameters() < SMALL_TARGET:
        torch.set_num_threads(1)
