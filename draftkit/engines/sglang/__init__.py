"""SGLang: the drafts that it serves, and how it is started."""

from __future__ import annotations

from pathlib import Path

from draftkit.engines.sglang.releases import PRESENT
from draftkit.errors import command
from draftkit.layout.spec import DraftSpec


def serves(spec: DraftSpec) -> bool:
    """Whether SGLang has an algorithm for a draft, in a layout of its own unless it is a language model."""
    return spec.architecture.SERVED_AS.get("sglang", {}).get(spec.method) in PRESENT.methods


def loads(spec: DraftSpec, layout: str) -> bool:
    """Whether SGLang serves a draft's folder in a layout: its own, or any of a whole language model but vLLM's; no
    GGUF file."""
    return serves(spec) and (layout == "sglang" or (spec.architecture.own_model and layout not in ("vllm", "gguf")))


def serve_command(spec: DraftSpec, target: str, folder: Path | str, tokens: int) -> str:
    """The command that serves the target with a draft, of which `tokens` are verified at a time."""
    options = {
        "model-path": target,
        "speculative-algorithm": spec.architecture.SERVED_AS["sglang"][spec.method],
        "speculative-draft-model-path": str(folder),
        "speculative-num-steps": str(tokens),
        "speculative-eagle-topk": "1",
        "speculative-num-draft-tokens": str(tokens + 1),
    }
    flags = (word for name, value in options.items() for word in (f"--{name}", value))
    return command("python", "-m", "sglang.launch_server", *flags)
