"""What engines do with the multi-token prediction heads that lie in a target's own folder."""

from __future__ import annotations

from draftkit.engines.llama_cpp import refusal_of_heads
from draftkit.layout.mtp import HeadKind

# By `model_type`, in transformers 5.23: whose heads its assisted generation runs, and whose targets it refuses.
IN_TRANSFORMERS = ("deepseek_v3", "glm4_moe")
RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text", "nemotron_h")

REPLAYED = ("qwen3_next",)  # whose memory llama.cpp cannot take back by single tokens (`llm_arch_supports_rs_rollback`)


def uses_of_heads(kind: HeadKind, count: int, model_type: str) -> dict[str, str]:
    """Engine → how it drafts with `count` heads of a target, and where that differs from vLLM."""
    tokens, again = count, "more tokens than heads use the heads again"
    if count > 1 and kind.modules == "first":
        tokens, again = 1, f"only the first drafts, again for further tokens, beyond {count} a multiple of {count}"
    elif count > 1:
        again = (
            f"more tokens, a multiple of {count}, use the heads again, each draft step the next (runner V2; V1 the "
            "first alone)"
        )
    settings = f'{{"method": "mtp", "num_speculative_tokens": {tokens}}}'
    return {
        "vLLM 0.32": f"--speculative-config '{settings}'; {again}",
        "SGLang": "--speculative-algorithm NEXTN",
        "transformers 5.23": _in_transformers(kind, model_type),
        "llama.cpp": _in_llama_cpp(kind, count, model_type),
    }


def _in_llama_cpp(kind: HeadKind, count: int, model_type: str) -> str:
    if reason := refusal_of_heads(model_type, count):
        return f"none: {reason}"
    return "; it ".join(["--spec-type draft-mtp, from GGUF", *differences_in_llama_cpp(kind.feedback, model_type)])


def differences_in_llama_cpp(feedback: str, model_type: str) -> list[str]:
    """What llama.cpp b11434 has heads read that vLLM does not (`common/speculative.cpp`, `src/models/`)."""
    found = ["reads a row more, of the first token beside the last state of the request before"]
    if feedback == "pre_norm":
        found.append("feeds the head's own state after its last norm, vLLM before it")
    if model_type in REPLAYED:
        found.append("runs what stands of a draft twice, and then reads the state of a rejected token")
    return found


def _in_transformers(kind: HeadKind, model_type: str) -> str:
    """Its generic heads (`modeling_layers.py`, `MtpModel`), and where they compute otherwise than vLLM."""
    if model_type in RECURRENT:
        return "none: its assisted generation refuses recurrent layers"
    known = "one token for each head" if model_type in IN_TRANSFORMERS else "if its release knows the kind"
    differing = []
    if kind.parts is not None and kind.hidden_state == "before_norm":
        differing.append("feeds the target's state after its norm, vLLM before it")
    if kind.parts is not None and kind.feedback == "pre_norm":
        differing.append("feeds the head's own state after its last norm, vLLM before it")
    if kind.parts is not None and kind.zero_first_embedding:
        differing.append("zeroes no embedding, vLLM the first")
    return "; it ".join([f"generate(use_mtp=True), {known}", *differing])
