"""What engines do with the multi-token prediction heads that lie in a target's own folder."""

from __future__ import annotations

from draftkit.layout.mtp import HeadKind


def uses_of_heads(kind: HeadKind, count: int) -> dict[str, str]:
    """Engine → how it drafts with `count` heads of a target, and where that differs from vLLM."""
    settings = f'{{"method": "mtp", "num_speculative_tokens": {count}}}'
    return {
        "vLLM 0.32": f"--speculative-config '{settings}'; more tokens than heads use the heads again",
        "SGLang": "--speculative-algorithm NEXTN",
        "transformers 5.19 on": "generate(use_mtp=True), one token for each head" + _otherwise(kind),
        "llama.cpp": "--spec-type draft-mtp, from a GGUF whose conversion kept the heads (nextn)",
    }


def _otherwise(kind: HeadKind) -> str:
    """Where transformers' generic heads (`modeling_layers.py`, `MtpModel`) compute otherwise than vLLM."""
    if kind.parts is None:
        return ""
    differing = []
    if kind.hidden_state == "before_norm":
        differing.append("the target's state after its norm")
    if kind.feedback == "pre_norm":
        differing.append("the head's own state after its last norm")
    return f"; it feeds {' and '.join(differing)}, vLLM before the norm" if differing else ""
