"""The commands that serve a converted draft."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.layout.families.medusa import MedusaSpec
from draftkit.layout.spec import DraftSpec

if TYPE_CHECKING:
    from draftkit.convert.api import Conversion

AUTOREGRESSIVE_TOKENS, PARALLEL_TOKENS = 3, 8  # usual draft lengths to start from; the best one is measured
VLLM_METHODS = {
    "eagle": "eagle",
    "eagle3": "eagle3",
    "p-eagle": "eagle3",
    "draft-model": "draft_model",
    "pard": "draft_model",
    "medusa": "medusa",
    "mlp-speculator": "mlp_speculator",
    "pard-2": "draft_model",
}
SGLANG_ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "draft-model": "STANDALONE"}


def serve_commands(conversion: Conversion, out: Path, k: int | None = None) -> dict[str, str]:
    """Engine → the command that serves the target with the folder written; engines that cannot are left out.

    `k`: draft tokens a round; None for a usual number of the method.
    """
    spec = conversion.require_draft().spec
    target = conversion.target.name if conversion.target else conversion.require_draft().provenance.target or "TARGET"
    commands = {}
    if conversion.destination in ("unified", "vllm", "speculators", "hf", "pard") and refusal_by_vllm(spec) is None:
        commands["vLLM"] = _vllm(spec, target, out, k)
    if conversion.destination == "sglang" or (spec.method == "draft-model" and conversion.destination != "vllm"):
        commands["SGLang"] = _sglang(spec, target, out, k)
    return commands


def vllm_settings(spec: DraftSpec, out: Path, k: int | None = None) -> dict[str, object]:
    """vLLM's `speculative_config` for a draft in the folder `out`."""
    settings: dict[str, object] = {
        "model": str(out),
        "method": VLLM_METHODS[spec.method],
        "num_speculative_tokens": _draft_tokens(spec) if k is None else k,
    }
    return settings | ({"parallel_drafting": True} if spec.method in ("p-eagle", "pard") else {})


def _vllm(spec: DraftSpec, target: str, out: Path, k: int | None) -> str:
    settings = json.dumps(vllm_settings(spec, out, k))
    return f"vllm serve {shlex.quote(target)} --speculative-config {shlex.quote(settings)}"


def _sglang(spec: DraftSpec, target: str, out: Path, k: int | None) -> str:
    steps = _draft_tokens(spec) if k is None else k
    options = {
        "model-path": target,
        "speculative-algorithm": SGLANG_ALGORITHMS[spec.method],
        "speculative-draft-model-path": str(out),
        "speculative-num-steps": str(steps),
        "speculative-eagle-topk": "1",
        "speculative-num-draft-tokens": str(steps + 1),
    }
    flags = (f"--{name} {shlex.quote(value)}" for name, value in options.items())
    return " ".join(("python -m sglang.launch_server", *flags))


def _draft_tokens(spec: DraftSpec) -> int:
    if isinstance(spec.architecture, MedusaSpec):
        return spec.architecture.num_heads
    parallel = getattr(spec.architecture, "parallel", None)
    return AUTOREGRESSIVE_TOKENS if parallel is None else PARALLEL_TOKENS
