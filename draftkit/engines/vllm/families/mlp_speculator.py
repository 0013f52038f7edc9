"""MLP speculators in vLLM 0.32."""

from __future__ import annotations

from draftkit.layout.families.mlp_speculator import MlpSpeculatorSpec


def refusal(mlp: MlpSpeculatorSpec) -> str | None:
    """vLLM V1 dropped them."""
    del mlp
    return "vLLM has no proposer for MLP speculators"
