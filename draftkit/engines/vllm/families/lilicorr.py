"""LiLiCorr in vLLM 0.32: `lilicorr.py`, which loads every tensor of the head or fails."""

from __future__ import annotations

from draftkit.engines.vllm.block import body_reasons, first_reason, second_runner
from draftkit.layout.families.lilicorr import LiLiCorrSpec

CANDIDATES = (1, 2, 4, 8, 16)


def refusal(lilicorr: LiLiCorrSpec) -> str | None:
    """The first thing that vLLM's class for this draft computes otherwise."""
    own = {
        "vLLM's LiLiCorr class drafts from masks alone": lilicorr.slots != "fill-in",
        "vLLM's LiLiCorr class has the whole vocabulary": lilicorr.reduced_vocabulary,
        "vLLM embeds LiLiCorr's candidates with the target's table": lilicorr.embed_tokens == "draft",
        f"vLLM takes {', '.join(map(str, CANDIDATES))} candidates": lilicorr.lilicorr_candidate_topk not in CANDIDATES,
    }
    return first_reason(body_reasons(lilicorr) | own)


def notes(lilicorr: LiLiCorrSpec) -> list[str]:
    """That its first model runner stops at the draft."""
    del lilicorr
    return [second_runner("LiLiCorr")]
