"""What a result has to say about how it was made, so that it can be compared with others."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from draftkit.evaluate.prompts import PromptSet
from draftkit.results.settings import Settings
from draftkit.targets.chat import template_sha256
from draftkit.version import __version__

SHOWN_IDS = 16  # of the first prompt
VARIED = (
    "num_speculative_tokens", "concurrency", "context", "slices", "prompts", "device", "dtype", "acceptance_rates",
    "strict",
)  # fmt: skip
WHERE_GIVEN = ("k_by_batch", "disable_above_batch")  # K of a cell is then the largest


def seen_by(tokenizer: PreTrainedTokenizerBase, first_ids: Sequence[int]) -> dict[str, object]:
    """How a target sees the prompts."""
    return {
        "first_prompt_ids": list(first_ids[:SHOWN_IDS]),
        "chat_template_sha256": template_sha256(tokenizer),
    }


def asked(prompts: PromptSet, settings: Settings) -> dict[str, object]:
    """Prompts and settings."""
    left_out = {*VARIED, *(name for name in WHERE_GIVEN if getattr(settings, name) is None)}
    shared = {name: value for name, value in asdict(settings).items() if name not in left_out}
    del shared["sampling"]["temperature"]
    return {
        "convention": "acceptance_length = 1 + accepted draft tokens / all rounds",
        "prompts": settings.prompts,
        "dataset": {
            "name": prompts.name,
            "source": prompts.source,
            "revision": prompts.revision,
            "split": prompts.split,
            "sha256": prompts.sha256,
            "turns": settings.turns,
            "thinking": settings.thinking,
        },
        "settings": shared,
    }


def environment(device: str, dtype: torch.dtype) -> dict[str, object]:
    """Date, versions and machine."""
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return made_by() | {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": gpu or "cpu",
        "hardware": gpu or processor(),
        "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."),
    }


def made_by() -> dict[str, object]:
    """Date and version."""
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "draftkit": __version__}


def processor() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
