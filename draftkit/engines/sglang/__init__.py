"""SGLang: the drafts that it serves, and how it is started."""

from __future__ import annotations

from pathlib import Path

from draftkit.engines.known import asked
from draftkit.errors import command
from draftkit.layout.spec import DraftSpec


def serves(spec: DraftSpec) -> bool:
    """Whether a release of SGLang of which is spoken has an algorithm for a draft: in a layout of its own, unless the
    draft is a language model."""
    algorithm = spec.architecture.SERVED_AS.get("sglang", {}).get(spec.method)
    return any(algorithm in release.methods for release in asked("SGLang"))


def loads(spec: DraftSpec, layout: str) -> bool:
    """Whether SGLang serves a draft's folder in a layout: its own, or any of a whole language model but vLLM's; no
    GGUF file."""
    return serves(spec) and (layout == "sglang" or (spec.architecture.own_model and layout not in ("vllm", "gguf")))


def serve_command(spec: DraftSpec, target: str, folder: Path | str, tokens: int, layout: str = "sglang") -> str:
    """The command that serves the target with a draft, of which `tokens` are verified at a time."""
    del layout
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
