"""The commands that serve a converted draft."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from draftkit import zoo
from draftkit.engines.vllm.accepts import refusal_by_vllm
from draftkit.layout.families.medusa import MedusaSpec
from draftkit.layout.folder import Draft
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


TOKENS_FACT = "speculative_tokens"  # the draft tokens a round that a draft was trained for


def local_name(source: str) -> str:
    """A source as other programs on this machine find it: the path of a zoo model, an absolute one for a folder."""
    if source.startswith("zoo:"):
        return str(zoo.path(source.removeprefix("zoo:")))
    return os.path.abspath(source) if os.path.isdir(source) else source


def serving_notes(draft: Draft, folder: Path) -> list[str]:
    """The vLLM command for a folder on this machine, and what vLLM cannot read from the folder itself."""
    if refusal_by_vllm(draft.spec) is not None:
        return []
    target = local_name(draft.provenance.target or "TARGET")
    return [
        f"vLLM: {_vllm(draft.spec, target, folder.absolute(), stated_tokens(draft))}",
        *method_note(draft.spec),
    ]


def method_note(spec: DraftSpec) -> list[str]:
    """What the folder of a parallel draft does not tell vLLM."""
    if spec.method not in ("p-eagle", "pard"):
        return []
    return [
        'vLLM cannot read "method" and "parallel_drafting" from the folder: without both it fails or drafts wrongly.'
    ]


def stated_tokens(draft: Draft) -> int | None:
    """The draft tokens a round that a draft's own file or its training names, None where nothing does."""
    for fact in draft.provenance.facts:
        if fact.name == TOKENS_FACT:
            return int(fact.value)
    stated = draft.provenance.dropped_config.get("speculators_config")
    methods = stated.get("proposal_methods") if isinstance(stated, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def serve_commands(conversion: Conversion, out: Path, k: int | None = None, *, local: bool = False) -> dict[str, str]:
    """Engine → the command that serves the target with the folder written; engines that cannot are left out.

    `k`: draft tokens a round; None for what the draft states, or a usual number of the method. `local`: with the paths
    of this machine, for its terminal; otherwise names stay as they are, as for a card.
    """
    spec = conversion.require_draft().spec
    target = conversion.target.name if conversion.target else conversion.require_draft().provenance.target or "TARGET"
    k = stated_tokens(conversion.require_draft()) if k is None else k
    if local:
        target, out = local_name(target), out.absolute()
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
